"""`stoker schedule` adds, lists and deletes schedules of a pipeline."""

import json
from collections.abc import Mapping, Sequence

from stoker.cli.pipelines import run_options, workload_of
from stoker.cli.progress import say
from stoker.cli.reaching import Reach
from stoker.cli.run_words import document, schedule_line
from stoker.errors import UsageError
from stoker.orchestrators.base import Timing
from stoker.orchestrators.cron import checked_zone, cron_expression, rate_expression


def schedule_command(
    target_name: str,
    file: str,
    *,
    cron: str | None,
    every: str | None,
    is_listing: bool,
    delete: str | None,
    name: str | None,
    time_zone: str,
    parameters: Sequence[str],
    options: Mapping[str, str | int | bool],
    reach: Reach,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Does one of --cron, --every, --list and --delete."""
    named = [
        flag
        for flag, is_there in (
            ("--cron", cron is not None),
            ("--every", every is not None),
            ("--list", is_listing),
            ("--delete", delete is not None),
        )
        if is_there
    ]
    if len(named) != 1:
        raise UsageError(
            f"{' and '.join(named)} exclude each other" if named else "when is it to run?",
            fix="name one of --cron, --every, --list, --delete",
        )
    if cron is None and every is None and (parameters or name or options):
        raise UsageError(
            f"{named[0]} takes no --param, no --name and nothing else of a new schedule",
            fix="leave them out",
        )
    workload = workload_of(file, overrides=overrides)
    target = reach.target(target_name, workload=workload, options=run_options(options))
    if is_listing:
        found = target.schedules(workload)
        if as_json:
            print(json.dumps([document(item) for item in found], indent=2))
        for item in found if not as_json else ():
            print(schedule_line(item))
        if not found:
            say(f"pipeline {workload.name} has no schedule", quiet=as_json)
        return
    if delete is not None:
        deleted = target.unschedule(workload, name=delete)
        print(json.dumps({"deleted": deleted}) if as_json else f"deleted: {deleted}")
        return
    timing = _timing(target.name, cron=cron, every=every or "", time_zone=time_zone)
    made = target.schedule(workload, timing=timing, parameters=parameters, name=name)
    if as_json:
        print(json.dumps(document(made), indent=2))
        return
    print(f"{made.action}: {schedule_line(made)}")
    if made.url:
        print(f"page:    {made.url}")
    where = reach.words(target.name)
    print(f"delete:  stoker schedule {target.name} {file} --delete {made.name}{where}")


def _timing(target: str, *, cron: str | None, every: str, time_zone: str) -> Timing:
    if target == "kubeflow":
        from stoker.orchestrators.kubeflow.schedules import cron_fields, period_seconds, period_text

        if time_zone != "UTC":
            raise UsageError(
                "a schedule on Kubeflow has no time zone: all follow the clock of its scheduler",
                where="--time-zone",
                fix="the time in UTC; its administrator may set another clock for all "
                "(CRON_SCHEDULE_TIMEZONE)",
            )
        if cron is not None:
            return Timing(expression=cron_fields(cron))
        return Timing(expression=period_text(period_seconds(every)))
    return Timing(
        expression=cron_expression(cron) if cron is not None else rate_expression(every),
        time_zone=checked_zone(time_zone),
    )
