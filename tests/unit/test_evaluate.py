"""The evaluation of a training, and its outcome, on which all who tell it agree."""

import re

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.evaluate import (
    evaluate,
    evaluation_table,
    evaluation_words,
    model_metadata,
)
from stoker.records import (
    Constraints,
    Decision,
    Gate,
    Job,
    Measured,
    Plan,
    Predicted,
    Prices,
    Training,
    Workload,
)
from support import builders

DNN = builders.group("dnn", workers_per_host=1)
DATA = builders.group("data", workers_per_host=1)
replace = msgspec.structs.replace


def _workload(*gates):
    return Workload(name="job", command=("python", "train.py"), gate=gates)


def _predicted(step, usd_per_hour):
    return Predicted(
        step_seconds=step,
        step_seconds_low=step * 0.9,
        step_seconds_high=step * 1.1,
        limit="cpu",
        second_limit="accelerator",
        second_limit_seconds=0.0,
        accelerator_utilization=0.5,
        usd_per_hour=usd_per_hour,
        usd_per_1000_steps=step * usd_per_hour * 1000 / 3600,
        speedup=0.06 / step,
        cost_change=0.0,
    )


def _decision(**changes):
    keep = Plan(action="keep", groups=(DNN,), predicted=_predicted(0.06, 0.05))
    chosen = Plan(
        action="heterogeneous",
        groups=(DNN, DATA),
        remote_share=0.7,
        predicted=_predicted(0.03, 0.1),
    )
    known = {
        "bottleneck": "cpu",
        "action": "heterogeneous",
        "verdict": "sure",
        "plan": chosen,
        "plans": (chosen, keep),
        "prices": Prices(source="nominal"),
        "objective": "time",
        "constraints": Constraints(),
    }
    return Decision(**(known | changes))


def _profile():
    return builders.profile(step_seconds=0.06, global_batch_size=64)


def _bounds(**bounds):
    return Gate(**({"metric": "m"} | bounds))


def _training(
    *, status="succeeded", step=0.033, usd=None, steps=100, groups=(DNN, DATA), **metrics
):
    measured = Measured(
        step_seconds=step,
        wait_seconds=0.0,
        compute_seconds=step,
        samples_per_second=2000,
        steps=steps,
        usd_per_1000_steps=usd,
    )
    return Training(
        status=status,
        groups=groups,
        measured=measured,
        metrics=metrics,
        job=Job(platform="local", name="r1"),
    )


def _evaluate(training, *gates, **records):
    known = {"workload": _workload(*gates), "profile": _profile(), "decision": _decision()}
    return evaluate(**{**known, "training": training, **records})


def _performance(**training):
    return _evaluate(_training(**training)).performance


@pytest.mark.parametrize(
    ("bounds", "value", "passed"),
    [
        ({"min": 0.9}, 0.9, True),
        ({"min": 0.9}, 0.89, False),
        ({"min": 1.0, "max": 2.0}, 2.0, True),
        ({"min": 1.0, "max": 2.0}, 2.1, False),
    ],
)
def test_pass_gate_holds_between_its_bounds(bounds, value, passed):
    evaluation = _evaluate(_training(m=value), _bounds(**bounds))
    assert evaluation.passed is passed
    assert (evaluation.gates[0].passed, evaluation.gates[0].value) == (passed, value)


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_metric_that_is_no_number_fails_its_pass_gate(value):
    evaluation = _evaluate(_training(m=value), _bounds(min=0.9))
    assert not evaluation.passed
    assert f"not a number ({value})" in evaluation_table(evaluation)


def test_a_models_metadata_names_its_job_and_decision_as_the_registry_takes_them():
    lineage = {"job_id": "arn:job", "git": "(" + "0a1b" * 100}
    metadata = model_metadata(replace(_training(), lineage=lineage), _decision())
    assert metadata["training_job"] == "arn:job"
    assert metadata["image_digest"] == "not known"
    assert _decision().plan.action in metadata["decided"]
    allowed = re.compile(r"[\w .:/=+@-]{1,256}")
    assert all(allowed.fullmatch(value) for value in metadata.values())


