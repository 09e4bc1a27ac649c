"""Step time over the whole of a run, and its distribution at the right edge."""

from collections.abc import Sequence

from markupsafe import Markup

from stoker.report.quantities import TimeUnit, whole
from stoker.report.strips import Strip
from stoker.report.svg import Drawing, text_width, ticks
from stoker.report.timeline import Bin, Quantiles

_HEAD = 15.0
_PLOT = 150.0
_BOX = 18.0
_GAP = 44.0


def draw_series(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Markup:
    """One panel a run on a common scale of step time: side by side, or stacked where narrow."""
    return series_drawing(strips, unit=unit, width=width, name=name).markup()


def series_drawing(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Drawing:
    """As `draw_series`, with the boxes of its labels."""
    quantiles = [strip.timeline.quantiles() for strip in strips]
    side_by_side = width >= 640 and len(strips) > 1
    panel = (width - _GAP) / 2 if side_by_side else width
    height = _HEAD + 12 + _PLOT + 40
    rows = 1 if side_by_side else len(strips)
    at_most = max(24, int(panel / 5))
    bins = [strip.timeline.bins(at_most) for strip in strips]
    # Single long steps (the first, a checkpoint) would flatten all others: the scale ends above
    # 95 % of the steps, and the head of the panel names the longest.
    top = 1.5 * max(quantile.p95 for quantile in quantiles) or 1.0
    drawing = Drawing(
        name=name,
        width=width,
        height=rows * height,
        title="Step time over the whole run",
        description=" ".join(_words(*pair, unit) for pair in zip(strips, quantiles, strict=True)),
    )
    wait = drawing.hatch("wait")
    for index, (strip, parts, quantile) in enumerate(zip(strips, bins, quantiles, strict=True)):
        left = index * (panel + _GAP) if side_by_side else 0.0
        base = 0.0 if side_by_side else index * height
        _panel(
            drawing,
            strip,
            parts,
            quantile,
            left=left,
            base=base,
            panel=panel,
            top=top,
            unit=unit,
            wait=wait,
        )
    return drawing


def _words(strip: Strip, quantile: Quantiles, unit: TimeUnit) -> str:
    return (
        f"{strip.name}: median {unit.show(quantile.p50)}, half of the"
        f" {whole(len(strip.timeline.steps))} steps within {unit.span(quantile.p25, quantile.p75)},"
        f" nine of ten within {unit.span(quantile.p5, quantile.p95)}."
    )


def _panel(
    drawing: Drawing,
    strip: Strip,
    parts: Sequence[Bin],
    quantile: Quantiles,
    *,
    left: float,
    base: float,
    panel: float,
    top: float,
    unit: TimeUnit,
    wait: str,
) -> None:
    marks = ticks(top, at_most=5)
    names = [unit.tick(mark, last=mark == marks[-1]) for mark in marks]
    gutter = max(text_width(text, 12) for text in names) + 8
    floor = base + _HEAD + 12 + _PLOT
    plot = left + gutter
    right = left + panel - 2 * _BOX

    longest = max(step.step_seconds for step in strip.timeline.steps)

    def height_of(seconds: float) -> float:
        return floor - min(seconds, top) / top * _PLOT

    drawing.text(left, base + _HEAD - 1, strip.name, css="head", size=14)
    drawing.text(
        left + panel,
        base + _HEAD - 1,
        f"median {unit.brief(quantile.p50)}, longest {unit.brief(longest)}",
        css="quiet",
        anchor="end",
    )
    for mark, text in zip(marks, names, strict=True):
        y = height_of(mark)
        drawing.line(plot, y, left + panel, y, "axis" if mark == 0 else "grid")
        drawing.text(plot - 6, y + 4, text, css="quiet", size=12, anchor="end")
    steps = len(strip.timeline.steps)
    compute: list[tuple[float, float]] = []
    whole_step: list[tuple[float, float]] = []
    for part in parts:
        for edge in (part.first, part.first + part.steps):
            x = plot + edge / steps * (right - plot)
            compute.append((x, height_of(part.compute_seconds)))
            whole_step.append((x, height_of(part.compute_seconds + part.wait_seconds)))
    drawing.area([(plot, floor), *compute, (right, floor)], "compute")
    drawing.area([*whole_step, *reversed(compute)], fill=wait)
    _box(drawing, x=right + _BOX, heights=[height_of(value) for value in _five(quantile)])
    drawing.text(plot, floor + 18, "step 1", css="quiet", size=12)
    drawing.text(right, floor + 18, whole(steps), css="quiet", size=12, anchor="end")


def _five(quantile: Quantiles) -> tuple[float, float, float, float, float]:
    return quantile.p5, quantile.p25, quantile.p50, quantile.p75, quantile.p95


def _box(drawing: Drawing, *, x: float, heights: Sequence[float]) -> None:
    low, lower, middle, upper, high = heights
    drawing.line(x, low, x, high, "whisker")
    drawing.rect(x - 6, upper, 12, max(lower - upper, 1), "box")
    drawing.line(x - 9, middle, x + 9, middle, "median")
