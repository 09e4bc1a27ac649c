"""The plans have a picture: time against money, and step time against the number of data hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from stoker.decide import pareto_front
from stoker.records import Decision, Plan, Predicted
from stoker.report.svg import (
    FOOT,
    HEAD,
    PLOT,
    Box,
    Drawing,
    Place,
    along,
    around,
    axes,
    fit,
    label,
    put,
    text_width,
    ticks,
)
from stoker.text import NBSP, TimeUnit, digits, usd

_GAP = 44.0
# Fewer plans than this are told by the table.
_LEAST_SPOTS = 3


@dataclass(frozen=True, slots=True)
class Spot:
    """Places a plan in the plane of time and cost.

    Attributes:
        cost: Dollars for 1000 steps, or CPU-seconds per step where nobody is billed.
        is_front: No other plan is both faster and cheaper.
    """

    name: str
    step_seconds: float
    cost: float
    is_front: bool
    is_chosen: bool
    is_today: bool


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung holds the step time with so many data hosts; today's cluster has none."""

    data_hosts: int
    step_seconds: float
    low: float
    high: float
    is_feasible: bool
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """Holds step times by the number of data hosts of one type.

    Attributes:
        rungs: Numbers of data hosts, from none on.
        floor_seconds: The accelerators' own step: no data host makes it shorter.
        is_today_measured: Whether today's step was measured, as it is unless the profile was taken
            elsewhere.
    """

    data_type: str
    rungs: tuple[Rung, ...]
    floor_seconds: float
    is_today_measured: bool


def spots_of(decision: Decision) -> list[Spot]:
    """Returns the plans that can be run and are predicted, the chosen one last, on top."""
    front = pareto_front(decision.plans)
    spots = [
        Spot(
            name=_short_name(plan),
            step_seconds=plan.predicted.step_seconds,
            cost=_cost(plan.predicted, decision),
            is_front=any(plan is each for each in front),
            is_chosen=_is_same(plan, decision.plan),
            is_today=plan.action == "keep",
        )
        for plan in decision.plans
        if plan.feasible and plan.predicted
    ]
    # SVG paints in order: what comes later covers what came before.
    return sorted(spots, key=lambda spot: (spot.is_chosen, spot.is_today, spot.is_front))


def _cost(outcome: Predicted, decision: Decision) -> float:
    if decision.prices.is_nominal and outcome.cpu_seconds is not None:
        return outcome.cpu_seconds
    return outcome.usd_per_1000_steps


def has_front(decision: Decision, spots: Sequence[Spot]) -> bool:
    """Returns whether time against cost says something: two plans are told by the table."""
    is_known = not decision.prices.is_nominal or all(
        plan.predicted.cpu_seconds is not None for plan in decision.plans if plan.predicted
    )
    return is_known and len(spots) >= _LEAST_SPOTS


def cost_text(cost: float, *, is_billed: bool) -> str:
    """Writes the cost of a plan as the picture does: dollars, or CPU-seconds."""
    return usd(cost) if is_billed else f"{digits(cost, 3)}{NBSP}s"


def scaling_of(decision: Decision) -> Scaling | None:
    """Returns the curve of the chosen plan's data type, or of the best plan's; None without one."""
    keep = next((p.predicted for p in decision.plans if p.action == "keep" and p.predicted), None)
    # The chosen plan first: its data type is the one that is drawn.
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
            # Plans are ranked: of several with so many hosts, the best comes first and stays.
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
        # The utilization was made of it: accelerator-only time over the step (records/decision.py).
        floor_seconds=keep.accelerator_utilization * keep.step_seconds,
        is_today_measured=decision.taken_elsewhere is None,
    )


def words_of_front(spots: Sequence[Spot], unit: TimeUnit, *, is_billed: bool = True) -> str:
    """Returns the front as a sentence, for those who do not see it."""
    front = sorted((s for s in spots if s.is_front), key=lambda spot: spot.step_seconds)
    listed = "; ".join(
        f"{s.name} {unit.show(s.step_seconds)} at {cost_text(s.cost, is_billed=is_billed)}"
        + (" for 1000 steps" if is_billed else " of CPU time per step")
        for s in front
    )
    return f"{len(spots)} plans, of them no other is both faster and cheaper than: {listed}."


def words_of_curve(scaling: Scaling, unit: TimeUnit) -> str:
    """Returns the curve as a sentence, for those who do not see it."""
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
    """Returns whether the plan is today's dnn hosts with data hosts of one type."""
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


