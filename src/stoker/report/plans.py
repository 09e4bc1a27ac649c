"""The picture of the plans: time against money."""

from dataclasses import dataclass
from itertools import pairwise

from stoker.decide import pareto_front
from stoker.records import Decision, Plan, Predicted
from stoker.report.svg import (
    FOOT,
    HEAD,
    PLOT,
    Box,
    Drawing,
    along,
    around,
    axes,
    label,
    text_width,
    ticks,
)
from stoker.units import NBSP, TimeUnit, digits, percent, usd

# The table alone is enough for fewer plans.
_LEAST_SPOTS = 3


@dataclass(frozen=True, slots=True)
class Spot:
    """A plan in the plane of time and cost.

    Attributes:
        cost: Dollars for 1000 steps, or CPU-seconds per step for local hosts without a price.
        is_front: No other plan is both faster and cheaper.
        is_probable: It probably gains.
        busy: Share of the step in which accelerators compute; None: none, or plans have prices.
        is_estimate: Its cost comes from an estimated price.
    """

    name: str
    step_seconds: float
    cost: float
    is_front: bool
    is_chosen: bool
    is_today: bool
    is_probable: bool = False
    busy: float | None = None
    is_estimate: bool = False

    @property
    def label(self) -> str:
        """Name in the picture."""
        busy = "" if self.busy is None else f", {percent(self.busy)} busy"
        if self.is_chosen:
            return f"{self.name}{busy}, chosen"
        return f"{self.name}{busy}{', probable' if self.is_probable else ''}"


def spots_of(decision: Decision) -> list[Spot]:
    """Returns the plans that can be run and are predicted, the chosen one last, on top."""
    is_billed = decision.prices.is_billed
    front = pareto_front(decision.plans, is_billed=is_billed)
    chosen, probable = decision.plan, decision.probable
    spots = [
        Spot(
            name=_short_name(plan),
            step_seconds=plan.predicted.counted_seconds,
            cost=_cost(plan.predicted, is_billed=is_billed),
            is_front=any(plan is each for each in front),
            is_chosen=(plan.action, plan.groups) == (chosen.action, chosen.groups),
            is_today=plan.action == "keep",
            is_probable=probable is not None and plan.groups == probable.groups,
            is_estimate=plan.predicted.is_estimate,
            busy=None if is_billed else _accelerators_busy(plan.predicted),
        )
        for plan in decision.plans
        if plan.feasible and plan.predicted
    ]
    # SVG paints in order: what comes later covers what came before.
    return sorted(spots, key=lambda spot: (spot.is_chosen, spot.is_today, spot.is_front))


def _accelerators_busy(outcome: Predicted) -> float | None:
    return outcome.accelerator_utilization if outcome.accelerator_seconds else None


def _cost(outcome: Predicted, *, is_billed: bool) -> float:
    cost = outcome.usd_per_1000_steps if is_billed else outcome.cpu_seconds
    return cost or 0.0


def _short_name(plan: Plan) -> str:
    dnn, *data = plan.groups
    if plan.action == "keep":
        return "today"
    if plan.action == "tune":
        return f"num_workers={plan.num_workers}" if plan.num_workers else "tuned"
    if data:
        return " ".join(f"+{g.count} {g.instance_type.removeprefix('ml.')}" for g in data)
    return f"{dnn.count} {dnn.instance_type.removeprefix('ml.')}"


