"""`stoker watch` over logs: a line or JSON for each interval, until the run ends."""

import json
from io import StringIO

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.figures.intervals import Interval
from stoker.figures.progress import StepProgress
from stoker.logs import Log
from stoker.run.watch import watch_run
from support.feed_rows import feed_line, host_rate


def line(event, **values):
    stream = StringIO()
    Log(run="mnist-1", host="gpu-1", stream=stream).event(event, **values)
    return stream.getvalue()


MADE = StepProgress(steps=120, step_seconds=0.02, wait_seconds=0.008)
ROW = Interval(start_seconds=0.0, seconds=2.0, steps=MADE)
STEP = line("interval", row=msgspec.json.encode(ROW).decode())
HEAD = "120 steps, 20.0 ms each, 40% waiting for data"
FED = "batches/s, 60.0 MB/s, 4 workers, 90% busy"


def test_each_interval_is_a_line_until_the_run_ends(tmp_path, capsys):
    log = tmp_path / "leader.log"
    rates = "".join(f"dnn/gpu-1 {feed_line(host_rate('data-1', rate))}" for rate in (1.0, 12.5))
    end = line("training_ended", status="failed", exit_code=3)
    log.write_text(f"own words\n{STEP}{rates}{end}{rates}")
    watch_run(str(log), as_json=False)
    step, _, row, last = capsys.readouterr().out.splitlines()
    assert step == f"mnist-1: running, {HEAD}"
    assert row.startswith(f"mnist-1: running, {HEAD}; data-1, 12.5 {FED}; limit: the data workers")
    assert last == row.replace("running", "failed")


def test_a_run_that_has_ended_is_shown_as_it_was(tmp_path, monkeypatch, capsys):
    logs = tmp_path / "runs" / "mnist-1" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "workload.json").touch()
    (logs.parent / "training.json").touch()
    (logs / "dnn-gpu-1.log").write_text(STEP + feed_line(host_rate("data-1", 12.5)))
    monkeypatch.chdir(tmp_path)
    watch_run("mnist-1", as_json=True)
    first, document = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["status"], first["interval"]["steps"]["steps"]) == ("running", 120)
    assert document["interval"]["hosts"][0]["name"] == "data-1"
    assert document["limit"]["limit"] == "cpu"
    with pytest.raises(UsageError, match="no run mnist-2"):
        watch_run("mnist-2", as_json=False)
