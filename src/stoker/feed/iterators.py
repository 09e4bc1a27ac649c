"""Iterators of a loader that number, seed, time and count each epoch; the rest is torch's own.

The only difference to torch: batch n is made from random states that depend on (base seed, replica,
epoch, n). Without workers the trainer's own random state is restored after each batch.
`seeding: torch` and iterable datasets behave as with torch in every respect.
"""

import multiprocessing
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

from torch._C._autograd import _profiler_enabled
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stoker.feed.bad_samples import BadSamples
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.changes import making
from stoker.feed.data_worker import hide_worker, is_worker
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.loader_state import seeding_of
from stoker.feed.sampler import SamplerOrder, yielded
from stoker.feed.seeding import Numbered, Occurrences, OneByOne, Seeder, Seeding, makes_many
from stoker.feed.timeline import Steps
from stoker.feed.tolerance import OnError, ToleratedBatch, TorchsFetcher, tolerate
from stoker.feed.wire.protocol import BadSample

if TYPE_CHECKING:
    from stoker.feed.wire.dataset import StartMethod


class Epoch:
    """State of one epoch: batch numbers, seed words, sizes and times.

    Attributes:
        number: Counts the loader's iter() calls, or comes from a loaded state.
        id: Number of the epoch in its session with the feed; see FeedSession.
    """

    def __init__(
        self,
        process: TrainerProcess,
        loader: "DataLoader[object]",
        *,
        seeding: Seeding,
        is_inline: bool = False,
        is_fed: bool = False,
    ) -> None:
        self.seeding: Seeding = seeding
        self.num_workers = max(1, loader.num_workers)
        self._process = process
        self._books = process.books(loader)
        settings = process.settings
        is_map_style = loader._dataset_kind == _DatasetKind.Map
        self.on_error: OnError = settings.feed.on_error if is_map_style else "raise"
        if self.on_error != "raise" and self._books.bad is None:
            self._books.bad = BadSamples()
        self.order = SamplerOrder(loader, self._books, is_inline=is_inline, is_fed=is_fed)
        is_many = loader._auto_collation and makes_many(loader.dataset)
        if seeding == "sample" and not is_many:
            self.order.occurrences = Occurrences(is_batched=loader._auto_collation)
        self._replica = settings.feed.replica(settings.rank)
        self.id = -1
        usage = process.timeline.usage
        if usage is not None:
            is_stream = loader._dataset_kind == _DatasetKind.Iterable
            shards = (settings.feed.shards or self.num_workers) if is_stream else 0
            usage.reads(self._books.number, type(loader), shards=shards)
        self._begin()

    def begin(self) -> None:
        self.order.begin(again=True)
        self._begin()

    def _begin(self) -> None:
        self.number = self.order.position.epoch
        self._next_batch_number = self.order.position.first
        self._sizes: deque[int] = deque()
        self._num_taken = self._next_batch_number
        self._bad_now: tuple[BadSample, ...] = ()
        # Of batches on their way, where costs of samples are measured.
        self._indices: deque[object] = deque()
        self.steps: Steps = self._process.timeline.epoch(
            loader=self._books.number,
            # Batches are seeded by the loader's own epoch; the timeline counts on over loaders.
            epoch=self._books.first_epoch + self.number,
            batch=self._next_batch_number,
        )
        self._books.life.begins(self.steps)

    def numbered(self, base_seed: int, index: object) -> Numbered:
        self._sizes.append(len(index) if isinstance(index, list | tuple) else 1)
        if self._books.costs is not None:
            self._indices.append(index)
        seed_words: tuple[int, ...] = (
            base_seed,
            self._replica,
            self.number,
            self._next_batch_number,
        )
        self._next_batch_number += 1
        if self.order.occurrences is not None:
            if isinstance(index, Iterator):
                # It is iterated over here, and again by the fetcher.
                index = list(index)
            seed_words += self.order.occurrences.of(index)
        return Numbered(seed_words, index)

    def timed(self, next_batch: Callable[[], object]) -> object:
        self.steps.ask()
        try:
            batch = next_batch()
        except StopIteration:
            self.steps.end()
            self._check_bad(is_over=True)
            raise
        except BaseException:
            # In place of a batch, whose size is skipped.
            self._next_size()
            raise
        maker = (self._process.settings.host, -1)
        if isinstance(batch, ToleratedBatch):
            self.note_bad(batch.bad, maker)
            batch = batch.batch
        size = self._next_size()
        self.steps.got(size)
        if self.on_error != "raise":
            self._judge(size)
        usage = self._process.timeline.usage
        if usage is not None:
            usage.saw(batch)
        return batch

    def now(self) -> float:
        """Returns the time by the timeline's clock, in seconds."""
        return self._process.timeline.clock()

    def end_in_finalizer(self) -> None:
        self.steps.end_in_finalizer()

    def measured(self, sizes: bytes) -> None:
        """Notes what the samples of the next batch cost, before the script gets it."""
        costs = self._books.costs
        if costs is not None and self._indices:
            skipped = {one.place for one in self._bad_now if not one.replaced_by}
            indices = enumerate(cast("Iterable[object]", self._indices[0]))
            costs.note((index for place, index in indices if place not in skipped), sizes)

    def note_bad(self, bad: tuple[BadSample, ...], maker: tuple[str, int]) -> None:
        """Lists the bad samples of the next batch, before the script gets it."""
        self._bad_now = bad
        self._process.list_bad(bad, epoch=self.number, batch_number=self._num_taken, maker=maker)

    def _judge(self, samples: int) -> None:
        """Counts a batch's samples and bad ones; raises FeedError if these are too many."""
        counts = self._books.bad
        if counts is not None:
            counts.count(self._bad_now, samples=samples)
            self._bad_now = ()
            self._check_bad()

    def _check_bad(self, *, is_over: bool = False) -> None:
        if self._books.bad is not None:
            self._process.check_bad(self._books.bad, epoch=self.number, is_over=is_over)

    def _next_size(self) -> int:
        self._num_taken += 1
        if self._indices:
            self._indices.popleft()
        return self._sizes.popleft() if self._sizes else 0


