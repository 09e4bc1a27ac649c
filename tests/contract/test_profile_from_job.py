"""`stoker profile --training-job` makes a record of answers of SageMaker and CloudWatch."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import typer

from stoker.cli.options import OutputFiles
from stoker.cli.profile import ProfileFlags, profile_verb
from stoker.errors import PlatformError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.observed_job import ObservedJob, describe_job, observe_job
from stoker.profile.combine import observed_profile
from stoker.records import Observed, Profile, read_json
from stoker.run.outputs import Outputs
from stoker.run.profiling import observe
from support import cloudwatch
from support.aws_answers import Answers
from support.command import stoker, succeeds
from support.moto_server import REGION, ROLE

NAME = "photos-2026-11-20"
put = partial(cloudwatch.put_points, job=NAME)
SIZES = {"ml.g5.2xlarge": (8, 1), "ml.c5.4xlarge": (16, 0), "ml.g4dn.xlarge": (4, 1)}
MINUTES = 30
TWO_HOSTS = {"InstanceType": "ml.g5.2xlarge", "InstanceCount": 2}
GROUPS = [
    {"InstanceType": "ml.c5.4xlarge", "InstanceCount": 2, "InstanceGroupName": "loaders"},
    {"InstanceType": "ml.g5.2xlarge", "InstanceCount": 1, "InstanceGroupName": "trainers"},
]


@pytest.fixture
def aws(aws_server):
    return Aws(region=REGION)


@pytest.fixture
def begin():
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    return now - timedelta(minutes=MINUTES + 5)


def make_job(aws: Aws, resources: Mapping[str, object] = TWO_HOSTS) -> None:
    """Creates a job as somebody does without stoker."""
    aws.call(
        "sagemaker",
        "CreateTrainingJob",
        TrainingJobName=NAME,
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn=ROLE,
        OutputDataConfig={"S3OutputPath": "s3://bucket/out"},
        ResourceConfig={"VolumeSizeInGB": 30, **resources},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
    )


def trained(answers: Answers, begin: datetime, *, minutes: float | None = MINUTES, **more) -> None:
    def change(parsed: dict[str, object]) -> None:
        # moto ends a job at once, and knows nothing of the times of its training.
        parsed.pop("TrainingEndTime", None)
        parsed["TrainingStartTime"] = begin
        if minutes:
            parsed["TrainingEndTime"] = begin + timedelta(minutes=minutes)
        parsed.update(more)

    answers.change("sagemaker", "DescribeTrainingJob", change)


def observed(aws: Aws) -> ObservedJob:
    state = describe_job(aws, NAME)
    return observe_job(aws, state, sizes=SIZES, now=datetime.now(UTC))


def profiled(aws: Aws) -> Profile:
    return observed_profile(observed(aws), sizes=SIZES)


def test_a_job_of_one_group_is_read_host_by_host_without_its_log(aws, answers, begin):
    make_job(aws)
    trained(answers, begin)
    answers.watch("logs", "DescribeLogStreams")
    put(aws, "algo-1", begin, CPUUtilization=(800.0, 760.0), GPUUtilization=(40.0, 50.0))
    put(aws, "algo-2", begin, CPUUtilization=(720.0,), GPUUtilization=(35.0,))
    found = profiled(aws)
    cpu, gpu = pytest.approx((0.975 + 0.9) / 2), pytest.approx((0.45 + 0.35) / 2)
    assert found.observed == Observed(cpu_utilization=cpu, gpu_utilization=gpu, hosts=2)
    assert (found.host.instance_type, found.host.count) == ("ml.g5.2xlarge", 2)
    assert found.what["host_cpu"] == {"algo-1": 0.975, "algo-2": 0.9}
    assert (found.what["minutes"], found.what["is_running"]) == (MINUTES, False)
    assert answers.count("DescribeLogStreams") == 0


def test_a_running_job_is_read_so_far(aws, answers, begin):
    make_job(aws)
    running = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
    trained(answers, begin, minutes=None, **running)
    put(aws, "algo-1", begin, CPUUtilization=(400.0,), GPUUtilization=(90.0,))
    found = profiled(aws)
    assert found.what["is_running"] is True
    assert found.observed.hosts == 1
    notes = " ".join(map(str, found.what["notes"]))
    assert "still running" in notes
    assert "no figures of algo-2" in notes


def test_a_job_of_several_groups_is_refused_by_their_names(aws, answers, begin):
    make_job(aws, {"InstanceGroups": GROUPS})
    trained(answers, begin)
    with pytest.raises(PlatformError, match="several groups: loaders, trainers") as caught:
        observed(aws)
    assert "stoker profile" in caught.value.fix


def test_a_job_that_there_is_not_is_named_with_its_region(aws):
    with pytest.raises(PlatformError) as caught:
        describe_job(aws, "no-such-job")
    assert "no-such-job" in str(caught.value)
    assert REGION in str(caught.value)


def test_a_job_that_never_trained_says_why(aws, answers):
    make_job(aws)

    failed = dict.fromkeys(("TrainingJobStatus", "SecondaryStatus"), "Failed")

    def change(parsed: dict[str, object]) -> None:
        parsed.pop("TrainingStartTime", None)
        parsed.update(failed, FailureReason="no capacity")

    answers.change("sagemaker", "DescribeTrainingJob", change)
    with pytest.raises(PlatformError, match="has not trained: it is Failed: no capacity"):
        describe_job(aws, NAME)


@pytest.mark.parametrize(
    ("ago", "minutes", "words"),
    [
        (timedelta(minutes=9), 0.8, "less than two minutes"),
        (timedelta(days=500), 120, "500 days ago"),
        (timedelta(hours=9), 120, "none were written"),
    ],
)
def test_a_job_without_points_says_why(aws, answers, ago, minutes, words):
    make_job(aws)
    trained(answers, datetime.now(UTC) - ago, minutes=minutes)
    with pytest.raises(PlatformError, match="no points") as caught:
        observed(aws)
    assert words in str(caught.value)


def test_old_jobs_are_asked_for_in_the_points_that_are_kept(aws, answers):
    make_job(aws)
    trained(answers, datetime.now(UTC) - timedelta(days=30), minutes=180)
    points = [{"Label": "CPUUtilization algo-1", "Values": [800.0]}]
    answers.answer("cloudwatch", "GetMetricData", {"MetricDataResults": points})
    found = observed(aws)
    assert found.point_seconds == 300
    (asked,) = (call for name, call in answers.calls if name == "GetMetricData")
    assert "300" in str(asked["body"])


@pytest.fixture
def finished(aws, begin, monkeypatch):
    """A job with points, for an `Aws` that the verb makes itself."""
    make_job(aws)
    for host in ("algo-1", "algo-2"):
        put(aws, host, begin, CPUUtilization=(792.0, 784.0), GPUUtilization=(41.0, 41.0))
    call = Aws.call

    def changed(self: Aws, service: str, operation: str, **parameters: object) -> object:
        answer = call(self, service, operation, **parameters)
        if operation == "DescribeTrainingJob":
            end = begin + timedelta(minutes=MINUTES)
            answer |= {"TrainingStartTime": begin.isoformat(), "TrainingEndTime": end.isoformat()}
        return answer

    monkeypatch.setattr(Aws, "call", changed)


def decided(folder: Path) -> str:
    return succeeds("decide", "profile.json", "--out", "decision.json", cwd=folder).stdout


@pytest.mark.usefixtures("finished")
def test_the_verb_writes_a_profile_that_decide_takes(tmp_path, capsys):
    out = tmp_path / "profile.json"
    observe(NAME, region=REGION, outputs=Outputs(out=out), as_json=False)
    assert "probably CPU-bound" in capsys.readouterr().out
    record = read_json(out, Profile)
    assert record.step is None
    assert record.observed.cpu_utilization == pytest.approx(0.985)
    assert "No step was timed" in decided(tmp_path)


def test_a_command_beside_a_job_is_refused():
    context, files = mock.create_autospec(typer.Context), OutputFiles()
    with pytest.raises(UsageError, match="--training-job runs nothing"):
        profile_verb(
            ["mnist.yaml"], context=context, flags=ProfileFlags(training_job=NAME), files=files
        )


def test_the_region_of_a_job_needs_a_job():
    done = stoker("profile", "--region", "eu-west-1")
    assert done.returncode == 2
    assert "--training-job" in done.stderr
