"""What a workload's settings change in the pipeline, and what `stoker compile` refuses."""

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.pipelines.sagemaker.compile import compile_pipeline, pipeline_request
from stoker.records import (
    Cluster,
    Constraints,
    ControlSettings,
    ModelSettings,
    NotifySettings,
    OnNoCapacity,
    SageMakerSettings,
    TodaysGroup,
    TrackingSettings,
    Workload,
    to_json,
)
from support import sagemaker_pipeline as sample
from support.command import stoker, succeeds
from support.sagemaker_execution import checked_steps
from support.sagemaker_job import KEY, ROLE
from support.when_used import WhenUsed

if TYPE_CHECKING:
    from stoker import sagemaker
else:
    sagemaker = WhenUsed("stoker.sagemaker")

MANY = Constraints(allowed_instance_types=("ml.c7i.24xlarge",) * 20)
LONG = {"n" * 80: "x" * 180}
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
    told = TrackingSettings(mlflow=mlflow, tensorboard=True)
    found = steps_of(changed(tracking=told, notify=NotifySettings()))
    assert not {"MlflowConfig", "TensorBoardOutputConfig"} & set(found["Profile"]["Arguments"])
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
        (6 * DAY, None, "the account's quota"),
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


def test_a_raised_quota_lets_a_step_last_nine_days():
    control = ControlSettings(max_run_seconds=9 * DAY)
    long = with_settings(max_run_seconds=6 * DAY, control=control)
    assert longest_step(changed(sagemaker=long)) == 9 * DAY


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
        model=ModelSettings(group="digits", image="serve:1", content_types=("text/csv",)),
    )
    return changed(sagemaker=settings)


@pytest.fixture(scope="module")
def full(everything):
    return steps_of(everything)


@pytest.fixture(scope="module")
def cached_profile(everything):
    """The profile step of a pipeline that asks for it alone: the service's own cache has it."""
    request = pipeline_request(everything, folder=sample.ROOT)
    definition = sagemaker.pipeline(request, lambda run: [sagemaker.profile_step(run)])
    return checked_steps(definition)["Profile"]


def test_small_steps_run_in_the_control_image_with_its_role_in_the_vpc(full):
    train, decide, evaluate = (full[name]["Arguments"] for name in ("Train", "Decide", "Evaluate"))
    assert train["RoleArn"] == CONTROL_ROLE
    # Whether its run is being stopped, where it is told to end.
    execution = {"Get": "Execution.PipelineExecutionArn"}
    told = {"AWS_DEFAULT_REGION": "eu-west-1", "STOKER_PIPELINE_EXECUTION": execution}
    assert train["Environment"] == told
    assert train["AppSpecification"]["ImageUri"].endswith("stoker-control:1")
    vpc = {"SecurityGroupIds": ["sg-1", "sg-2"], "Subnets": ["subnet-1"]}
    # Train calls SageMaker: isolated it could not. Decide needs nobody.
    assert train["NetworkConfig"] == {"EnableNetworkIsolation": False, "VpcConfig": vpc}
    assert decide["NetworkConfig"] == {"EnableNetworkIsolation": True, "VpcConfig": vpc}
    assert decide["Tags"] == [{"Key": "team", "Value": "vision"}]
    # A run's gate may ask the registry, though the workload's does not.
    assert evaluate["NetworkConfig"] == {"EnableNetworkIsolation": False, "VpcConfig": vpc}


def test_the_profile_keeps_the_jobs_role_and_neither_its_tags_nor_its_checkpoints(full):
    profile = full["Profile"]["Arguments"]
    assert profile["RoleArn"] == ROLE
    assert profile["Tags"] == [{"Key": "team", "Value": "vision"}]
    assert profile["EnableNetworkIsolation"] is True
    assert "s3://bucket/checkpoints" not in json.dumps(full)


def test_a_pipeline_looks_for_a_kept_profile_itself_before_it_asks_for_a_gpu(full):
    # The service would compare the address of the data with its date.
    assert not [name for name, step in full.items() if "CacheConfig" in step]
    find = full["FindProfile"]["Arguments"]
    assert find["ProcessingResources"]["ClusterConfig"]["InstanceType"] == "ml.m5.large"
    words = find["AppSpecification"]["ContainerArguments"]
    assert EXECUTION in words
    told = json.dumps(words)
    for name in ("instance_type", "instance_count", "image", "input_data", "lr"):
        assert f"Parameters.{name}" in told
    # S3 has to be asked.
    assert find["NetworkConfig"]["EnableNetworkIsolation"] is False
    tail = ("Decide", "Train", "Evaluate", "Gate")
    for end in ("", "Kept", "Again"):
        assert {f"{name}{end}" for name in tail} <= full.keys()
    kept = json.dumps(full["DecideKept"]["Arguments"]["ProcessingInputs"])
    assert find["ProcessingOutputConfig"]["Outputs"][0]["S3Output"]["S3Uri"] is not None
    assert "/profile/profile.json" in kept
    assert "Execution.PipelineExecutionId" in json.dumps(
        full["Profile"]["Arguments"]["CheckpointConfig"]
    )


