"""The evaluation for a person."""

from stoker.records import Evaluation, GateResult, Performance, StepCost


def summary(evaluation: Evaluation) -> str:
    """The verdict first, then gates and performance; at most 88 columns."""
    lines = [_verdict(evaluation)]
    lines += [_gate(gate) for gate in evaluation.gates]
    if evaluation.performance is not None:
        lines += _performance(evaluation.performance)
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


def _performance(performance: Performance) -> list[str]:
    rows: list[tuple[str, StepCost]] = [("baseline", performance.baseline)]
    if performance.predicted is not None:
        rows.append(("predicted", performance.predicted))
    rows.append(("measured", performance.measured))
    lines = [f"  {'':<10} {'step':>11} {'$/1000 steps':>13}"]
    lines += [f"  {name:<10} {_ms(row.step_seconds):>11} {_usd(row):>13}" for name, row in rows]
    text = f"  {performance.speedup:.2f}x as fast"
    if performance.cost_change is not None:
        word = "cheaper" if performance.cost_change < 0 else "dearer"
        text += f", {abs(performance.cost_change):.0%} {word} a step"
    if performance.prediction_error is not None:
        slower = "slower" if performance.prediction_error > 0 else "faster"
        text += f"; {abs(performance.prediction_error):.1%} {slower} than predicted"
    return [*lines, text, *([f"  {band_words(performance)}"] if performance.band else [])]


def band_words(performance: Performance) -> str:
    """Whether the outcome is one that was promised; empty where nothing was."""
    band = performance.band
    if band is None:
        return ""
    where = "inside" if performance.is_inside_band else "OUTSIDE"
    return f"{where} the promised band of {_ms(band.low_seconds)} to {_ms(band.high_seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 10 else f"{seconds:.2f} s"


def _usd(row: StepCost) -> str:
    return "unknown" if row.usd_per_1000_steps is None else f"{row.usd_per_1000_steps:.4g}"
