"""MLflow's own client keeps runs in a folder; a server that does not answer costs little."""

import functools
import importlib.util
import socket
from pathlib import Path

import msgspec
import pytest

from stoker.platforms.base import JobSpec
from stoker.records import Evaluation, TrackingSettings
from stoker.run import mlflow
from support.sample_records import training

# Not imported here: that takes as long as half of all tests' modules.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="needs MLflow")


def texts(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.timeout(300)
def test_all_attempts_of_a_run_are_one_run_of_mlflow_with_one_point(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow, "TIMEOUT_SECONDS", 90.0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    settings = TrackingSettings(mlflow=f"file:{tmp_path / 'store'}", experiment="mnist")
    groups = training().groups
    job = JobSpec(
        name="mnist-1", command=("x",), groups=groups, run_dir=tmp_path, tracking=settings
    )
    run_id = mlflow.start_run(job, platform="local").environment["MLFLOW_RUN_ID"]
    (run,) = (tmp_path / "store").glob(f"*/{run_id}")
    # As `mlflow.log_param` of the script writes it, in other words than the workload.
    (run / "params" / "lr").write_text("1e-1")
    report = tmp_path / "report.html"
    report.write_text("<p>report")
    # A second attempt, which knows the run by its name only.
    figures = {"accuracy": 0.97, "loss": "NaN", "norm": "Infinity"}
    found = {"hyperparameters": {"lr": 0.1, "version": "1.10"}, "metrics": figures}
    record = msgspec.structs.replace(training(), **found)
    keep = functools.partial(mlflow.log_run, settings, run="mnist-1")
    keep(training=record, files=[report, tmp_path / "is-not-there.json"])
    record = msgspec.structs.replace(record, mlflow_run_id=run_id)
    keep(training=record, evaluation=Evaluation(passed=True))
    metrics = texts(run / "metrics")
    assert metrics["stoker_passed"].split()[1] == "1.0"
    assert metrics["accuracy"].count("\n") == 1, metrics["accuracy"]
    assert metrics.keys().isdisjoint(("loss", "norm"))
    assert texts(run / "params")["version"] == "1.10"
    assert texts(run / "params")["lr"] == "1e-1"
    assert texts(run / "tags")["stoker_outcome"] == "no gate: the training succeeded"
    assert texts(run / "artifacts") == {"report.html": "<p>report"}
    # FINISHED
    assert "status: 3" in (run / "meta.yaml").read_text()


def test_a_server_that_does_not_answer_costs_no_more_than_its_deadline(monkeypatch, capsys):
    monkeypatch.setattr(mlflow, "TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = TrackingSettings(mlflow=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert mlflow.log_run(settings, run="mnist-1", training=None) == ""
    assert "no answer within 0.5 s" in capsys.readouterr().err
