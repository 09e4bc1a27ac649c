"""Random generators that a dataset, transform or library holds: found and seeded.

A dataset or a library may draw from a generator that is not a global one: numpy's `default_rng()`
in an attribute, the `RandomState` of MONAI's transforms, Albumentations' two. So the objects that
make batches are searched, breadth first, once they are there: attributes, containers, closures,
class attributes, results that a function keeps (`lru_cache`), and globals that functions of the
user's modules name. A generator is named by its path (`dataset.transform.rng`), which is the same
in every process.

What nothing leads to from these objects is looked for in modules of libraries that their code
names, which are searched likewise, and among the globals of all loaded modules (module_generators).
Such a generator is idle, and keeps its state, until a sample has drawn from it: libraries have some
for other ends.

One that is made at its first use is noticed without a walk: a dictionary has grown, or a None in it
was replaced (40 ns each). One that samples replace, each by another one, is followed: read again
where it is kept, each time that it is seeded.
"""

import builtins
import functools
import hashlib
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from operator import call, is_
from types import (
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Literal, NamedTuple, cast

import numpy as np
import torch

from stoker.feed.module_generators import (
    ModulePlace,
    global_generators,
    globals_of,
    is_of_library,
    may_be_made_by,
    module_generators,
)
from stoker.feed.reachable import (
    CachingFunction,
    attributes_of,
    behind_proxy,
    cache_of,
    cached_results,
    contents,
    globals_read,
    in_context,
    is_users,
    is_users_name,
    names_around_imports,
    read_slot,
    slots_of,
)

# Largest seed for torch: scripts make an int64 of `initial_seed()`.
MAX_SEED = (1 << 63) - 1

_PCG = (np.random.PCG64, np.random.PCG64DXSM)
# Objects that one walk visits, in 10 to 20 ms; what is near to the dataset is found first.
MAX_OBJECTS = 10_000
# And then as many more, but for the items of long containers: a transform behind all samples.
_MAX_OTHERS = 10_000
# Behind a global with the name of a generator.
_MAX_IN_GLOBAL = 64
# Modules of libraries that the dataset's code names, and objects of each: 1 to 10 ms.
_MAX_NEAR = 32
_MAX_IN_NEAR = 1000
# Of what is None there, and watched: 0.1 us each for every batch.
_MAX_NONE = 64
# To be seeded for each batch: 2 to 25 us each.
MAX_GENERATORS = 256
# A longer container holds samples, unless its first items are objects.
_SHORT = 64
_MAX_ITEMS = 1024
# Dictionaries that are looked at after each batch.
_MAX_WATCHED = 256
# A dictionary that grew this often without a generator in it is a cache.
_MAX_CHANGES = 8
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice)
_DATA = (np.ndarray, np.generic, torch.Tensor, torch.dtype, torch.device, ModuleType)
_BUILT_IN = (
    FunctionType,
    MethodType,
    BuiltinMethodType,
    functools.partial,
    list,
    tuple,
    deque,
    dict,
)
# A class of another language with such a method draws random numbers.
_SEEDERS = ("seed", "manual_seed", "set_random_state", "set_seed", "reseed")
_PYTHONS = (FunctionType, staticmethod, classmethod, property, MemberDescriptorType)
# Methods of a class that have run in the trainer: a worker does not call them.
_IN_TRAINER = ("__init__", "__post_init__", "__getstate__", "__reduce__", "__reduce_ex__")
_MISSING = object()


class GeneratorKind(NamedTuple):
    """How a kind of generator is read, written, and seeded from 32 bytes."""

    read: Callable[[object], object]
    write: Callable[[object, object], object]
    seed: Callable[[object, bytes], object]


def kind_of(value: object) -> GeneratorKind | None:
    """Returns how to read and seed `value`; None if it is no generator whose state can be set."""
    kind = any_kind_of(value)
    return None if kind is None or is_out_of_reach(value) else kind


