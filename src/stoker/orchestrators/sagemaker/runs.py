"""Runs of an uploaded pipeline, and training jobs, are started, found, shown and stopped."""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from stoker.errors import PlatformError, UsageError
from stoker.orchestrators.base import (
    Cause,
    RunState,
    RunSummary,
    Started,
    State,
    StepState,
    pack_inputs,
)
from stoker.orchestrators.sagemaker.compile import (
    MAX_ARGUMENT,
    ONLY_RUN,
    argument_of,
)
from stoker.orchestrators.sagemaker.pipelines import (
    SageMakerPipeline,
    find_pipeline,
    job_url,
    parameters_in,
    parsed,
    pipeline_url,
    started_job,
    tree_of,
    uploaded_pipeline,
)
from stoker.parameters import (
    Parameter,
    camel,
    is_number,
    parameters_of,
    parse,
    truth_value,
    whole_number,
)
from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.sagemaker.submit import TrainingJobState, find_job, job_state, stop_job
from stoker.records import Json, Workload, nearest
from stoker.records.base import mapping

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
class FoundExecution:
    """RUN names this run of a pipeline, or this job.

    Attributes:
        kind: A run of a pipeline, or a training job on its own.
        id: ARN of the run; name of the job.
        run: Name in short: PIPELINE/EXECUTION_ID, or the job's name.
        is_newest: RUN named a pipeline, and this is its newest run.
    """

    kind: Literal["run", "job"]
    id: str
    run: str
    is_newest: bool = False


def region_in(run: str) -> str | None:
    """Returns the region that an ARN names, or None."""
    return run.split(":")[3] or None if run.startswith("arn:") and run.count(":") >= 5 else None


def find_run(aws: Aws, run: str) -> FoundExecution:
    """Returns the run or job that RUN names.

    Args:
        aws: The account.
        run: An ARN of a pipeline's run, of a pipeline or of a training job; PIPELINE/EXECUTION_ID;
            a pipeline's name, for its newest run; or a training job's name.

    Raises:
        UsageError: If there is none of that name.
    """
    if found := _EXECUTION.fullmatch(run):
        return FoundExecution(kind="run", id=run, run=f"{found.group(1)}/{found.group(2)}")
    if found := _TRAINING.fullmatch(run):
        return FoundExecution(kind="job", id=found.group(1), run=found.group(1))
    if found := _PIPELINE.fullmatch(run):
        run = found.group(1)
    # An ARN of something else: its slashes are not PIPELINE/EXECUTION_ID.
    if run.startswith("arn:"):
        raise UsageError(f"{run} is not a pipeline, a run or a training job", fix=_HOW)
    name, slash, execution = run.partition("/")
    deployed = find_pipeline(aws, name)
    if slash and deployed:
        return FoundExecution(kind="run", id=f"{deployed.arn}/execution/{execution}", run=run)
    if deployed:
        newest = next(iter(runs_of(aws, name)), None)
        if newest is None:
            raise UsageError(
                f"pipeline {name} has not run yet", fix="stoker start sagemaker WORKLOAD"
            )
        execution = newest.run.rpartition("/")[2]
        return FoundExecution(
            kind="run",
            id=f"{deployed.arn}/execution/{execution}",
            run=newest.run,
            is_newest=True,
        )
    if not slash and find_job(aws, run) is not None:
        return FoundExecution(kind="job", id=run, run=run)
    raise UsageError(
        f"there is no pipeline and no training job {name}",
        where=f"region {aws.region}",
        fix=_HOW,
    )


def runs_of(aws: Aws, pipeline: str) -> tuple[RunSummary, ...]:
    """Returns the newest runs of a pipeline, newest first."""
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


# The service's own bound of a training job; a run waits for hosts, too.
_LONGEST_RUN = timedelta(days=30)


def under_way_before(aws: Aws, pipeline: str, execution: str, *, now: datetime) -> tuple[str, ...]:
    """Returns the runs under way that one of a pipeline's runs has to give way to.

    Of two runs that are under way only the later one learns of the other, whichever asks first. A
    later run counts as well if it gives way to nobody any more: another run has handed over to it,
    or it has passed its own check (the run that asks had failed then, and is tried again now).

    Args:
        aws: The account.
        pipeline: Name of the pipeline.
        execution: Id of the run that asks; one that is not listed yet counts as the latest.
        now: Time in UTC.
    """
    found = _under_way(aws, pipeline, now=now)
    mine = next((each for each in found.values() if each.run == f"{pipeline}/{execution}"), None)

    def is_earlier(other: RunSummary) -> bool:
        if mine is None or mine.began is None or other.began is None:
            return True
        # Of two that began at the same moment one has to give way.
        return (other.began, other.run) < (mine.began, mine.run)

    return tuple(
        each.run
        for arn, each in found.items()
        if each is not mine and (is_earlier(each) or _gives_way_no_more(aws, arn))
    )


