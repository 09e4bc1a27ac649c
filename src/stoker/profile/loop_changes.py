"""Whether the script changes what a loader without workers makes its batches from.

Under data hosts or with a plan's workers such a loader is made in the trainer (feed/in_step.py), so
that neither helps. A profile compares what the script had in hand between two batches: the first
ones in all, later ones for at most 0.5 % of the time.
"""

import time
from collections.abc import Callable
from weakref import ref

from torch.utils.data import DataLoader, IterableDataset

from stoker.feed.changes import Watch
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.in_step import MAX_CHANGED_EPOCHS, NO_BATCH_AHEAD, NUM_TRIED, watches_of
from stoker.feed.wire.pickling import factories_in

_SHARE = 0.005


class LoopChanges:
    """What one loader's loop changes, batch by batch.

    Attributes:
        words: Why nothing may be made ahead, as half a sentence; empty: nothing was seen.
        once: Path of a change that was seen once, in later steps.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: In seconds."""
        self.words = ""
        self.once = ""
        self._clock = clock
        self._began = clock()
        self._spent_seconds = 0.0
        self._loader: Callable[[], object] = lambda: None
        self._watches: tuple[Watch, ...] = ()
        self._num_compared = 0
        self._num_changes = 0
        # What the watches know is of the last batch; of this moment, before the next one is made.
        self._is_fresh = False
        self._is_exact = False
        self._judges_making = False

    def asked(self, loader: DataLoader[object]) -> None:
        """Compares with what was there when the last batch was made; call it before the next."""
        if loader.num_workers or self.words:
            return
        self._is_exact = False
        if self._loader() is not loader:
            self._begin(loader)
        elif self._is_fresh:
            self._timed(self._compare)
        self._is_fresh = False

    def made(self) -> None:
        """Takes what is there for unchanged: a batch has just been made from it."""
        if not self._watches or self.words:
            return
        is_new = self._num_compared < NUM_TRIED
        elapsed = self._clock() - self._began
        if is_new or self._spent_seconds <= _SHARE * elapsed:
            self._timed(self._look)

    def epoch_ended(self) -> None:
        """What changes between two epochs is in the next one's batches anyway."""
        self._is_fresh = False

    def _begin(self, loader: DataLoader[object]) -> None:
        self._loader = ref(loader)
        self._watches = ()
        # Data hosts make a dataset by name in any case.
        if next(factories_in(loader.dataset), None) is None:
            self._timed(lambda: self._find(loader))

    def _find(self, loader: DataLoader[object]) -> None:
        parts, sampler = self._watches = watches_of(loader)
        waits = sampler.waits or parts.waits
        if waits:
            self.words = f"{waits} may wait for the loop, and {NO_BATCH_AHEAD}"
        is_stream = isinstance(loader.dataset, IterableDataset)
        # Data hosts make those of stoker's class from the first batch on.
        is_stokers = reach_of(type(loader))[1] == "stoker"
        self._judges_making = not (is_stream or is_stokers)
        self._is_exact = True

    def _compare(self) -> None:
        self._num_compared += 1
        path = next(filter(None, (watch.changed(depth="all") for watch in self._watches)), "")
        if not path:
            self._is_exact = True
            return
        self._num_changes += 1
        is_early = self._num_compared <= NUM_TRIED
        if is_early or self._num_changes >= MAX_CHANGED_EPOCHS:
            self.words = f"{path} changed between two batches, and {NO_BATCH_AHEAD}"
        self.once = "" if self.words else path

    def _look(self) -> None:
        parts, sampler = self._watches
        path = parts.changed_in_making() if self._judges_making and self._is_exact else ""
        if path:
            self.words = f"{path} changes as a batch is made, and {NO_BATCH_AHEAD}"
        parts.look()
        sampler.look()
        self._is_fresh = True

    def _timed(self, act: Callable[[], None]) -> None:
        began = self._clock()
        act()
        self._spent_seconds += self._clock() - began
