"""The state of a run: its steps in their tree, their jobs, and why one failed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.sagemaker.state import JobState, job_state
from stoker.records import Json
from stoker.targets.base import Cause, RunState, StepState
from stoker.targets.sagemaker.console import job_url, pipeline_url
from stoker.targets.sagemaker.definition import parsed, started_job, tree_of
from stoker.targets.sagemaker.runs import STATES, Found, describe_job, moment

_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
# The service's word for: what runs in the container failed.
_OWN_FAULT = "AlgorithmError"
_JOBS = ("TrainingJob", "ProcessingJob", "TransformJob")


def state_of(aws: Aws, found: Found) -> RunState:
    """The run or job as it is now.

    Raises:
        PlatformError: If the service refuses.
    """
    return _job_as_run(aws, found) if found.kind == "job" else _run(aws, found)


def _run(aws: Aws, found: Found) -> RunState:
    answer = aws.call("sagemaker", "DescribePipelineExecution", PipelineExecutionArn=found.id)
    name, _, execution = found.run.partition("/")
    parameters = _parameters(aws, found.id)
    status = STATES.get(str(answer.get("PipelineExecutionStatus")), "running")
    known = {
        "Execution.PipelineName": name,
        "Execution.PipelineExecutionId": execution,
        "Execution.PipelineExecutionArn": found.id,
        "Execution.PipelineArn": str(answer.get("PipelineArn", "")),
        **{f"Parameters.{key}": value for key, value in parameters.items()},
    }
    has_ended = status in ("succeeded", "failed", "stopped")
    ended = moment(answer.get("LastModifiedTime")) if has_ended else None
    user = answer.get("CreatedBy")
    domain = _words(user.get("DomainId")) if isinstance(user, Mapping) else ""
    return RunState(
        run=found.run,
        id=found.id,
        pipeline=name,
        status=status,
        url=pipeline_url(found.id, domain=domain),
        began=moment(answer.get("CreationTime")),
        ended=ended,
        reason=_words(answer.get("FailureReason")),
        parameters=parameters,
        steps=tuple(_steps(aws, found.id, known, has_ended=has_ended)),
    )


def _steps(aws: Aws, arn: str, known: Mapping[str, str], *, has_ended: bool) -> Iterator[StepState]:
    told = {
        str(item.get("StepName")): item
        for item in aws.pages(
            "sagemaker",
            "ListPipelineExecutionSteps",
            items="PipelineExecutionSteps",
            PipelineExecutionArn=arn,
            SortOrder="Ascending",
        )
    }
    outcomes = {
        name: outcome for name, item in told.items() if (outcome := _outcome(item.get("Metadata")))
    }
    for depth, step in tree_of(_definition(aws, arn), outcomes=outcomes):
        name = str(step.get("Name"))
        state = StepState(
            name=name,
            kind=str(step.get("Type", "")),
            status="not run" if has_ended else "waiting",
            depth=depth,
        )
        if name in told:
            state = _told(state, told.pop(name))
        yield state
        job = started_job(step, known) if state.status not in ("waiting", "not run") else ""
        described = describe_job(aws, job) if job else None
        if described:
            yield _launched(job_state(described), depth=depth + 1)
    # Steps that the definition does not name, such as those of a loop.
    for name, item in told.items():
        yield _told(StepState(name=name, kind="", status="running"), item)


def _definition(aws: Aws, arn: str) -> Json:
    """The definition that this run has, which may be older than the pipeline's."""
    try:
        answer = aws.call(
            "sagemaker", "DescribePipelineDefinitionForExecution", PipelineExecutionArn=arn
        )
    except AwsError as err:
        if err.is_missing:
            return None
        raise
    return parsed(answer.get("PipelineDefinition"))


def _told(state: StepState, item: Mapping[str, Json]) -> StepState:
    """The step with what the service says of it."""
    metadata = item.get("Metadata")
    about = metadata if isinstance(metadata, Mapping) else {}
    job = next((_member(about, kind, "Arn") for kind in _JOBS if kind in about), "")
    message = _member(about, "Fail", "ErrorMessage")
    kind = state.kind or next(iter(about), "").removesuffix("Job")
    status = STATES.get(str(item.get("StepStatus")), "running")
    reason = message or _words(item.get("FailureReason"))
    attempts = item.get("AttemptCount")
    return replace(
        state,
        kind=kind,
        status=status,
        began=moment(item.get("StartTime")),
        ended=moment(item.get("EndTime")),
        reason=reason,
        cause=_cause(kind, reason) if status == "failed" else None,
        job=job.rpartition("/")[2],
        url=job_url(job) if job else "",
        outcome=_outcome(about),
        attempts=max(1, attempts) if isinstance(attempts, int) else 1,
        is_cached=bool(item.get("CacheHitResult")),
    )


def _cause(kind: str, reason: str) -> Cause:
    if kind == "Fail":
        return "gate"
    if _OWN_FAULT not in reason:
        return "platform"
    # stoker's own exit codes: 3 the gate, 4 the platform that refused.
    found = _EXIT_CODE.search(reason)
    code = int(found.group(1)) if found else None
    return "gate" if code == 3 else "platform" if code == 4 else "workload"


def _launched(job: JobState, *, depth: int) -> StepState:
    """The job that a step started, as a step below it."""
    status = STATES.get(job.status, "running")
    return StepState(
        name=f"job {job.name}",
        kind=", ".join(f"{name} {count} x {kind}" for name, (kind, count) in job.groups.items()),
        status=status,
        depth=depth,
        began=moment(job.began_at),
        ended=moment(job.ended_at),
        reason=job.reason or ("" if job.is_final else job.secondary),
        cause=_job_cause(job),
        job=job.name,
        url=job.url,
    )


def _job_cause(job: JobState) -> Cause | None:
    if job.status != "Failed":
        return None
    return "workload" if _OWN_FAULT in job.reason else "platform"


def _job_as_run(aws: Aws, found: Found) -> RunState:
    answer = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=found.id)
    job = job_state(answer)
    return RunState(
        run=job.name,
        id=job.arn,
        pipeline="",
        status=STATES.get(job.status, "running"),
        url=job.url,
        began=moment(answer.get("CreationTime")),
        ended=moment(job.ended_at),
        reason=job.reason,
        steps=(_launched(job, depth=0), *_transitions(job)),
    )


def _transitions(job: JobState) -> Iterator[StepState]:
    """What the job has gone through, as the service tells it."""
    for index, item in enumerate(job.transitions):
        is_last = index == len(job.transitions) - 1
        until = job.ended_at if is_last else job.transitions[index + 1].since
        yield StepState(
            name=item.status,
            kind="",
            status="running" if is_last and not job.is_final else "succeeded",
            depth=1,
            began=moment(item.since),
            ended=moment(until),
            reason=item.message,
        )


def _parameters(aws: Aws, arn: str) -> dict[str, str]:
    found = aws.pages(
        "sagemaker",
        "ListPipelineParametersForExecution",
        items="PipelineParameters",
        PipelineExecutionArn=arn,
    )
    return {str(item.get("Name")): str(item.get("Value")) for item in found}


def _outcome(metadata: Json) -> str:
    """Of a condition: True or False; empty of anything else."""
    return _member(metadata, "Condition", "Outcome") if isinstance(metadata, Mapping) else ""


def _member(about: Mapping[str, Json], kind: str, key: str) -> str:
    part = about.get(kind)
    return str(part.get(key) or "") if isinstance(part, Mapping) else ""


def _words(value: Json) -> str:
    """A reason's text; moto's server says None in a text."""
    return value if isinstance(value, str) and value != "None" else ""


__all__ = ["state_of"]