def _under_way(aws: Aws, pipeline: str, *, now: datetime) -> dict[str, RunSummary]:
    """Returns the pipeline's runs that have not ended, by ARN.

    All that began in the last 30 days are looked at: next to one that trains for a day, an hourly
    schedule leaves a page of refused ones.
    """
    listed = aws.pages(
        "sagemaker",
        "ListPipelineExecutions",
        items="PipelineExecutionSummaries",
        PipelineName=pipeline,
        CreatedAfter=now - _LONGEST_RUN,
        SortBy="CreationTime",
        SortOrder="Descending",
        MaxResults=100,
    )
    found = {str(item.get("PipelineExecutionArn")): _summary(pipeline, item) for item in listed}
    return {arn: each for arn, each in found.items() if each.status in ("running", "stopping")}


def _gives_way_no_more(aws: Aws, arn: str) -> bool:
    # A run that another one has decided for makes no check: the other one made it.
    if _parameters(aws, arn).get("ParentRun"):
        return True
    return any(
        item.get("StepDisplayName") == ONLY_RUN and item.get("StepStatus") == "Succeeded"
        for item in _begun_steps(aws, arn)
    )


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
    """Returns a time of an answer."""
    return datetime.fromisoformat(value) if isinstance(value, str) and value else None


_HOW = "RUN is PIPELINE/EXECUTION_ID, a pipeline's name, a training job's name, or an ARN of these"


# Of the API, for a run and for a schedule alike.
MAX_VALUE = 1024


def start_run(
    aws: Aws,
    workload: Workload,
    *,
    parameters: Sequence[str],
    folder: Path,
    version: str | None = None,
) -> Started:
    """Starts a run; `parameters` are NAME=VALUE.

    Args:
        aws: The account.
        workload: The one whose pipeline it is.
        parameters: Parameters of the run.
        folder: Project folder, with the workload's code.
        version: Version of the pipeline: its number, or an alias; absent: the one uploaded last.

    Raises:
        UsageError: If the pipeline is not uploaded, or a parameter is unknown or invalid.
        PlatformError: If the service refuses.
    """
    deployed = uploaded_pipeline(aws, workload.name)
    values = checked_parameters(deployed, workload, parameters)
    warnings = () if version else out_of_date(deployed, workload, folder=folder)
    answer = aws.call(
        "sagemaker",
        "StartPipelineExecution",
        PipelineName=deployed.name,
        # The API takes 82 characters.
        PipelineExecutionDisplayName=f"{deployed.name}-{time.strftime('%Y%m%d-%H%M%S')}"[:82],
        PipelineParameters=[{"Name": name, "Value": value} for name, value in values.items()],
        ClientRequestToken=secrets.token_hex(16),
        **_version(version),
    )
    arn = str(answer["PipelineExecutionArn"])
    return Started(
        run=f"{deployed.name}/{arn.rpartition('/')[2]}",
        id=arn,
        url=pipeline_url(arn, domain=deployed.domain),
        parameters=values,
        warnings=warnings,
    )


def _version(version: str | None) -> dict[str, object]:
    if version is None:
        return {}
    if version.isascii() and version.isdigit():
        return {"PipelineVersionId": int(version)}
    return {"PipelineVersionAlias": version}


def out_of_date(
    deployed: SageMakerPipeline, workload: Workload, *, folder: Path
) -> tuple[str, ...]:
    """Warns where the uploaded pipeline reads another workload or other code than these."""
    try:
        inputs = pack_inputs(msgspec.structs.replace(workload, platform="sagemaker"), folder=folder)
    except UsageError as err:
        return (f"whether the uploaded pipeline is up to date is not known: {err.what}",)
    # The address of the inputs is a digest of them: the same address, the same workload and code.
    if f'"{inputs.uri}/' in json.dumps(deployed.definition):
        return ()
    return (
        f"the uploaded pipeline {deployed.name} has another workload or code than this folder; "
        "it runs as it was uploaded (stoker upload sagemaker WORKLOAD changes that)",
    )


