"""Lowers how many batches wait before the kernel kills a process for its memory; says if it did."""

import signal
from collections.abc import Callable
from typing import NamedTuple

from stoker.host import machine
from stoker.host.memory_usage import MemoryUse, memory_use, swap_room_bytes
from stoker.units import count, size

# Of the limit. Above the first less may wait, below the second more again.
_HIGH = 0.92
_LOW = 0.80
# Use that grows is looked at this far ahead, once so much of the limit is in use: what was asked
# for still comes. Without, 13 processes were killed at 100 MB/s (test_memory_limit.py).
_SECONDS_AHEAD = 2.0
# A look takes 0.3 ms. In a second a small host is filled.
_LOOK_SECONDS = 0.25
_LOOKED_AHEAD = 0.6
# Of the limit: batches that were asked for have to fit, however slowly they come. With steps of
# 14 s 791 MB were passed at 20 MB a second, 12 s after less was asked for.
_FULL = 0.97
# Of `feed.max_bytes`, and of the limit where that is less.
_LEAST_SHARE = 1 / 16
# After a step down what waits has to be taken first, before its memory is free. Where use grows as
# before it was too small: in two seconds 170 MB/s had filled 240 MB (test_memory_limit.py).
_SECONDS_DOWN = 2.0
_SECONDS_GROWING = 0.5
_SECONDS_UP = 10.0
# A raise that was taken back is tried again after twice as long, by half as much: without, a run
# that would use 85% was lowered and raised 55 times in ten minutes (test_memory_guard.py).
_MOST_SECONDS_UP = 640.0
# One that was taken back later than this was none too many: something else took memory, as a
# validation does, and once that is over a raise is as fast as the first.
_SECONDS_HELD = 300.0
# Of the limit in a second. Less is what comes and goes.
_GROWS = 0.02


class MemoryShares(NamedTuple):
    """The share of `feed.max_bytes` that may wait on a host now, and the least so far."""

    now: float = 1.0
    least: float = 1.0


class MemoryGuard:
    """Says what share of `feed.max_bytes` may wait on this host; looks four times a second.

    Args:
        max_bytes: What may wait where there is memory.
        look: Returns how near memory is to its limit.

    Attributes:
        share: 1 as long as there is memory, at least 1/16, or as much of the limit if that is less.
        least_share: The least of it so far.
    """

    def __init__(
        self, *, max_bytes: int, look: Callable[[], MemoryUse | None] = memory_use
    ) -> None:
        self._max_bytes = max(1, max_bytes)
        self._look = look
        self.share = self.least_share = 1.0
        self._changed_at = self._due_at = 0.0
        self._seconds_up = _SECONDS_UP
        self._is_raised = False
        self._before: tuple[float, int] | None = None
        self._has_said = self._has_said_room = False

    @property
    def shares(self) -> MemoryShares:
        return MemoryShares(self.share, self.least_share)

    def is_due(self, now: float) -> bool:
        """Whether it is time for `tick`."""
        return now >= self._due_at

    def tick(self, now: float, *, waiting_bytes: int, coming_bytes: int = 0) -> str:
        """Looks at the memory; returns what is to be said, once: less may wait, and all again.

        Args:
            now: Monotonic seconds.
            waiting_bytes: What waits now: less than it may wait from the first step down on.
            coming_bytes: Batches among it that were asked for and are not here.
        """
        self._due_at = now + _LOOK_SECONDS
        use = self._look()
        if use is None:
            return ""
        growth = self._growth(use, now)
        soon = growth * _SECONDS_AHEAD / use.limit_bytes
        is_ahead = use.share >= _LOOKED_AHEAD and use.share + soon > _HIGH
        fits = use.share + coming_bytes / use.limit_bytes <= _FULL
        if use.share > _HIGH or is_ahead or (use.share >= _LOOKED_AHEAD and not fits):
            why = ""
            if not fits:
                why = f", and {size(coming_bytes)} of batches are on their way"
            elif use.share <= _HIGH:
                why = f", and {size(growth)} more each second"
            return self._lower(use, now, growth=growth, waiting_bytes=waiting_bytes, why=why)
        is_time = now - self._changed_at >= self._seconds_up
        if use.share < _LOW and self.share < 1.0 and is_time:
            return self._raise(use, now, coming_bytes=coming_bytes)
        return ""

    def _raise(self, use: MemoryUse, now: float, *, coming_bytes: int) -> str:
        """Raises the share to what there is room for; returns what is to be said, the first time.

        Args:
            use: What is in use.
            now: Monotonic seconds.
            coming_bytes: Batches that will be in use, too.
        """
        room = _HIGH * use.limit_bytes - use.used_bytes - coming_bytes
        step = self.share * _SECONDS_UP / self._seconds_up
        share = min(1.0, self.share + step, self.share + room / self._max_bytes)
        if share <= self.share:
            return ""
        self._change(share, now)
        if share < 1.0 or self._has_said_room:
            return ""
        self._has_said_room = True
        return f"memory has room again ({_words(use)}): as many batches wait as before"

    def _growth(self, use: MemoryUse, now: float) -> float:
        """Returns the bytes that more are in use each second than at the last look."""
        before = self._before
        self._before = (now, use.used_bytes)
        if before is None or now <= before[0]:
            return 0.0
        return max(0.0, (use.used_bytes - before[1]) / (now - before[0]))

    def _lower(
        self, use: MemoryUse, now: float, *, growth: float, waiting_bytes: int, why: str
    ) -> str:
        """Lowers the share if it may; returns what is to be said of it, the first time.

        Args:
            use: What is in use.
            now: Monotonic seconds.
            growth: Bytes that more are in use each second.
            waiting_bytes: What waits now.
            why: What else is to be said of what is in use.
        """
        least = _LEAST_SHARE * min(1.0, use.limit_bytes / self._max_bytes)
        pause = _SECONDS_DOWN
        if growth >= _GROWS * use.limit_bytes:
            pause = _SECONDS_GROWING
        may_lower = self.share > least and now - self._changed_at >= pause
        if not may_lower:
            return ""
        if self._is_raised:
            has_held = now - self._changed_at >= _SECONDS_HELD
            longer = min(_MOST_SECONDS_UP, 2 * self._seconds_up)
            self._seconds_up = _SECONDS_UP if has_held else longer
        # Half of a bound that is far above what waits would change nothing.
        waiting = min(self.share, waiting_bytes / self._max_bytes)
        self._change(max(least, waiting / 2), now)
        if self._has_said:
            return ""
        self._has_said = True
        aim = "no process is killed"
        if use.only_slows:
            aim = "the kernel slows no process"
        elif swap_room_bytes():
            aim = "nothing is swapped out"
        elif use.is_cgroups and machine.is_killed_together():
            aim = "the kernel does not kill the whole container (memory.oom.group)"
        return (
            f"{_words(use)}, are in use{why}: fewer batches wait from now on, so that {aim}; give "
            "the host more memory, or lower num_workers, batch_size or feed.max_bytes"
        )

    def _change(self, share: float, now: float) -> None:
        self._is_raised = share > self.share
        self.share = share
        self.least_share = min(self.least_share, share)
        self._changed_at = now


def _words(use: MemoryUse) -> str:
    whose = "the machine's memory"
    if use.only_slows:
        whose = "its memory.high"
    elif use.is_cgroups:
        whose = "its memory limit"
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
