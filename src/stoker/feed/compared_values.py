"""What a dataset changes from epoch to epoch that no state has, as it is too large, say.

Arrays, tensors and containers above the bounds of `plain_values`, arrays of objects, context
variables, and in workers the environment. Nothing is copied: their checksums are compared from one
epoch's beginning to the next one's, and what has changed is said to a script that asks for states.
A checksum takes 0.3 ms per MiB, and of 256 MiB at most; of what is larger, of blocks all over it. A
list of a million numbers or texts takes 40 ms.

A script may ask for its only state late. So two early looks are taken in any case, within a budget
of 64 MiB and 250,000 items: what has changed between them is said with the first state.

What is made anew in each epoch (`self.order = rng.permutation(n)`) is nobody's loss. So a value
counts that is still the same object, or whose attribute is read before it is set, as in
`self.order = self.order[places]`.
"""

import dis
import functools
import itertools
import os
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from stoker.feed.kept_values import UNKEPT, holders_in
from stoker.feed.plain_values import bounds, is_plain, owner_of
from stoker.feed.reachable import in_context, is_users_name

# Bytes of arrays and tensors that one look reads whole.
_MAX_READ_BYTES = 256 << 20
# Of a larger one.
_NUM_BLOCKS = 1024
_BLOCK_BYTES = 4096
# Items of one container, all over it.
_MAX_ITEMS_READ = 5_000_000
# Of one early look, all values together: 0.1 s of CPU time at most.
_MAX_EARLY_BYTES = 64 << 20
_MAX_EARLY_ITEMS = 250_000
_NUM_EARLY_LOOKS = 2

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, deque, set, bytearray, *_DICTS)
_VALUES = (type(None), bool, int, float, complex, str, bytes, np.generic, PurePath)

_CHANGES = ", changes in each epoch"
_OF_ENVIRONMENT = ", a variable of the environment"

_Bytes = npt.NDArray[np.uint8]


class _Checksum(NamedTuple):
    """What is compared of a value.

    Attributes:
        kept: What has to be the same for `content` to mean anything: the keys of a dictionary.
    """

    content: object
    kept: object = None

    def shows_change(self, before: "_Checksum") -> bool:
        return self.kept == before.kept and self.content != before.content


@dataclass(frozen=True, slots=True)
class _ComparedValue:
    """A value at one moment.

    Attributes:
        refers: Returns the value, while it is there; None: only its address is known.
        is_continued: Its attribute is read before it is set.
    """

    checksum: _Checksum
    words: str
    address: int
    refers: "weakref.ref[object] | None"
    is_continued: bool

    def is_of(self, other: "_ComparedValue") -> bool:
        if self.address != other.address:
            return False
        # A list cannot be referred to so.
        return self.refers is None or self.refers() is not None

    def has_changed(self, before: "_ComparedValue") -> bool:
        counts = before.is_of(self) or self.is_continued
        return counts and self.checksum.shows_change(before.checksum)


class ComparedValues:
    """A dataset's values that no state has, as they were at the last look.

    Attributes:
        is_asked: The script asks for states; else there are the early looks alone.
        last_words: What of them has changed, as users are told; empty: nothing has.
    """

    def __init__(self) -> None:
        self._before: dict[str, _ComparedValue] = {}
        self._early: dict[str, _ComparedValue] = {}
        self._num_early = 0
        self.is_asked = False
        self.last_words = ""

    def note(self, roots: Mapping[str, object]) -> None:
        """Takes all values as they are now.

        Args:
            roots: As of `kept_values.values_of`: the dataset and its collate function, by name.
        """
        if self.is_asked:
            self._before = dict(_seen_in(roots, _ValueReader()))
        # None where the first look has all.
        if 0 < self._num_early < _NUM_EARLY_LOOKS or not (self.is_asked or self._num_early):
            self._num_early += 1
            self._early = dict(_seen_in(roots, _EarlyReader()))

    def changed(self, roots: Mapping[str, object]) -> str:
        """Returns what has changed since the last look, with its path; empty: nothing.

        Args:
            roots: As of `note`. What is there now is what the next look compares with.
        """
        before, early = self._before, self._early
        self.note(roots)
        changed = _changed(before, self._before) or _changed(early, self._early)
        if changed:
            self.last_words = too_large_words(changed)
        return changed


