"""The report on scaling compares throughput and cost of a workload on clusters of many sizes."""

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup

from stoker.errors import UsageError
from stoker.records import Training, write_text
from stoker.report.page import NARROW, WIDE, templates
from stoker.report.svg import (
    FOOT,
    HEAD,
    PLOT,
    Box,
    Drawing,
    Plane,
    along,
    around,
    axes,
    label,
    ticks,
)
from stoker.text import digits, percent, usd

SAMPLES = 1_000_000
_GAP = 44.0


@dataclass(frozen=True, slots=True)
class Point:
    """Holds the runs on clusters of one size.

    Attributes:
        size: What the axis counts.
        samples_per_second: Median of the runs.
        low: Figure of the slowest run.
        high: Figure of the fastest run.
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
        points: At least two, the smallest size first.
        notes: What makes the runs hard to compare.
    """

    what: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def ideal(self, size: int) -> float:
        """Returns the samples/s of `size` if nothing were lost over the smallest size above 0."""
        first = next(point for point in self.points if point.size)
        return first.samples_per_second * size / first.size


def scaling_of_runs(runs: Mapping[str, Training]) -> ScalingOfRuns:
    """Orders runs by what they differ in: trainer processes, else dnn hosts, else data hosts.

    Args:
        runs: Runs by name; one size may have been run several times.

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
    # In the order of _COUNTS: more hosts usually means more processes, which say more.
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
    # Not size 0 (no data hosts): nothing is a multiple of it.
    first = min(size for size in by_size if size)
    one = _throughput(by_size[first]) / first
    return ScalingOfRuns(
        what=count,
        points=tuple(_point(size, by_size[size], one=one) for size in sorted(by_size)),
        notes=tuple(_notes(runs, count)),
    )


def usd_per_million(training: Training) -> float | None:
    """Returns the dollars for a million samples at the run's rate; None without a price."""
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
        # Extremes, not quartiles: there are two or three runs of a size, rarely more.
        low=min(rates),
        high=max(rates),
        # A median of those runs alone whose price is known could be that of the cheap ones.
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


def draw_scaling(scaling: ScalingOfRuns, *, width: float, name: str) -> Markup:
    """Draws both panels, next to each other, or stacked; no second one without prices."""
    has_cost = all(point.usd is not None for point in scaling.points)
    panels = 2 if has_cost else 1
    side_by_side = width >= 640 and panels == 2
    panel = (width - _GAP) / 2 if side_by_side else width
    height = HEAD + 14 + PLOT + FOOT
    drawing = Drawing(
        name=name,
        width=width,
        height=height if side_by_side else panels * height + (panels - 1) * 16,
        title=f"Throughput and cost over {scaling.what}",
        description=words_of_scaling(scaling),
    )
    _draw_throughput(drawing, scaling, panel=panel)
    if has_cost:
        left, top = (panel + _GAP, 0.0) if side_by_side else (0.0, height + 16)
        _draw_cost(drawing, scaling, left=left, top=top, panel=panel)
    return drawing.markup()


def words_of_scaling(scaling: ScalingOfRuns) -> str:
    """Returns the picture as a sentence, for those who do not see it."""
    listed = "; ".join(
        f"{point.size}: {digits(point.samples_per_second, 3)} samples per second"
        + (f", {percent(point.efficiency)} of the ideal" if point.efficiency is not None else "")
        + (f", {usd(point.usd)} for a million" if point.usd is not None else "")
        for point in scaling.points
    )
    return f"By {scaling.what}: {listed}."


def _draw_throughput(drawing: Drawing, scaling: ScalingOfRuns, *, panel: float) -> None:
    last = scaling.points[-1]
    most_y = 1.12 * max(scaling.ideal(last.size), *(point.high for point in scaling.points))
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Throughput",
        left=0.0,
        top=0.0,
        panel=panel,
        most=(last.size * 1.08, most_y),
        marks=[(mark, digits(mark, 3) if mark else "0") for mark in marks],
        under="upwards: samples per second",
    )
    _sizes(drawing, plane, scaling)
    # The ideal: as many times the samples as there are hosts or processes.
    ends = plane.at(0, 0), plane.at(last.size, scaling.ideal(last.size))
    drawing.line(*ends[0], *ends[1], "ghost")
    lines: list[Box] = along(*ends)
    spots = [plane.at(point.size, point.samples_per_second) for point in scaling.points]
    for one, other in pairwise(spots):
        drawing.line(*one, *other, "front")
        lines += along(one, other)
    taken = [around(x, y, 6) for x, y in spots]
    for point, (x, y) in zip(scaling.points, spots, strict=True):
        if point.num_runs > 1:
            drawing.line(x, plane.y(point.low), x, plane.y(point.high), "whisker")
        drawing.circle(x, y, 5, "compute")
    # The smallest size is 100 % of the ideal by definition.
    for point, at in list(zip(scaling.points, spots, strict=True))[1:]:
        text = f"{percent(point.efficiency)} of ideal"
        label(drawing, text, at=at, plane=plane, taken=taken, lines=lines, css="")
    at = plane.at(last.size, scaling.ideal(last.size))
    label(drawing, "ideal", at=at, plane=plane, taken=taken, lines=lines, css="quiet")


