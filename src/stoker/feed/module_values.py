"""What a script sets in its own modules: it does not travel, and the user is told.

Functions and classes of modules travel by name. So after `import cfg; cfg.SIZE = 5` a data host
makes batches with the size that `cfg` itself says. A data host says what the user's modules have
there, and the trainer compares, at each pass: values are no part of the spec, so that ranks which
set different ones share it, and one that changes does not ship it again.

A difference is told if code that came with the spec reads the name, in a module of the user (a file
outside of the standard library, site-packages and dist-packages) whose source gives it literals
and nothing else, of which the trainer has none. So left out is what differs by host: what a module
computes as it is imported (paths, the environment, the number of CPUs). Left out are also
containers that begin empty (caches, registries), and what the spec's own code sets (`global`,
worker_init_fn). Code and sources are looked at only where values differ.
"""

import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import MappingProxyType, ModuleType

from stoker.feed.code_names import names_read
from stoker.feed.source_literals import source_of
from stoker.logs import Log

# That a data host tells of: 20 to 40 bytes each.
MAX_NAMES = 1024
# Of a value; what is longer is no setting.
MAX_CHARACTERS = 1000
# In a warning.
MAX_TOLD = 8
# Specs of which the values there are kept, and warnings.
MAX_KEPT = 100

_NUMBERS = (type(None), bool, int, float)
_MAX_DEPTH = 4
# Longer ones are no easier to read.
_MAX_DIGITS = 40
_UNKNOWN: frozenset[str] = frozenset()


def values_here(modules: Iterable[str]) -> dict[str, str]:
    """What the plain globals of these modules are in this process, by `cfg.SIZE`: texts.

    Args:
        modules: Names; those that are not the user's are passed over.
    """
    found: dict[str, str] = {}
    for module in sorted(modules):
        there = sys.modules.get(module)
        if there is None or not is_users(there):
            continue
        for name, value in list(vars(there).items()):
            text = "" if name.startswith("__") else text_of(value)
            if text and len(found) < MAX_NAMES:
                found[f"{vars(there)['__name__']}.{name}"] = text
    return found


def values_of(names: Iterable[str]) -> dict[str, str]:
    """The same of these names."""
    found: dict[str, str] = {}
    for path in names:
        module, _, name = path.rpartition(".")
        there = sys.modules.get(module)
        if there is not None and is_users(there):
            text = text_of(vars(there).get(name, there))
            if text:
                found[path] = text
    return found


def names_read_by(code: Iterable[object]) -> frozenset[str]:
    """The globals of the user's modules that the code of a spec reads, as `cfg.SIZE`.

    Args:
        code: Functions and classes that were pickled.
    """
    try:
        read = names_read(code, is_module_users=is_users)
    except Exception:
        # Whatever modules and classes may be, it must not end the feed.
        return frozenset()
    return frozenset(f"{module}.{name}" for module, name in read)


def were_set(values: Mapping[str, str]) -> dict[str, str]:
    """Of these values those that the source does not have, where it has literals only."""
    found: dict[str, str] = {}
    for path, text in values.items():
        literals = _literals_of(*path.rsplit(".", 1))
        if literals and text not in literals:
            found[path] = text
    return found


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What the user should know; empty: nothing. Of strings, only that they differ.

    Args:
        here: What the trainer's script has set.
        there: A data host's `values_here`.
    """
    names = [name for name in sorted(here) if there.get(name, here[name]) != here[name]]
    if not names:
        return ""
    told = [f"{name}{_shown(here[name], there[name])}" for name in names[:MAX_TOLD]]
    if len(names) > MAX_TOLD:
        told.append(f"and {len(names) - MAX_TOLD} more")
    return (
        f"set in modules by the script, which does not travel: {', '.join(told)}; data hosts have "
        "what the modules say: set it in attributes of the dataset, in the module itself or in "
        "worker_init_fn"
    )


class ValuesThere:
    """What data hosts have, and what was told of it; for one thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._there: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._read: dict[str, frozenset[str]] = {}
        self._told: set[str] = set()

    def take(self, digest: str, host: str, there: Mapping[str, str]) -> None:
        """A data host's `values_here`, for the spec of that digest."""
        if len(self._there) >= MAX_KEPT:
            forgotten = next(iter(self._there))
            del self._there[forgotten]
            self._read.pop(forgotten, None)
        self._there[digest] = (host, there)

    def compare(self, digest: str, code: Iterable[object]) -> None:
        """Warns of a difference: once, not with every host, loader or pass.

        Args:
            code: Functions and classes that were pickled into that spec.
        """
        host, there = self._there.get(digest, ("", {}))
        here = values_of(there)
        differing = {name: text for name, text in here.items() if text != there[name]}
        if not differing:
            return
        if digest not in self._read:
            # 2.5 us an instruction, and then 10 us a line of a module.
            self._read[digest] = names_read_by(code)
        read = self._read[digest]
        values = were_set({name: text for name, text in differing.items() if name in read})
        warning = difference(values, there)
        if warning and warning not in self._told and len(self._told) < MAX_KEPT:
            self._told.add(warning)
            self._log.event("module_values_differ", agent=host, text=warning)


