"""Schedules of a pipeline: Kubeflow's recurring runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from stoker.errors import UsageError
from stoker.records import Json, Workload, nearest
from stoker.targets.base import Action, Schedule, Timing
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.cron import next_start, period_seconds, period_text
from stoker.targets.kubeflow.deployed import (
    moment,
    schedule_url,
    uploaded_pipeline,
    version_named,
)
from stoker.targets.kubeflow.errors import KubeflowError
from stoker.targets.kubeflow.spec import mapping
from stoker.targets.kubeflow.start import RunOptions, checked_parameters, experiment_id, in_text

MAX_CONCURRENCY = 10
_PREFIX = "stoker-"
_EVERY = "every "
# Of a recurring run: what makes it the one that is asked for.
_OURS = ("pipeline_version_reference", "service_account", "experiment_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A recurring run of the workload's pipeline."""

    id: str
    name: str
    document: Mapping[str, Json]


def add_schedule(
    kubeflow: Kubeflow,
    workload: Workload,
    *,
    timing: Timing,
    parameters: Sequence[str],
    name: str | None,
    options: RunOptions,
    now: datetime,
) -> Schedule:
    """Creates a recurring run, or replaces the one of that name: the service cannot change one.

    Raises:
        UsageError: If the pipeline is not uploaded, or the timing or a parameter cannot be.
        PlatformError: If the service refuses.
    """
    if not 1 <= options.max_concurrency <= MAX_CONCURRENCY:
        raise UsageError(
            f"--max-concurrency {options.max_concurrency}: Kubeflow takes 1 to {MAX_CONCURRENCY}"
        )
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    version = version_named(kubeflow, pipeline, options.version)
    values = checked_parameters(version, workload, parameters)
    full_name = _full_name(workload, name)
    reference: dict[str, Json] = {"pipeline_id": pipeline.id}
    if options.version not in (None, "latest"):
        # Without it the service takes the latest version at each start; kfp's client would not.
        reference["pipeline_version_id"] = version.id
    account = options.account(workload)
    wanted: dict[str, Json] = {
        "display_name": full_name,
        "description": f"Starts the pipeline {pipeline.name}; made by stoker",
        "experiment_id": experiment_id(kubeflow, workload, options),
        "pipeline_version_reference": reference,
        "runtime_config": {"parameters": values},
        "trigger": _trigger(timing),
        "mode": "ENABLE",
        "max_concurrency": str(options.max_concurrency),
        "no_catchup": not options.catch_up,
        **({"service_account": account} if account else {}),
    }
    old = [known for known in _known(kubeflow, pipeline.id) if known.name == full_name]
    if len(old) == 1 and _holds(old[0].document, wanted):
        return _schedule(kubeflow, old[0].document, now=now, action="unchanged")
    made = kubeflow.call("recurring_run", "create_recurring_run", recurring_run=wanted)
    # The new one is there before the old one goes: no start is missed if we are cut off here.
    for known in old:
        _delete(kubeflow, known.id)
    return _schedule(kubeflow, made, now=now, action="updated" if old else "created")


def list_schedules(
    kubeflow: Kubeflow, workload: Workload, *, now: datetime
) -> tuple[Schedule, ...]:
    """The recurring runs of the workload's pipeline, by name; () where it is not uploaded."""
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    found = sorted(_known(kubeflow, pipeline.id), key=lambda known: (known.name, known.id))
    return tuple(_schedule(kubeflow, known.document, now=now) for known in found)


def delete_schedule(kubeflow: Kubeflow, workload: Workload, *, name: str) -> str:
    """Deletes a recurring run of the workload's pipeline, by name or id, and gives its name.

    Raises:
        UsageError: If there is none, or more than one of that name.
    """
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    known = [*_known(kubeflow, pipeline.id)]
    names = (name, _full_name(workload, name))
    found = [item for item in known if item.id == name] or [
        item for item in known if item.name in names
    ]
    if not found:
        raise UsageError(
            f"pipeline {workload.name} has no schedule {name}",
            fix=nearest(names[1], [item.name for item in known]) if known else "it has none at all",
        )
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} schedules are called {found[0].name}",
            fix=f"--delete with an id: {', '.join(item.id for item in found)}",
        )
    _delete(kubeflow, found[0].id)
    return found[0].name


