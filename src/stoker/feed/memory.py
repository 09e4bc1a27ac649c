"""This module bounds how much of this host's memory the batches that wait may take."""

from collections.abc import Iterable
from typing import Protocol

from stoker.host.machine import host_bytes
from stoker.records import FeedSettings

# Of a host's memory, for batches that wait, where `feed.max_bytes` does not say it: the training,
# its pinned copies and the page cache want the rest.
DEFAULT_SHARE = 0.25
# Of a batch before any has come: larger than most, so that the first ones do not fill the memory.
UNKNOWN_BATCH_BYTES = 64 << 20


class Holding(Protocol):
    """One loader's batches."""

    @property
    def committed_bytes(self) -> int:
        """Bytes of the batches that wait, and of those under way as far as can be known."""
        ...


def max_bytes(feed: FeedSettings) -> int:
    """Returns how many bytes of batches may wait in this host, for all its loaders and ranks."""
    return feed.max_bytes or int(host_bytes() * DEFAULT_SHARE)


def max_message_bytes(feed: FeedSettings) -> int:
    """Returns the limit of one batch on the wire: one always goes, if this host can hold it."""
    return max(max_bytes(feed), host_bytes()) + (16 << 20)


def allowance(total_bytes: int, *, others: Iterable[Holding]) -> int:
    """Returns how much one loader's batches may take, next to the other loaders of its process.

    An equal part, and no more than is free: together they stay within `total_bytes` (but that each
    may have one batch), also while a new one joins.

    Args:
        total_bytes: Of the process.
        others: The other loaders that are iterated over now.
    """
    taken = [other.committed_bytes for other in others]
    return max(0, min(total_bytes // (len(taken) + 1), total_bytes - sum(taken)))
