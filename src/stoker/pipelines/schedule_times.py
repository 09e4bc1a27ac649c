"""Expressions of both schedulers: checked before the service, and when they fire next.

EventBridge Scheduler: cron(MINUTE HOUR DAY MONTH WEEKDAY YEAR), rate(N UNIT) and at(TIME). Kubeflow
reads them with robfig/cron 1.2: six fields, seconds first, @daily and the like, @every 12h.
"""

import calendar
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import cache

from stoker.errors import UsageError
from stoker.records import nearest

_IsDay = Callable[[date], bool]
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_NUMBER = re.compile(r"[0-9]{1,4}")
_RATE = re.compile(r"rate\(([0-9]+) ([a-z]+)\)")
_UNITS = {"minute": 60.0, "hour": 3600.0, "day": 86400.0}
# Go's durations that a schedule can use.
_EVERY = re.compile(r"@every ((?:[0-9]+(?:\.[0-9]+)?[hms])+)")
_GO_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_NAMED = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
_LAST_YEAR = 2199
# From one 29 February to the next there may be 8 years (2096 to 2104).
_SEARCHED_YEARS = 9
# For the longest time between two starts.
_WATCHED_DAYS = 3 * 366
_MAX_STARTS = 5000
_FIXES = {
    "sagemaker": "'cron(0 6 ? * MON-FRI *)': minute hour day month weekday year; 'rate(1 day)'",
    "kubeflow": "six fields, seconds first, such as '0 30 6 * * 1-5', in UTC; or '@every 12h'",
}
_SERVICES = {"sagemaker": "EventBridge Scheduler", "kubeflow": "Kubeflow's scheduler"}
_UTC = ("UTC", "Etc/UTC", "GMT", "Etc/GMT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What a field of a cron expression counts.

    Attributes:
        name: For errors.
        low: Its smallest number.
        high: Its largest number.
        names: Names of its numbers, from `low` on.
    """

    name: str
    low: int
    high: int
    names: Sequence[str] = ()

    def times(self, field: str) -> tuple[int, ...]:
        """Returns the numbers of a field in their order; raises as `numbers`."""
        return tuple(sorted(self.numbers(field)))

    def numbers(self, field: str, *, may_wrap: bool = False) -> frozenset[int]:
        """Returns the numbers of a field: *, 3, 1-5, MON-FRI, */15, 10/20, and lists of these.

        Args:
            field: Its text.
            may_wrap: Whether FRI-MON is a range.

        Raises:
            ValueError: If it is none.
        """
        chosen: set[int] = set()
        for part in field.split(","):
            span, slash, step = part.partition("/")
            if slash and not (_NUMBER.fullmatch(step) and int(step)):
                raise ValueError(f"{self.name} {part}: after / comes a whole number above 0")
            first, last = self._ends(span, field=field, has_step=bool(slash))
            numbers = [*range(first, last + 1)]
            if first > last:
                if not may_wrap:
                    raise ValueError(f"{self.name} {span} ends before it begins")
                numbers = [*range(first, self.high + 1), *range(self.low, last + 1)]
            if slash:
                numbers = numbers[:: int(step)]
            chosen.update(numbers)
        return frozenset(chosen)

    def _ends(self, span: str, *, field: str, has_step: bool) -> tuple[int, int]:
        """Returns the first and the last number of `*`, 3 or 1-5; with a step 3 has no end."""
        if span in ("*", "?"):
            return self.low, self.high
        begin, dash, end = span.partition("-")
        first = self._number(begin, field)
        if dash:
            return first, self._number(end, field)
        if has_step:
            return first, self.high
        return first, first

    def _number(self, text: str, field: str) -> int:
        if text.upper() in self.names:
            return self.low + self.names.index(text.upper())
        if not _NUMBER.fullmatch(text) or not self.low <= int(text) <= self.high:
            raise ValueError(f"{self.name} {text or field} is not in {self.low} to {self.high}")
        return int(text)


_YEAR = _Unit(name="year", low=1970, high=_LAST_YEAR)
_MONTH = _Unit(name="month", low=1, high=12, names=_MONTHS)
_DAY = _Unit(name="day", low=1, high=31)
# EventBridge counts from 1, Kubeflow from 0; both begin with SUN.
_WEEKDAY = _Unit(name="weekday", low=1, high=7, names=_WEEKDAYS)
_WEEKDAY_FROM_0 = _Unit(name="weekday", low=0, high=6, names=_WEEKDAYS)
_HOUR = _Unit(name="hour", low=0, high=23)
_MINUTE = _Unit(name="minute", low=0, high=59)
_SECOND = _Unit(name="second", low=0, high=59)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """When a schedule starts runs.

    Attributes:
        seconds: Between two starts, of a rate; None: it has times of day.
        starts_at_once: Of a rate: whether the service starts the first run when it is made.
        once: The only start, as in at(2027-01-01T06:00:00), without its zone.
        is_day: Whether there are starts on a day.
        hours: Hours with starts; minutes and seconds likewise.
        last_year: Year after which there are no starts.
    """

    text: str
    time_zone: str
    seconds: float | None = None
    starts_at_once: bool = False
    once: datetime | None = None
    is_day: _IsDay = lambda day: True
    hours: tuple[int, ...] = ()
    minutes: tuple[int, ...] = ()
    second: tuple[int, ...] = (0,)
    last_year: int | None = None

    def next_after(self, now: datetime) -> datetime | None:
        """Returns the first start after `now` in the schedule's zone; None: there is none."""
        zone = _zone(self.time_zone)
        if self.seconds is not None:
            if self.starts_at_once:
                return now.astimezone(zone)
            return (now + timedelta(seconds=self.seconds)).astimezone(zone)
        for moment in self._moments(now.astimezone(zone).date()):
            start = moment.replace(tzinfo=zone)
            as_utc = start.astimezone(UTC)
            # An hour that the clock jumps over in spring has no starts.
            exists = as_utc.astimezone(zone).replace(tzinfo=None) == moment
            if exists and as_utc > now:
                return start
        return None

    def _moments(self, first: date) -> Iterator[datetime]:
        """Yields its starts from a day on, by the clock of its zone."""
        if self.once:
            yield self.once
            return
        last_year = self.last_year or first.year + _SEARCHED_YEARS
        day = first
        while day.year <= min(last_year, _LAST_YEAR):
            if self.is_day(day):
                for clock in itertools.product(self.hours, self.minutes, self.second):
                    yield datetime.combine(day, time(*clock))
            day += timedelta(days=1)

    def longest_gap_hours(self, now: datetime) -> float | None:
        """Returns the hours between two starts, at most, by the clock of its zone.

        None: it starts one run.
        """
        if self.seconds is not None:
            return self.seconds / 3600
        if self.once:
            return None
        moments = self._moments(now.date())
        first = next(moments, None)
        if first is None:
            return None
        # Longer than any gap that comes again; of many starts a day some thousands are enough.
        until = first + timedelta(days=_WATCHED_DAYS)
        later = itertools.takewhile(lambda each: each < until, moments)
        starts = [first, *itertools.islice(later, _MAX_STARTS)]
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        if gaps:
            return max(gaps).total_seconds() / 3600
        return None

    def next_words(self, now: datetime) -> str:
        """Returns when it fires next, in its zone, and in UTC where that is another time."""
        if not has_zones():
            return ""
        start = self.next_after(now)
        if start is None:
            return ""
        shown = f"{start:%a %Y-%m-%d %H:%M} {self.time_zone}"
        if self.starts_at_once:
            shown = f"now, by AWS's documents, and then every {self.text[5:-1].removeprefix('1 ')}"
        elif start.utcoffset():
            shown += f" ({start.astimezone(UTC):%Y-%m-%d %H:%M} UTC)"
        return shown


def has_zones() -> bool:
    """Returns whether this machine knows time zones; minimal images know none."""
    try:
        _zone("Europe/Berlin")
    except LookupError:
        return False
    return True


def _zone(name: str) -> tzinfo:
    # Here, as it imports sysconfig: a process that needs no zone stays light.
    from zoneinfo import ZoneInfo

    return ZoneInfo(name)


def checked_times(
    cron: str, *, time_zone: str, target: str, now: datetime, where: str = "--cron"
) -> ScheduleTimes:
    """Returns an expression's times, for both services.

    Args:
        cron: The expression, in the service's own words.
        time_zone: Its zone, an IANA name.
        target: sagemaker or kubeflow.
        now: With its zone; a schedule must fire after it.
        where: The option or key that has the expression.

    Raises:
        UsageError: If the service would refuse it, or it never fires.
    """
    _check_zone(time_zone, target=target, where=where)
    try:
        if target == "sagemaker":
            times = _of_eventbridge(cron, time_zone)
        else:
            times = _of_kubeflow(cron, time_zone)
    except ValueError as err:
        what = f"{where.rpartition(' ')[2]} '{cron}' is not an expression of {_SERVICES[target]}"
        if str(err):
            what += f": {err}"
        raise UsageError(what, where=where, fix=_FIXES[target]) from None
    if has_zones() and times.next_after(now) is None:
        what = f"'{cron}' never fires: no such day lies ahead"
        if times.once:
            what = f"'{cron}' has passed"
        raise UsageError(what, where=where, fix="correct day, month or year")
    return times


def _check_zone(name: str, *, target: str, where: str) -> None:
    if target == "kubeflow" and name not in _UTC:
        raise UsageError(
            f"Kubeflow's scheduler knows only UTC, not the time zone {name}",
            where=where,
            fix="write the hours in UTC, and leave the time zone out",
        )
    if not has_zones() or name in _UTC:
        return
    if name not in _zone_names():
        near = nearest(name, sorted(_zone_names()))
        raise UsageError(
            f"there is no time zone {name}",
            where=where,
            fix=f"{near}; names are those of IANA, such as Europe/Berlin",
        )


@cache
def _zone_names() -> frozenset[str]:
    """Returns this machine's names of zones; to list them opens 600 files."""
    from zoneinfo import available_timezones

    return frozenset(available_timezones())


def _of_eventbridge(text: str, zone: str) -> ScheduleTimes:
    if text.startswith("rate("):
        return _rate(text, zone)
    if text.startswith("at("):
        moment = text.removeprefix("at(").removesuffix(")")
        if not re.fullmatch(r"at\([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\)", text):
            raise ValueError("a time is written at(2027-01-31T06:00:00)")
        return ScheduleTimes(text=text, time_zone=zone, once=datetime.fromisoformat(moment))
    fields = text.removeprefix("cron(").removesuffix(")").split(" ")
    if not re.fullmatch(r"cron\(\S+( \S+){5}\)", text):
        raise ValueError("")
    minute, hour, day, month, weekday, year = fields
    if (day == "?") == (weekday == "?"):
        found = "both are ?" if day == "?" else "neither is ?"
        raise ValueError(f"one of day ({day}) and weekday ({weekday}) must be ?, and {found}")
    years = _YEAR.numbers(year)
    months = _MONTH.numbers(month, may_wrap=True)
    is_day = _days_of_month(day) if weekday == "?" else _weekdays(weekday)
    return ScheduleTimes(
        text=text,
        time_zone=zone,
        is_day=lambda each: each.month in months and each.year in years and is_day(each),
        hours=_HOUR.times(hour),
        minutes=_MINUTE.times(minute),
        last_year=None if year == "*" else max(years),
    )


def _rate(text: str, zone: str) -> ScheduleTimes:
    found = _RATE.fullmatch(text)
    if not found:
        raise ValueError("a rate is written rate(12 hours)")
    count = int(found[1])
    unit = found[2]
    one = unit.removesuffix("s")
    if one not in _UNITS:
        raise ValueError(f"unknown unit {unit}: use minutes, hours or days")
    if not count:
        raise ValueError("a rate of 0 is not possible")
    right_unit = one if count == 1 else f"{one}s"
    if unit != right_unit:
        raise ValueError(f"write rate({count} {right_unit})")
    return ScheduleTimes(
        text=text, time_zone=zone, seconds=count * _UNITS[one], starts_at_once=True
    )


def _of_kubeflow(text: str, zone: str) -> ScheduleTimes:
    if text.startswith("@every"):
        seconds = 0.0
        if match := _EVERY.fullmatch(text):
            parts = re.findall(r"([0-9.]+)([hms])", match[1])
            seconds = sum(float(count) * _GO_UNITS[unit] for count, unit in parts)
        if seconds < 1:
            raise ValueError("a rate is written @every 12h, or @every 1h30m")
        return ScheduleTimes(text=text, time_zone=zone, seconds=seconds)
    if text.startswith("@") and text not in _NAMED:
        raise ValueError(f"unknown name {text}: {nearest(text, list(_NAMED))}")
    fields = _NAMED.get(text, text).split(" ")
    if len(fields) != 6 or not all(fields):
        raise ValueError("")
    second, minute, hour, day, month, weekday = fields
    months = _MONTH.numbers(month)
    days = _DAY.numbers(day)
    weekdays = _WEEKDAY_FROM_0.numbers(weekday)
    # Of two days that are both named, either is enough; `*` and `?` name none.
    has_one = any(part[0] in "*?" for part in f"{day},{weekday}".split(","))

    def is_day(each: date) -> bool:
        if each.month not in months:
            return False
        of_month = each.day in days
        of_week = each.isoweekday() % 7 in weekdays
        if has_one:
            return of_month and of_week
        return of_month or of_week

    return ScheduleTimes(
        text=text,
        time_zone=zone,
        is_day=is_day,
        hours=_HOUR.times(hour),
        minutes=_MINUTE.times(minute),
        second=_SECOND.times(second),
    )


def _days_of_month(field: str) -> _IsDay:
    """Returns whether a day is one of a field with L (the last), LW and 15W (nearest weekday)."""
    rules: list[_IsDay] = []
    plain = [part for part in field.split(",") if part[-1:] not in ("L", "W")]
    for part in field.split(","):
        if part == "L":
            rules.append(lambda day: day.day == _last_day(day))
        elif part == "LW":
            rules.append(lambda day: day == _nearest_weekday(day, _last_day(day)))
        elif part[-1:] == "W" and _NUMBER.fullmatch(part[:-1]) and 1 <= int(part[:-1]) <= 31:
            rules.append(_near(int(part[:-1])))
        elif part not in plain:
            raise ValueError(f"day {part} is not a day of a month")
    if plain:
        days = _DAY.numbers(",".join(plain))
        rules.append(lambda day: day.day in days)
    return lambda day: any(rule(day) for rule in rules)


def _near(number: int) -> _IsDay:
    return lambda day: number <= _last_day(day) and day == _nearest_weekday(day, number)


def _nearest_weekday(day: date, number: int) -> date:
    """Returns the weekday of `day`'s month that is nearest to its day `number`."""
    wanted = day.replace(day=number)
    days = [wanted + timedelta(days=shift) for shift in (0, -1, 1, -2, 2)]
    return next(each for each in days if each.month == day.month and each.isoweekday() < 6)


def _last_day(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def _weekdays(field: str) -> _IsDay:
    """Returns whether a day is one of a field with 1 (SUN) to 7, L (SAT), 6L and 2#1."""
    rules: list[_IsDay] = []
    plain: list[str] = []
    for part in field.split(","):
        base, hash_sign, nth = part.partition("#")
        if hash_sign:
            if nth not in ("1", "2", "3", "4", "5"):
                raise ValueError(f"weekday {part}: after # comes 1 to 5")
            rules.append(_nth(_weekday(base), int(nth)))
        elif part.endswith("L") and part != "L":
            rules.append(_last(_weekday(part[:-1])))
        else:
            plain.append("7" if part == "L" else part)
    if plain:
        days = _WEEKDAY.numbers(",".join(plain), may_wrap=True)
        rules.append(lambda day: day.isoweekday() % 7 + 1 in days)
    return lambda day: any(rule(day) for rule in rules)


def _weekday(text: str) -> int:
    (number,) = _WEEKDAY.numbers(text)
    return number


def _nth(weekday: int, nth: int) -> _IsDay:
    return lambda day: day.isoweekday() % 7 + 1 == weekday and (day.day - 1) // 7 + 1 == nth


def _last(weekday: int) -> _IsDay:
    return lambda day: day.isoweekday() % 7 + 1 == weekday and day.day + 7 > _last_day(day)
