"""A training job on SageMaker goes from submit() to its end, on moto's server and what it lacks."""

import dataclasses
import io
import itertools
import json
import ssl
import tarfile
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from botocore.exceptions import ReadTimeoutError, ResponseStreamingError
from botocore.response import StreamingBody

from stoker.catalog import load_catalog
from stoker.errors import (
    NoCapacityError,
    PlatformError,
    ServiceError,
    TerminatedError,
    WorkloadError,
)
from stoker.logs import parse_line
from stoker.platforms.aws import EVENTUAL_SECONDS, Aws, split_uri
from stoker.platforms.base import JobSpec, LogLine, leader_record
from stoker.platforms.follow import UNREACHABLE_SECONDS
from stoker.platforms.sagemaker import SageMakerPlatform, SageMakerRequest
from stoker.platforms.sagemaker.job import (
    DRAIN_SECONDS,
    LOGS_AGAIN_SECONDS,
    MAX_INTERVAL_SECONDS,
    MIN_INTERVAL_SECONDS,
    STOP_SECONDS,
    SageMakerRun,
)
from stoker.platforms.sagemaker.submit import MAX_NAMES, numbered, stop_job
from stoker.profile import profile
from stoker.records import (
    Channel,
    Cluster,
    PlatformSettings,
    SageMakerSettings,
    TodaysGroup,
    Workload,
    to_json,
)
from stoker.train import train
from support import cloudwatch, sample_records
from support.aws_answers import Answers, Clock, archive, tar
from support.builders import clusters
from support.job_listener import JobListener
from support.moto_server import REGION, ROLE

BUCKET = "stoker-test"
NAME = "mnist-1"
EXECUTION = "arn:aws:sagemaker:eu-central-1:123456789012:pipeline/mnist/execution/abc"
NOW = datetime(2026, 11, 20, 8, tzinfo=UTC)
NEXT_BEST = "dnn 1 x ml.g5.xlarge, data 2 x ml.m5.xlarge (80.0 ms per step, $2.00 per hour)"
QUOTA = (
    "The account-level service limit 'ml.c5.4xlarge for training job usage' is 1 Instances, with "
    "current utilization of 0 Instances and a request delta of 2 Instances."
)
put_lines = partial(cloudwatch.put_lines, job=NAME)
put_points = partial(cloudwatch.put_points, job=NAME)
LOOK = ("sagemaker", "DescribeTrainingJob")
NOT_FOUND = (*LOOK, "ValidationException", "Requested resource not found.")
OUTPUTS = f"s3://{BUCKET}/out/{NAME}/output/output.tar.gz"
MODEL = f"s3://{BUCKET}/out/{{}}/output/model.tar.gz"
ROLE_LINE = "stoker T run=mnist-1 host={0} host_role group={1} role={1} type=x leader=algo-2"


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
        next_best=NEXT_BEST,
    )


def submit(platform: SageMakerPlatform, job: JobSpec) -> tuple[SageMakerRequest, SageMakerRun]:
    request = platform.plan(job)
    return request, platform.submit(request)


@pytest.fixture
def run(platform, job):
    return submit(platform, job)[1]


def created(aws: Aws) -> list[str]:
    listed = aws.pages("sagemaker", "ListTrainingJobs", items="TrainingJobSummaries")
    return sorted(str(item["TrainingJobName"]) for item in listed)


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


@pytest.mark.parametrize("status", ["Failed", "Stopped", "Stopping"])
def test_beside_a_job_that_ended_badly_the_next_name_is_taken(platform, aws, answers, job, status):
    submit(platform, job)
    changes(answers, NAME, TrainingJobStatus=status)
    _, again = submit(platform, job)
    assert again.name == f"{NAME}-2"
    assert created(aws) == [NAME, f"{NAME}-2"]
    second = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=f"{NAME}-2")
    assert f"out/{NAME}-2/stoker_token/" in json.dumps(second["InputDataConfig"])
    assert aws.has_object(f"s3://{BUCKET}/out/{NAME}-2/stoker_token/token")
    # Of the first job nobody needs it any more, unless it is still stopping.
    is_left = aws.has_object(f"s3://{BUCKET}/out/{NAME}/stoker_token/token")
    assert is_left == (status == "Stopping")


