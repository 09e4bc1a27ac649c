"""The feed is watched while a run goes on: rates, the bottleneck, rows of feed.csv, log lines.

Ranks count, and report their counters (`Progress`) to the leader once a second. Prometheus shows
the counters of the last report; what lies between two looks at them is a `FeedInterval`. The leader
writes it as rows to `feed.csv` next to the timeline (for the report), and the same rows in one line
of its log (for `stoker watch`, and whoever holds only that). Both are read back here.

Columns; a cell that does not apply is empty:

    start_seconds       of the interval, after the leader began to look
    seconds             its length
    kind                rank | host | local: a trainer process, a data host, local workers of a host
    name                number of the rank, or name of the host
    batches_per_second  taken by the rank; made by the host and used
    bytes_per_second    that came from the host
    wait_share          of the rank's time, waiting for data, 0..1
    queue_depth         batches that lay ready when the rank took one, mean
    window              how far ahead of the rank batches are made, at the end of the interval
    workers             of the host that have made a batch so far
    busy_workers        at work at a time, mean
    busy_cpus           CPUs that they used, mean
    slowest_worker      batches a second of the host's slowest worker
    fastest_worker      and of its fastest
    in_flight           batches asked for, at the end of the interval
    credits             how many could be; 0: the host is gone
    moved               batches taken away from the host (lost, dropped or late) and made elsewhere
    duplicates          batches that came after another host's

Rank 0's timeline is the source, so that any loader that writes one is followed, with or without a
coordinator.
"""

import csv
import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from stoker.feed.wire.protocol import FeedWork, HostWork, Progress
from stoker.launch.passive_profile import MeasuredStep, step_of
from stoker.logs import Log, LogEvent
from stoker.platforms.logs import FileTail

Kind = Literal["rank", "host", "local"]

# Of the log line.
EVENT = "feed"
_Figure = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRate:
    """One trainer process over an interval; see the module's list of columns."""

    name: str
    batches_per_second: _Figure
    wait_share: _Figure | None = None
    queue_depth: _Figure | None = None
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRate:
    """The data workers of one host over an interval; see the module's list of columns."""

    kind: Kind
    name: str
    batches_per_second: _Figure
    bytes_per_second: _Figure
    workers: int
    busy_workers: _Figure
    busy_cpus: _Figure
    slowest_worker: _Figure | None = None
    fastest_worker: _Figure | None = None
    in_flight: int
    credits: int
    moved: int
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedInterval:
    """All ranks and hosts over the same seconds."""

    start_seconds: float
    seconds: float
    ranks: tuple[RankRate, ...]
    hosts: tuple[HostRate, ...]

    @property
    def wait_share(self) -> float | None:
        """Returns the share of the rank that waits longest; None where none finished a step."""
        return max((r.wait_share for r in self.ranks if r.wait_share is not None), default=None)

    @property
    def queue_depth(self) -> float | None:
        """Returns the batches that lay ready for a rank, mean over the ranks."""
        depths = [rank.queue_depth for rank in self.ranks if rank.queue_depth is not None]
        return sum(depths) / len(depths) if depths else None


_ROW = (
    "batches_per_second",
    "bytes_per_second",
    "wait_share",
    "queue_depth",
    "window",
    "workers",
    "busy_workers",
    "busy_cpus",
    "slowest_worker",
    "fastest_worker",
    "in_flight",
    "credits",
    "moved",
    "duplicates",
)
COLUMNS = ("start_seconds", "seconds", "kind", "name", *_ROW)

_HEAD = ",".join(COLUMNS) + "\n"


