"""The stack's heartbeat: after how many hours without a run that succeeded it mails."""

import math
from collections.abc import Sequence
from datetime import datetime

from stoker.errors import ServiceError, UsageError
from stoker.pipelines.schedule_times import checked_times
from stoker.pipelines.schedules import Schedule
from stoker.platforms.aws import Aws
from stoker.records.base import mappings

# For a run, and its start: as in the table of docs/how-to/monitoring.md.
_SLACK_HOURS = 6
_METRIC = {"Namespace": "stoker", "MetricName": "hours_since_success"}


def longest_gap_hours(schedules: Sequence[Schedule], *, now: datetime) -> float | None:
    """Returns the hours between two starts, at most, of the schedule that starts most often.

    Args:
        schedules: Those of one pipeline; disabled ones do not count.
        now: With its zone.

    Returns:
        None: no schedule starts more than one run.
    """
    gaps = [_gap_of(schedule, now) for schedule in schedules if schedule.is_on]
    return min((gap for gap in gaps if gap is not None), default=None)


def _gap_of(schedule: Schedule, now: datetime) -> float | None:
    zone = schedule.time_zone
    try:
        times = checked_times(schedule.cron, time_zone=zone, target="sagemaker", now=now)
    except UsageError:
        # Made by hand, or a start that is over.
        return None
    return times.longest_gap_hours(now)


def alarm_hours(aws: Aws, pipeline: str) -> float | None:
    """Returns the HeartbeatHours that the stack has; None: none, or it may not be read."""
    named = [{"Name": "PipelineName", "Value": pipeline}]
    try:
        answer = aws.call("cloudwatch", "DescribeAlarmsForMetric", **_METRIC, Dimensions=named)
    except ServiceError:
        return None
    alarms = mappings(answer, "MetricAlarms")
    thresholds = [alarm.get("Threshold") for alarm in alarms if alarm.get("Dimensions") == named]
    return min((float(str(hours)) for hours in thresholds if hours is not None), default=None)


def heartbeat_words(gap_hours: float, *, has: float | None) -> str:
    """Returns the HeartbeatHours that a schedule needs, and what is wrong with those of the stack.

    Args:
        gap_hours: Between two starts, at most.
        has: The stack's; None: unknown.
    """
    gap = math.ceil(gap_hours)
    needed = gap + _SLACK_HOURS
    words = f"heartbeat: HeartbeatHours={needed} in the stack: {gap} h between two starts, "
    words += f"{_SLACK_HOURS} h for a run; more where a run takes longer"
    if has is not None and has < gap:
        return f"{words}; the stack has {has:g}: too short, it mails though all runs succeed"
    if has is not None and has < needed:
        return f"{words}; the stack has {has:g}: short, if a run takes {has - gap:g} h"
    if has is not None and has >= needed + gap:
        return f"{words}; the stack has {has:g}: too long, it mails after more than one lost start"
    return words
