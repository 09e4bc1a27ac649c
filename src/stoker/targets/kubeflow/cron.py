"""When Kubeflow starts runs: cron with seconds, as its scheduler reads it, and periods."""

import calendar
import re
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import NoReturn

from stoker.errors import UsageError
from stoker.targets.cron_field import DAYS, HORIZON_DAYS, MONTHS, CronField, refuse

_MACROS = {
    "@hourly": "0 0 * * * *",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@weekly": "0 0 0 * * 0",
    "@monthly": "0 0 0 1 * *",
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
}
_EXAMPLE = "five fields: minute hour day month weekday; or six with seconds first: '0 30 6 * * 1-5'"
_EVERY = re.compile(r"([1-9][0-9]{0,6})\s*(s|m|h|d)(?:ec|in|our|ay)?(?:ond|ute)?s?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# The scheduler looks at what is due every few seconds; runs take minutes.
MIN_PERIOD_SECONDS = 60


_field = partial(CronField, example=_EXAMPLE)
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
    """Six fields with seconds first, as Kubeflow's scheduler takes them; five of Unix are turned.

    Raises:
        UsageError: Naming the field that cannot be; for AWS's form, which would mean something
            else here.
    """
    bare = text.strip()
    if bare.lower().startswith("@every"):
        _refuse(bare, "that is a period", fix="--every 12h")
    if bare.lower().startswith(("tz=", "cron_tz=")):
        _refuse(bare, "Kubeflow's scheduler has no time zones of schedules", fix="times in UTC")
    bare = _MACROS.get(bare.lower(), bare)
    if bare.lower().startswith("cron("):
        _refuse(bare, "that is AWS's form")
    fields = bare.split()
    if len(fields) == 5:
        fields = ["0", *fields[:4], _unix_weekday(fields[4], expression=bare)]
    if len(fields) != 6:
        _refuse(bare, f"it has {len(fields)} fields")
    if fields[2] == "?" or fields[4] == "?":
        _refuse(bare, "that is AWS's form: its first field is the minute, here it is the second")
    if re.search(r"[LW#]", re.sub("|".join(MONTHS + DAYS), "", " ".join(fields).upper())):
        _refuse(bare, "L, W and # are AWS's: Kubeflow's scheduler has no last or nearest days")
    for field, part in zip(_FIELDS, fields, strict=True):
        field.values(part, expression=bare)
    return " ".join(fields)


def period_seconds(text: str) -> int:
    """Seconds of a period such as 1d, 12h or 30m.

    Raises:
        UsageError: If it is none, or shorter than a minute.
    """
    found = _EVERY.fullmatch(text.strip().lower())
    seconds = int(found.group(1)) * _SECONDS[found.group(2)] if found else 0
    if seconds < MIN_PERIOD_SECONDS:
        raise UsageError(
            f"--every {text} is no period of a minute or more", fix="as --every 1d, 12h or 30m"
        )
    return seconds


def period_text(seconds: int) -> str:
    """`every 12 h` for a period in seconds."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"every {seconds // size} {unit}"
    return f"every {seconds} s"


def next_start(expression: str, *, now: datetime) -> datetime | None:
    """When six fields are met next, in UTC; None where that cannot be told.

    Args:
        expression: As the scheduler has it; others than ours may have made it.
        now: With a time zone.
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
    is_either = not any(_has_star(fields[place]) for place in (3, 5))
    today = now.astimezone(UTC).date()
    for offset in range(HORIZON_DAYS):
        day = today + timedelta(days=offset)
        of_days = (day.day in days, _weekday(day) in weekdays)
        if day.month not in months or not (any(of_days) if is_either else all(of_days)):
            continue
        for hour in sorted(hours):
            for minute in sorted(minutes):
                for second in sorted(seconds):
                    found = datetime.combine(day, time(hour, minute, second), tzinfo=UTC)
                    if found > now:
                        return found
    return None


def _has_star(text: str) -> bool:
    return any(part[:1] in ("*", "?") for part in text.split(","))


def _weekday(day: date) -> int:
    """0 for Sunday ... 6 for Saturday."""
    return (calendar.weekday(day.year, day.month, day.day) + 1) % 7


def _unix_weekday(text: str, *, expression: str) -> str:
    """Unix calls Sunday 0 and 7; the scheduler 0 only."""
    if "7" not in text:
        return text
    numbers = {number % 7 for number in _UNIX_WEEKDAY.values(text, expression=expression)}
    return ",".join(str(number) for number in sorted(numbers))


def _refuse(expression: str, why: str, *, fix: str = _EXAMPLE) -> NoReturn:
    refuse(expression, why, fix)


__all__ = ["cron_fields", "next_start", "period_seconds", "period_text"]
