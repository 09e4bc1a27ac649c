"""The loader measured alone: its rate, its reads, the parts of a sample's cost, receiving.

The feed is tried between two threads of this process, a sender and a receiver. CPU is counted per
thread, so the sender's share is left out. The receiver works as the feed's: it receives a batch
into reused memory, decrypts it there, and hands it to the trainer's thread, which decodes it.

The cost of a sample is divided into getitem, with each transform of a Compose, and collate. A
Compose is any object with a list `transforms` of callables, on the dataset or on one that it wraps.
The list is changed: only a worker's copy of the dataset may be timed.
"""

import contextlib
import functools
import inspect
import itertools
import os
import queue
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple, Protocol, TypeVar, cast

import msgspec
import psutil
import torch
import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stoker.errors import StokerError
from stoker.feed.wire.codec import Encoded, decode, encode
from stoker.feed.wire.sealing import KEY_BYTES, Sealer, Unsealer
from stoker.feed.wire.stream import BatchReader, BatchWriter, BufferPool, Bytes, tune
from stoker.host.counters import (
    OpenedFiles,
    bytes_read,
    children_cpu_seconds,
    drop_cached,
    queued_seconds,
    threads_cpu_seconds,
)
from stoker.host.machine import process_clock
from stoker.host.memory_usage import room_bytes
from stoker.host.processes import loopback
from stoker.logs import EventName, Log
from stoker.profile import batches
from stoker.profile.file_guard import guard_worker
from stoker.profile.rank_results import (
    Cost,
    Drain,
    Quartiles,
    Reads,
    Receive,
    block_means,
    quartiles,
)
from stoker.step_model import MOST_WORKERS_PER_VCPU, WAITS

Loader = DataLoader[object]
Iterate = Callable[[Loader], Iterator[object]]
# Process, CPU-seconds, monotonic seconds and seconds in the run queue when a batch was done.
Stamp = tuple[int, float, float, float]

# A round may last this much longer than its share, until its slowest workers have begun.
_START_SECONDS = 20.0
# Read this much slower than it loads, a loader has a batch ready each time.
_PACE = 1.3
_PACED_SHARE = 0.15
_MOST_PACED = 24
_LEAST_PACED = 6
# Batches until the queue is full: before, the reader had waited for each one.
_FILLING = 3
# A shorter round measures nothing, and starting workers takes about as long.
_MIN_SECONDS = 0.5
# The round of one number of workers: in a shorter one their start weighs too much.
_ROUND_SECONDS = 3.0
# In an error that torch hands on from a worker.
_TRACEBACK = "Original Traceback (most recent call last)"
_MOST_ROUNDS = 3
# Workers are idle when they use less than this share of a vCPU in this many polls.
_IDLE_SHARE = 0.05
_QUIET_POLLS = 2
_POLL_SECONDS = 0.1
# More workers of a loader that waits need memory, and a start each.
_MOST_TRIED = 64
_HELD_BATCHES = 3
_ROOM_PART = 4
# Batches of a worker in a pass: they are read three times.
_MAX_BATCHES = 8
_MAX_WORKERS = 16
# A batch that reads less than a page has nothing to do with storage.
_MIN_BYTES = 4096
# As a share of a batch's time: a shorter wait gives no rate of the storage.
_MIN_WAIT = 0.02
_MOST_RECEIVED = 200
_LEAST_BATCHES = 6
_WARM_UP = 3
# More batches than can be on their way between the threads.
_BLOCK = 8
_WAIT_SECONDS = 5.0
# Of what a dataset wraps: levels, and items of a list at each of them.
_DEPTH = 4
_MAX_CHILDREN = 64
_MAX_COST_BATCHES = 64
# As long as a name in a record may be.
_MAX_NAME = 200


class Round(NamedTuple):
    """One pass: each worker's stamps, and the reader's seconds to take batches that were ready."""

    stamps: list[list[Stamp]]
    handovers: Sequence[float] = ()


class StampedCollate:
    """The script's collate function, which also returns when the worker was done."""

    def __init__(self, collate: Callable[[list[object]], object]) -> None:
        self._collate = collate

    def __call__(self, samples: list[object]) -> tuple[object, Stamp]:
        batch = self._collate(samples)
        return batch, (os.getpid(), time.process_time(), time.monotonic(), queued_seconds())


class EndlessBatches:
    """The loader's own index batches, again and again."""

    def __init__(self, indices: object) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[object]:
        while True:
            empty = True
            for index in self._indices:  # type: ignore[attr-defined]
                empty = False
                yield index
            if empty:
                return


