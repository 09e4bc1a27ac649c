"""Whose loader it is: torch's or stoker's, another library's, or one within a data worker.

Light to import: the feed warns by this table, and a profile classifies loaders with it.
"""

import sys
import threading
from typing import Literal

LoaderReach = Literal["stoker", "torch", "own"]

_STOKERS = "stoker.feed.loader.DataLoader"
# Classes that make batches without torch's loader: data hosts cannot make these.
OWN_LOADERS = {
    "fastai.data.load": "DataLoader",
    "ffcv.loader.loader": "Loader",
    "grain._src.python.data_loader": "DataLoader",
    "litdata.streaming.dataloader": "StreamingDataLoader",
    "nvidia.dali.plugin.pytorch": "DALIGenericIterator",
    "ray.data.iterator": "DataIterator",
    "torchdata.nodes.loader": "Loader",
}

_is_of_worker = threading.Event()


def own_loaders() -> list[str]:
    """Returns classes of OWN_LOADERS whose modules this process has."""
    return [f"{module}.{name}" for module, name in OWN_LOADERS.items() if module in sys.modules]


def reach_of(kind: type) -> tuple[str, LoaderReach]:
    """Returns the name of a loader's class (its base's in OWN_LOADERS), and its reach."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    for module, name in OWN_LOADERS.items():
        if f"{module}.{name}" in names:
            return f"{module}.{name}", "own"
    return names[0], "stoker" if _STOKERS in names else "torch"


# ---- whether this process makes batches for a loader of another one


def become_data_worker() -> None:
    """Makes `is_worker` true in this process, and in those that it forks."""
    _is_of_worker.set()


def hide_worker() -> None:
    """Has `get_worker_info()` return None from now on, as in a script without workers."""
    from torch.utils.data._utils import worker

    become_data_worker()
    worker._worker_info = None


def is_worker() -> bool:
    """Returns whether this is a data worker, or a worker of torch's."""
    torch_data = sys.modules.get("torch.utils.data")
    if _is_of_worker.is_set() or torch_data is None:
        return _is_of_worker.is_set()
    return torch_data.get_worker_info() is not None
