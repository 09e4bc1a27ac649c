"""Where a script imports from: `sys.path`, the working folder and PYTHONPATH, on a data host too.

The entries of the script's path keep their order. In place of the trainer's installed directories
(standard library, site-packages) stand the data host's; entries that it does not have are left out,
and its other ones follow. So a project's `datasets` or `statistics.py` hides there what it
hides for the script, also where the data host has imported the other one before.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from stoker.host.installed import INSTALLED, front_of, is_installed, modules_in, users_folders

# On PYTHONPATH of each training run: its only module is stoker's sitecustomize.
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
    entries: dict[str, None] = {}
    for path in paths:
        # An empty entry means the working directory, which may have been removed.
        if not isinstance(path, str) or not (directory or path):
            continue
        full = os.path.normpath(os.path.join(directory, path))
        if full != _STARTUP:
            entries[INSTALLED if is_installed(full) else full] = None
    return tuple(entries)


def arranged(entries: Sequence[str], *, here: Sequence[str]) -> list[str]:
    """Returns a path with the order of `entries`, and with all of this process's path, `here`."""
    installed = [path for path in here if is_installed(path)]
    in_order: dict[str, None] = {}
    for entry in entries:
        if entry == INSTALLED:
            in_order |= dict.fromkeys(installed)
        elif os.path.exists(entry):
            in_order[entry] = None
    return list(in_order | dict.fromkeys(here))


def forget_hidden(*, kept: Iterable[str] = ()) -> None:
    """Forgets imported modules of names that `sys.path` finds elsewhere by now.

    They are imported again when they are needed next; modules that use the others keep them.
    """
    shared = _shared_names(users_folders()) - {*kept}
    hidden = [name for name in shared if _is_hidden(name)]
    if not hidden:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] in hidden:
            del sys.modules[name]
    importlib.invalidate_caches()


def _shared_names(folders: Sequence[str]) -> set[str]:
    """Returns imported names of which one of the folders has a module, too."""
    return modules_in(folders, sys.modules)


def _is_hidden(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec) or name in ("stoker", "__main__", "__mp_main__"):
        return False
    first = _found(name)
    # Without a place: built in, frozen, or a namespace, which hides nothing.
    return first is not None and first.has_location and first.origin != spec.origin


def _found(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec: object = None if find is None else find(name, None)
        # Whatever a finder of another package raises.
        except Exception:
            continue
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def _is_within(name: str, folders: Sequence[str]) -> bool:
    below = tuple(folder + os.sep for folder in folders)
    return any(place.startswith(below) for place in _places_of(name))


def _places_of(name: str) -> Iterator[str]:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        yield os.path.abspath(file)
    elif module is not None:
        # A namespace.
        with_paths = getattr(module, "__path__", ())
        yield from (os.path.abspath(path) for path in list(with_paths) if isinstance(path, str))
