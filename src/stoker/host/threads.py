"""Threads of this process, those of native code included, which a forked child would not have.

Python counts its threads only. A pool of Rust, C++ or OpenMP holds locks as well: a child that is
forked at that moment waits for them for ever. Some libraries prepare for a fork, and are no reason
not to: OpenBLAS ends its threads before each one, jemalloc begins its thread again in the child.
"""

import contextlib
import ctypes
import os
import platform
import signal
import time

# A pool that is joined when its work is done is no reason not to fork.
SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.01
# Of pyarrow's and Polars' allocator; so of pandas, too.
_FORK_SAFE = frozenset({"jemalloc_bg_thd"})
# The number of the system call that waits for a lock, and what it is told (futex(2)).
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_OF_THIS_PROCESS = 128
_WAITS = frozenset({0, 6, 9, 13})


def num_threads() -> int:
    """Returns how many threads this process has, without those of jemalloc."""
    return sum(_name_of(thread) not in _FORK_SAFE for thread in os.listdir("/proc/self/task"))


def num_lasting_threads(before: int) -> int:
    """Returns how many threads more than `before` a fork would lose.

    Forks once to have libraries end theirs, where they do; and waits for others to end, for a
    second at most. Does neither where there are no more threads than before.

    Args:
        before: What `num_threads` returned before the code ran that may have started some.
    """
    more = num_threads() - before
    if more <= 0:
        return 0
    _fork_once()
    deadline = time.monotonic() + SETTLE_SECONDS
    while (more := num_threads() - before) > 0 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return max(0, more)


def wait_without_end(pid: int) -> str:
    """Returns which lock a process waits for that nobody can release; empty: none, or not known.

    It has one thread, which waits without a limit for another one of its own process: one of the
    process that it was forked of had the lock then. Two looks that find the same show that it does
    not just begin to run.

    Args:
        pid: Of a descendant of this process.
    """
    try:
        if len(os.listdir(f"/proc/{pid}/task")) != 1:
            return ""
        with open(f"/proc/{pid}/syscall") as file:
            call = file.read()
    # It is gone, it is another user's, or no Linux.
    except OSError:
        return ""
    # Of a thread that runs it is one word; else its number, arguments, stack and place in the code.
    number, *arguments = call.split() or [""]
    if number != str(_FUTEX) or len(arguments) < 4:
        return ""
    operation, limit = int(arguments[1], 16), int(arguments[3], 16)
    waits = operation & _OF_THIS_PROCESS and operation % _OF_THIS_PROCESS in _WAITS
    return call if waits and not limit else ""


def _name_of(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def _fork_once() -> None:
    """Forks a child that ends at once, without what Python does at a fork, and with the GIL."""
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        os._exit(0)
    deadline = time.monotonic() + SETTLE_SECONDS
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while not os.waitpid(pid, os.WNOHANG)[0]:
            # A library's own preparation may hang in the child.
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS / 10)
