"""Loaders of other libraries that make batches themselves: data hosts cannot make these.

Light to import: the feed warns by this table, and a profile classifies loaders with it.
"""

import sys
from typing import Literal

LoaderReach = Literal["stoker", "torch", "left", "own"]

_STOKERS = "stoker.feed.loader.DataLoader"
# Module: its class that makes batches without torch's loader.
OWN_LOADERS = {
    "fastai.data.load": "DataLoader",
    "ffcv.loader.loader": "Loader",
    "grain._src.python.data_loader": "DataLoader",
    "litdata.streaming.dataloader": "StreamingDataLoader",
    "nvidia.dali.plugin.pytorch": "DALIGenericIterator",
    "ray.data.iterator": "DataIterator",
    "torchdata.nodes.loader": "Loader",
}


def own_loaders() -> list[str]:
    """Returns classes of OWN_LOADERS whose modules this process has."""
    return [f"{module}.{name}" for module, name in OWN_LOADERS.items() if module in sys.modules]


def imports_stokers() -> bool:
    """Returns whether the script has asked for stoker's DataLoader, to mark what is fed."""
    # The package caches names that a script asked for; stoker's own code imports from the module.
    return "DataLoader" in vars(sys.modules["stoker"])


def reach_of(kind: type) -> tuple[str, LoaderReach]:
    """Returns the name of a loader's class (its base's in OWN_LOADERS), and its reach."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    own_names = {f"{module}.{name}" for module, name in OWN_LOADERS.items()}
    name_of_base = next((name for name in names if name in own_names), None)
    if name_of_base is not None:
        return name_of_base, "own"
    if _STOKERS in names:
        return names[0], "stoker"
    return names[0], "left" if imports_stokers() else "torch"
