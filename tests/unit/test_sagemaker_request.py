"""Checks the CreateTrainingJob request that plan() makes."""

import dataclasses
import io
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.launch.telemetry import ProgressLog
from stoker.launch.topology import from_resourceconfig
from stoker.logs import Log
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.platforms.sagemaker.request import (
    PROGRESS_METRICS,
    REQUEST_TAG,
    WORKLOAD_TAG,
    plan_request,
)
from stoker.records import (
    Channel,
    FeedSettings,
    Json,
    PlatformSettings,
    StrategySettings,
    TrackingSettings,
)
from stoker.settings import RunEnvironment, from_environment
from support.sagemaker_job import (
    DATA,
    DIGEST,
    DNN,
    full_job,
    group,
    homogeneous_job,
    job,
    plan_body,
    profile_job,
    settings,
)


def body(spec: JobSpec) -> dict[str, Json]:
    return plan_body(spec)


def channels(spec: JobSpec) -> dict[str, Mapping[str, Json]]:
    return {str(c["ChannelName"]): c for c in body(spec)["InputDataConfig"]}


def groups_of(spec: JobSpec) -> dict[str, Json]:
    return {
        name: channel["DataSource"]["S3DataSource"].get("InstanceGroupNames")
        for name, channel in channels(spec).items()
    }


def environment(spec: JobSpec) -> dict[str, str]:
    found = body(spec)["Environment"]
    assert isinstance(found, dict)
    return found


