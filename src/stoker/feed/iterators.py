"""Iterators of a loader that number, seed, time and count each epoch; the rest is torch's own.

The only difference to torch: batch n is made from random states that depend on (base seed, replica,
epoch, n). Without workers the trainer's own random state is restored after each batch.
`seeding: torch` and iterable datasets behave as with torch in every respect.
"""

import contextlib
import functools
import itertools
import multiprocessing
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, cast

from torch._C._autograd import _profiler_enabled
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterDataPipe, _DatasetKind
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stoker.errors import FeedError
from stoker.feed.bad_samples import BadSamples, ListedBatch
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.changes import making
from stoker.feed.compared_values import ComparedValues, is_of_states
from stoker.feed.data_worker import hide_worker, is_worker
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.interrupts import is_of_signal_handler
from stoker.feed.kept_values import KeptValues
from stoker.feed.loader_state import note_shared, say_unused, seeding_of, values_before
from stoker.feed.module_generators import know_modules
from stoker.feed.rank_streams import has_other_ranks
from stoker.feed.sampler import SamplerOrder, yielded
from stoker.feed.seeding import (
    Numbered,
    Occurrences,
    OneByOne,
    Seeder,
    Seeding,
    makes_many,
    set_states,
    states_here,
)
from stoker.feed.stream_epochs import StreamEpochs, streams_in
from stoker.feed.stream_progress import ShardProgress, StreamProgress
from stoker.feed.timeline import Steps
from stoker.feed.tolerance import OnError, ToleratedBatch, TorchsFetcher, tolerate
from stoker.feed.wire.dataset import DatasetSpec, StartMethod
from stoker.feed.wire.protocol import BadSample, OwnState
from stoker.feed.workers.torch_streams import (
    IndexToSave,
    InlineStream,
    OfShard,
    StreamInit,
    resumed_streams,
)
from stoker.logs import EventName, Log
from stoker.pending_error import PendingError


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
        self._num_shards = settings.feed.shards or self.num_workers
        self._replica = settings.feed.replica(settings.rank)
        self.id = -1
        # Those of a loaded state, until the epoch ends.
        self.has_other_workers = False
        usage = process.timeline.usage
        if usage is not None:
            is_stream = loader._dataset_kind == _DatasetKind.Iterable
            shards = self._num_shards if is_stream else 0
            usage.reads(self._books.number, type(loader), shards=shards)
        self._begin()

    def begin(self, loader: "DataLoader[object]") -> None:
        """Begins the next epoch of workers that persist."""
        note_shared(loader, self._books, is_start=False)
        self.order.begin(again=True)
        self._begin()

    def track(self, *, num_workers: int, num_shards: int, is_inline: bool = False) -> None:
        """Begins to count the shards of an iterable dataset, if its loader has a `state_dict`.

        A resumed one has those of its state.
        """
        position = self.order.position
        if self.order.keeps_stream and position.stream is None:
            position.stream = StreamProgress(
                num_workers=num_workers,
                shards=[ShardProgress() for _ in range(num_shards)],
                is_inline=is_inline,
            )
        if position.stream is not None:
            position.stream.own_seconds = self._books.own_seconds

    @property
    def stream(self) -> StreamProgress | None:
        return self.order.position.stream

    @property
    def resumed_stream(self) -> StreamProgress | None:
        """The progress of an iterable dataset that is resumed, until its first batch is there."""
        position = self.order.position
        return None if position.resumed is None else position.stream

    def values_at_first(self, loader: "DataLoader[object]") -> KeptValues:
        """Returns the values of a stream's parts before its first epoch in this process."""
        return values_before(loader, self._books)

    @property
    def is_saved(self) -> bool:
        """Whether the script asks for states."""
        return self._books.is_saved

    def compared(self) -> ComparedValues:
        """Returns what a stream here is compared with."""
        books = self._books
        books.compared = books.compared or ComparedValues()
        books.compared.is_asked = books.is_saved
        return books.compared

    def say_resumed(self, stream: StreamProgress) -> None:
        """Says how long it took to make a stream's batches again, once its first one is there."""
        settings = self._process.settings
        seconds = self.now() - self._began
        # Where the dataset's own state led elsewhere, all of them were.
        num_again = stream.num_resumed if stream.own_trouble else stream.num_again
        words = (
            f"the stream resumes at batch {self.order.position.first + 1} of epoch {self.number}: "
            f"{num_again} batches were made again and not handed out, which took "
            f"{seconds:.1f} s"
        )
        if num_again < stream.num_resumed:
            words += "; the dataset's own state was loaded for those before them"
        if stream.num_earlier:
            words += f"; so were {stream.num_earlier} batches of the epochs before it"
        origin = stream.shards[0].origin
        if origin is not None:
            words += (
                f"; until the end of the epoch it is dealt from the shards of the "
                f"{origin.world_size} ranks of its state"
            )
            if stream.keeps_order:
                words += ", in their order, and ranks may end one step apart"
            else:
                words += (
                    "; some of them ended before others, so their batches have another order, and "
                    "ranks may end some steps apart"
                )
            num_readers = max(shard.turns.every for shard in stream.shards)
            if num_readers > 1:
                words += (
                    f"; {num_readers} ranks read a shard, as the shards cannot be divided by the "
                    "ranks here: each makes all of its batches, and hands out those of its turn"
                )
        elif len(stream.shards) != self._num_shards:
            words += (
                f"; until the end of the epoch it keeps the {len(stream.shards)} shards of its "
                f"state, then the script's {self._num_shards}"
            )
        log = Log(run=settings.run_id, host=settings.host)
        log.event(EventName.STREAM_RESUMED, rank=settings.rank, text=words)

    def note_own(self, stream: StreamProgress) -> None:
        """Notes what a state of a dataset took, and says once why they are not used."""
        books, trouble = self._books, stream.own_trouble
        books.own_seconds = stream.own_seconds or books.own_seconds
        books.own_trouble = trouble or books.own_trouble
        # Else with the first state.
        if self.is_saved or not is_of_states(trouble):
            say_unused(books, self._process, why=trouble)

    def _begin(self) -> None:
        self._began = self.now()
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
        if isinstance(batch, ToleratedBatch):
            self.note_bad(batch.bad, (self._process.settings.host, batch.worker))
            batch = batch.batch
        size = self._next_size()
        self.steps.got(size)
        if self.on_error != "raise":
            self._judge(size)
        usage = self._process.timeline.usage
        if usage is not None:
            usage.count_batch(batch)
        return batch

    def now(self) -> float:
        """Returns the time by the timeline's clock, in seconds."""
        return self._process.timeline.clock()

    def end_in_finalizer(self) -> None:
        self.steps.end_in_finalizer()

    def note_costs(self, sizes: bytes) -> None:
        """Notes what the samples of the next batch cost, before the script gets it.

        Args:
            sizes: As `balance.sizes_of` packs them; empty: they were not measured.
        """
        costs = self._books.costs
        if costs is None or not self._indices:
            return
        skipped_places = {bad.place for bad in self._bad_now if not bad.replaced_by}
        delivered: list[object] = []
        skipped: list[object] = []
        for place, index in enumerate(cast("Iterable[object]", self._indices[0])):
            if place in skipped_places:
                skipped.append(index)
            else:
                delivered.append(index)
        costs.note(delivered, sizes)
        costs.note_skipped(skipped)

    def note_bad(self, bad: tuple[BadSample, ...], maker: tuple[str, int]) -> None:
        """Lists the bad samples of the next batch, before the script gets it."""
        self._bad_now = bad
        host, worker = maker
        batch = ListedBatch(
            epoch=self._books.first_epoch + self.number,
            number=self._num_taken,
            loader=self._books.number,
            host=host,
            worker=worker,
        )
        self._process.list_bad(bad, batch)

    def _judge(self, samples: int) -> None:
        """Counts a batch's samples and bad ones; raises FeedError if these are too many."""
        counts = self._books.bad
        if counts is not None:
            counts.count(self._bad_now, samples=samples)
            self._bad_now = ()
            self._check_bad()

    def _check_bad(self, *, is_over: bool = False) -> None:
        counts = self._books.bad
        if counts is None or not counts.are_many(self._process.settings.feed.max_errors):
            return
        whole: int | None = counts.samples
        if not is_over:
            whole = self._num_samples(counts)
        self._process.check_bad(counts, epoch=self.number, whole=whole)

    def _num_samples(self, counts: BadSamples) -> int | None:
        """Returns how many samples the epoch has, if its batches go on as they were."""
        try:
            num_batches = len(self.order)
        except Exception:
            # Of a sampler of the script, which need not have one.
            return None
        return round(num_batches * counts.samples / self._num_taken)

    def _next_size(self) -> int:
        self._num_taken += 1
        if self._indices:
            self._indices.popleft()
        if self._books.costs is not None:
            self._books.costs.num_taken += 1
        return self._sizes.popleft() if self._sizes else 0


