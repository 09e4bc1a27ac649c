"""The evaluation of a training, and its outcome, on which all who tell it agree."""

import re

import msgspec
import pytest

from stoker.errors import GateError, UsageError
from stoker.evaluate import (
    evaluate,
    judged_again,
    lost_training,
    metadata_names,
    model_metadata,
    model_quality,
)
from stoker.record_words import evaluation_table, evaluation_words, training_words
from stoker.records import (
    Channel,
    Constraints,
    Decision,
    EpochPause,
    EpochTimes,
    Event,
    Gate,
    GroupSpending,
    Job,
    Measured,
    Plan,
    Predicted,
    Prices,
    TakenElsewhere,
    Training,
    Workload,
    to_json,
    write_json,
)
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.records.training import InputVersion, Lineage
from stoker.report.verdict import JudgedRun, collect, judge
from stoker.run.judging import pass_gate
from stoker.run.outputs import told_of_evaluation
from stoker.tracking import metrics_of, tags_of
from stoker.units import time_unit
from support import builders, sample_records

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
        "plan": chosen,
        "plans": (chosen, keep),
        "prices": Prices(source="nominal"),
        "objective": "time",
        "constraints": Constraints(),
    }
    return Decision(**(known | changes))


def _profile(sha=None):
    return builders.profile(workload_sha256=sha, step_seconds=0.06, global_batch_size=64)


def _bounds(**bounds):
    return Gate(**({"metric": "m"} | bounds))


def _training(
    *, status="succeeded", step=0.033, usd=None, steps=100, groups=(DNN, DATA), sha=None, **metrics
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
        workload_sha256=sha,
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
    ("batches", "is_helped"), [(0, False), (3, False), (61, False), (62, True), (1240, True)]
)
def test_a_data_group_that_made_next_to_nothing_is_a_warning(batches, is_helped):
    group = GroupSpending(group="data", usd=3.1, batches=batches, all_batches=1240)
    record = _evaluate(replace(_training(), spending=(group,)))
    words = f"the data group made {batches} of 1,240 batches, $3.10"
    assert record.warnings == (() if is_helped else (words,))
    assert record.performance.is_helped is is_helped
    told = (evaluation_words(record), evaluation_table(record))
    credit = "which is no effect of its data hosts"
    assert [words in text for text in told] == [not is_helped] * 2
    assert [credit in text for text in told] == [not is_helped] * 2


def test_hosts_that_nobody_counted_are_no_warning():
    record = _evaluate(replace(_training(), spending=(GroupSpending(group="data", usd=1.0),)))
    assert (record.warnings, record.performance.is_helped) == ((), None)


