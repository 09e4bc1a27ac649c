"""Figures as text: times, money, shares, bytes, counts.

A page's figures have spaces that do not break. A terminal gets plain ones: `ms`, `size`,
`percentage` and `duration`.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Style = Literal["terminal", "page"]
NBSP = "\N{NO-BREAK SPACE}"
_MINUS = "\N{MINUS SIGN}"
NOT_KNOWN = "not known"
# Before dollars that come from an estimated price.
ESTIMATE = "~"

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# A smaller difference between the waits of ranks is not shown.
_RANKS_DIFFER = 0.05
# Of a step: by less whole epochs are not said to be slower than it.
_WORTH_A_WORD = 0.01
# A smaller error would be written as 0.0%.
_SAME_TIME = 0.0005
# A change of a step's cost below it is written as 0%.
SAME_COST = 0.005
# Length of tag values and of model package metadata.
_MAX_AWS_VALUE = 256
_WITH_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)
_SHARES = {"%": 0.01, "percent": 0.01}
_SECONDS_OF = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600),
}
_BYTES_OF = {
    "b": 1,
    **dict.fromkeys(("k", "kb"), 10**3),
    **dict.fromkeys(("m", "mb"), 10**6),
    **dict.fromkeys(("g", "gb"), 10**9),
    **dict.fromkeys(("ki", "kib"), 2**10),
    **dict.fromkeys(("mi", "mib"), 2**20),
    **dict.fromkeys(("gi", "gib"), 2**30),
}


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The one unit of time of a report, so that a reader can compare its figures."""

    symbol: str
    per_second: float

    def show(self, seconds: float | None) -> str:
        """Writes three significant digits and the unit: `61.8 ms`."""
        return self._join(seconds, 3)

    def brief(self, seconds: float | None) -> str:
        """Writes two significant digits and the unit, for sentences: `62 ms`."""
        return self._join(seconds, 2)

    def bare(self, seconds: float | None) -> str:
        """Writes three significant digits without the unit, for columns."""
        if seconds is None:
            return NOT_KNOWN
        return digits(seconds * self.per_second, 3, max_places=4)

    def tick(self, seconds: float, *, last: bool) -> str:
        """Writes a mark of an axis as short as possible; the last one has the unit."""
        text = f"{seconds * self.per_second:,.10g}"
        if last:
            return text + NBSP + self.symbol
        return text

    def span(self, low: float, high: float) -> str:
        """Writes a range: `31.0 to 37.4 ms`."""
        return f"{self.bare(low)} to {self.show(high)}"

    def _join(self, seconds: float | None, figures: int) -> str:
        if seconds is None:
            return NOT_KNOWN
        return digits(seconds * self.per_second, figures, max_places=4) + NBSP + self.symbol


SECONDS = TimeUnit("s", 1.0)
MILLISECONDS = TimeUnit("ms", 1e3)
MICROSECONDS = TimeUnit("\N{MICRO SIGN}s", 1e6)


def time_unit(seconds: Iterable[float | None]) -> TimeUnit:
    """Returns the unit that suits the largest of `seconds`."""
    largest = max((value for value in seconds if value is not None), default=0.0)
    if largest >= 10:
        return SECONDS
    # Milliseconds also if nothing is known.
    if largest >= 1e-3 or largest == 0:
        return MILLISECONDS
    return MICROSECONDS


def digits(value: float, figures: int, *, max_places: int = 9) -> str:
    """Writes `value` with `figures` significant digits, never in powers of ten."""
    if abs(value) < 0.5 * 10**-max_places:
        return "0"
    if not math.isfinite(value):
        return NOT_KNOWN
    places = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    places = min(places, max_places)
    rounded = round(value, places)
    # 9.996 is rounded to 10.00, one digit too many.
    if rounded and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        places = max(0, places - 1)
    return _grouped(rounded, places).replace("-", _MINUS)


def _grouped(value: float, places: int) -> str:
    return f"{value:,.{places}f}"


def usd(value: float | None, *, is_estimate: bool = False) -> str:
    """Writes dollars: cents from 1 $ up, three significant digits below; `~` marks an estimate."""
    if value is None:
        return NOT_KNOWN
    mark = ESTIMATE if is_estimate else ""
    if abs(value) >= 1:
        return f"{mark}${_grouped(value, 2)}"
    return f"{mark}${digits(value, 3)}"


def with_article(noun: str) -> str:
    """Returns a noun, such as a class's name, behind `a` or `an`."""
    start = noun.lower()
    is_vowel = start.startswith(tuple("aeiou")) and not start.startswith(("uni", "us"))
    article = "an" if is_vowel else "a"
    return f"{article} {noun}"


