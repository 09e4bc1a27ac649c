"""What a run's timelines say of the main loader's steps.

Batches come in bursts (several workers, data hosts and local workers of different pace), so that a
median of single steps would miss the wait that ends a burst: medians are over means of blocks.
"""

import csv
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stoker.feed.messages import Progress
from stoker.records import Measured, Spread

# The first steps of an epoch hold the start of workers and the filling of the pipeline.
SKIPPED_STEPS = 2
# Consecutive steps of an epoch whose mean is one sample: longer than any burst, and still dozens of
# blocks in a run of a minute.
BLOCK_STEPS = 20
_NAME = "timeline-rank{rank}.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row of a timeline."""

    loader: int
    epoch: int
    wait_seconds: float
    compute_seconds: float
    samples: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.wait_seconds + self.compute_seconds


def step_of(row: Mapping[str, str]) -> Step | None:
    """The step in a row of a timeline; None if the row is cut."""
    try:
        return Step(
            loader=int(row["loader"]),
            epoch=int(row["epoch"]),
            wait_seconds=float(row["wait_seconds"]),
            compute_seconds=float(row["compute_seconds"]),
            samples=int(row["samples"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_timeline(path: Path) -> list[Step]:
    """The steps in a timeline; rows that are cut (the process was killed) are left out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            steps = [step_of(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError):
        return []
    return [step for step in steps if step is not None]


def main_loader(steps: Sequence[Step]) -> list[Step]:
    """The steps of the loader that made most batches: that of the training."""
    counts = Counter(step.loader for step in steps)
    if not counts:
        return []
    busiest = counts.most_common(1)[0][0]
    return [step for step in steps if step.loader == busiest]


def steady(steps: Sequence[Step]) -> list[Step]:
    """The steps without the first SKIPPED_STEPS of each epoch; all, if nothing else is left."""
    seen: Counter[int] = Counter()
    kept = []
    for step in steps:
        seen[step.epoch] += 1
        if seen[step.epoch] > SKIPPED_STEPS:
            kept.append(step)
    return kept or list(steps)


def block_means(steps: Sequence[Step], value: Callable[[Step], float]) -> list[float]:
    """Means of `value` over blocks of about BLOCK_STEPS consecutive steps of one epoch."""
    epochs: dict[int, list[float]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).append(value(step))
    means = []
    for values in epochs.values():
        count = max(1, len(values) // BLOCK_STEPS)
        bounds = [len(values) * block // count for block in range(count + 1)]
        means += [statistics.fmean(values[low:high]) for low, high in pairwise(bounds)]
    return means


def read_timelines(output: Path) -> dict[int, list[Step]]:
    """The steps of the main loader of each rank that left a timeline in `output`."""
    ranks = {
        int(path.stem.removeprefix("timeline-rank")): main_loader(read_timeline(path))
        for path in output.glob(_NAME.format(rank="*"))
        if path.stem.removeprefix("timeline-rank").isdigit()
    }
    return {rank: steps for rank, steps in sorted(ranks.items()) if steps}


def measure(
    ranks: Mapping[int, Sequence[Step]],
    progress: Mapping[int, Progress],
    *,
    replica_of: Callable[[int], int] = int,
) -> Measured | None:
    """What the ranks' timelines say; None where there is none.

    Args:
        ranks: The main loader's steps of this host's ranks.
        progress: Last reports of ranks on all hosts, for those without a timeline here.
        replica_of: Of a rank; the samples that ranks of one replica share count once.
    """
    if not ranks:
        return None
    first = min(ranks)
    kept = steady(ranks[first])
    rates = {replica_of(rank): _rate(steady(steps)) for rank, steps in ranks.items()}
    for rank, report in progress.items():
        rates.setdefault(replica_of(rank), 0.0)
        if rank not in ranks:
            rates[replica_of(rank)] = max(rates[replica_of(rank)], _reported_rate(report))
    fields = {
        "step_seconds": block_means(kept, lambda step: step.seconds),
        "wait_seconds": block_means(kept, lambda step: step.wait_seconds),
        "compute_seconds": block_means(kept, lambda step: step.compute_seconds),
    }
    return Measured(
        step_seconds=statistics.median(fields["step_seconds"]),
        wait_seconds=statistics.median(fields["wait_seconds"]),
        compute_seconds=statistics.median(fields["compute_seconds"]),
        samples_per_second=sum(rates.values()),
        steps=len(ranks[first]),
        spread={name: spread_of(values) for name, values in fields.items()},
        timeline_file=_NAME.format(rank=first),
    )


def _rate(steps: Sequence[Step]) -> float:
    seconds = sum(step.seconds for step in steps)
    return sum(step.samples for step in steps) / seconds if seconds else 0.0


def _reported_rate(report: Progress) -> float:
    seconds = report.wait_seconds + report.compute_seconds
    return report.samples / seconds if seconds else 0.0


def spread_of(values: Sequence[float]) -> Spread:
    """Quartiles of at least one value."""
    if len(values) < 2:
        return Spread(low=values[0], high=values[0], samples=1)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low=low, high=high, samples=len(values))