def too_large_words(changed: str) -> str:
    """Returns what users are told of a value that has changed, and is too large; empty: nothing.

    Args:
        changed: As `ComparedValues.changed` returns it.
    """
    return UNKEPT.format(changed + _CHANGES) if changed else ""


def is_of_states(words: str) -> bool:
    """Returns whether words like `last_words` are for scripts that ask for states alone."""
    return _CHANGES in words


def _changed(before: Mapping[str, _ComparedValue], now: Mapping[str, _ComparedValue]) -> str:
    if now is before:
        return ""
    for path, seen in now.items():
        if path in before and seen.has_changed(before[path]):
            return path + seen.words
    return ""


def _seen_in(
    roots: Mapping[str, object], reader: "_ValueReader"
) -> Iterator[tuple[str, _ComparedValue]]:
    for holder in holders_in(roots):
        if holder.is_librarys:
            continue
        kind: type = type(holder.value)
        named = [(holder.path_of(name), name, value) for name, value in holder.named.items()]
        for path, name, value in [*named, (holder.path, "", holder.value)]:
            checksum = reader.checksum_of(value)
            if checksum is None:
                continue
            is_continued = bool(name) and _continues(kind, name)
            yield path, _seen(value, checksum, is_continued=is_continued)
    if get_worker_info() is None:
        # There the script may set them.
        return
    for variable, text in os.environ.items():
        yield (
            f"os.environ[{variable!r}]",
            _ComparedValue(_Checksum(text), _OF_ENVIRONMENT, 0, None, False),
        )


def _seen(value: object, checksum: _Checksum, *, is_continued: bool) -> _ComparedValue:
    refers: weakref.ref[object] | None = None
    if isinstance(value, np.ndarray | torch.Tensor):
        refers = weakref.ref(value)
    return _ComparedValue(checksum, f", {_words_of(value)}", id(value), refers, is_continued)


