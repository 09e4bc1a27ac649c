"""Modules of stoker's that a zygote has executed, for the processes that it forks.

Executing them takes up to 0.3 CPU-seconds, in each process of a run. A forked process that imports
one gets it as it was after its execution, with the modules that it imports. Until then it is not in
`sys.modules`: what asks there which modules a process has is answered as in a new Python.
"""

import builtins
import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import resolve_name, spec_from_file_location
from types import ModuleType

_PACKAGE = "stoker"
# Those that launchers, data hosts, ranks and verbs import, with what these import.
_MODULES = (
    "stoker.launch.__main__",
    "stoker.launch.strategies.start",
    "stoker.launch.finish",
    "stoker.feed.agent.agent",
    "stoker.feed.agent.forkserver",
    "stoker.feed.workers.worker",
    "stoker.feed.loader",
    "stoker.feed.replace",
    "stoker.feed.trainer.client",
    "stoker.feed.trainer.local_workers",
    "stoker.feed.unfed",
    "stoker.feed.remote_iterators",
    "stoker.profile.phases",
    "stoker.cli.train",
    "stoker.cli.run",
    "stoker.cli.profile",
    "stoker.platforms.local",
)


def execute_ahead() -> None:
    """Executes the modules, and has them found when a forked process imports them."""
    imports = _Imports()
    imports.watch()
    executed = _taken()
    finder = _ExecutedFinder(executed, imports.of_modules)
    place = sys.meta_path.index(PathFinder)
    sys.meta_path.insert(place, finder)  # type: ignore[arg-type]


class _Imports:
    """What each module of stoker's imports of stoker's, while it is executed."""

    def __init__(self) -> None:
        self.of_modules: dict[str, list[str]] = defaultdict(list)
        self._import = builtins.__import__

    def watch(self) -> None:
        builtins.__import__ = self._noting  # type: ignore[assignment]
        try:
            for name in _MODULES:
                importlib.import_module(name)
        finally:
            builtins.__import__ = self._import

    def _noting(
        self,
        name: str,
        namespace: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        wanted: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        module = self._import(name, namespace, local, wanted or (), level)
        importing = str((namespace or {}).get("__name__"))
        if not _is_ours(importing):
            return module
        relative_to = str((namespace or {}).get("__package__"))
        whole = resolve_name("." * level + name, relative_to)
        parts = [f"{whole}.{part}" for part in wanted or ()]
        for each in (whole, *parts):
            if _is_ours(each) and each in sys.modules:
                self.of_modules[importing].append(each)
        return module


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == _PACKAGE


def _taken() -> dict[str, ModuleType]:
    """Takes the modules out of `sys.modules`, and out of the packages that they are in."""
    modules = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_ours(name)}
    for name, module in modules.items():
        package, _, own = name.rpartition(".")
        names = vars(modules[package]) if package else {}
        if names.get(own) is module:
            del names[own]
    # Of a folder without `__init__` there is nothing to execute.
    return {name: module for name, module in modules.items() if module.__file__}


class _ExecutedFinder:
    """Finds a module that was executed, where Python would find its file."""

    def __init__(
        self, executed: Mapping[str, ModuleType], imports: Mapping[str, Sequence[str]]
    ) -> None:
        self._executed = executed
        self._imports = imports

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._executed:
            return None
        spec = PathFinder.find_spec(name, path, target)
        module = self._executed[name]
        if spec is None or spec.origin is None or spec.origin != module.__file__:
            return spec
        loader = _ExecutedLoader(name, spec.origin)
        loader.module, loader.imports = module, self._imports.get(name, ())
        return spec_from_file_location(
            name,
            spec.origin,
            loader=loader,
            submodule_search_locations=spec.submodule_search_locations,
        )


class _ExecutedLoader(SourceFileLoader):
    """Gives a module that was executed, and imports what it had imported."""

    module: ModuleType
    imports: Sequence[str]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        # A module that is imported is a name of its package, which may mean another thing by it.
        names = dict(vars(module)) if hasattr(module, "__path__") else {}
        for name in self.imports:
            if name not in sys.modules:
                importlib.import_module(name)
        vars(module).update(names)
