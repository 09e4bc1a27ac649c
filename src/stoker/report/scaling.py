"""Throughput and cost of runs of one workload on clusters of different size."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.records import Training

SAMPLES = 1_000_000


@dataclass(frozen=True, slots=True)
class Point:
    """The runs on clusters of one size.

    Attributes:
        size: What the axis counts.
        samples_per_second: Median of the runs.
        low: Of the slowest run.
        high: Of the fastest run.
        usd: Dollars for a million samples, median; None where a price is not known.
        num_runs: So many were measured.
        efficiency: Throughput over `size` times that of one of the smallest size; None of no data
            host at all.
    """

    size: int
    samples_per_second: float
    low: float
    high: float
    usd: float | None
    num_runs: int
    efficiency: float | None


@dataclass(frozen=True, slots=True)
class ScalingOfRuns:
    """Runs by size.

    Attributes:
        what: What was made more of: `trainer processes`, `dnn hosts` or `data hosts`.
        points: From the smallest size on, at least two.
        notes: What makes the runs hard to compare.
    """

    what: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def ideal(self, size: int) -> float:
        """Samples a second of `size`, were nothing lost over the smallest size that is not 0."""
        first = next(point for point in self.points if point.size)
        return first.samples_per_second * size / first.size


def scaling_of_runs(runs: Mapping[str, Training]) -> ScalingOfRuns:
    """Orders runs by what they differ in: trainer processes, else dnn hosts, else data hosts.

    Args:
        runs: By name; one size may have been run several times.

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
    count = next((each for each in _COUNTS if _differ(each, runs)), None)
    if count is None:
        raise UsageError(
            f"{len(runs)} runs of one size: nothing scales",
            where=", ".join(runs),
            fix="name runs that differ in processes, dnn hosts or data hosts (--group)",
        )
    by_size: dict[int, list[Training]] = {}
    for training in runs.values():
        by_size.setdefault(_COUNTS[count](training), []).append(training)
    first = min(size for size in by_size if size)
    one = _throughput(by_size[first]) / first
    return ScalingOfRuns(
        what=count,
        points=tuple(_point(size, by_size[size], one=one) for size in sorted(by_size)),
        notes=tuple(_notes(runs, count)),
    )


def usd_per_million(training: Training) -> float | None:
    """Dollars for a million samples at the rate of the run; None where a price is not known."""
    measured = training.measured
    if measured is None or measured.usd_per_1000_steps is None or not measured.step_seconds:
        return None
    usd_per_second = measured.usd_per_1000_steps / (1000 * measured.step_seconds)
    return usd_per_second / measured.samples_per_second * SAMPLES


def _point(size: int, runs: Sequence[Training], *, one: float) -> Point:
    rates = [run.measured.samples_per_second for run in runs if run.measured]
    prices = [usd_per_million(run) for run in runs]
    known = [price for price in prices if price is not None]
    rate = statistics.median(rates)
    return Point(
        size=size,
        samples_per_second=rate,
        low=min(rates),
        high=max(rates),
        usd=statistics.median(known) if len(known) == len(runs) else None,
        num_runs=len(runs),
        efficiency=rate / (one * size) if size else None,
    )


def _throughput(runs: Sequence[Training]) -> float:
    return statistics.median(run.measured.samples_per_second for run in runs if run.measured)


def _processes(training: Training) -> int:
    return sum(
        group.count * (group.processes_per_host or 1)
        for group in training.groups
        if group.role == "dnn"
    )


def _dnn_hosts(training: Training) -> int:
    return sum(group.count for group in training.groups if group.role == "dnn")


def _data_hosts(training: Training) -> int:
    return sum(group.count for group in training.groups if group.role == "data")


_COUNTS: dict[str, Callable[[Training], int]] = {
    "trainer processes": _processes,
    "dnn hosts": _dnn_hosts,
    "data hosts": _data_hosts,
}


def _differ(count: str, runs: Mapping[str, Training]) -> bool:
    return len({_COUNTS[count](training) for training in runs.values()}) > 1


def _notes(runs: Mapping[str, Training], count: str) -> list[str]:
    notes = []
    if len({training.workload_sha256 for training in runs.values()}) > 1:
        notes.append("The runs are of different workloads: commands or today's clusters differ.")
    types = {
        (group.role, group.instance_type) for training in runs.values() for group in training.groups
    }
    for role in ("dnn", "data"):
        names = sorted(name for each, name in types if each == role)
        if len(names) > 1:
            notes.append(f"The {role} hosts are of different types: {', '.join(names)}.")
    if count != "data hosts" and _differ("data hosts", runs):
        notes.append("The runs differ in their number of data hosts, too.")
    return notes
