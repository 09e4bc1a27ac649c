"""The picture of the feed over the run: wait, batches ready, and the work of each host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from stoker.launch.feed_log import (
    FeedBottleneck,
    FeedInterval,
    HostRate,
    feed_limit_of,
    joined,
    read_csv,
)
from stoker.report.svg import Drawing, fit, text_width, time_axis
from stoker.text import NBSP, count, digits, percent

_LABEL = 13.0
_PLOT = 34.0
_ROW = _LABEL + 6 + _PLOT + 12
# More points cannot be told apart, and make the page large.
_MAX_POINTS = 160
# More hosts are shown as one row of their sum.
_MAX_HOSTS = 12
# The last quarter of the run counts as the present.
_PRESENT = 0.25
# In the order of `_cells`; a narrow page leaves some out.
_COLUMNS = (
    ("Batches per second", "number"),
    ("MB per second", "number"),
    ("Loader workers", "number hide-narrow"),
    ("Batches per second of one worker", "number hide-narrow"),
    ("Workers busy", "number"),
    ("Batches given to another host", "number"),
    ("Batches made twice", "number hide-narrow"),
)


@dataclass(frozen=True, slots=True)
class FeedStory:
    """The report's figures on the feed.

    Attributes:
        intervals: In the order of time, at least one.
        whole: All of them joined.
        limit: Limit of the whole run.
        present_limit: Limit of its last quarter.
        names: Shown names of hosts.
        wait_share: Share of a step that waits, from the run's record.
    """

    intervals: tuple[FeedInterval, ...]
    whole: FeedInterval
    limit: FeedBottleneck
    present_limit: FeedBottleneck
    names: Mapping[str, str] = field(default_factory=dict)
    wait_share: float | None = None

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        return _COLUMNS

    @property
    def rows(self) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
        styles = [style for _, style in _COLUMNS]
        return tuple(
            (_name(host, self.names), tuple(zip(_cells(host), styles, strict=True)))
            for host in self.whole.hosts
        )


def read_feed(
    path: Path,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    does_loading_wait: bool | None = None,
    wait_share: float | None = None,
) -> FeedStory | None:
    """Reads a feed.csv; None where it has no whole interval.

    Args:
        names: Shown names of hosts, if they differ.
        does_loading_wait: Whether a single loader worker waits for its reads; None: not known.
        wait_share: Share of a step that waits, from the run's record; None: the file's mean.
    """
    try:
        # The leader may have been killed while writing, in the middle of a character.
        intervals = read_csv(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if not intervals:
        return None
    intervals.sort(key=lambda each: each.start_seconds)
    whole = joined(intervals)
    since = whole.end_seconds - _PRESENT * whole.seconds
    present = joined([each for each in intervals if each.end_seconds > since])
    limits = [
        feed_limit_of(each, does_loading_wait=does_loading_wait, names=names)
        for each in (whole, present)
    ]
    share = whole.wait_share if wait_share is None else wait_share
    return FeedStory(tuple(intervals), whole, limits[0], limits[1], names, share)


@dataclass(frozen=True, slots=True)
class _Track:
    """A row of the picture: a value at each moment, None where it is not known.

    Attributes:
        top: Top of the scale.
        marks: Events, as seconds and text.
    """

    name: str
    right: str
    values: tuple[float | None, ...]
    top: float
    css: str
    marks: tuple[tuple[float, str], ...] = ()


def draw_feed(story: FeedStory, *, width: float, name: str) -> Drawing:
    """Draws rows on one axis of time; the hosts' rows have one scale."""
    size = math.ceil(len(story.intervals) / _MAX_POINTS)
    bins = range(0, len(story.intervals), size)
    # Joined, not sampled, so that no wait is lost between two points.
    intervals = [joined(story.intervals[first : first + size]) for first in bins]
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
    seconds = intervals[-1].end_seconds - start
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
    time_axis(drawing, len(tracks) * _ROW - 6, seconds=seconds, scale=scale)
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
            if story.wait_share is None
            else f"{percent(story.wait_share)} of a step, top 100{NBSP}%",
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
    # Local workers last: data hosts matter more here.
    hosts = sorted(whole.hosts, key=lambda host: (host.kind == "local", host.name))
    # One row less, for the sum of the others.
    shown = hosts[: _MAX_HOSTS if len(hosts) <= _MAX_HOSTS else _MAX_HOSTS - 1]
    rest = {host.name for host in hosts[len(shown) :]}
    found = [(_name(host, story.names), {host.name}, host.batches_per_second) for host in shown]
    if rest:
        total = sum(host.batches_per_second for host in hosts[len(shown) :])
        found.append((count(len(rest), "more host"), rest, total))
    series = [
        tuple(
            sum(host.batches_per_second for host in each.hosts if host.name in names)
            for each in intervals
        )
        for _, names, _ in found
    ]
    # One scale for all hosts: a slow one must look slow.
    top = max((value for values in series for value in values), default=0.0) or 1.0
    for (title, names, rate), values in zip(found, series, strict=True):
        tracks.append(
            _Track(
                title,
                f"{digits(rate, 3, max_places=1)}/s, top {digits(top, 3, max_places=1)}/s",
                values,
                top,
                "compute",
                _moved(story.intervals, names, story.names),
            )
        )
    return tracks


def _moved(
    intervals: Sequence[FeedInterval], names: set[str], titles: Mapping[str, str]
) -> tuple[tuple[float, str], ...]:
    return tuple(
        (
            each.start_seconds + each.seconds / 2,
            f"{titles.get(host.name, host.name)}: "
            f"{count(host.moved, 'batch', 'batches')} made elsewhere instead",
        )
        for each in intervals
        for host in each.hosts
        if host.moved and host.name in names
    )


def _shapes(
    track: _Track, intervals: Sequence[FeedInterval], *, start: float, scale: float, floor: float
) -> list[list[tuple[float, float]]]:
    """Returns the areas of a row: one for each stretch of known values."""
    shapes = []
    moments = zip(track.values, intervals, strict=True)
    for is_known, stretch in groupby(moments, key=lambda one: one[0] is not None):
        if not is_known:
            continue
        points: list[tuple[float, float]] = []
        for value, each in stretch:
            top = floor - min((value or 0.0) / track.top, 1.0) * _PLOT
            # Level over its interval, as a value is a mean.
            points += [((at - start) * scale, top) for at in (each.start_seconds, each.end_seconds)]
        shapes.append([(points[0][0], floor), *points, (points[-1][0], floor)])
    return shapes


def _name(host: HostRate, names: Mapping[str, str]) -> str:
    name = names.get(host.name, host.name)
    return f"{name}, own workers" if host.kind == "local" else name


def _range(slow: float, fast: float) -> str:
    low, high = digits(slow, 2, max_places=2), digits(fast, 2, max_places=2)
    return low if low == high else f"{low} to {high}"


def _cells(host: HostRate) -> tuple[str, ...]:
    slow, fast = host.slowest_worker, host.fastest_worker
    return (
        digits(host.batches_per_second, 3, max_places=2),
        digits(host.bytes_per_second / 1e6, 3, max_places=2),
        str(host.workers),
        "not known" if slow is None or fast is None else _range(slow, fast),
        percent(host.busy_share),
        str(host.moved),
        str(host.duplicates),
    )
