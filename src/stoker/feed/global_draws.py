"""Samplers that draw index by index from the process's random generators.

The feed asks a sampler as far ahead as its hosts need. How far depends on time, so what such a
sampler and the loop draw in turns would, too. A sampler that is seen to do so is asked exactly as
far as torch's loader asks it: then order, and what the loop draws, are torch's. Others that draw
their order at once, before the first index, are not held back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import cast

import torch

from stoker.feed.random_states import mark_of_numpy, mark_of_python

# The first index may come behind the whole order: the second one shows more.
_NUM_SEEN = 2


def marks() -> dict[str, object]:
    """Returns what each draw from a generator of the process changes, by its name."""
    torchs = bytes(torch.get_rng_state().numpy())
    return {"random": mark_of_python(), "numpy.random": mark_of_numpy(), "torch": torchs}


def changed_marks(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    """Returns the names of the generators that were drawn from between two looks."""
    return {name for name, mark in now.items() if before[name] != mark}


def is_torchs(sampler: object) -> bool:
    """Returns whether an index sampler, and the one that it takes batches from, are torch's."""
    return all(type(part).__module__.startswith("torch.") for part in both_samplers(sampler))


def both_samplers(sampler: object) -> tuple[object, object]:
    """Returns an index sampler, and the one that it takes batches from, or itself."""
    return sampler, getattr(sampler, "sampler", sampler)


class GlobalDraws:
    """A loader's index sampler, and whether it draws from the process's generators as it goes.

    Attributes:
        are_seen: It does, as of an index that was not its iterator's first.
        num_ahead: Batches that torch's loader asks a sampler ahead of those delivered.
    """

    def __init__(self, sampler: Iterable[object], *, num_ahead: int, are_seen: bool) -> None:
        self.are_seen = are_seen
        self.num_ahead = num_ahead
        self._sampler = sampler
        self._num_seen = 0

    def __len__(self) -> int:
        return len(cast("Sized", self._sampler))

    def __iter__(self) -> Iterator[object]:
        self._num_seen = 0
        return _SeenDraws(self, iter(self._sampler))

    def are_in_step(self) -> bool:
        """Returns whether the sampler is asked no further ahead than by torch.

        So it is as long as it is not known how it draws.
        """
        return self.are_seen or self._num_seen < _NUM_SEEN

    def see(self, before: Mapping[str, object]) -> None:
        """Notes an index that was drawn; what comes first may be drawn for all of them."""
        self._num_seen += 1
        if self._num_seen > 1 and changed_marks(before, marks()):
            self.are_seen = True


class _SeenDraws:
    """Iterator over `GlobalDraws`; like the sampler's own it may continue after an error."""

    def __init__(self, draws: GlobalDraws, iterator: Iterator[object]) -> None:
        self._draws = draws
        self._iterator = iterator

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        before = marks()
        index = next(self._iterator)
        self._draws.see(before)
        return index
