"""The scaling report: one HTML file over several runs."""

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stoker.records import Training, write_text
from stoker.report.pictures import NARROW, WIDE
from stoker.report.quantities import digits, percent, usd
from stoker.report.scaling import ScalingOfRuns
from stoker.report.scaling_picture import draw_scaling
from stoker.report.templating import templates


def write_scaling(path: Path, *, scaling: ScalingOfRuns, runs: Mapping[str, Training]) -> None:
    """Writes the page of `scaling`.

    Args:
        path: The HTML file, replaced in one go.
        scaling: What is drawn.
        runs: By folder, as they were named.

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
    """What the largest size gives over the smallest."""
    first, last = scaling.points[0], scaling.points[-1]
    faster = last.samples_per_second / first.samples_per_second
    return (
        f"{last.size} {scaling.what}: {digits(faster, 3)} times the samples a second of"
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
