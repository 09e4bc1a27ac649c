"""The report's two kinds of pictures: a strip of steps, and sparklines.

Both are SVG without text, drawn in a box of their own and stretched to the page's width: words
stand beside them in HTML, so that nothing has to be placed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from markupsafe import Markup

from stoker.feed.step_times import training_steps
from stoker.feed.timeline import MeasuredStep, read_timeline

_STRIP = (960.0, 40.0)
_SPARK = (320.0, 28.0)
# More points cannot be told apart, and make the page large.
_MAX_POINTS = 160


def read_steps(file: Path | None) -> list[MeasuredStep]:
    """Reads the single steps of a timeline, in order of time; none where it is missing."""
    if file is None:
        return []
    steps = [step for step in training_steps(read_timeline(file)) if step.steps == 1]
    return sorted(steps, key=lambda step: step.start_seconds)


def shown_seconds(step_seconds: Sequence[float]) -> float:
    """Returns the strips' common window: about 24 of the slowest steps, 40 of the fastest."""
    slow = max(step_seconds)
    fast = min(step_seconds)
    # Two of the slow ones at least, and 400 of the fast ones at most, whose marks would run into
    # each other.
    return min(24 * slow, max(40 * fast, 2 * slow), 400 * fast)


def _window(steps: Sequence[MeasuredStep], seconds: float) -> Sequence[MeasuredStep]:
    """Returns steps that fill `seconds`, in the middle of the run: its first ones warm up."""
    starts = [step.start_seconds for step in steps]
    middle = (starts[0] + steps[-1].end_seconds - seconds) / 2
    first = bisect_left(starts, middle)
    last = bisect_left(starts, middle + seconds)
    return steps[first:last] or steps


def strip(
    steps: Sequence[MeasuredStep], *, step: float, wait: float, seconds: float, label: str
) -> Markup:
    """Draws steps over `seconds`, each with its wait low and its computing high.

    Args:
        steps: Of a timeline; none: `step` and `wait` are repeated.
        step: Seconds of the run's step.
        wait: Of these, the seconds that it waits.
        seconds: Of the whole width.
        label: What it shows, for screen readers.
    """
    if steps:
        shown = _window(steps, seconds)
        marks = [(each.start_seconds, each.wait_seconds, each.seconds) for each in shown]
    else:
        marks = [(number * step, wait, step) for number in range(1 + int(seconds / step))]
    width, height = _STRIP
    scale = width / seconds
    origin = marks[0][0]
    body = []
    for start, waited, took in marks:
        x = (start - origin) * scale
        end = min(width, x + took * scale)
        middle = min(end, x + waited * scale)
        # A gap of 1 between steps lets them be counted.
        right = max(middle, end - 1) if end - x > 4 else end
        # By their height, too: colour alone must not carry it.
        for css, left, until, top in (("wait", x, middle, 0.55), ("compute", middle, right, 0.0)):
            if left < until:
                size = f'width="{until - left:.1f}" height="{height * (1 - top):g}"'
                body.append(f'<rect class="{css}" x="{left:.1f}" y="{height * top:g}" {size}/>')
    return _svg(_STRIP, "".join(body), css="strip", label=label)


def sparkline(points: Sequence[tuple[float, float]], *, top: float, css: str, label: str) -> Markup:
    """Draws values over time as an area.

    Args:
        points: Seconds of an interval, and the value in it.
        top: The value at the upper edge.
        css: Class that colours it: wait, compute or quiet.
        label: What it shows, for screen readers.
    """
    width, height = _SPARK
    # Joined, not sampled, so that no idle second is lost between two points.
    each = -(-len(points) // _MAX_POINTS)
    joined = []
    for first in range(0, len(points), each):
        group = points[first : first + each]
        seconds = sum(length for length, _ in group) or 1.0
        joined.append((seconds, sum(length * value for length, value in group) / seconds))
    ends = [0.0, *accumulate(length for length, _ in joined)]
    corners = [f"M0 {height:g}"]
    for index, (_, value) in enumerate(joined):
        y = height * (1 - min(value / (top or 1.0), 1.0))
        left, right = (width * end / ends[-1] for end in ends[index : index + 2])
        corners.append(f"L{left:.1f} {y:.1f}L{right:.1f} {y:.1f}")
    corners.append(f"L{width:g} {height:g}Z")
    return _svg(_SPARK, f'<path class="{css}" d="{"".join(corners)}"/>', css="spark", label=label)


def _svg(size: tuple[float, float], body: str, *, css: str, label: str) -> Markup:
    # The classes are ours and the numbers are formatted above: only the label may hold anything.
    return Markup(
        f'<svg class="{css}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {size[0]:g} {size[1]:g}" preserveAspectRatio="none">{body}</svg>'
    )
