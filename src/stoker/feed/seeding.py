"""Seeding of the random states that a dataset may draw from, for each batch.

Before a batch (or a sample) is made, all that it may draw from is set from (base seed, replica,
epoch, number), hashed by BLAKE2b, which no version of NumPy can change: the three global random
states (Python's `random`, NumPy's and torch's default CPU generator); the generators that the
dataset and the collate function hold; and `get_worker_info()`: for number n worker n modulo the
script's `num_workers`, as with torch. So a dataset that makes a generator from
`get_worker_info().seed` has the same one wherever it runs.
"""

import contextlib
import ctypes
import functools
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar, cast

import msgspec
import numpy as np
import torch
from torch.utils.data import StackDataset, Subset
from torch.utils.data._utils import worker as torch_worker

from stoker.environment import from_environment
from stoker.errors import ShippingError
from stoker.feed.generators import (
    MAX_SEED,
    GeneratorKind,
    HeldGenerators,
    global_generators,
    kind_of,
    put_back,
)
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.logs import EventName, Log

# Base seed, replica, epoch, number of the batch.
BATCH_WORDS = 4

_MASK = (1 << 64) - 1

# Unit of seeding: a batch, a sample, or workers as torch does.
Seeding = Literal["batch", "sample", "torch"]
# Of a Mersenne Twister: 624 words of 4 bytes, and the place among them.
_MT19937_BYTES = 2500
# Of a `RandomState`: whether it holds the second of two normal draws, and that draw.
_NORMAL = struct.Struct("@id")
# How often a batch is made in which new generators appear, to seed them.
_MAX_TIMES = 4
_T = TypeVar("_T")


class Numbered(msgspec.Struct):
    """The sampler's index, with the words that its batch is seeded from."""

    words: tuple[int, ...]
    index: object


def seed_batch(words: Sequence[int]) -> bytes:
    """Sets the random states from `words` (0 to 2**64 - 1), in 15 us; returns their digest."""
    return _seed(_digest(words))


def seed_sample(words: Sequence[int], index: object, occurrence: int) -> bytes:
    """Sets the three random states for one sample; returns their digest.

    Args:
        words: Base seed, epoch.
        occurrence: How often the epoch had this index before.
    """
    digest = hashlib.blake2b(_digest(words), digest_size=64, person=b"stoker sample")
    digest.update(index_bytes(index))
    digest.update(struct.pack("<Q", occurrence))
    return _seed(digest.digest())


