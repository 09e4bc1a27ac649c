"""Where a profile comes from, and what has changed since: its age, image, code and data."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from stoker.records.base import Json, Name, Record

# Data, drivers and hosts drift; Kubeflow's `cache_days` ends the use of a profile then, too.
MAX_PROFILE_DAYS = 30
_MAX_NAMED = 3
_DIGITS = 12
# A folder's name that is a date or a time: day=2026-11-25, dt=20261125, 2026-11-25, hour=07, and
# 2026/11/25 by its year.
_DAY = r"(?:19|20)\d\d-?(?:0[1-9]|1[0-2])(?:-?(?:0[1-9]|[12]\d|3[01]))?"
_TIME = r"(?:[T_-]?\d\d(?:[:-]?\d\d){0,2}Z?)?"
_DATED = re.compile(
    rf"/((?:\w+=)?{_DAY}{_TIME}"
    r"|(?:year|yyyy|y)=\d{4}|(?:month|mm|mon|m|week|day|dd|d|hour|hh|h|minute)=\d{1,2})(?=/|$)",
    re.IGNORECASE,
)
_MONTH_AND_DAY = r"(?:0[1-9]|1[0-2]){0}(?:0[1-9]|[12]\d|3[01])"
# A text that is nothing but a date, with its dashes.
_WHOLE_DATE = re.compile(rf"(?:19|20)\d\d-{_MONTH_AND_DAY.format('-')}{_TIME}")
# A whole date in a longer name: train-2026-11-27.tar, snapshot_20261127.
_IN_A_NAME = re.compile(
    rf"(?<!\d)(?:19|20)\d\d(?:-{_MONTH_AND_DAY.format('-')}|_{_MONTH_AND_DAY.format('_')}"
    rf"|{_MONTH_AND_DAY.format('')}){_TIME}(?!\d)"
)
_YEAR_FIRST = re.compile(r"/(?:19|20)\d\d/(?:0[1-9]|1[0-2])(?:/(?:0[1-9]|[12]\d|3[01]))?(?=/|$)")


class ProfileOrigin(Record, frozen=True, kw_only=True):
    """When a profile was measured, and with what.

    Attributes:
        measured_at: Time of the measurement, UTC, ISO 8601.
        image: Container image of the hosts. None: none, or not known.
        code: Digest of each file that the script imports, by its path. Empty: not known, as where
            the code is in the image.
        code_digest: Digest of all files that a step may depend on. Empty: not known.
        data: Address of each channel.
    """

    measured_at: Name
    image: Name | None = None
    code: dict[str, str] = {}
    code_digest: str = ""
    data: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedProfile:
    """What is said of a profile that was measured earlier.

    Attributes:
        words: One line: age, date, and whether image, code and data are as they were.
        warnings: What should be measured again, and why.
    """

    words: str
    warnings: tuple[str, ...] = ()


def undated(uri: str) -> str:
    """Returns an address with `*` for its dates: daily folders of one parent are one dataset.

    A folder counts as a date if its whole name is one, with or without a key before `=`; in a
    longer name a whole date does, year, month and day.
    """
    scheme, separator, path = uri.rpartition("://")
    path = _YEAR_FIRST.sub("/*", f"/{path}")
    path = _DATED.sub("/*", path)
    path = _IN_A_NAME.sub("*", path)
    # Levels of one date, such as year=2026/month=11, are one.
    path = re.sub(r"(?:/\*)+", "/*", path)
    return f"{scheme}{separator}{path[1:]}"


def undated_value(value: Json) -> Json:
    """Returns a value of a workload with `*` for dates, where a text is an address or a date.

    A number is never one: 20261127 may be a seed.
    """
    if isinstance(value, Mapping):
        return {key: undated_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [undated_value(item) for item in value]
    if isinstance(value, str):
        return undated_word(value)
    return value


def undated_word(word: str) -> str:
    """Returns a word of a command, or a text, with `*` for dates: `--data=s3://b/*/`."""
    if word.startswith("-"):
        option, separator, text = word.partition("=")
        return f"{option}{separator}{_undated_text(text)}"
    return _undated_text(word)


def _undated_text(text: str) -> str:
    if _WHOLE_DATE.fullmatch(text):
        return "*"
    if "/" in text:
        return undated(text)
    return text


def digests_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the first digits of each file's digest."""
    return {name: hashlib.sha256(files[name]).hexdigest()[:_DIGITS] for name in sorted(files)}


