import json
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stoker.feed.device_events import FoundDevice
from stoker.feed.step_times import training_steps
from stoker.feed.timed import log_metrics
from stoker.feed.timeline import (
    COLUMNS,
    MeasuredStep,
    Timeline,
    read_timeline,
    steps_in,
)
from stoker.figures.intervals import IntervalLog, read_intervals
from stoker.figures.measured import measure
from stoker.figures.progress import RunSteps
from stoker.logs import Log
from support.aws_answers import Clock
from support.device_double import DeviceDouble


@pytest.fixture
def path(tmp_path):
    return tmp_path / "timeline-rank0.csv"


def rows_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def step(steps, clock, *, samples=32, wait=0.0, compute=0.05):
    steps.ask()
    clock.now += wait
    steps.got(samples)
    clock.now += compute


def test_row_tells_wait_and_compute_of_a_step(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.csv", clock=clock)
    steps = timeline.epoch(loader=timeline.new_loader(), epoch=3)
    for _ in range(2):
        step(steps, clock, wait=0.25, compute=0.5)
    steps.ask()
    for _ in range(2):
        steps.end()
        timeline.close()
    assert rows_of(tmp_path / "t.csv") == [
        COLUMNS,
        "0,3,0,0.000000,0.250000,0.500000,32,1",
        "0,3,1,0.750000,0.250000,0.500000,32,1",
    ]
    assert (timeline.whole.steps, timeline.whole.samples) == (2, 64)
    assert (timeline.whole.wait_seconds, timeline.whole.compute_seconds) == (0.5, 1.0)


def with_a_step(path: Path) -> Timeline:
    timeline = Timeline(path, clock=Clock())
    steps = timeline.epoch(loader=0, epoch=0)
    steps.ask()
    steps.got(1)
    steps.end()
    return timeline


def test_second_process_appends_below_one_header(tmp_path):
    for _ in range(2):
        with_a_step(tmp_path / "t.csv").close()
    assert [row.startswith("loader") for row in rows_of(tmp_path / "t.csv")] == [True, False, False]


def test_unwritable_timeline_does_not_end_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    assert with_a_step(tmp_path / "file" / "t.csv").whole.steps == 1


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


def test_sums_are_those_of_the_loader_with_most_steps_and_know_its_steady_pace():
    clock = Clock()
    timeline = Timeline(None, clock=clock)

    def epoch(loader: int, number: int, waits: list[float]) -> None:
        steps = timeline.epoch(loader=loader, epoch=number)
        for wait in waits:
            step(steps, clock, samples=8, wait=wait, compute=1.0)
        steps.end()

    # The workers of each epoch start in its first two steps.
    for number in range(2):
        epoch(0, number, [50.0, 40.0, 0.5, 0.5])
        epoch(1, number, [9.0, 9.0, 9.0])
    main = timeline.training
    assert (main.steps, main.samples, main.epochs) == (8, 64, 2)
    assert (main.wait_seconds, main.compute_seconds) == (182.0, 8.0)
    assert main.steady_steps == 4
    assert (main.steady_wait_seconds, main.steady_compute_seconds) == (2.0, 4.0)


def trained(path, clock, *, epochs, steps, wait=lambda number: 0.01):
    """Writes the timeline of a training with a validation loader between its epochs."""
    timeline = Timeline(path, clock=clock)
    loaders = timeline.new_loader(), timeline.new_loader()
    number = 0
    for epoch in range(epochs):
        for loader, batches in zip(loaders, (steps, steps // 10), strict=True):
            recorded = timeline.epoch(loader=loader, epoch=epoch)
            for _ in range(batches):
                step(recorded, clock, wait=wait(number), compute=0.04)
                number += loader == loaders[0]
            recorded.end()
    timeline.close()
    return timeline


@pytest.fixture
def small_levels(monkeypatch):
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_ROWS", 400)


def test_a_timeline_grows_by_one_level_when_the_training_doubles(tmp_path, small_levels):
    sizes = []
    for number, epochs in enumerate((8, 16, 32, 64)):
        path = tmp_path / f"{number}.csv"
        trained(path, Clock(), epochs=epochs, steps=500)
        sizes.append(path.stat().st_size)
    # Unthinned they have about 0.2 to 1.9 MB; a level has 16 to 20 kB.
    assert sizes[0] > 40_000
    assert all(after - before < 40_000 for before, after in pairwise(sizes)), sizes


def test_sums_of_a_thinned_timeline_are_exact(path, small_levels):
    timeline = trained(path, Clock(), epochs=40, steps=333)
    rows = read_timeline(path)
    whole = timeline.whole
    assert sum(row.steps for row in rows) == whole.steps == 40 * (333 + 33)
    assert sum(row.samples for row in rows) == whole.samples
    assert sum(row.wait_seconds for row in rows) == pytest.approx(whole.wait_seconds, rel=1e-4)
    assert sum(row.seconds for row in rows) == pytest.approx(
        whole.wait_seconds + whole.compute_seconds, rel=1e-4
    )
    assert len(training_steps(rows)) < 3000
    assert steps_in(training_steps(rows)) == 40 * 333
    # The beginning, the size of a batch, and the count of the record.
    assert [row.batch for row in rows[:300]] == list(range(300))
    found = measure({0: training_steps(rows)}, {})
    assert (found.steps, found.rank) == (40 * 333, 0)


class Live:
    """A training whose live line is read after each step."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.timeline = Timeline(path, clock=self.clock)
        log = Log(run="r", host="h", stream=StringIO())
        steps = RunSteps(path.parent)
        file = path.with_name("metrics.jsonl")
        self.lines = IntervalLog(path=file, log=log, steps=steps, clock=self.clock)

    def epoch(self, number, *, steps=42, first_wait=0.8, between=0.0):
        recorded = self.timeline.epoch(loader=0, epoch=number)
        for batch in range(steps):
            step(recorded, self.clock, wait=first_wait if batch == 0 else 0.002, compute=0.045)
            self.lines.tick()
        recorded.end()
        for _ in range(int(between / 0.5)):
            self.lines.tick()
            self.clock.now += 0.5

    def progress(self):
        rows = read_intervals(self.lines.path)
        return [row.steps for row in rows if row.steps]


@pytest.fixture
def live(path):
    training = Live(path)
    yield training
    training.lines.close()


def test_live_line_has_no_pause_across_an_epochs_end(live):
    for number in range(6):
        live.epoch(number)
    # 1.15 s each, 97% waiting: that was the first batch of an epoch alone.
    assert len(live.progress()) > 4
    for progress in live.progress()[1:]:
        assert progress.step_seconds == pytest.approx(0.047)
        assert progress.wait_seconds == pytest.approx(0.002)
    # Of the rest of the training: whole epochs, each with the start of one.
    assert live.progress()[-1].whole_step_seconds == pytest.approx(0.047 + 0.798 / 42, rel=0.1)


def waited(tmp_path: Path, *, kernel_seconds: float) -> MeasuredStep:
    """Returns a step of a script that never waits for its device, and 50 ms for each batch."""
    device = DeviceDouble()
    file = tmp_path / "timeline.csv"

    def train() -> None:
        timeline = Timeline(file, clock=device.now, found=FoundDevice(lambda: device))
        steps = timeline.epoch(loader=0, epoch=0)
        for _ in range(60):
            steps.ask()
            device.work(0.050)
            steps.got(8)
            device.launch_step(kernel_seconds, kernels=20, host_seconds=0.005)
        steps.ask()
        steps.end()
        timeline.close()

    train()
    assert device.waited_seconds == 0.0
    return read_timeline(file)[30]


def test_a_wait_that_the_device_does_not_notice_is_none(tmp_path):
    assert waited(tmp_path, kernel_seconds=0.060).wait_seconds == 0.0


def test_a_wait_counts_as_far_as_the_device_is_idle(tmp_path):
    step = waited(tmp_path, kernel_seconds=0.030)
    assert step.wait_seconds == pytest.approx(0.025, abs=0.002)
    # The step is as long as it was.
    assert step.seconds == pytest.approx(0.055, abs=0.001)