@pytest.mark.parametrize(
    ("champion", "passed"), [(0.95, True), (0.956, False), (None, True), (0.1, True)]
)
def test_pass_gate_holds_a_model_against_the_one_in_use(champion, passed):
    known = None if champion is None else {"m": champion}
    record = _evaluate(_training(m=0.95), _bounds(min_champion=-0.005), champion=known)
    assert record.passed is passed
    assert record.gates[0].min == (None if champion is None else pytest.approx(champion - 0.005))
    told = evaluation_table(record)
    assert ("no model is in use yet" in told) == (champion is None)
    assert ("the model in use has" in told) == (champion is not None)
    assert all(len(line) <= 88 for line in told.splitlines())


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        ({"status": "failed"}, "the training failed: no reason was left"),
        ({"status": "stopped"}, "the training was stopped after 100 steps"),
        # No new model.
        (
            {"step": 0, "steps": 0},
            "the training did no step (was its checkpoint already at the last epoch?)",
        ),
    ],
)
def test_training_that_did_not_succeed_has_not_passed(training, reason):
    evaluation = _evaluate(_training(m=1.0, **training), _bounds(min=0.9))
    assert evaluation.gates[0].passed
    assert not evaluation.passed
    assert evaluation.reason == evaluation_table(evaluation).splitlines()[0] == reason
    assert (evaluation.performance is None) == ("steps" in training)


def test_promise_is_held_against_the_outcome():
    performance = _performance(step=0.033)
    assert performance.baseline.step_seconds == 0.06
    assert performance.predicted.step_seconds == 0.03
    assert performance.prediction_error == pytest.approx(0.1)
    assert performance.speedup == pytest.approx(0.06 / 0.033)
    assert performance.is_inside_band
    words = evaluation_words(_evaluate(_training(step=0.034)))
    assert "OUTSIDE the band of 27.0 ms to 33.0 ms" in words
    # Today's hosts are held against the plan that keeps them, others against none.
    kept = _performance(groups=(DNN,), step=0.066)
    assert kept.predicted.step_seconds == 0.06
    assert kept.prediction_error == pytest.approx(0.1)
    other = _performance(groups=(DNN, builders.group("data", count=2)))
    assert (other.predicted, other.prediction_error, other.cost_change) == (None,) * 3


def test_cost_is_measured_or_follows_from_the_plans_price():
    priced, derived = _performance(step=0.033, usd=0.002), _performance(step=0.033)
    assert priced.measured.usd_per_1000_steps == 0.002
    assert derived.measured.usd_per_1000_steps == pytest.approx(0.033 * 0.1 / 3.6)
    assert derived.cost_change == pytest.approx((0.033 * 0.1) / (0.06 * 0.05) - 1)


def test_record_of_another_workload_is_refused_and_one_made_by_hand_is_taken():
    keys = _workload().profile_keys()
    records = {"profile": replace(_profile(), workload_keys=keys), "training": _training()}
    assert _evaluate(**records).passed
    foreign = {"workload_keys": {**keys, "command": "python other.py"}}
    for kind, record in {
        "profile": _profile(),
        "decision": _decision(),
        "training": _training(),
    }.items():
        with pytest.raises(UsageError, match=f"the {kind} was made for another workload"):
            _evaluate(**(records | {kind: replace(record, **foreign)}))


def test_the_reason_names_each_pass_gate_that_failed_with_value_and_bound():
    bounds = {"accuracy": {"min": 0.99}, "loss": {"max": 0.1}, "f1": {"min": 0.5}}
    gates = [_bounds(metric=name, **bound) for name, bound in bounds.items()]
    evaluation = _evaluate(_training(accuracy=0.95, loss=0.05), *gates)
    assert [gate.passed for gate in evaluation.gates] == [False, True, False]
    assert evaluation.reason == (
        "gate failed: accuracy 0.95 (at least 0.99); f1 not reported (at least 0.5): "
        "stoker.log_metrics(**{'f1': value}) in the script, or the JSON file $STOKER_METRICS, or "
        "regex in the gate for a line that it prints"
    )