@pytest.fixture
def run_of_another_name(platform, aws, answers, job, monkeypatch):
    """A run that has trained as NAME-2, in a pipeline's step that registers NAME's model."""
    monkeypatch.setenv("STOKER_PIPELINE_EXECUTION", EXECUTION)
    submit(platform, job)
    changes(answers, NAME, TrainingJobStatus="Failed")
    artifacts = {"S3ModelArtifacts": MODEL.format(f"{NAME}-2")}
    changes(answers, f"{NAME}-2", ModelArtifacts=artifacts)
    _, again = submit(platform, job)
    aws.write_object(MODEL.format(f"{NAME}-2"), b"the second model")
    return again


def test_the_model_of_another_name_is_found_under_the_one_asked_for_and_its_copy_repeated(
    aws, answers, run_of_another_name
):
    answers.refuse("s3", "CopyObject", "SlowDown", times=3)
    list(run_of_another_name.lines())
    end = run_of_another_name.wait()
    assert (end.status, end.model_uri) == ("succeeded", MODEL.format(f"{NAME}-2"))
    # Both are tagged if the model is refused.
    assert end.model_copy_uri == MODEL.format(NAME)
    assert aws.read_object(end.model_copy_uri) == b"the second model"


@pytest.mark.parametrize("code", ["SlowDown", "AccessDenied"])
def test_a_model_that_cannot_be_copied_fails_the_step_with_its_address(
    answers, run_of_another_name, code
):
    answers.always_refuse("s3", "CopyObject", code)
    with pytest.raises(PlatformError, match=f"out/{NAME}-2/output/model.tar.gz") as caught:
        run_of_another_name.wait()
    assert f"{BUCKET}/out/{NAME}/output/model.tar.gz" in caught.value.where


def test_a_job_of_another_workload_or_with_other_code_is_not_adopted(platform, aws, job, tmp_path):
    submit(platform, dataclasses.replace(job, command=("python", "-m", "other")))
    assert submit(platform, job)[1].name == f"{NAME}-2"
    (tmp_path / "source" / "train.py").write_text("print('better')\n")
    assert submit(platform, job)[1].name == f"{NAME}-3"
    assert created(aws) == [NAME, f"{NAME}-2", f"{NAME}-3"]


@pytest.mark.parametrize("status", ["InProgress", "Completed"])
def test_a_second_training_of_a_pipelines_run_is_refused_under_the_firsts_name(
    platform, aws, answers, job, monkeypatch, status
):
    monkeypatch.setenv("STOKER_PIPELINE_EXECUTION", EXECUTION)
    submit(platform, dataclasses.replace(job, command=("python", "-m", "other")))
    changes(answers, NAME, TrainingJobStatus=status)
    with pytest.raises(PlatformError, match=f"{NAME} is another training run of this pipeline"):
        submit(platform, job)
    assert created(aws) == [NAME]


@pytest.mark.parametrize(("command", "name"), [("train.py", NAME), ("-m other", f"{NAME}-2")])
def test_where_tags_may_not_be_read_the_job_says_whose_it_is(platform, answers, job, command, name):
    body = submit(platform, dataclasses.replace(job, command=("python", *command.split())))[0].body
    # moto forgets the environment, and has metrics of its own.
    sent = {key: body[key] for key in ("Environment", "AlgorithmSpecification")}
    changes(answers, NAME, **sent)
    answers.always_refuse("sagemaker", "ListTags", "AccessDeniedException")
    _, run = submit(platform, job)
    assert run.name == name


def test_names_run_out_with_an_error(platform, answers, job):
    has_status(answers, ("Failed", "Failed"))
    for number in range(1, MAX_NAMES + 1):
        name = NAME if number == 1 else f"{NAME}-{number}"
        assert submit(platform, job)[1].name == name
    with pytest.raises(PlatformError, match=f"{NAME} to {NAME}-{MAX_NAMES} exist already"):
        submit(platform, job)
    # A long name keeps its number.
    assert numbered("n" * 60 + "-xx", 3) == "n" * 60 + "-3"


# ---- refusals


