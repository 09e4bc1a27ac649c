"""NaN and infinities in metrics and hyperparameters: recorded, judged, and the end of no run."""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker import log_metrics
from stoker.environment import ProcessSettings
from stoker.errors import GateError, UsageError
from stoker.evaluate import evaluate, judged_again, model_quality
from stoker.launch import finish
from stoker.launch.host_memory import MemoryLog
from stoker.logs import Log
from stoker.record_words import evaluation_table, evaluation_words, training_words
from stoker.records import (
    Evaluation,
    Gate,
    GateResult,
    Training,
    Workload,
    convert,
    read_json,
    to_document,
    to_json,
    write_text,
)
from stoker.records.base import Place
from stoker.records.hyperparameters import record_of
from stoker.records.outcome import outcome_of
from stoker.run.outputs import carried, told_of_evaluation, told_of_training
from stoker.workload_file import read_workload, workload_from
from support import sample_records


def strict(text):
    """Parses JSON as other languages do: without Python's NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


NOT_NUMBERS = [
    (math.nan, "NaN"),
    (math.inf, "Infinity"),
    (-math.inf, "-Infinity"),
    (np.float32("nan"), "NaN"),
    (np.float16("inf"), "Infinity"),
    (np.array(math.nan), "NaN"),
    (torch.tensor(math.nan), "NaN"),
    (torch.tensor([-math.inf]), "-Infinity"),
    (torch.tensor(math.nan, dtype=torch.bfloat16), "NaN"),
    (Decimal("NaN"), "NaN"),
    (Decimal("sNaN"), "NaN"),
    (10**400, "Infinity"),
    (-(10**400), "-Infinity"),
    # No numbers at all.
    (None, "NaN"),
    ("many", "NaN"),
    ([1, 2], "NaN"),
    (torch.zeros(2), "NaN"),
    (np.zeros(3), "NaN"),
    (1j, "NaN"),
]
NUMBERS = [
    (np.float32(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.bool_(True), 1.0),
    (torch.tensor(0.75, requires_grad=True), 0.75),
    (torch.tensor(True), 1.0),
    (torch.tensor([2]), 2.0),
    (np.array([[4]]), 4.0),
    (Decimal("0.25"), 0.25),
    (2**80, float(2**80)),
    (True, 1.0),
    ("0.5", 0.5),
]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    monkeypatch.setenv("STOKER_METRICS", str(path))
    return path


@pytest.mark.parametrize(("value", "word"), NOT_NUMBERS)
def test_a_metric_that_is_no_number_is_told_and_warned_of(file, capsys, value, word):
    log_metrics(accuracy=0.5)
    log_metrics(loss=value, norm=2)
    assert strict(file.read_text()) == {"accuracy": 0.5, "loss": word, "norm": 2.0}
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "metric_not_a" in each]
    assert "metric=loss" in line


@pytest.mark.parametrize(("value", "number"), NUMBERS)
def test_a_number_of_any_library_is_a_number(file, capsys, value, number):
    log_metrics(loss=value)
    assert strict(file.read_text()) == {"loss": number}
    assert "metric_not_a_number" not in capsys.readouterr().err


def test_without_a_run_a_metric_that_is_no_number_is_a_line(capsys, monkeypatch):
    monkeypatch.delenv("STOKER_METRICS", raising=False)
    log_metrics(loss=math.nan)
    assert "metrics loss=nan" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff", "nul", "[" * 100_000])
def test_a_damaged_file_of_metrics_is_written_anew_and_ends_no_training(file, capsys, content):
    file.write_text(content, errors="surrogateescape")
    log_metrics(accuracy=0.5)
    assert strict(file.read_text()) == {"accuracy": 0.5}
    assert "metrics_read_failed" in capsys.readouterr().err


def test_metrics_that_cannot_be_written_end_no_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("STOKER_METRICS", str(tmp_path / "a-file" / "metrics.json"))
    log_metrics(accuracy=0.5)
    (tmp_path / "a-folder").mkdir()
    monkeypatch.setenv("STOKER_METRICS", str(tmp_path / "a-folder"))
    log_metrics(accuracy=0.5)
    assert capsys.readouterr().err.count("metrics_write_failed") == 2


READ = [
    ('{"loss": "NaN"}', math.nan),
    ('{"loss": "-Infinity"}', -math.inf),
    # What a script's own json.dump writes.
    ('{"loss": NaN}', math.nan),
    ('{"loss": Infinity}', math.inf),
    ('{"loss": null}', math.nan),
    ('{"loss": 1e999}', math.inf),
    ('{"loss": 1' + "0" * 400 + "}", math.inf),
    ('{"loss": 0.5}', 0.5),
    ('{"loss": true}', None),
    ('{"loss": "0.5"}', None),
    ('{"loss": [1]}', None),
]


@pytest.mark.parametrize(("text", "value"), READ)
def test_a_metric_of_the_scripts_file_is_recorded_as_what_it_is(tmp_path, text, value):
    (tmp_path / "metrics.json").write_text(text)
    log = Log(run="r", host="h")
    found = finish._metrics(ProcessSettings(), tmp_path, log)
    assert repr(found.get("loss")) == repr(value)


@dataclass
class Double:
    """A host's run whose parts fail; only what `record_end` reads of it."""

    settings: ProcessSettings
    output: Path
    log: Log
    topology: None = None


def test_a_record_that_cannot_be_made_is_a_line_and_no_end_of_the_launcher(tmp_path, capsys):
    run = Double(settings=ProcessSettings(), output=tmp_path, log=Log(run="r", host="h"))
    outcome = finish.RunOutcome(status="succeeded", exit_code=0)
    seen = finish.LeaderFacts(
        processes_per_host=1,
        strategy="none",
        events=(),
        spending=None,
        others=(),
        memory=MemoryLog(),
        gpus=(),
        inputs={},
    )
    finish.record_end(outcome, run, seen=seen)
    assert "record_write_failed" in capsys.readouterr().err


