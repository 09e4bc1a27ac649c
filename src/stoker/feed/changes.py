"""Whether a script changes what its batches are made from, between one batch and the next.

A loader without workers makes nothing before it is asked, so a batch shows whatever the script
changed just before: a replay buffer that grew, weights of a sampler, another transform. Such a
loader may be fed ahead only while nothing changes. What counts is what changes while the script has
control; a cache that the dataset fills as it makes a batch is its own affair.

Watched are attributes, containers, closures, globals and variables of the environment that
functions read, attributes of the user's classes, versions and contents of tensors, contents of
arrays and buffers, positions of iterators, caches that are cleared, files that attributes name:
what is near to the dataset before each batch, everything within reach now and then, for at most 1%
of the time.
"""

import array
import contextlib
import ctypes
import functools
import io
import itertools
import logging
import mmap
import operator
import os
import queue
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from pathlib import PurePath
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType
from typing import Literal, NamedTuple, cast
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from stoker.feed.generators import any_kind_of
from stoker.feed.reachable import ATOMS, Referrer, globals_read, is_users_name, reachable

# Objects that a search visits: 3 us each.
_MAX_OBJECTS = 2000
# Looked at before each batch: places of up to so many references, tensors, arrays, their bytes.
_MAX_NEAR = 48
_MAX_REFERENCES = 64
_MAX_TENSORS = 32
_MAX_ARRAYS = 16
_MAX_ARRAY_BYTES = 4096
# Numbers of a large tensor that are compared now and then, all over it.
_NUM_SAMPLED = 512
# Files that attributes name: a look at one may take milliseconds.
_MAX_FILES = 8
_MAX_PATH = 1024
# References of one place that are compared now and then, and bytes of arrays in all.
_MAX_COMPARED = 100_000
_MAX_DIGESTED_BYTES = 64 << 20
# Names of one place, to tell a cache from other changes.
_MAX_NAMES = 1000
# Share of the time that may be spent on looking at everything, and at least so long between.
_SHARE = 0.01
_MIN_SECONDS = 1.0
_NO_OTHERS = contextlib.nullcontext()
# What runs while it is asked, and may wait for the loop.
_RUNNING = (GeneratorType, CoroutineType, AsyncGeneratorType)
# What a thread may wait at; a lock only guards something.
_WAITING = (
    queue.Queue,
    queue.SimpleQueue,
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    threading.Barrier,
)
# Iterators that show how far they are, and those that do not.
_ITERATED: tuple[Iterable[object], ...] = (
    *([], (), range(0), "", b"", bytearray(), set(), {}),
    *({}.values(), {}.items()),
)
_SHOWN_ITERATORS: tuple[type, ...] = (
    itertools.count,
    type(reversed([])),
    *(type(iter(iterable)) for iterable in _ITERATED),
)
_OPAQUE_ITERATORS: tuple[type, ...] = (
    itertools.chain,
    itertools.cycle,
    itertools.islice,
    enumerate,
    filter,
    map,
    zip,
    type(iter(int, 1)),
)
# `__annotations__`, not `_Own__private`.
_OF_PYTHON = re.compile(r"\.__(?!wrapped__)\w+__")
# What classes are made of; a function also has closures and globals.
_OF_CLASSES = (property, classmethod, staticmethod)
_CONTENTS = (
    np.ndarray,
    bytearray,
    array.array,
    ctypes.Array,
    ctypes.Structure,
    io.BytesIO,
    mmap.mmap,
    ContextVar,
    *_SHOWN_ITERATORS,
)
_LEAVES = (torch.Tensor, *_CONTENTS, np.generic, memoryview, logging.Logger, DataLoader)
_CACHE = type(functools.lru_cache(int))
_ENVIRONMENT = {"os", "environ", "getenv"}
_OF_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*")

# A change of them is seen in them.
_COMPARED = (torch.Tensor, _CACHE, *_CONTENTS)

_FAR = 1 << 30

Depth = Literal["near", "all"]


class _Ends(NamedTuple):
    """A long container by its length and ends."""

    length: int
    first: object = None
    last: object = None


