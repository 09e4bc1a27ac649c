"""Each figure of a run comes from the record that knows it best, and is written with its unit."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.records import (
    Decision,
    Evaluation,
    Group,
    Plan,
    Profile,
    Spread,
    Training,
    TransformCost,
)

# Parts with less than this share are left to the record.
_MIN_SHARE = 0.005
_MOST = 14


@dataclass(frozen=True, slots=True)
class TransformRow:
    """One part of loading; bytes are words, empty where they are not known."""

    name: str
    is_part: bool
    cpu_seconds: float
    share: float
    size: str
    samples: int


def transform_rows(transforms: Sequence[TransformCost]) -> list[TransformRow]:
    """Returns the parts that are worth a row, in the record's order."""
    shown = [each for each in transforms if each.within is None or each.share >= _MIN_SHARE]
    return [
        TransformRow(
            name=each.name,
            is_part=each.within is not None,
            cpu_seconds=each.cpu_seconds,
            share=each.share,
            size=_size(each),
            samples=each.samples,
        )
        for each in shown[:_MOST]
    ]


def _size(cost: TransformCost) -> str:
    if cost.bytes_out is None:
        return ""
    made = _bytes(cost.bytes_out)
    return made if cost.bytes_in is None else f"{_bytes(cost.bytes_in)} → {made}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


NBSP = "\N{NO-BREAK SPACE}"
_THIN = "\N{NARROW NO-BREAK SPACE}"
_MINUS = "\N{MINUS SIGN}"
NOT_KNOWN = "not known"

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The one unit of time of a report, so that its figures can be compared at sight.

    Attributes:
        symbol: What stands behind a figure.
        per_second: Units of one second.
    """

    symbol: str
    per_second: float

    def show(self, seconds: float | None) -> str:
        """Writes three significant digits and the unit: `61.8 ms`."""
        return self._join(seconds, 3)

    def brief(self, seconds: float | None) -> str:
        """Writes two significant digits and the unit, for sentences: `62 ms`."""
        return self._join(seconds, 2)

    def bare(self, seconds: float | None) -> str:
        """Writes three significant digits without the unit, for columns whose head names it."""
        return NOT_KNOWN if seconds is None else digits(seconds * self.per_second, 3, max_places=4)

    def tick(self, seconds: float, *, last: bool) -> str:
        """Writes a mark of an axis, as short as can be; the last one names the unit."""
        text = f"{seconds * self.per_second:.10g}"
        return text + NBSP + self.symbol if last else text

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
    return MILLISECONDS if largest >= 1e-3 or largest == 0 else MICROSECONDS


def digits(value: float, figures: int, *, max_places: int = 9) -> str:
    """Writes `value` with so many significant digits, whole digits kept, never in powers of ten."""
    if abs(value) < 0.5 * 10**-max_places:
        return "0"
    if not math.isfinite(value):
        return NOT_KNOWN
    places = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    places = min(places, max_places)
    rounded = round(value, places)
    if rounded and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        places = max(0, places - 1)
    return f"{rounded:,.{places}f}".replace(",", _THIN).replace("-", _MINUS)


def usd(value: float | None) -> str:
    """Writes dollars: cents from 1 $ up, three significant digits below."""
    if value is None:
        return NOT_KNOWN
    if abs(value) >= 1:
        return "$" + f"{value:,.2f}".replace(",", _THIN)
    return "$" + digits(value, 3)


def percent(fraction: float | None) -> str:
    """Writes `0.64` as `64 %`."""
    return NOT_KNOWN if fraction is None else _percent(abs(fraction), sign="")


def signed_percent(fraction: float | None) -> str:
    """Writes a change with its sign: 0.2 as `+20 %`."""
    if fraction is None:
        return NOT_KNOWN
    return _percent(abs(fraction), sign="+" if fraction >= 0 else _MINUS)


def times(factor: float | None) -> str:
    """Writes a speed-up: `1.72`, with as many digits as a measurement supports."""
    if factor is None:
        return NOT_KNOWN
    return digits(factor, 3 if factor < 100 else 2)


def metric(value: float | None) -> str:
    """Writes a metric or a bound of it as exactly as the script did, up to six digits."""
    return NOT_KNOWN if value is None else f"{value:.6g}".replace("-", _MINUS)


def whole(value: int) -> str:
    """Writes a count: `10 000`, a thin space between thousands."""
    return f"{value:,}".replace(",", _THIN)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Writes a count in a sentence: `one data host`, `12 data hosts`."""
    word = _WORDS[number] if number < len(_WORDS) else whole(number)
    return f"{word} {noun if number == 1 else plural or noun + 's'}"


