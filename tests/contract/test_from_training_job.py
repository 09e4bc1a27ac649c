"""`stoker init --from-training-job` turns what a job says into a workload that loads and plans."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import botocore.session
import pytest
from botocore.stub import Stubber

from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.orchestrators.adopt import adopt, parse_answer, workload_name, workload_of
from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Group, Workload
from stoker.settings import read_workload
from support.command import stoker

ROLE = "arn:aws:iam::123456789012:role/service-role/training"
IMAGE = "763104351884.dkr.ecr.eu-central-1.amazonaws.com/pytorch-training:2.5.1-gpu-py311"
CREATED = datetime(2026, 11, 1, 12, tzinfo=UTC)
ARN = "arn:aws:sagemaker:eu-central-1:123456789012:training-job/"


def channel(name: str, uri: str, *groups: str, **more: object) -> dict[str, object]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri}
    named = {"InstanceGroupNames": list(groups)} if groups else {}
    return {"ChannelName": name, "DataSource": {"S3DataSource": {**source, **named}}, **more}


SCRIPT_MODE = {
    "TrainingJobName": "photos-2026-11-02-10-11-12-345",
    "AlgorithmSpecification": {
        "TrainingImage": IMAGE,
        "TrainingInputMode": "File",
        "MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
    },
    "RoleArn": ROLE,
    "InputDataConfig": [
        channel("training", "s3://photos/train/", InputMode="FastFile", ContentType="image/jpeg"),
        channel("validation", "s3://photos/val/"),
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://photos/out/", "KmsKeyId": "alias/photos"},
    "ResourceConfig": {
        "InstanceType": "ml.p3.8xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 250,
        "VolumeKmsKeyId": "alias/disk",
        "KeepAlivePeriodInSeconds": 600,
    },
    "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1", "subnet-2"]},
    "StoppingCondition": {"MaxRuntimeInSeconds": 36000},
    "HyperParameters": {
        "epochs": "90",
        "lr": "0.1",
        "decay": "1e-4",
        "optimizer": '"adam"',
        "flag": '"true"',
        "sagemaker_program": '"train.py"',
        "sagemaker_submit_directory": '"s3://photos/job/source/sourcedir.tar.gz"',
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_container_log_level": "20",
    },
    "Environment": {"NCCL_DEBUG": "WARN"},
    "CheckpointConfig": {"S3Uri": "s3://photos/checkpoints/", "LocalPath": "/opt/ml/checkpoints"},
    "EnableNetworkIsolation": False,
    "EnableInterContainerTrafficEncryption": True,
    "RetryStrategy": {"MaximumRetryAttempts": 2},
}


def described(request: Mapping[str, object]) -> dict[str, object]:
    """Returns what DescribeTrainingJob answers for a job that was made with `request`."""
    name = str(request["TrainingJobName"])
    return {
        **request,
        "TrainingJobArn": ARN + name,
        "ModelArtifacts": {"S3ModelArtifacts": "s3://photos/out/model.tar.gz"},
        "TrainingJobStatus": "Completed",
        "SecondaryStatus": "Completed",
        "CreationTime": CREATED,
        "FinalMetricDataList": [{"MetricName": "loss", "Value": 0.5, "Timestamp": CREATED}],
    }


def stubbed(tmp_path: Path) -> tuple[Aws, Stubber]:
    """Makes an account whose answers tests give; botocore holds them against the API's model."""
    session = botocore.session.get_session()
    client = session.create_client(
        "sagemaker",
        region_name="eu-central-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    return Aws(region="eu-central-1", clients={"sagemaker": client}), Stubber(client)


def adopted(request: Mapping[str, object], tmp_path: Path) -> tuple[str, Workload]:
    """Makes the workload of a job, by way of the real client and its parser."""
    aws, stubber = stubbed(tmp_path)
    stubber.add_response("describe_training_job", described(request))
    stubber.add_response("list_tags", {"Tags": [{"Key": "team", "Value": "vision"}]})
    with stubber:
        made = adopt(str(request["TrainingJobName"]), aws=aws, catalog=load_catalog("sagemaker"))
    file = tmp_path / f"{made.name}.yaml"
    file.write_text(made.text)
    return made.text, read_workload(file)


def plan(workload: Workload, tmp_path: Path) -> Mapping[str, object]:
    """Returns the request for today's cluster with one data host next to it."""
    assert workload.cluster is not None
    data = Group(name="data", role="data", instance_type="ml.c7i.4xlarge", count=1)
    groups = (Group.of_today(workload.cluster.dnn), data)
    job = JobSpec.of(workload, groups=groups, run_dir=tmp_path / "runs" / "adopted-1")
    body = SageMakerPlatform(aws=Aws(region="eu-central-1", clients={})).plan(job).body
    return dict(body)


def test_a_script_mode_job_becomes_a_workload_with_all_its_settings(tmp_path: Path) -> None:
    _, workload = adopted(SCRIPT_MODE, tmp_path)
    settings = workload.sagemaker
    assert workload.name == "photos"
    assert workload.command == ("python", "train.py")
    assert workload.image == IMAGE
    assert workload.cluster is not None
    assert (workload.cluster.dnn.instance_type, workload.cluster.dnn.count) == (
        "ml.p3.8xlarge",
        2,
    )
    assert workload.hyperparameters == {
        "epochs": 90,
        "lr": 0.1,
        "decay": "1e-4",
        "optimizer": "adam",
        "flag": '"true"',
    }
    assert workload.channels["training"].uri == "s3://photos/train/"
    assert workload.channels["training"].mode == "FastFile"
    assert workload.channels["validation"].mode == "File"
    assert settings is not None
    assert settings.role == ROLE
    assert settings.output_uri == "s3://photos/out"
    assert settings.region == "eu-central-1"
    assert settings.source == "s3://photos/job/source/sourcedir.tar.gz"
    assert settings.framework is not None
    assert (settings.framework.name, settings.framework.version) == ("pytorch", "2.5.1")
    assert (settings.volume_gb, settings.volume_kms_key) == (250, "alias/disk")
    assert settings.output_kms_key == "alias/photos"
    assert settings.max_run_seconds == 36000
    assert settings.vpc is not None
    assert settings.vpc.security_groups == ("sg-1",)
    assert settings.vpc.subnets == ("subnet-1", "subnet-2")
    assert settings.encrypt_traffic
    assert not settings.network_isolation
    assert settings.checkpoint_uri == "s3://photos/checkpoints/"
    assert settings.environment == {"NCCL_DEBUG": "WARN"}
    assert settings.tags == {"team": "vision"}
    assert settings.metric_definitions is not None
    assert settings.metric_definitions[0].regex == "loss=([0-9.]+)"


def test_its_comments_say_what_was_left_out_and_what_is_not_known(tmp_path: Path) -> None:
    text, workload = adopted(SCRIPT_MODE, tmp_path)
    words = " ".join(text.replace("\n", " ").replace("#", " ").split())
    for said in (
        "training job photos-2026-11-02-10-11-12-345 (Completed, created 2026-11-01, eu-central-1)",
        "stoker must be in it",
        "ContentType image/jpeg",
        "sagemaker_torch_distributed_enabled",
        "The job's own metrics ended at: loss 0.5",
        "kept a warm pool",
        "not taken: RetryStrategy",
        "requirements.txt",
    ):
        assert said in words
    assert workload.sagemaker is not None
    assert workload.sagemaker.keep_alive_seconds == 0
    assert "TODO" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_an_adopted_workload_plans_with_a_data_group(tmp_path: Path) -> None:
    _, workload = adopted(SCRIPT_MODE, tmp_path)
    body = plan(workload, tmp_path)
    assert body["RoleArn"] == ROLE
    assert "InstanceGroups" in dict(body["ResourceConfig"])  # type: ignore[call-overload]


GROUPS = {
    **SCRIPT_MODE,
    "TrainingJobName": "mnist-groups",
    "ResourceConfig": {
        "InstanceGroups": [
            {"InstanceGroupName": "feeders", "InstanceType": "ml.c5.9xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "gpus", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        ],
        "VolumeSizeInGB": 30,
    },
    "InputDataConfig": [
        channel("training", "s3://photos/train/", "feeders"),
        channel("validation", "s3://photos/val/", "gpus", "feeders"),
    ],
}


def test_groups_are_told_apart_and_channels_go_to_roles(tmp_path: Path) -> None:
    text, workload = adopted(GROUPS, tmp_path)
    assert workload.cluster is not None
    assert workload.cluster.dnn.instance_type == "ml.g5.xlarge"
    assert workload.cluster.dnn.count == 1
    assert workload.channels["training"].groups == ("data",)
    assert workload.channels["validation"].groups == ("data", "dnn")
    assert "it alone has accelerators" in text
    assert "--group data=ml.c5.9xlarge:2" in " ".join(text.replace("#", " ").split())
    plan(workload, tmp_path)


@pytest.mark.parametrize(
    ("names", "hyperparameters", "because"),
    [
        (("b", "a"), {"sagemaker_distribution_instance_groups": '["a"]'}, "distribution named it"),
        (("data_group", "a"), {}, "it alone is not called data"),
        (("b", "a"), {}, "a guess"),
    ],
)
def test_how_the_training_group_was_found_is_said(
    names: tuple[str, str], hyperparameters: dict[str, str], because: str, tmp_path: Path
) -> None:
    groups = [
        {"InstanceGroupName": name, "InstanceType": "ml.c5.9xlarge", "InstanceCount": 1}
        for name in names
    ]
    made = {
        **GROUPS,
        "ResourceConfig": {"InstanceGroups": groups, "VolumeSizeInGB": 30},
        "InputDataConfig": [channel("training", "s3://photos/train/")],
        "HyperParameters": hyperparameters,
    }
    text = adopted(made, tmp_path)[0]
    assert because in text
    expected = "b" if because == "a guess" else "a"
    assert f"group {expected}, here dnn" in text


DRIVERS = "s3://photos/job/input/sm_drivers"


def model_trainer(code: str) -> dict[str, object]:
    """Describes a job of the SDK's ModelTrainer."""
    return {
        **SCRIPT_MODE,
        "TrainingJobName": "photos-20261102101112",
        "HyperParameters": {"epochs": "3"},
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/bash"],
            "ContainerArguments": ["-c", "/opt/ml/input/data/sm_drivers/sm_train.sh"],
        },
        "InputDataConfig": [
            channel("training", "s3://photos/train/"),
            channel("code", code),
            channel("sm_drivers", DRIVERS),
        ],
    }


@pytest.mark.parametrize(
    ("code", "drivers", "command", "source"),
    [
        (
            "s3://photos/code",
            {"entry_script": "train.py", "distributed": {}},
            ("python", "/opt/ml/input/data/code/train.py"),
            None,
        ),
        (
            "s3://photos/code/source.tar.gz",
            {"entry_script": "go.sh", "distributed": {"process_count_per_node": 4}},
            ("bash", "go.sh"),
            "s3://photos/code/source.tar.gz",
        ),
        (
            "s3://photos/code",
            {"command": "torchrun train.py", "distributed": {}},
            ("bash", "-c", "cd /opt/ml/input/data/code && exec torchrun train.py"),
            None,
        ),
        ("s3://photos/code", None, ("python", "/opt/ml/input/data/code/train.py"), None),
    ],
)
def test_a_model_trainers_job_is_understood(
    code: str,
    drivers: dict[str, object] | None,
    command: tuple[str, ...],
    source: str | None,
    tmp_path: Path,
) -> None:
    job = parse_answer(model_trainer(code))  # type: ignore[arg-type]
    made = workload_of(
        job,
        catalog=load_catalog("sagemaker"),
        region="eu-central-1",
        drivers=drivers,  # type: ignore[arg-type]
    )
    file = tmp_path / "w.yaml"
    file.write_text(made.text)
    workload = read_workload(file)
    assert made.name == "photos"
    assert workload.command == command
    assert workload.sagemaker is not None
    assert workload.sagemaker.source == source
    assert "sm_drivers" not in workload.channels
    assert ("code" in workload.channels) == (source is None)
    assert ("is a guess" in made.text) == (drivers is None)


def entered(**algorithm: object) -> dict[str, object]:
    specification = {"TrainingImage": "me/image:1", "TrainingInputMode": "File", **algorithm}
    return {**SCRIPT_MODE, "HyperParameters": {}, "AlgorithmSpecification": specification}


@pytest.mark.parametrize(
    ("request_of", "command", "said"),
    [
        (
            entered(ContainerEntrypoint=["python3", "-u"], ContainerArguments=["go.py", "--fast"]),
            ("python3", "-u", "go.py", "--fast"),
            "The job's entry point",
        ),
        (entered(ContainerArguments=["--fast"]), ("--fast",), "put its words in front"),
        (entered(), ("train",), "with the one argument `train`"),
        (
            entered(ContainerEntrypoint=["stoker", "launch", "--"], ContainerArguments=["python"]),
            ("python",),
            "was started by stoker already",
        ),
    ],
)
def test_the_command_of_a_bring_your_own_image(
    request_of: dict[str, object], command: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    text, workload = adopted(request_of, tmp_path)
    assert workload.command == command
    assert said in " ".join(text.replace("#", " ").split())


def test_a_job_that_stoker_started_loses_what_stoker_added(tmp_path: Path) -> None:
    request = entered(
        ContainerEntrypoint=["stoker", "launch", "--"], ContainerArguments=["python", "t.py"]
    ) | {
        "InputDataConfig": [
            channel("training", "s3://photos/train/"),
            channel("stoker_token", "s3://photos/out/job/stoker_token/"),
            channel("stoker_code", "s3://photos/out/job/stoker_code/"),
        ],
        "Environment": {
            "STOKER_CODE_FILE": "/opt/ml/input/data/stoker_code/code.tar.gz",
            "STOKER_FEED": "{}",
            "MINE": "1",
        },
    }
    _, workload = adopted(request, tmp_path)
    assert list(workload.channels) == ["training"]
    assert workload.sagemaker is not None
    assert workload.sagemaker.environment == {"MINE": "1"}
    assert workload.sagemaker.source == "s3://photos/out/job/stoker_code/code.tar.gz"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"AlgorithmSpecification": {"AlgorithmName": "x", "TrainingInputMode": "File"}},
            "no image to run stoker in",
        ),
        ({"ResourceConfig": None}, "runs serverless"),
    ],
)
def test_a_job_that_no_workload_can_hold_is_refused(change: dict[str, object], words: str) -> None:
    answer = {k: v for k, v in {**SCRIPT_MODE, **change}.items() if v is not None}
    job = parse_answer(answer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        workload_of(job, catalog=load_catalog("sagemaker"), region="eu-central-1")


def test_a_file_system_is_taken_on(tmp_path: Path) -> None:
    disk = {
        "FileSystemId": "fs-0123456789a",
        "FileSystemAccessMode": "ro",
        "FileSystemType": "EFS",
        "DirectoryPath": "/data",
    }
    request = {
        **SCRIPT_MODE,
        "InputDataConfig": [{"ChannelName": "disk", "DataSource": {"FileSystemDataSource": disk}}],
    }
    text, workload = adopted(request, tmp_path)
    assert workload.channels["disk"].uri == "efs://fs-0123456789a/data"
    assert "left out" not in text.partition("channels")[2].partition("sagemaker")[0]


def test_data_of_the_hub_is_left_out_and_named(tmp_path: Path) -> None:
    channel = {"ChannelName": "hub", "DataSource": {"DatasetSource": {"DatasetArn": "arn"}}}
    text, workload = adopted({**SCRIPT_MODE, "InputDataConfig": [channel]}, tmp_path)
    assert workload.channels == {}
    assert "Channel hub is not read from S3" in text


def test_spot_is_left_out_with_the_words_to_have_it(tmp_path: Path) -> None:
    request = {
        **SCRIPT_MODE,
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 200},
    }
    text, workload = adopted(request, tmp_path)
    assert workload.sagemaker is not None
    assert not workload.sagemaker.spot
    assert "max_wait_seconds: 200" in text


