"""How much memory batches take and may take; a brake on them; whom the kernel killed for memory."""

import signal
from collections.abc import Callable

from stoker.host import machine
from stoker.host.machine import host_bytes
from stoker.host.usage import MemoryUse, memory_use
from stoker.records import FeedSettings
from stoker.units import numbered, size

# Of a host's memory, for batches that wait: training, pinned copies and page cache want the rest.
DEFAULT_SHARE = 0.25
# Assumed size of a batch before the first one is here: larger than most, to not fill the memory.
UNKNOWN_BATCH_BYTES = 64 << 20
# Of the limit: above the first few batches may wait, below the second all again.
_HIGH = 0.92
_LOW = 0.80
# Of `feed.max_bytes`, while the brake holds; each loader may have one batch in any case.
_BRAKED_SHARE = 1 / 16


def max_bytes(feed: FeedSettings) -> int:
    """Returns how many bytes of batches may wait in this host, for all its loaders and ranks."""
    return feed.max_bytes or int(host_bytes() * DEFAULT_SHARE)


def max_message_bytes(feed: FeedSettings) -> int:
    """Returns the limit of one batch on the wire: one always fits, if this host can hold it."""
    return max(max_bytes(feed), host_bytes()) + (16 << 20)


class MemoryBrake:
    """Says what share of `feed.max_bytes` may wait on this host.

    Args:
        look: Returns how near memory is to its limit.

    Attributes:
        share: 1 as long as there is memory, else 1/16.
    """

    def __init__(self, *, look: Callable[[], MemoryUse | None] = memory_use) -> None:
        self._look = look
        self.share = 1.0
        self._has_braked = False

    def tick(self) -> str:
        """Looks at the memory, in 0.3 ms; returns what is to be said, the first time it brakes."""
        use = self._look()
        if use is None:
            return ""
        if use.share < _LOW:
            self.share = 1.0
        if use.share <= _HIGH:
            return ""
        self.share = _BRAKED_SHARE
        is_first, self._has_braked = not self._has_braked, True
        whose = "its memory limit" if use.is_cgroups else "the machine's memory"
        words = (
            f"{size(use.used_bytes)} of {size(use.limit_bytes)}, {whose}, are in use: fewer "
            f"batches wait until less than {_LOW:.0%} are; give the host more memory, or lower "
            "num_workers, batch_size or feed.max_bytes"
        )
        return words if is_first else ""


def killed_words(code: int, *, kills_before: int | None) -> str:
    """Returns what the kernel says of a process that ended with a code; empty: no kill for memory.

    Args:
        code: Its exit code; a signal's is negative.
        kills_before: The kernel's count for this host's group when the process started; None: it
            does not count. What it has killed since was this process, or died beside it.
    """
    kills = machine.num_memory_kills() if code == -signal.SIGKILL else None
    if kills is None or kills_before is None or kills <= kills_before:
        return ""
    limit = machine.limit_bytes()
    bound = f", whose limit is {size(limit)}" if limit else ""
    killed = numbered(kills - kills_before, "process", "processes")
    return (
        f"; since it started, the kernel has killed {killed} of this host for memory{bound}: give "
        "it more, or lower num_workers, batch_size or prefetch_factor"
    )
