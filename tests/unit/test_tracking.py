"""What a run's records become in MLflow, and what its script is told of it."""

from pathlib import Path

import msgspec
import pytest

from stoker.records import Evaluation, GateResult, TrackingSettings
from stoker.tracking import TrackedRun, handed, kept, metrics_of, parameters_of, started
from support.sample_records import training

SERVER = TrackingSettings(mlflow="https://mlflow.example/team/")
RUN = TrackedRun(run_id="0a1b")


def test_metrics_are_the_scripts_own_and_those_of_the_steps_and_the_gate() -> None:
    record = msgspec.structs.replace(training(), metrics={"accuracy": 0.97, "loss": float("nan")})
    gates = (GateResult(metric="accuracy", value=0.97, min=0.9, passed=True),)
    found = metrics_of(record, Evaluation(passed=True, gates=gates))
    assert found["accuracy"] == 0.97
    assert record.measured
    assert found["stoker_step_seconds"] == record.measured.step_seconds
    assert found["stoker_passed"] == 1.0
    # MLflow would take it for a value, and draw a curve of it.
    assert "loss" not in found


def test_parameters_are_hyperparameters_and_the_cluster_of_the_run() -> None:
    record = msgspec.structs.replace(training(), hyperparameters={"lr": 0.1, "name": "sgd"})
    found = parameters_of(record)
    assert (found["lr"], found["name"]) == ("0.1", "sgd")
    assert found[f"{record.groups[0].name}.count"] == str(record.groups[0].count)


@pytest.mark.parametrize(
    ("tracked", "settings", "is_this_machine", "names"),
    [
        (RUN, SERVER, False, {"MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"}),
        # A script would wait for a server that was away a moment ago.
        (TrackedRun(trouble="no answer"), SERVER, False, set()),
        # Hosts of a cluster do not see a folder of this machine.
        (RUN, TrackingSettings(mlflow="file:mlruns"), False, set()),
    ],
)
def test_a_script_is_told_the_run_only_where_it_can_write_to_it(
    tracked: TrackedRun, settings: TrackingSettings, is_this_machine: bool, names: set[str]
) -> None:
    assert set(handed(settings, tracked, is_this_machine=is_this_machine)) == names


def test_a_folder_is_named_so_that_a_script_in_another_one_finds_it(tmp_path: Path) -> None:
    named = handed(TrackingSettings(mlflow=f"file:{tmp_path}"), RUN, is_this_machine=True)
    assert named["MLFLOW_TRACKING_URI"] == tmp_path.as_uri()


def test_without_mlflow_or_its_plugin_the_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    managed = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-tracking-server/team"
    monkeypatch.setattr("stoker.tracking.find_spec", lambda name: None if "_" in name else name)
    told = started(TrackingSettings(mlflow=managed), run="r", tags={}, environ={})
    assert told == TrackedRun(trouble="its plugin is missing: pip install sagemaker-mlflow")
    monkeypatch.setattr("stoker.tracking.find_spec", lambda name: None)
    told = kept(SERVER, run="r", tags={}, training=None, environ={})
    assert told.trouble == "mlflow is not installed: pip install 'stoker[mlflow]'"
