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
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TextIO

import psutil

from stoker.host import machine, spawn
from stoker.host.processes import descendants, signal_all
from stoker.logs import EventName, Log
from stoker.records.secrets import HIDDEN
from stoker.units import numbered, size

# Eight ranks of Lightning print 10 KB each, and the first is the cause of the others.
TAIL_LINES = 2000
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


# `lost`: the leader is; `refused`: this host is.
DecisionKind = Literal["decided", "lost", "refused"]


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision from elsewhere that this host ends."""

    reason: str
    grace_seconds: float = VERDICT_GRACE_SECONDS
    kind: DecisionKind = "decided"


# Ends the training as SIGTERM to this host does.
SAVE = Decided("a limit of the run is reached", grace_seconds=GRACE_SECONDS)


LaunchEvent = SignalReceived | Decided
Inbox = queue.SimpleQueue[LaunchEvent]


def next_event(inbox: Inbox, seconds: float) -> LaunchEvent | None:
    with contextlib.suppress(queue.Empty):
        return inbox.get(timeout=seconds)
    return None


def catch_signals(inbox: Inbox) -> None:
    """Puts SIGTERM and SIGINT into `inbox` from now on (main thread only)."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: inbox.put(SignalReceived(number)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a command ended, and why the launcher ended it (`decided`).

    `exit_code` is a shell's: 128 + n for signal n.
    """

    exit_code: int
    signals: tuple[int, ...] = ()
    decided: str = ""
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


class Command:
    """A command that was started, and ends with this process; make it in the main thread.

    Args:
        asks_children: Signals go to its children: to ranks of mpirun, which itself would kill them
            a second later.
        hidden: Texts that its output must not show.
        head: Stands before each line. The errors then go to standard output, too.
        read: Gets its output and errors, whole lines, in two threads.

    Attributes:
        spared: Processes that were there before.
        tail: Its last lines of errors.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: Path | None = None,
        asks_children: bool = False,
        hidden: Sequence[str] = (),
        head: bytes = b"",
        read: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        spawn.adopt_orphans()
        self.spared = {child.pid for child in psutil.Process().children()}
        self.tail = deque[str](maxlen=TAIL_LINES)
        self._asks_children = asks_children
        self._has_failed_tick = False
        # The kernel's count is per cgroup: only the difference is this command's.
        self._kills_before = machine.num_memory_kills() or 0
        self.process = subprocess.Popen(
            # The kernel kills it when the thread that starts it ends.
            spawn.wrapped(words, signal_number=signal.SIGKILL),
            env=dict(environ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if head else subprocess.PIPE,
            # A new group, so that Ctrl-C at a terminal comes once, through the launcher; the
            # launcher's session, which identifies a host's processes.
            process_group=0,
        )
        # The command's are kept.
        machine.turn_off_core_dumps()

        def keep(lines: bytes) -> None:
            self.tail.extend(lines.decode(errors="replace").splitlines())
            read(lines)

        def copy(pipe: IO[bytes], target: TextIO, shown: Callable[[bytes], None]) -> None:
            with pipe:
                forward(pipe.fileno(), target.fileno(), hidden=hidden, read=shown, head=head)

        output, errors = self.process.stdout, self.process.stderr
        copies = [(output, sys.stdout, read), (errors, sys.stderr, keep)]
        if head:
            copies = [(output, sys.stdout, keep)]
        self._copies = [threading.Thread(target=copy, args=args, daemon=True) for args in copies]
        for thread in self._copies:
            thread.start()

    def ask(self, number: int) -> None:
        """Sends a signal to the first process alone, which passes it on, as torchrun does."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            signal_all((self._asks_children and first.children()) or [first], number)

    def end(self) -> None:
        """Ends leftover processes, which hold the pipes open, and waits for the last lines."""
        end_descendants(spared=self.spared)
        for copy in self._copies:
            copy.join(LEFTOVER_SECONDS)

    def _tick(self, on_tick: Callable[[], None], log: Log) -> None:
        try:
            on_tick()
        except Exception as err:
            # A figure must not end a training of days.
            if not self._has_failed_tick:
                log.event(EventName.TICK_FAILED, error=repr(err))
            self._has_failed_tick = True
        _reap_orphans(spared={self.process.pid, *self.spared})

    def follow(self, inbox: Inbox, log: Log, on_tick: Callable[[], None]) -> Ending:
        """Follows the command to its end, then ends its leftover processes, but no earlier child.

        Blocks while it runs: after the first SIGTERM or SIGINT for at most GRACE_SECONDS, after a
        second one for a few seconds, after a `Decided` for as long as that says. The command gets
        one signal: a second SIGTERM would kill a script that saves.

        Args:
            on_tick: Called about twice a second.
        """
        signals: list[int] = []
        decided = ""
        kill_at = float("inf")
        tick_at = 0.0
        while self.process.poll() is None:
            event = next_event(inbox, _POLL_SECONDS)
            now = time.monotonic()
            # If all hosts are stopped at once, a signal may come behind another host's decision.
            is_first = not (signals or decided)
            if isinstance(event, SignalReceived):
                signals.append(event.number)
                log.event(EventName.SIGNAL_RECEIVED, number=event.number, count=len(signals))
                kill_at = now + (GRACE_SECONDS if len(signals) == 1 else 0.0)
                if is_first:
                    self.ask(event.number)
            elif event and not decided:
                decided = event.reason
                log.event(EventName.COMMAND_STOPPING, reason=decided)
                # After a signal the command may be saving.
                if is_first:
                    kill_at = now + event.grace_seconds
                    self.ask(signal.SIGTERM)
            if now >= tick_at:
                tick_at = now + _TICK_SECONDS
                self._tick(on_tick, log)
            if now >= kill_at:
                kill_at = float("inf")
                signal_all(descendants(spared=self.spared), signal.SIGKILL)
        self.end()
        code = self.process.returncode
        log.event(EventName.COMMAND_ENDED, pid=self.process.pid, returncode=code)
        return Ending(
            exit_code=code if code >= 0 else 128 - code,
            signals=tuple(signals),
            decided=decided,
            stderr="\n".join(self.tail),
            killed_for_memory=_memory_kill(self._kills_before) if code else "",
        )


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
        # Lost output must neither end nor block the command; a pipe may take a part of it only.
        with contextlib.suppress(OSError):
            while shown:
                shown = shown[os.write(target, shown) :]


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


def _reap_orphans(*, spared: Collection[int]) -> None:
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