def _words_of(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        words = "an array"
        if isinstance(value, torch.Tensor):
            words = "a tensor"
        return f"{words} of {value.nbytes / 1e6:,.1f} MB"
    if isinstance(value, ContextVar):
        return "a ContextVar"
    length = len(cast("list[object]", value))
    return f"a {type(value).__name__} of {length:,} items"


@dataclass(slots=True)
class _ValueReader:
    """What reads values at one moment, each once.

    Attributes:
        left_bytes: That may still be read whole.
    """

    left_bytes: int = _MAX_READ_BYTES
    _visited: set[int] = field(default_factory=set)

    def checksum_of(self, value: object) -> _Checksum | None:
        """Returns what is compared of a value; None: nothing, a state has it, or it was there."""
        kind = type(value)
        is_array = isinstance(value, np.ndarray | torch.Tensor)
        if not is_array and kind not in _CONTAINERS and kind is not ContextVar:
            return None

        if id(value) in self._visited or is_plain(value):
            return None
        self._visited.add(id(value))

        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return self._of_array(cast("_Bytes", value))
        if isinstance(value, ContextVar):
            return _of_items([in_context(value)])
        if isinstance(value, bytearray):
            return self._of_memory(np.frombuffer(value, np.uint8))
        if kind in _DICTS:
            return _of_entries(cast("dict[object, object]", value))
        if isinstance(value, set):
            return _of_members(value)
        return _of_items(cast("list[object]", value))

    def _of_array(self, array: _Bytes) -> _Checksum | None:
        if array.dtype == object:
            return _of_items(array.flat)
        owner = owner_of(array)
        if array.dtype.hasobject or not isinstance(owner, np.ndarray | bytes | bytearray):
            # Also a file's memory, or another process's.
            return None
        return self._of_memory(array)

    def _of_tensor(self, tensor: torch.Tensor) -> _Checksum | None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
            return None
        if tensor.nbytes <= bounds().nbytes or tensor.is_shared():  # type: ignore[no-untyped-call]
            return None
        # Of its whole memory, whatever its strides are.
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return self._of_memory(memory.numpy())

    def _of_memory(self, array: _Bytes) -> _Checksum:
        if array.flags.f_contiguous:
            array = array.T
        is_whole = array.flags.c_contiguous and array.nbytes <= self.left_bytes
        if is_whole:
            self.left_bytes -= array.nbytes
            return _Checksum(zlib.crc32(array.reshape(-1).view(np.uint8).data))
        if not array.flags.c_contiguous:
            # Numbers all over it.
            every = max(1, array.size // (_NUM_BLOCKS * _BLOCK_BYTES))
            return _Checksum(zlib.crc32(array.flat[::every].tobytes()))
        numbers = array.reshape(-1).view(np.uint8)
        checksum = 0
        for start in range(0, len(numbers), max(_BLOCK_BYTES, len(numbers) // _NUM_BLOCKS)):
            checksum = zlib.crc32(numbers[start : start + _BLOCK_BYTES].data, checksum)
        return _Checksum(checksum)


@dataclass(slots=True)
class _EarlyReader(_ValueReader):
    """What reads values within the budget of an early look, and leaves out what exceeds it."""

    left_bytes: int = _MAX_EARLY_BYTES
    left_items: int = _MAX_EARLY_ITEMS

    def checksum_of(self, value: object) -> _Checksum | None:
        num_bytes, num_items = _costs_of(value)
        left_bytes = self.left_bytes
        if num_bytes > left_bytes or num_items > self.left_items:
            return None
        checksum = _ValueReader.checksum_of(self, value)
        if checksum is not None:
            self.left_bytes = left_bytes - num_bytes
            self.left_items -= num_items
        return checksum


def _costs_of(value: object) -> tuple[int, int]:
    """Returns how many bytes and how many items a look at a value reads."""
    if isinstance(value, torch.Tensor):
        is_read = value.layout == torch.strided and value.device.type == "cpu"
        return (value.nbytes if is_read else 0), 0
    if isinstance(value, np.ndarray):
        return value.nbytes, (value.size if value.dtype == object else 0)
    if type(value) in _CONTAINERS:
        return 0, len(cast("list[object]", value))
    return 0, 0


def _of_items(items: Iterable[object]) -> _Checksum:
    """Returns what changes with the values of a list's items; of objects, with their order.

    Objects that are new in it may be made anew in each epoch: then the sum of addresses differs,
    and the order means nothing.

    Args:
        items: Of a list or a deque, or of an array of objects.
    """
    some = [*items]
    some = some[:: 1 + len(some) // _MAX_ITEMS_READ]
    if _are_values(some):
        return _Checksum(hash(tuple(some)))
    addresses = [*map(id, some)]
    return _Checksum(hash(tuple(addresses)), kept=sum(addresses))


def _of_members(members: set[object]) -> _Checksum | None:
    if not _are_values(members):
        return None
    return _Checksum(sum(map(hash, members)))


def _of_entries(entries: Mapping[object, object]) -> _Checksum | None:
    """Returns what changes with a dictionary's values; one with other keys is a cache.

    Args:
        entries: Only plain ones are compared, as what objects are worth cannot be seen.
    """
    if not _are_values(entries) or not _are_values(entries.values()):
        return None
    return _Checksum(hash(tuple(entries.values())), kept=sum(map(hash, entries)))


def _are_values(items: Iterable[object]) -> bool:
    kinds = set(map(type, items))
    if tuple in kinds:
        kinds.discard(tuple)
        tuples = (item for item in items if isinstance(item, tuple))
        kinds |= set(map(type, itertools.chain.from_iterable(tuples)))
    return all(issubclass(kind, _VALUES) for kind in kinds)


@functools.lru_cache(maxsize=1024)
def _continues(kind: type, name: str) -> bool:
    """Returns whether a class's code sets an attribute from what it was.

    Args:
        kind: Its bases in libraries are not looked at.
        name: Of the attribute.
    """
    for base in kind.__mro__:
        if not is_users_name(base.__module__):
            continue
        for member in vars(base).values():
            if isinstance(member, FunctionType) and _reads_before_setting(member.__code__, name):
                return True
    return False


def _reads_before_setting(code: CodeType, name: str) -> bool:
    """Returns whether a function reads an attribute, of whatever object, and sets it after that."""
    is_read = False
    for step in dis.get_instructions(code):
        if step.argval != name:
            continue
        if step.opname == "STORE_ATTR":
            return is_read
        is_read |= step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return False
