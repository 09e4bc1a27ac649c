"""The evaluation of a run against its gates, its baseline and its prediction."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import msgspec

from stoker.records import (
    Band,
    Decision,
    Evaluation,
    Gate,
    GateResult,
    GpuLoad,
    Group,
    Job,
    Json,
    Measured,
    Performance,
    Plan,
    Predicted,
    Profile,
    StepCost,
    Training,
    Workload,
    bare_type,
    groups_in_words,
)
from stoker.records.base import sha256_of
from stoker.records.gpu import busy_share
from stoker.records.hyperparameters import shown, values_of
from stoker.records.notices import notices_of
from stoker.records.outcome import outcome_of, outcome_of_gates
from stoker.records.training import TrainingFacts, training_record
from stoker.records.workload import RecordKind, own_keys, refuse_foreign
from stoker.units import aws_value

# SageMaker Studio's names of regression metrics; all others are of a classification.
_REGRESSION = frozenset({"mae", "mse", "rmse", "r2"})
_PENDING = "PendingManualApproval"
# Facts of a run's lineage in a model's metadata.
_PROFILED_BUSY = "while it was profiled"
_ORIGIN = (
    "image_digest",
    "git",
    "code",
    "workload_sha256",
    "profile_sha256",
    "seeds",
    "packages",
)


def evaluate(
    *,
    workload: Workload,
    profile: Profile,
    decision: Decision,
    training: Training,
    champion: Mapping[str, float] | None = None,
    today: date | None = None,
    is_registered: bool = False,
) -> Evaluation:
    """Judges the run by its status, its gates and its prediction. Pure.

    A metric that the run did not report fails its gate, and so does a run without a step, whose
    metrics are an earlier run's. The prediction is of the plan with the run's groups, if any.

    Args:
        champion: Metrics of the model in use, for gates that name it; a missing metric fails its
            gate. None: no model is in use yet, and such gates hold.
        today: Day on which the profile's age counts. None: its age is not told.
        is_registered: Whether a model that passes is registered next.

    Raises:
        UsageError: If a record was made for another workload.
    """
    keys = own_keys(profile.workload_keys, is_elsewhere=decision.taken_elsewhere is not None)
    profiled = msgspec.structs.replace(profile, workload_keys=keys)
    records: tuple[tuple[RecordKind, Profile | Decision | Training], ...] = (
        ("profile", profiled),
        ("decision", decision),
        ("training", training),
    )
    for kind, record in records:
        refuse_foreign(
            kind, keys=record.workload_keys, digest=record.workload_sha256, workload=workload
        )
    gates = tuple(
        _result(gate, training.metrics.get(gate.metric), champion) for gate in workload.gate
    )
    outcome = outcome_of(training, gates)
    performance = _performance(profile, decision, training)
    notices = notices_of(
        profile=profile,
        decision=decision,
        training=training,
        performance=performance,
        today=today,
        waits_in=_waits_in(workload) if is_registered and outcome.is_good else "",
    )
    return Evaluation(
        workload_sha256=workload.digest(),
        passed=outcome.is_good,
        reason=outcome.reason,
        metrics=dict(sorted(training.metrics.items())),
        model_uri=training.model_uri,
        gates=gates,
        warnings=tuple(notice.text for notice in notices),
        notices=notices,
        performance=performance,
    )


def _waits_in(workload: Workload) -> str:
    """Returns the group in which a registered model waits for a person; empty: it does not."""
    settings = workload.sagemaker
    has_registry = workload.platform_info.has_model_registry
    if settings is None or not has_registry or settings.model.approval != _PENDING:
        return ""
    return settings.model.group or workload.name


def judged_again(evaluation: Evaluation, *, champion: Mapping[str, float]) -> Evaluation:
    """Judges a model that passed against the model in use by now. Pure."""
    gates = tuple(_result(gate, gate.value, champion) for gate in evaluation.gates)
    outcome = outcome_of_gates(gates)
    return msgspec.structs.replace(
        evaluation,
        passed=evaluation.passed and outcome.is_good,
        reason=evaluation.reason or outcome.reason,
        gates=gates,
    )


def model_quality(training: Training) -> dict[str, Json]:
    """Returns the run's metrics as the model quality document of SageMaker Studio."""
    parts: dict[str, dict[str, Json]] = {}
    for name, value in sorted(training.metrics.items()):
        if math.isfinite(value):
            kind = "regression" if name in _REGRESSION else "multiclass_classification"
            shown: Json = {"value": value, "standard_deviation": "NaN"}
            parts.setdefault(f"{kind}_metrics", {})[name] = shown
    return {**parts}


