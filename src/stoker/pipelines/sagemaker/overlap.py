"""Which runs a run has to give way to, under `overlap: refuse`; a step of the pipeline asks it."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from stoker.pipelines.sagemaker.compile import ONLY_RUN
from stoker.platforms.aws import Aws
from stoker.records import Json

UNDER_WAY = ("Starting", "Executing", "InProgress", "Stopping")
# The service's own bound of a training job; a run waits for hosts, too.
_LONGEST_RUN = timedelta(days=30)


def under_way_before(
    pipeline: str, execution: str, *, aws: Aws | None = None, now: datetime | None = None
) -> tuple[str, ...]:
    """Returns the runs under way that one of a pipeline's runs has to give way to.

    Of two runs that are under way only the later one learns of the other, whichever asks first. A
    later run counts as well if it has passed its own check: the run that asks had failed then, and
    is tried again now.

    Args:
        pipeline: Name of the pipeline.
        execution: Id of the run that asks; one that is not listed yet counts as the latest.
    """
    aws = aws or Aws()
    # Next to a run that trains for a day, an hourly schedule leaves a page of refused ones.
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
        str(item.get("PipelineExecutionArn")): str(item.get("StartTime") or "")
        for item in listed
        if item.get("PipelineExecutionStatus") in UNDER_WAY
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


def steps_of(aws: Aws, arn: str) -> list[Mapping[str, Json]]:
    """Returns the steps of a run that have begun, in their order."""
    asked = {"PipelineExecutionArn": arn, "SortOrder": "Ascending"}
    key = "PipelineExecutionSteps"
    return list(aws.pages("sagemaker", "ListPipelineExecutionSteps", items=key, **asked))
