"""torch's own iterators, with numbered and seeded batches and a timeline: no data group needed.

The only difference to torch: batch n is made from random states that depend on (base seed, replica,
epoch, n) and not on which worker makes it, or on what that worker did before. With no workers the
trainer's own random state is restored after each batch. `seeding: torch` and iterable datasets
are torch's own in every respect.
"""

import threading
import weakref

from torch.utils.data import DataLoader, _DatasetKind, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stoker.feed.iterators import Counted, Pass
from stoker.feed.process import Process
from stoker.feed.seeded_fetchers import PreservingFetcher, SeedingInit, WorkerInit
from stoker.feed.seeder import Seeder
from stoker.feed.seeding import Seeding


class LoaderView:
    """A loader as its iterator sees it, with some attributes replaced."""

    def __init__(self, loader: "DataLoader[object]", **changes: object) -> None:
        self._loader = loader
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class SingleProcessIterator(Counted, _SingleProcessDataLoaderIter):  # type: ignore[misc]
    """torch's iterator without workers."""

    def __init__(self, loader: "DataLoader[object] | LoaderView", pass_: Pass) -> None:
        self._pass = pass_
        super().__init__(loader)
        self._ask_sampler_again()
        if pass_.seeding != "torch":
            roots = {"dataset": self._dataset, "collate_fn": self._collate_fn}
            seeder = Seeder(roots, num_workers=None)
            self._dataset_fetcher = PreservingFetcher(self._dataset_fetcher, pass_.seeding, seeder)
        weakref.finalize(self, pass_.drop)

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        self._pass.begin()
        super()._reset(loader, first_iter)

    def _next_index(self) -> object:
        index: object = super()._next_index()  # type: ignore[no-untyped-call]
        return self._pass.for_fetcher(int(self._base_seed), index)

    def _next_data(self) -> object:  # type: ignore[override]
        before, _here.is_making = _is_making_here(), True
        try:
            batch: object = super()._next_data()  # type: ignore[no-untyped-call]
            return batch
        finally:
            _here.is_making = before

    def _num_taken(self) -> int:
        position = self._pass.order.position
        return position.num_handed - position.first

    def __next__(self) -> object:
        return self._counted(super().__next__)


class MultiProcessingIterator(Counted, _MultiProcessingDataLoaderIter):  # type: ignore[misc]
    """torch's iterator with workers."""

    def __init__(self, loader: "DataLoader[object] | LoaderView", pass_: Pass) -> None:
        self._pass = pass_
        self._user_init: WorkerInit | None = None
        super().__init__(loader)
        weakref.finalize(self, pass_.drop)

    # torch stores the loader's function here, and hands what is here to its workers.
    @property
    def _worker_init_fn(self) -> WorkerInit | None:
        if self._pass.seeding == "torch":
            return self._user_init
        return SeedingInit(self._user_init, self._pass.seeding, num_workers=self._pass.num_workers)

    @_worker_init_fn.setter
    def _worker_init_fn(self, user: WorkerInit | None) -> None:
        self._user_init = user

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        if not first_iter:
            self._pass.begin()
        super()._reset(loader, first_iter)

    def _next_index(self) -> object:
        index: object = super()._next_index()  # type: ignore[no-untyped-call]
        return self._pass.for_fetcher(int(self._base_seed), index)

    def _num_taken(self) -> int | None:
        return int(self._rcvd_idx) if self._in_order else None

    def __next__(self) -> object:
        return self._counted(super().__next__)


TorchIterator = SingleProcessIterator | MultiProcessingIterator

_here = threading.local()


def _is_making_here() -> bool:
    return bool(getattr(_here, "is_making", False))


def is_making() -> bool:
    """Whether a batch is being made here: a loader that is iterated over now is a part of it."""
    return _is_making_here() or get_worker_info() is not None


def part_iterator(loader: "DataLoader[object]") -> _BaseDataLoaderIter:
    """torch's own iterator, for a loader that another one's dataset goes through.

    It draws from the random states of the batch that it is a part of, wherever that is made.
    """
    if loader.num_workers == 0:
        return _SingleProcessDataLoaderIter(loader)
    return _MultiProcessingDataLoaderIter(loader)


def torch_iterator(
    loader: "DataLoader[object]", process: Process, *, num_workers: int | None = None
) -> TorchIterator:
    """torch's iterator for `loader`.

    Args:
        num_workers: In place of the loader's own, where it was decided.
    """
    is_map_style = loader._dataset_kind == _DatasetKind.Map
    seeding: Seeding = process.settings.feed.seeding if is_map_style else "torch"
    seen = loader if num_workers is None else with_workers(loader, num_workers)
    pass_ = Pass(process, loader, seeding=seeding, is_inline=seen.num_workers == 0)
    if seen.num_workers == 0:
        return SingleProcessIterator(seen, pass_)
    if num_workers is None:
        loader.check_worker_number_rationality()
    return MultiProcessingIterator(seen, pass_)


def with_workers(loader: "DataLoader[object]", num_workers: int) -> LoaderView:
    """`loader` with another number of workers, and what depends on it made to fit."""
    if num_workers == 0:
        return LoaderView(
            loader, num_workers=0, prefetch_factor=None, timeout=0, persistent_workers=False
        )
    return LoaderView(loader, num_workers=num_workers, prefetch_factor=loader.prefetch_factor or 2)
