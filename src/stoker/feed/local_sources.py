"""Batches made on this host as torch makes them: by its own workers, or in the trainer's process.

torch's worker loop runs unchanged. Its workers get what an epoch's sampler gives with the words
that a batch is seeded from, and a worker init function has their fetcher seed by these.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from stoker.feed.bookkeeping import EpochProgress
from stoker.feed.engine.messages import OwnState
from stoker.feed.foreign_loaders import hide_worker, is_worker, reach_of
from stoker.feed.generators import GLOBALS
from stoker.feed.loader_state import restore, take
from stoker.feed.seeding import Numbered, PreservedRandomStates, Seeder, Seeding
from stoker.feed.streams import ShardBatches, StreamFetcher, StreamProgress, own_before
from stoker.feed.tolerance import OnError, TolerantFetcher, ToleratedBatch

WorkerInit = Callable[[int], object]
AnyLoader = DataLoader[object]


@dataclass(slots=True, kw_only=True)
class Epoch:
    """What a source has to know of the epoch whose batches it makes.

    Attributes:
        indices: What the sampler gives, numbered; of an iterable dataset it has no end.
        num_workers: Of the script, or as if it had written them.
        pins: Batches go to pinned memory.
    """

    progress: EpochProgress
    indices: Iterator[Numbered]
    seeding: Seeding
    on_error: OnError
    num_workers: int
    pins: bool

    @property
    def stream(self) -> StreamProgress | None:
        return self.progress.stream


class LoaderView:
    """A loader with some attributes replaced, for its iterator."""

    def __init__(self, loader: AnyLoader, **changes: object) -> None:
        self._loader = loader
        # Whose books are kept.
        self.original: object = getattr(loader, "original", loader)
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def view_of(loader: AnyLoader, **changes: object) -> AnyLoader:
    return cast("AnyLoader", LoaderView(loader, **changes))


def is_of_stoker(loader: AnyLoader) -> bool:
    """Returns whether the script asked for stoker's class."""
    return reach_of(type(getattr(loader, "original", loader)))[1] == "stoker"


def worker_init_of(loader: AnyLoader) -> WorkerInit | None:
    """Returns the function that workers call which stoker gives a loader, at their start.

    None for a loader of torch's class without workers: there torch never calls it.
    """
    return loader.worker_init_fn if loader.num_workers or is_of_stoker(loader) else None


class SeededFetcher:
    """Torch's fetcher of a map-style dataset, which seeds first and tolerates bad samples.

    Args:
        num_workers: Of the script; None: in the trainer's process, whose random state is restored
            after each batch.
    """

    def __init__(
        self,
        fetcher: _MapDatasetFetcher,
        seeding: Seeding,
        on_error: OnError,
        num_workers: int | None,
    ) -> None:
        self._make: Callable[[object], object] = fetcher.fetch
        self._preserves = num_workers is None
        self._seeder: Seeder | None = None
        if seeding != "torch":
            roots = {"dataset": fetcher.dataset, "collate_fn": fetcher.collate_fn}
            self._seeder = Seeder(roots, num_workers=num_workers or None)
        if on_error != "raise":
            tolerant = TolerantFetcher(
                fetcher.dataset,
                fetcher.collate_fn,
                on_error,
                is_batched=fetcher.auto_collation,
            )

            def tolerate(index: object) -> object:
                batch = tolerant.fetch(index)
                return ToleratedBatch(batch, tolerant.bad) if tolerant.bad else batch

            self._make = tolerate

    def fetch(self, index: object) -> object:
        if self._seeder is None or not isinstance(index, Numbered):
            return self._make(index)
        preserved = self._seeder.preserved() if self._preserves else contextlib.nullcontext()
        with preserved:
            return self._seeder.make(index.seed_words, partial(self._make, index.index))


# ---- the trainer's process

_here = threading.local()


