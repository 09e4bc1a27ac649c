"""A panel with two axes, and labels that find a free place beside its dots and lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.report.svg import Anchor, Box, Drawing, fit, text_width

HEAD = 15.0
PLOT = 210.0
FOOT = 44.0
Place = tuple[float, float, Anchor]


@dataclass(frozen=True, slots=True)
class Plane:
    """A panel's axes: pixels of values."""

    left: float
    right: float
    top: float
    floor: float
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        """Where `value` stands from the left."""
        return self.left + value / self.most_x * (self.right - self.left)

    def y(self, value: float) -> float:
        """Where `value` stands from above."""
        return self.floor - value / self.most_y * (self.floor - self.top)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Both."""
        return self.x(x), self.y(y)


def axes(
    drawing: Drawing,
    *,
    title: str,
    left: float,
    top: float,
    panel: float,
    most: tuple[float, float],
    marks: Sequence[tuple[float, str]],
    under: str,
) -> Plane:
    """The panel's title, grid and marks at the left; the marks below are the caller's."""
    gutter = max(text_width(text, 12) for _, text in marks) + 10
    plane = Plane(
        left=left + gutter,
        right=left + panel - 8,
        top=top + HEAD + 14,
        floor=top + HEAD + 14 + PLOT,
        most_x=most[0],
        most_y=most[1],
    )
    drawing.text(left, top + HEAD - 1, title, css="head", size=14)
    if under:
        room = panel - text_width(title, 14) - 12
        drawing.text(
            left + panel, top + HEAD - 1, fit(under, 12, room), css="quiet", size=12, anchor="end"
        )
    for value, text in marks:
        y = plane.y(value)
        drawing.line(plane.left, y, left + panel, y, "axis" if value == 0 else "grid")
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
    """The label beside its dot: right, left, above or below."""
    x, y = at
    places: list[Place] = [(x + 12, y + 4, "start"), (x - 12, y + 4, "end")]
    for below in (-13.0, 22.0, -28.0, 37.0):
        places += [(x + 4, y + below, "start"), (x - 4, y + below, "end")]
    put(drawing, text, places=places, plane=plane, taken=taken, lines=lines, css=css)


def put(
    drawing: Drawing,
    text: str,
    *,
    places: Sequence[Place],
    plane: Plane,
    taken: list[Box],
    lines: Sequence[Box],
    css: str,
) -> None:
    """The text at the first place where it hides nothing, else no dot; left out where it must."""
    size = 12.0
    width = text_width(text, size)
    for hidden in ((*taken, *drawing.labels, *lines), (*taken, *drawing.labels)):
        for x, y, anchor in places:
            start = x if anchor == "start" else x - width
            box = Box(text, start, y - 0.78 * size, start + width, y + 0.22 * size)
            is_inside = box.left >= plane.left and box.right <= plane.right + 8
            is_inside = is_inside and box.top >= plane.top - 14 and box.bottom <= plane.floor
            if is_inside and not any(map(box.overlaps, hidden)):
                drawing.text(x, y, text, css=css, size=size, anchor=anchor)
                taken.append(box)
                return


def along(start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Small boxes on a line, for labels to keep off it."""
    count = max(1, int(max(abs(end[0] - start[0]), abs(end[1] - start[1])) / 6))
    parts = [index / count for index in range(count + 1)]
    (x1, y1), (x2, y2) = start, end
    return [around(x1 + part * (x2 - x1), y1 + part * (y2 - y1), 1.5) for part in parts]


def around(x: float, y: float, radius: float) -> Box:
    """The square around a dot."""
    return Box("", x - radius, y - radius, x + radius, y + radius)