def any_kind_of(value: object) -> GeneratorKind | None:
    kind = type(value)
    if kind not in _known:
        _known[kind] = next((_KINDS[base] for base in _KINDS if issubclass(kind, base)), None)
    return _known[kind]


def is_out_of_reach(value: object) -> bool:
    # By its type: `__class__` may run code.
    if issubclass(type(value), torch.Generator):
        return cast("torch.Generator", value).device.type != "cpu"
    return issubclass(type(value), random.SystemRandom)


def _seed_torch(generator: torch.Generator, seed: bytes) -> None:
    generator.manual_seed(int.from_bytes(seed[:8], "little") & MAX_SEED)


def _seed_python(generator: random.Random, seed: bytes) -> None:
    generator.seed(int.from_bytes(seed[:16], "little"))


def _seed_bits(bits: np.random.BitGenerator, seed: bytes) -> None:
    if type(bits) in _PCG:
        # 2 us against 35 us; the increment is odd by definition.
        state, inc = (int.from_bytes(seed[at : at + 16], "little") for at in (0, 16))
        numbers = {"state": state, "inc": inc | 1}
        name = type(bits).__name__
        bits.state = {"bit_generator": name, "state": numbers, "has_uint32": 0, "uinteger": 0}
        return
    words = np.random.SeedSequence(int.from_bytes(seed[:16], "little"))
    bits.state = type(bits)(words).state


def _seed_legacy(generator: np.random.RandomState, seed: bytes) -> None:
    bits: np.random.BitGenerator = generator._bit_generator
    if type(bits) is np.random.MT19937:
        generator.seed(np.frombuffer(seed, dtype="<u4"))
        return
    _seed_bits(bits, seed)
    # It may hold the second of two normal draws.
    generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0})


def _set_bits(bits: np.random.BitGenerator, state: object) -> None:
    bits.state = state  # type: ignore[assignment]


def _kind(read: object, write: object, seed: object) -> GeneratorKind:
    """Returns functions of one class as functions of any object: `kind_of` has looked at it."""
    return GeneratorKind(
        cast("Callable[[object], object]", read),
        cast("Callable[[object, object], object]", write),
        cast("Callable[[object, bytes], object]", seed),
    )


_KINDS: dict[type, GeneratorKind] = {
    torch.Generator: _kind(torch.Generator.get_state, torch.Generator.set_state, _seed_torch),
    random.Random: _kind(random.Random.getstate, random.Random.setstate, _seed_python),
    np.random.Generator: _kind(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: _set_bits(generator.bit_generator, state),
        lambda generator, seed: _seed_bits(generator.bit_generator, seed),
    ),
    np.random.RandomState: _kind(
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
        _seed_legacy,
    ),
    np.random.BitGenerator: _kind(lambda bits: bits.state, _set_bits, _seed_bits),
}
_known: dict[type, GeneratorKind | None] = {}


_Sort = Literal[
    "plain",
    "function",
    "method",
    "class",
    "sequence",
    "dictionary",
    "partial",
    "cache",
    "proxy",
    "variable",
    "object",
]
_SORTS: tuple[tuple[_Sort, tuple[type, ...]], ...] = (
    ("plain", (*_ATOMS, *_DATA)),
    ("function", (FunctionType,)),
    ("method", (MethodType, BuiltinMethodType)),
    ("class", (type,)),
    ("sequence", (list, tuple, deque)),
    ("dictionary", (dict,)),
    ("partial", (functools.partial,)),
    ("cache", (CachingFunction,)),
    ("proxy", (MappingProxyType,)),
    ("variable", (ContextVar,)),
)


Dictionary = Mapping[object, object]


class FoundGenerator(NamedTuple):
    """A random generator found inside an object; `name` is a digest of its path."""

    path: str
    value: object
    kind: GeneratorKind
    name: "hashlib.blake2b"


class _GeneratorPlace(NamedTuple):
    """Where a generator is kept, that samples replace."""

    get: Callable[[object], object]
    key: object


