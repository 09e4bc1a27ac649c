"""Finding and ending all processes of one host of a local run, and free ports for it."""

import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path

import psutil

# SIGKILL cannot be refused: what is still there afterwards sits in the kernel.
KILL_SECONDS = 5.0
PORTS = range(20000, 30000)
PORTS_PER_HOST = 3


def ended_words(code: int) -> str:
    """How a process ended, behind "ended with": its exit code, or its signal and what may be why.

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
    """Why a program cannot be started, and what to do about it.

    Args:
        program: As the command names it.
        folder: That relative paths begin at; None: this process's.
    """
    path = Path(folder or "", program)
    if os.path.dirname(program) and path.is_dir():
        return f"{program} is a folder, no program", "name the program in it"
    if os.path.dirname(program) and path.is_file():
        fix = f"chmod +x {program}"
        return f"{program} may not be executed", (
            f"{fix}, or: python {program}" if program.endswith(".py") else fix
        )
    return f"command not found: {program}", "check its spelling and the PATH"


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
