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

    def share_of(self, loaders: Iterable[int]) -> float:
        """Returns the share of all batches that these loaders gave, 0..1."""
        return sum(self.steps[loader] for loader in loaders) / max(1, self.steps.total())


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


def shares_of(rows: Sequence[MeasuredStep]) -> LoaderShares:
    """Returns the shares of the loaders in a timeline."""
    shares = LoaderShares()
    shares.add(rows)
    return shares


def training_steps(rows: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Returns the steps of the training, in the order of their time.

    Those of all loaders share no second: a step ends where a batch of another loader is asked for.
    Epochs are numbered over all of them, and those that are read at the same time are one.
    """
    main = shares_of(rows).main
    if main is not None:
        return [row for row in rows if row.loader == main]
    steps: list[MeasuredStep] = []
    for process_rows in processes(rows):
        first_epoch = steps[-1].epoch + 1 if steps else 0
        steps += _numbered(apart(process_rows), first_epoch=first_epoch)
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


def _numbered(rows: Sequence[MeasuredStep], *, first_epoch: int) -> list[MeasuredStep]:
    """Returns one process's rows with the epochs and batches of all loaders numbered together."""
    ends = {(row.loader, row.epoch): row.start_seconds for row in rows}
    numbered: list[MeasuredStep] = []
    epoch, batch, until = first_epoch - 1, 0, -math.inf
    for row in rows:
        if row.start_seconds > until:
            epoch += 1
            batch = 0
        until = max(until, ends[row.loader, row.epoch])
        numbered.append(row._replace(epoch=epoch, batch=batch))
        batch += row.steps
    return numbered


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


class WholeRun:
    """All steps of a run but the first SKIPPED_STEPS, which are its start.

    Attributes:
        seconds: From the first of these steps to the end of the last one, gaps included.
        compute_seconds: With gaps in mid-epoch: another loader was read, or a batch failed.
        first_waits: Waits for the first batches of the epochs that began during that time.
        betweens: Time in no step before these first batches.
        last_computes: Before these, the compute time of the last steps; None: of a sum of several.
        epoch_steps: Mean steps of the epochs that another one followed; None: there was none.
    """

    def __init__(self, rows: Iterable[MeasuredStep]) -> None:
        self.steps = self.samples = 0
        self.seconds = self.wait_seconds = self.compute_seconds = 0.0
        self.first_waits: list[float] = []
        self.betweens: list[float] = []
        self.last_computes: list[float | None] = []
        num_begins = steps_before_last = 0
        for process_rows in processes(rows):
            done = process_rows[0].steps
            before_last = 0
            for earlier, row in pairwise(process_rows):
                if done >= SKIPPED_STEPS:
                    self._add(row, after=earlier)
                if row.batch == 0:
                    num_begins += 1
                    before_last = done
                done += row.steps
            steps_before_last += before_last
        self.epoch_steps = steps_before_last / num_begins if steps_before_last else None

    def _add(self, row: MeasuredStep, *, after: MeasuredStep) -> None:
        gap = max(0.0, row.start_seconds - after.end_seconds)
        self.steps += row.steps
        self.samples += row.samples
        self.seconds += row.seconds + gap
        self.wait_seconds += row.wait_seconds
        self.compute_seconds += row.compute_seconds
        if row.batch:
            self.compute_seconds += gap
            return
        self.first_waits.append(row.wait_seconds)
        self.betweens.append(gap)
        self.last_computes.append(after.compute_seconds if after.steps == 1 else None)


def whole_run(rows: Sequence[MeasuredStep]) -> WholeRun | None:
    """Returns the sums over one loader's rows in the order of their time; None: too few steps."""
    run = WholeRun(rows)
    return run if run.steps and run.seconds > 0 else None


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
    usual_compute = _usual_compute(rows)
    start = between = None
    compute = run.compute_seconds
    if run.first_waits:
        usual_wait = median(block_means(steady(rows), lambda row: row.wait_seconds))
        start = _pause(run.first_waits, mean=fmean(run.first_waits), less=usual_wait)
        # A loop that keeps its exhausted iterator until the next epoch (Lightning) validates in its
        # last step; one that reads a batch ahead (Accelerate) ends the epoch before its last step.
        single = [last for last in run.last_computes if last is not None]
        moved = fmean(single) - usual_compute if single else 0.0
        gaps = [
            gap if last is None else max(0.0, gap + last - usual_compute)
            for gap, last in zip(run.betweens, run.last_computes, strict=True)
        ]
        between = _pause(gaps, mean=fmean(run.betweens) + moved)
        compute -= len(gaps) * moved + _end_seconds(rows, usual_compute)
    inside = max(0.0, compute / run.steps - usual_compute)
    steps = epoch_steps or run.epoch_steps
    return EpochTimes(steps=steps, start=start, between=between, inside_seconds=inside)


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
    if times.steps is None or times.start is None:
        return WholeStep(run.seconds / run.steps, run.wait_seconds / run.steps)
    num_begins = len(run.first_waits)
    pauses, start = times.pause_seconds(), times.start.seconds
    end_seconds = _end_seconds(rows, _usual_compute(rows))
    seconds = max(0.0, run.seconds - num_begins * pauses - end_seconds)
    waits = max(0.0, run.wait_seconds - num_begins * start)
    return WholeStep(
        seconds / run.steps + pauses / times.steps, waits / run.steps + start / times.steps
    )


def _usual_compute(rows: Sequence[MeasuredStep]) -> float:
    return median(block_means(steady(rows), lambda row: row.compute_seconds))


def _end_seconds(rows: Sequence[MeasuredStep], usual: float) -> float:
    """Returns how much longer the run's last step was than a usual one: what follows its epoch."""
    return max(0.0, rows[-1].compute_seconds - usual) if rows[-1].steps == 1 else 0.0


def _pause(values: Sequence[float], *, mean: float, less: float = 0.0) -> EpochPause:
    """Returns a pause from its single values and the mean over all, less a usual step's part."""
    mean = max(0.0, mean - less)
    low = high = mean
    if len(values) > 1:
        low, _, high = (max(0.0, each - less) for each in quantiles(values, method="inclusive"))
    return EpochPause(
        seconds=mean,
        low_seconds=min(low, mean),
        high_seconds=max(high, mean),
        count=len(values),
    )
