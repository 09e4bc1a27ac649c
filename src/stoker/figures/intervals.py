"""One row per interval of a run: steps, waits, hosts, GPUs and memory over the same seconds.

The leader writes each row to `metrics.jsonl`, which the report and the record read, and as one
event to its log, which `stoker watch`, the line of progress and SageMaker's metrics read.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.feed.engine.run_messages import FeedWork, HostWork, MemoryPeak, Progress
from stoker.figures.progress import (
    NO_PROGRESS,
    Figure,
    ProgressByRank,
    RunSteps,
    StepProgress,
)
from stoker.host.gpus import GpuState
from stoker.logs import EventName, Log, LogEvent
from stoker.units import known_mean

FILE = "metrics.jsonl"
INTERVAL_SECONDS = 2.0
# Intervals grow with the run: some 2,000 a day, each up to a minute.
_SHARE_OF_RUN = 1 / 480
_MAX_INTERVAL_SECONDS = 60.0
# A row with no new step is written only after so many steps' time: slow steps do not look idle.
_STEPS_OF_PATIENCE = 2
# More of a file is not read.
_MAX_READ_BYTES = 64 << 20
_NO_WORK = FeedWork(seconds=0.0)


class RankRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rates of one trainer process.

    Attributes:
        name: Number of the rank.
        batches_per_second: Batches that it took.
        wait_share: Share of its time waiting for data, 0 to 1. None: no step ended.
        queue_depth: Batches that were ready when it took one, mean.
        shards: Shards of the streams that it reads; 0: none.
        start_wait_share: Share of its time waiting for the first batches of epochs, 0 to 1.
    """

    name: str
    batches_per_second: Figure
    wait_share: Figure | None = None
    queue_depth: Figure | None = None
    shards: int = 0
    start_wait_share: Figure | None = None


class HostRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rates of one host's data workers.

    Attributes:
        name: Name of the host.
        batches_per_second: Batches that it made and that were used.
        bytes_per_second: Received from it.
        workers: Workers that have made a batch.
        busy_workers: Workers at work, mean.
        busy_cpus: CPUs in use, mean.
        credits: Batches that may be requested; 0: the host is gone.
    """

    name: str
    batches_per_second: Figure
    bytes_per_second: Figure
    workers: int
    busy_workers: Figure
    busy_cpus: Figure
    credits: int

    @property
    def busy_share(self) -> float | None:
        """Share of the workers' time at work, at most 1; None: none has made a batch."""
        if not self.workers:
            return None
        return min(1.0, self.busy_workers / self.workers)


class GpuRate(GpuState, frozen=True, kw_only=True, omit_defaults=True):
    """Means of one GPU over the interval; `host` is the name of its host."""

    host: str


