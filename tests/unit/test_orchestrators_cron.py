"""Checks when schedules run: their expressions, how Unix's become theirs, and the next time."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.orchestrators.cron import (
    checked_zone,
    cron_expression,
    next_run,
    period,
    rate_expression,
)

FRIDAY = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 6 ? * MON *", "cron(0 6 ? * MON *)"),
        ("cron(0 6 * * ? *)", "cron(0 6 * * ? *)"),
        ("0 6 L * ? *", "cron(0 6 L * ? *)"),
        ("0 6 ? * FRI#2 *", "cron(0 6 ? * FRI#2 *)"),
        ("0 6 15W * ? *", "cron(0 6 15W * ? *)"),
        ("0 6 ? JAN-MAR 2-6 2026-2030", "cron(0 6 ? JAN-MAR 2-6 2026-2030)"),
    ],
)
def test_six_fields_stay_as_they_are(text: str, expected: str) -> None:
    assert cron_expression(text) == expected


@pytest.mark.parametrize(
    ("unix", "expected"),
    [
        ("0 6 * * *", "cron(0 6 * * ? *)"),
        ("*/15 * * * *", "cron(0/15 * * * ? *)"),
        ("5,*/20 */2 * * *", "cron(5,0/20 0/2 * * ? *)"),
        ("0 6 1 * *", "cron(0 6 1 * ? *)"),
        ("0 6 * * 1-5", "cron(0 6 ? * MON-FRI *)"),
        ("0 6 * * 0", "cron(0 6 ? * SUN *)"),
        ("0 6 * * 7", "cron(0 6 ? * SUN *)"),
        ("0 6 * * 5-7", "cron(0 6 ? * SUN,FRI,SAT *)"),
        ("0 6 * * */2", "cron(0 6 ? * SUN,TUE,THU,SAT *)"),
        ("0 6 * * mon,wed", "cron(0 6 ? * MON,WED *)"),
    ],
)
def test_five_fields_become_six_that_mean_the_same(unix: str, expected: str) -> None:
    assert cron_expression(unix) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 6 1 * 1", "both the days of the month and the days of the week"),
        ("0 6 * * MON *", "one of day-of-month and day-of-week is ?"),
        ("0 6 ? * ? *", "one of day-of-month and day-of-week is ?"),
        ("60 6 * * ? *", "minute 60 is not from 0 to 59"),
        ("0 24 * * ? *", "hour 24 is not from 0 to 23"),
        ("0 6 ? * MUN *", "day-of-week MUN is not"),
        ("0 6 ? * 0 *", "day-of-week 0 is not from 1 to 7"),
        ("0 6 * 13 ? *", "month 13 is not from 1 to 12"),
        ("0/x 6 * * ? *", "a number must follow /"),
        ("0 9-6 * * ? *", "runs backwards"),
        ("? 6 * * ? *", "minute ? is not from 0 to 59"),
        ("@daily", "it has 1 fields"),
        ("", "it has 0 fields"),
        ("0 6 * * ? * *", "it has 7 fields"),
    ],
)
def test_an_expression_that_cannot_be_is_refused_with_its_field(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        cron_expression(text)
    assert words in refused.value.what
    assert refused.value.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1d", "rate(1 day)"),
        ("12h", "rate(12 hours)"),
        ("30m", "rate(30 minutes)"),
        ("2 days", "rate(2 days)"),
        ("1 hour", "rate(1 hour)"),
        ("5min", "rate(5 minutes)"),
    ],
)
def test_a_period_becomes_a_rate(text: str, expected: str) -> None:
    assert rate_expression(text) == expected


@pytest.mark.parametrize("text", ["", "0d", "1w", "1.5h", "-1d", "day", "1d12h"])
def test_what_is_no_period_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a period"):
        rate_expression(text)


def test_an_unknown_time_zone_is_refused_with_the_nearest() -> None:
    assert checked_zone("Europe/Berlin") == "Europe/Berlin"
    with pytest.raises(UsageError) as refused:
        checked_zone("Europe/Berlim")
    assert "Europe/Berlin" in refused.value.fix


def test_a_time_zone_is_a_name_and_no_path() -> None:
    with pytest.raises(UsageError):
        checked_zone("../../etc/passwd")


@pytest.mark.parametrize(
    ("expression", "zone", "expected"),
    [
        ("cron(0 6 ? * MON *)", "UTC", datetime(2026, 11, 23, 6, 0, tzinfo=UTC)),
        ("cron(0 6 ? * MON *)", "Europe/Berlin", datetime(2026, 11, 23, 5, 0, tzinfo=UTC)),
        ("cron(0/15 * * * ? *)", "UTC", datetime(2026, 11, 20, 12, 15, tzinfo=UTC)),
        ("cron(0 12 * * ? *)", "UTC", datetime(2026, 11, 21, 12, 0, tzinfo=UTC)),
        ("cron(0 0 29 2 ? *)", "UTC", datetime(2028, 2, 29, 0, 0, tzinfo=UTC)),
        # A night of Friday in Auckland is Thursday's afternoon in UTC.
        ("cron(30 1 ? * FRI *)", "Pacific/Auckland", datetime(2026, 11, 26, 12, 30, tzinfo=UTC)),
        ("cron(0 6 * * ? 2020)", "UTC", None),
        ("cron(0 6 L * ? *)", "UTC", None),
        ("cron(0 6 ? * 6#2 *)", "UTC", None),
        ("at(2027-01-01T00:00:00)", "UTC", None),
    ],
)
def test_the_next_run_is_in_the_schedules_own_zone(
    expression: str, zone: str, expected: datetime | None
) -> None:
    assert next_run(expression, now=FRIDAY, time_zone=zone) == expected


def test_a_time_that_summer_time_leaves_out_is_left_out() -> None:
    before = datetime(2027, 3, 27, 12, 0, tzinfo=UTC)
    found = next_run("cron(30 2 * * ? *)", now=before, time_zone="Europe/Berlin")
    assert found == datetime(2027, 3, 29, 0, 30, tzinfo=UTC)


def test_a_rate_runs_a_whole_number_of_periods_after_its_start() -> None:
    start = FRIDAY - timedelta(hours=30)
    found = next_run("rate(12 hours)", now=FRIDAY, time_zone="UTC", start=start)
    assert found == FRIDAY + timedelta(hours=6)
    assert next_run("rate(1 day)", now=start, time_zone="UTC", start=FRIDAY) == FRIDAY
    assert next_run("rate(1 day)", now=FRIDAY, time_zone="UTC") is None


def test_only_a_rate_has_a_period() -> None:
    assert period("rate(1 hour)") == timedelta(hours=1)
    assert period("cron(0 6 * * ? *)") is None


numbers = st.sets(st.integers(0, 6), min_size=1, max_size=3)


@given(
    minute=st.integers(0, 59),
    hour=st.integers(0, 23),
    weekdays=numbers,
    hours_later=st.integers(0, 24 * 400),
)
def test_a_converted_expression_is_met_when_unixs_would_be(
    minute: int, hour: int, weekdays: set[int], hours_later: int
) -> None:
    now = FRIDAY + timedelta(hours=hours_later)
    zone = ZoneInfo("UTC")
    unix = f"{minute} {hour} * * {','.join(map(str, sorted(weekdays)))}"
    found = next_run(cron_expression(unix), now=now, time_zone="UTC")
    # The plain way: each minute of the next eight days, days counted as Unix does.
    candidates = (
        day.replace(hour=hour, minute=minute, tzinfo=zone)
        for day in (now + timedelta(days=n) for n in range(9))
        if (day.weekday() + 1) % 7 in weekdays
    )
    assert found == next(moment for moment in candidates if moment > now)
