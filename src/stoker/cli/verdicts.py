"""The verdict of each record: one line of words, and the exit code of a training."""

import re

from stoker.cli.workloads import describe
from stoker.errors import FeedError
from stoker.evaluate import band_words
from stoker.records import Decision, Evaluation, Profile, Training

# In the first line of a rank's failure, or in the last line of its traceback.
_ERROR_OF_THE_FEED = re.compile(
    r"^(rank \d+ on \S+: |stoker\.errors\.)(Feed|FeedLost|Shipping|Protocol)Error: ", re.MULTILINE
)


def profile_words(record: Profile) -> str:
    """Returns the verdict of a profile in one line."""
    step = record.timed_step
    if step.wait_seconds is None:
        return f"a step takes {step.step_seconds * 1000:.1f} ms"
    share = min(1.0, step.wait_seconds / step.step_seconds)
    check = record.check
    unexplained = ""
    if check is not None and not check.explained:
        unexplained = f", in the state {check.state}" if check.state else ", unexplained"
    took = f"a step takes {step.step_seconds * 1000:.1f} ms"
    return f"{took}, {share:.0%} of it waiting for data{unexplained}"


def decision_words(record: Decision) -> str:
    """Returns the verdict of a decision in one line."""
    predicted = record.plan.predicted
    promise = f", {predicted.speedup:.2f} times as fast" if predicted else ""
    if record.action == "keep":
        reason = record.plan.reason or "no other cluster pays"
        return f"keep {describe(record.plan.groups)}: {reason}"
    return f"{record.action}: {describe(record.plan.groups)}{promise}"


def free_advice(profiled: Profile, decision: Decision) -> list[str]:
    """Returns the advice that costs nothing and is worth doing, whichever plan is run."""
    free = {fix.id for fix in profiled.fixes if fix.cost == "none"} | {"num-workers"}
    return [advice.text for advice in decision.advice if advice.id in free]


def training_words(training: Training) -> str:
    """Returns what a run did, and whether its times can be compared with those of other runs."""
    measured = training.measured
    if training.status != "succeeded":
        code = "" if training.exit_code is None else f" (exit code {training.exit_code})"
        if training.status == "stopped" and not training.failure:
            return f"training stopped{code}{_steps_words(training)}"
        return f"training {training.status}{code}: {training.cause}"
    if measured is None or not measured.steps:
        return "training succeeded; it read no batch from a loader of stoker"
    step, wait = measured.step_seconds * 1000, measured.wait_seconds * 1000
    metrics = "".join(f", {name} {value:.4g}" for name, value in training.metrics.items())
    # The platform says why: hosts share cores, or cores stand for hosts of a cloud.
    mind = next((e.what for e in training.events if e.what.startswith("not comparable: ")), "")
    mind = f"; {mind}" if mind else ""
    return f"{measured.steps} steps of {step:.1f} ms, {wait:.1f} ms of it waiting{metrics}{mind}"


def _steps_words(training: Training) -> str:
    """Returns how many steps were done; empty if nothing was measured."""
    measured = training.measured
    return f" after {measured.steps} steps" if measured and measured.steps else ""


def exit_code_of(training: Training) -> int:
    """Returns 0, 5 if the feed could not go on, 6 for a failed workload, 143 for a stopped one."""
    if training.status == "failed" and _is_feeds(training):
        return FeedError.exit_code
    return {"succeeded": 0, "failed": 6, "stopped": 143}[training.status]


def _is_feeds(training: Training) -> bool:
    """Returns whether an error of the feed ended the training, and not one of the user's."""
    return training.exit_code == FeedError.exit_code and bool(
        _ERROR_OF_THE_FEED.search(training.failure or "")
    )


def evaluation_words(record: Evaluation) -> str:
    """Returns the verdict of an evaluation in one line."""
    gates = ", ".join(
        f"{gate.metric} {'not reported' if gate.value is None else f'{gate.value:.4g}'} "
        f"{'passed' if gate.passed else 'FAILED'}"
        for gate in record.gates
    )
    performance = record.performance
    if performance is None:
        return gates or "no gate"
    error = performance.prediction_error
    side = "over" if (error or 0.0) > 0 else "under"
    promise = "" if error is None else f", {abs(error):.1%} {side} prediction"
    promise += f", {band_words(performance)}" if performance.band else ""
    speed = f"{performance.speedup:.2f} times as fast{promise}"
    return f"{gates}; {speed}" if gates else speed
