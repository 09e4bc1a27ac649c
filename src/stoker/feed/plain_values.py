"""Plain values, which another process can be given without pickles: copied, compared, measured.

Numbers, texts, truth values, None, arrays, tensors, and lists, tuples and dictionaries of them. In
an attribute also what can be filled from such a list or dictionary in place: deques, sets, byte
arrays, and the dictionaries of `collections`.
"""

import gc
import io
import itertools
import operator
import os
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import PurePath
from types import GeneratorType
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

# Longer lists and arrays are data.
MAX_ITEMS = 100_000
MAX_BYTES = 512 << 10
# Of dictionaries and nested lists: what grows longer is a cache.
_MAX_NESTED_BYTES = 64 << 10
_MAX_PARTS = 8192
_MAX_DEPTH = 4

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_FILLED = (list, deque, set, bytearray, *_DICTS)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Of some it cannot be seen whether they have ended.
_ENDLESS: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    itertools.repeat,
    itertools.product,
    itertools.permutations,
    itertools.combinations,
    itertools.combinations_with_replacement,
    itertools.groupby,
    type(itertools.tee(())[0]),
)
# Iterators of several others are followed.
_ITERATORS: tuple[type, ...] = (
    map,
    filter,
    zip,
    enumerate,
    itertools.accumulate,
    itertools.chain,
    itertools.compress,
    itertools.dropwhile,
    itertools.filterfalse,
    itertools.islice,
    itertools.pairwise,
    itertools.starmap,
    itertools.takewhile,
    itertools.zip_longest,
)
_NUMBERS = "biufc"

# Of any numbers.
Array = npt.NDArray[np.uint8]


def is_plain(value: object) -> bool:
    """Returns whether an attribute's value is plain, and short enough to be compared."""
    kind = type(value)
    if kind is list or kind is deque:
        items = cast("list[object]", value)
        if len(items) > MAX_ITEMS:
            return False
        return all(map(_is_item, items)) or _is_nested(items, 1, _budget())
    if kind is set or kind is bytearray:
        members = cast("set[object]", value)
        return len(members) <= MAX_ITEMS and all(map(_is_item, members))
    if kind in _DICTS:
        entries = cast("dict[object, object]", value)
        return len(entries) <= _MAX_PARTS and _is_nested(dict(entries), 1, _budget())
    return _is_nested(value, 1, _budget())


def _budget() -> Iterator[int]:
    """Returns an iterator over as many parts as a nested value may have."""
    return iter(range(_MAX_PARTS))


def _is_item(item: object) -> bool:
    if isinstance(item, tuple):
        return all(isinstance(part, _ATOMS) for part in item)
    return isinstance(item, (*_ATOMS, PurePath))


def _is_key(key: object) -> bool:
    return _is_item(key) and not isinstance(key, PurePath)


def _is_nested(value: object, depth: int, budget: Iterator[int]) -> bool:
    if next(budget, None) is None:
        return False
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is torch.Tensor:
        return _is_plain_tensor(cast("torch.Tensor", value))
    if kind is np.ndarray:
        return _is_plain_array(cast("Array", value))
    if isinstance(value, np.generic):
        return value.dtype.kind in _NUMBERS
    if depth > _MAX_DEPTH or kind not in (list, tuple, dict):
        return False
    parts = cast("list[object]", value)
    if kind is dict:
        entries = cast("dict[object, object]", value)
        if not all(map(_is_key, entries)):
            return False
        parts = list(entries.values())
    return all(_is_nested(part, depth + 1, budget) for part in parts)


def _is_plain_array(array: Array) -> bool:
    if array.nbytes > MAX_BYTES or array.dtype.kind not in _NUMBERS:
        return False
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        # Of an array that was unpickled.
        owner = owner.obj
    # Others may see what lies in other memory: a file's, or another process's.
    return type(owner) is np.ndarray or isinstance(owner, bytes | bytearray)


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
        return False
    return tensor.nbytes <= MAX_BYTES and not tensor.is_shared()  # type: ignore[no-untyped-call]


def is_generator(value: object) -> bool:
    """Returns whether it draws random numbers: those have states of their own."""
    return isinstance(value, _GENERATORS)


