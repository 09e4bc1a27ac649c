"""The live line's step, waiting and rest of the training do not jump at the ends of epochs."""

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed.timeline import FILE, Timeline
from stoker.figures.step_progress import ProgressLog, StepProgress, progress_in
from stoker.logs import Log, parse_line
from support.aws_answers import Clock


@dataclass(frozen=True)
class Epochs:
    """Synthetic epochs of equal steps.

    Attributes:
        first_wait: Seconds of the wait for the first batch.
        between: Seconds between epochs, in no step: a checkpoint, validation.
        validates: Seconds of validation within the last step, as Lightning's loop has them.
        report: Seconds between two looks at the timeline.
    """

    steps: int = 40
    wait: float = 0.02
    compute: float = 0.18
    first_wait: float = 0.0
    between: float = 0.0
    validates: float = 0.0
    report: float = 0.5
    count: int = 6

    @property
    def step_seconds(self) -> float:
        return self.wait + self.compute

    @property
    def pause_seconds(self) -> float:
        return max(0.0, self.first_wait - self.wait) + self.between + self.validates


@dataclass(frozen=True)
class Seen:
    """A live line, and the step in which it came."""

    progress: StepProgress
    epoch: int
    batch: int


class Run:
    """Epochs on a clock of their own; the log looks at the timeline as often as it does live."""

    def __init__(self, folder: Path, epochs: Epochs) -> None:
        self.clock, self.stream = Clock(), StringIO()
        self.epochs = epochs
        self.timeline = Timeline(folder / FILE.format(rank=0), clock=self.clock)
        log = Log(run="r", host="h", stream=self.stream)
        self.lines = ProgressLog(folder, log, clock=self.clock)
        self.seen: list[Seen] = []
        self._place = (0, 0)

    def play(self) -> list[Seen]:
        for number in range(self.epochs.count):
            self._epoch(number)
        self.lines.close()
        return self.seen

    def _epoch(self, number: int) -> None:
        epochs = self.epochs
        recorded = self.timeline.epoch(loader=0, epoch=number)
        for batch in range(epochs.steps):
            self._place = (number, batch)
            recorded.ask()
            self._passes(max(epochs.first_wait, epochs.wait) if batch == 0 else epochs.wait)
            recorded.got(8)
            self._passes(epochs.compute)
            if batch == epochs.steps - 1:
                self._passes(epochs.validates)
        recorded.end()
        self._passes(epochs.between)

    def _passes(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + self.epochs.report)
            self.timeline.flush()
            self._look()

    def _look(self) -> None:
        before = self.stream.tell()
        self.lines.tick()
        self.stream.seek(before)
        events = map(parse_line, self.stream.read().splitlines())
        number, batch = self._place
        for event in events:
            progress = progress_in(event) if event else None
            if progress:
                self.seen.append(Seen(progress, number, batch))


def played(epochs: Epochs) -> list[Seen]:
    with TemporaryDirectory() as folder:
        return Run(Path(folder), epochs).play()


KINDS = {
    "slow first batch": Epochs(first_wait=4.0),
    "validation between": Epochs(between=30.0),
    "validation in the last step": Epochs(validates=30.0),
    "validation in the last of slow steps": Epochs(
        steps=12, wait=0.5, compute=2.5, validates=40.0, report=1.0
    ),
    "slow steps, slow first batch": Epochs(steps=12, wait=0.5, compute=2.5, first_wait=20.0),
    "all of them": Epochs(first_wait=4.0, between=20.0, validates=10.0),
    "short epochs": Epochs(steps=8, first_wait=1.0, between=1.0),
    "long epochs": Epochs(steps=150, first_wait=1.0, between=30.0, count=4),
}


@pytest.mark.parametrize("epochs", KINDS.values(), ids=KINDS)
def test_the_step_and_its_wait_are_the_same_at_an_epochs_end_and_in_its_middle(epochs):
    for seen in played(epochs):
        if seen.progress.steps > 2:
            assert seen.progress.step_seconds == pytest.approx(epochs.step_seconds, abs=1e-4)
            assert seen.progress.wait_seconds == pytest.approx(epochs.wait, abs=1e-4)


@pytest.mark.parametrize("epochs", KINDS.values(), ids=KINDS)
def test_the_rest_of_the_training_does_not_jump_at_an_epochs_end(epochs):
    assert_one_estimate(epochs)


def assert_one_estimate(epochs: Epochs) -> None:
    """From the second pause on, each line counts whole epochs: steps and their share of a pause."""
    whole = epochs.step_seconds + epochs.pause_seconds / epochs.steps
    for seen in played(epochs):
        if seen.epoch < 2 or seen.batch == 0:
            continue
        assert seen.progress.counted_seconds == pytest.approx(whole, rel=0.01)


seconds = st.floats(min_value=0.0, max_value=20.0)


@settings(max_examples=12, deadline=None)
@given(
    epochs=st.builds(
        Epochs,
        steps=st.integers(min_value=6, max_value=30),
        wait=st.floats(min_value=0.001, max_value=0.5),
        compute=st.floats(min_value=0.02, max_value=2.0),
        first_wait=seconds,
        between=seconds,
        validates=seconds,
        report=st.floats(min_value=0.5, max_value=2.0),
        count=st.just(4),
    )
)
def test_no_line_jumps_whatever_lies_between_epochs(epochs):
    assert_one_estimate(epochs)
