"""Figures are of the loader that dominates, or of all, and then no second counts twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from stoker.feed.step_times import read_timelines
from stoker.feed.timeline import Steps, Timeline, steps_in


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


def pair(script: Script) -> None:
    for _ in range(4):
        with script.read(0) as real, script.read(1) as drawn:
            for _ in range(30):
                real(compute=0.0)
                drawn(compute=0.02)


WHOLE = [clients, pair]


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


def validated(script: Script) -> None:
    for _ in range(4):
        script.epoch(0, 40)
        script.epoch(1, 10)


def test_a_loader_that_dominates_stands_for_the_training(tmp_path):
    kind = validated
    script = run(tmp_path, kind)
    (rows,) = read_timelines(tmp_path).values()
    assert {row.loader for row in rows} == {0}
    assert script.timeline.training.steps == steps_in(rows)