class _WatchedGenerator:
    """Detects changes in objects by comparing lists, without a Python loop."""

    def __init__(self) -> None:
        self._dictionaries: list[Dictionary] = []
        self._sizes: list[int] = []
        self._gets: list[Callable[[object], object]] = []
        self._keys: list[object] = []
        self._values: list[object] = []

    def size_of(self, dictionary: Dictionary) -> None:
        if len(self._sizes) < _MAX_WATCHED:
            self._dictionaries.append(dictionary)
            self._sizes.append(len(dictionary))

    def entry(self, get: Callable[[object], object], key: object, value: object) -> None:
        if len(self._gets) < _MAX_WATCHED:
            self._gets.append(get)
            self._keys.append(key)
            self._values.append(value)

    def has_changed(self) -> bool:
        are_same = all(map(is_, map(call, self._gets, self._keys), self._values))
        return not are_same or list(map(len, self._dictionaries)) != self._sizes

    def grown(self) -> list[Dictionary]:
        sizes = zip(self._dictionaries, self._sizes, strict=True)
        return [dictionary for dictionary, size in sizes if len(dictionary) != size]


class HeldGenerators:
    """The generators that can be reached from `roots`, by the names that paths begin with.

    Args:
        with_modules: Also those of loaded modules that nothing in `roots` leads to.

    Attributes:
        found: To be seeded.
        idle: Those of modules that no sample has drawn from.
    """

    def __init__(self, roots: Mapping[str, object], *, with_modules: bool = False) -> None:
        self._roots = roots
        self.found: list[FoundGenerator] = []
        self.idle: list[FoundGenerator] = []
        # Paths of those of modules that samples have drawn from.
        self._drawn_globals: set[str] = set()
        self._modules = module_generators() if with_modules else None
        self._modules_version = 0
        # Path to class of generators that cannot be seeded.
        self.out_of_reach: dict[str, str] = {}
        self._changes: dict[int, tuple[Dictionary, int]] = {}
        self._watched = _WatchedGenerator()
        # Paths of generators that were replaced while the batch was made that is made now.
        self._replaced: set[str] = set()
        # By path: where those are kept that samples replace, whenever they are made.
        self.followed: dict[str, _GeneratorPlace] = {}
        self.look()

    def begin_batch(self) -> None:
        """Called before a batch is made, which may be made several times from the same seeds."""
        self._replaced.clear()

    def follow(self) -> bool:
        """Takes what samples have put in a generator's place; returns whether they have."""
        is_other = False
        for number, generator in enumerate(self.found):
            place = self.followed.get(generator.path)
            value = generator.value if place is None else place.get(place.key)
            kind = kind_of(value)
            if value is not generator.value and kind is not None:
                self.found[number] = generator._replace(value=value, kind=kind)
                is_other = True
        return is_other

    def has_changed(self) -> bool:
        """Returns whether there may be others now; 0.5 us for a dataset with ten attributes."""
        if self._modules is not None and self._modules.version() != self._modules_version:
            return True
        return self._watched.has_changed()

    def draw_from(self, idle: Collection[FoundGenerator]) -> None:
        """Has idle ones seeded from now on."""
        paths = {generator.path for generator in idle}
        self._drawn_globals |= paths
        self.found = [*self.found, *idle]
        self.idle = [generator for generator in self.idle if generator.path not in paths]

    def look(self) -> bool:
        """Searches again, without dictionaries that are caches; returns whether one is new."""
        caches = self._caches_so_far()
        before = {generator.path: generator.value for generator in (*self.found, *self.idle)}
        ids_before = set(map(id, before.values()))
        walk = self._walked(caches)
        new = {generator.path for generator in walk.found if id(generator.value) not in ids_before}
        replaced = new & before.keys()
        self._drawn_globals |= replaced & walk.of_modules
        if replaced & self._replaced:
            # Again, though the samples were the same: so they do it each time.
            for path in replaced & self._replaced & walk.places.keys():
                self.followed[path] = walk.places[path]
            walk = self._walked(caches)
        self._replaced |= replaced
        self._keep(walk)
        if new:
            self._changes.clear()
        return bool(new)

    def _caches_so_far(self) -> set[int]:
        """Counts what has grown since the last search; returns what does so again and again."""
        for grown in self._watched.grown():
            _, count = self._changes.get(id(grown), (grown, 0))
            # Kept with its count, so that its address is not used again.
            self._changes[id(grown)] = (grown, count + 1)
        return {key for key, (_, count) in self._changes.items() if count >= _MAX_CHANGES}

    def _keep(self, walk: "_Walk") -> None:
        """Keeps what a search has found; of modules' generators only those in use are seeded."""
        idle = walk.of_modules - self._drawn_globals
        self.found = [generator for generator in walk.found if generator.path not in idle]
        self.idle = [generator for generator in walk.found if generator.path in idle]
        self._watched = walk.watched
        self.out_of_reach = walk.out_of_reach

    def _walked(self, caches: set[int]) -> "_Walk":
        places: list[ModulePlace] = []
        if self._modules is not None:
            self._modules_version = self._modules.version()
            places = self._modules.places()
        walk = _Walk(caches, self.followed)
        walk.through(self._roots, places)
        return walk

    def seed(self, digest: bytes) -> None:
        for _, value, kind, name in self.found:
            digest_of_name = name.copy()
            digest_of_name.update(digest)
            kind.seed(value, digest_of_name.digest())

    def states(self) -> list[tuple[FoundGenerator, object]]:
        return [(generator, generator.kind.read(generator.value)) for generator in self.found]


