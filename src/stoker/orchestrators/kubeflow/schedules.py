"""Schedules of a pipeline are Kubeflow's recurring runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from zoneinfo import ZoneInfo

from stoker.errors import UsageError
from stoker.orchestrators.base import Action, Schedule, Timing, schedule_name
from stoker.orchestrators.cron import DAYS, MONTHS, CronField, cron_error, next_time
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowError
from stoker.orchestrators.kubeflow.pipelines import (
    moment,
    schedule_url,
    uploaded_pipeline,
    version_named,
)
from stoker.orchestrators.kubeflow.runs import (
    RunOptions,
    experiment_id,
    in_text,
)
from stoker.records import Json, Workload, nearest
from stoker.records.base import mapping

_EXAMPLE = "five fields: minute hour day month weekday; or six with seconds first: '0 30 6 * * 1-5'"
_EVERY = re.compile(r"([1-9][0-9]{0,6})\s*(s|m|h|d)(?:ec|in|our|ay)?(?:ond|ute)?s?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# The scheduler looks at what is due every few seconds; runs take minutes.
MIN_PERIOD_SECONDS = 60


_field = partial(CronField, example=_EXAMPLE)
# Those of robfig/cron, which Kubeflow's scheduler uses.
_FIELDS = (
    _field("second", 0, 59),
    _field("minute", 0, 59),
    _field("hour", 0, 23),
    _field("day", 1, 31, may_ask=True),
    _field("month", 1, 12, MONTHS),
    _field("weekday", 0, 6, DAYS, may_ask=True),
)
_UNIX_WEEKDAY = _field("weekday", 0, 7, DAYS)


def cron_fields(text: str) -> str:
    """Returns six fields, seconds first, as Kubeflow's scheduler takes them; turns five of Unix.

    Raises:
        UsageError: Naming the invalid field.
    """
    fields = text.split()
    if len(fields) == 5:
        # Unix's minutes begin at second 0.
        fields = ["0", *fields[:4], _unix_weekday(fields[4], expression=text)]
    if len(fields) != 6:
        raise cron_error(text, f"it has {len(fields)} fields", _EXAMPLE)
    for field, part in zip(_FIELDS, fields, strict=True):
        field.values(part, expression=text)
    return " ".join(fields)


def period_seconds(text: str) -> int:
    """Returns the seconds of a period such as 1d, 12h or 30m.

    Raises:
        UsageError: If it is not a period, or shorter than a minute.
    """
    found = _EVERY.fullmatch(text.strip().lower())
    seconds = int(found.group(1)) * _SECONDS[found.group(2)] if found else 0
    if seconds < MIN_PERIOD_SECONDS:
        raise UsageError(
            f"--every {text} is not a period of a minute or more", fix="as --every 1d, 12h or 30m"
        )
    return seconds


def period_text(seconds: int) -> str:
    """Returns `every 12 h` for a period in seconds."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"every {seconds // size} {unit}"
    return f"every {seconds} s"


def next_start(expression: str, *, now: datetime) -> datetime | None:
    """Returns the next time of six fields, in UTC; None where it is not known.

    Args:
        expression: Expression as the scheduler has it; it may come from other tools.
        now: Time with a time zone.
    """
    fields = expression.split()
    try:
        seconds, minutes, hours, days, months, weekdays = (
            field.values(text, expression=expression)
            for field, text in zip(_FIELDS, fields, strict=True)
        )
    except ValueError:
        return None
    # Where both days and weekdays are named, one of them is enough, as in Unix's cron.
    is_either = not any(part[:1] in ("*", "?") for at in (3, 5) for part in fields[at].split(","))

    def is_day(day: date) -> bool:
        of_days = (day.day in days, day.isoweekday() % 7 in weekdays)
        return day.month in months and (any(of_days) if is_either else all(of_days))

    utc = ZoneInfo("UTC")
    return next_time(is_day, hours=hours, minutes=minutes, seconds=seconds, now=now, zone=utc)


def _unix_weekday(text: str, *, expression: str) -> str:
    """Makes 7 into 0: Unix calls Sunday 0 and 7; the scheduler 0 only."""
    if "7" not in text:
        return text
    numbers = {number % 7 for number in _UNIX_WEEKDAY.values(text, expression=expression)}
    return ",".join(str(number) for number in sorted(numbers))


# The service's own limit.
MAX_CONCURRENCY = 10
# Before it recurring runs of the latest version had no labels by which they are counted.
LATEST_SCHEDULES = (2, 17)
_EVERY_SCHEDULE = "every "
# Keys of a recurring run that tell whether it is the one that is asked for.
_OURS = ("pipeline_version_reference", "service_account", "experiment_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownSchedule:
    """Kubeflow knows this recurring run of the workload's pipeline."""

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
        UsageError: If the pipeline is not uploaded, or the timing or a parameter is invalid.
        PlatformError: If the service refuses.
    """
    if not 1 <= options.max_concurrency <= MAX_CONCURRENCY:
        raise UsageError(
            f"--max-concurrency {options.max_concurrency}: Kubeflow takes 1 to {MAX_CONCURRENCY}"
        )
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    version = version_named(kubeflow, pipeline, options.version)
    values = options.values(version, workload, parameters)
    full_name = schedule_name(workload, name)
    reference: dict[str, Json] = {"pipeline_id": pipeline.id}
    # Without it the service takes the latest version at each start; kfp's client would not.
    why_pinned = why_fixed(kubeflow.version) if options.version is None else ""
    if why_pinned or options.version not in (None, "latest"):
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
        # Protobuf's JSON has integers of 64 bits as texts.
        "max_concurrency": str(options.max_concurrency),
        "no_catchup": not options.catch_up,
        **({"service_account": account} if account else {}),
    }
    old = [known for known in _known(kubeflow, pipeline.id) if known.name == full_name]
    if len(old) == 1 and _holds(old[0].document, wanted):
        there = _schedule(kubeflow, old[0].document, now=now, action="unchanged")
        return replace(there, note=there.note + why_pinned)
    made = kubeflow.call("recurring_run", "create_recurring_run", recurring_run=wanted)
    # The new one is created before the old one is deleted: no start is missed in between.
    for known in old:
        _delete(kubeflow, known.id)
    added = _schedule(kubeflow, made, now=now, action="updated" if old else "created")
    return replace(added, note=added.note + why_pinned)


def why_fixed(server: tuple[int, int, int] | None) -> str:
    """Says why a schedule gets the version of now; empty where the server can start the latest.

    Before 2.17 it did not count the runs of such a schedule, and could start two at once.
    """
    if server and server[:2] >= LATEST_SCHEDULES:
        return ""
    told = "does not tell its version" if server is None else "is " + ".".join(map(str, server))
    return (
        f"; fixed, for this Kubeflow Pipelines {told}, and 2.17 is the first to start the latest "
        "safely: schedule again after an upload, or --version latest"
    )


def list_schedules(
    kubeflow: Kubeflow, workload: Workload, *, now: datetime
) -> tuple[Schedule, ...]:
    """Returns the recurring runs of the pipeline, by name; () where it is not uploaded."""
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    found = sorted(_known(kubeflow, pipeline.id), key=lambda known: (known.name, known.id))
    return tuple(_schedule(kubeflow, known.document, now=now) for known in found)


def schedules_of_others(kubeflow: Kubeflow, pipeline_id: str, *, version_id: str) -> list[str]:
    """Returns the names of a pipeline's schedules that start another version than this one."""
    return sorted(
        known.name
        for known in _known(kubeflow, pipeline_id)
        if _is_on(known.document)
        and mapping(known.document, "pipeline_version_reference").get("pipeline_version_id")
        not in (None, "", version_id)
    )


def delete_schedule(kubeflow: Kubeflow, workload: Workload, *, name: str) -> str:
    """Deletes a recurring run of the workload's pipeline, by name or id; returns its name.

    Raises:
        UsageError: If there is none, or more than one of that name.
    """
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    known = [*_known(kubeflow, pipeline.id)]
    names = (name, schedule_name(workload, name))
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
            # The service itself lets several have one name.
            fix=f"--delete with an id: {', '.join(item.id for item in found)}",
        )
    _delete(kubeflow, found[0].id)
    return found[0].name


def _known(kubeflow: Kubeflow, pipeline_id: str) -> Sequence[_KnownSchedule]:
    found = kubeflow.pages(
        "recurring_run",
        "list_recurring_runs",
        items="recurringRuns",
        namespace=kubeflow.namespace,
        sort_by="created_at desc",
    )
    return [
        _KnownSchedule(
            id=str(item.get("recurring_run_id", "")),
            name=str(item.get("display_name", "")),
            document=item,
        )
        for item in found
        # The service cannot filter them by their pipeline.
        if mapping(item, "pipeline_version_reference").get("pipeline_id") == pipeline_id
    ]


def _delete(kubeflow: Kubeflow, id: str) -> None:
    try:
        kubeflow.call("recurring_run", "delete_recurring_run", recurring_run_id=id)
    except KubeflowError as err:
        # Somebody else has deleted it.
        if not err.is_missing:
            raise


def _trigger(timing: Timing) -> Json:
    if timing.expression.startswith(_EVERY_SCHEDULE):
        seconds = period_seconds(timing.expression.removeprefix(_EVERY_SCHEDULE))
        return {"periodic_schedule": {"interval_second": str(seconds)}}
    return {"cron_schedule": {"cron": timing.expression}}


def _holds(there: Mapping[str, Json], wanted: Mapping[str, Json]) -> bool:
    """Returns whether the existing recurring run is the one asked for."""
    return (
        # The service leaves out what is empty.
        all((there.get(key) or None) == (wanted.get(key) or None) for key in _OURS)
        and _when(there) == _when(wanted)
        and _is_on(there)
        and str(there.get("max_concurrency", "")) == wanted["max_concurrency"]
        and bool(there.get("no_catchup")) == wanted["no_catchup"]
        and _parameters(there) == _parameters(wanted)
    )


def _when(document: Mapping[str, Json]) -> tuple[str, int]:
    """Returns cron's fields, or the period in seconds."""
    trigger = mapping(document, "trigger")
    cron = str(mapping(trigger, "cron_schedule").get("cron") or "")
    period = str(mapping(trigger, "periodic_schedule").get("interval_second") or "0")
    return cron, int(period) if period.isdigit() else 0


def _is_on(document: Mapping[str, Json]) -> bool:
    return document.get("status") != "DISABLED" and document.get("mode") != "DISABLE"


def _parameters(document: Mapping[str, Json]) -> dict[str, str]:
    found = mapping(document, "runtime_config", "parameters")
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
    version = mapping(document, "pipeline_version_reference").get("pipeline_version_id")
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
    periodic = mapping(document, "trigger", "periodic_schedule")
    found = moment(periodic.get("start_time")) or moment(document.get("created_at"))
    return found.astimezone(UTC) if found else None
