"""Supervision of one command: signals, output, leftover processes, and how it ended.

The first SIGTERM to the host is passed on, and the command has 90 s to save before it is killed. A
second one kills it at once.
"""

import contextlib
import os
import queue
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from stoker.host import machine, spawn
from stoker.host.machine import vcpu_capacity
from stoker.host.processes import descendants, signal_all
from stoker.logs import EventName, Log
from stoker.records.secrets import HIDDEN
from stoker.units import numbered, size

# Eight ranks of Lightning print 10 KB each, and the first is the cause of the others.
STDERR_TAIL_BYTES = 512 << 10
_CHUNK_BYTES = 1 << 16
# Incomplete lines (a prompt, dots) are shown after this.
_PARTIAL_LINE_SECONDS = 0.5
# SageMaker kills 120 s after its SIGTERM; the rest is for the end of the run: absent hosts (15 s)
# and processes that do not end (8 s).
GRACE_SECONDS = 90.0
# After a verdict (a lost host, an end decided elsewhere) nothing is left to save.
VERDICT_GRACE_SECONDS = 5.0
# For leftover processes: until SIGKILL, and again until they are ignored.
LEFTOVER_SECONDS = 2.0
COMMAND_NOT_FOUND = 127
_TICK_SECONDS = 0.5


class OutputTail:
    """The last STDERR_TAIL_BYTES of a stream, from the first whole line on."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._is_cut = False

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= STDERR_TAIL_BYTES:
            self._size -= len(self._chunks.popleft())
            self._is_cut = True

    def text(self) -> str:
        held = b"".join(self._chunks)
        if self._is_cut or len(held) > STDERR_TAIL_BYTES:
            held = held[-STDERR_TAIL_BYTES:]
            # The first line is cut in the middle, unless it is all that there is.
            held = held.partition(b"\n")[2] or held
        return held.decode(errors="replace")


def forward(
    source: int,
    target: int,
    tail: OutputTail | None,
    hidden: Sequence[bytes] = (),
    read: Callable[[bytes], None] | None = None,
) -> None:
    """Copies a stream to its end by whole lines, as others often write to the same file.

    A carriage return ends a line, too, for progress bars. Incomplete lines are held back for half a
    second, or 64 KiB. `tail` gets everything; where `target` is closed or its disk full, output is
    dropped: the command is never blocked.

    Args:
        hidden: Texts that are shown as ***, also in `tail`.
        read: Gets what is shown.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    held = b""
    due = 0.0
    while True:
        left = due - time.monotonic()
        # Before reading, so that endless output without line ends is shown, too.
        is_due = bool(held) and (left <= 0 or not poll.poll(left * 1000))
        chunk = b""
        if not is_due:
            with contextlib.suppress(OSError):
                chunk = os.read(source, _CHUNK_BYTES)
        if not held:
            due = time.monotonic() + _PARTIAL_LINE_SECONDS
        held += chunk
        # rfind gives -1 without an end: 0 then.
        end = 1 + max(held.rfind(b"\n"), held.rfind(b"\r"))
        # The end of the stream, its due time, or a line that is too long to wait for.
        if not chunk or len(held) - end > _CHUNK_BYTES:
            end = len(held)
        if end:
            shown = held[:end]
            for text in hidden:
                shown = shown.replace(text, HIDDEN.encode())
            if tail:
                tail.add(shown)
            if read:
                read(shown)
            _write_all(target, shown)
            held = held[end:]
            due = time.monotonic() + _PARTIAL_LINE_SECONDS
        if not chunk and not is_due:
            return


def _write_all(target: int, shown: bytes) -> None:
    # Lost output must neither end nor block the command.
    with contextlib.suppress(OSError):
        view = memoryview(shown)
        while view:
            # A pipe may take a part of it only.
            view = view[os.write(target, view) :]


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal to the launcher, or of a rule, which is never a second one that ends at once."""

    number: int
    is_of_rule: bool = False


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """The end of the command's first process."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision from elsewhere that this host ends."""

    reason: str


LaunchEvent = SignalReceived | CommandEnded | Decided
Inbox = queue.SimpleQueue[LaunchEvent]


