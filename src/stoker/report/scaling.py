"""Throughput and cost of a workload on clusters of several sizes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from stoker.errors import UsageError
from stoker.records import Training
from stoker.units import ESTIMATE, percentage

_COLUMNS = "{:<18} {:>12} {:>13} {:>13} {:>5}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The runs on clusters of one size, with their medians.

    Attributes:
        efficiency: Throughput over `size` times the throughput of one unit of the smallest size;
            None where the size is 0 (no data hosts).
        usd_per_million_samples: None where a price is not known.
        is_estimate: Whether a price of one of the runs is an estimate.
    """

    size: int
    samples_per_second: float
    efficiency: float | None
    usd_per_million_samples: float | None
    runs: int
    is_estimate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOfRuns:
    """Runs by size.

    Attributes:
        what: What differs: `trainer processes`, `dnn hosts` or `data hosts`.
        points: At least two, the smallest size first.
        notes: What makes the runs hard to compare.
    """

    what: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def table(self) -> list[str]:
        lines = [_COLUMNS.format(self.what, "samples/s", "of the ideal", "$ per million", "runs")]
        for point in self.points:
            ideal = "" if point.efficiency is None else percentage(point.efficiency)
            usd = point.usd_per_million_samples
            mark = ESTIMATE if point.is_estimate else ""
            price = "not known" if usd is None else f"{mark}{usd:.4g}"
            rate = f"{point.samples_per_second:.1f}"
            lines.append(_COLUMNS.format(point.size, rate, ideal, price, point.runs))
        return [*lines, *self.notes]


def scaling_of_runs(runs: Mapping[str, Training]) -> ScalingOfRuns:
    """Orders runs by what they differ in: trainer processes, else dnn hosts, else data hosts.

    Raises:
        UsageError: If fewer than two sizes were measured, or a run has no measured step.
    """
    for name, training in runs.items():
        if training.measured is None or not training.measured.samples_per_second:
            raise UsageError(
                f"run {name} has no throughput: it {training.status}",
                where=f"{name}/training.json",
                fix="leave it out, or run it again",
            )
    sizes = [_sizes(training) for training in runs.values()]
    what, *also = _differences(sizes, names=list(runs))
    # Runs of one size are repetitions.
    by_size: dict[int, list[Training]] = {}
    for of_run, training in zip(sizes, runs.values(), strict=True):
        by_size.setdefault(of_run[what], []).append(training)
    # Not size 0 (no data hosts): nothing is a multiple of it.
    first = min(size for size in by_size if size)
    ideal = _samples_per_second(by_size[first]) / first
    points = tuple(_point(size, by_size[size], ideal=ideal) for size in sorted(by_size))
    notes = _notes([*runs.values()])
    if any(point.is_estimate for point in points):
        notes.append(f"{ESTIMATE} is by an estimated price.")
    if "data hosts" in also:
        notes.append("The runs also differ in their number of data hosts.")
    return ScalingOfRuns(what=what, points=points, notes=tuple(notes))


def _differences(sizes: Sequence[Mapping[str, int]], *, names: Sequence[str]) -> list[str]:
    """Returns what the runs differ in, in the order of what says most."""
    # More hosts usually means more processes.
    differ = [what for what in sizes[0] if len(set(map(itemgetter(what), sizes))) > 1]
    if not differ:
        raise UsageError(
            f"all {len(sizes)} runs have the same size: nothing to compare",
            where=", ".join(names),
            fix="name runs that differ in processes, dnn hosts or data hosts (--group)",
        )
    return differ


def _notes(runs: Sequence[Training]) -> list[str]:
    """Returns what makes the runs hard to compare."""
    notes = []
    if len({training.workload_sha256 for training in runs}) > 1:
        notes.append("The runs are of different workloads: commands or today's clusters differ.")
    groups = [*chain.from_iterable(training.groups for training in runs)]
    for role in ("dnn", "data"):
        types = sorted({group.instance_type for group in groups if group.role == role})
        if len(types) > 1:
            notes.append(f"The {role} hosts are of different types: {', '.join(types)}.")
    return notes


def _point(size: int, runs: Sequence[Training], *, ideal: float) -> Point:
    measured = [training.measured for training in runs if training.measured]
    prices = [
        run.usd_per_1000_steps / (1000 * run.counted_seconds) / run.samples_per_second * 1e6
        for run in measured
        if run.usd_per_1000_steps is not None and run.counted_seconds
    ]
    rate = _samples_per_second(runs)
    return Point(
        size=size,
        samples_per_second=rate,
        efficiency=rate / (ideal * size) if size else None,
        # A median over only some of the runs could be the median of the cheap ones.
        usd_per_million_samples=statistics.median(prices) if len(prices) == len(runs) else None,
        runs=len(runs),
        is_estimate=any(_has_estimate(training) for training in runs),
    )


def _samples_per_second(runs: Sequence[Training]) -> float:
    # A median: one disturbed run among several must not set the ideal.
    rates = (training.measured.samples_per_second for training in runs if training.measured)
    return statistics.median(rates)


def _has_estimate(training: Training) -> bool:
    measured = training.measured
    return bool(training.is_estimate and measured and measured.usd_per_1000_steps)


def _sizes(training: Training) -> dict[str, int]:
    dnn = [group for group in training.groups if group.role == "dnn"]
    return {
        "trainer processes": sum(g.count * (g.processes_per_host or 1) for g in dnn),
        "dnn hosts": sum(g.count for g in dnn),
        "data hosts": sum(g.count for g in training.groups if g.role == "data"),
    }
