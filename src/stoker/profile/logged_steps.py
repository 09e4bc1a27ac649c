"""The time of a step out of a training's log: stoker's own lines, or forms that are common."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from stoker.errors import UsageError
from stoker.logs import parse_line

MIN_SAMPLES = 20
# Longer or shorter ones are no steps of a training.
_SHORTEST, _LONGEST = 1e-6, 1e5

_NUMBER = r"(?P<value>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_BEFORE = r"(?<![\w.])"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSteps:
    """Steps as a log tells them.

    Attributes:
        step_seconds: Median.
        wait_seconds: Of it, waiting for data, median; None where the lines do not say it.
        low_seconds: Lower quartile of the step.
        high_seconds: Upper quartile.
        samples: Lines behind it.
        form: What the lines look like.
    """

    step_seconds: float
    wait_seconds: float | None
    low_seconds: float
    high_seconds: float
    samples: int
    form: str

    @property
    def words(self) -> str:
        """Where the time comes from, in a line."""
        return (
            f"a step's time is the median of {self.samples} lines of the log ({self.form}), "
            "evaluation and the first epoch among them, each taken as one global step"
        )


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to write a step's time; the pattern has `value`, and may have `unit` and `wait`."""

    name: str
    pattern: re.Pattern[str]
    seconds: Callable[[float], float] = lambda value: value


@dataclass(slots=True)
class _Found:
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


_STOKER = "stoker's own lines: progress steps=... step_seconds=..."
# The first form with enough lines is taken: the more exact ones come first.
_FORMS = (
    _Form(
        "step_time=0.19",
        re.compile(
            r"(?<![A-Za-z0-9])(?:step|iteration|iter|batch)[_ ](?:time|seconds|secs?)"
            r"(?:_(?P<named>ms|s))?[\"']?\s*[=:]\s*"
            + _NUMBER
            # Neither half a number, nor what stands before a separator of thousands.
            + r"(?!,\d{3}\b)\s*(?P<unit>ms|s|secs?|seconds)?(?![\w.])",
            re.IGNORECASE,
        ),
    ),
    _Form(
        "Time  0.190 ( 0.195)  Data  0.1 ( 0.1)",
        re.compile(
            r"\bTime\s+" + _NUMBER + r"\s*\(\s*[\d.]+\s*\)"
            r"(?:.*?\bData\s+(?P<wait>\d+(?:\.\d*)?)\s*\()?"
        ),
    ),
    _Form(
        "time: 0.190  data_time: 0.010",
        re.compile(
            r"\btime:\s*" + _NUMBER + r"(?![\w.:]).*?\bdata_time:\s*(?P<wait>\d+(?:\.\d*)?)"
        ),
    ),
    _Form(
        "time per iteration (ms): 190.0",
        re.compile(
            r"\btime per (?:iteration|step)\s*(?:\((?P<named>ms|s)\))?\s*[=:]\s*"
            + _NUMBER
            + r"\s*(?P<unit>ms|s|secs?|seconds)?(?![\w.])",
            re.IGNORECASE,
        ),
    ),
    _Form(
        "190ms/step or 0.19 s/it",
        re.compile(
            _BEFORE
            + _NUMBER
            + r"\s*(?P<unit>ms|s|secs?|seconds)\s*/\s*(?:it|iter|iteration|step|batch)\b"
        ),
    ),
    _Form(
        "5.2it/s",
        re.compile(
            _BEFORE
            + _NUMBER
            + r"\s*(?:it|iter|iters|iterations|steps?|batch|batches)\s*/\s*s(?:ec)?\b"
        ),
        lambda value: 1 / value if value else 0.0,
    ),
)


def steps_in(lines: Iterable[str], *, source: str = "--logs") -> LoggedSteps:
    """The median step of a log.

    Args:
        lines: Of the log; progress bars may have written over their line.
        source: Where they are from.

    Raises:
        UsageError: If no form has MIN_SAMPLES lines, naming what was looked for and found.
    """
    found: dict[str, _Found] = {_STOKER: _Found(), **{form.name: _Found() for form in _FORMS}}
    for line in lines:
        for part in line.split("\r"):
            if not _take_own(part, found[_STOKER]):
                _take(part, found)
    for name, taken in found.items():
        if len(taken.steps) >= MIN_SAMPLES:
            return _summed_up(name, taken)
    raise UsageError(
        f"no step's time is to be read from the log: {MIN_SAMPLES} lines of one form are needed; "
        + "; ".join(f"{name}: {len(taken.steps)}" for name, taken in found.items()),
        where=source,
        fix="leave --logs out, or print step_time=SECONDS at each step",
    )


def _take_own(line: str, found: _Found) -> bool:
    event = parse_line(line) if "progress" in line else None
    if event is None or event.event != "progress":
        return False
    step, wait = _number(event.values, "step_seconds"), _number(event.values, "wait_seconds")
    if step is not None and _SHORTEST <= step <= _LONGEST:
        found.steps.append(step)
        if wait is not None and wait >= 0:
            found.waits.append(min(wait, step))
    return True


def _take(line: str, found: Mapping[str, _Found]) -> None:
    for form in _FORMS:
        match = form.pattern.search(line)
        if match is None:
            continue
        groups = match.groupdict()
        value = form.seconds(float(groups["value"]))
        if groups.get("unit") == "ms" or (groups.get("named") or "").lower() == "ms":
            value /= 1000
        if not _SHORTEST <= value <= _LONGEST:
            continue
        found[form.name].steps.append(value)
        if groups.get("wait"):
            found[form.name].waits.append(min(float(groups["wait"]), value))


def _summed_up(name: str, found: _Found) -> LoggedSteps:
    low, median, high = statistics.quantiles(found.steps, n=4, method="inclusive")
    has_waits = len(found.waits) == len(found.steps)
    return LoggedSteps(
        step_seconds=median,
        wait_seconds=min(statistics.median(found.waits), median) if has_waits else None,
        low_seconds=low,
        high_seconds=high,
        samples=len(found.steps),
        form=name,
    )


def _number(values: Mapping[str, str], name: str) -> float | None:
    try:
        return float(values[name])
    except (KeyError, ValueError):
        return None
