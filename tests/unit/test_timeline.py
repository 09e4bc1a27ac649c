import json
import math
import random
import re
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles

import pytest
import torch

from stoker.errors import UsageError
from stoker.feed.metrics import log_metrics
from stoker.feed.timeline import (
    COLUMNS,
    Timeline,
    main_loader,
    read_timeline,
    steps_in,
    typical_step,
)
from stoker.launch.feed_log import ProgressLog
from stoker.launch.passive_profile import measure
from stoker.logs import Log, parse_line
from stoker.report.step_times import Strip, describe_windows, read_steps
from support.aws_answers import Clock


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
        "0,3,0,0.000000,0.250000,0.500000,32,1,1",
        "0,3,1,0.750000,0.250000,0.500000,32,1,1",
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


def trained(path, clock, *, epochs, steps, wait=lambda step: 0.01, batch_size=32):
    """Writes the timeline of a training with a validation loader between its epochs."""
    timeline = Timeline(path, clock=clock)
    loaders = timeline.new_loader(), timeline.new_loader()
    number = 0
    for epoch in range(epochs):
        for loader, batches in zip(loaders, (steps, steps // 10), strict=True):
            recorded = timeline.epoch(loader=loader, epoch=epoch)
            for _ in range(batches):
                recorded.ask()
                clock.now += wait(number)
                recorded.got(batch_size)
                clock.now += 0.04
                number += loader == loaders[0]
            recorded.end()
    timeline.close()
    return timeline


@pytest.fixture
def small_levels(monkeypatch):
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_BYTES", 16 << 10)


def test_a_timeline_grows_by_one_level_when_the_training_doubles(tmp_path, small_levels):
    sizes = []
    for number, epochs in enumerate((8, 16, 32, 64)):
        path = tmp_path / f"{number}.csv"
        trained(path, Clock(), epochs=epochs, steps=500)
        sizes.append(path.stat().st_size)
    # Unthinned they have about 0.2 to 1.9 MB.
    assert sizes[0] > 3 * (16 << 10)
    assert all(after - before < 2 * (16 << 10) for before, after in pairwise(sizes)), sizes


def test_sums_of_a_thinned_timeline_are_exact(tmp_path, small_levels):
    path = tmp_path / "timeline-rank0.csv"
    timeline = trained(path, Clock(), epochs=40, steps=333)
    rows = read_timeline(path)
    assert sum(row.steps for row in rows) == timeline.steps == 40 * (333 + 33)
    assert sum(row.samples for row in rows) == timeline.samples
    assert sum(row.wait_seconds for row in rows) == pytest.approx(timeline.wait_seconds, rel=1e-4)
    assert sum(row.seconds for row in rows) == pytest.approx(
        timeline.wait_seconds + timeline.compute_seconds, rel=1e-4
    )
    assert len(main_loader(rows)) < 3000
    assert steps_in(main_loader(rows)) == 40 * 333
    # The beginning, the size of a batch, and the count of the record.
    assert [row.batch for row in rows[:300]] == list(range(300))
    found = measure({0: main_loader(rows)}, {})
    assert (found.steps, found.rank) == (40 * 333, 0)


def test_medians_of_a_thinned_timeline_weigh_all_of_the_training(tmp_path, small_levels):
    # The pace changes after 30 % of the steps, which are most of the single ones that are kept.
    steps = 60 * 500

    def wait(step):
        noise = random.Random(step).lognormvariate(0, 0.3)
        return (0.01 if step < 0.3 * steps else 0.06) * noise

    path = tmp_path / "timeline-rank0.csv"
    trained(path, Clock(), epochs=60, steps=500, wait=wait)
    rows = main_loader(read_timeline(path))
    step_seconds, wait_seconds = typical_step(rows)
    every = [wait(step) for step in range(steps)]
    blocks = [fmean(every[at : at + 20]) for at in range(0, steps, 20)]
    assert wait_seconds == pytest.approx(median(blocks), rel=0.02)
    assert step_seconds == pytest.approx(0.04 + median(blocks), rel=0.02)
    found = measure({0: rows}, {})
    assert found.samples_per_second == pytest.approx(32 / (0.04 + fmean(every)), rel=0.02)
    assert found.spread["wait_seconds"].low == pytest.approx(quantiles(blocks)[0], rel=0.1)


def test_a_thinned_training_that_runs_is_seen_to_advance(tmp_path, small_levels):
    clock, stream, path = Clock(), StringIO(), tmp_path / "timeline-rank0.csv"
    trained(path, clock, epochs=40, steps=500)
    lines = ProgressLog(tmp_path, Log(run="r", host="h", stream=stream), clock=clock)
    lines.tick()
    # A second process after a restart, at the same level.
    timeline = Timeline(path, clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(2000):
        steps.ask()
        steps.got(32)
        clock.now += 0.05
        lines.tick()
    lines.close()
    events = [parse_line(line) for line in stream.getvalue().splitlines()]
    told = [event for event in events if event]
    seen = [int(event.values["steps"]) for event in told]
    assert seen[0] == 40 * 500
    # At this level a row has the steps of 16 s at most.
    assert max(after - before for before, after in pairwise(seen)) < 20 * 18
    assert 40 * 500 + 1700 < seen[-1] <= 40 * 500 + 2000
    assert {float(event.values["step_seconds"]) for event in told} == {0.05}


def test_a_killed_process_loses_its_last_two_rows(tmp_path, small_levels):
    path = tmp_path / "timeline-rank0.csv"
    clock = Clock()
    trained(path, clock, epochs=40, steps=500)
    before = steps_in(read_timeline(path))
    timeline = Timeline(path, clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(1000):
        steps.ask()
        steps.got(32)
        clock.now += 0.05
    # Neither ended nor closed, and cut in a row.
    path.write_bytes(path.read_bytes()[:-5])
    # The open one, and the cut one: 16 s each at this level.
    assert before + 1000 - 2 * 20 * 17 < steps_in(read_timeline(path)) < before + 1000


def test_the_picture_of_a_long_run_shows_single_steps_of_its_middle(tmp_path, small_levels):
    path = tmp_path / "timeline-rank0.csv"
    trained(path, Clock(), epochs=40, steps=500)
    found = read_steps(path)
    assert found.total == 20_000
    window = found.window(1.2)
    assert len(window) == 24
    assert {step.steps for step in window} == {1}
    strip = Strip("After", "one host", found)
    said = describe_windows([strip])
    first, last, total = (
        int(word.replace("\u202f", "")) for word in re.findall(r"[\d\u202f]+", said)
    )
    assert (last - first, total) == (23, 20_000)
    assert 5_000 < first < 15_000


def test_only_so_much_of_a_timeline_is_read(tmp_path, monkeypatch):
    path = tmp_path / "timeline-rank0.csv"
    trained(path, Clock(), epochs=1, steps=100)
    monkeypatch.setattr("stoker.feed.timeline.MAX_READ_BYTES", 1000)
    assert 10 < len(read_timeline(path)) < 25


def test_no_row_is_longer_than_a_minute(tmp_path, monkeypatch):
    # Levels that are else reached after weeks.
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_BYTES", 1000)
    trained(tmp_path / "t.csv", Clock(), epochs=40, steps=1000)
    rows = read_timeline(tmp_path / "t.csv")
    assert max(row.weight for row in rows) > 1000
    # The other loader has its own rows.
    assert 50 < max(row.seconds for row in rows if not row.weight) <= 60.1
