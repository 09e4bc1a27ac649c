"""Work that fresh workers of the script's loader do once, with its dataset: the trainer's own
copies of both stay as they are.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stoker.profile.drain import Endless, shut_down

# Beyond its share a task may last this long, until its worker has begun.
_START_SECONDS = 20.0


class Task(Protocol):
    """What a worker does; must be picklable, as must its report."""

    def __call__(self, source: "Source", *, until: float) -> object:
        """Does it until about `until`, monotonic seconds, and gives the report."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The script's dataset inside a worker, and how its loader makes batches of it.

    Attributes:
        indices: Of each batch a list, or of each item an index where `is_batched` is false; of a
            stream only their number counts.
        is_batched: Whether items are collated by the loader.
        batch_size: Of a stream that is batched.
    """

    dataset: object
    collate: Callable[[object], object]
    indices: Sequence[object]
    is_stream: bool
    is_batched: bool
    batch_size: int

    def samples(self) -> Iterator[object]:
        """What is to be collated to one batch, once around; a stream begins anew."""
        if self.is_stream:
            items = iter(self.dataset)  # type: ignore[call-overload]
            for _ in self.indices:
                if not self.is_batched:
                    yield from itertools.islice(items, 1)
                    continue
                found = list(itertools.islice(items, self.batch_size))
                if not found:
                    return
                yield found
        else:
            for index in self.indices:
                yield self.get(index)

    def get(self, index: object) -> object:
        """The items of a batch, or one item where they are not batched."""
        dataset = self.dataset
        if not self.is_batched:
            return dataset[index]  # type: ignore[index]
        # As torch's fetcher.
        many = getattr(dataset, "__getitems__", None)
        if many:
            return cast("object", many(index))
        return [dataset[each] for each in index]  # type: ignore[index, attr-defined]


def run_in_workers(
    loader: "DataLoader[object]",
    task: Task,
    *,
    workers: int,
    num_batches: int,
    seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> list[object]:
    """Runs `task` in `workers` fresh workers at a time; gives their reports.

    Blocks for about `seconds`, and the start of the workers.

    Args:
        num_batches: For each worker.
        iterate: Torch's own `DataLoader.__iter__`.

    Raises:
        Exception: What the dataset raises; RuntimeError if it ends in nothing for 20 s beyond
            `seconds`.
    """
    shell = _Shell(loader, task, workers=workers, num_batches=num_batches, seconds=seconds)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        fresh: DataLoader[object] = torch.utils.data.DataLoader(
            shell,
            batch_size=None,
            sampler=range(workers),
            num_workers=workers,
            collate_fn=_as_it_is,
            timeout=seconds + _START_SECONDS,
            worker_init_fn=_Init(shell, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
        )
        iterator = iterate(fresh)
    try:
        return [report for report in iterator if report is not None]
    finally:
        shut_down(iterator)


class _Shell(torch.utils.data.Dataset[object]):
    """A dataset of tasks: to get an item is to do it."""

    def __init__(
        self,
        loader: "DataLoader[object]",
        task: Task,
        *,
        workers: int,
        num_batches: int,
        seconds: float,
    ) -> None:
        self.dataset = loader.dataset
        self._task = task
        self._collate = cast("Callable[[object], object]", loader.collate_fn)
        self._seconds = seconds
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._is_batched = loader.batch_sampler is not None or (
            self._is_stream and loader.batch_size is not None
        )
        self._batch_size = loader.batch_size or 1
        drawn: list[object] = [None] * (workers * num_batches)
        if not self._is_stream:
            source = loader.batch_sampler if self._is_batched else loader.sampler
            drawn = list(itertools.islice(Endless(source), workers * num_batches))
        self._indices = [drawn[number::workers] for number in range(workers)]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> object:
        source = Source(
            dataset=self.dataset,
            collate=self._collate,
            indices=self._indices[number],
            is_stream=self._is_stream,
            is_batched=self._is_batched,
            batch_size=self._batch_size,
        )
        return self._task(source, until=time.monotonic() + self._seconds)


class _Init:
    """The script's own `worker_init_fn`, which finds its dataset where torch puts it."""

    def __init__(self, shell: _Shell, own: Callable[[int], None] | None) -> None:
        self._shell = shell
        self._own = own

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            # The class refuses assignments to a finished one.
            object.__setattr__(info, "dataset", self._shell.dataset)
        if self._own is not None:
            self._own(worker_id)


def _as_it_is(report: object) -> object:
    return report
