"""Python objects that a dataset holds.

An access to a Python object changes its reference count, so that a forked worker gets a copy of the
page that it lies on. Arrays and tensors have one object for all their values.
"""

import array
import contextlib
import io
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from stoker.feed.reachable import ReachableObject, reachable, read_slot, slots_of
from stoker.profile.loader_phases import attributes_of
from stoker.records import HeldObjects

# As long as the search may take.
_MAX_SECONDS = 0.5
_SAMPLED = 256
# Objects that a search of a dataset looks into.
_MAX_OBJECTS = 2000
# A longer collection holds samples; a shorter one may hold collections, as columns of a table.
_MOST_COLLECTIONS = 64
# Objects of one element that are counted, how deep, and of one collection in it.
_MAX_PARTS = 64
_MAX_DEPTH = 4
_MAX_ITEMS = 16
# Smaller arrays lie on pages of other objects, which are copied with them.
_SMALL_ARRAY_BYTES = 4096
# Fewer elements are no list of samples, unless they are so large.
_LEAST_COUNT = 1000
_LEAST_BYTES = 1_000_000
_POINTER = 8
# Arrays, texts and buffers that may become longer, and packages whose tables may.
OF_BYTES = (torch.Tensor, np.ndarray, str, bytes, bytearray, array.array, io.BytesIO, io.StringIO)
_OF_TABLES = ("pandas", "pyarrow", "polars")
# How people call what a cache, or a buffer, of their own holds at most.
_LIMITS = (
    *("capacity", "maxsize", "max_size", "maxlen", "max_items", "max_entries", "max_open"),
    *("cache_size", "buffer_size", "pool_size", "cache_limit", "max_cached", "max_cache"),
    *("reservoir_size", "replay_size", "memory_size"),
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# Modules of Python whose objects refer to a dataset's own, and packages whose objects do not.
_OPEN_MODULES = ("builtins", "collections", "functools", "types")
_CLOSED_PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "PIL", "stoker")
# One for all, whoever holds it: None, types, functions of C and modules.
_SHARED = (type(None), bool, type, type(len), type(sys))
_SMALL_INT = 256


def held_objects(
    dataset: object, *, with_arrays: bool = False, clock: Callable[[], float] = time.monotonic
) -> tuple[HeldObjects, ...]:
    """Returns the collections of Python objects in a dataset's attributes, the largest first.

    Blocks for half a second at most; sizes are estimates from 256 elements of each collection.

    Args:
        dataset: The dataset.
        with_arrays: Large arrays as well: workers that are no forks get a copy of each.
        clock: Monotonic seconds.
    """
    until = clock() + _MAX_SECONDS
    by_name: dict[str, HeldObjects] = {}
    for path, holder, elements in collections_of(dataset):
        if clock() >= until:
            break
        if len(cast("Sequence[object]", elements)) <= _MOST_COLLECTIONS:
            # What is in a short one is looked at by itself.
            continue
        held = _held(path, holder, elements)
        if held is not None:
            by_name.setdefault(path, held)
    if with_arrays:
        by_name |= {held.name: held for held in _held_arrays(dataset)}
    return tuple(sorted(by_name.values(), key=lambda held: -held.num_bytes))


def _held_arrays(dataset: object) -> Iterator[HeldObjects]:
    """Yields the large arrays in a dataset's attributes, those of mapped files among them."""
    seen = set[int]()
    for item in reachable_from(dataset):
        for path, value in _parts_with_names(item, {}):
            if not isinstance(value, np.ndarray) or value.dtype == object or id(value) in seen:
                continue
            seen.add(id(value))
            if value.nbytes >= _LEAST_BYTES:
                yield HeldObjects(
                    name=path,
                    container=type(value).__name__,
                    element=value.dtype.name,
                    count=value.size,
                    num_bytes=value.nbytes,
                )


