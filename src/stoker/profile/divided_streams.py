"""Detection of streams that divide themselves among workers: they call `get_worker_info()`.

The call is observed where it happens, in the worker: a library may make it deep below the script.
"""

import sys
from pathlib import Path

import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

# Of any rank of the host: all of them run one script.
_FILE = "stream-divides"
# They ask whether they are in a worker, of any dataset.
_NOT_OF_STREAMS = ("stoker.", "torch.utils.data._utils.")


def watch_streams(folder: Path) -> None:
    """Makes workers of this process leave a file in `folder` if their stream calls the function.

    To be called at the end of torch's import, before a script or a library has taken the function.
    """
    original = torch_worker.get_worker_info
    file = folder / _FILE

    def get_worker_info() -> WorkerInfo | None:
        info = original()
        if info is not None and isinstance(info.dataset, IterableDataset):
            asks = str(sys._getframe(1).f_globals.get("__name__", ""))
            if not asks.startswith(_NOT_OF_STREAMS) and not file.exists():
                file.touch()
        return info

    for module in (torch_worker, torch.utils.data, torch.utils.data.dataloader):
        vars(module)["get_worker_info"] = get_worker_info


def is_divided(folder: Path) -> bool:
    return (folder / _FILE).exists()