class CountedIterator:
    """Base of all iterators: counts progress, so that a state can resume there."""

    _epoch: Epoch
    # Torch's.
    _dataset_kind: int
    _num_yielded: int
    _world_size: int

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

    # torch draws it for data pipes; the workers of a resumed epoch begin with the state's.
    @property
    def _shared_seed(self) -> int | None:
        resumed = self._epoch.resumed_stream
        if resumed is not None and not resumed.is_inline:
            return resumed.shared_seed
        return self._drawn_shared_seed

    @_shared_seed.setter
    def _shared_seed(self, drawn: int | None) -> None:
        self._drawn_shared_seed = drawn

    def _note_shared_seed(self) -> None:
        stream = self._epoch.stream
        if stream is None:
            return
        stream.shared_seed = self._shared_seed
        if self._epoch.resumed_stream is None:
            stream.divides_pipes = self._world_size > 1

    def _note_stream_epochs(self, streams: Sequence[object]) -> tuple[int, ...]:
        """Returns the epochs of Hugging Face's streams in the dataset; a state has them."""
        epochs = StreamEpochs(streams).read()
        if self._epoch.stream is not None:
            self._epoch.stream.epochs = epochs
        return epochs

    @contextlib.contextmanager
    def _undrawn(self, loader: "DataLoader[object] | LoaderView") -> Iterator[None]:
        """Has the seeds of a resumed stream drawn without a trace: a state has them already."""
        if self._epoch.resumed_stream is None:
            yield
            return
        roots = {"generator": loader.generator}
        states = states_here(roots)
        yield
        set_states(states, roots)

    def _is_replaced(self, loader: "DataLoader[object]") -> bool:
        """Puts another iterator in its place, where it had the workers of a loaded state."""
        if not self._epoch.has_other_workers:
            return False
        loader._iterator = None
        loader._iterator = loader._get_iterator()
        return True

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

    def _next_stream(self) -> StreamProgress | None:
        """Returns how the next epoch of persistent workers begins; None: as any other."""
        return None

    def _counted(self, next_batch: Callable[[], object]) -> object:
        position = self._epoch.order.position
        resumed = self._epoch.resumed_stream
        try:
            batch = self._epoch.timed(next_batch)
        except StopIteration:
            position.next_stream = self._next_stream()
            position.is_over = True
            raise
        except Exception as err:
            forget_itself(err)
            yielded(position, self._num_taken())
            raise
        yielded(position, self._num_taken())
        if resumed is not None and (resumed.num_resumed or resumed.num_earlier):
            self._epoch.say_resumed(resumed)
        stream = self._epoch.stream
        if stream is not None:
            self._epoch.note_own(stream)
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
        seeder: Seeder | None = None
        if seeding != "torch":
            roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
            seeder = Seeder(roots, num_workers=None, seeding=seeding)
            self._fetcher = PreservingFetcher(fetcher, seeder)
        if loader._dataset_kind == _DatasetKind.Map:
            tolerate(cast("TorchsFetcher", fetcher), on_error, seeder=seeder)

    def make(self, numbered: Numbered) -> object:
        with _MakingHere():
            return self._fetcher.fetch(numbered.index if self._seeding == "torch" else numbered)


