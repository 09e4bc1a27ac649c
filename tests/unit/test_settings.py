from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from stoker.environment import (
    ProcessSettings,
    RunEnvironment,
    RunGroup,
    cloud_region,
    from_environment,
)
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
from stoker.workload_file import read_workload, workload_from
from support import builders

GOOD = """\
name: demo
command: [python, train.py]
feed:
  credits: 3
gate:
  - {metric: accuracy, min: 0.9}
"""


def write(tmp_path, text):
    file = tmp_path / "w.yaml"
    file.write_text(text)
    return file


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11)
)
# On lines of their own: YAML's scanner looks at all brackets of a line for each of them.
DEEP = "[\n" * 5000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "expand to more than"),
        ("name: &a [*a]\n", "that contains it"),
        ("name: &a {b: {c: *a}}\n", "that contains it"),
        ("name: " + DEEP, "nested too deeply"),
    ],
    ids=["bomb", "circle", "long circle", "deep"],
)
def test_yaml_that_expands_without_end_is_a_usage_error(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        read_workload(write(tmp_path, text))


@pytest.mark.parametrize("value", ["&a [*a]", DEEP])
def test_an_override_that_expands_without_end_is_a_usage_error(value):
    with pytest.raises(UsageError, match="--set name"):
        workload_from({"name": "x", "command": ["true"]}, overrides=[f"name={value}"])


def test_a_workload_is_read_with_its_defaults(tmp_path):
    text = GOOD + "hyperparameters: {a: &v 3, b: *v}\n"
    workload = read_workload(write(tmp_path, text), overrides=["constraints.objective=time"])
    assert workload.command == ("python", "train.py")
    assert (workload.feed.credits, workload.feed.lease_seconds) == (3, 60.0)
    assert (workload.constraints.objective, workload.constraints.max_data_hosts) == ("time", 8)
    assert workload.hyperparameters == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        (GOOD + "naem: x\n", "unknown key naem", "w.yaml:7, key naem"),
        (GOOD.replace("credits", "credit"), "unknown key credit", "w.yaml:4, key feed.credit"),
        (GOOD.replace("0.9", "high"), "expected a number", "w.yaml:6, key gate[0].min"),
        (GOOD.replace("0.9", ".inf"), "not a finite number", "w.yaml:6, key gate[0].min"),
        (GOOD.replace("min: 0.9", ""), "neither min nor max", "w.yaml:6, key gate[0]"),
        (GOOD.replace(" 3", " 0"), ">= 1", "w.yaml:4, key feed.credits"),
        (GOOD + "name: y\n", "duplicate key name", "w.yaml:7, key name"),
        (GOOD + "schema: stoker.workload/v9\n", "stoker.workload/v1", "w.yaml:7"),
        ("command: [a]\n", "key name is missing", "key name"),
        ("- a\n", "a mapping", "w.yaml"),
        (GOOD + "platform: locl\n", "'locl' is not one of", "w.yaml:7, key platform"),
        (GOOD.replace("credits: 3", "pin: true"), "true is not one of auto, script", "w.yaml:4"),
        (GOOD.replace("credits: 3", "balance: 1"), "1 is not one of cost", "key feed.balance"),
        (
            GOOD.replace("credits: 3", "seeding: torch\n  split_batches: true"),
            "split_batches cannot be used with seeding: torch",
            "key feed.split_batches",
        ),
        (GOOD.replace("credits: 3", "replace_dataloader: so"), "auto, true, false", "w.yaml:4"),
        (GOOD + "constraints: {deadline_hours: 2}\n", "number of steps", "w.yaml:7"),
        (GOOD + "tracking: {mlflow: 'https://TOKEN@host'}\n", "contains a user", "w.yaml:7"),
        (GOOD + "tracking: {mlflow: 'https://[mlflow'}\n", "invalid address", "w.yaml:7"),
    ],
)
def test_an_error_says_what_and_where(tmp_path, text, what, where):
    with pytest.raises(UsageError) as caught:
        read_workload(write(tmp_path, text))
    assert what in caught.value.what
    assert where in caught.value.where


