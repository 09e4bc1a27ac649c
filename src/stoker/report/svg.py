"""Drawings as SVG text: shapes by class, axes, and labels that find a free place."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal
from unicodedata import category

from markupsafe import Markup

from stoker.units import NBSP

Anchor = Literal["start", "middle", "end"]

# Upper estimates of advance widths over font size (DejaVu Sans, the widest of the usual fonts).
_NARROW = "iljtfrI.,:;!'|()[] \N{NO-BREAK SPACE}"
_WIDE = "mwMWGOQ%@\N{EM DASH}"
_ADVANCES = dict.fromkeys(_NARROW, 0.42) | dict.fromkeys(_WIDE, 0.98)
HEAD = 15.0
PLOT = 210.0
FOOT = 44.0


def text_width(text: str, size: float) -> float:
    """Returns an upper estimate of the width of `text` in the units of `size`."""
    return size * sum(_ADVANCES.get(letter, 0.65) for letter in text)


def fit(text: str, size: float, width: float) -> str:
    """Returns `text`, cut with an ellipsis where it would be wider than `width`."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text, size) + size > width:
        text = text[:-1]
    return text.rstrip() + "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class Box:
    """The area of a label; two of them may not overlap."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


class Drawing:
    """An SVG element that is drawn piece by piece; `y` points down."""

    def __init__(
        self, *, name: str, width: float, height: float, title: str, description: str
    ) -> None:
        self.name = name
        self.width = width
        self.height = height
        self.labels: list[Box] = []
        self._title = title
        self._description = description
        self._body: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, css: str = "", *, fill: str = ""
    ) -> None:
        """Draws a rectangle, coloured by its class or by `fill`, a pattern of `hatch`."""
        size = f'width="{_n(max(0.0, width))}" height="{_n(height)}"'
        self._body.append(f'<rect {_paint(css, fill)} x="{_n(x)}" y="{_n(y)}" {size}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self._body.append(f'<line class="{css}" {ends}/>')

    def circle(self, x: float, y: float, radius: float, css: str) -> None:
        self._body.append(f'<circle class="{css}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>')

    def area(self, points: Sequence[tuple[float, float]], css: str = "", *, fill: str = "") -> None:
        """Draws the area inside `points`, coloured as a rectangle."""
        steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._body.append(f'<path {_paint(css, fill)} d="M{steps}Z"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        css: str = "",
        size: float = 13,
        anchor: Anchor = "start",
    ) -> None:
        """Draws a label whose base line is at `y`."""
        self.labels.append(_text_box(x, y, text, size=size, anchor=anchor))
        name = place = ""
        if css:
            name = f' class="{css}"'
        if anchor != "start":
            place = f' text-anchor="{anchor}"'
        self._body.append(
            f'<text{name} x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{place}>'
            f"{_escape(text)}</text>"
        )

    def heads(self, left: str, right: str, *, base: float, size: float) -> None:
        """Writes the name of a row at the left, and its figures at the right."""
        figures = fit(right, size, 0.55 * self.width)
        room = self.width - text_width(figures, size) - 12
        self.text(0, base, fit(left, size, room), css="head", size=size)
        self.text(self.width, base, figures, css="quiet", size=size, anchor="end")

    def open_group(self, title: str) -> None:
        """Begins a group, whose title is shown on hover."""
        self._body.append(f"<g><title>{_escape(title)}</title>")

    def close_group(self) -> None:
        self._body.append("</g>")

    def hatch(self, css: str) -> str:
        """Returns the `fill` of stripes on a class's colour, for readers who do not see it."""
        # Ids are unique in the page, which holds each picture twice: they carry the drawing's name.
        name = f"{self.name}-{css}"
        self._body.append(
            f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse"'
            f' patternTransform="rotate(45)"><rect class="{css}" width="6" height="6"/>'
            f'<rect class="stripe" width="1.6" height="6"/></pattern></defs>'
        )
        return f"url(#{name})"

    def markup(self) -> Markup:
        """Returns the element, named and described for screen readers."""
        title = f"{self.name}-title"
        description = f"{self.name}-desc"
        return Markup(
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" class="{self.name}"'
            f' aria-labelledby="{title} {description}"'
            f' viewBox="0 0 {_n(self.width)} {_n(self.height)}">'
            f'<title id="{title}">{_escape(self._title)}</title>'
            f'<desc id="{description}">{_escape(self._description)}</desc>'
            f"{''.join(self._body)}</svg>"
        )


def _text_box(x: float, y: float, text: str, *, size: float, anchor: Anchor) -> Box:
    width = text_width(text, size)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    # Letters reach about 0.78 of their size above the base line, and 0.22 below.
    return Box(text, left, y - 0.78 * size, left + width, y + 0.22 * size)


def _paint(css: str, fill: str) -> str:
    if css:
        return f'class="{css}"'
    return f'fill="{fill}"'


