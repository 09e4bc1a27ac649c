"""What a dataset keeps in itself from epoch to epoch: numbers, and lists and arrays of them.

A dataset may shuffle by a count of its own, `self.epoch += 1` in `__iter__`, or shuffle a list of
files in place, so that each epoch begins with the order in which the last one ended. In a new
process it would begin again, and give another stream. So a state has what has changed since the
first epoch, and a new process begins with it. What of it cannot be kept is said.

What the script sets itself (`dataset.set_epoch(3)`) persistent workers do not see: they keep what
they were started with. So a state has that, too, and workers that resume are started with it.

What lies in an object is kept by the object's place at first: `dataset.files[3].epoch`, wherever
that object is later. Of objects in a list, or in an attribute, a state has which one is there.

What the dataset's code keeps outside of it, in globals and default arguments, is found by
`code_values`. Random generators are kept in the same way; see `seeding.states_here`.
"""

import contextlib
import itertools
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import CellType, FunctionType, MemberDescriptorType
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from stoker.feed.code_values import code_parts
from stoker.feed.plain_values import (
    Array,
    ValueBounds,
    are_equal,
    bounds,
    content_of,
    copied,
    fill,
    fill_views,
    is_generator,
    is_half_read,
    is_iterator,
    is_live_iterator,
    is_long,
    is_packable,
    is_plain,
    is_text_of_place,
    num_bytes,
    owner_of,
    packed,
    print_of,
    unpacked,
)
from stoker.feed.reachable import (
    ReachableObject,
    attributes_of,
    contents,
    is_users_name,
    reachable,
    read_slot,
    slots_of,
)
from stoker.feed.shared_places import (
    PlacedValues,
    SharedPlaces,
    join,
    separate,
    shared_places,
)
from stoker.feed.stream_epochs import is_stream
from stoker.feed.value_objects import ValueObject, value_object_of

# Objects that one walk visits, once an epoch; what is near to the dataset is found first.
_MAX_OBJECTS = 1000
# More values that change are data.
_MAX_CHANGED = 100
# Of a longer list its items are kept, not their order, which takes seconds to find.
_MAX_ORDERED = 100_000
# Items of a list that are looked at.
_MAX_ITERATORS = 64
# Changes that are no values: see _whole.
_ORDER = "order"
_LENGTH = "of"
_ARGUMENTS = "arguments"
_PLACE = "place"
# The name of what is in a container of a class of the user's.
_CONTENT = "[]"
# Not a path: the places that have one object.
SHARED = "~shared"
# Numbers that mean something in one process alone.
HANDLE = re.compile(r"(^|_)(fd|fileno|handle|pid|port|sock|socket)s?(_|$)", re.IGNORECASE)

# What it is, in words, is put in.
UNKEPT = (
    "the dataset keeps something from epoch to epoch that no state has: {}; a run that resumes "
    "begins with it as the dataset is built: make it anew in each __iter__, or give the loader "
    "workers that do not persist"
)
_PATH = re.compile(r"[/\\]|\.\w+$")

_Places = npt.NDArray[np.int32]

# By path: `dataset.source.epoch`.
KeptValues = Mapping[str, object]


class _Mark(Enum):
    """What is there instead of a value that could be kept."""

    OTHER = "it is not plain"
    MISSING = "it is not there"
    UNCHANGED = "it has not changed, or cannot be kept"
    UNPACKED = "it has changed, and has too many parts for a state"


@dataclass(frozen=True, slots=True)
class _Objects:
    """A list of objects, with the items that it has now."""

    container: object
    items: list[object]

    def order_since(self, before: object) -> dict[str, object] | None:
        """Returns where each item was before; None: nothing has changed, or some were not there."""
        if not isinstance(before, _Objects):
            return None
        addresses = [*map(id, self.items)]
        addresses_before = [*map(id, before.items)]
        if addresses == addresses_before:
            return None
        order = _order_of(addresses_before, addresses)
        return None if order is None else {_ORDER: order, _LENGTH: len(addresses_before)}


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of a class of the user's, in an attribute."""

    value: object