def checked_parameters(
    deployed: SageMakerPipeline, workload: Workload, texts: Sequence[str]
) -> dict[str, str]:
    """Returns NAME=VALUE texts as the uploaded pipeline names them, with checked values.

    Raises:
        UsageError: For a name that the uploaded pipeline does not have (with the nearest one),
            or an invalid value.
    """
    there = parameters_in(deployed.definition)
    known = {p.camel_name: p for p in parameters_of(workload)}
    values: dict[str, str] = {}
    for text in texts:
        typed, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        name = camel(typed.strip())
        # The service itself does not refuse unknown names.
        if name not in there:
            raise _unknown(typed.strip(), deployed, there, known)
        if name in known:
            # The steps would parse it by the same rules, after hosts have been rented.
            checked = parse([f"{known[name].name}={value}"], workload=workload)
            values[name] = checked[known[name].name]
            if known[name].name == "reuse_profile":
                # The steps read FOLDER/profile.json, one object: two slashes would be another one.
                values[name] = values[name].rstrip("/")
        else:
            values[name] = _checked(name, value, there[name])
        # The steps get the workload's own parameters as arguments.
        limit = MAX_ARGUMENT - len(argument_of(known[name], "")) if name in known else MAX_VALUE
        limit = min(limit, _longest(deployed.definition, name))
        if len(values[name]) > limit:
            raise UsageError(
                f"--param {typed}: its value has {len(values[name])} characters, at most {limit}",
                fix="set a longer value in the workload and upload that",
            )
    return values


def _longest(definition: Json, name: str) -> int:
    """Returns how long a parameter's value may be where it is a word of a step's command."""
    longest = MAX_VALUE
    for _, step in tree_of(definition, outcomes={}):
        arguments = step.get("Arguments")
        about = arguments.get("AppSpecification") if isinstance(arguments, Mapping) else None
        words = about.get("ContainerArguments") if isinstance(about, Mapping) else None
        for word in words if isinstance(words, list) else ():
            join = word.get("Std:Join") if isinstance(word, Mapping) else None
            parts = join.get("Values") if isinstance(join, Mapping) else [word]
            if isinstance(parts, list) and {"Get": f"Parameters.{name}"} in parts:
                fixed = sum(len(part) for part in parts if isinstance(part, str))
                longest = min(longest, MAX_ARGUMENT - fixed)
    return longest


def _unknown(
    typed: str,
    deployed: SageMakerPipeline,
    there: Mapping[str, Mapping[str, Json]],
    known: Mapping[str, Parameter],
) -> UsageError:
    if camel(typed) in known:
        return UsageError(
            f"the uploaded pipeline {deployed.name} has no parameter {typed}, the workload has",
            fix="it was uploaded by an older stoker or workload: stoker upload sagemaker WORKLOAD",
        )
    names = {(known[name].name if name in known else name): name for name in there}
    hint = nearest(typed, sorted(names))
    if hint.startswith("known"):
        hint = nearest(camel(typed), sorted(there))
    return UsageError(f"a run of {deployed.name} has no parameter {typed}", fix=hint)


def _checked(name: str, value: str, parameter: Mapping[str, Json]) -> str:
    """Checks a parameter that only the pipeline knows, one of its own function."""
    kind, choices = parameter.get("Type"), parameter.get("EnumValues")
    if kind != "String" or choices:
        value = value.strip()
    if kind == "Integer":
        whole = whole_number(value)
        is_count = name.endswith(("InstanceCount", "Workers"))
        if whole is None or (is_count and whole.startswith("-")):
            raise UsageError(f"{name}={value}: expected a whole number", fix=f"as {name}=3")
        value = whole
    if kind == "Float" and not is_number(value):
        raise UsageError(f"{name}={value}: expected a number", fix=f"as {name}=0.5")
    if kind == "Boolean":
        value = truth_value(value)
        if value not in ("true", "false"):
            raise UsageError(f"{name}={value} is not possible", fix="use true, false")
    if isinstance(choices, list) and value not in choices:
        words = ", ".join(str(choice) for choice in choices)
        raise UsageError(f"{name}={value} is not possible", fix=f"use {words}")
    return value


_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
# The service's word for a failure in the container.
_OWN_FAULT = "AlgorithmError"
_JOBS = ("TrainingJob", "ProcessingJob", "TransformJob")


def state_of(aws: Aws, found: FoundExecution) -> RunState:
    """Returns the run or job as it is now.

    Raises:
        PlatformError: If the service refuses.
    """
    return _job_as_run(aws, found) if found.kind == "job" else _run(aws, found)


def _run(aws: Aws, found: FoundExecution) -> RunState:
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
    # A run has no time of its end; it changes no more after it.
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
    told = {str(item.get("StepName")): item for item in _begun_steps(aws, arn)}
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
        # The service lists steps that have begun; the definition has the others.
        if name in told:
            state = _told(state, told.pop(name))
        yield state
        # A launched training is a job of its own: the service does not know that it is the step's.
        job = started_job(step, known) if state.status not in ("waiting", "not run") else ""
        for launched in _tries(aws, job) if job else ():
            described = find_job(aws, launched)
            if described:
                yield _launched(job_state(described), depth=depth + 1)
    # Steps that the definition does not name, such as those of a loop.
    for name, item in told.items():
        yield _told(StepState(name=name, kind="", status="running"), item)


