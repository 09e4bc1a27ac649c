"""The Pareto front: plans that no other beats in time and money at once."""

from collections.abc import Sequence

from stoker.records import Plan


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """The feasible plans with a prediction that none beats in both, fastest first."""
    priced = [
        (p.predicted.step_seconds, p.predicted.usd_per_1000_steps, i)
        for i, p in enumerate(plans)
        if p.feasible and p.predicted
    ]
    front: list[Plan] = []
    cheapest = float("inf")
    for _, usd, index in sorted(priced):
        if usd < cheapest:
            front.append(plans[index])
            cheapest = usd
    return front