def next_event(inbox: Inbox, seconds: float) -> LaunchEvent | None:
    with contextlib.suppress(queue.Empty):
        return inbox.get(timeout=seconds)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a command ended, and why the launcher ended it (`decided`) or did not start it.

    `exit_code` is a shell's: 128 + n for signal n.
    """

    exit_code: int
    signals: tuple[int, ...] = ()
    decided: str = ""
    refused: str = ""
    stderr: str = ""
    killed_for_memory: str = ""


@contextlib.contextmanager
def signals_to(inbox: Inbox) -> Iterator[None]:
    """Puts SIGTERM and SIGINT into `inbox` (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def put(number: int, _frame: object) -> None:
        inbox.put(SignalReceived(number))

    previous = {n: signal.signal(n, put) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedCommand:
    """A command as it is started.

    Attributes:
        asks_children: A first signal goes to the command's children: to ranks of mpirun, which
            itself would kill them a second later.
        takes_input: Whether it reads this process's standard input.
        hidden: Texts that its output must not show.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    folder: Path | None = None
    asks_children: bool = False
    takes_input: bool = False
    hidden: Sequence[str] = ()


def supervise(
    command: SupervisedCommand,
    *,
    inbox: Inbox,
    log: Log,
    on_tick: Callable[[], None] | None = None,
    others: Collection[int] = (),
    read: Callable[[bytes], None] | None = None,
) -> Ending:
    """Runs `command` to its end, then ends its leftover processes, but no earlier child.

    Blocks while the command runs: after the first SIGTERM or SIGINT for at most GRACE_SECONDS,
    after a second one, or a `Decided` alone, for a few seconds. The command gets one signal: a
    second SIGTERM would kill a script that saves.

    Args:
        on_tick: Called about twice a second.
        others: Children of this process whose exit status their owners read.
        read: Gets its output and errors, whole lines, in two threads.
    """
    spawn.adopt_orphans()
    # The kernel's count is per cgroup: only the difference is this command's.
    kills_before = machine.num_memory_kills()
    began = time.monotonic()
    cpu_before = _cpu_seconds()
    # Children that were there before are not the command's.
    spared = {*others, *(child.pid for child in psutil.Process().children())}
    process = _started(command)
    log.event(EventName.COMMAND_STARTED, pid=process.pid)
    tail = OutputTail()
    with _shown(process, tail, hidden=command.hidden, read=read):
        waiter = _thread(partial(_wait_for, process, inbox))
        signals, decided = _follow(
            process, inbox, log, on_tick, others, spared=spared, asks_children=command.asks_children
        )
        # That thread reads the exit status, which is asked for below.
        waiter.join()
        # Leftover processes hold the pipes open.
        end_descendants(spared=spared)
    code = process.returncode
    log.event(
        EventName.COMMAND_ENDED,
        pid=process.pid,
        returncode=code,
        wall_seconds=time.monotonic() - began,
        cpu_seconds=_cpu_seconds() - cpu_before,
        vcpus=vcpu_capacity(),
    )
    return Ending(
        exit_code=code if code >= 0 else 128 - code,
        signals=signals,
        decided=decided,
        stderr=tail.text(),
        killed_for_memory=_memory_kill(kills_before) if code else "",
    )


def _started(command: SupervisedCommand) -> "subprocess.Popen[bytes]":
    """Starts a command whose core dumps, unlike this process's, are kept."""
    process = subprocess.Popen(
        # The kernel kills the command if this launcher is killed.
        spawn.wrapped(command.words, signal_number=signal.SIGKILL),
        env=dict(command.environ),
        cwd=command.folder,
        stdin=None if command.takes_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A new group, so that Ctrl-C at a terminal comes once, through the launcher; the
        # launcher's session, which identifies a host's processes.
        process_group=0,
    )
    # The training's core dumps are the user's.
    machine.turn_off_core_dumps()
    return process


@contextlib.contextmanager
def _shown(
    process: "subprocess.Popen[bytes]",
    tail: OutputTail,
    *,
    hidden: Sequence[str],
    read: Callable[[bytes], None] | None,
) -> Iterator[None]:
    """Copies output and errors of a command that ends during the block, whose end waits for them.

    Args:
        process: The command.
        tail: Gets its errors.
        hidden: Texts that are shown as ***.
        read: Gets what is shown.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    texts = [text.encode() for text in hidden]
    pumps = [
        _thread(partial(forward, process.stdout.fileno(), sys.stdout.fileno(), None, texts, read)),
        _thread(partial(forward, process.stderr.fileno(), sys.stderr.fileno(), tail, texts, read)),
    ]
    yield
    for pump in pumps:
        pump.join(LEFTOVER_SECONDS)
    process.stdout.close()
    process.stderr.close()


def resolve_program(
    command: Sequence[str], environ: Mapping[str, str], *, folder: Path | None = None
) -> tuple[str, ...] | None:
    """Returns `command` with its program's path, or None if it does not exist.

    A bare `python` is the one that runs stoker, so that the script has the same packages. Relative
    paths start in `folder`, where the command will run.
    """
    program = command[0]
    if program in ("python", "python3"):
        return (sys.executable, *command[1:])
    if os.path.dirname(program):
        program = os.path.join(folder or "", program)
    path = shutil.which(program, path=environ.get("PATH"))
    if path:
        return (path, *command[1:])
    return None


def end_descendants(*, spared: Collection[int] = ()) -> None:
    """Sends SIGTERM, then SIGKILL; blocks for at most two times LEFTOVER_SECONDS."""
    # Looked at again before the second one: what ends may leave children.
    for attempt in (signal.SIGTERM, signal.SIGKILL):
        children = descendants(spared=spared)
        if not children:
            return
        signal_all(children, attempt)
        psutil.wait_procs(children, timeout=LEFTOVER_SECONDS)
    # Killed processes may have left orphans that were not seen before.
    signal_all(descendants(spared=spared), signal.SIGKILL)


def _follow(
    process: "subprocess.Popen[bytes]",
    inbox: Inbox,
    log: Log,
    on_tick: Callable[[], None] | None,
    others: Collection[int],
    *,
    spared: Collection[int],
    asks_children: bool,
) -> tuple[tuple[int, ...], str]:
    signals: list[int] = []
    decided = ""
    kill_at = float("inf")
    while True:
        match happening := next_event(inbox, _TICK_SECONDS):
            case CommandEnded():
                return tuple(signals), decided
            case SignalReceived() if not (happening.is_of_rule and signals):
                signals.append(happening.number)
                log.event(EventName.SIGNAL_RECEIVED, number=happening.number, count=len(signals))
                kill_at = time.monotonic() + (GRACE_SECONDS if len(signals) == 1 else 0.0)
                # If all hosts are stopped at once, another may have decided before.
                is_asked = len(signals) > 1 or bool(decided)
                if not is_asked and not (
                    asks_children and _send_to_children(process, happening.number)
                ):
                    _send(process, happening.number)
            case Decided() if not decided:
                decided = happening.reason
                log.event(EventName.COMMAND_STOPPING, reason=decided)
                # After a signal the command may be saving; a second one would end it.
                if not signals:
                    kill_at = time.monotonic() + VERDICT_GRACE_SECONDS
                    _send(process, signal.SIGTERM)
            case _:
                if on_tick:
                    on_tick()
                reap_orphans(spared=(process.pid, *others))
        if time.monotonic() >= kill_at:
            kill_at = float("inf")
            log.event(EventName.COMMAND_KILLED, pid=process.pid)
            signal_all(descendants(spared=spared), signal.SIGKILL)
            # What was started after the look above is in the group, unless it has left it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    # Only to the first process, as a container runtime does: torchrun forwards it to its ranks.
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _send_to_children(process: "subprocess.Popen[bytes]", number: int) -> bool:
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children()
    signal_all(children, number)
    return bool(children)


def reap_orphans(*, spared: Collection[int]) -> None:
    """Reads the exit status of adopted orphans, which else stay zombies, except of `spared`."""
    while True:
        try:
            # WNOWAIT: only a look. The Popen of a child in `spared` reads its status; until then
            # waitid returns the same child, and the next tick continues.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        # No children, or macOS before Python 3.13, which has no waitid.
        except (ChildProcessError, AttributeError):
            return
        if ended is None or ended.si_pid in spared:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)


def _memory_kill(kills_before: int | None) -> str:
    kills = machine.num_memory_kills()
    if kills is None or kills_before is None or kills <= kills_before:
        return ""
    killed = numbered(kills - kills_before, "process", "processes")
    words = f"out of memory: the kernel killed {killed}"
    if limit := machine.limit_bytes():
        words += f" (limit {size(limit)})"
    return words


def _wait_for(process: "subprocess.Popen[bytes]", inbox: Inbox) -> None:
    process.wait()
    inbox.put(CommandEnded())


def _thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
