"""Choice of the cluster that pays, from a profile, a catalog and constraints.

`decide.decide` is the way from a profile to a decision: `work` has what a step needs, by the
profile; `model` how long it takes on a cluster; `search` the clusters that are tried; `price` what
they cost, and which is better; `choose` takes the one that pays, and says why. `advice` and
`explain` tell it.
"""

from stoker.decide.decide import DecisionInputs, decide
from stoker.decide.elsewhere import TakeAs
from stoker.decide.explain import explain
from stoker.decide.price import refuse_undecidable, with_profiled

__all__ = [
    "DecisionInputs",
    "TakeAs",
    "decide",
    "explain",
    "refuse_undecidable",
    "with_profiled",
]
