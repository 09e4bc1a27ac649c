"""Which globals of the user's modules the code of a spec reads on a data host."""

import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

from stoker.feed.reductions import CachedFunction
from stoker.feed.spec_pickle import is_by_name

# Functions and classes that are looked at; 500 lines have some 50.
MAX_CODE = 5000

# Of what is pickled, they have run in the trainer.
_IN_TRAINER = ("__init__", "__post_init__", "__getstate__", "__reduce__", "__reduce_ex__")
# Code that names one of them may set all of a module.
_SETTERS = frozenset({"setattr", "vars", "globals", "__dict__"})
_CODE = (FunctionType, type, CachedFunction)
_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, set, frozenset, dict)
_NOTHING = object()

Path = tuple[str, ...]
IsUsers = Callable[[ModuleType], bool]


@dataclass(frozen=True, slots=True)
class _Named:
    """What a function's code names, and the functions inside of it.

    Attributes:
        read: Globals with the attributes taken from them: `cfg.SIZE` in its parts.
        written: The same.
    """

    read: tuple[Path, ...]
    written: tuple[Path, ...]
    may_set_all: bool


@dataclass(frozen=True, slots=True)
class _Code:
    """A function or class to look at.

    Attributes:
        is_there: Data hosts have it from its module: its globals do not travel.
        is_made: Of a class: code that runs there may call it.
    """

    value: object
    is_there: bool
    is_made: bool = False


def names_read(code: Iterable[object], *, is_module_users: IsUsers) -> set[tuple[str, str]]:
    """Module and name of each global that the code reads there, and does not set itself.

    Args:
        code: Functions and classes that were pickled; what they name is looked at, too.
        is_module_users: Whether a module is the user's, and looked into.
    """
    known: dict[int, bool] = {}

    def is_users(module: ModuleType) -> bool:
        found = known.get(id(module))
        if found is None:
            found = known[id(module)] = is_module_users(module)
        return found

    read: set[tuple[str, str]] = set()
    written: set[tuple[str, str]] = set()
    waiting = deque(_Code(each, is_by_name(each)) for each in code if not _ran_in_trainer(each))
    seen: set[tuple[int, bool, bool]] = set()
    while waiting and len(seen) < MAX_CODE:
        each = waiting.popleft()
        key = (id(each.value), each.is_there, each.is_made)
        if key in seen:
            continue
        seen.add(key)
        waiting.extend(_parts(each, is_users))
        function = each.value
        if not isinstance(function, FunctionType) or not _is_theirs(function, is_users):
            continue
        named = _named(function.__code__)
        for path in named.written:
            module, name, _ = _resolved(function, path, is_users)
            written.add((module, name))
        for path in named.read:
            module, name, value = _resolved(function, path, is_users)
            kind = type(value)
            # A function that travels takes its own globals along, but not those of modules.
            is_there = each.is_there or module != function.__globals__.get("__name__")
            if issubclass(kind, _CODE):
                waiting.append(_Code(value, is_there or is_by_name(value), is_made=True))
            elif kind is ModuleType:
                if named.may_set_all:
                    written.add((str(vars(value).get("__name__")), "*"))
            elif name == "__dict__" or (value is _NOTHING and name == "globals"):
                written.add((module, "*"))
            elif value is not _NOTHING:
                if is_there:
                    read.add((module, name))
                if kind not in _PLAIN:
                    waiting.append(_Code(kind, is_by_name(kind)))
    return {(module, name) for module, name in read - written if (module, "*") not in written}


def globals_read(code: CodeType) -> tuple[Path, ...]:
    """Returns the globals that a function's code reads, each with the attributes taken from it."""
    return _named(code).read


def _parts(each: _Code, is_users: IsUsers) -> Iterator[_Code]:
    """The functions and classes that a function or class consists of."""
    value = each.value
    if isinstance(value, type):
        for kind in value.__mro__:
            if _is_theirs(kind, is_users):
                is_there = each.is_there or is_by_name(kind)
                for name, member in list(vars(kind).items()):
                    inner = _inner(member)
                    if issubclass(type(inner), _CODE) and (each.is_made or name not in _IN_TRAINER):
                        yield _Code(inner, is_there, each.is_made)
        return
    parts: list[object] = [vars(value).get("__wrapped__")]
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:
                # Empty yet.
                continue
    for part in parts:
        if issubclass(type(part), _CODE):
            yield _Code(part, each.is_there or is_by_name(part), each.is_made)


def _inner(member: object) -> object:
    """The function of a method, a property; else the member of the class itself."""
    # By its type: to ask an object of the user for its class may run code.
    if type(member) in (staticmethod, classmethod):
        return vars(member).get("__wrapped__")
    if type(member) is property:
        return member.fget
    if type(member) is functools.cached_property:
        return member.func
    return member


def _ran_in_trainer(value: object) -> bool:
    return isinstance(value, FunctionType) and value.__name__ in _IN_TRAINER


def _is_theirs(value: FunctionType | type, is_users: IsUsers) -> bool:
    """Whether it is of the script, or of a module of the user."""
    name = str(value.__module__)
    if isinstance(value, FunctionType):
        # A decorator may have given it another module's name.
        name = str(value.__globals__.get("__name__"))
    own = sys.modules.get(name)
    return name == "__main__" or (own is not None and is_users(own))


def _resolved(function: FunctionType, path: Path, is_users: IsUsers) -> tuple[str, str, object]:
    """Where a path leads: into modules of the user, to a name there, and its value."""
    names: dict[str, object] = function.__globals__
    module, name, value = str(names.get("__name__")), "", _NOTHING
    for number, name in enumerate(path):
        value = names.get(name, _NOTHING)
        is_last = number == len(path) - 1
        if is_last or not (type(value) is ModuleType and is_users(value)):
            break
        names = vars(value)
        module = str(names.get("__name__"))
    return module, name, value


@functools.lru_cache(maxsize=4096)
def _named(code: CodeType) -> _Named:
    """2.5 us an instruction, once."""
    read: dict[Path, None] = {}
    written: dict[Path, None] = {}
    path: Path = ()
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, name)
            continue
        if step.opname == "STORE_GLOBAL":
            written[(name,)] = None
        elif path and step.opname == "STORE_ATTR":
            written[(*path, name)] = None
            path = ()
        if path:
            read[path] = None
        path = (name,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            named = _named(inner)
            read |= dict.fromkeys(named.read)
            written |= dict.fromkeys(named.written)
    may_set_all = any(not _SETTERS.isdisjoint(each) for each in read)
    return _Named(tuple(read), tuple(written), may_set_all)
