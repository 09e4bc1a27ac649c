"""Times of steps as they pass: `progress` lines of a log, from the timelines of a host's ranks.

Runs of one host have them too, without a feed.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from stoker.feed.epoch_times import WholeRun, WholeStep
from stoker.feed.timeline import (
    FILE,
    SKIPPED_STEPS,
    MeasuredStep,
    is_unlike,
    step_of,
    steps_in,
    timeline_ranks,
    waits_longest,
)
from stoker.feed.training_steps import LoaderShares, apart
from stoker.figures.feed_intervals import NO_PROGRESS, Figure, ProgressByRank
from stoker.logs import EventName, Log, LogEvent
from stoker.platforms.log_files import FileTail
from stoker.units import is_whole_longer, ms, step_words, wait_share, wait_words

REPORT_SECONDS = 2.0
# An epoch's last step that takes longer than both is no step any more.
_OVERDUE_SECONDS = 5.0
_OVERDUE_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """Progress of the training, with means of the latest steps.

    Attributes:
        step_seconds: Of steps within epochs: without an epoch's first one, and what is between.
        rank: The one that waits longest, whose steps these are.
        least_wait_share: Wait share of the rank that waits least; None: there is one rank.
        whole_step_seconds: All time over the steps, up to the start of the latest epoch; in the
            first epoch since the third step. None: not known.
        whole_wait_seconds: Likewise all waits, those for epochs' first batches included.
        is_estimate: `spent_usd` is by an estimated price.
        is_between_epochs: All steps of an epoch are done, and no step of the next one is.
    """

    steps: Annotated[int, msgspec.Meta(ge=0)]
    step_seconds: Figure
    wait_seconds: Figure
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    least_wait_share: Figure | None = None
    spent_usd: Figure | None = None
    is_estimate: bool = False
    whole_step_seconds: Figure | None = None
    whole_wait_seconds: Figure | None = None
    is_between_epochs: bool = False

    @property
    def words(self) -> str:
        took = f"{ms(self.step_seconds)} per step, {self.wait_words('of it waiting for data')}"
        if self.whole_wait_share is not None and not self.is_between_epochs:
            took = step_words(
                step_seconds=self.step_seconds,
                wait_seconds=self.wait_seconds,
                least_wait_share=self.least_wait_share,
                rank=self.rank,
                whole_step_seconds=self.whole_step_seconds,
                whole_wait_seconds=self.whole_wait_seconds,
            )
        return f"between epochs; {took}" if self.is_between_epochs else took

    @property
    def whole_wait_share(self) -> float | None:
        """Share of whole epochs that waits for data; None: not known, or as within them."""
        whole = self.whole_step_seconds
        wait = self.whole_wait_seconds
        if whole is None or wait is None or not is_whole_longer(self.step_seconds, whole):
            return None
        return wait_share(step_seconds=whole, wait_seconds=wait)

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step by which the rest of the training is estimated."""
        return self.whole_step_seconds or self.step_seconds

    def wait_words(self, of: str) -> str:
        share = wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)
        return wait_words(share, least=self.least_wait_share, rank=self.rank, of=of)


def progress_in(event: LogEvent) -> StepProgress | None:
    """Returns the progress in a line of the leader's log; None in another or a broken line."""
    if event.event != EventName.PROGRESS:
        return None
    try:
        return msgspec.convert(event.values, StepProgress, strict=False)
    except msgspec.ValidationError:
        return None


class _Held(NamedTuple):
    """A step unlike those before it, until the next one says whether it was its epoch's last."""

    row: MeasuredStep
    after: MeasuredStep


