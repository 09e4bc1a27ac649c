from dataclasses import fields, replace
from pathlib import Path

import pytest

from stoker.environment import (
    VARIABLES,
    ProcessSettings,
    RunGroup,
    from_environment,
)
from stoker.errors import UsageError
from stoker.records import (
    EngineSettings,
    FeedSettings,
    ProfileSettings,
    SecretSource,
)
from stoker.records.engine import EngineHost
from stoker.records.training import Budget
from stoker.workload_file import read_workload
from support import builders

GOOD = """\
name: demo
command: [python, train.py]
feed:
  max_errors: 3
gate:
  - {metric: accuracy, min: 0.9}
"""


def write(tmp_path, text):
    file = tmp_path / "w.yaml"
    file.write_text(text)
    return file


def test_a_workload_is_read_with_its_defaults(tmp_path):
    text = GOOD + "hyperparameters: {a: &v 3, b: *v}\n"
    workload = read_workload(write(tmp_path, text), overrides=["constraints.objective=time"])
    assert workload.command == ("python", "train.py")
    assert (workload.feed.max_errors, workload.feed.lease_seconds) == (3, 30.0)
    assert (workload.constraints.objective, workload.constraints.max_data_hosts) == ("time", 8)
    assert workload.hyperparameters == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        (GOOD + "naem: x\n", "unknown field `naem`", "w.yaml:7, key naem"),
        (GOOD.replace("0.9", "high"), "expected `float", "w.yaml:6, key gate[0].min"),
        (GOOD.replace("min: 0.9", ""), "neither min nor max", "w.yaml:6, key gate[0]"),
        (GOOD.replace(" 3", " 0"), "> 0", "w.yaml:4, key feed.max_errors"),
        (GOOD + "name: y\n", "duplicate key name", "w.yaml:7"),
        (GOOD + "schema: stoker.workload/v9\n", "stoker.workload/v9", "w.yaml:7"),
        ("command: [a]\n", "missing required field `name`", "w.yaml"),
        (GOOD + "platform: locl\n", "invalid enum value 'locl'", "w.yaml:7, key platform"),
        (GOOD + "tracking: {mlflow: 'https://TOKEN@host'}\n", "contains a user", "w.yaml:7"),
    ],
)
def test_an_error_says_what_and_where(tmp_path, text, what, where):
    with pytest.raises(UsageError) as caught:
        read_workload(write(tmp_path, text))
    assert what in caught.value.what
    assert where in caught.value.where


@pytest.mark.parametrize(
    ("platform", "uris", "named", "storage"),
    [
        ("sagemaker", ["s3://b/train"], None, "per_host"),
        ("sagemaker", ["fsx://fs-01234567/m/train"], None, "shared"),
        ("kubernetes", ["pvc://data/train"], None, "unknown"),
        ("sagemaker", ["s3://b/train", "efs://fs-01234567/test"], None, "unknown"),
        ("local", [], None, "shared"),
        ("kubernetes", ["pvc://of-s3/train"], "per_host", "per_host"),
    ],
)
def test_platform_and_channels_tell_whether_hosts_share_a_storage(platform, uris, named, storage):
    workload = builders.workload(
        "mnist",
        *([f"constraints.storage={named}"] if named else []),
        platform=platform,
        channels={
            f"c{number}" if number else "train": {"uri": uri} for number, uri in enumerate(uris)
        },
    )
    assert workload.known_constraints.storage == storage


HOST = {"run_id": "mnist", "host": "algo-1", "group": "dnn", "advertise": "10.0.0.1", "port": 7700}
LIMITS = {"restarts": 2, "max_run_seconds": 7200, "processes_per_host": 4}
RANK = {"rank": 3, "world_size": 8, "local_rank": 1, "local_world_size": 4}
LEADER = {"coordinator": "algo-1:7600", "launcher_pid": 17}
FILES = ("base_dir", "token_file", "profile_file", "code_file")
PATHS = {name: Path("/ml", name) for name in (*FILES, "output", "metrics")}
FULL = ProcessSettings(
    **{**HOST, **LIMITS, **RANK, **LEADER, **PATHS, "comes_back": True, "has_data_group": True},
    feed=FeedSettings(max_errors=5, model_parallel_size=2),
    workers={"dnn": 0, "data": 7},
    loader_workers={"train.py:41": 4},
    strategy="mpi",
    roles={"gpu": "dnn", "cpu": "data"},
    engine=EngineSettings(name="ray", ports={"server": 5050}),
    engine_hosts={"algo-2": EngineHost(address="127.0.0.1", ports={"server": 5051})},
    profile=ProfileSettings(budget_seconds=90),
    command=("python", "train.py"),
    requirements="jobs/requirements.txt",
    replace_dataloader=True,
    pod_groups=(RunGroup(name="dnn", instance_type="g5", count=2, hosts="dnn-{index}.run"),),
    watchdog_minutes=30.0,
    budget=Budget(usd_per_hour={"dnn": 1.5}, max_usd=9.0, predicted_usd=3.0),
    metric_patterns={"accuracy": "accuracy ([0-9.]+)"},
    secrets={"HF_TOKEN": SecretSource(arn="arn:x")},
)


def test_every_setting_is_read_back_as_it_was_written(tmp_path):
    default = ProcessSettings()
    assert [f.name for f in fields(FULL) if getattr(FULL, f.name) == getattr(default, f.name)] == []
    (tmp_path / "run.json").write_text(FULL.to_json())
    (tmp_path / "token").write_text("0" * 64)
    own = FULL.to_environ(*(name for name in VARIABLES if name != "command"))
    environ = {"STOKER_RUN": str(tmp_path / "run.json"), **own}
    environ["STOKER_COMMAND"] = '["python", "train.py"]'
    assert from_environment(environ) == replace(FULL, token_file=tmp_path / "token")
    assert from_environment(dict.fromkeys(environ, "")) == default
    # A launcher's own words replace what it was told.
    told = replace(FULL, host="algo-9").to_environ("host")
    assert from_environment({**environ, **told}).host == "algo-9"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("STOKER_PORT", "http", "Expected `int"),
        ("STOKER_RUN", "{", "cannot read"),
        ("STOKER_RUN", '{"feed": {"max_errors": 0}}', "max_errors"),
        ("STOKER_RUN", "/no/such/run.json", "cannot read"),
    ],
)
def test_a_malformed_setting_is_named(name, text, words):
    with pytest.raises(UsageError) as caught:
        from_environment({name: text})
    assert f"variable {name}" in caught.value.where
    assert words in str(caught.value)
