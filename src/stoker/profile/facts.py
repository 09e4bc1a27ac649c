"""What is known of the process and its loader before anything is measured."""

from importlib.metadata import PackageNotFoundError, version

import torch
from torch.utils.data import DataLoader

from stoker.profile.raw import LoaderFacts

_PACKAGES = ("stoker", "torch", "numpy", "torchvision", "pillow")


def facts_of(loader: DataLoader[object]) -> LoaderFacts:
    """How the script set up its loader."""
    kind = type(loader.dataset)
    return LoaderFacts(
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        dataset=f"{kind.__module__}.{kind.__qualname__}",
        torch_threads=torch.get_num_threads(),
    )


def length_of(loader: DataLoader[object]) -> int | None:
    """Batches of an epoch, or None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_cuda_used() -> bool:
    """Whether this process has work on an NVIDIA accelerator; does not initialise it."""
    if not torch.cuda.is_available():
        return False
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def versions() -> dict[str, str]:
    """Versions of the packages that batches and steps depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
