"""The keel, and what it uses of support/, knows nothing of stoker that a rewrite may change."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker

KEEL = Path(__file__).parent
SURFACE = {"stoker", "stoker.records", "stoker.errors"}
# It computes with the engine itself: published cases, by value.
NAMED = {"test_decide_published.py"}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in {"stoker", "support"}:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def inner_names(path: Path, seen: set[Path]) -> Iterator[str]:
    if path in seen or not path.is_file():
        return
    seen.add(path)
    for name in imported(path):
        if name.startswith("support."):
            yield from inner_names(KEEL.parent / f"{name.replace('.', '/')}.py", seen)
        elif name.startswith("stoker.") and name not in SURFACE and is_module(name):
            yield f"{path.name}: {name}"


def is_module(name: str) -> bool:
    # `from stoker import Workload` is none.
    inner = Path(stoker.__file__).parents[1] / name.replace(".", "/")
    return name.count(".") > 1 or inner.is_dir() or inner.with_suffix(".py").is_file()


@pytest.mark.parametrize("file", sorted(KEEL.glob("*.py")), ids=lambda path: path.name)
def test_nothing_of_stoker_is_imported_but_its_surface(file):
    assert file.name in NAMED or [*inner_names(file, set())] == []