def copied(value: object) -> object:
    """Returns a copy of a plain value."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    kind = type(value)
    if kind is list or kind is tuple:
        items = cast("list[object]", value)
        if all(map(_is_item, items)):
            return items.copy() if kind is list else value
        return kind(map(copied, items))
    if kind in _DICTS:
        entries = cast("dict[object, object]", value)
        copy = entries.copy()
        copy.update((key, copied(entry)) for key, entry in entries.items())
        return copy
    if isinstance(value, deque | set | bytearray):
        return value.copy()
    return value


def are_equal(one: object, other: object) -> bool:
    """Returns whether two plain values are the same; a deque and a list of the same items are."""
    if isinstance(one, list | deque) and isinstance(other, list | deque):
        return _have_equal_items([*one], [*other])
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        array = cast("Array", other)
        # Also of numbers that are not equal to themselves.
        is_alike = (one.dtype, one.shape) == (array.dtype, array.shape)
        return is_alike and one.tobytes() == array.tobytes()
    if isinstance(one, torch.Tensor):
        tensor = cast("torch.Tensor", other)
        return one.dtype == tensor.dtype and torch.equal(one, tensor)
    if isinstance(one, tuple):
        return _have_equal_items([*one], [*cast("tuple[object, ...]", other)])
    if isinstance(one, dict):
        entries = cast("dict[object, object]", other)
        # In the same order: a dataset may iterate over it.
        is_alike = [*one] == [*entries]
        return is_alike and _have_equal_items([*one.values()], [*entries.values()])
    return bool(one == other)


def _have_equal_items(items: list[object], others: list[object]) -> bool:
    if len(items) != len(others):
        return False
    # As of a copy that has not changed: of what could have changed in place it has copies, too.
    if all(map(operator.is_, items, others)):
        return True
    return all(map(are_equal, items, others))


def num_bytes(value: object) -> int:
    """Returns about how many bytes a plain value takes in a state."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, list | tuple | deque | set):
        return 2 + sum(map(num_bytes, value))
    if isinstance(value, dict):
        return 2 + sum(map(num_bytes, value)) + sum(map(num_bytes, value.values()))
    if isinstance(value, str | bytes | bytearray):
        return 2 + len(value)
    return 8


def is_long(value: object) -> bool:
    """Returns whether a changed value is too long to be kept."""
    is_nested = type(value) in _DICTS
    if isinstance(value, list | tuple):
        is_nested = not all(map(_is_item, value))
    return num_bytes(value) > (_MAX_NESTED_BYTES if is_nested else MAX_BYTES)


def packed(value: object) -> object:
    """Returns a copy that states can hold: of what is filled in place, a list or dictionary."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, deque | set):
        return [*value]
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return copied(value)


def is_packable(value: object) -> bool:
    """Returns whether a state can hold it: no paths, which are of this process's files."""
    # The longest ones.
    if type(value) is list and set(map(type, value)) <= {*_ATOMS}:
        return True
    if type(value) is list and set(map(type, value)) == {tuple} and all(map(_is_key, value)):
        return True
    return _is_nested(value, 0, _budget())


def fill(value: object, content: object) -> bool:
    """Fills a container in place, as others may refer to it; False: it is none of that kind."""
    if type(value) not in _FILLED:
        return False
    if isinstance(value, dict) and isinstance(content, dict):
        value.clear()
        value.update(content)
    elif isinstance(value, list | deque) and isinstance(content, list | deque):
        value.clear()
        value.extend(content)
    elif isinstance(value, set) and isinstance(content, list | set):
        value.clear()
        value.update(content)
    elif isinstance(value, bytearray) and isinstance(content, bytes | bytearray):
        value[:] = content
    else:
        return False
    return True


def is_iterator(value: object) -> bool:
    """Returns whether it is an iterator of Python's own: a generator, of a list, `map`, ..."""
    if isinstance(value, (GeneratorType, *_ENDLESS, *_ITERATORS)):
        return True
    return isinstance(value, Iterator) and type(value).__module__ == "builtins"


def is_live_iterator(value: object, depth: int = 0) -> bool:
    """Returns whether an iterator has more to give, which no other process can continue."""
    if not is_iterator(value):
        return False
    if isinstance(value, GeneratorType):
        return value.gi_frame is not None
    if isinstance(value, _ITERATORS):
        parts = gc.get_referents(value)
        # `map` and `zip` hold theirs in a tuple.
        parts += itertools.chain.from_iterable([part for part in parts if type(part) is tuple])
        return depth < _MAX_DEPTH and any(is_live_iterator(part, depth + 1) for part in parts)
    # Of lists, tuples, ranges, dictionaries and sets.
    return isinstance(value, _ENDLESS) or operator.length_hint(value) > 0


def is_half_read(value: object) -> bool:
    """Returns whether it is an open file of Python's own that was read, and not to its end."""
    if not isinstance(value, io.TextIOWrapper | io.BufferedReader | io.FileIO):
        return False
    try:
        if value.closed or not value.readable():
            return False
        return 0 < value.tell() < os.fstat(value.fileno()).st_size
    except OSError:
        # A text that a loop reads says no place until its end.
        return isinstance(value, io.TextIOWrapper)
    except ValueError:
        return False