def makes_many(dataset: object) -> bool:
    """Returns whether one call makes all samples of a batch: they cannot be seeded one by one."""
    if type(dataset) is Subset:
        return makes_many(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(makes_many, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


class OneByOne:
    """A dataset without `__getitems__`, so that a fetcher asks for one sample at a time."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset

    def __getitem__(self, index: object) -> object:
        sample: object = self._dataset[index]  # type: ignore[index]
        return sample


class Occurrences:
    """Counts, for each index handed out, how often the epoch had it before; 100 bytes an index."""

    def __init__(self, *, is_batched: bool) -> None:
        self._is_batched = is_batched
        self._seen: dict[int | bytes, int] = {}

    def clear(self) -> None:
        self._seen.clear()

    def of(self, index: object) -> tuple[int, ...]:
        """Returns the count for each index of a batch, in its order; empty: all are 0."""
        if not self._is_batched or not isinstance(index, Iterable):
            found: tuple[int, ...] = (self._count(index),)
        else:
            found = tuple(self._count(one) for one in index)
        return found if any(found) else ()

    def _count(self, index: object) -> int:
        key = index if isinstance(index, int) else index_bytes(index)
        # NumPy's and torch's integers count as the same index as Python's.
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


class NumpyState:
    """NumPy's global random state, read in 1 us while it stays as it was, and set in 4.

    NumPy's own functions take 50 us each: they copy 624 numbers one by one. So the memory of
    generator and cached normal draw is compared with what it was at the last reading; it is never
    written to.
    """

    def __init__(self) -> None:
        self._bits: np.random.BitGenerator | None = None
        self._address = self._normal_address = 0
        # What the memory held when the state was read; empty: it does not show the whole state.
        self._memory = b""
        self._state: dict[str, object] = {}

    def read(self) -> dict[str, object]:
        """Returns a state for `write`; not to be changed."""
        memory = self._memory_now()
        if not memory or memory != self._memory:
            self._state = np.random.get_state(legacy=False)
            self._memory = self._note(memory)
        return self._state

    def write(self, state: dict[str, object]) -> None:
        np.random.set_state(state)

    def _memory_now(self) -> bytes:
        bits = np.random.mtrand._rand._bit_generator
        if bits is not self._bits:
            self._bits, self._address, self._memory = bits, 0, b""
            place = _normal_place()
            if type(bits) is np.random.MT19937 and place is not None:
                self._address = bits.ctypes.state_address
                self._normal_address = id(np.random.mtrand._rand) + place
        if not self._address:
            return b""
        numbers = ctypes.string_at(self._address, _MT19937_BYTES)
        return numbers + ctypes.string_at(self._normal_address, _NORMAL.size)

    def _note(self, memory: bytes) -> bytes:
        """Prepares a state that was just read for `write`; returns the memory that shows it."""
        words = self._state["state"]
        if not memory or not isinstance(words, dict) or "key" not in words:
            return b""
        numbers = words["key"].tobytes() + words["pos"].to_bytes(4, sys.byteorder)
        # As Python's integers, which NumPy takes ten times as fast as its own.
        self._state["state"] = {"key": words["key"].tolist(), "pos": words["pos"]}
        normal = memory[_MT19937_BYTES:]
        is_known = memory == numbers + normal and self._shows_normal(normal)
        return memory if is_known else b""

    def _shows_normal(self, memory: bytes) -> bool:
        has_normal, normal = _NORMAL.unpack(memory)
        known = (bool(self._state["has_gauss"]), self._state["gauss"])
        return (bool(has_normal), normal) == known or not (has_normal or known[0])


@functools.cache
def _normal_place() -> int | None:
    """Returns where a `RandomState` keeps the second of two normal draws, in bytes from its start.

    It follows the only pointer of the object into itself (legacy-distributions.h: `aug_bitgen_t`).
    None: this NumPy keeps it elsewhere.
    """
    kind = np.random.RandomState
    samples = [kind(number) for number in range(2)]
    places = set(range(0, kind.__basicsize__ - _NORMAL.size - 8, 8))
    for sample in samples:
        start = id(sample)
        memory = ctypes.string_at(start, kind.__basicsize__)
        pointers = {at: int.from_bytes(memory[at : at + 8], sys.byteorder) for at in places}
        inside = range(start, start + kind.__basicsize__)
        places = {at for at, pointer in pointers.items() if pointer in inside}
    found = [at + 8 for at in places if all(_is_normal(sample, at + 8) for sample in samples)]
    return found[0] if len(found) == 1 else None


def _is_normal(sample: np.random.RandomState, place: int) -> bool:
    """Returns whether `place` of the object is 0, and then the second draw of a pair."""

    def read() -> tuple[int, float]:
        has_normal, normal = _NORMAL.unpack(ctypes.string_at(id(sample) + place, _NORMAL.size))
        return has_normal, normal

    sample.seed(5)
    if read()[0] != 0:
        return False
    sample.standard_normal()
    state = sample.get_state(legacy=False)
    return read() == (1, state["gauss"]) and bool(state["has_gauss"])


@contextmanager
def preserved_random_state(numpy_state: NumpyState) -> Iterator[None]:
    """Restores the random states at its end, in 20 us, so that the trainer's draws stay."""
    python, numpy, own = random.getstate(), numpy_state.read(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy_state.write(numpy)
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
    """Returns what a sampler gave as bytes, the same for 3, numpy.int64(3) and tensor(3)."""
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


class Seeder:
    """Seeds the batches that this process makes.

    Args:
        num_workers: Of the script, for `get_worker_info()`; None: leave that unset, as in the
            trainer's process.
        warns: Log, once a path, what looks like a generator and cannot be seeded.
    """

    def __init__(
        self, roots: Mapping[str, object], *, num_workers: int | None, warns: bool = True
    ) -> None:
        self._dataset = roots["dataset"]
        self._num_workers = num_workers
        self._held = HeldGenerators(roots)
        self._warns = warns
        self._warned: set[str] = set()
        self._numpy = NumpyState()
        self._base_seed: int | None = None
        self._infos: dict[int, torch_worker.WorkerInfo] = {}
        self._tell()

    def make(self, words: Sequence[int], make: Callable[[], _T]) -> _T:
        """Returns what `make` returns, called again if the dataset has made a new generator."""
        self._set_info(words)
        for _ in range(_MAX_TIMES - 1):
            self._seed_batch(words)
            try:
                made = make()
            except Exception:
                # What was drawn from the new generator may be the cause.
                if not (self._held.has_changed() and self._has_new()):
                    raise
                continue
            if not (self._held.has_changed() and self._has_new()):
                return made
            # First, because a worker gives up a slot with a live view (see Slots.free).
            del made
        # It makes a new generator each time, which cannot be seeded before its first draw.
        self._seed_batch(words)
        return make()

    def place(self, words: Sequence[int], index: object, place: int) -> None:
        """Seeds for the sample at `place`; its occurrence, if not 0, follows the batch's words."""
        # Without the replica: a sample is the same on any rank.
        occurrences = words[BATCH_WORDS:]
        occurrence = occurrences[place] if occurrences else 0
        digest = seed_sample((*words[:1], *words[2:3]), index, occurrence)
        if self._held.found:
            self._held.seed(digest)

    def each(self, words: Sequence[int], indices: Iterable[object]) -> Iterator[object]:
        for place, index in enumerate(indices):
            self.place(words, index, place)
            yield index
        # The collate function's draws belong to the batch.
        self._seed_batch(words)

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Restores all random states at its end: the trainer's own draws do not move."""
        return self._held_preserved() if self._held.found else preserved_random_state(self._numpy)

    @contextlib.contextmanager
    def _held_preserved(self) -> Iterator[None]:
        states = self._held.states()
        try:
            with preserved_random_state(self._numpy):
                yield
        finally:
            put_back(states)

    def _seed_batch(self, words: Sequence[int]) -> None:
        digest = seed_batch(words[:BATCH_WORDS])
        if self._held.found:
            self._held.seed(digest)

    def _has_new(self) -> bool:
        is_new = self._held.look()
        self._tell()
        return is_new

    def _tell(self) -> None:
        for path, what in self._held.out_of_reach.items() if self._warns else ():
            if path in self._warned:
                continue
            self._warned.add(path)
            settings = from_environment()
            Log(run=settings.run_id, host=settings.host).event(
                EventName.GENERATOR_NOT_SEEDED,
                text=f"{path} ({what}) draws random numbers and cannot be seeded for each batch: "
                "batches depend on who makes them; hold a generator of random, NumPy or torch, or "
                "seed it in __getitem__ from torch.initial_seed()",
            )

    def _set_info(self, words: Sequence[int]) -> None:
        if self._num_workers is None:
            return
        base_seed, worker = words[0], words[3] % self._num_workers
        if base_seed != self._base_seed:
            self._base_seed = base_seed
            self._infos.clear()
        info = self._infos.get(worker)
        if info is None:
            info = self._infos[worker] = torch_worker.WorkerInfo(
                id=worker,
                num_workers=self._num_workers,
                seed=base_seed + worker,
                dataset=cast("torch.utils.data.Dataset[object]", self._dataset),
            )
        torch_worker._worker_info = info


def states_here(roots: Mapping[str, object]) -> bytes:
    """Returns the random states of this process, for `set_states`; empty: they cannot be packed."""
    states = {path: kind.read(value) for path, value, kind in _all(roots)}
    try:
        return pack_value(states, allow_pickle=False)
    except ShippingError:
        # Of a subclass with another kind of state.
        return b""


def set_states(states: bytes, roots: Mapping[str, object]) -> set[str]:
    given = unpack_value(states, allow_pickle=False)
    assert isinstance(given, dict)
    here = {path: (value, kind) for path, value, kind in _all(roots)}
    for path in given.keys() & here.keys():
        value, kind = here[path]
        kind.write(value, given[path])
    return given.keys() - here.keys()


def _all(roots: Mapping[str, object]) -> Iterator[tuple[str, object, GeneratorKind]]:
    for name, value in zip(("torch", "python", "numpy"), global_generators(), strict=False):
        kind = kind_of(value)
        if kind is not None:
            yield name, value, kind
    for path, value, kind, _ in HeldGenerators(roots).found:
        yield path, value, kind
