"""Numbers that a stream keeps in memory which its workers share, and counts there.

MosaicML's StreamingDataset counts its epochs so, and a script may with `multiprocessing.Value`.
Such a number outlives workers of one epoch. So a state has what it was when the epoch began.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

from stoker.feed.plain_values import is_plain
from stoker.feed.reachable import reachable

# Objects that one walk visits, once an epoch.
_MAX_OBJECTS = 1000
# Where these classes are, and how their number is read and set.
_OF_STREAMING = "streaming.base.shared.scalar"
_OF_PYTHON = "multiprocessing.sharedctypes"
# Of MosaicML's only the count of epochs: the others are of its cache's files.
_COUNTS = "_next_epoch"


class _Scalar(Protocol):
    """A number of MosaicML's."""

    def get(self) -> object: ...

    def set(self, value: object) -> None: ...


class _Number(Protocol):
    """Memory with one number."""

    value: object


class _Value(Protocol):
    """A number of multiprocessing's, with its lock."""

    def get_obj(self) -> _Number: ...


def shared_values(roots: Mapping[str, object]) -> dict[str, object]:
    """Returns the numbers that objects share, by their paths.

    Args:
        roots: A stream's dataset and collate function, by name.
    """
    values: dict[str, object] = {}
    for path, shared in _shared_in(roots):
        value = _read(shared)
        if is_plain(value):
            values[path] = value
    return values


def set_shared_values(roots: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Sets what `shared_values` returned, before workers are started.

    Args:
        roots: As of `shared_values`, built anew.
        values: What is not there any more is left out.
    """
    for path, shared in _shared_in(roots) if values else ():
        if path not in values or values[path] == _read(shared):
            continue
        if _is_of_streaming(shared):
            cast("_Scalar", shared).set(values[path])
        else:
            _memory_of(shared).value = values[path]


def _shared_in(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    if _OF_STREAMING not in sys.modules and _OF_PYTHON not in sys.modules:
        return
    objects = reachable(roots, max_objects=_MAX_OBJECTS, is_leaf=lambda one: isinstance(one, type))
    for one in objects:
        if _is_of_streaming(one.value):
            if one.path.endswith(_COUNTS):
                yield one.path, one.value
        elif isinstance(one.value, _python_kinds()):
            yield one.path, one.value


def _is_of_streaming(value: object) -> bool:
    return type(value).__module__ == _OF_STREAMING


def _python_kinds() -> tuple[type, ...]:
    module = sys.modules.get(_OF_PYTHON)
    return () if module is None else (module.Synchronized,)


def _read(shared: object) -> object:
    if not _is_of_streaming(shared):
        return _memory_of(shared).value
    number = cast("_Scalar", shared).get()
    return int(cast("int", number))


def _memory_of(shared: object) -> _Number:
    """Returns its memory without its lock, which a worker that was killed may hold for ever."""
    return cast("_Value", shared).get_obj()
