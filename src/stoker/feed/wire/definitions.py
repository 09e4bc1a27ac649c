"""What a script defines beyond what its dataset refers to: it travels with the spec, by name.

Files that a dataset reads may name any class of the script, and a hint any alias. So each
definition is pickled alone, within bounds, and names the others instead of holding them: a function
`train` takes no model along. What cannot be sent is left out, with the reason. None of it counts in
the spec's digest, but for the classes' code: ranks with other constants share one dataset.

On a data host a definition is rebuilt at once if all modules are there that it needs, else when
`__main__` is asked for it: nothing is imported that nobody asks for.
"""

import argparse
import contextlib
import datetime
import enum
import functools
import hashlib
import io
import linecache
import pathlib
import pickle
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import cast
from weakref import WeakKeyDictionary

from stoker.feed.wire.pickling import (
    CachedFunction,
    SpecPickler,
    SpecUnpickler,
    is_importable,
    mark,
)
from stoker.feed.wire.script_module import (
    ScriptFacts,
    are_scripts_globals,
    is_of_script,
    name_in_script,
    script,
)

# Of one definition, of a script's text, and of all.
_MAX_BYTES = 1 << 20
_MAX_TOTAL_BYTES = 8 << 20
# CPU-seconds of this thread, once a class or function; a hundred of them take 20 ms. Not of a
# clock: where other programs have the CPUs, the last definitions would be missing on data hosts.
_MAX_SECONDS = 0.5
# Parts of a constant, and bytes of a tensor.
_MAX_PARTS = 10_000
_MAX_ARRAY_BYTES = 64 << 10
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type(...))
_PLAIN = (
    *(enum.Enum, pathlib.PurePath, re.Pattern, range, slice, typing.TypeVar, typing.NewType),
    *(types.GenericAlias, types.UnionType, typing._GenericAlias, typing._SpecialForm),  # type: ignore[attr-defined]
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)
_CONTAINERS = (list, tuple, set, frozenset)
_HOLDERS = (argparse.Namespace, types.SimpleNamespace)
_DEFINITIONS = (type, FunctionType, CachedFunction)
# A notebook's own names, and its history.
_OF_NOTEBOOK = {"In", "Out", "get_ipython", "exit", "quit", "open"}
_HISTORY = re.compile(r"_|__|___|_(i|ii|iii|oh|dh|ih|i?\d+)")
_CELL = re.compile(r"ipykernel_|^<ipython")


