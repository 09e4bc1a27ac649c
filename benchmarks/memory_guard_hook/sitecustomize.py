"""Notes what the memory guard does in each process of a benchmark, or turns it off.

STOKER_BENCHMARK_GUARD: a folder for the notes, one file a process; with "off:" before it the guard
looks, and changes nothing.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

_MODULE = "stoker.feed.memory_guard"
_ASKED = os.environ.get("STOKER_BENCHMARK_GUARD", "")


class _AfterImport:
    """Changes the guard's module once it is imported; most processes never do."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            _change(module.MemoryGuard)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change(guard: Any) -> None:
    is_off = _ASKED.startswith("off:")
    folder = Path(_ASKED.removeprefix("off:"))
    change = guard._change

    def changed(self: Any, share: float, now: float) -> None:
        with (folder / f"guard-{os.getpid()}").open("a") as file:
            file.write(f"{time.time():.3f} {self.share:.4f} {share:.4f}\n")
        if not is_off:
            change(self, share, now)

    guard._change = changed


if _ASKED:
    sys.meta_path.insert(0, _AfterImport())  # type: ignore[arg-type]
