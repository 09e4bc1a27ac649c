"""Modules of the feed import each other in one direction only, whichever is imported first."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.launch.strategies.start import SITE_DIR

PACKAGE = Path(stoker.__file__).parent
FEED = sorted(PACKAGE.glob("feed/*.py"))


def imported_by(node: ast.AST) -> set[str]:
    """What is imported as a module is imported; not by a function, and not for types only."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            found |= {child.module, *(f"{child.module}.{alias.name}" for alias in child.names)}
        found |= imported_by(child)
    return found


def test_no_module_of_the_feed_imports_itself_by_way_of_others() -> None:
    names = {f"stoker.feed.{path.stem}": path for path in FEED}
    graph = {
        name: imported_by(ast.parse(path.read_text())) & names.keys()
        for name, path in names.items()
    }
    assert sum(map(len, graph.values())) > 100
    graphlib.TopologicalSorter(graph).prepare()


# The first leads to torch by way of the others.
@pytest.mark.parametrize(
    "first",
    [
        "stoker.feed.trainer.client",
        pytest.param("stoker.feed.iterators", marks=pytest.mark.soak),
        pytest.param("stoker.feed", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("variable", ["STOKER_REPLACE_DATALOADER", "STOKER_PROFILE"])
def test_torch_is_changed_also_when_stoker_imports_it(
    first: str, variable: str, tmp_path: Path
) -> None:
    code = f"import {first}, torch.utils.data as d; print(d.DataLoader.{{}}.__module__)"
    name, where = ("_get_iterator", "stoker.feed.replace")
    value = "1"
    if variable == "STOKER_PROFILE":
        name, where, value = "__iter__", "stoker.profile.probe", "{}"
    done = subprocess.run(
        [sys.executable, "-c", code.format(name)],
        env={
            "PYTHONPATH": str(SITE_DIR),
            "STOKER_LAUNCHER_PID": "1",
            "STOKER_OUTPUT": str(tmp_path),
            variable: value,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{where}\n", "")
