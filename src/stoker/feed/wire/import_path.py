"""Where a script imports from: `sys.path`, the working folder and PYTHONPATH, on a data host too.

The entries of the script's path keep their order. In place of the trainer's installed directories
(standard library, site-packages) stand the data host's; entries that it does not have are left out,
and the rest of its own follow. So a project's `datasets` or `statistics.py` hides there what it
hides for the script, also where the data host has imported the other one before.
"""

import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, all_suffixes
from pathlib import Path

# Stands for the installed directories in the entries of a path.
INSTALLED = ""
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_STANDARD_ARCHIVE = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
# On PYTHONPATH of each training: its only module is stoker's sitecustomize.
_STARTUP = str(Path(__file__).parents[2] / "startup")


@dataclass(frozen=True, slots=True)
class ImportPath:
    """Where a process imports from.

    Attributes:
        directory: The working folder; empty: it was removed.
        entries: Absolute paths in order; INSTALLED for all installed directories.
        variable: Absolute paths of PYTHONPATH.
        kept: Names in the folders in front of INSTALLED that hide nothing, as their module was
            imported from elsewhere: `abc` by Python itself, `torch` where the folder `torch` has
            only checkpoints.
    """

    directory: str = ""
    entries: tuple[str, ...] = ()
    variable: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls) -> "ImportPath":
        try:
            directory = os.getcwd()
        except OSError:
            directory = ""
        entries = _entries(sys.path, directory)
        variable = os.environ.get("PYTHONPATH", "")
        users = front_of(entries)
        return cls(
            directory,
            entries,
            _entries(filter(None, variable.split(os.pathsep)), directory),
            tuple(sorted(name for name in _shared_names(users) if not _is_within(name, users))),
        )

    def enter(self) -> None:
        """Applies it to this process, and forgets modules that it hides."""
        # The trainer's directory may be a volume that this host does not have.
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        sys.path[:] = arranged(self.entries, here=sys.path)
        here = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        variable = [path for path in self.variable if path and os.path.exists(path)]
        if not {*variable} <= {*here}:
            # For programs that the dataset starts.
            joined = dict.fromkeys(filter(None, [*variable, *here]))
            os.environ["PYTHONPATH"] = os.pathsep.join(joined)
        forget_hidden(kept=self.kept)


def _entries(paths: Iterable[object], directory: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for path in paths:
        # An empty entry means the working directory, which may have been removed.
        if not isinstance(path, str) or not (directory or path):
            continue
        full = os.path.normpath(os.path.join(directory, path))
        if full != _STARTUP:
            found[INSTALLED if is_installed(full) else full] = None
    return tuple(found)


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


def arranged(entries: Sequence[str], *, here: Sequence[str]) -> list[str]:
    """Returns a path with the order of `entries`, and with all of this process's path, `here`."""
    installed = [path for path in here if is_installed(path)]
    found: dict[str, None] = {}
    for entry in entries:
        if entry == INSTALLED:
            found |= dict.fromkeys(installed)
        elif os.path.exists(entry):
            found[entry] = None
    return list(found | dict.fromkeys(here))


def forget_hidden(*, kept: Iterable[str] = ()) -> None:
    """Forgets imported modules of names that `sys.path` finds elsewhere by now.

    They are imported again for whoever asks next; modules that use the others keep them.
    """
    absolute = [os.path.abspath(path) for path in sys.path]
    users = front_of([INSTALLED if is_installed(path) else path for path in absolute])
    hidden = [name for name in _shared_names(users) - {*kept} if _is_hidden(name)]
    if not hidden:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] in hidden:
            del sys.modules[name]
    importlib.invalidate_caches()


def _shared_names(folders: Sequence[str]) -> set[str]:
    """Returns imported names of which one of the folders has a module, too."""
    imported = {name.partition(".")[0] for name in list(sys.modules)}
    found: set[str] = set()
    for folder in folders:
        shared = _names_in(folder) & imported
        found.update(name for name in shared if _has_module(folder, name))
    return found


def _has_module(folder: str, name: str) -> bool:
    # A folder without `__init__` hides no module that is imported.
    places = (os.path.join(folder, name), os.path.join(folder, name, "__init__"))
    files = [place + suffix for place in places for suffix in all_suffixes()]
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


def _is_hidden(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec) or name in ("stoker", "__main__", "__mp_main__"):
        return False
    found = _found(name)
    # Without a place: built in, frozen, or a namespace, which hides nothing.
    return found is not None and found.has_location and found.origin != spec.origin


def _found(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            found: object = None if find is None else find(name, None)
        # Whatever a finder of another package raises.
        except Exception:
            continue
        if isinstance(found, ModuleSpec):
            return found
    return None


def _is_within(name: str, folders: Sequence[str]) -> bool:
    places = list(_places_of(name))
    return any(place.startswith(folder + os.sep) for place in places for folder in folders)


def _places_of(name: str) -> Iterator[str]:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        yield os.path.abspath(file)
    elif module is not None:
        # A namespace.
        with_paths = getattr(module, "__path__", ())
        yield from (os.path.abspath(path) for path in list(with_paths) if isinstance(path, str))
