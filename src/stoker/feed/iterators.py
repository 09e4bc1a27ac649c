"""The iterator of every loader: draws as torch does, numbers, seeds, times and counts each epoch.

Batches come from a source: data hosts, torch's own workers, or the trainer's process. Batch n is
made from random states that depend on (base seed, replica, epoch, n) alone; `seeding: torch` and
iterable datasets behave as with torch in every respect.
"""

import contextlib
import hashlib
import re
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stoker.errors import UsageError
from stoker.feed.bad_samples import check_limit
from stoker.feed.bookkeeping import (
    IN_STATE,
    EpochProgress,
    LoaderState,
    SamplerSnapshot,
    TrainerProcess,
)
from stoker.feed.engine.messages import BadSample
from stoker.feed.generators import GLOBALS
from stoker.feed.loader_state import (
    generators_of,
    restore,
    take,
)
from stoker.feed.local_sources import (
    AnyLoader,
    BatchSource,
    Epoch,
    TrainerSource,
    WorkersSource,
    view_of,
)
from stoker.feed.placement import Placement, placement_of
from stoker.feed.seeding import Numbered
from stoker.feed.streams import ShardProgress, StreamProgress
from stoker.feed.tolerance import ToleratedBatch, check_on_error

if TYPE_CHECKING:
    from stoker.feed.fed_source import FedSource


