"""feed.csv and its line in the log: how fast a run's feed is, and what limits it, per interval.

Ranks send counters to the leader once a second (`feed.trainer.observer`). The leader computes a
`FeedInterval` from two sets of counters, and writes it as rows of `feed.csv`, which the report
reads, and as one line of its log, which `stoker watch` reads. Step times are in separate `progress`
lines (`step_progress`), which single-host runs write too.
"""

import csv
import dataclasses
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from stoker.feed.wire.protocol import FeedWork, HostWork, Progress
from stoker.logs import EventName, Log, LogEvent
from stoker.records import Limit
from stoker.units import known_mean, wait_share

Figure = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
# Columns after start_seconds and seconds of the interval, kind (rank, host, or local: a host's
# local workers) and name (host, or number of the rank); a cell that does not apply is empty. Each
# with how intervals are joined. rate: weighted with their lengths; known: the same where known.
_FIGURES: dict[str, Literal["rate", "known", "last", "most", "sum"]] = {
    "batches_per_second": "rate",  # Used by the rank, or made by the host and used.
    "bytes_per_second": "rate",  # Received from the host.
    "wait_share": "known",  # Share of the rank's time waiting for data, 0..1.
    "queue_depth": "known",  # Batches ready when the rank took one, mean.
    "window": "last",  # Batches made ahead of the rank.
    "shards": "last",  # Shards of the streams that the rank reads; 0: none.
    "shard_workers": "last",  # The rank's workers that could make a shard each.
    "workers": "most",  # Workers of the host that have made a batch.
    "busy_workers": "rate",  # Workers at work, mean.
    "busy_cpus": "rate",  # CPUs in use, mean.
    "slowest_worker": "known",  # Batches per second of the slowest worker.
    "fastest_worker": "known",  # Batches per second of the fastest worker.
    "in_flight": "last",  # Batches requested.
    "credits": "last",  # Batches that may be requested; 0: the host is gone.
    "moved": "sum",  # Batches taken from the host (lost, dropped or late), made elsewhere.
    "duplicates": "sum",  # Batches that came after another host's.
    # Share of the rank's time waiting for the first two batches of epochs, 0..1.
    "start_wait_share": "known",
    "shared_samples": "sum",  # Samples for batches that another host puts together.
}
COLUMNS = ("start_seconds", "seconds", "kind", "name", *_FIGURES)
_HEAD = ",".join(COLUMNS) + "\n"
_NO_WORK = FeedWork(seconds=0.0)
ProgressByRank = Mapping[int, Progress]
NO_PROGRESS = Progress(rank=0, steps=0, samples=0, wait_seconds=0.0, compute_seconds=0.0)
INTERVAL_SECONDS = 2.0
# Intervals grow with the run: some 2 000 a day, each up to a minute.
_SHARE_OF_RUN = 1 / 480
_MAX_INTERVAL_SECONDS = 60.0
# Less waiting is the feed's overhead (1 to 3% in benchmarks).
MIN_WAIT_SHARE = 0.05
# Workers that are busier than this are the bottleneck.
MIN_BUSY_SHARE = 0.8
# Of the time at work; below, a worker waits for storage, or shares its CPU.
MIN_CPU_SHARE = 0.7
# If the trainer waits with this many batches ready, it waits for another one.
MIN_READY = 2.0
# Of the credits; above, the way to the trainer is the bottleneck.
MIN_CREDIT_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRate:
    """Rates of one trainer process over an interval; the columns of `_FIGURES`."""

    name: str
    batches_per_second: Figure
    wait_share: Figure | None = None
    queue_depth: Figure | None = None
    window: int
    shards: int = 0
    shard_workers: int = 0
    start_wait_share: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRate:
    """Rates of one host's data workers over an interval; the columns of `_FIGURES`."""

    kind: Literal["host", "local"]
    name: str
    batches_per_second: Figure
    bytes_per_second: Figure
    workers: int
    busy_workers: Figure
    busy_cpus: Figure
    slowest_worker: Figure | None = None
    fastest_worker: Figure | None = None
    in_flight: int
    credits: int
    moved: int
    duplicates: int
    shared_samples: int = 0

    @property
    def busy_share(self) -> float | None:
        """Share of the workers' time at work, at most 1; None: none has made a batch."""
        if not self.workers:
            return None
        return min(1.0, self.busy_workers / self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedInterval:
    """Rates of all ranks and hosts over the same seconds."""

    start_seconds: float
    seconds: float
    ranks: tuple[RankRate, ...]
    hosts: tuple[HostRate, ...]

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds

    @property
    def wait_share(self) -> float | None:
        return max((r.wait_share for r in self.ranks if r.wait_share is not None), default=None)

    @property
    def start_wait_share(self) -> float:
        """Of the rank that waits longest, the share of time for epochs' first batches."""
        waits = ((rank.wait_share or 0.0, rank.start_wait_share or 0.0) for rank in self.ranks)
        return max(waits, default=(0.0, 0.0))[1]

    @property
    def queue_depth(self) -> float | None:
        return known_mean(rank.queue_depth for rank in self.ranks)


def csv_text(interval: FeedInterval) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rates: tuple[RankRate | HostRate, ...] = (*interval.ranks, *interval.hosts)
    for rate in rates:
        cells = (interval.start_seconds, interval.seconds, getattr(rate, "kind", "rank"), rate.name)
        cells += tuple(getattr(rate, column, None) for column in _FIGURES)
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()


def read_csv(text: str) -> list[FeedInterval]:
    by_time: dict[tuple[float, float], tuple[list[RankRate], list[HostRate]]] = {}
    for row in csv.DictReader(text.splitlines()):
        cells = {column: cell for column, cell in row.items() if cell}
        try:
            start = float(cells["start_seconds"])
            seconds = float(cells["seconds"])
            ranks, hosts = by_time.setdefault((start, seconds), ([], []))
            if cells["kind"] == "rank":
                ranks.append(msgspec.convert(cells, RankRate, strict=False))
            else:
                hosts.append(msgspec.convert(cells, HostRate, strict=False))
        except (KeyError, ValueError):
            continue
    return [
        FeedInterval(start_seconds=start, seconds=seconds, ranks=tuple(ranks), hosts=tuple(hosts))
        for (start, seconds), (ranks, hosts) in by_time.items()
        if 0 <= start < math.inf and 0 < seconds < math.inf and (ranks or hosts)
    ]


def interval_in(event: LogEvent) -> FeedInterval | None:
    """Returns the interval in a `feed` line of the leader's log; None in another line."""
    if event.event != EventName.FEED:
        return None
    # In a log line, rows end with spaces.
    rows = "\n".join(event.values.get("rows", "").split())
    return next(iter(read_csv(_HEAD + rows)), None)


_RateT = TypeVar("_RateT", RankRate, HostRate)


def joined(intervals: Sequence[FeedInterval]) -> FeedInterval:
    """Merges intervals, in order of time, into one; without any it raises ValueError."""
    if not intervals:
        raise ValueError("no interval")
    first = intervals[0]
    last = intervals[-1]
    whole = sum(interval.seconds for interval in intervals)
    return FeedInterval(
        start_seconds=first.start_seconds,
        seconds=last.end_seconds - first.start_seconds,
        ranks=_joined([(part.seconds, part.ranks) for part in intervals], whole),
        hosts=_joined([(part.seconds, part.hosts) for part in intervals], whole),
    )


def _joined(
    intervals: Iterable[tuple[float, Sequence[_RateT]]], whole: float
) -> tuple[_RateT, ...]:
    """Returns the rates by name over `whole` seconds, from those of intervals of some seconds."""
    # A host may be absent from some intervals: its rate then counts as 0 there.
    by_name: dict[str, list[tuple[float, _RateT]]] = {}
    for seconds, rates in intervals:
        for rate in rates:
            by_name.setdefault(rate.name, []).append((seconds, rate))
    return tuple(_joined_rate(parts, whole) for parts in by_name.values())


def _joined_rate(parts: Sequence[tuple[float, _RateT]], whole: float) -> _RateT:
    last = parts[-1][1]
    figures = dataclasses.asdict(last)
    for name in figures.keys() & _FIGURES.keys():
        # None where nothing was measured, such as the wait of a rank without a step.
        values = [(seconds, getattr(rate, name)) for seconds, rate in parts]
        measured = [(seconds, value) for seconds, value in values if value is not None]
        total = sum(seconds * value for seconds, value in measured)
        match _FIGURES[name]:
            case "rate":
                figures[name] = total / whole
            case "known" if measured:
                figures[name] = total / sum(seconds for seconds, _ in measured)
            case "most":
                figures[name] = max(value for _, value in measured)
            case "sum":
                figures[name] = sum(value for _, value in measured)
    return msgspec.convert(figures, type(last))


class _Share(NamedTuple):
    """A host's counters for one rank, before and after `seconds` of that rank's clock."""

    rank: int
    seconds: float
    was: HostWork
    now: HostWork


def interval_between(
    before: ProgressByRank,
    after: ProgressByRank,
    *,
    start_seconds: float,
    seconds: float,
) -> FeedInterval | None:
    """Returns the rates between two sets of reports; None if nothing is new.

    A restarted rank counts from its start.
    """
    ranks = []
    hosts = defaultdict[str, list[_Share]](list)
    for rank, now in sorted(after.items()):
        then = before.get(rank, NO_PROGRESS)
        work = now.feed or _NO_WORK
        earlier_work = then.feed or _NO_WORK
        # A rank that restarted counts from its start: its clock begins again.
        if earlier_work.seconds > work.seconds:
            then = NO_PROGRESS
            earlier_work = _NO_WORK
        # By the rank's clock, as its reports may be a second old.
        span = work.seconds - earlier_work.seconds
        if span <= 0:
            continue
        ranks.append(_rank_rate(rank, now, work, then=then, earlier_work=earlier_work))
        earlier_hosts = {host.host: host for host in earlier_work.hosts}
        for host in work.hosts:
            earlier = earlier_hosts.get(host.host, HostWork(host=host.host))
            hosts[host.host].append(_Share(rank, span, earlier, host))
    if not ranks:
        return None
    return FeedInterval(
        start_seconds=start_seconds,
        seconds=seconds,
        ranks=tuple(ranks),
        hosts=tuple(_host_rate(name, shares) for name, shares in sorted(hosts.items())),
    )


def _rank_rate(
    rank: int, now: Progress, work: FeedWork, *, then: Progress, earlier_work: FeedWork
) -> RankRate:
    waited = max(now.wait_seconds - then.wait_seconds, 0.0)
    stepped = waited + now.compute_seconds - then.compute_seconds
    steady = max(now.steady_wait_seconds - then.steady_wait_seconds, 0.0)
    taken = max(work.taken - earlier_work.taken, 0)
    ready = max(work.ready_at_takes - earlier_work.ready_at_takes, 0)
    wait = start_wait = queue_depth = None
    # Each take notes how many batches were ready then.
    if taken:
        queue_depth = ready / taken
    if stepped > 0:
        wait = wait_share(step_seconds=stepped, wait_seconds=waited)
    if stepped > 0 and now.steady_steps:
        # What a wait has beyond the steady steps' is for epochs' first batches.
        first_waits = max(waited - steady, 0.0)
        start_wait = wait_share(step_seconds=stepped, wait_seconds=first_waits)
    return RankRate(
        name=str(rank),
        batches_per_second=taken / (work.seconds - earlier_work.seconds),
        wait_share=wait,
        queue_depth=queue_depth,
        window=work.window,
        shards=work.shards,
        shard_workers=work.shard_workers,
        start_wait_share=start_wait,
    )


def _worker_paces(shares: Sequence[_Share]) -> Collection[float]:
    """Returns the batches per second of each worker of a host."""
    paces = defaultdict[tuple[int, int], float](float)
    for rank, seconds, was, now in shares:
        batches_before = {worker.worker: worker.batches for worker in was.workers}
        for worker in now.workers:
            # Local workers of two ranks have the same numbers.
            batches = max(worker.batches - batches_before.get(worker.worker, 0), 0)
            paces[rank if now.is_local else -1, worker.worker] += batches / seconds
    return paces.values()


def _host_rate(name: str, shares: Sequence[_Share]) -> HostRate:
    is_local = shares[0].now.is_local
    workers = [share.now.num_workers for share in shares]
    paces = _worker_paces(shares)

    def rate(counter: Callable[[HostWork], float]) -> float:
        return sum(max(counter(one.now) - counter(one.was), 0) / one.seconds for one in shares)

    def rise(counter: Callable[[HostWork], int]) -> int:
        return sum(max(counter(one.now) - counter(one.was), 0) for one in shares)

    return HostRate(
        kind="local" if is_local else "host",
        name=name,
        batches_per_second=rate(lambda work: work.batches),
        bytes_per_second=rate(lambda work: work.frame_bytes),
        # A data host's workers serve all ranks, which report the same ones.
        workers=sum(workers) if is_local else max(workers),
        busy_workers=rate(lambda work: work.busy_seconds),
        busy_cpus=rate(lambda work: work.cpu_seconds),
        slowest_worker=min(paces, default=None),
        fastest_worker=max(paces, default=None),
        in_flight=sum(share.now.in_flight for share in shares),
        credits=sum(share.now.credits for share in shares),
        moved=rise(lambda work: work.moved),
        duplicates=rise(lambda work: work.duplicates),
        shared_samples=rise(lambda work: work.shared_samples),
    )


def interval_of(run_seconds: float) -> float:
    """Returns the seconds between two lines of the log, after so much of the run."""
    due = min(run_seconds * _SHARE_OF_RUN, _MAX_INTERVAL_SECONDS)
    return max(INTERVAL_SECONDS, due)


@dataclass(eq=False)
class FeedLog:
    """Writes the feed's intervals to feed.csv, created with the first one, and to the log."""

    path: Path
    log: Log
    _: KW_ONLY
    progress: Callable[[], ProgressByRank]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self._looked_at = self.clock()
        self._before: ProgressByRank = {}
        self._is_broken = False

    def tick(self) -> None:
        now = self.clock()
        if now - self._looked_at >= interval_of(now - self._began):
            self._look(now)

    def close(self) -> None:
        """Writes the rest; may be called twice."""
        self._look(self.clock())

    def _look(self, now: float) -> None:
        after = self.progress()
        interval = interval_between(
            self._before,
            after,
            start_seconds=self._looked_at - self._began,
            seconds=now - self._looked_at,
        )
        if interval is None or interval.seconds <= 0:
            return
        self._before = after
        self._looked_at = now
        rows = csv_text(interval)
        self.log.event(EventName.FEED, rows=rows)
        if self._is_broken:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(rows if file.tell() else _HEAD + rows)
        except OSError as err:
            # A full disk must not end the training.
            self._is_broken = True
            text = f"cannot write {self.path}: {err.strerror}; the training continues"
            self.log.event(EventName.FEED_WRITE_FAILED, text=text)


@dataclass(frozen=True, slots=True)
class FeedBottleneck:
    """What limits the run, what was measured, and what to do.

    Of the feed only: start is the first batch of each epoch; shards are fewer than workers; order
    is one late batch that delays others; hand-out are credits that are not used.
    """

    limit: Limit | Literal["workers", "unknown", "start", "shards", "order", "hand-out"]
    words: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What tells the limit of an interval in which ranks wait; shares are 0 to 1.

    Attributes:
        wait: Share of the time of the rank that waits longest.
        start: The part of it for epochs' first batches.
        ready: Batches that were ready when one was taken; 0: not known.
        hosts: Those that batches may be requested from.
        spare_workers: Workers that could make a shard each, beyond the shards; may be below 0.
    """

    wait: float
    start: float
    ready: float
    hosts: tuple[HostRate, ...]
    shards: int
    spare_workers: int

    @property
    def busy_workers(self) -> float:
        return sum(host.workers * (host.busy_share or 0.0) for host in self.hosts)

    @property
    def busy_share(self) -> float:
        workers = sum(host.workers for host in self.hosts)
        if not workers:
            return 0.0
        return self.busy_workers / workers

    @property
    def busy_cpus(self) -> float:
        # Scaled to the time at work as busy_share caps it.
        return sum(
            host.busy_cpus * min(1.0, host.workers / host.busy_workers)
            for host in self.hosts
            if host.busy_workers
        )

    @property
    def requested(self) -> int:
        return sum(host.in_flight for host in self.hosts)

    @property
    def credits(self) -> int:
        return sum(host.credits for host in self.hosts)

    @property
    def has_few_shards(self) -> bool:
        # With fewer workers than shards, workers are the bottleneck.
        may_bind = self.spare_workers >= 0 or self.busy_share < MIN_BUSY_SHARE
        return self.shards > 0 and self.ready < MIN_READY and may_bind


def feed_limit_of(
    interval: FeedInterval,
    *,
    does_loading_wait: bool | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> FeedBottleneck:
    """Returns the limit of an interval (of several: see `joined`), without the wait.

    Args:
        interval: The rates.
        does_loading_wait: Whether a single worker waits for its reads, by a profile; None: not
            known, workers without a CPU may also be waiting for one.
        names: Shown names of hosts.
    """
    wait = interval.wait_share
    if wait is None:
        return FeedBottleneck(
            "unknown", "not known: no step ended in this time", "look again after a few steps"
        )
    # In the order of certainty: where nothing waits, nothing else limits.
    if wait < MIN_WAIT_SHARE:
        return _accelerator_limit(interval.queue_depth)
    shards = sum(rank.shards for rank in interval.ranks)
    seen = _Seen(
        wait=wait,
        start=interval.start_wait_share,
        ready=interval.queue_depth or 0.0,
        hosts=tuple(host for host in interval.hosts if host.credits),
        shards=shards,
        spare_workers=sum(rank.shard_workers for rank in interval.ranks) - shards,
    )
    # Only the first batches are late: more workers would wait as long.
    if wait - seen.start < MIN_WAIT_SHARE:
        return _start_limit(seen)
    if not seen.hosts:
        return FeedBottleneck(
            "workers",
            "the lack of data workers: none is connected",
            "see the data hosts' logs, and stoker doctor --peer HOST",
        )
    if seen.has_few_shards:
        return _shards_limit(seen)
    # Before what is requested, as busy workers also use up credits and delay batches.
    if seen.busy_share >= MIN_BUSY_SHARE:
        return _workers_limit(seen, does_loading_wait=does_loading_wait)
    return _delivery_limit(seen, names)


def _accelerator_limit(ready: float | None) -> FeedBottleneck:
    words = "the trainer, as data is there in time"
    if ready is not None:
        words += f": {ready:.1f} batches are ready"
    return FeedBottleneck("accelerator", words, "a faster trainer, or fewer data hosts")


def _start_limit(seen: _Seen) -> FeedBottleneck:
    return FeedBottleneck(
        "start",
        f"the start of epochs: the trainer waits {seen.start:.0%} of the time for their first "
        f"batches, and {seen.wait - seen.start:.0%} for all others, as it is begun with the epoch",
        "smaller batches (gradients of several accumulated) or longer epochs; "
        "persistent_workers=True, where an epoch starts new workers",
    )


def _shards_limit(seen: _Seen) -> FeedBottleneck:
    what = f"{seen.shards} shards"
    if seen.shards == 1:
        what = "only shard"
    busy = f"{seen.busy_share:.0%}"
    words = f"the stream's {what}: one worker makes a shard, at work {busy} of the time"
    more = "raise num_workers in the script, or feed.shards, if the stream divides itself"
    if seen.spare_workers > 0:
        words += f"; {seen.spare_workers} more could work"
    also = "persistent_workers=True if epochs are short, as each restarts its workers"
    if seen.busy_share >= MIN_BUSY_SHARE:
        also = "or a cheaper transform"
    return FeedBottleneck("shards", words, f"{more}; {also}")


def _workers_limit(seen: _Seen, *, does_loading_wait: bool | None) -> FeedBottleneck:
    words = f"the data workers, which are at work {seen.busy_share:.0%} of the time"
    # Busy without a CPU means waiting for reads, or for a core that others use.
    if seen.busy_cpus >= MIN_CPU_SHARE * seen.busy_workers:
        return FeedBottleneck("cpu", words, "more data hosts, or a cheaper transform")
    words += f" and have a CPU for {seen.busy_cpus / seen.busy_workers:.0%} of that"
    if does_loading_wait is None:
        return FeedBottleneck(
            "workers",
            words,
            "more data hosts, where workers share their cores with other processes; faster "
            "storage or more workers, where they wait for what they read",
        )
    if does_loading_wait:
        return FeedBottleneck(
            "latency",
            f"{words}, as they wait for what they read",
            "faster storage, or more workers, which wait at the same time",
        )
    return FeedBottleneck(
        "cpu",
        f"{words}, as they share their cores with other processes",
        "more data hosts, on separate cores",
    )


def _delivery_limit(seen: _Seen, names: Mapping[str, str]) -> FeedBottleneck:
    """Returns the limit of workers that are idle for a part of the time."""
    has_ready = seen.ready >= MIN_READY
    is_requested = seen.requested >= MIN_CREDIT_SHARE * seen.credits
    # Workers that begin together are ready together: nothing is late. Of epochs of fewer batches
    # than may be requested, nothing is left to be handed out.
    if seen.start >= seen.wait / 2 and (has_ready or not is_requested):
        return _start_limit(seen)
    if has_ready:
        # In order: one late batch holds all that are ready behind it.
        slowest = min(seen.hosts, key=lambda host: host.batches_per_second / max(host.workers, 1))
        return FeedBottleneck(
            "order",
            f"one late batch: {seen.ready:.1f} others are ready; slowest is "
            f"{names.get(slowest.name, slowest.name)}",
            "even out the cost of batches, or raise feed.credits and feed.max_bytes",
        )
    requested = f"{seen.requested} of {seen.credits} batches asked for"
    # Workers are idle though all that may be requested is: the time passes on the way.
    if is_requested:
        return FeedBottleneck(
            "network",
            f"the way to the trainer: workers are at work {seen.busy_share:.0%} of the time, "
            f"{requested}",
            "smaller batches on the wire (uint8), a faster network, or feed.credits",
        )
    return FeedBottleneck(
        "hand-out",
        f"the hand-out: {requested}",
        "raise feed.max_bytes; look at what the sampler costs",
    )