def csv_text(interval: FeedInterval) -> str:
    """Returns the interval as rows of feed.csv, without the head."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rates: tuple[RankRate | HostRate, ...] = (*interval.ranks, *interval.hosts)
    for rate in rates:
        cells = (interval.start_seconds, interval.seconds, getattr(rate, "kind", "rank"), rate.name)
        cells += tuple(getattr(rate, column, None) for column in _ROW)
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()


def read_csv(text: str) -> list[FeedInterval]:
    """Returns the intervals in a feed.csv; rows that are not whole are left out."""
    found: dict[tuple[float, float], tuple[list[RankRate], list[HostRate]]] = {}
    for row in csv.DictReader(text.splitlines()):
        cells = {column: cell for column, cell in row.items() if cell}
        try:
            start, seconds = float(cells["start_seconds"]), float(cells["seconds"])
            ranks, hosts = found.setdefault((start, seconds), ([], []))
            if cells["kind"] == "rank":
                ranks.append(msgspec.convert(cells, RankRate, strict=False))
            else:
                hosts.append(msgspec.convert(cells, HostRate, strict=False))
        except (KeyError, ValueError):
            continue
    return [
        FeedInterval(start_seconds=start, seconds=seconds, ranks=tuple(ranks), hosts=tuple(hosts))
        for (start, seconds), (ranks, hosts) in found.items()
        if 0 <= start < math.inf and 0 < seconds < math.inf and (ranks or hosts)
    ]


def of_event(event: LogEvent) -> FeedInterval | None:
    """Returns the interval in a log event; None if it holds none."""
    if event.event != EVENT:
        return None
    # A log line has blanks where the rows end.
    found = read_csv(_HEAD + "\n".join(event.values.get("rows", "").split()))
    return found[0] if found else None


def mean(intervals: Sequence[FeedInterval]) -> FeedInterval:
    """Joins intervals into one, each weighted with its length; what is counted now is the last's.

    Raises:
        ValueError: If there is none.
    """
    if not intervals:
        raise ValueError("no interval")
    whole = sum(each.seconds for each in intervals)
    last = intervals[-1]
    ranks: dict[str, list[tuple[float, RankRate]]] = {}
    hosts: dict[str, list[tuple[float, HostRate]]] = {}
    for each in intervals:
        for rank in each.ranks:
            ranks.setdefault(rank.name, []).append((each.seconds, rank))
        for host in each.hosts:
            hosts.setdefault(host.name, []).append((each.seconds, host))
    return FeedInterval(
        start_seconds=intervals[0].start_seconds,
        seconds=last.start_seconds + last.seconds - intervals[0].start_seconds,
        ranks=tuple(
            RankRate(
                name=name,
                batches_per_second=_total(seen, "batches_per_second") / whole,
                wait_share=_known_mean(seen, "wait_share"),
                queue_depth=_known_mean(seen, "queue_depth"),
                window=seen[-1][1].window,
            )
            for name, seen in ranks.items()
        ),
        hosts=tuple(
            dataclasses.replace(
                seen[-1][1],
                batches_per_second=_total(seen, "batches_per_second") / whole,
                bytes_per_second=_total(seen, "bytes_per_second") / whole,
                busy_workers=_total(seen, "busy_workers") / whole,
                busy_cpus=_total(seen, "busy_cpus") / whole,
                slowest_worker=_known_mean(seen, "slowest_worker"),
                fastest_worker=_known_mean(seen, "fastest_worker"),
                workers=max(host.workers for _, host in seen),
                moved=sum(host.moved for _, host in seen),
                duplicates=sum(host.duplicates for _, host in seen),
            )
            for name, seen in hosts.items()
        ),
    )


def _total(seen: Sequence[tuple[float, RankRate | HostRate]], column: str) -> float:
    return sum(seconds * float(getattr(rate, column)) for seconds, rate in seen)


def _known_mean(seen: Sequence[tuple[float, RankRate | HostRate]], column: str) -> float | None:
    known = [(seconds, getattr(rate, column)) for seconds, rate in seen]
    known = [(seconds, float(value)) for seconds, value in known if value is not None]
    whole = sum(seconds for seconds, _ in known)
    return sum(seconds * value for seconds, value in known) / whole if whole else None


_NOTHING = FeedWork(seconds=0.0)


def interval_between(
    before: Mapping[int, Progress],
    after: Mapping[int, Progress],
    *,
    start_seconds: float,
    seconds: float,
) -> FeedInterval | None:
    """Returns the rates between two looks at the ranks' reports; None if no rank told anything new.

    A rank's rates are over its own clock: its reports reach the leader up to a second apart from
    the leader's looks. A rank that was started again counts from its start.
    """
    ranks = []
    hosts: dict[str, _Host] = {}
    for rank, now in sorted(after.items()):
        then = before.get(rank)
        work = now.feed
        if work is None:
            continue
        was = then.feed if then and then.feed and then.feed.seconds <= work.seconds else None
        span = work.seconds - (was or _NOTHING).seconds
        if span <= 0:
            continue
        ranks.append(_rank_rate(now, then if was else None, work, was or _NOTHING, span))
        known = {each.host: each for each in was.hosts} if was else {}
        for each in work.hosts:
            gathered = hosts.setdefault(each.host, _Host(each.is_local))
            gathered.add(rank, each, known.get(each.host, HostWork(host=each.host)), span)
    if not ranks:
        return None
    return FeedInterval(
        start_seconds=start_seconds,
        seconds=seconds,
        ranks=tuple(ranks),
        hosts=tuple(host.rate(name) for name, host in sorted(hosts.items())),
    )


def _rank_rate(
    now: Progress, then: Progress | None, work: FeedWork, was: FeedWork, span: float
) -> RankRate:
    waited = now.wait_seconds - (then.wait_seconds if then else 0.0)
    computed = now.compute_seconds - (then.compute_seconds if then else 0.0)
    taken = work.taken - was.taken
    return RankRate(
        name=str(now.rank),
        batches_per_second=max(taken, 0) / span,
        wait_share=max(waited, 0.0) / (waited + computed) if waited + computed > 0 else None,
        queue_depth=max(work.ready_at_takes - was.ready_at_takes, 0) / taken if taken > 0 else None,
        window=work.window,
    )


@dataclass(slots=True)
class _Host:
    """One host, gathered over the ranks."""

    is_local: bool
    batches: float = 0.0
    frame_bytes: float = 0.0
    busy: float = 0.0
    cpus: float = 0.0
    in_flight: int = 0
    credits: int = 0
    moved: int = 0
    duplicates: int = 0
    workers: int = 0
    # Local workers of two ranks are different processes under the same numbers.
    rates: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, rank: int, now: HostWork, was: HostWork, span: float) -> None:
        """Adds what the host did for one rank in `span` seconds of that rank's clock."""
        self.batches += max(now.batches - was.batches, 0) / span
        self.frame_bytes += max(now.frame_bytes - was.frame_bytes, 0) / span
        self.busy += max(now.busy_seconds - was.busy_seconds, 0.0) / span
        self.cpus += max(now.cpu_seconds - was.cpu_seconds, 0.0) / span
        self.moved += max(now.moved - was.moved, 0)
        self.duplicates += max(now.duplicates - was.duplicates, 0)
        self.in_flight += now.in_flight
        self.credits += now.credits
        self.workers = (
            self.workers + now.num_workers if self.is_local else max(self.workers, now.num_workers)
        )
        known = {each.worker: each.batches for each in was.workers}
        for each in now.workers:
            key = (rank if self.is_local else -1, each.worker)
            rate = max(each.batches - known.get(each.worker, 0), 0) / span
            self.rates[key] = self.rates.get(key, 0.0) + rate

    def rate(self, name: str) -> HostRate:
        """Returns the rates of the host over the interval."""
        return HostRate(
            kind="local" if self.is_local else "host",
            name=name,
            batches_per_second=self.batches,
            bytes_per_second=self.frame_bytes,
            workers=self.workers,
            busy_workers=self.busy,
            busy_cpus=self.cpus,
            slowest_worker=min(self.rates.values(), default=None),
            fastest_worker=max(self.rates.values(), default=None),
            in_flight=self.in_flight,
            credits=self.credits,
            moved=self.moved,
            duplicates=self.duplicates,
        )