def read_round(
    loader: Loader,
    *,
    workers: int,
    seconds: float,
    is_stopped: Callable[[], bool],
    iterate: Iterate,
) -> Round:
    """Reads from `workers` fresh workers for about `seconds`: flat out, then a little slower.

    A worker's first batch includes its start and is not counted; then a batch's cost is what the
    worker used from one batch to the next. Raises any error of the dataset, and RuntimeError if no
    batch comes for 20 s beyond `seconds`.
    """
    began = time.monotonic()
    until = began + (1 - _PACED_SHARE) * seconds
    stamps: dict[int, list[Stamp]] = {}
    handovers: list[float] = []
    first: float | None = None
    count = 0
    with warnings.catch_warnings():
        # The script may have more workers than vCPUs, so that is tried, too.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        fresh = with_workers(loader, workers=workers, timeout=seconds + _START_SECONDS)
        iterator = iterate(fresh)
    try:
        for item in iterator:
            assert isinstance(item, list | tuple)
            stamp: Stamp = item[1]
            # Its shared memory is free again before the next batch is waited for.
            del item
            stamps.setdefault(stamp[0], []).append(stamp)
            now = time.monotonic()
            if first is None:
                first = now
            else:
                count += 1
            # Three of each: the first one holds the worker's start, and two make a rate.
            is_measured = len(stamps) == workers and min(map(len, stamps.values())) >= 3
            if is_stopped() or now >= until + _START_SECONDS or (now >= until and is_measured):
                break
        if first is not None and count and not is_stopped():
            # The loader's own pace; slower than that, a batch is ready when it is asked for.
            interval = (time.monotonic() - first) / count
            handovers = _handovers(iterator, every=_PACE * interval, until=began + seconds)
    finally:
        shut_down(iterator)
    return Round(list(stamps.values()), handovers)


def _handovers(iterator: Iterator[object], *, every: float, until: float) -> list[float]:
    """Returns seconds in next() at a pace where batches are ready, yet the workers are busy.

    Torch opens the memory of a batch by asking its worker, which answers between two of its
    operations: 2 to 3 ms where the worker holds the interpreter lock, without any CPU time.
    """
    if every <= 0:
        return []
    num = min(_MOST_PACED, int((until - time.monotonic()) / every))
    if num < _LEAST_PACED:
        return []
    seconds = []
    for _ in range(num):
        time.sleep(every)
        asked = time.monotonic()
        if next(iterator, None) is None:
            break
        seconds.append(time.monotonic() - asked)
    return seconds[_FILLING:]


def summarize(rounds: list[Round], *, workers: int) -> Drain | None:
    """Sums up all rounds; None where no worker made two batches."""
    stamps = chain.from_iterable(part.stamps for part in rounds)
    pairs = [*chain.from_iterable(map(pairwise, stamps))]
    if not pairs:
        return None
    handover = None
    if seconds := [*chain.from_iterable(part.handovers for part in rounds)]:
        handover = quartiles(seconds)
    return Drain(
        workers=workers,
        cpu_seconds=quartiles([later[1] - earlier[1] for earlier, later in pairs]),
        # Less the time in the run queue: with more workers than vCPUs that is most of it.
        wall_seconds=quartiles(
            [
                # The kernel counts a wait when it ends, which may be after the stamp before it.
                max(0.0, later[2] - earlier[2] - (later[3] - earlier[3]))
                for earlier, later in pairs
            ]
        ),
        batches_per_second=_batches_per_second(rounds, workers=workers),
        handover_seconds=handover,
    )


def _batches_per_second(rounds: Sequence[Round], *, workers: int) -> float:
    """Returns the rate of all workers together; 0: they never ran at the same time."""
    num_batches = 0
    seconds = 0.0
    for stamps in (part.stamps for part in rounds if len(part.stamps) == workers):
        # All workers run only between the last first batch and the first last one.
        begin = max(of_worker[0][2] for of_worker in stamps)
        end = min(of_worker[-1][2] for of_worker in stamps)
        if end > begin:
            times = [stamp[2] for stamp in chain.from_iterable(stamps)]
            num_batches += sum(begin < when <= end for when in times)
            seconds += end - begin
    if not seconds:
        return 0.0
    return num_batches / seconds


def shut_down(iterator: object) -> None:
    """Ends the workers of a torch iterator, if it has any; a worker ends after its batch."""
    if end := getattr(iterator, "_shutdown_workers", None):
        end()


