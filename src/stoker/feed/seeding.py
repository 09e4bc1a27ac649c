"""Seeding of the random states that a dataset may draw from, for each batch, stretch or sample.

Before a batch (or a sample, or a stretch of them) is made, all that it may draw from is set from
(base seed, replica, epoch, number), hashed by BLAKE2b, which no version of NumPy can change: the
three global random states (Python's `random`, NumPy's and torch's default CPU generator); the
generators that the dataset and the collate function hold; and `get_worker_info()`: for number n
worker n modulo the script's `num_workers`, as with torch. So a dataset that makes a generator from
`get_worker_info().seed` has the same one wherever it runs.

The way of these words: `sampler` (base seed), `iterators.numbered`, `protocol.Make.seed_words`, and
`workers/worker.py`, which has a `Seeder` set the states.
"""

import contextlib
import functools
import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Literal, TypeVar, cast

import msgspec
import numpy as np
import torch
from torch.utils.data import StackDataset, Subset
from torch.utils.data._utils import worker as torch_worker

from stoker.environment import from_environment
from stoker.errors import ShippingError
from stoker.feed.drawn_generators import DrawnGenerators, IdleGenerators
from stoker.feed.generators import (
    GeneratorKind,
    HeldGenerators,
    kind_of,
    put_back,
)
from stoker.feed.kept_values import KeptValues
from stoker.feed.module_generators import global_generators
from stoker.feed.random_states import PreservedRandomStates, seed_states
from stoker.feed.stretches import stretch_samples
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.logs import EventName, Log
from stoker.records.workload import SEEDS_EACH

# Base seed, replica, epoch, number of the batch.
BATCH_WORDS = 4

_MASK = (1 << 64) - 1
# Copied for each batch, which takes a third of the time of a new one.
_EMPTY_DIGEST = hashlib.blake2b(digest_size=64, person=b"stoker batch")
_OF_PLACES = hashlib.blake2b(digest_size=64, person=b"stoker place")
_PLACE = struct.Struct("<Q")

# What the states of a sample follow from: its batch, and what was drawn in it before; its batch and
# its stretch there, and what was drawn in that before; its batch and its place there; its index;
# the worker, as with torch. States of earlier versions have `batch` or `place`.
Seeding = Literal["batch", "stretch", "place", "sample", "torch"]
# In place of a sample's place: for the collate function.
_COLLATE = _MASK
# Beside the paths of generators, which are names.
# As versions wrote it that kept whole numbers alone.
_VALUES = "counts of the dataset"
_GLOBALS = ("torch", "python", "numpy")
# How often a batch is made in which new generators appear, to seed them.
_MAX_TIMES = 4
_T = TypeVar("_T")


class Numbered(msgspec.Struct):
    """The sampler's index, with the words that its batch is seeded from."""

    seed_words: tuple[int, ...]
    index: object


def seed_batch(seed_words: Sequence[int]) -> bytes:
    """Sets the random states from `words` (0 to 2**64 - 1), in 15 us; returns their digest."""
    digest = _digest(seed_words)
    seed_states(digest)
    return digest


def seed_sample(seed_words: Sequence[int], index: object, occurrence: int) -> bytes:
    """Sets the three random states for one sample; returns their digest.

    Args:
        seed_words: Base seed, epoch.
        occurrence: How often the epoch had this index before.
    """
    digest = hashlib.blake2b(_digest(seed_words), digest_size=64, person=b"stoker sample")
    digest.update(index_bytes(index))
    digest.update(struct.pack("<Q", occurrence))
    of_sample = digest.digest()
    seed_states(of_sample)
    return of_sample


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

    def __len__(self) -> int:
        return len(cast("Sized", self._dataset))


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
            counts: tuple[int, ...] = (self._count(index),)
        else:
            counts = tuple(self._count(one) for one in index)
        return counts if any(counts) else ()

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


@functools.cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def _digest(seed_words: Sequence[int]) -> bytes:
    digest = _EMPTY_DIGEST.copy()
    digest.update(_words(len(seed_words)).pack(*[word & _MASK for word in seed_words]))
    return digest.digest()


def _digest_of_place(seed_words: Sequence[int], place: int) -> bytes:
    digest = _OF_PLACES.copy()
    digest.update(_digest(seed_words[:BATCH_WORDS]))
    digest.update(_PLACE.pack(place))
    return digest.digest()


def _digest_of_attempt(digest_of_place: bytes, attempt: int) -> bytes:
    digest = _EMPTY_DIGEST.copy()
    digest.update(digest_of_place)
    digest.update(_PLACE.pack(attempt))
    return digest.digest()


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