def compared(then: ProfileOrigin, *, today: ProfileOrigin, now: datetime) -> ReusedProfile:
    """Compares an earlier profile's origin with what a run has now.

    Args:
        today: What the run would measure with.
        now: The time, with its zone.
    """
    age = age_words(then.measured_at, now=now)
    parts = [*_image_parts(then, today), *_code_parts(then, today), *_data_parts(then, today)]
    same = [name for name, words in parts if not words]
    changes = [words for _, words in parts if words]
    phrases = [f"{' and '.join(same)} the same"] if same else []
    warnings = [f"{each}: measure again, stoker profile" for each in changes]
    days = _days(then.measured_at, now=now)
    if days is not None and days > MAX_PROFILE_DAYS:
        text = f"the profile is {days:.0f} days old, more than {MAX_PROFILE_DAYS}"
        warnings.append(f"{text}: measure again, stoker profile")
        age = f"OLD: {age}"
    words = ", ".join([f"profile of {age}", *phrases])
    return ReusedProfile(words="; ".join([words, *changes]), warnings=tuple(warnings))


def age_words(measured_at: str, *, now: datetime) -> str:
    """Returns an age and its date, such as "3 days ago (2026-11-23)"."""
    days = _days(measured_at, now=now)
    if days is None:
        return "an unknown date"
    date = measured_at[: len("2026-11-23")]
    if days < 0:
        # The clock of one of the two hosts is wrong.
        return f"a later time than now ({measured_at})"
    minutes = days * 24 * 60
    if minutes < 1:
        return f"less than a minute ago ({date})"
    if minutes < 90:
        return f"{_number(minutes, 'minute')} ago ({date})"
    if days < 2:
        return f"{_number(days * 24, 'hour')} ago ({date})"
    return f"{_number(days, 'day')} ago ({date})"


def _number(value: float, unit: str) -> str:
    whole = int(value)
    if whole == 1:
        return f"{whole} {unit}"
    return f"{whole} {unit}s"


def _days(measured_at: str, *, now: datetime) -> float | None:
    try:
        when = datetime.fromisoformat(measured_at)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (now - when).total_seconds() / 86_400


def _image_parts(then: ProfileOrigin, today: ProfileOrigin) -> Iterator[tuple[str, str]]:
    if then.image is None or today.image is None:
        return
    is_same = then.image == today.image
    yield "image", "" if is_same else f"image changed: {then.image} -> {today.image}"


def _code_parts(then: ProfileOrigin, today: ProfileOrigin) -> Iterator[tuple[str, str]]:
    if then.code and today.code:
        names = sorted(then.code.keys() | today.code.keys())
        changed = [name for name in names if then.code.get(name) != today.code.get(name)]
        yield "code", f"code changed: {_named(changed)}" if changed else ""
    elif then.code_digest and today.code_digest:
        is_same = then.code_digest == today.code_digest
        yield "code", "" if is_same else "code changed"


def _data_parts(then: ProfileOrigin, today: ProfileOrigin) -> Iterator[tuple[str, str]]:
    for name in sorted(then.data.keys() & today.data.keys()):
        was = then.data[name]
        is_now = today.data[name]
        if was != is_now and undated(was) != undated(is_now):
            yield f"data of {name}", f"data of {name} changed: {was} -> {is_now}"
        elif was != is_now:
            yield f"data of {name} of another date, its parent", ""


def _named(names: list[str]) -> str:
    words = ", ".join(names[:_MAX_NAMED])
    if len(names) > _MAX_NAMED:
        words += f" and {len(names) - _MAX_NAMED} more"
    return words