@dataclass(frozen=True, slots=True)
class _Unkeepable:
    """A value that no state can hold, with something that changes when it does."""

    value: object
    print: object

    def has_changed(self, before: object) -> bool:
        # Another one may be made anew in each epoch.
        is_same = isinstance(before, _Unkeepable) and before.value is self.value
        return is_same and before != self


@dataclass(frozen=True, slots=True)
class Holder:
    """An object, a dictionary, a class or a function with variables, whose values may be kept.

    Attributes:
        named: By name.
        values: The same, as they are compared.
        slots: How those are set that are in slots.
        is_librarys: Its class is no code of the user's.
        is_whole: A dictionary that is kept as a value of another holder.
    """

    path: str
    value: object
    named: dict[str, object]
    values: dict[str, object]
    slots: Mapping[str, MemberDescriptorType]
    is_librarys: bool
    is_whole: bool

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}"

    def itself(self, name: str) -> object:
        """Returns what is there, of a value that may be kept in another way."""
        if name == _CONTENT:
            return self.value
        return _itself(self.values.get(name, _Mark.MISSING))

    def is_kept(self, since: KeptValues) -> bool:
        """Returns whether its values are kept as its own: new objects another process has not."""
        return not self.is_whole and self.path_of("") in since

    def changeable(self) -> Iterator[tuple[str, object]]:
        """Yields the plain values and lists that may be changed in place, by their paths."""
        if self.is_whole or self.is_librarys:
            return
        for name, value in self.values.items():
            if name != _CONTENT and not isinstance(value, _Mark | _Object | ValueObject):
                yield self.path_of(name), _itself(value)

    def put(self, name: str, value: object) -> None:
        cell = _cells(self.value).get(name)
        if name in self.slots:
            self.slots[name].__set__(self.value, value)
        elif cell is not None:
            cell.cell_contents = value
        elif isinstance(self.value, type):
            setattr(self.value, name, value)
        else:
            cast("dict[object, object]", _members(self.value))[name] = value

    def changes(self, since: KeptValues) -> Iterator[tuple[str, object]]:
        """Yields what is to be kept of the values that have changed, by their names."""
        if not self.is_kept(since):
            return
        has_opened = self._has_opened(since)
        for name, value in self.values.items():
            before = since.get(self.path_of(name), _Mark.MISSING)
            if self.is_librarys and not _counts(before, value):
                continue
            if has_opened and not _counts_when_open(before, value):
                continue
            if isinstance(value, _Object):
                change = _place_of(value, before, since)
            else:
                change = _change(name, before, value)
            if change is not _Mark.UNCHANGED:
                yield name, change

    def _has_opened(self, since: KeptValues) -> bool:
        """Returns whether it has something that is not plain, and was not there at first.

        It may have opened a file: then `is_open` is wrong in another process.
        """
        return any(
            _is_other(value) and not _is_other(since.get(self.path_of(name)))
            for name, value in self.values.items()
        )


def values_of(roots: Mapping[str, object]) -> KeptValues:
    """Returns copies of the values in attributes and dictionaries that a stream's parts refer to.

    Args:
        roots: Its dataset and collate function, by name. Not followed into torch's classes.
    """
    with_holders = [*holders_in(roots)]
    values = {path: copied(value) for path, value in _values_in(with_holders)}
    return values | _shared(with_holders)


def values_within(roots: Mapping[str, object], limits: ValueBounds) -> KeptValues | None:
    """Does as `values_of`, with other bounds; None: together the values are longer.

    Args:
        roots: As of `values_of`.
        limits: Of each value, and of the bytes of all of them.
    """
    values: dict[str, object] = {}
    left_bytes = limits.nbytes
    with limits.within():
        with_holders = [*holders_in(roots)]
        for path, value in _values_in(with_holders):
            left_bytes -= num_bytes(value)
            if left_bytes < 0:
                return None
            values[path] = copied(value)
    return values | _shared(with_holders)


def _values_in(with_holders: Iterable[Holder]) -> Iterator[tuple[str, object]]:
    for holder in with_holders:
        yield holder.path_of(""), _Object(holder.value)
        for name, value in holder.values.items():
            yield holder.path_of(name), value


