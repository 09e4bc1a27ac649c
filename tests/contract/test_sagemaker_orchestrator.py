"""The verbs of compiled pipelines work against moto's server, through the command line.

moto has neither the steps of a run nor its stop: see tests/unit/test_sagemaker_runs_status.py,
over recorded answers.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stoker.orchestrators.base import Uploaded
from stoker.orchestrators.sagemaker import SageMakerOrchestrator
from stoker.orchestrators.sagemaker.pipelines import MAX_DEFINITION
from stoker.orchestrators.sagemaker.runs import MAX_VALUE, start_run
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.checks import maximum
from stoker.records import Json
from support.aws_answers import Answers
from support.command import process, stoker
from support.moto import ACCOUNT, REGION, AwsServer
from support.sagemaker_orchestrator import (
    BUCKET,
    PIPELINE,
    ROLE,
    SCHEDULE_ROLE,
    WORKLOAD,
    hand_made,
    training_job,
    workload,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(aws_server: AwsServer) -> AwsServer:
    aws_server.make_bucket(BUCKET)
    return aws_server


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a project folder with the product's pipelines, code and a workload."""
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(WORKLOAD))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def upload(*overrides: str) -> Uploaded:
    """Uploads the pipeline made by hand: what a test is about comes after it."""
    of = workload(*overrides)
    target = SageMakerOrchestrator(settings=of.sagemaker)
    return target.upload(target.plan(hand_made(of)))


def described() -> dict[str, Json]:
    return Aws(region=REGION).call("sagemaker", "DescribePipeline", PipelineName="mnist")


def scheduled(name: str = "stoker-mnist") -> dict[str, Json]:
    return Aws(region=REGION).call("scheduler", "GetSchedule", Name=name)


# The product's own pipeline, compiled and uploaded by the verb itself.


def test_upload_creates_the_pipeline_with_its_inputs_role_and_tags(
    server: AwsServer, project: Path
) -> None:
    words = ("upload", "sagemaker", "w.yaml", "--set", "sagemaker.source=code", "--json")
    done = stoker(*words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["action"], told["id"]) == ("created", PIPELINE)
    assert [uri.rpartition("/")[2] for uri in told["inputs"]] == ["code.tar.gz", "workload.json"]
    assert all(Aws(region=REGION).has_object(uri) for uri in told["inputs"])
    pipeline = described()
    assert pipeline["RoleArn"] == ROLE
    definition = json.loads(str(pipeline["PipelineDefinition"]))
    assert definition["Version"] == "2020-12-01"
    tags = Aws(region=REGION).call("sagemaker", "ListTags", ResourceArn=PIPELINE)
    assert tags["Tags"] == [{"Key": "team", "Value": "vision"}]


def test_upload_of_the_same_again_sends_nothing_and_of_another_shows_the_difference(
    server: AwsServer, project: Path
) -> None:
    assert stoker("upload", "sagemaker", "w.yaml").returncode == 0
    before = described()
    again = stoker("upload", "sagemaker", "w.yaml")
    assert "pipeline mnist: no change" in again.stderr
    assert again.stdout.startswith(f"unchanged: {PIPELINE}")
    assert described() == before
    cheaper = ("--set", "sagemaker.control.instance_type=ml.m5.large")
    changed = stoker("upload", "sagemaker", "w.yaml", *cheaper)
    assert changed.returncode == 0, changed.stderr
    assert "pipeline mnist changes:" in changed.stderr
    assert 'ClusterConfig.InstanceType = "ml.t3.medium"' in changed.stderr
    assert 'ClusterConfig.InstanceType = "ml.m5.large"' in changed.stderr
    assert '/workload.json"' in changed.stderr
    assert changed.stdout.startswith(f"updated: {PIPELINE}")
    assert "next:    stoker start sagemaker w.yaml" in changed.stdout
    assert "ml.m5.large" in str(described()["PipelineDefinition"])