# Ranks report once a second.
INTERVAL_SECONDS = 2.0
# Intervals grow with the run, 2 s up to a quarter of an hour, so that a day leaves some 2 000 of
# them; the log is also for people who watch now, and gets a line at least every minute.
_SHARE_OF_RUN = 1 / 480
_MAX_INTERVAL_SECONDS = 60.0


class FeedLog:
    """Looks at the ranks' reports now and then, and writes down what went on in between.

    Args:
        path: The CSV file; made with the first interval.
        log: Of the leader.
        progress: Last report of each rank.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        log: Log,
        *,
        progress: Callable[[], Mapping[int, Progress]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._log = log
        self._progress = progress
        self._clock = clock
        self._began = self._looked_at = clock()
        self._before: Mapping[int, Progress] = {}
        self._is_broken = False

    def tick(self) -> None:
        """Looks, if the last look is long enough ago."""
        now = self._clock()
        due = min((now - self._began) * _SHARE_OF_RUN, _MAX_INTERVAL_SECONDS)
        if now - self._looked_at >= max(INTERVAL_SECONDS, due):
            self._look(now)

    def close(self) -> None:
        """Writes what is left; may be called twice."""
        self._look(self._clock())

    def _look(self, now: float) -> None:
        after = self._progress()
        interval = interval_between(
            self._before,
            after,
            start_seconds=self._looked_at - self._began,
            seconds=now - self._looked_at,
        )
        if interval is None or interval.seconds <= 0:
            return
        self._before, self._looked_at = after, now
        rows = csv_text(interval)
        self._log.event(EVENT, rows=rows)
        self._write(rows)

    def _write(self, rows: str) -> None:
        if self._is_broken:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                if file.tell() == 0:
                    file.write(_HEAD)
                file.write(rows)
        except OSError as err:
            # A full disk ends the picture, not the training.
            self._is_broken = True
            self._log.event("feed_not_written", file=str(self._path), reason=err.strerror)


Limit = Literal["unknown", "trainer", "workers", "order", "connection", "hand-out"]

# Less waiting than this is the feed's own overhead (1 to 3 % over the bound, benchmarks).
MIN_WAIT_SHARE = 0.05
# Workers that are at work for longer than this are what all wait for.
MIN_BUSY_SHARE = 0.8
# Of the time at work; below, a worker waits for storage, or shares its CPU with another.
MIN_CPU_SHARE = 0.7
# So many batches lie ready, and yet the trainer waits: for one that is not among them.
MIN_READY = 2.0
MIN_CREDIT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Tells what limits the run.

    Attributes:
        limit: trainer: data is there in time; workers: too few or too slow data workers; order: one
            late batch holds up others that are ready; connection: workers idle while all that may
            be asked for is asked for; hand-out: less is asked for than could be.
        words: What was seen.
        advice: What to do about it.
    """

    limit: Limit
    words: str
    advice: str


