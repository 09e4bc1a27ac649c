"""Random generators among the globals of loaded modules: of libraries, and of what samples import.

A sample may draw from a generator that nothing leads to from its dataset: a global of an installed
package, or of a module that `__getitem__` imports. So the globals of all modules are looked at, of
each module once, after its import: for generators, for objects that have one as an attribute, and
for the names that a generator made later usually has. It takes 3 ms for 1,100 modules, torch's
among them, and 50 ms for 4,500. Only a module's dictionary is read: to ask a module for an
attribute may import others.

Left out: the standard library, torch, NumPy and stoker, whose generators have their own rules, and
the script, which another host does not run: what its functions read is found with the dataset.
"""

import functools
import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import BuiltinMethodType, FunctionType, ModuleType
from typing import NamedTuple, cast

import numpy as np
import torch

from stoker.feed.reachable import CachingFunction, attributes_of, is_users, is_users_name

GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
# Of a global that is a generator once it is made, or leads to one; also with a "_" before it.
_NAMES = (
    *("rng", "RNG", "GLOBAL_RNG", "global_rng", "default_rng", "rngs", "local", "state"),
    *("gen", "generator", "GENERATOR", "generators", "random_state", "random_generator"),
    *("get_rng", "get_generator", "rng_of"),
)
_USUAL_NAMES = frozenset((*_NAMES, *(f"_{name}" for name in _NAMES)))
# Where a usual name leads to: another value than these is found by itself, or is not followed.
_MAKERS = (type(None), dict, list, threading.local, ContextVar, CachingFunction)
_CONTAINERS = (dict, list, tuple)
_OWN_RULES = frozenset(("torch", "numpy", "stoker", "__main__", "__mp_main__"))
_SHORT = 64
_MAX_FILE_BYTES = 1 << 20

Members = Mapping[object, object]


class ModulePlace(NamedTuple):
    """Where a generator is, or may be later: a name in a dictionary, and its path."""

    path: str
    members: Members
    name: str


class _Global(NamedTuple):
    """A global of a module that is a generator, or may lead to one."""

    # First, so that they are sorted by both.
    module: str
    name: str
    members: dict[str, object]


class ModuleGenerators:
    """What the modules of this process have among their globals, each looked at once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._num_modules = 0
        self._globals: list[_Global] = []
        self._in_classes: list[ModulePlace] = []
        self._version = 0

    def version(self) -> int:
        """Returns a number that grows as modules come that may matter; 0.1 us if none has."""
        if len(sys.modules) != self._num_modules:
            self._look()
        return self._version

    def places(self) -> list[ModulePlace]:
        """Returns where generators are, in the order of their paths."""
        self.version()
        holders: dict[int, list[_Global]] = {}
        places = list(self._in_classes)
        for held in self._globals:
            value = held.members.get(held.name)
            if value is None or isinstance(value, _MAKERS):
                places.append(_place_of(held))
            else:
                holders.setdefault(id(value), []).append(held)
        for several in holders.values():
            places += _places_in(_home_of(several))
        return sorted(places, key=lambda place: place.path)

    def place_of(self, generator: object) -> tuple[str, ...] | None:
        """Returns the module that has a generator, and its name there; or that of an object of it.

        None: no module has it.
        """
        self.version()
        holders = [one for one in self._globals if one.members.get(one.name) is generator]
        if holders:
            home = _home_of(holders)
            return home.module, home.name
        holders = [one for one in self._globals if _name_within(one, generator)]
        if not holders:
            return None
        home = _home_of(holders)
        return home.module, home.name, _name_within(home, generator)

    def _look(self) -> None:
        # A copy: another thread may import during this.
        modules = sys.modules.copy()
        self._num_modules = len(modules)
        for name in modules.keys() - self._seen:
            module = modules[name]
            if not _is_looked_at(name, module):
                self._seen.add(name)
                continue
            members = cast("dict[str, object]", globals_of(module))
            # Else it is looked at once its import has ended, as soon as another one comes.
            if not getattr(members.get("__spec__"), "_initializing", False):
                self._seen.add(name)
                self._look_at(name, module, members)

    def _look_at(self, name: str, module: ModuleType, members: dict[str, object]) -> None:
        if members.get("__name__") != name:
            # Another name of a module that is looked at under its own.
            return
        # First by its text: paths of thousands of modules take longer than all else.
        is_of_user = "-packages" not in str(members.get("__file__")) and is_users(module)
        kinds = set(map(type, list(members.values())))
        names: set[str] = set(members.keys() & _USUAL_NAMES)
        if any(_may_hold(kind) for kind in kinds):
            names.update(
                key for key, value in list(members.items()) if _may_hold(cast("type", type(value)))
            )
        if is_of_user:
            names.update(key for key, value in list(members.items()) if _has_generators(value))
            self._in_classes += _in_classes_of(name, members)
        leading = [_Global(name, key, members) for key in names if _leads_on(members[key])]
        self._globals += leading
        self._version += 1


@functools.cache
def module_generators() -> ModuleGenerators:
    """Returns what is known of this process's modules; a fork has what its parent knew."""
    return ModuleGenerators()


def know_modules(seeding: str) -> None:
    """Looks at them once, for all workers that are forked later: each would copy their pages."""
    if seeding != "torch":
        module_generators().version()


