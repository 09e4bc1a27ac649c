"""Actions that wait for a module's import: a setting of a library is made where that is used."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Waiting:
    """Finder that has actions done after the import of their modules; it finds none itself."""

    def __init__(self) -> None:
        # By module, and by what an action sets: what is set again replaces the former.
        self.actions: dict[str, dict[str, Callable[[], None]]] = {}
        self._is_looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions or self._is_looking:
            return None
        # All finders are asked, also this one, which must not answer now.
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for action in self.actions.pop(name, {}).values():
                action()

        # On this loader object, so that its type, which others check, stays the same.
        setattr(spec.loader, "exec_module", execute_and_act)  # noqa: B010
        return spec


@functools.cache
def _waiting() -> _Waiting:
    waiting = _Waiting()
    sys.meta_path.insert(0, waiting)
    return waiting


def when_imported(module: str, what: str, action: Callable[[], None]) -> None:
    """Calls `action` now, or after the import of a module that is not imported yet.

    Args:
        what: Name of what it sets; a later action of the same name replaces a waiting one.
        action: Raises nothing.
    """
    if module in sys.modules:
        action()
    else:
        _waiting().actions.setdefault(module, {})[what] = action