def test_a_missing_quota_names_type_group_limit_and_the_next_best_plan(platform, aws, answers, job):
    answers.refuse("sagemaker", "CreateTrainingJob", "ResourceLimitExceeded", QUOTA)
    request = platform.plan(job)
    with pytest.raises(PlatformError) as caught:
        platform.submit(request)
    said = str(caught.value)
    assert "'ml.c5.4xlarge for training job usage' is 1" in said
    assert "2 x ml.c5.4xlarge (group data)" in said
    assert "ml.g5.2xlarge" not in said
    assert caught.value.fix.endswith(NEXT_BEST)
    assert not aws.has_object(request.token_uri)


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
        (f"{LIMIT}for training-job/ml.c5.4xlarge is 0{USED}0{ASKED}", False, True),
        (f"{LIMIT}'ml.c5.4xlarge for spot training job usage' is 8{USED}7{ASKED}", True, True),
        ("too many ml.c5.4xlarge", True, True),
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


def test_a_wrong_role_ends_at_once(platform, answers, clock, job):
    words = "Could not assume role x. Please ensure that the role exists and allows principal"
    answers.always_refuse("sagemaker", "CreateTrainingJob", "ValidationException", words)
    with pytest.raises(ServiceError, match="Could not assume role"):
        train(job, platform=platform, catalog=load_catalog("sagemaker"), sleep=clock.sleep)
    assert answers.count("CreateTrainingJob") == 1


def test_no_job_is_created_where_its_token_cannot_be_written(platform, aws, answers, job):
    answers.refuse("s3", "PutObject", "AccessDenied", "Access Denied")
    with pytest.raises(ServiceError, match="permission s3:PutObject is missing"):
        submit(platform, job)
    assert created(aws) == []


@pytest.mark.parametrize(
    ("error", "status", "is_left"),
    [
        (KeyboardInterrupt, "", False),
        (TerminatedError, "", True),
        (TerminatedError, "Executing", True),
        (TerminatedError, "Stopping", False),
    ],
)
def test_a_job_that_is_being_created_outlives_sigterm_alone_unless_its_run_is_stopped(
    platform, aws, answers, job, monkeypatch, error, status, is_left
):
    request = platform.plan(job)
    if status:
        monkeypatch.setenv("STOKER_PIPELINE_EXECUTION", EXECUTION)
        found = {"PipelineExecutionStatus": status}
        answers.answer("sagemaker", "DescribePipelineExecution", found)
    # The service has the request, the answer is lost.
    answers.change("sagemaker", "CreateTrainingJob", Mock(side_effect=error))
    answers.answer("sagemaker", "StopTrainingJob", {})
    with pytest.raises(error) as raised:
        platform.submit(request)
    assert created(aws) == [NAME]
    assert answers.count("StopTrainingJob") == int(not is_left)
    assert aws.has_object(request.token_uri) == is_left
    assert ("aws sagemaker stop-training-job" in str(raised.value)) == is_left


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
        "dnn/algo-2 step 1",
        "sagemaker/status Completed: Completed it",
        "data/algo-1 cpu host says hello",
        "data/algo-1 bye",
        "dnn/algo-2 said before, seen after the end",
    ]
    roles = [parse_line(line.text).host for line in lines if "host_role" in line.text]
    assert roles == ["algo-2", "algo-1"]
    assert list(run.lines()) == []


def test_polling_backs_off_while_nothing_happens(answers, clock, run):
    has_status(answers, *[TRAINS] * 20, COMPLETED)
    clock.slept.clear()
    list(run.lines())
    waits = clock.slept[:19]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS)


def test_a_job_that_is_never_seen_is_left_by_a_deadline(answers, clock, run):
    answers.always_refuse(*NOT_FOUND)
    with pytest.raises(PlatformError, match="did not show it for 30 s"):
        run.wait()
    assert UNREACHABLE_SECONDS <= clock.now <= UNREACHABLE_SECONDS + 2 * EVENTUAL_SECONDS


def test_a_log_that_may_not_be_read_does_not_end_the_training(answers, clock, run):
    denied = "User: x is not authorized to perform: logs:DescribeLogStreams on resource: y"
    answers.always_refuse("logs", "DescribeLogStreams", "AccessDeniedException", denied)
    has_status(answers, *[TRAINS] * 40, COMPLETED)
    said = words(list(run.lines()))
    assert sum("permission logs:DescribeLogStreams is missing" in line for line in said) == 1
    assert run.wait().status == "succeeded"
    # Rarely.
    assert answers.count("DescribeLogStreams") <= clock.now / LOGS_AGAIN_SECONDS + 5


