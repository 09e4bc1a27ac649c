"""Timeline of a trainer process: how long each step waited for data, and computed.

It has one row for each delivered batch, complete when the next one is asked for (only then the
step's compute is known), in STOKER_OUTPUT/timeline-rankR.csv. Rows are written about once a second
and at the end of each epoch, so that a process that leaves by `os._exit` loses at most a second.

The file is bounded (docs/method.md, "A step and its wait"). With each further LEVEL_BYTES that it
has, single steps get rarer by half: STRETCH_STEPS of them, whose `weight` says for how many each
stands, then rows that are sums of `steps` steps, of weight 0. Sums over all rows stay exact;
medians are over the single steps, by weight. 50 ms steps of a day are 3.8 MiB, steps of any length
for ten years less than 15. Rows of several steps in which epochs begin have three more columns,
so that sums over epochs are exact as well (`feed.epoch_times`).
"""

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import fmean, median

from stoker.feed.device_events import ExposedWait, FoundDevice
from stoker.feed.resource_usage import Usage
from stoker.units import wait_share

# In the output folder of the rank's host.
FILE = "timeline-rank{rank}.csv"
COLUMNS = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps,weight"
# A row of several steps in which epochs begin has three more: `begins`, how many do;
# `first_wait_seconds`, the waits for their first batches; `gap_seconds`, between steps, of none.
# About 10,000 rows.
LEVEL_BYTES = 512 << 10
# The report's picture shows 24 to 40 steps; medians need blocks of BLOCK_STEPS.
STRETCH_STEPS = 100
# Longest time of a row: readers of a running training must see that it advances.
MAX_ROW_SECONDS = 60.0
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
# Figures of loaders that are added.
_SUMMED = (
    "steps",
    "samples",
    "wait_seconds",
    "compute_seconds",
    "steady_steps",
    "steady_wait_seconds",
    "steady_compute_seconds",
)
# Steps whose mean is one sample: longer than any burst, dozens of blocks in a run of a minute.
BLOCK_STEPS = 20
# Blocks whose means are compared; in longer runs one stands for several.
_MAX_BLOCKS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step, one row of a timeline: it waits for its batch, then computes.

    Attributes:
        steps: Number of steps that the row is the sum of; 1: a single step.
        weight: Number of steps that a single step stands for; 0: the row is a sum.
        begins: Number of epochs that begin in it.
        first_wait_seconds: Wait for the first batches of these epochs.
        gap_seconds: Time between these epochs' steps and the ones before, which no step has.
    """

    loader: int
    epoch: int
    batch: int = 0
    start_seconds: float = 0.0
    wait_seconds: float
    compute_seconds: float
    samples: int
    steps: int = 1
    weight: int = 1
    begins: int = 0
    first_wait_seconds: float = 0.0
    gap_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.compute_seconds

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds + self.gap_seconds


def step_of(row: str) -> MeasuredStep | None:
    """Returns the step in a row of a timeline; None for the header, and for a truncated row."""
    try:
        loader, epoch, batch, start, wait, compute, samples, steps, weight, *epochs = row.split(",")
        begins, first_wait, gap = epochs or ("0", "0", "0")
        step = MeasuredStep(
            loader=int(loader),
            epoch=int(epoch),
            batch=int(batch),
            start_seconds=float(start),
            wait_seconds=float(wait),
            compute_seconds=float(compute),
            samples=int(samples),
            steps=int(steps),
            weight=int(weight),
            begins=int(begins),
            first_wait_seconds=float(first_wait),
            gap_seconds=float(gap),
        )
    except ValueError:
        return None
    is_whole = math.isfinite(step.end_seconds) and step.steps > 0
    is_whole &= min(step.wait_seconds, step.compute_seconds, step.weight) >= 0
    is_whole &= min(step.begins, step.first_wait_seconds, step.gap_seconds) >= 0
    return step if is_whole else None


def steady(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Returns single steps, without the first ones of epochs unless nothing else is left.

    Nor a last one that is unlike the one before it: a loop that keeps its iterator until the next
    epoch validates in it (Lightning), one that reads ahead ends it too early (Accelerate).
    """
    seen: Counter[int] = Counter()
    kept = []
    before = None
    for step, following in zip_longest(steps, steps[1:]):
        seen[step.epoch] += step.steps
        is_last = following is None or following.epoch != step.epoch
        is_odd = is_last and before is not None and is_unlike(step, before)
        if step.weight and seen[step.epoch] > SKIPPED_STEPS and not is_odd:
            kept.append(step)
        before = step
    return kept or [step for step in steps if step.weight]


