"""A training job on SageMaker goes from submit() to its end, on moto's server and what it lacks."""

import dataclasses
import io
import itertools
import json
import tarfile
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.errors import (
    NoCapacityError,
    PlatformError,
    TerminatedError,
)
from stoker.logs import parse_line
from stoker.platforms.aws import Aws, split_uri
from stoker.platforms.base import JobSpec, LogLine, leader_record
from stoker.platforms.follow import UNREACHABLE_SECONDS
from stoker.platforms.sagemaker import SageMakerPlatform, SageMakerRequest
from stoker.platforms.sagemaker.job import (
    POLL_SECONDS,
    STOP_SECONDS,
    SageMakerRun,
)
from stoker.records import (
    Channel,
    PlatformSettings,
    SageMakerSettings,
    to_json,
)
from stoker.run.train import train
from support import cloudwatch, sample_records
from support.aws_answers import Answers, Clock, archive, has_object, tar
from support.builders import clusters
from support.moto_server import REGION, ROLE

BUCKET = "stoker-test"
NAME = "mnist-1"
EXECUTION = "arn:aws:sagemaker:eu-central-1:123456789012:pipeline/mnist/execution/abc"
NOW = datetime(2026, 11, 20, 8, tzinfo=UTC)
QUOTA = (
    "The account-level service limit 'ml.c5.4xlarge for training job usage' is 1 Instances, with "
    "current utilization of 0 Instances and a request delta of 2 Instances."
)
put_lines = partial(cloudwatch.put_lines, job=NAME)
LOOK = ("sagemaker", "DescribeTrainingJob")
NOT_FOUND = (*LOOK, "ValidationException", "Requested resource not found.")
OUTPUTS = f"s3://{BUCKET}/out/{NAME}/output/output.tar.gz"
MODEL = f"s3://{BUCKET}/out/{{}}/output/model.tar.gz"
ROLE_LINE = (
    "stoker 2026-11-01T12:00:00.000Z run=mnist-1 host={0} host_role group={1} role={1} type=x "
    "leader=algo-2"
)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def aws(aws_server, clock):
    aws_server.make_bucket(BUCKET)
    return Aws(region=REGION, sleep=clock.sleep, clock=clock)


@pytest.fixture
def platform(aws):
    return SageMakerPlatform(aws=aws)


def settings(**changes: Any) -> PlatformSettings:
    output = f"s3://{BUCKET}/out"
    return PlatformSettings(sagemaker=SageMakerSettings(role=ROLE, output_uri=output, **changes))