def test_a_fresh_upload_starts_with_no_warning(server: AwsServer, project: Path) -> None:
    assert stoker("upload", "sagemaker", "w.yaml").returncode == 0
    started = stoker("start", "sagemaker", "w.yaml", "--param", "epochs=3")
    assert started.returncode == 0, started.stderr
    assert "warning" not in started.stderr


# From here on the pipeline is one made by hand: no SDK, no compiling.


def test_an_input_that_was_deleted_is_uploaded_again(server: AwsServer, project: Path) -> None:
    upload()
    (uri,) = hand_made(workload()).uploads
    Aws(region=REGION).delete_object(uri)
    done = upload()
    assert (done.action, done.num_inputs) == ("unchanged", 1)
    assert Aws(region=REGION).has_object(uri)


def test_a_new_tag_and_a_new_role_are_changes(server: AwsServer, project: Path) -> None:
    upload()
    other = "arn:aws:iam::123456789012:role/pipeline"
    changes = (f"sagemaker.pipeline_role={other}", "sagemaker.tags.owner=ada")
    of = workload(*changes)
    target = SageMakerOrchestrator(settings=of.sagemaker)
    plan = target.plan(hand_made(of))
    assert f"~ role: {ROLE} → {other}" in plan.changes
    assert "~ tag owner: ada" in plan.changes
    target.upload(plan)
    assert described()["RoleArn"] == other
    assert not target.plan(hand_made(of)).is_needed


def test_a_definition_over_the_limit_goes_through_s3(server: AwsServer, project: Path) -> None:
    of = workload()
    padding = {"Name": "Long", "Type": "Fail", "Arguments": {"ErrorMessage": "x" * MAX_DEFINITION}}
    target = SageMakerOrchestrator(settings=of.sagemaker)
    done = target.upload(target.plan(hand_made(of, added=[padding])))
    assert done.action == "created"
    listed = Aws(region=REGION).call("s3", "ListObjectsV2", Bucket=BUCKET, Prefix="out/stoker/def")
    assert listed["KeyCount"] == 1


def test_limits_are_the_services_own() -> None:
    assert maximum("PipelineDefinition") == MAX_DEFINITION
    assert maximum("String1024") == MAX_VALUE


def test_parameters_arrive_under_the_services_names(server: AwsServer, project: Path) -> None:
    upload()
    words = ("--param", "epochs=3", "--param", "MaxUsdPerHour=12", "--param", "DataInstanceCount=4")
    done = stoker("start", "sagemaker", "w.yaml", *words, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    sent = {"Epochs": "3", "MaxUsdPerHour": "12", "DataInstanceCount": "4"}
    assert told["parameters"] == sent
    assert told["run"].startswith("mnist/")
    answer = Aws(region=REGION).call(
        "sagemaker", "ListPipelineParametersForExecution", PipelineExecutionArn=told["id"]
    )
    listed = answer["PipelineParameters"]
    assert isinstance(listed, list)
    assert {item["Name"]: item["Value"] for item in listed} == sent


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("epoch=3", ["no parameter epoch", "did you mean epochs?"]),
        ("DataInstanceCounts=3", ["no parameter DataInstanceCounts", "DataInstanceCount?"]),
        ("epochs=three", ["expected a whole number"]),
        ("DataInstanceCount=x", ["expected a whole number"]),
        ("DataInstanceCount=-1", ["expected a whole number"]),
        ("least=high", ["Least=high: expected a number"]),
        ("DryRun=maybe", ["DryRun=maybe is not possible", "use true, false"]),
        ("objective=speed", ["objective=speed is not possible", "use cost, time"]),
        ("epochs", ["is not NAME=VALUE"]),
        (f"model_group={'x' * 300}", ["300 characters, at most 244"]),
    ],
)
def test_a_parameter_that_cannot_be_starts_nothing(
    server: AwsServer, project: Path, parameter: str, words: list[str]
) -> None:
    upload()
    done = stoker("start", "sagemaker", "w.yaml", "--param", parameter)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
    runs = Aws(region=REGION).call("sagemaker", "ListPipelineExecutions", PipelineName="mnist")
    assert runs["PipelineExecutionSummaries"] == []


