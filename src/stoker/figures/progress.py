"""Times of a run's steps as they pass, from the timelines of the leader's ranks.

Ranks of other hosts report sums once a second. Runs of one host have no reports.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from stoker.feed.engine.run_messages import Progress
from stoker.feed.step_times import LoaderShares, apart
from stoker.feed.timeline import (
    FILE,
    SKIPPED_STEPS,
    MeasuredStep,
    step_of,
    steps_in,
    timeline_ranks,
    waits_longest,
)
from stoker.platforms.follow import FileTail
from stoker.units import wait_share, wait_words

# Of the steps as they are, which a profile measures first.
BASELINE_TIMELINE = "baseline-timeline-rank{rank}.csv"
Figure = Annotated[float, msgspec.Meta(ge=0)]
ProgressByRank = Mapping[int, Progress]
NO_PROGRESS = Progress(rank=0, steps=0, samples=0, wait_seconds=0.0, compute_seconds=0.0)


class StepProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of the training, with means of the latest steps.

    Attributes:
        step_seconds: Of steps within epochs, without an epoch's first one.
        rank: The one that waits longest, whose steps these are.
        least_wait_share: Wait share of the rank that waits least; None: there is one rank.
        whole_step_seconds: All time over the steps since the third one, what lies between epochs
            included. None: not known.
    """

    steps: Annotated[int, msgspec.Meta(ge=0)]
    step_seconds: Figure
    wait_seconds: Figure
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    least_wait_share: Figure | None = None
    whole_step_seconds: Figure | None = None

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step by which the rest of the training is estimated."""
        return self.whole_step_seconds or self.step_seconds

    def wait_words(self, of: str) -> str:
        share = wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)
        return wait_words(share, least=self.least_wait_share, rank=self.rank, of=of)


class _Mean(NamedTuple):
    """Mean step and wait of a rank, in seconds."""

    step: float
    wait: float

    @property
    def share(self) -> float:
        return wait_share(step_seconds=self.step, wait_seconds=self.wait)


class _RankSteps:
    """Steps of one rank of this host, from the rows of its timeline."""

    def __init__(self, file: Path) -> None:
        self.tail = FileTail(file)
        self._shares = LoaderShares()
        self._last: MeasuredStep | None = None
        self._num_followed = 0
        self._whole_steps = 0
        self._whole_seconds = 0.0

    @property
    def count(self) -> int:
        """Steps of the training: of the loader that stands for it, or of all."""
        main = self._shares.main
        return self._shares.steps.total() if main is None else self._shares.steps[main]

    @property
    def whole_seconds(self) -> float | None:
        return self._whole_seconds / self._whole_steps if self._whole_steps else None

    def read(self, *, is_last: bool) -> _Mean | None:
        """Returns the mean of the training's new steps within epochs; None: there is none.

        An epoch's first step, which waits for its workers, counts only where there is no other.
        """
        rows = [step for row in self.tail.read(is_last=is_last) if (step := step_of(row))]
        self._shares.add(rows)
        main = self._shares.main
        rows = apart(rows) if main is None else [row for row in rows if row.loader == main]
        for row in rows:
            last = self._last
            # A restarted process has a clock that begins again.
            is_later = last is not None and row.start_seconds >= last.start_seconds
            if last and is_later and self._num_followed >= SKIPPED_STEPS:
                self._whole_steps += row.steps
                self._whole_seconds += row.end_seconds - last.end_seconds
            self._num_followed += row.steps
            self._last = row
        # Epochs may have one step.
        counted = [row for row in rows if row.batch] or rows
        if not counted:
            return None
        num_steps = steps_in(counted)
        wait = max(0.0, sum(row.wait_seconds for row in counted))
        compute = sum(row.compute_seconds for row in counted)
        return _Mean((wait + compute) / num_steps, wait / num_steps)


class RunSteps:
    """Steps of all ranks of a run, as its leader sees them.

    Args:
        folder: Of the timelines of this host's ranks.
        file: Name of a rank's timeline.
    """

    def __init__(self, folder: Path, *, file: str = FILE) -> None:
        self._folder = folder
        self._file = file
        self._ranks: dict[int, _RankSteps] = {}
        self._reports: ProgressByRank = {}
        self._latest: dict[int, _Mean] = {}

    def look(self, reports: ProgressByRank, *, is_last: bool = False) -> StepProgress | None:
        """Returns the progress since the last look; None if no rank here made a step.

        Args:
            reports: What all ranks have reported.
            is_last: The ranks have ended, so that a row without an end of line is whole.
        """
        for rank in timeline_ranks(self._folder, file=self._file):
            if rank not in self._ranks:
                self._ranks[rank] = _RankSteps(self._folder / self._file.format(rank=rank))
        means = {rank: steps.read(is_last=is_last) for rank, steps in self._ranks.items()}
        new = {rank: mean for rank, mean in means.items() if mean}
        # A rank without a new step keeps its last figures: slow steps end a moment apart.
        self._latest |= new
        if not new:
            return None
        for rank, now in reports.items():
            then = self._reports.get(rank, NO_PROGRESS)
            count = now.steady_steps - then.steady_steps
            if rank not in self._ranks and count > 0:
                wait = max(0.0, now.steady_wait_seconds - then.steady_wait_seconds)
                compute = now.steady_compute_seconds - then.steady_compute_seconds
                self._latest[rank] = _Mean(max(0.0, wait + compute) / count, wait / count)
        self._reports = reports
        shares = {rank: mean.share for rank, mean in self._latest.items()}
        rank = waits_longest(shares)
        wholes = [steps.whole_seconds or 0.0 for steps in self._ranks.values()]
        return StepProgress(
            steps=max(steps.count for steps in self._ranks.values()),
            step_seconds=self._latest[rank].step,
            wait_seconds=self._latest[rank].wait,
            rank=rank,
            least_wait_share=min(shares.values()) if len(shares) > 1 else None,
            # All ranks take as long.
            whole_step_seconds=max(wholes) or None,
        )

    def close(self) -> None:
        """Closes the timelines; may be called twice."""
        for steps in self._ranks.values():
            steps.tail.close()
