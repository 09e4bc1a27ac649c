"""The picture of the plans: time against money."""

from collections.abc import Sequence
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
    Plane,
    along,
    around,
    axes,
    label,
    text_width,
    ticks,
)
from stoker.units import NBSP, TimeUnit, digits, percent, usd

# The table alone is enough for fewer plans.
_LEAST_DOTS = 3


@dataclass(frozen=True, slots=True)
class PlanDot:
    """A plan as a dot in the picture of time and cost.

    Attributes:
        cost: Dollars for 1,000 steps, or CPU-seconds per step for local hosts without a price.
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
        text = self.name
        if self.busy is not None:
            text += f", {percent(self.busy)} busy"
        if self.is_chosen:
            return f"{text}, chosen"
        if self.is_probable:
            return f"{text}, probable"
        return text


def dots_of(decision: Decision) -> list[PlanDot]:
    """Returns the plans that can be run and are predicted, the chosen one last, on top."""
    is_billed = decision.prices.is_billed
    front = {id(plan) for plan in pareto_front(decision.plans, is_billed=is_billed)}
    chosen = decision.plan
    probable = decision.probable
    dots = [
        PlanDot(
            name=_short_name(plan),
            step_seconds=plan.predicted.counted_seconds,
            cost=_cost(plan.predicted, is_billed=is_billed),
            is_front=id(plan) in front,
            is_chosen=(plan.action, plan.groups) == (chosen.action, chosen.groups),
            is_today=plan.action == "keep",
            is_probable=probable is not None and plan.groups == probable.groups,
            is_estimate=plan.predicted.is_estimate,
            busy=_accelerators_busy(plan.predicted, is_billed=is_billed),
        )
        for plan in decision.plans
        if plan.feasible and plan.predicted
    ]
    # SVG paints in order: what comes later covers what came before.
    return sorted(dots, key=lambda dot: (dot.is_chosen, dot.is_today, dot.is_front))


def _accelerators_busy(outcome: Predicted, *, is_billed: bool) -> float | None:
    """Returns the accelerators' busy share, shown in place of dollars; None: not known."""
    if is_billed or not outcome.accelerator_seconds:
        return None
    return outcome.accelerator_utilization


def _cost(outcome: Predicted, *, is_billed: bool) -> float:
    if is_billed:
        return outcome.usd_per_1000_steps or 0.0
    return outcome.cpu_seconds or 0.0


def _short_name(plan: Plan) -> str:
    dnn, *data = plan.groups
    if plan.action == "keep":
        return "today"
    if plan.action == "tune":
        return f"num_workers={plan.num_workers}" if plan.num_workers else "tuned"
    if data:
        return " ".join(f"+{g.count} {g.instance_type.removeprefix('ml.')}" for g in data)
    return f"{dnn.count} {dnn.instance_type.removeprefix('ml.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlansPicture:
    """What the picture of the plans shows.

    Attributes:
        dots: The plans with a dot, the chosen one last, on top.
        num_left_out: Plans without a dot: so costly that they would flatten the others.
        is_billed: Upwards are dollars; else CPU-seconds.
    """

    dots: Sequence[PlanDot]
    num_left_out: int
    is_billed: bool
    unit: TimeUnit

    def cost_text(self, cost: float, *, is_estimate: bool = False) -> str:
        """Writes a cost with its unit."""
        if self.is_billed:
            return usd(cost, is_estimate=is_estimate)
        return f"{digits(cost, 3)}{NBSP}s"

    def cost_of(self, dot: PlanDot) -> str:
        """Writes the cost of a plan."""
        return self.cost_text(dot.cost, is_estimate=dot.is_estimate)


def draw_plans(decision: Decision, *, unit: TimeUnit, width: float, name: str) -> Drawing | None:
    """Draws plans by time and cost; None where the table is enough.

    Args:
        decision: Its plans that can be run and are predicted are drawn.
        unit: Unit of the steps' times.
        width: Width of the drawing in pixels.
        name: Prefix of the ids in the drawing, unique in its page.
    """
    dots = dots_of(decision)
    is_billed = decision.prices.is_billed
    outcomes = [plan.predicted for plan in decision.plans if plan.predicted]
    are_costs_known = is_billed or all(outcome.cpu_seconds is not None for outcome in outcomes)
    # A plan of unknown cost would be drawn as free.
    if not are_costs_known or len(dots) < _LEAST_DOTS:
        return None
    # Much more expensive plans would flatten the others: they are counted below instead.
    needed = [s for s in dots if s.is_front or s.is_today or s.is_chosen or s.is_probable]
    # 1.0: where all plans are free, the axis still needs a top.
    most_cost = 1.25 * max(dot.cost for dot in needed) or 1.0
    # Room for a name to the right of the slowest plan.
    most_seconds = 1.08 * max(dot.step_seconds for dot in dots)
    shown = [dot for dot in dots if dot.cost <= most_cost]
    picture = _PlansPicture(
        dots=shown, num_left_out=len(dots) - len(shown), is_billed=is_billed, unit=unit
    )
    drawing = Drawing(
        name=name,
        width=width,
        height=HEAD + 14 + PLOT + FOOT,
        title="What the plans promise",
        # Read out by screen readers.
        description=_description(picture, dots),
    )
    plane = _draw_axes(drawing, picture, most=(most_seconds, most_cost))
    lines = _draw_front(drawing, picture, plane)
    _draw_dots(drawing, picture, plane)
    _draw_names(drawing, picture, plane, lines=lines)
    return drawing


