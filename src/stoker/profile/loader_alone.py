"""The loader measured alone: its cost, its rate with some numbers of workers, and its parts."""

import cProfile
import os
import pstats
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple, cast

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset

from stoker.decide.model import MOST_WORKERS_PER_VCPU, WAITS
from stoker.feed.timed import num_samples
from stoker.host.usage import children_cpu_seconds, thread_seconds
from stoker.profile.rank_results import Drain
from stoker.records import TransformCost

Loader = DataLoader[object]
Iterate = Callable[[Loader], Iterator[object]]

# A round may last this much longer than its share, until its slowest workers have begun.
_START_SECONDS = 20.0
# The round of one number of workers: in a shorter one their start weighs too much.
_ROUND_SECONDS = 3.0
_LONGEST_ROUND_SECONDS = 4.0
_LEAST_SECONDS = 0.5
# Workers are idle when they use less than this share of a vCPU in this many polls.
_IDLE_SHARE = 0.05
_QUIET_POLLS = 2
_POLL_SECONDS = 0.1
# Functions that are named, those with most time of their own.
_MAX_FUNCTIONS = 6
# As long as a name in a record may be.
_MAX_NAME = 200


class Stamp(NamedTuple):
    """A worker's clocks when a batch was done, in seconds."""

    pid: int
    cpu: float
    now: float
    # Less the time in the run queue: with more workers than vCPUs that is most of it.
    ready: float


@dataclass(frozen=True, slots=True)
class StampedCollate:
    """The script's collate function, which also returns when the worker was done."""

    collate: Callable[[list[object]], object]

    def __call__(self, samples: list[object]) -> tuple[object, Stamp]:
        batch = self.collate(samples)
        _, queued = thread_seconds()
        now = time.monotonic()
        return batch, Stamp(os.getpid(), time.process_time(), now, now - queued)


def drain(loader: Loader, *, workers: int, seconds: float, iterate: Iterate) -> Drain | None:
    """Reads from `workers` fresh workers for about `seconds`; None: none made two batches.

    A worker's first batch includes its start and is not counted; then a batch's cost is what the
    worker used from one batch to the next. Raises any error of the dataset, and RuntimeError if no
    batch comes for 20 s beyond `seconds`.
    """
    collate = StampedCollate(loader.collate_fn)
    timeout = seconds + _START_SECONDS
    endless = _endless(loader, collate=collate, workers=workers, timeout=timeout)
    until = time.monotonic() + seconds
    stamps: dict[int, list[Stamp]] = {}
    with _reading(endless, iterate) as iterator:
        for item in iterator:
            _, stamp = cast("tuple[object, Stamp]", item)
            # Its shared memory is free again before the next batch is waited for.
            del item, _
            stamps.setdefault(stamp.pid, []).append(stamp)
            now = time.monotonic()
            # Three of each: the first one holds the worker's start, and two make a rate.
            is_measured = len(stamps) == workers and min(map(len, stamps.values())) >= 3
            if now >= until + _START_SECONDS or (now >= until and is_measured):
                break
    spans = [(of[0], of[-1], len(of) - 1) for of in stamps.values() if len(of) > 1]
    if not spans:
        return None
    batches = sum(count for _, _, count in spans)
    wall = sum(last.ready - first.ready for first, last, _ in spans) / batches
    rate = sum(count / (last.now - first.now) for first, last, count in spans)
    return Drain(
        workers=workers,
        cpu_seconds=sum(last.cpu - first.cpu for first, last, _ in spans) / batches,
        wall_seconds=max(0.0, wall),
        batches_per_second=rate if len(spans) == workers else 0.0,
    )


def _endless(
    loader: Loader, *, collate: Callable[[list[object]], object], workers: int, timeout: float
) -> Loader:
    """Returns a loader of the same batches without an end.

    Args:
        timeout: Seconds after which a batch that does not come is an error.
    """
    batching: dict[str, object]
    if isinstance(loader.dataset, IterableDataset):
        batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        batching = {"batch_sampler": _again(loader.batch_sampler)}
    else:
        batching = {"batch_size": None, "sampler": _again(loader.sampler)}
    with warnings.catch_warnings():
        # The script may have more workers than vCPUs, so that is tried, too.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return torch.utils.data.DataLoader(
            loader.dataset,
            **batching,  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=collate,
            timeout=timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            # More than the script's: reading must never be what the workers wait for.
            prefetch_factor=max(2, loader.prefetch_factor or 2),
        )


def _again(indices: Iterable[object]) -> Iterator[object]:
    return chain.from_iterable(repeat(indices))


@contextmanager
def _reading(loader: Loader, iterate: Iterate) -> Iterator[Iterator[object]]:
    """Gives an iterator whose workers end with the block."""
    iterator = iterate(loader)
    try:
        yield iterator
    finally:
        shut_down(iterator)


def shut_down(iterator: object) -> None:
    """Ends the workers of a torch iterator, if it has any; a worker ends after its batch."""
    if end := getattr(iterator, "_shutdown_workers", None):
        end()


