"""Random generators that a dataset or a transform holds: found by one walk, and seeded.

A generator may be in an attribute (NumPy's `default_rng()`, the `RandomState` of MONAI's
transforms), a short container, a partial, a closure, or a global that a function of the user's
names. It is named by its path (`dataset.transform.rng`), which is the same in every process. The
walk is breadth first and runs none of the objects' code.
"""

import contextlib
import functools
import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import NamedTuple, cast

import numpy as np
import torch

from stoker.host.installed import INSTALLED_FILE

# Largest seed for torch: scripts make an int64 of `initial_seed()`.
MAX_SEED = (1 << 63) - 1

# Objects that one walk visits, in 10 to 20 ms; what is near to the dataset is found first.
MAX_OBJECTS = 10_000
# A longer container holds samples.
_SHORT = 64
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type)
_DATA = (np.ndarray, np.generic, torch.Tensor, torch.dtype, torch.device, ModuleType)
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


# The three global ones.
GLOBALS: dict[str, object] = {
    "python": random._inst,
    "numpy": np.random.mtrand._rand,
    "torch": torch.default_generator,
}


def is_generator(value: object) -> bool:
    """Returns whether it is a random generator whose state can be set."""
    # By its type: `__class__` may run code.
    kind = type(value)
    if not issubclass(kind, _GENERATORS) or issubclass(kind, random.SystemRandom):
        return False
    return not isinstance(value, torch.Generator) or value.device.type == "cpu"


def read_state(generator: object) -> object:
    match generator:
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
    return cast("torch.Generator", generator).get_state()


def write_state(generator: object, state: object) -> None:
    match generator:
        case random.Random():
            generator.setstate(cast("tuple[object, ...]", state))
        case np.random.Generator():
            generator.bit_generator.state = state  # type: ignore[assignment]
        case _:
            generator.set_state(state)  # type: ignore[attr-defined]


def _seed(generator: object, seed: bytes) -> None:
    """Seeds a generator from 32 bytes."""
    number = int.from_bytes(seed[:16], "little")
    match generator:
        case torch.Generator():
            generator.manual_seed(number & MAX_SEED)
        case random.Random():
            generator.seed(number)
        case np.random.RandomState():
            generator.seed(np.frombuffer(seed, dtype="<u4"))
        case np.random.Generator():
            bits = generator.bit_generator
            bits.state = type(bits)(np.random.SeedSequence(number)).state


class FoundGenerator(NamedTuple):
    """A random generator found inside an object."""

    path: str
    value: object

    def seed(self, digest: bytes) -> None:
        path = self.path.encode("utf-8", "surrogatepass")
        _seed(self.value, hashlib.blake2b(path + digest, digest_size=32).digest())


def find_generators(roots: Mapping[str, object]) -> list[FoundGenerator]:
    """Returns the generators that can be reached from `roots`, but the three global ones.

    Args:
        roots: Objects, by the names that paths begin with.
    """
    found: list[FoundGenerator] = []
    waiting = deque(roots.items())
    # Kept, so that their addresses are not used again.
    seen = {id(value): value for value in GLOBALS.values()}
    while waiting and len(seen) < MAX_OBJECTS:
        path, value = waiting.popleft()
        if issubclass(type(value), _ATOMS + _DATA) or id(value) in seen:
            continue
        seen[id(value)] = value
        if not issubclass(type(value), _GENERATORS):
            waiting.extend((path + step, child) for step, child in _children(value))
        elif is_generator(value):
            found.append(FoundGenerator(path, value))
    return found


def _children(value: object) -> Iterator[tuple[str, object]]:
    # By its type: `__class__` may run code.
    kind = type(value)
    if issubclass(kind, FunctionType):
        yield from _of_function(cast("FunctionType", value))
        return
    items: list[object] = []
    if issubclass(kind, list | tuple | deque):
        items = list(cast("list[object]", value))
    elif issubclass(kind, dict):
        items = list(cast("dict[object, object]", value).values())
    if len(items) <= _SHORT:
        yield from ((f"[{number}]", item) for number, item in enumerate(items))
    yield from _of_object(value)


def _of_object(value: object) -> Iterator[tuple[str, object]]:
    attributes: object = None
    with contextlib.suppress(AttributeError):
        attributes = object.__getattribute__(value, "__dict__")
    if type(attributes) is dict:
        for name in sorted(name for name in attributes if type(name) is str):
            yield f".{name}", attributes[name]
    for base in type(value).__mro__[:-1]:
        for name, member in sorted(vars(base).items()):
            # A slot, which may be empty; also what partials and bound methods hold.
            if type(member) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):
                    yield f".{name}", member.__get__(value)
            # What all objects of a class share, as MONAI's; of the user's methods what they name.
            elif issubclass(type(member), _GENERATORS) or _is_users(member):
                yield f".{name}", member


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        # It may have no content yet.
        with contextlib.suppress(ValueError):
            yield f".{name}", cell.cell_contents
    if _is_users(function):
        # The script's, in a process that was spawned.
        module = function.__module__.replace("__mp_main__", "__main__")
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                yield f" {module}.{name}", function.__globals__[name]


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[str, ...]:
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= dict.fromkeys(_names_in(inner))
    return tuple(names)


def _is_users(function: object) -> bool:
    """Returns whether it is a function of the script, or of a module outside installed packages."""
    if not isinstance(function, FunctionType):
        return False
    name = str(function.__module__)
    return not (name.startswith("stoker.") or INSTALLED_FILE.search(function.__code__.co_filename))