CLOUD = """\
name: demo
command: [python, train.py, BUCKET]
platform: sagemaker
image: ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:mnist
channels:
  training:
    uri: s3://BUCKET/mnist/
sagemaker:
  role: arn:aws:iam::123456789012:role/BUCKET
  output_uri: s3://mine/BUCKET
"""


def test_placeholders_are_refused_with_their_keys_and_what_to_put_there(tmp_path):
    with pytest.raises(UsageError) as caught:
        read_workload(write(tmp_path, CLOUD))
    error = caught.value
    assert (
        error.what == "replace the placeholder: ACCOUNT in image, REGION in image, BUCKET in "
        "channels.training.uri"
    )
    assert error.where == f"{tmp_path}/w.yaml:4, key image"
    assert error.fix.startswith(
        "in the whole file, write the 12 digits of your AWS account instead of ACCOUNT"
    )
    assert "instead of BUCKET, or use --set KEY=VALUE for each" in error.fix


# What only looks like a placeholder: names that the user gives, not addresses.
OWN_WORDS = """\
name: demo
command: [python, train.py, BUCKET]
platform: sagemaker
image: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/REGISTRY:BUCKET
hyperparameters: {group_by: REGION, image: REGION}
gate: [{metric: recall@REGION, min: 0.9}]
tracking: {experiment: churn-by-REGION}
notify: {variable: BUCKET}
engine: {name: command, data: {command: [serve, --by=REGION], environment: {region: REGION}}}
sagemaker:
  role: arn:aws:iam::123456789012:role/BUCKET
  output_uri: s3://mine/BUCKET
  dead_letter_queue: arn:aws:sqs:eu-west-1:123456789012:BUCKET
  request: {Environment: {GROUP_BY: REGION}, Tags: [{Key: scope, Value: REGION}]}
"""


def test_placeholders_are_looked_for_in_addresses_only(tmp_path):
    assert read_workload(write(tmp_path, OWN_WORDS)).gate[0].metric == "recall@REGION"


def test_an_override_takes_the_place_of_a_placeholder(tmp_path):
    # The command, the folder in a bucket and the name of a role are the user's own words.
    names = ["image=registry/stoker:1", "channels.training.uri=s3://mine/REGION"]
    assert read_workload(write(tmp_path, CLOUD), overrides=names).command[-1] == "BUCKET"
    with pytest.raises(UsageError) as caught:
        read_workload(write(tmp_path, CLOUD), overrides=[*names, "sagemaker.region=REGION"])
    assert caught.value.where == "--set sagemaker.region=..., key sagemaker.region"
    assert caught.value.fix == "in --set, write your AWS region instead of REGION"


