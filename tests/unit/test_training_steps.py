"""Figures are of the loader that dominates, or of all, and then no second counts twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path

import pytest

from stoker.feed.epoch_times import whole_run, whole_step
from stoker.feed.timeline import Steps, Timeline, read_timeline, steps_in
from stoker.feed.training_steps import read_timelines, shares_of, training_steps
from stoker.figures.passive_profile import loader_counts, measure


@dataclass
class Script:
    """A training by a clock of its own, which counts the truth."""

    path: Path
    now: float = 100.0
    steps: int = 0
    waited: float = 0.0
    epochs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.path, clock=lambda: self.now)

    @contextmanager
    def read(self, loader: int) -> Iterator[Callable[..., None]]:
        number = self.epochs[loader] = self.epochs.get(loader, -1) + 1
        steps = self.timeline.epoch(loader=loader, epoch=number)
        yield lambda **times: self.take(steps, **times)
        steps.end()

    def take(self, steps: Steps, *, wait: float = 0.016, compute: float = 0.01) -> None:
        steps.ask()
        self.now += wait
        self.waited += wait
        self.steps += 1
        steps.got(4)
        self.now += compute

    def epoch(self, loader: int, batches: int, **times: float) -> None:
        with self.read(loader) as take:
            for _ in range(batches):
                take(**times)


def clients(script: Script) -> None:
    for client in range(40):
        script.epoch(client, 20)


def rounds(script: Script) -> None:
    for _ in range(5):
        for client in range(12):
            script.epoch(client, 3 + client)


def folds(script: Script) -> None:
    for fold in range(5):
        for _ in range(3):
            script.epoch(2 * fold, 16)
            script.epoch(2 * fold + 1, 4, compute=0.001)


def trials(script: Script) -> None:
    for trial in range(8):
        script.epoch(trial, 10 * (1 + trial % 3), compute=0.002 * (1 + trial))


def pair(script: Script) -> None:
    for _ in range(4):
        with script.read(0) as real, script.read(1) as drawn:
            for _ in range(30):
                real(compute=0.0)
                drawn(compute=0.02)


def labelled(script: Script) -> None:
    """A short loader again and again beside a long one, and a third now and then."""
    with script.read(0) as long:
        for number in cycle(range(10)):
            long(compute=0.0)
            if number == 0:
                script.epoch(2, 1)
            with script.read(1) as short:
                short(compute=0.03)
            if script.steps > 600:
                return


def nested(script: Script) -> None:
    with script.read(0) as outer:
        for _ in range(30):
            outer(compute=0.0)
            script.epoch(1, 1)


WHOLE = [clients, rounds, folds, trials, pair, labelled, nested]


def run(path: Path, kind: Callable[[Script], None]) -> Script:
    script = Script(path / "timeline-rank0.csv")
    kind(script)
    script.timeline.close()
    return script


@pytest.mark.parametrize("kind", WHOLE)
def test_where_no_loader_dominates_all_are_counted(tmp_path, kind):
    script = run(tmp_path, kind)
    (rows,) = read_timelines(tmp_path).values()
    assert steps_in(rows) == script.steps
    assert sum(row.wait_seconds for row in rows) == pytest.approx(script.waited, abs=1e-3)
    assert sum(row.seconds for row in rows) == pytest.approx(script.now - 100, rel=0.002)
    assert all(one.end_seconds <= two.start_seconds + 1e-5 for one, two in pairwise(rows))
    live = script.timeline.training
    assert (live.steps, live.wait_seconds) == (script.steps, pytest.approx(script.waited))
    assert live.wait_seconds + live.compute_seconds == pytest.approx(script.now - 100, rel=0.002)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_run_whose_steps_are_of_all_loaders_takes_as_long_as_the_script_sees(tmp_path, kind):
    script = run(tmp_path, kind)
    (rows,) = read_timelines(tmp_path).values()
    total = whole_run(rows)
    # From the third step to the last.
    first_two = sum(row.seconds for row in rows[:2])
    assert total.seconds == pytest.approx(script.now - 100 - first_two, rel=0.002)
    assert whole_step(rows).seconds == pytest.approx(total.seconds / total.steps, rel=0.1)
    measured = measure({0: rows}, {})
    assert measured.steps == script.steps
    assert measured.samples_per_second == pytest.approx(
        4 * script.steps / (script.now - 100), rel=0.1
    )


@pytest.mark.parametrize("kind", [clients, rounds, pair, trials])
def test_a_long_timeline_that_is_thinned_counts_the_same(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_BYTES", 4 << 10)
    monkeypatch.setattr("stoker.feed.timeline.STRETCH_STEPS", 10)

    def often(script: Script) -> None:
        for _ in range(6):
            kind(script)

    script = run(tmp_path, often)
    rows = training_steps(read_timeline(script.path))
    assert any(row.weight == 0 for row in rows)
    assert steps_in(rows) == script.steps
    assert sum(row.wait_seconds for row in rows) == pytest.approx(script.waited, rel=0.01)
    seconds = sum(row.seconds + row.gap_seconds for row in rows)
    assert seconds == pytest.approx(script.now - 100, rel=0.05)


def validated(script: Script) -> None:
    for _ in range(4):
        script.epoch(0, 40)
        script.epoch(1, 10)


def validated_within(script: Script) -> None:
    with script.read(0) as train:
        for number in range(100):
            train()
            if number % 20 == 19:
                script.epoch(1, 12)


def two_validations(script: Script) -> None:
    for _ in range(3):
        script.epoch(0, 40)
        script.epoch(1, 15)
        script.epoch(2, 15)


@pytest.mark.parametrize("kind", [validated, validated_within, two_validations])
def test_a_loader_that_dominates_stands_for_the_training(tmp_path, kind):
    script = run(tmp_path, kind)
    (rows,) = read_timelines(tmp_path).values()
    assert {row.loader for row in rows} == {0}
    assert script.timeline.training.steps == steps_in(rows)


def test_a_restarted_process_has_a_clock_that_begins_again(tmp_path):
    for _ in range(2):
        script = run(tmp_path, clients)
    rows = training_steps(read_timeline(script.path))
    assert steps_in(rows) == 2 * script.steps
    assert [row.epoch for row in rows] == [epoch for epoch in range(80) for _ in range(20)]
    assert shares_of(rows).main is None


def test_whose_steps_are_measured_is_counted(tmp_path):
    script = run(tmp_path, two_validations)
    rows = read_timeline(script.path)
    counts = loader_counts(rows, training_steps(rows), None)
    assert (counts.measured, counts.all, counts.made_here) == (1, 3, 0)
    assert counts.share == pytest.approx(40 / 70)
