"""The priced plans are ranked, and one is picked."""

import math
from collections.abc import Sequence

import msgspec

from stoker.decide.words import limits
from stoker.records import Constraints, Plan, Predicted

# Plans this near to the best count as equal: then fewer machines win.
TIE = 0.03


def objective_value(outcome: Predicted, objective: str) -> float:
    """Returns the value that the objective makes as small as possible."""
    return outcome.usd_per_1000_steps if objective == "cost" else outcome.step_seconds


def error_band(outcome: Predicted) -> float:
    """Returns the prediction's own relative error."""
    return outcome.step_seconds_high / outcome.step_seconds - 1


def gain(outcome: Predicted, keep: Predicted, objective: str) -> float:
    """Returns the fraction of today's money or time that the plan saves; negative: it loses."""
    return 1 - objective_value(outcome, objective) / objective_value(keep, objective)


def ranked(plans: Sequence[Plan], objective: str) -> list[Plan]:
    """Ranks the plans: best first, infeasible ones and those without a prediction last."""
    return sorted(plans, key=lambda plan: _rank(plan, objective))


def choose(
    keep: Plan,
    others: Sequence[Plan],
    constraints: Constraints,
    *,
    unexplained: str,
    fix_first: str = "",
) -> Plan:
    """Returns the plan to run, with the reason.

    A change is chosen only if what it saves exceeds its own error band, or if today's cluster
    misses the deadline and it does not. What costs more an hour than today is held against the
    best plan that does not: what the money buys has to exceed the bands of both. More
    accelerators make another global batch, thus another training: they are chosen for time or a
    deadline, never to save money. Where something else is to be fixed first, plans that cost no
    more than today's cluster are left.
    """
    today, objective = keep.predicted, constraints.objective
    if today is None:
        return _because(keep, "today's price is not known: nothing can be compared with it")
    budget, deadline = constraints.max_usd_per_hour, constraints.deadline_hours
    if budget is not None and today.usd_per_hour > budget * (1 + 1e-9):
        return _because(
            keep,
            f"today's cluster costs {today.usd_per_hour:.3f} $/hour, above the budget of "
            f"{budget:.3f}: no plan can keep it",
        )
    if unexplained:
        return _because(keep, f"{unexplained}: no spending is advised on that")
    is_late = bool(deadline and today.total_hours and today.total_hours > deadline)
    able = [
        plan
        for plan in others
        if plan.feasible
        and plan.predicted is not None
        and (plan.action != "scale_out" or objective == "time" or is_late)
        and not (fix_first and plan.predicted.usd_per_hour > today.usd_per_hour * (1 + 1e-9))
    ]
    worth = [plan for plan in able if is_late or _is_worth(plan, today, objective)]
    free = best_free(worth, keep)
    if free is not None:
        worth = [plan for plan in worth if is_free(plan, keep) or buys(plan, free, objective)]
    if worth:
        best = _best(worth, objective)
        text = _praise(best, today, is_late=is_late)
        if free is not None and not is_free(best, keep):
            text += f"; {_bought(best, free, objective)}"
        return _because(best, text)
    if fix_first:
        return _because(keep, f"{fix_first}: fix that before money is spent")
    late = _why_late(others, constraints) if is_late else ""
    return _because(keep, _why_keep(able, today, objective) + late)


def is_free(plan: Plan, keep: Plan) -> bool:
    """Returns whether the plan costs no more an hour than today's cluster."""
    outcome, today = plan.predicted, keep.predicted
    return (
        outcome is not None
        and today is not None
        and outcome.usd_per_hour <= today.usd_per_hour * (1 + 1e-9)
    )


def best_free(plans: Sequence[Plan], keep: Plan) -> Plan | None:
    """Returns the fastest feasible plan that costs no more an hour than today; None: no such plan.

    `plans` are those that are worth more than their own band.
    """
    free = [plan for plan in plans if plan.feasible and is_free(plan, keep)]
    return min(free, key=lambda plan: _rank(plan, "time"), default=None)


