"""Makes jobs for SageMaker that tests need: a heterogeneous one with little, and one with all."""

import dataclasses
import json
from pathlib import Path

import msgspec

from stoker.environment import RunSettings
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.request import plan_request
from stoker.records import (
    Channel,
    Group,
    Json,
    PlatformSettings,
    Role,
    SageMakerSettings,
)
from support import builders

IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/stoker:1.0"
ROLE = "arn:aws:iam::123456789012:role/stoker-train"
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
        settings=RunSettings(),
    )
    for_platforms = PlatformSettings(sagemaker=sagemaker)
    return dataclasses.replace(spec, platform_settings=for_platforms, **changes)


def plan_body(job: JobSpec) -> dict[str, Json]:
    """Returns the CreateTrainingJob request of a job, a copy to change at will."""
    copy: dict[str, Json] = json.loads(json.dumps(plan_request(job).body))
    return copy
