"""The evaluation of a run against its gates, its baseline and its prediction."""

import math
from collections.abc import Mapping, Sequence
from datetime import date

import msgspec

from stoker.records import (
    Band,
    Decision,
    Evaluation,
    Gate,
    GateResult,
    Group,
    Job,
    Json,
    Measured,
    Performance,
    Predicted,
    Profile,
    StepCost,
    Training,
    Workload,
    bare_type,
    groups_in_words,
)
from stoker.records.outcome import gate_words, outcome_of, outcome_of_gates, warnings_of
from stoker.records.training import BUSY, Metric
from stoker.records.workload import own_keys, refuse_foreign
from stoker.units import (
    as_fast,
    aws_value,
    cost_change_words,
    is_whole_longer,
    longer,
    ms,
    table_lines,
)

# SageMaker Studio's names of regression metrics; all others are of a classification.
_REGRESSION = frozenset({"mae", "mse", "rmse", "r2"})
# A model's origin in SageMaker's registry.
MODEL_METADATA = ("training_job", "decided", "image_digest", "git", "code")


def evaluate(
    *,
    workload: Workload,
    profile: Profile,
    decision: Decision,
    training: Training,
    champion: Mapping[str, float] | None = None,
    today: date | None = None,
) -> Evaluation:
    """Judges the run by its status, its gates and its prediction. Pure.

    A metric that the run did not report fails its gate, and so does a run without a step, whose
    metrics are an earlier run's. The prediction is of the plan with the run's groups, if any.

    Args:
        champion: Metrics of the model in use, for gates that name it; a missing metric fails its
            gate. None: no model is in use yet, and such gates hold.
        today: Day on which the profile's age counts. None: its age is not told.

    Raises:
        UsageError: If a record was made for another workload.
    """
    keys = own_keys(profile.workload_keys, is_elsewhere=decision.taken_elsewhere is not None)
    refuse_foreign("profile", keys, workload=workload)
    refuse_foreign("decision", decision.workload_keys, workload=workload)
    refuse_foreign("training", training.workload_keys, workload=workload)
    gates = tuple(
        _result(gate, training.metrics.get(gate.metric), champion) for gate in workload.gate
    )
    outcome = outcome_of(training, gates)
    performance = performance_of(profile, decision, training)
    warnings = warnings_of(
        profile=profile,
        decision=decision,
        training=training,
        performance=performance,
        today=today,
    )
    return Evaluation(
        passed=outcome.is_good,
        reason=outcome.reason,
        metrics=dict(sorted(training.metrics.items())),
        model_uri=training.model_uri,
        gates=gates,
        warnings=warnings,
        performance=performance,
    )


def model_quality(training: Training) -> dict[str, Json]:
    """Returns the run's metrics as the model quality document of SageMaker Studio."""
    parts: dict[str, dict[str, Json]] = {}
    for name, value in sorted(training.numbers.items()):
        if math.isfinite(value):
            kind = "regression" if name in _REGRESSION else "multiclass_classification"
            shown: Json = {"value": value, "standard_deviation": "NaN"}
            parts.setdefault(f"{kind}_metrics", {})[name] = shown
    return {**parts}


def model_metadata(training: Training, decision: Decision) -> dict[str, str]:
    """Returns a model's origin for SageMaker's model registry; no value is empty."""
    what = {
        **training.lineage,
        "training_job": training.lineage.get("job_id", ""),
        "decided": f"{decision.plan.action}: {groups_in_words(training.groups)}",
    }
    return {name: aws_value(what.get(name, "")) or "not known" for name in MODEL_METADATA}


def lost_training(workload: Workload, decision: Decision) -> Training:
    """Returns the record of a failed training run that left none."""
    return Training(
        status="failed",
        groups=decision.plan.groups,
        job=Job(platform=workload.platform, name=workload.name),
        failure="the training ended without a record; its own log has the reason",
    )


def _result(gate: Gate, value: Metric | None, champion: Mapping[str, float] | None) -> GateResult:
    theirs = champion.get(gate.metric) if champion and gate.needs_champion else None
    bound = gate.against(theirs)
    is_unknown = champion is not None and gate.needs_champion and theirs is None
    result = GateResult(
        metric=gate.metric,
        value=value,
        min=bound.min,
        max=bound.max,
        min_champion=gate.min_champion,
        max_champion=gate.max_champion,
        regex=gate.regex,
        champion=theirs,
        passed=False,
    )
    return msgspec.structs.replace(result, passed=result.is_inside and not is_unknown)


