import json
import math
from pathlib import Path

import pytest
import torch

from stoker.errors import UsageError
from stoker.feed.metrics import log_metrics
from stoker.feed.timeline import COLUMNS, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rows_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_row_tells_wait_and_compute_of_a_step(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.csv", clock=clock)
    steps = timeline.epoch(loader=timeline.new_loader(), epoch=3)
    for _ in range(2):
        steps.ask()
        clock.now += 0.25
        steps.got(32)
        clock.now += 0.5
    steps.ask()
    for _ in range(2):
        steps.end()
        timeline.close()
    assert rows_of(tmp_path / "t.csv") == [
        COLUMNS,
        "0,3,0,0.000000,0.250000,0.500000,32",
        "0,3,1,0.750000,0.250000,0.500000,32",
    ]
    assert (timeline.steps, timeline.samples) == (2, 64)
    assert (timeline.wait_seconds, timeline.compute_seconds) == (0.5, 1.0)


def test_rows_reach_the_file_about_once_a_second(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.csv", clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(25):
        steps.ask()
        steps.got(1)
        clock.now += 0.1
    assert len(rows_of(tmp_path / "t.csv")) >= 20


def test_second_process_appends_below_one_header(tmp_path):
    for _ in range(2):
        timeline = Timeline(tmp_path / "t.csv", clock=Clock())
        steps = timeline.epoch(loader=0, epoch=0)
        steps.ask()
        steps.got(1)
        steps.end()
        timeline.close()
    assert [row.startswith("loader") for row in rows_of(tmp_path / "t.csv")] == [True, False, False]


def test_unwritable_timeline_does_not_end_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    timeline = Timeline(tmp_path / "file" / "t.csv", clock=Clock())
    steps = timeline.epoch(loader=0, epoch=0)
    steps.ask()
    steps.got(1)
    steps.end()
    assert timeline.steps == 1


def test_metrics_are_merged(tmp_path, monkeypatch):
    path = tmp_path / "new" / "metrics.json"
    monkeypatch.setenv("STOKER_METRICS", str(path))
    log_metrics(accuracy=0.5, loss=2)
    log_metrics(accuracy=torch.tensor(0.75))
    assert json.loads(path.read_text()) == {"accuracy": 0.75, "loss": 2.0}
    assert list(path.parent.iterdir()) == [path]


def test_only_rank_0_writes_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_METRICS", str(tmp_path / "metrics.json"))
    monkeypatch.setenv("RANK", "1")
    log_metrics(accuracy=0.5)
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, "many", None, [1, 2]])
def test_metric_that_is_no_finite_number_is_named(value):
    with pytest.raises(UsageError, match="metric accuracy is not a finite number"):
        log_metrics(accuracy=value)


def test_broken_metrics_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "metrics.json").write_text("{")
    monkeypatch.setenv("STOKER_METRICS", str(tmp_path / "metrics.json"))
    with pytest.raises(UsageError, match="not JSON"):
        log_metrics(accuracy=0.5)


def test_sums_are_those_of_the_loader_with_most_steps_and_know_its_steady_pace():
    clock = Clock()
    timeline = Timeline(None, clock=clock)

    def epoch(loader: int, number: int, waits: list[float]) -> None:
        steps = timeline.epoch(loader=loader, epoch=number)
        for wait in waits:
            steps.ask()
            clock.now += wait
            steps.got(8)
            clock.now += 1.0
        steps.end()

    # The workers of each epoch start in its first two steps.
    for number in range(2):
        epoch(0, number, [50.0, 40.0, 0.5, 0.5])
        epoch(1, number, [9.0, 9.0, 9.0])
    main = timeline.main
    assert (main.steps, main.samples, main.epochs) == (8, 64, 2)
    assert (main.wait_seconds, main.compute_seconds) == (182.0, 8.0)
    assert main.steady_steps == 4
    assert (main.steady_wait_seconds, main.steady_compute_seconds) == (2.0, 4.0)
