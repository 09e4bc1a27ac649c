"""The picture of scaling: throughput with the ideal line, and the cost of a million samples."""

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup

from stoker.report.plane import FOOT, HEAD, PLOT, Plane, along, around, axes, label
from stoker.report.quantities import digits, percent, usd
from stoker.report.scaling import ScalingOfRuns
from stoker.report.svg import Box, Drawing, ticks

_GAP = 44.0


def draw_scaling(scaling: ScalingOfRuns, *, width: float, name: str) -> Markup:
    """Both panels: side by side, or stacked where narrow; no second one without prices."""
    has_cost = all(point.usd is not None for point in scaling.points)
    panels = 2 if has_cost else 1
    side_by_side = width >= 640 and panels == 2
    panel = (width - _GAP) / 2 if side_by_side else width
    height = HEAD + 14 + PLOT + FOOT
    drawing = Drawing(
        name=name,
        width=width,
        height=height if side_by_side else panels * height + (panels - 1) * 16,
        title=f"Throughput and cost over {scaling.what}",
        description=words_of_scaling(scaling),
    )
    _draw_throughput(drawing, scaling, panel=panel)
    if has_cost:
        left, top = (panel + _GAP, 0.0) if side_by_side else (0.0, height + 16)
        _draw_cost(drawing, scaling, left=left, top=top, panel=panel)
    return drawing.markup()


def words_of_scaling(scaling: ScalingOfRuns) -> str:
    """The picture as a sentence, for those who do not see it."""
    listed = "; ".join(
        f"{point.size}: {digits(point.samples_per_second, 3)} samples a second"
        + (f", {percent(point.efficiency)} of the ideal" if point.efficiency is not None else "")
        + (f", {usd(point.usd)} for a million" if point.usd is not None else "")
        for point in scaling.points
    )
    return f"By {scaling.what}: {listed}."


def _draw_throughput(drawing: Drawing, scaling: ScalingOfRuns, *, panel: float) -> None:
    last = scaling.points[-1]
    most_y = 1.12 * max(scaling.ideal(last.size), *(point.high for point in scaling.points))
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Throughput",
        left=0.0,
        top=0.0,
        panel=panel,
        most=(last.size * 1.08, most_y),
        marks=[(mark, digits(mark, 3) if mark else "0") for mark in marks],
        under="upwards: samples a second",
    )
    _sizes(drawing, plane, scaling)
    ends = plane.at(0, 0), plane.at(last.size, scaling.ideal(last.size))
    drawing.line(*ends[0], *ends[1], "ghost")
    lines: list[Box] = along(*ends)
    spots = [plane.at(point.size, point.samples_per_second) for point in scaling.points]
    for one, other in pairwise(spots):
        drawing.line(*one, *other, "front")
        lines += along(one, other)
    taken = [around(x, y, 6) for x, y in spots]
    for point, (x, y) in zip(scaling.points, spots, strict=True):
        if point.num_runs > 1:
            drawing.line(x, plane.y(point.low), x, plane.y(point.high), "whisker")
        drawing.circle(x, y, 5, "compute")
    for point, at in list(zip(scaling.points, spots, strict=True))[1:]:
        text = f"{percent(point.efficiency)} of ideal"
        label(drawing, text, at=at, plane=plane, taken=taken, lines=lines, css="")
    at = plane.at(last.size, scaling.ideal(last.size))
    label(drawing, "ideal", at=at, plane=plane, taken=taken, lines=lines, css="quiet")


def _draw_cost(
    drawing: Drawing, scaling: ScalingOfRuns, *, left: float, top: float, panel: float
) -> None:
    prices = [point.usd or 0.0 for point in scaling.points]
    most_y = 1.25 * max(prices) or 1.0
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Cost",
        left=left,
        top=top,
        panel=panel,
        most=(scaling.points[-1].size * 1.08, most_y),
        marks=[(mark, usd(mark) if mark else "0") for mark in marks],
        under="upwards: $ for a million samples",
    )
    _sizes(drawing, plane, scaling)
    # Were nothing lost, a sample would cost what it costs at the smallest size.
    ends = plane.at(0, prices[0]), plane.at(scaling.points[-1].size, prices[0])
    drawing.line(*ends[0], *ends[1], "ghost")
    lines: list[Box] = along(*ends)
    spots = [
        plane.at(point.size, price) for point, price in zip(scaling.points, prices, strict=True)
    ]
    for one, other in pairwise(spots):
        drawing.line(*one, *other, "front")
        lines += along(one, other)
    taken = [around(x, y, 6) for x, y in spots]
    for price, (x, y) in zip(prices, spots, strict=True):
        drawing.circle(x, y, 5, "compute")
        label(drawing, usd(price), at=(x, y), plane=plane, taken=taken, lines=lines, css="")


def _sizes(drawing: Drawing, plane: Plane, scaling: ScalingOfRuns) -> None:
    for size in _thinned([point.size for point in scaling.points], plane):
        x = plane.x(size)
        drawing.text(x, plane.floor + 17, str(size), css="quiet", size=12, anchor="middle")
    drawing.text(plane.right, plane.floor + 36, scaling.what, css="quiet", size=12, anchor="end")


def _thinned(sizes: Sequence[int], plane: Plane) -> list[int]:
    """Those that have room beside each other; the largest always has."""
    shown: list[int] = []
    for size in reversed(sizes):
        if not shown or plane.x(shown[-1]) - plane.x(size) >= 22:
            shown.append(size)
    return shown
