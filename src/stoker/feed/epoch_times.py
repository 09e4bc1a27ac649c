"""Times of whole epochs, from the rows of a timeline: the first batches, and what lies between.

Profiles and the log of a run's progress ask for them: an epoch is longer than its steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

from stoker.feed.timeline import (
    SKIPPED_STEPS,
    MeasuredStep,
    block_means,
    steady,
)
from stoker.records.epochs import EpochPause, EpochTimes


@dataclass(slots=True)
class WholeRun:
    """Sums over all steps of a run but the first SKIPPED_STEPS, which are its start.

    Attributes:
        seconds: From the first of these steps to the end of the last one, gaps included.
        begins: Epochs that began during that time.
        first_wait_seconds: Waits for their first batches, in sum.
        between_seconds: Time in no step before these first batches, in sum.
        first_waits: Those of single rows, of which quartiles can be taken; likewise `betweens`.
        last_computes: Before these, the compute time of the last steps; None: not of a single row.
        steps_before_last: Steps of the run before the last epoch that began.
        epochs_before_last: Epochs that had these steps.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    begins: int = 0
    first_wait_seconds: float = 0.0
    between_seconds: float = 0.0
    first_waits: list[float] = field(default_factory=list)
    betweens: list[float] = field(default_factory=list)
    last_computes: list[float | None] = field(default_factory=list)
    steps_before_last: int = 0
    epochs_before_last: int = 0

    def add(self, row: MeasuredStep, *, after: MeasuredStep) -> None:
        """Adds a row that followed the row `after`."""
        gap = max(0.0, row.start_seconds - after.end_seconds)
        self.steps += row.steps
        self.samples += row.samples
        self.seconds += row.seconds + row.gap_seconds + gap
        self.wait_seconds += row.wait_seconds
        self.compute_seconds += row.compute_seconds
        is_first = row.batch == 0
        if row.weight == 0:
            self.begins += row.begins
            self.first_wait_seconds += row.first_wait_seconds
            self.between_seconds += row.gap_seconds
        elif is_first:
            self.begins += 1
            self.first_wait_seconds += row.wait_seconds
            self.first_waits.append(row.wait_seconds)
        if is_first:
            self.between_seconds += gap
            self.betweens.append(gap)
            self.last_computes.append(after.compute_seconds if after.weight else None)
        else:
            # In mid-epoch only a batch that failed is in no step.
            self.compute_seconds += gap


def whole_run(rows: Sequence[MeasuredStep]) -> WholeRun | None:
    """Returns the sums over one loader's rows in the order of their time; None: too few steps."""
    run = WholeRun()
    for process_rows in _processes(rows):
        _add_process(run, process_rows)
    return run if run.steps and run.seconds > 0 else None


def _processes(rows: Sequence[MeasuredStep]) -> Iterator[list[MeasuredStep]]:
    """Yields the rows of each process: one that was restarted has a clock that begins again."""
    rows_of_process: list[MeasuredStep] = []
    for row in rows:
        if rows_of_process and row.start_seconds < rows_of_process[-1].start_seconds:
            yield rows_of_process
            rows_of_process = []
        rows_of_process.append(row)
    if rows_of_process:
        yield rows_of_process


def _add_process(run: WholeRun, rows: Sequence[MeasuredStep]) -> None:
    done = rows[0].steps
    before_last = 0
    epochs = 1
    for earlier, row in pairwise(rows):
        if done >= SKIPPED_STEPS:
            run.add(row, after=earlier)
        if row.batch == 0 or row.begins:
            # Where it begins in a row of several steps, their number is known to one row.
            epochs += max(row.begins, 1)
            before_last = done
        done += row.steps
    run.steps_before_last += before_last
    run.epochs_before_last += epochs - 1