class CountedIterator:
    """Base of all iterators: counts progress, so that a state can resume there."""

    _epoch: Epoch
    # Torch's.
    _dataset_kind: int
    _num_yielded: int

    def _next_data(self) -> object:
        batch: object = super()._next_data()  # type: ignore[misc]
        return batch

    def _num_taken(self) -> int | None:
        """Returns how many batches the script has, good or failed; None: unknown."""
        raise NotImplementedError

    # torch's constructor and its reset set the two from the loader.
    @property
    def _base_seed(self) -> int:
        return self._epoch.order.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._epoch.order.drew_base_seed(drawn)

    @property
    def _index_sampler(self) -> SamplerOrder:
        return self._epoch.order

    @_index_sampler.setter
    def _index_sampler(self, sampler: object) -> None:
        pass

    def opened(self, seconds: float) -> None:
        """Records how long iter() took."""
        self._epoch.steps.opened(seconds)

    def _ask_sampler_again(self) -> None:
        """Asks the sampler for an iterator as often as torch's loader with workers would."""
        if self._epoch.order.is_asked_again:
            self._sampler_iter = iter(self._index_sampler)

    def _next_index(self) -> object:
        index: object = super()._next_index()  # type: ignore[misc]
        numbered = self._epoch.numbered(self._base_seed, index)
        return index if self._epoch.seeding == "torch" else numbered

    def __next__(self) -> object:
        return self._counted(self._next_batch)

    def _next_batch(self) -> object:
        """Returns what torch's own `__next__` returns.

        That opens a range for profilers around each batch, also where no profiler is on: 10 us in a
        loop, 50 us between two steps of a training run. And it warns of more samples than an
        iterable dataset said.
        """
        if _profiler_enabled() or self._dataset_kind != _DatasetKind.Map:
            batch: object = super().__next__()  # type: ignore[misc]
            return batch
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _counted(self, next_batch: Callable[[], object]) -> object:
        position = self._epoch.order.position
        try:
            batch = self._epoch.timed(next_batch)
        except StopIteration:
            position.is_over = True
            raise
        except Exception:
            yielded(position, self._num_taken())
            raise
        yielded(position, self._num_taken())
        return batch


class TrainerMaker:
    """Maker of batches in the trainer's process, as torch's iterator without workers makes them."""

    def __init__(
        self, loader: "DataLoader[object]", seeding: Seeding, *, on_error: OnError = "raise"
    ) -> None:
        self._seeding = seeding
        fetcher: Fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            loader._dataset_kind,
            loader.dataset,
            loader._auto_collation,
            loader.collate_fn,
            loader.drop_last,
        )
        self._fetcher = fetcher
        if seeding != "torch":
            roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
            seeder = Seeder(roots, num_workers=None, seeding=seeding)
            self._fetcher = PreservingFetcher(fetcher, seeder)
        if loader._dataset_kind == _DatasetKind.Map:
            tolerate(cast("TorchsFetcher", fetcher), on_error)

    def make(self, numbered: Numbered) -> object:
        before, _here.is_making = _is_making_here(), True
        try:
            return self._fetcher.fetch(numbered.index if self._seeding == "torch" else numbered)
        finally:
            _here.is_making = before


