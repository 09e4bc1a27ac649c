"""Steps of a trainer's timeline, and their picture: a strip of steps before and one after."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from markupsafe import Markup

from stoker.feed.timeline import MeasuredStep, read_timeline, typical_step
from stoker.feed.training_steps import training_steps
from stoker.records import Predicted
from stoker.report.svg import Drawing, fit, text_width, time_axis
from stoker.units import TimeUnit, percent, wait_share, whole

_FLAT_STEPS = 200
_TITLE = 15.0
_LABEL = 13.0
_BAR = 36.0
_ROW = 17.0
# Between a line and its label.
_LEAD_GAP = 5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Single steps of the training in the order of their start, at least one.

    Attributes:
        numbers: Each step's number in the run, from 1; empty: no timeline was kept, and all steps
            are the median.
        total: Steps of the run.
    """

    steps: tuple[MeasuredStep, ...]
    numbers: tuple[int, ...] = ()
    total: int = 0

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


def read_steps(path: Path) -> StepTimes | None:
    """Reads the training's steps; None where the file is missing or holds no step."""
    rows = sorted(training_steps(read_timeline(path)), key=lambda step: step.start_seconds)
    ends = list(accumulate(row.steps for row in rows))
    single = [(row, end) for row, end in zip(rows, ends, strict=True) if row.weight]
    if not single:
        return None
    steps, numbers = zip(*single, strict=True)
    return StepTimes(steps, numbers=numbers, total=ends[-1])


def flat_steps(step_seconds: float, wait_seconds: float) -> StepTimes:
    """Returns equal steps, where no timeline was kept."""
    wait = min(wait_seconds, step_seconds)
    first = MeasuredStep(
        loader=0,
        epoch=0,
        batch=0,
        start_seconds=0.0,
        wait_seconds=wait,
        compute_seconds=step_seconds - wait,
        samples=0,
    )
    numbers = range(_FLAT_STEPS)
    return StepTimes(
        tuple(replace(first, batch=n, start_seconds=n * step_seconds) for n in numbers)
    )


def shown_seconds(step_seconds: Sequence[float]) -> float:
    """Returns the strips' common window: about 24 of the slowest steps, 40 of the fastest."""
    slow = max(step_seconds)
    fast = min(step_seconds)
    # Two of the slow ones at least, and 400 of the fast ones at most, whose marks would run into
    # each other.
    return min(24 * slow, max(40 * fast, 2 * slow), 400 * fast)


@dataclass(frozen=True, slots=True)
class Strip:
    """One run in the picture.

    Attributes:
        name: `Before` or `After`.
        what: Its cluster, such as `one data host`.
        recorded: Step and wait of the run's record, if it has them.
    """

    name: str
    what: str
    timeline: StepTimes
    recorded: tuple[float, float] | None = None

    @property
    def step_seconds(self) -> float:
        """The step of the whole run, as everywhere on the page."""
        return (self.recorded or typical_step(self.timeline.steps))[0]

    @property
    def wait_share(self) -> float:
        step, wait = self.recorded or typical_step(self.timeline.steps)
        return wait_share(step_seconds=step, wait_seconds=wait)