@pytest.fixture
def job(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print('training')\n")
    return JobSpec(
        name=NAME,
        command=("python", "train.py"),
        groups=clusters("ml.g5.2xlarge", "ml.c5.4xlarge", 2),
        run_dir=tmp_path / "run",
        image="123456789012.dkr.ecr.eu-central-1.amazonaws.com/stoker:1",
        platform_settings=settings(
            source=str(source), request={"Tags": [{"Key": "team", "Value": "vision"}]}
        ),
    )


def submit(platform: SageMakerPlatform, job: JobSpec) -> tuple[SageMakerRequest, SageMakerRun]:
    request = platform.plan(job)
    return request, platform.submit(request)


@pytest.fixture
def run(platform, job):
    return submit(platform, job)[1]


TRAINS, COMPLETED = ("InProgress", "Training"), ("Completed", "Completed")


def has_status(answers: Answers, *states: tuple[str, str] | tuple[str, str, str]) -> None:
    """The job goes through (status, secondary[, reason]), one a look; the last one stays."""
    looked = []

    def change(parsed: dict[str, object]) -> None:
        status, secondary, *reason = states[min(len(looked), len(states) - 1)]
        looked.append(secondary)
        parsed["TrainingJobStatus"], parsed["SecondaryStatus"] = status, secondary
        times = (NOW + timedelta(seconds=at) for at in itertools.count())
        parsed["SecondaryStatusTransitions"] = [
            {"Status": name, "StartTime": when, "StatusMessage": f"{name} it"}
            for name, when in zip(dict.fromkeys(looked), times, strict=False)
        ]
        if reason:
            parsed["FailureReason"] = reason[0]

    answers.change("sagemaker", "DescribeTrainingJob", change)


def words(lines: list[LogLine]) -> list[str]:
    return [f"{line.group}/{line.host} {line.text}" for line in lines]


def record(**changes: object) -> bytes:
    return to_json(msgspec.structs.replace(sample_records.training(), **changes)).encode()


def test_submit_writes_code_and_token_encrypted_as_the_outputs(platform, aws, job):
    key = "arn:aws:kms:eu-central-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    source = job.platform_settings.sagemaker.source
    encrypted = settings(source=source, request={"OutputDataConfig": {"KmsKeyId": key}})
    request, _ = submit(platform, dataclasses.replace(job, platform_settings=encrypted))
    with tarfile.open(fileobj=io.BytesIO(aws.read_object(request.code_uri))) as code:
        assert code.getnames() == ["train.py"]
    for uri in (request.code_uri, request.token_uri):
        bucket, object_key = split_uri(uri)
        head = aws.call("s3", "HeadObject", Bucket=bucket, Key=object_key)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", key)


# ---- once, however often it is tried


def test_a_job_that_appears_between_look_and_creation_is_adopted(platform, aws, answers, job):
    request, _ = submit(platform, job)
    token = aws.read_object(request.token_uri)
    # The other attempt's job is not seen yet, at first, and for a moment after it is in the way.
    answers.refuse(*NOT_FOUND)
    answers.refuse("sagemaker", "CreateTrainingJob", "ResourceInUse", "already exists")
    answers.refuse(*NOT_FOUND)
    _, again = submit(platform, job)
    assert again.name == NAME
    assert aws.read_object(request.token_uri) == token


def changes(answers: Answers, name: str, **changed: object) -> None:
    """What the service says of one job."""

    def change(parsed: dict[str, object]) -> None:
        if parsed["TrainingJobName"] == name:
            parsed.update(changed)

    answers.change("sagemaker", "DescribeTrainingJob", change)


# ---- refusals


def test_a_missing_quota_names_type_group_and_limit(platform, aws, answers, job):
    answers.refuse("sagemaker", "CreateTrainingJob", "ResourceLimitExceeded", QUOTA)
    request = platform.plan(job)
    with pytest.raises(PlatformError) as caught:
        platform.submit(request)
    said = str(caught.value)
    assert "'ml.c5.4xlarge for training job usage' is 1" in said
    assert "2 x ml.c5.4xlarge (group data)" in said
    assert "ml.g5.2xlarge" not in said
    assert not has_object(aws, request.token_uri)


ENUM = (
    "1 validation error detected: Value 'ml.c5.4xlarge' at 'resourceConfig.instanceGroups.2.member."
    "instanceType' failed to satisfy constraint: Member must satisfy enum value set: "
    "[ml.g5.2xlarge, ml.m5.xlarge]"
)
UNSUPPORTED = "Unsupported instance type ml.c5.4xlarge"
RESOURCE, LIMIT = "requested resource", "The account-level service limit "
USED = " Instances, with current utilization of "
ASKED = " Instances and a request delta of 2 Instances. Please contact AWS support"


@pytest.mark.parametrize(
    ("message", "may_pass", "has_type"),
    [
        (f"{RESOURCE} training-job/ml.c5.4xlarge is not available in this region", False, True),
        (UNSUPPORTED, False, True),
        (ENUM, False, True),
        (QUOTA, False, True),
        (f"{LIMIT}'ml.c5.4xlarge for spot training job usage' is 8{USED}7{ASKED}", True, True),
        (f"{LIMIT}'Number of instances across all training jobs' is 1{USED}0{ASKED}", False, False),
    ],
)
def test_what_no_wait_changes_is_told_from_what_may_pass(
    platform, answers, job, message, may_pass, has_type
):
    is_limit = message not in (ENUM, UNSUPPORTED)
    code = "ResourceLimitExceeded" if is_limit else "ValidationException"
    answers.refuse("sagemaker", "CreateTrainingJob", code, message)
    with pytest.raises(NoCapacityError) as caught:
        platform.submit(platform.plan(job))
    assert caught.value.may_pass == may_pass
    assert caught.value.types == ({"ml.c5.4xlarge"} if has_type else set())
    assert "2 x ml.c5.4xlarge (group data)" in caught.value.what


# ---- following


def test_states_and_lines_of_all_hosts_come_once_and_in_order(aws, answers, clock, run):
    begun = [("InProgress", each) for each in ("Starting", "Downloading", "Training", "Training")]
    has_status(answers, *begun, COMPLETED)
    later = [
        lambda: None,
        lambda: put_lines(aws, "algo-1", (1, "cpu host says hello")),
        lambda: put_lines(aws, "algo-2", (2, ROLE_LINE.format("algo-2", "dnn")), (4, "step 1")),
        lambda: put_lines(aws, "algo-1", (5, ROLE_LINE.format("algo-1", "data")), (6, "bye")),
        lambda: put_lines(aws, "algo-2", (9, "said before, seen after the end")),
    ]
    clock.on_sleep = lambda _: later.pop(0)() if later else None
    lines = list(run.lines())
    plain = [line for line in words(lines) if "host_role" not in line]
    assert plain == [
        "sagemaker/status Starting: Starting it",
        "sagemaker/status Downloading: Downloading it",
        "sagemaker/status Training: Training it",
        # Before its launcher has said the group.
        "unknown/algo-1 cpu host says hello",
        "dnn/algo-2 step 1",
        "sagemaker/status Completed: Completed it",
        "data/algo-1 bye",
        "dnn/algo-2 said before, seen after the end",
    ]
    roles = [parse_line(line.text).host for line in lines if "host_role" in line.text]
    assert roles == ["algo-2", "algo-1"]
    assert list(run.lines()) == []


MISSING = "permission sagemaker:DescribeTrainingJob is missing"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ExpiredTokenException", ""),
        ("ThrottlingException", ""),
        ("AccessDeniedException", MISSING),
    ],
)
def test_a_service_that_stays_away_leaves_the_job_and_its_way_back(
    platform, aws, answers, clock, job, monkeypatch, code, words
):
    # Nobody logs in again: the clients stay as they are.
    monkeypatch.setattr(aws, "renew_login", lambda: None)
    request, run = submit(platform, job)
    answers.always_refuse("sagemaker", "DescribeTrainingJob", code, "no")
    answers.watch("sagemaker", "StopTrainingJob")
    with pytest.raises(PlatformError, match="for 15 minutes") as caught:
        list(run.lines())
    assert words in caught.value.what
    assert f"the job {NAME} keeps running" in caught.value.fix
    assert f"--name {NAME}" in caught.value.fix
    assert f"stop-training-job --training-job-name {NAME}" in caught.value.fix
    assert UNREACHABLE_SECONDS <= clock.now <= UNREACHABLE_SECONDS + 3 * POLL_SECONDS
    run.stop()
    assert answers.count("StopTrainingJob") == 0
    assert has_object(aws, request.token_uri)


