"""Expressions of both schedulers: what is refused before the service, and the next start."""

from datetime import UTC, datetime

import pytest

from stoker.errors import UsageError
from stoker.pipelines.schedule_times import checked_times

# A Thursday.
NOW = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)


def next_start(cron: str, *, zone: str = "UTC", target: str = "sagemaker", now=NOW) -> str:
    start = checked_times(cron, time_zone=zone, target=target, now=now).next_after(now)
    return "" if start is None else f"{start:%a %Y-%m-%d %H:%M:%S%z}"


@pytest.mark.parametrize(
    ("cron", "zone", "expected"),
    [
        ("cron(0 3 ? * MON *)", "UTC", "Mon 2026-11-30 03:00:00+0000"),
        ("cron(0 3 ? * 2 *)", "UTC", "Mon 2026-11-30 03:00:00+0000"),
        ("cron(30 6 ? * MON-FRI *)", "Europe/Berlin", "Fri 2026-11-27 06:30:00+0100"),
        ("cron(0 12 * * ? *)", "UTC", "Fri 2026-11-27 12:00:00+0000"),
        ("cron(1/20 12 * * ? *)", "UTC", "Thu 2026-11-26 12:01:00+0000"),
        ("cron(0 8-18/5 ? * THU *)", "UTC", "Thu 2026-11-26 13:00:00+0000"),
        ("cron(0 0 L * ? *)", "UTC", "Mon 2026-11-30 00:00:00+0000"),
        ("cron(0 0 LW 1 ? *)", "UTC", "Fri 2027-01-29 00:00:00+0000"),
        ("cron(0 0 1W * ? *)", "UTC", "Tue 2026-12-01 00:00:00+0000"),
        ("cron(0 0 1W 5 ? *)", "UTC", "Mon 2027-05-03 00:00:00+0000"),
        ("cron(0 5 ? * 3#2 *)", "UTC", "Tue 2026-12-08 05:00:00+0000"),
        ("cron(0 5 ? * FRIL *)", "UTC", "Fri 2026-11-27 05:00:00+0000"),
        ("cron(0 5 ? * L *)", "UTC", "Sat 2026-11-28 05:00:00+0000"),
        ("cron(0 9 1,15 JAN,JUN ? *)", "UTC", "Fri 2027-01-01 09:00:00+0000"),
        ("cron(0 9 29 2 ? *)", "UTC", "Tue 2028-02-29 09:00:00+0000"),
        ("cron(0 9 1 1 ? 2040)", "UTC", "Sun 2040-01-01 09:00:00+0000"),
        # 02:30 of the night in which clocks go forward is left out, as AWS documents it.
        ("cron(30 2 28,29 3 ? *)", "Europe/Berlin", "Mon 2027-03-29 02:30:00+0200"),
        ("rate(12 hours)", "UTC", "Thu 2026-11-26 12:00:00+0000"),
        ("at(2027-01-31T06:00:00)", "Asia/Tokyo", "Sun 2027-01-31 06:00:00+0900"),
    ],
)
def test_eventbridge_starts_next(cron, zone, expected):
    assert next_start(cron, zone=zone) == expected


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 30 6 * * 1-5", "Fri 2026-11-27 06:30:00+0000"),
        ("0 0 3 * * mon", "Mon 2026-11-30 03:00:00+0000"),
        ("15 */30 * * * *", "Thu 2026-11-26 12:00:15+0000"),
        ("@daily", "Fri 2026-11-27 00:00:00+0000"),
        ("@weekly", "Sun 2026-11-29 00:00:00+0000"),
        ("@hourly", "Thu 2026-11-26 13:00:00+0000"),
        ("@every 12h", "Fri 2026-11-27 00:00:00+0000"),
        ("@every 1h30m", "Thu 2026-11-26 13:30:00+0000"),
        # Two days that are both named: either is enough.
        ("0 0 0 29 * 1", "Sun 2026-11-29 00:00:00+0000"),
        ("0 0 0 1 * ?", "Tue 2026-12-01 00:00:00+0000"),
    ],
)
def test_kubeflow_starts_next(cron, expected):
    assert next_start(cron, target="kubeflow") == expected


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("rate(1 days)", r"write rate\(1 day\)"),
        ("rate(5 hour)", r"write rate\(5 hours\)"),
        ("rate(0 hours)", "a rate of 0"),
        ("rate(2 weeks)", "unknown unit weeks"),
        ("rate(-1 hours)", "written rate"),
        ("rate(1.5 hours)", "written rate"),
        ("cron(61 3 ? * MON *)", "minute 61 is not in 0 to 59"),
        ("cron(0 25 ? * MON *)", "hour 25 is not in 0 to 23"),
        ("cron(0 3 0 * ? *)", "day 0 is not in 1 to 31"),
        ("cron(0 3 1 13 ? *)", "month 13 is not in 1 to 12"),
        ("cron(0 3 ? * 0 *)", "weekday 0 is not in 1 to 7"),
        ("cron(0 3 ? * MO *)", "weekday MO"),
        ("cron(0 3 * * * *)", "neither is ?"),
        ("cron(0 3 1 * MON *)", "neither is ?"),
        ("cron(0 3 ? * ? *)", "both are ?"),
        ("cron(0 3 ? * MON 1969)", "year 1969"),
        ("cron(0 3 ? * MON)", "minute hour day month weekday year"),
        ("cron(*/0 3 ? * MON *)", "after / comes"),
        ("cron(30-10 3 ? * MON *)", "ends before it begins"),
        ("cron(0 3 ? * 2#6 *)", "after # comes 1 to 5"),
        ("cron(0 3 30 2 ? *)", "never fires"),
        ("cron(0 3 1 1 ? 2020)", "never fires"),
        ("at(2020-01-01T00:00:00)", "has passed"),
        ("at(2027-13-01T00:00:00)", "not an expression"),
        ("@daily", "not an expression of EventBridge Scheduler"),
        ("0 6 * * *", "not an expression of EventBridge Scheduler"),
    ],
)
def test_what_eventbridge_would_refuse_is_refused_before(cron, words):
    with pytest.raises(UsageError, match=words):
        checked_times(cron, time_zone="UTC", target="sagemaker", now=NOW)


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 61 3 * * *", "minute 61 is not in 0 to 59"),
        ("0 0 25 * * *", "hour 25 is not in 0 to 23"),
        ("60 0 3 * * *", "second 60"),
        ("0 0 3 * * 7", "weekday 7 is not in 0 to 6"),
        ("0 0 3 32 * *", "day 32"),
        ("0 0 3 L * *", "day L"),
        ("0 0 3 * * fri-mon", "ends before it begins"),
        ("0 0 3 31 4 *", "never fires"),
        ("0 3 * * *", "six fields"),
        ("@fortnightly", "unknown name @fortnightly"),
        ("@every 12", "written @every 12h"),
        ("@every 0h", "written @every 12h"),
        ("rate(1 day)", "six fields"),
        ("cron(0 3 ? * MON *)", "six fields"),
    ],
)
def test_what_kubeflow_would_refuse_is_refused_before(cron, words):
    with pytest.raises(UsageError) as raised:
        checked_times(cron, time_zone="UTC", target="kubeflow", now=NOW)
    assert words in f"{raised.value.what} {raised.value.fix}"


