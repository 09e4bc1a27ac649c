"""Compiles a workload's pipeline on SageMaker for tests."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from stoker.pipelines.base import Compiled
from stoker.records import Channel, Cluster, Gate, Json, SageMakerSettings, TodaysGroup, Workload
from stoker.sagemaker import compile_pipeline
from support.sagemaker_definition import resolved, steps
from support.sagemaker_job import IMAGE, ROLE

# The SDK only takes clients from it.
SESSION = SimpleNamespace(
    boto_session=SimpleNamespace(client=lambda service: None), local_mode=False
)
ROOT = Path(__file__).resolve().parents[2]

WORKLOAD = Workload(
    name="mnist",
    platform="sagemaker",
    command=("python", "train.py"),
    image=IMAGE,
    cluster=Cluster(dnn=TodaysGroup(instance_type="ml.g5.2xlarge")),
    channels={"train": Channel(uri="s3://bucket/mnist/")},
    hyperparameters={"epochs": 3, "lr": 0.1},
    gate=(Gate(metric="accuracy", min=0.94),),
    sagemaker=SageMakerSettings(role=ROLE, output_uri="s3://bucket/out"),
)


@cache
def compiled() -> Compiled:
    return compile_pipeline(WORKLOAD, folder=ROOT)


def definition() -> dict[str, Json]:
    document: dict[str, Json] = json.loads(compiled().definition)
    return document


def step_named(name: str) -> dict[str, Json]:
    return next(step for step in steps(definition()) if step["Name"] == name)


def arguments_of(name: str) -> list[str]:
    """Returns what a small step's container hands to stoker, in a run with the defaults."""
    request = step_named(name)["Arguments"]
    words = resolved(request["AppSpecification"]["ContainerArguments"], definition())
    return [str(word) for word in words]
