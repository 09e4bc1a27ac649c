"""What Python objects refer to, read without running any of their code.

Attributes, slots, containers, closures and defaults, the globals that functions of the user's
modules read, and the attributes of the user's classes. Objects are found breadth first, so that
what is near to a dataset comes first, and named by their path (`dataset.transform.scale`).
"""

import dis
import functools
import gc
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Literal, NamedTuple, cast

ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice)
# Items of one container that are followed; a longer one holds samples.
_MAX_ITEMS = 64
_LEAVES = (
    *ATOMS,
    bytearray,
    BuiltinFunctionType,
    CodeType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
_MISSING = object()
_IMPORT = dis.opmap["IMPORT_NAME"]
CachingFunction = type(functools.lru_cache(len))


class Referrer(NamedTuple):
    """A place that refers to others: a container, an object's attributes, a function's globals.

    Attributes:
        path: How it is reached, as `dataset.transform`.
        holder: The object whose place this is.
        kind: "attributes" of an object, class or module, a "dict", or "items" of another container.
        read: Returns what it refers to now; names: yields their paths, in the same order.
    """

    path: str
    holder: object
    read: Callable[[], Collection[object]]
    names: Callable[[], Iterable[str]]
    kind: Literal["attributes", "dict", "items"] = "attributes"


class ReachableObject(NamedTuple):
    """An object that can be reached, with its parts."""

    path: str
    value: object
    parts: tuple[Referrer, ...]


def reachable(
    roots: Mapping[str, object], *, max_objects: int, is_leaf: Callable[[object], bool]
) -> Iterator[ReachableObject]:
    """Yields what can be reached from `roots`, nearest first, each object once.

    Args:
        roots: Objects by the names that paths begin with.
        max_objects: Ends the search.
        is_leaf: Whether not to look inside an object; atoms and modules are leaves anyway.
    """
    seen: dict[int, object] = {}
    waiting = deque(roots.items())
    while waiting and len(seen) < max_objects:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        # Kept, so that its address is not used again.
        seen[id(value)] = value
        parts = () if is_leaf(value) else tuple(_parts(path, value))
        yield ReachableObject(path, value, parts)
        for part in parts:
            names = islice(part.names(), _MAX_ITEMS)
            waiting.extend(zip(names, islice(part.read(), _MAX_ITEMS), strict=False))


def _parts(path: str, value: object) -> Iterator[Referrer]:
    kind = type(value)
    if issubclass(kind, dict):
        yield _entries(path, value, cast("dict[object, object]", value), style="[]")
    elif issubclass(kind, list | tuple | deque | set | frozenset):
        items = cast("Collection[object]", value)
        yield Referrer(path, value, lambda: items, lambda: _numbered(path, items), "items")
    elif kind is FunctionType:
        yield from _of_function(path, cast("FunctionType", value))
    elif kind is MethodType:
        method = cast("MethodType", value)
        ends = [method.__self__, method.__func__]
        yield Referrer(path, value, lambda: ends, lambda: [path, path])
    elif kind is functools.partial:
        partial = cast("functools.partial[object]", value)
        yield Referrer(
            path,
            value,
            lambda: [partial.func, partial.args, partial.keywords],
            lambda: [f"{path}.func", f"{path}.args", f"{path}.keywords"],
        )
    if isinstance(value, type):
        if is_users_name(value.__module__):
            members = cast("Mapping[object, object]", vars(value))
            yield _entries(value.__qualname__, value, members, style=".")
    elif kind is not FunctionType:
        yield from _of_object(path, value)


def _of_object(path: str, value: object) -> Iterator[Referrer]:
    kind: type = type(value)
    attributes = attributes_of(value)
    if attributes is not None:
        yield _entries(path, value, attributes, style=".")
    slots = slots_of(kind)
    if slots:
        names = [f"{path}.{name}" for name, _ in slots]
        yield Referrer(path, value, _slot_reader(slots, value), lambda: names)
    users = [base for base in kind.__mro__ if is_users_name(base.__module__)]
    if users:
        yield Referrer(path, value, lambda: list(users), lambda: [path] * len(users))


def _slot_reader(
    slots: tuple[tuple[str, MemberDescriptorType], ...], value: object
) -> Callable[[], list[object]]:
    """Returns a function that reads an object's slots: 30 ns a slot, where all of them are set."""
    getters = [member.__get__ for _, member in slots]

    def read() -> list[object]:
        try:
            return [get(value) for get in getters]
        except Exception:
            return [read_slot(member, value) for _, member in slots]

    return read


def _of_function(path: str, function: FunctionType) -> Iterator[Referrer]:
    # Its name says where a global of it was found.
    where = function.__qualname__
    cells = function.__closure__ or ()
    if cells:
        names = [f"{where} variable {name}" for name in function.__code__.co_freevars]
        yield Referrer(path, function, lambda: [contents(cell) for cell in cells], lambda: names)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if defaults:
        of_defaults = [f"{where} default"] * len(defaults)
        yield Referrer(path, function, lambda: defaults, lambda: of_defaults)
    places = _globals_of(function)
    if places:
        yield Referrer(
            path,
            function,
            lambda: [members.get(name) for members, name, _ in places],
            lambda: [shown for _, _, shown in places],
        )
    attributes = attributes_of(function)
    if attributes:
        yield _entries(where, function, attributes, style=".")


def _globals_of(function: FunctionType) -> list[tuple[dict[str, object], str, str]]:
    """Returns the places of the user's globals that a function reads."""
    module_globals = function.__globals__
    if not is_users_name(str(module_globals.get("__name__"))):
        return []
    places: list[tuple[dict[str, object], str, str]] = []
    for names in globals_read(function.__code__):
        place = global_place(module_globals, names)
        if place is not None:
            places.append(place)
    return places


def global_place(
    known: dict[str, object], names: tuple[str, ...]
) -> tuple[dict[str, object], str, str] | None:
    """Returns the dictionary, name and path of a global that code reads; None: not the user's."""
    first, *rest = names
    value = known.get(first, _MISSING)
    if value is _MISSING:
        return None
    if isinstance(value, ModuleType):
        return global_place(vars(value), tuple(rest)) if rest and is_users(value) else None
    return known, first, f"{known.get('__name__')}.{first}".removeprefix("__main__.")


def _entries(
    path: str, holder: object, entries: Mapping[object, object], *, style: str
) -> Referrer:
    begin, end = (".", "") if style == "." else ("[", "]")

    def names() -> Iterator[str]:
        shown = str if style == "." else repr
        keys = (shown(key) if isinstance(key, ATOMS) else "..." for key in entries)
        return (f"{path}{begin}{key}{end}" for key in keys)

    kind: Literal["attributes", "dict"] = "attributes" if style == "." else "dict"
    return Referrer(path, holder, entries.values, names, kind)


def _numbered(path: str, items: Iterable[object]) -> Iterator[str]:
    return (f"{path}[{number}]" for number, _ in enumerate(items))


@functools.lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    """Returns what a class keeps in slots, by their names: its own and those of its bases."""
    slots = []
    for base in kind.__mro__[:-1]:
        for name, member in sorted(vars(base).items()):
            if type(member) is MemberDescriptorType:
                slots.append((name, member))
    return tuple(slots)


def read_slot(member: MemberDescriptorType, value: object) -> object:
    try:
        return cast("object", member.__get__(value))
    except Exception:
        return None


def attributes_of(value: object) -> dict[object, object] | None:
    try:
        if isinstance(value, threading.local):
            return cast("dict[object, object]", value.__dict__)
        attributes: object = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return attributes if type(attributes) is dict else None


def behind_proxy(proxy: object) -> dict[object, object]:
    """Returns the dictionary of a MappingProxyType; an empty one, where it is of another class."""
    (mapping,) = gc.get_referents(proxy)
    return mapping if type(mapping) is dict else {}


def cache_of(function: object) -> dict[object, object]:
    """Returns the dictionary of a function of `functools.lru_cache`, by the arguments of its calls.

    Only the garbage collector shows it; an empty one, where it shows none.
    """
    wrapped = (attributes_of(function) or {}).get("__wrapped__")
    # It comes before the function whose results it has.
    for shown, behind in itertools.pairwise(gc.get_referents(function)):
        if behind is wrapped and type(shown) is dict:
            return shown
    return {}


def cached_results(function: object) -> list[tuple[object, object]]:
    """Returns arguments and result of each call that a function of `lru_cache` has kept."""
    cache = cache_of(function)
    link_kind = type(next(iter(cache.values()), None))
    # Of a cache with a bound, the dictionary has links, which show nothing.
    linked: dict[int, object] = {}
    shown = gc.get_referents(function)
    for arguments, result, behind in zip(shown, shown[1:], shown[2:], strict=False):
        if behind is link_kind:
            linked[id(arguments)] = result
    return [(arguments, linked.get(id(arguments), kept)) for arguments, kept in cache.items()]


def in_context(variable: object) -> object:
    """Returns what a ContextVar has in the context of this thread; None: nothing."""
    try:
        return cast("ContextVar[object]", variable).get()
    except LookupError:
        return None


def contents(cell: object) -> object:
    assert isinstance(cell, CellType)
    try:
        return cast("object", cell.cell_contents)
    except ValueError:
        return None


@functools.lru_cache(maxsize=4096)
def globals_read(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Returns the globals that code reads, with attributes: `cfg.SIZE` is ("cfg", "SIZE")."""
    read: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, name)
            continue
        if path and step.opname == "STORE_ATTR":
            path = ()
        if path:
            read[path] = None
        path = (name,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            read |= dict.fromkeys(globals_read(inner))
    return tuple(read)


@functools.lru_cache(maxsize=4096)
def names_around_imports(code: CodeType) -> tuple[str, ...]:
    """Returns all names in code that imports something as it runs; empty: it imports nothing."""
    names: dict[str, None] = {}
    if _IMPORT in code.co_code[::2] or "import_module" in code.co_names:
        names |= dict.fromkeys(code.co_names)
        # As `importlib.import_module` has them.
        names |= dict.fromkeys(const for const in code.co_consts if isinstance(const, str))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= dict.fromkeys(names_around_imports(inner))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def is_users_name(module: str) -> bool:
    if module in ("__main__", "__mp_main__"):
        return True
    imported = sys.modules.get(module)
    return imported is not None and is_users(imported)


def is_users(module: ModuleType) -> bool:
    # Another type may run code at an access.
    if type(module) is not ModuleType:
        return False
    name = vars(module).get("__name__")
    path = vars(module).get("__file__")
    return type(name) is str and type(path) is str and _is_users_file(name, path)


@functools.lru_cache(maxsize=1024)
def _is_users_file(name: str, path: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("__main__", "__mp_main__", "stoker"):
        return False
    return path.endswith(".py") and not {"site-packages", "dist-packages"} & {*PurePath(path).parts}
