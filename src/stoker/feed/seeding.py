"""The three random states that a dataset may draw from, made from words instead of from history.

A batch (or a sample) is the same wherever it is made because Python's `random`, NumPy's global
state and torch's default CPU generator are set from (base seed, replica, epoch, number) before it
is made. The words are hashed by BLAKE2b, which no version of NumPy can change.
"""

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec
import numpy as np
import torch
from torch.utils.data import StackDataset, Subset

from stoker.feed.generators import MAX_SEED

# Base seed, replica, epoch, number of the batch.
BATCH_WORDS = 4

_MASK = (1 << 64) - 1

# What is seeded before each batch: all random states, or a sample at a time, or as torch does.
Seeding = Literal["batch", "sample", "torch"]


class Numbered(msgspec.Struct):
    """What the sampler gave, and the words that its batch is seeded from."""

    words: tuple[int, ...]
    index: object


def seed_batch(words: Sequence[int]) -> bytes:
    """Sets the three random states from `words`: whole numbers from 0 to 2**64 - 1. 15 us.

    Returns the digest that they were made of.
    """
    return _seed(_digest(words))


def seed_sample(words: Sequence[int], index: object, occurrence: int) -> bytes:
    """Sets the three random states for one sample; returns the digest that they were made of.

    Args:
        words: Base seed, epoch.
        index: What the sampler gave.
        occurrence: How often the epoch had this index before.
    """
    digest = hashlib.blake2b(_digest(words), digest_size=64, person=b"stoker sample")
    digest.update(index_bytes(index))
    digest.update(struct.pack("<Q", occurrence))
    return _seed(digest.digest())


def seed_place(words: Sequence[int], index: object, place: int) -> bytes:
    """Sets the three random states for the sample at `place` of a batch.

    Args:
        words: Base seed, replica, epoch, number; then the occurrence at each place, where one is
            not 0. The replica is left out: a sample is the same on whatever rank.
    """
    occurrences = words[BATCH_WORDS:]
    return seed_sample((*words[:1], *words[2:3]), index, occurrences[place] if occurrences else 0)


def makes_many(dataset: object) -> bool:
    """Whether the samples of a batch are made by one call, and so cannot be seeded one by one."""
    if type(dataset) is Subset:
        return makes_many(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(makes_many, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


class OneByOne:
    """A dataset for a fetcher that asks for one sample after the other."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset

    def __getitem__(self, index: object) -> object:
        sample: object = self._dataset[index]  # type: ignore[index]
        return sample


class Occurrences:
    """How often an epoch had an index before, for each that is handed out; 100 bytes an index.

    Args:
        is_batched: What is handed out are batches of indices.
    """

    def __init__(self, *, is_batched: bool) -> None:
        self._is_batched = is_batched
        self._seen: dict[int | bytes, int] = {}

    def clear(self) -> None:
        """The epoch begins again."""
        self._seen.clear()

    def of(self, index: object) -> tuple[int, ...]:
        """Of each index of a batch, in its order; empty: it is the first of all."""
        if not self._is_batched or not isinstance(index, Iterable):
            found: tuple[int, ...] = (self._count(index),)
        else:
            found = tuple(self._count(one) for one in index)
        return found if any(found) else ()

    def _count(self, index: object) -> int:
        key = index if isinstance(index, int) else index_bytes(index)
        if isinstance(key, bytes) and key[:1] == b"i":
            key = int(key[1:])
        before = self._seen.get(key, 0)
        self._seen[key] = before + 1
        return before


def seed_as_torch(base_seed: int, worker_id: int) -> int:
    """Sets the states as torch's worker loop does at its start; returns the worker's seed."""
    from torch.utils.data._utils.worker import _generate_state

    seed = base_seed + worker_id
    random.seed(seed)
    torch.default_generator.manual_seed(seed & _MASK)
    np.random.seed(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restores the three random states at its end: the trainer's own draws do not move. 66 us."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)


def _digest(words: Sequence[int]) -> bytes:
    packed = struct.pack(f"<{len(words)}Q", *(word & _MASK for word in words))
    return hashlib.blake2b(packed, digest_size=64, person=b"stoker batch").digest()


def _seed(digest: bytes) -> bytes:
    random.seed(int.from_bytes(digest[:16], "little"))
    np.random.seed(np.frombuffer(digest, dtype="<u4", count=8, offset=16))
    # Not torch.manual_seed: it visits every backend, 76 us against 1.2 us.
    torch.default_generator.manual_seed(int.from_bytes(digest[48:56], "little") & MAX_SEED)
    return digest


def index_bytes(index: object) -> bytes:
    """What a sampler gave, the same bytes for 3, numpy.int64(3) and tensor(3)."""
    if isinstance(index, torch.Tensor | np.ndarray | np.generic):
        plain: object = index.tolist()
        return index_bytes(plain)
    if isinstance(index, list | tuple):
        parts = [index_bytes(part) for part in index]
        return b"(" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    if isinstance(index, bytes):
        return b"b" + index
    if isinstance(index, int):
        return b"i" + str(int(index)).encode()
    return b"r" + repr(index).encode("utf-8", "surrogatepass")
