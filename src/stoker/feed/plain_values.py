"""Plain values, which another process can be given without pickles: copied, compared, measured.

Numbers, texts, truth values, None, paths, arrays, tensors, and lists, tuples, sets and dictionaries
of them. In an attribute also what can be filled from such a list or dictionary in place: deques,
byte arrays, the dictionaries of `collections`, and containers of the user's that inherit from one.

States have no paths, no sets within others, and no arrays of texts and dates: there they are marks,
which `unpacked` makes values again.
"""

import ast
import bz2
import contextlib
import csv
import gc
import gzip
import io
import itertools
import lzma
import operator
import os
import queue
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from types import GeneratorType
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    import hashlib

_MAX_DEPTH = 4
# Of an array of objects: a path has three parts in a state.
_MAX_OBJECTS = 2048

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_SHORT = (type(None), bool, int, float)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_NESTED = (list, tuple, dict, set, Counter, OrderedDict)
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
    type(csv.reader(())),
)
_NUMBERS = "biufc"
_COMPRESSED = (gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile)
_FILES = (io.BufferedReader, io.BufferedRandom, io.FileIO, *_COMPRESSED)
# Modules of hashlib's classes.
_HASHES = ("_hashlib", "_md5", "_sha", "_blake2")
# Texts, bytes and dates.
_OTHER_KINDS = "USMm"
# The first part of a tuple that stands for something else.
_MARK = "\0stoker: "
_MAKERS = cast(
    "dict[str, Callable[[object], object]]",
    {
        "path": Path,
        "pure path": PurePosixPath,
        "set": set,
        "Counter": Counter,
        "OrderedDict": OrderedDict,
    },
)

# Of any numbers.
Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ValueBounds:
    """How long a plain value may be; what is longer is data.

    Attributes:
        items: Of a list.
        nbytes: Of a value, and of all together that have changed.
        nested_bytes: Of dictionaries and nested lists: what grows longer is a cache.
        parts: Of these.
        entries: Of a dictionary of numbers and texts.
        has_globals: Globals that the script's loop may change as well are looked at.
    """

    items: int = 100_000
    nbytes: int = 512 << 10
    nested_bytes: int = 64 << 10
    parts: int = 8192
    entries: int = 8192
    has_globals: bool = False

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Has all functions of this module, and those that call them, keep to these bounds."""
        token = _bounds.set(self)
        try:
            yield
        finally:
            _bounds.reset(token)


_bounds: ContextVar[ValueBounds] = ContextVar("bounds", default=ValueBounds())  # noqa: B039 - it is frozen


def bounds() -> ValueBounds:
    """Returns how long a plain value may be here: as short as in a state, unless it is said."""
    return _bounds.get()


def is_plain(value: object) -> bool:
    """Returns whether an attribute's value is plain, and short enough to be compared."""
    kind = type(value)
    if kind is list or kind is deque:
        items = cast("list[object]", value)
        if len(items) > bounds().items:
            return False
        if _are_atoms(items) or all(map(_is_item, items)):
            return True
        return _is_nested([*items], 1, _budget())
    if kind is bytearray:
        return len(cast("bytearray", value)) <= bounds().nbytes
    if kind is set:
        members = cast("set[object]", value)
        return len(members) <= bounds().items and all(map(_is_item, members))
    if kind in _DICTS:
        entries = cast("dict[object, object]", value)
        if _are_atoms(entries) and _are_atoms(entries.values()):
            return len(entries) <= bounds().entries
        return len(entries) <= bounds().parts and _is_nested(dict(entries), 1, _budget())
    return _is_nested(value, 1, _budget())


def _budget() -> Iterator[int]:
    """Returns an iterator over as many parts as a nested value may have."""
    return iter(range(bounds().parts))


def _is_item(item: object) -> bool:
    if isinstance(item, tuple):
        return all(isinstance(part, (*_ATOMS, PurePath)) for part in item)
    return isinstance(item, (*_ATOMS, PurePath))


def _is_nested(value: object, depth: int, budget: Iterator[int]) -> bool:
    if next(budget, None) is None:
        return False
    kind = type(value)
    if kind in _ATOMS or kind in (PosixPath, PurePosixPath):
        return True
    if kind is torch.Tensor:
        return _is_plain_tensor(cast("torch.Tensor", value))
    if kind is np.ndarray:
        return _is_plain_array(cast("Array", value))
    if isinstance(value, np.generic):
        return value.dtype.kind in _NUMBERS
    if depth > _MAX_DEPTH or kind not in _NESTED:
        return False
    parts = [*cast("list[object]", value)]
    if kind is set and len(parts) > bounds().parts:
        return False
    if isinstance(value, dict):
        if not all(map(_is_item, value)):
            return False
        parts = [*value.values()]
    return all(_is_nested(part, depth + 1, budget) for part in parts)


