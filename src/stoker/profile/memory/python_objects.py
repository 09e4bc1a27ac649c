"""Python objects that a dataset holds.

An access to a Python object changes its reference count, so that a forked worker gets a copy of the
page that it lies on. Arrays and tensors have one object for all their values.
"""

import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from stoker.profile.loader_phases import attributes_of, objects_below
from stoker.records import HeldObjects

# As long as the search may take.
_MAX_SECONDS = 0.5
_SAMPLED = 256
# Objects of one element that are counted, and how deep.
_MAX_PARTS = 64
_MAX_DEPTH = 4
# Smaller arrays lie on pages of other objects, which are copied with them.
_SMALL_ARRAY_BYTES = 4096
# Fewer elements are no list of samples.
_LEAST_COUNT = 1000
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# One for all, whoever holds it: None, types, functions of C and modules.
_SHARED = (type(None), bool, type, type(len), type(sys))
_SMALL_INT = 256


def held_objects(
    dataset: object, *, clock: Callable[[], float] = time.monotonic
) -> tuple[HeldObjects, ...]:
    """Returns the collections of Python objects in a dataset's attributes, the largest first.

    Blocks for half a second at most; sizes are estimates from 256 elements of each collection.
    """
    until = clock() + _MAX_SECONDS
    by_name: dict[str, HeldObjects] = {}
    for path, holder, elements in collections_of(dataset):
        if clock() >= until:
            break
        held = _held(path, holder, elements)
        if held is not None:
            by_name.setdefault(path, held)
    return tuple(sorted(by_name.values(), key=lambda held: -held.num_bytes))


def collections_of(dataset: object) -> Iterator[tuple[str, object, object]]:
    """Yields name, holder and elements of each collection in a dataset's attributes."""
    for owner in objects_below(dataset, leads_on=may_hold, seen=set()):
        for name, value in attributes_of(owner).items():
            for path, elements in _collections(f"{type(owner).__name__}.{name}", value):
                yield path, value, elements


def may_hold(name: str, value: object) -> bool:
    return isinstance(value, Dataset) or any(
        word in name for word in ("dataset", "cache", "transform", "store", "reader", "source")
    )


def _collections(name: str, value: object) -> Iterator[tuple[str, Sequence[object] | object]]:
    """Yields what of an attribute has many Python objects: of a table, each such column."""
    if isinstance(value, _CONTAINERS):
        yield name, value
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield name, value.reshape(-1)
    elif type(value).__module__.partition(".")[0] == "pandas":
        yield from _columns(name, value)


def _columns(name: str, table: object) -> Iterator[tuple[str, object]]:
    """Yields the object columns of a table or series of pandas, without a copy."""
    if hasattr(table, "columns") and hasattr(table, "items"):
        for column, series in table.items():
            yield from _columns(f"{name}[{column!r}]", series)
        return
    array = getattr(table, "array", None)
    values = getattr(array, "_ndarray", None)
    if isinstance(values, np.ndarray) and values.dtype == object:
        yield name, values


def _held(name: str, holder: object, collection: object) -> HeldObjects | None:
    count = len(cast("Sequence[object]", collection))
    if count < _LEAST_COUNT:
        return None
    elements = some_of(collection)
    sizes = [_deep_bytes(element) for element in elements]
    if not any(sizes):
        return None
    list_bytes = sys.getsizeof(collection)
    if isinstance(collection, np.ndarray):
        list_bytes = int(collection.nbytes)
    kinds = [_kind_of(collection, element) for element in elements]
    # The elements looked at stand for all; shared ones count nothing.
    return HeldObjects(
        name=name,
        container=type(holder).__name__,
        element=max(set(kinds), key=kinds.count),
        count=count,
        num_bytes=int(list_bytes + count * sum(sizes) / len(sizes)),
    )


def some_of(collection: object) -> list[object]:
    """Returns some elements, of a list from all over it; of a mapping pairs of key and value."""
    if isinstance(collection, list | tuple | np.ndarray):
        every = max(1, len(collection) // _SAMPLED)
        return list(collection[::every][:_SAMPLED])
    if isinstance(collection, dict):
        return list(itertools.islice(collection.items(), _SAMPLED))
    return list(itertools.islice(cast("Sequence[object]", collection), _SAMPLED))


def _kind_of(collection: object, element: object) -> str:
    if isinstance(collection, dict):
        element = cast("tuple[object, object]", element)[1]
    return type(element).__name__


def kept_bytes(element: object) -> int:
    """Returns the bytes of an object and of those in it, with the values that they have loaded."""
    return _deep_bytes(element, own_bytes=_loaded_bytes)


def _deep_bytes(element: object, *, own_bytes: Callable[[object], int] | None = None) -> int:
    """Returns the bytes of an object and of those in it.

    Args:
        element: The object.
        own_bytes: Bytes of one of them; None: without the values of large arrays.
    """
    own_bytes = own_bytes or _own_bytes
    total = 0
    seen = set[int]()
    waiting: deque[tuple[object, int]] = deque([(element, 0)])
    while waiting and len(seen) < _MAX_PARTS:
        part, depth = waiting.popleft()
        if id(part) in seen or _is_shared(part):
            continue
        seen.add(id(part))
        total += own_bytes(part)
        if depth < _MAX_DEPTH:
            waiting += ((child, depth + 1) for child in _parts_of(part))
    return total


def _is_shared(part: object) -> bool:
    # CPython keeps one object for each of these numbers.
    is_small = isinstance(part, int) and -5 <= part <= _SMALL_INT
    return is_small or isinstance(part, _SHARED)


def _own_bytes(part: object) -> int:
    if isinstance(part, torch.Tensor | np.ndarray):
        header = 64 + sys.getsizeof(np.empty(0))
        if part.nbytes >= _SMALL_ARRAY_BYTES:
            return header
        return header + part.nbytes
    return sys.getsizeof(part)


def _loaded_bytes(part: object) -> int:
    if isinstance(part, np.memmap):
        return _own_bytes(part)
    if isinstance(part, torch.Tensor | np.ndarray):
        return int(part.nbytes)
    if type(part).__module__.startswith("PIL."):
        return _own_bytes(part) + _pixels_of(part)
    return _own_bytes(part)


def _pixels_of(image: object) -> int:
    """Returns the bytes of an image of Pillow, 0 until it has read its file."""
    attributes = attributes_of(image)
    pixels = attributes.get("_im", attributes.get("im"))
    size = attributes.get("_size")
    if pixels is None or not isinstance(size, tuple):
        return 0
    return int(math.prod(size)) * len(str(getattr(image, "mode", "")))


def _parts_of(part: object) -> Sequence[object]:
    if isinstance(part, dict):
        return [*itertools.chain.from_iterable(itertools.islice(part.items(), _MAX_PARTS))]
    if isinstance(part, list | tuple | set | frozenset | deque):
        return list(itertools.islice(part, _MAX_PARTS))
    if isinstance(part, str | bytes | int | float | torch.Tensor | np.ndarray):
        return ()
    return [*attributes_of(part).values()]