def put_back(states: Iterable[tuple[FoundGenerator, object]]) -> None:
    for generator, state in states:
        generator.kind.write(generator.value, state)


class _Walk:
    """Search for generators in objects; visits each once, and runs none of their code."""

    def __init__(self, caches: set[int], followed: Collection[str]) -> None:
        self._caches = caches
        self._followed = followed
        # By path: where those generators are kept whose place is watched.
        self.places: dict[str, _GeneratorPlace] = {}
        # Kept, so that their addresses are not used again.
        self._seen: dict[int, object] = {
            id(generator): generator for generator in global_generators()
        }
        # Path, object, and whether it is one of many that a container has.
        self._waiting: deque[tuple[str, object, bool]] = deque()
        self._is_one_of_many = False
        self.found: list[FoundGenerator] = []
        # Paths of those that only a module leads to.
        self.of_modules: set[str] = set()
        self.out_of_reach: dict[str, str] = {}
        self.watched = _WatchedGenerator()
        # What functions import as they run, as in `__getitem__`: module, and a name there.
        self._imported: deque[tuple[str, str]] = deque()
        # Modules of libraries that are named by what was visited, in the order of visits.
        self._near: dict[str, None] = {}
        self._watches_all = True
        # Globals and class attributes of these modules that are watched.
        self._num_none = 0

    def through(self, roots: Mapping[str, object], places: Sequence[ModulePlace]) -> None:
        for name, value in roots.items():
            self._push(name, value)
        self._visit_next(MAX_OBJECTS)
        self._waiting = deque(waiting for waiting in self._waiting if not waiting[2])
        self._visit_next(_MAX_OTHERS)
        self._visit_imported()
        self._visit_modules(places)
        # A bit generator that a found generator draws from is the same one.
        inner = {id(_bits_of(generator.value)) for generator in self.found}
        self.found = [generator for generator in self.found if id(generator.value) not in inner]

    def _visit_imported(self) -> None:
        """Visits what is imported in functions, last: which modules are there depends on when."""
        while self._imported:
            name, named = self._imported.popleft()
            module = sys.modules.get(name)
            if module is not None and is_users(module):
                self._global(vars(module), (named,))
                self._visit_next(_MAX_OTHERS)
            elif module is not None:
                self._name_in_library(module, (named,))

    def _visit_modules(self, places: Sequence[ModulePlace]) -> None:
        held = {generator.path for generator in self.found}
        # Of no interest where a library has it for other ends.
        out_of_reach = dict(self.out_of_reach)
        self._watches_all = False
        for name in list(self._near)[:_MAX_NEAR]:
            self._waiting.clear()
            self._near_module(name)
            self._visit_next(_MAX_IN_NEAR)
        self._watches_all = True
        for place in places:
            self._waiting.clear()
            self._entry(place.path, place.members, place.name)
            self._visit_next(_MAX_IN_GLOBAL)
        self.out_of_reach = out_of_reach
        self.of_modules = {generator.path for generator in self.found} - held

    def _near_module(self, name: str) -> None:
        """Visits what a library's module has made itself, and watches what it may make later."""
        members = globals_of(name)
        self.watched.size_of(members)
        for key in sorted(key for key in members if type(key) is str and key[:2] != "__"):
            value = members[key]
            if may_be_made_by(value, name):
                self._entry(f"{name}.{key}", members, key)
            self._watch_what_may_come(members, key)

    def _watch_what_may_come(self, members: Dictionary, name: str) -> None:
        """Watches where a library may put a generator that it makes at its first use."""
        value = members[name]
        if value is None:
            self._watch_none(members, name)
        elif type(value) is dict and len(value) < _SHORT:
            self.watched.size_of(cast("Dictionary", value))
        elif issubclass(type(value), threading.local):
            self.watched.size_of(cast("Dictionary", attributes_of(value)))
        elif type(value) is CachingFunction:
            self.watched.size_of(cache_of(value))
        elif type(value) is ContextVar:
            self.watched.entry(in_context, value, in_context(value))

    def _watch_none(self, members: Dictionary, name: str) -> None:
        if self._num_none < _MAX_NONE:
            self._num_none += 1
            self.watched.entry(members.get, name, None)

    def _note_near(self, module: object) -> None:
        if type(module) is str and is_of_library(module):
            self._near[module] = None

    def _visit_next(self, num_objects: int) -> None:
        for _ in range(num_objects):
            if not self._waiting:
                break
            path, value, self._is_one_of_many = self._waiting.popleft()
            self._visit(path, value)

    def _push(self, path: str, value: object) -> None:
        if _sort_of(_held_kind(value)) != "plain" and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._waiting.append((path, value, self._is_one_of_many))

    def _visit(self, path: str, value: object) -> None:
        kind = kind_of(value)
        if kind is not None:
            self._find(path, value, kind)
            return
        match _sort_of(_held_kind(value)):
            case "function":
                self._function(path, cast("FunctionType", value))
            case "method":
                self._method(path, cast("MethodType | BuiltinMethodType", value))
            case "class":
                self._class(cast("type", value))
            case "sequence":
                self._sequence(path, cast("Sequence[object]", value))
            case "dictionary":
                self._dictionary(path, cast("dict[object, object]", value))
            case "partial" | "cache" | "proxy" | "variable":
                self._holder(path, value)
        if type(value) not in _BUILT_IN:
            self._object(path, value)

    def _holder(self, path: str, value: object) -> None:
        """Visits what shows what it holds in a way of its own."""
        match _sort_of(_held_kind(value)):
            case "partial":
                partial = cast("functools.partial[object]", value)
                self._push(f"{path}.func", partial.func)
                self._sequence(f"{path}.args", partial.args)
                keywords = cast("dict[object, object]", partial.keywords)
                self._dictionary(f"{path}.keywords", keywords)
            case "cache":
                self._cache(path, value)
            case "proxy":
                self._dictionary(path, behind_proxy(value))
            case "variable":
                self._read(path, in_context, value)

    def _method(self, path: str, method: MethodType | BuiltinMethodType) -> None:
        if isinstance(method, MethodType):
            self._push(path, method.__func__)
            self._push(f"{path}.__self__", method.__self__)
        elif any_kind_of(method.__self__) is not None:
            # As random.Random(1).random; others are functions of modules.
            self._push(f"{path}.__self__", method.__self__)

    def _find(self, path: str, value: object, kind: GeneratorKind) -> None:
        if len(self.found) >= MAX_GENERATORS:
            what = f"a {_name(type(value))}, the first of more than {MAX_GENERATORS}"
            self.out_of_reach.setdefault(path, what)
            self._waiting.clear()
            return
        name = hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=32)
        self.found.append(FoundGenerator(path, value, kind, name))

    def _object(self, path: str, value: object) -> None:
        kind = _held_kind(value)
        attributes = attributes_of(value)
        if attributes is not None:
            self._watch(attributes)
            for name in sorted(name for name in attributes if type(name) is str):
                self._entry(f"{path}.{name}", attributes, name)
        if id(kind) not in self._seen:
            self._seen[id(kind)] = kind
            self._class(kind)
        for name, member in slots_of(kind):
            self._read(f"{path}.{name}", functools.partial(read_slot, member), value)
        if is_out_of_reach(value) or _is_foreign_generator(kind):
            self.out_of_reach.setdefault(path, f"a {_name(kind)}")

    def _sequence(self, path: str, values: Sequence[object]) -> None:
        if len(values) > _SHORT:
            if _is_data(islice(values, 4)):
                return
            self._is_one_of_many = True
        for number, value in enumerate(islice(values, _MAX_ITEMS)):
            self._push(f"{path}[{number}]", value)

    def _dictionary(self, path: str, values: dict[object, object]) -> None:
        if len(values) > _SHORT:
            if _is_data(islice(values.values(), 4)):
                return
            self._is_one_of_many = True
        self._watch(values)
        keys = list(islice(values, _MAX_ITEMS))
        if all(type(key) is str for key in keys):
            keys.sort(key=str)
        for number, key in enumerate(keys):
            shown = _shown(key) if _sort_of(_held_kind(key)) == "plain" else f"#{number}"
            self._entry(f"{path}[{shown}]", values, key)

    def _entry(self, path: str, values: Dictionary, key: object) -> None:
        self._read(path, values.get, key)

    def _read(self, path: str, get: Callable[[object], object], key: object) -> None:
        value = get(key)
        # Watched: a generator may be made where None is now, or be replaced by another one.
        if kind_of(value) is not None:
            self.places[path] = _GeneratorPlace(get, key)
            if path not in self._followed:
                self.watched.entry(get, key, value)
        elif value is None and self._watches_all:
            self.watched.entry(get, key, value)
        self._push(path, value)

    def _cache(self, path: str, function: object) -> None:
        cache = cache_of(function)
        if len(cache) > _MAX_ITEMS:
            # Of samples.
            return
        self._watch(cache)
        for number, (arguments, result) in enumerate(cached_results(function)):
            shown = repr(arguments) if _is_data([arguments]) else f"#{number}"
            self._push(f"{path}[{shown}]", result)

    def _watch(self, values: Dictionary) -> None:
        if id(values) not in self._caches and self._watches_all:
            self.watched.size_of(values)

    def _function(self, path: str, function: FunctionType) -> None:
        self._sequence(f"{path}.__defaults__", function.__defaults__ or ())
        for name in ("__kwdefaults__", "__dict__"):
            # Empty ones are not watched: every method of the user's classes has one.
            if values := getattr(function, name):
                self._dictionary(f"{path}.{name}", cast("dict[object, object]", values))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._read(f"{path}.{name}", contents, cell)
        if is_users_name(str(function.__globals__.get("__name__"))):
            for named in globals_read(function.__code__):
                self._global(function.__globals__, named)
            self._note_imported(function)
        else:
            self._note_near(function.__globals__.get("__name__"))

    def _note_imported(self, function: FunctionType) -> None:
        package = str(function.__globals__.get("__package__") or "")
        names = names_around_imports(function.__code__)
        for name in names:
            for full_name in (name, f"{package}.{name}"):
                self._imported += [(full_name, named) for named in names]

    def _global(self, known: dict[str, object], named: tuple[str, ...]) -> None:
        first, *rest = named
        value = known.get(first, _MISSING)
        if isinstance(value, ModuleType):
            if rest and is_users(value):
                self._global(vars(value), tuple(rest))
            else:
                self._name_in_library(value, rest)
        elif value is not _MISSING or not hasattr(builtins, first):
            # Also one that the function makes itself.
            module = _module(str(known.get("__name__")))
            self._entry(f"{module}.{first}", cast("Dictionary", known), first)

    def _name_in_library(self, module: ModuleType, names: Sequence[str]) -> None:
        """Notes the modules of libraries that code names, and those that define what it names."""
        members = globals_of(module)
        if not is_of_library(str(members.get("__name__"))):
            return
        self._note_near(members.get("__name__"))
        value = members.get(names[0]) if names else None
        if isinstance(value, ModuleType):
            self._name_in_library(value, names[1:])
        elif isinstance(value, FunctionType | type):
            self._note_near(value.__module__)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__[:-1]:
            is_seen = base is not kind and id(base) in self._seen
            if is_seen or base.__module__ == "builtins":
                continue
            self._seen[id(base)] = base
            members = cast("Dictionary", vars(base))
            names = sorted(name for name in members if type(name) is str)
            if is_users_name(base.__module__):
                self._watch(members)
                for name in names:
                    self._member_of_users_class(base, name)
            else:
                self._note_near(base.__module__)
                for name in names:
                    self._member_of_class(base, name)

    def _member_of_users_class(self, kind: type, name: str) -> None:
        is_entry = self._member_of_class(kind, name)
        value = vars(kind)[name]
        if value is None:
            # The user's code may make a generator there.
            self._entry(_path_in_class(kind, name), cast("Dictionary", vars(kind)), name)
        elif not is_entry and name not in _IN_TRAINER:
            self._push(_path_in_class(kind, name), _function_in(value))

    def _member_of_class(self, kind: type, name: str) -> bool:
        """Visits a member of a class if it may lead to a generator; returns whether it may."""
        members = cast("Dictionary", vars(kind))
        value = members[name]
        if value is None and not self._watches_all:
            self._watch_none(members, name)
        # A member of an enumeration is one of its class.
        is_member = type(value) is kind and not self._watches_all
        if kind_of(value) is None and not is_member:
            return False
        self._entry(_path_in_class(kind, name), members, name)
        return True


