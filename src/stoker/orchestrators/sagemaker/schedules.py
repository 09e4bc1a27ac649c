"""Schedules of a pipeline are kept in EventBridge Scheduler."""

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from stoker.errors import UsageError
from stoker.orchestrators.base import Action, Schedule, Timing, schedule_name
from stoker.orchestrators.cron import next_run, period
from stoker.orchestrators.sagemaker.pipelines import (
    SageMakerPipeline,
    parameters_in,
    uploaded_pipeline,
)
from stoker.orchestrators.sagemaker.runs import checked_parameters
from stoker.platforms.aws import Aws, AwsError
from stoker.records import Json, Workload, nearest
from stoker.records.base import mapping

# The scheduler retries a start: a run that is an hour late is better left to the next one.
RETRIES = 3
MAX_AGE_SECONDS = 3600
_PREFIX = "stoker-"
SCHEDULE_GROUP = "default"
_NAME = re.compile(r"[0-9a-zA-Z_.-]{1,64}")
# Keys of a schedule that stoker sets; the service adds others.
_OURS = ("ScheduleExpression", "ScheduleExpressionTimezone", "State", "StartDate")


def add_schedule(
    aws: Aws,
    workload: Workload,
    *,
    timing: Timing,
    parameters: Sequence[str],
    name: str | None,
    now: datetime,
) -> Schedule:
    """Creates a schedule, or updates the one of that name.

    Raises:
        UsageError: If the pipeline is not uploaded, no role is set, or a parameter is invalid.
        PlatformError: If the service refuses.
    """
    role = workload.sagemaker.schedule_role if workload.sagemaker else None
    if role is None:
        raise UsageError(
            "no role with which the scheduler may start the pipeline",
            where=f"workload {workload.name}, key sagemaker.schedule_role",
            fix="name one there, and make it: stoker render cloudformation WORKLOAD",
        )
    deployed = uploaded_pipeline(aws, workload.name)
    full_name = _full_name(workload, name)
    values = _values(deployed, workload, parameters)
    there = _get(aws, full_name)
    if there:
        _refuse_foreign(there, full_name, deployed)
    queue = workload.sagemaker.dead_letter_queue if workload.sagemaker else None
    request: dict[str, object] = {
        "Name": full_name,
        "GroupName": SCHEDULE_GROUP,
        "Description": f"Starts the pipeline {deployed.name}; made by stoker",
        "ScheduleExpression": timing.expression,
        "ScheduleExpressionTimezone": timing.time_zone,
        "State": "ENABLED",
        # The API wants it: off means at the minute.
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": {
            "Arn": deployed.arn,
            "RoleArn": role,
            "SageMakerPipelineParameters": {
                "PipelineParameterList": [
                    {"Name": key, "Value": value} for key, value in sorted(values.items())
                ]
            },
            "RetryPolicy": {
                "MaximumRetryAttempts": RETRIES,
                "MaximumEventAgeInSeconds": MAX_AGE_SECONDS,
            },
            **({"DeadLetterConfig": {"Arn": queue}} if queue else {}),
        },
    }
    every = period(timing.expression)
    kept = _time(there.get("StartDate")) if there else None
    is_same_rate = bool(there) and there.get("ScheduleExpression") == timing.expression
    if every is not None:
        # A new rate begins after one period: AWS's default would be at once. Where the rate stays
        # the same an update must not move its starts.
        request["StartDate"] = kept if kept and is_same_rate else now + every
    if there and _holds(there, request):
        return _schedule(there, now=now, action="unchanged")
    aws.call(
        "scheduler",
        "UpdateSchedule" if there else "CreateSchedule",
        **request,
        ClientToken=secrets.token_hex(16),
    )
    made = _get(aws, full_name) or {}
    return _schedule(made, now=now, action="updated" if there else "created")


def list_schedules(aws: Aws, workload: Workload, *, now: datetime) -> tuple[Schedule, ...]:
    """Returns the schedules that start the workload's pipeline, by name."""
    names = sorted(
        str(item.get("Name", ""))
        for item in aws.pages(
            "scheduler",
            "ListSchedules",
            items="Schedules",
            GroupName=SCHEDULE_GROUP,
            NamePrefix=_PREFIX,
        )
        if _starts(item, workload.name)
    )
    # A listing has neither expression nor parameters.
    found = (_get(aws, name) for name in names)
    return tuple(_schedule(item, now=now) for item in found if item)