def performance_of(
    profile: Profile | None, decision: Decision, training: Training
) -> Performance | None:
    """Returns the measured step against today's and the predicted one; None: none was measured.

    They are compared by whole epochs where these are known of all of them, else by the step.
    """
    measured = training.measured
    keep = decision.today.predicted if decision.today else None
    # The profile's step is another machine's if it was taken elsewhere.
    profiled = None if decision.taken_elsewhere else profile
    today = profiled.step.step_seconds if profiled else keep and keep.step_seconds
    if measured is None or not measured.steps or not measured.step_seconds or not today:
        return None
    is_billed = decision.prices.is_billed
    # The chosen plan first: another one in the list may have the same hosts.
    plans = (decision.plan, *decision.plans)
    plan = next((each for each in plans if _is_same(each.groups, training.groups)), None)
    promise = plan.predicted if plan else None
    is_whole = _is_whole_known(profile, measured)
    is_whole = is_whole and keep is not None and keep.whole_step_seconds is not None

    def cost(plan: Predicted | None, step: float, whole: float | None) -> StepCost:
        """Returns what a step costs that takes as long on the plan's hosts."""
        made = StepCost(step_seconds=step, whole_step_seconds=whole if is_whole else None)
        if plan is None:
            return made
        times = made.counted_seconds / plan.counted_seconds
        usd = plan.usd_per_1000_steps if is_billed else None
        return msgspec.structs.replace(
            made,
            cpu_seconds=plan.cpu_seconds and plan.cpu_seconds * times,
            usd_per_1000_steps=usd and usd * times,
        )

    baseline = cost(keep, today, keep.whole_step_seconds if keep else None)
    outcome = cost(promise, measured.step_seconds, measured.whole_step_seconds)
    if is_billed and measured.usd_per_1000_steps is not None:
        compared = outcome.counted_seconds / measured.counted_seconds
        usd = measured.usd_per_1000_steps * compared
        outcome = msgspec.structs.replace(outcome, usd_per_1000_steps=usd)
    predicted = band = error = None
    if promise is not None:
        predicted = cost(promise, promise.step_seconds, promise.whole_step_seconds)
        error = _change(outcome.counted_seconds, predicted.counted_seconds)
        low, high = promise.step_seconds_low, promise.step_seconds_high
        if is_whole:
            low, high = promise.counted_low, promise.counted_high
        band = Band(low_seconds=low, high_seconds=high)
    # Nominal dollars only compare plans; without a bill the cost is in CPU-seconds.
    change = _change(outcome.cpu_seconds, baseline.cpu_seconds)
    if is_billed:
        change = _change(outcome.usd_per_1000_steps, baseline.usd_per_1000_steps)
    return Performance(
        action=plan.action if plan else None,
        baseline=baseline,
        predicted=predicted,
        measured=outcome,
        prediction_error=error,
        band=band,
        is_inside_band=band.holds(outcome.counted_seconds) if band else None,
        speedup=baseline.counted_seconds / outcome.counted_seconds,
        cost_change=change,
        busy="while it was profiled" if decision.is_noisy else "",
    )


def _is_whole_known(profile: Profile | None, measured: Measured) -> bool:
    """Whether the profile saw all that the run's whole epochs have beyond their steps."""
    seen = profile.epochs if profile else None
    run = measured.epochs
    if seen is None or run is None or measured.whole_step_seconds is None:
        return False
    pauses = ((run.start, seen.start), (run.between, seen.between))
    return all(had is None or known is not None for had, known in pauses)


def _change(value: float | None, reference: float | None) -> float | None:
    if value is None or not reference:
        return None
    return value / reference - 1


def _is_same(planned: Sequence[Group], ran: Sequence[Group]) -> bool:
    """Whether the run had the plan's hosts; workers count only where both records have them."""
    return len(planned) == len(ran) and all(
        (one.role, bare_type(one.instance_type), one.count)
        == (other.role, bare_type(other.instance_type), other.count)
        # A run that was named by hand may leave its workers open.
        and len({one.workers_per_host, other.workers_per_host} - {None}) < 2
        for one, other in zip(planned, ran, strict=False)
    )


# The evaluation in words.


def evaluation_words(record: Evaluation) -> str:
    """Returns the evaluation in one line."""
    gates = (f"{gate_words(gate)} passed" for gate in record.gates)
    verdict = record.reason or ", ".join(gates) or "no gate"
    return "; ".join([verdict, *record.warnings, *performance_words(record.performance)])


def performance_words(performance: Performance | None) -> list[str]:
    """Returns what the run gained, and how far it was predicted."""
    if performance is None:
        return []
    if performance.busy:
        return [f"{BUSY} ({performance.busy})"]
    speedup = as_fast(performance.speedup)
    if performance.action == "keep":
        speedup += " as in the profile on the same hosts"
    error = performance.prediction_error
    if error is None:
        return [speedup]
    measured = performance.measured
    is_whole = is_whole_longer(measured.step_seconds, measured.counted_seconds)
    words = f"{'whole epochs are' if is_whole else 'the step is'} {longer(error)} predicted"
    if performance.band:
        # Capitals stand out.
        inside = "inside" if performance.is_inside_band else "OUTSIDE"
        band = performance.band
        words += f", {inside} the band of {ms(band.low_seconds)} to {ms(band.high_seconds)}"
    return [speedup, words]


def evaluation_table(evaluation: Evaluation) -> str:
    """Returns the verdict first, then gates and performance."""
    lines = [evaluation.reason or outcome_of_gates(evaluation.gates).words]
    lines += [f"  warning: {words}" for words in evaluation.warnings]
    lines += [f"  {'ok' if g.passed else 'FAIL':<4} {gate_words(g)}" for g in evaluation.gates]
    performance = evaluation.performance
    if performance is None:
        return "\n".join(lines)
    lines += table_lines(*cost_table(performance))
    lines += performance_words(performance)
    change = performance.cost_change
    if change is not None and performance.action != "keep" and not performance.busy:
        is_billed = performance.measured.usd_per_1000_steps is not None
        lines.append(cost_change_words(change, is_billed=is_billed))
    return "\n".join(lines)


def cost_table(performance: Performance) -> tuple[list[str], list[list[str]]]:
    """Returns heads and rows of the compared steps."""
    is_billed = performance.measured.usd_per_1000_steps is not None
    heads = ["", "step", "within epochs", "$ per 1,000 steps" if is_billed else "CPU-s per step"]
    rows = []
    steps = {"Baseline": performance.baseline, "Predicted": performance.predicted}
    steps["Measured"] = performance.measured
    for name, cost in steps.items():
        if cost:
            price = cost.usd_per_1000_steps if is_billed else cost.cpu_seconds
            times = [ms(cost.counted_seconds), ms(cost.step_seconds)]
            rows.append([name, *times, f"{price:.4g}" if price else ""])
    return heads, rows
