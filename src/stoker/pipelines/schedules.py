"""Schedules of pipelines on both services: what is wanted, what is there, and what changes."""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from stoker.errors import UsageError
from stoker.parameters import Kind, spelt_as
from stoker.pipelines.schedule_times import checked_times
from stoker.records import Json, ScheduleSettings, Workload
from stoker.records.base import Document
from stoker.records.platforms import NAME_END

# What EventBridge Scheduler takes; Kubeflow takes these, too.
_MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
KEYS = {"sagemaker": "sagemaker.schedule", "kubeflow": "kubernetes.kubeflow.schedule"}
_REMOVE = {
    "sagemaker": "aws scheduler delete-schedule --name {name}",
    "kubeflow": "kfp recurring-run delete ID; kfp recurring-run list shows the ID of {name}",
}
# In a schedule's description: `upload` made it from the workload's key.
OF_WORKLOAD = "made by stoker upload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of a pipeline, as a service has it, or as it is wanted.

    Attributes:
        parameters: Values by the names of the uploaded pipeline.
        facts: What else is compared, by its name for people: the scheduler's role ...
        is_on: Whether it starts runs; who disabled it may enable it again.
        is_of_workload: Whether `upload` made it from the workload's key.
    """

    name: str
    cron: str
    time_zone: str = "UTC"
    parameters: Document = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    is_on: bool = True
    is_of_workload: bool = False

    @property
    def compared(self) -> dict[str, str]:
        """Everything that makes two schedules different, by its name for people."""
        values = {name: _shown(value) for name, value in sorted(self.parameters.items())}
        return {"cron": self.cron, "time zone": self.time_zone, **values, **self.facts}

    def description(self, pipeline: str) -> str:
        """Returns what both services store with it, by which `is_of_workload` is read again."""
        made_by = OF_WORKLOAD if self.is_of_workload else "made by stoker"
        return f"Starts the pipeline {pipeline}; {made_by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSchedule:
    """What a user says about a schedule; what is None stays as it is.

    Attributes:
        parameters: NAME=VALUE texts.
        is_whole: Whether it has nothing but what is said here.
    """

    name: str
    cron: str | None = None
    time_zone: str | None = None
    parameters: Sequence[str] = ()
    is_whole: bool = False
    is_of_workload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChange:
    """A schedule that is wanted, next to the one that is there.

    Attributes:
        changes: A line each; empty: nothing differs, or it is new.
        kept: What it keeps, though nobody said so again.
        next_words: When it fires next.
    """

    wanted: Schedule
    there: Schedule | None
    changes: tuple[str, ...]
    kept: tuple[str, ...]
    next_words: str

    @property
    def action(self) -> str:
        if self.there is None:
            return "created"
        if self.changes:
            return "changed"
        return "unchanged"

    @property
    def lines(self) -> list[str]:
        """What people are shown of it."""
        wanted = self.wanted
        head = f"schedule {wanted.name}: {self.action}  {wanted.cron}  {wanted.time_zone}"
        shown = [f"  {line}" for line in self.changes]
        shown += [f"  kept: {line}" for line in self.kept]
        if not wanted.is_on:
            shown.append("  disabled, as before: enable it where it was disabled")
        elif self.next_words:
            shown.append(f"  next: {self.next_words}")
        return [head, *shown]

    @property
    def document(self) -> dict[str, Json]:
        wanted = self.wanted
        return {
            "name": wanted.name,
            "action": self.action,
            "expression": wanted.cron,
            "time_zone": wanted.time_zone,
            "parameters": dict(wanted.parameters),
            "enabled": wanted.is_on,
            "changes": list(self.changes),
            "next": self.next_words,
        }


def schedule_name(workload: Workload, name: str | None, *, end: str = "-") -> str:
    """Returns the full name of a schedule, from --name or None.

    Args:
        workload: Whose schedule it is.
        name: As typed; a full name stays as it is.
        end: What stands between the workload's name and the schedule's.
    """
    # Schedules of all pipelines are in one list: the name tells whose this one is.
    base = f"stoker-{workload.name}"
    if name is None or name in (base, workload.name):
        return base
    full = name
    if not name.startswith(f"{base}-"):
        full = f"{base}{end}{name}"
    if not _NAME.fullmatch(full):
        raise UsageError(
            f"invalid name of a schedule: {full!r}",
            where="--name",
            fix="use letters, digits, dots, dashes and underscores",
        )
    if len(full) > _MAX_NAME:
        raise UsageError(
            f"the schedule's name {full} has {len(full)} characters, at most {_MAX_NAME}",
            where="--name",
            fix=f"shorten it to {_MAX_NAME - len(base) - 1} or fewer",
        )
    return full


def settings_of(workload: Workload, *, target: str) -> ScheduleSettings | None:
    """Returns the workload's own schedule for a service."""
    if target == "sagemaker":
        if workload.sagemaker:
            return workload.sagemaker.schedule
        return None
    kubeflow = workload.kubernetes_settings.kubeflow
    if kubeflow:
        return kubeflow.schedule
    return None


