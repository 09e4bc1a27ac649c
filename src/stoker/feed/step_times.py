"""Which steps of a timeline are the training's, and how long whole epochs take.

A training run usually reads one loader, and others now and then, which validate: that one's steps
are the training's, and what the others take lies between or inside them. Where no loader gave half
of the batches (federated clients, domains, folds), or other loaders are read within its steps (a
GAN's two, or labelled and unlabelled data), the steps of all loaders are: each batch is one.
Profiles and the log of a run's progress ask for whole epochs: one is longer than its steps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import NamedTuple

from stoker.feed.timeline import (
    FILE,
    SKIPPED_STEPS,
    MeasuredStep,
    block_means,
    is_main,
    read_timeline,
    steady,
    steps_in,
    timeline_ranks,
    typical_wait_share,
    waits_longest,
)
from stoker.records.profile import EpochPause, EpochTimes

# ---- whose steps


@dataclass(slots=True)
class LoaderShares:
    """How many batches each loader gave, and how many of its steps hold batches of others."""

    steps: Counter[int] = field(default_factory=Counter)
    # Of rows of one step: before how many of an epoch another loader was read.
    _single: Counter[int] = field(default_factory=Counter)
    _shared: Counter[int] = field(default_factory=Counter)

    def add(self, rows: Sequence[MeasuredStep]) -> None:
        """Adds rows as they stand in a timeline."""
        for process_rows in processes(rows):
            before = None
            for row in sorted(process_rows, key=_start):
                self.steps[row.loader] += row.steps
                if row.steps == 1:
                    self._single[row.loader] += 1
                    is_other = before is not None and before.loader != row.loader
                    self._shared[row.loader] += is_other and row.batch > 0
                before = row

    @property
    def main(self) -> int | None:
        """The loader that stands for the training; None: all do, or there is none."""
        top = max(self.steps, key=self.steps.__getitem__, default=None)
        if top is None:
            return None
        steps = self.steps[top]
        shared = self._shared[top] * steps / max(1, self._single[top])
        return top if is_main(steps, shared=shared, total=self.steps.total()) else None


def _start(row: MeasuredStep) -> float:
    return row.start_seconds


def processes(rows: Iterable[MeasuredStep]) -> Iterator[list[MeasuredStep]]:
    """Yields the rows of each process: one that was restarted has a clock that begins again."""
    latest: dict[int, float] = {}
    rows_of_process: list[MeasuredStep] = []
    for row in rows:
        if row.start_seconds < latest.get(row.loader, -math.inf):
            yield rows_of_process
            rows_of_process = []
            latest = {}
        latest[row.loader] = row.start_seconds
        rows_of_process.append(row)
    if rows_of_process:
        yield rows_of_process


def training_steps(rows: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Returns the steps of the training, in the order of their time.

    Those of all loaders share no second: a step ends where a batch of another loader is asked for.
    Together they have no epochs: what a process read is one.
    """
    shares = LoaderShares()
    shares.add(rows)
    main = shares.main
    if main is not None:
        return [row for row in rows if row.loader == main]
    steps: list[MeasuredStep] = []
    for number, process_rows in enumerate(processes(rows)):
        batch = 0
        for row in apart(process_rows):
            steps.append(row._replace(epoch=number, batch=batch))
            batch += row.steps
    return steps


def apart(rows: Iterable[MeasuredStep]) -> list[MeasuredStep]:
    """Returns one process's rows by time, none of which overlap.

    Rows of several steps do where loaders are read in turn: each then begins after the one before.
    """
    in_turn: list[MeasuredStep] = []
    end = -math.inf
    for row in sorted(rows, key=_start):
        row = row._replace(start_seconds=max(row.start_seconds, end))
        end = row.end_seconds
        in_turn.append(row)
    return in_turn


def read_timelines(output: Path, *, file: str = FILE) -> dict[int, list[MeasuredStep]]:
    ranks = {
        rank: training_steps(read_timeline(output / file.format(rank=rank)))
        for rank in timeline_ranks(output, file=file)
    }
    return {rank: steps for rank, steps in ranks.items() if steps}


