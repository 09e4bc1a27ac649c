"""Who goes first on a data host's cores: what makes batches, before what sends them."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def interrupting_nobody() -> Iterator[None]:
    """The calling thread, and those it starts meanwhile, wait for an idle core or for their turn.

    A worker that hands over a batch wakes the agent, and the kernel may run the woken at once where
    the waker runs, even beside an idle core: the worker stands still while its batch is sealed
    (1 ms for 5 MB), before it can begin the next. SCHED_BATCH keeps threads from "extra
    preemptions (between the workload's tasks)", sched(7). Where all cores are busy their turn
    comes with the next slice, within some 3 ms. Nothing is done where the thread has another policy
    than the default one, by the user's will, or where it may not be changed.
    """
    is_set = False
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            is_set = True
    try:
        yield
    finally:
        if is_set:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
