"""Decides which cluster pays: profile, catalog and constraints in, decision out."""

from stoker.decide.body import decide
from stoker.decide.calibrate import Run, calibrate
from stoker.decide.explain import explain
from stoker.decide.front import pareto_front

__all__ = ["Run", "calibrate", "decide", "explain", "pareto_front"]
