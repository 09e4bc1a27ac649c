"""Recurring runs of Kubeflow Pipelines, and parameters as its requests have them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from stoker.parameters import Kind
from stoker.pipelines.run_parameters import ToldParameter
from stoker.pipelines.schedules import OF_WORKLOAD, Schedule
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, text

_KINDS: Mapping[str, Kind] = {
    "STRING": "string",
    "NUMBER_INTEGER": "integer",
    "NUMBER_DOUBLE": "number",
    "BOOLEAN": "boolean",
}


def kinds_of(inputs: Document) -> dict[str, Kind]:
    """Returns the kinds of a version's parameters."""
    return {
        name: _KINDS.get(str(item_at(each, "parameterType")), "string")
        for name, each in inputs.items()
    }


def typed(told: ToldParameter, kind: Kind) -> Json:
    """Returns a value with its JSON type: the service refuses another."""
    if kind == "integer":
        return int(told.value)
    if kind == "number":
        return float(told.value)
    if kind == "boolean":
        return told.value == "true"
    is_file = told.name == "reuse_profile" and Path(told.value).is_file()
    if is_file:
        return Path(told.value).read_text()
    return told.value


def newest_first(
    recurring_runs: Iterable[Document], *, pipeline_id: str, name: str | None
) -> list[Document]:
    """Returns a pipeline's recurring runs of a name (None: of all), the newest first."""
    listed = [
        run
        for run in recurring_runs
        if item_at(run, "pipeline_version_reference", "pipeline_id") == pipeline_id
        and name in (None, run.get("display_name"))
    ]
    return sorted(listed, key=lambda run: str(run.get("created_at")), reverse=True)


def schedule_of(found: Document, *, has_account: bool) -> Schedule:
    """Returns a recurring run; `has_account`: whether the workload names a service account."""
    account = text(found, "service_account")
    facts = {}
    # Without one in the workload, the service fills in its own.
    if account and has_account:
        facts["service account"] = account
    return Schedule(
        name=str(found.get("display_name")),
        cron=_cron_of(mapping(found, "trigger")),
        parameters=mapping(found, "runtime_config", "parameters"),
        facts=facts,
        is_on=found.get("status") != "DISABLED",
        is_of_workload=OF_WORKLOAD in str(found.get("description")),
    )


def schedule_request(wanted: Schedule, *, pipeline: str, pipeline_id: str) -> dict[str, Json]:
    """Returns what a recurring run has besides a run's request.

    Args:
        wanted: The schedule.
        pipeline: Name of its pipeline.
        pipeline_id: Its id.
    """
    return {
        "display_name": wanted.name,
        "description": wanted.description(pipeline),
        # Without a version the service takes the latest; kfp's client insists on one.
        "pipeline_version_reference": {"pipeline_id": pipeline_id},
        "runtime_config": {"parameters": dict(wanted.parameters)},
        "trigger": {"cron_schedule": {"cron": wanted.cron}},
        "mode": "ENABLE" if wanted.is_on else "DISABLE",
        "max_concurrency": "1",
        "no_catchup": True,
    }


def _cron_of(trigger: Document) -> str:
    """Returns a trigger's expression; a period that the page made is a rate."""
    seconds = item_at(trigger, "periodic_schedule", "interval_second")
    if seconds is not None:
        return f"@every {int(str(seconds))}s"
    return text(trigger, "cron_schedule", "cron")
