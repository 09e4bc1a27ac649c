"""The picture of the feed over the run: wait, batches ready, and the work of each host."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
from stoker.report.svg import Drawing, time_axis
from stoker.units import NOT_KNOWN, count, digits, percent

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
    intervals.sort(key=lambda interval: interval.start_seconds)
    whole = joined(intervals)
    since = whole.end_seconds - _PRESENT * whole.seconds
    present = joined([part for part in intervals if part.end_seconds > since])
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
    sentences = [f"{track.name}: {track.right}." for track in tracks]
    sentences.append(f"Limit: {story.told_limit.words}.")
    drawing = Drawing(
        name=name,
        width=width,
        height=len(tracks) * _ROW + 26,
        title="The feed over the run",
        description=" ".join(sentences),
    )
    start = intervals[0].start_seconds
    seconds = intervals[-1].end_seconds - start
    scale = width / seconds
    wait = drawing.hatch("wait")
    for number, track in enumerate(tracks):
        top = number * _ROW
        drawing.heads(track.name, track.right, base=top + _LABEL, size=_LABEL)
        floor = top + _LABEL + 6 + _PLOT
        drawing.rect(0, floor - _PLOT, width, _PLOT, "ground")
        for points in _shapes(track, intervals, start=start, scale=scale, floor=floor):
            # Waiting is striped too: colour alone must not carry it.
            if track.css == "wait":
                drawing.area(points, fill=wait)
            else:
                drawing.area(points, track.css)
        _draw_marks(drawing, track, start=start, scale=scale, floor=floor)
    time_axis(drawing, len(tracks) * _ROW - 6, seconds=seconds, scale=scale)
    return drawing


def _draw_marks(
    drawing: Drawing, track: _Track, *, start: float, scale: float, floor: float
) -> None:
    for moment, words in track.marks:
        x = (moment - start) * scale
        drawing.open_group(words)
        drawing.line(x, floor - _PLOT, x, floor, "lead wait")
        drawing.close_group()


def _tracks(story: FeedStory, intervals: Sequence[FeedInterval]) -> list[_Track]:
    depths = tuple(interval.queue_depth for interval in intervals)
    deepest = max((depth for depth in depths if depth is not None), default=0.0)
    waits = tuple(interval.wait_share for interval in intervals)
    waiting = NOT_KNOWN
    ready = NOT_KNOWN
    if story.wait_share is not None:
        waiting = f"{percent(story.wait_share)} of a step, top 100%"
    if story.whole.queue_depth is not None:
        mean = digits(story.whole.queue_depth, 2, max_places=1)
        ready = f"{mean}, top {digits(deepest, 2, max_places=1)}"
    return [
        _Track("Waiting for data", waiting, waits, 1.0, "wait"),
        _Track("Batches ready", ready, depths, deepest or 1.0, "band"),
        *_host_tracks(story, intervals),
    ]


def _host_tracks(story: FeedStory, intervals: Sequence[FeedInterval]) -> list[_Track]:
    """Returns a track for each host; of many hosts, the last one is the sum of the others."""
    # Local workers last: data hosts matter more here.
    hosts = sorted(story.whole.hosts, key=lambda host: (host.kind == "local", host.name))
    # One row less, for the sum of the others.
    num_shown = _MAX_HOSTS if len(hosts) <= _MAX_HOSTS else _MAX_HOSTS - 1
    rows = [(_name(host, story.names), [host]) for host in hosts[:num_shown]]
    if others := hosts[num_shown:]:
        rows.append((count(len(others), "more host"), others))
    series = [_rates(intervals, of=members) for _, members in rows]
    # One scale for all hosts: a slow one must look slow.
    fastest = max(map(max, series), default=0.0) or 1.0
    top = f"top {digits(fastest, 3, max_places=1)}/s"
    tracks = []
    for (title, members), values in zip(rows, series, strict=True):
        rate = sum(host.batches_per_second for host in members)
        right = f"{digits(rate, 3, max_places=1)}/s, {top}"
        moves = tuple(_moves(story, of=members))
        tracks.append(_Track(title, right, values, fastest, "compute", moves))
    return tracks


def _rates(intervals: Sequence[FeedInterval], *, of: Sequence[HostRate]) -> tuple[float, ...]:
    """Returns the batches per second that these hosts made in each interval."""
    names = {host.name for host in of}
    rates = []
    for interval in intervals:
        hosts = [host for host in interval.hosts if host.name in names]
        rates.append(sum(host.batches_per_second for host in hosts))
    return tuple(rates)


def _moves(story: FeedStory, *, of: Sequence[HostRate]) -> Iterator[tuple[float, str]]:
    """Yields when batches of these hosts were made elsewhere, and how many."""
    names = {host.name for host in of}
    for interval in story.intervals:
        # It is not known when in the interval they moved.
        middle = interval.start_seconds + interval.seconds / 2
        for host in interval.hosts:
            if host.moved and host.name in names:
                batches = count(host.moved, "batch", "batches")
                shown = story.names.get(host.name, host.name)
                yield middle, f"{shown}: {batches} made elsewhere instead"


def _shapes(
    track: _Track, intervals: Sequence[FeedInterval], *, start: float, scale: float, floor: float
) -> list[list[tuple[float, float]]]:
    """Returns the areas of a row: one for each stretch of known values."""
    shapes = []
    moments = zip(track.values, intervals, strict=True)
    for has_values, stretch in groupby(moments, key=lambda moment: moment[0] is not None):
        if not has_values:
            continue
        points: list[tuple[float, float]] = []
        for value, interval in stretch:
            top = floor - min((value or 0.0) / track.top, 1.0) * _PLOT
            # Level over its interval, as a value is a mean.
            ends = (interval.start_seconds, interval.end_seconds)
            points += [((at - start) * scale, top) for at in ends]
        shapes.append([(points[0][0], floor), *points, (points[-1][0], floor)])
    return shapes


def _name(host: HostRate, names: Mapping[str, str]) -> str:
    name = names.get(host.name, host.name)
    return f"{name}, own workers" if host.kind == "local" else name


def _cells(host: HostRate) -> list[tuple[str, str, str]]:
    rate = digits(host.batches_per_second, 3, max_places=2)
    megabytes = digits(host.bytes_per_second / 1e6, 3, max_places=2)
    paces = [pace for pace in (host.slowest_worker, host.fastest_worker) if pace is not None]
    # One figure where both look the same.
    workers = dict.fromkeys(digits(pace, 2, max_places=2) for pace in paces)
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
