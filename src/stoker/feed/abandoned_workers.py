"""Workers of torch's loaders that nobody tells to end, where a thread of stoker's finds them.

An iterator in a cycle of references (an error that is kept has the frames that have the iterator)
ends when Python looks for cycles, in whichever thread that happens to be. Of a cycle,
multiprocessing's queues are told to end first, so nobody sends what the iterator puts into them
then. Its workers never hear that they are to end, and torch waits 5 s for each, one after the
other. A thread of stoker's must not stand still for that long: no batch would be asked for.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

# Of stoker's threads in a process of the user's.
_NAME = "stoker-"
_Endings = SimpleQueue[Callable[[], None]]


def end_elsewhere(kind: type) -> None:
    """Has objects of a class that a thread of stoker's finds as garbage end in another thread.

    They end as before, and so do those that a thread of the script finds, in that thread. To be
    called again in a forked child.

    Args:
        kind: With a `__del__` that may wait.
    """
    _ends(os.getpid())
    _replace(kind)


@functools.cache
def _replace(kind: type) -> None:
    as_before: Callable[[object], None] = vars(kind)["__del__"]

    @functools.wraps(as_before)
    def delete(garbage: object) -> None:
        if _is_in_a_thread_of_stokers():
            # The queue may be used wherever a look for garbage begins: it takes no lock.
            _ends(os.getpid()).put(partial(as_before, garbage))
        else:
            as_before(garbage)

    kind.__del__ = delete  # type: ignore[attr-defined]


def _is_in_a_thread_of_stokers() -> bool:
    thread = threading.current_thread()
    # A child that such a thread has forked goes on under its name, as the main thread.
    return thread.name.startswith(_NAME) and thread is not threading.main_thread()


@functools.lru_cache(maxsize=1)
def _ends(pid: int) -> _Endings:
    """Returns what is left to be ended; a forked process has another queue, and thread."""
    ends: _Endings = SimpleQueue()

    def run() -> None:
        while True:
            _end_one(ends.get())

    threading.Thread(target=run, name="stoker-ends", daemon=True).start()
    return ends


def _end_one(ending: Callable[[], None]) -> None:
    try:
        # All at once: each may wait for many workers.
        threading.Thread(target=ending, name="ends-workers", daemon=True).start()
    except RuntimeError:
        # No thread is left, or Python ends: here, one after the other. Nobody sees what a `__del__`
        # raises.
        with contextlib.suppress(Exception):
            ending()