def changed_values(roots: Mapping[str, object], *, since: KeptValues) -> KeptValues:
    """Returns what has changed of a dataset's values, for `set_values`.

    Args:
        roots: As of `values_of`.
        since: What they were.
    """
    changed: dict[str, object] = {}
    left_bytes = bounds().nbytes
    with_holders = [*holders_in(roots, since=since)]
    for holder in with_holders:
        for name, change in holder.changes(since):
            if _is_long(change):
                continue
            left_bytes -= num_bytes(change)
            if left_bytes >= 0:
                changed[holder.path_of(name)] = change
    if len(changed) > _MAX_CHANGED:
        return {}
    return changed | _changed_sharing(with_holders, since, changed)


def _changed_sharing(
    with_holders: Sequence[Holder], since: KeptValues, changed: KeptValues
) -> dict[str, SharedPlaces]:
    """Returns which places have one object, if that matters; else nothing."""
    sharing = _shared(with_holders, since=since)
    groups = sharing.get(SHARED, [])
    paths = {place[0] for place in itertools.chain.from_iterable(groups)}
    # In another process what has another one in its place would part from those.
    if paths.isdisjoint(changed) and groups == since.get(SHARED, []):
        return {}
    return sharing


def _shared(
    with_holders: Iterable[Holder], *, since: KeptValues | None = None
) -> dict[str, SharedPlaces]:
    """Returns which places of what is kept have one object; see `shared_places`."""
    values: list[tuple[str, object]] = []
    for holder in with_holders:
        if since is None or holder.is_kept(since):
            values.extend(holder.changeable())
    shared = shared_places(values)
    return {} if shared is None else {SHARED: shared}


def live_iterator_in(roots: Mapping[str, object]) -> str:
    """Returns the path of an iterator that a dataset keeps and that has not ended; empty: none."""
    for holder in holders_in(roots):
        for name, value in holder.named.items():
            if any(map(is_live_iterator, _with_items(value))):
                return holder.path_of(name)
    return ""


def _with_items(value: object) -> list[object]:
    if not isinstance(value, list | tuple | deque):
        return [value]
    return [value, *itertools.islice(value, _MAX_ITERATORS)]


def unkept(roots: Mapping[str, object], *, since: KeptValues, has_iterators: bool = False) -> str:
    """Returns, in words, what a dataset keeps that no state has; see `what_is_unkept`."""
    what = what_is_unkept(roots, since=since, has_iterators=has_iterators)
    return UNKEPT.format(what) if what else ""


def what_is_unkept(
    roots: Mapping[str, object], *, since: KeptValues, has_iterators: bool = False
) -> str:
    """Returns what a dataset keeps from epoch to epoch that no state has; empty: nothing.

    Args:
        roots: As of `values_of`, between two epochs.
        since: Its values at first.
        has_iterators: The epochs before cannot be made again, for an iterator that it keeps.
    """
    path = live_iterator_in(roots) if has_iterators else ""
    if path:
        return f"{path} is an iterator that has not ended"
    num_changed = 0
    total_bytes = 0
    for holder in holders_in(roots, since=since):
        lost = _lost_in(holder, since)
        if lost:
            return lost
        for name, change in holder.changes(since):
            is_too_long = _is_long(change)
            # A dictionary that grows is a cache.
            if is_too_long and type(holder.values[name]) is not dict:
                size = num_bytes(holder.values[name] if change is _Mark.UNPACKED else change)
                return f"{holder.path_of(name)} has changed, and has {size:,} bytes"
            total_bytes += 0 if is_too_long else num_bytes(change)
            num_changed += 1
    if num_changed > _MAX_CHANGED:
        return f"{num_changed} values of it have changed, more than {_MAX_CHANGED}"
    if total_bytes > bounds().nbytes:
        return f"what has changed in it has {total_bytes:,} bytes"
    return ""


def _lost_in(holder: Holder, since: KeptValues) -> str:
    """Returns what of a holder has changed that no state can hold; empty: nothing."""
    if holder.is_librarys:
        return ""
    for name, value in holder.named.items():
        path = holder.path_of(name)
        form = holder.values.get(name)
        if is_half_read(value):
            return f"{path} is a file that is read on"
        if isinstance(form, _Unkeepable) and form.has_changed(since.get(path)):
            return f"{path}, a {type(value).__name__}, has changed"
    return ""