def draw_strips(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Drawing:
    seconds = shown_seconds([strip.step_seconds for strip in strips])
    heads = [_heads(strip, unit) for strip in strips]
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
    for strip, (title, figures) in zip(strips, heads, strict=True):
        base = top + _TITLE
        drawing.text(0, base, fit(title, _TITLE, width), css="head", size=_TITLE)
        if broken:
            base += _ROW + 2
            drawing.text(0, base, figures, css="quiet", size=_LABEL)
        else:
            drawing.text(width, base, figures, css="quiet", size=_LABEL, anchor="end")
        steps = strip.timeline.window(seconds)
        _marks(drawing, steps, scale=scale, seconds=seconds, base=base, wait=wait, unit=unit)
        top += block
    time_axis(drawing, top - 16, seconds=seconds, scale=scale)
    return drawing


def _heads(strip: Strip, unit: TimeUnit) -> tuple[str, str]:
    # The wait of the whole run, not of the drawn steps: a run has one wait on the page.
    figures = f"{unit.brief(strip.step_seconds)} per step, {percent(strip.wait_share)} waiting"
    return f"{strip.name}: {strip.what}", figures


def describe_windows(strips: Sequence[Strip]) -> str:
    """Returns which steps the strips show; empty without strips."""
    if not strips:
        return ""
    seconds = shown_seconds([strip.step_seconds for strip in strips])
    sentences = []
    for strip in strips:
        text = "no timeline was kept, so the strip repeats the median step"
        if strip.timeline.numbers:
            shown = strip.timeline.window(seconds)
            first = strip.timeline.numbers[strip.timeline.steps.index(shown[0])]
            text = f"step {whole(first)}"
            if len(shown) > 1:
                text = f"steps {whole(first)} to {whole(first + len(shown) - 1)}"
            text += f" of {whole(strip.timeline.total)}"
            if len(shown) < strip.timeline.total:
                text += ", from the middle of the run"
        sentences.append(f"{strip.name}: {text}.")
    return " ".join(sentences)


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
    drawing: Drawing, steps: Sequence[MeasuredStep], *, scale: float, base: float, bar: float
) -> None:
    """Labels the two parts of the strip's first ordinary step."""
    step = _ordinary_step(steps)
    left = (step.start_seconds - steps[0].start_seconds) * scale
    boundary = min(left + step.wait_seconds * scale, drawing.width)
    right = min(left + step.seconds * scale, drawing.width)
    # Without figures, which would be one step's; the head has the run's.
    wait = _Lead("wait", (left + boundary) / 2, "waits for its batch")
    compute = _Lead("compute", (boundary + right) / 2, "computes")
    is_mirrored = max(wait.end, compute.end) > drawing.width and wait.begin_mirrored >= 0
    for lead, row in ((wait, 1), (compute, 2)):
        start = min(lead.x + _LEAD_GAP, drawing.width - lead.width)
        if is_mirrored:
            # Near the right edge the labels are left of their lines, and the rows swapped, so that
            # no line crosses a label.
            row = 3 - row
            start = lead.begin_mirrored
        y = base + row * _ROW + 3
        drawing.line(lead.x, y - 9, lead.x, bar, f"lead {lead.css}")
        drawing.text(start, y, lead.text, css=f"on-{lead.css}", size=_LABEL)


@dataclass(frozen=True, slots=True)
class _Lead:
    """A label at a line that leads to its part of a step, at `x`."""

    css: str
    x: float
    text: str

    @property
    def width(self) -> float:
        return text_width(self.text, _LABEL)

    @property
    def end(self) -> float:
        return self.x + _LEAD_GAP + self.width

    @property
    def begin_mirrored(self) -> float:
        return self.x - _LEAD_GAP - self.width


def _ordinary_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Returns the first step that is about as long as most: words at another would mislead."""
    # In the first third there is room for the words, at the right of their lines.
    early = steps[: max(1, len(steps) // 3)]
    typical = sorted(step.seconds for step in steps)[len(steps) // 2]

    def oddness(step: MeasuredStep) -> float:
        return abs(step.seconds - typical)

    # Within a tenth of the median.
    ordinary = (step for step in early if oddness(step) < 0.1 * typical)
    return next(ordinary, min(early, key=oddness))


def draw_bar(promise: Predicted, *, is_measured: bool, largest: float) -> Markup:
    """Draws a step of the table of plans as a small bar, hidden from screen readers."""
    width = 120.0
    height = 14.0
    value, low, high = (
        round(min(seconds / largest, 1.0) * width, 1)
        for seconds in (promise.counted_seconds, promise.counted_low, promise.counted_high)
    )
    css = "measured" if is_measured else "predicted"
    band = ""
    if promise.counted_high > promise.counted_low:
        band = f'<rect class="band" x="{low}" y="1" height="12" width="{high - low:.1f}"/>'
    # The names of the classes are ours and the numbers are formatted above: nothing to escape.
    return Markup(
        f'<svg class="bar" aria-hidden="true" viewBox="0 0 {width:g} {height:g}">'
        f'<rect class="ground" y="5" width="{width:g}" height="4"/>{band}'
        f'<rect class="{css}" y="5" width="{value}" height="4"/></svg>'
    )