@pytest.mark.parametrize(
    ("bounds", "value", "passed"),
    [
        ({"min": 0.9}, 0.9, True),
        ({"min": 0.9}, 0.89, False),
        ({"min": 1.0, "max": 2.0}, 2.0, True),
        ({"min": 1.0, "max": 2.0}, 2.1, False),
    ],
)
def testpass_gate_holds_between_its_bounds(bounds, value, passed):
    evaluation = _evaluate(_training(m=value), _bounds(**bounds))
    assert evaluation.passed is passed
    assert (evaluation.gates[0].passed, evaluation.gates[0].value) == (passed, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metric_that_is_no_number_fails_itspass_gate(value):
    evaluation = _evaluate(_training(m=value), _bounds(min=0.9))
    assert not evaluation.passed
    to_json(evaluation)


def test_metrics_are_told_in_the_form_that_studio_shows():
    quality = model_quality(_training(accuracy=0.97, rmse=0.5, loss=float("nan")))
    assert quality == {
        f"{kind}_metrics": {name: {"value": value, "standard_deviation": "NaN"}}
        for kind, name, value in (
            ("multiclass_classification", "accuracy", 0.97),
            ("regression", "rmse", 0.5),
        )
    }


def test_a_models_metadata_names_job_image_inputs_and_decision_as_the_registry_takes_them():
    channels = {"train": Channel(uri="s3://b/t/"), "my-data": Channel(uri="s3://b/" + "d" * 400)}
    workload = replace(_workload(), channels=channels)
    lineage = Lineage(
        job_id="arn:job",
        git="0a1b",
        seeds={"seed": 7},
        inputs={
            "train": InputVersion(address="s3://b/t/", version="sha256:1 of 2"),
            "my-data": InputVersion(address="s3://b/(" + "d" * 400),
        },
    )
    metadata = model_metadata(workload, replace(_training(), lineage=lineage), _decision())
    assert (metadata["git"], metadata["seeds"]) == ("0a1b", "seed=7")
    assert list(metadata) == list(metadata_names(workload))
    assert metadata["training_job"] == "arn:job"
    assert metadata["image_digest"] == "not known"
    assert metadata["input_train"] == "s3://b/t/ sha256:1 of 2"
    assert _decision().plan.action in metadata["decided"]
    allowed = re.compile(r"[\w .:/=+@-]{1,256}")
    assert all(allowed.fullmatch(value) for value in metadata.values())


@pytest.mark.parametrize(
    ("champion", "passed"), [(0.95, True), (0.956, False), (None, True), (0.1, True)]
)
def testpass_gate_holds_a_model_against_the_one_in_use(champion, passed):
    known = None if champion is None else {"m": champion}
    record = _evaluate(_training(m=0.95), _bounds(min_champion=-0.005), champion=known)
    assert record.passed is passed
    assert record.gates[0].min == (None if champion is None else pytest.approx(champion - 0.005))
    told = evaluation_table(record)
    assert ("no model is in use yet" in told) == (champion is None)
    assert ("of the model in use" in told) == (champion is not None)
    assert all(len(line) <= 88 for line in told.splitlines())


def test_model_in_use_that_did_not_report_apass_gates_metric_fails_it():
    gate = _bounds(min=0.5, min_champion=-0.005)
    record = _evaluate(_training(m=0.95), gate, champion={"loss": 0.1})
    assert not record.passed
    assert record.reason == "gate failed: m is 0.95, and the model in use has not reported it"
    assert "the model in use has not reported it" in evaluation_table(record)


def test_model_that_passed_is_judged_again_by_itspass_gates_offsets():
    gates = (_bounds(min=0.5, min_champion=-0.01), _bounds(metric="n", max=0.2))
    first = _evaluate(_training(m=0.95, n=0.1), *gates)
    assert first.passed
    assert judged_again(first, champion={"m": 0.96}).passed
    behind = judged_again(first, champion={"m": 0.97})
    assert not behind.passed
    reason = "gate failed: m is 0.95, asked for at least 0.96 (the model in use has 0.97)"
    assert behind.reason == reason
    failed = _evaluate(_training(m=0.4, n=0.1), *gates)
    assert not judged_again(failed, champion={"m": 0.1}).passed


@pytest.mark.parametrize(("champion", "bound"), [(0.2, 0.3), (0.9, 0.5), (None, 0.5)])
def test_the_stricter_of_two_bounds_counts(champion, bound):
    assert _bounds(max=0.5, max_champion=0.1).against(champion).max == pytest.approx(bound)


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


def test_run_is_not_held_against_a_step_that_another_machine_took():
    # The profile is a workstation's: what it took there, 0.5 s, is no baseline here.
    sources = {"cpu_speed_source": "given", "accelerator_step_source": "cpu"}
    taken = TakenElsewhere(profiled_on="local.c2", taken_as="local.c1", cpu_speed=2.0, **sources)
    profile = builders.profile("local.c2", step_seconds=0.5)
    decision = _decision(taken_elsewhere=taken)
    performance = _evaluate(_training(step=0.03), profile=profile, decision=decision).performance
    assert performance.baseline.step_seconds == 0.06
    assert performance.speedup == pytest.approx(2.0)


def test_a_faster_step_on_the_same_hosts_is_no_gain():
    # Other programs that ran at the time of the profile have ended, say.
    evaluation = _evaluate(_training(step=0.03, groups=(DNN,)))
    assert evaluation.performance.action == "keep"
    words = "2.00 times as fast as in the profile on the same hosts: the machine's load or speed"
    assert words in evaluation_table(evaluation)
    assert words in evaluation_words(evaluation)
    same = evaluation_words(_evaluate(_training(step=0.058, groups=(DNN,))))
    assert "1.03 times as fast as in the profile on the same hosts: no gain by stoker" in same


def test_cost_is_measured_or_follows_from_the_plans_price():
    priced, derived = _performance(step=0.033, usd=0.002), _performance(step=0.033)
    assert priced.measured.usd_per_1000_steps == 0.002
    assert derived.measured.usd_per_1000_steps == pytest.approx(0.033 * 0.1 / 3.6)
    assert derived.cost_change == pytest.approx((0.033 * 0.1) / (0.06 * 0.05) - 1)


def test_record_of_another_workload_is_refused_and_one_made_by_hand_is_taken():
    own, other = _workload().digest(), "f" * 64
    records = {"profile": _profile(own), "training": _training(sha=own)}
    evaluation = _evaluate(**records)
    assert (evaluation.passed, evaluation.workload_sha256) == (True, own)
    for kind, wrong in {
        "profile": _profile(other),
        "decision": _decision(workload_sha256=other),
        "training": _training(sha=other),
    }.items():
        with pytest.raises(UsageError, match=f"the {kind} was made for another workload"):
            _evaluate(**(records | {kind: wrong}))


def test_text_gives_verdictpass_gates_and_three_step_times():
    lines = evaluation_table(_evaluate(_training(m=0.97), _bounds(min=0.9))).splitlines()
    assert lines[0] == "passed: 1 of 1 gates held"
    assert "0.97" in lines[1]
    assert "at least 0.9" in lines[1]
    assert lines[2].split(maxsplit=1) == ["step", "$ per 1,000 steps"]
    assert [line.split()[0] for line in lines[3:6]] == ["baseline", "predicted", "measured"]
    assert "1.82 times as fast" in lines[-2]
    assert lines[-1].strip() == (
        "the step is 10.0% longer than predicted, inside the band of 27.0 ms to 33.0 ms"
    )
    assert max(map(len, lines)) <= 88


def test_a_training_that_left_no_record_is_judged_as_failed():
    workload = _workload(_bounds(metric="accuracy", min=0.9))
    lost = lost_training(workload, _decision())
    assert lost.status == "failed"
    assert lost.groups == _decision().plan.groups
    judged = _evaluate(lost, workload=workload)
    assert not judged.passed
    assert "failed" in judged.reason


def test_the_reason_names_eachpass_gate_that_failed_with_value_and_bound():
    bounds = {"accuracy": {"min": 0.99}, "loss": {"max": 0.1}, "f1": {"min": 0.5}}
    gates = [_bounds(metric=name, **bound) for name, bound in bounds.items()]
    evaluation = _evaluate(_training(accuracy=0.95, loss=0.05), *gates)
    assert [gate.passed for gate in evaluation.gates] == [False, True, False]
    assert evaluation.reason == (
        "gate failed: accuracy is 0.95, asked for at least 0.99; "
        "f1 was not reported, asked for at least 0.5 (in the script: "
        "stoker.log_metrics(f1=value), or the JSON file $STOKER_METRICS; or regex in the gate, "
        "for a line that it prints)"
    )


def test_where_nobody_is_billed_a_step_costs_cpu_seconds_and_no_dollars():
    chosen, keep = (
        replace(
            plan,
            predicted=replace(
                plan.predicted, cpu_seconds=len(plan.groups) * plan.predicted.step_seconds
            ),
        )
        for plan in _decision().plans
    )
    prices = Prices(source="nominal", purchase="nominal")
    nominal = _decision(plan=chosen, plans=(chosen, keep), prices=prices)
    judged = _evaluate(_training(step=0.033, usd=0.002), decision=nominal)
    assert judged.performance.measured.usd_per_1000_steps is None
    assert judged.performance.measured.cpu_seconds == pytest.approx(2 * 0.033)
    assert judged.performance.cost_change == pytest.approx(2 * 0.033 / 0.06 - 1)
    text = evaluation_table(judged)
    assert "$" not in text
    assert "10% more CPU-seconds per step" in text


GATE = Gate(metric="accuracy", min=0.9)
UNFED = "the training took no batch from its data hosts: x.Loader makes batches in its own way"


def _sample(**changes):
    record = replace(sample_records.training(), metrics={"accuracy": 0.95})
    return replace(record, workload_sha256=None, **changes)


NOT_FED = _sample(status="failed", exit_code=0, failure=UNFED, is_unfed=True, measured=None)
# State, exit code of a judgement, exit code of the training alone, its record, gates.
CASES = {
    "passed": (0, 0, _sample(), (GATE,)),
    "no gate": (0, 0, _sample(), ()),
    "gate failed": (3, 0, _sample(metrics={"accuracy": 0.5}), (GATE,)),
    "did no step": (3, 0, _sample(measured=None, steps=0), (GATE,)),
    "not fed": (6, 6, NOT_FED, (GATE,)),
    "failed": (6, 6, _sample(status="failed", exit_code=1, failure="ValueError: x"), (GATE,)),
    "stopped": (143, 143, _sample(status="stopped", exit_code=143), (GATE,)),
}


@pytest.mark.parametrize("state", CASES)
def test_all_answers_to_did_it_pass_agree(state, tmp_path, capsys):
    code, training_code, training, gates = CASES[state]
    workload = replace(sample_records.workload(), gate=gates)
    profile = replace(sample_records.profile(), workload_sha256=None)
    decision = replace(sample_records.decision(), workload_sha256=None)
    known = {"profile": profile, "decision": decision, "training": training}
    record = evaluate(workload=workload, **known)
    outcome = outcome_of(training, record.gates)
    is_good = state in ("passed", "no gate")
    assert (outcome.state, outcome.is_good, outcome.exit_code) == (state, is_good, code)
    assert training_exit_code(training) == training_code
    # The record, and what later steps of a pipeline are told of it.
    assert (record.passed, record.reason) == (is_good, "" if is_good else outcome.words)
    assert told_of_evaluation(record).parameters["passed"] == str(is_good).lower()
    assert metrics_of(training, record)["stoker_passed"] == is_good
    assert tags_of(training, record)["stoker_outcome"] == state
    # The terminal, of each verb.
    assert evaluation_table(record).splitlines()[0] == outcome.words
    if not is_good:
        assert evaluation_words(record).startswith(outcome.words)
    if state not in ("passed", "no gate", "gate failed"):
        assert f"the {training_words(training)}" == outcome.words
    # The pipeline's gate.
    file = tmp_path / "evaluation.json"
    write_json(file, record)
    if is_good:
        pass_gate(file, champions=None)
        assert capsys.readouterr().out == f"{outcome.words}\n"
    else:
        with pytest.raises(GateError) as raised:
            pass_gate(file, champions=None)
        assert raised.value.what == outcome.words
    # The report.
    figures = collect(**known, evaluation=record)
    unit = time_unit([figures.baseline.seconds])
    told = {**known, "evaluation": record, "failure": None}
    verdict = judge(JudgedRun(figures=figures, unit=unit, nominal=False, **told))
    assert (verdict.tone == "bad") is not is_good
    badges = {"failed": "training failed", "passed": "gate passed"}
    assert (badges.get(state, state) in verdict.badge) is (state != "no gate")
    assert state == "passed" or "gate passed" not in verdict.badge
    if state == "gate failed":
        assert verdict.headline.startswith("The model missed its quality gate. accuracy 0.5")
    elif not is_good:
        assert verdict.headline.lower().rstrip(".") == outcome.words.lower()


def test_steps_that_nothing_counted_are_no_missing_steps():
    # A script without torch: neither 0 steps, nor a failure.
    assert outcome_of(_sample(measured=None, steps=None)).state == "no gate"
    assert outcome_of(_sample(measured=None, steps=125)).state == "no gate"
    words = training_words(_sample(measured=None, steps=125))
    assert words.startswith("training succeeded, 125 steps; no step was timed")
    shared = (Event(when="2026-11-21T12:00:00Z", what="not comparable: hosts share cores"),)
    words = training_words(_sample(events=shared))
    assert words.endswith("; not comparable: hosts share cores")


LOST = """\
rank 0 on algo-3: FeedLostError: no data worker is left after 5 s: 2 data hosts expected
where: rank 0
try:   see the logs of the data hosts
Traceback (most recent call last):
stoker.errors.FeedLostError: no data worker is left after 5 s: 2 data hosts expected
where: rank 0
try:   see the logs of the data hosts
"""
OWN = "rank 0 on algo-3: ValueError: no FeedLostError: of the script's own\nTraceback ..."


def failed(failure, exit_code):
    return _sample(status="failed", failure=failure, exit_code=exit_code)


@pytest.mark.parametrize(
    ("failure", "code", "expected"), [(LOST, 5, 5), (OWN, 5, 6), (LOST, 1, 6), ("", 5, 6)]
)
def test_an_error_of_the_feed_is_5_and_anything_else_6(failure, code, expected):
    assert training_exit_code(failed(failure, code)) == expected


def test_the_words_of_a_lost_feed_are_what_was_lost_and_not_what_to_try():
    assert training_words(failed(LOST, 5)).endswith("(exit code 5): " + LOST.splitlines()[0])


def _pause(seconds):
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=2)


