"""What a workload's settings change in the pipeline, and what `stoker compile` refuses."""

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import typer.main

from stoker.cli.parser import app
from stoker.errors import UsageError
from stoker.records import (
    ControlSettings,
    ModelSettings,
    NotifySettings,
    OnNoCapacity,
    SageMakerSettings,
    TrackingSettings,
    Workload,
    to_json,
)
from stoker.sagemaker import compile_pipeline
from support import sagemaker_pipeline as sample
from support.command import stoker
from support.sagemaker_execution import checked_steps
from support.sagemaker_job import KEY
from support.when_used import WhenUsed

if TYPE_CHECKING:
    from stoker import sagemaker
else:
    sagemaker = WhenUsed("stoker.sagemaker")

OF_FOLDER = TrackingSettings(mlflow="sqlite:mlflow.db")
EXECUTION = {"Get": "Execution.PipelineExecutionId"}
CONTROL_ROLE = "arn:aws:iam::123456789012:role/stoker-steps"


def changed(**changes: object) -> Workload:
    return msgspec.structs.replace(sample.WORKLOAD, **changes)


def with_settings(**changes: object) -> SageMakerSettings:
    return msgspec.structs.replace(sample.WORKLOAD.sagemaker, **changes)


def steps_of(workload: Workload) -> dict[str, Any]:
    return checked_steps(compile_pipeline(workload, folder=sample.ROOT).definition)


def test_the_last_step_knows_of_which_run_it_tells_mlflow_and_the_webhook():
    mlflow = "arn:aws:sagemaker:eu-central-1:123456789012:mlflow-app/team"
    told = TrackingSettings(mlflow=mlflow)
    found = steps_of(changed(tracking=told, notify=NotifySettings()))
    named = {"Std:Join": {"On": "", "Values": ["mnist--", EXECUTION]}}
    for step in ("Train", "Evaluate"):
        assert found[step]["Arguments"]["Environment"]["STOKER_PIPELINE_RUN"] == named


def longest_step(workload: Workload) -> int:
    return int(steps_of(workload)["Train"]["Arguments"]["StoppingCondition"]["MaxRuntimeInSeconds"])


HOUR, DAY = 3600, 86400


def test_the_step_that_follows_the_training_lasts_a_little_longer_than_it_may():
    once = OnNoCapacity(wait_minutes=60, then="fail")
    hour = with_settings(max_run_seconds=HOUR)
    assert longest_step(changed(sagemaker=hour, on_no_capacity=once)) == HOUR + HOUR + 2 * HOUR
    # Each of the five plans may be waited for.
    waits = OnNoCapacity(wait_minutes=60)
    assert longest_step(changed(sagemaker=hour, on_no_capacity=waits)) == HOUR + 5 * HOUR + 2 * HOUR
    # With spot the service's wait for hosts, too.
    waits = {"MaxWaitTimeInSeconds": 4 * HOUR}
    spot = {"EnableManagedSpotTraining": True, "StoppingCondition": waits}
    found = with_settings(max_run_seconds=HOUR, checkpoint_uri="s3://bucket/c", request=spot)
    assert longest_step(changed(sagemaker=found, on_no_capacity=once)) == (4 + 1 + 2) * HOUR