def draw_plans(decision: Decision, *, unit: TimeUnit, width: float, name: str) -> Drawing | None:
    """Draws plans by time and cost; None where the table is enough."""
    spots = spots_of(decision)
    is_billed = decision.prices.is_billed
    is_known = is_billed or all(
        plan.predicted.cpu_seconds is not None for plan in decision.plans if plan.predicted
    )
    if not is_known or len(spots) < _LEAST_SPOTS:
        return None

    def cost_text(cost: float, *, is_estimate: bool = False) -> str:
        dollars = usd(cost, is_estimate=is_estimate)
        return dollars if is_billed else f"{digits(cost, 3)}{NBSP}s"

    by_time = sorted(spots, key=lambda spot: spot.step_seconds)
    listed = "; ".join(
        f"{s.name} {unit.show(s.step_seconds)} at {cost_text(s.cost, is_estimate=s.is_estimate)}"
        + (" for 1000 steps" if is_billed else " of CPU time per step")
        for s in by_time
        if s.is_front
    )
    less = "cheaper" if is_billed else "takes less CPU time"
    drawing = Drawing(
        name=name,
        width=width,
        height=HEAD + 14 + PLOT + FOOT,
        title="What the plans promise",
        # Read out by screen readers.
        description=f"{len(spots)} plans; no other is both faster and {less} than: {listed}.",
    )
    # Much more expensive plans would flatten the others: they are counted below instead.
    needed = [s for s in spots if s.is_front or s.is_today or s.is_chosen or s.is_probable]
    most_x = 1.08 * max(spot.step_seconds for spot in spots)
    # 1.0: where all plans are free, the axis still needs a top.
    most_y = 1.25 * max(spot.cost for spot in needed) or 1.0
    num_left_out = sum(spot.cost > most_y for spot in spots)
    spots = [spot for spot in spots if spot.cost <= most_y]
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Time against money" if is_billed else "Time against CPU time",
        most=(most_x, most_y),
        marks=[(mark, cost_text(mark) if mark else "0") for mark in marks],
        under="upwards: $ for 1000 steps" if is_billed else "upwards: CPU-seconds per step",
    )
    for mark in ticks(most_x, at_most=max(3, int(width / 90))):
        text = unit.tick(mark, last=False)
        # The drawing ends 8 beyond the plane (see `axes`): the last mark's text must not leave it.
        x = min(plane.x(mark), plane.right + 8 - text_width(text, 12) / 2)
        drawing.text(x, plane.floor + 17, text, css="quiet", size=12, anchor="middle")
    drawing.text(
        plane.right, plane.floor + 36, f"step, {unit.symbol}", css="quiet", size=12, anchor="end"
    )
    if num_left_out:
        text = f"{num_left_out} costlier plans are left out"
        drawing.text(plane.left, plane.floor + 36, text, css="quiet", size=12)
    lines: list[Box] = []
    front = sorted(plane.at(s.step_seconds, s.cost) for s in spots if s.is_front)
    for (x1, y1), (x2, y2) in pairwise(front):
        # Nothing is known between two plans: the line goes in steps.
        for ends in (((x1, y1), (x2, y1)), ((x2, y1), (x2, y2))):
            drawing.line(*ends[0], *ends[1], "front")
            lines += along(*ends)
    for spot in spots:
        x, y = plane.at(spot.step_seconds, spot.cost)
        cost = cost_text(spot.cost, is_estimate=spot.is_estimate)
        drawing.open_group(f"{spot.name}: {unit.show(spot.step_seconds)}, {cost}")
        if spot.is_chosen or spot.is_probable:
            drawing.circle(x, y, 9, "ring")
        css = "dot" if spot.is_today else "compute" if spot.is_front else "predicted"
        drawing.circle(x, y, 5 if spot.is_front or spot.is_today or spot.is_chosen else 2.5, css)
        drawing.close_group()
    # Dots first, then names in the order of their worth: a name never hides a dot, and where two
    # names need one place the less important one is left out.
    taken = [around(*plane.at(s.step_seconds, s.cost), 4) for s in spots]
    fastest = sorted((s for s in spots if s.is_front), key=lambda spot: spot.step_seconds)
    named = [s for s in spots if s.is_chosen] + [s for s in spots if s.is_today]
    named += [s for s in spots if s.is_probable]
    # And both ends of the front.
    for spot in dict.fromkeys([*named, *fastest[:1], *fastest[-1:]]):
        at = plane.at(spot.step_seconds, spot.cost)
        css = "head" if spot.is_chosen else ""
        label(drawing, spot.label, at=at, plane=plane, taken=taken, lines=lines, css=css)
    return drawing
