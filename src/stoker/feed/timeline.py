"""Timeline of a trainer process: how long each step waited for data, and computed.

It has one row for each delivered batch, complete when the next one is asked for (only then the
step's compute is known), in STOKER_OUTPUT/timeline-rankR.csv. A step also ends where a batch of
another loader is asked for, so that no second is in two of them. Rows are written about once a
second and at the end of each epoch, so that a process that leaves by `os._exit` loses at most a
second.

The file is bounded (docs/method.md): after LEVEL_ROWS rows one is the sum of up to two steps of an
epoch, after as many more of four, and so on; the first steps of each epoch stay single. Sums over
all rows are exact; medians take a row of several steps for as many equal ones.
"""

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from stoker.feed.device_events import ExposedWait, FoundDevice
from stoker.units import wait_share

# In the output folder of the rank's host.
FILE = "timeline-rank{rank}.csv"
# The first of those that `stoker.timed` only times; loaders are numbered from 0.
FIRST_SOURCE = 1000
COLUMNS = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps"
# 50 ms steps of a day are 8 MB.
LEVEL_ROWS = 20_000
# Bound for reading: more than a timeline ever has.
MAX_READ_BYTES = 16 << 20
_FLUSH_SECONDS = 1.0
# The first steps of an epoch hold the start of workers and the filling of the pipeline.
SKIPPED_STEPS = 2
# An epoch's last step that computes so many times as long as the one before it validates.
_UNLIKE = 3
# Of all batches: a loader that gave fewer does not stand for the run.
MAIN_SHARE = 0.5
# Of a loader's steps: in more, another loader is read; validation within an epoch is rarer.
SHARED_SHARE = 0.2
# Steps whose mean is one sample: longer than any burst, dozens of blocks in a run of a minute.
BLOCK_STEPS = 20


# ---- rows


class MeasuredStep(NamedTuple):
    """A row of a timeline: a step, which waits for its batch, then computes.

    Attributes:
        steps: Number of steps of an epoch, one after the other, that the row is the sum of.
    """

    loader: int
    epoch: int
    batch: int
    start_seconds: float
    wait_seconds: float
    compute_seconds: float
    samples: int
    steps: int = 1

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.compute_seconds

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


def step_of(row: str) -> MeasuredStep | None:
    """Returns the step in a row of a timeline; None for the header, and for a truncated row."""
    try:
        step = msgspec.convert(row.split(","), MeasuredStep, strict=False)
    except msgspec.ValidationError:
        return None
    is_whole = row.count(",") == COLUMNS.count(",")
    return step if is_whole and math.isfinite(step.end_seconds) and step.steps > 0 else None