# ---- stopping


@pytest.mark.parametrize("code", ["AccessDeniedException", "ThrottlingException"])
def test_a_stop_that_is_refused_says_that_the_job_continues_and_how_to_end_it(
    platform, aws, answers, clock, job, capsys, code
):
    request, run = submit(platform, job)
    has_status(answers, TRAINS)
    answers.always_refuse("sagemaker", "StopTrainingJob", code, "no")
    run.stop()
    run.stop()
    assert capsys.readouterr().err.count("job_stop_failed") == 1
    assert clock.now <= STOP_SECONDS + POLL_SECONDS
    left = run.remaining()
    assert f"the job {NAME} is not stopped" in left.what
    assert f"stop-training-job --training-job-name {NAME}" in left.fix
    # Its hosts may still read it.
    assert has_object(aws, request.token_uri)


@pytest.mark.parametrize("status", ["Executing", "Stopping", "Stopped", "error"])
def test_a_step_that_is_told_to_end_stops_its_job_only_if_its_run_is_stopped(
    platform, answers, job, monkeypatch, status
):
    monkeypatch.setenv("STOKER_PIPELINE_EXECUTION", EXECUTION)
    if status == "error":
        answers.always_refuse("sagemaker", "DescribePipelineExecution", "AccessDeniedException")
    else:
        found = {"PipelineExecutionStatus": status}
        answers.answer("sagemaker", "DescribePipelineExecution", found)
    has_status(answers, TRAINS, ("Stopped", "Stopped"))
    answers.answer("sagemaker", "StopTrainingJob", {})

    terminated = Mock(side_effect=TerminatedError)
    with pytest.raises(TerminatedError) as caught:
        train(job, platform=platform, catalog=load_catalog("sagemaker"), on_line=terminated)
    is_stopped = status in ("Stopping", "Stopped")
    assert answers.count("StopTrainingJob") == is_stopped
    assert ("the next attempt adopts it" in str(caught.value)) != is_stopped


