"""Random states of samples: only what a dataset draws from is seeded for each stretch of them.

To seed every generator for every stretch takes 15 us, and 2 to 25 us more for each that the dataset
holds; most datasets draw from one of them, or from none. So the first samples show which ones are
drawn from, and from then on only those are seeded. The others keep the state that the batch began
with, and a look at the end of the batch shows whether one has moved: then the batch is made again,
and that one is seeded too, for good. So the bytes are those of a batch in which every generator is
seeded for every stretch, in each process, whatever it has seen before.

Torch's generators are always seeded: to read `initial_seed()` moves nothing.

What the stretches of a batch are seeded from is computed for many of them in a row. Between two
samples nothing of it is in the processor's caches, and the same takes two to three times as long.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from stoker.feed import random_states
from stoker.feed.generators import FoundGenerator, HeldGenerators

# Seeds that are computed in a row: a state of NumPy takes 2.5 KB.
_NUM_AHEAD = 64
# Seeds that show what is drawn from. A sample may draw now and then only: a batch that is made
# again for it costs more than 64 stretches with all generators seeded (2 ms).
_NUM_LOOKED_AT = 64


class _SeededGenerator(NamedTuple):
    """A generator that samples may draw from.

    Attributes:
        seeded: Returns, for each of some digests of 64 bytes, a function that sets its state.
        mark: Reads what every draw moves.
        shows_seed: Its seed can be read without a draw.
    """

    path: str
    seeded: Callable[[Sequence[bytes]], Sequence[Callable[[], object]]]
    mark: Callable[[], object]
    shows_seed: bool


class _PlaceSeed(NamedTuple):
    """What a place is seeded from: its digest, and functions that set the generators."""

    digest: bytes
    set_states: tuple[Callable[[], object], ...]


class DrawnGenerators:
    """Generators that the samples of a dataset draw from, as seen in this process."""

    def __init__(self, held: HeldGenerators) -> None:
        self._held = held
        self._drawn: set[str] = set()
        self._num_left = _NUM_LOOKED_AT
        self._all: list[_SeededGenerator] = []
        self._each: list[_SeededGenerator] = []
        self._others: list[_SeededGenerator] = []
        self._marks: list[object] = []
        # Of the batch that is made: the places that are seeded, and the seeds that are computed.
        self._expected = range(0)
        self._ahead: dict[int, _PlaceSeed] = {}
        self.look()

    def look(self) -> None:
        """Takes the held generators as they are found now; new ones are seeded for each sample."""
        # Where one was replaced, another one may be there by the next stretch.
        self._expected = range(0)
        known_paths = {generator.path for generator in self._all}
        self._all = [
            _SeededGenerator("torch", random_states.torch_seeded, _nothing, shows_seed=True),
            _SeededGenerator(
                "random",
                random_states.python_seeded,
                random_states.mark_of_python,
                shows_seed=False,
            ),
            _SeededGenerator(
                "numpy", random_states.numpy_seeded, random_states.mark_of_numpy, shows_seed=False
            ),
            *map(_held_generator, self._held.found),
        ]
        if known_paths:
            self._drawn |= {generator.path for generator in self._all} - known_paths
        self._divide()

    def begin(self) -> None:
        """Begins a batch, or a part of one, right after all generators are seeded for it."""
        self._expected = range(0)
        self._ahead.clear()
        self._mark()

    def expect(self, places: range) -> None:
        """Says which places of the batch are seeded next, in this order; others may come too."""
        self._expected = places

    def seed_place(self, place: int, digest_of: Callable[[int], bytes]) -> bytes:
        """Seeds for the sample at a place of the batch, and returns its digest.

        Args:
            digest_of: Returns the digest for a place of this batch.
        """
        if self._num_left:
            digest = digest_of(place)
            self.seed(digest)
            return digest
        seed = self._ahead.get(place) or self._computed(place, digest_of)
        for set_state in seed.set_states:
            set_state()
        return seed.digest

    def seed(self, digest: bytes) -> None:
        """Seeds for a sample, or for the collate function."""
        if self._num_left:
            self._look_at_last()
        (seed,) = self._seeds([digest])
        for set_state in seed.set_states:
            set_state()
        if self._num_left:
            self._mark()

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
            self._mark()

    def _mark(self) -> None:
        self._marks = [generator.mark() for generator in self._others]

    def _computed(self, place: int, digest_of: Callable[[int], bytes]) -> _PlaceSeed:
        """Returns the seed of a place, and keeps those of the places behind it."""
        if place not in self._expected:
            # Behind a sample that is bad.
            return self._seeds([digest_of(place)])[0]
        first = self._expected.index(place)
        places = self._expected[first : first + _NUM_AHEAD]
        seeds = self._seeds([digest_of(at) for at in places])
        self._ahead = dict(zip(places, seeds, strict=True))
        return self._ahead[place]

    def _seeds(self, digests: Sequence[bytes]) -> list[_PlaceSeed]:
        """Returns the seed that follows from each digest."""
        by_generator = [generator.seeded(digests) for generator in self._each]
        by_digest = zip(*by_generator, strict=True)
        return list(map(_PlaceSeed, digests, by_digest))

    def _divide(self) -> None:
        self._ahead.clear()
        movable = [generator for generator in self._all if not generator.shows_seed]
        if self._num_left:
            self._each = self._all
            self._others = movable
            return
        self._others = [generator for generator in movable if generator.path not in self._drawn]
        others = {generator.path for generator in self._others}
        self._each = [generator for generator in self._all if generator.path not in others]

    def _moved(self) -> set[str]:
        marks = zip(self._others, self._marks, strict=True)
        return {generator.path for generator, mark in marks if not _is_same(generator.mark(), mark)}


class IdleGenerators:
    """Generators of modules that samples have not drawn from: they keep the states they have."""

    def __init__(self, held: HeldGenerators) -> None:
        self._held = held
        self._known: list[FoundGenerator] = []
        self._functions: list[random_states.StateFunctions] = []
        self._states: list[object] = []

    def states(self) -> list[tuple[Callable[[object], object], object]]:
        """Returns, for each of them, the function that writes its state, and its state now."""
        self._take()
        return [(of_one.write, of_one.read()) for of_one in self._functions]

    def begin(self) -> None:
        """Called before a batch is made, or made again."""
        self._take()
        self._states = [of_one.read() for of_one in self._functions]

    def have_moved(self) -> bool:
        """Returns whether the batch has drawn from one that was not seeded; from now on it is."""
        states = zip(self._known, self._functions, self._states, strict=True)
        moved = [one for one, of_one, state in states if not _is_same(of_one.read(), state)]
        if moved:
            self._held.draw_from(moved)
        return bool(moved)

    def _take(self) -> None:
        if self._known is not self._held.idle:
            self._known = self._held.idle
            values = [generator.value for generator in self._known]
            self._functions = list(map(random_states.state_functions, values))


def _held_generator(found: FoundGenerator) -> _SeededGenerator:
    path, value, kind, name = found

    def seeded(digests: Sequence[bytes]) -> list[Callable[[], object]]:
        return [functools.partial(kind.seed, value, of_name(digest)) for digest in digests]

    def of_name(digest: bytes) -> bytes:
        digest_of_name = name.copy()
        digest_of_name.update(digest)
        return digest_of_name.digest()

    shows_seed = isinstance(value, torch.Generator)
    return _SeededGenerator(path, seeded, lambda: kind.read(value), shows_seed)


def _nothing() -> None:
    return None


def _is_same(state: object, other: object) -> bool:
    if isinstance(state, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(state, other)
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return all(_is_same(value, other.get(key)) for key, value in state.items())
    return bool(state == other)