def metadata_names(workload: Workload) -> dict[str, str]:
    """Returns the names of a model's metadata; each input's with its channel."""
    # JSON paths allow no dashes.
    inputs = {f"input_{re.sub('[^A-Za-z0-9]', '_', name)}": name for name in workload.channels}
    return {"training_job": "", "decided": "", **dict.fromkeys(_ORIGIN, ""), **inputs}


def model_metadata(workload: Workload, training: Training, decision: Decision) -> dict[str, str]:
    """Returns a model's origin for SageMaker's model registry; no value is empty."""
    groups = groups_in_words(training.groups)
    facts = training.lineage.facts()
    seeds = values_of(training.lineage.seeds)
    what = {
        **facts,
        "training_job": facts.get("job_id", ""),
        "decided": f"{sha256_of(decision)[:12]}: {decision.plan.action}: {groups}",
        "seeds": " ".join(f"{name}={shown(value)}" for name, value in seeds.items()),
    }
    return {
        name: aws_value(what.get(f"input_{channel}" if channel else name, "")) or "not known"
        for name, channel in metadata_names(workload).items()
    }


def lost_training(workload: Workload, decision: Decision) -> Training:
    """Returns the record of a failed training run that left none."""
    return training_record(
        TrainingFacts(
            workload_sha256=workload.digest(),
            status="failed",
            groups=decision.plan.groups,
            job=Job(platform=workload.platform, name=workload.name),
            failure="the training ended without a record; its own log has the reason",
        )
    )


def _result(gate: Gate, value: float | None, champion: Mapping[str, float] | None) -> GateResult:
    theirs = champion.get(gate.metric) if champion is not None and gate.needs_champion else None
    if theirs is not None and not math.isfinite(theirs):
        # A model in use that diverged sets no bound.
        theirs = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _WholeEpochs:
    """Seconds of whole epochs over their steps; None: not compared by them."""

    baseline: float | None = None
    measured: float | None = None
    predicted: float | None = None
    band: Band | None = None


def _whole_epochs(
    profile: Profile,
    measured: Measured,
    *,
    today_seconds: float,
    keep: Predicted | None,
    promise: Predicted | None,
) -> _WholeEpochs:
    """Returns what is compared: nothing where a part of whole epochs is not known of all three.

    `keep` is today's prediction if the profile was taken elsewhere, else None.
    """
    profiled = profile.epochs
    run = measured.epochs
    if profiled is None or run is None or measured.whole_step_seconds is None:
        return _WholeEpochs()
    if run.start is not None and profiled.start is None:
        return _WholeEpochs()
    same = profiled.as_in(run)
    baseline = same.whole_step_seconds(today_seconds)
    # What the decision did not count, or the run did not have.
    more = same.whole_step_seconds(0.0) - profiled.whole_step_seconds(0.0)
    if keep is not None:
        baseline = keep.counted_seconds + more
    if promise is None:
        return _WholeEpochs(baseline=baseline, measured=measured.whole_step_seconds)
    if promise.whole_step_seconds is None:
        return _WholeEpochs()
    return _WholeEpochs(
        baseline=baseline,
        measured=measured.whole_step_seconds,
        predicted=promise.whole_step_seconds + more,
        band=Band(low_seconds=promise.counted_low + more, high_seconds=promise.counted_high + more),
    )