WorkerInit = Callable[[int], object]


class Fetcher(Protocol):
    """Torch's fetcher: makes a batch of what a sampler gave."""

    dataset: object
    auto_collation: bool

    def fetch(self, index: object) -> object: ...


class SeededFetcher:
    """Fetcher that seeds first; indices without seed words (of other loaders) pass unchanged."""

    def __init__(self, fetcher: Fetcher, seeder: Seeder) -> None:
        self._fetcher = fetcher
        self._seeder = seeder
        if seeder.seeds_each and fetcher.auto_collation and not makes_many(fetcher.dataset):
            fetcher.dataset = OneByOne(fetcher.dataset)
        # There may be one around another.
        self.dataset = fetcher.dataset
        self.auto_collation = fetcher.auto_collation

    def fetch(self, index: object) -> object:
        if not isinstance(index, Numbered):
            return self._fetcher.fetch(index)
        seed_words, given = index.seed_words, index.index
        if isinstance(given, Iterator):
            # The batch may have to be made again.
            given = list(given)
        if self._seeder.seeds_each:
            return self._seeder.make(seed_words, lambda: self._fetch_samples(seed_words, given))
        return self._seeder.make(seed_words, lambda: self._fetcher.fetch(given))

    def _fetch_samples(self, seed_words: tuple[int, ...], index: object) -> object:
        if not self.auto_collation:
            if not self._seeder.seeds_lone_samples:
                return self._fetcher.fetch(index)
            self._seeder.place(seed_words, index, 0)
            return self._fetcher.fetch(index)
        if makes_many(self.dataset):
            return self._fetcher.fetch(index)
        return self._fetcher.fetch(self._seeder.each(seed_words, cast("Iterable[object]", index)))


class PreservingFetcher(SeededFetcher):
    """Fetcher for the trainer's process: its random state is restored after each batch."""

    def fetch(self, index: object) -> object:
        with self._seeder.preserved():
            return super().fetch(index)


class SeedingInit:
    """Worker init function that calls the script's, then makes the worker seed its batches.

    With `num_workers` 0, which the script has, `get_worker_info()` is None from then on.
    """

    def __init__(
        self,
        user: WorkerInit | None,
        seeding: Seeding,
        *,
        num_workers: int,
        on_error: OnError = "raise",
    ) -> None:
        self.user = user
        self.seeding = seeding
        self.num_workers = num_workers
        self.on_error: OnError = on_error

    def __call__(self, worker_id: int) -> None:
        if self.user is not None:
            self.user(worker_id)
        if not self.num_workers:
            hide_worker()
        if self.seeding == "torch" and self.on_error == "raise":
            return
        create = _DatasetKind.create_fetcher

        def create_seeded(*args: object) -> Fetcher:
            fetcher = create(*args)  # type: ignore[no-untyped-call]
            seeded: Fetcher = fetcher
            if self.seeding != "torch":
                seeded = SeededFetcher(fetcher, seeder_of(*args))
            tolerate(fetcher, self.on_error)
            return seeded

        def seeder_of(*args: object) -> Seeder:
            _, dataset, _, collate_fn, _ = args
            return Seeder(
                {"dataset": dataset, "collate_fn": collate_fn},
                num_workers=self.num_workers or None,
                seeding=self.seeding,
                warns=worker_id == 0,
            )

        # In the worker's process, whose loop asks for the fetcher right after this.
        _DatasetKind.create_fetcher = staticmethod(create_seeded)  # type: ignore[method-assign]


class LoaderView:
    """A loader with some attributes replaced, for its iterator."""

    def __init__(self, loader: "DataLoader[object] | LoaderView", **changes: object) -> None:
        self._loader = loader
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class SingleProcessIterator(CountedIterator, _SingleProcessDataLoaderIter):  # type: ignore[misc]
    """Torch's iterator without workers, counted and seeded."""

    def __init__(self, loader: "DataLoader[object] | LoaderView", epoch: Epoch) -> None:
        self._epoch = epoch
        super().__init__(loader)
        self._ask_sampler_again()
        fetcher = self._dataset_fetcher
        if epoch.seeding != "torch":
            roots = {"dataset": self._dataset, "collate_fn": self._collate_fn}
            seeder = Seeder(roots, num_workers=None, seeding=epoch.seeding)
            self._dataset_fetcher = PreservingFetcher(fetcher, seeder)
        if self._dataset_kind == _DatasetKind.Map:
            tolerate(fetcher, epoch.on_error)
        weakref.finalize(self, epoch.end_in_finalizer)

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        self._epoch.begin()
        super()._reset(loader, first_iter)

    def _next_data(self) -> object:  # type: ignore[override]
        before, _here.is_making = _is_making_here(), True
        try:
            # Other loaders may read the same dataset, and watch it.
            with making():
                batch: object = super()._next_data()
            return batch
        finally:
            _here.is_making = before

    def _num_taken(self) -> int:
        position = self._epoch.order.position
        return position.num_handed - position.first