def _known(kubeflow: Kubeflow, pipeline_id: str) -> Sequence[_Known]:
    found = kubeflow.pages(
        "recurring_run",
        "list_recurring_runs",
        items="recurringRuns",
        namespace=kubeflow.namespace,
        sort_by="created_at desc",
    )
    return [
        _Known(
            id=str(item.get("recurring_run_id", "")),
            name=str(item.get("display_name", "")),
            document=item,
        )
        for item in found
        if mapping(item.get("pipeline_version_reference")).get("pipeline_id") == pipeline_id
    ]


def _delete(kubeflow: Kubeflow, id: str) -> None:
    try:
        kubeflow.call("recurring_run", "delete_recurring_run", recurring_run_id=id)
    except KubeflowError as err:
        # Somebody else was faster.
        if not err.is_missing:
            raise


def _full_name(workload: Workload, name: str | None) -> str:
    base = f"{_PREFIX}{workload.name}"
    if name is None or name in (base, workload.name):
        return base
    return name if name.startswith(f"{base}-") else f"{base}-{name}"


def _trigger(timing: Timing) -> Json:
    if timing.expression.startswith(_EVERY):
        seconds = period_seconds(timing.expression.removeprefix(_EVERY))
        return {"periodic_schedule": {"interval_second": str(seconds)}}
    return {"cron_schedule": {"cron": timing.expression}}


def _holds(there: Mapping[str, Json], wanted: Mapping[str, Json]) -> bool:
    """Whether the recurring run that is there is the one asked for."""
    return (
        all((there.get(key) or None) == (wanted.get(key) or None) for key in _OURS)
        and _when(there) == _when(wanted)
        and _is_on(there)
        and str(there.get("max_concurrency", "")) == wanted["max_concurrency"]
        and bool(there.get("no_catchup")) == wanted["no_catchup"]
        and _parameters(there) == _parameters(wanted)
    )


def _when(document: Mapping[str, Json]) -> tuple[str, int]:
    """Cron's fields, or the period in seconds."""
    trigger = mapping(document.get("trigger"))
    cron = str(mapping(trigger.get("cron_schedule")).get("cron") or "")
    period = str(mapping(trigger.get("periodic_schedule")).get("interval_second") or "0")
    return cron, int(period) if period.isdigit() else 0


def _is_on(document: Mapping[str, Json]) -> bool:
    return document.get("status") != "DISABLED" and document.get("mode") != "DISABLE"


def _parameters(document: Mapping[str, Json]) -> dict[str, str]:
    found = mapping(mapping(document.get("runtime_config")).get("parameters"))
    return {name: in_text(_whole(value)) for name, value in sorted(found.items())}


def _whole(value: Json) -> Json:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _schedule(
    kubeflow: Kubeflow, document: Mapping[str, Json], *, now: datetime, action: Action = "found"
) -> Schedule:
    cron, period = _when(document)
    is_on = _is_on(document)
    if cron:
        following = next_start(cron, now=now)
    else:
        began = _began(document) or now
        every = timedelta(seconds=period)
        passed = max(0, (now - began) // every) if period else 0
        following = began + (passed + 1) * every if period else None
    version = mapping(document.get("pipeline_version_reference")).get("pipeline_version_id")
    runs = str(document.get("max_concurrency") or "1")
    id = str(document.get("recurring_run_id", ""))
    notes = (
        f"version {version}" if version else "the latest version",
        f"{runs} run{'' if runs == '1' else 's'} at a time",
        "no catch-up" if document.get("no_catchup") else "catches up",
    )
    return Schedule(
        name=str(document.get("display_name", "")),
        timing=Timing(expression=cron or period_text(period)),
        parameters=_parameters(document),
        is_on=is_on,
        next_run=following if is_on else None,
        action=action,
        id=id,
        note=", ".join(notes),
        url=schedule_url(kubeflow, id),
    )


def _began(document: Mapping[str, Json]) -> datetime | None:
    periodic = mapping(mapping(document.get("trigger")).get("periodic_schedule"))
    found = moment(periodic.get("start_time")) or moment(document.get("created_at"))
    return found.astimezone(UTC) if found else None


__all__ = ["add_schedule", "delete_schedule", "list_schedules"]
