"""Processes of this host: children, how they ended, how to kill them, and free ports."""

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import psutil

from stoker.pending_error import PendingError

# What survives SIGKILL for that long is blocked in the kernel.
KILL_SECONDS = 5.0
PORTS = range(20000, 30000)
PORTS_PER_HOST = 3
# Of the state of torch's generator before a fork: about a millisecond.
_NUM_READS = 500


def descendant_pids(pid: int | None = None) -> list[int]:
    """Returns the pids of all processes below one, or below this one.

    One that starts or ends meanwhile may be missing. Reads only the files of these processes where
    the kernel lists children: in a process whose threads contend for the GIL each file may take
    5 ms.

    Args:
        pid: Of a process of this user; None: this one.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    pids = _children(str(pid or "self"))
    # The list grows as it is iterated: children of children are appended.
    for child in pids:
        pids += _children(str(child))
    return pids


def descendants(*, spared: Collection[int] = ()) -> list[psutil.Process]:
    """Returns all processes below this one, without the children `spared` and theirs."""
    processes = []
    for child in psutil.Process().children():
        if child.pid not in spared:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [child, *child.children(recursive=True)]
    return processes


def is_below_this_process(pid: int) -> bool | None:
    """Returns whether a process is below this one; None: there is none of this pid here."""
    try:
        parents = psutil.Process(pid).parents()
    except psutil.Error:
        return None
    return os.getpid() in [parent.pid for parent in parents]


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _children(pid: str) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                pids += map(int, file.read().split())
    return pids


@dataclass(slots=True)
class _Start:
    """A child that another thread starts."""

    start: Callable[[], None]
    is_done: threading.Event = field(default_factory=threading.Event)
    failure: PendingError = field(default_factory=PendingError)


def start_to_last(start: Callable[[], None]) -> None:
    """Runs `start`, which starts a child, in a thread that lasts as long as this process.

    `spawn.end_with_parent` counts from the end of the thread that starts a child. The main thread
    starts its children itself, as torch does; callers of other threads wait.

    A child that is forked has another stdin: the script may hold its lock for as long as it waits
    for a line (a debugger's, say), and multiprocessing would close it first of all. It is forked
    when no other thread draws random numbers: a generator's lock would stay locked in it.
    """
    _prepare_for_forks()
    if threading.current_thread() is threading.main_thread():
        _start_forking(start)
        return
    starting = _Start(start)
    # By pid: a forked child inherits the cached queue, but not its thread.
    _starter(os.getpid()).put(starting)
    starting.is_done.wait()
    if starting.failure.is_there:
        raise starting.failure.take()


@functools.lru_cache(maxsize=1)
def _starter(pid: int) -> "SimpleQueue[_Start]":
    """Returns the queue of the thread that starts children; a forked process has another."""
    starts: SimpleQueue[_Start] = SimpleQueue()

    def run() -> None:
        while True:
            # In a call of its own: nothing of the last one is kept while the thread waits.
            _start_next(starts)

    threading.Thread(target=run, name="stoker-starter", daemon=True).start()
    return starts


def _start_next(starts: "SimpleQueue[_Start]") -> None:
    starting = starts.get()
    try:
        _start_forking(starting.start)
    except BaseException as err:
        starting.failure.keep(err)
    starting.is_done.set()


_here = threading.local()


def _start_forking(start: Callable[[], None]) -> None:
    _here.forks_a_child = True
    try:
        start()
    finally:
        _here.forks_a_child = False


@functools.lru_cache(maxsize=1)
def _prepare_for_forks() -> None:
    os.register_at_fork(
        before=_stop_draws, after_in_parent=_let_draw, after_in_child=_begin_as_child
    )


def _stop_draws() -> None:
    """Has no other thread draw from the generators of torch and NumPy as a child is forked."""
    if not getattr(_here, "forks_a_child", False):
        return
    if numpy_random := sys.modules.get("numpy.random"):
        _here.lock = numpy_random.get_bit_generator().lock
        _here.lock.acquire()
    if torch_random := sys.modules.get("torch.random"):
        # Its lock cannot be kept. Who has it needs Python's for the next draw, which this thread
        # has from here to the fork; who is about to take it has taken it by the last of these. Not
        # a loop of Python's, between whose turns another thread may have Python's lock.
        read = torch_random.default_generator.get_state
        deque(itertools.starmap(read, itertools.repeat((), _NUM_READS)), maxlen=0)


def _let_draw() -> None:
    lock = getattr(_here, "lock", None)
    if lock is not None:
        _here.lock = None
        lock.release()


def _begin_as_child() -> None:
    _let_draw()
    _replace_stdin()


def _replace_stdin() -> None:
    """Replaces stdin, in a child that was just forked here."""
    if getattr(_here, "forks_a_child", False):
        _here.forks_a_child = False
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


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
    if os.path.dirname(program) and path.is_dir():
        return f"{program} is a folder, not a program", "name the program in it"
    if os.path.dirname(program) and path.is_file():
        fix = f"chmod +x {program}"
        return f"{program} is not executable", (
            f"{fix}, or: -- python {program}" if program.endswith(".py") else fix
        )
    if program.endswith(".py") and path.is_file():
        return f"{program} is a script, not a program on the PATH", f"-- python {program}"
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
        # Orphans of a daemon that this process has adopted would stay zombies.
        _reap(session)
        if not pids:
            return True
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # Again: a process that was just being forked is not in this list.
        time.sleep(0.02)


def loopback() -> str:
    """Returns the address of this machine for its own processes: ::1 where it has IPv6 alone."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


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
    raise OSError(f"no free ports of {loopback()} between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    address = loopback()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        # A port whose last connections are in TIME_WAIT is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _reap(session: int) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(OSError, psutil.Error):
            is_theirs = os.getsid(child.pid) == session and child.pid != session
            if is_theirs and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
