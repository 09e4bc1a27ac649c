"""Five answers to "did it pass?" are one: terminal, exit code, record, gate and report agree."""

import msgspec
import pytest

from stoker.cli.evaluate import _gate
from stoker.cli.outputs import told_of_evaluation
from stoker.errors import GateError
from stoker.evaluate import evaluate
from stoker.records import Event, Gate, write_json
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.report.verdict import collect, judge
from stoker.text import time_unit
from stoker.tracking import metrics_of, tags_of
from stoker.words import evaluation_table, evaluation_words, training_words
from support import sample_records

GATE = Gate(metric="accuracy", min=0.9)
UNFED = "the training took no batch from its data hosts: x.Loader makes batches in its own way"


def _training(**changes):
    record = msgspec.structs.replace(sample_records.training(), metrics={"accuracy": 0.95})
    return msgspec.structs.replace(record, workload_sha256=None, **changes)


# State, exit code of a judgement, exit code of the training alone, its record, gates.
CASES = {
    "passed": (0, 0, _training(), (GATE,)),
    "no gate": (0, 0, _training(), ()),
    "gate failed": (3, 0, _training(metrics={"accuracy": 0.5}), (GATE,)),
    "did no step": (3, 0, _training(measured=None, steps=0), (GATE,)),
    "not fed": (
        6,
        6,
        _training(status="failed", exit_code=0, failure=UNFED, is_unfed=True, measured=None),
        (GATE,),
    ),
    "failed": (6, 6, _training(status="failed", exit_code=1, failure="ValueError: x"), (GATE,)),
    "stopped": (143, 143, _training(status="stopped", exit_code=143), (GATE,)),
}


def _records(state):
    _, _, training, gates = CASES[state]
    workload = msgspec.structs.replace(sample_records.workload(), gate=gates)
    profile = msgspec.structs.replace(sample_records.profile(), workload_sha256=None)
    decision = msgspec.structs.replace(sample_records.decision(), workload_sha256=None)
    record = evaluate(workload=workload, profile=profile, decision=decision, training=training)
    return workload, profile, decision, training, record


@pytest.mark.parametrize("state", CASES)
def test_all_answers_to_did_it_pass_agree(state, tmp_path, capsys):
    code, training_code, *_ = CASES[state]
    _, profile, decision, training, record = _records(state)
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
        _gate(file, champions=None)
        assert capsys.readouterr().out == f"{outcome.words}\n"
    else:
        with pytest.raises(GateError) as raised:
            _gate(file, champions=None)
        assert raised.value.what == outcome.words
    # The report.
    figures = collect(profile=profile, decision=decision, training=training, evaluation=record)
    verdict = judge(
        figures=figures,
        unit=time_unit([figures.baseline]),
        nominal=False,
        profile=profile,
        decision=decision,
        training=training,
        evaluation=record,
        failure=None,
    )
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
    assert outcome_of(_training(measured=None, steps=None)).state == "no gate"
    assert outcome_of(_training(measured=None, steps=125)).state == "no gate"
    words = training_words(_training(measured=None, steps=125))
    assert words.startswith("training succeeded, 125 steps; no step was timed")
    shared = (Event(when="2026-11-21T12:00:00Z", what="not comparable: hosts share cores"),)
    words = training_words(_training(events=shared))
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
    return _training(status="failed", failure=failure, exit_code=exit_code)


@pytest.mark.parametrize(
    ("failure", "code", "expected"), [(LOST, 5, 5), (OWN, 5, 6), (LOST, 1, 6), ("", 5, 6)]
)
def test_an_error_of_the_feed_is_5_and_anything_else_6(failure, code, expected):
    assert training_exit_code(failed(failure, code)) == expected


def test_the_words_of_a_lost_feed_are_what_was_lost_and_not_what_to_try():
    assert training_words(failed(LOST, 5)).endswith("(exit code 5): " + LOST.splitlines()[0])