@pytest.mark.parametrize("code", ["ServiceUnavailable", "AccessDeniedException", "Weird"])
def test_a_log_is_read_again_after_an_error(aws, answers, run, code):
    answers.refuse("logs", "DescribeLogStreams", code, times=2)
    has_status(answers, *[TRAINS] * 40, COMPLETED)
    put_lines(aws, "algo-2", (2, ROLE_LINE.format("algo-2", "dnn")), (4, "step 1"))
    assert "dnn/algo-2 step 1" in words(list(run.lines()))


def test_a_login_that_runs_out_is_renewed_from_what_the_machine_has_by_then(aws, answers, run):
    old = aws.client("sagemaker")
    # A client has read its keys once, and its refusals never end.
    answers.always_refuse("sagemaker", "DescribeTrainingJob", "ExpiredTokenException", "expired")
    answers.always_refuse("logs", "DescribeLogStreams", "ExpiredTokenException", "expired")
    said = words(list(run.lines()))
    assert sum("and the job continues; log in again" in line for line in said) == 1
    assert not any("cannot be read" in line for line in said)
    assert run.wait().status == "succeeded"
    assert aws.client("sagemaker") is not old


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
    aws, answers, clock, job, code, words
):
    # Nobody logs in again: these clients stay as they are.
    clients = {name: aws.client(name) for name in ("sagemaker", "s3", "logs")}
    stale = Aws(clients=clients, sleep=clock.sleep, clock=clock)
    request, run = submit(SageMakerPlatform(aws=stale), job)
    answers.always_refuse("sagemaker", "DescribeTrainingJob", code, "no")
    answers.watch("sagemaker", "StopTrainingJob")
    with pytest.raises(PlatformError, match="for 15 minutes") as caught:
        list(run.lines())
    assert words in caught.value.what
    assert f"the job {NAME} keeps running" in caught.value.fix
    assert f"--name {NAME}" in caught.value.fix
    assert f"stop-training-job --training-job-name {NAME}" in caught.value.fix
    assert UNREACHABLE_SECONDS <= clock.now <= UNREACHABLE_SECONDS + 3 * MAX_INTERVAL_SECONDS
    run.stop()
    assert answers.count("StopTrainingJob") == 0
    assert aws.has_object(request.token_uri)


def test_a_log_that_never_ends_is_left_after_the_drain_deadline(aws, clock, run):
    count = iter(range(10**6))
    clock.on_sleep = lambda _: put_lines(aws, "algo-1", (next(count), "still here"))
    list(run.lines())
    assert DRAIN_SECONDS <= clock.now <= DRAIN_SECONDS + MAX_INTERVAL_SECONDS


def profiled(job: JobSpec, platform: SageMakerPlatform) -> None:
    workload = Workload(
        name="mnist",
        command=job.command,
        platform="sagemaker",
        image=job.image,
        cluster=Cluster(dnn=TodaysGroup(instance_type="ml.g5.2xlarge")),
        sagemaker=msgspec.structs.replace(job.platform_settings.sagemaker, source=None),
    )
    profile(workload, platform=platform, run_dir=job.run_dir.with_name(NAME))


@pytest.mark.parametrize("has_lines", [False, True])
def test_a_profiles_deadline_counts_from_the_trainers_first_line(
    platform, aws, answers, job, monkeypatch, has_lines
):
    started = []

    class Timer(threading.Timer):
        def start(self) -> None:
            started.append(self.interval)

    monkeypatch.setattr("stoker.profile.profiled_job.threading.Timer", Timer)
    has_status(answers, ("InProgress", "Starting"), ("Failed", "Failed", "AlgorithmError: x"))
    if has_lines:
        put_lines(aws, "algo-1", (1, "the trainer is here"))
    with pytest.raises(WorkloadError, match="AlgorithmError: x"):
        profiled(job, platform)
    assert len(started) == has_lines


def test_a_profile_that_cannot_be_read_says_so(platform, answers, job):
    answers.always_refuse("s3", "GetObject", "AccessDenied")
    with pytest.raises(PlatformError, match="what it measured could not be read"):
        profiled(job, platform)


