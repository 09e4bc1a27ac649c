"""Lowers how many batches wait before the kernel kills a process for its memory; says if it did."""

import signal
from collections.abc import Callable

from stoker.host import machine
from stoker.host.memory_usage import MemoryUse, memory_use
from stoker.units import count, size

# Of the limit. Above the first less may wait, below the second more again.
_HIGH, _LOW = 0.92, 0.80
_LEAST_SHARE = 1 / 16
# After a step down what waits has to be taken first, before its memory is free.
_SECONDS_DOWN, _SECONDS_UP = 2.0, 10.0


class MemoryGuard:
    """Says what share of `feed.max_bytes` may wait on this host; asked once a second.

    Args:
        look: Returns how near memory is to its limit.

    Attributes:
        share: 1 as long as there is memory, at least 1/16.
        least_share: The least of it so far.
    """

    def __init__(self, look: Callable[[], MemoryUse | None] = memory_use) -> None:
        self._look = look
        self.share = self.least_share = 1.0
        self._changed_at = 0.0
        self._has_said = self._has_said_room = False

    def tick(self, now: float) -> str:
        """Looks at the memory; returns what is to be said, once: less may wait, and all again.

        Args:
            now: Monotonic seconds.
        """
        use = self._look()
        if use is None:
            return ""
        if use.share > _HIGH:
            return self._lower(use, now)
        if use.share < _LOW and self.share < 1.0 and now - self._changed_at >= _SECONDS_UP:
            self._change(2 * self.share, now)
            if self.share == 1.0 and not self._has_said_room:
                self._has_said_room = True
                return f"memory has room again ({_words(use)}): as many batches wait as before"
        return ""

    def _lower(self, use: MemoryUse, now: float) -> str:
        may_lower = self.share > _LEAST_SHARE and now - self._changed_at >= _SECONDS_DOWN
        if not may_lower:
            return ""
        self._change(self.share / 2, now)
        if self._has_said:
            return ""
        self._has_said = True
        return (
            f"{_words(use)}, are in "
            "use: fewer batches wait from now on, so that no process is killed; give the host more "
            "memory, or lower num_workers, batch_size or feed.max_bytes"
        )

    def _change(self, share: float, now: float) -> None:
        self.share = min(1.0, max(_LEAST_SHARE, share))
        self.least_share = min(self.least_share, self.share)
        self._changed_at = now


def _words(use: MemoryUse) -> str:
    whose = "its memory limit" if use.is_cgroups else "the machine's memory"
    return f"{size(use.used_bytes)} of {size(use.limit_bytes)}, {whose}"


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
    killed = count(kills - kills_before, "process", "processes")
    return (
        f"; since it started, the kernel has killed {killed} of this host for memory{bound}: give "
        "it more, or lower num_workers, batch_size or prefetch_factor"
    )
