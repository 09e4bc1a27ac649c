"""Throughput and cost of a workload on clusters of several sizes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.errors import UsageError
from stoker.records import Measured, Training
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
    # In the order of what says most: more hosts usually means more processes.
    differ = [what for what in sizes[0] if len({each[what] for each in sizes}) > 1]
    if not differ:
        raise UsageError(
            f"all {len(runs)} runs have the same size: nothing to compare",
            where=", ".join(runs),
            fix="name runs that differ in processes, dnn hosts or data hosts (--group)",
        )
    what = differ[0]
    by_size: dict[int, list[Measured]] = {}
    estimated: set[int] = set()
    for each, training in zip(sizes, runs.values(), strict=True):
        if training.measured:
            by_size.setdefault(each[what], []).append(training.measured)
        if training.is_estimate and training.measured and training.measured.usd_per_1000_steps:
            estimated.add(each[what])
    # Not size 0 (no data hosts): nothing is a multiple of it.
    first = min(size for size in by_size if size)
    ideal = statistics.median(run.samples_per_second for run in by_size[first]) / first
    notes = []
    if len({training.workload_sha256 for training in runs.values()}) > 1:
        notes.append("The runs are of different workloads: commands or today's clusters differ.")
    groups = [group for training in runs.values() for group in training.groups]
    for role in ("dnn", "data"):
        types = sorted({group.instance_type for group in groups if group.role == role})
        if len(types) > 1:
            notes.append(f"The {role} hosts are of different types: {', '.join(types)}.")
    if estimated:
        notes.append(f"{ESTIMATE} is by an estimated price.")
    if "data hosts" in differ[1:]:
        notes.append("The runs also differ in their number of data hosts.")
    return ScalingOfRuns(
        what=what,
        points=tuple(
            replace(_point(size, by_size[size], ideal=ideal), is_estimate=size in estimated)
            for size in sorted(by_size)
        ),
        notes=tuple(notes),
    )


def _point(size: int, runs: Sequence[Measured], *, ideal: float) -> Point:
    prices = [
        run.usd_per_1000_steps / (1000 * run.counted_seconds) / run.samples_per_second * 1e6
        for run in runs
        if run.usd_per_1000_steps is not None and run.counted_seconds
    ]
    rate = statistics.median(run.samples_per_second for run in runs)
    return Point(
        size=size,
        samples_per_second=rate,
        efficiency=rate / (ideal * size) if size else None,
        # A median over only some of the runs could be the median of the cheap ones.
        usd_per_million_samples=statistics.median(prices) if len(prices) == len(runs) else None,
        runs=len(runs),
    )


def _sizes(training: Training) -> dict[str, int]:
    dnn = [group for group in training.groups if group.role == "dnn"]
    return {
        "trainer processes": sum(g.count * (g.processes_per_host or 1) for g in dnn),
        "dnn hosts": sum(g.count for g in dnn),
        "data hosts": sum(g.count for g in training.groups if g.role == "data"),
    }