def error_words(error: Exception) -> str:
    """Returns an error in one line: a worker's own error stands at the end of torch's."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1][:200]


def worker_counts(*, script: int, vcpus: int, seconds: float) -> list[int]:
    """Returns the numbers of workers of one rank that are tried, the most informative first.

    Args:
        script: The script's own number of workers.
        vcpus: Of this rank.
        seconds: Time for all of them: less than 3 s each leave out the last ones.
    """
    # Every vCPU busy (what loading costs), one alone (how long it takes), the script's own; too few
    # are more by doubling, up to the cores.
    counts = [vcpus, 1, max(1, script)]
    counts += (2**power for power in range(1, vcpus.bit_length()) if script < 2**power < vcpus)
    return [*dict.fromkeys(counts)][: max(3, int(seconds / _ROUND_SECONDS))]


def workers_rest(*, seconds: float) -> bool:
    """Waits until the processes below this one are idle; False if they are not in `seconds`."""
    until = time.monotonic() + seconds
    before = 0.0
    num_quiet = 0
    while num_quiet < _QUIET_POLLS:
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
        now = children_cpu_seconds()
        num_quiet = num_quiet + 1 if now - before < _IDLE_SHARE * _POLL_SECONDS else 0
        before = now
    return True


def try_workers(
    loader: Loader, *, vcpus: int, seconds: float, most: int, iterate: Iterate
) -> tuple[tuple[Drain, ...], dict[int, str]]:
    """Reads the loader alone at several numbers of workers, for `seconds` in all.

    Args:
        vcpus: Of this rank.
        most: Workers that may be tried of a loader that waits: more than vCPUs.

    Returns:
        What was measured, and by number of workers why it gave no figures.
    """
    drains: dict[int, Drain] = {}
    failed: dict[int, str] = {}
    counts = worker_counts(script=loader.num_workers, vcpus=vcpus, seconds=seconds)
    share = max(_LEAST_SECONDS, min(_LONGEST_ROUND_SECONDS, seconds / len(counts)))
    until = time.monotonic() + seconds

    def try_all(counts: Iterable[int]) -> None:
        for workers in counts:
            if drains and time.monotonic() >= until:
                return
            try:
                if found := drain(loader, workers=workers, seconds=share, iterate=iterate):
                    drains[workers] = found
            except Exception as err:
                # A process edge: the dataset is the user's, and may not work in workers at all.
                failed[workers] = error_words(err)

    try_all(counts)
    alone = drains.get(1)
    if alone and alone.wall_seconds > WAITS * alone.cpu_seconds:
        more = {2 * vcpus, MOST_WORKERS_PER_VCPU * vcpus} - drains.keys()
        try_all(workers for workers in sorted(more) if workers <= most)
    return tuple(drains.values()), failed


# The parts of loading a sample.


def measure_parts(loader: Loader, *, seconds: float, iterate: Iterate) -> tuple[TransformCost, ...]:
    """Returns what getitem, collate and their functions cost, under cProfile in a fresh worker.

    Blocks for about `seconds`. Raises any error of the dataset, and RuntimeError if the worker does
    not answer for 20 s beyond `seconds`.
    """
    collate = _PartsCollate(loader.collate_fn, seconds=seconds)
    endless = _endless(loader, collate=collate, workers=1, timeout=seconds + _START_SECONDS)
    with _reading(endless, iterate) as iterator:
        costs = cast("Iterator[tuple[TransformCost, ...]]", iterator)
        return next(filter(None, costs), ())


class _PartsCollate:
    """The script's collate function, which takes its worker's loading apart.

    It returns no batches: nothing until its time is over, then what the parts cost.
    """

    def __init__(self, collate: Callable[[list[object]], object], *, seconds: float) -> None:
        self._collate = collate
        self._seconds = seconds
        self._until = self._collate_seconds = 0.0
        self._num_samples = 0
        self._fetching: cProfile.Profile | None = None

    def __call__(self, items: list[object]) -> tuple[TransformCost, ...]:
        fetching = self._fetching
        if fetching is None:
            # In the worker. The first batch imports, opens and fills caches, and does not count.
            self._collate(items)
            self._until = time.monotonic() + self._seconds
            fetching = self._fetching = cProfile.Profile(time.thread_time)
        else:
            fetching.disable()
            began = time.thread_time()
            self._collate(items)
            self._collate_seconds += time.thread_time() - began
            self._num_samples += len(items) if isinstance(items, list) else num_samples(items)
            if time.monotonic() >= self._until:
                return tuple(self._costs(fetching))
        fetching.enable()
        return ()

    def _costs(self, fetching: cProfile.Profile) -> Iterator[TransformCost]:
        """Yields getitem, its functions with most time of their own, and collate."""
        fetching.create_stats()
        rows = pstats.Stats(fetching).stats  # type: ignore[attr-defined]
        seconds = {_name(*place): row[2] for place, row in rows.items()}
        dearest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_MAX_FUNCTIONS]
        parts = {"getitem": sum(seconds.values()), "collate": self._collate_seconds}
        whole = max(sum(parts.values()), 1e-9)
        for name in ("getitem", *dearest, "collate"):
            cpu_seconds = parts.get(name, seconds.get(name, 0.0))
            yield TransformCost(
                name=name,
                within="getitem" if name in dearest else None,
                cpu_seconds=cpu_seconds / self._num_samples,
                share=cpu_seconds / whole,
                samples=self._num_samples,
            )


def _name(file: str, line: int, function: str) -> str:
    # Of C there is no file.
    is_python = file not in ("~", "")
    return (f"{Path(file).name}:{line} {function}" if is_python else function)[:_MAX_NAME]