def bottleneck_of(interval: FeedInterval) -> Bottleneck:
    """Names the limit of an interval (of several: see `mean`)."""
    wait = interval.wait_share
    if wait is None:
        return Bottleneck(
            "unknown", "not known: no step ended in this time", "look again after a few steps"
        )
    if wait < MIN_WAIT_SHARE:
        ready = interval.queue_depth
        queue = "" if ready is None else f", {ready:.1f} batches lie ready"
        return Bottleneck(
            "trainer",
            f"the trainer: data is there in time ({wait:.0%} of a step is wait{queue})",
            "a faster trainer, or fewer data hosts",
        )
    hosts = [host for host in interval.hosts if host.credits]
    if not hosts:
        return Bottleneck(
            "workers",
            f"the lack of data workers: none is there ({wait:.0%} of a step is wait)",
            "see the data hosts' logs, and stoker doctor --peer HOST",
        )
    return _of_the_feed(hosts, wait=wait, ready=interval.queue_depth or 0.0)


def _of_the_feed(hosts: list[HostRate], *, wait: float, ready: float) -> Bottleneck:
    workers = sum(host.workers for host in hosts)
    busy = sum(host.busy_workers * _counted(host) for host in hosts)
    cpus = sum(host.busy_cpus * _counted(host) for host in hosts)
    asked = sum(host.in_flight for host in hosts)
    credits = sum(host.credits for host in hosts)
    waits = f"{wait:.0%} of a step is wait"
    share = busy / workers if workers else 0.0
    if share >= MIN_BUSY_SHARE:
        seen = f"the data workers: {share:.0%} of their time at work, {waits}"
        if cpus >= MIN_CPU_SHARE * busy:
            return Bottleneck("workers", seen, "more data hosts, or a cheaper transform")
        return Bottleneck(
            "workers",
            f"{seen}, their CPUs at {cpus / busy:.0%} of that",
            "faster storage, or more workers where they wait for it; where workers share cores, "
            "more data hosts",
        )
    if ready >= MIN_READY:
        slowest = min(hosts, key=_pace)
        return Bottleneck(
            "order",
            f"one late batch: {ready:.1f} others lie ready, {waits}; slowest is {slowest.name}",
            "even out the cost of batches, or raise feed.credits and feed.max_bytes",
        )
    if credits and asked >= MIN_CREDIT_SHARE * credits:
        return Bottleneck(
            "connection",
            f"the way to the trainer: workers are at work for {share:.0%} of the time, "
            f"{asked} of {credits} batches asked for, {waits}",
            "smaller batches on the wire (uint8), a faster network, or feed.credits",
        )
    return Bottleneck(
        "hand-out",
        f"the hand-out: {asked} of {credits} batches asked for, {waits}",
        "raise feed.max_bytes; look at what the sampler costs",
    )