def set_values(roots: Mapping[str, object], values: KeptValues, *, since: KeptValues) -> None:
    """Sets values as they were in another process, where they had changed.

    Args:
        roots: As of `values_of`, built as that process built them.
        values: Changes.
        since: What the values were here at first.
    """
    if not values:
        return
    holders = list(holders_in(roots, since=since))
    shared = cast("SharedPlaces | None", values.get(SHARED))
    if shared is not None:
        here = _shared(holders, since=since).get(SHARED, [])
        parted = [group for group in here if group not in shared]
        # Before anything is filled: what has parted would be filled with the other's values.
        separate(parted, _placed_in(holders))
        holders = list(holders_in(roots, since=since))
    filled = _filled_views(holders, values)
    for holder in holders:
        for name, change in _of_holder(holder, values):
            value = _whole(change, since.get(holder.path_of(name)), since)
            current = holder.values.get(name)
            is_filled = holder.path_of(name) in filled
            if is_filled or current is _Mark.OTHER or value is _Mark.UNCHANGED:
                continue
            if not fill(holder.itself(name), value):
                holder.put(name, copied(value))
    if shared:
        join(shared, _placed_in(holders_in(roots, since=since)))


def _placed_in(holders: Iterable[Holder]) -> PlacedValues:
    values: dict[str, object] = {}
    owners: dict[str, tuple[Holder, str]] = {}
    for holder in holders:
        for name in holder.values:
            path = holder.path_of(name)
            values[path] = holder.itself(name)
            owners[path] = holder, name

    def put(path: str, value: object) -> None:
        if path in owners:
            holder, name = owners[path]
            holder.put(name, value)

    return PlacedValues(values, put)


def _filled_views(holders: Sequence[Holder], values: KeptValues) -> set[str]:
    """Fills tensors and arrays that share memory with others in place; returns their paths.

    Another one in the place of one of them would not follow what is written to the others.
    """
    views: dict[int, dict[str, torch.Tensor]] = {}
    for holder in holders:
        for name, value in holder.values.items():
            tensor = _as_tensor(value)
            if tensor is not None and tensor.nbytes:
                views.setdefault(_memory_of(value), {})[holder.path_of(name)] = tensor
    filled: set[str] = set()
    for tensors in views.values():
        if len(tensors) == 1 or tensors.keys().isdisjoint(values):
            continue
        contents = [
            _as_tensor(unpacked(values[path])) if path in values else tensor
            for path, tensor in tensors.items()
        ]
        are_tensors = all(content is not None for content in contents)
        if are_tensors and fill_views([*tensors.values()], contents):
            filled.update(tensors)
    return filled


def _as_tensor(value: object) -> torch.Tensor | None:
    """Returns a tensor, or an array as one that shares its memory; None: it is none of them."""
    if type(value) is torch.Tensor:
        return value
    if type(value) is not np.ndarray or not value.flags.writeable:
        return None
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        # Of objects, texts or records; or read backwards.
        return None


