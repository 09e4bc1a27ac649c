"""`stoker init --from-training-job` turns what a job says into a workload that loads and plans."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from stoker.errors import ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.project.from_training_job import from_training_job
from stoker.records import Group, Workload
from stoker.workload_file import read_workload
from support.command import stoker, succeeds
from support.sagemaker_uploads import recorded

ROLE = "arn:aws:iam::123456789012:role/service-role/training"
IMAGE = "763104351884.dkr.ecr.eu-central-1.amazonaws.com/pytorch-training:2.5.1-gpu-py311"
CREATED = datetime(2026, 11, 1, 12, tzinfo=UTC)
AS_IS = ("VpcConfig", "Environment", "RetryStrategy", "EnableInterContainerTrafficEncryption")
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
    "StoppingCondition": {"MaxRuntimeInSeconds": 36000, "MaxWaitTimeInSeconds": 72000},
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
    "EnableManagedSpotTraining": True,
    "EnableInterContainerTrafficEncryption": True,
    "RetryStrategy": {"MaximumRetryAttempts": 2},
}


def described(request: Mapping[str, object]) -> dict[str, object]:
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


def made(request: Mapping[str, object], tmp_path: Path) -> tuple[str, Workload]:
    answers = recorded()
    answers.add("describe_training_job", described(request))
    answers.add("list_tags", {"Tags": [{"Key": "team", "Value": "vision"}]})
    name, text = from_training_job(str(request["TrainingJobName"]), aws=answers.aws())
    file = tmp_path / f"{name}.yaml"
    file.write_text(text)
    return " ".join(text.replace("\n#", " ").split()), read_workload(file)


def plan(workload: Workload, tmp_path: Path) -> Mapping[str, object]:
    data = Group(name="data", role="data", instance_type="ml.c7i.4xlarge", count=1)
    groups = (Group.of_today(workload.cluster.dnn), data)
    job = JobSpec.of(workload, groups=groups, run_dir=tmp_path / "runs" / "photos-1")
    body = SageMakerPlatform(aws=Aws(region="eu-central-1", clients={})).plan(job).body
    return dict(body)


def test_a_script_mode_job_becomes_a_workload_with_all_its_settings(tmp_path):
    words, workload = made(SCRIPT_MODE, tmp_path)
    assert yaml.safe_load((tmp_path / "photos.yaml").read_text()) == {
        "schema": "stoker.workload/v1",
        "name": "photos",
        "command": ["python", "train.py"],
        "image": IMAGE,
        "platform": "sagemaker",
        "cluster": {"dnn": {"instance_type": "ml.p3.8xlarge", "count": 2}},
        "channels": {
            "training": {"uri": "s3://photos/train/", "mode": "FastFile"},
            "validation": {"uri": "s3://photos/val/"},
        },
        "hyperparameters": {
            "decay": 0.0001,
            "epochs": 90,
            "flag": "true",
            "lr": 0.1,
            "optimizer": "adam",
        },
        "sagemaker": {
            "role": ROLE,
            "output_uri": "s3://photos/out",
            "region": "eu-central-1",
            "source": "s3://photos/job/source/sourcedir.tar.gz",
            "max_run_seconds": 36000,
            "checkpoint_uri": "s3://photos/checkpoints/",
            "request": {
                "AlgorithmSpecification": {
                    "MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]
                },
                "InputDataConfig": [{"ChannelName": "training", "ContentType": "image/jpeg"}],
                "OutputDataConfig": {"KmsKeyId": "alias/photos"},
                "ResourceConfig": {"VolumeSizeInGB": 250, "VolumeKmsKeyId": "alias/disk"},
                **{key: SCRIPT_MODE[key] for key in AS_IS},
                "Tags": [{"Key": "team", "Value": "vision"}],
            },
        },
    }
    for said in (
        "training job photos-2026-11-02-10-11-12-345 (Completed, created 2026-11-01, eu-central-1)",
        "stoker must be in it",
        "The job's metrics ended at loss 0.5",
        "requirements.txt",
        "Not taken, as jobs with data hosts cannot have it: ",
        *("EnableManagedSpotTraining", "ResourceConfig.KeepAlivePeriodInSeconds"),
        "StoppingCondition.MaxWaitTimeInSeconds",
    ):
        assert said in words
    body = plan(workload, tmp_path)
    assert body["RoleArn"] == ROLE
    assert body["VpcConfig"] == SCRIPT_MODE["VpcConfig"]
    assert "InstanceGroups" in dict(body["ResourceConfig"])  # type: ignore[call-overload]


def test_a_pending_limit_is_not_taken_as_a_data_group_cannot_have_it(tmp_path):
    limits = {"MaxRuntimeInSeconds": 36000, "MaxPendingTimeInSeconds": 7200}
    words, workload = made(SCRIPT_MODE | {"StoppingCondition": limits}, tmp_path)
    assert "StoppingCondition.MaxPendingTimeInSeconds" in words
    assert "InstanceGroups" in dict(plan(workload, tmp_path)["ResourceConfig"])  # type: ignore[call-overload]


def grouped(*groups: tuple[str, str, int]) -> dict[str, object]:
    named = [
        {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": count}
        for name, kind, count in groups
    ]
    return {
        **SCRIPT_MODE,
        "TrainingJobName": "mnist-groups",
        "ResourceConfig": {"InstanceGroups": named, "VolumeSizeInGB": 30},
        "InputDataConfig": [
            channel("training", "s3://photos/train/", groups[0][0]),
            channel("validation", "s3://photos/val/", *(name for name, _, _ in groups)),
        ],
    }


GROUPS = grouped(("feeders", "ml.c5.9xlarge", 2), ("gpus", "ml.g5.xlarge", 1))


def today(workload: Workload) -> tuple[str, int]:
    return workload.cluster.dnn.instance_type, workload.cluster.dnn.count


def test_the_group_that_trains_is_todays_cluster(tmp_path):
    words, workload = made(GROUPS, tmp_path)
    assert today(workload) == ("ml.g5.xlarge", 1)
    assert workload.channels["training"].groups == ("data",)
    assert workload.channels["validation"].groups == ("data", "dnn")
    assert "the job's group gpus; correct it" in words
    assert "feeders (2 x ml.c5.9xlarge), is left out" in words
    plan(workload, tmp_path)
    g6 = {"InstanceType": "ml.g6.xlarge", "InstanceCount": 3}
    preferred = {"InstancePreferences": [g6], "VolumeSizeInGB": 30}
    preferred |= {f"Selected{key}": value for key, value in g6.items()}
    selected = made({**SCRIPT_MODE, "ResourceConfig": preferred}, tmp_path)[1]
    assert today(selected) == ("ml.g6.xlarge", 3)
    of_cpus = grouped(("data_group", "ml.c5.9xlarge", 1), ("b", "ml.c5.2xlarge", 1))
    assert today(made(of_cpus, tmp_path)[1]) == ("ml.c5.2xlarge", 1)


def entered(hyperparameters: Mapping[str, str], **algorithm: object) -> dict[str, object]:
    specification = {"TrainingImage": "me/image:1", "TrainingInputMode": "File", **algorithm}
    changes = {"HyperParameters": hyperparameters, "AlgorithmSpecification": specification}
    return {**SCRIPT_MODE, **changes}


RUNS_GO = {"ContainerEntrypoint": ["python3", "-u"], "ContainerArguments": ["go.py", "--fast"]}
MPI_4 = {"sagemaker_program": "go", "sagemaker_mpi_num_of_processes_per_host": "4"}


@pytest.mark.parametrize(
    ("request_of", "command", "processes", "said"),
    [
        (entered({}, **RUNS_GO), "python3 -u go.py --fast", 1, "stoker must be in it"),
        (entered({}), "train", 1, "the job names no program"),
        (entered({"sagemaker_program": "go.sh"}), "bash go.sh", 1, "not say where its code came"),
        (entered(MPI_4), "python -m go", 4, "stoker must be in it"),
    ],
)
def test_the_command_is_what_the_job_ran(request_of, command, processes, said, tmp_path):
    words, workload = made(request_of, tmp_path)
    assert workload.command == tuple(command.split())
    assert workload.cluster.dnn.processes_per_host == processes
    assert said in words


ALGORITHM = {"AlgorithmName": "x", "TrainingInputMode": "File"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AlgorithmSpecification": ALGORITHM}, "names an algorithm, not an image"),
        ({"ResourceConfig": {"VolumeSizeInGB": 30}}, "runs serverless"),
        (entered({}, ContainerEntrypoint=["stoker", "launch", "--"]), "was started by stoker"),
    ],
)
def test_a_job_that_no_workload_can_hold_is_refused(change, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        made({**SCRIPT_MODE, **change}, tmp_path)


def test_a_file_system_is_a_channel_and_data_of_the_hub_is_left_out(tmp_path):
    kind = {"FileSystemAccessMode": "ro", "FileSystemType": "EFS"}
    disk = {"FileSystemId": "fs-0123456789a", "DirectoryPath": "/data", **kind}
    hub = {"DatasetArn": "a"}
    channels = [
        {"ChannelName": "disk", "DataSource": {"FileSystemDataSource": disk}},
        {"ChannelName": "hub", "DataSource": {"DatasetSource": hub}},
    ]
    words, workload = made({**SCRIPT_MODE, "InputDataConfig": channels}, tmp_path)
    (channel,) = workload.channels.items()
    assert (channel[0], channel[1].uri) == ("disk", "efs://fs-0123456789a/data")
    assert "channels.hub is left out" in words
    plan(workload, tmp_path)


def test_a_missing_permission_is_named():
    answers = recorded()
    words = "User: x is not authorized to perform: sagemaker:DescribeTrainingJob on resource: y"
    answers.refuse("describe_training_job", "AccessDeniedException", words)
    with pytest.raises(ServiceError, match="sagemaker:DescribeTrainingJob is missing"):
        from_training_job("photos", aws=answers.aws())


def test_tags_that_may_not_be_read_are_no_obstacle():
    answers = recorded()
    answers.add("describe_training_job", described(SCRIPT_MODE))
    answers.refuse("list_tags", "AccessDeniedException", "not authorized")
    text = from_training_job("photos", aws=answers.aws())[1]
    assert "tags could not be read (AccessDeniedException)" in text


@pytest.mark.parametrize(
    ("job", "name"), [("Photos-20261102101112", "photos"), ("x" * 39 + "-y", "x" * 39)]
)
def test_the_name_of_a_workload_is_the_jobs_without_its_time(job, name, tmp_path):
    assert made({**SCRIPT_MODE, "TrainingJobName": job}, tmp_path)[1].name == name


@pytest.mark.usefixtures("aws_server")
def test_init_asks_the_service_and_writes_the_workload(tmp_path):
    aws = Aws(region="eu-central-1")
    aws.call("sagemaker", "CreateTrainingJob", **SCRIPT_MODE)
    aws.call("sagemaker", "CreateTrainingJob", **GROUPS)
    name = str(SCRIPT_MODE["TrainingJobName"])
    done = succeeds("init", "mine", "--from-training-job", name, cwd=tmp_path)
    assert "made: mine/photos.yaml, mine/.gitignore" in done.stdout
    succeeds("init", "mine", "--from-training-job", "mnist-groups", cwd=tmp_path)
    for file in ("photos.yaml", "mnist-groups.yaml"):
        workload = read_workload(tmp_path / "mine" / file)
        assert workload.command == ("python", "train.py")
        plan(workload, tmp_path)


@pytest.mark.usefixtures("aws_server")
def test_a_job_that_is_not_there_leaves_no_folder(tmp_path):
    done = stoker("init", "mine", "--from-training-job", "none-such", cwd=tmp_path)
    assert done.returncode == 4
    assert "training job none-such not found in eu-central-1" in done.stderr
    assert "try:" in done.stderr
    assert not (tmp_path / "mine").exists()
