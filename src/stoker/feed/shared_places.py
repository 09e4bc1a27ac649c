"""Places of a dataset that have one and the same list, dictionary or array.

A state has values by their places: `self.order` and `self.current`. Where both are one list, what
is written to one is in the other; in another process two equal lists would part. So a state also
says which places have one object (`kept_values`). A place is a path and, within a value, the keys
or numbers that lead on: `("dataset.seen", "train", 0)`.
"""

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from stoker.feed.plain_values import copied

# Containers that one look visits.
_MAX_CONTAINERS = 10_000
# What can be changed in place. In a tuple nothing can be put.
_CHANGEABLE = (list, deque, dict, set, bytearray, np.ndarray, torch.Tensor)

_Step = str | int
_Steps = Sequence[_Step]
# Each of two places or more. As lists, which states can hold.
SharedPlaces = list[list[list[_Step]]]


def shared_places(values: Iterable[tuple[str, object]]) -> SharedPlaces | None:
    """Returns the places that have one object, for each object that has several.

    None: there are too many containers to look at.

    Args:
        values: By path; those alone are looked into.
    """
    places = defaultdict[int, list[list[_Step]]](list)
    left: deque[tuple[list[_Step], object]] = deque()
    for path, value in values:
        if isinstance(value, _CHANGEABLE):
            left.append(([path], value))
    # What lists its values anew would have another one at the same address.
    visited: list[object] = []
    while left:
        place, value = left.popleft()
        visited.append(value)
        of_value = places[id(value)]
        of_value.append(place)
        if len(of_value) > 1:
            # Its items are known by its first place.
            continue
        left.extend(([*place, step], item) for step, item in _changeable_items(value))
        if len(places) + len(left) > _MAX_CONTAINERS:
            return None
    return [of_value for of_value in places.values() if len(of_value) > 1]


def _changeable_items(value: object) -> Iterator[tuple[_Step, object]]:
    """Returns the items of a value that can be changed in place, no more than can be looked at."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict) and _has_changeable(value.values()):
        items = ((key, item) for key, item in value.items() if type(key) in (str, int))
    elif isinstance(value, list | deque) and _has_changeable(value):
        items = enumerate(value)
    changeable = (pair for pair in items if isinstance(pair[1], _CHANGEABLE))
    return cast("Iterator[tuple[_Step, object]]", itertools.islice(changeable, _MAX_CONTAINERS + 1))


def _has_changeable(items: Iterable[object]) -> bool:
    # Of a million items in 20 ms: a list of texts, or of tuples, is not gone through one by one.
    return any(issubclass(kind, _CHANGEABLE) for kind in set(map(type, items)))


@dataclass(frozen=True, slots=True)
class PlacedValues:
    """A dataset's values by path, and how the one of a path is set."""

    values: Mapping[str, object]
    put: Callable[[str, object], None]

    def at(self, place: _Steps) -> object:
        """Returns what is at a place; None: there is none."""
        path, *steps = place
        value = self.values.get(str(path))
        for step in steps:
            try:
                value = cast("dict[_Step, object]", value)[step]
            except (TypeError, LookupError):
                return None
        return value

    def put_at(self, place: _Steps, value: object) -> None:
        """Sets what is at a place, if there is one."""
        *container_place, step = place
        if not container_place:
            self.put(str(step), value)
            return
        container = self.at(container_place)
        if isinstance(container, dict):
            dict.__setitem__(container, step, value)
        elif isinstance(container, list | deque):
            with contextlib.suppress(IndexError):
                container[cast("int", step)] = value


def separate(groups: SharedPlaces, placed: PlacedValues) -> None:
    """Gives each place but the first of a group a copy of its own.

    Args:
        groups: As of `shared_places`.
        placed: Of the dataset.
    """
    for first, *others in groups:
        value = placed.at(first)
        for place in others:
            placed.put_at(place, copied(value))


def join(groups: SharedPlaces, placed: PlacedValues) -> None:
    """Has all places of a group have the object of the first one; arguments as of `separate`."""
    for first, *others in groups:
        value = placed.at(first)
        for place in others:
            if value is not None and placed.at(place) is not value:
                placed.put_at(place, value)
