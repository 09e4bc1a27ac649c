"""The steps of a run stand in its trainer's timeline, and have their statistics here."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.launch import passive_profile
from stoker.launch.passive_profile import MeasuredStep, main_loader


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


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Step time at 5, 25, 50, 75 and 95 % of the steps, in seconds."""

    p5: float
    p25: float
    p50: float
    p75: float
    p95: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of the main loader in the order of their start.

    Attributes:
        measured: False where the steps are drawn from medians because no timeline was kept.
    """

    steps: tuple[MeasuredStep, ...]
    measured: bool = True

    def quantiles(self) -> Quantiles:
        """Returns the quantiles of the time of all steps."""
        values = sorted(step.seconds for step in self.steps)
        return Quantiles(*(_quantile(values, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)))

    def median(self) -> tuple[float, float, float]:
        """Returns median step, wait and compute, in seconds; each is a median of its own."""
        return (
            _quantile(sorted(step.seconds for step in self.steps), 0.5),
            _quantile(sorted(step.wait_seconds for step in self.steps), 0.5),
            _quantile(sorted(step.compute_seconds for step in self.steps), 0.5),
        )

    def window(self, seconds: float) -> tuple[MeasuredStep, ...]:
        """Returns consecutive steps that fill `seconds`, as near to the run's middle as can be.

        A window inside one epoch is preferred to one that crosses the validation between two.
        """
        starts = [step.start_seconds for step in self.steps]
        middle = (starts[0] + self.steps[-1].end_seconds - seconds) / 2

        def cut(first: int) -> tuple[MeasuredStep, ...]:
            last = bisect_left(starts, starts[first] + seconds - 1e-9)
            return self.steps[first : max(last, first + 1)]

        order = sorted(range(len(starts)), key=lambda index: abs(starts[index] - middle))
        for first in order:
            steps = cut(first)
            full = steps[-1].end_seconds >= starts[first] + seconds
            if full and steps[0].epoch == steps[-1].epoch:
                return steps
        return cut(order[0]) if starts[-1] - starts[0] > seconds else cut(0)

    def bins(self, at_most: int) -> list[Bin]:
        """Divides the whole run into no more than `at_most` neighbourhoods."""
        size = max(1, math.ceil(len(self.steps) / at_most))
        bins = []
        for first in range(0, len(self.steps), size):
            part = self.steps[first : first + size]
            wait = sum(step.wait_seconds for step in part) / len(part)
            compute = sum(step.compute_seconds for step in part) / len(part)
            bins.append(Bin(first, len(part), wait, compute))
        return bins


def read_timeline(path: Path) -> StepTimes | None:
    """Reads the main loader's steps; None where the file is missing or holds no step."""
    steps = main_loader(passive_profile.read_timeline(path))
    return StepTimes(tuple(sorted(steps, key=lambda step: step.start_seconds))) if steps else None


def flat_timeline(*, wait_seconds: float, compute_seconds: float, steps: int) -> StepTimes | None:
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
    return min(24 * slow, max(40 * fast, 2 * slow), 400 * fast)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
