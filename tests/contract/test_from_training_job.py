"""`stoker init --from-training-job` turns what a job says into a workload that loads and plans."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import yaml

from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.project.from_training_job import from_training_job
from stoker.records import Group, Workload
from stoker.run.advising import observe, observed_load
from stoker.workload_file import read_workload
from support import cloudwatch
from support.aws_answers import Answers
from support.command import succeeds
from support.moto_server import REGION
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
    }


def from_job(request: Mapping[str, object]) -> tuple[str, str]:
    answers = recorded()
    answers.add("describe_training_job", described(request))
    return from_training_job(str(request["TrainingJobName"]), aws=answers.aws())


def made(request: Mapping[str, object], tmp_path: Path) -> tuple[str, Workload]:
    name, text = from_job(request)
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
                "OutputDataConfig": {"KmsKeyId": "alias/photos"},
                "ResourceConfig": {"VolumeSizeInGB": 250, "VolumeKmsKeyId": "alias/disk"},
                **{key: SCRIPT_MODE[key] for key in AS_IS},
            },
        },
    }
    for said in (
        "training job photos-2026-11-02-10-11-12-345 (Completed, created 2026-11-01, eu-central-1)",
        "stoker must be in it",
        "requirements.txt",
        "Spot, warm pools and other settings of the job are not taken",
    ):
        assert said in words
    body = plan(workload, tmp_path)
    assert body["RoleArn"] == ROLE
    assert body["VpcConfig"] == SCRIPT_MODE["VpcConfig"]
    assert "InstanceGroups" in dict(body["ResourceConfig"])  # type: ignore[call-overload]


def test_a_secret_of_the_job_gets_a_place_and_its_value_is_not_written(tmp_path):
    secrets = {"HF_TOKEN": "hidden-1", "WANDB_API_KEY": "hidden-2"}
    given = {**SCRIPT_MODE["HyperParameters"], "hub_token": "hidden-3"}  # type: ignore[dict-item]
    variables = {"Environment": {"NCCL_DEBUG": "WARN", **secrets}, "HyperParameters": given}
    name, text = from_job({**SCRIPT_MODE, **variables})
    document = yaml.safe_load(text)
    assert "hidden" not in text
    assert document["sagemaker"]["request"]["Environment"] == {"NCCL_DEBUG": "WARN"}
    assert document["secrets"].keys() == secrets.keys()
    for words in ("secrets.HF_TOKEN: ", "secrets.WANDB_API_KEY: ", "hyperparameters.hub_token is"):
        assert words in text
    # Until its place is filled in, no verb takes it.
    file = tmp_path / f"{name}.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"secrets\.HF_TOKEN"):
        read_workload(file)


def entered(hyperparameters: Mapping[str, str], **algorithm: object) -> dict[str, object]:
    specification = {"TrainingImage": "me/image:1", "TrainingInputMode": "File", **algorithm}
    changes = {"HyperParameters": hyperparameters, "AlgorithmSpecification": specification}
    return {**SCRIPT_MODE, **changes}


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


@pytest.mark.usefixtures("aws_server")
def test_init_asks_the_service_and_writes_the_workload(tmp_path):
    aws = Aws(region="eu-central-1")
    aws.call("sagemaker", "CreateTrainingJob", **SCRIPT_MODE)
    name = str(SCRIPT_MODE["TrainingJobName"])
    done = succeeds("init", "mine", "--from-training-job", name, cwd=tmp_path)
    assert "made: mine/photos.yaml" in done.stdout
    workload = read_workload(tmp_path / "mine" / "photos.yaml")
    assert workload.command == ("python", "train.py")
    plan(workload, tmp_path)


NAME = "photos-2026-11-20"
put = partial(cloudwatch.put_points, job=NAME)
MINUTES = 30
TWO_HOSTS = {"InstanceType": "ml.g5.2xlarge", "InstanceCount": 2}


@pytest.fixture
def aws(aws_server):
    return Aws(region=REGION)


@pytest.fixture
def begin():
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    return now - timedelta(minutes=MINUTES + 5)


def make_job(aws: Aws, resources: Mapping[str, object] = TWO_HOSTS) -> None:
    """Creates a job as somebody does without stoker."""
    aws.call(
        "sagemaker",
        "CreateTrainingJob",
        TrainingJobName=NAME,
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn=ROLE,
        OutputDataConfig={"S3OutputPath": "s3://bucket/out"},
        ResourceConfig={"VolumeSizeInGB": 30, **resources},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
    )


def trained(answers: Answers, begin: datetime, *, minutes: float | None = MINUTES, **more) -> None:
    def change(parsed: dict[str, object]) -> None:
        # moto ends a job at once, and knows nothing of the times of its training.
        parsed.pop("TrainingEndTime", None)
        parsed["TrainingStartTime"] = begin
        if minutes:
            parsed["TrainingEndTime"] = begin + timedelta(minutes=minutes)
        parsed.update(more)

    answers.change("sagemaker", "DescribeTrainingJob", change)


def test_a_job_of_one_group_is_read_host_by_host_without_its_log(aws, answers, begin):
    make_job(aws)
    trained(answers, begin)
    answers.watch("logs", "FilterLogEvents")
    put(aws, "algo-1", begin, CPUUtilization=(800.0, 760.0), GPUUtilization=(40.0, 50.0))
    put(aws, "algo-2", begin, CPUUtilization=(720.0, 720.0), GPUUtilization=(35.0, 35.0))
    hosts, found = observed_load(aws, NAME)
    assert found.cpu_utilization == pytest.approx((0.975 + 0.9) / 2)
    assert found.gpu_utilization == pytest.approx((0.45 + 0.35) / 2)
    assert hosts == "2 x ml.g5.2xlarge"
    assert answers.count("FilterLogEvents") == 0


@pytest.fixture
def finished(aws, begin, monkeypatch):
    """A job with points, for an `Aws` that the verb makes itself."""
    make_job(aws)
    for host in ("algo-1", "algo-2"):
        put(aws, host, begin, CPUUtilization=(792.0, 784.0), GPUUtilization=(41.0, 41.0))
    call = Aws.call

    def changed(self: Aws, service: str, operation: str, **parameters: object) -> object:
        answer = call(self, service, operation, **parameters)
        if operation == "DescribeTrainingJob":
            end = begin + timedelta(minutes=MINUTES)
            answer |= {"TrainingStartTime": begin.isoformat(), "TrainingEndTime": end.isoformat()}
        return answer

    monkeypatch.setattr(Aws, "call", changed)


@pytest.mark.usefixtures("finished")
def test_the_verb_prints_means_and_one_sentence(capsys):
    observe(NAME, as_json=False)
    words = capsys.readouterr().out
    assert "2 x ml.g5.2xlarge   CPU 98%   GPU 41%" in words
    assert "probably CPU-bound" in words