def draw_plans(decision: Decision, *, unit: TimeUnit, width: float, name: str) -> Markup | None:
    """Draws both panels, next to each other, or stacked where narrow; None if there are none."""
    drawing = plans_drawing(decision, unit=unit, width=width, name=name)
    return drawing.markup() if drawing else None


def plans_drawing(decision: Decision, *, unit: TimeUnit, width: float, name: str) -> Drawing | None:
    """Draws as `draw_plans` does, and returns the drawing with the boxes of its labels."""
    spots, scaling = spots_of(decision), scaling_of(decision)
    is_front, has_curve = has_front(decision, spots), scaling is not None and len(scaling.rungs) > 1
    is_billed = not decision.prices.is_nominal
    panels = is_front + has_curve
    if not panels:
        return None
    # Narrower, a panel's marks would overlap.
    side_by_side = width >= 640 and panels == 2
    panel = (width - _GAP) / 2 if side_by_side else width
    height = HEAD + 14 + PLOT + FOOT
    # The description is read out to those who do not see the picture.
    words = [words_of_front(spots, unit, is_billed=is_billed)] if is_front else []
    if has_curve and scaling:
        words.append(words_of_curve(scaling, unit))
    drawing = Drawing(
        name=name,
        width=width,
        height=height if side_by_side else panels * height + (panels - 1) * 16,
        title="What the plans promise",
        description=" ".join(words),
    )
    left, top = 0.0, 0.0
    if is_front:
        _draw_front(drawing, spots, unit=unit, left=left, top=top, panel=panel, is_billed=is_billed)
        left, top = (panel + _GAP, 0.0) if side_by_side else (0.0, height + 16)
    if has_curve and scaling:
        _draw_curve(drawing, scaling, unit=unit, left=left, top=top, panel=panel)
    return drawing


def _draw_front(
    drawing: Drawing,
    spots: Sequence[Spot],
    *,
    unit: TimeUnit,
    left: float,
    top: float,
    panel: float,
    is_billed: bool,
) -> None:
    # Much more expensive plans would flatten the others: they are counted at the head instead.
    needed = [spot for spot in spots if spot.is_front or spot.is_today or spot.is_chosen]
    most_x = 1.08 * max(spot.step_seconds for spot in spots)
    # 1.0: where all plans are free, the axis still needs a top.
    most_y = 1.25 * max(spot.cost for spot in needed) or 1.0
    num_left_out = sum(spot.cost > most_y for spot in spots)
    spots = [spot for spot in spots if spot.cost <= most_y]
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Time against money" if is_billed else "Time against CPU time",
        left=left,
        top=top,
        panel=panel,
        most=(most_x, most_y),
        marks=[(mark, cost_text(mark, is_billed=is_billed) if mark else "0") for mark in marks],
        under="upwards: $ for 1000 steps" if is_billed else "upwards: CPU-seconds per step",
    )
    for mark in ticks(most_x, at_most=max(3, int(panel / 90))):
        text = unit.tick(mark, last=False)
        # The panel ends 8 beyond the plane (see `axes`): the last mark's text must not leave it.
        x = min(plane.x(mark), plane.right + 8 - text_width(text, 12) / 2)
        drawing.text(x, plane.floor + 17, text, css="quiet", size=12, anchor="middle")
    drawing.text(
        plane.right, plane.floor + 36, f"step, {unit.symbol}", css="quiet", size=12, anchor="end"
    )
    if num_left_out:
        text = f"{num_left_out} costlier plans are left out"
        drawing.text(plane.left, plane.floor + 36, text, css="quiet", size=12)
    lines: list[Box] = []
    front = sorted((s.step_seconds, s.cost) for s in spots if s.is_front)
    for (x1, y1), (x2, y2) in pairwise(front):
        # Nothing is known between two plans: the front goes by steps.
        for one, other in (((x1, y1), (x2, y1)), ((x2, y1), (x2, y2))):
            ends = plane.at(*one), plane.at(*other)
            drawing.line(*ends[0], *ends[1], "front")
            lines += along(*ends)
    for spot in spots:
        x, y = plane.x(spot.step_seconds), plane.y(spot.cost)
        drawing.open_group(
            f"{spot.name}: {unit.show(spot.step_seconds)}, "
            f"{cost_text(spot.cost, is_billed=is_billed)}"
        )
        if spot.is_chosen:
            drawing.circle(x, y, 9, "ring")
        css = "dot" if spot.is_today else "compute" if spot.is_front else "predicted"
        drawing.circle(x, y, 5 if spot.is_front or spot.is_today or spot.is_chosen else 2.5, css)
        drawing.close_group()
    # Dots first, then names in the order of their worth: a name never hides a dot, and of two in
    # one place the less needed one is left out.
    taken = [around(plane.x(s.step_seconds), plane.y(s.cost), 4) for s in spots]
    for spot in _worth_a_name(spots):
        name = "today" if spot.is_today else spot.name
        text = f"{name}, chosen" if spot.is_chosen else name
        at = plane.x(spot.step_seconds), plane.y(spot.cost)
        css = "head" if spot.is_chosen else ""
        label(drawing, text, at=at, plane=plane, taken=taken, lines=lines, css=css)