def test_a_text_with_half_a_character_can_be_written(tmp_path):
    write_text(tmp_path / "failure", "no such file: \udcff")
    assert (tmp_path / "failure").read_text() == r"no such file: \udcff"


VALUES = st.sampled_from([math.nan, math.inf, -math.inf]) | st.floats()
NAMES = st.text(st.sampled_from("ab.[]_/ "), min_size=1, max_size=5)
NESTED = st.recursive(
    # No argument of a command holds a NUL, and no text of JSON half of a pair.
    VALUES | st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.dictionaries(NAMES, NESTED, max_size=4))
def test_a_record_keeps_every_number(metrics, hyperparameters):
    record = msgspec.structs.replace(
        sample_records.training(), metrics=metrics, hyperparameters=record_of(hyperparameters)
    )
    document = strict(to_json(record))
    again = convert(document, Training, Place("here"))
    assert repr(again.metrics) == repr(metrics)
    told = workload_from({"name": "w", "command": ["x"], "hyperparameters": hyperparameters})
    assert repr(read_workload(to_json(told)).hyperparameters) == repr(told.hyperparameters)


def test_null_has_the_word_beside_it():
    record = msgspec.structs.replace(
        sample_records.training(),
        metrics={"accuracy": 0.9, "loss": math.nan},
        hyperparameters={"clip": math.inf, "sizes": [1, -math.inf], "none": None},
    )
    document = strict(to_json(record))
    assert document["metrics"] == {"accuracy": 0.9, "loss": None}
    assert document["hyperparameters"] == {"clip": None, "sizes": [1, None], "none": None}
    assert document["not_numbers"] == {
        "metrics.loss": "NaN",
        "hyperparameters.clip": "Infinity",
        "hyperparameters.sizes[1]": "-Infinity",
    }
    assert "not_numbers" not in to_document(sample_records.training())


@pytest.mark.parametrize(
    "document",
    [
        {"name": "w", "command": ["x"], "constraints": {"max_usd": math.nan}},
        # A word counts only where any number may stand.
        {"name": "w", "command": ["x"], "gate": [{"metric": "a", "min": math.inf}]},
    ],
)
def test_nan_is_refused_where_it_would_spoil_a_sum(document):
    with pytest.raises(UsageError, match="not a finite number"):
        convert(document, Workload, Place("here"))


def test_a_word_makes_no_limit_infinite():
    document = {
        "name": "w",
        "command": ["x"],
        "constraints": {"max_usd": None},
        "not_numbers": {"constraints.max_usd": "Infinity"},
    }
    assert convert(document, Workload, Place("here")).constraints.max_usd is None


BOUNDS = [
    {"min": 0.9},
    {"max": 0.2},
    {"min": 0.1, "max": 1e300},
    {"min_champion": -0.01},
    {"max_champion": 0.01},
]


def judged(value, champion=None, **bounds):
    gate = Gate(metric="loss", **bounds)
    workload = Workload(name="w", command=("x",), gate=(gate,))
    metrics = {} if value is None else {"loss": value}
    training = Training(
        status="succeeded",
        groups=(),
        job=sample_records.training().job,
        metrics=metrics,
    )
    profile, decision = sample_records.profile(), sample_records.decision()
    plain = {"workload_sha256": None, "workload_keys": None}
    return training, evaluate(
        workload=workload,
        profile=msgspec.structs.replace(profile, **plain),
        decision=msgspec.structs.replace(decision, **plain),
        training=training,
        champion=champion,
    )


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_a_gate_fails_by_a_metric_that_is_not_a_number_and_says_so(bounds, value, word):
    training, evaluation = judged(value, **bounds)
    outcome = outcome_of(training, evaluation.gates)
    assert outcome.exit_code == GateError.exit_code
    assert f"loss is not a number ({word})" in outcome.words
    assert "\n" not in outcome.words
    assert not evaluation.passed
    # Its file, what a pipeline's steps are told, and the texts.
    document = strict(to_json(evaluation))
    assert document["gates"][0]["value"] is None
    assert document["not_numbers"]["gates[0].value"] == word
    again = convert(document, Evaluation, Place("here"))
    assert outcome_of(training, again.gates).words == outcome.words
    assert strict(carried(training))["not_numbers"] == {"metrics.loss": word}
    assert "loss" not in model_quality(training).get("multiclass_classification_metrics", {})
    for told in (told_of_training(training), told_of_evaluation(evaluation)):
        assert "loss" in told.metrics
    assert "not a number" in evaluation_table(evaluation)
    assert "not a number" in evaluation_words(evaluation)
    assert f"loss not a number ({word})" in training_words(training)


def test_a_model_in_use_that_is_not_a_number_sets_no_bound():
    training, evaluation = judged(0.1, champion={"loss": math.nan}, max_champion=0.0)
    words = outcome_of(training, evaluation.gates).words
    assert words == "gate failed: loss is 0.1, and the model in use has not reported it"
    strict(to_json(evaluation))
    passed = Evaluation(
        passed=True,
        gates=(GateResult(metric="loss", value=0.1, max_champion=0.0, passed=True),),
    )
    assert not judged_again(passed, champion={"loss": math.inf}).passed


def test_a_champion_that_is_not_a_number_is_read_from_its_file(tmp_path):
    write_text(tmp_path / "e.json", to_json(Evaluation(passed=True, metrics={"loss": math.nan})))
    assert math.isnan(read_json(tmp_path / "e.json", Evaluation).metrics["loss"])