def _is_plain_array(array: Array) -> bool:
    if array.dtype == object:
        items = [*array.flat] if array.size <= _MAX_OBJECTS else [array]
        return all(map(_is_item, items)) and _is_nested(items, 1, iter(range(_MAX_OBJECTS)))
    is_record = array.dtype.names is not None and not array.dtype.hasobject
    if not is_record and array.dtype.kind not in _NUMBERS + _OTHER_KINDS:
        return False
    owner = owner_of(array)
    # Others may see what lies in other memory: a file's, or another process's.
    is_own = type(owner) is np.ndarray or isinstance(owner, bytes | bytearray)
    return is_own and array.nbytes <= bounds().nbytes


def owner_of(array: Array) -> object:
    """Returns whose memory an array is of: another array, bytes, or something else."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    # Of an array that was unpickled.
    return owner.obj if isinstance(owner, memoryview) else owner


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
        return False
    return tensor.nbytes <= bounds().nbytes and not tensor.is_shared()  # type: ignore[no-untyped-call]


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
        if _are_atoms(items) or all(map(_is_item, items)):
            return items.copy() if kind is list else value
        return kind(map(copied, items))
    if kind is deque:
        queued = cast("deque[object]", value)
        return deque(map(copied, queued), queued.maxlen)
    if kind in _DICTS:
        entries = cast("dict[object, object]", value)
        copy = entries.copy()
        if _are_atoms(entries.values()):
            return copy
        # Of a Counter: its own method counts.
        dict.update(copy, {key: copied(entry) for key, entry in entries.items()})
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
        if one.dtype.hasobject:
            return is_alike and _have_equal_items([*one.flat], [*array.flat])
        return is_alike and _have_equal_bytes(one, array)
    if isinstance(one, torch.Tensor):
        tensor = cast("torch.Tensor", other)
        return one.dtype == tensor.dtype and _are_equal_tensors(one, tensor)
    if isinstance(one, tuple):
        return _have_equal_items([*one], [*cast("tuple[object, ...]", other)])
    if isinstance(one, dict):
        entries = cast("dict[object, object]", other)
        # In the same order: a dataset may iterate over it.
        is_alike = [*one] == [*entries]
        return is_alike and _have_equal_items([*one.values()], [*entries.values()])
    return bool(one == other)


def _are_equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    # Also of numbers that are not equal to themselves.
    ours, theirs = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(ours, theirs)


def _have_equal_bytes(one: Array, other: Array) -> bool:
    if not one.nbytes or not (one.flags.c_contiguous and other.flags.c_contiguous):
        return one.tobytes() == other.tobytes()
    # Without two copies: they may be large.
    ours, theirs = (array.reshape(-1).view(np.uint8) for array in (one, other))
    return np.array_equal(ours, theirs)


def _have_equal_items(items: list[object], others: list[object]) -> bool:
    if len(items) != len(others):
        return False
    # As of a copy that has not changed: of what could have changed in place it has copies, too.
    if all(map(operator.is_, items, others)):
        return True
    return all(map(are_equal, items, others))


def num_bytes(value: object) -> int:
    """Returns about how many bytes a plain value takes in a state."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return num_bytes([*value.flat])
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, dict):
        return num_bytes([*value]) + num_bytes([*value.values()])
    if isinstance(value, list | tuple | deque | set):
        return 2 + _num_item_bytes(value)
    if isinstance(value, str | bytes | bytearray):
        return 2 + len(value)
    if isinstance(value, PurePath):
        return 2 + len(str(value))
    return 8


def _num_item_bytes(items: Collection[object]) -> int:
    kinds = set(map(type, items))
    # The longest ones.
    if kinds <= {*_SHORT}:
        return 8 * len(items)
    if kinds <= {str, bytes}:
        return 2 * len(items) + sum(map(len, cast("Collection[str]", items)))
    return sum(map(num_bytes, items))


def is_long(value: object) -> bool:
    """Returns whether a changed value is too long to be kept."""
    is_nested = type(value) in _DICTS
    if isinstance(value, list | tuple):
        is_nested = not (_are_atoms(value) or all(map(_is_item, value)))
    return num_bytes(value) > (bounds().nested_bytes if is_nested else bounds().nbytes)


def packed(value: object) -> object:
    """Returns a copy that states can hold: of what is filled in place, a list or dictionary."""
    if isinstance(value, bytearray):
        return bytes(value)
    if type(value) is dict and _are_atoms(value) and _are_atoms(value.values()):
        return value.copy()
    if isinstance(value, dict):
        return {_packed_part(key): _packed_part(entry) for key, entry in value.items()}
    if isinstance(value, list | deque | set):
        items = [*value]
        return items if _are_atoms(items) else [*map(_packed_part, items)]
    return _packed_part(value)