def test_plan_needs_no_region_no_client_no_network_and_no_folder(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("plan() is pure")

    monkeypatch.chdir(tmp_path)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("boto3.client", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    spec = job(sagemaker=settings(source="no/such/folder"))
    platform = SageMakerPlatform()
    assert platform.plan(spec) == platform.plan(spec)
    assert platform.describe(platform.plan(spec))["code_folder"] == "no/such/folder"
    assert list(tmp_path.iterdir()) == []


def test_the_decisions_groups_become_instance_groups_with_the_services_type_names():
    assert body(job(DNN, group("data", "c7i.4xlarge", 3)))["ResourceConfig"] == {
        "InstanceGroups": [
            {"InstanceGroupName": "dnn", "InstanceType": "ml.g5.2xlarge", "InstanceCount": 1},
            {"InstanceGroupName": "data", "InstanceType": "ml.c7i.4xlarge", "InstanceCount": 3},
        ],
        "VolumeSizeInGB": 100,
    }


def test_one_group_is_the_homogeneous_form():
    assert body(job(group("dnn", "g5.2xlarge", 2)))["ResourceConfig"] == {
        "InstanceType": "ml.g5.2xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 100,
    }


def test_the_image_runs_the_launcher_with_the_command_behind_it():
    algorithm = body(job())["AlgorithmSpecification"]
    assert isinstance(algorithm, dict)
    assert algorithm["ContainerEntrypoint"] == ["stoker", "launch", "--"]
    assert algorithm["ContainerArguments"] == ["python", "train.py", "--epochs", "3"]


def test_no_channel_names_groups_where_all_groups_get_all():
    assert set(groups_of(job()).values()) == {None}


def test_one_channel_with_groups_gives_all_channels_groups():
    spec = job(
        channels={
            "train": Channel(uri="s3://bucket/train", groups=("data",)),
            "vocabulary": Channel(uri="s3://bucket/vocabulary"),
        }
    )
    everyone = ["dnn", "data"]
    assert groups_of(spec) == {
        "train": ["data"],
        "vocabulary": everyone,
        "stoker_token": everyone,
        "stoker_code": everyone,
    }


def test_channels_may_name_roles_instead_of_groups():
    spec = job(
        group("dnn", "ml.p3.8xlarge", name="gpu"),
        group("data", name="cpu-1"),
        group("data", name="cpu-2"),
        channels={
            "train": Channel(uri="s3://bucket/a", groups=("data",)),
            "eval": Channel(uri="s3://bucket/b", groups=("dnn", "cpu-2")),
        },
    )
    found = groups_of(spec)
    assert (found["train"], found["eval"]) == (["cpu-1", "cpu-2"], ["gpu", "cpu-2"])


def test_without_a_data_group_the_dnn_group_gets_its_channels():
    spec = job(DNN, channels={"train": Channel(uri="s3://bucket/a", groups=("data",))})
    assert groups_of(spec)["train"] is None


def test_a_channel_of_an_unknown_group_is_refused_with_the_nearest_name():
    spec = job(channels={"train": Channel(uri="s3://bucket/a", groups=("dta",))})
    with pytest.raises(UsageError, match=r"unknown instance group dta") as caught:
        body(spec)
    assert caught.value.where == "key channels.train.groups"
    assert "data" in caught.value.fix


def test_data_types_distributions_and_modes_are_handed_on():
    found = channels(full_job())
    labels, boxes = found["labels"], found["boxes"]
    assert (labels["InputMode"], boxes["InputMode"]) == ("FastFile", "Pipe")
    source = labels["DataSource"]["S3DataSource"]
    assert source["S3DataType"] == "ManifestFile"
    assert source["S3DataDistributionType"] == "ShardedByS3Key"
    # RecordIO says where one record ends: a pipe alone does not.
    assert boxes["RecordWrapperType"] == "RecordIO"
    streamed = boxes["DataSource"]["S3DataSource"]
    assert streamed["AttributeNames"] == ["source-ref", "boxes"]


def test_what_a_pipe_streams_can_be_left_unwrapped():
    channel = Channel(
        uri="s3://bucket/boxes.jsonl",
        data_type="AugmentedManifestFile",
        mode="Pipe",
        attribute_names=("source-ref",),
        record_wrapper="None",
    )
    assert channels(job(channels={"boxes": channel}))["boxes"]["RecordWrapperType"] == "None"


def test_the_token_is_an_object_of_its_own_and_not_in_the_request():
    platform = SageMakerPlatform()
    request = platform.plan(job())
    assert request.token_uri == "s3://bucket/out/mnist-1/stoker_token/token"
    source = channels(job())["stoker_token"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://bucket/out/mnist-1/stoker_token/"
    told = from_environment(environment(job()))
    assert told.token_file == Path("/opt/ml/input/data/stoker_token/token")


def test_a_folder_of_code_is_packed_to_a_place_of_the_jobs_own():
    request = SageMakerPlatform().plan(job())
    assert request.code_uri == "s3://bucket/out/mnist-1/stoker_code/code.tar.gz"
    assert request.code_folder == Path("examples/mnist")
    told = from_environment(environment(job()))
    assert told.code_file == Path("/opt/ml/input/data/stoker_code/code.tar.gz")


def test_packed_code_is_read_where_it_is():
    request = SageMakerPlatform().plan(full_job())
    assert (request.code_uri, request.code_folder) == (None, None)
    source = channels(full_job())["stoker_code"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://bucket/code/mnist-7.tar.gz"
    told = from_environment(environment(full_job()))
    assert told.code_file == Path("/opt/ml/input/data/stoker_code/mnist-7.tar.gz")


def test_code_in_the_image_needs_no_channel():
    assert "stoker_code" not in channels(homogeneous_job())
    assert "STOKER_CODE_FILE" not in environment(homogeneous_job())


def test_the_launcher_reads_what_the_request_tells_it():
    feed = FeedSettings(credits=4, lease_seconds=20.0)
    dnn = msgspec.structs.replace(DNN, processes_per_host=4, workers_per_host=0)
    settings = RunEnvironment(
        feed=feed,
        strategy=StrategySettings(name="torchrun"),
        replace_dataloader=True,
        workload_sha256=DIGEST,
    )
    spec = job(dnn, DATA, settings=settings)
    told = from_environment({**environment(spec), "TRAINING_JOB_NAME": spec.name})
    assert told.run_id == "mnist-1"
    assert told.feed == feed
    assert told.workers == {"dnn": 0}
    assert (told.strategy.name, told.processes_per_host) == ("torchrun", 4)
    assert told.replace_dataloader
    assert told.workload_sha256 == DIGEST
    assert told.profile is None


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("dnn", "data"), None),
        (("gpu", "Data-1"), None),
        (("gpu", "cpu"), {"gpu": "dnn", "cpu": "data"}),
        (("datacenter", "cpu"), {"datacenter": "dnn", "cpu": "data"}),
    ],
)
def test_roles_are_told_where_names_do_not_tell_them(names, told, tmp_path):
    spec = job(group("dnn", "ml.g5.2xlarge", name=names[0]), group("data", name=names[1]))
    text = environment(spec).get("STOKER_ROLES")
    assert (json.loads(text) if text else None) == told
    resources = {
        "current_host": "algo-2",
        "hosts": ["algo-1", "algo-2"],
        "instance_groups": [
            {"instance_group_name": names[0], "hosts": ["algo-2"]},
            {"instance_group_name": names[1], "hosts": ["algo-1"]},
        ],
    }
    topology = from_resourceconfig(
        tmp_path, {**environment(spec), "SM_RESOURCE_CONFIG": json.dumps(resources)}
    )
    assert (topology.dnn_hosts, topology.data_hosts) == (("algo-2",), ("algo-1",))


def test_a_homogeneous_cluster_has_no_group_names_that_roles_could_be_told_for(tmp_path):
    spec = job(group("dnn", "ml.g5.2xlarge", name="data-lovers"))
    resources = {"current_host": "algo-1", "hosts": ["algo-1"]}
    topology = from_resourceconfig(
        tmp_path, {**environment(spec), "SM_RESOURCE_CONFIG": json.dumps(resources)}
    )
    assert topology.leader == "algo-1"


def test_the_users_variables_are_handed_on():
    found = environment(full_job())
    assert (found["NCCL_DEBUG"], found["TOKENIZERS_PARALLELISM"]) == ("WARN", "false")


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"TrainingJobName": "mine"}, "TrainingJobName"),
        ({"ResourceConfig": {"InstanceGroups": []}}, "ResourceConfig.InstanceGroups"),
        ({"ResourceConfig": None}, "ResourceConfig"),
        (
            {"AlgorithmSpecification": {"ContainerEntrypoint": ["train"]}},
            "AlgorithmSpecification.ContainerEntrypoint",
        ),
        ({"Environment": {"STOKER_FEED": "{}"}}, "Environment.STOKER_FEED"),
        (
            {"InputDataConfig": [{"ChannelName": "stoker_token", "ContentType": "x"}]},
            "InputDataConfig[stoker_token]",
        ),
        ({"Tags": [{"Key": "stoker:x", "Value": "y"}]}, "Tags[stoker:x]"),
        ({"CheckpointConfig": {"S3Uri": "s3://b/c"}}, "CheckpointConfig"),
    ],
)
def test_what_stoker_sets_in_the_request_cannot_be_patched(patch, path):
    with pytest.raises(UsageError, match="is set by stoker") as caught:
        body(job(sagemaker=settings(request=patch)))
    assert caught.value.where == f"key sagemaker.request.{path}"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"VpcConfg": {"Subnets": ["subnet-1"]}}, "VpcConfg"),
        ({"RetryStrategy": {"MaximumRetryAttempts": "two"}}, "MaximumRetryAttempts"),
        ({"ResourceConfig": 3}, "ResourceConfig must be a mapping, found one value"),
        ({"Tags": [{"Value": "y"}]}, "an item has no Key"),
        ({"InputDataConfig": [{"ChannelName": "trian"}]}, "unknown channel trian"),
    ],
)
def test_a_patch_of_the_wrong_shape_is_refused(patch, words):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        body(job(sagemaker=settings(request=patch)))
    assert "sagemaker.request" in caught.value.where