def test_a_missing_permission_is_named(tmp_path: Path) -> None:
    aws, stubber = stubbed(tmp_path)
    stubber.add_client_error(
        "describe_training_job",
        "AccessDeniedException",
        "User: x is not authorized to perform: sagemaker:DescribeTrainingJob on resource: y",
    )
    with stubber, pytest.raises(AwsError, match="sagemaker:DescribeTrainingJob is missing"):
        adopt("photos", aws=aws, catalog=load_catalog("sagemaker"))


def test_tags_that_may_not_be_read_are_no_obstacle(tmp_path: Path) -> None:
    aws, stubber = stubbed(tmp_path)
    stubber.add_response("describe_training_job", described(SCRIPT_MODE))
    stubber.add_client_error("list_tags", "AccessDeniedException", "not authorized")
    with stubber:
        made = adopt("photos", aws=aws, catalog=load_catalog("sagemaker"))
    assert "tags could not be read (AccessDeniedException)" in made.text


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("photos-2026-11-02-10-11-12-345", "photos"),
        ("Photos-20261102101112", "photos"),
        ("a" * 60, "a" * 40),
        ("x" * 39 + "-y", "x" * 39),
    ],
)
def test_the_name_of_a_workload_is_the_jobs_without_its_time(job: str, name: str) -> None:
    assert workload_name(job) == name


@pytest.mark.usefixtures("aws_server")
def test_init_asks_the_service_and_writes_the_workload(tmp_path: Path) -> None:
    aws = Aws(region="eu-central-1")
    aws.call("sagemaker", "CreateTrainingJob", **SCRIPT_MODE)
    aws.call("sagemaker", "CreateTrainingJob", **GROUPS)
    name = str(SCRIPT_MODE["TrainingJobName"])
    done = stoker("init", "mine", "--from-training-job", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "configs/photos.yaml" in done.stdout
    again = stoker("init", "mine", "--from-training-job", "mnist-groups", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for file in ("photos.yaml", "mnist-groups.yaml"):
        workload = read_workload(tmp_path / "mine" / "configs" / file)
        assert workload.command == ("python", "train.py")
        plan(workload, tmp_path)


@pytest.mark.usefixtures("aws_server")
def test_a_job_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    done = stoker("init", "mine", "--from-training-job", "none-such", cwd=tmp_path)
    assert done.returncode == 4
    assert "there is no training job none-such in eu-central-1" in done.stderr
    assert "try:" in done.stderr
    assert not (tmp_path / "mine").exists()
