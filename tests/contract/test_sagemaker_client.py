"""The verbs of pipelines on SageMaker: on moto's server, else over recorded answers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from stoker.errors import ServiceError
from stoker.pipelines.sagemaker import SageMakerClient
from stoker.platforms.aws import Aws
from stoker.records import Json
from support.aws_answers import has_object
from support.command import stoker, succeeds
from support.moto_server import REGION
from support.sagemaker_uploads import (
    BUCKET,
    EXECUTION,
    LAUNCHED,
    PIPELINE,
    ROLE,
    RUN,
    WORKLOAD,
    at,
    hand_made,
    recorded,
    step,
    workload,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(aws_server):
    aws_server.make_bucket(BUCKET)
    return aws_server


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(WORKLOAD))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def upload(*overrides: str) -> dict[str, Json]:
    """Uploads the pipeline made by hand: what a test is about comes after it."""
    of = workload(*overrides)
    client = SageMakerClient(of.sagemaker)
    there, wanted = client.compared(hand_made(of))
    return client.upload(hand_made(of), is_changed=there != wanted)


def call(service: str, operation: str, **parameters: object) -> dict[str, Json]:
    return Aws(region=REGION).call(service, operation, **parameters)


def described() -> dict[str, Json]:
    return call("sagemaker", "DescribePipeline", PipelineName="mnist")


def scheduled() -> dict[str, Json]:
    return call("scheduler", "GetSchedule", Name="stoker-mnist")


def fails(*words: str, command: Sequence[str]) -> None:
    done = stoker(*command)
    assert done.returncode == 2, done.stdout
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


# The product's own pipeline, compiled and uploaded by the verb itself.


def test_an_upload_shows_what_changes_and_sends_nothing_if_nothing_does(server, project):
    succeeds("upload", "sagemaker", "w.yaml")
    before = described()
    again = stoker("upload", "sagemaker", "w.yaml")
    assert "pipeline mnist: unchanged" in again.stderr
    assert again.stdout.startswith(f"unchanged: {PIPELINE}")
    assert described() == before
    cheaper = ("--set", "sagemaker.control.instance_type=ml.m5.large")
    changed = succeeds("upload", "sagemaker", "w.yaml", *cheaper)
    assert "pipeline mnist: changed" in changed.stderr
    assert changed.stdout.startswith(f"updated: {PIPELINE}")
    assert "next:    stoker start sagemaker w.yaml" in changed.stdout
    assert "ml.m5.large" in str(described()["PipelineDefinition"])


def test_a_check_sends_nothing_and_its_exit_code_tells(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "net.py", "old.py"):
        (tmp_path / name).write_text("print(1)\n")
    settings = {**WORKLOAD["sagemaker"], "source": "."}
    (tmp_path / "w.json").write_text(json.dumps({**WORKLOAD, "sagemaker": settings}))
    words = ("upload", "sagemaker", "w.json")
    new = stoker(*words, "--check")
    assert (new.returncode, new.stdout) == (11, "pipeline mnist: new\n")
    assert Aws(region=REGION).find("sagemaker", "DescribePipeline", PipelineName="mnist") is None
    succeeds(*words)
    same = stoker(*words, "--check")
    assert (same.returncode, same.stdout) == (0, "pipeline mnist: unchanged\n")
    (tmp_path / "train.py").write_text("print(2)\n")
    (tmp_path / "new.py").write_text("print(2)\n")
    (tmp_path / "old.py").unlink()
    (tmp_path / "prod.yaml").write_text("gate: [{metric: accuracy, min: 0.95}]\n")
    (tmp_path / ".stokerignore").write_text("prod.yaml\n.stokerignore\n")
    before = described()
    changed = stoker(*words, "--check", "--diff", "--values", "prod.yaml")
    assert changed.returncode == 10
    assert changed.stdout.startswith("pipeline mnist: changed\n")
    assert re.search(r"(?m)^-.*accuracy>=0.9\"", changed.stdout)
    assert re.search(r"(?m)^\+.*accuracy>=0.95\"", changed.stdout)
    assert described() == before
    (uri,) = [key for key in compiled_uris(words) if key.endswith("code.tar.gz")]
    assert not has_object(Aws(region=REGION), uri)
    told = json.loads(stoker(*words, "--check", "--diff", "--json").stdout)
    assert told["state"] == "changed"
    assert any(line.startswith("+") for line in told["diff"])


def compiled_uris(words: Sequence[str]) -> list[str]:
    told = json.loads(succeeds("compile", *words[1:], "--out", "p.json", "--json").stdout)
    return list(told["inputs"])


# From here on the pipeline is one made by hand: no SDK, no compiling.


def test_parameters_arrive_under_the_services_names(server, project):
    upload()
    words = ("--param", "epochs=3", "--param", "max_usd_per_hour=12", "--param", "own_setting=4")
    done = succeeds("start", "sagemaker", "w.yaml", *words, "--json")
    name, _, id = json.loads(done.stdout)["run"].partition("/")
    assert name == "mnist"
    arn = f"{PIPELINE}/execution/{id}"
    answer = call("sagemaker", "ListPipelineParametersForExecution", PipelineExecutionArn=arn)
    given = {"epochs": "3", "max_usd_per_hour": "12", "own_setting": "4"}
    assert {each["Name"]: each["Value"] for each in answer["PipelineParameters"]} == given


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("own_settings=3", ["no parameter own_settings", "own_setting?"]),
        ("reuse_profile=foo", ["reuse_profile=foo", "s3://"]),
        ("input_data=pictures/today", ["pictures/today", "s3://"]),
        ("instance_type=huge", ["huge"]),
        ("own_setting=many", ["own_setting=many: expected a whole number"]),
    ],
)
def test_a_parameter_that_cannot_be_starts_nothing(server, project, parameter, words):
    upload()
    fails(*words, command=("start", "sagemaker", "w.yaml", "--param", parameter))
    runs = call("sagemaker", "ListPipelineExecutions", PipelineName="mnist")
    assert runs["PipelineExecutionSummaries"] == []


def test_a_schedule_holds_its_parameters_and_replaces_the_one_of_its_name(server, project):
    upload()
    words = ("schedule", "sagemaker", "w.yaml", "--cron")
    succeeds(*words, "rate(12 hours)")
    # Set by hand in the console, and nothing of stoker's.
    by_hand = {
        "EndDate": "2027-03-01T00:00:00Z",
        "FlexibleTimeWindow": {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 30},
        "State": "DISABLED",
    }
    kept = ("Name", "ScheduleExpression", "Target")
    mine = {name: value for name, value in scheduled().items() if name in kept}
    call("scheduler", "UpdateSchedule", **mine, **by_hand)
    end = scheduled()["EndDate"]
    more = ("--param", "epochs=2")
    zone = ("--time-zone", "Europe/Berlin")
    done = succeeds(*words, "cron(30 6 ? * MON-FRI *)", *zone, *more)
    head = (
        "schedule stoker-mnist: replaced  cron(30 6 ? * MON-FRI *)  Europe/Berlin  "
        "disabled, as before"
    )
    assert done.stdout.splitlines() == [head]
    found = scheduled()
    assert found["EndDate"] == end
    assert (found["FlexibleTimeWindow"], found["State"]) == (
        by_hand["FlexibleTimeWindow"],
        "DISABLED",
    )
    assert found["ScheduleExpression"] == "cron(30 6 ? * MON-FRI *)"
    assert found["ScheduleExpressionTimezone"] == "Europe/Berlin"
    parameters = [{"Name": "epochs", "Value": "2"}]
    assert found["Target"] == {
        "Arn": PIPELINE,
        "RoleArn": ROLE,
        "SageMakerPipelineParameters": {"PipelineParameterList": parameters},
        "RetryPolicy": {"MaximumRetryAttempts": 3, "MaximumEventAgeInSeconds": 3600},
    }


def test_a_schedule_is_deleted_and_a_second_time_is_an_error(server, project):
    upload()
    words = ("schedule", "sagemaker", "w.yaml")
    succeeds(*words, "--cron", "rate(1 day)")
    assert succeeds(*words, "--delete").stdout == "schedule stoker-mnist: deleted\n"
    fails("there is no schedule stoker-mnist", command=(*words, "--delete"))


OWN = {"cron": "cron(15 4 1 * ? *)", "time_zone": "Europe/Paris", "parameters": {"epochs": 7}}


def test_an_upload_makes_and_changes_the_schedule_of_the_workload(server, project):
    own = ("--set", f"sagemaker.schedule={json.dumps(OWN)}")
    words = ("upload", "sagemaker", "w.yaml")
    done = succeeds(*words, *own)
    assert "schedule stoker-mnist: created  " in done.stdout
    found = scheduled()
    assert found["ScheduleExpression"] == OWN["cron"]
    assert found["ScheduleExpressionTimezone"] == "Europe/Paris"
    values = found["Target"]["SageMakerPipelineParameters"]["PipelineParameterList"]
    assert values == [{"Name": "epochs", "Value": "7"}]
    unknown = ("--set", "sagemaker.schedule.parameters={weekly: 1}")
    changed = stoker(*words, *own, *unknown)
    assert changed.returncode == 2
    assert "no parameter weekly" in changed.stderr
    changed = succeeds(*words, *own, "--set", "sagemaker.schedule.cron=rate(7 days)")
    # Another schedule makes no other pipeline.
    assert "pipeline mnist: unchanged" in changed.stderr
    assert "schedule stoker-mnist: replaced  rate(7 days)  Europe/Paris" in changed.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("status sagemaker nothing", "no run of a pipeline nothing found"),
        ("start sagemaker w.yaml", "pipeline mnist is not uploaded; stoker upload sagemaker"),
        ("start sagemaker w.yaml --set sagemaker=null", "no settings for SageMaker"),
    ],
)
def test_what_is_missing_and_a_wrong_command_line_are_usage_errors(server, project, command, said):
    fails(*said.split("; "), command=command.split())


# Over recorded answers.

TRAIN = step("Train", "Executing")
DONE = step("Train", "Succeeded", EndTime=at(9))


@pytest.fixture
def answers():
    """All of them are asked for."""
    found = recorded()
    yield found
    found.stubber.assert_no_pending_responses()


@pytest.fixture
def client(answers):
    return SageMakerClient(None, aws=answers.aws())


def test_a_run_is_shown_with_its_steps(answers, client):
    failed = step("Evaluate", "Failed", FailureReason="ClientError: no image")
    answers.add_run()
    answers.add_state("Failed", DONE, failed, reason="Step failure")
    run = client.status(EXECUTION)
    assert (run.run, run.status, run.reason) == (RUN, "Failed", "Step failure")
    assert [(step.name, step.status, step.reason) for step in run.steps] == [
        ("Train", "Succeeded", ""),
        ("Evaluate", "Failed", "ClientError: no image"),
    ]


@pytest.mark.parametrize(
    ("status", "failed", "code"),
    [
        ("Succeeded", {}, 0),
        ("Stopped", {}, 4),
        ("Failed", {"FailureReason": "ClientError: no image"}, 4),
        ("Failed", {"FailureReason": "AlgorithmError: , exit code: 6"}, 6),
        ("Failed", {"FailureReason": "AlgorithmError: , exit code: 3"}, 3),
        ("Failed", {"Metadata": {"Fail": {"ErrorMessage": "accuracy is 0.61"}}}, 3),
    ],
)
def test_the_exit_code_says_whether_a_gate_failed(answers, client, status, failed, code):
    answers.add_run()
    answers.add_state(status, step("Last", status, **failed))
    assert client.status(EXECUTION).exit_code == code


def test_waiting_tells_each_change_of_a_step_once_and_outlasts_an_outage(answers, client):
    answers.add_run()
    answers.refuse("describe_pipeline_execution", "ResourceNotFound", "does not exist")
    for _ in range(2):
        answers.add_run()
        answers.add_state("Executing", TRAIN)
    for _ in range(3):
        answers.refuse("list_pipeline_executions", "ThrottlingException", "Rate exceeded")
    answers.add_run()
    answers.add_state("Succeeded", DONE)
    lines = list[str]()
    assert client.wait(RUN, show=lines.append).exit_code == 0
    words = [line.split() for line in lines]
    assert words == [["Train", "Executing"], ["Train", "Succeeded", "480", "s"]]


def test_a_stop_ends_the_jobs_that_the_run_left_behind(answers, client):
    going = {LAUNCHED: "InProgress", f"{LAUNCHED}-plan2": "InProgress"}
    answers.add_run()
    answers.add_state("Executing", TRAIN)
    answers.add("stop_pipeline_execution", {"PipelineExecutionArn": EXECUTION})
    # While the run is stopping its step may stop them.
    answers.add_state("Stopping", TRAIN)
    answers.add_state("Stopped", jobs=going)
    for name in going:
        answers.add("stop_training_job", {}, TrainingJobName=name)
    answers.add_state("Stopped", jobs=dict.fromkeys(going, "Stopping"))
    answers.add_state("Stopped", jobs=dict.fromkeys(going, "Stopped"))
    assert client.stop(EXECUTION).status == "Stopped"


def test_a_stop_that_is_refused_says_that_the_run_may_continue(answers, client):
    answers.add_run()
    answers.add_state("Executing", TRAIN)
    answers.stubber.add_client_error("stop_pipeline_execution", "AccessDeniedException")
    with pytest.raises(ServiceError) as caught:
        client.stop(EXECUTION)
    assert "it may still run, and is billed" in caught.value.fix