# ---- the end


def test_the_leaders_records_are_unpacked_and_the_services_events_are_told(aws, answers, run):
    has_status(answers, TRAINS, COMPLETED)
    files = {"stoker/training.json": record(), "stoker/metrics.json": b"{}", "big.bin": b"x"}
    aws.write_object(OUTPUTS, archive(**files))
    end = run.wait()
    assert (end.status, end.exit_code, end.failure) == ("succeeded", 0, None)
    names = sorted(path.name for path in end.output_dir.rglob("*"))
    assert names == ["metrics.json", "stoker", "training.json"]
    assert leader_record(end.output_dir)
    told = ["Training: Training it", "Completed: Completed it"]
    assert [event.what for event in end.events] == told
    assert end.model_uri == MODEL.format(NAME)


def test_a_jobs_tags_keep_the_image_and_the_inputs_that_it_began_with(platform, aws, answers, job):
    def push(layer: str) -> str:
        layers = [{"digest": f"sha256:{layer * 64}", "size": 1, "mediaType": "layer"}]
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": layers[0], "layers": layers}
        to = {"repositoryName": "stoker", "imageTag": "1"}
        pushed = aws.call("ecr", "PutImage", **to, imageManifest=json.dumps(manifest))
        return str(pushed["image"]["imageId"]["imageDigest"])

    aws.call("ecr", "CreateRepository", repositoryName="stoker")
    for number in range(5):
        aws.write_object(f"s3://{BUCKET}/data/{number}", b"1")
    uri = f"s3://{BUCKET}/data/"
    job = dataclasses.replace(job, channels={"train": Channel(uri=uri)})
    digest = push("a")
    _, first = submit(platform, job)
    # What is there later is not what the job began with: a second attempt follows the same job.
    push("b")
    aws.write_object(f"{uri}more", b"2")
    _, again = submit(platform, job)
    assert again.name == first.name
    lineage = first.wait().lineage
    assert again.wait().lineage == lineage
    assert lineage["job_id"] == f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{NAME}"
    assert lineage["image_digest"] == digest
    other = submit(platform, dataclasses.replace(job, name="other"))[1].wait().lineage
    assert other["image_digest"] != digest


def test_an_archive_that_means_harm_writes_nothing_outside(aws, tmp_path, run):
    link = tarfile.TarInfo("stoker/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    names = ("stoker/../../escaped", "/stoker/absolute", "stoker/link/x")
    aws.write_object(OUTPUTS, tar((link, b""), *((tarfile.TarInfo(name), b"x") for name in names)))
    run.wait()
    assert not [path for path in tmp_path.rglob("*") if path.name in ("escaped", "absolute")]
    assert not list(tmp_path.rglob("stoker/link"))


CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a "
    "different ML instance type."
)


@pytest.mark.parametrize("reason", [CAPACITY, "InsufficientCapacityError: no ml.c5.4xlarge left"])
def test_missing_capacity_names_types_groups_and_the_next_plan(platform, aws, answers, job, reason):
    request, run = submit(platform, job)
    has_status(answers, ("InProgress", "Starting"), ("Failed", "Failed", reason))
    with pytest.raises(PlatformError) as caught:
        run.wait()
    said = str(caught.value)
    assert "2 x ml.c5.4xlarge (group data)" in said
    assert ("ml.g5.2xlarge (group dnn)" in said) == ("ml.c5.4xlarge" not in reason)
    assert not has_object(aws, request.token_uri)
