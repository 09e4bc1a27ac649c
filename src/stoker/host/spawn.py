"""Starts a command so that it ends with its parent: `spawn.py PARENT SIGNAL CORES -- CMD`.

It runs as a script, in between: it asks the kernel to send SIGNAL when PARENT dies, pins itself to
CORES (`0,1`, or `-` for no change), and becomes CMD. So no Python runs between fork and exec in a
parent that has threads.
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
    """Returns `command` so that it ends with this process, which is to start it.

    Args:
        command: Program and arguments.
        signal_number: What the kernel sends it when this process (the starting thread) ends.
        cores: Cores to pin it to; none: where this process may run.
    """
    pinned = ",".join(str(core) for core in cores) or "-"
    # -I and -S: no site-packages, no variable of the user's: a few milliseconds, and none of the
    # training's own start-up code runs here.
    head = (sys.executable, "-I", "-S", __file__, str(os.getpid()), str(signal_number), pinned)
    return (*head, "--", *command)


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants' orphans; False where that is not known."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(signal_number: int) -> bool:
    """Asks for `signal_number` when this process's parent ends; False where that is not known."""
    return _prctl(_PR_SET_PDEATHSIG, signal_number)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def _main(arguments: list[str]) -> int:
    parent, signal_number, cores, _, *command = arguments
    end_with_parent(int(signal_number))
    # After the request, not before: a parent that dies in between is seen here. As if the signal
    # had ended this process.
    if os.getppid() != int(parent):
        return 128 + int(signal_number)
    if cores != "-" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(command[0], command)
    except OSError as err:
        sys.stderr.write(f"error: cannot start {command[0]}: {err.strerror}\n")
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