def asked_of(workload: Workload, *, target: str) -> AskedSchedule | None:
    """Returns what the workload says about its schedule; None: nothing."""
    settings = settings_of(workload, target=target)
    if settings is None:
        return None
    return AskedSchedule(
        name=schedule_name(workload, None),
        cron=settings.cron,
        time_zone=settings.time_zone,
        parameters=[f"{name}={_shown(value)}" for name, value in settings.parameters.items()],
        is_whole=True,
        is_of_workload=True,
    )


def check_own(workload: Workload, *, target: str) -> None:
    """Refuses a workload whose schedule the service would refuse, or that never fires."""
    if asked := asked_of(workload, target=target):
        assert asked.cron
        checked_times(
            asked.cron,
            time_zone=asked.time_zone or "UTC",
            target=target,
            now=datetime.now(UTC),
            where=f"workload {workload.name}, key {KEYS[target]}.cron",
        )


def planned(
    asked: AskedSchedule,
    *,
    there: Schedule | None,
    before: Document,
    parameters: Document,
    facts: Mapping[str, str],
    target: str,
    now: datetime,
) -> ScheduleChange:
    """Returns a schedule with what is asked, and with what it had where nothing is said.

    Args:
        asked: What the user says; its parameters are in `parameters`.
        there: The schedule of that name, if there is one.
        before: Those of its parameters that stay, by the uploaded pipeline's names.
        parameters: Checked values by the uploaded pipeline's names.
        facts: As of `Schedule`.
        target: sagemaker or kubeflow.
        now: With its zone.

    Raises:
        UsageError: If it has no expression, or one that the service would refuse.
    """
    # What it has where nothing is said.
    base = Schedule(name=asked.name, cron="")
    if there and not asked.is_whole:
        base = there
    cron = asked.cron or base.cron
    if not cron:
        raise UsageError(
            f"there is no schedule {asked.name} yet: it needs an expression",
            where="--cron",
            fix="stoker schedule --help has examples",
        )
    wanted = Schedule(
        name=asked.name,
        cron=cron,
        time_zone=asked.time_zone or base.time_zone,
        parameters={**before, **parameters},
        facts=facts,
        is_on=there is None or there.is_on,
        is_of_workload=asked.is_of_workload or bool(there and there.is_of_workload),
    )
    where = "--cron"
    if asked.is_of_workload:
        where = f"key {KEYS[target]}.cron"
    times = checked_times(cron, time_zone=wanted.time_zone, target=target, now=now, where=where)
    kept_parameters = {name: before[name] for name in before if name not in parameters}
    changes: list[str] = []
    if there:
        changes = _changes(there.compared, wanted.compared)
    return ScheduleChange(
        wanted=wanted,
        there=there,
        changes=tuple(changes),
        kept=tuple(_kept_words(asked, base, kept_parameters)),
        next_words=times.next_words(now),
    )


def _kept_words(asked: AskedSchedule, base: Schedule, parameters: Document) -> Iterator[str]:
    """Yields what a schedule keeps of what it was, though nobody said so again."""
    for name, value in parameters.items():
        yield f"{name}={_shown(value)}"
    if asked.time_zone is None and base.time_zone != "UTC":
        yield f"time zone {base.time_zone}"
    if asked.cron is None:
        yield f"cron {base.cron}"


def spelt_parameters(schedule: Schedule, declared: Collection[str]) -> dict[str, Json]:
    """Returns a schedule's parameters by the names of a pipeline, in snake or camel case."""
    return {spelt_as(name, declared): value for name, value in schedule.parameters.items()}