def is_users(module: ModuleType) -> bool:
    """Whether it is a plain module of the user's own code, and travels by name."""
    # One of another type may do anything when it is looked at.
    if type(module) is not ModuleType:
        return False
    name, path = vars(module).get("__name__"), vars(module).get("__file__")
    return type(name) is str and type(path) is str and _is_users_file(name, path)


def text_of(value: object) -> str:
    """A number as it is written, the digest of another plain value; empty: it is none."""
    try:
        text = _canonical(value, depth=_MAX_DEPTH)
    except (ValueError, RuntimeError):
        # RuntimeError: another thread changes it.
        return ""
    if type(value) in _NUMBERS and len(text) <= _MAX_DIGITS:
        return text
    data = text.encode("utf-8", "surrogatepass")
    return f"#{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _canonical(value: object, *, depth: int) -> str:
    """Raises ValueError if the value is not plain, or is too large."""
    kind = type(value)
    if kind in _NUMBERS:
        text = repr(value)
    elif kind in (str, bytes) and isinstance(value, str | bytes):
        text = repr(value[: MAX_CHARACTERS + 1])
    elif kind in (list, tuple, set, frozenset, dict) and isinstance(
        value, list | tuple | set | frozenset | dict
    ):
        if not depth or len(value) > MAX_CHARACTERS:
            raise ValueError("too large")
        parts = value.items() if isinstance(value, dict) else value
        items = [_canonical(part, depth=depth - 1) for part in parts]
        if not isinstance(value, list | tuple):
            items.sort()
        text = f"{kind.__name__}({','.join(items)})"
    else:
        raise ValueError("not plain")
    if len(text) > MAX_CHARACTERS:
        raise ValueError("too large")
    return text


def _shown(here: str, there: str) -> str:
    is_hidden = here.startswith("#") or there.startswith("#")
    return "" if is_hidden else f" ({here} here, {there} there)"


def _literals_of(module: str, name: str) -> frozenset[str]:
    """Texts of what the source gives a name, also by way of imports; empty: something else."""
    for _ in range(_MAX_DEPTH):
        found = sys.modules.get(module)
        if found is None or not is_users(found):
            return _UNKNOWN
        package = vars(found).get("__package__")
        literals, imports = _source(str(found.__file__), str(package or ""))
        if name in literals or name not in imports:
            return literals.get(name, _UNKNOWN)
        module, name = imports[name]
    return _UNKNOWN


@functools.lru_cache(maxsize=1024)
def _is_users_file(name: str, path: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("__main__", "__mp_main__", "stoker"):
        return False
    return path.endswith(".py") and not {"site-packages", "dist-packages"} & {*PurePath(path).parts}


@functools.lru_cache(maxsize=1024)
def _source(
    path: str, package: str
) -> tuple[Mapping[str, frozenset[str]], Mapping[str, tuple[str, str]]]:
    """Texts of a file's literals, and its imports; as it was when first asked for."""
    source = source_of(path, package=package)
    texts = {name: frozenset(map(text_of, each)) for name, each in source.literals.items()}
    return (
        MappingProxyType({name: each for name, each in texts.items() if "" not in each}),
        MappingProxyType(source.imports),
    )