class _MakingHere:
    """While a batch is made in this thread.

    A class: contextlib's generator sets an error's traceback, which a frozen dataclass refuses.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = getattr(_here, "is_making", False)
        _here.is_making = True

    def __exit__(self, *_: object) -> None:
        _here.is_making = self._before


def is_making() -> bool:
    """Returns whether a batch is being made here: a loader iterated over now is part of it."""
    return getattr(_here, "is_making", False) or is_worker()


class TrainerSource:
    """The trainer's own process, as torch without workers."""

    def __init__(self, loader: AnyLoader, epoch: Epoch) -> None:
        self.num_taken = 0
        self._epoch = epoch
        self._is_stream = loader._dataset_kind == _DatasetKind.Iterable
        new_fetcher = partial(
            _DatasetKind.create_fetcher,
            loader._dataset_kind,
            loader.dataset,
            loader._auto_collation,
            loader.collate_fn,
            loader.drop_last,
        )
        self._fetch: Callable[[object], object]
        if epoch.stream is not None:
            batches = ShardBatches(new_fetcher, dataset=loader.dataset, outlives_epoch=True)
            self._begin_stream(loader, epoch.stream, batches)
        elif self._is_stream:
            self._fetch = new_fetcher().fetch
        else:
            self._fetch = SeededFetcher(new_fetcher(), epoch.seeding, epoch.on_error, None).fetch

    def _begin_stream(
        self, loader: AnyLoader, stream: StreamProgress, batches: ShardBatches
    ) -> None:
        """Begins a stream, and makes again what an earlier process made: it draws the same."""
        (shard,) = stream.shards
        progress = self._epoch.progress
        is_resumed = progress.resumed is not None
        if not is_resumed:
            progress.at_iter = take(GLOBALS)
        own = own_before(shard.owns, shard.num_made)
        # The script's own draws stay where they are.
        preserved = PreservedRandomStates() if is_resumed else contextlib.nullcontext()
        with _MakingHere(), preserved:
            if is_resumed and progress.at_iter is not None:
                restore(GLOBALS, progress.at_iter)
            # Torch's sampler of a stream gives the same for each batch.
            index = next(iter(loader._index_sampler))
            batches.begin(index, num_made=shard.num_made, own=own)

        def fetch(index: object) -> object:
            own: OwnState | None = None
            try:
                batch = batches.make(index)
                own = batches.take_own()
                return batch
            finally:
                # One that failed counts.
                if batches.position > shard.num_made:
                    stream.deliver(0, own)

        self._fetch = fetch

    def begin(self, epoch: Epoch) -> None:
        raise NotImplementedError("a loader without workers has no iterator that persists")

    def take(self) -> object:
        numbered = next(self._epoch.indices)
        # First: the sampler does not give its index again.
        self.num_taken += 1
        try:
            with _MakingHere():
                is_torchs = self._epoch.seeding == "torch"
                batch = self._fetch(numbered.index if is_torchs else numbered)
        except StopIteration:
            self.num_taken -= self._is_stream
            raise
        return pin_memory(batch) if self._epoch.pins else batch  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """There are no workers."""


# ---- torch's workers


class WorkersSource(_MultiProcessingDataLoaderIter):
    """torch's own workers, over indices that are numbered already."""

    def __init__(
        self,
        loader: AnyLoader,
        epoch: Epoch,
        *,
        num_processes: int,
        timeout: float | None = None,
        is_rest: bool = False,
        as_first: bool = False,
    ) -> None:
        """Starts the workers, which draw nothing from the script's states.

        Args:
            loader: Whose batches they make.
            epoch: The epoch.
            num_processes: The workers.
            timeout: For a batch; None: the loader's.
            is_rest: They make what is left of the epoch, and end with it.
            as_first: The only worker is the first of as many as the script has.
        """
        self._set(epoch)
        init = worker_init_of(loader)
        if epoch.stream or epoch.seeding != "torch" or epoch.on_error != "raise" or as_first:
            init = WorkerStart(init, epoch, persists=loader.persistent_workers, as_first=as_first)
        view = view_of(
            loader,
            num_workers=num_processes,
            prefetch_factor=loader.prefetch_factor or 2,
            generator=torch.Generator(),
            pin_memory=epoch.pins,
            pin_memory_device="",
            in_order=True,
            timeout=loader.timeout if timeout is None else timeout,
            persistent_workers=loader.persistent_workers and not is_rest and loader.num_workers > 0,
            _index_sampler=(),
            worker_init_fn=init,
        )
        super().__init__(view)

    def _set(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self.num_taken = 0

    # torch draws it in its constructor; the epoch has its own.
    @property
    def _base_seed(self) -> int:
        return self._epoch.progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        pass

    # It begins with the worker that has the next batch, and then they take turns.
    @property
    def _worker_queue_idx_cycle(self) -> "itertools.cycle[int]":
        return self._turns

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, turns: "itertools.cycle[int]") -> None:
        stream = self._epoch.stream
        for _ in range(stream.next_number % len(stream.shards) if stream else 0):
            next(turns)
        self._turns = turns

    def begin(self, epoch: Epoch) -> None:
        self._set(epoch)
        # The loader is not kept here: one that the script drops ends its workers.
        self._reset(SimpleNamespace(generator=torch.Generator(), _IterableDataset_len_called=None))

    def _next_index(self) -> object:
        numbered = next(self._epoch.indices)
        return numbered.index if self._epoch.seeding == "torch" else numbered

    def _process_data(self, data: object, *worker: int) -> object:
        self.num_taken += 1
        return super()._process_data(data, *worker)  # type: ignore[no-untyped-call]

    def take(self) -> object:
        batch: object = self._next_data()  # type: ignore[no-untyped-call]
        stream = self._epoch.stream
        if stream is None or not isinstance(batch, OfShard):
            return batch
        stream.deliver(batch.shard, batch.own_state)
        if isinstance(batch.batch, ExceptionWrapper):
            batch.batch.reraise()  # type: ignore[no-untyped-call]
        return batch.batch

    def close(self) -> None:
        self._shutdown_workers()


