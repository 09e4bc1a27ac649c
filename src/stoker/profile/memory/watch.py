"""Looks at the memory of a trainer and its workers, and how one worker's grows by itself.

A forked worker inherits the trainer's pages. One that it writes to becomes its own, *copied*, while
its resident memory stays as it is; memory that it takes for itself, *grown*, adds to both.
"""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple, cast

import msgspec

from stoker.host.memory_holders import files_in_memory, other_programs
from stoker.host.memory_usage import (
    MemoryUse,
    Paging,
    ProcessMemory,
    give_back_freed,
    group_shared_bytes,
    memory_uses,
    paging,
    process_memory,
)
from stoker.profile.loader_phases import Iterate, Loader, TaskSource, run_in_workers
from stoker.profile.memory.growing_objects import (
    Elements,
    Size,
    Stretch,
    elements_of,
    grown_to_the_end,
    loaded_since,
    measured_again,
    sizes_of,
    stream_sizes,
)
from stoker.profile.rank_results import RankMemory, WorkerGrowth
from stoker.records import GrowingObjects

# At most once a second, and where the kernel takes long to count pages, in 1% of the time.
_EVERY_SECONDS = 1.0
_MAX_SHARE = 0.01
# Looks of a worker at itself.
_LOOKS = 24
# Looks of it at all that may grow.
_EVERY_LOOKS = 2
# Imports, open files and buffers come in the first third.
_WARM_UP_SHARE = 1 / 3
# Of the intervals after it: noise comes and goes.
_STEADY_SHARE = 0.5
# Of what it grew by for each sample, in the second half.
_LEAST_LATE = 0.3
_LEAST_LOOKS = 4
_LEAST_POINTS = 9
# Their numbers are Python objects, too, which the worker copies.
_MAX_SAMPLES = 20_000
# Elements of a collection that are compared.
_SAMPLED = 256
# Of the limit: from here on it matters who else holds it. Folders with less are no cause.
_SHORT = 0.8
_LEAST_FILES = 0.02
_NOT_KNOWN = MemoryUse(used_bytes=0, limit_bytes=0, is_cgroups=False)


class _Point(NamedTuple):
    """Memory after so many samples or steps."""

    done: float
    private_bytes: int
    anonymous_bytes: int
    pss_anonymous_bytes: int | None = None


