"""Schedules of EventBridge Scheduler, and parameters as SageMaker's requests have them."""

import json
from collections.abc import Mapping

from stoker.errors import UsageError
from stoker.parameters import Kind
from stoker.pipelines.run_parameters import ToldParameter
from stoker.pipelines.schedules import OF_WORKLOAD, Schedule
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings

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
    if told.name == "ReuseProfile":
        # The steps read FOLDER/profile.json.
        return told.value.rstrip("/")
    if told.own and told.own.name == "instance_type":
        return f"ml.{told.value.removeprefix('ml.')}"
    return told.value


def schedule_of(found: Document, *, name: str, pipeline: str) -> Schedule:
    """Returns a schedule as GetSchedule gives it; raises UsageError if it starts something else."""
    target = mapping(found, "Target")
    if not str(target.get("Arn")).endswith(f":pipeline/{pipeline}"):
        what = f"schedule {name} exists and starts something else"
        raise UsageError(what, where=str(target.get("Arn")), fix="choose another --name")
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
            role=str(target.get("RoleArn") or ""),
            queue=str(mapping(target, "DeadLetterConfig").get("Arn") or ""),
        ),
        is_on=found.get("State", "ENABLED") == "ENABLED",
        is_of_workload=OF_WORKLOAD in str(found.get("Description")),
    )


def schedule_facts(*, role: str, queue: str | None) -> dict[str, str]:
    return {"role": role, **({_QUEUE: queue} if queue else {})}


def schedule_request(wanted: Schedule, *, pipeline: str) -> dict[str, Json]:
    """Returns CreateSchedule's request, without its name, the pipeline's ARN and the token."""
    values: list[Json] = [{"Name": key, "Value": value} for key, value in wanted.parameters.items()]
    queue = wanted.facts.get(_QUEUE)
    made_by = OF_WORKLOAD if wanted.is_of_workload else "made by stoker"
    return {
        "Description": f"Starts the pipeline {pipeline}; {made_by}",
        "ScheduleExpression": wanted.cron,
        "ScheduleExpressionTimezone": wanted.time_zone,
        "State": "ENABLED" if wanted.is_on else "DISABLED",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": {
            "RoleArn": wanted.facts["role"],
            "SageMakerPipelineParameters": {"PipelineParameterList": values},
            "RetryPolicy": RETRY_POLICY,
            **({"DeadLetterConfig": {"Arn": queue}} if queue else {}),
        },
    }
