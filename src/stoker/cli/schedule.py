"""`stoker schedule`, and the schedule that `stoker upload` makes of a workload."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from stoker.cli.clients import client_of, workload_of
from stoker.cli.options import AsJson, Overrides, Reach, RunParams, TargetName, WorkloadFile, Yes
from stoker.errors import ServiceError, UsageError
from stoker.terminal import ask, print_result, say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import Compiled, PipelineClient
    from stoker.pipelines.schedules import AskedSchedule, Schedule, ScheduleChange
    from stoker.records import Json, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFlags:
    """The schedule that is wanted; what no flag says stays as it is.

    Attributes:
        cron (E): Start runs at these times. SageMaker: 'cron(0 6 ? * MON-FRI *)' or 'rate(12
            hours)'; Kubeflow: six fields, seconds first, '0 0 6 * * 1-5', or '@every 12h' (default:
            unchanged).
        name (N): Name of this schedule, if the pipeline has several (default: the only one).
        time_zone (Z): Time zone of --cron, SageMaker only (default: unchanged; UTC for a new
            schedule).
        params (NAME=VALUE): Set a parameter of the pipeline's run, such as epochs=3; may be
            repeated.
        fresh: Drop the parameters and the time zone that the schedule has now.
    """

    cron: str | None = None
    name: str | None = None
    time_zone: str | None = None
    params: RunParams = None
    fresh: bool = False

    def asked(self, workload: "Workload", *, target: str) -> "AskedSchedule":
        """Returns what these flags ask of a pipeline's schedule, checked without a service.

        Args:
            workload: Workload of the uploaded pipeline.
            target: sagemaker or kubeflow.
        """
        from stoker.cli.workloads import with_params
        from stoker.pipelines.base import check_run_decidable
        from stoker.pipelines.schedule_times import checked_times
        from stoker.pipelines.schedules import AskedSchedule, schedule_name
        from stoker.records.platforms import NAME_END

        end = NAME_END if target == "sagemaker" else "-"
        full_name = schedule_name(workload, self.name, end=end)
        params = self.params or ()
        judged = with_params(workload, params, target=target)
        check_run_decidable(workload, judged, target=target, parameters=params)
        if self.cron or self.time_zone:
            # Any expression, to check the zone alone.
            any_cron = "rate(1 day)" if target == "sagemaker" else "@daily"
            checked_times(
                self.cron or any_cron,
                time_zone=self.time_zone or "UTC",
                target=target,
                now=datetime.now(UTC),
                where="--cron" if self.cron else "--time-zone",
            )
        return AskedSchedule(
            name=full_name,
            cron=self.cron,
            time_zone=self.time_zone,
            parameters=params,
            is_whole=self.fresh,
        )


def schedule_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    flags: ScheduleFlags,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Start runs of the uploaded pipeline at regular times.

    An existing schedule keeps what no option changes. `stoker upload` makes the schedule that is in
    the workload (sagemaker.schedule, kubernetes.kubeflow.schedule).

    Examples:
        stoker schedule kubeflow configs/mnist-kubeflow.yaml --cron @daily
        stoker schedule sagemaker configs/mnist-sagemaker.yaml --cron 'rate(1 day)'
        stoker schedule sagemaker configs/mnist-sagemaker.yaml --param epochs=20
    """
    of = workload_of(workload, overrides=overrides or ())
    # Before the service is reached: a wrong value is reported without credentials.
    asked = flags.asked(of, target=target)
    client = client_of(target, of, reach)
    with working(f"reading the schedules of {of.name}", quiet=as_json):
        change = client.plan_schedule(of, asked)
    if change.action == "changed":
        refused = UsageError("schedule not changed", fix="use --yes to change it without asking")
        ask("\n".join([*change.lines, "change it"]), assume_yes=yes or as_json, refused=refused)
    if change.action != "unchanged":
        with working(f"scheduling {of.name}", quiet=as_json):
            client.put_schedule(of, change.wanted)
    print_result(change.document, "\n".join(change.lines), as_json=as_json)
    if line := heartbeat_line(client, of):
        say(line, quiet=as_json)
    for line in early_schedules(client, of, workload=workload):
        print(f"warning: {line}", file=sys.stderr)


def show_schedules(
    client: "PipelineClient", of: "Workload", planned: "PlannedSchedule", *, workload: str
) -> None:
    """Prints what an upload did to the schedules of a pipeline, and what is wrong with others.

    Args:
        client: Of the pipeline's service.
        of: Names the pipeline.
        planned: As `planned_schedule` returned it.
        workload: The file, for a command.
    """
    if planned.done_words:
        print(planned.done_words)
        if line := heartbeat_line(client, of):
            print(line)
    early = early_schedules(client, of, workload=workload)
    for words in filter(None, [planned.warning, *planned.lacking, *early]):
        print(f"warning: {words}", file=sys.stderr)