def _draw_curve(
    drawing: Drawing, scaling: Scaling, *, unit: TimeUnit, left: float, top: float, panel: float
) -> None:
    rungs = scaling.rungs
    most_x = max(rung.data_hosts for rung in rungs)
    most_y = 1.12 * max(max(rung.high, rung.step_seconds) for rung in rungs)
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Step time and data hosts",
        left=left,
        top=top,
        panel=panel,
        most=(most_x + 0.25, most_y),
        marks=[(mark, unit.tick(mark, last=mark == marks[-1])) for mark in marks],
        under="",
    )
    # Rounded up, so that a figure has 44 pixels at least.
    every = max(1, -(-most_x // max(3, int(panel / 44))))
    for count in range(0, most_x + 1, every):
        x = plane.x(count)
        drawing.text(x, plane.floor + 17, str(count), css="quiet", size=12, anchor="middle")
    under = fit(f"data hosts ({scaling.data_type})", 12, plane.right - plane.left)
    drawing.text(plane.right, plane.floor + 36, under, css="quiet", size=12, anchor="end")
    # The band is that of predictions.
    band = [rung for rung in rungs if rung.data_hosts or not scaling.is_today_measured]
    if len(band) > 1:
        upper = [(plane.x(r.data_hosts), plane.y(r.high)) for r in band]
        lower = [(plane.x(r.data_hosts), plane.y(r.low)) for r in band]
        drawing.area([*upper, *reversed(lower)], "band")
    lines: list[Box] = []
    for one, other in pairwise(rungs):
        ends = (
            plane.at(one.data_hosts, one.step_seconds),
            plane.at(other.data_hosts, other.step_seconds),
        )
        drawing.line(*ends[0], *ends[1], "front" if other.is_feasible else "ghost")
        lines += along(*ends)
    taken: list[Box] = []
    for rung in rungs:
        x, y = plane.x(rung.data_hosts), plane.y(rung.step_seconds)
        taken.append(around(x, y, 6))
        if rung.is_chosen:
            drawing.circle(x, y, 9, "ring")
        css = "dot" if not rung.data_hosts else "compute" if rung.is_feasible else "predicted"
        drawing.circle(x, y, 5 if rung.is_feasible else 3, css)
    if scaling.floor_seconds > 0:
        y = plane.y(scaling.floor_seconds)
        drawing.line(plane.left, y, plane.right, y, "floor")
        lines += along((plane.left, y), (plane.right, y))
        text = f"accelerators alone, {unit.show(scaling.floor_seconds)}"
        text = fit(text, 12, plane.right - plane.left)
        room: list[Place] = [(plane.left + 4, y + 16, "start"), (plane.right, y + 16, "end")]
        room += [(plane.right, y - 7, "end"), (plane.left + 4, y - 7, "start")]
        put(drawing, text, places=room, plane=plane, taken=taken, lines=lines, css="over")
    named = [rung for rung in rungs if rung.is_chosen or not rung.data_hosts]
    for rung in named:
        text = unit.show(rung.step_seconds)
        at = plane.x(rung.data_hosts), plane.y(rung.step_seconds)
        text = f"{text}, chosen" if rung.is_chosen and rung.data_hosts else text
        css = "head over" if rung.is_chosen else "over"
        label(drawing, text, at=at, plane=plane, taken=taken, lines=lines, css=css)


def _worth_a_name(spots: Sequence[Spot]) -> list[Spot]:
    """Returns the chosen plan, today's cluster, and both ends of the front: fastest, cheapest."""
    chosen = [spot for spot in spots if spot.is_chosen]
    today = [spot for spot in spots if spot.is_today and not spot.is_chosen]
    front = [spot for spot in spots if spot.is_front]
    ends = sorted(front, key=lambda spot: spot.step_seconds)
    rest = [spot for spot in (ends[:1] + ends[-1:]) if spot not in (*chosen, *today)]
    return [*chosen, *today, *dict.fromkeys(rest)]
