"""Seeding of the random states that a dataset may draw from, for each batch.

Before a batch is made, all that it may draw from is set from (base seed, replica, epoch, number),
hashed by BLAKE2b, which no version of NumPy can change: the
three global random states (Python's `random`, NumPy's and torch's default CPU generator); the
generators that the dataset and the collate function hold; and `get_worker_info()`: for number n
worker n modulo the script's `num_workers`, as with torch. So a dataset that makes a generator from
`get_worker_info().seed` has the same one wherever it runs.

The way of these words: `iterators.IndexDraws`, `engine.messages.Make.seed_words`, and
`engine.batches`, which has a `Seeder` set the states.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar, cast

import msgspec
import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from stoker.feed.generators import (
    GLOBALS,
    MAX_SEED,
    FoundGenerator,
    find_generators,
    read_state,
    write_state,
)

# Of a digest: where NumPy's 8 words are.
_NUMPY_WORDS = slice(16, 48)
_MASK = (1 << 64) - 1

# What the states of a sample follow from: its batch; the worker, as with torch.
Seeding = Literal["batch", "torch"]
_T = TypeVar("_T")


class Numbered(msgspec.Struct):
    """The sampler's index, with the words that its batch is seeded from."""

    seed_words: tuple[int, ...]
    index: object


class PreservedRandomStates:
    """Restores the random states at its end, so that the trainer's draws stay.

    A class: contextlib's generator sets an error's traceback, which a frozen dataclass refuses.

    Args:
        found: Generators whose states are restored, too.
    """

    __slots__ = ("_generators", "_states")

    def __init__(self, found: Sequence[FoundGenerator] = ()) -> None:
        self._generators = [*GLOBALS.values(), *(one.value for one in found)]

    def __enter__(self) -> None:
        self._states = [*map(read_state, self._generators)]

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            write_state(generator, state)


def seed_as_torch(base_seed: int, worker_id: int) -> None:
    """Sets the states as torch's worker loop does at its start."""
    random.seed(base_seed + worker_id)
    torch.default_generator.manual_seed((base_seed + worker_id) & _MASK)
    words = torch_worker._generate_state(base_seed, worker_id)  # type: ignore[no-untyped-call]
    np.random.seed(words)


def set_worker_info(worker: int, num_workers: int, base_seed: int, dataset: object) -> None:
    """Sets what `get_worker_info()` returns."""
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker,
        num_workers=num_workers,
        seed=base_seed + worker,
        dataset=cast("torch.utils.data.Dataset[object]", dataset),
    )


def _digest(seed_words: Sequence[int]) -> bytes:
    words = struct.pack(f"<{len(seed_words)}Q", *[word & _MASK for word in seed_words])
    return hashlib.blake2b(words, digest_size=64, person=b"stoker batch").digest()


def shown_index(index: object) -> object:
    """Returns an index as plain numbers: the same for 3, numpy.int64(3) and tensor(3)."""
    if isinstance(index, tuple | list):
        return [*map(shown_index, index)]
    return index.tolist() if hasattr(index, "tolist") else index


class Seeder:
    """Seeds the batches that this process makes.

    Args:
        num_workers: Of the script, for `get_worker_info()`; None: leave that unset, as in the
            trainer's process.
    """

    def __init__(self, roots: Mapping[str, object], *, num_workers: int | None) -> None:
        self._roots = roots
        self._num_workers = num_workers
        self._found = find_generators(roots)
        # Whether it was looked once more, after the first batch.
        self._is_settled = False

    def make(self, seed_words: Sequence[int], make: Callable[[], _T]) -> _T:
        """Returns what `make` returns; called again for a first batch that made a generator."""
        if self._num_workers is not None:
            worker = seed_words[3] % self._num_workers
            set_worker_info(worker, self._num_workers, seed_words[0], self._roots["dataset"])
        digest = _digest(seed_words)
        self._seed(digest)
        if self._is_settled:
            return make()
        try:
            batch = make()
        except Exception:
            # What was drawn from the generator may be the cause.
            if not self._has_missed():
                raise
        else:
            if not self._has_missed():
                return batch
            # First, because a worker gives up a slot with a live view.
            del batch
        self._seed(digest)
        return make()

    def _has_missed(self) -> bool:
        """Looks once more for generators; returns whether the first batch has made some."""
        self._is_settled = True
        before = {id(one.value) for one in self._found}
        self._found = find_generators(self._roots)
        return not before.issuperset(id(one.value) for one in self._found)

    def preserved(self) -> PreservedRandomStates:
        """Restores all random states at its end: the trainer's own draws do not move."""
        return PreservedRandomStates(self._found)

    def _seed(self, digest: bytes) -> None:
        random.seed(int.from_bytes(digest[:16], "little"))
        np.random.seed(np.frombuffer(digest[_NUMPY_WORDS], dtype="<u4"))
        # Not torch.manual_seed: it visits every backend, 76 us against 1.2 us.
        word = int.from_bytes(digest[_NUMPY_WORDS.stop : _NUMPY_WORDS.stop + 8], "little")
        torch.default_generator.manual_seed(word & MAX_SEED)
        for one in self._found:
            one.seed(digest)
