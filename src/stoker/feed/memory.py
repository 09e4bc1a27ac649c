"""How much memory batches take, and how much those that wait may take."""

import contextlib
from collections.abc import Mapping, Sequence

from stoker.host.machine import host_bytes
from stoker.records import FeedSettings

# Of a host's memory, for batches that wait: training, pinned copies and page cache want the rest.
DEFAULT_SHARE = 0.25
# Assumed size of a batch before the first one is here: larger than most, to not fill the memory.
UNKNOWN_BATCH_BYTES = 64 << 20
_MAX_DEPTH = 16


def max_bytes(feed: FeedSettings) -> int:
    """Returns how many bytes of batches may wait in this host, for all its loaders and ranks."""
    return feed.max_bytes or int(host_bytes() * DEFAULT_SHARE)


def max_message_bytes(feed: FeedSettings) -> int:
    """Returns the limit of one batch on the wire: one always fits, if this host can hold it."""
    return max(max_bytes(feed), host_bytes()) + (16 << 20)


def allowance(total_bytes: int, *, taken: Sequence[int]) -> int:
    """Returns how much one loader's batches may take: an equal part, and no more than is free.

    `taken` are the bytes of the other loaders' batches, those under way included.
    """
    return max(0, min(total_bytes // (len(taken) + 1), total_bytes - sum(taken)))


def num_bytes(batch: object, *, depth: int = 0) -> int:
    """Returns the bytes of a batch's tensors and arrays, one level deep in other objects."""
    if hasattr(batch, "dtype"):
        return _own_bytes(batch)
    if depth >= _MAX_DEPTH:
        return 0
    if isinstance(batch, str | bytes | bytearray):
        return 0
    if isinstance(batch, Mapping | Sequence):
        items = batch.values() if isinstance(batch, Mapping) else batch
        return sum(num_bytes(item, depth=depth + 1) for item in items)
    held = getattr(batch, "__dict__", None)
    values = held.values() if isinstance(held, dict) else ()
    return sum(_own_bytes(value) for value in values if hasattr(value, "dtype"))


def _own_bytes(array: object) -> int:
    # A sparse tensor of torch has no size; its parts do.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        size = getattr(array, "nbytes", 0)
        return size if isinstance(size, int) else 0
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        parts = (array._indices(), array._values())  # type: ignore[attr-defined]
        return sum(int(part.nbytes) for part in parts)
    return 0