def _of_h100(*, profiled, run, predicted_start=0.65, usd=None):
    """The H100 of 2026-11-26: 160 ms a step, predicted 52.7, measured 47.8; 42 steps an epoch."""
    times = profiled and profiled.whole_step_seconds(0.0)
    keep, data = (
        replace(
            _predicted(step, price),
            whole_step_seconds=profiled and step + times,
            whole_step_seconds_low=profiled and step * 0.9 + times,
            whole_step_seconds_high=profiled and step * 1.1 + times,
            usd_per_1000_steps=(step + (times or 0.0)) * price * 1000 / 3600,
        )
        for step, price in ((0.1596, 0.05), (0.0527, 0.1))
    )
    plans = (
        Plan(action="heterogeneous", groups=(DNN, DATA), predicted=data),
        Plan(action="keep", groups=(DNN,), predicted=keep),
    )
    training = _training(step=0.0478, usd=usd)
    measured = replace(
        training.measured,
        epochs=run,
        whole_step_seconds=run and run.whole_step_seconds(0.0478),
    )
    profile = replace(builders.profile(step_seconds=0.1596), epochs=profiled)
    return _evaluate(
        replace(training, measured=measured),
        profile=profile,
        decision=_decision(plan=plans[0], plans=plans),
    ).performance