class MemoryWatch:
    """Memory of this process, of a loader's workers and of the host, once a second at most."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = self._processes_due_at = 0.0
        self._looks: list[float] = []
        self._trainer_bytes = 0
        self._workers: dict[int, list[_Point]] = defaultdict(list)
        self._worker_bytes: list[float] = []
        self._num_workers = 0
        self._use: MemoryUse | None = None
        self._swapped_bytes = 0
        self._first: tuple[float, Paging] | None = None
        self._last: tuple[float, Paging] | None = None

    def look(self, inner: object, *, steps: int, batch_size: int) -> None:
        """Looks if it is time for it; blocks for some milliseconds a process, in 1% of the time.

        Args:
            inner: Torch's iterator, whose workers are looked at.
            steps: Batches that were taken so far.
            batch_size: Samples of one.
        """
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + _EVERY_SECONDS
        for use in memory_uses():
            if self._use is None or use.room_bytes < self._use.room_bytes:
                self._use = use
        self._last = (now, paging())
        self._first = self._first or self._last
        if now < self._processes_due_at:
            return
        self._look_at_processes(worker_pids(inner), steps=steps, batch_size=batch_size)
        seconds = self._clock() - now
        self._looks.append(seconds)
        # The kernel counts their pages one by one.
        self._processes_due_at = now + seconds / _MAX_SHARE

    def result(self, *, prefetch_factor: int, epoch_samples: int | None) -> RankMemory | None:
        """Returns what was seen; None: nothing.

        Args:
            prefetch_factor: Batches that each worker makes ahead.
            epoch_samples: Samples of an epoch of this rank, if known.
        """
        if self._first is None or self._last is None:
            return None
        seconds = self._last[0] - self._first[0]
        before = self._first[1]
        after = self._last[1]
        growths = [growth_of(points) for points in self._workers.values()]
        grown = [
            growth.grown * points[-1].done
            for growth, points in zip(growths, self._workers.values(), strict=True)
        ]
        privates = [points[-1].private_bytes for points in self._workers.values()]
        swapped = after.swapped_in_bytes + after.swapped_out_bytes
        swapped -= before.swapped_in_bytes + before.swapped_out_bytes
        use = self._use or _NOT_KNOWN
        memory = RankMemory(
            looks=len(self._looks),
            look_seconds=fmean(self._looks),
            limit_bytes=use.limit_bytes,
            used_bytes=use.used_bytes,
            is_cgroups=use.is_cgroups,
            only_slows=use.only_slows,
            trainer_bytes=self._trainer_bytes,
            workers=self._num_workers,
            worker_bytes=max(self._worker_bytes, default=0.0),
            worker_private_bytes=fmean(privates or [0]),
            copied_bytes_per_sample=max((growth.copied for growth in growths), default=0.0),
            grown_bytes_per_sample=max((growth.grown for growth in growths), default=0.0),
            grown_bytes=max(grown, default=0.0),
            swapped_bytes=self._swapped_bytes,
            swapped_bytes_per_second=_per_second(swapped, seconds),
            refaulted_bytes_per_second=_per_second(
                after.refaulted_bytes - before.refaulted_bytes, seconds
            ),
            major_faults_per_second=_per_second(after.major_faults - before.major_faults, seconds),
            prefetch_factor=prefetch_factor,
            epoch_samples=epoch_samples,
        )
        if use.limit_bytes and use.share >= _SHORT:
            memory = _with_other_holders(memory)
        return memory

    def _look_at_processes(self, pids: Sequence[int], *, steps: int, batch_size: int) -> None:
        trainer = process_memory(os.getpid())
        swapped = 0
        if trainer is not None:
            # PSS: of a page that several processes share, each counts its part.
            self._trainer_bytes = max(self._trainer_bytes, trainer.pss_bytes)
            swapped += trainer.swapped_bytes
        shared: list[int] = []
        for pid in pids:
            worker = process_memory(pid)
            if worker is not None:
                # Torch deals batches out in turn: each worker made an equal part of the samples.
                self._workers[pid].append(_point(steps * batch_size / len(pids), worker))
                shared.append(worker.pss_bytes)
                swapped += worker.swapped_bytes
        if shared:
            self._num_workers = max(self._num_workers, len(shared))
            self._worker_bytes.append(fmean(shared))
        self._swapped_bytes = max(self._swapped_bytes, swapped)


def _with_other_holders(memory: RankMemory) -> RankMemory:
    files = files_in_memory(least_bytes=int(_LEAST_FILES * memory.limit_bytes))
    files_bytes = files.num_bytes
    shared = group_shared_bytes()
    if memory.is_cgroups and shared is not None:
        # Files that another group has written count for that one.
        files_bytes = min(files_bytes, shared)
    others = other_programs(everywhere=not memory.is_cgroups)
    return msgspec.structs.replace(
        memory,
        others_bytes=others.num_bytes,
        largest_other=others.holder,
        files_bytes=files_bytes,
        files_folder=files.holder,
    )


class Growth(NamedTuple):
    """Bytes copied, and bytes grown, for each sample or step."""

    copied: float = 0.0
    grown: float = 0.0


def growth_of(points: Sequence[_Point]) -> Growth:
    """Returns the steady growth after a warm-up; nothing where it comes and goes, or is not known.

    What is copied once, as by Python's garbage collector, is no growth: a median of intervals.
    """
    usual = [point for point in points if point.done > _WARM_UP_SHARE * points[-1].done]
    if len(usual) < _LEAST_LOOKS or usual[-1].done <= usual[0].done:
        return Growth()
    pairs = list(itertools.pairwise(usual))
    copied = [
        copied_between(earlier, later) / (later.done - earlier.done)
        for earlier, later in pairs
        if later.done > earlier.done
    ]
    # A heap grows in jumps: over the whole time, if most looks saw more than the one before.
    grew = [later.anonymous_bytes > earlier.anonymous_bytes for earlier, later in pairs]
    grown = 0.0
    if sum(grew) >= _STEADY_SHARE * len(grew):
        grown = _grown_for_each(usual)
        # A cache that has filled up grows no more.
        if _grown_for_each(usual[len(usual) // 2 :]) < _LEAST_LATE * grown:
            grown = 0.0
    return Growth(copied=max(0.0, median(copied)), grown=max(0.0, grown))


def _grown_for_each(points: Sequence[_Point]) -> float:
    grown = points[-1].anonymous_bytes - points[0].anonymous_bytes
    return grown / max(1, points[-1].done - points[0].done)


def copied_between(earlier: _Point, later: _Point) -> int:
    """Returns the bytes of inherited pages that became a process's own between two looks."""
    grown = later.anonymous_bytes - earlier.anonymous_bytes
    copied = later.private_bytes - earlier.private_bytes - grown
    if earlier.pss_anonymous_bytes is None or later.pss_anonymous_bytes is None:
        return copied
    # Pages of files and of shared memory that it wrote are private, too, and no copies. Of a copy
    # at least a half is gained: it was shared by two processes or more.
    gained = later.pss_anonymous_bytes - earlier.pss_anonymous_bytes - grown
    return min(copied, 2 * gained)


def worker_pids(inner: object) -> list[int]:
    """Returns the pids of a torch iterator's workers; none where it has no workers."""
    workers = cast("Sequence[object]", getattr(inner, "_workers", ()))
    pids = [getattr(worker, "pid", None) for worker in workers]
    return [pid for pid in pids if isinstance(pid, int)]


