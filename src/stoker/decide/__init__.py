"""Choice of the cluster that pays, from a profile, a catalog and constraints.

`decide.decide` goes five steps: prepare, baseline, search, pick, explain. `step_work` has what a
step needs, by the profile; `candidates` the clusters that are tried (a larger instance: `scale_up`;
data hosts: `heterogeneous`); `model` and `pricing` their steps and prices. The function
`choose.choose` takes the one that pays: a larger instance, data hosts, or today's cluster, in the
order of `ranking`.
"""

from stoker.decide.calibrate import EarlierRun, calibrate
from stoker.decide.choose import followed, local_core_words
from stoker.decide.decide import DecisionInputs, decide, refuse_unfed
from stoker.decide.explain import explain
from stoker.decide.pricing import refuse_undecidable, with_profiled
from stoker.decide.ranking import pareto_front
from stoker.decide.remember import LastRun, remembered
from stoker.decide.scaled_profile import TakeAs

__all__ = [
    "DecisionInputs",
    "EarlierRun",
    "LastRun",
    "TakeAs",
    "calibrate",
    "decide",
    "explain",
    "followed",
    "local_core_words",
    "pareto_front",
    "refuse_undecidable",
    "refuse_unfed",
    "remembered",
    "with_profiled",
]