def collections_of(dataset: object) -> Iterator[tuple[str, object, object]]:
    """Yields name, holder and elements of each collection that a dataset is or refers to.

    Those in its attributes and slots, in objects below them, in short collections of collections,
    in closures, and in variables that the functions of its class read; the nearest first.
    """
    names: dict[int, str] = {}
    seen = {id(dataset)}
    for name, elements in _collections("the dataset", dataset):
        yield name, dataset, elements
    for item in reachable_from(dataset):
        for path, value in _parts_with_names(item, names):
            # What a class has from Python (`__orig_bases__`) no user has made.
            if id(value) in seen or path.endswith("__"):
                continue
            seen.add(id(value))
            names[id(value)] = path
            for name, elements in _collections(path, value):
                yield name, value, elements


def reachable_from(dataset: object) -> Iterator[ReachableObject]:
    """Yields a dataset and what it refers to, but not the samples in long lists."""
    roots = {type(dataset).__name__: dataset}
    return reachable(roots, max_objects=_MAX_OBJECTS, is_leaf=_is_leaf)


def _is_leaf(value: object) -> bool:
    """Whether nothing is looked for in an object: in a model, a logger or a list of samples."""
    # Not isinstance, which asks a lazy object what it is.
    kind = type(value)
    if issubclass(kind, _CONTAINERS):
        return len(cast("Sequence[object]", value)) > _MOST_COLLECTIONS
    if issubclass(kind, Dataset):
        return False
    package = kind.__module__.partition(".")[0]
    is_of_python = package in sys.stdlib_module_names and package not in _OPEN_MODULES
    return is_of_python or package in _CLOSED_PACKAGES or issubclass(kind, torch.nn.Module)


def _parts_with_names(
    item: ReachableObject, names: Mapping[int, str]
) -> Iterator[tuple[str, object]]:
    """Yields what an object refers to, with names as a user writes them, such as `Photos.paths`.

    Args:
        item: The object.
        names: Of collections, by their identities.
    """
    owner = names.get(id(item.value), item.path)
    if not isinstance(item.value, (*_CONTAINERS, type, FunctionType)):
        owner = type(item.value).__name__
    for part in item.parts:
        for path, value in list(zip(part.names(), part.read(), strict=False)):
            name = path
            if path.startswith(item.path):
                name = owner + path.removeprefix(item.path)
            yield name, value


def _collections(name: str, value: object) -> Iterator[tuple[str, Sequence[object] | object]]:
    """Yields what of an attribute has many Python objects: of a table, each such column."""
    if isinstance(value, _CONTAINERS):
        yield name, value
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield name, value.reshape(-1)
    elif type(value).__module__.partition(".")[0] == "pandas":
        yield from _columns(name, value)


def _columns(name: str, table: object) -> Iterator[tuple[str, object]]:
    """Yields index and object columns of a table or series of pandas, without a copy."""
    index = getattr(table, "index", None)
    if hasattr(index, "dtype"):
        yield from _values(f"{name}.index", index)
    if hasattr(table, "columns") and hasattr(table, "items"):
        for column, series in table.items():
            yield from _values(f"{name}[{column!r}]", series)
    else:
        yield from _values(name, table)


