"""A pipeline on SageMaker finds a profile that an earlier run kept: by what a step costs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.pipelines.sagemaker.kept_profiles import (
    DataSize,
    FoundProfile,
    data_change,
    find_profile,
)
from stoker.platforms.aws import Aws
from stoker.platforms.packing import package_of
from stoker.records import Profile, read_json, to_json
from stoker.records.profile_key import reuse_key
from stoker.records.profile_origin import ProfileOrigin
from support import sample_records
from support.builders import workload
from support.command import succeeds
from support.moto_server import REGION, ROLE

BUCKET = "stoker-kept"
OUT = f"s3://{BUCKET}/out"
NOW = datetime.now(UTC)
BASE: dict[str, Any] = {
    "command": ["python", "train.py", "--width", "32"],
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
    "platform": "sagemaker",
    "cluster": {"dnn": {"instance_type": "ml.g5.xlarge"}},
    "channels": {"training": {"uri": f"s3://{BUCKET}/data/2026-11-20/"}},
    "hyperparameters": {
        "batch_size": 64,
        "lr": 0.1,
        "epochs": 3,
        "num_workers": 4,
        "crop": 224,
        "train_uri": "s3://b/data/2026-11-20/",
    },
    "sagemaker": {"role": ROLE, "output_uri": OUT, "region": REGION, "cache_days": 7},
}
PARAMETERS = ("--param", f"input_data=s3://{BUCKET}/data/2026-11-27/")


@pytest.fixture
def aws(aws_server) -> Aws:
    aws_server.make_bucket(BUCKET)
    found = Aws(region=REGION)
    for day in ("2026-11-20", "2026-11-27"):
        write_data(found, day)
    return found


def write_data(aws: Aws, day: str, *, num: int = 4, num_bytes: int = 100) -> None:
    for number in range(num):
        aws.write_object(f"s3://{BUCKET}/data/{day}/{number}", b"x" * num_bytes)


def changed(path: str, value: object) -> dict[str, Any]:
    """Returns BASE with the value at a key path."""
    document: Any = json.loads(json.dumps(BASE))
    target, names = document, path.split(".")
    for name in names[:-1]:
        target = target.setdefault(name, {})
    target[names[-1]] = value
    return document


def profile_of(days: float = 1.0) -> Profile:
    measured_at = (NOW - timedelta(days=days)).isoformat()
    origin = ProfileOrigin(measured_at=measured_at, image=BASE["image"])
    return msgspec.structs.replace(sample_records.profile(), origin=origin)


def asks(
    aws: Aws,
    run: str,
    document: dict[str, Any],
    code: str = "c",
    now: datetime | None = None,
) -> FoundProfile:
    wanted = workload("mnist", **document)
    return find_profile(wanted, aws=aws, key=reuse_key(wanted, code=code), run=run, now=now)


def measures(aws: Aws, run: str, *, days: float = 1.0) -> None:
    content = to_json(profile_of(days)).encode()
    aws.write_object(f"{OUT}/stoker/profiles/mnist/{run}/profile.json", content)


def measured(aws: Aws, run: str = "r1") -> None:
    """Plays a first run: it finds nothing, and measures."""
    assert asks(aws, run, BASE).profile is None
    measures(aws, run)


SAME: list[tuple[str, Any]] = [
    ("channels.training.uri", f"s3://{BUCKET}/data/2026-11-27/"),
    ("hyperparameters.lr", 0.7),
    ("hyperparameters.epochs", 90),
    ("gate", [{"metric": "accuracy", "min": 0.5}]),
    ("notify", {"on": "always"}),
    ("sagemaker.request", {"Tags": [{"Key": "branch", "Value": "another"}]}),
    ("hyperparameters.train_uri", "s3://b/data/2026-11-27/"),
    ("sagemaker.schedule", {"cron": "cron(0 3 ? * MON *)"}),
    ("sagemaker.source", "s3://stoker-kept/out/stoker/inputs/0123456789abcdef/code.tar.gz"),
    ("constraints.max_usd", 5.0),
    ("training", {"steps": 1000}),
]
OTHER: list[tuple[str, Any]] = [
    ("hyperparameters.batch_size", 32),
    ("hyperparameters.num_workers", 8),
    ("hyperparameters.crop", 336),
    ("image", f"{BASE['image']}@sha256:{'b' * 64}"),
    ("cluster.dnn.instance_type", "ml.g6.xlarge"),
    ("cluster.dnn.count", 2),
    ("feed.pin", "script"),
    ("command", ["python", "train.py", "--width", "64"]),
    ("channels.training.mode", "FastFile"),
    ("channels.training.uri", f"s3://{BUCKET}/other/2026-11-27/"),
]


@pytest.mark.parametrize(("path", "value"), SAME, ids=[path for path, _ in SAME])
def test_what_leaves_a_steps_cost_as_it_is_measures_nothing(aws, path, value):
    measured(aws)
    found = asks(aws, "r2", changed(path, value))
    assert found.profile == profile_of()
    assert "nothing is run" in found.words


@pytest.mark.parametrize(("path", "value"), OTHER, ids=[f"{path}" for path, _ in OTHER])
def test_what_may_cost_otherwise_is_measured(aws, path, value):
    measured(aws)
    found = asks(aws, "r2", changed(path, value))
    assert found.profile is None
    assert "it is measured" in found.words


def test_other_code_is_measured(aws):
    measured(aws)
    assert asks(aws, "r2", BASE, code="d").profile is None


@pytest.mark.parametrize(
    ("num", "num_bytes", "words"),
    [(2, 100, "200 B"), (4, 50, "200 B"), (4, 200, "800 B"), (8, 100, "800 B"), (4, 130, "520 B")],
    ids=["half the samples", "half the bytes", "twice the bytes", "twice the samples", "larger"],
)
@pytest.mark.parametrize("day", ["2026-11-20", "2026-11-28"], ids=["in place", "another date"])
def test_much_more_or_less_data_is_measured_again(aws, day, num, num_bytes, words):
    measured(aws)
    for number in range(4):
        aws.delete_object(f"s3://{BUCKET}/data/{day}/{number}")
    write_data(aws, day, num=num, num_bytes=num_bytes)
    found = asks(aws, "r2", changed("channels.training.uri", f"s3://{BUCKET}/data/{day}/"))
    assert found.profile is None
    assert "it is measured again: the data of training had four objects, 400 B" in found.words
    assert found.words.endswith(words)


def test_a_little_more_data_is_no_change(aws):
    measured(aws)
    write_data(aws, "2026-11-28", num=5, num_bytes=110)
    document = changed("channels.training.uri", f"s3://{BUCKET}/data/2026-11-28/")
    assert asks(aws, "r2", document).profile is not None


def test_an_old_profile_and_one_that_was_never_measured_are_passed_over(aws):
    assert asks(aws, "r1", BASE).profile is None
    # Its run failed before it had a profile.
    assert asks(aws, "r2", BASE).profile is None
    measures(aws, "r1")
    assert asks(aws, "r3", BASE, now=NOW + timedelta(days=8)).profile is None
    assert asks(aws, "r4", BASE, now=NOW + timedelta(days=6)).profile == profile_of()


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": "stoker.profile/v9"}', b"\xff"])
def test_a_profile_or_a_note_that_cannot_be_read_is_measured(aws, content):
    measured(aws)
    aws.write_object(f"{OUT}/stoker/profiles/mnist/r1/profile.json", content)
    assert asks(aws, "r2", BASE).profile is None
    measures(aws, "r2")
    key = reuse_key(workload("mnist", **BASE), code="c")
    aws.write_object(f"{OUT}/stoker/profiles/mnist/by-cost/{key}/r2", content)
    assert asks(aws, "r3", BASE).profile is None


def test_a_bucket_that_refuses_lets_the_run_measure(aws):
    document = changed("sagemaker.output_uri", "s3://stoker-not-there/out")
    found = asks(aws, "r1", document)
    assert found.profile is None
    assert "cannot be read or noted" in found.words


@pytest.mark.parametrize(
    ("was", "now", "is_other"),
    [
        ({"a": (100, 1000)}, {"a": (149, 1490)}, False),
        ({"a": (100, 1000)}, {"a": (151, 1510)}, True),
        ({"a": (100, 1000)}, {"a": (100, 1260)}, True),
        ({"a": (0, 0)}, {"a": (0, 0)}, False),
        ({"a": (0, 0)}, {"a": (1, 10)}, True),
        ({"a": (1, 0)}, {"a": (1, 0)}, False),
        ({"a": (10, 10)}, {}, True),
        ({}, {}, False),
    ],
)
def test_data_are_compared_by_number_total_and_mean_size(was, now, is_other):
    def sizes(of: dict[str, tuple[int, int]]) -> dict[str, DataSize]:
        return {name: DataSize(objects=each[0], bytes=each[1]) for name, each in of.items()}

    assert bool(data_change(sizes(was), sizes(now))) is is_other


@pytest.fixture
def project(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("import loader\n")
    (code / "loader.py").write_text("a = 1\n")
    (tmp_path / "workload.json").write_text(to_json(workload("mnist", **BASE)))
    return tmp_path


def step(project: Path, run: str, *more: str) -> tuple[str, dict[str, str]]:
    """Runs the step's command line; returns what it says, and what the condition reads."""
    (project / "code.tar.gz").write_bytes(package_of(project / "code").content)
    words = ("profile", "workload.json", "--find", run, "--package", "code.tar.gz")
    done = succeeds(*words, "--out", "out/profile.json", *more, cwd=project)
    return done.stdout + done.stderr, json.loads((project / "out" / "found.json").read_text())