def _description(picture: _PlansPicture, dots: Sequence[PlanDot]) -> str:
    less = "takes less CPU time"
    per = "of CPU time per step"
    if picture.is_billed:
        less = "cheaper"
        per = "for 1,000 steps"
    # From the fastest on, as the front is read in the picture.
    by_time = sorted(dots, key=lambda dot: dot.step_seconds)
    listed = "; ".join(
        f"{dot.name} {picture.unit.show(dot.step_seconds)} at {picture.cost_of(dot)} {per}"
        for dot in by_time
        if dot.is_front
    )
    return f"{len(dots)} plans; no other is both faster and {less} than: {listed}."


def _draw_axes(drawing: Drawing, picture: _PlansPicture, *, most: tuple[float, float]) -> Plane:
    most_seconds, most_cost = most
    unit = picture.unit
    title = "Time against CPU time"
    under = "upwards: CPU-seconds per step"
    if picture.is_billed:
        title = "Time against money"
        under = "upwards: $ for 1,000 steps"
    costs = ticks(most_cost, at_most=5)
    marks = [(cost, picture.cost_text(cost) if cost else "0") for cost in costs]
    plane = axes(drawing, title=title, most=most, marks=marks, under=under)
    for seconds in ticks(most_seconds, at_most=max(3, int(drawing.width / 90))):
        text = unit.tick(seconds, last=False)
        # The drawing ends 8 beyond the plane (see `axes`): the last mark's text must not leave it.
        x = min(plane.x(seconds), plane.right + 8 - text_width(text, 12) / 2)
        drawing.text(x, plane.floor + 17, text, css="quiet", size=12, anchor="middle")
    foot = plane.floor + 36
    drawing.text(plane.right, foot, f"step, {unit.symbol}", css="quiet", size=12, anchor="end")
    if picture.num_left_out:
        text = f"{picture.num_left_out} costlier plans are left out"
        drawing.text(plane.left, foot, text, css="quiet", size=12)
    return plane


def _draw_front(drawing: Drawing, picture: _PlansPicture, plane: Plane) -> list[Box]:
    """Draws the line of plans that no other beats, and returns the places that it takes."""
    lines: list[Box] = []
    front = sorted(plane.at(s.step_seconds, s.cost) for s in picture.dots if s.is_front)
    for (x1, y1), (x2, y2) in pairwise(front):
        # Nothing is known between two plans: the line goes in steps.
        for ends in (((x1, y1), (x2, y1)), ((x2, y1), (x2, y2))):
            drawing.line(*ends[0], *ends[1], "front")
            lines += along(*ends)
    return lines


def _draw_dots(drawing: Drawing, picture: _PlansPicture, plane: Plane) -> None:
    for dot in picture.dots:
        x, y = plane.at(dot.step_seconds, dot.cost)
        time = picture.unit.show(dot.step_seconds)
        drawing.open_group(f"{dot.name}: {time}, {picture.cost_of(dot)}")
        if dot.is_chosen or dot.is_probable:
            drawing.circle(x, y, 9, "ring")
        css = "predicted"
        radius = 2.5
        if dot.is_front or dot.is_today or dot.is_chosen:
            radius = 5
        if dot.is_today:
            css = "dot"
        elif dot.is_front:
            css = "compute"
        drawing.circle(x, y, radius, css)
        drawing.close_group()


def _draw_names(
    drawing: Drawing, picture: _PlansPicture, plane: Plane, *, lines: Sequence[Box]
) -> None:
    """Writes names in the order of their worth, after all dots.

    A name never hides a dot, and where two names need one place the less important one is left out.
    """
    dots = picture.dots
    taken = [around(*plane.at(dot.step_seconds, dot.cost), 4) for dot in dots]
    front = [dot for dot in dots if dot.is_front]
    fastest = sorted(front, key=lambda dot: dot.step_seconds)
    named = [dot for dot in dots if dot.is_chosen]
    named += [dot for dot in dots if dot.is_today]
    named += [dot for dot in dots if dot.is_probable]
    # And both ends of the front.
    for dot in dict.fromkeys([*named, *fastest[:1], *fastest[-1:]]):
        at = plane.at(dot.step_seconds, dot.cost)
        css = "head" if dot.is_chosen else ""
        label(drawing, dot.label, at=at, plane=plane, taken=taken, lines=lines, css=css)
