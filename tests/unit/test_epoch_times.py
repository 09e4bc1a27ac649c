"""Whole epochs in a timeline: what is in their steps, at their starts, and between them."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed.epoch_times import epoch_times, whole_run, whole_step
from stoker.feed.timeline import MeasuredStep, Timeline, read_timeline, steps_in
from stoker.feed.training_steps import training_steps
from stoker.figures.passive_profile import measure
from stoker.record_words import training_words
from stoker.records import Group, Job, Training
from support.aws_answers import Clock
from support.property_tests import examples

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
    found = epoch_times(rows_of(tmp_path / "t.csv"))
    assert (found.between.seconds, found.between.count) == (pytest.approx(4.2), 2)
    assert whole_step(rows_of(tmp_path / "t.csv")).seconds == pytest.approx(
        STEP + 0.76 / 42 + 4.2 / 42
    )


def test_validation_in_mid_epoch_counts(tmp_path):
    trained(tmp_path / "t.csv", epochs=1, steps=200, inside={100: 8.0})
    found = measure({0: rows_of(tmp_path / "t.csv")}, {})
    assert found.step_seconds == pytest.approx(STEP)
    assert found.whole_step_seconds == pytest.approx(STEP + 8 / 198)
    assert found.epochs.inside_seconds == pytest.approx(8 / 198)
    # One epoch: neither its steps, nor what lies between epochs.
    assert (found.epochs.start, found.epochs.between, found.epochs.steps) == (None, None, None)


@pytest.mark.parametrize("held", [2.0, -(STEP - WAIT)])
def test_last_step_of_an_epoch_ends_as_a_usual_one(tmp_path, held):
    # Lightning keeps the iterator through its validation, Accelerate ends it a step early.
    clock, path = Clock(), tmp_path / "t.csv"
    timeline = Timeline(path, clock=clock)
    for epoch in range(6):
        recorded = timeline.epoch(loader=0, epoch=epoch)
        for number in range(50):
            recorded.ask()
            clock.now += WAIT
            recorded.got(8)
            clock.now += STEP - WAIT + (held if number == 49 else 0.0)
        recorded.end()
        clock.now += 2.0 - held
    timeline.close()
    rows = rows_of(path)
    found = epoch_times(rows)
    assert found.between.seconds == pytest.approx(2.0)
    assert found.between.low_seconds == pytest.approx(2.0)
    assert found.inside_seconds == pytest.approx(0.0, abs=0.01)
    assert whole_step(rows).seconds == pytest.approx(STEP + 2.0 / 50, rel=0.01)


def test_start_of_the_run_is_apart(tmp_path):
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    trained(short, startup=1.0)
    trained(long, startup=100.0)
    assert whole_step(rows_of(short)).seconds == pytest.approx(whole_step(rows_of(long)).seconds)


def test_parts_add_up_to_the_clock(tmp_path):
    clock = trained(tmp_path / "t.csv", epochs=5, validation=1.5, inside={20: 0.3})
    rows = rows_of(tmp_path / "t.csv")
    run = whole_run(rows)
    # The clock stops after the last validation, which no further epoch follows.
    assert run.seconds == pytest.approx(clock.now - 1.5 - rows[1].end_seconds)
    assert run.steps == 5 * 42 - 2


@pytest.fixture
def small_levels(monkeypatch):
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_BYTES", 8 << 10)


@pytest.mark.parametrize("steps", [1, 3, 8, 42, 500])
def test_thinned_rows_keep_what_lies_between_epochs(tmp_path, small_levels, steps):
    path = tmp_path / "t.csv"
    epochs = max(10, 20_000 // steps)
    trained(path, epochs=epochs, steps=steps, validation=0.6)
    rows = rows_of(path)
    assert len(rows) < 5000
    assert steps_in(rows) == epochs * steps
    run = whole_run(rows)
    # With one or two steps an epoch, the run's first steps are epochs' starts.
    skipped = len([number for number in (0, 1) if number % steps == 0])
    assert run.begins == epochs - skipped
    assert run.first_wait_seconds == pytest.approx(run.begins * 0.763, rel=1e-3)
    assert run.between_seconds == pytest.approx(run.begins * 0.6, rel=1e-2)
    found = epoch_times(rows)
    assert found.steps == pytest.approx(steps, rel=0.05)
    true_step = (steps - 1) / steps * STEP + (STEP - WAIT + 0.763 + 0.6) / steps
    assert whole_step(rows).seconds == pytest.approx(true_step, rel=0.01)


def test_file_of_many_short_epochs_stays_bounded(tmp_path, small_levels):
    sizes = []
    for number, epochs in enumerate((500, 1000, 2000, 4000)):
        trained(tmp_path / f"{number}.csv", epochs=epochs, steps=8)
        sizes.append((tmp_path / f"{number}.csv").stat().st_size)
    growth = [after - before for before, after in pairwise(sizes)]
    assert max(growth) < 3 * (8 << 10), sizes


def test_restarted_process_starts_again(tmp_path):
    path = tmp_path / "t.csv"
    trained(path, startup=1.0)
    trained(path, startup=60.0)
    rows = rows_of(path)
    run = whole_run(rows)
    assert (run.steps, run.begins) == (2 * (3 * 42 - 2), 4)
    assert whole_step(rows).seconds == pytest.approx(STEP + 0.76 / 42)


def test_epoch_that_is_left_early_has_the_steps_that_were_done(tmp_path):
    path, clock = tmp_path / "t.csv", Clock()
    timeline = Timeline(path, clock=clock)
    for epoch in range(4):
        recorded = timeline.epoch(loader=0, epoch=epoch)
        for _ in range(10 if epoch < 3 else 4):
            recorded.ask()
            clock.now += 0.01
            recorded.got(8)
            clock.now += 0.04
        recorded.end_in_finalizer()
    timeline.close()
    assert epoch_times(rows_of(path)).steps == 10


def test_two_steps_say_nothing_of_epochs(tmp_path):
    trained(tmp_path / "t.csv", epochs=1, steps=2)
    rows = rows_of(tmp_path / "t.csv")
    assert (epoch_times(rows), whole_step(rows)) == (None, None)


def test_iter_is_a_part_of_the_first_wait(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.csv", clock=clock)
    recorded = timeline.epoch(loader=0, epoch=0)
    clock.now += 0.4
    recorded.opened(0.4)
    recorded.ask()
    clock.now += 0.1
    recorded.got(8)
    recorded.end()
    timeline.close()
    (row,) = rows_of(tmp_path / "t.csv")
    assert row.wait_seconds == pytest.approx(0.5)


def test_one_line_of_a_run_is_of_whole_epochs(tmp_path):
    trained(tmp_path / "t.csv")
    measured = measure({0: rows_of(tmp_path / "t.csv")}, {})
    record = Training(
        status="succeeded",
        groups=(Group(name="dnn", role="dnn", instance_type="local.c4", count=1),),
        measured=measured,
        job=Job(platform="local", name="r"),
    )
    # 126 steps of 47.8 ms were told where 66 were meant.
    assert training_words(record) == (
        "126 steps of 65.9 ms over whole epochs, 32% of it waiting for data "
        "(47.8 ms within them, 6% of it)"
    )


def test_epochs_of_8_batches_wait_as_the_script_sees_it(tmp_path):
    trained(tmp_path / "t.csv", epochs=20, steps=8, first_wait=1.0)
    measured = measure({0: rows_of(tmp_path / "t.csv")}, {})
    # In steps alone 6%; 14% was told where three quarters were.
    script = (1.0 + 7 * WAIT) / (1.0 + 7 * STEP + STEP - WAIT)
    assert measured.wait_share < 0.1
    assert measured.whole_wait_seconds / measured.whole_step_seconds == pytest.approx(
        script, rel=0.01
    )
    assert script == pytest.approx(0.74, abs=0.01)


def test_sums_that_ranks_report_have_the_starts_of_epochs_and_what_is_between():
    clock = Clock()
    timeline = Timeline(None, clock=clock)
    for epoch in range(3):
        for loader, steps in ((0, 5), (1, 2)):
            recorded = timeline.epoch(loader=loader, epoch=epoch)
            for number in range(steps):
                recorded.ask()
                clock.now += 0.5 if number == 0 else 0.1
                recorded.got(8)
                clock.now += 0.4
            recorded.end()
    main = timeline.training
    assert main.begins == 2
    assert main.first_wait_seconds == pytest.approx(2 * 0.5)
    # A validation of two steps is between the training's epochs.
    assert main.between_seconds == pytest.approx(2 * (0.5 + 0.1 + 2 * 0.4))


# Whole microseconds: less is lost where it is added to a second.
SECONDS = st.integers(0, 3_000_000).map(lambda microseconds: microseconds / 1e6)


@settings(max_examples=examples(60), deadline=None)
@given(
    epochs=st.lists(
        st.tuples(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), SECONDS),
        min_size=1,
        max_size=8,
    )
)
def test_sums_are_the_time_that_passed_whatever_a_run_does(epochs):
    rows, now = [], 0.0
    for number, (steps, gap) in enumerate(epochs):
        for batch, (wait, compute) in enumerate(steps):
            rows.append(
                MeasuredStep(
                    loader=0,
                    epoch=number,
                    batch=batch,
                    start_seconds=now,
                    wait_seconds=wait,
                    compute_seconds=compute,
                    samples=8,
                )
            )
            now += wait + compute
        now += gap
    run = whole_run(rows)
    if len(rows) < 3 or rows[-1].end_seconds == rows[1].end_seconds:
        assert run is None
        return
    assert run.seconds == pytest.approx(rows[-1].end_seconds - rows[1].end_seconds)
    assert run.wait_seconds == pytest.approx(sum(row.wait_seconds for row in rows[2:]))
    times, whole = epoch_times(rows), whole_step(rows)
    # No figure is negative, nor is more waited for than time passed.
    assert whole.wait_seconds >= 0
    assert 0 <= whole.seconds < math.inf
    assert all(
        0 <= pause.low_seconds <= pause.seconds <= pause.high_seconds for pause in times.pauses
    )
    # Each epoch counts one start: without the run's own the sum is at most one pause away.
    if times.steps and times.steps == len(rows) / len(epochs):
        assert whole.seconds * run.steps == pytest.approx(
            run.seconds, abs=3 * times.pause_seconds() + 3.1
        )