FULL = EpochTimes(steps=42.0, start=_pause(0.65), between=_pause(0.3), inside_seconds=0.0)
FED = EpochTimes(steps=42.0, start=_pause(0.76), between=_pause(0.3), inside_seconds=0.0)


def test_speedup_is_of_whole_epochs():
    found = _of_h100(profiled=FULL, run=FED)
    before, now = 0.1596 + 0.95 / 42, 0.0478 + 1.06 / 42
    assert found.speedup == pytest.approx(before / now)
    assert found.speedup < 2.6 < 0.1596 / 0.0478
    assert found.prediction_error == pytest.approx(now / (0.0527 + 0.95 / 42) - 1)
    assert found.is_inside_band
    # The step is there, too.
    assert (found.baseline.step_seconds, found.measured.step_seconds) == (0.1596, 0.0478)


def test_what_lies_between_epochs_and_was_not_profiled_is_as_in_the_run():
    short = EpochTimes(steps=42.0, start=_pause(0.65))
    found = _of_h100(profiled=short, run=FED)
    assert found.baseline.whole_step_seconds == pytest.approx(0.1596 + 0.95 / 42)
    assert found.predicted.whole_step_seconds == pytest.approx(0.0527 + 0.95 / 42)
    assert found.band.high_seconds == pytest.approx(0.0527 * 1.1 + 0.95 / 42)