def ticks(largest: float, *, at_most: int) -> list[float]:
    """Returns round numbers from 0 up to `largest`, `at_most` of them at most."""
    if largest <= 0:
        return [0.0]
    # The power of ten below it, read from its digits: a logarithm can be one off at such a power.
    power = 10.0 ** int(f"{largest:e}".partition("e")[2])
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0):
        # With a tolerance for a last mark at the largest value.
        number = int(largest / (step * power) + 1e-9)
        if number < at_most:
            return [index * step * power for index in range(number + 1)]
    return [0.0]


def time_axis(drawing: Drawing, y: float, *, seconds: float, scale: float) -> None:
    """Draws an axis from 0 to `seconds` over the whole width, in ms, s or minutes."""
    unit = "min"
    size = 60.0
    if seconds < 2:
        unit = "ms"
        size = 1e-3
    elif seconds < 300:
        unit = "s"
        size = 1.0
    marks = ticks(seconds / size, at_most=max(3, int(drawing.width / 90)))
    drawing.line(0, y, drawing.width, y, "axis")
    for mark in marks:
        x = mark * size * scale
        text = f"{mark:.4g}"
        if mark == marks[-1]:
            text += f"{NBSP}{unit}"
        drawing.line(x, y, x, y + 5, "axis")
        anchor: Anchor = "middle"
        # Half of a text in the middle would leave the drawing.
        if x < 8:
            anchor = "start"
        elif x + text_width(text, 12) / 2 > drawing.width:
            anchor = "end"
        drawing.text(x, y + 18, text, css="quiet", size=12, anchor=anchor)


def _escape(text: str) -> str:
    """Returns text for XML, which allows no control characters, not even escaped."""
    return escape("".join(" " if category(letter)[0] == "C" else letter for letter in text))


def _n(value: float) -> str:
    # Short, as a page holds thousands of numbers.
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


@dataclass(frozen=True, slots=True)
class Plane:
    """A chart's axes, to turn values into pixels."""

    left: float
    right: float
    top: float
    floor: float
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return self.left + value / self.most_x * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.floor - value / self.most_y * (self.floor - self.top)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x(x), self.y(y)


def axes(
    drawing: Drawing,
    *,
    title: str,
    most: tuple[float, float],
    marks: Sequence[tuple[float, str]],
    under: str,
) -> Plane:
    """Draws title, grid and left marks; the marks below are the caller's."""
    # As wide as the marks need, which differs from unit to unit.
    gutter = max(text_width(text, 12) for _, text in marks) + 10
    plane = Plane(gutter, drawing.width - 8, HEAD + 14, HEAD + 14 + PLOT, *most)
    drawing.text(0, HEAD - 1, title, css="head", size=14)
    under = fit(under, 12, drawing.width - text_width(title, 14) - 12)
    drawing.text(drawing.width, HEAD - 1, under, css="quiet", size=12, anchor="end")
    for value, text in marks:
        y = plane.y(value)
        drawing.line(plane.left, y, drawing.width, y, "axis" if value == 0 else "grid")
        drawing.text(plane.left - 6, y + 4, text, css="quiet", size=12, anchor="end")
    return plane


def label(
    drawing: Drawing,
    text: str,
    *,
    at: tuple[float, float],
    plane: Plane,
    taken: list[Box],
    lines: Sequence[Box],
    css: str,
) -> None:
    """Draws the label next to its dot, across `lines` if there is no other room, or not at all."""
    x, y = at
    # Right and left of the dot, then above and below it, the nearer ones first.
    places: list[tuple[float, float, Anchor]] = [(x + 12, y + 4, "start"), (x - 12, y + 4, "end")]
    for below in (-13.0, 22.0, -28.0, 37.0):
        places += [(x + 4, y + below, "start"), (x - 4, y + below, "end")]
    size = 12.0
    boxes = [*taken, *drawing.labels]
    # All places are tried without touching a line before any is taken that a line crosses.
    for obstacles in ([*boxes, *lines], boxes):
        for x, y, anchor in places:
            box = _text_box(x, y, text, size=size, anchor=anchor)
            # A little room beyond the plane, at the right and above, has no marks in it.
            is_beside = box.left < plane.left or box.right > plane.right + 8
            is_above_or_below = box.top < plane.top - 14 or box.bottom > plane.floor
            if is_beside or is_above_or_below:
                continue
            if not any(map(box.overlaps, obstacles)):
                drawing.text(x, y, text, css=css, size=size, anchor=anchor)
                taken.append(box)
                return


def along(start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Returns small boxes on a line, for labels to keep off it."""
    count = max(1, int(max(abs(end[0] - start[0]), abs(end[1] - start[1])) / 6))
    parts = [index / count for index in range(count + 1)]
    (x1, y1) = start
    (x2, y2) = end
    return [around(x1 + part * (x2 - x1), y1 + part * (y2 - y1), 1.5) for part in parts]


def around(x: float, y: float, radius: float) -> Box:
    return Box("", x - radius, y - radius, x + radius, y + radius)
