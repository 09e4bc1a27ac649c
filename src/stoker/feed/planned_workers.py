"""A plan's workers for a loader that has none in its script: asked ahead only while in step.

torch makes nothing for such a loader before it is asked. Its first batches are made here, one by
one; if the script changes nothing in the meantime, torch's workers make batches ahead from then on.
After a change, what they made is discarded, and the trainer makes the rest of the epoch from the
same indices.

A loop that asks `next(iter(loader))` at each step would start workers for each batch, and have them
make others that nobody wants. So where the last epoch was left after its first batches, as many are
made here before workers start.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.feed.bookkeeping import Position, TrainerProcess
from stoker.feed.in_step import NUM_TRIED, InStep, Say
from stoker.feed.iterators import (
    CountedIterator,
    Epoch,
    with_workers,
)
from stoker.feed.loader_state import seeding_of
from stoker.feed.numbered_workers import AheadIterator, numbered_view
from stoker.feed.seeding import Numbered
from stoker.host.importing import imported

if TYPE_CHECKING:
    from stoker.feed.watched_workers import WatchedBatches


class PlannedIterator(CountedIterator, _BaseDataLoaderIter):  # type: ignore[misc]
    """Iterator over an epoch of a map-style loader with `num_workers=0`, and a plan's workers."""

    def __init__(
        self, loader: "DataLoader[object]", process: TrainerProcess, *, num_workers: int, say: Say
    ) -> None:
        """Begins an epoch; nothing is made yet.

        Args:
            say: Takes why the loader is made here, the path, and whether it is for good.
        """
        seeding = seeding_of(loader, process)
        # Whoever limits a sample's time wants none to be made here.
        is_limited = process.settings.feed.sample_timeout_seconds is not None
        last_epoch = process.books(loader).position
        self._num_made_first = 0 if is_limited else _num_taken_of(last_epoch)
        self._epoch = Epoch(process, loader, seeding=seeding, is_fed=True)
        self._view = with_workers(loader, num_workers)
        super().__init__(cast("DataLoader[object]", self._view))
        self._loader = loader
        self._num_made_here = 0
        self._process = process
        self._ahead: AheadIterator | WatchedBatches | None = None
        numbered = partial(self._epoch.numbered, self._base_seed)
        self._indices: Iterator[Numbered] = map(numbered, self._sampler_iter)
        self._in_step = InStep(
            loader,
            process.books(loader),
            seeding=seeding,
            say=say,
            on_error=self._epoch.on_error,
        )
        self._in_step.begin(is_stream=False)
        weakref.finalize(self, _end, self._epoch)

    def _next_data(self) -> object:  # type: ignore[override]
        path = self._in_step.change()
        if path:
            self._change_at(path)
        try:
            return self._data()
        except StopIteration:
            self._end()
            raise

    def _change_at(self, path: str) -> None:
        num_taken = self._num_taken()
        if self._ahead is not None:
            self._indices = self._ahead.take_back()
            self._ahead = None
            self._num_made_here = num_taken
        if num_taken:
            self._in_step.turn(path)
        else:
            # Nothing is made yet: the epoch begins here.
            self._in_step.look()

    def _data(self) -> object:
        if self._in_step.place != "fed":
            return self._made_here(self._in_step.make, self._in_step.next_index(self._indices))
        if self._ahead is None and self._num_made_here < self._num_made_first:
            return self._made_here(self._in_step.make_meanwhile, next(self._indices))
        return self._data_ahead()

    def _made_here(self, make: Callable[[Numbered], object], numbered: Numbered) -> object:
        # First: it counts also where it fails, as the sampler does not give its index again.
        self._num_made_here += 1
        return self._pinned(make(numbered))

    def _data_ahead(self) -> object:
        try:
            if self._ahead is None:
                self._ahead = self._workers_ahead()
            batch = self._ahead.take()
            # Torch's workers' batches are in pinned memory already, by a thread of torch's.
            is_pinned = isinstance(self._ahead, AheadIterator) or not self._pin_memory
            return batch if is_pinned else pin_memory(batch)  # type: ignore[no-untyped-call]
        finally:
            self._in_step.was_fed()

    def _workers_ahead(self) -> "AheadIterator | WatchedBatches":
        feed = self._process.settings.feed
        num_workers = cast(int, self._view.num_workers)
        if feed.looks_for_deadly_samples:
            # First, as an import statement would begin a collection.
            imported("stoker.feed.watched_workers")
            from stoker.feed.watched_workers import WatchedBatches, is_watched, watched

            loader = self._loader
            process = self._process
            if is_watched(loader, process, num_workers=num_workers):
                seed = int(self._base_seed)
                batches = WatchedBatches(
                    watched(loader, process, view=self._view, base_seed=seed), self._indices
                )
                batches.close_with(self)
                return batches
        view = numbered_view(self._view, self._loader, self._epoch, pin_memory=self._pin_memory)
        return AheadIterator(view, self._indices, self._epoch)

    def _pinned(self, batch: object) -> object:
        # Objects of the script may pin themselves.
        return pin_memory(batch) if self._pin_memory else batch  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        self._in_step.end()
        self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """Ends the epoch, for scripts that do so as with torch's."""
        if self._ahead is not None:
            self._ahead._shutdown_workers()
        self._epoch.order.position.cancel()

    def _num_taken(self) -> int:
        return self._num_made_here + (self._ahead.num_taken if self._ahead is not None else 0)


def _num_taken_of(last_epoch: Position | None) -> int:
    """Returns how many batches of an epoch the script took before it left it; 0: not so few."""
    if last_epoch is None or last_epoch.is_over:
        return 0
    num_taken = last_epoch.num_yielded or 0
    return num_taken if num_taken <= NUM_TRIED else 0


def _end(epoch: Epoch) -> None:
    """Ends the epoch of an iterator that is gone; a finalizer, so in any thread: takes no lock."""
    epoch.end_in_finalizer()
    epoch.order.position.cancel_in_finalizer()
