"""The request that plan() makes, and what is refused before it is sent; whole ones are golden."""

import dataclasses
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from stoker.environment import RunSettings, from_environment
from stoker.errors import UsageError
from stoker.figures.intervals import IntervalLog
from stoker.figures.progress import RunSteps
from stoker.launch.topology import from_resourceconfig
from stoker.logs import Log
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.job import verdict_of
from stoker.platforms.sagemaker.request import (
    PROGRESS_METRICS,
    REQUEST_TAG,
    check_body,
    plan_request,
)
from stoker.platforms.sagemaker.submit import no_hosts
from stoker.records import Channel, FeedSettings, Json
from stoker.records.training import Budget
from support.sagemaker_job import (
    DATA,
    DNN,
    SPOT,
    group,
    job,
    plan_body,
    settings,
)


def channels(spec: JobSpec) -> dict[str, Mapping[str, Json]]:
    return {str(c["ChannelName"]): c for c in plan_body(spec)["InputDataConfig"]}


def environment(spec: JobSpec) -> dict[str, str]:
    return plan_body(spec)["Environment"]


def digest(spec: JobSpec) -> str:
    return next(tag["Value"] for tag in plan_body(spec)["Tags"] if tag["Key"] == REQUEST_TAG)


def test_the_launcher_reads_what_the_request_tells_it():
    feed = FeedSettings(max_errors=4, lease_seconds=20.0)
    dnn = msgspec.structs.replace(DNN, processes_per_host=4, workers_per_host=0)
    settings = RunSettings(
        feed=feed,
        strategy="torchrun",
        replace_dataloader=True,
    )
    spec = job(dnn, DATA, settings=settings)
    assert environment(spec)["STOKER_RUN"] == "/opt/ml/input/data/stoker_token/run.json"
    told = from_environment({"STOKER_RUN": plan_request(spec).settings.to_json()})
    assert told.run_id == "mnist-1"
    assert told.feed == feed
    assert told.workers == {"dnn": 0}
    assert (told.strategy, told.processes_per_host) == ("torchrun", 4)
    assert told.replace_dataloader
    assert told.profile is None
    assert told.code_file == Path("/opt/ml/input/data/stoker_code/code.tar.gz")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("dnn", "data"), {"dnn": "dnn", "data": "data"}),
        (("gpu", "cpu"), {"gpu": "dnn", "cpu": "data"}),
        # The hosts of a job with one group do not learn its name.
        (("data-lovers",), None),
    ],
)
def test_the_roles_of_several_groups_are_told(names, told, tmp_path):
    roles = ("dnn", "data")[: len(names)]
    spec = job(*(group(role, name=name) for role, name in zip(roles, names, strict=True)))
    run = plan_request(spec).settings
    variables = {"STOKER_RUN": run.to_json()}
    assert run.to_document().get("roles") == told
    hosts = ["algo-2", "algo-1"][: len(names)]
    groups = [
        {"instance_group_name": name, "hosts": [host]}
        for name, host in zip(names, hosts, strict=True)
    ]
    resources = {"current_host": "algo-2", "hosts": hosts}
    if len(groups) > 1:
        resources["instance_groups"] = groups
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    topology = from_resourceconfig(tmp_path, variables)
    assert (topology.dnn_hosts, topology.data_hosts) == (("algo-2",), tuple(hosts[1:]))


def test_a_patch_changes_stokers_defaults():
    channel = {"ChannelName": "train", "ContentType": "image/jpeg"}
    spec = job(sagemaker=settings(request={"RetryStrategy": None, "InputDataConfig": [channel]}))
    assert "RetryStrategy" not in plan_body(spec)
    assert channels(spec)["train"] == {**channels(job())["train"], **channel}


def test_checkpoints_belong_to_a_run_and_its_further_attempts():
    def folder(name: str, *, run: str | None = None) -> str:
        kept_at = settings(checkpoint_uri="s3://bucket/kept/")
        return plan_body(job(name=name, run=run, sagemaker=kept_at))["CheckpointConfig"]["S3Uri"]

    assert folder("mnist-1") == "s3://bucket/kept/mnist-1"
    assert folder("mnist-2") == "s3://bucket/kept/mnist-2"
    assert folder("mnist-1-2", run="mnist-1") == "s3://bucket/kept/mnist-1"


