"""What a stream without workers changes in itself, brought from a data host to the script's object.

With `num_workers=0` PyTorch iterates over the script's own dataset: what `__iter__` changes in it,
as a count of epochs or the order of a list, is there in the next epoch. On a data host a copy is
iterated over. So its process sends what has changed in that, with the first two batches and at the
end, and the trainer sets the same in the script's dataset before that is asked for again. An epoch
that is left early has changed what its first two batches show, unless that moves with each batch.
"""

import random
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch

from stoker.errors import ShippingError
from stoker.feed.generators import FoundGenerator, HeldGenerators, kind_of
from stoker.feed.kept_values import (
    HANDLE,
    SHARED,
    KeptValues,
    changed_values,
    live_iterator_in,
    set_values,
    values_of,
    values_within,
    what_is_unkept,
)
from stoker.feed.plain_values import ValueBounds, num_bytes, unpacked
from stoker.feed.reachable import attributes_of
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.feed.wire.protocol import MAX_CHANGES_BYTES, MAX_STATES_BYTES

# Batches with which a process sends what has changed.
NUM_SHOWN = 2
# Of values that are sent with each of these.
_MAX_SHOWN_BYTES = MAX_STATES_BYTES // 2
# Of what has changed, at the end of an epoch; so much of what may change is copied as it begins.
_MAX_CARRIED_BYTES = 128 << 20
_CARRIED = ValueBounds(
    items=1_000_000,
    nbytes=_MAX_CARRIED_BYTES,
    nested_bytes=_MAX_CARRIED_BYTES,
    parts=16_384,
    entries=200_000,
    has_globals=True,
)
_PATH = re.compile(r"[/\\]|\.\w+$")
_OF_OTHERS = "{} is changed within an epoch by the script, or by another epoch of the dataset"
_TEXTS = (str, bytes, PurePath)
_CONTAINERS = (list, tuple, set, dict)
# Generators that a dataset may make at its first epoch, by the names of their classes; NumPy's new
# ones by what they take their bits from.
_KINDS: dict[str, Callable[[], object]] = {
    "Random": random.Random,
    "RandomState": np.random.RandomState,
    "torch.Generator": torch.Generator,
}
_BITS: dict[str, Callable[[], np.random.BitGenerator]] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}

_WORDS = (
    "the iterable dataset changes itself, and what data hosts change does not reach the script's: "
    "{}; the next epoch begins without it: give the loader num_workers=1 and "
    "persistent_workers=True, or have the script set it before each epoch"
)

_T = TypeVar("_T")


class Beginning(NamedTuple):
    """What a dataset has in itself as an epoch begins.

    Attributes:
        values: As of `kept_values.values_of`.
        generators: Their packed states, by path.
        bounds: Longer values are not looked at.
    """

    values: KeptValues
    generators: Mapping[str, bytes]
    bounds: ValueBounds


class Changes(NamedTuple):
    """What has changed since an epoch began.

    Attributes:
        values: As of `kept_values.changed_values`.
        generators: The packed states of those that have moved, by path.
        unkept: What of it cannot be sent; empty: nothing.
        of_states: What of it is too large for a state of the loader, likewise.
    """

    values: Mapping[str, object]
    generators: Mapping[str, bytes]
    unkept: str = ""
    of_states: str = ""


def beginning_of(roots: Mapping[str, object]) -> Beginning:
    """Returns what a dataset has in itself now.

    Args:
        roots: As of `kept_values.values_of`.
    """
    generators = _generators_in(roots)
    values = values_within(roots, _CARRIED)
    if values is None:
        # It holds more: only what is small is looked at.
        return Beginning(values_of(roots), generators, ValueBounds())
    return Beginning(values, generators, _CARRIED)


