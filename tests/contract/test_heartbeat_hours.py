"""`stoker schedule` tells the HeartbeatHours that the schedules of a pipeline need."""

from datetime import UTC, datetime

import pytest

from stoker.pipelines.sagemaker.heartbeat import alarm_hours, heartbeat_words, longest_gap_hours
from stoker.pipelines.schedules import Schedule
from stoker.platforms.aws import Aws
from support.moto_server import REGION

NOW = datetime(2026, 11, 27, 2, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "hours"),
    [
        ("rate(90 minutes)", 1.5),
        ("rate(1 day)", 24),
        ("rate(7 days)", 168),
        ("cron(0 3 * * ? *)", 24),
        ("cron(0 3 ? * MON-FRI *)", 72),
        ("cron(0 3 ? * MON *)", 168),
        ("cron(0 3 ? * MON#1 *)", 5 * 168),
        ("cron(0 3 1 * ? *)", 744),
        ("cron(0 3 L * ? *)", 744),
        ("cron(0 3 1 1 ? *)", 366 * 24),
        ("cron(0 9,17 ? * MON-FRI *)", 64),
        ("cron(0/5 8-9 ? * TUE,WED *)", 5 * 24 + 22 + 5 / 60),
        ("cron(* * * * ? *)", 1 / 60),
        ("at(2027-01-01T06:00:00)", None),
        ("by hand", None),
    ],
)
def test_the_longest_time_between_two_starts(cron, hours):
    found = longest_gap_hours([Schedule(name="a", cron=cron, time_zone="Asia/Tokyo")], now=NOW)
    assert found == (hours and pytest.approx(hours))


def test_of_several_schedules_the_most_frequent_one_that_is_on_counts():
    weekly = Schedule(name="w", cron="rate(7 days)")
    daily = Schedule(name="d", cron="rate(1 day)")
    hourly = Schedule(name="h", cron="rate(1 hour)", is_on=False)
    assert longest_gap_hours([weekly, daily, hourly], now=NOW) == 24
    assert longest_gap_hours([hourly], now=NOW) is None
    assert longest_gap_hours([], now=NOW) is None


@pytest.mark.parametrize(
    ("has", "said"),
    [
        (None, ""),
        (100, "the stack has 100: too short, it mails though all runs succeed"),
        (168, "the stack has 168: short, if a run takes 0 h"),
        (171.5, "the stack has 171.5: short, if a run takes 3.5 h"),
        (174, ""),
        (200, ""),
        (341, ""),
        (342, "the stack has 342: too long, it mails after more than one lost start"),
    ],
)
def test_what_the_stack_has_is_judged(has, said):
    words = heartbeat_words(167.2, has=has)
    assert words.startswith("heartbeat: HeartbeatHours=174 in the stack: 168 h between two starts")
    assert words.partition("longer")[2].removeprefix("; ") == said


def test_the_stacks_hours_are_read_from_its_alarm(aws_server):
    aws = Aws(region=REGION)
    assert alarm_hours(aws, "mnist") is None
    for pipeline, hours in (("mnist", 174), ("other", 30)):
        aws.call(
            "cloudwatch",
            "PutMetricAlarm",
            AlarmName=f"of-{pipeline}",
            Namespace="stoker",
            MetricName="hours_since_success",
            Dimensions=[{"Name": "PipelineName", "Value": pipeline}],
            Statistic="Maximum",
            Period=3600,
            EvaluationPeriods=2,
            Threshold=hours,
            ComparisonOperator="GreaterThanThreshold",
        )
    assert alarm_hours(aws, "mnist") == 174