@pytest.mark.parametrize(
    ("seconds", "given", "words"),
    [
        (10 * DAY, None, "9 days"),
        (10 * DAY, 9 * DAY, "9 days"),
        (DAY, DAY - 1, "cannot outlast"),
    ],
)
def test_a_training_that_its_step_cannot_outlast_is_refused(seconds, given, words):
    control = ControlSettings(max_run_seconds=given)
    long = with_settings(max_run_seconds=seconds, control=control)
    with pytest.raises(UsageError) as caught:
        compile_pipeline(changed(sagemaker=long), folder=sample.ROOT)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def everything():
    settings = with_settings(
        region="eu-west-1",
        source="s3://bucket/code.tar.gz",
        request={
            "ResourceConfig": {"VolumeKmsKeyId": KEY},
            "OutputDataConfig": {"KmsKeyId": KEY},
            "VpcConfig": {"SecurityGroupIds": ["sg-1", "sg-2"], "Subnets": ["subnet-1"]},
            "EnableNetworkIsolation": True,
            "EnableInterContainerTrafficEncryption": True,
            "Tags": [{"Key": "team", "Value": "vision"}],
        },
        checkpoint_uri="s3://bucket/checkpoints",
        cache_days=30,
        control=ControlSettings(
            image="123456789012.dkr.ecr.eu-west-1.amazonaws.com/stoker-control:1",
            role=CONTROL_ROLE,
            instance_type="ml.m5.large",
        ),
        model=ModelSettings(group="digits", image="serve:1"),
    )
    return changed(sagemaker=settings)


@pytest.fixture(scope="module")
def full(everything):
    return steps_of(everything)


def test_small_steps_run_in_the_control_image_with_its_role_in_the_vpc(full):
    train, decide, evaluate = (full[name]["Arguments"] for name in ("Train", "Decide", "Evaluate"))
    assert train["RoleArn"] == CONTROL_ROLE
    # Whether its run is being stopped, where it is told to end.
    execution = {"Get": "Execution.PipelineExecutionArn"}
    told = {"AWS_DEFAULT_REGION": "eu-west-1", "STOKER_PIPELINE_EXECUTION": execution}
    assert told.items() <= train["Environment"].items()
    assert train["AppSpecification"]["ImageUri"].endswith("stoker-control:1")
    vpc = {"SecurityGroupIds": ["sg-1", "sg-2"], "Subnets": ["subnet-1"]}
    assert train["NetworkConfig"] == {"EnableNetworkIsolation": False, "VpcConfig": vpc}
    assert decide["Tags"] == [{"Key": "team", "Value": "vision"}]
    # A run's gate may ask the registry, though the workload's does not.
    assert evaluate["NetworkConfig"] == {"EnableNetworkIsolation": False, "VpcConfig": vpc}


@pytest.mark.parametrize(
    ("target", "change", "more", "words"),
    [
        ("kubeflow", {}, (), ["what a pod on", "key kubernetes.pools"]),
        ("sagemakr", {}, (), ["'sagemakr' is not one of", "sagemaker"]),
        ("sagemaker", {"sagemaker": None}, (), ["no settings for SageMaker", "output_uri"]),
        ("sagemaker", {"tracking": OF_FOLDER}, (), ["not share a folder", "key tracking.mlflow"]),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_three_lines(tmp_path, target, change, more, words):
    (tmp_path / "mnist.json").write_text(to_json(changed(**change)))
    done = stoker("compile", target, "mnist.json", "--out", "def.json", *more, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "def.json").exists()


def test_five_steps_in_a_row_and_the_profile_alone_has_the_parameters():
    names = [str(step["Name"]) for step in sample.definition()["Steps"]]
    assert names == ["Profile", "Decide", "Train", "Evaluate", "Gate"]
    for name in ("Decide", "Train", "Evaluate"):
        assert "Parameters." not in json.dumps(sample.step_named(name)["Arguments"])


def test_the_evaluation_is_fed_by_literals_so_that_a_failed_training_does_not_stop_it():
    assert "Steps." not in json.dumps(sample.step_named("Evaluate")["Arguments"])


def test_every_parameter_reaches_a_step():
    compiled = sample.compiled()
    text = json.dumps(sample.definition()["Steps"])
    for parameter in compiled.parameters:
        assert f'"Parameters.{parameter.name}"' in text, parameter.name


def test_the_cli_understands_what_the_small_steps_say():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for step in sample.steps(sample.definition()):
        if step["Type"] != "Processing":
            continue
        verb, *words = sample.arguments_of(str(step["Name"]))
        command = commands[verb]
        if verb == "step":
            command = command.commands[words.pop(0)]
        command.make_context(verb, list(words))