def globals_of(module: object) -> dict[object, object]:
    """Returns the globals of a module, or of the one of a name; an empty one: it is not there."""
    if type(module) is str:
        module = sys.modules.get(module)
    if not issubclass(type(module), ModuleType):
        return {}
    # Not `vars` or `isinstance`, which ask a lazy module's own code.
    members: dict[object, object] = object.__getattribute__(module, "__dict__")
    return members


def is_of_library(name: str) -> bool:
    """Returns whether a module is an installed package's, without rules of its own."""
    return not _has_own_rules(name) and not is_users_name(name)


def may_be_made_by(value: object, module: str) -> bool:
    """Returns whether a global may be, hold or become a generator of this module."""
    if type(value) is FunctionType:
        keeps = value.__defaults__ or value.__kwdefaults__ or value.__closure__
        return bool(keeps) and value.__module__ == module
    if isinstance(value, type):
        return value.__module__ == module
    kinds = (*_MAKERS, tuple, functools.partial, BuiltinMethodType)
    return isinstance(value, kinds) or _may_hold(cast("type", type(value)))


def _has_own_rules(name: str) -> bool:
    top = name.partition(".")[0]
    return top in _OWN_RULES or top in sys.stdlib_module_names


def _is_looked_at(name: str, module: object) -> bool:
    return issubclass(type(module), ModuleType) and not _has_own_rules(name)


@functools.lru_cache(maxsize=4096)
def _may_hold(kind: type) -> bool:
    """Returns whether objects of a class are generators, or may have one as an attribute."""
    if issubclass(kind, GENERATORS):
        return True
    module = vars(kind).get("__module__")
    if issubclass(kind, type | ModuleType) or type(module) is not str:
        return False
    top = module.partition(".")[0]
    return top != "builtins" and top not in _OWN_RULES and top not in sys.stdlib_module_names


def global_generators() -> list[object]:
    """Returns the objects behind `random`, `numpy.random` and torch's default CPU generator."""
    generators: list[object] = [torch.default_generator, getattr(random, "_inst", None)]
    of_numpy = getattr(np.random.mtrand, "_rand", None)
    return [*generators, of_numpy, getattr(of_numpy, "_bit_generator", None)]


def _is_own(value: object) -> bool:
    """Returns whether an object is a generator, but none behind the global functions."""
    if not issubclass(type(value), GENERATORS):
        return False
    return not any(value is generator for generator in global_generators())


def _leads_on(value: object) -> bool:
    if _is_own(value) or type(value) in _MAKERS or type(value) is tuple:
        return True
    return next(_generators_of(value), "") != ""


def _has_generators(value: object) -> bool:
    """Returns whether a short container has generators."""
    if type(value) not in _CONTAINERS:
        return False
    items = value.values() if type(value) is dict else cast("list[object]", value)
    return len(items) <= _SHORT and any(map(_is_own, items))


def _in_classes_of(module: str, members: dict[str, object]) -> Iterator[ModulePlace]:
    """Yields the generators in attributes of the classes that a user's module defines."""
    for value in list(members.values()):
        if not isinstance(value, type) or value.__module__ != module:
            continue
        of_class = cast("Members", vars(value))
        for name, member in list(of_class.items()):
            if _is_own(member):
                yield ModulePlace(f"{module}.{value.__qualname__}.{name}", of_class, str(name))


def _generators_of(value: object) -> Iterator[str]:
    """Yields the attributes of an object that are generators, or have the name of one."""
    for name, member in list((attributes_of(value) or {}).items()):
        if type(name) is not str:
            continue
        is_made_later = member is None and name in _USUAL_NAMES
        if is_made_later or _is_own(member):
            yield name


def _name_within(held: _Global, generator: object) -> str:
    """Returns the attribute of a global that is a generator; empty: it has none that is."""
    attributes = attributes_of(held.members.get(held.name)) or {}
    names = (str(name) for name, member in list(attributes.items()) if member is generator)
    return next(names, "")


def _place_of(held: _Global) -> ModulePlace:
    members = cast("Members", held.members)
    return ModulePlace(f"{held.module}.{held.name}", members, held.name)


def _places_in(held: _Global) -> Iterator[ModulePlace]:
    value = held.members.get(held.name)
    if issubclass(type(value), GENERATORS) or type(value) in _CONTAINERS:
        yield _place_of(held)
        return
    attributes = attributes_of(value) or {}
    for name in _generators_of(value):
        yield ModulePlace(f"{held.module}.{held.name}.{name}", attributes, name)


def _home_of(several: list[_Global]) -> _Global:
    """Returns, of modules that have one object, the one that makes it: each process has that one.

    Which others there are depends on what a process has imported.
    """
    ordered = sorted(several)
    if len(ordered) == 1:
        return ordered[0]
    return next((held for held in ordered if _assigns(held)), ordered[0])


def _assigns(held: _Global) -> bool:
    return _is_assigned(str(held.members.get("__file__")), held.name)


@functools.lru_cache(maxsize=1024)
def _is_assigned(file: str, name: str) -> bool:
    """Returns whether a module's text assigns to a name, in place of importing it."""
    if not file.endswith(".py"):
        return False
    # Of a file that has gone nothing is known.
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as opened:
        assignment = rf"^[ \t]*(?:\w+\s*,\s*)*{re.escape(name)}\b[^=\n(]*=(?!=)"
        return re.search(assignment, opened.read(_MAX_FILE_BYTES), re.MULTILINE) is not None
    return False