def _held_kind(value: object) -> type:
    return type(value)


@functools.lru_cache(maxsize=4096)
def _sort_of(kind: type) -> _Sort:
    for sort, kinds in _SORTS:
        if issubclass(kind, kinds):
            return sort
    return "object"


def _bits_of(value: object) -> object:
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    return value._bit_generator if isinstance(value, np.random.RandomState) else None


def _function_in(member: object) -> object:
    # By its type: `__class__` may run code.
    if type(member) in (staticmethod, classmethod):
        return vars(member).get("__wrapped__")
    if type(member) is property:
        return member.fget
    return member.func if type(member) is functools.cached_property else member


def _shown(key: object) -> str:
    """Returns a key in words, which are the same in each process."""
    if type(key) is int and key in (os.getpid(), threading.get_ident()):
        return "here"
    return repr(key)


def _is_data(values: Iterable[object], *, depth: int = 3) -> bool:
    for value in values if depth else ():
        match _sort_of(_held_kind(value)):
            case "plain":
                continue
            case "sequence":
                parts: Iterable[object] = cast("Sequence[object]", value)
            case "dictionary":
                parts = cast("dict[object, object]", value).values()
            case _:
                return False
        if not _is_data(islice(parts, 4), depth=depth - 1):
            return False
    return True


def _path_in_class(kind: type, name: str) -> str:
    return f"{_module(kind.__module__)}.{kind.__qualname__}.{name}"


def _module(name: str) -> str:
    # The script's, in a process that was spawned.
    return "__main__" if name == "__mp_main__" else name


@functools.lru_cache(maxsize=4096)
def _is_foreign_generator(kind: type) -> bool:
    """Returns whether a class of another language has a method that seeds."""
    for base in kind.__mro__:
        members = [vars(base).get(name) for name in _SEEDERS]
        if any(callable(member) and not isinstance(member, _PYTHONS) for member in members):
            return True
    return False


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
