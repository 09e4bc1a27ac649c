"""Settings of the script's process, which torch's forked workers inherit: sent with a dataset.

The tables say how each is read, written, and what it is in a fresh process; what differs from that
is sent. Settings in which ranks often differ (levels of loggers, filters of warnings, how things
are printed) do not count for the dataset's name, so that a data host still holds one dataset for
all ranks: there they are the first rank's.

Values are JSON's: they are set before the dataset is unpickled, and need no module of the user's.
Those that are objects (functions, classes) are pickled with the dataset.
"""

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from stoker.feed.wire.import_hooks import when_imported
from stoker.feed.wire.inherited import UNKNOWN, InheritedObjects, InheritedSetting, setting
from stoker.feed.wire.library_settings import LIBRARY_OBJECTS, LIBRARY_SETTINGS
from stoker.feed.wire.module_values import (
    object_values,
    plain_values,
    set_object_values,
    set_plain_values,
    unsent_values,
)
from stoker.feed.wire.python_settings import (
    PYTHON_OBJECTS,
    PYTHON_SETTINGS,
    started_otherwise,
    unsent_handlers,
)
from stoker.feed.wire.torch_settings import TORCH_OBJECTS, TORCH_SETTINGS, unsent_device

# A fixed size, left out of a spec's digest.
RANK_SETTINGS_BYTES = 16384

SETTINGS: tuple[InheritedSetting, ...] = (
    *PYTHON_SETTINGS,
    *TORCH_SETTINGS,
    *LIBRARY_SETTINGS,
    setting("values in modules", plain_values, set_plain_values, default=[], is_compared=False),
)
REGISTERS: tuple[InheritedObjects, ...] = (
    *PYTHON_OBJECTS,
    *TORCH_OBJECTS,
    *LIBRARY_OBJECTS,
    InheritedObjects(
        name="objects in modules",
        module="sys",
        read=object_values,
        write=set_object_values,
    ),
)


@dataclass(frozen=True, slots=True)
class InheritedSettings:
    """Settings of a process; by default of none.

    Attributes:
        shared: By name, as JSON; empty: not known, so that nothing is set.
        of_rank: Likewise those in which ranks often differ. They are not pickled.
        objects: What registers hold, by name.
        unsent: What a forked worker would have and a data host has not, in words.
    """

    shared: str = ""
    of_rank: str = ""
    objects: tuple[tuple[str, object], ...] = ()
    unsent: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, *, of_stream: bool = False) -> "InheritedSettings":
        """Reads all settings; takes about a millisecond.

        Args:
            of_stream: Also what only a stream may have, as it is one rank's.
        """
        sent = [one for one in SETTINGS if of_stream or not one.is_of_streams]
        shared = _values_set([one for one in sent if not one.differs_by_rank])
        of_rank = _values_set([one for one in sent if one.differs_by_rank])
        packed_of_rank, too_long = _packed_in(of_rank, RANK_SETTINGS_BYTES)
        unsent = (*started_otherwise(), *unsent_device(), *unsent_handlers(), *unsent_values())
        return cls(
            shared=json.dumps(shared, sort_keys=True),
            of_rank=packed_of_rank,
            objects=_objects_here(),
            unsent=(*unsent, *too_long),
        )

    def packed_of_rank(self) -> bytes:
        """Returns RANK_SETTINGS_BYTES bytes."""
        # Filled with spaces, which mean nothing in JSON.
        return self.of_rank.encode().ljust(RANK_SETTINGS_BYTES)

    def __reduce__(self) -> tuple[object, ...]:
        # The same for all ranks.
        return (InheritedSettings, (self.shared, "", self.objects))

    def enter(self) -> None:
        """Makes this process one that has just been forked by the script's, but for objects."""
        if not self.shared:
            return
        given = {**json.loads(self.shared), **json.loads(self.of_rank or "{}")}
        for inherited in SETTINGS:
            _write(
                inherited,
                given.get(inherited.name, inherited.default),
                is_given=inherited.name in given,
            )

    def set(self) -> None:
        """Sets what was sent, in a worker: a thread's settings, and what registers hold."""
        given = {**json.loads(self.shared or "{}"), **json.loads(self.of_rank or "{}")}
        for inherited in SETTINGS:
            if inherited.name in given:
                _write(inherited, given[inherited.name], is_given=True)
        objects = dict(self.objects)
        for register in REGISTERS:
            if register.name in objects:
                _write_objects(register, objects[register.name])


def _values_set(settings: Sequence[InheritedSetting]) -> dict[str, object]:
    """Returns those settings by name that are not as in a fresh process."""
    values: dict[str, object] = {}
    for inherited in settings:
        value = value_here(inherited)
        if value is not UNKNOWN and value != inherited.default:
            values[inherited.name] = value
    return values


def _objects_here() -> tuple[tuple[str, object], ...]:
    """Returns what the registers of this process hold, without empty ones."""
    objects: list[tuple[str, object]] = []
    for register in REGISTERS:
        value = value_here(register)
        if value and value is not UNKNOWN:
            objects.append((register.name, value))
    return tuple(objects)


def value_here(each: InheritedSetting | InheritedObjects) -> object:
    """Returns UNKNOWN for a setting of a module that is not imported, or that lacks it."""
    if each.module not in sys.modules:
        return UNKNOWN
    try:
        return each.read()
    # A library of a version that was not tried.
    except (AttributeError, ImportError, KeyError, TypeError):
        return UNKNOWN


def _write(each: InheritedSetting, value: object, *, is_given: bool) -> None:
    """Sets a value where it is another one; for a library that is not imported here, then."""
    if value is UNKNOWN or not (is_given or each.module in sys.modules):
        return

    def write() -> None:
        try:
            if not each.is_compared or _as_json(value_here(each)) != value:
                each.write(json.dumps(value))
        except Exception as err:
            _say_once(f"{each.name} is not as in the script: {type(err).__name__}: {err}")

    when_imported(each.module, each.name, write)


def _write_objects(each: InheritedObjects, value: object) -> None:
    def write() -> None:
        try:
            each.write(value)
        except Exception as err:
            _say_once(f"{each.name} is not as in the script: {type(err).__name__}: {err}")

    when_imported(each.module, each.name, write)


def _as_json(value: object) -> object:
    return value if value is UNKNOWN else json.loads(json.dumps(value))


@functools.cache
def _say_once(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr, flush=True)


def _packed_in(values: dict[str, object], max_bytes: int) -> tuple[str, list[str]]:
    """Returns JSON of at most `max_bytes`, and the names of those that are too long for it."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in sorted(values.items())}
    too_long: list[str] = []
    # 8: more than the quotes, colon, comma and spaces of an entry.
    while sum(len(name) + len(text) + 8 for name, text in texts.items()) > max_bytes:
        # The longest first: so the fewest are left out.
        longest = max(texts, key=lambda name: len(texts[name]))
        too_long.append(longest)
        del texts[longest]
    kept = {name: cast("object", json.loads(text)) for name, text in texts.items()}
    return json.dumps(kept, sort_keys=True), too_long
