"""MLflow's own client keeps runs in a folder; a server that does not answer costs little."""

import functools
import importlib.util
import itertools
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker import tracking
from stoker.records import Evaluation, TrackingSettings
from stoker.tracking import TrackedRecords, TrackedRun, TrackingOrder, kept, started
from support.command import stoker
from support.sample_records import training

# Not imported here: that takes as long as half of all tests' modules.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="needs MLflow")


def texts(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


CLIENT = """
import sys
import msgspec
from stoker.tracking import TrackingOrder, _written
for line in sys.stdin.buffer:
    print(msgspec.json.encode(_written(msgspec.json.decode(line, type=TrackingOrder))).decode())
    print("answered", flush=True)
"""


@pytest.fixture(scope="module")
def ask():
    """Gives all orders to one process with MLflow, which takes 3 CPU-seconds to import."""
    command = [sys.executable, "-P", "-c", CLIENT]
    environ, pipe = {**os.environ, **tracking._ALWAYS}, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as client:

        def ask_it(order: TrackingOrder, **_: object) -> TrackedRun:
            print(msgspec.json.encode(order).decode(), file=client.stdin, flush=True)
            # MLflow prints, too.
            said = list(itertools.takewhile(lambda line: line != "answered\n", client.stdout))
            return msgspec.json.decode(said[-1], type=TrackedRun)

        yield ask_it
        client.stdin.close()
        assert client.wait(150) == 0


@pytest.mark.timeout(300)
def test_all_attempts_of_a_run_are_one_run_of_mlflow_with_one_point(tmp_path, ask, monkeypatch):
    monkeypatch.setattr(tracking, "_asked", ask)
    store = f"file:{tmp_path / 'store'}"
    settings = TrackingSettings(mlflow=store, experiment="mnist", timeout_seconds=90)
    first = started(settings, run="mnist-1", tags={}, environ=os.environ)
    assert first.run_id, first.trouble
    (run,) = (tmp_path / "store").glob(f"*/{first.run_id}")
    # As `mlflow.log_param` of the script writes it, in other words than the workload.
    (run / "params" / "lr").write_text("1e-1")
    report = tmp_path / "report.html"
    report.write_text("<p>report")
    # A second attempt, which knows the run by its name only.
    keep = functools.partial(kept, settings, environ=os.environ)
    figures = {"accuracy": 0.97, "loss": math.nan, "norm": math.inf}
    found = {"hyperparameters": {"lr": 0.1, "version": "1.10"}, "metrics": figures}
    record = msgspec.structs.replace(training(), **found)
    files = [report, tmp_path / "is-not-there.json"]
    again = keep(TrackedRecords(run="mnist-1", training=record, files=files), tags={})
    assert again.run_id == first.run_id
    assert again.trouble == "it keeps the first value of lr"
    record = msgspec.structs.replace(record, mlflow_run_id=first.run_id)
    tags, passed = {"stoker_run": "mnist-1"}, Evaluation(passed=True)
    renamed = TrackedRecords(run="of another name", training=record, evaluation=passed)
    last = keep(renamed, tags=tags)
    assert last.run_id == first.run_id
    metrics = texts(run / "metrics")
    assert metrics["stoker_passed"].split()[1] == "1.0"
    for name in figures:
        assert metrics[name].count("\n") == 1, metrics[name]
    assert (metrics["loss"].split()[1], metrics["norm"].split()[1]) == ("nan", "inf")
    assert texts(run / "params")["version"] == "1.10"
    assert texts(run / "params")["lr"] == "1e-1"
    assert texts(run / "tags")["stoker_status"] == "succeeded"
    assert texts(run / "artifacts") == {"report.html": "<p>report"}
    # An attempt that was refused, in a pod that has no record: the end is that of the first.
    keep(TrackedRecords(run="mnist-1", training=None, is_refused=True), tags={})
    assert texts(run / "tags")["stoker_status"] == "succeeded"
    # FINISHED
    assert "status: 3" in (run / "meta.yaml").read_text()


def test_a_server_that_does_not_answer_costs_no_more_than_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = TrackingSettings(mlflow=address, timeout_seconds=0.5)
        told = started(settings, run="mnist-1", tags={}, environ=os.environ)
    assert (told.run_id, told.trouble) == ("", "no answer within 0.5 s")


@pytest.mark.timeout(300)
def test_a_training_that_fails_and_then_succeeds_is_one_finished_run(tmp_path, ask, monkeypatch):
    # A file of the user's must not take the place of the library.
    (tmp_path / "mlflow.py").write_text("raise ImportError('not the library')")
    script = tmp_path / "fails_once.py"
    script.write_text(
        "import pathlib, sys\n"
        "tried = pathlib.Path(__file__).with_name('tried')\n"
        "sys.exit(0 if tried.exists() else tried.touch() or 'out of luck')\n"
    )
    tracked = {"mlflow": "file:store", "timeout_seconds": 90}
    command = [sys.executable, str(script)]
    workload = {"name": "mnist", "command": command, "tracking": tracked}
    words = ("train", json.dumps(workload), "--name", "mnist-1")
    codes, tags = [], []
    for is_first in (True, False):
        with monkeypatch.context() as patch:
            if is_first:
                patch.setattr(tracking, "_asked", ask)
            done = stoker(*words, cwd=tmp_path)
        codes.append(done.returncode)
        runs = list((tmp_path / "store").glob("*/*/meta.yaml"))
        assert len(runs) == 1, done.stderr
        tags.append(texts(runs[0].parent / "tags"))
    assert codes == [6, 0]
    assert [each["stoker_status"] for each in tags] == ["failed", "succeeded"]
    assert tags[0]["stoker_failure"]
    assert not tags[1]["stoker_failure"]
    assert "status: 3" in runs[0].read_text()
    assert set(texts(runs[0].parent / "artifacts")) == {"training.json", "report.html"}
