"""A new platform is added in the places that `stoker.platforms` names, and nowhere else.

The platform of tests/data/new_platform is added to a copy of the sources, in these places only.
"""

import ast
import os
import shutil
from pathlib import Path

import pytest

import stoker
from stoker.platforms import PLATFORMS
from stoker.records import Training, read_json
from support.command import Done, process

SOURCES = Path(stoker.__file__).parent
PLAIN = Path(__file__).parents[1] / "data" / "new_platform" / "plain.py.txt"
# By file: the line before an addition, and what is added.
ADDED = {
    "platforms/__init__.py": (
        ('        "local": "local.LocalPlatform",\n', '        "plain": "plain.PlainPlatform",\n'),
    ),
    "records/platforms.py": (
        ('PlatformName = Literal["local", ', '"plain", '),
        (
            '        "local": PlatformInfo(is_this_machine=True),\n',
            '        "plain": PlatformInfo(host_variables=("PLAIN_JOB",)),\n',
        ),
        (
            "    kubernetes: KubernetesSettings | None = None\n",
            "    plain: PlainSettings | None = None\n",
        ),
        ("        kubernetes: Settings for Kubernetes.\n", "        plain: Settings for plain.\n"),
    ),
}
SECTION = '''class PlainSettings(Record, frozen=True, kw_only=True):
    """Settings of a workload for plain.

    Attributes:
        niceness: How far the job gives way to others.
        max_run_seconds: Upper limit on a job, in seconds.
    """

    niceness: NonNegativeInt = 0
    max_run_seconds: PositiveInt | None = None


'''
WORKLOAD = """\
name: plain
command: [python, train.py]
platform: plain
cluster: {dnn: {instance_type: c7i.large}}
plain: {niceness: 3, max_run_seconds: 600}
"""
SCRIPT = """\
import os
print("niceness", os.nice(0))
"""
# What SageMaker or Kubernetes alone has, and that its room asks for by the platform's name.
ASKED_BY_NAME = {
    "profile/profiled_job.py": 1,
    "run/earlier_runs.py": 1,
    "run/pipeline_facts.py": 1,
    "run/plan_price.py": 1,
}


def added(file: Path, additions) -> None:
    text = file.read_text()
    for before, addition in additions:
        assert text.count(before) == 1, before
        text = text.replace(before, before + addition)
    file.write_text(text)


@pytest.fixture(scope="module")
def with_plain(tmp_path_factory):
    """The command of a stoker that has one more platform."""
    sources = tmp_path_factory.mktemp("sources")
    package = sources / "stoker"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PLAIN, package / "platforms" / "plain.py")
    for file, additions in ADDED.items():
        added(package / file, additions)
    records = package / "records" / "platforms.py"
    head = "class PlatformSettings("
    records.write_text(records.read_text().replace(head, SECTION + head))
    environ = {**os.environ, "PYTHONPATH": str(sources)}

    def run(*words: str, cwd: Path) -> Done:
        return process(*words, cwd=cwd, env=environ)

    return run


@pytest.fixture
def project(tmp_path):
    (tmp_path / "plain.yaml").write_text(WORKLOAD)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_new_platform_trains_through_the_command_line(with_plain, project):
    done = with_plain("train", "plain.yaml", "--name", "one", "--yes", cwd=project)
    assert done.returncode == 0, done.stderr
    # The tests' own processes may be nice themselves.
    assert f"niceness {min(19, os.nice(0) + 3)}" in done.stderr
    record = read_json(project / "runs" / "one" / "training.json", Training)
    assert (record.status, record.job.platform) == ("succeeded", "plain")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "plain.yaml", "--dry-run"), '"platform": "plain"'),
        (("train", "--help"), "local, plain, sagemaker"),
    ],
)
def test_a_new_platform_is_known_to_each_verb(with_plain, project, words, expected):
    done = with_plain(*words, cwd=project)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_workload_s_section_of_a_new_platform_is_checked(with_plain, project):
    (project / "plain.yaml").write_text(WORKLOAD.replace("niceness", "nicenes"))
    done = with_plain("train", "plain.yaml", "--dry-run", cwd=project)
    assert done.returncode == 2
    assert "niceness" in done.stderr


def test_a_new_platform_gets_a_project(with_plain, project):
    (project / "plain.yaml").unlink()
    done = with_plain("init", "--script", "train.py", "--platform", "plain", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "platform: plain\n" in (project / "train.yaml").read_text()
    assert "stoker train --dry-run train.yaml" in done.stdout


def test_a_run_of_a_new_platform_is_planned_with_more_hosts_than_it_has(with_plain, project):
    done = with_plain("train", "plain.yaml", "--group", "dnn=2", "--yes", cwd=project)
    assert done.returncode == 2
    assert "has one host" in done.stderr


def is_of_platform(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "platform"
        case ast.Call(func=ast.Name(id=name)):
            return name == "platform_name"
    return False


def asks_by_name(node: ast.AST) -> bool:
    """Whether a comparison asks if a platform is the one of that name."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    names = [side for side in sides if isinstance(side, ast.Constant) and side.value in PLATFORMS]
    return bool(names) and any(map(is_of_platform, sides))


def test_no_other_room_asks_for_a_platform_by_its_name():
    found: dict[str, int] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        room = file.relative_to(SOURCES)
        if room.parts[0] != "platforms":
            count = sum(map(asks_by_name, ast.walk(ast.parse(file.read_text()))))
            found |= {room.as_posix(): count} if count else {}
    assert found == ASKED_BY_NAME