def longest_waiting_file(output: Path, *, file: str = FILE) -> Path | None:
    ranks = read_timelines(output, file=file)
    if not ranks:
        return None
    rank = waits_longest({rank: typical_wait_share(steps) for rank, steps in ranks.items()})
    return output / file.format(rank=rank)


# ---- whole epochs


class WholeRun(NamedTuple):
    """All steps of a run but the first SKIPPED_STEPS, which are its start.

    Attributes:
        seconds: From the first of these steps to the end of the last one, gaps included.
        times: Of its epochs.
        step_seconds: All seconds of whole epochs over their steps. The start of the run's first
            epoch is not known: each epoch has one here. Of a run in which no epoch began, the mean.
    """

    steps: int
    samples: int
    seconds: float
    times: EpochTimes
    step_seconds: float


def whole_run(rows: Sequence[MeasuredStep], *, epoch_steps: int | None = None) -> WholeRun | None:
    """Returns the figures of one loader's rows in the order of their time; None: too few steps.

    Args:
        rows: These.
        epoch_steps: Steps of an epoch, as the loader says; None: they are counted, over the epochs
            that another one followed.
    """
    steps = samples = 0
    seconds = waits = computes = 0.0
    starts: list[float] = []
    betweens: list[float] = []
    kept = steady(rows)
    if not kept:
        return None
    usual = median(block_means(kept, lambda row: row.compute_seconds))
    for process_rows in processes(rows):
        done = process_rows[0].steps
        for earlier, row in pairwise(process_rows):
            done += row.steps
            if done - row.steps < SKIPPED_STEPS:
                continue
            gap = max(0.0, row.start_seconds - earlier.end_seconds)
            steps += row.steps
            samples += row.samples
            seconds += row.seconds + gap
            waits += row.wait_seconds
            computes += row.compute_seconds
            if row.batch == 0:
                # A loop that keeps its exhausted iterator until the next epoch (Lightning)
                # validates in its last step; one that reads a batch ahead (Accelerate) ends the
                # epoch before its last step.
                moved = earlier.compute_seconds - usual if earlier.steps == 1 else 0.0
                computes -= moved
                starts.append(row.wait_seconds)
                betweens.append(gap + moved)
            else:
                # Another loader was read, or a batch failed.
                computes += gap
    if not steps or seconds <= 0:
        return None
    step = seconds / steps
    num_steps = _epoch_steps(rows)
    start = between = None
    if starts and num_steps:
        usual_wait = median(block_means(kept, lambda row: row.wait_seconds))
        start, between = _pause(starts, less=usual_wait), _pause(betweens)
        # What the run's last step computes longer than a usual one follows its epoch.
        if rows[-1].steps == 1:
            computes -= max(0.0, rows[-1].compute_seconds - usual)
        waits = max(0.0, waits - len(starts) * start.seconds)
        pauses = (start.seconds + between.seconds) / num_steps
        step = (waits + max(0.0, computes)) / steps + pauses
    times = EpochTimes(
        steps=epoch_steps or num_steps,
        start=start,
        between=between,
        inside_seconds=max(0.0, computes / steps - usual),
    )
    return WholeRun(steps, samples, seconds, times, step)


def _epoch_steps(rows: Sequence[MeasuredStep]) -> float | None:
    """Returns the mean steps of the epochs that another one followed; None: there was none."""
    num_steps = num_epochs = 0
    for process_rows in processes(rows):
        begins = [number for number, row in enumerate(process_rows) if number and row.batch == 0]
        num_epochs += len(begins)
        num_steps += steps_in(process_rows[: begins[-1]] if begins else ())
    return num_steps / num_epochs if num_epochs else None


def _pause(values: Sequence[float], *, less: float = 0.0) -> EpochPause:
    """Returns a pause from its single values, less a usual step's part."""
    mean = max(0.0, fmean(values) - less)
    low = high = mean
    if len(values) > 1:
        low, _, high = (max(0.0, each - less) for each in quantiles(values, method="inclusive"))
    return EpochPause(
        seconds=mean,
        low_seconds=min(low, mean),
        high_seconds=max(high, mean),
        count=len(values),
    )