@pytest.mark.parametrize(
    ("zone", "target", "words"),
    [
        ("Europe/Berln", "sagemaker", "did you mean Europe/Berlin?"),
        ("CEST", "sagemaker", "no time zone CEST"),
        ("berlin", "sagemaker", "no time zone berlin"),
        ("../etc/passwd", "sagemaker", "no time zone"),
        ("+01:00", "sagemaker", "no time zone"),
        ("Europe/Berlin", "kubeflow", "knows only UTC"),
    ],
)
def test_a_zone_that_the_scheduler_does_not_know_is_refused(zone, target, words):
    cron = "rate(1 day)" if target == "sagemaker" else "@daily"
    with pytest.raises(UsageError) as raised:
        checked_times(cron, time_zone=zone, target=target, now=NOW)
    assert words in f"{raised.value.what} {raised.value.fix}"


def test_the_next_start_is_told_in_its_zone_and_in_utc():
    times = checked_times(
        "cron(0 3 ? * MON *)", time_zone="America/New_York", target="sagemaker", now=NOW
    )
    words = "Mon 2026-11-30 03:00 America/New_York (2026-11-30 08:00 UTC)"
    assert times.next_words(NOW) == words
    rate = checked_times("rate(1 day)", time_zone="UTC", target="sagemaker", now=NOW)
    assert rate.next_words(NOW) == "now, by AWS's documents, and then every day"
