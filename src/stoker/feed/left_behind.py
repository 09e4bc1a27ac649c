"""What a sample leaves behind in its process, and would strike a later one there."""

import signal
import sys

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_NONE: frozenset[int] = frozenset()


class Contained:
    """Ends timers that a sample leaves running, and after its error takes back its recursion limit.

    A limit of one sample's time would end another one, and below a low limit of recursion not even
    the error could be told. Entered for one sample after the other: to make one for each would take
    a third more.
    """

    __slots__ = ("_recursion_limit", "_timers")

    def __init__(self) -> None:
        self.begin_batch()

    def begin_batch(self) -> None:
        """Notes timers that run before a sample is made: these go on."""
        self._timers = _running_timers()

    def __enter__(self) -> None:
        self._recursion_limit = sys.getrecursionlimit()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: object
    ) -> None:
        if kind is not None and sys.getrecursionlimit() != self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        running = _running_timers()
        if running:
            for timer in running - self._timers:
                signal.setitimer(timer, 0)


def _running_timers() -> frozenset[int]:
    """Returns the timers of this process that run."""
    real, virtual, profiling = map(signal.getitimer, _TIMERS)
    if not (real[0] or virtual[0] or profiling[0]):
        return _NONE
    return frozenset(timer for timer in _TIMERS if signal.getitimer(timer)[0])