def apart(one: float, other: float) -> tuple[str, str]:
    """Writes two figures with two decimals, or with more if they look the same."""
    places = 2
    while one != other and places < 9 and f"{one:.{places}f}" == f"{other:.{places}f}":
        places += 1
    return _grouped(one, places), _grouped(other, places)


def percent(fraction: float | None) -> str:
    """Writes `0.64` as `64%`."""
    if fraction is None:
        return NOT_KNOWN
    return _percent(abs(fraction), sign="")


def signed_percent(fraction: float | None) -> str:
    """Writes a change with its sign: 0.2 as `+20%`."""
    if fraction is None:
        return NOT_KNOWN
    if fraction < 0:
        return _percent(-fraction, sign=_MINUS)
    return _percent(fraction, sign="+")


def times(factor: float) -> str:
    """Writes a ratio, wherever one is written: `1.80`, `12.3`, `0.98`."""
    return digits(factor, 3, max_places=2)


def as_fast(speedup: float) -> str:
    """Writes a speed-up for a sentence: `1.80 times as fast`."""
    return f"{times(speedup)} times as fast"


def metric(value: float | None) -> str:
    """Writes a metric or a bound of it as exactly as the script did, up to six digits."""
    if value is None:
        return NOT_KNOWN
    if math.isfinite(value):
        return figure(value).replace("-", _MINUS)
    return figure(value)


def figure(value: float, *, figures: int = 6) -> str:
    """Writes a number of a script with up to `figures` digits, or that it is none.

    JavaScript's words, as in the records: `not a number (NaN)`, `not a number (-Infinity)`.
    """
    if math.isfinite(value):
        return f"{value:.{figures}g}"
    if math.isnan(value):
        return "not a number (NaN)"
    sign = "" if value > 0 else "-"
    return f"not a number ({sign}Infinity)"


def whole(value: int) -> str:
    """Formats a count: `10,000`."""
    return _grouped(value, 0)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Formats a count for a sentence: `one data host`, `12 data hosts`."""
    nouns = plural or f"{noun}s"
    if number == 1:
        nouns = noun
    if number < len(_WORDS):
        return f"{_WORDS[number]} {nouns}"
    return f"{whole(number)} {nouns}"


def numbered(number: int, noun: str, plural: str | None = None) -> str:
    """Writes a number of things for a terminal: `1 worker`, `1,250 steps`."""
    nouns = plural or f"{noun}s"
    if number == 1:
        nouns = noun
    return f"{whole(number)} {nouns}"


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _percent(fraction: float, *, sign: str) -> str:
    value = fraction * 100
    if value < 0.05:
        # It would be written as 0.0, with a sign that says nothing.
        return "0%"
    # No decimals from 10% on; 9.96 would be 10.0.
    if value >= 9.95:
        return f"{sign}{_grouped(value, 0)}%"
    return f"{sign}{value:.1f}%"


def ms(seconds: float) -> str:
    """Writes a time for a terminal, with three significant digits: `61.8 ms`, `1.24 s`."""
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3, 3, max_places=4)} ms"
    return f"{digits(seconds, 3)} s"


def percentage(fraction: float, *, places: int = 0, signed: bool = False) -> str:
    """Writes a share or a change for a terminal: `64%`, or with its sign `+20%`."""
    sign = "+" if signed else ""
    return f"{fraction:{sign}.{places}%}"


def known_mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are known; None if none is."""
    known_values = [value for value in values if value is not None]
    if known_values:
        return fmean(known_values)
    return None


def wait_share(*, step_seconds: float, wait_seconds: float) -> float:
    """Returns the share of a step in which the trainer waits for data, 0 to 1.

    A step lasts from one request for a batch to the next; it waits until the batch is there
    (docs/method.md, "A step and its wait").
    """
    if step_seconds > 0:
        return min(1.0, wait_seconds / step_seconds)
    return 0.0


def wait_words(
    share: float,
    *,
    least: float | None,
    rank: int,
    of: str = "of it waiting for data",
    style: Style = "terminal",
) -> str:
    """Writes a share of waiting: `64% of it waiting for data`, with the ranks if they differ.

    `rank` waits longest; `least` is the share of the rank that waits least, if there are several.
    """
    write = percent if style == "page" else percentage
    if least is None or share - least < _RANKS_DIFFER:
        return f"{write(share)} {of}".rstrip()
    return f"{write(least)} to {write(share)} {of}".rstrip() + f" (rank {rank} waits longest)"


