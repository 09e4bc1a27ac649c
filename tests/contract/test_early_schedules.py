"""All schedules of a pipeline are looked at, also additional ones of an earlier version's names."""

import json
import shlex
from typing import Any

import pytest

from stoker.parameters import Kind
from stoker.pipelines.schedules import ListedSchedule, Schedule, early_words, lacking_words
from stoker.platforms.aws import Aws
from support.builders import workload
from support.command import stoker, succeeds
from support.kfp_server import KfpServer
from support.kubeflow_uploads import write_project
from support.moto_server import REGION
from support.policies import ROOT
from support.sagemaker_uploads import BUCKET, SCHEDULE_ROLE, WORKLOAD

CODE = ("--set", "sagemaker.source=s3://bucket/code.tar.gz")
ARN = f"arn:aws:sagemaker:{REGION}:123456789012:pipeline/mnist"


@pytest.fixture
def project(aws_server, tmp_path, monkeypatch):
    aws_server.make_bucket(BUCKET)
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    (tmp_path / "w.yaml").write_text(json.dumps(WORKLOAD))
    monkeypatch.chdir(tmp_path)
    succeeds("upload", "sagemaker", "w.yaml", *CODE)
    return Aws(region=REGION)


def make(aws: Aws, name: str, *, starts: str = ARN, is_on: bool = True, **values: str) -> None:
    listed = [{"Name": key, "Value": value} for key, value in values.items()]
    target = {"Arn": starts, "RoleArn": SCHEDULE_ROLE}
    aws.call(
        "scheduler",
        "CreateSchedule",
        Name=name,
        GroupName="default",
        ScheduleExpression="cron(0 4 ? * SUN *)",
        ScheduleExpressionTimezone="Asia/Tokyo",
        State="ENABLED" if is_on else "DISABLED",
        FlexibleTimeWindow={"Mode": "OFF"},
        Target={**target, "SageMakerPipelineParameters": {"PipelineParameterList": listed}},
        ClientToken="token",
    )


@pytest.mark.parametrize("extra", ["nightly", "week.end", "a-b-c", "2", "on_Mondays"])
def test_each_verb_names_it_with_the_commands_that_adopt_and_delete_it(project, extra):
    make(project, f"stoker-mnist-{extra}", epochs="3")
    for words in (
        ("upload", "sagemaker", "w.yaml", "--yes", *CODE),
        ("schedule", "sagemaker", "w.yaml", "--cron", "rate(1 day)"),
    ):
        said = succeeds(*words).stderr
        (line,) = (each for each in said.splitlines() if "earlier version's name" in each)
        assert f"stoker-mnist-{extra} still starts runs" in line
        assert f"aws scheduler delete-schedule --name stoker-mnist-{extra}" in line
    adopt = shlex.split(line.partition("adopt it: ")[2].partition("; delete")[0])
    succeeds(*adopt[1:])
    made = project.call("scheduler", "GetSchedule", Name=f"stoker-mnist--{extra}")
    assert made["ScheduleExpression"] == "cron(0 4 ? * SUN *)"
    assert made["ScheduleExpressionTimezone"] == "Asia/Tokyo"
    assert '"Value": "3"' in json.dumps(made["Target"])


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("stoker-mnist", ARN),
        ("stoker-mnist--nightly", ARN),
        ("stoker-mnist-stage", f"{ARN}-stage"),
        ("stoker-mnist-stage--nightly", f"{ARN}-stage"),
        ("mnist-nightly", ARN),
        ("stoker-mnist-queue", "arn:aws:sqs:eu-central-1:123456789012:queue"),
    ],
)
def test_what_is_todays_or_somebody_elses_is_not_named(project, name, starts):
    make(project, name, starts=starts)
    said = succeeds("upload", "sagemaker", "w.yaml", "--yes", *CODE).stderr
    assert "earlier version's name" not in said


def listed(name: str, *, is_on: bool = True, is_read: bool = True) -> ListedSchedule:
    schedule = Schedule(name=name, cron="rate(1 day)", is_on=is_on)
    return ListedSchedule(name=name, schedule=schedule if is_read else None)


def test_a_schedule_that_may_not_be_read_is_named_all_the_same():
    (line,) = early_words(
        [listed("stoker-mnist-a", is_read=False)], workload=workload(), file="w.yaml"
    )
    assert "--name a --cron EXPRESSION; delete" in line


def test_a_disabled_one_is_called_so():
    (line,) = early_words(
        [listed("stoker-mnist-a", is_on=False)], workload=workload(), file="my w.yaml"
    )
    assert "is there, disabled" in line
    assert "sagemaker 'my w.yaml' --name a" in line


DECLARED: dict[str, Kind] = {"epochs": "integer", "Depth": "integer"}


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ({}, ""),
        ({"epochs": "1"}, ""),
        ({"Width": "1"}, "Width"),
        ({"epochs": "1", "Width": "1", "Height": "2"}, "Width, Height"),
        ({"Epochs": "1"}, "Epochs"),
    ],
)
def test_what_a_pipeline_lacks_is_named_by_schedule(values, lost):
    schedule = Schedule(name="stoker-mnist--a", cron="rate(1 day)", parameters=values)
    each = ListedSchedule(name=schedule.name, schedule=schedule)
    lines = lacking_words([each], DECLARED, pipeline="version 3")
    expected = f"the schedule stoker-mnist--a sets {lost}, which version 3 does not have"
    assert lines == ([expected] if lost else [])


