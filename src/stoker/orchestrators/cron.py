"""Schedules have cron and rate expressions, which are checked here; the next run is computed.

People write the five fields of Unix's cron, or the target's own six: AWS's are in this module,
those of Kubeflow's scheduler in `kubeflow.schedules`.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stoker.errors import UsageError
from stoker.records import nearest

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
# Four years have a leap day: an expression that is not met in them has no next run.
_HORIZON_DAYS = 4 * 366


@dataclass(frozen=True, slots=True)
class CronField:
    """Tells what a field may hold.

    Attributes:
        name: Name as errors call it.
        low, high: The least and the greatest number.
        words: Names of the numbers from `low` on.
        special: Letters with a meaning that only the service checks.
        may_ask: Whether `?` is the same as `*`.
        example: A whole expression, for errors.
    """

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    special: str = ""
    may_ask: bool = False
    example: str = ""

    def values(self, text: str, *, expression: str) -> frozenset[int]:
        """Returns all numbers that the field's text means.

        Raises:
            UsageError: Naming the invalid part.
        """
        found: set[int] = set()
        for part in text.split(","):
            span, slash, step = part.partition("/")
            if slash and not (step.isascii() and step.isdigit() and int(step) > 0):
                raise cron_error(
                    expression, f"{self.name} {part}: a number must follow /", self.example
                )
            first, dash, last = span.partition("-")
            if span == "*" or (span == "?" and self.may_ask):
                low, high = self.low, self.high
            else:
                low = self._number(first, expression=expression)
                high = self._number(last, expression=expression) if dash else low
                # `5/15` is 5, 20, 35 ...: from 5 to the end.
                high = self.high if slash and not dash else high
            if low > high:
                raise cron_error(expression, f"{self.name} {part} runs backwards", "as 1,2,5")
            found.update(range(low, high + 1, int(step) if slash else 1))
        return frozenset(found)

    def is_special(self, text: str) -> bool:
        """Returns whether the text has one of the letters that the service alone checks."""
        return any(letter in text for letter in self.special) and text not in self.words

    def _number(self, text: str, *, expression: str) -> int:
        if text.upper() in self.words:
            return self.low + self.words.index(text.upper())
        if not (text.isascii() and text.isdigit()) or not self.low <= int(text) <= self.high:
            why = f"{self.name} {text} is not from {self.low} to {self.high}"
            raise cron_error(expression, why, self.example)
        return int(text)


def cron_error(expression: str, why: str, fix: str) -> UsageError:
    """Returns the error of an invalid expression."""
    return UsageError(f"--cron '{expression}': {why}", fix=fix)


def next_time(
    is_day: Callable[[date], bool],
    *,
    hours: Iterable[int],
    minutes: Iterable[int],
    seconds: Iterable[int] = (0,),
    now: datetime,
    zone: ZoneInfo,
) -> datetime | None:
    """Returns the first time after `now`, in UTC; None where there is none in four years.

    Args:
        is_day: Whether a day is one of the schedule's.
        hours, minutes, seconds: The times of such a day.
        now: Time with a time zone.
        zone: Days and hours are read in this time zone.
    """
    today = now.astimezone(zone).date()
    times = [sorted(hours), sorted(minutes), sorted(seconds)]
    for day in (today + timedelta(days=offset) for offset in range(_HORIZON_DAYS)):
        for hour, minute, second in itertools.product(*times) if is_day(day) else ():
            local = datetime.combine(day, time(hour, minute, second), tzinfo=zone)
            found = local.astimezone(UTC)
            # A time that does not exist because of summer time is left out, as AWS does.
            is_real = found.astimezone(zone).replace(tzinfo=None) == local.replace(tzinfo=None)
            if found > now and is_real:
                return found
    return None


_EXAMPLE = "six fields: minute hour day-of-month month day-of-week year, as '0 6 ? * MON-FRI *'"
_EVERY = re.compile(r"([1-9][0-9]{0,4})\s*(m|h|d)(?:in|our|ay)?(?:ute)?s?", re.ASCII)
_UNITS = {"m": "minute", "h": "hour", "d": "day"}
_RATE = re.compile(r"rate\(([1-9][0-9]{0,4}) (minute|hour|day)s?\)", re.ASCII)


_field = partial(CronField, example=_EXAMPLE)
_FIELDS = (
    _field("minute", 0, 59),
    _field("hour", 0, 23),
    _field("day-of-month", 1, 31, special="LW", may_ask=True),
    _field("month", 1, 12, MONTHS),
    _field("day-of-week", 1, 7, DAYS, special="L#", may_ask=True),
    _field("year", 1970, 2199),
)


def cron_expression(text: str) -> str:
    """Returns `cron(...)` as AWS takes it; five fields of Unix's cron are turned into its six.

    Raises:
        UsageError: Naming the field that cannot be, or what Unix's expression means that AWS's
            cannot say.
    """
    bare = text.strip()
    if bare.lower().startswith("cron(") and bare.endswith(")"):
        bare = bare[5:-1]
    fields = bare.split()
    if len(fields) == 5:
        fields = _from_unix(fields, expression=bare)
    if len(fields) != 6:
        raise cron_error(bare, f"it has {len(fields)} fields", _EXAMPLE)
    # AWS's rule: exactly one of the two is `?`.
    if (fields[2] == "?") == (fields[4] == "?"):
        raise cron_error(
            bare,
            "one of day-of-month and day-of-week is ?, the other says when",
            "as '0 6 * * ? *' for each day, '0 6 ? * MON *' for each Monday",
        )
    for field, part in zip(_FIELDS, fields, strict=True):
        if not field.is_special(part):
            field.values(part, expression=bare)
    return f"cron({' '.join(fields)})"


def rate_expression(text: str) -> str:
    """Returns `rate(...)` of a period such as 1d, 12h or 30m.

    Raises:
        UsageError: If it is not a period.
    """
    found = _EVERY.fullmatch(text.strip().lower())
    if found is None:
        raise UsageError(f"--every {text} is not a period", fix="as --every 1d, 12h or 30m")
    number, unit = int(found.group(1)), _UNITS[found.group(2)]
    return f"rate({number} {unit}{'' if number == 1 else 's'})"


def checked_zone(name: str) -> str:
    """Returns the name of a time zone, once it is known that it exists.

    Raises:
        UsageError: With the nearest known name.
    """
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # It reads the whole folder of time zones, which only the error needs.
        from zoneinfo import available_timezones

        raise UsageError(
            f"there is no time zone {name}",
            fix=nearest(name, sorted(available_timezones())) if available_timezones() else "",
        ) from None
    return name


def period(expression: str) -> timedelta | None:
    """Returns the period of `rate(...)`; None for any other expression."""
    found = _RATE.fullmatch(expression)
    return timedelta(**{f"{found.group(2)}s": int(found.group(1))}) if found else None


def next_run(
    expression: str, *, now: datetime, time_zone: str, start: datetime | None = None
) -> datetime | None:
    """Returns the next time of AWS's expression, in UTC; None where it is not known.

    Args:
        expression: `cron(...)` or `rate(...)`.
        now: Time with a time zone.
        time_zone: A cron expression is read in this time zone.
        start: First run of a rate.
    """
    every = period(expression)
    if every is not None:
        if start is None:
            return None
        # Rounded up: the first start that is not in the past.
        missed = max(0, -((start - now) // every))
        return (start + missed * every).astimezone(UTC)
    parts = expression[5:-1].split() if expression.startswith("cron(") else []
    if len(parts) != 6 or any(f.is_special(t) for f, t in zip(_FIELDS, parts, strict=True)):
        return None
    minutes, hours, days, months, weekdays, years = (
        field.values(part, expression=expression)
        for field, part in zip(_FIELDS, parts, strict=True)
    )

    def is_day(day: date) -> bool:
        # AWS counts weekdays from 1 for Sunday.
        is_date = day.year in years and day.month in months and day.day in days
        return is_date and day.isoweekday() % 7 + 1 in weekdays

    return next_time(is_day, hours=hours, minutes=minutes, now=now, zone=ZoneInfo(time_zone))


def _from_unix(fields: Sequence[str], *, expression: str) -> list[str]:
    minute, hour, day, month, weekday = fields
    if day not in ("*", "?") and weekday not in ("*", "?"):
        raise cron_error(
            expression,
            "in Unix's cron it runs on both the days of the month and the days of the week; "
            "AWS's has one of them",
            "make two schedules, with --name",
        )
    if weekday in ("*", "?"):
        days = ["*" if day == "?" else day, month, "?"]
    else:
        days = ["?", month, _unix_weekdays(weekday, expression=expression)]
    # AWS counts from a number: `*/5` is `0/5` there.
    return [*(re.sub(r"(^|,)\*/", r"\g<1>0/", text) for text in (minute, hour)), *days, "*"]


def _unix_weekdays(text: str, *, expression: str) -> str:
    """Turns Unix's weekdays into names: Unix counts from 0 or 7 for Sunday, AWS from 1."""
    if text == "1-5":
        return "MON-FRI"
    numbers = _field("day-of-week", 0, 7, DAYS).values(text, expression=expression)
    return ",".join(DAYS[number] for number in sorted({number % 7 for number in numbers}))