class _RankSteps:
    """Steps of one rank that runs, from the rows of its timeline.

    All figures come from one division of the rows: what is usual, and what ends or begins an epoch.
    """

    def __init__(self) -> None:
        self._shares = LoaderShares()
        self._usual: list[MeasuredStep] = []
        self._first: list[MeasuredStep] = []
        self._held: _Held | None = None
        self._last: MeasuredStep | None = None
        self._last_usual: MeasuredStep | None = None
        self._epoch_steps = 0
        self._is_whole = False
        self._followed = 0
        self._epochs = _EpochMeans()

    @property
    def count(self) -> int:
        """Steps of the training: of the loader that stands for it, or of all."""
        main = self._shares.main
        return self._shares.steps.total() if main is None else self._shares.steps[main]

    @property
    def whole(self) -> WholeStep | None:
        return self._epochs.mean

    def is_between(self, *, idle_seconds: float) -> bool:
        """Whether the epoch has as many steps as the one before it, which is known.

        Its last step may end with the next epoch's iter() only: then it is long overdue.
        """
        if self._last is None or not self._epoch_steps or self._is_whole:
            # Of several loaders, none says when the next one begins.
            return False
        # An epoch's length is known from the one before it.
        missing = self._epoch_steps - self._last.batch - self._last.steps
        overdue = max(_OVERDUE_SECONDS, _OVERDUE_STEPS * self._last.seconds / self._last.steps)
        return missing == 0 or (missing == 1 and idle_seconds >= overdue)

    def add(self, rows: Sequence[MeasuredStep]) -> bool:
        """Takes new rows; returns whether one is the training's."""
        self._shares.add(rows)
        main = self._shares.main
        self._is_whole = main is None
        has_new = False
        for row in apart(rows) if main is None else rows:
            if main in (None, row.loader):
                self._follow(row)
                has_new = True
        return has_new

    def take(self) -> tuple[float, float] | None:
        """Returns the mean step and wait since the last call, within epochs; None: no step was.

        Neither an epoch's first step, which waits for its workers, nor a last one that validates
        is a step like the others.
        """
        usual = self._usual
        self._usual = []
        first = self._first
        self._first = []
        # In rows of several steps epochs may begin everywhere, and with epochs of one step.
        rows = usual or [row for row in first if row.weight == 0]
        if not rows and self._last_usual is None and self._epoch_steps <= 1:
            rows = first
        if not rows:
            return None
        count = steps_in(rows)
        wait = sum(row.wait_seconds - row.first_wait_seconds for row in rows)
        compute = sum(row.compute_seconds for row in rows)
        return (max(0.0, wait) + compute) / count, max(0.0, wait) / count

    def _follow(self, row: MeasuredStep) -> None:
        last = self._last
        is_same_process = last is not None and row.start_seconds >= last.start_seconds
        if not is_same_process:
            # A restarted process has a clock that begins again.
            self._held = None
            last = None
        self._release(row)
        if last is not None and row.epoch != last.epoch and last.begins <= 1:
            self._epoch_steps = last.batch + last.steps
        if row.batch == 0 or row.begins:
            self._first.append(row)
        elif last is not None and self._is_odd(row):
            self._held = _Held(row, last)
        else:
            self._counts(row)
        if last is not None and self._held is None and self._followed >= SKIPPED_STEPS:
            self._epochs.add(row, after=last)
        self._followed += row.steps
        self._last = row

    def _is_odd(self, row: MeasuredStep) -> bool:
        # Of several loaders, steps differ anyway.
        before = self._last_usual
        return before is not None and not self._is_whole and is_unlike(row, before)

    def _release(self, following: MeasuredStep) -> None:
        held = self._held
        self._held = None
        if held is None:
            return
        if self._followed >= SKIPPED_STEPS:
            self._epochs.add(held.row, after=held.after)
        # Before another epoch's first step it was the last one, which validates: see `steady`.
        if following.epoch == held.row.epoch:
            self._counts(held.row)

    def _counts(self, row: MeasuredStep) -> None:
        self._usual.append(row)
        self._last_usual = row


class _EpochMeans:
    """The mean step over whole epochs: from one epoch's start to a later one's.

    It changes where an epoch starts, and nowhere else, so that neither a pause nor its lack moves
    it. Until the first one it is the mean of all steps since the third; until the second one the
    first epoch's, which lacks its start.
    """

    def __init__(self) -> None:
        self._all = WholeRun()
        self._first: _EpochSums | None = None
        self._latest: WholeStep | None = None

    @property
    def mean(self) -> WholeStep | None:
        """Seconds over steps, and those that wait; None: not known."""
        if self._latest is None and self._all.steps:
            return _EpochSums.of(self._all).since(_NO_SUMS)
        return self._latest

    def add(self, row: MeasuredStep, *, after: MeasuredStep) -> None:
        """Adds a row that followed the row `after`."""
        self._all.add(row, after=after)
        if row.epoch == after.epoch and not row.begins:
            return
        now = _EpochSums.of(self._all)
        self._latest = now.since(self._first or _NO_SUMS)
        self._first = self._first or now


class _EpochSums(NamedTuple):
    steps: int
    seconds: float
    wait_seconds: float

    @classmethod
    def of(cls, run: WholeRun) -> "_EpochSums":
        return cls(run.steps, run.seconds, run.wait_seconds)

    def since(self, before: "_EpochSums") -> WholeStep:
        steps = self.steps - before.steps
        waits = self.wait_seconds - before.wait_seconds
        return WholeStep((self.seconds - before.seconds) / steps, waits / steps)


