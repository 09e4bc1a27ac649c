"""The figures behind the picture of the plans: the front, and the scaling with data hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.decide import pareto_front
from stoker.records import Decision, Plan, Predicted
from stoker.report.quantities import TimeUnit, usd


@dataclass(frozen=True, slots=True)
class Spot:
    """A plan in the plane of time and money.

    Attributes:
        is_front: No other plan is both faster and cheaper.
    """

    name: str
    step_seconds: float
    usd: float
    is_front: bool
    is_chosen: bool
    is_today: bool


@dataclass(frozen=True, slots=True)
class Rung:
    """Step time with so many data hosts; today's cluster has none, and its step was measured."""

    data_hosts: int
    step_seconds: float
    low: float
    high: float
    is_feasible: bool
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """Step time against the number of data hosts of one type.

    Attributes:
        rungs: From no data host on.
        floor_seconds: The accelerators' own step: no data host makes it shorter.
    """

    data_type: str
    rungs: tuple[Rung, ...]
    floor_seconds: float


def spots_of(decision: Decision) -> list[Spot]:
    """The plans that can be run and are predicted, the chosen one last, above the others."""
    front = pareto_front(decision.plans)
    spots = [
        Spot(
            name=_short_name(plan),
            step_seconds=plan.predicted.step_seconds,
            usd=plan.predicted.usd_per_1000_steps,
            is_front=any(plan is each for each in front),
            is_chosen=_is_same(plan, decision.plan),
            is_today=plan.action == "keep",
        )
        for plan in decision.plans
        if plan.feasible and plan.predicted
    ]
    return sorted(spots, key=lambda spot: (spot.is_chosen, spot.is_today, spot.is_front))


def scaling_of(decision: Decision) -> Scaling | None:
    """Of the chosen plan's data type, else of the best plan's; None where there is none."""
    keep = next((p.predicted for p in decision.plans if p.action == "keep" and p.predicted), None)
    plans = [p for p in (decision.plan, *decision.plans) if _is_searched(p)]
    if keep is None or not plans:
        return None
    data_type = plans[0].groups[1].instance_type
    # Of a run that had a data group already, today's cluster is one of the rungs above.
    today = next(plan for plan in decision.plans if plan.action == "keep")
    hosts = sum(group.count for group in today.groups if group.role == "data")
    is_chosen = decision.plan.action == "keep"
    found = {hosts: _rung(keep, hosts, is_feasible=True, is_chosen=is_chosen)}
    dnn = plans[0].groups[0]
    for plan in plans:
        here, data = plan.groups[0], plan.groups[1]
        is_same = (here.instance_type, here.count) == (dnn.instance_type, dnn.count)
        if data.instance_type == data_type and is_same and plan.predicted:
            found.setdefault(
                data.count,
                _rung(
                    plan.predicted,
                    data.count,
                    is_feasible=plan.feasible,
                    is_chosen=_is_same(plan, decision.plan),
                ),
            )
    return Scaling(
        data_type=data_type,
        rungs=tuple(found[count] for count in sorted(found)),
        floor_seconds=keep.accelerator_utilization * keep.step_seconds,
    )


def words_of_front(spots: Sequence[Spot], unit: TimeUnit) -> str:
    """The front as a sentence, for those who do not see it."""
    front = sorted((s for s in spots if s.is_front), key=lambda spot: spot.step_seconds)
    listed = "; ".join(
        f"{s.name} {unit.show(s.step_seconds)} at {usd(s.usd)} for 1000 steps" for s in front
    )
    return f"{len(spots)} plans, of them no other is both faster and cheaper than: {listed}."


def words_of_curve(scaling: Scaling, unit: TimeUnit) -> str:
    """The curve as a sentence, for those who do not see it."""
    listed = ", ".join(f"{r.data_hosts}: {unit.show(r.step_seconds)}" for r in scaling.rungs)
    floor = f"; the accelerators alone need {unit.show(scaling.floor_seconds)}"
    return f"Step time by data hosts of {scaling.data_type}: {listed}{floor}."


def _rung(outcome: Predicted, count: int, *, is_feasible: bool, is_chosen: bool) -> Rung:
    return Rung(
        data_hosts=count,
        step_seconds=outcome.step_seconds,
        low=outcome.step_seconds_low,
        high=outcome.step_seconds_high,
        is_feasible=is_feasible,
        is_chosen=is_chosen,
    )


def _is_searched(plan: Plan) -> bool:
    """Whether the plan is today's dnn hosts with data hosts of one type."""
    return plan.action == "heterogeneous" and len(plan.groups) == 2 and plan.predicted is not None


def _is_same(one: Plan, other: Plan) -> bool:
    return one.action == other.action and one.groups == other.groups


def _short_name(plan: Plan) -> str:
    dnn, *data = plan.groups
    if plan.action in ("keep", "tune"):
        return {"keep": "today", "tune": "tuned"}[plan.action]
    if data:
        return " ".join(f"+{g.count} {g.instance_type.removeprefix('ml.')}" for g in data)
    return f"{dnn.count} {dnn.instance_type.removeprefix('ml.')}"
