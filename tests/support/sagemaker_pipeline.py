"""Compiles a workload's pipeline on SageMaker for tests, and resolves it as a run does."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from stoker.pipelines.sagemaker.compile import Compiled, compile_pipeline
from stoker.records import Channel, Cluster, Gate, Json, SageMakerSettings, TodaysGroup, Workload
from support.sagemaker_job import IMAGE, ROLE

ROOT = Path(__file__).resolve().parents[2]
EXECUTION_ID = "abcdefghijkl"

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


def steps(document: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    def walk(listed: Json) -> Iterator[dict[str, Json]]:
        for step in listed:
            yield step
            for branch in ("IfSteps", "ElseSteps"):
                yield from walk(step["Arguments"].get(branch, []))

    return walk(document["Steps"])


def step_named(name: str) -> dict[str, Json]:
    return next(step for step in steps(definition()) if step["Name"] == name)


def resolved(value, document, *, reuse_profile=None) -> Json:
    """Resolves a value as in a run with the defaults of all parameters but `reuse_profile`."""
    listed = document["Parameters"]
    known = {f"Parameters.{p['Name']}": p["DefaultValue"] for p in listed}
    if reuse_profile is not None:
        known["Parameters.reuse_profile"] = reuse_profile
    known["Execution.PipelineExecutionId"] = EXECUTION_ID

    def resolve(value: Json) -> Json:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        if set(value) == {"Get"}:
            named = str(value["Get"])
            return known.get(named, f"s3://bucket/{named}")
        if set(value) == {"Std:Join"}:
            join = value["Std:Join"]
            return str(join["On"]).join(str(resolve(item)) for item in join["Values"])
        if set(value) == {"Std:JsonGet"}:
            return "a value of a file"
        return {key: resolve(item) for key, item in value.items()}

    return resolve(value)


def arguments_of(name: str) -> list[str]:
    """Returns what a small step's container hands to stoker, in a run with the defaults."""
    request = step_named(name)["Arguments"]
    words = resolved(request["AppSpecification"]["ContainerArguments"], definition())
    return [str(word) for word in words]