def delete_schedule(aws: Aws, workload: Workload, *, name: str) -> str:
    """Deletes a schedule of the workload's pipeline and returns its full name.

    Raises:
        UsageError: If there is none of that name.
    """
    # Only schedules of this pipeline: no name reaches another one's.
    known = [schedule.name for schedule in list_schedules(aws, workload, now=datetime.now(UTC))]
    full_name = name if name in known else _full_name(workload, name)
    if full_name not in known:
        raise UsageError(
            f"pipeline {workload.name} has no schedule {name}",
            fix=nearest(full_name, known) if known else "it has none at all",
        )
    aws.call("scheduler", "DeleteSchedule", Name=full_name, GroupName=SCHEDULE_GROUP)
    return full_name


def _full_name(workload: Workload, name: str | None) -> str:
    full_name = schedule_name(workload, name)
    if not _NAME.fullmatch(full_name):
        raise UsageError(
            f"schedule {full_name}: a name has 64 letters, digits, -, _ and . at most",
            fix="choose a shorter --name, such as nightly",
        )
    return full_name


def _values(
    deployed: SageMakerPipeline, workload: Workload, texts: Sequence[str]
) -> dict[str, str]:
    """Returns the parameters to pass; an empty value must be the default, and is left out.

    Raises:
        UsageError: As `checked_parameters`, and for an empty value that is not the default.
    """
    values = checked_parameters(deployed, workload, texts)
    defaults = parameters_in(deployed.definition)
    # EventBridge's model wants at least one character.
    for name in [name for name, value in values.items() if not value]:
        if str(defaults[name].get("DefaultValue", "")):
            raise UsageError(
                f"a schedule cannot pass an empty value: {name}",
                fix="empty it in the workload and upload that, or schedule another value",
            )
        del values[name]
    return values


def _get(aws: Aws, name: str) -> dict[str, Json]:
    """Returns the schedule, or {} where there is none."""
    try:
        return aws.call("scheduler", "GetSchedule", Name=name, GroupName=SCHEDULE_GROUP)
    except AwsError as err:
        if err.is_missing:
            return {}
        raise


def _refuse_foreign(there: Mapping[str, Json], name: str, deployed: SageMakerPipeline) -> None:
    if not _starts(there, deployed.name):
        raise UsageError(
            f"schedule {name} is there already and starts something else",
            where=str(_target(there).get("Arn", "")),
            fix="choose another --name",
        )


def _starts(schedule: Mapping[str, Json], pipeline: str) -> bool:
    return str(_target(schedule).get("Arn", "")).endswith(f":pipeline/{pipeline}")


def _target(schedule: Mapping[str, Json]) -> Mapping[str, Json]:
    target = schedule.get("Target")
    return mapping(target)


def _parameters(schedule: Mapping[str, Json]) -> dict[str, str]:
    held = _target(schedule).get("SageMakerPipelineParameters")
    items = held.get("PipelineParameterList") if isinstance(held, Mapping) else None
    return {
        str(item.get("Name")): str(item.get("Value"))
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, Mapping)
    }


def _holds(there: Mapping[str, Json], request: Mapping[str, object]) -> bool:
    """Returns whether the existing schedule is the one asked for."""
    target = request["Target"]
    wanted = target if isinstance(target, Mapping) else {}
    held = _target(there)
    return (
        all(there.get(key) == request.get(key) for key in _OURS[:3])
        and _time(there.get("StartDate")) == request.get("StartDate")
        and _parameters(there) == _parameters({"Target": wanted})
        and all(
            held.get(key) == wanted.get(key)
            for key in ("Arn", "RoleArn", "RetryPolicy", "DeadLetterConfig")
        )
    )


def _schedule(found: Mapping[str, Json], *, now: datetime, action: Action = "found") -> Schedule:
    timing = Timing(
        expression=str(found.get("ScheduleExpression", "")),
        time_zone=str(found.get("ScheduleExpressionTimezone") or "UTC"),
    )
    is_on = found.get("State") == "ENABLED"
    following = next_run(
        timing.expression,
        now=now,
        time_zone=timing.time_zone,
        start=_time(found.get("StartDate")) or _time(found.get("CreationDate")),
    )
    return Schedule(
        name=str(found.get("Name", "")),
        timing=timing,
        parameters=_parameters(found),
        is_on=is_on,
        next_run=following if is_on else None,
        action=action,
    )


def _time(value: Json) -> datetime | None:
    """Returns a time of an answer, to the second."""
    if isinstance(value, str) and value:
        # What we sent had fractions, what comes back may not: compared to the second.
        return datetime.fromisoformat(value).astimezone(UTC).replace(microsecond=0)
    return None


__all__ = ["add_schedule", "delete_schedule", "list_schedules"]