def forget_itself(err: Exception) -> None:
    """Ends the cycle that torch makes where it raises what a worker raised.

    Its function names the error, which knows the function's frame, and so the variables of all its
    callers: they would live until Python looks for cycles.
    """
    raising_code = ExceptionWrapper.reraise.__code__
    traceback = err.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is raising_code:
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


def next_index(indices: Iterator[Numbered], end: PendingError) -> Numbered | None:
    """Returns what a sampler gives next; None: it has ended, or failed.

    Args:
        indices: The epoch's, drawn ahead of the loop.
        end: Gets how the sampler ended or failed: its turn comes after the batches before it.
    """
    if end.is_there:
        return None
    try:
        return next(indices)
    except StopIteration:
        # A new one: the traceback of the original would keep the iterator.
        end.keep(StopIteration())
    except Exception as err:
        if is_of_signal_handler(err):
            raise
        # Not yet: without workers the sampler would be asked when the loop is there.
        end.keep(err)
    return None


def raising(failure: PendingError) -> Iterator[Numbered]:
    """Yields nothing; raises how a sampler failed, once all indices before it are taken."""
    if failure.is_there and not failure.is_end:
        raise failure.take()
    yield from ()


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
        seed_words = index.seed_words
        given = index.index
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
        know_modules(seeding)

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
            seeder: Seeder | None = None
            if self.seeding != "torch":
                seeder = seeder_of(*args)
                seeded = SeededFetcher(fetcher, seeder)
            tolerate(fetcher, self.on_error, seeder=seeder)
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
        self._inline: InlineStream | None = None
        epoch.track(num_workers=0, num_shards=1, is_inline=True)
        if epoch.stream is None:
            super().__init__(loader)
        else:
            self._begin_stream(loader, epoch.stream)
        self._ask_sampler_again()
        fetcher = self._dataset_fetcher
        seeder: Seeder | None = None
        if epoch.seeding != "torch":
            roots = {"dataset": self._dataset, "collate_fn": self._collate_fn}
            seeder = Seeder(roots, num_workers=None, seeding=epoch.seeding)
            self._dataset_fetcher = PreservingFetcher(fetcher, seeder)
        if self._dataset_kind == _DatasetKind.Map:
            tolerate(fetcher, epoch.on_error, seeder=seeder)
        weakref.finalize(self, epoch.end_in_finalizer)

    def _begin_stream(
        self, loader: "DataLoader[object] | LoaderView", progress: StreamProgress
    ) -> None:
        order = self._epoch.order
        is_resumed = order.position.resumed is not None
        streamed = cast("DataLoader[object]", loader)
        inline = InlineStream(
            streamed,
            progress,
            values_at_first=self._epoch.values_at_first(streamed),
            compared=self._epoch.compared(),
            epochs_before=self._epoch.number,
        )
        shard = progress.shards[0]
        before = shard.own_before(shard.num_made)
        if not is_resumed:
            inline.note_own()
            if self._epoch.number:
                inline.note_unkept()
        inline.note_compared()
        # Seeds are drawn again, too, as when the epoch began; an earlier version did not keep that.
        order.keeps_draws = is_resumed and not progress.own_made
        with inline.begin(is_resumed=order.keeps_draws), _MakingHere():
            if before is None or not self._has_continued(loader, inline, before):
                self._begin_again(loader, inline, is_resumed=is_resumed)
        order.keeps_draws = False
        self._inline = inline
        self._dataset_fetcher = inline

    def _has_continued(
        self, loader: "DataLoader[object] | LoaderView", inline: InlineStream, own: OwnState
    ) -> bool:
        """Resumes a stream from a state that the dataset gave; False: that is another stream."""
        loaded = inline.load_own(own)
        if loaded is None:
            return False
        super().__init__(loader)
        inline.fetcher = self._dataset_fetcher
        if inline.continues(own, loaded, next(self._sampler_iter)):
            return True
        inline.set_states()
        return False

    def _begin_again(
        self, loader: "DataLoader[object] | LoaderView", inline: InlineStream, *, is_resumed: bool
    ) -> None:
        """Begins a stream, and makes again what an earlier process made."""
        if is_resumed and inline.progress.own_made:
            # Of an earlier version: nothing before it is made again.
            inline.load_own_of_beginning()
        super().__init__(loader)
        inline.fetcher = self._dataset_fetcher
        if not is_resumed:
            return
        try:
            inline.make_again(next(self._sampler_iter))
        except FeedError:
            # Something may be left of the epochs before, which the dataset's state then has. At
            # first without it: behind an epoch's end it may say that there is nothing more.
            inline.set_states()
            if inline.progress.own_made or not inline.load_own_of_beginning():
                raise
            super().__init__(loader)
            inline.fetcher = self._dataset_fetcher
            inline.make_again(next(self._sampler_iter))

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        if self._is_replaced(loader):
            return
        self._epoch.begin(loader)
        super()._reset(loader, first_iter)

    def _next_data(self) -> object:  # type: ignore[override]
        # Other loaders may read the same dataset, and watch it.
        with _MakingHere(), making():
            batch: object = super()._next_data()
        return batch

    def _num_taken(self) -> int:
        position = self._epoch.order.position
        if self._inline is not None:
            return self._inline.progress.num_here
        return position.num_handed - position.first


