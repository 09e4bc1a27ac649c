"""The settings of a run travel in variables: what a platform writes, a launcher reads."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import stoker
from stoker.errors import UsageError
from stoker.records import EngineSettings, FeedSettings, ProfileSettings, StrategySettings
from stoker.records.engine import EngineHost
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
    assert from_environment(FULL.to_environ()) == FULL


def test_only_what_is_not_as_by_default_is_sent():
    sent = {"STOKER_FEED", "STOKER_WORKERS", "STOKER_STRATEGY"}
    assert RunEnvironment().to_environ().keys() == sent
    assert RunEnvironment(port=1).to_environ().keys() == sent | {"STOKER_PORT"}


def test_fields_that_are_named_are_sent_as_they_are():
    told = ProcessSettings(run_id="a").to_environ("has_data_group", "run_id")
    assert told == {"STOKER_RUN_ID": "a", "STOKER_HAS_DATA_GROUP": "0"}


def test_an_empty_variable_says_nothing():
    assert from_environment(dict.fromkeys(FULL.to_environ(), "")) == ProcessSettings()


def test_fields_that_are_not_named_are_not_read():
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


def test_no_variable_of_a_run_is_spelled_that_is_not_declared():
    declared = set(FULL.to_environ()) | {
        # Of the user, of pipelines, and between the parts of one strategy.
        *("STOKER_INSTANCE_TYPE", "STOKER_MPI", "STOKER_PROFILED_CLUSTER"),
        *("STOKER_KUBEFLOW_NAMESPACE", "STOKER_KUBEFLOW_TOKEN"),
        *("STOKER_WEBHOOK_URL", "STOKER_PIPELINE_RUN"),
        # Of a pod, by the cluster itself.
        "STOKER_CPU_REQUEST_MILLI",
    }
    root = Path(stoker.__file__).parent
    named = {
        name
        for path in root.rglob("*.py")
        for name in re.findall(r"STOKER_[A-Z0-9_]+(?<!_)(?![A-Z0-9_*])", path.read_text())
    }
    assert named - declared == set()


def test_a_launcher_s_own_words_replace_what_it_was_told():
    told = replace(FULL, host="algo-9").to_environ("host")
    assert from_environment({**FULL.to_environ(), **told}).host == "algo-9"


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
def test_a_run_replaces_loaders_as_its_workload_says(feed, engine, expected):
    document = {"name": "a", "command": ["python", "a.py"], "feed": feed, "engine": engine}
    told = RunEnvironment.of(workload_from(document)).to_environ()
    assert told.get("STOKER_REPLACE_DATALOADER") == expected


def test_a_profile_measures_the_loaders_of_the_script():
    workload = workload_from(
        {"name": "a", "command": ["python", "a.py"], "feed": {"replace_dataloader": True}}
    )
    told = RunEnvironment.of(workload, profile=ProfileSettings()).to_environ()
    assert "STOKER_REPLACE_DATALOADER" not in told
