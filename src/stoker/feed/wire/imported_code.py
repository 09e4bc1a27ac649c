"""Comparison of the code that datasets come from, between a trainer and a data host.

What can be imported travels by name, so a data host makes batches with the files that it has. With
a spec goes what the trainer has imported of the modules that the pickle names, and of the modules
that these use in their globals: a digest of a user's file, the version of an installed package.

Compared is what a process has imported, not what is on disk by now. Of an installed package the
version of the distribution of its name counts, else its `__version__`. Not compared: extension
modules (each host may have built its own), stoker and cloudpickle (`protocol.compare_versions`).
"""

import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

from stoker.host.packages import name_and_version

# Files of the standard library and of installed packages. (sysconfig would read 0.6 MB.)
INSTALLED = re.compile(
    rf"^{re.escape(os.path.dirname(os.__file__))}{os.sep}|{os.sep}(site|dist)-packages{os.sep}"
)
_NOT_COMPARED = sys.stdlib_module_names | {"__main__", "stoker", "cloudpickle"}
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Digests of users' modules and versions of installed packages, by name."""

    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Imported:
    """A module as it was imported: importlib.reload gives it another `spec`."""

    spec: ModuleSpec
    digest: str
    uses: tuple[str, ...] = ()


class ImportedCode:
    """The users' modules that this process, or the one that forked it, has imported."""

    def __init__(self) -> None:
        # Looked at once: a file that is edited later changes nothing.
        self._modules: dict[str, _Imported] = {}

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            self._of_user(name)

    def facts(self, names: Iterable[str]) -> CodeFacts:
        files: dict[str, str] = {}
        packages: set[str] = set()
        waiting = list(names)
        seen = set[str]()
        while waiting:
            name = waiting.pop()
            package = name.partition(".")[0]
            if name in seen or package in _NOT_COMPARED:
                continue
            seen.add(name)
            imported = self._of_user(name)
            if imported is None:
                packages.add(package)
                continue
            files[name] = imported.digest
            waiting += imported.uses
            # Only their files: what else was imported of a package may be the training's.
            while name := name.rpartition(".")[0]:
                parent = self._of_user(name)
                if parent is not None:
                    files[name] = parent.digest
        installed = {name: installed_version(name) for name in packages - files.keys()}
        versions = {name: version for name, version in sorted(installed.items()) if version}
        return CodeFacts(dict(sorted(files.items())), versions)

    def differences(self, theirs: CodeFacts) -> str:
        """Returns in words what differs here from a trainer's; empty: nothing."""
        differences: list[str] = []
        for name, digest in theirs.files.items():
            imported = self._module(name) or _on_disk(name)
            if imported is not None and imported.digest not in ("", digest):
                differences.append(
                    f"module {name} ({imported.spec.origin}) is {imported.digest[:8]} on the "
                    f"data host, {digest[:8]} in the trainer"
                )
        for name, version in theirs.versions.items():
            here = installed_version(name)
            if here and here != version:
                differences.append(
                    f"package {name} is {here} on the data host, {version} in the trainer"
                )
        more = (
            f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
        )
        what = "; ".join(differences[:_MAX_SHOWN]) + more
        return f"its code differs from the trainer's: {what}" if what else ""

    def _of_user(self, name: str) -> _Imported | None:
        _, spec = _module_and_spec(name)
        # First: the files of installed packages are large.
        if spec is None or INSTALLED.search(spec.origin or ""):
            return None
        imported = self._module(name)
        return imported if imported is not None and imported.digest else None

    def _module(self, name: str) -> _Imported | None:
        module, spec = _module_and_spec(name)
        if module is None or spec is None:
            return None
        imported = self._modules.get(name)
        if imported is None or imported.spec is not spec:
            digest = _digest(spec)
            uses = tuple(sorted(_used_by(module))) if digest else ()
            imported = self._modules[name] = _Imported(spec, digest, uses)
        return imported


@functools.cache
def imported_code() -> ImportedCode:
    """Returns this process's imported code; a forked child begins with its parent's."""
    return ImportedCode()


def _module_and_spec(name: str) -> tuple[ModuleType | None, ModuleSpec | None]:
    module = sys.modules.get(name)
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
    if not isinstance(module, ModuleType) or not isinstance(spec, ModuleSpec):
        return None, None
    return module, spec


def _on_disk(name: str) -> _Imported | None:
    try:
        spec = importlib.util.find_spec(name)
    # Whatever a package raises as it is imported.
    except Exception:
        return None
    return None if spec is None else _Imported(spec, _digest(spec))


def _digest(spec: ModuleSpec) -> str:
    if not spec.has_location or not (spec.origin or "").endswith(".py"):
        return ""
    try:
        # Of a file or of an archive.
        data = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return ""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _used_by(module: ModuleType) -> set[str]:
    names: set[object] = set()
    # A list: another thread may modify the module during this.
    for value in list(vars(module).values()):
        # By its type: an object's __class__ may run code, or warn.
        kind = type(value)
        if issubclass(kind, ModuleType):
            names.add(vars(value).get("__name__"))
        elif issubclass(kind, (type, FunctionType)):
            names.add(value.__module__)
        else:
            names.add(kind.__module__)
    return {name for name in names if isinstance(name, str)}


@functools.cache
def installed_version(package: str) -> str:
    """Returns a package's version without the build (+cpu, +cu124); empty: unknown."""
    try:
        _, version = name_and_version(metadata.distribution(package))
    except (metadata.PackageNotFoundError, ValueError):
        names = getattr(sys.modules.get(package), "__dict__", {})
        version = str(names.get("__version__") or "")
    return version.partition("+")[0]
