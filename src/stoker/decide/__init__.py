"""This package decides which cluster pays: profile, catalog and constraints in, decision out."""

from stoker.decide.calibrate import EarlierRun, calibrate
from stoker.decide.choose import pareto_front
from stoker.decide.decide import decide
from stoker.decide.elsewhere import TakeAs
from stoker.decide.explain import explain

__all__ = ["EarlierRun", "TakeAs", "calibrate", "decide", "explain", "pareto_front"]