class EpochIterator(_BaseDataLoaderIter):
    """Iterator over one epoch (with persistent workers: one after the other).

    By torch's base the sampler, the seeds and the warnings are asked for in torch's order.

    Attributes:
        is_seeded: Each batch has its own seed.
    """

    def __init__(self, loader: AnyLoader, process: TrainerProcess) -> None:
        """Begins an epoch.

        Raises:
            UsageError: If bad samples of the dataset cannot be treated as `feed.on_error` says, or
                the sampler does not give the same again as before a state was taken.
            FeedError: If a dataset that only data hosts have cannot be read there.
        """
        self._is_map_style = loader._dataset_kind == _DatasetKind.Map
        self._batch_size = loader.batch_size or 1
        self._on_error = process.settings.feed.on_error
        check_on_error(loader.dataset, self._on_error, is_map_style=self._is_map_style)
        self._process = process
        self._books = process.books(loader)
        # A loader of torch's own class has no `state_dict`, so nobody can ask for its state.
        self._has_state = hasattr(loader, "state_dict")
        # Which a state of a map-style dataset's epoch needs.
        self._generators: dict[str, object] | None = None
        if self._has_state and self._is_map_style:
            self._generators = GLOBALS | generators_of(loader)
        self._source: BatchSource | FedSource | None = None
        # Whether data hosts, and how many workers, make the batches.
        self._placed: tuple[bool, int] | None = None
        # Not kept: a loader that the script drops ends its workers.
        self._begin(loader)

    def _reset(self, loader: AnyLoader, first_iter: bool = False) -> None:
        """Begins the next epoch of workers that persist."""
        self._steps.end()
        self._begin(loader, is_again=True)

    def _begin(self, loader: AnyLoader, *, is_again: bool = False) -> None:
        process, books = self._process, self._books
        began = process.timeline.clock()
        place = placement_of(loader, process, is_again=is_again)
        self.is_seeded = place.seeding != "torch"
        state = books.pending_state()
        # From here on the state is used: no later epoch begins from it again.
        books.loaded = None
        begun: dict[str, object] = {}
        if state is not None:
            books.epochs, books.base_seed = state["epoch"], state["base_seed"]
            begun = state["begun"] or {}
        at_iter = self._draw_as_torch(place.loader, state, is_again=is_again)
        self._index_sampler = place.loader._index_sampler
        self._num_workers = place.num_processes or place.loader.num_workers
        self._progress = books.progress = progress = EpochProgress(
            epoch=books.epochs,
            base_seed=int(self._base_seed),
            resumed=state if begun else None,
            at_iter=at_iter,
        )
        books.epochs += 1
        for name in begun.keys() & IN_STATE:
            setattr(progress, name, begun[name])
        progress.first = progress.num_yielded
        if not self._is_map_style:
            progress.stream = place.stream or self._new_stream(place)
        is_replayed = bool(begun) and self._is_map_style
        self._draws = IndexDraws(
            # Torch's sampler of a stream gives the same for each batch.
            self._sampler_iter if is_replayed or not begun else iter(self._index_sampler),
            progress,
            replica=process.settings.feed.replica(process.settings.rank),
            is_batched=self._auto_collation,
            generators=self._generators,
        )
        if is_replayed:
            self._draws.resume(self._index_sampler)
        self._num_samples = 0
        self._bad: list[BadSample] = []
        # Batches are seeded by the loader's own epoch; the timeline counts on over loaders.
        self._number = max(process.timeline.sums(books.number).epochs, progress.epoch)
        self._steps = process.timeline.epoch(
            loader=books.number, epoch=self._number, batch=progress.first
        )
        weakref.finalize(self, self._steps.end_in_finalizer)
        epoch = Epoch(
            progress=progress,
            indices=self._draws,
            seeding=place.seeding,
            on_error=self._on_error,
            num_workers=(progress.stream or place.loader).num_workers,
            pins=self._pin_memory,
        )
        self._begin_source(place, epoch)
        # Workers start in it: the first batch waits for them.
        self._steps.opened(process.timeline.clock() - began)

    def _draw_as_torch(
        self, loader: AnyLoader, state: LoaderState | None, *, is_again: bool
    ) -> SamplerSnapshot | None:
        """Asks for the sampler's iterator and the seeds in torch's order.

        Returns the random states from which the sampler began; None: nobody asks for a state, or
        a loaded one has them.
        """
        books = self._books
        is_resumed = state is not None and state["begun"] is not None
        # Workers that persist have one for all epochs.
        persists = loader.persistent_workers and loader.num_workers > 0
        keeps_seed = is_resumed or (persists and state is not None and books.base_seed is not None)
        # What a state has is drawn without a trace.
        drawn_before: dict[str, object] = {"_index_sampler": ()} if is_resumed else {}
        shown = loader
        if keeps_seed:
            shown = view_of(loader, generator=torch.Generator(), **drawn_before)
        noted = None if is_resumed else self._generators
        at_iter = noted and take(noted)
        if not is_again:
            super().__init__(shown)
        if is_again or loader.num_workers:
            # With workers torch makes an iterator of the sampler twice, unless one is used again.
            at_iter = noted and take(noted)
            if is_resumed:
                self._index_sampler = ()
            super()._reset(shown)
        if keeps_seed:
            self._base_seed = books.base_seed or 0
        books.base_seed = int(self._base_seed)
        return at_iter

    def _new_stream(self, place: Placement) -> StreamProgress | None:
        """Returns the beginning of an iterable dataset; None: nobody asks for its state."""
        if not (self._has_state or place.is_fed):
            return None
        num_workers = place.loader.num_workers
        return StreamProgress(
            num_workers=num_workers,
            shards=[ShardProgress() for _ in range(max(1, num_workers))],
        )

    def _begin_source(self, place: Placement, epoch: Epoch) -> None:
        placed = (place.is_fed, place.num_processes)
        if self._source is not None and placed == self._placed:
            self._source.begin(epoch)
            return
        self._shutdown_workers()
        self._placed = placed
        if place.is_fed:
            from stoker.feed.engine.feed import feed_of
            from stoker.feed.fed_source import FedSource

            self._source = FedSource(place.loader, epoch, self._process, feed_of(self._process))
        elif place.num_processes:
            self._source = WorkersSource(place.loader, epoch, num_processes=place.num_processes)
        else:
            self._source = TrainerSource(place.loader, epoch)

    def __next__(self) -> object:
        # torch's own opens a range for profilers around each batch, also where no profiler is on:
        # 10 us in a loop, 50 us between two steps of a training run. And it warns of more samples
        # than an iterable dataset said.
        if _profiler_enabled() or not self._is_map_style:
            batch: object = super().__next__()
            return batch
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _next_data(self) -> object:  # type: ignore[override]
        source, progress = self._source, self._progress
        assert source is not None
        self._steps.ask()
        try:
            batch = source.take()
        except StopIteration:
            progress.is_over = True
            self._steps.end()
            raise
        except BaseException:
            self._count(source)
            raise
        size = self._count(source)
        if isinstance(batch, ToleratedBatch):
            self._note_bad(batch)
            batch = batch.batch
        self._steps.got(size)
        return batch

    def _note_bad(self, batch: ToleratedBatch) -> None:
        """Lists a batch's bad samples; raises FeedError if the epoch has too many."""
        process, books = self._process, self._books
        number = self._progress.num_yielded - 1
        process.bad.add(batch.bad, epoch=self._number, number=number, loader=books.number)
        self._bad += batch.bad
        num_batches = 0
        # Of a sampler of the script, which need not have a length.
        with contextlib.suppress(Exception):
            num_batches = len(self)
        check_limit(
            self._bad,
            samples=self._num_samples,
            epoch_samples=num_batches * self._batch_size,
            most=process.settings.feed.max_errors,
            where=f"epoch {self._progress.epoch}, {process.bad.where}",
        )

    def _count(self, source: "BatchSource | FedSource") -> int:
        """Counts what the script has got since the last call; returns its samples.

        Nothing was got where a timeout ended the wait, or a signal's handler raised.
        """
        progress, sizes = self._progress, self._draws.sizes
        size = 0
        while progress.num_yielded < progress.first + source.num_taken:
            progress.num_yielded += 1
            size = sizes.popleft() if sizes else 0
        progress.resumed = None
        self._num_samples += size
        return size

    def _shutdown_workers(self) -> None:
        """Ends the epoch, for scripts that do so as with torch's: nothing more is made ahead."""
        if self._source is not None:
            self._source.close()