def _percent(fraction: float, *, sign: str) -> str:
    value = fraction * 100
    text = f"{value:,.0f}".replace(",", _THIN) if value >= 9.95 else f"{value:.1f}"
    return f"{sign if value >= 0.05 else ''}{'0' if text == '0.0' else text}{NBSP}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Step times in seconds, costs in dollars per 1000 steps; None where not known.

    Attributes:
        prediction_error: measured / predicted - 1.
        is_inside_band: Whether the measured step is one that was promised.
        speedup: Baseline step over measured step.
        predicted_speedup: Baseline step over predicted step.
        cost_change: Measured cost over the baseline's, minus 1.
    """

    baseline: float | None = None
    baseline_wait: float | None = None
    baseline_spread: Spread | None = None
    predicted: float | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None
    predicted_speedup: float | None = None
    measured: float | None = None
    measured_wait: float | None = None
    measured_spread: Spread | None = None
    measured_steps: int | None = None
    prediction_error: float | None = None
    is_inside_band: bool | None = None
    speedup: float | None = None
    baseline_usd: float | None = None
    predicted_usd: float | None = None
    measured_usd: float | None = None
    cost_change: float | None = None

    @property
    def wait_share(self) -> float | None:
        """Share of a baseline step that is waiting for data."""
        if self.baseline is None or self.baseline_wait is None or self.baseline <= 0:
            return None
        return min(1.0, self.baseline_wait / self.baseline)


def collect(
    *,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
) -> Figures:
    """Returns the evaluation's figures where there is one, else those it would be made from."""
    performance = evaluation.performance if evaluation else None
    promise = decision.plan.predicted if decision else None
    outcome = training.measured if training else None
    today = (
        next((plan for plan in decision.plans if plan.action == "keep"), None) if decision else None
    )
    baseline = performance.baseline.step_seconds if performance else None
    step = profile.step if profile else None
    if baseline is None and step:
        baseline = step.step_seconds
    baseline_usd = performance.baseline.usd_per_1000_steps if performance else None
    if baseline_usd is None and today and today.predicted:
        baseline_usd = today.predicted.usd_per_1000_steps
    expected = performance.predicted if performance else None
    predicted = expected.step_seconds if expected else promise.step_seconds if promise else None
    predicted_usd = expected.usd_per_1000_steps if expected else None
    if predicted_usd is None and promise:
        predicted_usd = promise.usd_per_1000_steps
    measured = performance.measured.step_seconds if performance else None
    if measured is None and outcome:
        measured = outcome.step_seconds
    measured_usd = performance.measured.usd_per_1000_steps if performance else None
    if measured_usd is None and outcome:
        measured_usd = outcome.usd_per_1000_steps
    error = performance.prediction_error if performance else None
    band = performance.band if performance else None
    if error is None and measured is not None:
        error = _change(measured, predicted)
    cost_change = performance.cost_change if performance else None
    if cost_change is None and measured_usd is not None:
        cost_change = _change(measured_usd, baseline_usd)
    return Figures(
        baseline=baseline,
        baseline_wait=step.wait_seconds if step else None,
        baseline_spread=(profile.spread or {}).get("step_seconds") if profile else None,
        predicted=predicted,
        predicted_low=band.low_seconds if band else promise.step_seconds_low if promise else None,
        predicted_high=band.high_seconds
        if band
        else promise.step_seconds_high
        if promise
        else None,
        predicted_speedup=promise.speedup if promise else _ratio(baseline, predicted),
        measured=measured,
        measured_wait=outcome.wait_seconds if outcome else None,
        measured_spread=outcome.spread.get("step_seconds") if outcome else None,
        measured_steps=outcome.steps if outcome else None,
        prediction_error=error,
        is_inside_band=performance.is_inside_band if performance else None,
        speedup=performance.speedup if performance else _ratio(baseline, measured),
        baseline_usd=baseline_usd,
        predicted_usd=predicted_usd,
        measured_usd=measured_usd,
        cost_change=cost_change,
    )


def plan_name(plan: Plan, *, today: Group | None = None) -> str:
    """Names a plan in a few words, with its dnn hosts where they are not `today`'s."""
    dnn, *others = plan.groups
    data = [group for group in others if group.role == "data"]
    if plan.action == "keep":
        return "today's cluster"
    if plan.action == "tune":
        return "today's cluster, tuned"
    if plan.action == "scale_up":
        return f"a larger type ({dnn.instance_type})"
    if plan.action == "scale_out":
        return f"{count(dnn.count, 'dnn host')} ({dnn.instance_type})"
    if plan.action == "offload_gpu":
        return "augmentation on the accelerator"
    name = " and ".join(
        f"{count(group.count, 'data host')} ({group.instance_type})" for group in data
    )
    own = (dnn.instance_type, dnn.count)
    if not name or (today and own != (today.instance_type, today.count)):
        hosts = f"{count(dnn.count, 'dnn host')} ({dnn.instance_type})"
        return f"{hosts} and {name}" if name else hosts
    return name


def todays_group(decision: Decision) -> Group | None:
    """Returns the dnn group of today's cluster."""
    return next((plan.groups[0] for plan in decision.plans if plan.action == "keep"), None)


def group_arguments(plan: Plan) -> list[str]:
    """Returns the plan as arguments of `stoker train`: `--group dnn=TYPE:HOSTS[:WORKERS]`."""
    words = []
    for group in plan.groups:
        workers = "" if group.workers_per_host is None else f":{group.workers_per_host}"
        words += ["--group", f"{group.role}={group.instance_type}:{group.count}{workers}"]
    return words


def _change(value: float, reference: float | None) -> float | None:
    ratio = _ratio(value, reference)
    return None if ratio is None else ratio - 1


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or below is None or below <= 0:
        return None
    return above / below or None