def test_file_systems_are_channels_of_all_groups_in_a_vpc():
    network = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    vpc = settings(request={"VpcConfig": network})
    disks = {
        "train": Channel(uri="fsx://fs-0123456789abcdef0/mount/mnist"),
        "words": Channel(uri="efs://fs-01234567/words"),
    }
    found = channels(job(channels=disks, sagemaker=vpc))
    assert found["train"]["DataSource"] == {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789abcdef0",
            "FileSystemAccessMode": "ro",
            "FileSystemType": "FSxLustre",
            "DirectoryPath": "/mount/mnist",
        }
    }
    some = {**disks, "labels": Channel(uri="s3://bucket/labels", groups=("data",))}
    with pytest.raises(UsageError, match="all groups mount"):
        plan_body(job(channels=some, sagemaker=vpc))


def metrics_in(lines: str) -> list[float]:
    found = [re.search(metric["Regex"], lines) for metric in PROGRESS_METRICS]
    return [float(match.group(1)) for match in found if match]


def test_the_metric_definitions_read_what_the_progress_log_writes(tmp_path):
    timeline = tmp_path / "timeline-rank0.csv"
    head = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps"
    rows = [head, *(f"0,0,0,{start},0.125,0.125,8,1" for start in (0.0, 0.25, 0.5))]
    timeline.write_text("\n".join(rows) + "\n", encoding="utf-8")
    stream = io.StringIO()
    log = Log(run="r", host="h", stream=stream)
    file = tmp_path / "metrics.jsonl"
    steps = RunSteps(tmp_path)
    rows = IntervalLog(path=file, log=log, steps=steps, spent_usd=lambda: 1.5)
    rows.tick()
    rows.close()
    assert metrics_in(stream.getvalue()) == [0.25, 0.125, 0.25, 1.5]


def test_the_requests_digest_changes_with_the_job_alone():
    first = digest(job())
    tagged = settings(request={"Tags": [{"Key": "a", "Value": "b"}]})
    # An attempt that reaches MLflow has these variables, one that does not has none.
    mlflow = {"MLFLOW_TRACKING_URI": "https://mlflow", "MLFLOW_RUN_ID": "0a1b"}
    limited = dataclasses.replace(job().settings, budget=Budget(max_usd=9.0))
    for same in (
        job(sagemaker=tagged),
        job(run_dir=Path("elsewhere/mnist-1")),
        job(environment=mlflow),
        # Prices may change between attempts, and the user may raise the limit.
        dataclasses.replace(job(), settings=limited),
    ):
        assert digest(same) == first
    for other in (job(command=("python", "train.py")), job(DNN, group("data", count=3))):
        assert digest(other) != first


Body = dict[str, Json]


def hetero(**resources: Json) -> Body:
    body = plan_body(job())
    body["ResourceConfig"] |= resources
    return body


def test_what_botocore_refuses_is_refused_with_all_of_its_words():
    body = hetero() | {"TrainingJobNme": "x", "Environment": {"A": 3}}
    del body["RoleArn"]
    with pytest.raises(UsageError) as caught:
        check_body(body)
    for word in ("RoleArn", "TrainingJobNme", "Environment.A"):
        assert word in caught.value.what


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job(sagemaker=None), "no settings for SageMaker"),
        (job(image=None), "no image"),
        (job(DNN, *(group("data", name=f"data-{i}") for i in range(6))), "at most 5 .* found 7"),
        (job(group("dnn", "ml.g5.2xlrge"), DATA), "did you mean ml.g5.2xlarge"),
        (job(name="mnist_1"), "invalid run name"),
        (job(channels={"train": Channel(uri="data/mnist")}), "and FSx for Lustre, not data/mnist"),
        (job(sagemaker=settings(source="https://host/code.tar.gz")), "not from https://host"),
        (job(sagemaker=settings(request=SPOT, max_run_seconds=60)), "managed spot and warm pools"),
    ],
)
def test_a_job_that_sagemaker_cannot_run_is_refused(spec, words):
    with pytest.raises(UsageError) as caught:
        plan_body(spec)
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ("Completed", "", 0),
        ("Failed", "AlgorithmError: x, exit code: 7", 7),
        ("Failed", "InternalServerError: try again", None),
    ],
)
def test_the_exit_code_is_the_one_that_the_reason_tells(status, reason, code):
    ended = {"TrainingJobStatus": status, "FailureReason": reason}
    assert verdict_of(ended)[1] == code


@pytest.mark.parametrize(
    ("reason", "lacks"),
    [
        ("CapacityError: Unable to provision requested ML compute capacity.", True),
        ("InsufficientInstanceCapacity", True),
        ("AlgorithmError: a cache of insufficient size", False),
        ("ClientError: Data download failed", False),
    ],
)
def test_missing_capacity_is_told_from_other_failures(reason, lacks):
    assert bool(no_hosts(reason, job(), where="job")) == lacks
