"""Compiles a workload's pipeline on SageMaker for tests, and resolves it as a run does."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from stoker.orchestrators.sagemaker.compile import Compiled, compile_pipeline
from stoker.records import (
    Channel,
    Cluster,
    Decision,
    Gate,
    Group,
    Json,
    SageMakerSettings,
    TodaysGroup,
    Workload,
)
from support import sample_records
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


def decision(*, data: Group | None = None) -> Decision:
    """Makes a heterogeneous decision; of one dnn group only where `data` is left out of it."""
    dnn = Group(name="dnn", role="dnn", instance_type="g5.2xlarge", count=1, workers_per_host=2)
    groups = (dnn, data) if data else (dnn,)
    record = sample_records.decision()
    plan = msgspec.structs.replace(record.plan, groups=groups)
    return msgspec.structs.replace(record, workload_sha256=None, plan=plan)


DATA = Group(name="data", role="data", instance_type="ml.c7i.4xlarge", count=2, workers_per_host=15)


@cache
def compiled(train_step: str = "launched") -> Compiled:
    """Compiles the sample's pipeline, once per test session."""
    pinned = decision(data=DATA) if train_step == "native" else None
    return compile_pipeline(WORKLOAD, train_step=train_step, decision=pinned, folder=ROOT)


def definition(train_step: str = "launched") -> dict[str, Json]:
    """Returns the pipeline's definition as a document."""
    document: dict[str, Json] = json.loads(compiled(train_step).definition)
    return document


def steps(document: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """Yields all steps, those inside conditions, too."""

    def walk(listed: Json) -> Iterator[dict[str, Json]]:
        assert isinstance(listed, list)
        for step in listed:
            yield step
            for branch in ("IfSteps", "ElseSteps"):
                yield from walk(step["Arguments"].get(branch, []))

    return walk(document["Steps"])


def step_named(name: str, train_step: str = "launched") -> dict[str, Json]:
    """Finds one step of the sample's pipeline."""
    return next(step for step in steps(definition(train_step)) if step["Name"] == name)


def resolved(
    value: Json, document: Mapping[str, Json], *, reuse_profile: str | None = None
) -> Json:
    """Resolves a value as in a run with the defaults of all parameters but `reuse_profile`."""
    listed = document["Parameters"]
    assert isinstance(listed, list)
    known = {f"Parameters.{p['Name']}": p["DefaultValue"] for p in listed}
    if reuse_profile is not None:
        known["Parameters.ReuseProfile"] = reuse_profile
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
            assert isinstance(join, Mapping)
            assert isinstance(join["Values"], list)
            return str(join["On"]).join(str(resolve(item)) for item in join["Values"])
        if set(value) == {"Std:JsonGet"}:
            return "a value of a file"
        return {key: resolve(item) for key, item in value.items()}

    return resolve(value)


def arguments_of(name: str, train_step: str = "launched") -> list[str]:
    """Returns what a small step's container hands to stoker, in a run with the defaults."""
    request = step_named(name, train_step)["Arguments"]
    words = resolved(
        request["AppSpecification"]["ContainerArguments"],  # type: ignore[index,call-overload]
        definition(train_step),
    )
    assert isinstance(words, list)
    return [str(word) for word in words]
