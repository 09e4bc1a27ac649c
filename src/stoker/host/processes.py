"""Processes of this host: children, how they ended, how to kill them, free ports; git's state."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

# What survives SIGKILL for that long is blocked in the kernel.
KILL_SECONDS = 5.0
LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)
PORTS_PER_HOST = 3


def descendants(*, spared: Collection[int] = ()) -> list[psutil.Process]:
    """Returns all processes below this one, without the children `spared` and theirs."""
    processes = []
    for child in psutil.Process().children():
        if child.pid not in spared:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [child, *child.children(recursive=True)]
    return processes


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def ended_words(code: int) -> str:
    """Returns how a process ended, for use after "ended with"; negative codes are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    hint = ", perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"signal {-code}{name}{hint}"


def why_not_found(program: str, *, folder: Path | None = None) -> tuple[str, str]:
    """Returns why a program cannot be started, and what to do about it."""
    path = Path(folder or "", program)
    if path.is_file() and program.endswith(".py"):
        return f"{program} is a script, not a program", f"-- python {program}"
    if path.is_file() and os.path.dirname(program):
        return f"{program} is not executable", f"chmod +x {program}"
    return f"command not found: {program}", "check its spelling and the PATH"


def processes_of(session: int, marker: bytes) -> list[int]:
    """Returns the pids of a host's processes, without the caller's.

    They are in its launcher's session, or have its marker in their environment.
    """
    pids = []
    # Not process_iter, which remembers processes whose pid another one may have by now.
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid != os.getpid() and is_running(psutil.Process(pid)):
                environ = Path(f"/proc/{pid}/environ")
                if os.getsid(pid) == session or marker in b"\0" + environ.read_bytes():
                    pids.append(pid)
    return pids


def kill_all(session: int, marker: bytes) -> bool:
    """Kills what `processes_of` finds until nothing is left; returns False after KILL_SECONDS."""
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        pids = processes_of(session, marker)
        if not pids:
            return True
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # Again: a process that was just being forked is not in this list.
        time.sleep(0.02)


def with_port(address: str, port: int) -> str:
    """Returns address:port, an address of IPv6 in brackets."""
    if ":" in address:
        return f"[{address}]:{port}"
    return f"{address}:{port}"


def free_ports(taken: set[int], *, count: int = PORTS_PER_HOST) -> int:
    """Returns the first of `count` free neighbouring ports, added to `taken`, or raises OSError."""
    # At random: nothing reserves a port until it is used, and two runs may begin at once.
    for first in random.sample(PORTS, 200):
        ports = set(range(first, first + count))
        if not ports & taken and all(_is_free(port) for port in ports):
            taken |= ports
            return first
    raise OSError(f"no free ports of {LOOPBACK} between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A port whose last connections are in TIME_WAIT is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


# Without locking the index against the user's own git. No tag matches: the digest is the name.
_DESCRIBE = "git --no-optional-locks describe --always --dirty --abbrev=40 --match="
_SECONDS = 5.0


def git_state(folder: Path) -> dict[str, str | bool]:
    """Returns the commit as `git`, and `git_dirty` if tracked files differ from it.

    Empty outside of a checkout, or without git. Blocks for 5 s at most.
    """
    try:
        done = subprocess.run(
            _DESCRIBE.split(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"git": commit, **({"git_dirty": True} if dirty else {})}
