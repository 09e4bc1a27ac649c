"""Whole epochs in a timeline: what is in their steps, at their starts, and between them."""

from pathlib import Path

import pytest

from stoker.feed.step_times import training_steps, whole_run
from stoker.feed.timeline import Timeline, read_timeline
from stoker.figures.measured import measure
from support.aws_answers import Clock

STEP = 0.0478
WAIT = 0.003


def trained(
    path: Path,
    *,
    epochs: int = 3,
    steps: int = 42,
    first_wait: float = 0.763,
    validation: float = 0.0,
    inside: dict[int, float] | None = None,
    startup: float = 5.0,
    clock: Clock | None = None,
) -> Clock:
    """Writes the timeline of a training whose epochs begin with a long wait."""
    clock = clock or Clock()
    timeline = Timeline(path, clock=clock)
    for epoch in range(epochs):
        recorded = timeline.epoch(loader=0, epoch=epoch)
        for number in range(steps):
            recorded.ask()
            is_first = number == 0
            clock.now += (startup if epoch == 0 else first_wait) if is_first else WAIT
            recorded.got(128)
            clock.now += STEP - WAIT + (inside or {}).get(number, 0.0)
        recorded.end()
        clock.now += validation
    timeline.close()
    return clock


def rows_of(path: Path):
    return training_steps(read_timeline(path))


def test_wait_for_each_first_batch_counts(tmp_path):
    trained(tmp_path / "t.csv")
    found = measure({0: rows_of(tmp_path / "t.csv")}, {})
    assert found.step_seconds == pytest.approx(STEP)
    assert found.epochs.steps == 42
    assert found.epochs.start.seconds == pytest.approx(0.76)
    assert found.epochs.start.count == 2
    # 47.8 ms in epochs; over whole epochs as on the H100: 66 ms, not 2,640 pictures/s.
    assert found.whole_step_seconds == pytest.approx(STEP + 0.76 / 42)
    assert found.samples_per_second == pytest.approx(128 / (STEP + 0.76 / 42))


def test_validation_between_epochs_counts(tmp_path):
    trained(tmp_path / "t.csv", validation=4.2)
    run = whole_run(rows_of(tmp_path / "t.csv"))
    between = run.times.between
    assert (between.seconds, between.count) == (pytest.approx(4.2), 2)
    assert run.step_seconds == pytest.approx(STEP + 0.76 / 42 + 4.2 / 42)


def test_start_of_the_run_is_apart(tmp_path):
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    trained(short, startup=1.0)
    trained(long, startup=100.0)
    runs = [whole_run(rows_of(path)) for path in (short, long)]
    assert runs[0].step_seconds == pytest.approx(runs[1].step_seconds)


def test_parts_add_up_to_the_clock(tmp_path):
    clock = trained(tmp_path / "t.csv", epochs=5, validation=1.5, inside={20: 0.3})
    rows = rows_of(tmp_path / "t.csv")
    run = whole_run(rows)
    # The clock stops after the last validation, which no further epoch follows.
    assert run.seconds == pytest.approx(clock.now - 1.5 - rows[1].end_seconds)
    assert run.steps == 5 * 42 - 2