def with_workers(
    loader: Loader, *, workers: int, timeout: float, pin_memory: bool = False
) -> Loader:
    """Returns a loader of the same batches without an end, each with the stamp of its worker.

    Args:
        timeout: Seconds after which a batch that does not come is an error.
    """
    batch_size = None
    drop_last = False
    sampler: EndlessBatches | None = None
    batch_sampler: EndlessBatches | None = None
    if isinstance(loader.dataset, IterableDataset):
        batch_size = loader.batch_size
        drop_last = loader.drop_last
    elif loader.batch_sampler is not None:
        # Torch takes a batch_sampler only with its default batch_size, and without a sampler.
        batch_size = 1
        batch_sampler = EndlessBatches(loader.batch_sampler)
    else:
        sampler = EndlessBatches(loader.sampler)
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_size=batch_size,
        batch_sampler=batch_sampler,  # type: ignore[arg-type]
        sampler=sampler,
        drop_last=drop_last,
        num_workers=workers,
        collate_fn=StampedCollate(loader.collate_fn),
        timeout=timeout,
        pin_memory=pin_memory,
        worker_init_fn=_WorkerInit(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        # More than the script's: reading must never be what the workers wait for.
        prefetch_factor=max(2, loader.prefetch_factor or 2),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """The script's dataset in a worker; of a stream only the number of `indices` counts."""

    dataset: object
    collate: Callable[[object], object]
    indices: Sequence[object]
    is_stream: bool
    is_batched: bool
    batch_size: int

    def samples(self) -> Iterator[object]:
        """Yields the items of each batch, once around; a stream starts over."""
        if not self.is_stream:
            yield from map(self._get, self.indices)
            return
        items = iter(self.dataset)  # type: ignore[call-overload]
        for _ in self.indices:
            if not self.is_batched:
                yield from itertools.islice(items, 1)
            elif batch := list(itertools.islice(items, self.batch_size)):
                yield batch

    def num_samples(self, items: object) -> int:
        """Returns how many samples the items of a batch are.

        Where the loader makes no batches, an item of the dataset is one already, or one sample.
        """
        if self.is_batched:
            return len(cast("Sequence[object]", items))
        return batches.num_samples(items)

    def _get(self, index: object) -> object:
        dataset = self.dataset
        if not self.is_batched:
            return dataset[index]  # type: ignore[index]
        # As torch's fetcher.
        many = getattr(dataset, "__getitems__", None)
        if many:
            return cast("object", many(index))
        return [dataset[number] for number in index]  # type: ignore[index, attr-defined]


# For a worker in place of its batches, until monotonic seconds; task and report are pickled.
WorkerTask = Callable[[TaskSource, float], object]
ReportT = TypeVar("ReportT")


def run_in_workers(
    loader: Loader,
    task: Callable[[TaskSource, float], ReportT | None],
    *,
    workers: int,
    num_batches: int,
    seconds: float,
    iterate: Iterate,
) -> list[ReportT]:
    """Runs `task` in `workers` fresh workers for `num_batches` each; returns their reports.

    Blocks for about `seconds`, and the start of the workers. Raises any error of the dataset, and
    RuntimeError if no report comes for 20 s beyond `seconds`.
    """
    shell = _TaskDataset(loader, task, workers=workers, num_batches=num_batches, seconds=seconds)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        fresh: Loader = torch.utils.data.DataLoader(
            shell,
            batch_size=None,
            # Torch deals items out in turn: each worker gets one, the task with its number.
            sampler=range(workers),
            num_workers=workers,
            collate_fn=_as_it_is,
            timeout=seconds + _START_SECONDS,
            worker_init_fn=_WorkerInit(loader.worker_init_fn, shell),
            multiprocessing_context=loader.multiprocessing_context,
        )
        iterator = iterate(fresh)
    try:
        reports = cast("Iterator[ReportT | None]", iterator)
        return [report for report in reports if report is not None]
    finally:
        shut_down(iterator)


class _TaskDataset(torch.utils.data.Dataset[object]):
    """A dataset whose item N is the report of worker N on its task."""

    def __init__(
        self, loader: Loader, task: WorkerTask, *, workers: int, num_batches: int, seconds: float
    ) -> None:
        self.dataset = loader.dataset
        self._task = task
        self._seconds = seconds
        is_stream = isinstance(loader.dataset, IterableDataset)
        is_batched = loader.batch_sampler is not None or (
            is_stream and loader.batch_size is not None
        )
        drawn: list[object] = [None] * (workers * num_batches)
        if not is_stream:
            source = loader.batch_sampler if is_batched else loader.sampler
            drawn = list(itertools.islice(EndlessBatches(source), workers * num_batches))
        self._sources = [
            TaskSource(
                dataset=loader.dataset,
                collate=cast("Callable[[object], object]", loader.collate_fn),
                # As torch deals batches out: of W workers, number n gets n, n + W, n + 2 W ...
                indices=drawn[number::workers],
                is_stream=is_stream,
                is_batched=is_batched,
                batch_size=loader.batch_size or 1,
            )
            for number in range(workers)
        ]

    def __getitem__(self, number: int) -> object:
        return self._task(self._sources[number], time.monotonic() + self._seconds)


class _WorkerInit:
    """The script's `worker_init_fn`, in a worker that may change no file of the user's."""

    def __init__(
        self, own: Callable[[int], None] | None, shell: _TaskDataset | None = None
    ) -> None:
        self._own = own
        self._shell = shell

    def __call__(self, worker_id: int) -> None:
        if self._shell is not None:
            # The script's function looks for its dataset there. The class refuses assignments.
            object.__setattr__(get_worker_info(), "dataset", self._shell.dataset)
        guard_worker()
        if self._own is not None:
            self._own(worker_id)


def _as_it_is(report: object) -> object:
    return report


def error_words(error: Exception) -> str:
    text = str(error)
    if _TRACEBACK in text:
        # Of a worker: its own error stands at the end.
        return text.strip().splitlines()[-1][:200]
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"


def worker_counts(*, script: int, vcpus: int, ranks_on_host: int, seconds: float) -> list[int]:
    """Returns the numbers of workers of one rank that are tried, the most informative first.

    Args:
        script: The script's own number of workers.
        seconds: Time for all of them: less than 3 s each leave out the last ones.
    """
    most = max(1, vcpus // ranks_on_host)
    # Every vCPU busy (what loading costs), one alone (how long it takes), the script's own, half of
    # the vCPUs (whether hyper-threads are worth a whole core).
    counts = list(dict.fromkeys([most, 1, max(1, script), max(1, most // 2)]))
    # Too few are more by doubling, up to the cores.
    doubled = (2**power for power in range(1, most.bit_length()))
    more = [count for count in doubled if script < count < most and count not in counts]
    return [*counts, *more[: max(0, int(seconds / _ROUND_SECONDS) - len(counts))]]


def waiting_counts(
    drains: Sequence[Drain], *, vcpus: int, batch_bytes: int, room_bytes: int
) -> list[int]:
    """Returns more workers than vCPUs, to try for a loader that waits; none if it does not.

    Args:
        drains: What was measured already.
        batch_bytes: Size of a batch; each worker holds the one that it makes and two ready ones.
        room_bytes: Memory that they may take.
    """
    alone = min(drains, key=lambda drain: drain.workers, default=None)
    if alone is None or alone.wall_seconds.median <= WAITS * alone.cpu_seconds.mean:
        return []
    most = min(_MOST_TRIED, room_bytes // max(1, _HELD_BATCHES * batch_bytes))
    tried = {drain.workers for drain in drains}
    more = (2 * vcpus, MOST_WORKERS_PER_VCPU * vcpus)
    return [workers for workers in more if workers <= most and workers not in tried]


def room_for_batches(shared_memory: str = "/dev/shm") -> int:
    """Returns the bytes that batches of tried workers may take of memory and shared memory."""
    room = room_bytes(psutil.virtual_memory().available)
    with contextlib.suppress(OSError):
        filesystem = os.statvfs(shared_memory)
        room = min(room, filesystem.f_bavail * filesystem.f_frsize)
    return room // _ROOM_PART


def workers_rest(iterator: object, *, seconds: float, is_stopped: Callable[[], bool]) -> bool:
    """Waits until the workers have filled their queues; False if they did not within `seconds`.

    Only a torch iterator's own workers count, where they are known: a script may have other
    processes that are never idle.
    """
    until = time.monotonic() + seconds
    before = _cpu_seconds_of_workers(iterator)
    num_quiet = 0
    while num_quiet < _QUIET_POLLS and not is_stopped():
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
        now = _cpu_seconds_of_workers(iterator)
        num_quiet += 1
        if now - before >= _IDLE_SHARE * _POLL_SECONDS:
            num_quiet = 0
        before = now
    return True


def _cpu_seconds_of_workers(iterator: object) -> float:
    pids = [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid]
    clocks = [process_clock(pid) for pid in pids]
    running = [clock for clock in clocks if clock is not None]
    if not running:
        return children_cpu_seconds()
    return sum(running)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingAlone:
    """The loader without the model.

    Attributes:
        drains: What it gave, by number of workers.
        notes: Why some numbers gave nothing.
        error: What it raised in workers; empty: nothing.
    """

    drains: tuple[Drain, ...]
    notes: tuple[str, ...]
    error: str = ""


def measure_loading(
    loader: Loader,
    *,
    counts: Sequence[int],
    seconds: float,
    is_stopped: Callable[[], bool],
    iterate: Iterate,
    log: Log,
    more: Callable[[Sequence[Drain]], Sequence[int]] = lambda drains: (),
) -> LoadingAlone:
    """Measures the loader alone at each of `counts`, in turns, in `seconds`.

    Args:
        more: Returns counts to try as well, from what the first turn of `counts` gave; without
            time for a second turn it is not asked.
    """
    until = time.monotonic() + seconds
    rounds = max(1, min(_MOST_ROUNDS, int(seconds / len(counts) / _ROUND_SECONDS)))
    trials = _Trials(loader, is_stopped=is_stopped, iterate=iterate)
    tried = [*counts]
    # In turns, so that a machine that becomes slower or faster meanwhile does so for all counts.
    for turn in range(rounds):
        if turn == 1:
            tried += more(trials.drains(counts))
        for index, workers in enumerate(tried):
            # The time that is left, divided among the turns to come: a short turn leaves more.
            left = (rounds - turn) * len(tried) - index
            share = (until - time.monotonic()) / left
            trials.try_once(workers, seconds=share, is_first=not turn and not index)
    drains = trials.drains(tried)
    for drained in drains:
        log.event(
            EventName.PROFILE_LOADER,
            workers=drained.workers,
            cpu_seconds=drained.cpu_seconds.mean,
            wall_seconds=drained.wall_seconds.median,
            batches=drained.cpu_seconds.samples,
        )
    return LoadingAlone(
        drains=tuple(drains), notes=tuple(trials.failed.values()), error=trials.error
    )


class _Trials:
    """Rounds of the loader alone, by number of workers, and why some failed.

    Attributes:
        failed: Why a number of workers gave no figures, as a note.
        error: What the loader raised first; empty: nothing.
    """

    def __init__(self, loader: Loader, *, is_stopped: Callable[[], bool], iterate: Iterate) -> None:
        self.failed: dict[int, str] = {}
        self.error = ""
        self._loader = loader
        self._is_stopped = is_stopped
        self._iterate = iterate
        self._rounds: dict[int, list[Round]] = {}

    def try_once(self, workers: int, *, seconds: float, is_first: bool) -> None:
        """Reads for about `seconds`; a number that failed is not tried again."""
        if workers in self.failed:
            return
        if self._is_stopped() or (not is_first and seconds < _MIN_SECONDS):
            if workers not in self._rounds:
                self.failed[workers] = (
                    f"the loader was not tried with {workers} workers: no time was left"
                )
            return
        try:
            read = read_round(
                self._loader,
                workers=workers,
                seconds=seconds,
                is_stopped=self._is_stopped,
                iterate=self._iterate,
            )
            self._rounds.setdefault(workers, []).append(read)
        except Exception as err:
            # A process edge: the dataset is the user's, and may not work in workers at all.
            words = error_words(err)
            self.error = self.error or words
            self.failed[workers] = f"the loader failed with {workers} workers: {words}"

    def drains(self, counts: Sequence[int]) -> list[Drain]:
        """Returns what each of `counts` gave, less those that made too few batches."""
        drains: list[Drain] = []
        for workers in counts:
            drained = summarize(self._rounds.get(workers, []), workers=workers)
            if drained is None:
                self.failed.setdefault(workers, f"too few batches came from {workers} workers")
                continue
            drains.append(drained)
        return drains


class BatchRead(NamedTuple):
    """Times of one batch of one worker; `wait_seconds`: neither on a CPU nor ready to run."""

    wall_seconds: float
    wait_seconds: float
    asked: int
    fetched: int


class ColdAndWarm(NamedTuple):
    """Times of one worker's batches, cold and then warm; `first` found out their files."""

    first: tuple[BatchRead, ...] = ()
    cold: tuple[BatchRead, ...] = ()
    warm: tuple[BatchRead, ...] = ()


def read_cold_and_warm(source: TaskSource, until: float) -> ColdAndWarm | None:
    """Reads a worker's batches, drops their files, and, if it read any, reads cold, then warm."""
    if bytes_read() is None:
        return None
    # A third of the time for the first reads: cold reads may be much slower, warm ones are not.
    opened = OpenedFiles()
    begun = time.monotonic()
    first = _read(source, until=begun + (until - begun) / 3)
    if not _read_something(first) or not drop_cached(opened.paths()):
        return ColdAndWarm(first=first)
    # Where the first reads found all in memory, the storage may be much slower than it was.
    cold = _read(source, until=until, most=len(first))
    warm = _read(source, until=float("inf"), most=len(cold))
    return ColdAndWarm(first=first, cold=cold, warm=warm)


def _read_something(batches: Sequence[BatchRead]) -> bool:
    read = sum(batch.asked + batch.fetched for batch in batches)
    return read >= _MIN_BYTES * max(1, len(batches))


def measure_reads(
    loader: Loader, *, seconds: float, iterate: Iterate
) -> tuple[Reads | None, list[str]]:
    """Reads some batches with today's number of workers, cold and warm; also returns notes.

    None where a batch reads nothing (its data is in memory), or the kernel does not count reads.
    """
    workers = min(max(1, loader.num_workers), _MAX_WORKERS)
    reports = run_in_workers(
        loader,
        read_cold_and_warm,
        workers=workers,
        num_batches=_MAX_BATCHES,
        seconds=seconds,
        iterate=iterate,
    )
    return summarize_reads(reports, workers=workers)


def summarize_reads(
    reports: Sequence[ColdAndWarm], *, workers: int
) -> tuple[Reads | None, list[str]]:
    if not _read_something([*chain.from_iterable(report.first for report in reports)]):
        return None, []
    both = (zip(report.cold, report.warm, strict=False) for report in reports)
    pairs = [*chain.from_iterable(both)]
    cold = [batch for batch, _ in pairs]
    if not _read_something(cold):
        return None, [
            "the storage was not measured: data stays in memory after the first read, or the "
            "kernel does not see these reads"
        ]
    # A cold read waits longer than a warm one for storage only.
    waits = [max(0.0, one.wait_seconds - other.wait_seconds) for one, other in pairs]
    is_waiting = sum(waits) >= _MIN_WAIT * sum(batch.wall_seconds for batch in cold)
    fetched = [batch.fetched for batch in cold]
    if sum(fetched) < _MIN_BYTES * len(cold):
        # The kernel may not count storage over a network or in user space.
        if not is_waiting:
            return None, ["the storage's rate is not known: its reads could not be made cold"]
        fetched = [batch.asked for batch in cold]
    rate = None
    if is_waiting:
        rate = _rate(fetched, waits, workers=workers)
    reads = Reads(
        workers=workers,
        batch_bytes=quartiles(fetched),
        cold_seconds=quartiles([batch.wall_seconds for batch in cold]),
        warm_seconds=quartiles([batch.wall_seconds for _, batch in pairs]),
        bytes_per_second=rate,
    )
    return reads, []


def _rate(fetched: Sequence[int], waits: Sequence[float], *, workers: int) -> Quartiles:
    whole = workers * sum(fetched) / sum(waits)
    single = [workers * size / wait for size, wait in zip(fetched, waits, strict=True) if wait > 0]
    rate = quartiles(single)
    low = min(rate.low, whole)
    high = max(rate.high, whole)
    return msgspec.structs.replace(rate, mean=whole, low=low, high=high)


def _read(source: TaskSource, *, until: float, most: int | None = None) -> tuple[BatchRead, ...]:
    reads: list[BatchRead] = []
    before = _now()
    for samples in source.samples():
        source.collate(samples)
        del samples
        after = _now()
        wall, cpu, queued = (after[i] - before[i] for i in range(3))
        reads.append(
            BatchRead(
                wall_seconds=max(0.0, wall - queued),
                wait_seconds=max(0.0, wall - queued - cpu),
                asked=int(after[3] - before[3]),
                fetched=int(after[4] - before[4]),
            )
        )
        if len(reads) == most or after[0] >= until:
            break
        before = _now()
    return tuple(reads)


def _now() -> tuple[float, float, float, int, int]:
    asked = 0
    fetched = 0
    if read := bytes_read():
        asked = read.asked
        fetched = read.fetched
    return time.monotonic(), time.process_time(), queued_seconds(), asked, fetched


def try_receive(batch: object, *, seconds: float) -> tuple[Receive | None, list[str]]:
    """Receives `batch` through the feed for about `seconds`; returns a note where that fails."""
    try:
        receive = _measure_receive(batch, seconds=seconds)
    except (StokerError, OSError) as err:
        return None, [f"the feed could not be tried: {' '.join(str(err).split())}"]
    if receive is None:
        return None, ["the feed could not be tried: nothing came in time"]
    return receive, []


def _measure_receive(batch: object, *, seconds: float) -> Receive | None:
    encoded = encode(batch, allow_pickle=True)
    frame = bytearray(encoded.nbytes)
    if frame:
        encoded.write_into(memoryview(frame))
    key = os.urandom(KEY_BYTES)
    received: queue.Queue[Bytes | None] = queue.Queue(maxsize=2)
    is_over = threading.Event()
    # Real sockets and real keys: a shortcut would leave out what receiving costs.
    address = loopback()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        sink = socket.create_connection(listener.getsockname()[:2])
        source, _ = listener.accept()
    with source, sink:
        tune(source)
        tune(sink)
        threads = [
            threading.Thread(target=_send, args=(source, key, frame), daemon=True),
            threading.Thread(target=_receive, args=(sink, key, received, is_over), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            return _take(received, encoded, ids={threads[1].native_id or 0}, seconds=seconds)
        finally:
            is_over.set()
            for connection in (source, sink):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            # Frees a receiver that waits in `put`; it puts one batch more at most.
            with contextlib.suppress(queue.Empty):
                while True:
                    received.get_nowait()
            for thread in threads:
                thread.join(2 * _WAIT_SECONDS)


def _take(
    received: "queue.Queue[Bytes | None]", encoded: Encoded, *, ids: set[int], seconds: float
) -> Receive | None:
    until = time.monotonic() + seconds
    taken_seconds: list[float] = []
    off: list[float] = []
    before = 0.0
    while len(taken_seconds) < _MOST_RECEIVED and (
        time.monotonic() < until or len(taken_seconds) < _LEAST_BATCHES
    ):
        # CPU time of this thread alone: the wait for the batch is not in it.
        started = time.thread_time()
        payload: Bytes | None = None
        with contextlib.suppress(queue.Empty):
            payload = received.get(timeout=_WAIT_SECONDS)
        if payload is None:
            return None
        batch = decode(encoded.tree, payload, allow_pickle=True)
        taken = time.thread_time() - started
        taken_seconds.append(taken + _cold_read_seconds(payload))
        del batch, payload
        now = threads_cpu_seconds(ids)
        off.append(now - before)
        before = now
    skipped = min(_WARM_UP, len(taken_seconds) - 1)
    # The other threads work ahead: most single batches would seem to cost nothing.
    blocks = block_means(off[skipped:], workers=_BLOCK)
    return Receive(
        thread_seconds=quartiles(taken_seconds[skipped:]),
        cpu_seconds=quartiles(blocks, samples=len(off) - skipped),
    )


def _cold_read_seconds(payload: Bytes) -> float:
    """Returns how much longer the first read of a batch takes, which another core wrote."""
    if not payload.size:
        return 0.0
    # max() reads every byte, the second time from this core's cache.
    started = time.thread_time()
    payload.max()
    first = time.thread_time()
    payload.max()
    return max(0.0, 2 * first - started - time.thread_time())


def _send(connection: socket.socket, key: bytes, frame: bytearray) -> None:
    writer = BatchWriter(connection, Sealer(key), BufferPool())
    payload = memoryview(frame) if frame else None
    with contextlib.suppress(OSError):
        while True:
            writer.write(b"", payload, of=("", 0))


def _receive(
    connection: socket.socket,
    key: bytes,
    received: "queue.Queue[Bytes | None]",
    is_over: threading.Event,
) -> None:
    # Not at the top: the probe may be imported in the middle of the feed's own import of torch,
    # and BatchBuffers needs all of the feed.
    from stoker.feed.trainer.buffers import BatchBuffers

    pool = BufferPool()
    buffers = BatchBuffers(pool)
    reader = BatchReader(
        connection, Unsealer(key), pool, max_head_bytes=0, receive_timeout_seconds=_WAIT_SECONDS
    )
    try:
        # Small batches are in the socket's buffers by the hundred, and are read after its end, too.
        while not is_over.is_set():
            _, nbytes = reader.head(is_awaited=True)
            payload = buffers.room(nbytes, None)
            reader.read(payload.data)
            received.put(payload)
    except (OSError, StokerError):
        received.put(None)


class _Call(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> object: ...


@dataclass(slots=True, kw_only=True)
class Timed:
    """CPU time of one transform so far, in all its calls."""

    name: str
    calls: int = 0
    cpu_seconds: float = 0.0

    def clear(self) -> None:
        self.calls = 0
        self.cpu_seconds = 0.0

    def call(self, transform: _Call, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        before = time.process_time()
        result = transform(*args, **kwargs)
        # CPU of the process, not of this thread: a transform may compute with several.
        self.cpu_seconds += time.process_time() - before
        self.calls += 1
        return result


def time_transforms(dataset: object) -> list[Timed]:
    """Replaces the transforms in a dataset's lists by timed ones; returns their times."""
    by_transform: dict[int, tuple[Timed, object]] = {}
    used: dict[int, Timed] = {}
    for owner, transforms in _composes(dataset):
        for transform in transforms:
            if id(transform) not in by_transform:
                timed = Timed(name=_name_of(transform))
                by_transform[id(transform)] = timed, _in_place(transform, timed)
        replaced = [by_transform[id(transform)] for transform in transforms]
        try:
            _set_list(owner, [timed_transform for _, timed_transform in replaced])
        except (AttributeError, TypeError):
            continue
        used |= {id(timed): timed for timed, _ in replaced}
    return list(used.values())


def objects_below(
    dataset: object, *, leads_on: Callable[[str, object], bool], seen: set[int]
) -> Iterator[object]:
    """Yields a dataset and the objects in its attributes, each once, the nearest first.

    Args:
        dataset: The object to begin with.
        leads_on: Whether an attribute, by its name and value, is followed; of a list its items are.
        seen: Identities of objects that are left out; the caller may add to it between two objects.
    """
    waiting: deque[tuple[object, int]] = deque([(dataset, 0)])
    while waiting:
        value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        # Each attribute that is followed is one level deeper.
        for name, child in attributes_of(value).items():
            if depth < _DEPTH and leads_on(name, child):
                children = child if isinstance(child, list | tuple) else (child,)
                # It may be a list of a million rows.
                for item in itertools.islice(children, _MAX_CHILDREN):
                    waiting.append((item, depth + 1))


def attributes_of(value: object) -> dict[str, object]:
    try:
        # Not `dir`: a property may load what it names.
        return dict(vars(value))
    except TypeError:
        return {}


def _composes(dataset: object) -> Iterator[tuple[object, Sequence[object]]]:
    """Yields owners of a list of transforms, each once, the outermost of nested ones only."""
    seen: set[int] = set()
    # Below an owner, too: a dataset with a list may wrap one that has another.
    for value in objects_below(dataset, leads_on=_may_transform, seen=seen):
        transforms = _list_of(value)
        if transforms is not None:
            yield value, transforms
            # What is nested in them is part of them.
            seen.update(map(id, transforms))


def _may_transform(name: str, _value: object) -> bool:
    return any(word in name for word in ("transform", "aug", "dataset", "pipeline"))


def _list_of(value: object) -> Sequence[object] | None:
    transforms = getattr(value, "transforms", None)
    if transforms is None and isinstance(value, torch.nn.Sequential):
        transforms = list(value)
    if not isinstance(transforms, list | tuple | torch.nn.ModuleList) or not len(transforms):
        return None
    items = list(transforms)
    if not all(callable(item) for item in items):
        return None
    return items


def _set_list(owner: object, transforms: list[object]) -> None:
    kept = getattr(owner, "transforms", None)
    if isinstance(owner, torch.nn.Sequential):
        kept = owner
    if isinstance(kept, torch.nn.Sequential | torch.nn.ModuleList):
        for number, transform in enumerate(transforms):
            kept[number] = transform  # type: ignore[assignment]
    elif isinstance(kept, list):
        kept[:] = transforms
    else:
        owner.transforms = tuple(transforms)  # type: ignore[attr-defined]


def _name_of(transform: object) -> str:
    if inspect.isroutine(transform) or inspect.isclass(transform):
        return str(getattr(transform, "__qualname__", None) or transform)
    return type(transform).__qualname__


def _in_place(transform: object, timed: Timed) -> object:
    """Times the calls of an object, which stays itself (isinstance holds); wraps a function."""
    kind = type(transform)
    # Python looks up `__call__` on the class: so the object gets a separate subclass.
    call = getattr(kind, "__call__")  # noqa: B004, B009 - the class's own, unbound

    def timed_call(own: object, *args: object, **kwargs: object) -> object:
        return timed.call(functools.partial(call, own), args, kwargs)

    if not inspect.isroutine(transform) and not inspect.isclass(transform):
        try:
            transform.__class__ = type(
                kind.__name__,
                (kind,),
                {"__call__": timed_call, "__module__": kind.__module__, "__doc__": kind.__doc__},
            )
        except TypeError:
            pass
        else:
            return transform

    def timed_function(*args: object, **kwargs: object) -> object:
        return timed.call(cast("_Call", transform), args, kwargs)

    return timed_function


class _BatchCost(NamedTuple):
    """CPU-seconds to fetch and to collate one batch of so many samples."""

    getitem_seconds: float
    collate_seconds: float
    samples: int


def load_in_parts(source: TaskSource, until: float) -> tuple[Cost, ...]:
    """Fetches and collates in a worker, each transform timed; no costs of less than two batches."""
    transforms = time_transforms(source.dataset)
    costs = _timed_batches(source)
    # The first batch imports, opens and fills caches: it is made and not counted.
    next(costs, None)
    for transform in transforms:
        transform.clear()
    counted: list[_BatchCost] = []
    # One batch at least counts, however long it takes.
    for batch in costs:
        counted.append(batch)
        if time.monotonic() >= until:
            break
    if not counted:
        return ()
    return _costs_of(counted, transforms)


def _timed_batches(source: TaskSource) -> Iterator[_BatchCost]:
    """Makes the batches of a source again and again, and yields what each cost."""
    has_batches = True
    while has_batches:
        has_batches = False
        begun = time.process_time()
        for items in source.samples():
            has_batches = True
            fetched = time.process_time()
            source.collate(items)
            done = time.process_time()
            samples = source.num_samples(items)
            del items
            yield _BatchCost(fetched - begun, done - fetched, samples)
            begun = time.process_time()


def _costs_of(counted: Sequence[_BatchCost], transforms: Sequence[Timed]) -> tuple[Cost, ...]:
    samples = sum(batch.samples for batch in counted)
    getitem_seconds = sum(batch.getitem_seconds for batch in counted)
    collate_seconds = sum(batch.collate_seconds for batch in counted)
    parts = (
        Cost(
            name=name_of(transform.name),
            within="getitem",
            cpu_seconds=transform.cpu_seconds / samples,
            samples=transform.calls,
        )
        for transform in transforms
        if transform.calls
    )
    return (
        Cost(name="getitem", cpu_seconds=getitem_seconds / samples, samples=samples),
        Cost(name="collate", cpu_seconds=collate_seconds / samples, samples=len(counted)),
        *parts,
    )


def measure_costs(
    loader: Loader, *, seconds: float, iterate: Iterate
) -> tuple[tuple[Cost, ...], list[str]]:
    reports = run_in_workers(
        loader,
        load_in_parts,
        workers=1,
        num_batches=_MAX_COST_BATCHES,
        seconds=seconds,
        iterate=iterate,
    )
    costs = next(iter(reports), ())
    if not costs:
        return (), ["the parts of loading are not known: too few batches"]
    return costs, []


def name_of(text: str) -> str:
    if len(text) <= _MAX_NAME:
        return text
    rest = _MAX_NAME - 1
    return f"{text[: rest // 2]}\u2026{text[-(rest - rest // 2) :]}"
