"""The evaluate component holds a run against its gates, its baseline and its prediction."""

import math
from collections.abc import Mapping, Sequence

from stoker.errors import UsageError
from stoker.records import (
    Band,
    Decision,
    Evaluation,
    Gate,
    GateResult,
    Group,
    Job,
    Json,
    Performance,
    Plan,
    Profile,
    StepCost,
    Training,
    Workload,
    bare_type,
)
from stoker.records.training import TrainingFacts, training_record
from stoker.text import ms, percentage


def evaluate(
    *,
    workload: Workload,
    profile: Profile,
    decision: Decision,
    training: Training,
    champion: Mapping[str, float] | None = None,
) -> Evaluation:
    """Judges the run by its status, its gates and its prediction. Pure.

    A metric that the run did not report fails its gate, and a run that did no step is no new model:
    what it reports is an earlier run's. The prediction is that of the plan with the run's groups; a
    run that is not of a plan has no prediction. `champion` has the metrics of the model in use, for
    gates that name it.

    Raises:
        UsageError: If a record was made for another workload.
    """
    digest = workload.digest()
    _refuse_foreign("profile", profile.workload_sha256, digest)
    _refuse_foreign("decision", decision.workload_sha256, digest)
    _refuse_foreign("training", training.workload_sha256, digest)
    known = champion or {}
    bounds = (gate.against(known.get(gate.metric)) for gate in workload.gate)
    gates = tuple(_result(gate, training) for gate in bounds)
    return Evaluation(
        workload_sha256=digest,
        passed=training.status == "succeeded"
        and not _did_no_step(training)
        and all(gate.passed for gate in gates),
        reason=_reason(training, gates),
        gates=gates,
        performance=_performance(profile, decision, training),
    )


# Names by which SageMaker Studio knows metrics of a regression; all others are a classification's.
_REGRESSION = frozenset({"mae", "mse", "rmse", "r2"})


def model_quality(training: Training) -> dict[str, Json]:
    """Returns the run's metrics in the form of model quality that SageMaker Studio shows."""
    parts: dict[str, dict[str, Json]] = {}
    for name, value in sorted(training.metrics.items()):
        if math.isfinite(value):
            kind = "regression" if name in _REGRESSION else "multiclass_classification"
            # One run says nothing of a spread.
            shown: Json = {"value": value, "standard_deviation": "NaN"}
            parts.setdefault(f"{kind}_metrics", {})[name] = shown
    return {**parts}


def told_metrics(document: Json) -> dict[str, float]:
    """Returns the metrics in a training.json, an evaluation.json or a model-quality.json."""
    content = document if isinstance(document, Mapping) else {}
    values: list[tuple[Json, Json]] = [*_members(content.get("metrics"))]
    gates = content.get("gates")
    values += [
        (gate.get("metric"), gate.get("value"))
        for gate in (gates if isinstance(gates, list) else ())
        if isinstance(gate, Mapping)
    ]
    for kind, part in content.items():
        if kind.endswith("_metrics"):
            values += [
                (name, told.get("value"))
                for name, told in _members(part)
                if isinstance(told, Mapping)
            ]
    return {str(name): float(value) for name, value in values if isinstance(value, int | float)}


def _members(value: Json) -> Sequence[tuple[str, Json]]:
    return [*value.items()] if isinstance(value, Mapping) else []


def lost_training(workload: Workload, decision: Decision) -> Training:
    """Returns the record of a training that left none: failed, on the decision's cluster."""
    return training_record(
        TrainingFacts(
            workload_sha256=workload.digest(),
            status="failed",
            groups=decision.plan.groups,
            job=Job(platform=workload.platform, name=workload.name),
            failure="the training ended without a record; its own log has the reason",
        )
    )


def _reason(training: Training, gates: Sequence[GateResult]) -> str:
    # Before the gates, which fail as well where no metric was reported.
    if training.status != "succeeded":
        return f"the training {training.status}: {training.cause}"
    if _did_no_step(training):
        return "the training did no step, as one that goes on from where another has ended"
    return "; ".join(_gate_words(gate) for gate in gates if not gate.passed)


def _did_no_step(training: Training) -> bool:
    """Tells whether the script had loaders and took no batch; False where nothing was measured."""
    return training.measured is not None and training.measured.steps == 0


def _gate_words(gate: GateResult) -> str:
    value = "was not reported" if gate.value is None else f"is {gate.value:.6g}"
    bounds = [f"at least {gate.min:g}"] if gate.min is not None else []
    bounds += [f"at most {gate.max:g}"] if gate.max is not None else []
    return f"{gate.metric} {value}, asked for {' and '.join(bounds)}"


def _refuse_foreign(kind: str, found: str | None, expected: str) -> None:
    # A record without a digest, made of bare figures or by hand, is taken as it is.
    if found is not None and found != expected:
        raise UsageError(
            f"the {kind} was made for another workload",
            where=f"{kind}, key workload_sha256: {found[:12]}, the workload's is {expected[:12]}",
            fix=f"hand over the {kind} of this workload, or make it again: stoker {_VERBS[kind]}",
        )


_VERBS = {"profile": "profile", "decision": "decide", "training": "train"}


def _result(gate: Gate, training: Training) -> GateResult:
    value = training.metrics.get(gate.metric)
    # A NaN passes no bound anyway, and is no number of JSON.
    if value is not None and not math.isfinite(value):
        value = None
    passed = (
        value is not None
        and (gate.min is None or value >= gate.min)
        and (gate.max is None or value <= gate.max)
    )
    return GateResult(metric=gate.metric, value=value, min=gate.min, max=gate.max, passed=passed)


