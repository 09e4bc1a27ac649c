"""Checks rules that no other tool checks: unique names, no circles, code that can be read."""

import ast
import functools
import gc
import graphlib
import gzip
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import botocore.session
import pytest

import stoker
from stoker.records import KubernetesSettings, SageMakerSettings
from stoker.records.schema import schema_of
from support.house_counts import (
    RUFF_RULES,
    HouseCounts,
    complex_functions,
    count_house,
    figures_of,
    files_of,
    heavy_functions,
    statements,
)

ROOT = Path(stoker.__file__).parent
MODULES = {
    ".".join(("stoker", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
TESTS = Path(__file__).parents[1]
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


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


def aliases(tree: ast.Module) -> Iterator[str]:
    """Yields names in CamelCase that a module assigns, but for type variables."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_variable = ast.unparse(node.value).startswith("TypeVar")
            if isinstance(target, ast.Name) and not is_variable:
                yield from re.findall(r"^_?[A-Z]\w*[a-z]\w*$", target.id)


def test_no_name_of_a_class_or_of_an_alias_occurs_twice():
    places = defaultdict(list)
    for module, tree in trees():
        # The types of options are called as what they hold.
        for name in aliases(tree) if module != "stoker.cli.options" else ():
            places[name].append(module)
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_name_of_a_file_of_tests_occurs_twice():
    """Pytest imports them by this name alone: the second one would not be collected."""
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_module_of_support_is_called_as_an_installed_one():
    """Where a test has this folder in its path, a library would import it instead."""
    names = [path.stem for path in (TESTS / "support").glob("*.py")]
    places = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    assert places
    assert [name for name in names if PathFinder.find_spec(name, places)] == []


def constants_below_definitions(tree: ast.Module) -> Iterator[str]:
    """Yields constants that stand below a definition although they need nothing defined there."""
    local: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            local.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and local:
            found = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {ast.unparse(target) for target in targets}
            if found & local or not all(CONSTANT.fullmatch(name) for name in names):
                local |= names
            else:
                yield from names
        elif local:
            # An import in a `with` or `try` names what the constants below it may need.
            for part in ast.walk(node):
                if isinstance(part, ast.Import | ast.ImportFrom):
                    local |= {alias.asname or alias.name for alias in part.names}
                elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    local.add(part.id)


def test_constants_stand_under_the_imports():
    found = {name: sorted(constants_below_definitions(tree)) for name, tree in trees()}
    assert {name: names for name, names in found.items() if names} == {}


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


CLIENTS = "cli/pipelines.py", "pipelines/kubeflow/client.py", "pipelines/sagemaker/client.py"


@pytest.mark.parametrize(
    ("files", "most"),
    [
        (CLIENTS, 7_100),
        (("project/from_training_job.py",), 2_200),
        (("doctor/cluster.py",), 2_200),
        (("notify.py", "run/webhook.py"), 1_550),
    ],
    ids=["verbs of pipelines", "init of a job", "doctor of a cluster", "webhook"],
)
def test_what_a_service_could_do_itself_stays_small(files, most):
    """In nodes of the syntax tree: a limit of lines would pay for density."""
    assert count_house(ROOT / file for file in files).nodes <= most


HELD = json.loads((TESTS / "data" / "house.json").read_text())
LOWER = "try: python benchmarks/house.py --hold"
# A ceiling is lowered once a figure is so much below it.
SLACK = 0.03


@pytest.fixture
def _no_process_is_started():
    """Allows processes here: ruff is one, and what a process has imported is seen only in one."""


@pytest.fixture(scope="module")
def house() -> HouseCounts:
    return count_house(files_of(ROOT))


@pytest.fixture(scope="module")
def heavy(house: HouseCounts) -> dict[str, list[str]]:
    return heavy_functions(house)


def in_excess(names: list[str], *, of: list[str]) -> list[str]:
    """Returns the names that occur more often than in the other list."""
    return sorted((Counter(names) - Counter(of)).elements())


def assert_held(breaking: dict[str, list[str]]) -> None:
    """Checks that only listed functions break a rule, and that all of the list still do."""
    listed = {rule: HELD["functions"][rule] for rule in breaking}
    added = {rule: in_excess(names, of=listed[rule]) for rule, names in breaking.items()}
    assert not any(added.values()), added
    mended = {rule: in_excess(listed[rule], of=names) for rule, names in breaking.items()}
    assert not any(mended.values()), f"no longer so, {LOWER}: {mended}"


def test_no_more_functions_get_too_long_or_too_wide(heavy):
    assert_held(heavy)


def test_no_more_functions_get_too_complex(house):
    assert_held(complex_functions(ROOT, house.functions))


COUNTED = """
class Reader:
    def lines(self, *, wanted, **options):
        \"""Returns lines.

        Args:
            wanted: Their numbers.
        \"""
        # Nested by a second `for`, and by a comprehension inside.
        found = [line for page in self for line in page if line]
        return {each: [line for line in found] for each in (wanted if options else ())}
"""


def test_a_function_is_counted_with_what_it_holds(tmp_path):
    file = tmp_path / "reader.py"
    file.write_text(COUNTED)
    counts = count_house([file])
    (function,) = counts.functions
    assert (function.name, function.lines, function.parameters) == ("Reader.lines", 9, 2)
    assert function.is_documented
    assert function.has_arguments
    assert counts.nested_comprehensions == {"Reader.lines": 2}
    assert counts.vague_locals == {"found": 1, "each": 1}
    assert (counts.comprehensions, counts.conditional_expressions) == (3, 1)
    assert (counts.text_lines, counts.comment_lines, counts.docstring_lines) == (8, 1, 5)
    assert counts.nodes == sum(1 for _ in ast.walk(ast.parse(COUNTED)))


def test_every_list_has_its_rule(heavy):
    assert HELD["functions"].keys() == {*heavy, *RUFF_RULES.values()}


@pytest.mark.parametrize("name", HELD["at most"])
def test_no_figure_of_the_house_grows(house, name):
    ceiling = HELD["at most"][name]
    if name == "nodes":
        ceiling += sum(HELD["nodes of features"].values())
    figure = figures_of(house)[name]
    assert figure <= ceiling
    assert figure >= HELD["at most"][name] * (1 - SLACK), f"much less than allowed; {LOWER}"


@pytest.mark.parametrize("name", HELD["at least"])
def test_no_good_figure_of_the_house_falls(house, name):
    assert figures_of(house)[name] >= HELD["at least"][name]


# Keys of the workload that have the name of a service's key, and mean stoker's own: an image of a
# role, Kubeflow's address, a processing step's type. Anything else of a service is a patch.
OWN_KEYS = {
    "SageMakerSettings": {"environment", "instance_type"},
    "KubernetesSettings": {
        *("host", "image", "max_restarts", "metadata", "namespace", "service_account", "spec"),
        # Of steps, too, which are no part of a job.
        "image_pull_secrets",
    },
}


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def members(shape: object) -> Iterator[str]:
    """Yields the names of a request's members, at any depth."""
    for name, below in getattr(shape, "members", {}).items():
        yield snake(name)
        yield from members(below)
    if hasattr(shape, "member"):
        yield from members(shape.member)


def fields(schema: object) -> Iterator[str]:
    """Yields the names of an object's fields, at any depth."""
    if isinstance(schema, dict):
        yield from map(snake, schema.get("properties", {}))
        for below in schema.values():
            yield from fields(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from fields(below)


def test_no_key_of_the_workload_repeats_a_key_of_its_service():
    model = botocore.session.get_session().get_service_model("sagemaker")
    with gzip.open(TESTS / "data" / "crds" / "jobset.x-k8s.io_jobsets.json.gz") as file:
        crd = json.load(file)
    services = {
        "SageMakerSettings": {*members(model.operation_model("CreateTrainingJob").input_shape)},
        "KubernetesSettings": {*fields(crd["spec"])},
    }
    keys = {
        kind.__name__: {*fields(schema_of(kind)["$defs"])}
        for kind in (SageMakerSettings, KubernetesSettings)
    }
    assert {name: keys[name] & there for name, there in services.items()} == OWN_KEYS


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
    "stoker.doctor.cluster",
    "stoker.evaluate",
    "stoker.feed.metrics",
    "stoker.feed.remote",
    "stoker.feed.timed",
    "stoker.keras",
    "stoker.launch.launcher",
    "stoker.launch.strategies.mpi_programs",
    "stoker.launch.strategies.smddp",
    "stoker.profile.entrypoint",
    "stoker.profile.combine",
    "stoker.profile.explain",
    "stoker.profile.timed_probe",
    "stoker.report.page",
    "stoker.startup.sitecustomize",
    "stoker.train",
]
# A data host's agent has no more than it sends with: datasets live in processes of their own.
AGENT = "stoker.launch.feed_host", {"numpy", "cryptography"}
IMPORT_IN_TURN = """
import importlib, sys
*names, heavy = sys.argv[1:]
for name in names:
    before = set(sys.modules)
    importlib.import_module(name)
    print(*[f"{name}: {each}" for each in heavy.split() if each in sys.modules.keys() - before])
"""


@pytest.mark.parametrize(
    "room", ["feed", "feed.agent", "feed.trainer", "feed.wire", "feed.workers"]
)
def test_the_map_of_a_room_of_the_feed_names_its_modules(room):
    begin = f"stoker.{room}."
    names = {name.removeprefix(begin) for name in MODULES if name.startswith(begin)}
    modules = {name for name in names if "." not in name}
    tree = ast.parse(MODULES[f"stoker.{room}"].read_text())
    _, _, table = ast.get_docstring(tree).partition("| question |")
    rows = re.findall(r"^\|.*?\|(.*?)\|", table, re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    rooms = {"agent", "trainer", "wire", "workers"} if room == "feed" else set()
    assert sorted(named) == sorted(modules - rooms)


@pytest.mark.parametrize(("names", "allowed"), [(LIGHT, set()), ([AGENT[0]], AGENT[1])])
def test_what_begins_a_process_is_light(names, allowed):
    assert set(names) <= MODULES.keys()
    command = [sys.executable, "-c", IMPORT_IN_TURN, *names, " ".join(HEAVY - allowed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [""] * (len(names) + 1)
