"""Values that the script sets in modules: `cfg.SIZE = 5`, `json.loads = faster`, `cfg["a"] = 1`.

A forked worker has them; a data host imports the module afresh. What the script may have set is
what the text of its files assigns to: an attribute or a key below a name that stands for a module,
or for an object of a module (`from config import cfg`). Of these the values at iter() are sent.
Not seen are `setattr`, `update` and what installed packages set in each other.
"""

import ast
import contextlib
import functools
import io
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, cast

from stoker.feed.wire.import_hooks import when_imported
from stoker.feed.wire.imported_code import INSTALLED
from stoker.feed.wire.pickling import SpecPickler

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# An assignment to `a.b.c`, or to `a.b["c"]`, at a line's beginning.
_ASSIGNMENT = re.compile(
    r"^[ \t]*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\.([A-Za-z_]\w*)|\[\s*[\"'](\w+)[\"']\s*\])"
    r"[ \t]*(?::[^=\n]+)?(?:[-+*/|&%]|//|\*\*)?=(?!=)",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+(.+)$", re.MULTILINE)
_FROM = re.compile(
    r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+\(?([^)#\n]+|[^)]+\))", re.MULTILINE
)
_NAMED = re.compile(r"([\w.]+)(?:[ \t]+as[ \t]+(\w+))?")
_OWN = ("self", "cls")
# Streams, paths and the environment have their own rules.
_NOT_SENT = ("os", "sys", "stoker", "__main__", "builtins", "warnings", "logging")
# A name, or a value, that ranks do not share.
_OF_ONE_RANK = re.compile(
    r"(^|_)(RANKS?|WORLD_SIZE|DEVICE|GPU|PID|HOST(NAME)?)(_|$)", re.IGNORECASE
)
_ACCELERATOR = re.compile(r"\b(cuda|xpu|hpu|npu|mps):\d")
_MAX_FILE_BYTES = 1 << 20
_MAX_VALUE_BYTES = 64 << 10
_MAX_OBJECT_BYTES = 1 << 20
_SMALL = (FunctionType, type, PurePath, re.Pattern, functools.partial)
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Target:
    """What a line assigns to: `name`, attributes from there, and the last attribute or key."""

    name: str
    path: tuple[str, ...]
    last: str
    is_key: bool


@dataclass(frozen=True, slots=True)
class _Assignments:
    """The targets in a file, and where the names that it imports are from."""

    targets: tuple[_Target, ...]
    imported: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SetValue:
    """A value in a module: the attributes from there, and the last attribute or key."""

    module: str
    path: tuple[str, ...]
    is_key: bool
    value: object

    @property
    def name(self) -> str:
        if self.is_key:
            return f"{'.'.join((self.module, *self.path[:-1]))}[{self.path[-1]!r}]"
        return ".".join((self.module, *self.path))


def assignments_in(text: str) -> _Assignments:
    """Returns what a file's text assigns to, but for attributes of `self` and `cls`."""
    targets: dict[_Target, None] = {}
    for match in _ASSIGNMENT.finditer(text):
        name, *path = match[1].split(".")
        if name not in _OWN:
            is_key = match[3] is not None
            target = _Target(name, tuple(path), match[3] or match[2], is_key)
            targets[target] = None
    return _Assignments(tuple(targets), dict(_imports_in(text)) if targets else {})


def _imports_in(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    for line in _IMPORT.finditer(text):
        for named in _NAMED.finditer(line[1]):
            module = named[1]
            alias = named[2]
            yield (
                alias or module.partition(".")[0],
                (module if alias else module.partition(".")[0], ""),
            )
    for line in _FROM.finditer(text):
        for named in _NAMED.finditer(line[2]):
            yield named[2] or named[1], (line[1], named[1])


class ScriptFiles:
    """The assignments in the files of the script, and of its own modules, each read once."""

    def __init__(self) -> None:
        self._files: dict[str, _Assignments] = {}
        self._seen: set[str] = set()

    def values(self) -> list[SetValue]:
        """Returns what the script's files have set by now, in the order of their names."""
        self.look()
        values: dict[str, SetValue] = {}
        for name, file in self._files.items():
            module = sys.modules.get(name)
            for target in file.targets if isinstance(module, ModuleType) else ():
                # A property, or an object's __getattr__, may raise whatever it likes.
                with contextlib.suppress(Exception):
                    value = _value_of(target, vars(module), file.imported)
                    if value is not None:
                        values[value.name] = value
        return [values[name] for name in sorted(values)]

    def look(self) -> None:
        """Reads the files of modules that were imported since the last time."""
        fresh = sys.modules.keys() - self._seen
        self._seen |= fresh
        # By package, not by module: to look at each of thousands takes milliseconds.
        packages = {name.partition(".")[0] for name in fresh}
        # Of thousands of modules nearly all are in a few packages.
        foreign = {name for name in packages if name == "stoker" or _is_installed(name)}
        local = [name for name in fresh if name.partition(".")[0] not in foreign]
        for name in sorted(local):
            file = _file_of(name)
            if file.endswith(".py") and not INSTALLED.search(file):
                assignments = assignments_in(_text_of(file))
                if assignments.targets:
                    self._files[name] = assignments


def _is_installed(name: str) -> bool:
    return INSTALLED.search(_file_of(name)) is not None


def _file_of(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__file__", None) or "")


def _text_of(file: str) -> str:
    with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as opened:
        return opened.read(_MAX_FILE_BYTES)
    return ""


def _value_of(
    target: _Target, names: Mapping[str, object], imported: Mapping[str, tuple[str, str]]
) -> SetValue | None:
    """Returns the value that the target has now; None if it is in no module that can be named."""
    module, path = _place_of(target, names, imported)
    root = sys.modules.get(module)
    if root is None or module.partition(".")[0] in _NOT_SENT:
        return None
    owner: object = root
    for part in path:
        owner = getattr(owner, part)
        if isinstance(owner, ModuleType):
            # By the module itself: it may have been reached by another one.
            module = owner.__name__
            path = path[path.index(part) + 1 :]
            root = owner
    if owner is root and target.is_key:
        return None
    if module.partition(".")[0] in _NOT_SENT or _OF_ONE_RANK.search(target.last):
        return None
    if target.is_key:
        value = cast("dict[str, object]", owner)[target.last]
    else:
        value = getattr(owner, target.last)
    return SetValue(module, (*path, target.last), target.is_key, value)


def _place_of(
    target: _Target, names: Mapping[str, object], imported: Mapping[str, tuple[str, str]]
) -> tuple[str, tuple[str, ...]]:
    """Returns module and attributes that the target's name stands for; ("", ()): unknown."""
    named = names.get(target.name)
    if isinstance(named, ModuleType):
        return named.__name__, target.path
    module, name = imported.get(target.name, ("", ""))
    if not name:
        return module, target.path
    if f"{module}.{name}" in sys.modules:
        return f"{module}.{name}", target.path
    is_other = target.name in names and getattr(sys.modules.get(module), name, None) is not named
    return ("", ()) if is_other else (module, (name, *target.path))


@functools.cache
def script_files() -> ScriptFiles:
    return ScriptFiles()


def plain_values() -> list[list[object]]:
    """Returns the values that a text can say, as [module, path, whether a key, text]."""
    values: list[list[object]] = []
    for set_value in script_files().values():
        text = _literal(set_value.value)
        if text is not None and not _ACCELERATOR.search(text):
            values.append([set_value.module, list(set_value.path), set_value.is_key, text])
    return values


def _literal(value: object) -> str | None:
    """Returns a value's text, if it says all of the value."""
    try:
        # A text needs no class of the user's to be read, and runs no code.
        text = repr(value)
        if len(text) > _MAX_VALUE_BYTES:
            return None
        again = ast.literal_eval(text)
    except Exception:
        return None
    # nan, for one, is not equal to itself: it is sent as an object, or not at all.
    return text if type(again) is type(value) and again == value else None


def set_plain_values(values: list[tuple[str, list[str], bool, str]]) -> None:
    """Sets values that `plain_values` has read; one that is there already stays the same object."""
    for module, path, is_key, text in values:
        _set(module, path, is_key=is_key, value=ast.literal_eval(text), text=text)


def object_values() -> list[tuple[str, tuple[str, ...], bool, object]]:
    """Returns functions, classes and other small objects that can be pickled."""
    return [
        (set_value.module, set_value.path, set_value.is_key, set_value.value)
        for set_value in script_files().values()
        if _literal(set_value.value) is None and _may_be_pickled(set_value)
    ]


def _may_be_pickled(each: SetValue) -> bool:
    if not isinstance(each.value, _SMALL):
        return False
    is_where_it_was = getattr(each.value, "__module__", "") == each.module and getattr(
        each.value, "__qualname__", ""
    ) == ".".join(each.path)
    return not is_where_it_was and _is_small(each.value)


@functools.lru_cache(maxsize=256)
def _is_small(value: object) -> bool:
    """Returns whether an object can be pickled to few bytes; asked once, it may hold a model."""
    try:
        SpecPickler(_SmallFile(), copies_shared=True).dump(value)
    # Whatever the script's objects raise.
    except Exception:
        return False
    return True


class _SmallFile(io.BytesIO):
    """File that ends a pickle which is too large."""

    def write(self, data: "ReadableBuffer", /) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_OBJECT_BYTES:
            raise ValueError("too large")
        return super().write(data)


def set_object_values(value: object) -> None:
    for module, path, is_key, set_value in cast(
        "list[tuple[str, tuple[str, ...], bool, object]]", value
    ):
        _set(module, path, is_key=is_key, value=set_value)


def unsent_values() -> list[str]:
    """Returns the names of set values that cannot be sent."""
    return [
        set_value.name
        for set_value in script_files().values()
        if _literal(set_value.value) is None
        and not isinstance(set_value.value, ModuleType | type)
        and not _may_be_pickled(set_value)
        and not _is_original(set_value)
    ]


def _is_original(each: SetValue) -> bool:
    return getattr(each.value, "__module__", None) == each.module


def _set(
    module: str,
    path: "list[str] | tuple[str, ...]",
    *,
    is_key: bool,
    value: object,
    text: str | None = None,
) -> None:
    """Sets a value, now or once its module is imported; one of the same `text` stays."""

    def write() -> None:
        # An attribute on the way may be made by the script.
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            owner: object = sys.modules[module]
            for part in path[:-1]:
                owner = getattr(owner, part)
            last = path[-1]
            if is_key:
                entries = cast("dict[str, object]", owner)
                if text is None or _literal(entries.get(last, _MISSING)) != text:
                    entries[last] = value
            elif text is None or _literal(getattr(owner, last, _MISSING)) != text:
                setattr(owner, last, value)

    when_imported(module, ".".join(path), write)