def epoch_times(
    rows: Sequence[MeasuredStep], *, epoch_steps: int | None = None
) -> EpochTimes | None:
    """Returns the times of whole epochs; None: too few steps.

    Args:
        rows: The steps of one loader, in the order of their time.
        epoch_steps: Steps of an epoch, as the loader says; None: they are counted, over the epochs
            that another one followed.
    """
    run = whole_run(rows)
    if run is None:
        return None
    kept = steady(rows)
    usual_wait = median(block_means(kept, lambda row: row.wait_seconds))
    usual_compute = median(block_means(kept, lambda row: row.compute_seconds))
    steps: float | None = epoch_steps
    if steps is None and run.epochs_before_last:
        steps = run.steps_before_last / run.epochs_before_last or None
    start = between = None
    moved = 0.0
    if run.begins:
        mean_wait = run.first_wait_seconds / run.begins
        start = _pause(run.first_waits, mean=mean_wait, count=run.begins, less=usual_wait)
        moved = _moved(run, usual_compute=usual_compute)
        mean_gap = max(0.0, run.between_seconds / run.begins + moved)
        between = _pause(_betweens(run, usual_compute), mean=mean_gap, count=run.begins)
    compute = run.compute_seconds - run.begins * moved
    if run.begins:
        compute -= _end_seconds(rows)
    mean_compute = compute / run.steps
    return EpochTimes(
        steps=steps,
        start=start,
        between=between,
        inside_seconds=max(0.0, mean_compute - usual_compute),
    )


def _betweens(run: WholeRun, usual_compute: float) -> list[float]:
    """Returns single times between epochs, from the ends of usual last steps.

    A loop that keeps its exhausted iterator until the next epoch (Lightning) validates in its last
    step; one that reads a batch ahead (Accelerate) ends the epoch before its last step does.
    """
    return [
        gap if last is None else max(0.0, gap + last - usual_compute)
        for gap, last in zip(run.betweens, run.last_computes, strict=True)
    ]


def _moved(run: WholeRun, *, usual_compute: float) -> float:
    """Returns the mean seconds of epochs' last steps beyond a usual one's, which are between."""
    single = [last for last in run.last_computes if last is not None]
    if not single:
        return 0.0
    return sum(single) / len(single) - usual_compute


class WholeStep(NamedTuple):
    """All seconds of whole epochs over their steps, and those of them that wait for data."""

    seconds: float
    wait_seconds: float


def whole_step(rows: Sequence[MeasuredStep]) -> WholeStep | None:
    """Returns the measured seconds of whole epochs over their steps; None: too few steps.

    In a run of few epochs one start is missing, the run's own: each epoch has one here. Where no
    epoch began in the run, it is the mean step.
    """
    run = whole_run(rows)
    times = epoch_times(rows)
    if run is None or times is None:
        return None
    if not run.begins or times.steps is None or times.start is None:
        return WholeStep(run.seconds / run.steps, run.wait_seconds / run.steps)
    pauses = times.pause_seconds()
    start = times.start.seconds
    seconds = run.seconds - run.begins * pauses - _end_seconds(rows)
    inside = max(0.0, seconds) / run.steps
    waits = max(0.0, run.wait_seconds - run.begins * start) / run.steps
    return WholeStep(inside + pauses / times.steps, waits + start / times.steps)


def _end_seconds(rows: Sequence[MeasuredStep]) -> float:
    """Returns how much longer the run's last step was than a usual one: what follows its epoch."""
    usual = median(block_means(steady(rows), lambda row: row.compute_seconds))
    return max(0.0, rows[-1].compute_seconds - usual) if rows[-1].weight else 0.0


def _pause(values: Sequence[float], *, mean: float, count: int, less: float = 0.0) -> EpochPause:
    """Returns a pause from its single values and the mean over all, less a usual step's part."""
    mean = max(0.0, mean - less)
    low = high = mean
    if len(values) > 1:
        low, _, high = quantiles(values, n=4, method="inclusive")
        low = max(0.0, low - less)
        high = max(0.0, high - less)
    return EpochPause(
        seconds=mean, low_seconds=min(low, mean), high_seconds=max(high, mean), count=count
    )