def is_unlike(step: MeasuredStep, before: MeasuredStep) -> bool:
    """Returns whether a step computes much longer or shorter than the one before it."""
    usual = before.compute_seconds / before.steps
    return not usual / _UNLIKE <= step.compute_seconds <= usual * _UNLIKE


def block_means(
    steps: Sequence[MeasuredStep], value: Callable[[MeasuredStep], float]
) -> list[float]:
    """Returns means of `value` over blocks of about BLOCK_STEPS single steps of one epoch.

    The mean of steps that stand for several is there as often.
    """
    epochs: dict[int, list[MeasuredStep]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).append(step)
    per_block = BLOCK_STEPS * max(1, sum(step.weight for step in steps) // _MAX_BLOCKS)
    means: list[float] = []
    for epoch_steps in epochs.values():
        for block in _blocks(epoch_steps):
            num_means = max(1, sum(step.weight for step in block) // per_block)
            mean = fmean(map(value, block))
            means += [mean] * num_means
    return means


def _blocks(steps: Sequence[MeasuredStep]) -> Iterator[Sequence[MeasuredStep]]:
    """Yields the steps of an epoch in blocks of nearly the same length."""
    count = max(1, len(steps) // BLOCK_STEPS)
    bounds = [len(steps) * block // count for block in range(count + 1)]
    for low, high in pairwise(bounds):
        yield steps[low:high]


def read_timeline(path: Path) -> list[MeasuredStep]:
    try:
        with path.open("rb") as file:
            rows = file.read(MAX_READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [step for row in rows if (step := step_of(row)) is not None]


def steps_in(rows: Iterable[MeasuredStep]) -> int:
    return sum(row.steps for row in rows)


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


def is_main(steps: int, *, shared: int, total: int) -> bool:
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


def typical_wait_share(steps: Sequence[MeasuredStep]) -> float:
    step_seconds, wait_seconds = typical_step(steps)
    return wait_share(step_seconds=step_seconds, wait_seconds=wait_seconds)


def timeline_ranks(output: Path, *, file: str = FILE) -> list[int]:
    before, after = file.split("{rank}")
    names = (path.name for path in output.glob(file.format(rank="*")))
    ranks = (name.removeprefix(before).removesuffix(after) for name in names)
    return sorted(int(rank) for rank in ranks if rank.isdigit())


@dataclass(slots=True)
class LoaderSums:
    """Sums over the steps of one loader; `steady` excludes the first ones of each epoch.

    Attributes:
        begins: Epochs that began after another one, with the waits for their first batches, and the
            time from the last step before to the request for it.
        shared: Steps in which batches of other loaders were asked for.
    """

    epochs: int = 0
    steps: int = 0
    samples: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    steady_steps: int = 0
    steady_wait_seconds: float = 0.0
    steady_compute_seconds: float = 0.0
    begins: int = 0
    first_wait_seconds: float = 0.0
    between_seconds: float = 0.0
    shared: int = 0

    def begin(self, *, wait: float, gap: float) -> None:
        """Adds the first batch of an epoch, asked for `gap` seconds after the last step."""
        self.begins += 1
        self.first_wait_seconds += wait
        self.between_seconds += gap

    def add(self, *, wait: float, compute: float, samples: int, is_steady: bool) -> None:
        self.steps += 1
        self.samples += samples
        self.wait_seconds += wait
        self.compute_seconds += compute
        if is_steady:
            self.steady_steps += 1
            self.steady_wait_seconds += wait
            self.steady_compute_seconds += compute


# Start of the line; batch; times of the request, its arrival and the end of the step; samples.
_Row = tuple[str, int, float, float, float, int]


@dataclass(slots=True)
class _SumRow:
    """An open row of several steps, which began with the step `first`."""

    first: _Row
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    begins: int = 0
    first_wait_seconds: float = 0.0
    gap_seconds: float = 0.0
    ended: float = 0.0

    def add(self, row: _Row) -> None:
        _, batch, asked_at, got, ended, samples = row
        if self.steps:
            self.gap_seconds += max(0.0, asked_at - self.ended)
        if batch == 0:
            self.begins += 1
            self.first_wait_seconds += got - asked_at
        self.wait_seconds += got - asked_at
        self.compute_seconds += ended - got
        self.samples += samples
        self.steps += 1
        self.ended = ended

    def text(self, *, zero: float) -> str:
        head, batch, asked_at, *_ = self.first
        times = f"{asked_at - zero:.6f},{self.wait_seconds:.6f},{self.compute_seconds:.6f}"
        epochs = ""
        if self.begins or self.gap_seconds:
            epochs = f",{self.begins},{self.first_wait_seconds:.6f},{self.gap_seconds:.6f}"
        return f"{head}{batch},{times},{self.samples},{self.steps},0{epochs}\n"


@dataclass(slots=True)
class _Thinning:
    """Rows of one loader, from all of its steps."""

    # Of the file when the present stretch began, `place` steps ago.
    level: int = 0
    place: int = 0
    sum: _SumRow | None = None

    def rows_of(self, row: _Row, *, level: int, zero: float) -> Iterator[str]:
        head, batch, asked_at, got, ended, samples = row
        if self.place == 0:
            self.level = level
        self.place += 1
        if self.place <= STRETCH_STEPS:
            times = f"{asked_at - zero:.6f},{got - asked_at:.6f},{ended - got:.6f}"
            yield f"{head}{batch},{times},{samples},1,{1 << self.level}\n"
        else:
            self.sum = self.sum or _SumRow(row)
            self.sum.add(row)
            longest = (1 << self.level) / 4
            if longest > MAX_ROW_SECONDS:
                # Longer after 90 days: else a year would have half a million such rows.
                longest = max(MAX_ROW_SECONDS, longest / 4096)
            began = self.sum.first[2]
            if self.place == STRETCH_STEPS << self.level or ended - began >= longest:
                yield from self.rest(zero=zero)
        if self.place == STRETCH_STEPS << self.level:
            self.place = 0

    def rest(self, *, zero: float) -> Iterator[str]:
        if self.sum:
            yield self.sum.text(zero=zero)
            self.sum = None


class Timeline:
    """Steps of all loaders of a process; any thread may read the totals."""

    def __init__(
        self,
        path: Path | None,
        *,
        usage: Usage | None = None,
        clock: Callable[[], float] = time.monotonic,
        found: FoundDevice | None = None,
    ) -> None:
        self.usage = usage
        self.found = found or FoundDevice()
        self.steps = self.samples = 0
        self.wait_seconds = self.compute_seconds = 0.0
        self._path = path
        self.clock = clock
        self._rows: list[_Row] = []
        self._zero: float | None = None
        self._flushed = 0.0
        # Epochs that began with their first batch, not resumed ones.
        self.begun = 0
        self._loaders = 0
        self._sums: dict[int, LoaderSums] = {}
        # Of all loaders: epochs that began, and seconds of steps in which another one was read.
        self._begins = LoaderSums()
        self._overlap_seconds = self._steady_overlap_seconds = 0.0
        # The epoch whose batch came last.
        self.latest: Steps | None = None
        # When the last step of each loader ended.
        self._ends: dict[int, float] = {}
        self._thinned: dict[str, _Thinning] = {}
        # Of a profile that is stopped, a signal's handler closes it in the thread that may hold it.
        self._lock = threading.RLock()

    def new_loader(self) -> int:
        self._loaders += 1
        return self._loaders - 1

    def sums(self, loader: int) -> LoaderSums:
        return self._sums.setdefault(loader, LoaderSums())

    @property
    def training(self) -> LoaderSums:
        """Sums of the steps that `training_steps.training_steps` chooses: one loader's, or all."""
        # A copy: another thread reads this while a loader may be added.
        sums_of_loaders = list(self._sums.values())
        top = max(sums_of_loaders, key=lambda sums: sums.steps, default=None)
        if top is not None and is_main(top.steps, shared=top.shared, total=self.steps):
            return top
        return self._whole(sums_of_loaders)

    def gap(self, loader: int, *, asked: float, ended: float) -> float | None:
        """Returns the time since the loader's last step, and notes this one; None: the first.

        Args:
            loader: Its number.
            asked: When its batch was asked for.
            ended: When its step ended.
        """
        before = self._ends.get(loader)
        self._ends[loader] = ended
        return None if before is None else max(0.0, asked - before)

    def begins(self, *, wait: float, asked: float) -> None:
        """Adds the first batch of an epoch, asked for in no other step, to those of all loaders."""
        if self._ends:
            gap = max(0.0, asked - max(self._ends.values()))
            self._begins.begin(wait=wait, gap=gap)

    def overlaps(self, seconds: float, *, is_steady: bool) -> None:
        """Notes seconds of a step in which another loader was read."""
        self._overlap_seconds += seconds
        self._steady_overlap_seconds += seconds * is_steady

    def _whole(self, loaders: Sequence[LoaderSums]) -> LoaderSums:
        """Returns the sums over all loaders' steps, in which no second is twice."""
        whole = replace(self._begins)
        for sums in loaders:
            for name in _SUMMED:
                setattr(whole, name, getattr(whole, name) + getattr(sums, name))
        whole.compute_seconds -= self._overlap_seconds
        whole.steady_compute_seconds -= self._steady_overlap_seconds
        return whole

    def epoch(self, *, loader: int, epoch: int, batch: int = 0) -> "Steps":
        return Steps(self, loader=loader, epoch=epoch, batch=batch)

    def add(self, row: _Row, *, may_write: bool = True) -> None:
        """Adds one step; in a finalizer it must not write."""
        _, _, asked_at, got, ended, samples = row
        if self._zero is None:
            self._zero = self._flushed = asked_at
        self.steps += 1
        self.samples += samples
        self.wait_seconds += got - asked_at
        self.compute_seconds += ended - got
        if self._path is not None:
            self._rows.append(row)
            # A finalizer may run in the thread that holds the lock of `flush`: a deadlock.
            if may_write and ended - self._flushed > _FLUSH_SECONDS:
                self.flush()

    def flush(self, *, is_last: bool = False) -> None:
        """Writes what has been collected; a full disk ends the timeline, not the training."""
        with self._lock, contextlib.suppress(OSError):
            self._flushed = self.clock()
            rows = self._rows
            self._rows = []
            if self._path is None or not (rows or is_last):
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                size = file.tell()
                lines = [] if size else [COLUMNS + "\n"]
                lines += self._lines_of(rows, size=size)
                if is_last:
                    lines += self._last_lines()
                file.writelines(lines)

    def _lines_of(self, rows: Iterable[_Row], *, size: int) -> Iterator[str]:
        """Yields the lines of rows; in a long file one stands for several.

        Args:
            rows: In their order.
            size: Bytes of the file so far.
        """
        for row in rows:
            loader, _, _ = row[0].partition(",")
            thinning = self._thinned.setdefault(loader, _Thinning())
            level = size // LEVEL_BYTES
            for line in thinning.rows_of(row, level=level, zero=self._zero or 0.0):
                yield line
                size += len(line)

    def _last_lines(self) -> Iterator[str]:
        """Yields the lines of rows that wait for others, as no more come."""
        for thinning in self._thinned.values():
            yield from thinning.rest(zero=self._zero or 0.0)

    def close(self) -> None:
        """Writes the rest, or the header if there was no step; may be called twice."""
        self.flush(is_last=True)
        if self.usage is not None and self._path is not None:
            self.usage.end()
            self.usage.write()
        self._path = None


class Steps:
    """Recorder of one epoch: `ask` before a batch is waited for, `got` when it is there.

    Attributes:
        began, first_got, ended: When the first batch was asked for (iter() included) and there, and
            when the last step ended; by the timeline's clock.
    """

    def __init__(self, timeline: Timeline, *, loader: int, epoch: int, batch: int = 0) -> None:
        timeline.begun += batch == 0
        self._timeline = timeline
        self._loader = loader
        self._epoch = epoch
        self._head = f"{loader},{epoch},"
        self._clock = timeline.clock
        self._batch = batch
        self._sums = timeline.sums(loader)
        self._sums.epochs = max(self._sums.epochs, epoch + 1)
        self.num_done = 0
        self.began = self.first_got = self.ended = 0.0
        self._asked = 0.0
        self._opening_seconds = 0.0
        self._open: tuple[float, float, int] | None = None
        # When a batch of another loader was asked for within the open step.
        self._shared_at: float | None = None
        self._is_within = False
        self._exposed = ExposedWait(timeline.found)

    def opened(self, seconds: float) -> None:
        """Records how long iter() took, which starts workers: a part of the first wait."""
        self._opening_seconds = seconds

    def ask(self) -> None:
        """Records that the trainer asks for a batch: the step before is complete."""
        now = self._clock()
        latest = self._timeline.latest
        if latest is not self:
            self._is_within = latest is not None and latest.shares(now - self._opening_seconds)
        self._complete(now)
        # What iter() took counts whole: nothing was launched during it.
        self._exposed.asked(is_first=self._opening_seconds > 0)
        self._asked = now - self._opening_seconds
        self._opening_seconds = 0.0
        if self._timeline.usage is not None:
            self._timeline.usage.asked(self._loader, self._epoch)

    def got(self, samples: int) -> None:
        now = self._clock()
        self._open = (self._asked, now, samples)
        self._timeline.latest = self
        self._exposed.got(wait_seconds=now - self._asked)
        if self._timeline.usage is not None:
            self._timeline.usage.got()

    def shares(self, now: float) -> bool:
        """Notes that another loader is asked for a batch; returns whether within a step."""
        if self._open is None:
            return False
        if self._shared_at is None:
            self._shared_at = now
            self._sums.shared += 1
        return True

    def took(self, *, seconds: float, wait: float, samples: int) -> None:
        """Records a whole step that ends now, with its wait."""
        usage = self._timeline.usage
        start = self._clock() - seconds
        if usage is not None:
            usage.got()
        self._open = (start, start + wait, samples)
        self._complete(start + seconds)
        if usage is not None:
            usage.asked(self._loader, self._epoch)

    def end(self) -> None:
        self._complete(self._clock())
        self._timeline.flush()
        if self._timeline.usage is not None:
            self._timeline.usage.end()

    def end_in_finalizer(self) -> None:
        self._complete(self._clock(), may_write=False)
        if self._timeline.usage is not None:
            self._timeline.usage.end_in_finalizer(self._loader, self._epoch)

    def _complete(self, now: float, *, may_write: bool = True) -> None:
        if self._open is None:
            return
        timeline = self._timeline
        is_first = self._batch == 0
        (asked_at, got, samples) = self._open
        self._open = None
        # Not in a finalizer, which may run anywhere.
        got = asked_at + self._exposed.seconds(got - asked_at) if may_write else got
        is_steady = self.num_done >= SKIPPED_STEPS
        ended = now
        if self._shared_at is not None:
            ended = self._end_of_shared(got, now, is_steady=is_steady)
        timeline.add((self._head, self._batch, asked_at, got, ended, samples), may_write=may_write)
        if is_first and not self._is_within:
            timeline.begins(wait=got - asked_at, asked=asked_at)
        gap = timeline.gap(self._loader, asked=asked_at, ended=now)
        if is_first and gap is not None:
            self._sums.begin(wait=got - asked_at, gap=gap)
        self._sums.add(wait=got - asked_at, compute=now - got, samples=samples, is_steady=is_steady)
        if not self.num_done:
            self.began = asked_at
            self.first_got = got
        self.ended = now
        self._batch += 1
        self.num_done += 1

    def _end_of_shared(self, got: float, now: float, *, is_steady: bool) -> float:
        """Returns the end that a step has in the file in which another loader was read.

        Of loaders that are read in turn no two have a second in common, in rows of several steps
        either; what validates within an epoch stays in its step.
        """
        until = max(got, self._shared_at or now)
        self._shared_at = None
        self._timeline.overlaps(now - until, is_steady=is_steady)
        is_in_turn = self._sums.shared > SHARED_SHARE * (self._sums.steps + 1)
        return until if is_in_turn else now