def _memory_of(value: object) -> int:
    """Returns what tensors, or arrays, of the same memory have alike."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr()
    return id(owner_of(cast("Array", value)))


def script_changes(roots: Mapping[str, object], *, since: KeptValues) -> KeptValues:
    """Returns what a script has set in a dataset, for `as_changed`.

    Args:
        roots: As of `values_of`, in the trainer's process.
        since: Its values at an earlier time.
    """
    changes = changed_values(roots, since=since)
    # Texts may be paths, of another machine.
    return {
        path: change
        for path, change in changes.items()
        if path != SHARED and not is_text_of_place(unpacked(change))
    }


@contextlib.contextmanager
def as_changed(
    roots: Mapping[str, object], changes: KeptValues, *, since: KeptValues
) -> Iterator[None]:
    """Has a dataset's values be those of another time; at the end they are as the script set them.

    Args:
        roots: As of `values_of`, built as they were then.
        changes: What the script had set by then.
        since: The values before the script set any.
    """
    with contextlib.ExitStack() as undo:
        for holder in list(holders_in(roots, since=since)):
            # What the script has set since then, and what it had set then.
            names = dict.fromkeys([name for name, _ in holder.changes(since)])
            names |= dict.fromkeys([name for name, _ in _of_holder(holder, changes)])
            for name in names:
                path = holder.path_of(name)
                before = since.get(path, _Mark.MISSING)
                wanted = _whole(changes[path], before, since) if path in changes else before
                _put_meanwhile(holder, name, wanted, undo)
        yield


def set_back(roots: Mapping[str, object], values: KeptValues, *, since: KeptValues) -> None:
    """Does what `set_values` does; other values that have changed here are as they were at first.

    Args:
        roots: As of `values_of`.
        values: Changes.
        since: What the values were here at first.
    """
    for holder in list(holders_in(roots, since=since)):
        for name, _ in list(holder.changes(since)):
            path = holder.path_of(name)
            if path not in values:
                before = since.get(path, _Mark.MISSING)
                _put_meanwhile(holder, name, before, contextlib.ExitStack())
    set_values(roots, values, since=since)


def _put_meanwhile(holder: Holder, name: str, wanted: object, undo: contextlib.ExitStack) -> None:
    current = holder.itself(name)
    if is_text_of_place(wanted) or isinstance(wanted, _Mark) or isinstance(current, _Mark):
        return
    items = wanted.items if isinstance(wanted, _Objects) else _itself(wanted)
    before = copied(current)
    if name == _CONTENT:
        before = holder.named[name]
    elif isinstance(current, list | deque):
        before = [*current]
    if fill(current, items):
        undo.callback(fill, current, before)
    else:
        undo.callback(holder.put, name, current)
        holder.put(name, copied(items))


def _itself(value: object) -> object:
    """Returns what is there, of a value that is kept in another way."""
    if isinstance(value, _Objects):
        return value.container
    return value.value if isinstance(value, ValueObject | _Object) else value


def holders_in(roots: Mapping[str, object], *, since: KeptValues | None = None) -> Iterator[Holder]:
    """Yields the holders of a dataset's values, nearest first.

    Args:
        roots: As of `values_of`.
        since: What it returned at first: what was there then has its path of then.
    """
    # By address.
    whole: set[int] = set()
    of_libraries: set[int] = set()
    within_reach = list(
        reachable(roots, max_objects=_MAX_OBJECTS, is_leaf=lambda one: isinstance(one, type))
    )
    places = _FirstPlaces(since or {}, within_reach)
    for one in [*within_reach, *places.far_away]:
        kind = type(one.value)
        # Torch's own code sets those of its classes, as where a data pipe begins. Streams
        # of Hugging Face are told theirs: see stream_epochs.
        if _module_of(one.value).partition(".")[0] == "torch" or is_stream(one.value):
            of_libraries.update(map(id, _members(one.value).values()))
            continue
        if isinstance(one.value, Enum):
            # All of the process have the same one.
            continue
        is_librarys = id(one.value) in of_libraries
        if kind is not dict:
            is_librarys = not is_users_name(_module_of(one.value))
        path = f"class {one.value.__qualname__}" if isinstance(one.value, type) else one.path
        path = places.path_of(one.value, path)
        holder = _holder(path, one.value, is_librarys=is_librarys, is_whole=id(one.value) in whole)
        of_others = of_libraries if is_librarys else whole
        of_others.update(id(value) for value in holder.values.values() if type(value) is dict)
        yield holder
    for part in code_parts([one.value for one in within_reach]):
        forms = _kept_forms(part.named, is_librarys=False)
        yield Holder(part.path, part.holder, part.named, forms, {}, False, False)


def _holder(path: str, value: object, *, is_librarys: bool, is_whole: bool) -> Holder:
    slots = {} if isinstance(value, type) else _users_slots(value)
    named = dict(_named_values(value, slots))
    forms = _kept_forms(named, is_librarys=is_librarys)
    return Holder(path, value, named, forms, slots, is_librarys, is_whole)


class _FirstPlaces:
    """Paths of objects as a stream was built: one that was there keeps its path wherever it is.

    Attributes:
        far_away: Objects that were found then, and are now too far back in a list to be found.
    """

    def __init__(self, since: KeptValues, within_reach: list[ReachableObject]) -> None:
        # By path, as of a holder's empty name.
        self._at_first = {
            path: value.value
            for path, value in since.items()
            if isinstance(value, _Object) and path.endswith(".")
        }
        self._paths = {id(value): path[:-1] for path, value in self._at_first.items()}
        visited = {id(one.value) for one in within_reach}
        self._present = set(visited)
        for one in within_reach:
            # 0.3 s for a million items: not where nothing is looked for among them.
            if self._at_first and isinstance(one.value, list | deque):
                self._present.update(map(id, one.value))
        hidden = self._present - visited
        self.far_away = [
            ReachableObject(path[:-1], value, ())
            for path, value in self._at_first.items()
            if id(value) in hidden
        ]

    def path_of(self, value: object, path: str) -> str:
        """Returns the path of an object that is there now.

        Args:
            value: The object.
            path: Where it is now.
        """
        first_path = self._paths.get(id(value))
        if first_path is not None:
            return first_path
        # It has replaced another one, which may be elsewhere: then a new process has only that.
        replaced = self._at_first.get(f"{path}.")
        is_elsewhere = replaced is not None and id(replaced) in self._present
        return f"{path} (new)" if is_elsewhere else path


def _kept_forms(named: Mapping[str, object], *, is_librarys: bool) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in named.items():
        if is_generator(value) and not is_librarys:
            # Its own state is kept elsewhere.
            values[name] = value_object_of(value) or _Mark.OTHER
            continue
        if is_generator(value) or is_iterator(value):
            continue
        # The others do not count in a library's objects; its vocabularies are long.
        may_be_kept = not is_librarys or _counts(value, value) or type(value) is dict
        values[name] = _kept_form(value) if may_be_kept else _Mark.OTHER
    return values


def _kept_form(value: object) -> object:
    """Returns what is compared of an attribute's value."""
    if is_plain(value):
        return value
    value_object = value_object_of(value)
    if value_object is not None:
        return value_object
    changing = print_of(value)
    if changing is not None:
        return _Unkeepable(value, changing)
    if type(value) is list or type(value) is deque:
        items = cast("list[object]", value)
        return _Objects(items, [*items]) if len(items) <= _MAX_ORDERED else _Mark.OTHER
    return _Object(value) if is_users_name(type(value).__module__) else _Mark.OTHER


