"""What jobs of a guide leave: records of a training that waits, and where a service has them."""

import contextlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import msgspec
from botocore.awsrequest import AWSResponse

from stoker.profile.rank_results import (
    AcceleratorOnly,
    AsIs,
    BatchFacts,
    Drain,
    LoaderFacts,
    Quartiles,
    RankResult,
    quartiles,
)
from stoker.records import write_json
from support import sample_records
from support.builders import clusters


def at(seconds: float) -> Quartiles:
    return quartiles([seconds] * 60)


# Three cores that feed one GPU: it would take 30 ms a step, and waits for 53 more.
STARVED = RankResult(
    rank=0,
    world_size=1,
    host="algo-1",
    vcpus=3,
    ranks_on_host=1,
    steps=200,
    loaders=1,
    as_is=AsIs(
        step_seconds=at(0.083),
        wait_seconds=at(0.053),
        trainer_cpu_seconds=0.01,
        children_cpu_seconds=0.24,
        receive_seconds=0.0005,
        epoch_batches=234,
    ),
    accelerator=AcceleratorOnly(
        step_seconds=at(0.03), trainer_cpu_seconds=at(0.01), cached_batches=8
    ),
    drains=tuple(
        Drain(
            workers=workers,
            cpu_seconds=at(0.24),
            wall_seconds=at(0.24),
            batches_per_second=workers / 0.24,
        )
        for workers in (1, 3)
    ),
    batch=BatchFacts(samples=256, num_bytes=256 * 96 * 96),
    loader=LoaderFacts(
        num_workers=3, pin_memory=True, persistent_workers=True, dataset="__main__.Digits"
    ),
)


def records(folder: Path, *, host: str, data: str) -> Path:
    folder.mkdir()
    (folder / "profile-rank0.json").write_bytes(msgspec.json.encode(STARVED))
    found = {"groups": clusters(host, data), "metrics": {"accuracy": 0.98}}
    training = msgspec.structs.replace(sample_records.training(), **found)
    write_json(folder / "training.json", training)
    return folder


def archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        packed.add(folder, arcname="stoker")
    return content.getvalue()


@contextlib.contextmanager
def jobs_leave(content: bytes) -> Iterator[None]:
    """Every training job has left this output by the time that it was made."""
    boto3.setup_default_session()
    session = boto3.DEFAULT_SESSION

    def made(params: Mapping[str, Any], **_: object) -> None:
        body = json.loads(params["body"])
        place = body["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://")
        bucket, _, prefix = place.partition("/")
        key = f"{prefix}/{body['TrainingJobName']}/output/output.tar.gz"
        boto3.Session().client("s3").put_object(Bucket=bucket, Key=key, Body=content)

    def no_steps(**_: object) -> tuple[AWSResponse, object]:
        return AWSResponse("", 200, {}, None), {"PipelineExecutionSteps": []}

    events = session.events
    events.register("before-call.sagemaker.CreateTrainingJob", made)
    # Which moto does not have.
    events.register("before-call.sagemaker.ListPipelineExecutionSteps", no_steps)
    try:
        yield
    finally:
        boto3.setup_default_session()
