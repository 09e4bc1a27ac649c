"""Places of a dataset that have one and the same list, dictionary or array.

A state has values by their places: `self.order` and `self.current`. Where both are one list, what
is written to one is in the other; in another process two equal lists would part. So a state also
says which places have one object (`kept_values`). A place is a path and, within a value, the keys
or numbers that lead on: `("dataset.seen", "train", 0)`.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from stoker.feed.plain_values import copied

# Containers that one look visits.
_MAX_CONTAINERS = 10_000
# What can be changed in place. In a tuple nothing can be put.
_CHANGEABLE = (list, deque, dict, set, bytearray, np.ndarray, torch.Tensor)
# Items of such types have no places of their own.
_ATOMS = {int, float, bool, str, bytes, complex, type(None)}

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
    places: dict[int, list[list[_Step]]] = {}
    left = deque((cast("list[_Step]", [path]), value) for path, value in values)
    # What lists its values anew would have another one at the same address.
    visited: list[object] = []
    while left:
        place, value = left.popleft()
        if not isinstance(value, _CHANGEABLE):
            continue
        visited.append(value)
        of_value = places.setdefault(id(value), [])
        of_value.append(place)
        if len(of_value) > 1:
            # Its items are known by its first place.
            continue
        if len(places) > _MAX_CONTAINERS:
            return None
        left.extend(([*place, step], item) for step, item in _items(value))
    return [of_value for of_value in places.values() if len(of_value) > 1]


def _items(value: object) -> Iterator[tuple[_Step, object]]:
    if isinstance(value, dict):
        if not _are_atoms(value.values()):
            yield from ((key, item) for key, item in value.items() if type(key) in (str, int))
    elif isinstance(value, list | deque) and not _are_atoms(value):
        yield from enumerate(value)


def _are_atoms(items: Iterable[object]) -> bool:
    return _ATOMS.issuperset(map(type, items))


def separate(
    groups: SharedPlaces, values: Mapping[str, object], put: Callable[[str, object], None]
) -> None:
    """Gives each place but the first of a group a copy of its own.

    Args:
        groups: As of `shared_places`.
        values: By path.
        put: Sets the value of a path.
    """
    for first, *others in groups:
        value = _value_at(first, values)
        for place in others:
            _put_at(place, copied(value), values, put)


def join(
    groups: SharedPlaces, values: Mapping[str, object], put: Callable[[str, object], None]
) -> None:
    """Has all places of a group have the object of the first one; arguments as of `separate`."""
    for first, *others in groups:
        value = _value_at(first, values)
        for place in others:
            if value is not None and _value_at(place, values) is not value:
                _put_at(place, value, values, put)


def _value_at(place: _Steps, values: Mapping[str, object]) -> object:
    """Returns what is at a place; None: there is none."""
    path, *steps = place
    value = values.get(str(path))
    for step in steps:
        try:
            value = cast("dict[_Step, object]", value)[step]
        except (TypeError, LookupError):
            return None
    return value


def _put_at(
    place: _Steps,
    value: object,
    values: Mapping[str, object],
    put: Callable[[str, object], None],
) -> None:
    if len(place) == 1:
        put(str(place[0]), value)
        return
    container = _value_at(place[:-1], values)
    if isinstance(container, dict):
        dict.__setitem__(container, place[-1], value)
    elif isinstance(container, list | deque):
        with contextlib.suppress(IndexError):
            container[cast("int", place[-1])] = value