_References = list[object] | _Ends


class _WatchedPlace(NamedTuple):
    """A place and what it refers to at one moment, near and all, with its names."""

    part: Referrer
    near: _References
    all: _References
    names: tuple[str, ...] = ()


class _WatchedLeaf(NamedTuple):
    """A tensor or array, and its version or content at one moment."""

    path: str
    value: object
    mark: object


class Watch:
    """What a loader's batches are made from, compared from one moment to the next.

    Attributes:
        waits: Path of an object that may wait for the loop, as a queue; empty: none was found.
        has_users: Whether classes of the user's code are among what was found.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        apart: tuple[object, ...] = (),
        is_near_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Finds what there is to compare.

        Args:
            roots: Objects by the names that paths begin with.
            apart: Objects that are not looked into.
            is_near_only: A near look is never at everything.
            clock: In seconds.
        """
        self._is_near_only = is_near_only
        self.waits = ""
        self.has_users = False
        self._apart = set(map(id, apart))
        self._roots = roots
        self._clock = clock
        self._noted = ""
        # Files that the dataset writes itself.
        self._own_files: set[object] = set()
        self._places: list[_WatchedPlace] = []
        self._tensors: list[_WatchedLeaf] = []
        self._arrays: list[_WatchedLeaf] = []
        self._caches: list[_WatchedLeaf] = []
        self._files: list[_WatchedLeaf] = []
        # Of arrays, that may still be read.
        self._left_bytes = _MAX_DIGESTED_BYTES
        self._next_seconds = 0.0
        # The nearest places: how to read them, and what they referred to.
        self._near: list[_WatchedPlace] = []
        self._reads: list[Callable[[], Collection[object]]] = []
        self._short: list[_References] = []
        self._long: list[tuple[Referrer, _References]] = []
        self._near_tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._near_contents: list[_WatchedTensor] = []
        self._near_arrays: list[_WatchedLeaf] = []
        self.look()
        _watches.add(self)

    def look(self) -> None:
        """Finds what can be reached now; takes 3 us an object, and reads up to 64 MiB of arrays."""
        self._places = []
        self._tensors = []
        self._arrays = []
        self._caches = []
        self._files = []
        self._noted = ""
        self._left_bytes = _MAX_DIGESTED_BYTES
        variables: dict[str, None] = {}
        for path, value, parts in reachable(
            self._roots, max_objects=_MAX_OBJECTS, is_leaf=self._is_leaf
        ):
            if id(value) in self._apart:
                continue
            self.has_users = self.has_users or is_users_name(type(value).__module__)
            self._add_places([_place_now(part, with_names=True) for part in parts])
            self._add_leaf(path, value)
            if isinstance(value, FunctionType):
                variables |= dict.fromkeys(_variables_read(value))
        if variables:
            self._places.insert(0, _place_now(_environment(tuple(variables)), with_names=True))
        self._arrays.sort(key=_near_order)
        self._next_seconds = self._clock() + _MIN_SECONDS
        self._keep_near()

    def _add_places(self, places: list[_WatchedPlace]) -> None:
        self._places += places
        if len(self._files) < _MAX_FILES:
            self._files += _files_of(places, but=self._own_files)

    def _add_leaf(self, path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._tensors.append(_WatchedLeaf(path, value, _mark_of(value)))
        elif isinstance(value, _CACHE):
            self._caches.append(_WatchedLeaf(path, value, _misses(value)))
        elif isinstance(value, _CONTENTS):
            num_bytes = _num_bytes(value)
            if num_bytes <= self._left_bytes:
                self._left_bytes -= num_bytes
                self._arrays.append(_WatchedLeaf(path, value, _content(value)))
        elif not self.waits and _may_wait(path, value):
            self.waits = path

    def _is_leaf(self, value: object) -> bool:
        return id(value) in self._apart or _is_leaf(value)

    def changed(self, *, depth: Depth = "near") -> str:
        """Returns the path of the first change; empty: none. Near: about 5 us for a small dataset.

        Now and then the near look is at everything: at most 1% of the time.
        """
        began = self._clock()
        if depth == "near" and began >= self._next_seconds and not self._is_near_only:
            change = self._compare("all")
            now = self._clock()
            self._next_seconds = now + max(_MIN_SECONDS, (now - began) / _SHARE)
            return change
        return self._compare(depth) if depth == "all" or self._looks_changed() else ""

    def _keep_near(self) -> None:
        """Takes from all places and leaves those that the near comparison looks at."""
        near = [place for place in self._places if _may_change(place.part)][:_MAX_NEAR]
        self._near = near
        short = [place for place in near if isinstance(place.near, list)]
        long = [place for place in near if isinstance(place.near, _Ends)]
        self._reads = [place.part.read for place in short]
        self._short = [place.near for place in short]
        self._long = [(place.part, place.near) for place in long]
        arrays = self._arrays[:_MAX_ARRAYS]
        self._near_arrays = [leaf for leaf in arrays if _near_order(leaf) < _FAR]
        self._keep_near_tensors()

    def _keep_near_tensors(self) -> None:
        tensors = self._tensors[:_MAX_TENSORS]
        self._near_tensors = [_tensor(leaf) for leaf in tensors if not _tensor(leaf).is_inference()]
        self._versions = [tensor._version for tensor in self._near_tensors]
        marked = [leaf for leaf in tensors if isinstance(leaf.mark, _TensorMark)]
        self._near_contents = [_watched_tensor(leaf) for leaf in marked[:_MAX_ARRAYS]]

    def _looks_changed(self) -> bool:
        """Does what the near comparison does, without names and in less time."""
        if self._noted:
            return True
        try:
            if [[*read()] for read in self._reads] != self._short:
                return True
        except Exception:
            return True
        if [tensor._version for tensor in self._near_tensors] != self._versions:
            return True
        if self._contents_differ():
            return True
        if any(_references(part, "near") != ends for part, ends in self._long):
            return True
        if any(_misses(leaf.value) < cast("int", leaf.mark) for leaf in self._caches):
            return True
        return any(_content(leaf.value) != leaf.mark for leaf in self._near_arrays)

    def _contents_differ(self) -> bool:
        # What is written through `.data` or NumPy has no version.
        for number, (tensor, address, view, content) in enumerate(self._near_contents):
            if tensor.data_ptr() == address:
                if view is not None and view.tobytes() != content:
                    return True
            elif self._differs_elsewhere(number):
                return True
        return False

    def _differs_elsewhere(self, number: int) -> bool:
        """Compares a tensor that has another storage now: `.data` was set, or it was shared."""
        before = self._near_contents[number]
        mark = _mark_of(before.tensor)
        if not isinstance(mark, _TensorMark) or mark.content != before.content:
            return True
        leaf = _WatchedLeaf("", before.tensor, mark)
        self._near_contents[number] = _watched_tensor(leaf)
        return False

    def note(self) -> None:
        """Keeps whether something has changed, before another loader changes more."""
        self._noted = self._compare("near")

    def rebase(self) -> None:
        """Takes everything as it is now for unchanged, but for what was noted."""
        self._places = [_place_now(place.part) for place in self._places]
        self._tensors = [leaf._replace(mark=_mark_of(_tensor(leaf))) for leaf in self._tensors]
        self._arrays = [leaf._replace(mark=_content(leaf.value)) for leaf in self._arrays]
        self._caches = [leaf._replace(mark=_misses(leaf.value)) for leaf in self._caches]
        self._files = [leaf._replace(mark=_mark_of_file(leaf.value)) for leaf in self._files]
        self._keep_near()

    def changed_in_making(self) -> str:
        """Returns the path of what a batch changed in the dataset as it was made; empty: nothing.

        Not counted are caches and what is made at its first use: entries that are new, and what was
        None. Objects of libraries keep what they drew last, so only the user's are compared.
        """
        for place in self._places:
            if _is_of_users(place.part.holder):
                change = _change_beyond_cache(place)
                if change:
                    return change
        # Its own log or cache, which workers write as well.
        written_files = (leaf for leaf in self._files if _mark_of_file(leaf.value) != leaf.mark)
        self._own_files |= {leaf.value for leaf in written_files}
        changed = itertools.chain(self._changed_tensors("all"), self._changed_arrays("all"))
        return next(changed, "")

    def _compare(self, depth: Depth) -> str:
        if self._noted:
            return self._noted
        near = self._changed_places(depth), self._changed_tensors(depth), self._cleared_caches()
        changed = itertools.chain(*near, self._changed_arrays(depth), self._changed_files(depth))
        return next(changed, "")

    def _changed_places(self, depth: Depth) -> Iterator[str]:
        is_near = depth == "near"
        for part, near, whole, _ in self._near if is_near else self._places:
            before = near if is_near else whole
            now = _references(part, depth)
            if not _are_same(before, now):
                yield _first_difference(part, before, now)

    def _changed_tensors(self, depth: Depth) -> Iterator[str]:
        for leaf in islice(self._tensors, _MAX_TENSORS if depth == "near" else None):
            if _mark_of(_tensor(leaf)) != leaf.mark:
                yield leaf.path

    def _cleared_caches(self) -> Iterator[str]:
        for path, cache, misses in self._caches:
            if _misses(cache) < cast("int", misses):
                yield path

    def _changed_arrays(self, depth: Depth) -> Iterator[str]:
        is_near = depth == "near"
        for leaf in self._arrays[:_MAX_ARRAYS] if is_near else self._arrays:
            if is_near and _near_order(leaf) == _FAR:
                return
            if _content(leaf.value) != leaf.mark:
                yield leaf.path

    def _changed_files(self, depth: Depth) -> Iterator[str]:
        for path, name, mark in self._files:
            if depth == "all" and _mark_of_file(name) != mark:
                yield path


_watches: "WeakSet[Watch]" = WeakSet()


def forget(*watches: Watch) -> None:
    """Ends the comparison for watches of an epoch that is over; others' batches cost no look."""
    for watch in watches:
        _watches.discard(watch)


def making(*own: Watch) -> "contextlib.AbstractContextManager[None]":
    """While a loader's batch is made in this process: what changes is no change of the script's.

    Loaders may share a dataset, and be read in turns.
    """
    # Once a batch, and most processes have none.
    return _Making(own) if _watches else _NO_OTHERS


class _Making:
    # A class: contextlib's generator sets an error's traceback, which a frozen dataclass refuses.
    __slots__ = ("_others",)

    def __init__(self, own: Collection[Watch]) -> None:
        self._others = [watch for watch in _watches if watch not in own]

    def __enter__(self) -> None:
        for watch in self._others:
            watch.note()

    def __exit__(self, *_: object) -> None:
        for watch in self._others:
            if watch.changed():
                watch.rebase()


def path_of_waiting(roots: Mapping[str, object], *, apart: tuple[object, ...] = ()) -> str:
    """Returns what `Watch.waits` is for these arguments, and reads no contents for it."""
    outside = set(map(id, apart))
    for path, value, _ in reachable(
        roots,
        max_objects=_MAX_OBJECTS,
        is_leaf=lambda value: id(value) in outside or _is_leaf(value),
    ):
        is_looked_at = id(value) not in outside and not isinstance(value, _COMPARED)
        if is_looked_at and _may_wait(path, value):
            return path
    return ""


def _is_leaf(value: object) -> bool:
    return isinstance(value, _LEAVES) or any_kind_of(value) is not None


def _may_wait(path: str, value: object) -> bool:
    if isinstance(value, _RUNNING):
        # A running generator of a dataset cannot be sent anyway.
        return path.startswith("sampler")
    # The loop may draw from an iterator, too, and each batch moves it.
    return isinstance(value, (*_WAITING, *_OPAQUE_ITERATORS))


def _may_change(part: Referrer) -> bool:
    """Returns whether a place is worth a look before each batch.

    Not what cannot change, and not what Python keeps about classes and functions: the fields of a
    dataclass, annotations, attributes of methods. They are among what is looked at now and then.
    """
    is_of_python = bool(_OF_PYTHON.search(part.path)) or isinstance(part.holder, _OF_CLASSES)
    return not (is_of_python or isinstance(part.holder, tuple | frozenset))


def _place_now(part: Referrer, *, with_names: bool = False) -> _WatchedPlace:
    names = tuple(islice(part.names(), _MAX_NAMES)) if with_names else ()
    return _WatchedPlace(part, _references(part, "near"), _references(part, "all"), names)


def _references(part: Referrer, depth: Depth) -> _References:
    values: Collection[object] = part.read()
    length = len(values)
    if length <= (_MAX_REFERENCES if depth == "near" else _MAX_COMPARED):
        return list(values)
    if isinstance(values, set | frozenset):
        return _Ends(length)
    first = next(iter(values))
    if not isinstance(values, Sequence):
        return _Ends(length, first)
    return _Ends(length, first, values[-1])


def _are_same(before: _References, now: _References) -> bool:
    try:
        # By identity first, as Python compares lists.
        return before == now
    except Exception:
        # Arrays and tensors have no one answer; a new one is a change.
        return False


def _first_difference(part: Referrer, before: _References, now: _References) -> str:
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for path, old, new in zip(part.names(), before, now, strict=False):
            if not _are_same([old], [new]):
                return path
    return part.path


def _change_beyond_cache(place: _WatchedPlace) -> str:
    part = place.part
    before = place.all
    now = _references(part, "all")
    if _are_same(before, now) or isinstance(part.holder, set):
        return ""
    if isinstance(before, _Ends) or isinstance(now, _Ends):
        return "" if part.kind == "dict" else part.path
    named = dict(zip(part.names(), now, strict=False))
    for path, old in zip(place.names, before, strict=False):
        is_gone = path not in named
        if is_gone and part.kind != "dict":
            return path
        if not is_gone and old is not None and not _are_same([old], [named[path]]):
            return path
    return part.path if part.kind == "items" and len(now) > len(before) else ""


def _is_of_users(holder: object) -> bool:
    if isinstance(holder, type | FunctionType):
        return is_users_name(str(holder.__module__))
    if isinstance(holder, list | dict | tuple | set):
        return True
    return is_users_name(type(holder).__module__)


def _tensor(leaf: _WatchedLeaf) -> torch.Tensor:
    return cast("torch.Tensor", leaf.value)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        # Tensors of inference mode have none.
        return 0


class _TensorMark(NamedTuple):
    """A tensor in the host's memory: its version and bytes; of a large one, some."""

    version: int
    content: bytes


class _WatchedTensor(NamedTuple):
    """A tensor as it is compared before each batch.

    Attributes:
        address: Where its memory was; elsewhere now, `view` may not be read.
        view: Of its bytes, if these are few.
    """

    tensor: torch.Tensor
    address: int
    view: NDArray[np.uint8] | None
    content: bytes


def _mark_of(tensor: torch.Tensor) -> "_TensorMark | int":
    version = _version(tensor)
    numbers = _bytes_of(tensor)
    if numbers is None:
        return version
    size = tensor.element_size()
    if len(numbers) > _MAX_ARRAY_BYTES:
        count = len(numbers) // size
        numbers = numbers.reshape(count, size)[:: max(1, count // _NUM_SAMPLED)]
    return _TensorMark(version, numbers.tobytes())


def _watched_tensor(leaf: _WatchedLeaf) -> _WatchedTensor:
    tensor = _tensor(leaf)
    mark = cast("_TensorMark", leaf.mark)
    numbers = _bytes_of(tensor)
    is_small = numbers is not None and len(numbers) <= _MAX_ARRAY_BYTES
    view = numbers if is_small else None
    return _WatchedTensor(tensor, tensor.data_ptr(), view, mark.content)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8] | None:
    """Returns a view of a tensor's memory; None: it is elsewhere, or not in one piece."""
    try:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        plain = torch.Tensor.detach(tensor).as_subclass(torch.Tensor)
        return plain.reshape(-1).view(torch.uint8).numpy()
    except Exception:
        # Sparse, quantized and fake ones.
        return None


def _misses(cache: object) -> int:
    """Returns how often a cache had to call its function; 0 again once it is cleared."""
    return int(cache.cache_info().misses)  # type: ignore[attr-defined]


def _variables_read(function: FunctionType) -> Iterator[str]:
    """Yields names of environment variables that a function of the user's may read."""
    if not is_users_name(str(function.__module__)):
        return
    code = function.__code__
    if any(_ENVIRONMENT & {*names} for names in globals_read(code)):
        texts = (value for value in code.co_consts if isinstance(value, str))
        yield from filter(_OF_ENVIRONMENT.fullmatch, texts)


def _environment(names: tuple[str, ...]) -> Referrer:
    return Referrer(
        "os.environ",
        os.environ,
        lambda: [os.environ.get(name) for name in names],
        lambda: [f"os.environ[{name!r}]" for name in names],
    )


def _files_of(places: Sequence[_WatchedPlace], *, but: Collection[object]) -> list[_WatchedLeaf]:
    """Returns files that attributes of a user's object name; looks at 8 names at most."""
    leaves: list[_WatchedLeaf] = []
    for path, name in islice(_file_names_in(places, but=but), _MAX_FILES):
        mark = _mark_of_file(name)
        if mark is not None:
            leaves.append(_WatchedLeaf(path, name, mark))
    return leaves


def _file_names_in(
    places: Sequence[_WatchedPlace], *, but: Collection[object]
) -> Iterator[tuple[str, object]]:
    """Yields what may be names of files, with the paths of the attributes that hold them."""
    for place in places:
        if place.part.kind != "attributes" or not _is_of_users(place.part.holder):
            continue
        values = cast("list[object]", place.all)
        for path, value in zip(place.names, values, strict=False):
            if _is_path(value) and value not in but:
                yield path, value


def _is_path(value: object) -> bool:
    if isinstance(value, PurePath):
        return True
    return isinstance(value, str) and os.sep in value and len(value) < _MAX_PATH


def _mark_of_file(name: object) -> object:
    """Returns what tells a file from an earlier one; None: there is none. Folders change a lot."""
    try:
        status = os.stat(cast("str", name))
    except (OSError, ValueError):
        return None
    is_file = stat.S_ISREG(status.st_mode)
    return (status.st_ino, status.st_mtime_ns, status.st_size) if is_file else None


def _position(iterator: object) -> object:
    """Returns the next number of a count; else how many items an iterator has left, -1: unknown."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    try:
        return operator.length_hint(iterator, -1)
    except Exception:
        return -1


def _num_bytes(value: object) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (ContextVar, *_SHOWN_ITERATORS)):
        return 0
    try:
        with _memory_of(value) as memory:
            # What is mapped to be read is as large as a dataset.
            return _MAX_DIGESTED_BYTES + 1 if memory.readonly else memory.nbytes
    except (ValueError, BufferError):
        return 0


def _near_order(leaf: _WatchedLeaf) -> int:
    """Returns the number of bytes to compare before each batch; _FAR: too many."""
    if isinstance(leaf.value, (ContextVar, *_SHOWN_ITERATORS)):
        return 0
    return len(leaf.mark) if type(leaf.mark) is bytes else _FAR


def _memory_of(value: object) -> memoryview:
    return (
        value.getbuffer() if isinstance(value, io.BytesIO) else memoryview(cast("bytearray", value))
    )


def _content(value: object) -> object:
    """Returns bytes that are few, the identities of objects, or a checksum."""
    if isinstance(value, ContextVar):
        held = value.get(None)
        return held if isinstance(held, ATOMS) else id(held)
    if not isinstance(value, np.ndarray):
        if type(value) in _SHOWN_ITERATORS:
            return _position(value)
        try:
            with _memory_of(value) as memory:
                is_small = memory.nbytes <= _MAX_ARRAY_BYTES
                return memory.tobytes() if is_small else zlib.crc32(memory)
        except (ValueError, BufferError):
            # A buffer that is closed.
            return None
    if value.dtype.hasobject:
        return [id(item) for item in value.flat[:_MAX_COMPARED].tolist()]
    if value.nbytes <= _MAX_ARRAY_BYTES:
        return value.tobytes()
    return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