_NO_SUMS = _EpochSums(0, 0.0, 0.0)


@dataclass(eq=False)
class ProgressLog:
    """Logs `progress steps=... step_seconds=... wait_seconds=...` of the training.

    With several ranks it is the one that waits longest, `rank=...`, with `least_wait_share=...`.
    `progress` returns the reports of ranks without a timeline here.
    """

    folder: Path
    log: Log
    _: KW_ONLY
    progress: Callable[[], ProgressByRank] = dict
    spent_usd: Callable[[], float | None] = lambda: None
    is_estimate: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._tails: dict[int, FileTail] = {}
        self._ranks: dict[int, _RankSteps] = {}
        self._reports: ProgressByRank = {}
        self._latest: dict[int, tuple[float, float]] = {}
        self._reported_at = -math.inf
        self._was_between = False
        self._stepped_at = self.clock()

    def tick(self) -> None:
        if self.clock() - self._reported_at >= REPORT_SECONDS:
            self._report(is_last=False)

    def close(self) -> None:
        """Logs the rest; may be called twice."""
        self._report(is_last=True)
        for tail in self._tails.values():
            tail.close()

    def _report(self, *, is_last: bool) -> None:
        has_new = self._read(is_last=is_last)
        if has_new:
            self._stepped_at = self.clock()
        is_between = not is_last and not has_new and self._is_between()
        # A line for new steps, and one when a pause between epochs begins: not one for each look.
        if not has_new and (is_between == self._was_between or not is_between):
            return
        self._was_between = is_between
        # Taken from all ranks at once, so that shares of one line are of one time.
        means = {rank: steps.take() for rank, steps in self._ranks.items()}
        reports = self.progress()
        # A rank without a new step keeps its last figures: slow steps end a moment apart.
        self._latest |= {rank: mean for rank, mean in means.items() if mean is not None}
        self._latest |= self._elsewhere(reports)
        if not self._latest:
            return
        self._reports = reports
        self._reported_at = self.clock()
        self._log_latest(is_between=is_between)

    def _log_latest(self, *, is_between: bool) -> None:
        shares = {
            rank: wait_share(step_seconds=step, wait_seconds=wait)
            for rank, (step, wait) in self._latest.items()
        }
        rank = waits_longest(shares)
        step_seconds, wait_seconds = self._latest[rank]
        more: dict[str, float | None] = {}
        if len(shares) > 1:
            more = {"rank": rank, "least_wait_share": min(shares.values())}
        if (spent := self.spent_usd()) is not None:
            more["spent_usd"] = spent
            # By an estimated price.
            more |= {"is_estimate": 1} if self.is_estimate else {}
        wholes = [steps.whole for steps in self._ranks.values() if steps.whole]
        if wholes:
            # All ranks take as long; the one that waits longest says how much of it is waiting.
            more["whole_step_seconds"] = max(whole.seconds for whole in wholes)
            more["whole_wait_seconds"] = max(whole.wait_seconds for whole in wholes)
        if is_between:
            more["is_between_epochs"] = 1
        self.log.event(
            EventName.PROGRESS,
            steps=max(steps.count for steps in self._ranks.values()),
            step_seconds=step_seconds,
            wait_seconds=wait_seconds,
            **more,
        )

    def _read(self, *, is_last: bool) -> bool:
        """Reads the local ranks' timelines; returns whether the training made a step since."""
        for rank in timeline_ranks(self.folder):
            if rank not in self._tails:
                self._tails[rank] = FileTail(self.folder / FILE.format(rank=rank))
                self._ranks[rank] = _RankSteps()
        has_new = False
        for rank, tail in self._tails.items():
            rows = map(step_of, tail.read(is_last=is_last))
            new = [step for step in rows if step is not None]
            has_new |= self._ranks[rank].add(new)
        return has_new

    def _is_between(self) -> bool:
        idle = self.clock() - self._stepped_at
        ranks = self._ranks.values()
        return bool(ranks) and all(steps.is_between(idle_seconds=idle) for steps in ranks)

    def _elsewhere(self, reports: ProgressByRank) -> dict[int, tuple[float, float]]:
        """Returns the same for ranks on other hosts, from their reports."""
        means = {}
        for rank, now in reports.items():
            then = self._reports.get(rank, NO_PROGRESS)
            count = now.steady_steps - then.steady_steps
            if rank not in self._tails and count > 0:
                wait = now.steady_wait_seconds - then.steady_wait_seconds
                compute = now.steady_compute_seconds - then.steady_compute_seconds
                means[rank] = (max(0.0, wait + compute) / count, max(0.0, wait) / count)
        return means
