"""Makes jobs for SageMaker that tests need: a heterogeneous one with little, and one with all."""

import dataclasses
import json
from pathlib import Path

import msgspec

from stoker.environment import RunEnvironment
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.request import plan_request
from stoker.records import (
    Channel,
    Group,
    Json,
    PlatformSettings,
    ProfileSettings,
    Role,
    SageMakerSettings,
    StrategySettings,
)
from support import builders

IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/stoker:1.0"
ROLE = "arn:aws:iam::123456789012:role/stoker-train"
DIGEST = "0123456789abcdef" * 4
KEY = "arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"

SPOT = {"EnableManagedSpotTraining": True, "StoppingCondition": {"MaxWaitTimeInSeconds": 7200}}
SETTINGS = SageMakerSettings(role=ROLE, output_uri="s3://bucket/out", source="examples/mnist")


def group(role: Role, kind: str = "ml.c7i.4xlarge", count: int = 1, name: str = "") -> Group:
    return builders.group(role, kind, count, name=name)


DNN = group("dnn", "ml.g5.2xlarge")
DATA = group("data", count=2)


def settings(**changes: object) -> SageMakerSettings:
    return msgspec.structs.replace(SETTINGS, **changes)


def job(*groups, sagemaker=SETTINGS, **changes) -> JobSpec:
    """Makes a job on `groups`, else on one dnn and two data hosts, with changed fields."""
    spec = JobSpec(
        name="mnist-1",
        command=("python", "train.py", "--epochs", "3"),
        groups=groups or (DNN, DATA),
        run_dir=Path("runs/mnist-1"),
        channels={"train": Channel(uri="s3://bucket/mnist")},
        hyperparameters={"lr": 0.1, "fast": True, "name": "resnet"},
        image=IMAGE,
        settings=RunEnvironment(workload_sha256=DIGEST),
    )
    for_platforms = PlatformSettings(sagemaker=sagemaker)
    return dataclasses.replace(spec, platform_settings=for_platforms, **changes)


def full_job() -> JobSpec:
    return job(
        group("dnn", "ml.p3.8xlarge", 2, name="gpu"),
        msgspec.structs.replace(group("data", count=3, name="cpu"), workers_per_host=14),
        channels={
            "train": Channel(uri="s3://bucket/train/", groups=("cpu",)),
            "labels": Channel(
                uri="s3://bucket/labels.manifest",
                data_type="ManifestFile",
                distribution="ShardedByS3Key",
                mode="FastFile",
                groups=("cpu",),
            ),
            "boxes": Channel(
                uri="s3://bucket/boxes.jsonl",
                data_type="AugmentedManifestFile",
                mode="Pipe",
                attribute_names=("source-ref", "boxes"),
                groups=("data",),
            ),
            "validation": Channel(uri="s3://bucket/validation", groups=("gpu",)),
            "vocabulary": Channel(uri="s3://bucket/vocabulary"),
        },
        environment={"NCCL_DEBUG": "WARN"},
        settings=RunEnvironment(
            workload_sha256=DIGEST,
            strategy=StrategySettings(name="torchrun"),
            replace_dataloader=True,
        ),
        sagemaker=settings(
            source="s3://bucket/code/mnist-7.tar.gz",
            max_run_seconds=172800,
            checkpoint_uri="s3://bucket/checkpoints/mnist",
            request={
                "AlgorithmSpecification": {
                    "MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]
                },
                "ResourceConfig": {"VolumeSizeInGB": 500, "VolumeKmsKeyId": KEY},
                "OutputDataConfig": {"KmsKeyId": KEY},
                "VpcConfig": {
                    "SecurityGroupIds": ["sg-12ab"],
                    "Subnets": ["subnet-1a", "subnet-1b"],
                },
                "Environment": {"TOKENIZERS_PARALLELISM": "false"},
                "EnableInterContainerTrafficEncryption": True,
                "EnableNetworkIsolation": True,
                "Tags": [{"Key": "team", "Value": "vision"}, {"Key": "cost-center", "Value": "42"}],
            },
        ),
    )


def profile_job() -> JobSpec:
    """Makes a job of today's cluster, in profiling mode."""
    return job(
        group("dnn", "ml.g5.2xlarge", 2),
        channels={"train": Channel(uri="s3://bucket/mnist", groups=("data",))},
        settings=RunEnvironment(
            workload_sha256=DIGEST, profile=ProfileSettings(budget_seconds=120)
        ),
        sagemaker=settings(checkpoint_uri="s3://bucket/checkpoints/mnist"),
    )


def homogeneous_job() -> JobSpec:
    """Makes a job on spot hosts, with the code in the image."""
    return job(
        group("dnn", "ml.g5.12xlarge", 2),
        sagemaker=settings(
            source=None,
            max_run_seconds=3600,
            checkpoint_uri="s3://bucket/checkpoints/mnist",
            request=SPOT,
        ),
    )


def plan_body(job: JobSpec) -> dict[str, Json]:
    """Returns the CreateTrainingJob request of a job, a copy to change at will."""
    copy: dict[str, Json] = json.loads(json.dumps(plan_request(job).body))
    return copy
