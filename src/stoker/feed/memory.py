"""How much memory batches take, and how much those that wait may take."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from stoker.host.machine import host_bytes
from stoker.records import FeedSettings

# Share of a host's memory for batches that wait, unless `feed.max_bytes` is set: the training,
# its pinned copies and the page cache want the rest.
DEFAULT_SHARE = 0.25
# Assumed size of a batch before the first one is here: larger than most, to not fill the memory.
UNKNOWN_BATCH_BYTES = 64 << 20
_MAX_DEPTH = 16


class Holding(Protocol):
    """Holder of one loader's batches."""

    @property
    def committed_bytes(self) -> int:
        """Bytes of batches that wait, and of those under way as far as is known."""
        ...


def max_bytes(feed: FeedSettings) -> int:
    """Returns how many bytes of batches may wait in this host, for all its loaders and ranks."""
    return feed.max_bytes or int(host_bytes() * DEFAULT_SHARE)


def max_message_bytes(feed: FeedSettings) -> int:
    """Returns the limit of one batch on the wire: one always fits, if this host can hold it."""
    return max(max_bytes(feed), host_bytes()) + (16 << 20)


def allowance(total_bytes: int, *, others: Iterable[Holding]) -> int:
    """Returns how much one loader's batches may take, given the other busy loaders of its process.

    An equal part, and no more than is free: together they stay within `total_bytes` (except that
    each may have one batch), also while a new one joins.
    """
    taken = [other.committed_bytes for other in others]
    return max(0, min(total_bytes // (len(taken) + 1), total_bytes - sum(taken)))


def num_bytes(batch: object, *, depth: int = 0) -> int:
    """Returns the bytes of a batch's tensors and arrays, one level deep in other objects."""
    if hasattr(batch, "dtype"):
        return _own_bytes(batch)
    if depth >= _MAX_DEPTH:
        return 0
    if isinstance(batch, Mapping):
        return sum(num_bytes(item, depth=depth + 1) for item in batch.values())
    if isinstance(batch, Sequence):
        if isinstance(batch, str | bytes | bytearray):
            return 0
        return sum(num_bytes(item, depth=depth + 1) for item in batch)
    held = getattr(batch, "__dict__", None)
    if not isinstance(held, dict):
        return 0
    return sum(_own_bytes(value) for value in held.values() if hasattr(value, "dtype"))


def _own_bytes(array: object) -> int:
    try:
        size = getattr(array, "nbytes", 0)
        return size if isinstance(size, int) else 0
    except (RuntimeError, NotImplementedError):
        # A sparse tensor of torch has no size; its parts do.
        return _sparse_bytes(array)


def _sparse_bytes(tensor: object) -> int:
    try:
        parts = (tensor._indices(), tensor._values())  # type: ignore[attr-defined]
        return sum(int(part.nbytes) for part in parts)
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
