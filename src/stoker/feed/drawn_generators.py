"""Random states of single samples: only what a dataset draws from is seeded for each of them.

To seed every generator for every sample takes 15 us, and 2 to 25 us more for each that the dataset
holds; most datasets draw from one of them, or from none. So the first samples show which ones are
drawn from, and from then on only those are seeded. The others keep the state that the batch began
with, and a look at the end of the batch shows whether one has moved: then the batch is made again,
and that one is seeded too, for good. So the bytes are those of a batch in which every generator is
seeded for every sample, in each process, whatever it has seen before.

Torch's generators are always seeded: to read `initial_seed()` moves nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from stoker.feed import random_states
from stoker.feed.generators import FoundGenerator, HeldGenerators

# Samples that show what is drawn from. A sample may draw now and then only: a batch that is made
# again for it costs more than 64 samples with all generators seeded (2 ms).
_NUM_LOOKED_AT = 64


class _SeededGenerator(NamedTuple):
    """A generator by its path: seeds it from a digest of 64 bytes; reads what every draw moves."""

    path: str
    seed: Callable[[bytes], None]
    mark: Callable[[], object]
    shows_seed: bool


class DrawnGenerators:
    """Generators that the samples of a dataset draw from, as seen in this process."""

    def __init__(self, held: HeldGenerators) -> None:
        self._held = held
        self._drawn: set[str] = set()
        self._num_left = _NUM_LOOKED_AT
        self._all: list[_SeededGenerator] = []
        self._each: list[Callable[[bytes], None]] = []
        self._others: list[_SeededGenerator] = []
        self._marks: list[object] = []
        self.look()

    def look(self) -> None:
        """Takes the held generators as they are found now; new ones are seeded for each sample."""
        known_paths = {generator.path for generator in self._all}
        self._all = [
            _SeededGenerator("torch", random_states.seed_torch, _nothing, shows_seed=True),
            _SeededGenerator(
                "random", random_states.seed_python, random_states.mark_of_python, shows_seed=False
            ),
            _SeededGenerator(
                "numpy", random_states.seed_numpy, random_states.mark_of_numpy, shows_seed=False
            ),
            *map(_held_generator, self._held.found),
        ]
        if known_paths:
            self._drawn |= {generator.path for generator in self._all} - known_paths
        self._divide()

    def begin(self) -> None:
        """Begins a batch, or a part of one, right after all generators are seeded for it."""
        self._marks = [generator.mark() for generator in self._others]

    def seed(self, digest: bytes) -> None:
        """Seeds for a sample, or for the collate function."""
        if self._num_left:
            self._look_at_last()
        for seed in self._each:
            seed(digest)
        if self._num_left:
            self.begin()

    def has_missed(self) -> bool:
        """Returns, at the end of a batch, whether one that was not seeded for each has moved."""
        moved = self._moved()
        if self._num_left:
            # All were seeded for each sample.
            self._drawn |= moved
            return False
        if not moved:
            return False
        self._drawn |= moved
        self._divide()
        return True

    def _look_at_last(self) -> None:
        self._drawn |= self._moved()
        self._num_left -= 1
        if not self._num_left:
            self._divide()
            self.begin()

    def _divide(self) -> None:
        movable = [generator for generator in self._all if not generator.shows_seed]
        if self._num_left:
            self._each = [generator.seed for generator in self._all]
            self._others = movable
            return
        self._others = [generator for generator in movable if generator.path not in self._drawn]
        others = {generator.path for generator in self._others}
        self._each = [generator.seed for generator in self._all if generator.path not in others]

    def _moved(self) -> set[str]:
        marks = zip(self._others, self._marks, strict=True)
        return {generator.path for generator, mark in marks if not _is_same(generator.mark(), mark)}


def _held_generator(found: FoundGenerator) -> _SeededGenerator:
    path, value, kind, name = found

    def seed(digest: bytes) -> None:
        digest_of_name = name.copy()
        digest_of_name.update(digest)
        kind.seed(value, digest_of_name.digest())

    shows_seed = isinstance(value, torch.Generator)
    return _SeededGenerator(path, seed, lambda: kind.read(value), shows_seed)


def _nothing() -> None:
    return None


def _is_same(state: object, other: object) -> bool:
    if isinstance(state, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return all(_is_same(value, other.get(key)) for key, value in state.items())
    return bool(state == other)