BatchSource = TrainerSource | WorkersSource


class WorkerStart:
    """Worker init function that calls the script's, then has the worker seed or count its batches.

    Args:
        user: The script's.
        persists: The workers make later epochs, too.
        as_first: The worker is the first of as many as the script has.
    """

    def __init__(
        self, user: WorkerInit | None, epoch: Epoch, *, persists: bool, as_first: bool
    ) -> None:
        self._user = user
        self._persists = persists
        self._as_first = as_first
        self._num_workers = epoch.num_workers
        self._seeding: Seeding = epoch.seeding
        self._on_error: OnError = epoch.on_error
        # Of each shard, what was made elsewhere of the first epoch.
        self._begins: list[tuple[int, OwnState | None]] = []
        for shard in epoch.stream.shards if epoch.stream else ():
            self._begins.append((shard.num_made, own_before(shard.owns, shard.num_made)))

    def __call__(self, worker_id: int) -> None:
        info = torch_worker._worker_info
        assert info is not None
        dataset = info.dataset
        if self._as_first:
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=worker_id, num_workers=max(1, self._num_workers), seed=info.seed, dataset=dataset
            )
        if self._user is not None:
            self._user(worker_id)
        if not self._num_workers:
            # As in the script.
            hide_worker()
        create = _DatasetKind.create_fetcher

        def create_ours(*args: object) -> object:
            # Other loaders may be read within the dataset.
            is_nested = args[1] is not dataset
            if self._begins and not is_nested:
                return self._of_shard(worker_id, partial(create, *args), dataset)
            fetcher = create(*args)  # type: ignore[no-untyped-call]
            if is_nested or args[0] == _DatasetKind.Iterable:
                return fetcher
            return SeededFetcher(fetcher, self._seeding, self._on_error, self._num_workers)

        # In the worker's process, whose loop asks for the fetcher right after this.
        _DatasetKind.create_fetcher = staticmethod(create_ours)  # type: ignore[method-assign]

    def _of_shard(
        self, shard: int, new_fetcher: Callable[[], StreamFetcher], dataset: object
    ) -> "ShardFetcher":
        batches = ShardBatches(new_fetcher, dataset=dataset, outlives_epoch=self._persists)
        num_made, own = self._begins[shard]
        # Persistent: then that is over.
        self._begins[shard] = (0, None)
        return ShardFetcher(shard, batches, num_made, own)


class OfShard(NamedTuple):
    """A batch of a worker, or what it raised; a named tuple, so that torch pins its tensors.

    Attributes:
        own_state: The dataset's state after the batch, now and then.
    """

    batch: object
    shard: int
    own_state: OwnState | None = None


@dataclass(slots=True)
class ShardFetcher:
    """Fetcher of a stream's worker, for an epoch, which begins with the first batch."""

    shard: int
    batches: ShardBatches
    num_made: int
    own: OwnState | None
    has_begun: bool = False

    def fetch(self, index: object) -> OfShard:
        try:
            if not self.has_begun:
                self.has_begun = True
                self.batches.begin(index, num_made=self.num_made, own=self.own)
            batch = self.batches.make(index)
        except StopIteration:
            raise
        except Exception:
            # As torch's worker sends an error: raised in the trainer, in place of the batch.
            where = f"in DataLoader worker process {self.shard}"
            error = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
            return OfShard(error, self.shard)
        return OfShard(batch, self.shard, self.batches.take_own())
