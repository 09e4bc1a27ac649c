"""Cold against warm reads: what a batch reads, and how fast the storage gives it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch.utils.data import DataLoader

from stoker.feed.process_io import bytes_read
from stoker.profile.clocks import queued_seconds
from stoker.profile.page_cache import OpenedFiles, drop_cached
from stoker.profile.raw import Quartiles, Reads, quartiles
from stoker.profile.worker_task import Source, run_in_workers

# A pass is over so many batches of a worker at most: they are read three times.
_MAX_BATCHES = 8
_MAX_WORKERS = 16
# Less than a page and a batch has nothing to do with storage.
_MIN_BYTES = 4096
# Of a batch's time: a shorter wait for storage is no measurement of it.
_MIN_WAIT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRead:
    """One batch of one worker; `wait_seconds`: neither on a CPU nor ready to run."""

    wall_seconds: float
    wait_seconds: float
    asked: int
    fetched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The same batches of one worker, cold and then warm; `first` found out which files."""

    first: tuple[BatchRead, ...] = ()
    cold: tuple[BatchRead, ...] = ()
    warm: tuple[BatchRead, ...] = ()


class ReadPasses:
    """The task of a worker: reads its batches, drops their files, reads them cold, then warm."""

    def __call__(self, source: Source, *, until: float) -> Passes | None:
        """The three passes; the later ones are empty where the first read nothing."""
        if bytes_read() is None:
            return None
        opened = OpenedFiles()
        begun = time.monotonic()
        first = _read(source, until=begun + (until - begun) / 3)
        if sum(each.asked + each.fetched for each in first) < _MIN_BYTES * len(first):
            return Passes(first=first)
        if not drop_cached(opened.paths()):
            return Passes(first=first)
        # Where the first pass found all in memory, the storage may be much slower than it was.
        cold = _read(source, until=until, most=len(first))
        warm = _read(source, until=float("inf"), most=len(cold))
        return Passes(first=first, cold=cold, warm=warm)


def measure_reads(
    loader: "DataLoader[object]",
    *,
    seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> tuple[Reads | None, list[str]]:
    """Reads some batches with today's number of workers, cold and warm; with notes.

    None where a batch reads nothing (its data is in memory), or that cannot be known.

    Raises:
        Exception: What the dataset raises.
    """
    workers = min(max(1, loader.num_workers), _MAX_WORKERS)
    reports = run_in_workers(
        loader,
        ReadPasses(),
        workers=workers,
        num_batches=_MAX_BATCHES,
        seconds=seconds,
        iterate=iterate,
    )
    return summarize_reads([cast("Passes", report) for report in reports], workers=workers)


def summarize_reads(reports: Sequence[Passes], *, workers: int) -> tuple[Reads | None, list[str]]:
    """What the workers' passes say of the storage."""
    first = [each for report in reports for each in report.first]
    if not first or sum(each.asked + each.fetched for each in first) < _MIN_BYTES * len(first):
        return None, []
    pairs = [
        (cold, warm)
        for report in reports
        for cold, warm in zip(report.cold, report.warm, strict=False)
    ]
    cold = [each for each, _ in pairs]
    if not cold or sum(each.asked + each.fetched for each in cold) < _MIN_BYTES * len(cold):
        return None, ["what a batch reads is kept in memory after the first time, or not seen"]
    waits = [max(0.0, one.wait_seconds - other.wait_seconds) for one, other in pairs]
    is_waiting = sum(waits) >= _MIN_WAIT * sum(each.wall_seconds for each in cold)
    fetched = [each.fetched for each in cold]
    if sum(fetched) < _MIN_BYTES * len(cold):
        # Storage over a network or in user space may be in no book of the kernel's.
        if not is_waiting:
            return None, ["the storage's rate is not known: its reads could not be made cold"]
        fetched = [each.asked for each in cold]
    return (
        Reads(
            workers=workers,
            batch_bytes=quartiles(fetched),
            cold_seconds=quartiles([each.wall_seconds for each in cold]),
            warm_seconds=quartiles([each.wall_seconds for _, each in pairs]),
            bytes_per_second=_rate(fetched, waits, workers=workers) if is_waiting else None,
        ),
        [],
    )


def _rate(fetched: Sequence[int], waits: Sequence[float], *, workers: int) -> Quartiles:
    """Of all workers together, which wait side by side."""
    whole = workers * sum(fetched) / sum(waits)
    single = [workers * size / wait for size, wait in zip(fetched, waits, strict=True) if wait > 0]
    found = quartiles(single)
    return Quartiles(
        mean=whole,
        median=found.median,
        low=min(found.low, whole),
        high=max(found.high, whole),
        samples=found.samples,
    )


def _read(source: Source, *, until: float, most: int | None = None) -> tuple[BatchRead, ...]:
    found: list[BatchRead] = []
    before = _now()
    for samples in source.samples():
        source.collate(samples)
        del samples
        after = _now()
        wall, cpu, queued = (after[i] - before[i] for i in range(3))
        found.append(
            BatchRead(
                wall_seconds=wall - queued,
                wait_seconds=max(0.0, wall - queued - cpu),
                asked=int(after[3] - before[3]),
                fetched=int(after[4] - before[4]),
            )
        )
        if len(found) == most or after[0] >= until:
            break
        before = _now()
    return tuple(found)


def _now() -> tuple[float, float, float, int, int]:
    read = bytes_read()
    asked, fetched = (read.asked, read.fetched) if read else (0, 0)
    return time.monotonic(), time.process_time(), queued_seconds(), asked, fetched
