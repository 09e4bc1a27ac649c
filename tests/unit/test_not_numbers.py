"""NaN and infinities in metrics and hyperparameters: recorded, judged, and the end of no run."""

import json
import math

import msgspec
import numpy as np
import pytest
import torch

from stoker import log_metrics
from stoker.records import to_json
from support import sample_records


def strict(text):
    """Parses JSON as other languages do: without Python's NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


NOT_NUMBERS = [
    (math.nan, "NaN"),
    (-math.inf, "-Infinity"),
    (np.float32("nan"), "NaN"),
    (torch.tensor(math.nan), "NaN"),
    # No number at all.
    ("many", "NaN"),
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


def test_a_record_has_words_for_what_is_no_number():
    record = msgspec.structs.replace(
        sample_records.training(), hyperparameters={"clip": math.inf, "sizes": [1, -math.inf]}
    )
    document = strict(to_json(record))
    assert document["hyperparameters"] == {"clip": "Infinity", "sizes": [1, "-Infinity"]}