def test_a_patch_changes_stokers_defaults():
    assert body(job())["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    channel = {"ChannelName": "train", "ContentType": "image/jpeg"}
    patch = {"RetryStrategy": None, "InputDataConfig": [channel]}
    spec = job(sagemaker=settings(request=patch))
    assert "RetryStrategy" not in body(spec)
    assert channels(spec)["train"] == {**channels(job())["train"], **channel}


def test_a_profile_is_told_so_and_ends_by_the_service_at_the_latest():
    told = from_environment(environment(profile_job()))
    assert told.profile is not None
    assert told.profile.budget_seconds == 120
    assert body(profile_job())["StoppingCondition"] == {"MaxRuntimeInSeconds": 7320}


def test_a_profile_never_touches_the_trainings_checkpoints():
    assert body(profile_job())["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/out/mnist-1/profile",
        "LocalPath": "/opt/ml/profile",
    }
    told = from_environment(environment(profile_job()))
    assert told.profile_file == Path("/opt/ml/profile/profile.json")


def test_checkpoints_belong_to_a_run_and_its_further_attempts():
    def folder(name: str, *, run: str | None = None, **changes: object) -> str:
        kept_at = settings(checkpoint_uri="s3://bucket/kept/", **changes)
        kept = plan_request(job(name=name, run=run, sagemaker=kept_at)).body["CheckpointConfig"]
        assert isinstance(kept, dict)
        return str(kept["S3Uri"])

    assert folder("mnist-1") == "s3://bucket/kept/mnist-1"
    assert folder("mnist-2") == "s3://bucket/kept/mnist-2"
    assert folder("mnist-1-2", run="mnist-1") == "s3://bucket/kept/mnist-1"
    warm = "s3://bucket/kept/mnist-1"
    assert folder("mnist-2", resume_from=warm) == warm


def test_file_systems_are_channels_of_all_groups_in_a_vpc():
    network = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    vpc = settings(request={"VpcConfig": network})
    disks = {
        "train": Channel(uri="fsx://fs-0123456789abcdef0/mount/mnist"),
        "words": Channel(uri="efs://fs-01234567/words"),
    }
    found = body(job(channels=disks, sagemaker=vpc))["InputDataConfig"]
    assert isinstance(found, list)
    assert found[0] == {
        "ChannelName": "train",
        "DataSource": {
            "FileSystemDataSource": {
                "FileSystemId": "fs-0123456789abcdef0",
                "FileSystemAccessMode": "ro",
                "FileSystemType": "FSxLustre",
                "DirectoryPath": "/mount/mnist",
            }
        },
    }
    with pytest.raises(UsageError, match="through a VPC"):
        body(job(channels=disks))
    with pytest.raises(UsageError, match="is a file system"):
        body(job(channels={"a": Channel(uri="efs://fs-01234567/a", mode="Pipe")}, sagemaker=vpc))
    some = {**disks, "labels": Channel(uri="s3://bucket/labels", groups=("data",))}
    with pytest.raises(UsageError, match="all groups mount"):
        body(job(channels=some, sagemaker=vpc))


def test_spot_is_for_homogeneous_jobs():
    found = body(homogeneous_job())
    assert found["EnableManagedSpotTraining"] is True
    assert found["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 3600,
        "MaxWaitTimeInSeconds": 7200,
    }


def test_hyperparameters_are_texts():
    assert body(job())["HyperParameters"] == {"fast": "true", "lr": "0.1", "name": "resnet"}
    assert "HyperParameters" not in body(job(hyperparameters={}))


def progress_line(step_seconds: float, wait_seconds: float) -> str:
    stream = io.StringIO()
    log = Log(run="mnist 1", host="algo-1", stream=stream)
    log.event("progress", steps=1200, step_seconds=step_seconds, wait_seconds=wait_seconds)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("step_seconds", "wait_seconds"),
    [(0.1923, 0.0121), (1.0, 0.0), (12.5, 3e-06), (1.23456789e-05, 1e-09), (86400.0, 1234567.0)],
)
def test_the_metric_definitions_read_the_launchers_own_line(step_seconds, wait_seconds):
    line = progress_line(step_seconds, wait_seconds)
    found = [re.search(metric["Regex"], line) for metric in PROGRESS_METRICS]
    values = [float(match.group(1)) for match in found if match]
    assert values == pytest.approx([step_seconds, wait_seconds], rel=1e-5)


