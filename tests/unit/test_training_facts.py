import math

import msgspec
import pytest

from stoker.records import Evaluation, GateResult, Group, Job, Training
from stoker.records.training import completed
from stoker.run import mlflow
from support.sample_records import training, training_of_epochs

LEADER = training()
OUTSIDE = Training(
    job=Job(platform="sagemaker", name="asked-2", url="https://job"),
    status="succeeded",
    exit_code=1,
    groups=(Group(name="dnn", role="dnn", instance_type="ml.g5.xlarge", count=1),),
)
FAILED = {"status": "failed", "failure": "its words"}
UNFED = {"status": "failed", "exit_code": 0, "is_unfed": True, "failure": "no batch came"}


@pytest.mark.parametrize(
    ("leader", "outside", "expected"),
    [
        ({"exit_code": 3}, {}, {"exit_code": 3}),
        ({"status": "succeeded"}, {"status": "failed"}, {"status": "failed"}),
        (FAILED, {"status": "failed", "failure": "exit code 1"}, {"failure": "its words"}),
        (UNFED, {"exit_code": 0}, {k: UNFED[k] for k in ("status", "exit_code", "failure")}),
    ],
)
def test_who_is_believed_where_the_leader_and_the_platform_differ(leader, outside, expected):
    found = completed(
        msgspec.structs.replace(OUTSIDE, **outside), msgspec.structs.replace(LEADER, **leader)
    )
    assert {field: getattr(found, field) for field in expected} == expected


def test_parameters_and_metrics_are_the_scripts_own_and_those_of_the_run_and_its_gate():
    record = msgspec.structs.replace(
        training_of_epochs(),
        metrics={"accuracy": 0.97, "loss": float("nan")},
        hyperparameters={"lr": 0.1, "name": "sgd"},
    )
    gates = (GateResult(metric="accuracy", value=0.97, min=0.9, passed=True),)
    metrics = mlflow._metrics_of(record, Evaluation(passed=True, gates=gates))
    assert (metrics["accuracy"], metrics["stoker_passed"]) == (0.97, 1.0)
    assert metrics["stoker_step_seconds"] == record.measured.step_seconds
    epochs = record.measured.epochs
    assert metrics["stoker_whole_step_seconds"] == record.measured.whole_step_seconds
    assert metrics["stoker_epoch_start_seconds"] == epochs.start.seconds
    assert metrics["stoker_between_epochs_seconds"] == epochs.between.seconds
    # MLflow keeps it as what it is (`is_nan` of its tables).
    assert math.isnan(metrics["loss"])
    parameters = mlflow._parameters_of(record)
    assert (parameters["lr"], parameters["name"]) == ("0.1", "sgd")
    assert parameters["hosts"].startswith("dnn 1 x ")
