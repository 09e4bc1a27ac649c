"""Checks what a workload's settings change in the pipeline, and what `stoker compile` refuses."""

import json
import re
from collections.abc import Mapping

import msgspec
import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from stoker.errors import UsageError
from stoker.pipelines.sagemaker.compile import (
    MAX_ARGUMENT,
    MAX_DESCRIPTION,
    compile_pipeline,
)
from stoker.records import (
    Cluster,
    Constraints,
    ControlSettings,
    Json,
    ModelSettings,
    NotifySettings,
    TodaysGroup,
    TrackingSettings,
    to_json,
)
from support import sagemaker_pipeline as sample
from support.command import stoker
from support.sagemaker_job import KEY, ROLE

MODEL = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
MANY = Constraints(allowed_instance_types=("ml.c7i.24xlarge",) * 20)
EXECUTION: Json = {"Get": "Execution.PipelineExecutionId"}
CONTROL_ROLE = "arn:aws:iam::123456789012:role/stoker-steps"


def compiled(instance_type: str, **settings: object) -> dict[str, Json]:
    workload = msgspec.structs.replace(
        sample.WORKLOAD,
        cluster=Cluster(dnn=TodaysGroup(instance_type=instance_type)),
        sagemaker=msgspec.structs.replace(sample.WORKLOAD.sagemaker, **settings),
    )
    document: dict[str, Json] = json.loads(
        compile_pipeline(workload, folder=sample.ROOT).definition
    )
    return document


def arguments(document: Mapping[str, Json], name: str) -> dict[str, Json]:
    step = next(step for step in sample.steps(document) if step["Name"] == name)
    found = step["Arguments"]
    assert isinstance(found, dict)
    return found


def test_the_last_step_knows_of_which_run_it_tells_mlflow_and_the_webhook():
    workload = msgspec.structs.replace(
        sample.WORKLOAD,
        tracking=TrackingSettings(
            mlflow="arn:aws:sagemaker:eu-central-1:123456789012:mlflow-app/team", tensorboard=True
        ),
        notify=NotifySettings(),
    )
    document = json.loads(compile_pipeline(workload, folder=sample.ROOT).definition)
    assert not {"MlflowConfig", "TensorBoardOutputConfig"} & set(arguments(document, "Profile"))
    named: Json = {"Std:Join": {"On": "", "Values": [f"{workload.name}-", EXECUTION]}}
    for step in ("Train", "Evaluate"):
        told = _member(arguments(document, step), "Environment", "STOKER_PIPELINE_RUN")
        assert told == named


def _member(request: Mapping[str, Json], part: str, key: str) -> Json:
    found = request[part]
    assert isinstance(found, dict)
    return found[key]


