"""Rules that no other tool checks: no circle of imports, processes that start light."""

import ast
import functools
import gc
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker

ROOT = Path(stoker.__file__).parent
MODULES = {
    ".".join(("stoker", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
TESTS = Path(__file__).parents[1]


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    # All that is made stays: to look meanwhile for what may go takes most of the time.
    gc.disable()
    try:
        return [(name, ast.parse(path.read_text())) for name, path in MODULES.items()]
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_kept():
    """Each look for garbage in later tests would take a third of a second longer."""
    yield
    trees.cache_clear()


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields statements at any depth; expressions hold none."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(tree, field, []):
            yield statement
            yield from statements(statement)


def test_no_name_of_a_file_of_tests_occurs_twice():
    """Pytest imports them by this name alone: the second one would not be collected."""
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def names_in(statement: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(statement, ast.Import):
        return {alias.name for alias in statement.names}
    whole = {f"{statement.module}.{alias.name}" for alias in statement.names}
    return {name if name in MODULES else str(statement.module) for name in whole}


def test_no_circle_of_imports_and_none_is_hidden_by_late_imports_or_types():
    graph = {
        module: MODULES.keys()
        & {
            name
            for node in statements(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in names_in(node)
        }
        for module, tree in trees()
    }
    assert sum(map(len, graph.values())) > 500
    graphlib.TopologicalSorter(graph).prepare()


@pytest.fixture
def _no_process_is_started():
    """Allows processes here: ruff is one, and what a process has imported is seen only in one."""


# Libraries that take long to import, or much memory, or are not in every image.
HEAVY = {"torch", "numpy", "cryptography", "tensorflow", "ray", "boto3", "kubernetes", "kfp"}
# sysconfig reads a file of 0.6 MB, of which forked workers would have a copy each.
HEAVY |= {"asyncio", "sysconfig"}
# Modules that begin a process, or that a script's process imports before it does anything. A
# launcher runs next to every training, also in small memory, where torch alone would be 200 MB; a
# control image has no torch and no numpy; a script may be no torch script.
LIGHT = [
    *(name for name in MODULES if re.match(r"stoker\.(cli|pipelines|platforms)\b", name)),
    "stoker.decide",
    "stoker.doctor.services",
    "stoker.evaluate",
    "stoker.feed.remote",
    "stoker.feed.timed",
    "stoker.launch.launcher",
    "stoker.launch.mpi_programs",
    "stoker.profile.leader",
    "stoker.profile.combine",
    "stoker.profile.explain",
    "stoker.profile.timed_probe",
    "stoker.report.page",
    "stoker.startup.sitecustomize",
    "stoker.run.train",
]
# A data host's agent has no more than it sends with: datasets live in processes of their own.
AGENT = "stoker.launch.data_host", {"numpy", "cryptography"}
IMPORT_IN_TURN = """
import importlib, sys
*names, heavy = sys.argv[1:]
for name in names:
    before = set(sys.modules)
    importlib.import_module(name)
    print(*[f"{name}: {each}" for each in heavy.split() if each in sys.modules.keys() - before])
"""


@pytest.mark.parametrize(("names", "allowed"), [(LIGHT, set()), ([AGENT[0]], AGENT[1])])
def test_what_begins_a_process_is_light(names, allowed):
    assert set(names) <= MODULES.keys()
    command = [sys.executable, "-c", IMPORT_IN_TURN, *names, " ".join(HEAVY - allowed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [""] * (len(names) + 1)


# A double that used the code it checks could not contradict it.


SUPPORT = Path(__file__).parents[1] / "support"
DOUBLES = (
    *("sagemaker_service", "sagemaker_rules", "sagemaker_containers", "sagemaker_execution"),
    *("sagemaker_definition", "moto_server", "cloudwatch", "documents"),
)


def imported(file: Path) -> set[str]:
    """Returns the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


@pytest.mark.parametrize("name", DOUBLES)
def test_a_double_imports_nothing_of_stoker_but_its_errors(name: str):
    modules = imported(SUPPORT / f"{name}.py")
    assert {each for each in modules if each.partition(".")[0] == "stoker"} <= {"stoker.errors"}
