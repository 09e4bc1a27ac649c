"""Starts a command that ends with its parent: `spawn.py PARENT SIGNAL CORES -- CMD`.

This script asks the kernel to send SIGNAL when PARENT dies, pins itself to CORES (`0,1`, or `-` for
no change) and becomes CMD. So no Python runs between fork and exec in a parent that has threads.
"""

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
CANNOT_START = 127


def wrapped(
    command: Sequence[str], *, signal_number: int, cores: Sequence[int] = ()
) -> tuple[str, ...]:
    """Returns `command` so that it ends with the calling process, which is to start it.

    The kernel sends `signal_number` when the thread that starts it ends.
    """
    pinned = ",".join(str(core) for core in cores) or "-"
    # -I and -S save a few milliseconds, and keep the training's start-up code out of here.
    head = (sys.executable, "-I", "-S", __file__, str(os.getpid()), str(signal_number), pinned)
    return (*head, "--", *command)


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants' orphans; returns False if unsupported."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(signal_number: int, *, parent: int | None = None) -> None:
    """Asks the kernel for a signal when the thread that started this process ends (Linux only).

    Exits at once, as if by that signal, if `parent` has died already (None: the current parent).
    """
    parent = parent or os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    # Checked after the request: no signal comes for a parent that died before it.
    if os.getppid() != parent:
        os._exit(128 + signal_number)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def _main(arguments: list[str]) -> int:
    parent, signal_number, cores, _, *command = arguments
    end_with_parent(int(signal_number), parent=int(parent))
    if cores != "-" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(command[0], command)
    except OSError as err:
        sys.stderr.write(f"error: cannot start {command[0]}: {err.strerror}\n")
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
