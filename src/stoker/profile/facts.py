"""Facts about batches, the loader that makes them, which loader is measured, and its host."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast
from weakref import ref

import numpy as np
import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from stoker.environment import named_instance_type
from stoker.feed.bookkeeping import kind_of, line_words, made_at
from stoker.feed.engine.loader_spec import LoaderSpec, refusal_of
from stoker.feed.engine.pickler import factories_in
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.placement import digests_of, is_taken_whole
from stoker.feed.timed import num_samples
from stoker.profile.rank_results import BatchFacts, Inventory
from stoker.records import ProfiledLoader

_ARRAYS = (torch.Tensor, np.ndarray)
_FLOATS = (torch.float32, np.float32)
# A loader that is read where no gradients are wanted is for validation, unless nothing else comes.
MAX_BATCHES_WITHOUT_GRADIENTS = 50
# For finding out what cannot be pickled for data hosts: beyond it takes too long.
_MAX_PICKLE_BYTES = 256 << 20


def leaves(batch: object) -> Iterator[torch.Tensor]:
    """Yields a batch's tensors and arrays; looks one level into other objects."""
    for leaf in tree_leaves(batch):
        # Of an array only what a tensor has, too, is asked.
        held = [leaf] if isinstance(leaf, _ARRAYS) else tree_leaves(getattr(leaf, "__dict__", ()))
        yield from (cast("torch.Tensor", each) for each in held if isinstance(each, _ARRAYS))


def facts(batch: object) -> BatchFacts:
    held = [*leaves(batch)]
    # Sparse tensors have no size.
    dense = [leaf for leaf in held if getattr(leaf, "layout", torch.strided) is torch.strided]
    # Four dimensions: sample, channel, height, width.
    images = [leaf for leaf in dense if leaf.ndim >= 4 and leaf.dtype in _FLOATS]
    return BatchFacts(
        samples=num_samples(batch),
        num_bytes=sum(leaf.nbytes for leaf in dense),
        num_tensors=len(held),
        float_image_bytes=sum(image.nbytes for image in images),
    )


def loader_of(loader: DataLoader[object]) -> ProfiledLoader:
    name, reach = reach_of(type(loader))
    is_stream = isinstance(loader.dataset, IterableDataset)
    return ProfiledLoader(
        class_name=name,
        reach=reach,
        iterable=is_stream,
        # A stream without workers is one shard.
        shards=max(1, loader.num_workers) if is_stream else None,
    )


class MainLoader:
    """The loader whose steps are the training's.

    It is the first of which a second batch is read with gradients on (a script may look at one
    batch of any loader); the next one when it is gone, or when the script makes it again, even if
    something still holds the former one, as accelerate does with every prepared loader.
    """

    def __init__(self) -> None:
        # Weak: a loader that the script drops must end its workers, as it does without a profile.
        self._loader: Callable[[], DataLoader[object] | None] = lambda: None
        self._kind: tuple[object, ...] = ()
        self._since = 0.0

    def is_(self, loader: DataLoader[object], *, delivered: int) -> bool:
        """Whether `loader`, with `delivered` batches in this epoch, is or becomes the main one."""
        main = self._loader()
        if main is loader:
            return True
        trains = torch.is_grad_enabled() and delivered > 0
        is_next = main is None and (trains or delivered >= MAX_BATCHES_WITHOUT_GRADIENTS)
        is_made_again = made_at(loader) > self._since and kind_of(loader) == self._kind
        if not (is_next or is_made_again):
            return False
        self._loader = ref(loader)
        self._kind, self._since = kind_of(loader), time.monotonic()
        return True


def early_digests(loader: DataLoader[object]) -> dict[str, str]:
    """Returns digests of what a map-style loader without workers makes its batches from."""
    is_left = loader.num_workers or isinstance(loader.dataset, IterableDataset)
    # Data hosts make a dataset by name in any case.
    if is_left or next(factories_in(loader.dataset), None) is not None:
        return {}
    return digests_of(loader)


def facts_of(
    loader: DataLoader[object], *, before: Mapping[str, str], failure: str = ""
) -> ProfiledLoader:
    """Returns the loader, with whether workers and data hosts could make its batches.

    Batches that are made ahead of the loop would be older than what it changes, as a counter, a
    replay buffer or a curriculum.

    Args:
        before: Digests of many batches before; empty: nothing is compared.
        failure: Error of a loader without workers in any worker; empty: there was none.
    """
    line = None
    changed = sorted(before.items() ^ digests_of(loader).items()) if before else []
    spec = LoaderSpec(
        dataset=loader.dataset,
        collate_fn=cast("Callable[[object], object]", loader.collate_fn),
        worker_init_fn=loader.worker_init_fn,
        outlives_epochs=loader.persistent_workers,
    )
    why = fix = ""
    if failure:
        # A dataset on an accelerator, say, which a forked process cannot use.
        why = f"it fails in a worker ({failure})"
    elif changed:
        words = "changed between two batches, and num_workers=0 means that no batch is made before"
        why = f"{changed[0][0]} {words} it is asked for"
    elif err := refusal_of(spec, max_bytes=_MAX_PICKLE_BYTES):
        why, fix = err.what, err.fix
    elif before and is_taken_whole(loader):
        line = line_words(loader)
    known = loader_of(loader)
    return replace(known, unsendable=why, unsendable_fix=fix, made_ahead_at=line)


# What the firmware says: of EC2's hosts the product is their type.
_FIRMWARE = Path("/sys/class/dmi/id")


def take_inventory() -> Inventory:
    """Returns the equipment and type of this host."""
    # Accelerators that this process may use.
    has_cuda = torch.cuda.is_available()
    vendor, product = (_text_of(_FIRMWARE / name) for name in ("sys_vendor", "product_name"))
    of_host = product if vendor.startswith("Amazon") else None
    return Inventory(
        accelerators=torch.cuda.device_count() if has_cuda else None,
        accelerator_model=torch.cuda.get_device_name(0) if has_cuda else None,
        instance_type=named_instance_type() or of_host,
    )


def _text_of(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").strip()
    return ""
