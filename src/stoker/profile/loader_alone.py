"""The loader measured alone: its cost, its rate with some numbers of workers, and its parts."""

import cProfile
import os
import pstats
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import NamedTuple, cast

import psutil
import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset

from stoker.decide.model import MOST_WORKERS_PER_VCPU, WAITS
from stoker.host.machine import process_clock
from stoker.host.usage import children_cpu_seconds, queued_seconds, room_bytes
from stoker.profile.facts import num_samples
from stoker.profile.rank_results import Drain, quartiles
from stoker.records import TransformCost

Loader = DataLoader[object]
Iterate = Callable[[Loader], Iterator[object]]

# A round may last this much longer than its share, until its slowest workers have begun.
_START_SECONDS = 20.0
# The round of one number of workers: in a shorter one their start weighs too much.
_ROUND_SECONDS = 3.0
_LEAST_SECONDS = 0.5
_MOST_ROUNDS = 2
# In an error that torch hands on from a worker.
_TRACEBACK = "Original Traceback (most recent call last)"
# Workers are idle when they use less than this share of a vCPU in this many polls.
_IDLE_SHARE = 0.05
_QUIET_POLLS = 2
_POLL_SECONDS = 0.1
# More workers of a loader that waits need memory, and a start each.
_MOST_TRIED = 64
_HELD_BATCHES = 3
_ROOM_PART = 4
# Functions that are named, those with most time of their own.
_MAX_FUNCTIONS = 6
# As long as a name in a record may be.
_MAX_NAME = 200


class Stamp(NamedTuple):
    """A worker's clocks when a batch was done, in seconds."""

    pid: int
    cpu: float
    now: float
    queued: float


@dataclass(frozen=True, slots=True)
class StampedCollate:
    """The script's collate function, which also returns when the worker was done."""

    collate: Callable[[list[object]], object]

    def __call__(self, samples: list[object]) -> tuple[object, Stamp]:
        batch = self.collate(samples)
        return batch, Stamp(os.getpid(), time.process_time(), time.monotonic(), queued_seconds())


# Each worker's stamps, of one pass.
Round = list[list[Stamp]]


def read_round(loader: Loader, *, workers: int, seconds: float, iterate: Iterate) -> Round:
    """Reads from `workers` fresh workers for about `seconds`.

    A worker's first batch includes its start and is not counted; then a batch's cost is what the
    worker used from one batch to the next. Raises any error of the dataset, and RuntimeError if no
    batch comes for 20 s beyond `seconds`.
    """
    collate = StampedCollate(loader.collate_fn)
    timeout = seconds + _START_SECONDS
    endless = _endless(loader, collate=collate, workers=workers, timeout=timeout)
    until = time.monotonic() + seconds
    stamps: dict[int, list[Stamp]] = {}
    with reading(endless, iterate) as iterator:
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
    return [*stamps.values()]


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
def reading(loader: Loader, iterate: Iterate) -> Iterator[Iterator[object]]:
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


def summarize(rounds: Sequence[Round], *, workers: int) -> Drain | None:
    """Sums up all rounds; None where no worker made two batches."""
    pairs = [*chain.from_iterable(map(pairwise, chain.from_iterable(rounds)))]
    if not pairs:
        return None
    rates = [_rate(part) for part in rounds if len(part) == workers]
    seconds = sum(seconds for _, seconds in rates)
    return Drain(
        workers=workers,
        cpu_seconds=quartiles([later.cpu - earlier.cpu for earlier, later in pairs]),
        # Less the time in the run queue: with more workers than vCPUs that is most of it. The
        # kernel counts a wait when it ends, which may be after the stamp before it.
        wall_seconds=quartiles(
            [
                max(0.0, later.now - earlier.now - (later.queued - earlier.queued))
                for earlier, later in pairs
            ]
        ),
        batches_per_second=sum(count for count, _ in rates) / seconds if seconds else 0.0,
    )


def _rate(stamps: Round) -> tuple[int, float]:
    """Returns batches and seconds in which all workers ran."""
    # All workers run only between the last first batch and the first last one.
    begin = max(of_worker[0].now for of_worker in stamps)
    end = min(of_worker[-1].now for of_worker in stamps)
    times = [stamp.now for stamp in chain.from_iterable(stamps)]
    return sum(begin < now <= end for now in times), max(0.0, end - begin)


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


