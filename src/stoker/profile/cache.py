"""Batches that are kept and given out again, of the main loader and of those read beside it."""

import time
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from stoker.feed.batch_bytes import num_bytes
from stoker.profile import batches
from stoker.profile.facts import length_of

CACHED_BATCHES = 8
_CACHED_BYTES = 2 << 30


class Cache:
    """The first batches of a loader, 8 at most, and 2 GiB of them."""

    def __init__(self) -> None:
        self.batches: list[object] = []

    def add(self, batch: object) -> None:
        """Keeps a copy, where there is room for one."""
        if len(self.batches) >= CACHED_BATCHES:
            return
        if self.batches and num_bytes(batch) * (len(self.batches) + 1) > _CACHED_BYTES:
            return
        self.batches.append(batches.clone(batch))

    def give(self, index: int) -> object:
        """A copy of one of at least one, round and round."""
        return batches.clone(self.batches[index % len(self.batches)])


class Beside:
    """Loaders that a script reads within the steps of the main one: labelled and unlabelled data.

    What a step waits for them is waiting, too; and where the main one's batches come from the
    cache, theirs do.

    Attributes:
        count: Batches that were read so, as is.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waited = 0.0
        self._caches: WeakKeyDictionary[DataLoader[object], Cache] = WeakKeyDictionary()

    def next_batch(
        self,
        loader: DataLoader[object],
        inner: Iterator[object],
        *,
        delivered: int,
        is_replaying: bool,
    ) -> object:
        """The next batch: its own as is, then a cached one.

        Args:
            loader: One beside the main one.
            inner: Its own iterator.
            delivered: Its batches in this pass.
            is_replaying: Whether the main one's batches come from the cache.

        Raises:
            StopIteration: At the end of a pass, of cached batches, too.
        """
        cache = self._caches.setdefault(loader, Cache())
        if is_replaying and cache.batches:
            length = length_of(loader)
            if length is not None and delivered >= length:
                raise StopIteration
            return cache.give(delivered)
        asked = time.monotonic()
        batch = next(inner)
        self._waited += time.monotonic() - asked
        if not is_replaying:
            self.count += 1
            cache.add(batch)
        return batch

    def take_waited(self) -> float:
        """Seconds that these loaders were waited for since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited
