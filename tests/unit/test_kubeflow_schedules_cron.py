"""Kubeflow's cron has six fields with seconds, made of Unix's five; everything else is refused."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.orchestrators.kubeflow.schedules import (
    cron_fields,
    next_start,
    period_seconds,
    period_text,
)

NOW = datetime(2026, 11, 20, 10, 30, tzinfo=UTC)  # a Friday


@pytest.mark.parametrize(
    ("typed", "fields"),
    [
        ("0 3 * * *", "0 0 3 * * *"),
        ("*/15 * * * MON-FRI", "0 */15 * * * MON-FRI"),
        ("0 3 * * 7", "0 0 3 * * 0"),
        ("0 3 * * 5-7", "0 0 3 * * 0,5,6"),
        ("30 0 3 * * *", "30 0 3 * * *"),
        ("0 0 9 ? * 2-6", "0 0 9 ? * 2-6"),
        (" 0 3  * * * ", "0 0 3 * * *"),
        ("0 3 1 jan *", "0 0 3 1 jan *"),
    ],
)
def test_five_fields_get_seconds_and_six_stay(typed: str, fields: str) -> None:
    assert cron_fields(typed) == fields


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        # AWS's form, which would mean something else: its first field is the minute.
        ("cron(0 3 * * ? *)", "second cron(0 is not from 0 to 59"),
        ("0 3 * * ? *", "month ? is not from 1 to 12"),
        ("0 3 ? * MON-FRI *", "hour ? is not from 0 to 23"),
        ("0 0 3 L * *", "day L is not from 1 to 31"),
        ("0 0 3 ? * 6#3", "weekday 6#3 is not from 0 to 6"),
        ("0 0 3 15W * *", "day 15W is not from 1 to 31"),
        # Kubeflow's scheduler has one time zone for all schedules.
        ("TZ=Europe/Berlin 0 3 * * *", "second TZ=Europe/Berlin: a number must follow /"),
        ("CRON_TZ=UTC 0 0 3 * * *", "it has 7 fields"),
        ("@daily", "it has 1 fields"),
        ("@every 12h", "it has 2 fields"),
        ("0 3 * *", "it has 4 fields"),
        ("0 3 * * * 2026 1", "it has 7 fields"),
        ("60 3 * * *", "minute 60 is not from 0 to 59"),
        ("0 0 3 * * 7", "weekday 7 is not from 0 to 6"),
        ("0 24 * * *", "hour 24 is not from 0 to 23"),
        ("0 3 0 * *", "day 0 is not from 1 to 31"),
        ("0 3 * 13 *", "month 13 is not from 1 to 12"),
        ("0 5-3 * * *", "hour 5-3 runs backwards"),
        ("*/0 * * * *", "a number must follow /"),
        ("٣ * * * *", "is not from 0 to 59"),
        ("? 0 3 * * *", "second ? is not from 0 to 59"),
        ("", "it has 0 fields"),
    ],
)
def test_what_the_scheduler_would_refuse_or_read_otherwise_is_refused(typed: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        cron_fields(typed)
    assert why in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("fields", "following"),
    [
        ("0 0 3 * * *", datetime(2026, 11, 21, 3, tzinfo=UTC)),
        ("0 30 10 * * *", datetime(2026, 11, 21, 10, 30, tzinfo=UTC)),
        ("30 30 10 * * *", datetime(2026, 11, 20, 10, 30, 30, tzinfo=UTC)),
        ("0 0 3 * * 1", datetime(2026, 11, 23, 3, tzinfo=UTC)),
        ("0 0 3 * * SUN", datetime(2026, 11, 22, 3, tzinfo=UTC)),
        ("0 0 0 29 2 *", datetime(2028, 2, 29, tzinfo=UTC)),
        # Days and weekdays together: either is enough, unless one of them is a star.
        ("0 0 3 1 * MON", datetime(2026, 11, 23, 3, tzinfo=UTC)),
        ("0 0 3 24 * TUE", datetime(2026, 11, 24, 3, tzinfo=UTC)),
        ("0 0 3 */2 * MON", datetime(2026, 11, 23, 3, tzinfo=UTC)),
        ("0 0 3 31 2 *", None),
        ("not cron", None),
        ("@hourly", None),
    ],
)
def test_the_next_start(fields: str, following: datetime | None) -> None:
    assert next_start(fields, now=NOW) == following


@given(minute=st.integers(0, 59), hour=st.integers(0, 23), seconds=st.integers(0, 400 * 86400))
def test_a_daily_schedule_starts_within_a_day_at_its_time(
    minute: int, hour: int, seconds: int
) -> None:
    now = NOW + timedelta(seconds=seconds)
    found = next_start(cron_fields(f"{minute} {hour} * * *"), now=now)
    assert found is not None
    assert timedelta(0) < found - now <= timedelta(days=1)
    assert (found.hour, found.minute, found.second) == (hour, minute, 0)


@pytest.mark.parametrize(
    ("typed", "seconds", "text"),
    [
        ("1d", 86400, "every 1 d"),
        ("12h", 43200, "every 12 h"),
        ("24 hours", 86400, "every 1 d"),
        ("30m", 1800, "every 30 min"),
        ("90 s", 90, "every 90 s"),
    ],
)
def test_periods_in_seconds_and_words(typed: str, seconds: int, text: str) -> None:
    assert period_seconds(typed) == seconds
    assert period_text(seconds) == text


@given(st.integers(60, 999_999))
def test_a_period_s_words_are_read_back(seconds: int) -> None:
    assert period_seconds(period_text(seconds).removeprefix("every ")) == seconds


@pytest.mark.parametrize("typed", ["", "d", "0h", "1.5h", "-1h", "59s", "1w", "1h30m", "٣h"])
def test_what_is_no_period_is_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="not a period of a minute or more"):
        period_seconds(typed)
