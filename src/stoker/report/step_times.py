"""Step times have their statistics and their pictures here.

They come from a trainer's timeline, and are drawn before and after, over the run, and promised
against measured.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Literal, NamedTuple

from markupsafe import Markup

from stoker.feed.timeline import (
    MeasuredStep,
    block_means,
    main_loader,
    read_timeline,
    steady,
    typical_step,
)
from stoker.report.svg import Drawing, fit, text_width, ticks, time_axis
from stoker.text import TimeUnit, percent, wait_share, whole

_TITLE = 15.0
_LABEL = 13.0
_BAR = 36.0
_ROW = 17.0
_HEAD = 15.0
_PLOT = 150.0
_BOX = 18.0
_GAP = 44.0
_INTERVAL_ROW = 40.0


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin holds means over neighbouring steps; the two parts add up to the whole.

    Attributes:
        first: Number of its first step, from 0.
        steps: How many steps it holds.
    """

    first: int
    steps: int
    wait_seconds: float
    compute_seconds: float


class Quantiles(NamedTuple):
    """Holds the step time at 5, 25, 50, 75 and 95 % of the blocks of steps, in seconds."""

    p5: float
    p25: float
    p50: float
    p75: float
    p95: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Holds the steps of the main loader in the order of their start, at least one.

    Attributes:
        measured: False where the steps are drawn from medians because no timeline was kept.
    """

    steps: tuple[MeasuredStep, ...]
    measured: bool = True

    def quantiles(self) -> Quantiles:
        """Returns the quantiles of the step, over the blocks that its median is defined by."""
        values = block_means(steady(self.steps), lambda step: step.seconds)
        # 19 cuts, 5 % apart; a single step is each of its own quantiles.
        cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else 19 * values
        return Quantiles(*(cuts[place] for place in (0, 4, 9, 14, 18)))

    def window(self, seconds: float) -> tuple[MeasuredStep, ...]:
        """Returns consecutive steps that fill `seconds`, as near to the run's middle as can be.

        A window inside one epoch is preferred to one that crosses the validation between two.
        """
        starts = [step.start_seconds for step in self.steps]
        middle = (starts[0] + self.steps[-1].end_seconds - seconds) / 2

        def cut(first: int) -> tuple[MeasuredStep, ...]:
            # A step that begins where the window ends, but for rounding, is not in it.
            last = bisect_left(starts, starts[first] + seconds - 1e-9)
            return self.steps[first : max(last, first + 1)]

        # The middle of the run: neither its first steps, which warm up, nor its last.
        order = sorted(range(len(starts)), key=lambda index: abs(starts[index] - middle))
        for first in order:
            steps = cut(first)
            full = steps[-1].end_seconds >= starts[first] + seconds
            if full and steps[0].epoch == steps[-1].epoch:
                return steps
        # No window fits into one epoch: it crosses to the next, or shows the whole of a short run.
        return cut(order[0]) if starts[-1] - starts[0] > seconds else cut(0)

    def bins(self, at_most: int) -> list[Bin]:
        """Divides the whole run into `at_most` neighbourhoods at most."""
        # Means of neighbours, not every n-th step: a periodic one (a checkpoint) would show always
        # or never.
        size = math.ceil(len(self.steps) / at_most)
        parts = [(n, self.steps[n : n + size]) for n in range(0, len(self.steps), size)]
        return [
            Bin(
                first=first,
                steps=len(part),
                wait_seconds=fmean(step.wait_seconds for step in part),
                compute_seconds=fmean(step.compute_seconds for step in part),
            )
            for first, part in parts
        ]


def read_steps(path: Path) -> StepTimes | None:
    """Reads the main loader's steps; None where the file is missing or holds no step."""
    steps = main_loader(read_timeline(path))
    return StepTimes(tuple(sorted(steps, key=lambda step: step.start_seconds))) if steps else None


def flat_steps(*, wait_seconds: float, compute_seconds: float, steps: int) -> StepTimes | None:
    """Returns a run of equal steps, for want of a timeline; None for steps of no length."""
    step_seconds = wait_seconds + compute_seconds
    if step_seconds <= 0:
        return None
    return StepTimes(
        tuple(
            MeasuredStep(
                loader=0,
                epoch=0,
                batch=number,
                start_seconds=number * step_seconds,
                wait_seconds=wait_seconds,
                compute_seconds=compute_seconds,
                samples=0,
            )
            for number in range(steps)
        ),
        measured=False,
    )


def shown_seconds(step_seconds: Sequence[float]) -> float:
    """Returns the strips' common window: about 24 of the slowest steps, 40 of the fastest.

    Where one is very much faster, it shows more than 40 so that the other shows two.
    """
    slow, fast = max(step_seconds), min(step_seconds)
    # More than 400 marks of the fast run would run into each other.
    return min(24 * slow, max(40 * fast, 2 * slow), 400 * fast)


