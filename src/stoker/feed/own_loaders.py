"""The loaders of other libraries that make batches in their own way: data hosts cannot make these.

The table is light to import: the feed warns by it, and a profile says by it what was read.
"""

import sys

# Module: the class in it that makes batches in a way of its own.
OWN_LOADERS = {
    "fastai.data.load": "DataLoader",
    "ffcv.loader.loader": "Loader",
    "litdata.streaming.dataloader": "StreamingDataLoader",
    "nvidia.dali.plugin.pytorch": "DALIGenericIterator",
    "ray.data.iterator": "DataIterator",
    "torchdata.nodes.loader": "Loader",
}


def own_loaders() -> list[str]:
    """Returns classes of OWN_LOADERS whose modules this process has, by their full names."""
    return [f"{module}.{name}" for module, name in OWN_LOADERS.items() if module in sys.modules]


def own_loader_of(kind: type) -> str:
    """Returns the class of OWN_LOADERS that `kind` is, or is made from; empty: none."""
    for each in kind.__mro__:
        if OWN_LOADERS.get(each.__module__) == each.__name__:
            return f"{each.__module__}.{each.__name__}"
    return ""