def waiting_counts(drains: Sequence[Drain], *, vcpus: int, batch_bytes: int) -> list[int]:
    """Returns more workers than vCPUs, to try for a loader that waits; none if it does not.

    Args:
        drains: What was measured already.
        batch_bytes: Size of a batch; each worker holds the one that it makes and two ready ones.
    """
    alone = min(drains, key=lambda drain: drain.workers, default=None)
    if alone is None or alone.wall_seconds.median <= WAITS * alone.cpu_seconds.mean:
        return []
    room = room_bytes(psutil.virtual_memory().available) // _ROOM_PART
    most = min(_MOST_TRIED, room // max(1, _HELD_BATCHES * batch_bytes))
    tried = {drain.workers for drain in drains}
    more = (2 * vcpus, MOST_WORKERS_PER_VCPU * vcpus)
    return [workers for workers in more if workers <= most and workers not in tried]


def workers_rest(iterator: object, *, seconds: float) -> bool:
    """Waits until the workers have filled their queues; False if they did not within `seconds`.

    Only a torch iterator's own workers count, where they are known: a script may have other
    processes that are never idle.
    """
    until = time.monotonic() + seconds
    before = 0.0
    num_quiet = 0
    while time.monotonic() < until:
        now = _cpu_seconds_of_workers(iterator)
        num_quiet = num_quiet + 1 if now - before < _IDLE_SHARE * _POLL_SECONDS else 0
        if num_quiet == _QUIET_POLLS:
            return True
        before = now
        time.sleep(_POLL_SECONDS)
    return False


def _cpu_seconds_of_workers(iterator: object) -> float:
    pids = [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid]
    running = [clock for pid in pids if (clock := process_clock(pid)) is not None]
    if not running:
        return children_cpu_seconds()
    return sum(running)


def try_workers(
    loader: Loader,
    counts: Sequence[int],
    *,
    seconds: float,
    more: Callable[[Sequence[Drain]], Sequence[int]],
    iterate: Iterate,
) -> tuple[tuple[Drain, ...], dict[int, str]]:
    """Reads at each of `counts`, in turns, for `seconds` at most.

    Args:
        more: Returns counts to try as well, from what the first turn of `counts` gave; without time
            for a second turn it is not asked.

    Returns:
        What was measured, and by number of workers why it gave no figures.
    """
    rounds = defaultdict[int, list[Round]](list)
    failed: dict[int, str] = {}
    turns = max(1, min(_MOST_ROUNDS, int(seconds / len(counts) / _ROUND_SECONDS)))
    share = max(_LEAST_SECONDS, min(_ROUND_SECONDS, seconds / len(counts) / turns))
    tried = [*counts]
    until = time.monotonic() + seconds
    # In turns: a machine that becomes slower or faster meanwhile does so for all counts.
    for turn in range(turns):
        tried += more(_drains(rounds)) if turn else ()
        for workers in tried:
            if workers in failed or (rounds and time.monotonic() >= until):
                continue
            try:
                read = read_round(loader, workers=workers, seconds=share, iterate=iterate)
                rounds[workers].append(read)
            except Exception as err:
                # A process edge: the dataset is the user's, and may not work in workers at all.
                failed[workers] = error_words(err)
    return _drains(rounds), failed


def _drains(rounds: Mapping[int, Sequence[Round]]) -> tuple[Drain, ...]:
    drains = (summarize(parts, workers=workers) for workers, parts in rounds.items())
    return tuple(drain for drain in drains if drain is not None)


# The parts of loading a sample.


def measure_parts(loader: Loader, *, seconds: float, iterate: Iterate) -> tuple[TransformCost, ...]:
    """Returns what getitem, collate and their functions cost, under cProfile in a fresh worker.

    Blocks for about `seconds`. Empty: there were too few batches. Raises any error of the dataset,
    and RuntimeError if the worker does not answer for 20 s beyond `seconds`.
    """
    collate = _PartsCollate(loader.collate_fn, seconds=seconds)
    endless = _endless(loader, collate=collate, workers=1, timeout=seconds + _START_SECONDS)
    with reading(endless, iterate) as iterator:
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
        if self._fetching is None:
            # In the worker. The first batch imports, opens and fills caches, and does not count.
            self._collate(items)
            self._until = time.monotonic() + self._seconds
            self._fetching = cProfile.Profile(time.thread_time)
        else:
            self._fetching.disable()
            began = time.thread_time()
            self._collate(items)
            self._collate_seconds += time.thread_time() - began
            self._num_samples += len(items) if isinstance(items, list) else num_samples(items)
            if time.monotonic() >= self._until:
                return self._costs(self._fetching)
        self._fetching.enable()
        return ()

    def _costs(self, fetching: cProfile.Profile) -> tuple[TransformCost, ...]:
        """Returns getitem, its functions with most time of their own, and collate."""
        fetching.create_stats()
        rows = pstats.Stats(fetching).stats  # type: ignore[attr-defined]
        seconds = {_name(*place): row[2] for place, row in rows.items()}
        getitem = sum(seconds.values())
        whole = max(getitem + self._collate_seconds, 1e-9)

        def cost(name: str, cpu_seconds: float, *, is_within: bool = False) -> TransformCost:
            return TransformCost(
                name=name,
                within="getitem" if is_within else None,
                cpu_seconds=cpu_seconds / self._num_samples,
                share=cpu_seconds / whole,
                samples=self._num_samples,
            )

        dearest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_MAX_FUNCTIONS]
        functions = [cost(name, seconds[name], is_within=True) for name in dearest]
        return cost("getitem", getitem), *functions, cost("collate", self._collate_seconds)


def _name(file: str, line: int, function: str) -> str:
    # Of C there is no file.
    is_python = file not in ("~", "")
    return (f"{Path(file).name}:{line} {function}" if is_python else function)[:_MAX_NAME]
