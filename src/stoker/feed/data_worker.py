"""Whether this process makes batches for a loader of another one.

`get_worker_info()` does not say it on a data host: for a script without workers it is None there.
"""

import multiprocessing
import sys
import threading

_of_process = threading.Event()


def become_data_worker() -> None:
    """Makes `is_worker` true in this process, and in those that it forks."""
    _of_process.set()


def hide_worker() -> None:
    """Has `get_worker_info()` return None from now on, as in a script without workers."""
    from torch.utils.data._utils import worker

    become_data_worker()
    worker._worker_info = None


def may_start_processes() -> None:
    """Lets this process, which is a daemon, have children of multiprocessing: pools of a sample."""
    # `daemon` itself cannot be set in a process that has begun.
    settings = getattr(multiprocessing.current_process(), "_config", {})
    settings["daemon"] = False


def is_worker() -> bool:
    """Returns whether this is a data worker, or a worker of torch's."""
    torch_data = sys.modules.get("torch.utils.data")
    if _of_process.is_set() or torch_data is None:
        return _of_process.is_set()
    return torch_data.get_worker_info() is not None