def _draw_cost(
    drawing: Drawing, scaling: ScalingOfRuns, *, left: float, top: float, panel: float
) -> None:
    prices = [point.usd or 0.0 for point in scaling.points]
    most_y = 1.25 * max(prices) or 1.0
    marks = ticks(most_y, at_most=5)
    plane = axes(
        drawing,
        title="Cost",
        left=left,
        top=top,
        panel=panel,
        most=(scaling.points[-1].size * 1.08, most_y),
        marks=[(mark, usd(mark) if mark else "0") for mark in marks],
        under="upwards: $ for a million samples",
    )
    _sizes(drawing, plane, scaling)
    # Were nothing lost, a sample would cost what it costs at the smallest size.
    ends = plane.at(0, prices[0]), plane.at(scaling.points[-1].size, prices[0])
    drawing.line(*ends[0], *ends[1], "ghost")
    lines: list[Box] = along(*ends)
    spots = [
        plane.at(point.size, price) for point, price in zip(scaling.points, prices, strict=True)
    ]
    for one, other in pairwise(spots):
        drawing.line(*one, *other, "front")
        lines += along(one, other)
    taken = [around(x, y, 6) for x, y in spots]
    for price, (x, y) in zip(prices, spots, strict=True):
        drawing.circle(x, y, 5, "compute")
        label(drawing, usd(price), at=(x, y), plane=plane, taken=taken, lines=lines, css="")


def _sizes(drawing: Drawing, plane: Plane, scaling: ScalingOfRuns) -> None:
    for size in _thinned([point.size for point in scaling.points], plane):
        x = plane.x(size)
        drawing.text(x, plane.floor + 17, str(size), css="quiet", size=12, anchor="middle")
    drawing.text(plane.right, plane.floor + 36, scaling.what, css="quiet", size=12, anchor="end")


def _thinned(sizes: Sequence[int], plane: Plane) -> list[int]:
    """Returns those that have room next to each other; the largest always has."""
    shown: list[int] = []
    # From the largest on: small sizes (1, 2, 4) are those that crowd.
    for size in reversed(sizes):
        if not shown or plane.x(shown[-1]) - plane.x(size) >= 22:
            shown.append(size)
    return shown


def write_scaling(path: Path, *, scaling: ScalingOfRuns, runs: Mapping[str, Training]) -> None:
    """Writes the page of `scaling`.

    Args:
        path: The HTML file, replaced in one go.
        scaling: What is drawn.
        runs: Runs by folder, as they were named.

    Raises:
        UsageError: If the file cannot be written.
    """
    filled = templates()
    filled.filters.update(digits=partial(digits, figures=3), percent=percent, usd=usd)
    page = filled.get_template("scaling.html.jinja").render(
        scaling=scaling,
        headline=headline(scaling),
        wide=draw_scaling(scaling, width=WIDE, name="scaling-wide"),
        narrow=draw_scaling(scaling, width=NARROW, name="scaling-narrow"),
        runs=[(name, _words(training)) for name, training in runs.items()],
        names=shlex.join(runs),
    )
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


def headline(scaling: ScalingOfRuns) -> str:
    """Says what the largest size gives over the smallest."""
    first, last = scaling.points[0], scaling.points[-1]
    faster = last.samples_per_second / first.samples_per_second
    return (
        f"{last.size} {scaling.what}: {digits(faster, 3)} times the samples per second of"
        f" {first.size}, {percent(last.efficiency)} of the ideal"
    )


def _words(training: Training) -> str:
    hosts = " + ".join(
        f"{group.count} x {group.instance_type}"
        + (f" ({group.processes_per_host} processes each)" if group.processes_per_host else "")
        for group in training.groups
    )
    measured = training.measured
    steps = f", {measured.steps} steps" if measured else ""
    return f"{hosts}, {training.strategy}, {training.engine}{steps}"
