"""The steps of a run of SageMaker Pipelines: seconds, cache, reason, log; and its exit code."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from stoker.errors import GateError, PlatformError, ServiceError, WorkloadError
from stoker.pipelines.base import RunState, RunStep
from stoker.pipelines.sagemaker.compile import COMPARE, HAS_CHANGED
from stoker.platforms.aws import Aws
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings, text
from stoker.records.memory import NOTHING_CHANGED
from stoker.records.outcome import exit_code_of_words

_EXIT_CODE = re.compile(r"(?i)exit code:? (\d+)\b")
_LAST_LINES = 20
# Of a stream, from its end: empty ones are rare.
_MAX_PAGES = 5
_CODES = (GateError.exit_code, WorkloadError.exit_code)
# Where the service keeps the lines of a step's job, by the name of its ARN.
_LOG_GROUPS = {
    "ProcessingJob": ("processing-job", "/aws/sagemaker/ProcessingJobs"),
    "TrainingJob": ("training-job", "/aws/sagemaker/TrainingJobs"),
}


def exit_code_of(steps: Sequence[Document]) -> int:
    """Returns the exit code of a run that did not succeed: 3 a gate, 6 the training, else 4.

    A Fail step is what a gate's condition leads to; it also ends the run of a training job that
    crashed, and only the words tell the two apart.
    """
    failed = [step for step in steps if step.get("StepStatus") == "Failed"]
    codes = {_code_of(step) for step in failed}
    return next((code for code in _CODES if code in codes), PlatformError.exit_code)


def _code_of(step: Document) -> int:
    reason = _reason_of(step)
    if item_at(step, "Metadata", "Fail"):
        return exit_code_of_words(reason, default=GateError.exit_code)
    match = _EXIT_CODE.search(reason)
    if match and int(match[1]) in _CODES:
        return int(match[1])
    return PlatformError.exit_code


def _reason_of(step: Document) -> str:
    told = item_at(step, "Metadata", "Fail", "ErrorMessage")
    return str(step.get("FailureReason") or told or "")


def run_step(step: Document, *, aws: Aws, is_over: bool) -> RunStep:
    """Returns a step as `stoker status` shows it, a failed one of an ended run with its lines.

    Args:
        step: As ListPipelineExecutionSteps lists it.
        aws: Where its log is.
        is_over: Whether the run has ended.
    """
    shown = RunStep(name=str(step.get("StepName")), status=text(step, "StepStatus"))
    if not item_at(step, "CacheHitResult", "SourcePipelineExecutionArn"):
        log = _log_of(step, region=aws.region)
        shown = dataclasses.replace(shown, seconds=_seconds(step), log=log)
    elif shown.status == "Succeeded":
        # Neither time nor log: they are those of another run.
        return dataclasses.replace(shown, status="cached")
    if shown.status != "Failed":
        return shown
    shown = dataclasses.replace(shown, reason=_reason_of(step))
    if is_over:
        return dataclasses.replace(shown, lines=last_lines(aws, step))
    return shown


def _seconds(step: Document) -> float | None:
    times = [_time(step.get(key)) for key in ("StartTime", "EndTime")]
    began, ended = times
    if began and ended:
        return max((ended - began).total_seconds(), 0.0)
    return None


def _time(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        return None


def _log_of(step: Document, *, region: str | None) -> str:
    """Returns the command that prints the log of a step's job; empty for a step without one."""
    group, name = log_place(step)
    if not name:
        return ""
    command = (
        f"aws logs filter-log-events --log-group-name {group} --log-stream-name-prefix {name}/ "
        "--query 'events[].[message]' --output text"
    )
    if region:
        return f"{command} --region {region}"
    return command


def log_place(step: Document) -> tuple[str, str]:
    """Returns the log group and the name of a step's job; empty texts for a step without one."""
    for kind, (word, group) in _LOG_GROUPS.items():
        arn = text(step, "Metadata", kind, "Arn")
        if f":{word}/" in arn:
            return group, arn.rpartition("/")[2]
    return "", ""


def last_lines(aws: Aws, step: Document) -> tuple[str, ...]:
    """Returns the last lines of a step's job; () if it has none, or they may not be read."""
    group, name = log_place(step)
    if not name:
        return ()
    asked = {"logGroupName": group, "logStreamNamePrefix": f"{name}/"}
    try:
        streams = mappings(aws.call("logs", "DescribeLogStreams", **asked), "logStreams")
        if not streams:
            return ()
        return _last_messages(aws, group, str(streams[-1].get("logStreamName")))
    except ServiceError:
        # The status is shown without them.
        return ()


def _last_messages(aws: Aws, group: str, stream: str) -> tuple[str, ...]:
    """Returns the last messages of a log stream, whose last pages may be empty."""
    asked = {"logGroupName": group, "logStreamName": stream, "limit": _LAST_LINES}
    token: dict[str, Json] = {}
    for _ in range(_MAX_PAGES):
        answer = aws.call("logs", "GetLogEvents", **asked, startFromHead=False, **token)
        events = mappings(answer, "events")
        messages = [text(event, "message").rstrip() for event in events]
        if any(messages):
            return tuple(message for message in messages if message)
        earlier: dict[str, Json] = {"nextToken": answer.get("nextBackwardToken")}
        # At the stream's beginning the service returns the token that it was given.
        if earlier in (token, {"nextToken": None}):
            break
        token = earlier
    return ()


def with_reason(
    state: RunState, *, failed: RunStep | None, listed: Sequence[Document], aws: Aws
) -> RunState:
    """Returns a run with the reason of its failed step, or why it has trained nothing.

    Args:
        state: The run, without its steps.
        failed: Its first failed step. None: none has.
        listed: Its steps, as ListPipelineExecutionSteps lists them.
        aws: Where the logs are.
    """
    if state.exit_code == 0:
        return dataclasses.replace(state, reason=skipped_words(aws, listed) or state.reason)
    if failed and failed.reason and not state.reason:
        return dataclasses.replace(state, reason=f"{failed.name}: {failed.reason}")
    return state


def skipped_words(aws: Aws, steps: Sequence[Document]) -> str:
    """Returns why a run has trained nothing, in its own words; empty: it has, or would have.

    Args:
        aws: Where the logs are.
        steps: As ListPipelineExecutionSteps lists them.
    """
    outcomes = [
        item_at(step, "Metadata", "Condition", "Outcome")
        for step in steps
        if str(step.get("StepName")).startswith(HAS_CHANGED)
    ]
    if not outcomes or set(outcomes) != {"False"}:
        return ""
    generic = f"{NOTHING_CHANGED} the last run that passed: skipped"
    compared = (step for step in steps if step.get("StepDisplayName") == COMPARE)
    lines = itertools.chain.from_iterable(last_lines(aws, step) for step in compared)
    return next((line for line in lines if line.startswith(NOTHING_CHANGED)), generic)


def step_names(definition: str) -> tuple[str, ...]:
    """Returns the names of a definition's steps in their order; () if it is none."""
    try:
        document: Json = json.loads(definition)
    except ValueError:
        return ()
    return tuple(_names(mappings(mapping(document), "Steps")))


def _names(steps: Sequence[Document]) -> Iterator[str]:
    for step in steps:
        yield str(step.get("Name"))
        for side in ("IfSteps", "ElseSteps"):
            yield from _names(mappings(mapping(step, "Arguments"), side))