def test_the_metric_definitions_read_no_other_line():
    stream = io.StringIO()
    Log(run="r", host="h", stream=stream).event("steady", steps=3, step_seconds=0.1, wait_seconds=1)
    assert not any(re.search(metric["Regex"], stream.getvalue()) for metric in PROGRESS_METRICS)


def test_the_lines_fields_are_those_of_the_progress_log(tmp_path):
    timeline = tmp_path / "timeline-rank0.csv"
    head = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples"
    rows = [head, *["0,0,0,0.0,0.125,0.125,8"] * 3]
    timeline.write_text("\n".join(rows) + "\n", encoding="utf-8")
    stream = io.StringIO()
    progress = ProgressLog(tmp_path, Log(run="r", host="h", stream=stream))
    progress.tick()
    progress.close()
    found = [re.search(metric["Regex"], stream.getvalue()) for metric in PROGRESS_METRICS]
    assert [match.group(1) for match in found if match] == ["0.25", "0.125"]


def tags(spec: JobSpec) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in body(spec)["Tags"]}


def test_tags_tell_workload_and_request():
    found = tags(full_job())
    assert (found["team"], found[WORKLOAD_TAG]) == ("vision", DIGEST)
    assert re.fullmatch("[0-9a-f]{64}", found[REQUEST_TAG])