def step_words(
    *,
    step_seconds: float,
    wait_seconds: float,
    least_wait_share: float | None = None,
    rank: int = 0,
    whole_step_seconds: float | None = None,
    whole_wait_seconds: float | None = None,
) -> str:
    """Writes a step and its wait for a terminal: `61.8 ms, 64% of it waiting for data`.

    With what whole epochs have beyond their steps, if that is worth a word: `75.1 ms over whole
    epochs, 71% of it waiting for data (61.8 ms within them, 64% of it)`.
    """
    share = wait_share(step_seconds=step_seconds, wait_seconds=wait_seconds)
    waiting = wait_words(share, least=least_wait_share, rank=rank)
    if whole_step_seconds is None or not is_whole_longer(step_seconds, whole_step_seconds):
        return f"{ms(step_seconds)}, {waiting}"
    whole = f"{ms(whole_step_seconds)} over whole epochs"
    if whole_wait_seconds is None:
        return f"{whole} ({ms(step_seconds)} within them, {waiting})"
    all_waiting = wait_share(step_seconds=whole_step_seconds, wait_seconds=whole_wait_seconds)
    waiting = wait_words(share, least=least_wait_share, rank=rank, of="of it")
    return (
        f"{whole}, {percentage(all_waiting)} of it waiting for data "
        f"({ms(step_seconds)} within them, {waiting})"
    )


def is_whole_longer(step_seconds: float, whole_step_seconds: float) -> bool:
    """Returns whether whole epochs are so much slower than their steps that it is worth a word."""
    return whole_step_seconds >= (1 + _WORTH_A_WORD) * step_seconds


def than_predicted(error: float, style: Style = "terminal") -> str:
    """Writes measured / predicted - 1: `2.2% longer than predicted`, or as on a page."""
    if abs(error) < _SAME_TIME:
        return f"{longer(error, style)} as predicted"
    return f"{longer(error, style)} than predicted"


def longer(error: float, style: Style = "terminal") -> str:
    """Writes by how much a time differs: `2.2% longer`, `as long`."""
    if abs(error) < _SAME_TIME:
        return "as long"
    by = percentage(abs(error), places=1)
    if style == "page":
        by = percent(error)
    if error > 0:
        return f"{by} longer"
    return f"{by} shorter"


def vcpus_words(number: float) -> str:
    """Writes a number of vCPUs: `1 vCPU`, `1.5 vCPUs`."""
    if number == 1:
        return "1 vCPU"
    return f"{number:.3g} vCPUs"


def cost_change_words(change: float, *, is_billed: bool) -> str:
    """Writes how the cost of a step changes: in money, or in CPU-seconds without a bill."""
    if abs(change) < SAME_COST:
        return "a step costs the same" if is_billed else "as many CPU-seconds per step"
    by = percentage(abs(change))
    if is_billed:
        than_today = "cheaper" if change < 0 else "more expensive"
        return f"{by} {than_today} per step"
    than_today = "fewer" if change < 0 else "more"
    return f"{by} {than_today} CPU-seconds per step"


def duration(seconds: float) -> str:
    """Writes a duration for a terminal: `48 s`, `3 min 12 s`, `1 h 03 min`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        if minutes:
            return f"{minutes} min {rest:02d} s"
        return f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(num_bytes: float) -> str:
    """Writes bytes for a terminal, with three significant digits: `900 kB`, `4.05 MB`."""
    for unit, bytes_of_one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # 999.9 kB are written as 1.00 MB, not as 1,000 kB.
        if num_bytes >= 0.9995 * bytes_of_one:
            return f"{digits(num_bytes / bytes_of_one, 3)} {unit}"
    return f"{num_bytes:.0f} B"


def wrapped(text: str, *, width: int = 88, indent: str = "") -> list[str]:
    """Breaks a text into lines; all but the first are indented by two more."""
    return textwrap.wrap(
        text, width, break_on_hyphens=False, initial_indent=indent, subsequent_indent=f"{indent}  "
    )


def aws_value(text: str) -> str:
    """Returns a text with the characters and the length that AWS allows in tags."""
    return re.sub(r"[^\w .:/=+@-]", "-", text)[:_MAX_AWS_VALUE]


def without_unit(text: str, *, name: str) -> str:
    """Returns a number that was written with its unit as it is to be written; empty: not clear.

    Args:
        text: Such as 5%, 10 min or 2GB.
        name: Of the key or option, whose last word is its unit: seconds or bytes; else a share.
    """
    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        return ""
    units: Mapping[str, float] = _SHARES
    if name.lower().endswith("seconds"):
        units = _SECONDS_OF
    elif name.lower().endswith("bytes"):
        units = _BYTES_OF
    factor = units.get(match[2].lower())
    return "" if factor is None else f"{float(match[1]) * factor:.15g}"
