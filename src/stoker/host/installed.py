"""What a Python has installed, and which folders of the user hide it.

A script may have files with names of standard modules. They are not for stoker, nor for what it
imports: `hide_users_modules` has these find the installed ones, and leaves the script its own.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from itertools import product
from types import ModuleType

# Stands for the installed directories in the entries of a path.
INSTALLED = ""
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_STANDARD_ARCHIVE = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
# What stoker imports of others before a script does.
_OTHERS = {"cffi", "cloudpickle", "cryptography", "msgspec", "psutil", "yaml", "zmq"}


def is_installed(path: str) -> bool:
    """Returns whether a path entry belongs to this Python: its library, or its site-packages."""
    if path == _STANDARD_LIBRARY or path.startswith(_STANDARD_LIBRARY + os.sep):
        return True
    name = os.path.basename(path)
    if name == _STANDARD_ARCHIVE:
        return True
    if name not in ("site-packages", "dist-packages"):
        # A folder of that name elsewhere is the user's: `pip install --target`.
        return False
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    of_user = getattr(sys.modules.get("site"), "USER_SITE", None)
    return path == of_user or any(path.startswith(prefix + os.sep) for prefix in prefixes)


def front_of(entries: Sequence[str]) -> tuple[str, ...]:
    """Returns the entries before the installed ones: they hide what is installed."""
    return tuple(entries[: entries.index(INSTALLED)] if INSTALLED in entries else entries)


def users_folders() -> tuple[str, ...]:
    """Returns the folders that hide what is installed, in the order of `sys.path`."""
    absolute = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    return front_of([INSTALLED if is_installed(path) else path for path in absolute])


def modules_in(folders: Iterable[str], names: Container[str]) -> set[str]:
    """Returns those of the names that are modules in one of the folders."""
    modules: set[str] = set()
    for folder in folders:
        # Of the folder's names, which are few: those of all modules would be read in each process
        # that is forked, which copies their memory (2.5 ms).
        shared = [name for name in _names_in(folder) if name in names]
        modules.update(name for name in shared if _has_module(folder, name))
    return modules


def _has_module(folder: str, name: str) -> bool:
    # A folder without `__init__` hides no module that is imported.
    places = (os.path.join(folder, name), os.path.join(folder, name, "__init__"))
    files = map("".join, product(places, all_suffixes()))
    return any(map(os.path.isfile, files))


def _names_in(folder: str) -> frozenset[str]:
    try:
        changed = os.stat(folder).st_mtime_ns
    except OSError:
        return frozenset()
    return _listed(folder, changed)


@functools.lru_cache(maxsize=64)
def _listed(folder: str, _changed: int) -> frozenset[str]:
    try:
        return frozenset(name.partition(".")[0] for name in os.listdir(folder))
    except OSError:
        # An archive, say: what it has is imported, but hides nothing that was imported before.
        return frozenset()


def hide_users_modules() -> None:
    """Has modules of stoker that are imported from now on find what is installed.

    Does nothing where the script hides nothing of it. May be called several times.
    """
    if any(isinstance(finder, _OwnFinder) for finder in sys.meta_path):
        return
    if modules_in(users_folders(), sys.stdlib_module_names | _OTHERS):
        sys.meta_path.insert(0, _OwnFinder())


class _OwnFinder:
    """Finder that executes stoker's modules with the installed modules in `sys.modules`."""

    def __init__(self) -> None:
        self._is_hiding = False
        # Modules that only stoker, and what it imports, have.
        self._installed: dict[str, ModuleType] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("stoker."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_hiding(module: ModuleType) -> None:
            with self._hiding():
                execute(module)

        # On this loader object, so that its type, which others check, stays the same.
        setattr(spec.loader, "exec_module", execute_hiding)  # noqa: B010
        return spec

    @contextlib.contextmanager
    def _hiding(self) -> Iterator[None]:
        if self._is_hiding:
            yield
            return
        folders = users_folders()
        hidden = modules_in(folders, sys.stdlib_module_names | _OTHERS)
        theirs = _taken(hidden, within=folders)
        # Python had these before the script began: nothing hides them.
        hidden -= {name.partition(".")[0] for name in list(sys.modules)}
        sys.modules.update(self._installed)
        before = list(sys.path)
        sys.path[:] = [path for path in before if os.path.abspath(path) not in folders]
        self._is_hiding = True
        try:
            yield
        finally:
            self._is_hiding = False
            sys.path[:] = [*before, *(path for path in sys.path if path not in before)]
            self._installed |= _taken(hidden)
            sys.modules.update(theirs)


def _taken(names: set[str], *, within: Sequence[str] | None = None) -> dict[str, ModuleType]:
    """Takes modules out of `sys.modules`; with `within` only those of files in these folders."""
    modules: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        file = os.path.abspath(str(getattr(module, "__file__", None) or ""))
        is_there = within is None or any(file.startswith(folder + os.sep) for folder in within)
        if name.partition(".")[0] in names and is_there:
            modules[name] = sys.modules.pop(name)
    return modules
