"""The verbs of pipelines on SageMaker: on moto's server, else over recorded answers."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from stoker.errors import PlatformError, ServiceError
from stoker.pipelines.base import PATIENCE_SECONDS
from stoker.pipelines.sagemaker.client import SageMakerClient
from stoker.pipelines.sagemaker.compile import ONLY_RUN
from stoker.pipelines.sagemaker.overlap import active_before
from stoker.platforms.aws import Aws
from stoker.records import Json
from support.command import stoker, succeeds
from support.moto_server import ACCOUNT, REGION
from support.sagemaker_uploads import (
    BUCKET,
    EXECUTION,
    LAUNCHED,
    PIPELINE,
    ROLE,
    RUN,
    SCHEDULE_ROLE,
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


def scheduled(name: str = "stoker-mnist") -> dict[str, Json]:
    return call("scheduler", "GetSchedule", Name=name)


def fails(*words: str, command: Sequence[str]) -> None:
    done = stoker(*command)
    assert done.returncode == 2, done.stdout
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


# The product's own pipeline, compiled and uploaded by the verb itself.


def test_upload_creates_the_pipeline_with_its_inputs_role_and_tags(server, project):
    words = ("upload", "sagemaker", "w.yaml", "--set", "sagemaker.source=code", "--json")
    told = json.loads(succeeds(*words).stdout)
    assert (told["action"], told["id"]) == ("created", PIPELINE)
    names = [uri.rpartition("/")[2] for uri in told["inputs"]]
    assert names == ["code.tar.gz", "workload.json", "README.txt"]
    assert all(Aws(region=REGION).has_object(uri) for uri in told["inputs"])
    pipeline = described()
    assert pipeline["RoleArn"] == ROLE
    assert json.loads(str(pipeline["PipelineDefinition"]))["Version"] == "2020-12-01"
    tags = call("sagemaker", "ListTags", ResourceArn=PIPELINE)
    assert tags["Tags"] == [{"Key": "team", "Value": "vision"}]


def test_an_upload_shows_what_changes_and_sends_nothing_if_nothing_does(server, project):
    succeeds("upload", "sagemaker", "w.yaml")
    before = described()
    again = stoker("upload", "sagemaker", "w.yaml")
    assert "pipeline mnist: no change" in again.stderr
    assert again.stdout.startswith(f"unchanged: {PIPELINE}")
    assert described() == before
    cheaper = ("--set", "sagemaker.control.instance_type=ml.m5.large")
    changed = succeeds("upload", "sagemaker", "w.yaml", *cheaper)
    lines = changed.stderr.splitlines()
    assert "  sagemaker.control.instance_type: ml.t3.medium -> ml.m5.large" in lines
    assert any(line.startswith("  steps that change: ") for line in lines)
    assert len(lines) < 8
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
    assert (new.returncode, new.stdout) == (11, "new: mnist\n")
    assert Aws(region=REGION).find("sagemaker", "DescribePipeline", PipelineName="mnist") is None
    succeeds(*words)
    same = stoker(*words, "--check")
    assert (same.returncode, same.stdout) == (0, "unchanged: mnist\n")
    (tmp_path / "train.py").write_text("print(2)\n")
    (tmp_path / "new.py").write_text("print(2)\n")
    (tmp_path / "old.py").unlink()
    (tmp_path / "prod.yaml").write_text("gate: [{metric: accuracy, min: 0.95}]\n")
    (tmp_path / ".stokerignore").write_text("prod.yaml\n.stokerignore\n")
    before = described()
    changed = stoker(*words, "--check", "--values", "prod.yaml")
    assert (changed.returncode, changed.stdout) == (10, "changed: mnist\n")
    lines = changed.stderr.splitlines()
    told = "one file changed (train.py), one file new (new.py), one file removed (old.py)"
    # No digests, and no steps: they read the same addresses by another name.
    assert [line for line in lines if line.startswith("  ")] == [
        "  gate[0].min: 0.9 -> 0.95",
        f"  code: {told}",
    ]
    assert described() == before
    (uri,) = [key for key in compiled_uris(words) if key.endswith("code.tar.gz")]
    assert not Aws(region=REGION).has_object(uri)
    told = json.loads(stoker(*words, "--check", "--json").stdout)
    assert told["state"] == "changed"
    assert uri in told["inputs"]
    assert any(line.startswith("+") for line in told["diff"])


def compiled_uris(words: Sequence[str]) -> list[str]:
    told = json.loads(succeeds("compile", *words[1:], "--out", "p.json", "--json").stdout)
    return list(told["inputs"])


def test_an_input_that_is_missing_is_a_change_for_a_check(server, project):
    upload_words = ("upload", "sagemaker", "w.yaml")
    uri = json.loads(succeeds(*upload_words, "--json").stdout)["inputs"][0]
    Aws(region=REGION).delete_object(uri)
    done = stoker(*upload_words, "--check")
    assert done.returncode == 10
    assert uri in done.stderr


def test_uploads_of_one_tree_converge_though_what_stoker_writes_lies_in_it(
    server, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    settings = {**WORKLOAD["sagemaker"], "source": "."}
    (tmp_path / "w.yaml").write_text(json.dumps({**WORKLOAD, "sagemaker": settings}))
    first = succeeds("upload", "sagemaker", "w.yaml")
    assert "code: two files, " in first.stderr
    assert "train.py (9 B)" in first.stderr
    succeeds("compile", "sagemaker", "w.yaml", "--out", "p.json")
    succeeds("compile", "sagemaker", "w.yaml", "--out", "builds/night.json")
    (tmp_path / "runs" / "mnist-1").mkdir(parents=True)
    (tmp_path / "runs" / "mnist-1" / "training.json").write_text("{}")
    told = json.loads(succeeds("upload", "sagemaker", "w.yaml", "--json").stdout)
    assert (told["action"], told["inputs"]) == ("unchanged", [])
    (tmp_path / ".env").write_text("TOKEN=1")
    refused = stoker("upload", "sagemaker", "w.yaml")
    assert refused.returncode == 2
    assert "seems to contain secrets" in refused.stderr
    assert ".env (by its name)" in refused.stderr


# From here on the pipeline is one made by hand: no SDK, no compiling.


def test_an_input_that_was_deleted_is_uploaded_again(server, project):
    upload()
    (uri,) = hand_made(workload()).uploads
    Aws(region=REGION).delete_object(uri)
    done = upload()
    assert (done["action"], done["inputs"]) == ("unchanged", [uri])
    assert Aws(region=REGION).has_object(uri)


def of(prefix, *, status="Enabled", **more):
    return {"ID": f"on {prefix}", "Status": status, "Filter": {"Prefix": prefix}, **more}


DAYS = {"Expiration": {"Days": 30}}
OLD = {"NoncurrentVersionExpiration": {"NoncurrentDays": 30}}
ARCHIVES = {"Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}
COOLS = {"Transitions": [{"Days": 30, "StorageClass": "STANDARD_IA"}]}


@pytest.mark.parametrize(
    ("rule", "is_harm"),
    [
        (of("", **DAYS), True),
        (of("out", **DAYS), True),
        (of("out/stoker/", **DAYS), True),
        (of("out/mnist-", **DAYS), True),
        (of("out/", **ARCHIVES), True),
        (of("out/", **COOLS), False),
        (of("out/", status="Disabled", **DAYS), False),
        (of("out/", **OLD), False),
        (of("other/", **DAYS), False),
        (of("out/pipelines/", **DAYS), True),
        (of("out/stoker/jobs/mnist", **DAYS), False),
        (of("out/", **DAYS) | {"Filter": {"Tag": {"Key": "a", "Value": "b"}}}, False),
    ],
    ids=lambda value: value["ID"] if isinstance(value, dict) else str(value),
)
def test_an_upload_names_a_lifecycle_rule_that_would_delete_models(server, project, rule, is_harm):
    assert upload()["warnings"] == []
    rules = {"Rules": [rule]}
    call("s3", "PutBucketLifecycleConfiguration", Bucket=BUCKET, LifecycleConfiguration=rules)
    warnings = upload()["warnings"]
    assert len(warnings) == is_harm
    if is_harm:
        assert rule["ID"] in warnings[0]
        assert "only out/stoker/jobs/ may expire" in warnings[0]


def test_a_new_tag_and_a_new_role_are_changes(server, project):
    upload()
    other = "arn:aws:iam::123456789012:role/pipeline"
    tags = "[{Key: team, Value: vision}, {Key: owner, Value: ada}]"
    changes = (f"sagemaker.pipeline_role={other}", f"sagemaker.request.Tags={tags}")
    assert upload(*changes)["action"] == "updated"
    assert described()["RoleArn"] == other
    # The group of models has the tags, too.
    for arn in (PIPELINE, f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package-group/mnist"):
        listed = Aws(region=REGION).pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
        assert {tag["Key"]: tag["Value"] for tag in listed} == {"team": "vision", "owner": "ada"}
    assert upload(*changes)["action"] == "unchanged"


def test_parameters_arrive_under_the_services_names(server, project):
    upload()
    words = ("--param", "epochs=3", "--param", "MaxUsdPerHour=12", "--param", "OwnSetting=4")
    done = succeeds("start", "sagemaker", "w.yaml", *words, "--json")
    name, _, id = json.loads(done.stdout)["run"].partition("/")
    assert name == "mnist"
    arn = f"{PIPELINE}/execution/{id}"
    answer = call("sagemaker", "ListPipelineParametersForExecution", PipelineExecutionArn=arn)
    given = {"epochs": "3", "max_usd_per_hour": "12", "own_setting": "4"}
    assert {each["Name"]: each["Value"] for each in answer["PipelineParameters"]} == given


@pytest.mark.parametrize("name", ["learning-rate", "--learning-rate", "LearningRate"])
def test_the_scripts_own_spelling_of_an_option_arrives(server, project, name):
    given = "hyperparameters={learning-rate: 0.1}"
    upload(given)
    words = ("--set", given, "--param", f"{name}=1e-3", "--json")
    run = json.loads(succeeds("start", "sagemaker", "w.yaml", *words).stdout)["run"]
    arn = f"{PIPELINE}/execution/{run.partition('/')[2]}"
    answer = call("sagemaker", "ListPipelineParametersForExecution", PipelineExecutionArn=arn)
    assert answer["PipelineParameters"] == [{"Name": "learning_rate", "Value": "1e-3"}]


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("OwnSettings=3", ["no parameter OwnSettings", "own_setting?"]),
        (f"model_group={'x' * 300}", ["300 characters, at most 244"]),
        ("ReuseProfile=foo", ["reuse_profile=foo", "s3://"]),
        ("Image=", ["image is empty"]),
        ("InputData=pictures/today", ["input_data=pictures/today", "s3://"]),
        ("InstanceType=huge", ["InstanceType=huge"]),
        ("InstanceCount=0", ["at least one host"]),
        ("OwnSetting=many", ["own_setting=many: expected a whole number"]),
        ("Least=half", ["Least=half: expected a number"]),
        ("DryRun=perhaps", ["DryRun=perhaps is not possible"]),
    ],
)
def test_a_parameter_that_cannot_be_starts_nothing(server, project, parameter, words):
    upload()
    fails(*words, command=("start", "sagemaker", "w.yaml", "--param", parameter))
    runs = call("sagemaker", "ListPipelineExecutions", PipelineName="mnist")
    assert runs["PipelineExecutionSummaries"] == []


# The service's steps are what moto lacks: the wait itself is replaced by a long one.
WAITING = """
import time
from stoker.cli import main
from stoker.pipelines.base import PipelineClient
PipelineClient.wait = lambda *asked, **more: time.sleep(60)
main()
"""


def test_a_signal_ends_the_waiting_and_not_the_run(server, project):
    upload()
    words = [sys.executable, "-c", WAITING, "start", "sagemaker", "w.yaml", "--wait"]
    how = {"stderr": subprocess.PIPE, "text": True}
    waiting = subprocess.Popen(words, cwd=project, env=server.environ(), **how)
    try:
        said = ""
        while "next:" not in said:
            line = waiting.stderr.readline()
            assert line, said
            said += line
        waiting.send_signal(signal.SIGINT)
        said += waiting.communicate(timeout=150)[1]
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 130, said
    assert "stopped waiting; the run continues" in said
    assert "stop:    stoker stop sagemaker mnist/" in said
    assert "stopping all processes" not in said


def test_a_schedule_holds_its_parameters_and_replaces_the_one_of_its_name(server, project):
    upload()
    words = ("schedule", "sagemaker", "w.yaml", "--cron")
    succeeds(*words, "rate(12 hours)")
    queue = "arn:aws:sqs:eu-central-1:123456789012:given-up"
    more = ("--param", "epochs=2", "--set", f"sagemaker.dead_letter_queue={queue}")
    zone = ("--time-zone", "Europe/Berlin")
    done = succeeds(*words, "cron(30 6 ? * MON-FRI *)", *zone, *more)
    head, *lines = done.stdout.splitlines()
    assert head == "schedule stoker-mnist: changed  cron(30 6 ? * MON-FRI *)  Europe/Berlin"
    assert "  cron: rate(12 hours) -> cron(30 6 ? * MON-FRI *)" in lines
    assert "  time zone: UTC -> Europe/Berlin" in lines
    assert "  epochs: not set -> 2" in lines
    assert lines[-1].startswith("  next: ")
    assert " 06:30 Europe/Berlin" in lines[-1]
    found = scheduled()
    assert found["ScheduleExpression"] == "cron(30 6 ? * MON-FRI *)"
    assert found["ScheduleExpressionTimezone"] == "Europe/Berlin"
    parameters = [{"Name": "epochs", "Value": "2"}]
    assert found["Target"] == {
        "Arn": PIPELINE,
        "RoleArn": SCHEDULE_ROLE,
        "SageMakerPipelineParameters": {"PipelineParameterList": parameters},
        "RetryPolicy": {"MaximumRetryAttempts": 3, "MaximumEventAgeInSeconds": 3600},
        "DeadLetterConfig": {"Arn": queue},
    }
    succeeds(*words, "rate(7 days)", "--name", "weekly")
    assert scheduled("stoker-mnist--weekly")["ScheduleExpression"] == "rate(7 days)"
    assert scheduled() == found


def test_a_schedule_that_somebody_switched_off_stays_off(server, project):
    upload()
    words = ("schedule", "sagemaker", "w.yaml", "--cron")
    succeeds(*words, "rate(12 hours)")
    keys = ("Name", "ScheduleExpression", "FlexibleTimeWindow", "Target")
    kept = {key: scheduled()[key] for key in keys}
    call("scheduler", "UpdateSchedule", **kept, State="DISABLED")
    assert "disabled, as before" in stoker(*words, "rate(2 days)").stdout
    found = scheduled()
    assert (found["State"], found["ScheduleExpression"]) == ("DISABLED", "rate(2 days)")
    assert not json.loads(stoker(*words, "rate(2 days)", "--json").stdout)["enabled"]


DAILY = ("--cron", "rate(1 day)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cron", "0 6 * * *"), "is not an expression of EventBridge Scheduler"),
        (("--cron", "cron(0 6 * * *)"), "minute hour day month weekday year"),
        (("--cron", "rate(1 days)"), "write rate(1 day)"),
        (("--cron", "cron(0 6 * * * *)"), "must be ?"),
        ((*DAILY, "--time-zone", "Europe/Berln"), "did you mean Europe/Berlin?"),
        ((*DAILY, "--name", "each week"), "invalid name of a schedule"),
        ((*DAILY, "--name", "w" * 60), "at most 64"),
        (("--param", "epochs=3"), "there is no schedule stoker-mnist yet"),
        ((*DAILY, "--param", "Epochs=3", "--param", "epochs=4"), "epochs is given twice"),
        ((*DAILY, "--param", "epoch=1"), "did you mean epochs?"),
        ((*DAILY, "--set", "sagemaker.schedule_role=null"), "key sagemaker.schedule_role"),
    ],
)
def test_a_schedule_that_cannot_be_is_not_made(server, project, words, said):
    upload()
    fails(said, command=("schedule", "sagemaker", "w.yaml", *words))
    assert call("scheduler", "ListSchedules")["Schedules"] == []


def test_a_schedule_keeps_what_nobody_changes(server, project):
    upload()
    words = ("schedule", "sagemaker", "w.yaml")
    first = ("--cron", "cron(0 3 ? * MON *)", "--time-zone", "Asia/Tokyo", "--param", "epochs=20")
    succeeds(*words, *first)
    done = succeeds(*words, "--cron", "rate(1 day)", "--param", "max_usd=5")
    assert "  kept: epochs=20\n  kept: time zone Asia/Tokyo\n" in done.stdout
    found = scheduled()
    assert found["ScheduleExpressionTimezone"] == "Asia/Tokyo"
    values = found["Target"]["SageMakerPipelineParameters"]["PipelineParameterList"]
    assert values == [{"Name": "epochs", "Value": "20"}, {"Name": "max_usd", "Value": "5"}]
    done = succeeds(*words, "--param", "epochs=5")
    assert "  epochs: 20 -> 5\n" in done.stdout
    assert scheduled()["ScheduleExpression"] == "rate(1 day)"
    assert succeeds(*words).stdout.startswith("schedule stoker-mnist: unchanged ")
    succeeds(*words, "--cron", "rate(2 days)", "--fresh")
    found = scheduled()
    assert found["ScheduleExpressionTimezone"] == "UTC"
    assert found["Target"]["SageMakerPipelineParameters"] == {"PipelineParameterList": []}


OWN = {"cron": "cron(15 4 1 * ? *)", "time_zone": "Europe/Paris", "parameters": {"epochs": 7}}


def test_an_upload_makes_and_changes_the_schedule_of_the_workload(server, project):
    own = ("--set", f"sagemaker.schedule={json.dumps(OWN)}")
    words = ("upload", "sagemaker", "w.yaml")
    done = succeeds(*words, *own)
    assert "schedule: created: stoker-mnist\n" in done.stdout
    found = scheduled()
    assert found["ScheduleExpression"] == OWN["cron"]
    assert found["ScheduleExpressionTimezone"] == "Europe/Paris"
    values = found["Target"]["SageMakerPipelineParameters"]["PipelineParameterList"]
    assert values == [{"Name": "epochs", "Value": "7"}]
    again = succeeds(*words, *own)
    # Another schedule makes no other pipeline.
    assert "pipeline mnist: no change" in again.stderr
    assert "schedule: unchanged: stoker-mnist\n" in again.stdout
    unknown = ("--set", "sagemaker.schedule.parameters={weekly: 1}")
    changed = stoker(*words, *own, *unknown)
    assert changed.returncode == 2
    assert "no parameter weekly" in changed.stderr
    changed = succeeds(*words, *own, "--set", "sagemaker.schedule.cron=rate(7 days)")
    assert "pipeline mnist: no change" in changed.stderr
    assert "cron: cron(15 4 1 * ? *) -> rate(7 days)" in changed.stderr
    assert "schedule: changed: stoker-mnist\n" in changed.stdout
    left = succeeds(*words)
    assert "schedule stoker-mnist (rate(7 days) Europe/Paris) still starts runs" in left.stderr
    assert "aws scheduler delete-schedule --name stoker-mnist" in left.stderr
    assert scheduled()["ScheduleExpression"] == "rate(7 days)"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cron=rate(1 hours)", "write rate(1 hour)"),
        ("cron=cron(0 3 31 6 ? *)", "never fires"),
        ("time_zone=Mars/Olympus", "no time zone Mars/Olympus"),
        ("parameters={epochs: soon}", "expected a whole number"),
        ("parameters={Epochs: 1, epochs: 2}", "epochs is given twice"),
        ("parameters={image: ''}", "image is empty"),
    ],
)
def test_an_upload_refuses_a_schedule_before_it_changes_anything(server, project, key, said):
    own = ("--set", f"sagemaker.schedule={json.dumps(OWN)}", "--set", f"sagemaker.schedule.{key}")
    fails(said, command=("upload", "sagemaker", "w.yaml", *own))
    assert call("scheduler", "ListSchedules")["Schedules"] == []
    assert call("sagemaker", "ListPipelines")["PipelineSummaries"] == []


def test_a_schedule_of_that_name_that_starts_something_else_is_left_alone(server, project):
    upload()
    other = {
        "Name": "stoker-mnist",
        "ScheduleExpression": "rate(1 day)",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": {"Arn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:queue", "RoleArn": SCHEDULE_ROLE},
    }
    call("scheduler", "CreateSchedule", **other)
    words = ("schedule", "sagemaker", "w.yaml", "--cron", "rate(2 days)")
    fails("starts something else", command=words)
    assert scheduled()["ScheduleExpression"] == "rate(1 day)"


def test_a_training_job_is_shown_and_need_not_be_stopped(server, project):
    call(
        "sagemaker",
        "CreateTrainingJob",
        TrainingJobName="mnist-1",
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn=ROLE,
        OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/out"},
        ResourceConfig={"InstanceType": "ml.c5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
    )
    for verb in ("status", "stop"):
        assert succeeds(verb, "sagemaker", "mnist-1").stdout.startswith("mnist-1  Completed")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("status sagemaker nothing", "no pipeline or training job nothing found"),
        ("stop sagemaker nothing", "no pipeline or training job nothing found"),
        ("start sagemaker w.yaml", "pipeline mnist is not uploaded; stoker upload sagemaker"),
        ("status sagmaker x", "did you mean sagemaker?"),
        ("start sagemaker w.yaml --set sagemaker=null", "no settings for SageMaker"),
        ("start sagemaker mnist", "mnist is not a workload file"),
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


def test_a_run_is_shown_with_its_steps_and_the_jobs_that_they_started(answers, client):
    failed = step("Evaluate", "Failed", FailureReason="ClientError: no image")
    jobs = {LAUNCHED: "Completed"}
    answers.add_state("Failed", DONE, failed, jobs=jobs, reason="Step failure")
    run = client.status(EXECUTION)
    assert (run.run, run.status, run.reason) == (RUN, "Failed", "Step failure")
    assert [(step.name, step.status, step.reason) for step in run.steps] == [
        ("Train", "Succeeded", ""),
        ("Evaluate", "Failed", "ClientError: no image"),
        (f"job {LAUNCHED}", "Completed", ""),
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
    answers.add_state(status, step("Last", status, **failed), jobs={LAUNCHED: "Completed"})
    assert client.status(EXECUTION).exit_code == code


def test_a_pipelines_name_means_its_newest_run(answers, client):
    answers.add("describe_pipeline", {"PipelineArn": PIPELINE}, PipelineName="mnist")
    newest = {"PipelineExecutionSummaries": [{"PipelineExecutionArn": EXECUTION}]}
    answers.add("list_pipeline_executions", newest)
    executing = {"PipelineExecutionStatus": "Executing"}
    answers.add("describe_pipeline_execution", executing, PipelineExecutionArn=EXECUTION)
    answers.add("list_pipeline_execution_steps", {"PipelineExecutionSteps": []})
    answers.add("list_training_jobs", {"TrainingJobSummaries": []})
    run = client.status("mnist")
    assert (run.run, run.has_ended) == (RUN, False)


def test_waiting_tells_each_change_of_a_step_once_and_outlasts_an_outage(answers, client):
    answers.add("describe_pipeline", {"PipelineArn": PIPELINE}, PipelineName="mnist")
    answers.refuse("describe_pipeline_execution", "ResourceNotFound", "does not exist")
    answers.add_state("Executing", TRAIN)
    answers.add_state("Executing", TRAIN)
    for _ in range(3):
        answers.refuse("describe_pipeline", "ThrottlingException", "Rate exceeded")
    answers.add_state("Succeeded", DONE)
    lines = list[str]()
    assert client.wait(RUN, show=lines.append).exit_code == 0
    words = [line.split() for line in lines]
    assert words == [["Train", "Executing"], ["Train", "Succeeded", "480", "s"]]


def test_waiting_ends_if_the_service_stays_away():
    answers = recorded()
    for _ in range(1000):
        answers.refuse("describe_pipeline", "ThrottlingException", "Rate exceeded")
    with pytest.raises(PlatformError, match="throttled"):
        SageMakerClient(None, aws=answers.aws()).wait(RUN, show=print)
    assert 0 <= answers.clock.now - PATIENCE_SECONDS < 60


def test_waiting_ends_if_the_service_refuses(answers, client):
    answers.refuse("describe_pipeline", "AccessDeniedException", "not authorized")
    with pytest.raises(PlatformError, match="permission"):
        client.wait(RUN, show=print)
    assert answers.clock.slept == []


def test_a_stop_ends_the_jobs_that_the_run_left_behind(answers, client):
    going = {LAUNCHED: "InProgress", f"{LAUNCHED}-plan2": "InProgress"}
    answers.add_state("Executing", TRAIN, jobs=going)
    answers.add("describe_pipeline", {"PipelineArn": PIPELINE}, PipelineName="mnist")
    answers.add("stop_pipeline_execution", {"PipelineExecutionArn": EXECUTION})
    # While the run is stopping its step may stop them.
    answers.add_state("Stopping", TRAIN, jobs=going)
    answers.add_state("Stopped", jobs=going)
    for name in going:
        answers.add("stop_training_job", {}, TrainingJobName=name)
    answers.add_state("Stopped", jobs=dict.fromkeys(going, "Stopping"))
    answers.add_state("Stopped", jobs=dict.fromkeys(going, "Stopped"))
    assert client.stop(EXECUTION).status == "Stopped"


def test_a_stop_is_repeated_until_the_service_takes_it(answers, client):
    answers.add_state("Executing", TRAIN)
    for _ in range(3):
        answers.add("describe_pipeline", {"PipelineArn": PIPELINE}, PipelineName="mnist")
        answers.stubber.add_client_error("stop_pipeline_execution", "ThrottlingException")
    answers.add("describe_pipeline", {"PipelineArn": PIPELINE}, PipelineName="mnist")
    answers.add("stop_pipeline_execution", {"PipelineExecutionArn": EXECUTION})
    answers.stubber.add_client_error("describe_pipeline", "ServiceUnavailable", "", 503)
    answers.add_state("Stopped")
    assert client.stop(EXECUTION).status == "Stopped"


def test_a_stop_that_is_refused_says_that_the_run_may_continue(answers, client):
    answers.add_state("Executing", TRAIN)
    answers.add("describe_pipeline", {"PipelineArn": PIPELINE}, PipelineName="mnist")
    answers.stubber.add_client_error("stop_pipeline_execution", "AccessDeniedException")
    with pytest.raises(ServiceError) as caught:
        client.stop(EXECUTION)
    assert "it may still run, and is billed" in caught.value.fix


def test_a_run_that_has_ended_is_not_stopped_but_its_job_is(answers, client):
    for _ in range(2):
        answers.add_state("Failed", jobs={LAUNCHED: "InProgress"})
    answers.add("stop_training_job", {}, TrainingJobName=LAUNCHED)
    answers.add_state("Failed", jobs={LAUNCHED: "Stopped"})
    assert client.stop(EXECUTION).status == "Failed"


# A step of the pipeline asks for runs to give way to.


def listed(execution: str, minute: int, status: str = "Executing") -> dict[str, object]:
    arn = f"{PIPELINE}/execution/{execution}"
    return {"PipelineExecutionArn": arn, "PipelineExecutionStatus": status, "StartTime": at(minute)}


def before(execution: str, *runs: dict[str, object], later: str = "") -> tuple[str, ...]:
    answers = recorded()
    newest, oldest = runs[:1], runs[1:]
    # Next to a day's training an hourly schedule leaves many refused runs.
    refused = [listed(f"refused-{n}", 2, "Failed") for n in range(99)]
    summaries = "PipelineExecutionSummaries"
    answers.add("list_pipeline_executions", {summaries: [*newest, *refused], "NextToken": "more"})
    answers.add("list_pipeline_executions", {summaries: list(oldest)})
    if later:
        guard = [step("Profile", "Succeeded"), step("Guard", later, StepDisplayName=ONLY_RUN)]
        answers.add("list_pipeline_execution_steps", {"PipelineExecutionSteps": guard})
    found = active_before("mnist", execution, aws=answers.aws())
    answers.stubber.assert_no_pending_responses()
    return found


def test_of_two_runs_that_are_under_way_only_the_later_one_gives_way():
    runs = (listed("later", 2), listed("earlier", 1), listed("before", 0, "Succeeded"))
    assert before("later", *runs) == ("mnist/earlier",)
    # The later one is at its own check.
    assert before("earlier", *runs, later="Executing") == ()
    # It passed the check while this one had failed, which is tried again now.
    assert before("earlier", *runs, later="Succeeded") == ("mnist/later",)
    assert before("not-listed-yet", *runs) == ("mnist/later", "mnist/earlier")


def test_the_pipeline_s_own_step_fails_with_4_if_it_has_to_give_way(server, project):
    upload()
    alone = stoker("status", "sagemaker", "mnist", "--besides", "abc")
    assert (alone.returncode, "no run of mnist" in alone.stdout) == (0, True)