@pytest.mark.parametrize(
    ("platform", "uris", "named", "storage"),
    [
        # Each host reads from S3, or copies it, by itself.
        ("sagemaker", ["s3://b/train"], None, "per_host"),
        ("sagemaker", ["fsx://fs-01234567/m/train"], None, "shared"),
        ("sagemaker", ["efs://fs-01234567/train", "fsx://fs-01234567/m/test"], None, "shared"),
        # Behind a claim is NFS, or a bucket's driver; of two storages it cannot be told which is
        # waited for, nor what a script reads by itself.
        ("kubernetes", ["pvc://data/train"], None, "unknown"),
        ("sagemaker", ["s3://b/train", "efs://fs-01234567/test"], None, "unknown"),
        ("kubernetes", [], None, "unknown"),
        # All of its hosts are this machine.
        ("local", [], None, "shared"),
        ("local", ["/data"], None, "shared"),
        ("kubernetes", ["pvc://of-s3/train"], "per_host", "per_host"),
        ("sagemaker", ["s3://b/train"], "unknown", "unknown"),
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


def test_a_channel_of_settings_says_nothing_of_where_the_data_are():
    channels = {"config": {"uri": "s3://b/config"}}
    workload = builders.workload("mnist", platform="sagemaker", channels=channels)
    assert workload.known_constraints.storage == "unknown"


def test_both_variables_that_name_a_region_are_read():
    both = {"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-east-1"}
    assert cloud_region(both) == "eu-west-1"
    assert cloud_region({"AWS_DEFAULT_REGION": "us-east-1"}) == "us-east-1"
    assert cloud_region({}) is None


def test_a_workload_may_be_its_own_json_document():
    text = '{"name": "demo", "command": ["python", "train.py"], "feed": {"credits": 3}}'
    workload = read_workload(text, overrides=["feed.credits=5"])
    assert (workload.name, workload.feed.credits) == ("demo", 5)
    with pytest.raises(UsageError, match="unknown key comand") as caught:
        read_workload('{"name": "demo", "comand": ["true"]}')
    assert "the workload's document" in caught.value.where


def test_a_pools_file_is_replaced_by_its_text(tmp_path):
    table = "instance_type,vcpus,usd_per_hour\n" + "".join(f"pool-{n},4,1\n" for n in range(50))
    (tmp_path / "pools.csv").write_text(table)
    workload = builders.workload(kubernetes={"pools_file": str(tmp_path / "pools.csv")})
    assert workload.kubernetes.pools_file == table
    assert read_workload(msgspec.json.encode(workload).decode()) == workload


def test_a_pools_file_that_is_not_there_is_named_with_its_key():
    document = {"name": "demo", "command": ["true"], "kubernetes": {"pools_file": "none.csv"}}
    with pytest.raises(UsageError, match=r"no such file: none\.csv") as caught:
        workload_from(document)
    assert "key kubernetes.pools_file" in caught.value.where


HOST = {"run_id": "mnist", "host": "algo-1", "group": "dnn", "advertise": "10.0.0.1", "port": 7700}
LIMITS = {"restarts": 2, "max_fresh_starts": 3, "max_run_seconds": 7200, "processes_per_host": 4}
RANK = {"rank": 3, "world_size": 8, "local_rank": 1, "local_world_size": 4, "backend": "nccl"}
LEADER = {"coordinator": "algo-1:7600", "launcher_pid": 17, "workload_sha256": "0" * 64}
FILES = ("base_dir", "token_file", "profile_file", "code_file", "follower_lease", "tensorboard")
PATHS = {name: Path("/ml", name) for name in (*FILES, "output", "metrics")}
FULL = ProcessSettings(
    **{**HOST, **LIMITS, **RANK, **LEADER, **PATHS, "comes_back": True, "has_data_group": True},
    feed=FeedSettings(credits=5, replicas=((0, 1), (2, 3))),
    workers={"dnn": 0, "data": 7},
    strategy=StrategySettings(name="mpi", mpi_arguments=("-x", "A=b c")),
    roles={"gpu": "dnn", "cpu": "data"},
    engine=EngineSettings(name="ray", ports={"server": 5050}),
    engine_hosts={"algo-2": EngineHost(address="127.0.0.1", ports={"server": 5051})},
    profile=ProfileSettings(budget_seconds=90),
    command=("python", "train.py"),
    requirements="jobs/requirements.txt",
    image="registry/train:7",
    code_digest="0123456789abcdef",
    replace_dataloader="auto",
    pod_groups=(RunGroup(name="dnn", instance_type="g5", count=2, hosts="dnn-{index}.run"),),
    watchdog=WatchdogSettings(then="stop"),
    budget=Budget(usd_per_hour={"dnn": 1.5}, max_usd=9.0, predicted_usd=3.0),
    hyperparameter_order=(1, 0),
    hyperparameter_forms="vo",
    metric_patterns={"accuracy": "accuracy ([0-9.]+)"},
    literal_hyperparameters=(1,),
    more_hyperparameters=Path("/opt/ml/more.json"),
    secret_names=("HF_TOKEN",),
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
