"""Decides which cluster pays: profile, catalog and constraints in, decision out."""

from stoker.decide.body import decide
from stoker.decide.explain import explain

__all__ = ["decide", "explain"]
