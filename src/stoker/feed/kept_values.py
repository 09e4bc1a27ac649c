"""What a dataset keeps in itself from epoch to epoch: numbers, and lists and arrays of them.

A dataset may shuffle by a count of its own, `self.epoch += 1` in `__iter__`, or shuffle a list of
files in place, so that each epoch begins with the order in which the last one ended. In a new
process it would begin again, and give another stream. So a state has what has changed since the
first epoch, and a new process begins with it.

Random generators are kept in the same way; see `seeding.states_here`.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from stoker.feed.reachable import attributes_of, reachable
from stoker.feed.stream_epochs import is_stream

# Objects that one walk visits, once an epoch; what is near to the dataset is found first.
_MAX_OBJECTS = 1000
# More values that change are data; so are longer lists and arrays, and what takes more bytes.
_MAX_CHANGED = 100
_MAX_ITEMS = 100_000
_MAX_BYTES = 512 << 10
_ORDER = "order"

_PLAIN = (int, float, str, bytes, bool, type(None))

# Of any numbers.
_Array = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.int32]

# By path: `dataset.source.epoch`.
KeptValues = Mapping[str, object]


class _Attribute(NamedTuple):
    path: str
    attributes: dict[object, object]
    name: str
    value: object


def values_of(dataset: object) -> KeptValues:
    """Returns copies of the values in attributes and dictionaries that a dataset refers to.

    Not of torch's classes.
    """
    return {one.path: _copy(one.value) for one in _attributes_in(dataset)}


def changed_values(dataset: object, *, since: KeptValues) -> KeptValues:
    """Returns what has changed of a dataset's values, for `set_values`.

    Args:
        dataset: An iterable dataset.
        since: What they were. A number of -1 stood for none, and is not kept.
    """
    changed: dict[str, object] = {}
    num_bytes = 0
    for one in _attributes_in(dataset):
        change = _change(since.get(one.path), one.value)
        if change is None:
            continue
        num_bytes += _num_bytes(change)
        if num_bytes <= _MAX_BYTES:
            changed[one.path] = change
    if len(changed) > _MAX_CHANGED:
        return {}
    return changed


def set_values(dataset: object, values: KeptValues, *, since: KeptValues) -> None:
    """Sets values as they were in another process, where they had changed.

    Args:
        dataset: Built as that process built it.
        values: Changes.
        since: What the values were here at first.
    """
    if not values:
        return
    for one in list(_attributes_in(dataset)):
        if one.path in values:
            _set(one, values[one.path], since.get(one.path))


def _attributes_in(dataset: object) -> Iterator[_Attribute]:
    within_reach = reachable(
        {"dataset": dataset}, max_objects=_MAX_OBJECTS, is_leaf=lambda one: isinstance(one, type)
    )
    for holder in within_reach:
        # Torch's own code sets those of its classes, as where a data pipe's iterator begins.
        if type(holder.value).__module__.partition(".")[0] == "torch":
            continue
        # Those are told: see stream_epochs.
        if is_stream(holder.value):
            continue
        attributes = attributes_of(holder.value) or {}
        if type(holder.value) is dict:
            attributes = holder.value
        for name, value in attributes.items():
            if type(name) is str and _may_be_kept(value):
                yield _Attribute(f"{holder.path}.{name}", attributes, name, value)


def _may_be_kept(value: object) -> bool:
    # Neither a truth value nor an enumeration's.
    if type(value) is int or type(value) is float:
        return True
    if type(value) is list or type(value) is deque:
        return len(value) <= _MAX_ITEMS and all(map(_is_plain_item, value))
    if type(value) is torch.Tensor:
        return _is_plain_tensor(value)
    return type(value) is np.ndarray and _is_plain_array(value)


def _is_plain_item(item: object) -> bool:
    if isinstance(item, tuple):
        return all(isinstance(part, _PLAIN) for part in item)
    return isinstance(item, (*_PLAIN, PurePath))


def _is_plain_array(array: _Array) -> bool:
    if array.nbytes > _MAX_BYTES or array.dtype.hasobject:
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
    return tensor.nbytes <= _MAX_BYTES and not tensor.is_shared()  # type: ignore[no-untyped-call]


def _copy(value: object) -> object:
    if isinstance(value, list | deque | np.ndarray):
        return value.copy()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _change(before: object, now: object) -> object:
    """Returns what is to be kept of a value; None: nothing."""
    if type(before) is not type(now):
        return None
    if isinstance(now, np.ndarray):
        return None if _are_equal(cast("_Array", before), now) else now.copy()
    if isinstance(now, torch.Tensor):
        former = cast("torch.Tensor", before)
        is_same = former.dtype == now.dtype and torch.equal(former, now)
        return None if is_same else now.clone()
    if before == now:
        return None
    if isinstance(now, list | deque):
        return _changed_list([*cast("list[object]", before)], [*now])
    is_number = isinstance(before, float) or cast("int", before) >= 0
    return now if is_number else None


def _are_equal(one: _Array, other: _Array) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # Also of numbers that are not equal to themselves.
    return one.tobytes() == other.tobytes()


def _changed_list(before: list[object], now: list[object]) -> object:
    order = _order_of(before, now)
    if order is not None:
        # Of long texts it is shorter than these.
        return {_ORDER: order}
    # Paths are of this process's files.
    return None if any(isinstance(item, PurePath) for item in now) else list(now)


def _order_of(before: list[object], now: list[object]) -> _Places | None:
    """Returns where each item was before; None: they are other items."""
    if len(before) != len(now):
        return None
    places: dict[object, deque[int]] = {}
    for place, item in enumerate(before):
        places.setdefault((type(item), item), deque()).append(place)
    order: list[int] = []
    for item in now:
        left = places.get((type(item), item))
        if not left:
            return None
        order.append(left.popleft())
    return np.array(order, dtype=np.int32)


def _in_order(before: object, order: _Places) -> list[object]:
    items = [*cast("list[object]", before)]
    # Of another length it is another dataset's: what that makes is compared.
    return [items[place] for place in order.tolist()] if len(items) == len(order) else items


def _num_bytes(change: object) -> int:
    if isinstance(change, dict):
        change = change[_ORDER]
    if isinstance(change, np.ndarray | torch.Tensor):
        return change.nbytes
    return len(repr(change))


def _set(one: _Attribute, change: object, before: object) -> None:
    if isinstance(change, dict | list):
        if isinstance(one.value, list | deque):
            items = change if isinstance(change, list) else _in_order(before, change[_ORDER])
            one.value.clear()
            one.value.extend(items)
    elif isinstance(change, np.ndarray | torch.Tensor):
        one.attributes[one.name] = _copy(change)
    else:
        one.attributes[one.name] = change