def _performance(profile: Profile, decision: Decision, training: Training) -> Performance | None:
    measured = training.measured
    if profile.step is None or measured is None or not measured.steps or not measured.step_seconds:
        return None
    keep = next((plan for plan in decision.plans if plan.action == "keep"), None)
    today = profile.step.step_seconds
    if decision.taken_elsewhere and keep and keep.predicted:
        # The profile's step is another machine's: no run here is faster or slower than that.
        today = keep.predicted.step_seconds
    baseline = StepCost(
        step_seconds=today,
        usd_per_1000_steps=keep.predicted.usd_per_1000_steps if keep and keep.predicted else None,
    )
    # The chosen plan first: another one in the list may have the same hosts.
    plan = _plan_of(training.groups, (decision.plan, *decision.plans))
    promise = plan.predicted if plan else None
    usd = measured.usd_per_1000_steps
    # The run knew no prices; the plan's hosts are those that ran, so its price holds.
    if usd is None and promise is not None:
        usd = measured.step_seconds * promise.usd_per_hour * 1000 / 3600
    change = None
    if usd is not None and baseline.usd_per_1000_steps:
        change = usd / baseline.usd_per_1000_steps - 1
    band = None
    if promise is not None:
        band = Band(low_seconds=promise.step_seconds_low, high_seconds=promise.step_seconds_high)
    return Performance(
        baseline=baseline,
        predicted=StepCost(
            step_seconds=promise.step_seconds, usd_per_1000_steps=promise.usd_per_1000_steps
        )
        if promise
        else None,
        measured=StepCost(step_seconds=measured.step_seconds, usd_per_1000_steps=usd),
        prediction_error=measured.step_seconds / promise.step_seconds - 1 if promise else None,
        band=band,
        is_inside_band=band.holds(measured.step_seconds) if band else None,
        speedup=baseline.step_seconds / measured.step_seconds,
        cost_change=change,
    )


def _plan_of(groups: Sequence[Group], plans: Sequence[Plan]) -> Plan | None:
    return next((plan for plan in plans if _is_same(plan.groups, groups)), None)


def _is_same(planned: Sequence[Group], ran: Sequence[Group]) -> bool:
    """Returns whether the run had the plan's hosts; compares workers only where both tell them."""
    return len(planned) == len(ran) and all(
        (one.role, _bare(one), one.count) == (other.role, _bare(other), other.count)
        # A run that was named by hand may leave its workers open.
        and _agree(one.workers_per_host, other.workers_per_host)
        for one, other in zip(planned, ran, strict=True)
    )


def _bare(group: Group) -> str:
    return bare_type(group.instance_type)


def _agree(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one == other


def summary(evaluation: Evaluation) -> str:
    """Returns the verdict first, then gates and performance; at most 88 columns."""
    lines = [_verdict(evaluation)]
    lines += [_gate(gate) for gate in evaluation.gates]
    if evaluation.performance is not None:
        lines += _performance_words(evaluation.performance)
    return "\n".join(lines)


def _verdict(evaluation: Evaluation) -> str:
    failed = [gate.metric for gate in evaluation.gates if not gate.passed]
    if evaluation.passed:
        held = f"{len(evaluation.gates)} of {len(evaluation.gates)} gates held"
        return f"passed: {held}" if evaluation.gates else "passed: the training succeeded; no gates"
    if failed:
        return f"failed: {len(failed)} of {len(evaluation.gates)} gates"
    return "failed: the training did not succeed"


def _gate(gate: GateResult) -> str:
    value = "not reported" if gate.value is None else f"{gate.value:.6g}"
    bounds = [f"at least {gate.min:g}"] if gate.min is not None else []
    bounds += [f"at most {gate.max:g}"] if gate.max is not None else []
    mark = "ok  " if gate.passed else "FAIL"
    return f"  {mark} {gate.metric[:36]:<36} {value:>12}  {', '.join(bounds)}"


def _performance_words(performance: Performance) -> list[str]:
    rows: list[tuple[str, StepCost]] = [("baseline", performance.baseline)]
    if performance.predicted is not None:
        rows.append(("predicted", performance.predicted))
    rows.append(("measured", performance.measured))
    lines = [f"  {'':<10} {'step':>11} {'$ per 1000 steps':>16}"]
    lines += [f"  {name:<10} {ms(row.step_seconds):>11} {_usd(row):>16}" for name, row in rows]
    text = f"  {performance.speedup:.2f}x as fast"
    if performance.cost_change is not None:
        word = "cheaper" if performance.cost_change < 0 else "more expensive"
        text += f", {percentage(abs(performance.cost_change))} {word} per step"
    if performance.prediction_error is not None:
        slower = "slower" if performance.prediction_error > 0 else "faster"
        text += f"; {abs(performance.prediction_error):.1%} {slower} than predicted"
    return [*lines, text, *([f"  {band_words(performance)}"] if performance.band else [])]


def band_words(performance: Performance) -> str:
    """Says whether the outcome is one that was promised; empty where nothing was."""
    band = performance.band
    if band is None:
        return ""
    where = "inside" if performance.is_inside_band else "OUTSIDE"
    return f"{where} the promised band of {ms(band.low_seconds)} to {ms(band.high_seconds)}"


def _usd(row: StepCost) -> str:
    return "unknown" if row.usd_per_1000_steps is None else f"{row.usd_per_1000_steps:.4g}"