def test_a_run_that_compares_first_looks_for_a_kept_profile_after_that():
    found = steps_of(changed(skip_unchanged=True, sagemaker=with_settings(cache_days=7)))
    order = ("Compare", "HasChanged", "NeedsProfile", "FindProfile", "IsProfileKept", "DecideKept")
    assert [name for name in found if name in order] == [*order]
    # Branches cannot join: the tail is there three times, and the limit is 50 steps.
    assert len(found) < 50


def test_a_cached_profile_holds_nothing_of_the_run_and_tells_clusters_apart(cached_profile):
    assert cached_profile["CacheConfig"] == {"Enabled": True, "ExpireAfter": "P30D"}
    profile = cached_profile["Arguments"]
    # What the service compares when it looks for an earlier run.
    image = {key: profile.get(key) for key in ("AlgorithmSpecification", "HyperParameters")}
    compared = json.dumps([image, profile["InputDataConfig"]])
    folder, variables = (json.dumps(profile[key]) for key in ("CheckpointConfig", "Environment"))
    assert "Execution." not in compared + folder + variables
    for name in ("instance_type", "instance_count"):
        assert f"Parameters.{name}" in variables
        assert f"Parameters.{name}" in folder
    # All else that it compares and a run can change: the next run must not write over it.
    changeable = set(re.findall(r"Parameters\.\w+", compared))
    assert {"Parameters.image", "Parameters.input_data"} <= changeable
    # Rates leave a step's cost as it is.
    assert "Parameters.lr" not in changeable
    assert all(name in folder for name in changeable)


def test_a_cached_profile_whose_address_would_be_too_long_is_refused():
    many = {f"parameter{number}": "x" * 150 for number in range(6)}
    told = changed(hyperparameters=many, sagemaker=with_settings(cache_days=3))
    request = pipeline_request(told, folder=sample.ROOT)
    with pytest.raises(UsageError, match="at most 1024"):
        sagemaker.pipeline(request, lambda run: [sagemaker.profile_step(run)])


def test_todays_type_is_spelt_as_the_service_does():
    today = Cluster(dnn=TodaysGroup(instance_type="g5.2xlarge"))
    found = json.loads(compile_pipeline(changed(cluster=today), folder=sample.ROOT).definition)
    assert found["Parameters"] == sample.definition()["Parameters"]


def test_compile_writes_the_definition_of_the_project_that_it_is_run_in(tmp_path):
    """It takes a workload in YAML's subset JSON, with the installation's own pipeline."""
    (tmp_path / "mnist.json").write_text(to_json(sample.WORKLOAD))
    words = ("compile", "sagemaker", "mnist.json", "--out", "out/def.json")
    done = succeeds(*words, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["parameters"]["instance_type"] == "ml.g5.2xlarge"
    assert (tmp_path / "out" / "def.json").read_text() == sample.compiled().definition
    done = stoker(*words, "--set", "feed.credits=5", cwd=tmp_path)
    again = "stoker upload sagemaker mnist.json --set feed.credits=5"
    assert f"next:      {again}\n" in done.stderr


@pytest.mark.parametrize(
    ("target", "change", "more", "words"),
    [
        ("kubeflow", {}, (), ["how many GPUs a pod gets", "kubernetes.pools"]),
        ("sagemakr", {}, (), ["unknown target sagemakr", "did you mean sagemaker?"]),
        ("sagemaker", {"sagemaker": None}, (), ["no settings for SageMaker", "output_uri"]),
        ("sagemaker", {"image": None}, (), ["needs the workload's image"]),
        ("sagemaker", {"cluster": None}, (), ["needs the workload's cluster"]),
        ("sagemaker", {"tracking": OF_FOLDER}, (), ["not share a folder", "key tracking.mlflow"]),
        ("sagemaker", {}, ("--components", "nowhere"), ["is only for kubeflow"]),
        ("sagemaker", {"constraints": MANY}, (), ["allowed_types=ml.c7i", "at most 256"]),
        ("sagemaker", {"hyperparameters": LONG}, (), ["has 269 characters", "at most 256"]),
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