def test_run_of_one_epoch_is_compared_without_pauses():
    found = _of_h100(profiled=FULL, run=EpochTimes(inside_seconds=0.004))
    assert found.baseline.whole_step_seconds == pytest.approx(0.1596)
    assert found.measured.whole_step_seconds == pytest.approx(0.0478 + 0.004)


@pytest.mark.parametrize(
    ("profiled", "run"),
    [
        (None, FED),
        (FULL, None),
        # Its start is not known.
        (EpochTimes(steps=42.0, between=_pause(0.3)), FED),
    ],
)
def test_steps_are_compared_where_epochs_are_not_known_of_all(profiled, run):
    found = _of_h100(profiled=profiled, run=run)
    assert found.speedup == pytest.approx(0.1596 / 0.0478)
    assert found.baseline.whole_step_seconds is found.measured.whole_step_seconds is None
    assert found.prediction_error == pytest.approx(0.0478 / 0.0527 - 1)


def test_dollars_are_compared_by_what_is_compared():
    # The run's dollars are of whole epochs; the profile knows only the step.
    usd = FED.whole_step_seconds(0.0478) * 0.1 * 1000 / 3600
    whole = _of_h100(profiled=FULL, run=FED, usd=usd)
    steps = _of_h100(profiled=None, run=FED, usd=usd)
    assert whole.cost_change == pytest.approx(2 / whole.speedup - 1)
    assert steps.cost_change == pytest.approx(2 / steps.speedup - 1)


def test_table_has_whole_epochs_beside_the_steps():
    performance = _of_h100(profiled=FULL, run=FED)
    evaluation = replace(_evaluate(_training()), performance=performance)
    table = evaluation_table(evaluation)
    assert "whole epochs" in table
    assert any(
        line.split()[:5] == ["baseline", "182", "ms", "160", "ms"] for line in table.split("\n")
    )
    assert "2.49 times as fast" in table
    assert "whole epochs are" in table
    assert max(map(len, table.splitlines())) <= 88
    assert "whole epochs" not in evaluation_table(_evaluate(_training()))