def _tries(aws: Aws, job: str) -> Sequence[str]:
    """Returns the names of a training's jobs: a further attempt, or plan, has one of its own."""
    listed = aws.pages(
        "sagemaker",
        "ListTrainingJobs",
        items="TrainingJobSummaries",
        NameContains=job,
        SortBy="CreationTime",
        SortOrder="Ascending",
    )
    try:
        found = [str(item.get("TrainingJobName")) for item in listed]
    except AwsError as err:
        # Whoever may not list still sees the first one.
        if not err.is_denied:
            raise
        found = []
    return [name for name in found if name == job or name.startswith(f"{job}-")] or [job]


def _begun_steps(aws: Aws, arn: str) -> Iterator[Mapping[str, Json]]:
    return aws.pages(
        "sagemaker",
        "ListPipelineExecutionSteps",
        items="PipelineExecutionSteps",
        PipelineExecutionArn=arn,
        SortOrder="Ascending",
    )


def _definition(aws: Aws, arn: str) -> Json:
    """Returns the definition that this run has, which may be older than the pipeline's."""
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
    """Returns the step with what the service says of it."""
    metadata = item.get("Metadata")
    about = mapping(metadata)
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
    # Without that word the container was not what failed: no hosts, no image, no permission.
    if _OWN_FAULT not in reason:
        return "platform"
    # stoker's own exit codes: 3 the gate, 4 the platform that refused.
    found = _EXIT_CODE.search(reason)
    code = int(found.group(1)) if found else None
    return "gate" if code == 3 else "platform" if code == 4 else "workload"


def _launched(job: TrainingJobState, *, depth: int) -> StepState:
    """Returns the job that a step started, as a step below it."""
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


def _job_cause(job: TrainingJobState) -> Cause | None:
    if job.status != "Failed":
        return None
    return "workload" if _OWN_FAULT in job.reason else "platform"


def _job_as_run(aws: Aws, found: FoundExecution) -> RunState:
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


def _transitions(job: TrainingJobState) -> Iterator[StepState]:
    """Yields what the job has gone through, as the service tells it."""
    for index, item in enumerate(job.transitions):
        is_last = index == len(job.transitions) - 1
        # The service tells when a state began; it ends with the next one.
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
    """Returns the outcome of a condition: True or False; empty for anything else."""
    return _member(metadata, "Condition", "Outcome") if isinstance(metadata, Mapping) else ""


def _member(about: Mapping[str, Json], kind: str, key: str) -> str:
    part = about.get(kind)
    return str(part.get(key) or "") if isinstance(part, Mapping) else ""


def _words(value: Json) -> str:
    """Returns a reason's text; moto's server says None in a text."""
    return value if isinstance(value, str) and value != "None" else ""


# A container has 120 s to end; then come the upload of its output and the steps after it.
STOP_SECONDS = 900.0
POLL_SECONDS = 5.0


def stop_run(aws: Aws, found: FoundExecution) -> RunState:
    """Asks the run or job to stop and waits until it has.

    The training job that a step of the run started is stopped as well: nobody else would.

    Raises:
        PlatformError: If it has not stopped after `STOP_SECONDS`; it goes on stopping.
    """
    state = state_of(aws, found)
    if not state.has_ended and found.kind == "run":
        aws.call(
            "sagemaker",
            "StopPipelineExecution",
            PipelineExecutionArn=found.id,
            ClientRequestToken=secrets.token_hex(16),
        )
    elif not state.has_ended:
        stop_job(aws, found.id)
    deadline = aws.clock() + STOP_SECONDS
    asked: set[str] = set()
    while True:
        state = state_of(aws, found)
        left = [
            step.job
            for step in state.steps
            if step.name == f"job {step.job}" and step.status in ("running", "stopping")
        ]
        if state.has_ended and not left:
            return state
        # Only then: a step that is stopped stops its job itself, unless it is killed.
        if state.has_ended:
            for job in (job for job in left if job not in asked):
                stop_job(aws, job)
                asked.add(job)
        if aws.clock() >= deadline:
            raise PlatformError(
                f"{state.run} is {state.status} after {STOP_SECONDS:.0f} s",
                where=state.url,
                fix=f"it was asked to stop; see later: stoker status sagemaker {state.run}",
            )
        aws.sleep(POLL_SECONDS)
