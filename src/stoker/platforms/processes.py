"""Finding and ending all processes of one host of a local run, and free ports for it."""

import contextlib
import os
import random
import signal
import socket
import time

import psutil

# SIGKILL cannot be refused: what is still there afterwards sits in the kernel.
KILL_SECONDS = 5.0
PORTS = range(20000, 30000)
PORTS_PER_HOST = 3


def processes_of(session: int, marker: bytes) -> list[int]:
    """Processes of a host: of its launcher's session, or with its marker in their environment.

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
        _reap(session)
        if not pids:
            return True
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def free_ports(taken: set[int], *, count: int = PORTS_PER_HOST) -> int:
    """The first of `count` neighbouring free ports on loopback; they are added to `taken`.

    Raises:
        OSError: If none are found.
    """
    # Not for secrets: two runs that draw the same ports would only have to draw again.
    for first in random.sample(PORTS, 200):
        ports = set(range(first, first + count))
        if not ports & taken and all(_is_free(port) for port in ports):
            taken |= ports
            return first
    raise OSError("no free ports between 20000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
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