@dataclass(frozen=True, slots=True)
class Strip:
    """The picture has a strip for each run.

    Attributes:
        name: `Before` or `After`.
        what: Cluster that it ran on, in a few words.
        recorded: The step and its wait as the record has them; None: it has none.
    """

    name: str
    what: str
    timeline: StepTimes
    recorded: tuple[float, float] | None = None

    @property
    def step_seconds(self) -> float:
        """Returns the step of the whole run, as everywhere on the page."""
        return (self.recorded or typical_step(self.timeline.steps))[0]

    @property
    def wait_share(self) -> float:
        """Returns the share of such a step that waits for data."""
        step, wait = self.recorded or typical_step(self.timeline.steps)
        return wait_share(step_seconds=step, wait_seconds=wait)


def draw_strips(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Markup:
    """Draws the strips, one below the other, with one axis of time."""
    return strips_drawing(strips, unit=unit, width=width, name=name).markup()


def strips_drawing(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Drawing:
    """Draws as `draw_strips` does, and returns the drawing with the boxes of its labels."""
    seconds = shown_seconds([strip.step_seconds for strip in strips])
    windows = [strip.timeline.window(seconds) for strip in strips]
    heads = [_head(strip, unit) for strip in strips]
    # One head in two rows breaks all of them, so that all strips are of one height.
    broken = any(text_width(title + right, _TITLE) + 24 > width for title, right in heads)
    block = _TITLE + (_ROW if broken else 0) + 2 * _ROW + 12 + _BAR + 26
    drawing = Drawing(
        name=name,
        width=width,
        height=len(strips) * block + 22,
        title="Step timeline, " + " and ".join(strip.name.lower() for strip in strips),
        description=" ".join(f"{title}: {right}." for title, right in heads)
        + " Striped marks are waiting for data, plain marks are compute.",
    )
    scale = (width - 1) / seconds
    wait = drawing.hatch("wait")
    top = 0.0
    for (title, right), steps in zip(heads, windows, strict=True):
        base = top + _TITLE
        drawing.text(0, base, fit(title, _TITLE, width), css="head", size=_TITLE)
        if broken:
            base += _ROW + 2
            drawing.text(0, base, right, css="quiet", size=_LABEL)
        else:
            drawing.text(width, base, right, css="quiet", size=_LABEL, anchor="end")
        _marks(drawing, steps, scale=scale, seconds=seconds, base=base, wait=wait, unit=unit)
        top += block
    time_axis(drawing, top - 16, seconds=seconds, scale=scale)
    return drawing


def describe_windows(strips: Sequence[Strip]) -> str:
    """Says which steps the strips show, for the caption."""
    seconds = shown_seconds([strip.step_seconds for strip in strips])
    sentences = []
    for strip in strips:
        shown = strip.timeline.window(seconds)
        first = strip.timeline.steps.index(shown[0]) + 1
        if strip.timeline.measured:
            sentences.append(
                f"{strip.name}: steps {whole(first)} to {whole(first + len(shown) - 1)}"
                f" of {whole(len(strip.timeline.steps))}, from the middle of the run."
            )
        else:
            sentences.append(
                f"{strip.name}: no timeline was kept, so the strip repeats the median step."
            )
    return " ".join(sentences)


def _head(strip: Strip, unit: TimeUnit) -> tuple[str, str]:
    # Of the whole run, not of the steps that are drawn: one run has one wait.
    words = f"{unit.brief(strip.step_seconds)} per step, {percent(strip.wait_share)} waiting"
    return f"{strip.name}: {strip.what}", words


def _marks(
    drawing: Drawing,
    steps: Sequence[MeasuredStep],
    *,
    scale: float,
    seconds: float,
    base: float,
    wait: str,
    unit: TimeUnit,
) -> None:
    bar = base + 2 * _ROW + 10
    origin = steps[0].start_seconds
    drawing.rect(0, bar, seconds * scale, _BAR, "ground")
    for step in steps:
        x = (step.start_seconds - origin) * scale
        # The last step of a window may reach beyond it.
        end = min(seconds, step.end_seconds - origin) * scale
        middle = min(end, x + step.wait_seconds * scale)
        # A gap of 1 between steps lets them be counted; it is taken from the mark, not added.
        gap = 1.0 if end - x > 4 else 0.0
        drawing.open_group(
            f"epoch {step.epoch}, batch {step.batch}: wait {unit.show(step.wait_seconds)},"
            f" compute {unit.show(step.compute_seconds)}"
        )
        drawing.rect(x, bar, middle - x, _BAR, fill=wait)
        drawing.rect(middle, bar, max(end - gap, middle) - middle, _BAR, "compute")
        drawing.close_group()
    _callout(drawing, steps, scale=scale, base=base, bar=bar)


def _callout(
    drawing: Drawing,
    steps: Sequence[MeasuredStep],
    *,
    scale: float,
    base: float,
    bar: float,
) -> None:
    """Names the two parts of one step, the first ordinary one of the strip."""
    # In the first third there is room for the words, at the right of their lines.
    early = steps[: max(1, len(steps) // 3)]
    typical = sorted(step.seconds for step in steps)[len(steps) // 2]

    def oddness(step: MeasuredStep) -> float:
        return abs(step.seconds - typical)

    # Within a tenth of the median: words at an unusual step would mislead.
    ordinary = [step for step in early if oddness(step) < 0.1 * typical]
    step = ordinary[0] if ordinary else min(early, key=oddness)
    left = (step.start_seconds - steps[0].start_seconds) * scale
    boundary = min(left + step.wait_seconds * scale, drawing.width)
    right = min(left + step.seconds * scale, drawing.width)
    parts = [
        # Without figures: those of one step are not those of the run, which the head has.
        ("wait", (left + boundary) / 2, "waits for its batch"),
        ("compute", (boundary + right) / 2, "computes"),
    ]
    widths = [text_width(text, _LABEL) for _, _, text in parts]
    # Near the right edge the labels are left of their lines, the rows swapped, so that no line
    # crosses a label.
    runs_out = any(
        x + 5 + wide > drawing.width for (_, x, _), wide in zip(parts, widths, strict=True)
    )
    mirrored = runs_out and parts[0][1] - 5 - widths[0] >= 0
    rows = (2, 1) if mirrored else (1, 2)
    for (css, x, text), wide, row in zip(parts, widths, rows, strict=True):
        y = base + row * _ROW + 3
        start = x - 5 - wide if mirrored else min(x + 5, drawing.width - wide)
        drawing.line(x, y - 9, x, bar, f"lead {css}")
        drawing.text(start, y, text, css=f"on-{css}", size=_LABEL)


def draw_series(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Markup:
    """Draws one panel for each run, all on one scale of step time; stacked where narrow."""
    return series_drawing(strips, unit=unit, width=width, name=name).markup()


def series_drawing(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Drawing:
    """Draws as `draw_series` does, and returns the drawing with the boxes of its labels."""
    quantiles = [strip.timeline.quantiles() for strip in strips]
    side_by_side = width >= 640 and len(strips) > 1
    panel = (width - _GAP) / 2 if side_by_side else width
    height = _HEAD + 12 + _PLOT + 40
    rows = 1 if side_by_side else len(strips)
    # A bin of 5 pixels or more: narrower ones look like noise.
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
        f"{strip.name}: median {unit.show(strip.step_seconds)}, half of the"
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

    longest = max(step.seconds for step in strip.timeline.steps)

    def height_of(seconds: float) -> float:
        return floor - min(seconds, top) / top * _PLOT

    drawing.text(left, base + _HEAD - 1, strip.name, css="head", size=14)
    drawing.text(
        left + panel,
        base + _HEAD - 1,
        f"median {unit.brief(strip.step_seconds)}, longest {unit.brief(longest)}",
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
        # Both edges at one height: a bin is a mean, no slope leads from one to the next.
        for edge in (part.first, part.first + part.steps):
            x = plot + edge / steps * (right - plot)
            compute.append((x, height_of(part.compute_seconds)))
            whole_step.append((x, height_of(part.compute_seconds + part.wait_seconds)))
    drawing.area([(plot, floor), *compute, (right, floor)], "compute")
    drawing.area([*whole_step, *reversed(compute)], fill=wait)
    _box(drawing, x=right + _BOX, heights=[height_of(value) for value in quantile])
    drawing.text(plot, floor + 18, "step 1", css="quiet", size=12)
    drawing.text(right, floor + 18, whole(steps), css="quiet", size=12, anchor="end")


def _box(drawing: Drawing, *, x: float, heights: Sequence[float]) -> None:
    low, lower, middle, upper, high = heights
    drawing.line(x, low, x, high, "whisker")
    drawing.rect(x - 6, upper, 12, max(lower - upper, 1), "box")
    drawing.line(x - 9, middle, x + 9, middle, "median")


@dataclass(frozen=True, slots=True)
class Interval:
    """A row shows a value in seconds with its band, whose ends are equal where none is known."""

    name: str
    kind: Literal["predicted", "measured"]
    value: float
    low: float
    high: float


def draw_intervals(rows: Sequence[Interval], *, unit: TimeUnit, width: float, name: str) -> Markup:
    """Draws the rows below each other; a prediction's band runs on to the row that it promised."""
    return intervals_drawing(rows, unit=unit, width=width, name=name).markup()


def intervals_drawing(
    rows: Sequence[Interval], *, unit: TimeUnit, width: float, name: str
) -> Drawing:
    """Draws as `draw_intervals` does, and returns the drawing with the boxes of its labels."""
    narrow = width < 640
    texts = [unit.show(row.value) for row in rows]
    left = 4.0 if narrow else max(text_width(row.name, _LABEL) for row in rows) + 18
    right = max(text_width(text, _LABEL) for text in texts) + 18
    largest = max(max(row.high, row.value) for row in rows) or 1.0
    row_height = _INTERVAL_ROW + 14 if narrow else _INTERVAL_ROW
    floor = len(rows) * row_height + 4
    drawing = Drawing(
        name=name,
        width=width,
        height=floor + 26,
        title="Step time, predicted against measured",
        description=" ".join(f"{row.name}: {_words_of_intervals(row, unit)}." for row in rows),
    )

    def x_of(seconds: float) -> float:
        return left + 6 + seconds / largest * (width - left - right - 12)

    tops = [index * row_height + (26 if narrow else 0) for index in range(len(rows))]
    _axis_of_intervals(
        drawing, floor, tops, largest=largest, x_of=[x_of(0), x_of(largest)], unit=unit
    )
    for index, row in enumerate(rows):
        y = index * row_height + row_height - _INTERVAL_ROW / 2
        if row.kind == "predicted":
            # Down to the next row, the measurement that the prediction is held against.
            reach = _INTERVAL_ROW / 2 if index + 1 == len(rows) else row_height + 12
            drawing.rect(
                x_of(row.low), y - 12, max(x_of(row.high) - x_of(row.low), 1), 12 + reach, "band"
            )
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        y = index * row_height + row_height - _INTERVAL_ROW / 2
        name_y = y - 18 if narrow else y + 4
        drawing.text(0, name_y, row.name, css="head" if narrow else "", size=_LABEL)
        if row.kind == "predicted":
            drawing.line(x_of(row.value), y - 12, x_of(row.value), y + 12, "median")
        else:
            drawing.line(x_of(row.low), y, x_of(row.high), y, "whisker")
            drawing.circle(x_of(row.value), y, 5, "dot")
        drawing.text(x_of(max(row.high, row.value)) + 10, y + 4, text, css="head", size=_LABEL)
    return drawing


def draw_bar(interval: Interval, *, largest: float) -> Markup:
    """Draws a table row as a small bar: the predicted step with its band, or the measured one.

    It says no more than the figures next to it, so it is hidden from readers of text.
    """
    width, height = 120.0, 14.0

    def place(seconds: float) -> str:
        return f"{min(seconds / largest, 1.0) * width:.1f}"

    band = ""
    if interval.high > interval.low:
        band = (
            f'<rect class="band" x="{place(interval.low)}" y="1" height="12"'
            f' width="{float(place(interval.high)) - float(place(interval.low)):.1f}"/>'
        )
    # The names of the classes are ours and the numbers are formatted above: nothing to escape.
    return Markup(
        f'<svg class="bar" aria-hidden="true" viewBox="0 0 {width:g} {height:g}">'
        f'<rect class="ground" y="5" width="{width:g}" height="4"/>{band}'
        f'<rect class="{interval.kind}" y="5" width="{place(interval.value)}" height="4"/></svg>'
    )


def _words_of_intervals(row: Interval, unit: TimeUnit) -> str:
    text = f"{row.kind} {unit.show(row.value)}"
    return f"{text}, {unit.span(row.low, row.high)}" if row.high > row.low else text


def _axis_of_intervals(
    drawing: Drawing,
    floor: float,
    tops: Sequence[float],
    *,
    largest: float,
    x_of: Sequence[float],
    unit: TimeUnit,
) -> None:
    """Draws the axis' marks; grid lines leave out the names that are above their rows."""
    start, end = x_of
    marks = ticks(largest, at_most=max(3, int((end - start) / 60)))
    for mark in marks:
        x = start + mark / largest * (end - start)
        css = "axis" if mark == 0 else "grid"
        for top, below in zip(tops, [*tops[1:], floor + 26], strict=True):
            drawing.line(x, top, x, min(below - (26 if tops[0] else 0), floor), css)
        text = unit.tick(mark, last=mark == marks[-1])
        drawing.text(x, floor + 18, text, css="quiet", size=12, anchor="middle")
    drawing.line(start, floor, end, floor, "axis")