class _HeldPreserved(PreservedRandomStates):
    """Restores those of held generators as well."""

    __slots__ = ("_held", "_idle", "_of_held", "_of_idle")

    def __init__(self, held: HeldGenerators, idle: IdleGenerators) -> None:
        self._held = held
        self._idle = idle

    def __enter__(self) -> None:
        self._of_held = self._held.states()
        self._of_idle = self._idle.states()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            put_back(self._of_held)
            for write, state in self._of_idle:
                write(state)


class Seeder:
    """Seeds the batches that this process makes.

    Args:
        num_workers: Of the script, for `get_worker_info()`; None: leave that unset, as in the
            trainer's process.
        warns: Log, once a path, what looks like a generator and cannot be seeded.

    Attributes:
        seeds_from: Place of the next sample that is seeded: those before it continue a stretch.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        num_workers: int | None,
        seeding: Seeding = "batch",
        warns: bool = True,
    ) -> None:
        self._dataset = roots["dataset"]
        self._num_workers = num_workers
        self._held = HeldGenerators(roots, with_modules=True)
        self._idle = IdleGenerators(self._held)
        self._seeding = seeding
        by_place = seeding in ("stretch", "place")
        self._drawn = DrawnGenerators(self._held) if by_place else None
        self._of_places = _OF_PLACES
        self.seeds_from = 0
        self._stretch_samples = 1
        # Of the batch that is made.
        self._seed_words: Sequence[int] = ()
        self._warns = warns
        self._warned: set[str] = set()
        self._base_seed: int | None = None
        self._infos: dict[int, torch_worker.WorkerInfo] = {}
        self._tell()

    @property
    def seeds_each(self) -> bool:
        """Whether samples or stretches are seeded, where the dataset makes samples one by one."""
        return self._seeding in SEEDS_EACH

    @property
    def seeds_lone_samples(self) -> bool:
        """Whether a sample that is a batch of its own is seeded as a sample, not as the batch."""
        return self._seeding == "sample"

    def make(self, seed_words: Sequence[int], make: Callable[[], _T]) -> _T:
        """Returns what `make` returns, called again where a generator was not seeded for it.

        The dataset has made it then, or has drawn from it for the first time.
        """
        self._set_info(seed_words)
        self._seed_words = seed_words
        self._held.begin_batch()
        for _ in range(_MAX_TIMES - 1):
            self._idle.begin()
            self._seed_batch(seed_words)
            try:
                batch = make()
            except Exception:
                # What was drawn from the generator may be the cause.
                if not self._has_missed():
                    raise
                continue
            if not self._has_missed():
                return batch
            # First, because a worker gives up a slot with a live view (see Slots.reuse).
            del batch
        # It makes a new generator each time, which cannot be seeded before its first draw.
        self._seed_batch(seed_words)
        return make()

    def begin_samples(self, places: range, *, size: int) -> None:
        """Begins samples of the batch that is made, which are made in this order.

        Args:
            places: Of a whole number of stretches, or up to the batch's end.
            size: Samples of the batch.
        """
        self.seeds_from = places.start
        self._stretch_samples = stretch_samples(size) if self._seeding == "stretch" else 1
        if self._drawn is not None:
            self._drawn.expect(places[:: self._stretch_samples])

    def end_stretch(self) -> None:
        """Has the next sample seeded by its place: the one before was not made.

        So what it draws follows from which samples are bad, and not from how far those came.
        """
        self.seeds_from = 0

    def place(self, seed_words: Sequence[int], index: object, place: int) -> bytes:
        """Seeds for a sample, and the rest of its stretch; returns its digest.

        Args:
            seed_words: Of the batch; the occurrence of the index follows them, if not 0.
            index: Of the sample.
            place: In the batch.
        """
        self.seeds_from = place + self._stretch_samples - place % self._stretch_samples
        if self._held.followed:
            self._follow()
        if self._drawn is not None:
            return self._drawn.seed_place(place, self._digest_at)
        # Without the replica: a sample is the same on any rank.
        occurrences = seed_words[BATCH_WORDS:]
        occurrence = occurrences[place] if occurrences else 0
        digest = seed_sample((*seed_words[:1], *seed_words[2:3]), index, occurrence)
        if self._held.found:
            self._held.seed(digest)
        return digest

    def place_again(self, index: object, place: int, *, attempt: int = 0) -> bytes:
        """Seeds for a sample of the batch that is made, whatever was drawn since its begin.

        Returns its digest: it follows from the batch's words and the place, also where samples are
        not seeded one by one; with `sample` seeding from the index.

        Args:
            attempt: How many were made for that place before: what those drew may be why they are
                bad.
        """
        if self._seeding == "sample" or self._drawn is not None:
            digest = self.place(self._seed_words, index, place)
            # What is made now is no sample of the stretch.
            self.end_stretch()
        else:
            digest = self._seed_by(_digest_of_place(self._seed_words, place))
        # Another index has other states with `sample` seeding.
        if attempt and self._seeding != "sample":
            digest = _digest_of_attempt(digest, attempt)
            self._seed_place_by(digest)
        return digest

    def _seed_place_by(self, digest: bytes) -> None:
        if self._drawn is not None:
            self._drawn.seed(digest)
        else:
            self._seed_by(digest)

    def collation_again(self) -> None:
        """Seeds for the collate function of the batch that is made."""
        if self.seeds_each:
            self.collation(self._seed_words)
        else:
            self._seed_by(_digest_of_place(self._seed_words, _COLLATE))

    def collation(self, seed_words: Sequence[int]) -> None:
        """Seeds for the collate function of a batch whose samples were seeded one by one."""
        if self._drawn is not None:
            self._follow()
            self._drawn.seed(self._digest_at(_COLLATE))
        else:
            self._seed_batch(seed_words)

    def each(self, seed_words: Sequence[int], indices: Iterable[object]) -> Iterator[object]:
        """Yields the indices of a batch, whose samples are made in between."""
        listed = list(indices)
        self.begin_samples(range(len(listed)), size=len(listed))
        for place, index in enumerate(listed):
            if place >= self.seeds_from:
                self.place(seed_words, index, place)
            yield index
        self.collation(seed_words)

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Restores all random states at its end: the trainer's own draws do not move."""
        has_others = self._held.found or self._held.idle
        if not has_others:
            return PreservedRandomStates()
        return _HeldPreserved(self._held, self._idle)

    def _follow(self) -> None:
        if self._held.followed and self._held.follow() and self._drawn is not None:
            self._drawn.look()

    def _seed_batch(self, seed_words: Sequence[int]) -> None:
        self._follow()
        digest = seed_batch(seed_words[:BATCH_WORDS])
        if self._held.found:
            self._held.seed(digest)
        if self._drawn is not None:
            self._of_places = _OF_PLACES.copy()
            self._of_places.update(digest)
            self._drawn.begin()

    def _seed_by(self, digest: bytes) -> bytes:
        self._follow()
        seed_states(digest)
        if self._held.found:
            self._held.seed(digest)
        return digest

    def _digest_at(self, place: int) -> bytes:
        digest = self._of_places.copy()
        digest.update(_PLACE.pack(place))
        return digest.digest()

    def _has_missed(self) -> bool:
        has_new = self._idle.have_moved()
        has_new = (self._held.has_changed() and self._has_new()) or has_new
        has_missed = self._drawn is not None and self._drawn.has_missed()
        if has_new and self._drawn is not None:
            self._drawn.look()
        return has_new or has_missed

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
                "seed it in __getitem__ with torch.randint",
            )

    def _set_info(self, seed_words: Sequence[int]) -> None:
        if self._num_workers is None:
            return
        base_seed, worker = seed_words[0], seed_words[3] % self._num_workers
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


