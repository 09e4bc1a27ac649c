"""RUN on the command line: a pipeline's run, a pipeline, or a training job."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from stoker.errors import UsageError
from stoker.platforms.aws import Aws, AwsError
from stoker.records import Json
from stoker.targets.base import RunSummary, State
from stoker.targets.sagemaker.definition import find_pipeline

# A listing of runs shows so many at most: the newest.
MAX_RUNS = 20

_EXECUTION = re.compile(r"arn:[a-z-]+:sagemaker:[a-z0-9-]+:\d{12}:pipeline/([^/]+)/execution/(.+)")
_TRAINING = re.compile(r"arn:[a-z-]+:sagemaker:[a-z0-9-]+:\d{12}:training-job/(.+)")
_PIPELINE = re.compile(r"arn:[a-z-]+:sagemaker:[a-z0-9-]+:\d{12}:pipeline/([^/]+)")

STATES: Mapping[str, State] = {
    "Starting": "running",
    "Executing": "running",
    "InProgress": "running",
    "Stopping": "stopping",
    "Stopped": "stopped",
    "Failed": "failed",
    "CompletedWithFailures": "failed",
    "Succeeded": "succeeded",
    "Completed": "succeeded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What RUN names.

    Attributes:
        kind: A run of a pipeline, or a training job by itself.
        id: ARN of the run; name of the job.
        run: In short: PIPELINE/EXECUTION_ID, or the job's name.
        is_newest: RUN named a pipeline, and this is its newest run.
    """

    kind: Literal["run", "job"]
    id: str
    run: str
    is_newest: bool = False


def region_in(run: str) -> str | None:
    """The region that an ARN names, or None."""
    return run.split(":")[3] or None if run.startswith("arn:") and run.count(":") >= 5 else None


def find_run(aws: Aws, run: str) -> Found:
    """The run or job that RUN names.

    Args:
        aws: The account.
        run: An ARN of a pipeline's run, of a pipeline or of a training job; PIPELINE/EXECUTION_ID;
            a pipeline's name, for its newest run; or a training job's name.

    Raises:
        UsageError: If there is none of that name.
    """
    if found := _EXECUTION.fullmatch(run):
        return Found(kind="run", id=run, run=f"{found.group(1)}/{found.group(2)}")
    if found := _TRAINING.fullmatch(run):
        return Found(kind="job", id=found.group(1), run=found.group(1))
    if found := _PIPELINE.fullmatch(run):
        run = found.group(1)
    if run.startswith("arn:"):
        raise UsageError(f"{run} is no pipeline, no run and no training job", fix=_HOW)
    name, slash, execution = run.partition("/")
    deployed = find_pipeline(aws, name)
    if slash and deployed:
        return Found(kind="run", id=f"{deployed.arn}/execution/{execution}", run=run)
    if deployed:
        newest = next(iter(runs_of(aws, name)), None)
        if newest is None:
            raise UsageError(
                f"pipeline {name} has not run yet", fix="stoker start sagemaker WORKLOAD"
            )
        execution = newest.run.rpartition("/")[2]
        return Found(
            kind="run",
            id=f"{deployed.arn}/execution/{execution}",
            run=newest.run,
            is_newest=True,
        )
    if not slash and is_training_job(aws, run):
        return Found(kind="job", id=run, run=run)
    raise UsageError(
        f"there is no pipeline and no training job {name}",
        where=f"region {aws.region}",
        fix=_HOW,
    )


def runs_of(aws: Aws, pipeline: str) -> tuple[RunSummary, ...]:
    """The newest runs of a pipeline, newest first."""
    answer = aws.call(
        "sagemaker",
        "ListPipelineExecutions",
        PipelineName=pipeline,
        SortBy="CreationTime",
        SortOrder="Descending",
        MaxResults=MAX_RUNS,
    )
    found = answer.get("PipelineExecutionSummaries")
    items = [item for item in (found if isinstance(found, list) else ()) if isinstance(item, dict)]
    newest_first = sorted(items, key=lambda item: str(item.get("StartTime", "")), reverse=True)
    return tuple(_summary(pipeline, item) for item in newest_first[:MAX_RUNS])


def is_training_job(aws: Aws, name: str) -> bool:
    """Whether there is a training job of that name."""
    return describe_job(aws, name) is not None


def describe_job(aws: Aws, name: str) -> dict[str, Json] | None:
    """DescribeTrainingJob; None where there is none."""
    try:
        return aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
    except AwsError as err:
        # The service says so with a general code and words: "Requested resource not found."
        if err.is_missing or "not find" in err.what:
            return None
        raise


def _summary(pipeline: str, item: Mapping[str, Json]) -> RunSummary:
    arn = str(item.get("PipelineExecutionArn", ""))
    reason = item.get("PipelineExecutionFailureReason")
    return RunSummary(
        run=f"{pipeline}/{arn.rpartition('/')[2]}",
        status=STATES.get(str(item.get("PipelineExecutionStatus")), "running"),
        began=moment(item.get("StartTime")),
        reason=str(reason) if reason and reason != "None" else "",
    )


def moment(value: Json) -> datetime | None:
    """A time of an answer."""
    return datetime.fromisoformat(value) if isinstance(value, str) and value else None


_HOW = "RUN is PIPELINE/EXECUTION_ID, a pipeline's name, a training job's name, or an ARN of these"

__all__ = [
    "STATES",
    "Found",
    "describe_job",
    "find_run",
    "moment",
    "region_in",
    "runs_of",
]