def _are_atoms(items: Iterable[object]) -> bool:
    return set(map(type, items)) <= {*_ATOMS}


def _packed_part(value: object) -> object:
    kind = type(value)
    if kind is PosixPath:
        return (_MARK + "path", str(value))
    if kind is PurePosixPath:
        return (_MARK + "pure path", str(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return (_MARK + "objects", list(value.shape), packed([*value.flat]))
    if isinstance(value, np.ndarray) and value.dtype.names is not None:
        described = np.lib.format.dtype_to_descr(value.dtype)
        return (_MARK + "records", repr(described), list(value.shape), value.tobytes())
    if isinstance(value, np.ndarray) and value.dtype.kind in _OTHER_KINDS:
        return (_MARK + "array", value.dtype.str, list(value.shape), value.tobytes())
    if kind is set:
        return (_MARK + "set", packed(value))
    if kind in (Counter, OrderedDict):
        return (_MARK + kind.__name__, packed(value))
    if kind is tuple:
        return tuple(map(_packed_part, cast("tuple[object, ...]", value)))
    if kind in (list, dict):
        return packed(value)
    return copied(value)


def unpacked(value: object) -> object:
    """Returns the value of which `packed` has made this."""
    kind = type(value)
    if kind is dict:
        entries = cast("dict[object, object]", value)
        if _are_atoms(entries) and _are_atoms(entries.values()):
            return entries
        return {unpacked(key): unpacked(entry) for key, entry in entries.items()}
    if kind is list:
        items = cast("list[object]", value)
        return items if _are_atoms(items) else [*map(unpacked, items)]
    if kind is not tuple:
        return value
    parts = cast("tuple[object, ...]", value)
    if parts and isinstance(parts[0], str) and parts[0].startswith(_MARK):
        return _of_mark(parts[0].removeprefix(_MARK), parts[1:])
    return tuple(map(unpacked, parts))


def _of_mark(name: str, parts: tuple[object, ...]) -> object:
    if name == "array":
        kind, shape, content = cast("tuple[str, list[int], bytes]", parts)
        return np.frombuffer(bytearray(content), np.dtype(kind)).reshape(shape)
    if name == "records":
        kind, shape, content = cast("tuple[str, list[int], bytes]", parts)
        described = np.lib.format.descr_to_dtype(ast.literal_eval(kind))
        return np.frombuffer(bytearray(content), described).reshape(shape)
    if name == "objects":
        shape, items = cast("tuple[list[int], list[object]]", parts)
        return _array_of(cast("list[object]", unpacked(items)), shape)
    return _MAKERS[name](unpacked(parts[0]))


def _array_of(items: list[object], shape: list[int]) -> object:
    # Filled, as an array of tuples would get a further dimension.
    array = np.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        array[place] = item
    return array.reshape(shape)


def is_text_of_place(value: object) -> bool:
    """Returns whether it is a text or a path, which may be of this machine alone."""
    return isinstance(value, str | bytes | PurePath)


def is_packable(value: object) -> bool:
    """Returns whether a state can hold it."""
    # The longest ones.
    if type(value) is list and _are_atoms(value):
        return True
    if type(value) is dict and _are_atoms(value) and _are_atoms(value.values()):
        return True
    if type(value) is list:
        tuples = [item for item in value if type(item) is tuple]
        is_of_both = set(map(type, value)) <= {tuple, *_ATOMS}
        if is_of_both and _are_atoms(itertools.chain.from_iterable(tuples)):
            return True
    return _is_nested(value, 0, _budget())


def content_of(container: object) -> object:
    """Returns what is in a container of a class of the user's, by none of its code; None: none."""
    kind = type(container)
    if kind.__module__ in ("builtins", "collections"):
        return None
    if isinstance(container, list):
        return list.copy(container)
    if isinstance(container, deque):
        return deque(deque.__iter__(container))
    if isinstance(container, OrderedDict):
        return dict(OrderedDict.items(container))
    if isinstance(container, dict):
        return dict.copy(container)
    if isinstance(container, set):
        return set().union(set.__iter__(container))
    return None


def fill(value: object, content: object) -> bool:
    """Fills a container in place, as others may refer to it; False: it is none of that kind.

    One of a class of the user's is filled by none of its code.
    """
    if isinstance(value, OrderedDict) and isinstance(content, dict):
        OrderedDict.clear(value)
        for key, entry in content.items():
            OrderedDict.__setitem__(value, key, entry)
    elif isinstance(value, dict) and isinstance(content, dict):
        dict.clear(value)
        dict.update(value, content)
    elif isinstance(value, list) and isinstance(content, list | deque):
        list.__setitem__(value, slice(None), content)
    elif isinstance(value, deque) and isinstance(content, list | deque):
        deque.clear(value)
        deque.extend(value, content)
    elif isinstance(value, set) and isinstance(content, list | set):
        set.clear(value)
        set.update(value, content)
    elif isinstance(value, bytearray) and isinstance(content, bytes | bytearray):
        value[:] = content
    else:
        return False
    return True


def fill_views(tensors: Sequence[torch.Tensor], contents: Sequence[object]) -> bool:
    """Fills tensors that share memory in place; False: these contents do not share it.

    Args:
        tensors: Of which some may stay as they are.
        contents: Of each, what it is to be.
    """
    before = [tensor.clone() for tensor in tensors]
    for tensor, content in zip(tensors, contents, strict=True):
        if content is tensor:
            continue
        new = cast("torch.Tensor", content)
        if tensor.is_inference() or (new.dtype, new.shape) != (tensor.dtype, tensor.shape):
            return False
    wanted = [
        former if content is tensor else content
        for tensor, content, former in zip(tensors, contents, before, strict=True)
    ]
    _copy_into(tensors, [content for content in contents if type(content) is torch.Tensor])
    if all(map(are_equal, tensors, wanted)):
        return True
    _copy_into(tensors, before)
    return False


def _copy_into(tensors: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
    for tensor, content in zip(tensors, contents, strict=True):
        if content is not tensor:
            tensor.copy_(content)


def is_iterator(value: object) -> bool:
    """Returns whether it is an iterator of Python's own: a generator, of a list, `map`, ...

    So are a cursor of sqlite3 and what `os.scandir` returns.
    """
    if isinstance(value, (GeneratorType, *_ENDLESS, *_ITERATORS)):
        return True
    if not isinstance(value, Iterator):
        return False
    return type(value).__module__ == "builtins" or _is_cursor(value) or _is_of_folder(value)


def is_live_iterator(value: object, depth: int = 0) -> bool:
    """Returns whether an iterator has more to give, which no other process can continue."""
    if not is_iterator(value):
        # Rows and maps of a file go on where that is.
        return depth > 0 and is_half_read(value)
    if _is_cursor(value):
        # It forgets its statement with the last row.
        return any(type(part).__name__ == "Statement" for part in gc.get_referents(value))
    if _is_of_folder(value):
        return True
    if isinstance(value, GeneratorType):
        return value.gi_frame is not None
    if isinstance(value, _ITERATORS):
        parts = gc.get_referents(value)
        # `map` and `zip` hold theirs in a tuple.
        parts += itertools.chain.from_iterable([part for part in parts if type(part) is tuple])
        return depth < _MAX_DEPTH and any(is_live_iterator(part, depth + 1) for part in parts)
    # Of lists, tuples, ranges, dictionaries and sets.
    return isinstance(value, _ENDLESS) or operator.length_hint(value) > 0


def _is_cursor(value: object) -> bool:
    sqlite = sys.modules.get("sqlite3")
    return sqlite is not None and isinstance(value, cast("type", vars(sqlite)["Cursor"]))


def _is_of_folder(value: object) -> bool:
    kind = type(value)
    # Of `os.scandir`: it does not show whether it has ended.
    return (kind.__module__, kind.__name__) == ("posix", "ScandirIterator")


def is_half_read(value: object) -> bool:
    """Returns whether it is an open file of Python's own that was read, and not to its end."""
    file = value.buffer if isinstance(value, io.TextIOWrapper) else value
    if not isinstance(file, _FILES):
        return False
    outer = cast("io.BufferedReader", value)
    try:
        if outer.closed or not outer.readable() or outer.tell() == 0:
            return False
        if isinstance(file, _COMPRESSED):
            # How long it is nobody knows. A peek leaves it where it is.
            return bool(file.peek(1)) or outer.tell() < file.tell()
        return outer.tell() < os.fstat(outer.fileno()).st_size
    except (OSError, EOFError):
        # A text that a loop reads says no place until its end.
        return isinstance(value, io.TextIOWrapper)
    except ValueError:
        return False


def print_of(value: object) -> object:
    """Returns what changes in a value that no state can hold; None: it is none of these."""
    kind = type(value)
    if kind is queue.SimpleQueue:
        return cast("queue.SimpleQueue[object]", value).qsize()
    if kind.__module__.startswith(_HASHES) and hasattr(value, "digest_size"):
        if cast("hashlib._Hash", value).digest_size == 0:
            return cast("_Shake", value).digest(16)
        return cast("hashlib._Hash", value).digest()
    return None


class _Shake(Protocol):
    def digest(self, length: int) -> bytes: ...