def part_iterator(loader: AnyLoader) -> _BaseDataLoaderIter:
    """Returns torch's own iterator, for a loader that another one's dataset iterates over."""
    # It draws from the random states of the batch that it is a part of.
    if loader.num_workers == 0:
        return _SingleProcessDataLoaderIter(loader)
    return _MultiProcessingDataLoaderIter(loader)


# ---- what the sampler gives


@dataclass(slots=True)
class IndexDraws:
    """The index batches of an epoch in their order; it may go on after an error of the sampler.

    Attributes:
        indices: The sampler's iterator.
        progress: The epoch's.
        replica: For the batches' seeds.
        is_batched: An index is a batch of them.
        generators: What a state of the epoch needs; None: nobody asks for one.
        sizes: Samples of each batch that was given, to be taken away as it is used.
    """

    indices: Iterator[object]
    progress: EpochProgress
    replica: int
    is_batched: bool
    generators: dict[str, object] | None = None
    sizes: deque[int] = field(default_factory=deque)
    _num_given: int = 0
    # Drawn before and not yielded, of a resumed epoch.
    _ahead: deque[object] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Numbered]:
        return self

    def __next__(self) -> Numbered:
        index = self._ahead.popleft() if self._ahead else self._draw()
        size = 1
        if self.is_batched or isinstance(index, list):
            # 1 where it has no length: a generator.
            size = length_hint(index, 1)
        self.sizes.append(size)
        progress = self.progress
        number = progress.first + self._num_given
        self._num_given += 1
        return Numbered((progress.base_seed, self.replica, progress.epoch, number), index)

    def _draw(self) -> object:
        progress = self.progress
        if self.generators is not None and progress.at_draw is None:
            progress.at_draw = take(self.generators)
        try:
            index = next(self.indices)
        except StopIteration:
            progress.is_drawn_out = True
            raise
        index = _as_it_is(index)
        progress.num_drawn += 1
        if self.generators is not None:
            progress.digest = digest_with(index, before=progress.digest)
        return index

    def resume(self, sampler: Iterable[object]) -> None:
        """Runs the sampler again from where the epoch began, up to what the script has.

        Raises:
            UsageError: The sampler does not give the same again.
        """
        progress, generators = self.progress, self.generators
        assert progress.resumed is not None
        assert progress.at_iter is not None
        assert generators is not None
        here = take(GLOBALS)
        try:
            restore(generators, progress.at_iter)
            self.indices = iter(sampler)
            if progress.at_draw is not None:
                restore(generators, progress.at_draw)
            if self._drawn_again(progress) != progress.digest:
                raise UsageError(
                    f"the sampler ({type(sampler).__name__}) did not give the same "
                    f"{progress.num_drawn} batches as before the state was taken",
                    where=f"epoch {progress.epoch}, {progress.num_yielded} batches yielded",
                    fix="build the dataset and the sampler as in the run that saved the state, "
                    "with the same set_epoch; a sampler draws from generators of its own, of the "
                    "loader or the process",
                )
            # Where the sampler draws while it is asked, the script's draws come next.
            restore(generators, progress.resumed["now"])
        finally:
            restore(GLOBALS, here)

    def _drawn_again(self, progress: EpochProgress) -> str:
        """Draws what was drawn, and keeps what of it was not yielded; returns its digest."""
        digest = ""
        # A sampler that ends too early gives another digest.
        for number, given in enumerate(islice(self.indices, progress.num_drawn)):
            index = _as_it_is(given)
            digest = digest_with(index, before=digest)
            if number >= progress.num_yielded:
                self._ahead.append(index)
        if progress.is_drawn_out:
            # To its end, where it may draw once more; what else it gives makes another digest.
            digest += "".join("more" for _ in self.indices)
        return digest


def _as_it_is(index: object) -> object:
    """Returns what a sampler gave: it may give the same list again, or what can be read once."""
    return [*index] if type(index) is list or isinstance(index, Iterator) else index


def digest_with(index: object, *, before: str) -> str:
    """Returns the digest of everything that a sampler gave, `index` last."""
    # Addresses of objects differ between processes.
    text = before + re.sub(r" at 0x[0-9a-f]+", "", repr(index))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
