"""How the processes of data workers end, are ended, and are described when they have."""

import signal
import time
from collections.abc import Callable, Iterable
from typing import Protocol

# From the end of a worker's connection to its exit status; from kill to end.
REAP_SECONDS = 2.0
KILL_SECONDS = 5.0


class Process(Protocol):
    """A worker's process: what `multiprocessing.Process` is, too."""

    @property
    def exitcode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or where it is not known."""
        ...

    def kill(self) -> None:
        """Kills it."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        ...


def reap(process: Process) -> int | None:
    """The exit status of a process whose connection has ended; kills it if it goes on."""
    _join(process, REAP_SECONDS)
    if process.exitcode is None:
        # It closed its connection and yet goes on, or does not tell.
        _quietly(process.kill)
        _join(process, KILL_SECONDS)
    return process.exitcode


def end_all(processes: Iterable[Process]) -> None:
    """Kills them and waits for their end, 5 s at most; never raises."""
    killed = list(processes)
    for process in killed:
        _quietly(process.kill)
    deadline = time.monotonic() + KILL_SECONDS
    for process in killed:
        _join(process, max(0.0, deadline - time.monotonic()))


def describe_exit(status: int | None) -> str:
    """How a process ended, as `was killed by SIGKILL (-9), perhaps out of memory`."""
    if status is None:
        return "ended in an unknown way"
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal"
    hint = ", perhaps out of memory" if -status == signal.SIGKILL else ""
    return f"was killed by {name} ({status}){hint}"


def advice_on(how: str) -> str:
    """What to try after a process has ended as `describe_exit` has it, whatever else `how` says."""
    if "exited with code" in how:
        return "see the host's log: the dataset ended its own process (sys.exit, os._exit)"
    if "was killed by" in how and "SIGKILL" not in how:
        return "see the host's log: native code of the dataset crashed, perhaps at one sample"
    return "see the host's log; give it more memory, or fewer workers"


def _join(process: Process, seconds: float) -> None:
    _quietly(lambda: process.join(seconds))


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        # The process is gone already, or was never started: nothing is left to do.
        return