def states_here(roots: Mapping[str, object], *, values: KeptValues | None = None) -> bytes:
    """Returns the random states of this process, for `set_states`; empty: they cannot be packed.

    Args:
        roots: What may hold random generators.
        values: What the dataset keeps from epoch to epoch, for `values_in`.
    """
    states = {path: kind.read(value) for path, value, kind in _all(roots)}
    if values:
        states[_VALUES] = dict(values)
    try:
        return pack_value(states, allow_pickle=False)
    except ShippingError:
        # Of a subclass with another kind of state.
        return states_here(roots) if values else b""


def set_states(states: bytes, roots: Mapping[str, object]) -> set[str]:
    given = unpack_value(states, allow_pickle=False)
    assert isinstance(given, dict)
    given.pop(_VALUES, None)
    here = {path: (value, kind) for path, value, kind in _all(roots)}
    for path in given.keys() & here.keys():
        value, kind = here[path]
        kind.write(value, given[path])
    return given.keys() - here.keys()


def of_dataset_alone(states: bytes) -> bytes:
    """Returns states without the three global ones, for a process that torch's way seeds."""
    given = unpack_value(states, allow_pickle=False)
    assert isinstance(given, dict)
    kept = {path: state for path, state in given.items() if path not in _GLOBALS}
    return pack_value(kept, allow_pickle=False) if kept else b""


def values_in(states: bytes) -> KeptValues:
    """Returns what a dataset kept, from what `states_here` returned."""
    if not states:
        return {}
    given = unpack_value(states, allow_pickle=False)
    assert isinstance(given, dict)
    values: KeptValues = given.get(_VALUES, {})
    return values


def _all(roots: Mapping[str, object]) -> Iterator[tuple[str, object, GeneratorKind]]:
    for name, value in zip(_GLOBALS, global_generators(), strict=False):
        kind = kind_of(value)
        if kind is not None:
            yield name, value, kind
    for path, value, kind, _ in HeldGenerators(roots).found:
        yield path, value, kind