def _values(name: str, series: object) -> Iterator[tuple[str, object]]:
    """Yields the values of a column or an index of pandas, if they are Python objects."""
    dtype = getattr(series, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind != "O":
        return
    # An index of several levels has no array.
    with contextlib.suppress(ValueError):
        values = getattr(getattr(series, "array", None), "_ndarray", None)
        if isinstance(values, np.ndarray) and values.dtype == object:
            yield name, values


def _held(name: str, holder: object, collection: object) -> HeldObjects | None:
    count = len(cast("Sequence[object]", collection))
    elements = some_of(collection)
    # What several elements share, such as keys and labels, is there once.
    seen = set[int]()
    sizes = [_deep_bytes(element, seen=seen) for element in elements]
    if not any(sizes):
        return None
    if isinstance(collection, dict):
        # A pair of key and value is there only while it is looked at.
        sizes = [num_bytes - sys.getsizeof(()) - 2 * _POINTER for num_bytes in sizes]
    list_bytes = sys.getsizeof(collection)
    if isinstance(collection, np.ndarray):
        list_bytes = int(collection.nbytes)
    num_bytes = int(list_bytes + count * sum(sizes) / len(sizes))
    if count < _LEAST_COUNT and num_bytes < _LEAST_BYTES:
        return None
    kinds = [_kind_of(collection, element) for element in elements]
    # The elements looked at stand for all; shared ones count nothing.
    return HeldObjects(
        name=name,
        container=type(holder).__name__,
        element=max(set(kinds), key=kinds.count),
        count=count,
        num_bytes=num_bytes,
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
    return _deep_bytes(element, seen=set(), own_bytes=_loaded_bytes)


def _deep_bytes(
    element: object, *, seen: set[int], own_bytes: Callable[[object], int] | None = None
) -> int:
    """Returns the bytes of an object and of those in it; some items of a long list stand for all.

    Args:
        element: The object.
        seen: Identities of objects that were counted, to which these are added.
        own_bytes: Bytes of one of them; None: without the values of large arrays.
    """
    own_bytes = own_bytes or _own_bytes
    total = 0.0
    counted = 0
    waiting: deque[tuple[object, int, float]] = deque([(element, 0, 1.0)])
    while waiting and counted < _MAX_PARTS:
        part, depth, weight = waiting.popleft()
        if id(part) in seen or _is_shared(part):
            continue
        seen.add(id(part))
        counted += 1
        total += weight * own_bytes(part)
        if depth < _MAX_DEPTH:
            children, share = _parts_of(part)
            waiting += ((child, depth + 1, weight / share) for child in children)
    return int(total)


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


def _parts_of(part: object) -> tuple[Sequence[object], float]:
    """Returns objects that one refers to, and which share of all of them these are."""
    if isinstance(part, dict):
        some = list(itertools.islice(part.items(), _MAX_PARTS))
        return [*itertools.chain.from_iterable(some)], _share(some, part)
    if isinstance(part, list | tuple):
        every = max(1, len(part) // _MAX_ITEMS)
        some = list(part[::every][:_MAX_ITEMS])
        return some, _share(some, part)
    if isinstance(part, set | frozenset | deque):
        some = list(itertools.islice(part, _MAX_ITEMS))
        return some, _share(some, part)
    if isinstance(part, str | bytes | int | float | torch.Tensor | np.ndarray):
        return (), 1.0
    kind: type = type(part)
    slots = [read_slot(member, part) for _, member in slots_of(kind)]
    return [*attributes_of(part).values(), *slots], 1.0


def _share(some: Sequence[object], collection: Collection[object]) -> float:
    return len(some) / max(1, len(collection))


def limit_among(attributes: Mapping[object, object] | Mapping[str, object]) -> int | None:
    """Returns what an object says that its cache or its buffer holds at most; None: nothing."""
    limits = [
        value
        for name, value in attributes.items()
        if type(value) is int
        and isinstance(name, str)
        and name.strip("_").lower().endswith(_LIMITS)
    ]
    return max(limits, default=None)


def has_length_in_bytes(value: object) -> bool:
    """Whether an object is an array, a text, a buffer or a table of pandas, pyarrow or polars."""
    # Not isinstance, which asks a lazy object what it is.
    kind = type(value)
    return issubclass(kind, OF_BYTES) or is_table(value)


def is_table(value: object) -> bool:
    """Whether an object is a table, or a column, of pandas, pyarrow or polars."""
    kind = type(value)
    return kind.__module__.partition(".")[0] in _OF_TABLES and hasattr(kind, "__len__")


def num_bytes_of(value: object) -> int:
    """Returns the bytes of what `has_length_in_bytes`; of a mapped file 0: it is read, not kept."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return 0 if isinstance(value, np.memmap) else int(value.nbytes)
    if isinstance(value, io.StringIO):
        # Four bytes for a character.
        return 0 if value.closed else 4 * value.tell()
    if is_table(value):
        return _bytes_of_table(value)
    return sys.getsizeof(value)


def _bytes_of_table(table: object) -> int:
    # Of pandas, of polars and of pyarrow.
    usage = getattr(table, "memory_usage", None)
    if usage is not None:
        return int(np.sum(usage()))
    estimate = getattr(table, "estimated_size", None)
    if estimate is not None:
        return int(estimate())
    return int(getattr(table, "nbytes", 0))