def test_a_pipeline_that_is_not_uploaded_is_said_to_be_so(server: AwsServer, project: Path) -> None:
    done = stoker("start", "sagemaker", "w.yaml")
    assert done.returncode == 2
    assert "pipeline mnist is not uploaded" in done.stderr
    assert "stoker upload sagemaker" in done.stderr


def test_an_upload_older_than_the_workload_is_said_to_be_so(
    server: AwsServer, project: Path
) -> None:
    upload("training.epochs=1")
    done = stoker("start", "sagemaker", "w.yaml")
    assert done.returncode == 0
    assert "warning: the uploaded pipeline mnist has another workload" in done.stderr


def test_a_parameter_that_an_older_upload_has_not_is_said_to_be_so(
    server: AwsServer, project: Path
) -> None:
    upload("channels={}")
    done = stoker("start", "sagemaker", "w.yaml", "--param", "input_data=s3://b/d")
    assert done.returncode == 2
    assert "the workload has" in done.stderr
    assert "stoker upload sagemaker" in done.stderr


# The service's steps are what moto lacks: the wait itself is replaced by a long one.
WAITING = """
import time
from stoker.cli import edge
from stoker import orchestrators
orchestrators.follow_run = lambda *asked, **more: time.sleep(60)
edge.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_waiting_and_not_the_run(
    server: AwsServer, project: Path, number: signal.Signals, code: int
) -> None:
    upload()
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITING, "start", "sagemaker", "w.yaml", "--wait"],
        cwd=project,
        env=server.environ(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr
    try:
        said = ""
        while "page:" not in said:
            line = waiting.stderr.readline()
            assert line, said
            said += line
        waiting.send_signal(number)
        said += waiting.communicate(timeout=60)[1]
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == code, said
    assert "stopped waiting; the run goes on" in said
    assert "stop:    stoker stop sagemaker mnist/" in said
    assert "told to stop" not in said


def test_a_schedule_holds_its_time_zone_parameters_role_and_bounded_retries(
    server: AwsServer, project: Path
) -> None:
    upload()
    words = ("--cron", "30 6 * * 1-5", "--time-zone", "Europe/Berlin", "--param", "epochs=2")
    done = stoker("schedule", "sagemaker", "w.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("created: stoker-mnist ")
    found = scheduled()
    assert found["ScheduleExpression"] == "cron(30 6 ? * MON-FRI *)"
    assert found["ScheduleExpressionTimezone"] == "Europe/Berlin"
    assert found["FlexibleTimeWindow"] == {"Mode": "OFF"}
    assert found["State"] == "ENABLED"
    assert found["Target"] == {
        "Arn": PIPELINE,
        "RoleArn": SCHEDULE_ROLE,
        "SageMakerPipelineParameters": {
            "PipelineParameterList": [{"Name": "Epochs", "Value": "2"}]
        },
        "RetryPolicy": {"MaximumRetryAttempts": 3, "MaximumEventAgeInSeconds": 3600},
    }


def test_the_same_schedule_again_changes_nothing_and_another_time_updates_it(
    server: AwsServer, project: Path
) -> None:
    upload()
    daily = ("schedule", "sagemaker", "w.yaml", "--cron", "0 6 * * *", "--json")
    assert json.loads(stoker(*daily).stdout)["action"] == "created"
    assert json.loads(stoker(*daily).stdout)["action"] == "unchanged"
    later = ("schedule", "sagemaker", "w.yaml", "--cron", "0 7 * * *", "--json")
    assert json.loads(stoker(*later).stdout)["action"] == "updated"
    assert scheduled()["ScheduleExpression"] == "cron(0 7 * * ? *)"


@pytest.mark.parametrize(
    ("version", "key", "value"),
    [("3", "PipelineVersionId", 3), ("champion", "PipelineVersionAlias", "champion")],
)
def test_a_run_may_be_of_an_earlier_version(
    server: AwsServer, project: Path, version: str, key: str, value: Json
) -> None:
    upload()
    aws = Aws(region=REGION)
    answers = Answers(aws)
    answers.watch("sagemaker", "StartPipelineExecution")
    start_run(aws, workload(), parameters=(), folder=project, version=version)
    ((_, asked),) = answers.calls
    body = asked["body"]
    assert json.loads(body if isinstance(body, str | bytes) else "")[key] == value


def test_parameters_that_a_schedule_would_lose_are_named_and_kept_when_named_again(
    server: AwsServer, project: Path
) -> None:
    upload()
    daily = ("schedule", "sagemaker", "w.yaml", "--cron", "0 6 * * *")
    assert "replaced" not in stoker(*daily, "--param", "epochs=20").stderr
    assert "replaced" not in stoker(*daily, "--param", "Epochs=30").stderr
    done = stoker(*daily, "--json", "--yes")
    assert "replaced by the pipeline's defaults: Epochs=30" in done.stderr
    assert json.loads(done.stdout)["parameters"] == {}


def test_starts_that_are_given_up_go_to_a_queue(server: AwsServer, project: Path) -> None:
    upload()
    queue = "arn:aws:sqs:eu-central-1:123456789012:given-up"
    words = ("--cron", "0 6 * * *", "--set", f"sagemaker.dead_letter_queue={queue}", "--json")
    assert json.loads(stoker("schedule", "sagemaker", "w.yaml", *words).stdout)["action"]
    target = scheduled()["Target"]
    assert isinstance(target, dict)
    assert target["DeadLetterConfig"] == {"Arn": queue}
    again = json.loads(stoker("schedule", "sagemaker", "w.yaml", *words).stdout)
    assert again["action"] == "unchanged"


def test_a_period_begins_after_one_period_and_keeps_its_beat(
    server: AwsServer, project: Path
) -> None:
    upload()
    every = ("schedule", "sagemaker", "w.yaml", "--every", "12h", "--json")
    first = json.loads(stoker(*every).stdout)
    found = scheduled()
    assert found["ScheduleExpression"] == "rate(12 hours)"
    assert str(found["StartDate"]) > str(found["CreationDate"])
    more = json.loads(stoker(*every, "--param", "epochs=2").stdout)
    assert more["action"] == "updated"
    assert more["next_run"] == first["next_run"]
    assert scheduled()["StartDate"] == found["StartDate"]


def test_listing_shows_our_schedules_of_this_pipeline_only(
    server: AwsServer, project: Path
) -> None:
    upload()
    schedule = ("schedule", "sagemaker", "w.yaml")
    stoker(*schedule, "--cron", "0 6 * * *", "--name", "nightly")
    stoker(*schedule, "--every", "7d", "--param", "epochs=9")
    make = {
        "ScheduleExpression": "rate(1 day)",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": {"Arn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:queue", "RoleArn": SCHEDULE_ROLE},
    }
    for name in ("somebody-elses", "stoker-another"):
        Aws(region=REGION).call("scheduler", "CreateSchedule", Name=name, **make)
    listed = stoker(*schedule, "--list")
    lines = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["stoker-mnist", "stoker-mnist-nightly"]
    assert "rate(7 days)  UTC  next " in lines[0]
    assert lines[0].endswith("Epochs=9")
    assert lines[1].endswith("defaults")
    as_json = json.loads(stoker(*schedule, "--list", "--json").stdout)
    assert as_json[0]["parameters"] == {"Epochs": "9"}
    assert as_json[1]["timing"] == {"expression": "cron(0 6 * * ? *)", "time_zone": "UTC"}


def test_a_schedule_is_deleted_by_its_short_or_full_name_and_no_other(
    server: AwsServer, project: Path
) -> None:
    upload()
    schedule = ("schedule", "sagemaker", "w.yaml")
    for name in ("nightly", "weekly"):
        stoker(*schedule, "--cron", "0 6 * * *", "--name", name)
    assert stoker(*schedule, "--delete", "nightly").returncode == 0
    assert stoker(*schedule, "--delete", "stoker-mnist-weekly").returncode == 0
    assert json.loads(stoker(*schedule, "--list", "--json").stdout) == []
    again = stoker(*schedule, "--delete", "nightly")
    assert again.returncode == 2
    assert "has no schedule nightly" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing says when to run"),
        (("--cron", "0 6 * * *", "--every", "1d"), "--cron and --every exclude each other"),
        (("--list", "--param", "epochs=1"), "--list does not take --param"),
        (("--cron", "0 6 * * *", "--param", "gate="), "cannot pass an empty value: Gate"),
        (("--cron", "0 6 * * *", "--param", "epoch=1"), "did you mean epochs?"),
        (("--cron", "0 6 1 * 1"), "make two schedules"),
        (("--cron", "0 6 * * *", "--time-zone", "Mars/Base"), "no time zone Mars/Base"),
        (("--cron", "0 6 * * *", "--name", "x" * 60), "64 letters"),
        (("--every", "1 fortnight"), "is not a period"),
        (
            ("--every", "1d", "--set", "sagemaker.schedule_role=null"),
            "key sagemaker.schedule_role",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_not_made(
    server: AwsServer, project: Path, words: tuple[str, ...], said: str
) -> None:
    upload()
    done = stoker("schedule", "sagemaker", "w.yaml", *words)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert Aws(region=REGION).call("scheduler", "ListSchedules")["Schedules"] == []


def test_a_schedule_of_that_name_that_starts_something_else_is_left_alone(
    server: AwsServer, project: Path
) -> None:
    upload()
    target = {"Arn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:queue", "RoleArn": SCHEDULE_ROLE}
    Aws(region=REGION).call(
        "scheduler",
        "CreateSchedule",
        Name="stoker-mnist",
        ScheduleExpression="rate(1 day)",
        FlexibleTimeWindow={"Mode": "OFF"},
        Target=target,
    )
    done = stoker("schedule", "sagemaker", "w.yaml", "--every", "2d")
    assert done.returncode == 2
    assert "starts something else" in done.stderr
    assert scheduled()["ScheduleExpression"] == "rate(1 day)"


def make_training_job() -> str:
    job = training_job("InProgress", "Training")
    Aws(region=REGION).call(
        "sagemaker",
        "CreateTrainingJob",
        TrainingJobName=job["TrainingJobName"],
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn=ROLE,
        OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/out"},
        ResourceConfig=job["ResourceConfig"],
        StoppingCondition=job["StoppingCondition"],
    )
    return str(job["TrainingJobName"])


def test_the_status_of_a_training_job_is_told_with_its_groups(
    server: AwsServer, project: Path
) -> None:
    name = make_training_job()
    done = process("status", "sagemaker", name, env=server.environ())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}  succeeded")
    assert "dnn 1 x ml.g4dn.xlarge, data 2 x ml.c5.2xlarge" in done.stdout
    assert f"#/jobs/{name}" in done.stdout


def test_a_stop_of_a_job_that_has_ended_says_so(server: AwsServer, project: Path) -> None:
    done = stoker("stop", "sagemaker", make_training_job(), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["had_ended"] is True


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_run_that_is_not_there_is_a_usage_error(
    server: AwsServer, project: Path, verb: str
) -> None:
    done = stoker(verb, "sagemaker", "nothing")
    assert done.returncode == 2
    assert "no pipeline and no training job nothing" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "sagmaker", "x"), "did you mean sagemaker?"),
        (("start", "sagemaker", "w.yaml", "--set", "sagemaker=null"), "no settings for SageMaker"),
        (("start", "sagemaker", "mnist"), "mnist is not a workload file"),
    ],
)
def test_a_wrong_command_line_asks_nobody(
    server: AwsServer, project: Path, words: tuple[str, ...], said: str
) -> None:
    done = stoker(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