class MultiProcessingIterator(CountedIterator, _MultiProcessingDataLoaderIter):  # type: ignore[misc]
    """Torch's iterator with workers, counted and seeded."""

    def __init__(self, loader: "DataLoader[object] | LoaderView", epoch: Epoch) -> None:
        self._epoch = epoch
        self._user_init: WorkerInit | None = None
        count = cast(int, loader.num_workers)
        epoch.track(num_workers=count, num_shards=count)
        # Batches that each worker was asked for in this epoch, or makes again.
        self._num_asked = [0] * count
        resumed = epoch.resumed_stream
        if resumed is not None:
            self._num_asked = [shard.num_made for shard in resumed.shards]
        self._streams: tuple[object, ...] = ()
        if epoch.stream is not None:
            parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
            self._streams = streams_in(parts)
        # Before torch starts the workers, which begin with them.
        self._note_stream_epochs(self._streams)
        with self._undrawn(loader):
            super().__init__(loader)
        if resumed is not None:
            # To make batches again is no hang.
            self._timeout = 0
        weakref.finalize(self, epoch.end_in_finalizer)

    # torch begins with the first worker, and then they take turns.
    @property
    def _worker_queue_idx_cycle(self) -> "itertools.cycle[int]":
        return cast("itertools.cycle[int]", self._turns)

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, turns: Iterator[int]) -> None:
        resumed = self._epoch.resumed_stream
        if resumed is not None:
            # A generator that held its owner would keep it, and its workers, when it is left.
            turns = _turns_of(resumed, weakref.proxy(self))
        self._turns: Iterator[int] = turns

    # torch stores the loader's function here, and passes this attribute to its workers.
    @property
    def _worker_init_fn(self) -> WorkerInit | None:
        epoch = self._epoch
        if epoch.stream is not None:
            return self._stream_init(epoch.stream)
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
        # A script's own may have no arguments by position: Lightning's.
        if isinstance(user, functools.partial) and isinstance((*user.args, None)[0], StreamInit):
            # torch puts what it read here into the function that divides a data pipe.
            user = functools.partial(user.func, self._user_init, *user.args[1:])
        self._user_init = user

    def _stream_init(self, progress: StreamProgress) -> StreamInit:
        spec = DatasetSpec(
            dataset=None,
            collate_fn=cast("Callable[[object], object]", self._collate_fn),
            worker_init_fn=self._user_init,
            auto_collation=self._auto_collation,
            num_workers=progress.num_workers,
            is_iterable=True,
            drop_last=self._drop_last,
            streams=self._streams,
        )
        return StreamInit(
            spec,
            resumed=resumed_streams(
                progress, persists=self._persistent_workers, is_saved=self._epoch.is_saved
            ),
            turns=tuple(shard.turns for shard in progress.shards),
        )

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        if first_iter:
            self._note_shared_seed()
            super()._reset(loader, first_iter)
            return
        if self._is_replaced(loader):
            return
        began = self._epoch.now()
        before = self._epoch.stream
        self._epoch.begin(loader)
        self._timeout = loader.timeout
        self._epoch.track(num_workers=self._num_workers, num_shards=self._num_workers)
        if self._epoch.stream is not None and before is not None:
            self._epoch.stream.follow(before, num_asked=self._num_asked)
        self._num_asked = [0] * self._num_workers
        self._note_stream_epochs(self._streams)
        super()._reset(loader, first_iter)
        self._note_shared_seed()
        self.opened(self._epoch.now() - began)

    def _next_stream(self) -> StreamProgress | None:
        progress = self._epoch.stream
        is_pipe = isinstance(self._dataset, IterDataPipe)
        is_kept = self._persistent_workers and not self._epoch.has_other_workers
        if progress is None or not is_kept or is_pipe:
            return None
        following = StreamProgress(
            num_workers=progress.num_workers,
            shards=[ShardProgress() for _ in progress.shards],
        )
        following.follow(progress, num_asked=self._num_asked)
        return following

    def _next_index(self) -> object:
        index = super()._next_index()
        if self._epoch.stream is None or not self._epoch.is_saved:
            return index
        return IndexToSave(index)

    def _try_put_index(self) -> None:
        number = self._send_idx
        super()._try_put_index()
        if self._send_idx > number:
            worker_id, *_ = self._task_info[number]
            self._num_asked[worker_id] += 1

    def _next_data(self) -> object:  # type: ignore[override]
        batch: object = super()._next_data()
        progress = self._epoch.stream
        if progress is None or not isinstance(batch, OfShard):
            return batch
        shard = progress.shards[batch.shard]
        if batch.random:
            shard.random = batch.random
            shard.earlier = []
        progress.deliver(batch.shard, batch.digest, batch.own_state)
        if isinstance(batch.batch, ExceptionWrapper):
            batch.batch.reraise()  # type: ignore[no-untyped-call]
        return batch.batch

    def _num_taken(self) -> int | None:
        if self._epoch.stream is not None and getattr(self, "_in_order", True):
            return self._epoch.stream.num_here
        # torch before 2.6 has no in_order, and always keeps the order.
        return int(self._rcvd_idx) if getattr(self, "_in_order", True) else None