class Interval(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row: what the run did in `seconds` from `start_seconds` of its command on.

    Attributes:
        steps: Progress of the training. None: no step ended.
        spent_usd: Dollars of the run so far. None: not known.
        gpu_utilization: Mean busy share of the GPUs that are in use. None: not known.
        ranks: Rates of the ranks, where there is a data group.
        hosts: Rates of hosts with data workers, likewise.
        gpus: Load of all dnn hosts' GPUs.
        memory: Memory of each host, by its name.
    """

    start_seconds: Figure
    seconds: Figure
    steps: StepProgress | None = None
    spent_usd: Figure | None = None
    gpu_utilization: Figure | None = None
    ranks: tuple[RankRate, ...] = ()
    hosts: tuple[HostRate, ...] = ()
    gpus: tuple[GpuRate, ...] = ()
    memory: dict[str, MemoryPeak] = {}

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds

    @property
    def wait_share(self) -> float | None:
        """Wait share of the rank that waits longest."""
        return max((r.wait_share for r in self.ranks if r.wait_share is not None), default=None)

    @property
    def start_wait_share(self) -> float:
        """Of the rank that waits longest, the share of time for epochs' first batches."""
        waits = ((rank.wait_share or 0.0, rank.start_wait_share or 0.0) for rank in self.ranks)
        return max(waits, default=(0.0, 0.0))[1]

    @property
    def queue_depth(self) -> float | None:
        return known_mean(rank.queue_depth for rank in self.ranks)


def interval_in(event: LogEvent) -> Interval | None:
    """Returns the row in a line of the leader's log; None in another or a broken line."""
    if event.event != EventName.INTERVAL:
        return None
    return _interval_of(event.values.get("row", ""))


def read_intervals(path: Path | None) -> list[Interval]:
    """Reads a metrics.jsonl; rows that are cut off or malformed are left out.

    A file that is missing has none.
    """
    if path is None or not path.is_file():
        return []
    with path.open("rb") as file:
        lines = file.read(_MAX_READ_BYTES).splitlines()
    return [interval for line in lines if (interval := _interval_of(line))]


def _interval_of(text: str | bytes) -> Interval | None:
    try:
        interval = msgspec.json.decode(text, type=Interval)
    except ValueError:
        return None
    return interval if interval.seconds > 0 else None


_MEANS = (
    *("batches_per_second", "bytes_per_second", "busy_workers", "busy_cpus"),
    *("wait_share", "start_wait_share", "queue_depth"),
)
_RateT = TypeVar("_RateT", RankRate, HostRate)


def joined(intervals: Sequence[Interval]) -> Interval:
    """Merges the feed's rates of at least one interval, in order of time."""
    last = intervals[-1]
    ranks = [(part.seconds, rank) for part in intervals for rank in part.ranks]
    hosts = [(part.seconds, host) for part in intervals for host in part.hosts]
    seconds = last.end_seconds - intervals[0].start_seconds
    return msgspec.structs.replace(
        last,
        start_seconds=intervals[0].start_seconds,
        seconds=seconds,
        ranks=_joined(ranks),
        hosts=_joined(hosts),
    )


def _joined(rates: Sequence[tuple[float, _RateT]]) -> tuple[_RateT, ...]:
    """Returns the rates by name: means over intervals of some seconds, and the last counts.

    A host counts only where it is there, a wait only where steps ended.
    """
    merged = []
    for last in {rate.name: rate for _, rate in rates}.values():
        means: dict[str, float] = {}
        for name in _MEANS:
            parts = [(s, getattr(rate, name, None)) for s, rate in rates if rate.name == last.name]
            if (mean := mean_over_time(parts)) is not None:
                means[name] = mean
        merged.append(msgspec.structs.replace(last, **means))
    return tuple(merged)


def mean_over_time(parts: Iterable[tuple[float, float | None]]) -> float | None:
    """Returns the mean of values, each of so many seconds; None: none is known."""
    known = [(seconds, value) for seconds, value in parts if value is not None]
    whole = sum(seconds for seconds, _ in known)
    return sum(seconds * value for seconds, value in known) / whole if whole else None


def rates_between(
    before: ProgressByRank, after: ProgressByRank
) -> tuple[tuple[RankRate, ...], tuple[HostRate, ...]]:
    """Returns the rates of ranks and hosts between two sets of reports."""
    ranks = []
    # Of each host, for each rank: its seconds, the counters before and now.
    hosts = defaultdict[str, list[tuple[float, HostWork, HostWork]]](list)
    for rank, now in sorted(after.items()):
        then = before.get(rank, NO_PROGRESS)
        work = now.feed or _NO_WORK
        earlier = then.feed or _NO_WORK
        # By the rank's clock, as its reports may be a second old.
        seconds = work.seconds - earlier.seconds
        if seconds <= 0:
            continue
        ranks.append(_rank_rate(now, then, seconds=seconds))
        known = {host.host: host for host in earlier.hosts}
        for host in work.hosts:
            was = known.get(host.host, HostWork(host=host.host))
            hosts[host.host].append((seconds, was, host))
    return tuple(ranks), tuple(_host_rate(name, hosts[name]) for name in sorted(hosts))


def _grown(now: object, then: object, counter: str) -> float:
    return max(0.0, float(getattr(now, counter)) - float(getattr(then, counter)))


def _rank_rate(now: Progress, then: Progress, *, seconds: float) -> RankRate:
    work = now.feed or _NO_WORK
    earlier = then.feed or _NO_WORK
    waited = _grown(now, then, "wait_seconds")
    stepped = waited + _grown(now, then, "compute_seconds")
    taken = _grown(work, earlier, "taken")
    wait = start_wait = None
    if stepped:
        wait = waited / stepped
        # What a wait has beyond the steady steps' is for epochs' first batches.
        if now.steady_steps:
            start_wait = max(0.0, waited - _grown(now, then, "steady_wait_seconds")) / stepped
    return RankRate(
        name=str(now.rank),
        batches_per_second=taken / seconds,
        wait_share=wait,
        # Each take notes how many batches were ready then.
        queue_depth=_grown(work, earlier, "ready_at_takes") / taken if taken else None,
        shards=work.shards,
        start_wait_share=start_wait,
    )


def _host_rate(name: str, reports: Sequence[tuple[float, HostWork, HostWork]]) -> HostRate:
    latest = [now for _, _, now in reports]
    workers = [now.num_workers for now in latest]

    def rate(counter: str) -> float:
        return sum(_grown(now, was, counter) / seconds for seconds, was, now in reports)

    return HostRate(
        name=name,
        batches_per_second=rate("batches"),
        bytes_per_second=rate("frame_bytes"),
        # A data host's workers serve all ranks, which report the same ones.
        workers=sum(workers) if latest[0].is_local else max(workers),
        busy_workers=rate("busy_seconds"),
        busy_cpus=rate("cpu_seconds"),
        credits=sum(now.credits for now in latest),
    )


@dataclass(eq=False, kw_only=True)
class IntervalLog:
    """Writes the run's rows to a file, created with the first one, and to the log.

    Args:
        steps: Of the leader's own ranks.
        progress: What all ranks have reported.
        gpu_means: Of each dnn host's GPUs since the last call, by host.
        memory: Of each host now, by its name.
        spent_usd: Dollars so far.
    """

    path: Path
    log: Log
    steps: RunSteps
    progress: Callable[[], ProgressByRank] = dict
    gpu_means: Callable[[], Mapping[str, Sequence[GpuState]]] = dict
    memory: Callable[[], dict[str, MemoryPeak]] = dict
    spent_usd: Callable[[], float | None] = lambda: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # An earlier attempt's rows are not this one's.
        self.path.unlink(missing_ok=True)
        self._began = self._looked_at = self.clock()
        self._before: ProgressByRank = {}
        self._step_seconds = 0.0

    def tick(self) -> None:
        now = self.clock()
        due = min((now - self._began) * _SHARE_OF_RUN, _MAX_INTERVAL_SECONDS)
        if now - self._looked_at >= max(INTERVAL_SECONDS, due):
            self._look(now)

    def close(self) -> None:
        """Writes the rest; may be called twice."""
        self._look(self.clock(), is_last=True)
        self.steps.close()

    def _look(self, now: float, *, is_last: bool = False) -> None:
        seconds = now - self._looked_at
        reports = self.progress()
        steps = self.steps.look(reports, is_last=is_last)
        if seconds <= 0:
            return
        if steps is not None:
            self._step_seconds = steps.step_seconds
        elif not is_last and seconds < _STEPS_OF_PATIENCE * self._step_seconds:
            return
        ranks, hosts = rates_between(self._before, reports)
        gpus = tuple(self._gpu_rates())
        if not (steps or ranks or gpus):
            return
        start = self._looked_at - self._began
        self._before = reports
        self._looked_at = now
        shares = [gpu.utilization for gpu in gpus]
        self._write(
            Interval(
                start_seconds=start,
                seconds=seconds,
                steps=steps,
                spent_usd=self.spent_usd(),
                gpu_utilization=known_mean([share for share in shares if share] or shares),
                ranks=ranks,
                hosts=hosts,
                gpus=gpus,
                memory=self.memory(),
            )
        )

    def _gpu_rates(self) -> Iterable[GpuRate]:
        for host, states in self.gpu_means().items():
            for state in states:
                yield GpuRate(host=host, **msgspec.structs.asdict(state))

    def _write(self, interval: Interval) -> None:
        row = msgspec.json.encode(interval).decode()
        self.log.event(EventName.INTERVAL, row=row)
        # A full disk must not end the training; the log has the row.
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(row + "\n")
