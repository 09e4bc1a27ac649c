"""Active runs that a new run has to give way to, with `overlap: refuse`."""

from datetime import UTC, datetime, timedelta

from stoker.errors import PlatformError
from stoker.pipelines.sagemaker.compile import ONLY_RUN
from stoker.platforms.aws import Aws
from stoker.records.base import Document, text

ACTIVE = ("Starting", "Executing", "InProgress", "Stopping")
# The service's own bound of a training job; a run waits for hosts, too.
_LONGEST_RUN = timedelta(days=30)


def refuse_overlap(pipeline: str, execution: str) -> None:
    """Raises PlatformError if a run has to give way to another one."""
    if others := active_before(pipeline, execution):
        raise PlatformError(
            f"another run of {pipeline} is active: {', '.join(others)}",
            where="the workload says overlap: refuse",
            fix=f"start again when it has ended, or: stoker stop sagemaker {others[0]}",
        )


def active_before(
    pipeline: str, execution: str, *, aws: Aws | None = None, now: datetime | None = None
) -> tuple[str, ...]:
    """Returns the active runs of a pipeline that one of its runs has to give way to.

    These are the earlier ones, and later ones that have passed their own check: then the asking run
    is a retry.

    Args:
        execution: Id of the run that asks; one that is not listed yet counts as the latest.
    """
    aws = aws or Aws()
    listed = aws.pages(
        "sagemaker",
        "ListPipelineExecutions",
        items="PipelineExecutionSummaries",
        PipelineName=pipeline,
        CreatedAfter=(now or datetime.now(UTC)) - _LONGEST_RUN,
        SortBy="CreationTime",
        SortOrder="Descending",
        MaxResults=100,
    )
    began = {
        str(item.get("PipelineExecutionArn")): text(item, "StartTime")
        for item in listed
        if item.get("PipelineExecutionStatus") in ACTIVE
    }
    mine = next((arn for arn in began if arn.endswith(f"/{execution}")), None)

    def is_before(arn: str) -> bool:
        # Of two that began at the same moment one has to give way; one without a time counts.
        if mine is None or not (began[arn] and began[mine]):
            return True
        return (began[arn], arn) < (began[mine], mine) or any(
            (step.get("StepDisplayName"), step.get("StepStatus")) == (ONLY_RUN, "Succeeded")
            for step in steps_of(aws, arn)
        )

    return tuple(
        f"{pipeline}/{arn.rpartition('/')[2]}" for arn in began if arn != mine and is_before(arn)
    )


def steps_of(aws: Aws, arn: str) -> list[Document]:
    asked = {"PipelineExecutionArn": arn, "SortOrder": "Ascending"}
    key = "PipelineExecutionSteps"
    return list(aws.pages("sagemaker", "ListPipelineExecutionSteps", items=key, **asked))
