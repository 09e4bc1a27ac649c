"""Figures as text, the same for terminal and page: times, money, shares, bytes, counts."""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from statistics import fmean

NOT_KNOWN = "not known"
# Before dollars that come from an estimated price.
ESTIMATE = "~"

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


def digits(value: float, figures: int, *, max_places: int = 9) -> str:
    """Writes `value` with `figures` significant digits, never in powers of ten."""
    if abs(value) < 0.5 * 10**-max_places:
        return "0"
    if not math.isfinite(value):
        return NOT_KNOWN
    # Of the rounded value: 9.996 is 10.0, with a digit less behind the point.
    exponent = int(f"{value:.{figures - 1}e}".partition("e")[2])
    places = min(max(0, figures - 1 - exponent), max_places)
    return f"{value:,.{places}f}"


def usd(value: float | None) -> str:
    """Writes dollars: cents from 1 $ up, three significant digits below."""
    if value is None:
        return NOT_KNOWN
    if abs(value) >= 1:
        return f"${value:,.2f}"
    return f"${digits(value, 3)}"


def percent(fraction: float | None) -> str:
    """Writes `0.64` as `64%`, and `0.022` as `2.2%`."""
    if fraction is None:
        return NOT_KNOWN
    # No decimals from 10% on; 9.96 would be 10.0. Less than a twentieth would be written as 0.0.
    return f"{fraction:.{1 if 0.0005 <= abs(fraction) < 0.0995 else 0}%}"


def times(factor: float) -> str:
    """Writes a ratio, wherever one is written: `1.80`, `12.3`, `0.98`."""
    return digits(factor, 3, max_places=2)


def as_fast(speedup: float) -> str:
    """Writes a speed-up for a sentence: `1.80 times as fast`."""
    return f"{times(speedup)} times as fast"


def figure(value: float | str, *, figures: int = 6) -> str:
    """Writes a number of a script with up to `figures` digits, or that it is none.

    Texts as in the records: `not a number (NaN)`, `not a number (-Infinity)`.
    """
    if isinstance(value, str):
        return f"not a number ({value})"
    return f"{value:.{figures}g}"


def numbered(number: int, noun: str, plural: str | None = None) -> str:
    """Writes a number of things: `1 worker`, `1,250 steps`."""
    nouns = plural or f"{noun}s"
    if number == 1:
        nouns = noun
    return f"{number:,} {nouns}"


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def ms(seconds: float) -> str:
    """Writes a time, with three significant digits: `61.8 ms`, `1.24 s`."""
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3, 3, max_places=4)} ms"
    return f"{digits(seconds, 3)} s"


def percentage(fraction: float, *, places: int = 0, signed: bool = False) -> str:
    """Writes a share or a change: `64%`, or with its sign `+20%`."""
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
    least: float | None = None,
    rank: int = 0,
    of: str = "of it waiting for data",
) -> str:
    """Writes a share of waiting: `64% of it waiting for data`, with the ranks if they differ.

    `rank` waits longest; `least` is the share of the rank that waits least, if there are several.
    """
    if least is None or share - least < _RANKS_DIFFER:
        return f"{percentage(share)} {of}"
    return f"{percentage(least)} to {percentage(share)} {of} (rank {rank} waits longest)"


def is_whole_longer(step_seconds: float, whole_step_seconds: float) -> bool:
    """Returns whether whole epochs are so much slower than their steps that it is worth a word."""
    return whole_step_seconds >= (1 + _WORTH_A_WORD) * step_seconds


def longer(error: float) -> str:
    """Writes by how much a time differs: `2.2% longer than`, `as long as`."""
    if abs(error) < _SAME_TIME:
        return "as long as"
    return f"{percentage(abs(error), places=1)} {'longer' if error > 0 else 'shorter'} than"


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
    """Writes a duration: `48 s`, `3 min 12 s`, `1 h 03 min`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        if minutes:
            return f"{minutes} min {rest:02d} s"
        return f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(num_bytes: float) -> str:
    """Writes bytes, with three significant digits: `900 kB`, `4.05 MB`."""
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


def table_lines(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, width: int = 88
) -> list[str]:
    """Returns a table as lines; long cells of text are cut, columns of figures are at the right."""
    # Imported here: this module is in every process.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    cells = [*rows]
    for column, head in enumerate(heads):
        is_number = all(row[column][:1] in "0123456789~$-+?" for row in cells)
        # The first columns are names, which may be long.
        is_name = column < 2 and not is_number
        table.add_column(
            head,
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="ellipsis" if is_name else "fold",
        )
    for row in cells:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def aws_value(text: str) -> str:
    """Returns a text with the characters and the length that AWS allows in tags."""
    return re.sub(r"[^\w .:/=+@-]", "-", text)[:_MAX_AWS_VALUE]
