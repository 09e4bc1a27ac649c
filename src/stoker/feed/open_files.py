"""Open files and connections in reach of a loader: forked workers share each as it is.

One worker seeks and reads undisturbed. Of several, each reads where another one has just sought,
or takes what was sent to another one.
"""

import fcntl
import gc
import io
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, ModuleType
from typing import cast

import numpy as np
import torch.utils.data

from stoker.feed.reachable import (
    ATOMS,
    ReachableObject,
    attributes_of,
    globals_read,
    is_users_name,
    reachable,
)

# 3 us each.
_MAX_OBJECTS = 2000
# Parts of one object that are no attributes: of a reader its buffer and file.
_MAX_PARTS = 64
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LEAVES = (torch.Tensor, np.ndarray, logging.Logger, torch.utils.data.DataLoader)
_NOT_OPENED = (*ATOMS, ModuleType, type, FunctionType, CodeType)
# Classes of libraries that read a file or connection at a position which forked workers share.
_READERS = frozenset(
    {
        "_dbm.dbm",
        "_gdbm.gdbm",
        "av.container.input.InputContainer",
        # Of lmdb.
        "builtins.Environment",
        "cv2.VideoCapture",
        "decord.video_reader.VideoReader",
        "h5py._hl.dataset.Dataset",
        "h5py._hl.files.File",
        "h5py._hl.group.Group",
        "multiprocessing.connection._ConnectionBase",
        "multiprocessing.queues.Queue",
        "multiprocessing.queues.SimpleQueue",
        "netCDF4._netCDF4.Dataset",
        "posix.ScandirIterator",
        "pyarrow.lib.OSFile",
        "sqlite3.Connection",
    }
)
# Functions of `os` that read where a descriptor, which is a plain number, stands.
_OF_DESCRIPTORS = frozenset({"fdopen", "lseek", "read", "readv", "sendfile"})


def open_file_in(roots: Mapping[str, object]) -> str:
    """Returns the path and class of what is open, the nearest first; empty: nothing.

    Takes 3 us for each of the first 2,000 objects, and runs no code of theirs.

    Args:
        roots: Objects by the names that paths begin with.
    """
    numbers: list[str] = []
    has_reader = False
    for place in reachable(roots, max_objects=_MAX_OBJECTS, is_leaf=_is_leaf):
        kind = _reader_behind(place)
        if kind:
            return f"{place.path} ({kind})"
        for path, part in _unvisited(place):
            kind = _reader_behind(ReachableObject(path, part, ()))
            if kind:
                return f"{path} ({kind})"
            if type(part) is int and _is_descriptor(part):
                numbers.append(f"{path} (a descriptor)")
        has_reader = has_reader or _reads_descriptors(place.value)
    return numbers[0] if numbers and has_reader else ""


def _is_leaf(value: object) -> bool:
    # Not by isinstance, which asks an object for its `__class__`.
    return issubclass(type(value), _LEAVES)


def _unvisited(place: ReachableObject) -> Iterator[tuple[str, object]]:
    """Yields parts that the search does not visit: numbers, and methods such as `file.readline`."""
    for part in place.parts:
        values = islice(part.read(), _MAX_PARTS)
        for path, value in zip(part.names(), values, strict=False):
            if type(value) in (int, BuiltinMethodType):
                yield path, value


def _reader_behind(place: ReachableObject) -> str:
    """Returns the class of what is open in an object, but for what the search visits; or empty."""
    seen = {id(attributes_of(place.value))}
    for part in place.parts:
        seen.update(map(id, part.read()))
    waiting = [place.value]
    for value in waiting:
        if _is_reader(value):
            return _class_of(value)
        is_visited = value is place.value and issubclass(type(value), _CONTAINERS)
        if is_visited or _is_leaf(value) or len(waiting) > _MAX_PARTS:
            continue
        for part in islice(gc.get_referents(value), _MAX_PARTS):
            if id(part) not in seen and not issubclass(type(part), _NOT_OPENED):
                seen.add(id(part))
                waiting.append(part)
    return ""


def _class_of(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _is_reader(value: object) -> bool:
    kind = type(value)
    try:
        if issubclass(kind, io.IOBase) and kind.__module__ == "_io":
            file = cast("io.IOBase", value)
            return file.readable() and file.fileno() >= 0
        if issubclass(kind, socket.socket):
            return cast("socket.socket", value).fileno() >= 0
    except ValueError:
        # Closed, or in memory.
        return False
    return any(f"{base.__module__}.{base.__qualname__}" in _READERS for base in kind.__mro__)


def _is_descriptor(number: int) -> bool:
    """Returns whether a number is that of a file which is open for reading."""
    try:
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        access = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError):
        return False
    return is_file and access != os.O_WRONLY


def _reads_descriptors(value: object) -> bool:
    if not isinstance(value, FunctionType) or not is_users_name(str(value.__module__)):
        return False
    names = globals_read(value.__code__)
    return any(path[0] == "os" and path[-1] in _OF_DESCRIPTORS for path in names)
