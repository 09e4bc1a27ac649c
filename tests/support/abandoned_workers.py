"""Workers of torch's loaders whose iterator is left to the garbage collector.

An iterator in a cycle of references (a test's frame has `pytest.raises(...) as caught`, which has
the frame) ends when garbage is collected, in whichever thread that happens. Of a cycle,
multiprocessing's queues are told to end first, so nobody sends what the iterator puts into them
then. Its workers never hear that they are to end, and torch waits 5 s for each, one after the
other: a coordinator's thread stood still for 70 s, and its data hosts gave it up.
"""

import os

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_delete_as_torch = vars(_MultiProcessingDataLoaderIter)["__del__"]
_forget_pids = vars(signal_handling)["_remove_worker_pids"]


def end_them_at_once() -> None:
    """Has iterators of this process end workers that cannot be told; others end as by torch."""
    _MultiProcessingDataLoaderIter.__del__ = _delete  # type: ignore[method-assign]


def _delete(iterator: _MultiProcessingDataLoaderIter) -> None:
    if _has_untold_workers(iterator):
        # First, for torch takes the end of a worker that it knows of for a failure.
        _forget_pids(id(iterator))
        iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.terminate()
    _delete_as_torch(iterator)


def _has_untold_workers(iterator: _MultiProcessingDataLoaderIter) -> bool:
    """Whether it has workers, of this process, whose queues send nothing any more."""
    state = vars(iterator)
    if state.get("_shutdown", True) or not state.get("_worker_pids_set"):
        return False
    if any(vars(worker)["_parent_pid"] != os.getpid() for worker in iterator._workers):
        return False
    ends = [vars(queue)["_close"] for queue in iterator._index_queues]
    return any(end is not None and not end.still_active() for end in ends)
