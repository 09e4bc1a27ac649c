"""Each figure of a run comes from the record that knows it best."""

from collections.abc import Sequence
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
from stoker.text import count, size

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
    made = size(cost.bytes_out)
    return made if cost.bytes_in is None else f"{size(cost.bytes_in)} → {made}"


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