def packed_changes(
    roots: Mapping[str, object],
    since: Beginning,
    *,
    is_end: bool,
    too_large: str = "",
    of_states: str = "",
) -> bytes:
    """Returns what has changed of a dataset, for `StreamBegun`.

    Args:
        roots: As of `kept_values.values_of`, in the process that makes the epoch.
        since: What it had there when the epoch began.
        is_end: The epoch is over.
        too_large: What has changed of it that is no value to be kept, in words; empty: nothing.
        of_states: What has changed of it that a state does not have, likewise.
    """
    generators = {
        path: state
        for path, state in _generators_in(roots).items()
        if since.generators.get(path) != state
    }
    with since.bounds.within():
        values = dict(changed_values(roots, since=since.values))
        if is_end:
            # An iterator that an epoch reads is there until its end.
            lost = what_is_unkept(roots, since=since.values, has_iterators=True)
            changes = Changes(values, generators, lost or too_large, of_states)
            return _packed_within(changes, MAX_CHANGES_BYTES)
    # The longest ones only at the end.
    sizes = {path: num_bytes(value) for path, value in values.items()}
    unkept = ""
    while sum(sizes.values()) > _MAX_SHOWN_BYTES:
        path = max(sizes, key=lambda one: sizes[one])
        unkept = f"{path} changes, and an epoch was left before its end"
        del sizes[path], values[path]
    return _packed_within(Changes(values, generators, unkept), MAX_STATES_BYTES)


def _packed_within(changes: Changes, max_bytes: int) -> bytes:
    packed = _packed(changes)
    if len(packed) <= max_bytes:
        return packed
    unkept = changes.unkept or f"what has changed in it has {len(packed):,} bytes"
    return _packed(Changes({}, {}, unkept, changes.of_states))


def _packed(changes: Changes) -> bytes:
    return pack_value(tuple(changes), allow_pickle=False)


def _unpacked(packed: bytes) -> Changes:
    if not packed:
        return Changes({}, {})
    return Changes(*cast("Changes", unpack_value(packed, allow_pickle=False)))