@pytest.fixture(scope="module")
def full():
    return compiled(
        "ml.p3.8xlarge",
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


def test_botocore_would_send_every_request_with_all_settings(full):
    for step in sample.steps(full):
        operation = {"Processing": "CreateProcessingJob", "Training": "CreateTrainingJob"}.get(
            str(step["Type"])
        )
        if operation:
            request = sample.resolved(step["Arguments"], full)
            assert isinstance(request, dict)
            named = {operation.removeprefix("Create") + "Name": "job", **request}
            shape = MODEL.operation_model(operation).input_shape
            report = ParamValidator().validate(named, shape).generate_report()
            assert report == "", f"{step['Name']}: {report}"


def test_small_steps_run_in_the_control_image_with_its_role_in_the_vpc(full):
    train = arguments(full, "Train")
    assert train["RoleArn"] == CONTROL_ROLE
    assert train["Environment"] == {"AWS_DEFAULT_REGION": "eu-west-1"}
    assert train["AppSpecification"]["ImageUri"].endswith("stoker-control:1")  # type: ignore[index,call-overload,union-attr]
    vpc = {"SecurityGroupIds": ["sg-1", "sg-2"], "Subnets": ["subnet-1"]}
    # Train calls SageMaker: isolated it could not. Decide needs nobody.
    assert train["NetworkConfig"] == {"EnableNetworkIsolation": False, "VpcConfig": vpc}
    decide = arguments(full, "Decide")
    assert decide["NetworkConfig"] == {"EnableNetworkIsolation": True, "VpcConfig": vpc}
    assert decide["Tags"] == [{"Key": "team", "Value": "vision"}]
    # A run's gate may ask the registry, though the workload's does not.
    evaluate = arguments(full, "Evaluate")
    assert evaluate["NetworkConfig"] == {"EnableNetworkIsolation": False, "VpcConfig": vpc}


def test_jobs_keep_their_own_role_and_lose_the_tags_of_a_single_job(full):
    profile = arguments(full, "Profile")
    assert profile["RoleArn"] == ROLE
    assert profile["Tags"] == [{"Key": "team", "Value": "vision"}]
    assert profile["EnableNetworkIsolation"] is True


def test_a_cached_profile_holds_nothing_of_the_run_and_tells_clusters_apart(full):
    step = next(step for step in sample.steps(full) if step["Name"] == "Profile")
    assert step["CacheConfig"] == {"Enabled": True, "ExpireAfter": "P30D"}
    profile = arguments(full, "Profile")
    # What the service compares when it looks for an earlier run.
    compared = json.dumps(
        [
            profile.get(key)
            for key in (
                "AlgorithmSpecification",
                "CheckpointConfig",
                "Environment",
                "HyperParameters",
                "InputDataConfig",
            )
        ]
    )
    assert "Execution." not in compared
    for name in ("InstanceType", "InstanceCount"):
        assert f"Parameters.{name}" in json.dumps(profile["Environment"])
        assert f"Parameters.{name}" in json.dumps(profile["CheckpointConfig"])
    # All else that it compares and a run can change: the next run must not write over it.
    parts = {key: profile.get(key) for key in ("AlgorithmSpecification", "HyperParameters")}
    changed = re.findall(r"Parameters\.\w+", json.dumps([parts, profile["InputDataConfig"]]))
    assert {"Parameters.Image", "Parameters.InputData", "Parameters.Lr"} <= set(changed)
    assert all(name in json.dumps(profile["CheckpointConfig"]) for name in changed)


def test_a_cached_profile_whose_address_would_be_too_long_is_refused():
    many = {f"parameter{number}": "x" * 150 for number in range(6)}
    workload = msgspec.structs.replace(
        sample.WORKLOAD,
        hyperparameters=many,
        sagemaker=msgspec.structs.replace(sample.WORKLOAD.sagemaker, cache_days=3),
    )
    with pytest.raises(UsageError, match="at most 1024"):
        compile_pipeline(workload, folder=sample.ROOT)


def test_decide_reads_the_profile_where_the_profile_step_writes_it(full):
    for document in (full, sample.definition()):
        written = arguments(document, "Profile")["CheckpointConfig"]
        assert isinstance(written, Mapping)
        for step in ("Decide", "Evaluate"):
            read = {
                item["InputName"]: item["S3Input"]["S3Uri"]
                for item in arguments(document, step)["ProcessingInputs"]  # type: ignore[union-attr]
            }
            # That object alone: a prefix would bring along whatever else is written there.
            folder, file = (
                sample.resolved(uri, document) for uri in (written["S3Uri"], read["profile"])
            )
            assert file == f"{folder}/profile.json"


def test_only_the_profile_is_ever_taken_from_the_cache(full):
    assert [s["Name"] for s in sample.steps(full) if "CacheConfig" in s] == ["Profile"]
    assert not [s for s in sample.steps(sample.definition()) if "CacheConfig" in s]


def test_a_profile_never_touches_the_trainings_checkpoints(full):
    assert "s3://bucket/checkpoints" not in json.dumps(full)


def test_each_kind_of_error_is_in_one_retry_policy_of_a_step():
    for step in sample.steps(sample.definition()):
        policies = step.get("RetryPolicies", [])
        assert isinstance(policies, list)
        kinds = [kind for policy in policies for kind in policy["ExceptionType"]]
        assert len(kinds) == len(set(kinds))
        if step["Type"] in ("Processing", "Training"):
            assert len(kinds) == 5
        for policy in policies:
            assert ("MaxAttempts" in policy) != ("ExpireAfterMin" in policy)


def test_todays_type_is_spelt_as_the_service_does():
    today = Cluster(dnn=TodaysGroup(instance_type="g5.2xlarge"))
    workload = msgspec.structs.replace(sample.WORKLOAD, cluster=today)
    document = json.loads(compile_pipeline(workload, folder=sample.ROOT).definition)
    listed = {p["Name"]: p["DefaultValue"] for p in document["Parameters"]}
    assert listed["InstanceType"] == "ml.g5.2xlarge"


def test_limits_are_those_of_the_services_model():
    def most(shape: str) -> object:
        return MODEL.shape_for(shape).metadata["max"]

    assert most("PipelineDescription") == MAX_DESCRIPTION
    assert most("ContainerArgument") == MAX_ARGUMENT


def test_compile_writes_the_definition_of_the_project_that_it_is_run_in(tmp_path):
    """It takes a workload in YAML's subset JSON, with the installation's own pipeline."""
    (tmp_path / "mnist.json").write_text(to_json(sample.WORKLOAD))
    words = ("compile", "sagemaker", "mnist.json", "--out", "out/def.json")
    done = stoker(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"]["InstanceType"] == "ml.g5.2xlarge"
    assert (tmp_path / "out" / "def.json").read_text() == sample.compiled().definition
    done = stoker(*words, "--set", "feed.credits=5", cwd=tmp_path)
    again = "stoker upload sagemaker mnist.json --set feed.credits=5"
    assert f"next:      {again}\n" in done.stderr


@pytest.mark.parametrize(
    ("target", "change", "more", "words"),
    [
        ("kubeflow", {}, (), ["how many GPUs a pod gets", "kubernetes.pools"]),
        ("sagemakr", {}, (), ["no target sagemakr", "did you mean sagemaker?"]),
        ("sagemaker", {"sagemaker": None}, (), ["no settings for SageMaker", "output_uri"]),
        ("sagemaker", {"image": None}, (), ["needs the workload's image"]),
        ("sagemaker", {"cluster": None}, (), ["needs the workload's cluster"]),
        (
            *("sagemaker", {"tracking": TrackingSettings(mlflow="sqlite:mlflow.db")}, ()),
            ["do not share a folder", "key tracking.mlflow"],
        ),
        ("sagemaker", {}, ("--components", "nowhere"), ["is only for kubeflow"]),
        ("sagemaker", {"constraints": MANY}, (), ["allowed_types=ml.c7i", "at most 256"]),
        (
            *("sagemaker", {"hyperparameters": {"n" * 80: "x" * 180}}, ()),
            ["has 269 characters", "at most 256"],
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_three_lines(tmp_path, target, change, more, words):
    workload = msgspec.structs.replace(sample.WORKLOAD, **change)
    (tmp_path / "mnist.json").write_text(to_json(workload))
    done = stoker("compile", target, "mnist.json", "--out", "def.json", *more, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "def.json").exists()