def heartbeat_line(client: "PipelineClient", of: "Workload") -> str:
    """Returns the HeartbeatHours for all schedules of a pipeline; empty: not known, or no stack."""
    from stoker.pipelines.sagemaker.heartbeat import (
        alarm_hours,
        heartbeat_words,
        longest_gap_hours,
    )
    from stoker.platforms.aws import Aws

    if client.target != "sagemaker":
        return ""
    try:
        listed = [entry.schedule for entry in client.schedules(of) if entry.schedule]
    except (ServiceError, UsageError):
        # The schedule is made; this needs a right to see all of them.
        return ""
    gap = longest_gap_hours(listed, now=datetime.now(UTC))
    if gap is None:
        return ""
    return heartbeat_words(gap, has=alarm_hours(Aws(region=of.sagemaker_region), of.name))


def early_schedules(client: "PipelineClient", of: "Workload", *, workload: str) -> list[str]:
    """Returns a line for each schedule of an earlier version's name, with what to do about it.

    Args:
        client: Of the pipeline's service.
        of: Names the pipeline.
        workload: The file, for the command.
    """
    from stoker.pipelines.schedules import early_words

    if client.target != "sagemaker":
        return []
    try:
        return early_words(client.schedules(of), workload=of, file=workload)
    except (ServiceError, UsageError):
        # It needs a right to see schedules, and the command has done its own part.
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSchedule:
    """The schedule of a workload, as an upload makes it.

    Attributes:
        asked: What the workload says; None: nothing.
        change: What differs from the one that is there.
        warning: Of a schedule that the workload no longer has.
        lacking: A line for each schedule whose starts would fail with the pipeline as it will be.
        carried: Other schedules, with the names that the pipeline will have for their parameters.
    """

    asked: "AskedSchedule | None"
    change: "ScheduleChange | None" = None
    warning: str = ""
    lacking: "Sequence[str]" = ()
    carried: "Sequence[Schedule]" = ()

    @property
    def is_change(self) -> bool:
        """Whether a schedule that is there would be another one."""
        is_changed = self.change is not None and self.change.action == "changed"
        return is_changed or bool(self.carried)

    @property
    def lines(self) -> list[str]:
        """What people are shown of it."""
        lines = []
        if self.change:
            lines += self.change.lines
        for schedule in self.carried:
            names = ", ".join(schedule.parameters)
            lines.append(
                f"schedule {schedule.name}: its parameters get the pipeline's names: {names}"
            )
        return lines

    def applied(self, client: "PipelineClient", workload: "Workload") -> "dict[str, Json]":
        """Makes or changes the schedules, and returns what an upload reports of them."""
        for schedule in self.carried:
            client.put_schedule(workload, schedule)
        if self.asked:
            return {"schedule": client.schedule(workload, self.asked).document}
        if self.warning:
            return {"schedule": None, "schedule_left": self.warning}
        return {"schedule": None}

    @property
    def done_words(self) -> str:
        if self.change is None:
            return ""
        return f"schedule: {self.change.action}: {self.change.wanted.name}"


def planned_schedule(
    client: "PipelineClient", workload: "Workload", compiled: "Compiled"
) -> PlannedSchedule:
    """Compares the workload's schedule with the one that is there; changes nothing."""
    from stoker.cli.workloads import with_params
    from stoker.pipelines.base import check_run_decidable
    from stoker.pipelines.schedules import asked_of, check_own

    check_own(workload, target=client.target)
    asked = asked_of(workload, target=client.target)
    if asked is None:
        warning = _left_behind(client, workload)
        carried, lacking = _other_schedules(client, workload, compiled)
        return PlannedSchedule(asked=None, warning=warning, lacking=lacking, carried=carried)
    judged = with_params(workload, asked.parameters, target=client.target)
    check_run_decidable(workload, judged, target=client.target, parameters=asked.parameters)
    change = client.plan_schedule(workload, asked, compiled=compiled)
    carried, lacking = _other_schedules(client, workload, compiled, except_for=asked.name)
    return PlannedSchedule(asked=asked, change=change, lacking=lacking, carried=carried)


def _other_schedules(
    client: "PipelineClient", workload: "Workload", compiled: "Compiled", *, except_for: str = ""
) -> "tuple[list[Schedule], list[str]]":
    """Returns the schedules that are carried over, and a line for each that will not start a run.

    Args:
        client: Of the pipeline's service.
        workload: Names the pipeline.
        compiled: What will be uploaded.
        except_for: A schedule that will be changed.
    """
    from stoker.pipelines.schedules import ListedSchedule, carried_over, lacking_words

    try:
        listed = [entry for entry in client.schedules(workload) if entry.name != except_for]
    except (ServiceError, UsageError):
        # Who uploads needs no right to see schedules.
        return [], []
    if not listed:
        return [], []
    declared = client.declared(workload, compiled)
    carried = carried_over(listed, declared, workload=workload)
    then = {entry.name: entry for entry in listed}
    for schedule in carried:
        then[schedule.name] = ListedSchedule(name=schedule.name, schedule=schedule)
    lines = lacking_words([*then.values()], declared, pipeline="this pipeline")
    fix = "its starts will fail: stoker schedule --fresh, with parameters that the pipeline has"
    return carried, [f"{line}; {fix}" for line in lines]


def _left_behind(client: "PipelineClient", workload: "Workload") -> str:
    from stoker.pipelines.schedules import removed_words, schedule_name

    name = schedule_name(workload, None)
    try:
        return removed_words(client.find_schedule(workload, name), target=client.target)
    except (ServiceError, UsageError):
        # Who uploads needs no right to see schedules, and the name may be somebody else's.
        return ""
