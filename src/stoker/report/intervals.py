"""What was promised against what came: predicted and measured step times on one axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from stoker.report.quantities import TimeUnit
from stoker.report.svg import Drawing, text_width, ticks

_ROW = 40.0
_LABEL = 13.0


@dataclass(frozen=True, slots=True)
class Interval:
    """One row: a value with its band, in seconds; low and high are equal where no band is known."""

    name: str
    kind: Literal["predicted", "measured"]
    value: float
    low: float
    high: float


def draw_intervals(rows: Sequence[Interval], *, unit: TimeUnit, width: float, name: str) -> Markup:
    """The rows below each other; the band of a prediction runs on to the row that it promised."""
    return intervals_drawing(rows, unit=unit, width=width, name=name).markup()


def intervals_drawing(
    rows: Sequence[Interval], *, unit: TimeUnit, width: float, name: str
) -> Drawing:
    """As `draw_intervals`, with the boxes of its labels."""
    narrow = width < 640
    texts = [unit.show(row.value) for row in rows]
    left = 4.0 if narrow else max(text_width(row.name, _LABEL) for row in rows) + 18
    right = max(text_width(text, _LABEL) for text in texts) + 18
    largest = max(max(row.high, row.value) for row in rows) or 1.0
    row_height = _ROW + 14 if narrow else _ROW
    floor = len(rows) * row_height + 4
    drawing = Drawing(
        name=name,
        width=width,
        height=floor + 26,
        title="Step time, predicted against measured",
        description=" ".join(f"{row.name}: {_words(row, unit)}." for row in rows),
    )

    def x_of(seconds: float) -> float:
        return left + 6 + seconds / largest * (width - left - right - 12)

    tops = [index * row_height + (26 if narrow else 0) for index in range(len(rows))]
    _axis(drawing, floor, tops, largest=largest, x_of=[x_of(0), x_of(largest)], unit=unit)
    for index, row in enumerate(rows):
        y = index * row_height + row_height - _ROW / 2
        if row.kind == "predicted":
            reach = _ROW / 2 if index + 1 == len(rows) else row_height + 12
            drawing.rect(
                x_of(row.low), y - 12, max(x_of(row.high) - x_of(row.low), 1), 12 + reach, "band"
            )
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        y = index * row_height + row_height - _ROW / 2
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
    """A row of a table as a small bar: the predicted step with its band, or the measured one.

    It says no more than the figures beside it, so it is hidden from readers of text.
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


def _words(row: Interval, unit: TimeUnit) -> str:
    text = f"{row.kind} {unit.show(row.value)}"
    return f"{text}, {unit.span(row.low, row.high)}" if row.high > row.low else text


def _axis(
    drawing: Drawing,
    floor: float,
    tops: Sequence[float],
    *,
    largest: float,
    x_of: Sequence[float],
    unit: TimeUnit,
) -> None:
    """Marks of the axis; grid lines leave out the names that stand above their rows."""
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
