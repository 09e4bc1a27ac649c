"""What a sample leaves behind in its process, and would strike a later one there."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Ends timers that a sample leaves running, and after its error goes back to the folder.

    A limit of one sample's time would end another one, and the next ones may have relative paths.
    A lower limit of recursion is taken back, too: below it, not even the error could be told.
    """
    running = _running_timers()
    folder = _working_folder()
    recursion_limit = sys.getrecursionlimit()
    try:
        yield
    except BaseException:
        if sys.getrecursionlimit() < recursion_limit:
            sys.setrecursionlimit(recursion_limit)
        if folder and _working_folder() != folder:
            with contextlib.suppress(OSError):
                os.chdir(folder)
        raise
    finally:
        for timer in _running_timers() - running:
            signal.setitimer(timer, 0)


def _running_timers() -> set[int]:
    return {timer for timer in _TIMERS if signal.getitimer(timer)[0]}


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        # It is deleted.
        return ""
