"""The feed's story over the run is drawn: wait, batches ready, and the work of each host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from stoker.launch.telemetry import (
    Bottleneck,
    FeedInterval,
    HostRate,
    bottleneck_of,
    mean,
    read_csv,
)
from stoker.report.svg import Anchor, Drawing, fit, text_width, ticks
from stoker.text import NBSP, count, digits, percent

_LABEL = 13.0
_PLOT = 34.0
_ROW = _LABEL + 6 + _PLOT + 12
# More points than this are not told apart, and make the page large.
_MAX_POINTS = 160
# More hosts than this are shown as one row of their sum.
_MAX_HOSTS = 12
# What is called the present: the last quarter of the run, as a step or two is not enough to judge.
_PRESENT = 0.25


@dataclass(frozen=True, slots=True)
class FeedStory:
    """The report's figures on the feed.

    Attributes:
        intervals: In the order of time, at least one.
        whole: All of them as one.
        limit: Of the whole run.
        present_limit: Of its last quarter.
    """

    intervals: tuple[FeedInterval, ...]
    whole: FeedInterval
    limit: Bottleneck
    present_limit: Bottleneck

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Rows of the hosts' table."""
        return tuple(_cells(host) for host in self.whole.hosts)


def read_feed(path: Path) -> FeedStory | None:
    """Reads the story in a feed.csv; None where it holds nothing whole."""
    try:
        intervals = read_csv(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if not intervals:
        return None
    intervals.sort(key=lambda each: each.start_seconds)
    whole = mean(intervals)
    end = intervals[-1].start_seconds + intervals[-1].seconds
    since = end - _PRESENT * (end - intervals[0].start_seconds)
    present = [each for each in intervals if each.start_seconds + each.seconds > since]
    return FeedStory(tuple(intervals), whole, bottleneck_of(whole), bottleneck_of(mean(present)))


@dataclass(frozen=True, slots=True)
class _Track:
    """One row of the picture: a value at each moment, None where it is not known.

    Attributes:
        top: Of the scale.
        marks: Moments in seconds at which something happened, with words.
    """

    name: str
    right: str
    values: tuple[float | None, ...]
    top: float
    css: str
    marks: tuple[tuple[float, str], ...] = ()


def draw_feed(story: FeedStory, *, width: float, name: str) -> Markup:
    """Draws rows on one axis of time; the hosts' rows have one scale."""
    return feed_drawing(story, width=width, name=name).markup()


def feed_drawing(story: FeedStory, *, width: float, name: str) -> Drawing:
    """Does the same as `draw_feed`, but keeps the boxes of the labels."""
    intervals = _binned(story.intervals)
    tracks = _tracks(story, intervals)
    drawing = Drawing(
        name=name,
        width=width,
        height=len(tracks) * _ROW + 26,
        title="The feed over the run",
        description=" ".join(f"{track.name}: {track.right}." for track in tracks)
        + f" Limit: {story.present_limit.words}.",
    )
    wait = drawing.hatch("wait")
    start = intervals[0].start_seconds
    seconds = intervals[-1].start_seconds + intervals[-1].seconds - start
    scale = width / seconds
    for number, track in enumerate(tracks):
        base = number * _ROW
        floor = base + _LABEL + 6 + _PLOT
        right = fit(track.right, _LABEL, 0.55 * width)
        left = width - text_width(right, _LABEL) - 12
        drawing.text(0, base + _LABEL, fit(track.name, _LABEL, left), css="head", size=_LABEL)
        drawing.text(width, base + _LABEL, right, css="quiet", size=_LABEL, anchor="end")
        drawing.rect(0, floor - _PLOT, width, _PLOT, "ground")
        for points in _shapes(track, intervals, start=start, scale=scale, floor=floor):
            if track.css == "wait":
                drawing.area(points, fill=wait)
            else:
                drawing.area(points, track.css)
        for moment, words in track.marks:
            x = (moment - start) * scale
            drawing.open_group(words)
            drawing.line(x, floor - _PLOT, x, floor, "lead wait")
            drawing.close_group()
    _axis(drawing, len(tracks) * _ROW - 6, seconds=seconds, scale=scale)
    return drawing


def _tracks(story: FeedStory, intervals: Sequence[FeedInterval]) -> list[_Track]:
    whole = story.whole
    depths = [each.queue_depth for each in intervals]
    deepest = max((depth for depth in depths if depth is not None), default=0.0)
    ready = whole.queue_depth
    tracks = [
        _Track(
            "Waiting for data",
            "not known"
            if whole.wait_share is None
            else f"{percent(whole.wait_share)}, top 100{NBSP}%",
            tuple(each.wait_share for each in intervals),
            1.0,
            "wait",
        ),
        _Track(
            "Batches ready",
            "not known"
            if ready is None
            else f"{digits(ready, 2, max_places=1)}, top {digits(deepest, 2, max_places=1)}",
            tuple(depths),
            deepest or 1.0,
            "band",
        ),
    ]
    hosts = sorted(whole.hosts, key=lambda host: (host.kind == "local", host.name))
    shown = hosts[: _MAX_HOSTS if len(hosts) <= _MAX_HOSTS else _MAX_HOSTS - 1]
    rest = {host.name for host in hosts[len(shown) :]}
    found = [(_name(host), {host.name}, host.batches_per_second) for host in shown]
    if rest:
        total = sum(host.batches_per_second for host in hosts[len(shown) :])
        found.append((count(len(rest), "more host"), rest, total))
    series = [tuple(_rate_of(each, names) for each in intervals) for _, names, _ in found]
    top = max((value for values in series for value in values), default=0.0) or 1.0
    for (title, names, rate), values in zip(found, series, strict=True):
        tracks.append(
            _Track(
                title,
                f"{digits(rate, 3, max_places=1)}/s, top {digits(top, 3, max_places=1)}/s",
                values,
                top,
                "compute",
                _moved(story.intervals, names),
            )
        )
    return tracks


def _moved(intervals: Sequence[FeedInterval], names: set[str]) -> tuple[tuple[float, str], ...]:
    return tuple(
        (
            each.start_seconds + each.seconds / 2,
            f"{host.name}: {count(host.moved, 'batch', 'batches')} made elsewhere instead",
        )
        for each in intervals
        for host in each.hosts
        if host.moved and host.name in names
    )


def _rate_of(interval: FeedInterval, names: set[str]) -> float:
    return sum(host.batches_per_second for host in interval.hosts if host.name in names)


def _binned(intervals: Sequence[FeedInterval]) -> list[FeedInterval]:
    size = math.ceil(len(intervals) / _MAX_POINTS)
    return [mean(intervals[first : first + size]) for first in range(0, len(intervals), size)]


def _shapes(
    track: _Track, intervals: Sequence[FeedInterval], *, start: float, scale: float, floor: float
) -> list[list[tuple[float, float]]]:
    """Returns the areas of a row: one for each stretch of known values."""
    shapes: list[list[tuple[float, float]]] = []
    is_open = False
    for value, interval in zip(track.values, intervals, strict=True):
        left = (interval.start_seconds - start) * scale
        right = left + interval.seconds * scale
        if value is None:
            is_open = False
            continue
        if not is_open:
            shapes.append([(left, floor)])
            is_open = True
        else:
            shapes[-1].pop()
        top = floor - min(value / track.top, 1.0) * _PLOT
        shapes[-1] += [(left, top), (right, top), (right, floor)]
    return shapes


def _axis(drawing: Drawing, y: float, *, seconds: float, scale: float) -> None:
    unit, size = ("min", 60.0) if seconds >= 300 else ("s", 1.0)
    marks = ticks(seconds / size, at_most=max(3, int(drawing.width / 90)))
    drawing.line(0, y, drawing.width, y, "axis")
    for mark in marks:
        x = mark * size * scale
        text = f"{mark:.4g}" + (f"{NBSP}{unit}" if mark == marks[-1] else "")
        drawing.line(x, y, x, y + 5, "axis")
        is_last = x + text_width(text, 12) / 2 > drawing.width
        anchor: Anchor = "start" if x < 8 else "end" if is_last else "middle"
        drawing.text(x, y + 18, text, css="quiet", size=12, anchor=anchor)


def _name(host: HostRate) -> str:
    return f"{host.name}, local workers" if host.kind == "local" else host.name


def _cells(host: HostRate) -> tuple[str, ...]:
    slow, fast = host.slowest_worker, host.fastest_worker
    busy = min(1.0, host.busy_workers / host.workers) if host.workers else None
    return (
        _name(host),
        digits(host.batches_per_second, 3, max_places=2),
        digits(host.bytes_per_second / 1e6, 3, max_places=2),
        str(host.workers),
        "not known"
        if slow is None or fast is None
        else f"{digits(slow, 2, max_places=2)} to {digits(fast, 2, max_places=2)}",
        percent(busy),
        str(host.moved),
        str(host.duplicates),
    )
