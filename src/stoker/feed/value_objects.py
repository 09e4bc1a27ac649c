"""Small values of other classes: dates, fractions, ranges, named tuples, members of enumerations.

Also UUIDs, files in memory with their content and place, and how far torch's Sobol sequences are.

They are made again from plain arguments, which a state has. Who makes them again is a value of the
same class, in the same place of the new process: a state names no class.

What seeds generators (`rng.spawn(1)`) counts its children, so its argument is their number.
"""

import array
import copyreg
import enum
import functools
import io
import uuid
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Protocol, cast

import numpy as np
import torch

from stoker.feed.plain_values import bounds, is_packable, packed, unpacked
from stoker.feed.reachable import attributes_of

# Of these classes, and what inherits from them.
_KINDS = (
    enum.Enum,
    frozenset,
    range,
    tuple,
    int,
    float,
    complex,
    str,
    bytes,
    date,
    time,
    timedelta,
    Decimal,
    Fraction,
    array.array,
)
# By pickle's rules; from this protocol on tuples and numbers have arguments, too.
_PROTOCOL = 2


class _Maker(Protocol):
    def __call__(self, *arguments: object) -> object: ...


@dataclass(frozen=True, slots=True)
class ValueObject:
    """A value with the arguments that make it again.

    Attributes:
        arguments: Plain.
    """

    value: object
    arguments: tuple[object, ...]
    _make: _Maker

    def packed(self) -> tuple[object, ...]:
        """Returns the arguments as a state can hold them."""
        return tuple(cast("list[object]", packed([*self.arguments])))

    def made_of(self, arguments: tuple[object, ...]) -> object:
        """Returns a value of this class.

        Args:
            arguments: Of another one, packed.
        """
        return self._make(*map(unpacked, arguments))


def value_object_of(value: object) -> ValueObject | None:
    """Returns a value with its arguments; None: it is of no such class, or has more than these."""
    seeds = _seeds_of(value)
    if seeds is not None:
        make = cast("_Maker", functools.partial(_with_children, value, seeds))
        return ValueObject(value, (seeds.n_children_spawned,), make)
    further = _further(value)
    if further is not None:
        return further
    if not isinstance(value, _KINDS):
        return None
    if attributes_of(value) and not isinstance(value, enum.Enum):
        return None
    try:
        # A class of the user's may say how, and fail.
        make, arguments = cast("tuple[_Maker, object]", _reduced(value))
    except Exception:
        return None
    if not isinstance(arguments, tuple):
        return None
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        make = cast("_Maker", functools.partial(make, type(value)))
        arguments = arguments[1:]
    return ValueObject(value, arguments, make) if is_packable(arguments) else None


def _further(value: object) -> ValueObject | None:
    """Returns a value of a class that does not say itself of what it is made."""
    if type(value) is uuid.UUID:
        return ValueObject(value, (str(value),), cast("_Maker", uuid.UUID))
    if type(value) is torch.quasirandom.SobolEngine:
        make = cast("_Maker", functools.partial(_drawn_on, value))
        return ValueObject(value, (value.num_generated,), make)
    if type(value) is not io.StringIO and type(value) is not io.BytesIO:
        return None
    file = cast("io.BytesIO", value)
    make = cast("_Maker", functools.partial(_rewritten, file))
    if file.closed:
        return ValueObject(value, (), make)
    place = file.tell()
    length = file.seek(0, io.SEEK_END)
    file.seek(place)
    if length > bounds().nbytes:
        # A dataset's data, whose place alone changes.
        return ValueObject(value, (place,), make)
    return ValueObject(value, (place, file.getvalue()), make)


def _drawn_on(engine: torch.quasirandom.SobolEngine, count: int) -> object:
    """Returns a Sobol sequence, once it has given as many points."""
    engine.reset()  # type: ignore[no-untyped-call]
    if count:
        engine.fast_forward(count)  # type: ignore[no-untyped-call]
    return engine


def _rewritten(file: io.BytesIO, place: int | None = None, content: bytes | None = None) -> object:
    """Returns a file in memory, with another place and other content; None: it is closed."""
    if place is None:
        file.close()
        return file
    if content is not None and content != file.getvalue():
        file.seek(0)
        file.truncate()
        file.write(content)
    file.seek(place)
    return file


def _seeds_of(value: object) -> np.random.SeedSequence | None:
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        # Of numpy 1.25 and later.
        value = getattr(value, "seed_seq", None)
    return value if isinstance(value, np.random.SeedSequence) else None


def _with_children(value: object, seeds: np.random.SeedSequence, count: int) -> object:
    """Returns the value, once it has seeded as many generators."""
    seeds.spawn(max(0, count - seeds.n_children_spawned))
    return value


def _reduced(value: object) -> tuple[object, object]:
    parts = value.__reduce_ex__(_PROTOCOL)
    if isinstance(parts, str):
        raise TypeError("it is a global of its module")
    make, arguments, *rest = parts
    if any(rest):
        raise TypeError("it has more than arguments")
    return make, arguments