@dataclass(frozen=True, slots=True)
class Definition:
    """A pickled definition, with the names of the script and the modules that it needs."""

    data: bytes
    reads: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What travels of a script.

    Attributes:
        left_out: Names that are not sent, with the reason.
        wanted: Names in annotations of what the spec holds: rebuilt in any case, as
            `typing.get_type_hints` looks for them.
    """

    facts: ScriptFacts
    definitions: Mapping[str, Definition] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()

    def enter(self) -> "Rebuilding":
        """Makes this process's `__main__` the script's; then unpickle the spec, and `fill`."""
        module = self.facts.enter()
        rebuilding = Rebuilding(self, module)
        vars(module).setdefault("__getattr__", rebuilding.get)
        return rebuilding


# Classes and functions whose pickle is known: what a script defines it seldom changes.
_known: "WeakKeyDictionary[object, Definition]" = WeakKeyDictionary()
_marks: "WeakKeyDictionary[object, str]" = WeakKeyDictionary()


def script_of_this_process(
    *, is_secret: Callable[[str], bool], wanted: Iterable[str] = ()
) -> Script:
    """Returns what this process's script defines.

    Args:
        is_secret: Whether a constant of that name must not be sent.
        wanted: Names that annotations of the spec mention.
    """
    definitions: dict[str, Definition] = {}
    left_out: dict[str, str] = {}
    left_bytes = _MAX_TOTAL_BYTES
    until = time.thread_time() + _MAX_SECONDS
    for name, value in _names_of_script():
        if not isinstance(value, _DEFINITIONS) and is_secret(name):
            left_out[name] = "its name looks secret"
            continue
        try:
            definition = _definition(value, until=until)
            if len(definition.data) > left_bytes:
                raise _LeftOutError("all definitions together are too large")
        except Exception as err:
            left_out[name] = str(err) or type(err).__name__
            continue
        left_bytes -= len(definition.data)
        definitions[name] = definition
    return Script(
        facts=ScriptFacts.of_this_process(_sources()),
        definitions=definitions,
        left_out=left_out,
        wanted=tuple(sorted(set(wanted) & definitions.keys())),
    )


def classes_digest() -> str:
    """Returns a digest of the code of all classes that the script has, the same in each rank."""
    text = repr([(name, _mark_of(value)) for name, value in _names_of_script() if _is_own(value)])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _is_own(value: object) -> bool:
    return isinstance(value, type) and bool(name_in_script(value))


def _mark_of(value: object) -> str:
    mark_of_value = _marks.get(value)
    if mark_of_value is None:
        mark_of_value = _marks[value] = mark(cast("type", value))
    return mark_of_value


def _names_of_script() -> Iterator[tuple[str, object]]:
    names = vars(script())
    is_notebook = "get_ipython" in names
    # Sorted: ranks that define in another order have the same digest.
    for name in sorted(names):
        value = names.get(name)
        is_special = name.startswith("__") and name.endswith("__")
        is_history = is_notebook and (name in _OF_NOTEBOOK or _HISTORY.fullmatch(name))
        if not is_special and not is_history:
            yield name, value


class _LeftOutError(Exception):
    """Why a definition is not sent."""


def _definition(value: object, *, until: float) -> Definition:
    can_be_kept = isinstance(value, _DEFINITIONS)
    if can_be_kept and value in _known:
        return _known[value]
    if isinstance(value, ModuleType):
        if sys.modules.get(value.__name__) is not value:
            raise _LeftOutError("it is a module that cannot be imported")
    elif not can_be_kept and not is_importable(value) and not _is_plain(value):
        raise _LeftOutError(f"it is a {type(value).__module__}.{type(value).__qualname__}")
    if time.thread_time() > until:
        raise _LeftOutError("the script defines too much to look at all of it")
    file = _DefinitionFile(_MAX_BYTES)
    pickler = _DefinitionPickler(file, value)
    pickler.dump(value)
    reads = tuple(sorted(pickler.reads))
    if is_importable(value):
        pickler.modules.add(str(getattr(value, "__module__", "builtins")))
    definition = Definition(file.getvalue(), reads, tuple(sorted(pickler.modules)))
    if can_be_kept:
        _known[value] = definition
    return definition


class _DefinitionFile(io.BytesIO):
    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._left = max_bytes

    def write(self, data: object, /) -> int:
        view = memoryview(cast("bytes", data))
        self._left -= view.nbytes
        if self._left < 0:
            raise _LeftOutError("it is too large")
        return super().write(view)


def _is_plain(value: object) -> bool:
    """Returns whether a constant holds only plain data, so that pickling it runs no foreign code.

    Raises _LeftOutError if it is large.
    """
    waiting = [value]
    num_parts = num_bytes = 0
    while waiting:
        part = waiting.pop()
        num_parts += 1
        num_bytes += len(part) if isinstance(part, str | bytes) else 0
        if num_parts > _MAX_PARTS or num_bytes > _MAX_BYTES:
            raise _LeftOutError("it is too large")
        inner = _inside(part)
        if inner is None:
            return False
        waiting += inner
    return True


def _inside(part: object) -> list[object] | None:
    """Returns what a plain value holds; None: it is not plain, or holds more than is looked at."""
    kind = type(part)
    if kind in _ATOMS or isinstance(part, _PLAIN + _DEFINITIONS):
        return []
    # By their names: torch need not be imported.
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "Size"):
        return []
    if kind.__module__ in ("torch", "numpy") and kind.__name__ in ("Tensor", "ndarray"):
        return [] if _nbytes(part) <= _MAX_ARRAY_BYTES else None
    if issubclass(kind, (dict, *_CONTAINERS)):
        return _items_of(cast("Collection[object]", part))
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    is_holder = kind in _HOLDERS or (is_of_script(kind) and _is_pickled_as_usual(kind))
    if is_holder and hasattr(part, "__dict__"):
        return list(vars(part).values())
    return None


def _items_of(container: Collection[object]) -> list[object] | None:
    """Returns what a container holds, a dictionary also its keys; None: as of `_inside`."""
    kind = type(container)
    # A library's subclass may run its own code when it is pickled.
    is_pythons = kind in (dict, *_CONTAINERS) or kind.__module__ == "collections"
    if not (is_pythons or is_of_script(kind)) or len(container) > _MAX_PARTS:
        return None
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _nbytes(array: object) -> int:
    # A small view may hold a large tensor.
    whole: object = getattr(array, "untyped_storage", lambda: array)()
    nbytes: object = getattr(whole, "nbytes", 0)
    return int(cast("int", nbytes() if callable(nbytes) else nbytes))


def _is_pickled_as_usual(kind: type) -> bool:
    names = {"__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"}
    return all(names.isdisjoint(vars(base)) for base in kind.__mro__[:-1])


class _DefinitionPickler(SpecPickler):
    """Pickler of one definition: of others, and of globals, it has the names."""

    def __init__(self, file: io.BytesIO, root: object) -> None:
        super().__init__(file)
        self._root = root
        self.reads: set[str] = set()

    def persistent_id(self, obj: object) -> object:
        if obj is not self._root and isinstance(obj, _DEFINITIONS):
            name = name_in_script(obj)
            if name:
                self.reads.add(name)
                return ("script", name)
        return super().persistent_id(obj)

    def _dynamic_function_reduce(self, func: FunctionType) -> tuple[object, ...]:
        usual: tuple[object, ...] = super()._dynamic_function_reduce(func)
        if are_scripts_globals(func.__globals__):
            _, slots = cast("tuple[object, dict[str, dict[str, object]]]", usual[2])
            self.reads.update(slots["__globals__"])
            # What it reads travels as separate definitions, by name.
            slots["__globals__"] = {}
        return usual


class _DefinitionUnpickler(SpecUnpickler):
    def __init__(self, data: bytes, load: Callable[[str], object]) -> None:
        super().__init__(io.BytesIO(data))
        self._load_name = load

    def persistent_load(self, pid: object) -> object:
        match pid:
            case ("script", str(name)):
                return self._load_name(name)
        return super().persistent_load(pid)


class Rebuilding:
    """The definitions of a script in the process that has them by name."""

    def __init__(self, of: Script, module: ModuleType) -> None:
        self._script = of
        self._module = module
        self._loading: set[str] = set()

    def fill(self) -> None:
        """Rebuilds what needs no module that is not imported yet, and what is wanted."""
        names = self._script.definitions
        for name in (*self._script.wanted, *names):
            if name in self._script.wanted or self._is_at_hand(name):
                # Who asks for it gets the error.
                with contextlib.suppress(Exception):
                    self._load(name)

    def get(self, name: str) -> object:
        """Returns what the script defines under that name, as the module's `__getattr__`."""
        where = f"module {self._script.facts.name!r}"
        why = self._script.left_out.get(name)
        if why:
            raise AttributeError(f"{where} has {name!r} only in the trainer: {why}")
        if name not in self._script.definitions:
            raise AttributeError(f"{where} has no attribute {name!r}")
        try:
            return self._load(name)
        except Exception as err:
            what = f"{type(err).__name__}: {err}"
            raise AttributeError(f"{where} cannot have {name!r} here: {what}") from err

    def _load(self, name: str) -> object:
        names = vars(self._module)
        if name in names:
            return names[name]
        if name in self._loading:
            raise AttributeError(f"{name!r} refers to itself")
        definition = self._script.definitions.get(name)
        if definition is None:
            why = self._script.left_out.get(name, "the script has none")
            raise AttributeError(f"no {name!r} here: {why}")
        self._loading.add(name)
        try:
            value = _DefinitionUnpickler(definition.data, self._load).load()
        finally:
            self._loading.discard(name)
        # Code that ran while it was unpickled may have set it.
        names.setdefault(name, value)
        for read in definition.reads:
            # Where it is used, it is a NameError, as of a name that the script has not set yet.
            with contextlib.suppress(Exception):
                self._load(read)
        return names[name]

    def _is_at_hand(self, name: str) -> bool:
        waiting = [name]
        seen = set[str]()
        while waiting:
            definition = self._script.definitions.get(waiting.pop())
            if definition is None:
                continue
            # An import may take long, or fail: only if somebody asks for the name.
            if any(module not in sys.modules for module in definition.modules):
                return False
            news = {*definition.reads} - seen
            seen |= news
            waiting += news
        return True


def _sources() -> Mapping[str, str]:
    """Returns the texts of the script's file, or of a notebook's cells."""
    file = vars(script()).get("__file__")
    files = [file] if isinstance(file, str) else []
    files += [name for name in list(linecache.cache) if _CELL.search(name)]
    sources: dict[str, str] = {}
    left = _MAX_BYTES
    for name in files:
        text = "".join(linecache.getlines(name))
        left -= len(text)
        if text and left >= 0:
            sources[name] = text
    return sources


def pack_script(found: Script) -> bytes:
    return pickle.dumps(found, protocol=5)


def unpack_script(data: bytes) -> Script:
    unpacked = pickle.loads(data)
    assert isinstance(unpacked, Script)
    return unpacked
