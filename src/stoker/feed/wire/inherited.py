"""The form of a setting of a process that its forked children inherit, and others do not."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

ValueT = TypeVar("ValueT")

# The default of a setting that no fresh process is known by: it is always sent.
UNKNOWN = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedSetting:
    """A setting whose value is JSON's: numbers, texts, lists, dictionaries.

    Attributes:
        name: As the documentation names it.
        module: The module that has to be imported for the setting to be another than its default.
        write: Sets what the value's JSON says.
        default: Its value in a fresh process.
        differs_by_rank: Ranks of one script often have different values.
        is_compared: Written only where the value here is another one; False: `read` takes long.
        is_of_streams: Sent with a stream alone, which is one rank's.
    """

    name: str
    module: str
    read: Callable[[], object]
    write: Callable[[str], None]
    default: object = UNKNOWN
    differs_by_rank: bool = False
    is_compared: bool = True
    is_of_streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedObjects:
    """A register of objects: `read` returns those that the script, or a library for it, has added.

    Attributes:
        read: Returns something that can be pickled; empty if nothing was added.
    """

    name: str
    module: str
    read: Callable[[], object]
    write: Callable[[object], None]


def setting(
    name: str,
    read: Callable[[], object],
    write: Callable[[ValueT], object],
    *,
    module: str = "sys",
    default: object = UNKNOWN,
    differs_by_rank: bool = False,
    is_compared: bool = True,
    is_of_streams: bool = False,
) -> InheritedSetting:
    """Returns a setting whose `write` takes the value itself; see InheritedSetting.

    Args:
        module: Default: one that is always imported.
    """

    def write_json(text: str) -> None:
        write(json.loads(text))

    return InheritedSetting(
        name=name,
        module=module,
        read=read,
        write=write_json,
        default=default,
        differs_by_rank=differs_by_rank,
        is_compared=is_compared,
        is_of_streams=is_of_streams,
    )
