"""A row of the benchmark holds one figure of one loader, next to alternatives of the same run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from measuring import Spread, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares a figure with another loader's, repetition by repetition.

    Attributes:
        beside: The other loader; empty: the figure itself is what the target is about.
        how: points: this less that; times: this over that; alone: this itself.
        is_met: Whether the median keeps the target; None: there is no target.
        target: In words, empty without one.
    """

    beside: str
    how: Literal["points", "times", "alone"]
    value: Spread
    target: str = ""
    is_met: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row is one line of the table.

    Attributes:
        part: Of the benchmark: even, exponential, straggler, cpu, mnist or crowd.
        case: What was measured, in words.
        figure: Name and unit of `value`.
        value: None: not measured, `note` says why.
        details: Other figures of the same runs.
    """

    part: str
    case: str
    loader: str
    figure: str
    value: Spread | None
    comparisons: tuple[Comparison, ...] = ()
    details: dict[str, object] = field(default_factory=dict)
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def points(
    mine: Sequence[float],
    theirs: Sequence[float],
    *,
    beside: str,
    at_most: float | None = None,
    is_below: bool = False,
) -> Comparison:
    """Compares by the differences of the repetitions.

    Args:
        at_most: The target for their median.
        is_below: The target is to be below the other.
    """
    value = spread([a - b for a, b in zip(mine, theirs, strict=True)])
    if at_most is not None:
        return _judged(
            beside, "points", value, f"<= {at_most:+g}", is_met=_median(value) <= at_most
        )
    if is_below:
        return _judged(beside, "points", value, "< 0", is_met=_median(value) < 0)
    return Comparison(beside=beside, how="points", value=value)


def times(
    mine: Sequence[float],
    theirs: Sequence[float],
    *,
    beside: str,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Comparison:
    """Compares by the quotients of the repetitions, with a target for their median."""
    value = spread([a / b for a, b in zip(mine, theirs, strict=True)])
    if at_most is not None:
        return _judged(beside, "times", value, f"<= {at_most:g}", is_met=_median(value) <= at_most)
    if at_least is not None:
        return _judged(
            beside, "times", value, f">= {at_least:g}", is_met=_median(value) >= at_least
        )
    return Comparison(beside=beside, how="times", value=value)


def alone(mine: Sequence[float], *, at_most: float) -> Comparison:
    """Sets a target for the figure itself."""
    value = spread(mine)
    return _judged("", "alone", value, f"<= {at_most:g}", is_met=_median(value) <= at_most)


def _judged(
    beside: str,
    how: Literal["points", "times", "alone"],
    value: Spread,
    target: str,
    *,
    is_met: bool,
) -> Comparison:
    return Comparison(beside=beside, how=how, value=value, target=target, is_met=is_met)


def _median(value: Spread) -> float:
    median = value["median"]
    assert isinstance(median, float | int)
    return median


def markdown(rows: Sequence[Row]) -> str:
    """Returns one table of all rows."""
    lines = [
        "| case | loader | figure | median (min..max) | n | beside, in the same run | target |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row.value is None:
            cells = [row.case, row.loader, row.figure, row.note, "", "", ""]
        else:
            values = row.value["values"]
            assert isinstance(values, list)
            beside = [_beside(each) for each in row.comparisons if each.beside]
            if row.note:
                beside.append(row.note)
            verdicts = [_verdict(each) for each in row.comparisons if each.target]
            cells = [row.case, row.loader, row.figure, _text(row.value), str(len(values))]
            cells += ["; ".join(beside), "; ".join(verdicts)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _beside(each: Comparison) -> str:
    if each.how == "points":
        return f"{each.beside} {_text(each.value, sign='+')}"
    return f"{_text(each.value)} x {each.beside}"


def _verdict(each: Comparison) -> str:
    subject = f"{each.beside} {each.target}" if each.beside else each.target
    return f"{subject}: {'met' if each.is_met else '**not met**'}"


def _text(value: Spread, *, sign: str = "") -> str:
    shown = [f"{value[key]:{sign}.{_digits(value)}f}" for key in ("median", "min", "max")]
    if shown[1] == shown[2]:
        return shown[0]
    return f"{shown[0]} ({shown[1]}..{shown[2]})"


def _digits(value: Spread) -> int:
    largest = max(abs(float(str(value[key]))) for key in ("median", "min", "max"))
    return 0 if largest >= 300 else 1 if largest >= 3 else 2