class MultiProcessingIterator(CountedIterator, _MultiProcessingDataLoaderIter):  # type: ignore[misc]
    """Torch's iterator with workers, counted and seeded."""

    def __init__(self, loader: "DataLoader[object] | LoaderView", epoch: Epoch) -> None:
        self._epoch = epoch
        self._user_init: WorkerInit | None = None
        super().__init__(loader)
        weakref.finalize(self, epoch.end_in_finalizer)

    # torch stores the loader's function here, and passes this attribute to its workers.
    @property
    def _worker_init_fn(self) -> WorkerInit | None:
        epoch = self._epoch
        if epoch.seeding == "torch" and epoch.on_error == "raise":
            return self._user_init
        return SeedingInit(
            self._user_init,
            epoch.seeding,
            num_workers=epoch.num_workers,
            on_error=epoch.on_error,
        )

    @_worker_init_fn.setter
    def _worker_init_fn(self, user: WorkerInit | None) -> None:
        self._user_init = user

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        if first_iter:
            super()._reset(loader, first_iter)
            return
        began = self._epoch.now()
        self._epoch.begin()
        super()._reset(loader, first_iter)
        self.opened(self._epoch.now() - began)

    def _num_taken(self) -> int | None:
        # torch before 2.6 has no in_order, and always keeps the order.
        return int(self._rcvd_idx) if getattr(self, "_in_order", True) else None


TorchIterator = SingleProcessIterator | MultiProcessingIterator

_here = threading.local()


def _is_making_here() -> bool:
    return bool(getattr(_here, "is_making", False))


def is_making() -> bool:
    """Returns whether a batch is being made here: a loader iterated over now is part of it."""
    return _is_making_here() or is_worker()


def part_iterator(loader: "DataLoader[object]") -> _BaseDataLoaderIter:
    """Returns torch's own iterator, for a loader that another one's dataset iterates over."""
    # It draws from the random states of the batch that it is a part of.
    if loader.num_workers == 0:
        return _SingleProcessDataLoaderIter(loader)
    return _MultiProcessingDataLoaderIter(loader)


def worker_init_of(loader: "DataLoader[object]", *, num_shards: int = 0) -> WorkerInit | None:
    """Returns the function that workers call which stoker gives a loader, at their start.

    None for a loader of torch's class without workers, or shards that were set for it: there torch
    never calls it.

    Args:
        num_shards: Of a stream, as `feed.shards` sets it; 0: the script's `num_workers`.
    """
    is_stokers = reach_of(type(loader))[1] == "stoker"
    if not loader.num_workers and num_shards < 2 and not is_stokers:
        return None
    return loader.worker_init_fn


def start_method_of(loader: "DataLoader[object]") -> "StartMethod":
    """Returns how torch would start the loader's workers; fork, where it would start none."""
    if not loader.num_workers:
        return "fork"
    context = loader.multiprocessing_context or multiprocessing
    # Not to be fixed here: the script may still set it.
    chosen = context.get_start_method(allow_none=True)
    return cast("StartMethod", chosen or multiprocessing.get_all_start_methods()[0])


def torch_iterator(
    loader: "DataLoader[object]", process: TrainerProcess, *, num_workers: int | None = None
) -> TorchIterator:
    seeding = seeding_of(loader, process)
    seen = loader if num_workers is None else with_workers(loader, num_workers)
    epoch = Epoch(process, loader, seeding=seeding, is_inline=seen.num_workers == 0)
    if seen.num_workers == 0:
        return SingleProcessIterator(seen, epoch)
    if num_workers is None:
        loader.check_worker_number_rationality()
    return MultiProcessingIterator(seen, epoch)


def with_workers(loader: "DataLoader[object]", num_workers: int) -> LoaderView:
    if num_workers == 0:
        return LoaderView(
            loader, num_workers=0, prefetch_factor=None, timeout=0, persistent_workers=False
        )
    return LoaderView(loader, num_workers=num_workers, prefetch_factor=loader.prefetch_factor or 2)