# ---- stopping


def test_stop_does_not_wait_for_ever(answers, clock, capsys, run):
    has_status(answers, ("Stopping", "Stopping"))
    answers.answer("sagemaker", "StopTrainingJob", {})
    run.stop()
    assert STOP_SECONDS <= clock.now <= STOP_SECONDS + MAX_INTERVAL_SECONDS
    assert "job_still_stopping" in capsys.readouterr().err


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
    assert clock.now <= STOP_SECONDS + MAX_INTERVAL_SECONDS
    left = run.remaining()
    assert f"the job {NAME} is not stopped" in left.what
    assert f"stop-training-job --training-job-name {NAME}" in left.fix
    # Its hosts may still read it.
    assert aws.has_object(request.token_uri)


def test_a_stop_is_repeated_until_it_is_confirmed(platform, aws, answers, job):
    request, run = submit(platform, job)
    has_status(answers, *[TRAINS] * 3, ("Stopped", "Stopped"))
    answers.refuse("sagemaker", "StopTrainingJob", "ThrottlingException", times=3)
    answers.answer("sagemaker", "StopTrainingJob", {})
    answers.refuse("sagemaker", "DescribeTrainingJob", "ThrottlingException", times=3)
    run.stop()
    assert answers.count("StopTrainingJob") == 4
    assert run.remaining() is None
    assert not aws.has_object(request.token_uri)


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

    terminated = JobListener(Mock(side_effect=TerminatedError))
    with pytest.raises(TerminatedError) as caught:
        train(job, platform=platform, catalog=load_catalog("sagemaker"), observer=terminated)
    is_stopped = status in ("Stopping", "Stopped")
    assert answers.count("StopTrainingJob") == is_stopped
    assert ("the next attempt adopts it" in str(caught.value)) != is_stopped


def test_a_job_that_ends_before_its_stop_arrives_is_no_error(aws, answers, run):
    words = "The request was rejected because the training job is in status Completed."
    answers.always_refuse("sagemaker", "StopTrainingJob", "ValidationException", words)
    stop_job(aws, NAME)


