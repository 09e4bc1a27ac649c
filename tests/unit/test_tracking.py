import json
import math
import os

import msgspec
import pytest

from stoker.errors import PlatformError, install_command
from stoker.platforms.local import lock_run_folder
from stoker.records import Evaluation, GateResult, TrackingSettings, Workload, to_json, write_json
from stoker.run.training_run import FollowedTraining
from stoker.tracking import (
    TrackedRecords,
    TrackedRun,
    handed,
    kept,
    metrics_of,
    parameters_of,
    started,
)
from support import sample_records
from support.command import stoker, succeeds
from support.sample_records import training, training_of_epochs

SERVER = TrackingSettings(mlflow="https://mlflow.example/team/")
RUN = TrackedRun(run_id="0a1b")


def test_parameters_and_metrics_are_the_scripts_own_and_those_of_the_run_and_its_gate():
    record = msgspec.structs.replace(
        training_of_epochs(),
        metrics={"accuracy": 0.97, "loss": float("nan")},
        hyperparameters={"lr": 0.1, "name": "sgd"},
    )
    gates = (GateResult(metric="accuracy", value=0.97, min=0.9, passed=True),)
    metrics = metrics_of(record, Evaluation(passed=True, gates=gates))
    assert (metrics["accuracy"], metrics["stoker_passed"]) == (0.97, 1.0)
    assert metrics["stoker_step_seconds"] == record.measured.step_seconds
    epochs = record.measured.epochs
    assert metrics["stoker_whole_step_seconds"] == record.measured.whole_step_seconds
    assert metrics["stoker_epoch_start_seconds"] == epochs.start.seconds
    assert metrics["stoker_between_epochs_seconds"] == epochs.between.seconds
    # MLflow keeps it as what it is (`is_nan` of its tables).
    assert math.isnan(metrics["loss"])
    parameters = parameters_of(record)
    assert (parameters["lr"], parameters["name"]) == ("0.1", "sgd")
    assert parameters[f"{record.groups[0].name}.count"] == str(record.groups[0].count)


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
def test_only_a_script_that_can_write_is_told_the_run(tracked, settings, is_this_machine, names):
    assert set(handed(settings, tracked, is_this_machine=is_this_machine)) == names


def test_a_folder_is_named_so_that_a_script_in_another_one_finds_it(tmp_path):
    named = handed(TrackingSettings(mlflow=f"file:{tmp_path}"), RUN, is_this_machine=True)
    assert named["MLFLOW_TRACKING_URI"] == tmp_path.as_uri()


def test_without_mlflow_or_its_plugin_the_line_says_what_to_install(monkeypatch):
    managed = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-tracking-server/team"
    monkeypatch.setattr("stoker.tracking.find_spec", lambda name: None if "_" in name else name)
    told = started(TrackingSettings(mlflow=managed), run="r", tags={}, environ={})
    assert told == TrackedRun(trouble="its plugin is missing: pip install sagemaker-mlflow")
    monkeypatch.setattr("stoker.tracking.find_spec", lambda name: None)
    told = kept(SERVER, TrackedRecords(run="r", training=None), tags={}, environ={})
    assert told.trouble == f"mlflow is not installed: {install_command('mlflow')}"


TRACKED = to_json(Workload(name="mnist", command=("true",), tracking=SERVER))


@pytest.fixture
def kept_runs(monkeypatch):
    """Collects what the commands would write to MLflow."""
    found: list[TrackedRecords] = []

    def keep(_: object, records: TrackedRecords, **__: object) -> TrackedRun:
        found.append(records)
        return TrackedRun(run_id="1")

    monkeypatch.setattr("stoker.run.mlflow_run.kept", keep)
    return found


def test_a_second_start_of_a_run_that_still_runs_leaves_it_as_it_is(tmp_path, kept_runs):
    folder = tmp_path / "runs" / "mnist-1"
    lock = lock_run_folder(folder, run="mnist-1")
    try:
        done = stoker("train", TRACKED, "--name", "mnist-1", cwd=tmp_path)
    finally:
        os.close(lock)
    assert (done.returncode, kept_runs) == (4, [])
    assert "mnist-1 is still running" in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_second_start_that_is_refused_leaves_the_end_of_the_first(
    tmp_path, kept_runs, monkeypatch, is_begun
):
    def fail(run: FollowedTraining) -> None:
        run.has_submitted = is_begun
        raise PlatformError("refused, or lost")

    monkeypatch.setattr("stoker.run.training_run.train_and_keep", fail)
    for first in (None, training()):
        if first:
            write_json(tmp_path / "runs" / "mnist-1" / "training.json", first)
        assert stoker("train", TRACKED, "--name", "mnist-1", cwd=tmp_path).returncode == 4
        records = kept_runs.pop()
        # A job that began and left no record has failed.
        assert records.training == (None if is_begun else first)
        assert records.is_refused is not is_begun


def test_an_evaluation_without_room_for_copies_keeps_its_figures(tmp_path, kept_runs, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    words = []
    for name in ("profile", "decision", "training"):
        write_json(tmp_path / f"{name}.json", getattr(sample_records, name)())
        words += [f"--{name}", f"{name}.json"]
    monkeypatch.setattr("stoker.run.judging.shutil.copyfile", full)
    done = succeeds("evaluate", TRACKED, *words, cwd=tmp_path)
    assert "mlflow: files not kept: [Errno 28]" in done.stdout + done.stderr
    (records,) = kept_runs
    assert records.files == []
    assert json.loads((tmp_path / "evaluation.json").read_text())["passed"]