def _is_other(value: object) -> bool:
    return value is _Mark.OTHER or isinstance(value, _Object | _Unkeepable)


def _users_slots(holder: object) -> dict[str, MemberDescriptorType]:
    slots = slots_of(cast("type", type(holder)))
    # What types of other languages show so may be read-only.
    return {name: slot for name, slot in slots if is_users_name(slot.__objclass__.__module__)}


def _module_of(holder: object) -> str:
    is_code = isinstance(holder, type | FunctionType)
    return str(holder.__module__ if is_code else type(holder).__module__)


def _named_values(
    holder: object, slots: Mapping[str, MemberDescriptorType]
) -> Iterator[tuple[str, object]]:
    content = content_of(holder)
    if isinstance(content, list | deque) or (content is not None and is_plain(content)):
        yield _CONTENT, content
    members = _members(holder)
    if members is holder and content is not None and is_plain(content):
        # It is kept whole.
        members = {}
    for key, value in members.items():
        if type(key) is str and not key.startswith("__"):
            yield key, value
    for name, cell in _cells(holder).items():
        yield name, contents(cell)
    for name, member in slots.items():
        yield name, read_slot(member, holder)


def _members(holder: object) -> Mapping[object, object]:
    if isinstance(holder, type):
        return cast("Mapping[object, object]", vars(holder))
    attributes = attributes_of(holder)
    if isinstance(holder, dict) and not attributes:
        # Also one of the user's, as a configuration whose entries are read as attributes.
        return holder
    return {} if attributes is None else attributes


def _cells(holder: object) -> dict[str, CellType]:
    """Returns the variables of the functions around a function, which it may change."""
    if type(holder) is not FunctionType or not holder.__closure__:
        return {}
    return dict(zip(holder.__code__.co_freevars, holder.__closure__, strict=True))


def _of_holder(holder: Holder, values: KeptValues) -> Iterator[tuple[str, object]]:
    """Yields the changes of one holder by name, also of attributes that it does not have yet."""
    start = holder.path_of("")
    for path, change in values.items():
        name = path.removeprefix(start)
        if path.startswith(start) and (name in holder.values or name.isidentifier()):
            yield name, change