def _counted(host: HostRate) -> float:
    """Returns the factor, at most 1, that brings busy workers down to all workers.

    A batch counts as work when it has come: a short interval may show more than all workers.
    """
    return min(1.0, host.workers / host.busy_workers) if host.busy_workers else 1.0


def _pace(host: HostRate) -> float:
    """Returns the batches a second of each of the host's workers."""
    return host.batches_per_second / max(host.workers, 1)


REPORT_SECONDS = 2.0


class ProgressLog:
    """Logs `progress steps=... step_seconds=... wait_seconds=...` of the main loader.

    Args:
        timeline: CSV that rank 0 writes; need not be there yet.
        log: Of this host.
        clock: Monotonic seconds.
    """

    def __init__(
        self, timeline: Path, log: Log, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tail = FileTail(timeline)
        self._log = log
        self._clock = clock
        self._columns: list[str] = []
        self._counts: Counter[int] = Counter()
        self._new: list[MeasuredStep] = []
        self._reported_at = float("-inf")

    def tick(self) -> None:
        """Reads what is new, and logs a line if there are steps and the last line is old enough."""
        for line in self._tail.read():
            self._take(line)
        if self._new and self._clock() - self._reported_at >= REPORT_SECONDS:
            self._report()

    def close(self) -> None:
        """Logs what is left; may be called twice."""
        for line in self._tail.read(is_last=True):
            self._take(line)
        if self._new:
            self._report()
        self._tail.close()

    def _take(self, line: str) -> None:
        cells = next(csv.reader([line]), [])
        if not self._columns:
            self._columns = cells
            return
        step = step_of(dict(zip(self._columns, cells, strict=False)))
        if step is not None:
            self._counts[step.loader] += 1
            self._new.append(step)

    def _report(self) -> None:
        loader, steps = self._counts.most_common(1)[0]
        new = [step for step in self._new if step.loader == loader]
        self._new = []
        if not new:
            return
        self._reported_at = self._clock()
        self._log.event(
            "progress",
            steps=steps,
            step_seconds=sum(step.seconds for step in new) / len(new),
            wait_seconds=sum(step.wait_seconds for step in new) / len(new),
        )