@pytest.mark.parametrize("name", ["stoker-mnist--weekly", "stoker-mnist-early", "by-hand"])
def test_an_upload_warns_of_each_schedule_that_sets_what_the_pipeline_loses(project, name):
    make(project, name, Width="4", epochs="2")
    said = succeeds("upload", "sagemaker", "w.yaml", "--yes", *CODE).stderr
    assert f"the schedule {name} sets Width, which this pipeline does not have" in said
    assert "its starts will fail" in said


def made_earlier(aws: Aws) -> None:
    """Makes the uploaded pipeline one of an earlier version, with parameters in camel case."""
    found = aws.call("sagemaker", "DescribePipeline", PipelineName="mnist")
    definition = json.loads(str(found["PipelineDefinition"]))
    text = json.dumps(definition)
    for parameter in definition["Parameters"]:
        name = parameter["Name"]
        camel = "".join(word.capitalize() for word in name.split("_"))
        text = text.replace(f'"Parameters.{name}"', f'"Parameters.{camel}"')
        text = text.replace(f'"Name": "{name}"', f'"Name": "{camel}"')
    aws.call("sagemaker", "UpdatePipeline", PipelineName="mnist", PipelineDefinition=text)


def sets(aws: Aws, name: str) -> dict[str, str]:
    target: Any = aws.call("scheduler", "GetSchedule", Name=name)["Target"]
    listed = target["SageMakerPipelineParameters"]["PipelineParameterList"]
    return {item["Name"]: item["Value"] for item in listed}


OWN = ("--set", 'sagemaker.schedule={"cron": "rate(1 day)", "parameters": {"max_usd": 5}}')


@pytest.mark.parametrize("own", [(), OWN], ids=["by hand", "of the workload"])
@pytest.mark.parametrize(
    ("name", "is_on"),
    [("stoker-mnist--weekly", True), ("stoker-mnist--a", False), ("stoker-mnist", True)],
)
def test_an_upload_carries_the_parameters_of_schedules_over_to_snake_case(
    project, name, is_on, own
):
    made_earlier(project)
    make(project, name, is_on=is_on, Epochs="3", MaxUsd="7")
    done = succeeds("upload", "sagemaker", "w.yaml", "--yes", *CODE, *own)
    assert "does not have" not in done.stderr
    is_workloads = own and name == "stoker-mnist"
    kept = {"epochs": "3", "max_usd": "7"}
    assert sets(project, name) == ({"max_usd": "5"} if is_workloads else kept)
    found = project.call("scheduler", "GetSchedule", Name=name)
    assert found["State"] == ("ENABLED" if is_on else "DISABLED")
    assert "no change" in succeeds("upload", "sagemaker", "w.yaml", "--yes", *CODE, *own).stderr


def test_a_schedule_that_somebody_made_by_hand_is_named_and_stays(project):
    made_earlier(project)
    make(project, "by-hand", Epochs="3")
    said = succeeds("upload", "sagemaker", "w.yaml", "--yes", *CODE).stderr
    assert "the schedule by-hand sets Epochs, which this pipeline does not have" in said
    assert sets(project, "by-hand") == {"Epochs": "3"}


@pytest.mark.parametrize("spelling", ["epochs", "Epochs", "--epochs"])
@pytest.mark.parametrize(("is_earlier", "sent"), [(True, "Epochs"), (False, "epochs")])
def test_either_spelling_starts_and_schedules_a_pipeline_of_either(
    project, spelling, is_earlier, sent
):
    if is_earlier:
        made_earlier(project)
    param = f"--param={spelling}=3"
    done = succeeds("start", "sagemaker", "w.yaml", param, "--yes", "--json")
    started = json.loads(done.stdout)
    # A run that has just begun has no exit code.
    assert (started["has_ended"], started["exit_code"]) == (False, None)
    run = started["run"].rpartition("/")[2]
    given = project.call(
        "sagemaker",
        "ListPipelineParametersForExecution",
        PipelineExecutionArn=f"{ARN}/execution/{run}",
    )
    assert given["PipelineParameters"] == [{"Name": sent, "Value": "3"}]
    make(project, "stoker-mnist", Epochs="2", MaxUsd="7")
    words = ("schedule", "sagemaker", "w.yaml", param)
    succeeds(*words)
    other = "MaxUsd" if is_earlier else "max_usd"
    assert sets(project, "stoker-mnist") == {sent: "3", other: "7"}
    assert "unchanged" in succeeds(*words).stdout


@pytest.fixture
def kubeflow(tmp_path, monkeypatch):
    pytest.importorskip("kfp")
    with KfpServer() as server:
        write_project(tmp_path, host=server.url)
        monkeypatch.chdir(tmp_path)
        yield server
    assert server.problems == []


def test_kubeflow_refuses_to_go_back_behind_any_schedule(kubeflow):
    for depth in ("{epochs: 2}", "{epochs: 2, depth: 3}"):
        succeeds("upload", "kubeflow", "w.yaml", "--set", f"hyperparameters={depth}", "--yes")
    (versions,) = kubeflow.versions.values()
    words = ("--set", "hyperparameters={epochs: 2, depth: 3}", "--param", "depth=4")
    succeeds("schedule", "kubeflow", "w.yaml", "--name", "weekly", "--cron", "@weekly", *words)
    back = stoker("upload", "kubeflow", "w.yaml", "--back-to", versions[0]["name"], "--yes")
    assert back.returncode == 2
    assert "the schedule stoker-mnist-weekly sets depth" in back.stderr
    assert len(versions) == 2