def _performance(profile: Profile, decision: Decision, training: Training) -> Performance | None:
    measured = training.measured
    if profile.step is None or measured is None or not measured.steps or not measured.step_seconds:
        return None
    keep = decision.today.predicted if decision.today else None
    # The profile's step is another machine's.
    scaled = keep if decision.taken_elsewhere else None
    today = scaled.step_seconds if scaled else profile.step.step_seconds
    is_billed = decision.prices.is_billed
    plan = _plan_that_ran(decision, training)
    promise = plan.predicted if plan else None
    whole = _whole_epochs(profile, measured, today_seconds=today, keep=scaled, promise=promise)
    baseline = _cost_of(keep, today, whole=whole.baseline, is_billed=is_billed)
    # The plan's hosts ran, so its price also holds where the run has none.
    outcome = _cost_of(promise, measured.step_seconds, whole=whole.measured, is_billed=is_billed)
    if is_billed:
        outcome = _with_bill(outcome, measured, is_estimate=training.is_estimate)
    band = whole.band
    predicted = None
    error = None
    if promise is not None:
        low = promise.step_seconds_low
        high = promise.step_seconds_high
        band = band or Band(low_seconds=low, high_seconds=high)
        predicted = _cost_of(
            promise, promise.step_seconds, whole=whole.predicted, is_billed=is_billed
        )
        error = _change(outcome.counted_seconds, predicted.counted_seconds)
    return Performance(
        action=plan.action if plan else None,
        baseline=_with_load(baseline, _gpus_today(profile, decision)),
        predicted=predicted,
        measured=_with_load(outcome, training.gpus),
        prediction_error=error,
        band=band,
        is_inside_band=band.holds(outcome.counted_seconds) if band else None,
        speedup=baseline.counted_seconds / outcome.counted_seconds,
        cost_change=_cost_change(outcome, baseline, is_billed=is_billed),
        busy=training.busy or (_PROFILED_BUSY if decision.is_noisy else ""),
        is_helped=training.is_helped,
    )


def _gpus_today(profile: Profile, decision: Decision) -> Sequence[GpuLoad]:
    # Of another machine's GPU, a profile that was taken elsewhere says nothing.
    if profile.observed is None or decision.taken_elsewhere:
        return ()
    return profile.observed.gpus


def _cost_change(cost: StepCost, reference: StepCost, *, is_billed: bool) -> float | None:
    # Nominal dollars only compare plans; without a bill the cost is in CPU-seconds.
    if is_billed:
        return _change(cost.usd_per_1000_steps, reference.usd_per_1000_steps)
    return _change(cost.cpu_seconds, reference.cpu_seconds)


def _plan_that_ran(decision: Decision, training: Training) -> Plan | None:
    """Returns the decision's plan with the hosts of the run; None: they were named otherwise."""
    # The chosen plan first: another one in the list may have the same hosts.
    for plan in (decision.plan, *decision.plans):
        if _is_same(plan.groups, training.groups):
            return plan
    return None


def _with_bill(cost: StepCost, measured: Measured, *, is_estimate: bool) -> StepCost:
    """Returns what the run cost by its bill; the plan's price where the run has none."""
    if measured.usd_per_1000_steps is None:
        return cost
    compared = cost.counted_seconds / measured.counted_seconds
    return msgspec.structs.replace(
        cost,
        usd_per_1000_steps=measured.usd_per_1000_steps * compared,
        is_estimate=cost.is_estimate or is_estimate,
    )


def _with_load(cost: StepCost, gpus: Sequence[GpuLoad]) -> StepCost:
    return msgspec.structs.replace(cost, gpu_utilization=busy_share(gpus))


def _cost_of(
    plan: Predicted | None, step_seconds: float, *, whole: float | None, is_billed: bool
) -> StepCost:
    if plan is None:
        return StepCost(step_seconds=step_seconds, whole_step_seconds=whole)
    times = (whole or step_seconds) / plan.counted_seconds

    def scaled(value: float | None) -> float | None:
        if value is None:
            return None
        return value * times

    return StepCost(
        step_seconds=step_seconds,
        whole_step_seconds=whole,
        usd_per_1000_steps=scaled(plan.usd_per_1000_steps) if is_billed else None,
        is_estimate=is_billed and plan.is_estimate,
        cpu_seconds=scaled(plan.cpu_seconds),
        accelerator_seconds=scaled(plan.accelerator_seconds),
    )


def _change(value: float | None, reference: float | None) -> float | None:
    if value is None or not reference:
        return None
    return value / reference - 1


def _is_same(planned: Sequence[Group], ran: Sequence[Group]) -> bool:
    """Whether the run had the plan's hosts; workers count only where both records have them."""
    if len(planned) != len(ran):
        return False
    for plan, group in zip(planned, ran, strict=True):
        if _hosts(plan) != _hosts(group):
            return False
        # A run that was named by hand may leave its workers open.
        if len({plan.workers_per_host, group.workers_per_host} - {None}) > 1:
            return False
    return True


def _hosts(group: Group) -> tuple[str, str, int]:
    return group.role, bare_type(group.instance_type), group.count
