import json

import msgspec
import pytest

from stoker.cli.outputs import carried, told_of_evaluation, told_of_training
from stoker.records import Event, Host, Training, read_json
from support import sample_records


def training(**changes):
    return msgspec.structs.replace(sample_records.training(), **changes)


def test_a_training_is_carried_whole_where_it_is_short():
    record = training()
    found = read_json(carried(record), Training)
    timeline = record.measured and msgspec.structs.replace(record.measured, timeline_file=None)
    assert found == msgspec.structs.replace(record, measured=timeline)


@pytest.mark.parametrize("max_bytes", [4096, 16384])
def test_a_long_training_is_carried_within_its_bound_with_verdict_and_metrics(max_bytes):
    record = training(
        status="failed",
        exit_code=9,
        events=tuple(Event(when="2026-01-01T00:00:00Z", what="x" * 50) for _ in range(5000)),
        hosts=tuple(Host(host=f"host-{n}", group="data") for n in range(3000)),
        failure="start " + "y" * 100_000 + " end",
        metrics={"accuracy": 0.9},
    )
    text = carried(record, max_bytes=max_bytes)
    assert len(text.encode()) <= max_bytes
    found = read_json(text, Training)
    assert (found.status, found.exit_code, found.metrics) == ("failed", 9, {"accuracy": 0.9})
    assert found.failure
    assert found.failure.endswith("y end")


def test_a_training_and_its_evaluation_tell_parameters_and_known_metrics():
    trained = told_of_training(training(metrics={"accuracy": 0.9}))
    assert trained.metrics["accuracy"] == 0.9
    assert json.loads(trained.parameters["training"])["status"] == trained.parameters["status"]
    told = told_of_evaluation(sample_records.evaluation())
    assert told.parameters["passed"] == "true"
    assert told.metrics["passed"] == 1.0
    assert all(isinstance(value, float | int) for value in told.metrics.values())
