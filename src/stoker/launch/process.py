"""A command from its start to its end: signals, output, leftover processes, and how it ended.

The first SIGTERM to the host is passed on, and the command has 90 s to save before it is killed. A
second one kills it at once.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

import psutil

from stoker.host import machine, spawn
from stoker.host.processes import descendants, signal_all
from stoker.logs import EventName, Log
from stoker.records.secrets import HIDDEN
from stoker.units import numbered, size

# Eight ranks of Lightning print 10 KB each, and the first is the cause of the others.
STDERR_TAIL_BYTES = 512 << 10
_CHUNK_BYTES = 1 << 16
# SageMaker kills 120 s after its SIGTERM; the rest is for the end of the run: absent hosts (15 s)
# and processes that do not end (8 s).
GRACE_SECONDS = 90.0
# After a verdict (a lost host, an end decided elsewhere) nothing is left to save.
VERDICT_GRACE_SECONDS = 5.0
# For leftover processes: until SIGKILL, and again until they are ignored.
LEFTOVER_SECONDS = 2.0
_POLL_SECONDS = 0.1
_TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal to the launcher."""

    number: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision from elsewhere that this host ends."""

    reason: str
    grace_seconds: float = VERDICT_GRACE_SECONDS


LaunchEvent = SignalReceived | Decided
Inbox = queue.SimpleQueue[LaunchEvent]


def next_event(inbox: Inbox, seconds: float) -> LaunchEvent | None:
    with contextlib.suppress(queue.Empty):
        return inbox.get(timeout=seconds)
    return None


@contextlib.contextmanager
def signals_to(inbox: Inbox) -> Iterator[None]:
    """Puts SIGTERM and SIGINT into `inbox` (main thread only)."""

    def put(number: int, _frame: object) -> None:
        inbox.put(SignalReceived(number))

    previous = {n: signal.signal(n, put) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def wait_for(inbox: Inbox, condition: Callable[[], bool], *, seconds: float) -> Ending | None:
    """Waits for a condition; returns the end of a command that may not start any more.

    Raises:
        TimeoutError: If the condition did not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        match next_event(inbox, _POLL_SECONDS):
            case SignalReceived(number):
                return Ending(exit_code=128 + number, signals=(number,))
            case Decided(reason):
                return Ending(exit_code=128 + signal.SIGTERM, decided=reason)
        if time.monotonic() > deadline:
            raise TimeoutError
    return None


def supervise(
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path | None = None,
    asks_children: bool = False,
    hidden: Sequence[str] = (),
    inbox: Inbox,
    log: Log,
    on_tick: Callable[[], None] = lambda: None,
    read: Callable[[bytes], None] = lambda _: None,
) -> Ending:
    """Runs a command to its end, then ends its leftover processes, but no earlier child.

    Blocks while the command runs: after the first SIGTERM or SIGINT for at most GRACE_SECONDS,
    after a second one for a few seconds, after a `Decided` for as long as that says. The command
    gets one signal: a second SIGTERM would kill a script that saves.

    Args:
        asks_children: The signal goes to the command's children: to ranks of mpirun, which itself
            would kill them a second later.
        hidden: Texts that its output must not show.
        on_tick: Called about twice a second.
        read: Gets its output and errors, whole lines, in two threads.
    """
    spawn.adopt_orphans()
    # The kernel's count is per cgroup: only the difference is this command's.
    kills_before = machine.num_memory_kills() or 0
    # Children that were there before are not the command's.
    spared = {child.pid for child in psutil.Process().children()}
    process = started(words, environ, folder)
    tail = OutputTail()

    def keep(lines: bytes) -> None:
        tail.add(lines)
        read(lines)

    copies = (
        copying(process.stdout, sys.stdout, hidden=hidden, read=read),
        copying(process.stderr, sys.stderr, hidden=hidden, read=keep),
    )

    def ask(number: int) -> None:
        # The first process alone, which passes it on, as torchrun does.
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            signal_all((asks_children and first.children()) or [first], number)

    signals, decided = follow_to_end(process, inbox, log, on_tick, spared=spared, ask=ask)
    # Leftover processes hold the pipes open.
    end_descendants(spared=spared)
    for copy in copies:
        copy.join(LEFTOVER_SECONDS)
    code = process.returncode
    log.event(EventName.COMMAND_ENDED, pid=process.pid, returncode=code)
    return Ending(
        exit_code=code if code >= 0 else 128 - code,
        signals=signals,
        decided=decided,
        stderr=tail.text(),
        killed_for_memory=_memory_kill(kills_before) if code else "",
    )


def started(
    words: Sequence[str],
    environ: Mapping[str, str],
    folder: Path | None,
    *,
    is_one_stream: bool = False,
) -> "subprocess.Popen[bytes]":
    """Starts a process that ends with this one, to be called in the main thread.

    Its core dumps are kept, unlike this process's from now on.
    """
    process = subprocess.Popen(
        # The kernel kills it when the thread that starts it ends.
        spawn.wrapped(words, signal_number=signal.SIGKILL),
        env=dict(environ),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_one_stream else subprocess.PIPE,
        # A new group, so that Ctrl-C at a terminal comes once, through the launcher; the
        # launcher's session, which identifies a host's processes.
        process_group=0,
    )
    machine.turn_off_core_dumps()
    return process


