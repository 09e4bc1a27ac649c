"""The picture of the feed over the run: wait, batches ready, and the work of each host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from stoker.figures.feed_intervals import (
    FeedBottleneck,
    FeedInterval,
    HostRate,
    feed_limit_of,
    joined,
    read_csv,
)
from stoker.report.svg import Drawing, fit, text_width, time_axis
from stoker.units import NBSP, NOT_KNOWN, count, digits, percent

_LABEL = 13.0
_PLOT = 34.0
_ROW = _LABEL + 6 + _PLOT + 12
# More points cannot be told apart, and make the page large.
_MAX_POINTS = 160
# More hosts are shown as one row of their sum.
_MAX_HOSTS = 12
# The last quarter of the run counts as the present.
_PRESENT = 0.25


@dataclass(frozen=True, slots=True)
class FeedStory:
    """The report's figures on the feed.

    Attributes:
        intervals: In the order of time, at least one.
        present_limit: Limit of the run's last quarter.
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
    def told_limit(self) -> FeedBottleneck:
        """The limit that the text names first: of the whole run, unless it changed at its end."""
        is_same = self.limit.limit == self.present_limit.limit
        return self.limit if is_same else self.present_limit

    @property
    def rows(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """Name of each host with its cells: head of the column, text, style."""
        return [(_name(host, self.names), _cells(host)) for host in self.whole.hosts]


def read_feed(
    path: Path,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    does_loading_wait: bool | None = None,
    wait_share: float | None = None,
) -> FeedStory | None:
    """Reads a feed.csv; None where it has no whole interval.

    Args:
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
    limit_of = partial(feed_limit_of, does_loading_wait=does_loading_wait, names=names)
    share = whole.wait_share if wait_share is None else wait_share
    return FeedStory(tuple(intervals), whole, limit_of(whole), limit_of(present), names, share)


@dataclass(frozen=True, slots=True)
class _Track:
    """A row of the picture: a value at each moment, None where it is not known, below `top`."""

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
        + f" Limit: {story.told_limit.words}.",
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
    depths = tuple(each.queue_depth for each in intervals)
    deepest = max((depth for depth in depths if depth is not None), default=0.0)
    waits = tuple(each.wait_share for each in intervals)
    waiting = NOT_KNOWN
    ready = NOT_KNOWN
    if story.wait_share is not None:
        waiting = f"{percent(story.wait_share)} of a step, top 100{NBSP}%"
    if whole.queue_depth is not None:
        mean, top = (digits(depth, 2, max_places=1) for depth in (whole.queue_depth, deepest))
        ready = f"{mean}, top {top}"
    tracks = [
        _Track("Waiting for data", waiting, waits, 1.0, "wait"),
        _Track("Batches ready", ready, depths, deepest or 1.0, "band"),
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
    fastest = max((value for values in series for value in values), default=0.0) or 1.0
    for (title, names, rate), values in zip(found, series, strict=True):
        right = f"{digits(rate, 3, max_places=1)}/s, top {digits(fastest, 3, max_places=1)}/s"
        moved = tuple(
            (
                each.start_seconds + each.seconds / 2,
                f"{story.names.get(host.name, host.name)}: "
                f"{count(host.moved, 'batch', 'batches')} made elsewhere instead",
            )
            for each in story.intervals
            for host in each.hosts
            if host.moved and host.name in names
        )
        tracks.append(_Track(title, right, values, fastest, "compute", moved))
    return tracks


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


def _cells(host: HostRate) -> list[tuple[str, str, str]]:
    rate, megabytes = (
        digits(value, 3, max_places=2)
        for value in (host.batches_per_second, host.bytes_per_second / 1e6)
    )
    known = [each for each in (host.slowest_worker, host.fastest_worker) if each is not None]
    # One figure where both look the same.
    workers = dict.fromkeys(digits(each, 2, max_places=2) for each in known)
    # A narrow page leaves some out.
    return [
        ("Batches per second", rate, "number"),
        ("MB per second", megabytes, "number"),
        ("Loader workers", str(host.workers), "number hide-narrow"),
        (
            "Batches per second of one worker",
            " to ".join(workers) or NOT_KNOWN,
            "number hide-narrow",
        ),
        ("Workers busy", percent(host.busy_share), "number"),
        ("Batches given to another host", str(host.moved), "number"),
        ("Batches made twice", str(host.duplicates), "number hide-narrow"),
    ]
