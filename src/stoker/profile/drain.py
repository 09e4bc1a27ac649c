"""The loader without the model: what a batch costs its workers, and how fast some number are."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset

from stoker.profile.clocks import queued_seconds
from stoker.profile.raw import Drain, quartiles

# Beyond its share a drain may last this long, until its slowest workers have begun.
_START_SECONDS = 20.0

# So much slower than it loads, a loader has its batches ready.
_PACE = 1.3
_PACED_SHARE = 0.15
_MOST_PACED, _LEAST_PACED = 24, 6
# Until the queue of a reader that had waited for each batch is filled.
_FILLING = 3

Stamp = tuple[int, float, float, float]


@dataclass(frozen=True, slots=True)
class Round:
    """One drain of a loader.

    Attributes:
        stamps: Of the batches of each worker.
        handovers: Seconds of the reader to take batches that were ready.
    """

    stamps: list[list[Stamp]]
    handovers: list[float] = field(default_factory=list)


class StampedCollate:
    """Collates as the script does, and says when the worker was done: (pid, CPU, wall, queued)."""

    def __init__(self, collate: Callable[[list[object]], object]) -> None:
        self._collate = collate

    def __call__(self, samples: list[object]) -> tuple[object, Stamp]:
        """The batch and its stamp."""
        batch = self._collate(samples)
        return batch, (os.getpid(), time.process_time(), time.monotonic(), queued_seconds())


class Endless:
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


def drain(
    loader: "DataLoader[object]",
    *,
    workers: int,
    seconds: float,
    is_stopped: Callable[[], bool],
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> Drain | None:
    """What one round says; None where too few batches came."""
    read = read_round(
        loader, workers=workers, seconds=seconds, is_stopped=is_stopped, iterate=iterate
    )
    return summarize([read], workers=workers)


def read_round(
    loader: "DataLoader[object]",
    *,
    workers: int,
    seconds: float,
    is_stopped: Callable[[], bool],
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> Round:
    """Reads from `workers` fresh workers for about `seconds`: flat out, then a little slower.

    The workers are torch's own, with the loader's dataset, sampler and collate function. A worker's
    first batch holds its start and is not counted; then a batch's cost is what the worker used
    from one batch to the next: fetch, collate and the hand-over.

    Args:
        iterate: Torch's own `DataLoader.__iter__`.

    Raises:
        Exception: What the dataset raises; RuntimeError if it sends nothing for 20 s beyond
            `seconds`.
    """
    began = time.monotonic()
    until = began + (1 - _PACED_SHARE) * seconds
    stamps: dict[int, list[Stamp]] = {}
    handovers: list[float] = []
    first: float | None = None
    count = 0
    with warnings.catch_warnings():
        # More workers than vCPUs is what the script may have, and is tried for that reason.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        fresh = _with_workers(loader, workers=workers, timeout=seconds + _START_SECONDS)
        iterator = iterate(fresh)
    try:
        for item in iterator:
            assert isinstance(item, list | tuple)
            stamp: Stamp = item[1]
            del item
            stamps.setdefault(stamp[0], []).append(stamp)
            now = time.monotonic()
            if first is None:
                first = now
            else:
                count += 1
            is_measured = len(stamps) == workers and min(map(len, stamps.values())) >= 3
            if is_stopped() or now >= until + _START_SECONDS or (now >= until and is_measured):
                break
        if first is not None and count and not is_stopped():
            interval = (time.monotonic() - first) / count
            handovers = _handovers(iterator, every=_PACE * interval, until=began + seconds)
    finally:
        shut_down(iterator)
    return Round(list(stamps.values()), handovers)


def _handovers(iterator: Iterator[object], *, every: float, until: float) -> list[float]:
    """Seconds in next() at a pace at which batches are ready, yet their workers are busy.

    Torch opens the memory of a batch by asking its worker, which answers between two of its own
    operations: 2 to 3 ms where the worker holds the interpreter lock, and no CPU time of anybody.
    """
    num = min(_MOST_PACED, int((until - time.monotonic()) / every)) if every > 0 else 0
    if num < _LEAST_PACED:
        return []
    found = []
    for _ in range(num):
        time.sleep(every)
        asked = time.monotonic()
        if next(iterator, None) is None:
            break
        found.append(time.monotonic() - asked)
    return found[_FILLING:]


def summarize(rounds: list[Round], *, workers: int) -> Drain | None:
    """The costs in the stamps of each worker of each round; None where none made two batches."""
    pairs = [pair for each in rounds for own in each.stamps for pair in pairwise(own)]
    if not pairs:
        return None
    made, seconds = 0, 0.0
    for stamps in (each.stamps for each in rounds):
        if len(stamps) != workers:
            continue
        # All workers run between the last first batch and the first last one: only there is the
        # rate that of all of them.
        begin = max(own[0][2] for own in stamps)
        end = min(own[-1][2] for own in stamps)
        if end > begin:
            made += sum(1 for own in stamps for stamp in own if begin < stamp[2] <= end)
            seconds += end - begin
    handovers = [seconds for each in rounds for seconds in each.handovers]
    return Drain(
        workers=workers,
        cpu_seconds=quartiles([later[1] - earlier[1] for earlier, later in pairs]),
        wall_seconds=quartiles(
            [later[2] - earlier[2] - (later[3] - earlier[3]) for earlier, later in pairs]
        ),
        batches_per_second=made / seconds if seconds else 0.0,
        handover_seconds=quartiles(handovers) if handovers else None,
    )


def shut_down(iterator: object) -> None:
    """Ends the workers of a torch iterator, if it has any; a worker ends after its batch."""
    end = getattr(iterator, "_shutdown_workers", None)
    if callable(end):
        end()


def _with_workers(
    loader: "DataLoader[object]", *, workers: int, timeout: float
) -> "DataLoader[object]":
    is_iterable = isinstance(loader.dataset, IterableDataset)
    batches = loader.batch_sampler is not None
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_size=loader.batch_size if is_iterable else 1 if batches else None,
        batch_sampler=Endless(loader.batch_sampler) if batches and not is_iterable else None,  # type: ignore[arg-type]
        sampler=None if batches or is_iterable else Endless(loader.sampler),
        drop_last=loader.drop_last if is_iterable else False,
        num_workers=workers,
        collate_fn=StampedCollate(loader.collate_fn),
        timeout=timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        # More than the script's: reading must never be what the workers wait for.
        prefetch_factor=max(2, loader.prefetch_factor or 2),
    )
