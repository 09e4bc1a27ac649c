"""The step times of a run, of its trainer's timeline, have their statistics here."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import NamedTuple

from stoker.feed.timeline import MeasuredStep, main_loader, read_timeline


@dataclass(frozen=True, slots=True)
class Bin:
    """Means over neighbouring steps; the two parts add up to the whole.

    Attributes:
        first: Number of its first step, from 0.
        steps: How many steps it holds.
    """

    first: int
    steps: int
    wait_seconds: float
    compute_seconds: float


class Quantiles(NamedTuple):
    """Step time at 5, 25, 50, 75 and 95 % of the steps, in seconds."""

    p5: float
    p25: float
    p50: float
    p75: float
    p95: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of the main loader in the order of their start, at least one.

    Attributes:
        measured: False where the steps are drawn from medians because no timeline was kept.
    """

    steps: tuple[MeasuredStep, ...]
    measured: bool = True

    def quantiles(self) -> Quantiles:
        """Returns the quantiles of the time of all steps."""
        values = [step.seconds for step in self.steps]
        # 19 cuts, 5 % apart; a single step is each of its own quantiles.
        cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else 19 * values
        return Quantiles(*(cuts[place] for place in (0, 4, 9, 14, 18)))

    def window(self, seconds: float) -> tuple[MeasuredStep, ...]:
        """Returns consecutive steps that fill `seconds`, as near to the run's middle as can be.

        A window inside one epoch is preferred to one that crosses the validation between two.
        """
        starts = [step.start_seconds for step in self.steps]
        middle = (starts[0] + self.steps[-1].end_seconds - seconds) / 2

        def cut(first: int) -> tuple[MeasuredStep, ...]:
            # A step that begins where the window ends, but for rounding, is not in it.
            last = bisect_left(starts, starts[first] + seconds - 1e-9)
            return self.steps[first : max(last, first + 1)]

        # The middle of the run: neither its first steps, which warm up, nor its last.
        order = sorted(range(len(starts)), key=lambda index: abs(starts[index] - middle))
        for first in order:
            steps = cut(first)
            full = steps[-1].end_seconds >= starts[first] + seconds
            if full and steps[0].epoch == steps[-1].epoch:
                return steps
        # Epochs shorter than the window: any window crosses from one to the next.
        return cut(order[0]) if starts[-1] - starts[0] > seconds else cut(0)

    def bins(self, at_most: int) -> list[Bin]:
        """Divides the whole run into no more than `at_most` neighbourhoods."""
        # Means of neighbours, not every n-th step: a periodic one (a checkpoint) would show always
        # or never.
        size = math.ceil(len(self.steps) / at_most)
        parts = [(n, self.steps[n : n + size]) for n in range(0, len(self.steps), size)]
        return [
            Bin(
                first=first,
                steps=len(part),
                wait_seconds=fmean(step.wait_seconds for step in part),
                compute_seconds=fmean(step.compute_seconds for step in part),
            )
            for first, part in parts
        ]


def read_steps(path: Path) -> StepTimes | None:
    """Reads the main loader's steps; None where the file is missing or holds no step."""
    steps = main_loader(read_timeline(path))
    return StepTimes(tuple(sorted(steps, key=lambda step: step.start_seconds))) if steps else None


def flat_steps(*, wait_seconds: float, compute_seconds: float, steps: int) -> StepTimes | None:
    """Returns a run of equal steps, for want of a timeline; None for steps of no length."""
    step_seconds = wait_seconds + compute_seconds
    if step_seconds <= 0:
        return None
    return StepTimes(
        tuple(
            MeasuredStep(
                loader=0,
                epoch=0,
                batch=number,
                start_seconds=number * step_seconds,
                wait_seconds=wait_seconds,
                compute_seconds=compute_seconds,
                samples=0,
            )
            for number in range(steps)
        ),
        measured=False,
    )


def shown_seconds(step_seconds: Sequence[float]) -> float:
    """Returns the strips' common window: about 24 of the slowest steps, 40 of the fastest.

    Where one is very much faster, it shows more than 40 so that the other shows two.
    """
    slow, fast = max(step_seconds), min(step_seconds)
    # More than 400 marks of the fast run would run into each other.
    return min(24 * slow, max(40 * fast, 2 * slow), 400 * fast)