def follow_to_end(
    process: "subprocess.Popen[bytes]",
    inbox: Inbox,
    log: Log,
    on_tick: Callable[[], None],
    *,
    spared: Collection[int],
    ask: Callable[[int], None],
) -> tuple[tuple[int, ...], str]:
    """Returns the signals that came until the command's end, and why it was ended, if it was."""
    signals: list[int] = []
    decided = ""
    has_failed = False
    kill_at = float("inf")
    tick_at = 0.0
    while process.poll() is None:
        event = next_event(inbox, _POLL_SECONDS)
        now = time.monotonic()
        # If all hosts are stopped at once, a signal may come behind another host's decision.
        is_first = not (signals or decided)
        if isinstance(event, SignalReceived):
            signals.append(event.number)
            log.event(EventName.SIGNAL_RECEIVED, number=event.number, count=len(signals))
            kill_at = now + (GRACE_SECONDS if len(signals) == 1 else 0.0)
            if is_first:
                ask(event.number)
        elif event and not decided:
            decided = event.reason
            log.event(EventName.COMMAND_STOPPING, reason=decided)
            # After a signal the command may be saving.
            if is_first:
                kill_at = now + event.grace_seconds
                ask(signal.SIGTERM)
        if now >= tick_at:
            tick_at = now + _TICK_SECONDS
            try:
                on_tick()
            except Exception as err:
                # A figure must not end a training of days.
                if not has_failed:
                    log.event(EventName.TICK_FAILED, error=repr(err))
                has_failed = True
            reap_orphans(spared={process.pid, *spared})
        if now >= kill_at:
            kill_at = float("inf")
            signal_all(descendants(spared=spared), signal.SIGKILL)
    return tuple(signals), decided


class OutputTail:
    """The last STDERR_TAIL_BYTES of a stream, from the first whole line on."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, chunk: bytes) -> None:
        self._held += chunk
        if len(self._held) > 2 * STDERR_TAIL_BYTES:
            del self._held[:-STDERR_TAIL_BYTES]

    def text(self) -> str:
        held = bytes(self._held[-STDERR_TAIL_BYTES:])
        if len(held) == STDERR_TAIL_BYTES:
            # The first line is cut in the middle, unless it is all that there is.
            held = held.partition(b"\n")[2] or held
        return held.decode(errors="replace")


def forward(
    source: int,
    target: int,
    *,
    hidden: Sequence[str] = (),
    read: Callable[[bytes], None] = lambda _: None,
    head: bytes = b"",
) -> None:
    """Copies `source` to `target` by whole lines until its end.

    A line ends with a newline or, as in a progress bar, a carriage return. Lines are written whole,
    even when several processes write to the same pipe; where `target` is closed or its disk full,
    output is dropped: the command is never blocked.

    Args:
        hidden: Texts that are shown as ***, also to `read`.
        read: Gets what is shown.
        head: Stands before each line that is shown.
    """
    held = b""
    is_open = True
    while is_open:
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = os.read(source, _CHUNK_BYTES)
        is_open = bool(chunk)
        held += chunk
        # rfind gives -1 without an end: 0 then.
        end = 1 + max(held.rfind(b"\n"), held.rfind(b"\r"))
        # The end of the stream, or a line that is too long to wait for.
        if not is_open or len(held) - end > _CHUNK_BYTES:
            end = len(held)
        shown = held[:end]
        held = held[end:]
        for text in hidden:
            shown = shown.replace(text.encode(), HIDDEN.encode())
        read(shown)
        if head:
            shown = b"".join(head + line for line in shown.splitlines(keepends=True))
        _write_all(target, shown)


def _write_all(target: int, shown: bytes) -> None:
    # Lost output must neither end nor block the command.
    with contextlib.suppress(OSError):
        while shown:
            # A pipe may take a part of it only.
            shown = shown[os.write(target, shown) :]


def copying(
    source: IO[bytes] | None,
    target: TextIO,
    *,
    hidden: Sequence[str] = (),
    read: Callable[[bytes], None] = lambda _: None,
    head: bytes = b"",
) -> threading.Thread:
    """Starts a thread that forwards a pipe to its end, and closes it."""
    assert source is not None

    def copy(pipe: IO[bytes] = source) -> None:
        with pipe:
            forward(pipe.fileno(), target.fileno(), hidden=hidden, read=read, head=head)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def with_own_python(command: Sequence[str]) -> tuple[str, ...]:
    """Returns a command whose bare `python` runs stoker, too: the script has the same packages."""
    program, *words = command
    return (sys.executable if program in ("python", "python3") else program, *words)


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


def _memory_kill(kills_before: int) -> str:
    kills = (machine.num_memory_kills() or 0) - kills_before
    if kills <= 0:
        return ""
    words = f"out of memory: the kernel killed {numbered(kills, 'process', 'processes')}"
    if limit := machine.limit_bytes():
        words += f" (limit {size(limit)})"
    return words
