"""Batches as values: clone, size, look inside. A batch is any nesting of lists, tuples, dicts."""

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from stoker.feed.batch_bytes import num_bytes
from stoker.profile.raw import BatchFacts

# Of a large batch only this many values are looked at: enough to tell bytes from real numbers.
_LOOK_AT_VALUES = 65536


def clone(batch: object) -> object:
    """A batch of its own memory, in host memory: the script may change it in place."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if type(batch) is dict:
        return {key: clone(value) for key, value in batch.items()}
    if type(batch) is list:
        return [clone(item) for item in batch]
    if type(batch) is tuple:
        return tuple([clone(item) for item in batch])
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make([clone(item) for item in batch])
    return copy.deepcopy(batch)


def leaves(batch: object) -> Iterator[torch.Tensor]:
    """Its tensors and arrays, as tensors; objects of other classes are looked into one level."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, np.ndarray):
        if batch.dtype.kind in "biufc":
            yield torch.from_numpy(np.ascontiguousarray(batch))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes | bytearray):
        for item in batch:
            yield from leaves(item)
    elif hasattr(batch, "__dict__"):
        for value in vars(batch).values():
            if isinstance(value, torch.Tensor):
                yield value


def num_samples(batch: object) -> int:
    """Samples: the first dimension of its first tensor that has one, else its length, else 1."""
    for leaf in leaves(batch):
        if leaf.ndim:
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, list | tuple) and batch else 1


def facts(batch: object) -> BatchFacts:
    """What it looks like."""
    images = [leaf for leaf in leaves(batch) if leaf.dtype == torch.float32 and leaf.ndim >= 4]
    return BatchFacts(
        samples=num_samples(batch),
        num_bytes=num_bytes(batch),
        float_image_bytes=sum(image.numel() * image.element_size() for image in images),
        is_uint8_like=bool(images) and all(_is_uint8_like(image) for image in images),
    )


def _is_uint8_like(image: torch.Tensor) -> bool:
    values = image.detach().flatten()[:_LOOK_AT_VALUES].cpu()
    if not values.numel() or float(values.min()) < 0:
        return False
    scaled = values * 255 if float(values.max()) <= 1 else values
    return float(scaled.max()) <= 255 and bool(torch.all((scaled - scaled.round()).abs() < 1e-3))
