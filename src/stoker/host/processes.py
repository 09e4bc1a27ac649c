"""Processes of this host have children, which end with their parent where the kernel sees to it."""

import contextlib
import ctypes
import functools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import psutil

_PR_SET_PDEATHSIG = 1
# SIGKILL cannot be refused: what is still there afterwards sits in the kernel.
KILL_SECONDS = 5.0
PORTS = range(20000, 30000)
PORTS_PER_HOST = 3


def descendant_pids() -> list[int] | None:
    """Returns the pids of the processes below this one; None where the kernel does not tell.

    One that begins or ends meanwhile may be left out. Only these processes are asked, not all of
    the machine: in a process whose threads fight for the interpreter lock, every file that is read
    may take 5 ms.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return None
    found = _children("self")
    # The list grows while it is gone through: children of children are appended.
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


_Start = tuple[Callable[[], None], Future[None]]


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends (Linux only)."""
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
    # By pid: after a fork the child has the cached queue, but not the thread that serves it.
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


def ended_words(code: int) -> str:
    """Says how a process ended, for use after "ended with": exit code, or signal and likely cause.

    Args:
        code: Negative for a signal.
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    hint = ", perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"signal {-code}{name}{hint}"


def why_not_found(program: str, *, folder: Path | None = None) -> tuple[str, str]:
    """Says why a program cannot be started, and what to do about it.

    Args:
        program: Program as the command names it.
        folder: Folder that relative paths begin at; None: this process's.
    """
    path = Path(folder or "", program)
    if os.path.dirname(program) and path.is_dir():
        return f"{program} is a folder, not a program", "name the program in it"
    if os.path.dirname(program) and path.is_file():
        fix = f"chmod +x {program}"
        return f"{program} is not executable", (
            f"{fix}, or: -- python {program}" if program.endswith(".py") else fix
        )
    if program.endswith(".py") and path.is_file():
        return f"{program} is a script, and no program on the PATH", f"-- python {program}"
    return f"command not found: {program}", "check its spelling and the PATH"


def processes_of(session: int, marker: bytes) -> list[int]:
    """Returns a host's processes: of its launcher's session, or with its marker in the environment.

    A process that is the caller's own is never among them.
    """
    found = []
    for pid in psutil.pids():
        if pid == os.getpid() or not _is_running(pid):
            continue
        try:
            if os.getsid(pid) == session or marker in _environment(pid):
                found.append(pid)
        except OSError:
            continue
    return found


def kill_all(session: int, marker: bytes) -> bool:
    """Kills what `processes_of` finds until nothing is left; False after KILL_SECONDS."""
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        pids = processes_of(session, marker)
        # Orphans of a daemon are this process's children by now: unreaped they would stay zombies.
        _reap(session)
        if not pids:
            return True
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # Once more after a while: one that was being forked is not in this list.
        time.sleep(0.02)


def free_ports(taken: set[int], *, count: int = PORTS_PER_HOST) -> int:
    """Returns the first of `count` neighbouring free ports on loopback; adds them to `taken`.

    Raises:
        OSError: If none are found.
    """
    # At random, for nothing holds a port between this look and its use: two runs that begin at once
    # on a host would otherwise take the same.
    for first in random.sample(PORTS, 200):
        ports = set(range(first, first + count))
        if not ports & taken and all(_is_free(port) for port in ports):
            taken |= ports
            return first
    raise OSError("no free ports between 20000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A port whose last connections are in TIME_WAIT is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reap(session: int) -> None:
    """Takes the exit status of orphans of that session that this process has adopted."""
    for child in psutil.Process().children():
        with contextlib.suppress(OSError, psutil.Error):
            is_theirs = os.getsid(child.pid) == session and child.pid != session
            if is_theirs and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read()
    except OSError:
        return b""