class StreamBegun:
    """An epoch of a stream that a data host makes, in the trainer: what it has changed so far.

    Attributes:
        dataset: The script's.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self.dataset = weakref.ref(roots["dataset"])
        self._since = beginning_of(roots)
        # The script's dataset is not iterated over: it has kept this one since it was built.
        self._kept_iterator = live_iterator_in(roots)
        # By position, of batches that the script has.
        self._shown: list[Changes] = []
        self._num_taken = 0
        self._is_over = False
        # Why something is not set: that the data host could not send; that others have changed.
        self._unset = self._of_others = ""

    def take(self, shown: bytes) -> None:
        """Notes that the script has one more batch.

        Args:
            shown: What had changed after it, of the first ones.
        """
        self._num_taken += 1
        if self._num_taken <= NUM_SHOWN:
            self._shown.append(_unpacked(shown))

    def end(self, packed: bytes, roots: Mapping[str, object]) -> str:
        """Sets what the whole epoch has changed; returns what of it no state of a loader has.

        Args:
            packed: By the process that has made it.
            roots: The dataset and collate function of the script.
        """
        changes = _unpacked(packed)
        self._is_over = True
        self._unset = self._set(changes, roots) or changes.unkept or self._of_others
        return changes.of_states

    def leave(self, roots: Mapping[str, object]) -> str:
        """Sets what an epoch has changed that is not over; returns what could not be set.

        Args:
            roots: The dataset and collate function of the script.
        """
        if not self._is_over and self._shown:
            self._unset = self._set_shown(roots) or self._shown[-1].unkept
            if self._kept_iterator:
                self._unset = f"{self._kept_iterator} is an iterator that has not ended"
        return _WORDS.format(self._unset) if self._unset else ""

    def _set_shown(self, roots: Mapping[str, object]) -> str:
        first, last = self._shown[0], self._shown[-1]
        if self._num_taken <= NUM_SHOWN:
            return self._set(last, roots)
        values = _same(first.values, last.values)
        generators = _same(first.generators, last.generators)
        moved = [*(last.values.keys() - values.keys())]
        moved += last.generators.keys() - generators.keys()
        unset = self._set(Changes(values, generators), roots)
        if moved:
            return f"{min(moved)} changes batch by batch, and an epoch was left before its end"
        return unset

    def _set(self, changes: Changes, roots: Mapping[str, object]) -> str:
        """Sets changes, but for what others have set since; returns what cannot be set."""
        with self._since.bounds.within():
            return self._set_within(changes, roots)

    def _set_within(self, changes: Changes, roots: Mapping[str, object]) -> str:
        others = changed_values(roots, since=self._since.values).keys() & changes.values.keys()
        others.discard(SHARED)
        values = {
            path: change
            for path, change in changes.values.items()
            if path not in others and self._may_be_set(path, change)
        }
        self._of_others = _OF_OTHERS.format(min(others)) if others else ""
        set_values(roots, values, since=self._since.values)
        unset = ""
        generators = {one.path: one for one in HeldGenerators(roots).found}
        for path, packed in changes.generators.items():
            name, state = cast("tuple[str, object]", unpack_value(packed, allow_pickle=False))
            held = generators.get(path)
            if held is None:
                generator = _put_new(roots, path, name)
            elif _state_of(held) == self._since.generators.get(path):
                generator = held.value
            else:
                self._of_others = _OF_OTHERS.format(path)
                continue
            kind = kind_of(generator)
            if kind is None:
                unset = f"{path} is a generator that it has made"
            else:
                kind.write(generator, state)
        return unset

    def _may_be_set(self, path: str, change: object) -> bool:
        """Returns whether a value means the same in another process, on another machine.

        Texts may be of one machine alone. What there was none of before is a cache.
        """
        value = unpacked(change)
        before = self._since.values.get(path)
        if HANDLE.search(path.rpartition(".")[2]):
            return False
        if isinstance(before, bytearray):
            return True
        if isinstance(value, _TEXTS):
            return type(before) is type(value) and not _may_be_path(value)
        return before is not None or not isinstance(value, _CONTAINERS)


def _may_be_path(text: object) -> bool:
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return False
        if not text.isprintable():
            return False
    return isinstance(text, PurePath) or _PATH.search(str(text)) is not None


def _same(first: Mapping[str, _T], second: Mapping[str, _T]) -> dict[str, _T]:
    return {
        path: value
        for path, value in second.items()
        if path in first and _packed_value(first[path]) == _packed_value(value)
    }


def _generators_in(roots: Mapping[str, object]) -> dict[str, bytes]:
    return {held.path: _state_of(held) for held in HeldGenerators(roots).found}


def _state_of(held: FoundGenerator) -> bytes:
    """Returns a generator's state, with the name of what makes another one like it."""
    generator = held.value
    name = type(generator).__name__
    if isinstance(generator, np.random.Generator):
        name = type(generator.bit_generator).__name__
    elif isinstance(generator, torch.Generator):
        name = "torch.Generator"
    return _packed_value((name, held.kind.read(generator)))


def _packed_value(value: object) -> bytes:
    try:
        return pack_value(value, allow_pickle=False)
    except ShippingError:
        # The state of a subclass.
        return b""


def _put_new(roots: Mapping[str, object], path: str, name: str) -> object:
    """Puts a generator where the dataset has made one; returns None where that cannot be done.

    Args:
        roots: As of `kept_values.values_of`.
        path: The generator's.
        name: Of what makes it.
    """
    first, *names, last = path.split(".")
    holder = roots.get(first)
    for attribute in names:
        holder = (attributes_of(holder) or {}).get(attribute)
    attributes = attributes_of(holder)
    if attributes is None or attributes.get(last) is not None:
        return None
    if name in _BITS:
        attributes[last] = np.random.Generator(_BITS[name]())
    elif name in _KINDS:
        attributes[last] = _KINDS[name]()
    return attributes.get(last)
