"""The report's two kinds of pictures: a strip of steps, and sparklines.

Both are SVG without text, drawn in a box of their own and stretched to the page's width: words
stand beside them in HTML, so that nothing has to be placed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markupsafe import Markup

from stoker.feed.step_times import training_steps
from stoker.feed.timeline import MeasuredStep, read_timeline

_STRIP = (960.0, 40.0)
_SPARK = (320.0, 28.0)
# More points cannot be told apart, and make the page large.
_MAX_POINTS = 160


def read_steps(file: Path) -> list[MeasuredStep]:
    """Reads the single steps of a timeline, in order of time; none where it is missing."""
    steps = [step for step in training_steps(read_timeline(file)) if step.steps == 1]
    return sorted(steps, key=lambda step: step.start_seconds)


def shown_seconds(step_seconds: Sequence[float]) -> float:
    """Returns the strips' common window: about 24 of the slowest steps."""
    # Marks of more than 400 fast ones would run into each other.
    return min(24 * max(step_seconds), 400 * min(step_seconds))


def strip(steps: Sequence[MeasuredStep], *, seconds: float, label: str) -> Markup:
    """Draws `seconds` of steps, each with its wait low and its computing high.

    Args:
        steps: Of a timeline; those in the middle of the run are drawn, as its first ones warm up.
        seconds: Of the whole width.
        label: What it shows, for screen readers.
    """
    width, height = _STRIP
    starts = [step.start_seconds for step in steps]
    middle = bisect_left(starts, (starts[0] + steps[-1].end_seconds - seconds) / 2)
    scale = width / seconds
    body = []
    for step in steps[middle:]:
        left = (step.start_seconds - starts[middle]) * scale
        if left >= width:
            break
        until = min(width, left + step.wait_seconds * scale)
        # A gap of 1 between steps lets them be counted.
        end = max(until, min(width, left + step.seconds * scale) - 1)
        # By their height, too: colour alone must not carry it.
        body.append(_bar("wait", left, until, top=0.55 * height))
        body.append(_bar("compute", until, end, top=0.0))
    return _svg(_STRIP, "".join(body), css="strip", label=label)


def _bar(css: str, left: float, right: float, *, top: float) -> str:
    size = f'width="{right - left:.1f}" height="{_STRIP[1] - top:g}"'
    return f'<rect class="{css}" x="{left:.1f}" y="{top:g}" {size}/>'


def sparkline(points: Sequence[tuple[float, float]], *, top: float, css: str, label: str) -> Markup:
    """Draws values over time as an area.

    Args:
        points: Seconds of an interval, and the value in it.
        top: The value at the upper edge.
        css: Class that colours it: wait or compute.
        label: What it shows, for screen readers.
    """
    width, height = _SPARK
    whole = sum(seconds for seconds, _ in points)
    corners = [f"M0 {height:g}"]
    # Means, not samples, so that no idle second is lost between two points.
    length = area = passed = 0.0
    for seconds, value in points:
        length += seconds
        area += seconds * value
        if length * _MAX_POINTS < whole and passed + length < whole:
            continue
        y = height * (1 - min(area / length / (top or 1.0), 1.0))
        left, right = (width * end / whole for end in (passed, passed + length))
        corners.append(f"L{left:.1f} {y:.1f}L{right:.1f} {y:.1f}")
        passed += length
        length = area = 0.0
    corners.append(f"L{width:g} {height:g}Z")
    return _svg(_SPARK, f'<path class="{css}" d="{"".join(corners)}"/>', css="spark", label=label)


def _svg(size: tuple[float, float], body: str, *, css: str, label: str) -> Markup:
    # The classes are ours and the numbers are formatted above: only the label may hold anything.
    return Markup(
        f'<svg class="{css}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {size[0]:g} {size[1]:g}" preserveAspectRatio="none">{body}</svg>'
    )
