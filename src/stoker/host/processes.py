"""Processes of this host have children, which end with their parent where the kernel sees to it."""

import contextlib
import ctypes
import functools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


def descendant_pids() -> list[int] | None:
    """Returns the pids of the processes below this one; None where the kernel does not tell.

    One that begins or ends meanwhile may be left out. Only these processes are asked, not all of
    the machine: in a process whose threads fight for the interpreter lock, every file that is read
    may take 5 ms.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return None
    found = _children("self")
    for pid in found:
        found += _children(str(pid))
    return found


def _children(pid: str) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                pids += map(int, file.read().split())
    return pids


_PR_SET_PDEATHSIG = 1

_Start = tuple[Callable[[], None], Future[None]]


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends (Linux only)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start_to_last(start: Callable[[], None]) -> None:
    """Runs `start`, which starts a child, in a thread that lasts as long as this process.

    For the kernel it is a thread that has children, and `die_with_parent` is about its end:
    children that a short-lived thread forks die with it. The main thread starts its own, as torch
    does; for any other one a thread of ours does, while the caller waits.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    started: Future[None] = Future()
    _starter(os.getpid()).put((start, started))
    started.result()


@functools.lru_cache(maxsize=1)
def _starter(pid: int) -> "SimpleQueue[_Start]":
    """Returns the queue of the thread that starts children; a forked process has its own."""
    starts: SimpleQueue[_Start] = SimpleQueue()

    def run() -> None:
        while True:
            start, started = starts.get()
            try:
                start()
            except BaseException as err:
                started.set_exception(err)
            else:
                started.set_result(None)

    threading.Thread(target=run, name="stoker-starter", daemon=True).start()
    return starts
