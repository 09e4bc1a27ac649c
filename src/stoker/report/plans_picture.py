"""What the plans promise: time against money, and step time against the number of data hosts."""

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup

from stoker.records import Decision
from stoker.report.plan_values import (
    Scaling,
    Spot,
    scaling_of,
    spots_of,
    words_of_curve,
    words_of_front,
)
from stoker.report.plane import FOOT, HEAD, PLOT, Place, along, around, axes, label, put
from stoker.report.quantities import TimeUnit, usd
from stoker.report.svg import Box, Drawing, fit, text_width, ticks

_GAP = 44.0


def draw_plans(decision: Decision, *, unit: TimeUnit, width: float, name: str) -> Markup | None:
    """Both panels: side by side, or stacked where narrow; None where there is nothing to see."""
    drawing = plans_drawing(decision, unit=unit, width=width, name=name)
    return drawing.markup() if drawing else None


def plans_drawing(decision: Decision, *, unit: TimeUnit, width: float, name: str) -> Drawing | None:
    """As `draw_plans`, with the boxes of its labels."""
    spots, scaling = spots_of(decision), scaling_of(decision)
    has_front, has_curve = len(spots) > 1, scaling is not None and len(scaling.rungs) > 1
    panels = has_front + has_curve
    if not panels:
        return None
    side_by_side = width >= 640 and panels == 2
    panel = (width - _GAP) / 2 if side_by_side else width
    height = HEAD + 14 + PLOT + FOOT
    words = [words_of_front(spots, unit)] if has_front else []
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
    if has_front:
        _draw_front(drawing, spots, unit=unit, left=left, top=top, panel=panel)
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
) -> None:
    # Much dearer plans would flatten the others: they are counted at the head instead.
    needed = [spot for spot in spots if spot.is_front or spot.is_today or spot.is_chosen]
    most_x = 1.08 * max(spot.step_seconds for spot in spots)
    most_y = 1.25 * max(spot.usd for spot in needed) or 1.0
    dearer = sum(spot.usd > most_y for spot in spots)
    spots = [spot for spot in spots if spot.usd <= most_y]
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Time against money",
        left=left,
        top=top,
        panel=panel,
        most=(most_x, most_y),
        marks=[(mark, usd(mark) if mark else "0") for mark in marks],
        under="upwards: $ for 1000 steps",
    )
    for mark in ticks(most_x, at_most=max(3, int(panel / 90))):
        text = unit.tick(mark, last=False)
        x = min(plane.x(mark), plane.right + 8 - text_width(text, 12) / 2)
        drawing.text(x, plane.floor + 17, text, css="quiet", size=12, anchor="middle")
    drawing.text(
        plane.right, plane.floor + 36, f"step, {unit.symbol}", css="quiet", size=12, anchor="end"
    )
    if dearer:
        text = f"{dearer} dearer plans are left out"
        drawing.text(plane.left, plane.floor + 36, text, css="quiet", size=12)
    lines: list[Box] = []
    front = sorted((s.step_seconds, s.usd) for s in spots if s.is_front)
    for (x1, y1), (x2, y2) in pairwise(front):
        # Nothing is known between two plans: the front goes by steps.
        for one, other in (((x1, y1), (x2, y1)), ((x2, y1), (x2, y2))):
            ends = plane.at(*one), plane.at(*other)
            drawing.line(*ends[0], *ends[1], "front")
            lines += along(*ends)
    for spot in spots:
        x, y = plane.x(spot.step_seconds), plane.y(spot.usd)
        drawing.open_group(f"{spot.name}: {unit.show(spot.step_seconds)}, {usd(spot.usd)}")
        if spot.is_chosen:
            drawing.circle(x, y, 9, "ring")
        css = "dot" if spot.is_today else "compute" if spot.is_front else "predicted"
        drawing.circle(x, y, 5 if spot.is_front or spot.is_today or spot.is_chosen else 2.5, css)
        drawing.close_group()
    taken = [around(plane.x(s.step_seconds), plane.y(s.usd), 4) for s in spots]
    for spot in _worth_a_name(spots):
        name = "today" if spot.is_today else spot.name
        text = f"{name}, chosen" if spot.is_chosen else name
        at = plane.x(spot.step_seconds), plane.y(spot.usd)
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
    every = max(1, -(-most_x // max(3, int(panel / 44))))
    for count in range(0, most_x + 1, every):
        x = plane.x(count)
        drawing.text(x, plane.floor + 17, str(count), css="quiet", size=12, anchor="middle")
    under = fit(f"data hosts ({scaling.data_type})", 12, plane.right - plane.left)
    drawing.text(plane.right, plane.floor + 36, under, css="quiet", size=12, anchor="end")
    band = [rung for rung in rungs if rung.data_hosts]
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
    """What was chosen, today's cluster, and both ends of the front: the fastest, the cheapest."""
    chosen = [spot for spot in spots if spot.is_chosen]
    today = [spot for spot in spots if spot.is_today and not spot.is_chosen]
    front = [spot for spot in spots if spot.is_front]
    ends = sorted(front, key=lambda spot: spot.step_seconds)
    rest = [spot for spot in (ends[:1] + ends[-1:]) if spot not in (*chosen, *today)]
    return [*chosen, *today, *dict.fromkeys(rest)]