def read_timeline(path: Path) -> list[MeasuredStep]:
    try:
        with path.open("rb") as file:
            rows = file.read(MAX_READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [step for row in rows if (step := step_of(row)) is not None]


def timeline_ranks(output: Path, *, file: str = FILE) -> list[int]:
    paths = output.glob(file.format(rank="*"))
    ranks = [path.stem.rpartition("rank")[2] for path in paths]
    return sorted(int(rank) for rank in ranks if rank.isdigit())


# ---- figures of rows


def steps_in(rows: Iterable[MeasuredStep]) -> int:
    return sum(row.steps for row in rows)


def _epoch_of(step: MeasuredStep) -> int:
    return step.epoch


def steady(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Returns the steps without the first ones of epochs, unless nothing else is left.

    Nor a last one that is unlike the one before it: a loop that keeps its iterator until the next
    epoch validates in it (Lightning), one that reads ahead ends it too early (Accelerate).
    """
    kept: list[MeasuredStep] = []
    for _, group in groupby(steps, key=_epoch_of):
        rows = list(group)
        if len(rows) > 1 and _is_unlike(rows[-1], rows[-2]):
            rows.pop()
        seen = 0
        for row in rows:
            seen += row.steps
            if seen > SKIPPED_STEPS:
                kept.append(row)
    return kept or list(steps)


def _is_unlike(step: MeasuredStep, before: MeasuredStep) -> bool:
    """Returns whether a step computes much longer or shorter than the one before it."""
    usual = before.compute_seconds / before.steps
    return not usual / _UNLIKE <= step.compute_seconds / step.steps <= usual * _UNLIKE


def block_means(
    steps: Sequence[MeasuredStep], value: Callable[[MeasuredStep], float]
) -> list[float]:
    """Returns means of `value` over blocks of about BLOCK_STEPS steps of one epoch.

    The mean of a longer block is there as often.
    """
    means: list[float] = []
    for _, group in groupby(steps, key=_epoch_of):
        rows = list(group)
        total = steps_in(rows)
        count = max(1, total // BLOCK_STEPS)
        blocks = defaultdict[int, list[MeasuredStep]](list)
        done = 0
        for row in rows:
            blocks[done * count // total].append(row)
            done += row.steps
        for block in blocks.values():
            num_steps = steps_in(block)
            means += [sum(map(value, block)) / num_steps] * max(1, num_steps // BLOCK_STEPS)
    return means


def typical_step(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Returns the seconds of a step and of its wait, of at least one step.

    Medians over means of blocks, without the first steps of epochs (docs/method.md, "A step and its
    wait").
    """
    kept = steady(steps)
    return (
        median(block_means(kept, lambda step: step.seconds)),
        median(block_means(kept, lambda step: step.wait_seconds)),
    )


def typical_wait_share(steps: Sequence[MeasuredStep]) -> float:
    step_seconds, wait_seconds = typical_step(steps)
    return wait_share(step_seconds=step_seconds, wait_seconds=wait_seconds)


def is_main(steps: int, *, shared: float, total: int) -> bool:
    """Returns whether the steps of the loader with most batches are the training's.

    Args:
        steps: Of that loader.
        shared: Of them, those in which other loaders are read.
        total: Steps of all loaders.
    """
    return steps >= MAIN_SHARE * total and shared <= SHARED_SHARE * steps


def waits_longest(shares: Mapping[int, float]) -> int:
    """Returns the rank with the largest share of wait; the first of equals.

    It stands for all ranks: the others wait for it in all-reduce, which looks like compute.
    """
    return min(shares, key=lambda rank: (-shares[rank], rank))


# ---- the recorder


@dataclass(slots=True)
class LoaderSums:
    """Sums over the steps of one loader, or of all; `steady` excludes the first of each epoch.

    Attributes:
        compute_seconds: With time in no step within epochs, in which another loader was read.
        between_seconds: From the last steps of epochs to the requests for the next ones' first
            batches.
        shared: Steps that ended because a batch of another loader was asked for.
        ended: When the last step ended; None: there was none.
    """

    epochs: int = 0
    steps: int = 0
    samples: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    steady_steps: int = 0
    steady_wait_seconds: float = 0.0
    steady_compute_seconds: float = 0.0
    between_seconds: float = 0.0
    shared: int = 0
    ended: float | None = None

    def add(self, step: MeasuredStep, *, ended: float, is_early: bool, is_begin: bool) -> None:
        """Adds a step; an early one is among the first of its epoch, which one begins."""
        if self.ended is not None:
            gap = max(0.0, step.start_seconds - self.ended)
            if is_begin:
                self.between_seconds += gap
            else:
                self.compute_seconds += gap
        self.ended = ended
        self.steps += 1
        self.samples += step.samples
        self.wait_seconds += step.wait_seconds
        self.compute_seconds += step.compute_seconds
        if not is_early:
            self.steady_steps += 1
            self.steady_wait_seconds += step.wait_seconds
            self.steady_compute_seconds += step.compute_seconds


class Timeline:
    """Steps of all loaders of a process; any thread may read the totals.

    Attributes:
        latest: The recorder of the epoch whose batch came last.
        whole: Sums over the steps of all loaders.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        found: FoundDevice | None = None,
    ) -> None:
        self.found = found or FoundDevice()
        self.clock = clock
        self.latest: Steps | None = None
        self.whole = LoaderSums()
        self._path = path
        # Of the file: to be written, and by loader what is not complete yet.
        self._complete: list[MeasuredStep] = []
        self._rows: dict[int, MeasuredStep] = {}
        self._num_rows = 0
        self._zero = self._flushed = 0.0
        self._loaders = 0
        self._sums: dict[int, LoaderSums] = {}
        # Of a profile that is stopped, a signal's handler closes it in the thread that may hold it.
        self._lock = threading.RLock()

    def new_loader(self) -> int:
        self._loaders += 1
        return self._loaders - 1

    def sums(self, loader: int) -> LoaderSums:
        return self._sums.setdefault(loader, LoaderSums())

    @property
    def training(self) -> LoaderSums:
        """Sums of the steps that `step_times.training_steps` chooses: one loader's, or all."""
        # A copy: another thread reads this while a loader may be added.
        top = max([*self._sums.values()], key=lambda sums: sums.steps, default=self.whole)
        return top if is_main(top.steps, shared=top.shared, total=self.whole.steps) else self.whole

    def epoch(self, *, loader: int, epoch: int, batch: int = 0) -> "Steps":
        return Steps(self, loader=loader, epoch=epoch, batch=batch)

    def add(self, step: MeasuredStep, *, ended: float, is_early: bool, may_write: bool) -> None:
        """Keeps one step for the file; in a finalizer it must not write."""
        if self._path is None:
            return
        if self.whole.steps == 1:
            self._zero = self._flushed = step.start_seconds
        row = self._rows.pop(step.loader, None)
        if row is not None:
            if step.batch == row.batch + row.steps and step.epoch == row.epoch and not is_early:
                step = MeasuredStep(
                    *row[:4],
                    row.wait_seconds + step.wait_seconds,
                    row.compute_seconds + step.compute_seconds,
                    row.samples + step.samples,
                    row.steps + 1,
                )
            else:
                self._complete.append(row)
        if is_early or step.steps >= 1 << (self._num_rows + len(self._complete)) // LEVEL_ROWS:
            self._complete.append(step)
        else:
            self._rows[step.loader] = step
        # A finalizer may run in the thread that holds the lock of `flush`: a deadlock.
        if may_write and ended - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self, *, is_last: bool = False) -> None:
        """Writes what has been collected; a full disk ends the timeline, not the training."""
        with self._lock, contextlib.suppress(OSError):
            self._flushed = self.clock()
            complete, self._complete = self._complete, []
            if is_last:
                complete += self._rows.values()
                self._rows.clear()
            if self._path is None or not (complete or is_last):
                return
            self._num_rows += len(complete)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(COLUMNS + "\n")
                file.writelines(map(self._line, complete))

    def _line(self, row: MeasuredStep) -> str:
        start = row.start_seconds - self._zero
        times = f"{start:.6f},{row.wait_seconds:.6f},{row.compute_seconds:.6f}"
        return f"{row.loader},{row.epoch},{row.batch},{times},{row.samples},{row.steps}\n"

    def close(self) -> None:
        """Writes the rest, or the header if there was no step; may be called twice."""
        self.flush(is_last=True)
        self._path = None


class Steps:
    """Recorder of one epoch: `ask` before a batch is waited for, `got` when it is there."""

    def __init__(self, timeline: Timeline, *, loader: int, epoch: int, batch: int = 0) -> None:
        self._timeline = timeline
        self._loader = loader
        self._epoch = epoch
        self._batch = self._first = batch
        self._sums = timeline.sums(loader)
        self._sums.epochs = max(self._sums.epochs, epoch + 1)
        self._asked = 0.0
        self._opening_seconds = 0.0
        self._open: tuple[float, float, int] | None = None
        self._is_within = False
        self._exposed = ExposedWait(timeline.found)

    def opened(self, seconds: float) -> None:
        """Records how long iter() took, which starts workers: a part of the first wait."""
        self._opening_seconds = seconds

    def ask(self) -> None:
        """Records that the trainer asks for a batch: the step before is complete."""
        now = self._timeline.clock()
        self._complete(now)
        self._asked = now - self._opening_seconds
        latest = self._timeline.latest
        if latest is not self:
            self._is_within = latest is not None and latest.interrupt(self._asked)
        # What iter() took counts whole: nothing was launched during it.
        self._exposed.asked(is_first=self._opening_seconds > 0)
        self._opening_seconds = 0.0

    def got(self, samples: int) -> None:
        now = self._timeline.clock()
        self._open = (self._asked, now, samples)
        self._timeline.latest = self
        self._exposed.got(wait_seconds=now - self._asked)

    def interrupt(self, now: float) -> bool:
        """Ends the step, as another loader is asked for a batch; returns whether one was open."""
        if self._open is None:
            return False
        self._sums.shared += 1
        self._complete(now)
        return True

    def end(self) -> None:
        self._complete(self._timeline.clock())
        self._timeline.flush()

    def end_in_finalizer(self) -> None:
        self._complete(self._timeline.clock(), may_write=False)

    def _complete(self, now: float, *, may_write: bool = True) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        asked, got, samples = opened
        # Not in a finalizer, which may run anywhere.
        got = asked + self._exposed.seconds(got - asked) if may_write else got
        ended = max(now, got)
        batch = self._batch
        self._batch = batch + 1
        is_early = batch - self._first < SKIPPED_STEPS
        # By position: a step's bookkeeping is a matter of microseconds.
        step = MeasuredStep(
            self._loader, self._epoch, batch, asked, got - asked, ended - got, samples
        )
        is_begin = batch == 0
        self._sums.add(step, ended=ended, is_early=is_early, is_begin=is_begin)
        # Of all loaders, none begins within a step of another one.
        is_begin = is_begin and not self._is_within
        self._timeline.whole.add(step, ended=ended, is_early=is_early, is_begin=is_begin)
        self._timeline.add(step, ended=ended, is_early=is_early, may_write=may_write)
