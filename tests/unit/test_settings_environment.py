"""The settings of a run travel in variables: what a platform writes, a launcher reads."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.records import (
    EngineSettings,
    FeedSettings,
    ProfileSettings,
    StrategySettings,
    WatchdogSettings,
)
from stoker.records.engine import EngineHost
from stoker.records.training import Budget
from stoker.settings import (
    ProcessSettings,
    RunEnvironment,
    RunGroup,
    from_environment,
    workload_from,
)

FULL = ProcessSettings(
    run_id="mnist-1",
    host="algo-1",
    group="dnn",
    base_dir=Path("/ml"),
    token_file=Path("/token"),
    feed=FeedSettings(credits=5, replicas=((0, 1), (2, 3))),
    workers={"dnn": 0, "data": 7},
    strategy=StrategySettings(name="mpi", mpi_arguments=("-x", "A=b c")),
    processes_per_host=4,
    roles={"gpu": "dnn", "cpu": "data"},
    engine=EngineSettings(name="ray", ports={"server": 5050}),
    engine_hosts={"algo-2": EngineHost(address="127.0.0.1", ports={"server": 5051})},
    advertise="10.0.0.1",
    port=7700,
    coordinator="algo-1:7600",
    profile=ProfileSettings(budget_seconds=90),
    profile_file=Path("/profile.json"),
    workload_sha256="0" * 64,
    code_file=Path("/code.tar.gz"),
    command=("python", "train.py"),
    replace_dataloader="auto",
    tensorboard=Path("/ml/output/tensorboard"),
    comes_back=True,
    pod_groups=(RunGroup(name="dnn", instance_type="g5", count=2, hosts="dnn-{index}.run"),),
    follower_lease=Path("/follower"),
    restarts=2,
    max_fresh_starts=3,
    max_run_seconds=7200,
    watchdog=WatchdogSettings(then="stop"),
    budget=Budget(usd_per_hour={"dnn": 1.5}, max_usd=9.0, predicted_usd=3.0),
    has_data_group=True,
    output=Path("/out"),
    metrics=Path("/out/metrics.json"),
    launcher_pid=17,
    backend="nccl",
    rank=3,
    world_size=8,
    local_rank=1,
    local_world_size=4,
)


def test_every_setting_is_read_back_as_it_was_written():
    default = ProcessSettings()
    assert [f.name for f in fields(FULL) if getattr(FULL, f.name) == getattr(default, f.name)] == []
    environ = FULL.to_environ()
    assert from_environment(environ) == FULL
    assert from_environment(dict.fromkeys(environ, "")) == default
    # A launcher's own words replace what it was told.
    told = replace(FULL, host="algo-9").to_environ("host")
    assert from_environment({**environ, **told}).host == "algo-9"


def test_only_fields_that_are_named_or_not_as_by_default_are_sent_and_read():
    sent = {"STOKER_FEED", "STOKER_WORKERS", "STOKER_STRATEGY"}
    assert RunEnvironment(port=1).to_environ().keys() == sent | {"STOKER_PORT"}
    told = ProcessSettings(run_id="a").to_environ("has_data_group", "run_id")
    assert told == {"STOKER_RUN_ID": "a", "STOKER_HAS_DATA_GROUP": "0"}
    environ = {"STOKER_FEED": "{", "STOKER_GROUP": "dnn"}
    assert RunEnvironment.from_environ(environ, "group") == RunEnvironment(group="dnn")


def test_what_the_service_calls_the_job_is_the_run_s_id():
    assert from_environment({"TRAINING_JOB_NAME": "job"}).run_id == "job"
    both = {"TRAINING_JOB_NAME": "job", "STOKER_RUN_ID": "run"}
    assert from_environment(both).run_id == "run"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("STOKER_PORT", "http", "whole number"),
        ("STOKER_REPLACE_DATALOADER", "yes", "auto, 1 (on) or 0 (off)"),
        ("STOKER_COMES_BACK", "no", "1 (on) or 0 (off)"),
        ("STOKER_FEED", "{", "malformed"),
        ("STOKER_FEED", '{"credits": 0}', "credits"),
        ("STOKER_WORKERS", '{"dnn": "two"}', "malformed"),
        ("STOKER_COMMAND", "python train.py", "malformed"),
        ("STOKER_STRATEGY", "horovod", "horovod"),
        ("STOKER_GROUPS", '[{"name": "a", "count": 0, "hosts": "b"}]', "malformed"),
    ],
)
def test_a_malformed_variable_is_named(name, text, words):
    with pytest.raises(UsageError) as caught:
        from_environment({name: text})
    assert f"variable {name}" in caught.value.where
    assert words in str(caught.value)


# As the launcher writes it, and as a person may.
@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", "auto"), ("1", True), ("true", True), ("0", False), ("false", False), ("", False)],
)
def test_the_replacement_of_loaders_is_read_in_both_spellings(text, expected):
    assert from_environment({"STOKER_REPLACE_DATALOADER": text}).replace_dataloader == expected


@pytest.mark.parametrize(
    ("feed", "engine", "expected"),
    [
        ({}, "feed", "auto"),
        ({"replace_dataloader": True}, "feed", "1"),
        ({"replace_dataloader": False}, "feed", None),
        # Another engine feeds in its own way, unless torch's class is asked for by name.
        ({}, "ray", None),
        ({"replace_dataloader": True}, "ray", "1"),
    ],
)
def test_a_run_replaces_loaders_as_its_workload_says_and_a_profile_none(feed, engine, expected):
    document = {"name": "a", "command": ["python", "a.py"], "feed": feed, "engine": engine}
    told = RunEnvironment.of(workload_from(document)).to_environ()
    assert told.get("STOKER_REPLACE_DATALOADER") == expected
    profile = RunEnvironment.of(workload_from(document), profile=ProfileSettings())
    assert "STOKER_REPLACE_DATALOADER" not in profile.to_environ()