def carried_over(
    listed: Sequence["ListedSchedule"], declared: Collection[str], *, workload: Workload
) -> list[Schedule]:
    """Returns the workload's schedules that another spelling of the parameters would stop.

    They have the pipeline's names. Pipelines that an earlier version uploaded have camel case, and
    so have their schedules. One that somebody made by hand stays as it is.

    Args:
        listed: The schedules that start the pipeline.
        declared: Names of the parameters of the pipeline that will be uploaded.
        workload: Whose schedules they are.
    """
    base = f"stoker-{workload.name}"
    carried = []
    for entry in listed:
        is_ours = entry.name == base or entry.name.startswith(f"{base}{NAME_END}")
        if not is_ours or entry.schedule is None:
            continue
        parameters = spelt_parameters(entry.schedule, declared)
        if parameters.keys() != entry.schedule.parameters.keys():
            carried.append(replace(entry.schedule, parameters=parameters))
    return carried


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSchedule:
    """A schedule that starts the pipeline, as the service lists it.

    Attributes:
        schedule: None: this caller may not read it.
    """

    name: str
    schedule: Schedule | None = None


def lacking_words(
    listed: Sequence[ListedSchedule], declared: Mapping[str, Kind], *, pipeline: str
) -> list[str]:
    """Returns a line for each schedule that sets what a pipeline does not have: its starts fail.

    Args:
        listed: The schedules that start the pipeline.
        declared: The parameters of the pipeline that would be started.
        pipeline: How the lines call it, such as *version 3*.
    """
    lines = []
    for entry in listed:
        if entry.schedule is None:
            continue
        lost = [name for name in entry.schedule.parameters if name not in declared]
        if lost:
            lines.append(
                f"the schedule {entry.name} sets {', '.join(lost)}, which {pipeline} does not have"
            )
    return lines


def early_words(listed: Sequence[ListedSchedule], *, workload: Workload, file: str) -> list[str]:
    """Returns a line for each additional schedule of SageMaker that an earlier version made.

    It was called stoker-NAME-EXTRA, and is stoker-NAME--EXTRA since: nothing here reads, changes or
    deletes one of the earlier name. It starts runs all the same.

    Args:
        listed: The schedules that start the pipeline.
        workload: Whose schedules they are.
        file: The workload's file, for the command.
    """
    base = f"stoker-{workload.name}"
    return [
        _early_line(entry, extra=entry.name.removeprefix(f"{base}-"), file=file)
        for entry in listed
        if re.match(rf"{re.escape(base)}-[^-]", entry.name)
    ]


def _early_line(entry: ListedSchedule, *, extra: str, file: str) -> str:
    # Of one that this caller may not read, the user has to say the expression.
    schedule = entry.schedule or Schedule(name=entry.name, cron="EXPRESSION")
    words = ["stoker", "schedule", "sagemaker", file, "--name", extra, "--cron", schedule.cron]
    if schedule.time_zone != "UTC":
        words += ["--time-zone", schedule.time_zone]
    for name, value in schedule.parameters.items():
        words += ["--param", f"{name}={_shown(value)}"]
    state = "still starts runs" if schedule.is_on else "is there, disabled"
    delete = _REMOVE["sagemaker"].format(name=entry.name)
    return (
        f"schedule {entry.name} {state} under an earlier version's name: adopt it: "
        f"{shlex.join(words)}; delete it, then or instead: {delete}"
    )


def removed_words(there: Schedule | None, *, target: str) -> str:
    """Returns a warning of a schedule that the workload no longer has; empty: there is none."""
    if there is None or not there.is_of_workload:
        return ""
    state = "still starts runs" if there.is_on else "is still there, disabled"
    return (
        f"schedule {there.name} ({there.cron} {there.time_zone}) {state}, but the workload has no "
        f"key {KEYS[target]} any more; remove it: {_REMOVE[target].format(name=there.name)}"
    )


def _changes(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {was.get(name) or 'not set'} -> {now.get(name) or 'not set'}"
        for name in {**was, **now}
        if was.get(name, "") != now.get(name, "")
    ]


def _shown(value: Json) -> str:
    """Returns a parameter's value as a NAME=VALUE text has it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        # Services store numbers as floats.
        value = int(value)
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return json.dumps(value)