def _turns_of(resumed: StreamProgress, iterator: MultiProcessingIterator) -> Iterator[int]:
    """Yields the worker that has the next batch, by the numbers of a resumed stream."""
    numbers = resumed.next_numbers()
    while True:
        # All of them, once every worker has ended: torch asks no more.
        live = [who for who, is_live in enumerate(iterator._workers_status) if is_live]
        worker = min(live or range(len(numbers)), key=lambda who: numbers[who])
        numbers[worker] += len(numbers) * resumed.shards[worker].turns.every
        yield worker


TorchIterator = SingleProcessIterator | MultiProcessingIterator

_here = threading.local()


def _is_making_here() -> bool:
    return bool(getattr(_here, "is_making", False))


class _MakingHere:
    """While a batch is made in this thread.

    A class: contextlib's generator sets an error's traceback, which a frozen dataclass refuses.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _is_making_here()
        _here.is_making = True

    def __exit__(self, *_: object) -> None:
        _here.is_making = self._before


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


def start_method_of(loader: "DataLoader[object]") -> StartMethod:
    """Returns how torch would start the loader's workers; fork, where it would start none."""
    if not loader.num_workers:
        return "fork"
    context = loader.multiprocessing_context or multiprocessing
    # Not to be fixed here: the script may still set it.
    chosen = context.get_start_method(allow_none=True)
    return cast(StartMethod, chosen or multiprocessing.get_all_start_methods()[0])


def torch_iterator(
    loader: "DataLoader[object]", process: TrainerProcess, *, num_workers: int | None = None
) -> TorchIterator:
    seeding = seeding_of(loader, process)
    stream = process.books(loader).pending_stream()
    given = loader.num_workers if num_workers is None else num_workers
    has_other_workers = False
    if stream is not None:
        # As many as there are shards; what data hosts made had a process even without workers.
        count = 0 if stream["is_inline"] else len(stream["shards"])
        has_other_workers = count != given
        num_workers = count if has_other_workers else num_workers
    seen = loader if num_workers is None else with_workers(loader, num_workers)
    if has_other_ranks(stream):
        seen = LoaderView(seen, dataset=process.books(loader).rank_datasets)
        has_other_workers = True
    epoch = Epoch(process, loader, seeding=seeding, is_inline=seen.num_workers == 0)
    epoch.has_other_workers = has_other_workers
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
