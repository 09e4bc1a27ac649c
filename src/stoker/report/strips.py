"""The picture of the report: steps before and after as two strips on one scale of time."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stoker.report.quantities import NBSP, TimeUnit, percent, whole
from stoker.report.svg import Drawing, fit, text_width, ticks
from stoker.report.timeline import Step, Timeline, shown_seconds

_TITLE = 15.0
_LABEL = 13.0
_BAR = 36.0
_ROW = 17.0


@dataclass(frozen=True, slots=True)
class Strip:
    """One run of the picture.

    Attributes:
        name: `Before` or `After`.
        what: Where it ran, in a few words.
        step_seconds: Its median step over the whole run, above 0.
    """

    name: str
    what: str
    step_seconds: float
    timeline: Timeline


def draw_strips(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Markup:
    """The strips, one below the other, with one axis of time."""
    return strips_drawing(strips, unit=unit, width=width, name=name).markup()


def strips_drawing(strips: Sequence[Strip], *, unit: TimeUnit, width: float, name: str) -> Drawing:
    """As `draw_strips`, with the boxes of its labels."""
    seconds = shown_seconds([strip.step_seconds for strip in strips])
    windows = [strip.timeline.window(seconds) for strip in strips]
    heads = [_head(strip, steps, unit) for strip, steps in zip(strips, windows, strict=True)]
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
    _axis(drawing, top - 16, seconds=seconds, scale=scale)
    return drawing


def describe_windows(strips: Sequence[Strip]) -> str:
    """Which steps the strips show, for the caption."""
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


def _head(strip: Strip, steps: Sequence[Step], unit: TimeUnit) -> tuple[str, str]:
    span = steps[-1].end_seconds - steps[0].start_seconds
    share = sum(step.wait_seconds for step in steps) / span if span > 0 else 0.0
    title = f"{strip.name}: {strip.what}"
    if not strip.timeline.measured:
        return title, f"drawn from medians: {unit.brief(strip.step_seconds)} a step"
    return title, f"{whole(len(steps))} steps shown, {percent(share)} of the time waiting"


def _marks(
    drawing: Drawing,
    steps: Sequence[Step],
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
    _callout(drawing, steps, scale=scale, base=base, bar=bar, unit=unit)


def _callout(
    drawing: Drawing,
    steps: Sequence[Step],
    *,
    scale: float,
    base: float,
    bar: float,
    unit: TimeUnit,
) -> None:
    """Names the two parts of one step, the first ordinary one of the strip."""
    early = steps[: max(1, len(steps) // 3)]
    typical = sorted(step.step_seconds for step in steps)[len(steps) // 2]

    def oddness(step: Step) -> float:
        return abs(step.step_seconds - typical)

    ordinary = [step for step in early if oddness(step) < 0.1 * typical]
    step = ordinary[0] if ordinary else min(early, key=oddness)
    left = (step.start_seconds - steps[0].start_seconds) * scale
    boundary = min(left + step.wait_seconds * scale, drawing.width)
    right = min(left + step.step_seconds * scale, drawing.width)
    parts = [
        ("wait", (left + boundary) / 2, f"wait {unit.brief(step.wait_seconds)}"),
        ("compute", (boundary + right) / 2, f"compute {unit.brief(step.compute_seconds)}"),
    ]
    widths = [text_width(text, _LABEL) for _, _, text in parts]
    # Near the right edge the labels stand left of their lines, the rows swapped, so that no line
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


def _axis(drawing: Drawing, y: float, *, seconds: float, scale: float) -> None:
    largest = ticks(seconds, at_most=max(3, int(drawing.width / 90)))
    in_ms = seconds < 2
    for tick in largest:
        x = tick * scale
        text = f"{tick * 1000:.4g}" if in_ms else f"{tick:.4g}"
        text += NBSP + ("ms" if in_ms else "s") if tick == largest[-1] else ""
        drawing.line(x, y, x, y + 5, "axis")
        last = x + text_width(text, 12) / 2 > drawing.width
        drawing.text(
            x,
            y + 18,
            text,
            css="quiet",
            size=12,
            anchor="start" if x < 8 else "end" if last else "middle",
        )
    drawing.line(0, y, drawing.width, y, "axis")