def _counts(before: object, now: object) -> bool:
    """Returns whether a value counts whatever else its object has: numbers, lists and arrays."""
    if type(before) is not type(now) or type(now) is bool:
        return False
    return isinstance(now, int | float | list | deque | np.ndarray | torch.Tensor)


def _is_unset(before: object) -> bool:
    return not isinstance(before, int) or before < 0


def _counts_when_open(before: object, now: object) -> bool:
    """Returns whether a value counts where its object has opened something: a place in it, say."""
    if type(before) is not type(now) or type(now) is bool:
        return False
    # A path may be of what is open.
    is_path = isinstance(now, PurePath) or (isinstance(now, str) and _PATH.search(now))
    return not is_path


def _place_of(thing: _Object, before: object, since: KeptValues) -> object:
    """Returns where an object was at first that an attribute has now."""
    if isinstance(before, _Object) and before.value is thing.value:
        return _Mark.UNCHANGED
    for path, value in since.items():
        if path[-1] == "." and isinstance(value, _Object) and value.value is thing.value:
            return {_PLACE: path}
    return _Mark.UNCHANGED


def _change(name: str, before: object, now: object) -> object:
    """Returns what is to be kept of a value."""
    if isinstance(now, _Objects):
        return now.order_since(before) or _Mark.UNCHANGED
    if isinstance(now, ValueObject):
        return _arguments_of(now, before)
    if now is _Mark.OTHER or _is_other(before) or are_equal(before, now):
        return _Mark.UNCHANGED
    if isinstance(now, int) and _is_unset(before) and HANDLE.search(name):
        return _Mark.UNCHANGED
    if isinstance(now, str | PurePath) and str(now).startswith(tempfile.gettempdir()):
        return _Mark.UNCHANGED
    if isinstance(before, list | deque) and isinstance(now, list | deque):
        may_be_ordered = len(before) == len(now) <= _MAX_ORDERED
        order = _order_of([*before], [*now]) if may_be_ordered else None
        if order is not None:
            # Of long texts it is shorter than these.
            return {_ORDER: order}
    change = packed(now)
    return change if is_packable(change) else _Mark.UNPACKED


def _arguments_of(now: ValueObject, before: object) -> object:
    if not isinstance(before, ValueObject) or type(before.value) is not type(now.value):
        return _Mark.UNCHANGED
    if are_equal(before.arguments, now.arguments):
        return _Mark.UNCHANGED
    return {_ARGUMENTS: now.packed()}


def _order_of(before: Sequence[object], now: Sequence[object]) -> _Places | None:
    """Returns where each item was before; None: some were not there."""
    if len(before) < len(now):
        return None
    places: dict[object, deque[int]] = {}
    order: list[int] = []
    # Lists within a list have no hash.
    with contextlib.suppress(TypeError):
        for place, item in enumerate(before):
            places.setdefault((type(item), item), deque()).append(place)
        for item in now:
            left = places.get((type(item), item))
            if not left:
                return None
            order.append(left.popleft())
        return np.array(order, dtype=np.int32)
    return None


def _is_long(change: object) -> bool:
    if change is _Mark.UNPACKED:
        return True
    order = change.get(_ORDER) if isinstance(change, dict) else None
    return is_long(order if isinstance(order, np.ndarray) else change)


def _whole(change: object, before: object, since: KeptValues) -> object:
    """Returns a value from its change.

    Args:
        change: What a state has.
        before: What the value was at first.
        since: All that was there at first.
    """
    if not isinstance(change, dict):
        return unpacked(change)
    if isinstance(before, ValueObject) and _ARGUMENTS in change:
        return before.made_of(tuple(change[_ARGUMENTS]))
    object_there = since.get(str(change.get(_PLACE)))
    if isinstance(object_there, _Object):
        return object_there.value
    items = before.items if isinstance(before, _Objects) else before
    if not isinstance(items, list | deque) or not isinstance(change.get(_ORDER), np.ndarray):
        return unpacked(change)
    order: _Places = change[_ORDER]
    # Of another length it is another dataset's: what that makes is compared.
    if len(items) != change.get(_LENGTH, len(order)):
        return [*items]
    return [items[place] for place in order.tolist()]