def measure_growth(
    loader: Loader, *, seconds: float, iterate: Iterate
) -> tuple[WorkerGrowth | None, list[str]]:
    """Measures in a fresh worker how its memory grows; blocks for about `seconds` and its start."""
    reports = run_in_workers(
        loader,
        watch_own_memory,
        workers=1,
        num_batches=max(1, _MAX_SAMPLES // max(1, loader.batch_size or 1)),
        seconds=seconds,
        iterate=iterate,
    )
    return next(iter(reports), None), []


def watch_own_memory(source: TaskSource, until: float) -> WorkerGrowth | None:
    """Makes samples in a worker until then, once around, and looks at its memory meanwhile."""
    batches = source.samples()
    growth_of_objects = ObjectsGrowth(source, batches)
    began = time.monotonic()
    every = (until - began) / _LOOKS
    points: list[_Point] = []
    samples = 0
    due_at = began
    for items in batches:
        source.collate(items)
        samples += source.num_samples(items)
        growth_of_objects.made(samples)
        del items
        now = time.monotonic()
        if now >= due_at:
            give_back_freed()
            if memory := process_memory(os.getpid()):
                points.append(_point(samples, memory))
            growth_of_objects.look()
            due_at = now + every
        # On a busy machine a few batches take all of the time.
        is_seen = len(points) >= _LEAST_POINTS or now >= 2 * until - began
        if now >= until and is_seen:
            break
    if not points:
        return None
    growth = growth_of(points)
    return WorkerGrowth(
        samples=samples,
        copied_bytes_per_sample=growth.copied,
        grown_bytes_per_sample=growth.grown,
        growing=growth_of_objects.growing(),
    )


class _ObjectsSeen(NamedTuple):
    """Sizes of what may grow, and some elements, after so many samples and batches."""

    samples: int
    batches: int
    dataset: dict[str, Size]
    stream: dict[str, Size]
    collate: dict[str, Size]
    elements: dict[str, Elements]


class ObjectsGrowth:
    """What grows of a dataset with its samples, and of its collate function with their batches.

    Args:
        source: The dataset and its collate function.
        samples: The generator of its samples, through which a stream's own are found.
    """

    def __init__(self, source: TaskSource, samples: Iterator[object]) -> None:
        self._source = source
        self._generator = samples
        self._samples = self._batches = self._looks = 0
        # Those of the first look, and of the latest.
        self._streams: list[dict[str, Size]] = []
        indices = list(itertools.islice(_numbers_of(source.indices), _SAMPLED))
        self._seen = [self._see(elements_of(source.dataset, indices))]

    def made(self, samples: int) -> None:
        """Counts a batch.

        Args:
            samples: That were made so far.
        """
        self._samples = samples
        self._batches += 1

    def look(self) -> None:
        """Looks at a stream's variables, in 0.1 ms, and now and then at all, in milliseconds."""
        self._looks += 1
        if sizes := stream_sizes(self._generator):
            # Those are there while it is read.
            self._streams = [*self._streams[:1], sizes]
        if self._looks % _EVERY_LOOKS == 0:
            self._seen.append(self._see(measured_again(self._seen[0].elements)))

    def _see(self, elements: dict[str, Elements]) -> _ObjectsSeen:
        return _ObjectsSeen(
            self._samples,
            self._batches,
            sizes_of(self._source.dataset),
            self._streams[-1] if self._streams else {},
            sizes_of(self._source.collate),
            elements,
        )

    def growing(self) -> tuple[GrowingObjects, ...]:
        """Returns the collections that grow to the end, the dataset's first."""
        now = self._see({})
        first = self._seen[0]._replace(stream=self._streams[0] if self._streams else {})
        half = [seen for seen in self._seen if 2 * seen.samples <= now.samples][-1]
        samples = Stretch(half.samples, now.samples)
        batches = Stretch(half.batches, now.batches)
        looks = [first, *self._seen[1:], now]
        of_dataset = [seen.dataset for seen in looks]
        of_collate = [seen.collate for seen in looks]
        growing = [
            *grown_to_the_end(of_dataset, half.dataset, samples),
            *grown_to_the_end([first.stream, now.stream], half.stream, samples),
        ]
        names = {grown.name for grown in growing}
        per_sample = now.batches / max(1, now.samples)
        for grown in grown_to_the_end(of_collate, half.collate, batches):
            if grown.name not in names:
                count = grown.count_per_sample * per_sample
                growing.append(msgspec.structs.replace(grown, count_per_sample=count))
        if growing:
            return tuple(growing)
        return loaded_since(first.elements, half.elements, samples)


def _numbers_of(indices: Sequence[object]) -> Iterator[int]:
    """Yields the single indices of batches, or those that are no batches."""
    for index in indices:
        parts = index if isinstance(index, list | tuple) else (index,)
        for part in parts:
            if isinstance(part, int) and part >= 0:
                yield part


def _point(done: float, memory: ProcessMemory) -> _Point:
    # A page that is swapped in again is neither copied nor new.
    swapped = memory.swapped_bytes
    pss = memory.pss_anonymous_bytes
    if pss is not None:
        pss += swapped
    return _Point(done, memory.private_bytes + swapped, memory.anonymous_bytes + swapped, pss)


def _per_second(amount: float, seconds: float) -> float:
    if seconds <= 0:
        return 0.0
    return max(0.0, amount / seconds)
