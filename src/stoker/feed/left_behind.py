"""What a sample leaves behind in its process, and would strike a later one there."""

import contextlib
import os
import signal
import sys

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_NONE: frozenset[int] = frozenset()


class Contained:
    """Ends timers that a sample leaves running, and after its error goes back to the folder.

    A limit of one sample's time would end another one, and the next ones may have relative paths.
    The limit of recursion is taken back, too: below a low one, not even the error could be told.

    Args:
        timers: That run already; None: they are read now.
    """

    # Entered for each sample: a generator would take a third more.
    __slots__ = ("_folder", "_recursion_limit", "_timers")

    def __init__(self, timers: frozenset[int] | None = None) -> None:
        self._timers = running_timers() if timers is None else timers

    def __enter__(self) -> None:
        self._folder = _working_folder()
        self._recursion_limit = sys.getrecursionlimit()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: object
    ) -> None:
        if kind is not None:
            self._go_back()
        running = running_timers()
        if running:
            for timer in running - self._timers:
                signal.setitimer(timer, 0)

    def _go_back(self) -> None:
        if sys.getrecursionlimit() != self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        if self._folder and _working_folder() != self._folder:
            with contextlib.suppress(OSError):
                os.chdir(self._folder)


def running_timers() -> frozenset[int]:
    """Returns the timers of this process that run."""
    real, virtual, profiling = map(signal.getitimer, _TIMERS)
    if not (real[0] or virtual[0] or profiling[0]):
        return _NONE
    return frozenset(timer for timer in _TIMERS if signal.getitimer(timer)[0])


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        # It is deleted.
        return ""