def test_the_requests_digest_changes_with_the_request_and_not_with_its_tags():
    digest = tags(job())[REQUEST_TAG]
    assert (
        tags(job(sagemaker=settings(request={"Tags": [{"Key": "a", "Value": "b"}]})))[REQUEST_TAG]
        == digest
    )
    assert tags(job(run_dir=Path("elsewhere/mnist-1")))[REQUEST_TAG] == digest
    assert tags(job(command=("python", "train.py")))[REQUEST_TAG] != digest
    assert tags(job(DNN, group("data", count=3)))[REQUEST_TAG] != digest


MLFLOW = "arn:aws:sagemaker:eu-central-1:123456789012:mlflow-tracking-server/team"


def test_figures_go_to_the_services_own_mlflow_and_tensorboard():
    told = TrackingSettings(mlflow=MLFLOW, experiment="mnist", tensorboard=True)
    found = body(job(tracking=told))
    assert found["MlflowConfig"] == {
        "MlflowResourceArn": MLFLOW,
        "MlflowExperimentName": "mnist",
        "MlflowRunName": "mnist-1",
    }
    place = "/opt/ml/output/tensorboard"
    assert found["TensorBoardOutputConfig"] == {
        "S3OutputPath": "s3://bucket/out/mnist-1/tensorboard",
        "LocalPath": place,
    }
    variables = found["Environment"]
    assert isinstance(variables, dict)
    assert variables["STOKER_TENSORBOARD"] == place
    assert variables["MLFLOW_TRACKING_URI"] == MLFLOW
    # A profile is no training to compare with others.
    profiled = body(dataclasses.replace(profile_job(), tracking=told))
    assert not {"MlflowConfig", "TensorBoardOutputConfig"} & set(profiled)


def test_an_attempt_for_which_mlflow_was_away_is_the_same_job():
    told = {"MLFLOW_TRACKING_URI": "https://mlflow", "MLFLOW_RUN_ID": "0a1b"}
    assert tags(job(environment=told))[REQUEST_TAG] == tags(job())[REQUEST_TAG]


def test_a_plan_is_another_value_each_time():
    plan_body(job())["ResourceConfig"] = None
    assert plan_body(job())["ResourceConfig"]


def test_what_is_printed_tells_what_nobody_can_check():
    platform = SageMakerPlatform()
    described = platform.describe(platform.plan(full_job()))
    assert described["platform"] == "sagemaker"
    notes = " ".join(described["notes"])
    for word in ("security groups", "S3", "UDP port 500", "channel labels", "channel boxes"):
        assert word in notes
    assert platform.describe(platform.plan(job()))["notes"] == []


def test_spot_without_checkpoints_is_told():
    spot = homogeneous_job()
    assert spot.platform_settings.sagemaker is not None
    settings = msgspec.structs.replace(spot.platform_settings.sagemaker, checkpoint_uri=None)
    without = dataclasses.replace(spot, platform_settings=PlatformSettings(sagemaker=settings))
    platform = SageMakerPlatform()
    notes = platform.describe(platform.plan(without))["notes"]
    assert notes == ["without sagemaker.checkpoint_uri an interrupted job starts from scratch"]