def test_an_answer_that_is_older_than_the_end_does_not_bring_the_job_back(answers, run):
    answers.answer("sagemaker", "StopTrainingJob", {})
    asked = []

    def stopped_meanwhile(answer: dict[str, object]) -> None:
        asked.append(answer)
        if len(asked) == 1:
            # As the service saw it when it was asked; another thread stops the run meanwhile.
            answer |= {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
            run.stop()

    answers.change("sagemaker", "DescribeTrainingJob", stopped_meanwhile)
    next(iter(run.lines()))
    run.stop()
    assert answers.count("StopTrainingJob") == 1


def test_a_token_that_cannot_be_deleted_is_said(platform, answers, job, capsys):
    answers.always_refuse("s3", "DeleteObject", "AccessDenied", "Access Denied")
    request, run = submit(platform, job)
    assert run.wait().status == "succeeded"
    said = capsys.readouterr().err
    assert "token_delete_failed" in said
    assert request.token_uri in said


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
    asked = []

    def in_pages_of_two(params, **_):
        asked.append(params)
        return {**params, "MaxKeys": 2}

    aws.client("s3").meta.events.register("provide-client-params.s3.ListObjectsV2", in_pages_of_two)
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
    assert lineage.job_id == f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{NAME}"
    assert lineage.image_digest == digest
    assert lineage.inputs["train"].address == uri
    assert str(lineage.inputs["train"].version).endswith(" of 5 objects")
    assert sum("ContinuationToken" in params for params in asked) >= 2
    other = submit(platform, dataclasses.replace(job, name="other"))[1].wait().lineage
    assert other.image_digest != digest
    assert str(other.inputs["train"].version).endswith(" of 6 objects")
    assert [name for name, _, _ in lineage.differences(other)] == ["image_digest", "input_train"]


def test_an_account_that_may_read_neither_image_nor_data_trains(platform, answers, job):
    answers.always_refuse("ecr", "DescribeImages", "AccessDeniedException")
    answers.always_refuse("s3", "ListObjectsV2", "AccessDenied")
    uri = f"s3://{BUCKET}/data/"
    end = submit(platform, dataclasses.replace(job, channels={"train": Channel(uri=uri)}))[1].wait()
    assert end.status == "succeeded"
    assert sorted(end.lineage.facts()) == ["code", "input_train", "job_id"]


def test_an_archive_that_means_harm_writes_nothing_outside(aws, tmp_path, run):
    link = tarfile.TarInfo("stoker/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    # A file of the folder's name, too, and one behind the link.
    before = ("stoker/../../escaped", "/stoker/absolute", "stoker")
    names = (*before, "stoker/link/x", "./stoker/good")
    members = [(tarfile.TarInfo(name), b"x") for name in names]
    members.insert(len(before), (link, b""))
    aws.write_object(OUTPUTS, tar(*members))
    folder = run.wait().output_dir
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"stoker/good", "stoker/link/x"}
    assert not [path for path in tmp_path.rglob("*") if path.name in ("escaped", "absolute")]
    assert not (folder / "stoker" / "link").is_symlink()


CUT = archive(**{"stoker/a": b"x"})[:60]


@pytest.mark.parametrize("content", [b"not an archive", CUT, b""], ids=["other", "cut", "empty"])
def test_outputs_that_cannot_be_unpacked_do_not_hide_how_the_job_ended(aws, content, capsys, run):
    aws.write_object(OUTPUTS, content)
    end = run.wait()
    assert (end.status, end.output_dir) == ("succeeded", None)
    assert "outputs_read_failed" in capsys.readouterr().err


class BrokenStream(io.BytesIO):
    """An object's content whose connection fails after `after` bytes."""

    def __init__(self, content: bytes, *, after: int, error: Exception) -> None:
        super().__init__(content)
        self._after, self._error = after, error

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() >= self._after:
            raise self._error
        return super().read(min(self._after, size if size and size > 0 else self._after))


# botocore's ReadTimeoutError is an OSError as well; the others are of sockets below it.
STREAM_ERRORS = {
    "read timeout": ReadTimeoutError(endpoint_url="https://s3.example"),
    "streaming": ResponseStreamingError(error="cut"),
    "reset": ConnectionResetError(104, "Connection reset by peer"),
    "socket timeout": TimeoutError("timed out"),
    "tls": ssl.SSLError("bad record"),
}


@pytest.mark.parametrize("error", STREAM_ERRORS.values(), ids=list(STREAM_ERRORS))
def test_outputs_whose_stream_breaks_off_are_read_again(aws, answers, run, error):
    content = archive(**{"stoker/training.json": record(exit_code=0)})
    aws.write_object(OUTPUTS, content)
    broken = BrokenStream(content, after=len(content) // 2, error=error)
    answers.answer("s3", "GetObject", {"Body": StreamingBody(broken, len(content))})
    assert (run.wait().output_dir / "stoker" / "training.json").exists()
    assert answers.count("GetObject") == 2


def test_outputs_that_cannot_be_read_in_time_are_unknown(aws, answers, run):
    error = ReadTimeoutError(endpoint_url="https://s3.example")
    aws.write_object(OUTPUTS, archive(**{"stoker/training.json": record(exit_code=0)}))

    def stall(answer: dict[str, object]) -> None:
        answer["Body"] = BrokenStream(b"", after=0, error=error)

    answers.change("s3", "GetObject", stall)
    assert run.wait().unfetched == OUTPUTS


@pytest.mark.parametrize("limit", ["MAX_FILE_BYTES", "MAX_TOTAL_BYTES"])
def test_a_timeline_that_is_too_large_is_left_out_and_the_record_is_not(
    aws, monkeypatch, capsys, run, limit
):
    told = record(exit_code=0)
    monkeypatch.setattr(f"stoker.platforms.sagemaker.job.{limit}", len(told))
    timeline = b"x" * (len(told) + 1)
    files = {"stoker/algo-1/timeline-rank0.csv": timeline, "stoker/training.json": told}
    aws.write_object(OUTPUTS, archive(**files))
    folder = run.wait().output_dir / "stoker"
    assert [path.name for path in folder.rglob("*.*")] == ["training.json"]
    assert "output_skipped file=stoker/algo-1/timeline-rank0.csv" in capsys.readouterr().err


def test_the_records_exit_code_counts_more_than_the_services(aws, answers, run):
    has_status(answers, ("Failed", "Failed", "AlgorithmError: , exit code: 1"))
    files = {"stoker/training.json": record(status="failed", exit_code=3)}
    aws.write_object(OUTPUTS, archive(**files))
    assert run.wait().exit_code == 3


@pytest.mark.parametrize(
    ("checkpoint_uri", "words"),
    [
        (None, "its progress is lost, as sagemaker.checkpoint_uri is not set"),
        (f"s3://{BUCKET}/checkpoints", "continues from the last checkpoint"),
    ],
)
def test_a_job_that_ran_out_of_time_has_failed(platform, answers, job, checkpoint_uri, words):
    changed = settings(checkpoint_uri=checkpoint_uri)
    _, run = submit(platform, dataclasses.replace(job, platform_settings=changed))
    has_status(answers, ("Stopped", "MaxRuntimeExceeded"))
    end = run.wait()
    assert end.status == "failed"
    assert words in end.failure
    assert "raise sagemaker.max_run_seconds" in end.failure


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
    assert caught.value.fix.endswith(NEXT_BEST)
    assert not aws.has_object(request.token_uri)


def alone(job: JobSpec) -> JobSpec:
    return dataclasses.replace(job, groups=job.groups[:1])


@pytest.mark.parametrize("secondary", ["MaxPendingTimeExceeded", "MaxPendingExceeded"])
def test_a_job_whose_pending_time_ran_out_lacks_capacity(platform, aws, answers, job, secondary):
    request, run = submit(platform, alone(job))
    assert request.body["StoppingCondition"]["MaxPendingTimeInSeconds"] == 7200
    changes(answers, NAME, TrainingStartTime=None)
    has_status(answers, ("InProgress", "Pending"), ("Stopped", secondary))
    with pytest.raises(NoCapacityError) as caught:
        run.wait()
    assert caught.value.waited_seconds >= 7200
    assert caught.value.types == {"ml.g5.2xlarge"}
    assert secondary in caught.value.what
    assert not aws.has_object(request.token_uri)


def test_an_attempt_adopts_a_pending_job_whatever_is_left_of_the_wait(platform, aws, job):
    submit(platform, alone(job))
    later = dataclasses.replace(alone(job), wait_seconds=2000.0)
    assert submit(platform, later)[1].name == NAME
    assert created(aws) == [NAME]


def put_loads(aws: Aws, answers: Answers) -> None:
    begin = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
    put_points(aws, "algo-1", begin, CPUUtilization=(800.0, 400.0), GPUUtilization=(30.0, 50.0))
    put_points(aws, "algo-2", begin, CPUUtilization=(1600.0,), MemoryUtilization=(25.0,))
    times = {"TrainingStartTime": begin, "TrainingEndTime": begin + timedelta(minutes=9)}
    changes(answers, NAME, **times)
    for number, group in enumerate(("dnn", "data", "data"), 1):
        put_lines(aws, f"algo-{number}", (number, ROLE_LINE.format(f"algo-{number}", group)))


def test_utilisation_is_normalised_by_group_as_the_log_tells_the_hosts(aws, answers, run):
    sizes = {"ml.g5.2xlarge": (8, 1), "c5.4xlarge": (16, 0)}
    put_loads(aws, answers)
    assert run.utilisation(sizes) == ()
    run.wait()
    loads = run.utilisation(sizes)
    assert [(load.group, load.hosts, load.cpu, load.gpu, load.memory) for load in loads] == [
        ("dnn", 1, 0.75, 0.4, None),
        # Of one of the two there are no points.
        ("data", 2, 1.0, None, 0.25),
    ]


def test_a_training_record_says_how_busy_each_group_was(platform, aws, answers, job):
    put_loads(aws, answers)
    told = JobListener()
    record = train(job, platform=platform, catalog=load_catalog("sagemaker"), observer=told)
    loads = [line.text for line in told.lines if line.host == "load"]
    assert [text.split()[0] for text in loads] == ["dnn", "data"]
    events = [event.what for event in record.events if event.what.startswith("utilisation")]
    assert events == [f"utilisation: {text}" for text in loads]