def buys(plan: Plan, free: Plan, objective: str) -> bool:
    """Returns whether the plan's gain over the free one exceeds the bands of both."""
    outcome, rival = plan.predicted, free.predicted
    if outcome is None or rival is None:
        return False
    return gain(outcome, rival, objective) > combined_band(outcome, rival)


def combined_band(one: Predicted, other: Predicted) -> float:
    """Returns the relative error of the ratio of two predictions."""
    return math.hypot(error_band(one), error_band(other))


def _bought(plan: Plan, free: Plan, objective: str) -> str:
    outcome, rival = plan.predicted, free.predicted
    assert outcome is not None
    assert rival is not None
    return (
        f"{gain(outcome, rival, objective):.0%} beyond what is free, where both bands together are "
        f"{combined_band(outcome, rival):.0%}"
    )


def _is_worth(plan: Plan, today: Predicted, objective: str) -> bool:
    outcome = plan.predicted
    return outcome is not None and gain(outcome, today, objective) > error_band(outcome)


def _best(plans: Sequence[Plan], objective: str) -> Plan:
    values = {id(plan): _value(plan, objective) for plan in plans}
    least = min(values.values())
    equal = [plan for plan in plans if values[id(plan)] <= least * (1 + TIE)]
    return min(equal, key=lambda plan: (_machines(plan), *_rank(plan, objective)))


def _rank(plan: Plan, objective: str) -> tuple[bool, float, float, int, str]:
    other = "time" if objective == "cost" else "cost"
    has_prediction = plan.predicted is not None
    return (
        not (plan.feasible and has_prediction),
        _value(plan, objective),
        _value(plan, other),
        _machines(plan),
        " ".join(f"{g.instance_type}:{g.count}:{g.workers_per_host}" for g in plan.groups),
    )


def _value(plan: Plan, objective: str) -> float:
    return objective_value(plan.predicted, objective) if plan.predicted else float("inf")


def _machines(plan: Plan) -> int:
    return sum(group.count for group in plan.groups)


def _praise(plan: Plan, today: Predicted, *, is_late: bool) -> str:
    outcome = plan.predicted
    assert outcome is not None
    change = "cheaper" if outcome.cost_change < 0 else "more expensive"
    text = f"{outcome.speedup:.2f}x as fast and {abs(outcome.cost_change):.0%} {change} per step"
    if is_late and outcome.total_hours is not None and today.total_hours is not None:
        text += (
            f"; {outcome.total_hours:.2f} h, today's {today.total_hours:.2f} h miss the deadline"
        )
    return f"{text}; its limit is {limits(outcome)}"


def _why_keep(able: Sequence[Plan], today: Predicted, objective: str) -> str:
    word = "costs less" if objective == "cost" else "is faster"
    better = [p for p in able if p.predicted and gain(p.predicted, today, objective) > 0]
    if not better:
        return f"no feasible plan {word} than today's cluster"
    best = ranked(better, objective)[0].predicted
    assert best is not None
    return (
        f"no plan {word} by more than its own error band: the best gains "
        f"{gain(best, today, objective):.0%}, its band is {error_band(best):.0%}"
    )


def _why_late(others: Sequence[Plan], constraints: Constraints) -> str:
    """Says why today's cluster is kept although it misses the deadline."""
    deadline, budget = constraints.deadline_hours or 0.0, constraints.max_usd_per_hour
    text = f"; it misses the deadline of {deadline:g} h, as all plans do"
    in_time = [
        plan.predicted.usd_per_hour
        for plan in others
        if plan.predicted
        and plan.predicted.total_hours is not None
        and plan.predicted.total_hours <= deadline
    ]
    if budget is None or not in_time:
        return text
    return (
        f"{text} within the budget of {budget:g} $/hour: the two contradict each other, the "
        f"cheapest plan in time needs {min(in_time):.2f} $/hour"
    )


def _because(plan: Plan, reason: str) -> Plan:
    return msgspec.structs.replace(plan, reason=reason)


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the feasible, predicted plans that none beats in both, fastest first."""
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
