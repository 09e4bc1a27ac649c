"""The kernel's CPU clocks of single processes and threads.

Exact to a nanosecond, where /proc counts in hundredths of a second.
"""

import time

# Linux names a process's CPU clock by its inverted pid and a thread's by its inverted tid.
_PROCESS, _THREAD = 0b010, 0b110


def process_clock(pid: int) -> float | None:
    """User and system seconds of a process; None if it ended, or there is no such clock."""
    return _read(pid, _PROCESS)


def thread_clock(tid: int) -> float | None:
    """The same of a thread of this process, by its native id."""
    return _read(tid, _THREAD)


def _read(number: int, kind: int) -> float | None:
    try:
        return time.clock_gettime((~number << 3) | kind)
    except (OSError, AttributeError):
        return None
