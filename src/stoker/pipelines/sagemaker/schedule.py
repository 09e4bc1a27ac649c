"""Schedules of EventBridge Scheduler, and parameters as SageMaker's requests have them."""

import json
from collections.abc import Mapping

from stoker.errors import ServiceError, UsageError
from stoker.parameters import Kind
from stoker.pipelines.run_parameters import ToldParameter
from stoker.pipelines.schedules import OF_WORKLOAD, ListedSchedule, Schedule
from stoker.platforms.aws import Aws
from stoker.records import Json, SageMakerSettings
from stoker.records.base import Document, item_at, mapping, mappings, text

SCHEDULE_GROUP = "default"
# A start that is an hour late is left to the next one.
RETRY_POLICY = {"MaximumRetryAttempts": 3, "MaximumEventAgeInSeconds": 3600}
_QUEUE = "dead letter queue"
_KINDS: Mapping[str, Kind] = {
    "String": "string",
    "Integer": "integer",
    "Float": "number",
    "Number": "number",
    "Boolean": "boolean",
}


def declared_in(definition: str) -> dict[str, Kind]:
    """Returns names and kinds of the parameters of a pipeline's definition."""
    document: Json = json.loads(definition)
    return {
        str(item.get("Name")): _KINDS.get(str(item.get("Type")), "string")
        for item in mappings(document, "Parameters")
    }


def as_sent(told: ToldParameter) -> str:
    """Returns a parameter's value as steps use it: they get what a run was given."""
    if told.own is None:
        return told.value
    name = told.own.name
    if name == "reuse_profile":
        # The steps read FOLDER/profile.json.
        return told.value.rstrip("/")
    if name == "instance_type":
        return f"ml.{told.value.removeprefix('ml.')}"
    return told.value


def read_schedule(aws: Aws, name: str, *, pipeline: str) -> Schedule | None:
    """Returns a schedule by its name; raises UsageError if it starts something else."""
    answer = aws.find("scheduler", "GetSchedule", Name=name, GroupName=SCHEDULE_GROUP)
    if answer:
        return schedule_of(answer, name=name, pipeline=pipeline)
    return None


def listed_schedules(aws: Aws, pipeline: str) -> list[ListedSchedule]:
    """Returns the schedules that start a pipeline, whatever they are called."""
    asked = {"items": "Schedules", "GroupName": SCHEDULE_GROUP}
    names = [
        str(summary.get("Name"))
        for summary in aws.pages("scheduler", "ListSchedules", **asked)
        if str(item_at(summary, "Target", "Arn")).endswith(f":pipeline/{pipeline}")
    ]
    return [_listed(aws, name, pipeline=pipeline) for name in sorted(names)]


def _listed(aws: Aws, name: str, *, pipeline: str) -> ListedSchedule:
    try:
        return ListedSchedule(name=name, schedule=read_schedule(aws, name, pipeline=pipeline))
    except ServiceError as err:
        # The stack's policy is for names that stoker gives now.
        if err.kind != "denied":
            raise
        return ListedSchedule(name=name)


def schedule_of(found: Document, *, name: str, pipeline: str) -> Schedule:
    """Returns a schedule as GetSchedule gives it; raises UsageError if it starts something else."""
    target = mapping(found, "Target")
    if not str(target.get("Arn")).endswith(f":pipeline/{pipeline}"):
        raise UsageError(
            f"schedule {name} exists and starts something else",
            where=str(target.get("Arn")),
            fix="choose another --name",
        )
    values = mapping(target, "SageMakerPipelineParameters")
    return Schedule(
        name=name,
        cron=str(found.get("ScheduleExpression")),
        time_zone=str(found.get("ScheduleExpressionTimezone") or "UTC"),
        parameters={
            str(each.get("Name")): each.get("Value")
            for each in mappings(values, "PipelineParameterList")
        },
        facts=schedule_facts(
            role=text(target, "RoleArn"),
            queue=text(target, "DeadLetterConfig", "Arn"),
        ),
        is_on=found.get("State", "ENABLED") == "ENABLED",
        is_of_workload=OF_WORKLOAD in str(found.get("Description")),
    )


def facts_of_settings(settings: SageMakerSettings, *, pipeline: str) -> dict[str, str]:
    """Returns a schedule's facts; raises UsageError if the workload names no role for it."""
    if settings.schedule_role is None:
        raise UsageError(
            "there is no role with which the scheduler may start the pipeline",
            where=f"workload {pipeline}, key sagemaker.schedule_role",
            fix="name one; configs/sagemaker/stoker.yaml makes it",
        )
    return schedule_facts(role=settings.schedule_role, queue=settings.dead_letter_queue)


def schedule_facts(*, role: str, queue: str | None) -> dict[str, str]:
    if queue:
        return {"role": role, _QUEUE: queue}
    return {"role": role}


def schedule_request(wanted: Schedule, *, pipeline: str) -> dict[str, Json]:
    """Returns CreateSchedule's request, without its name, the pipeline's ARN and the token."""
    values: list[Json] = [{"Name": key, "Value": value} for key, value in wanted.parameters.items()]
    target: dict[str, Json] = {
        "RoleArn": wanted.facts["role"],
        "SageMakerPipelineParameters": {"PipelineParameterList": values},
        "RetryPolicy": RETRY_POLICY,
    }
    if _QUEUE in wanted.facts:
        target["DeadLetterConfig"] = {"Arn": wanted.facts[_QUEUE]}
    return {
        "Description": wanted.description(pipeline),
        "ScheduleExpression": wanted.cron,
        "ScheduleExpressionTimezone": wanted.time_zone,
        "State": "ENABLED" if wanted.is_on else "DISABLED",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": target,
    }