def test_the_steps_command_line_finds_a_profile_over_data_of_another_date(aws, project):
    _, told = step(project, "r1")
    assert told["found"] == "no"
    assert not (project / "out" / "profile.json").exists()
    measures(aws, "r1")
    (project / "code" / "README.md").write_text("prose")
    said, told = step(project, "r2", *PARAMETERS, "--param=epochs=9", "--param=lr=0.5")
    assert told["found"] == "yes"
    assert f"measured before over s3://{BUCKET}/data/2026-11-20/, nothing is run" in said
    assert read_json(project / "out" / "profile.json", Profile) == profile_of()
    assert "profile of 24 hours ago" in said
    (project / "code" / "loader.py").write_text("a = 2\n")
    assert step(project, "r3", *PARAMETERS)[1]["found"] == "no"


def test_a_decision_on_sagemaker_names_the_file_that_has_changed(project):
    then = profile_of()
    assert then.origin is not None
    origin = msgspec.structs.replace(
        then.origin, code={"train.py": "0", "loader.py": "0"}, code_digest="0"
    )
    host = msgspec.structs.replace(then.host, instance_type="ml.g5.xlarge", vcpus=4)
    changes = {"origin": origin, "host": host, "workload_sha256": None}
    (project / "profile.json").write_text(to_json(msgspec.structs.replace(then, **changes)))
    (project / "code.tar.gz").write_bytes(package_of(project / "code").content)
    words = ("decide", "profile.json", "--workload", "workload.json", "--package", "code.tar.gz")
    done = succeeds(*words, "--out", "d.json", cwd=project)
    assert "code changed: loader.py, train.py" in done.stdout + done.stderr
