"""`stoker report` writes the HTML report of a run, or compares several runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, writable_file
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Json


def report_verb(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="[scaling] RUN", help="Folders of runs, such as runs/ID."),
    ],
    *,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Same as the word scaling before the runs."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="File for the page of `report scaling`.",
            metavar="F",
            callback=writable_file,
        ),
    ] = Path("scaling.html"),
    as_json: AsJson = False,
) -> None:
    """Writes the HTML report of a run again, or compares several runs.

    `stoker report RUN` writes RUN/report.html. `stoker report scaling RUN RUN` writes one page on
    throughput and cost over cluster sizes.
    """
    from stoker.cli.report_files import report_of_run

    first, *others = runs
    if others and str(first) == "scaling" and not first.exists():
        runs, scaling = others, True
    if scaling:
        report_scaling(runs, out=out, as_json=as_json)
        return
    files: list[Json] = [str(report_of_run(run)) for run in runs]
    print(json.dumps({"reports": files}) if as_json else "\n".join(map(str, files)))


def report_scaling(runs: Sequence[Path], *, out: Path, as_json: bool) -> None:
    """Writes one page over all runs."""
    from stoker.records import Training, read_json
    from stoker.report import headline, scaling_of_runs, write_scaling

    trainings = {}
    for run in runs:
        if (run / "training.json").is_file():
            trainings[str(run)] = read_json(run / "training.json", Training)
        else:
            print(f"left out: {run} has no training.json", file=sys.stderr)
    if not trainings:
        raise UsageError("no training.json in these folders", where="report scaling", fix="ls runs")
    scaling = scaling_of_runs(trainings)
    write_scaling(out, scaling=scaling, runs=trainings)
    if as_json:
        points: list[Json] = [
            {
                "size": point.size,
                "samples_per_second": point.samples_per_second,
                "efficiency": point.efficiency,
                "usd_per_million_samples": point.usd,
                "runs": point.num_runs,
            }
            for point in scaling.points
        ]
        notes: list[Json] = list(scaling.notes)
        document = {"what": scaling.what, "points": points, "notes": notes, "report": str(out)}
        print(json.dumps(document))
        return
    print(headline(scaling))
    print(
        f"{scaling.what:<18} {'samples/s':>12} {'of the ideal':>13} {'$/million':>12} {'runs':>5}"
    )
    for point in scaling.points:
        ideal = "" if point.efficiency is None else f"{point.efficiency:.0%}"
        price = "not known" if point.usd is None else f"{point.usd:.4g}"
        print(
            f"{point.size:<18} {point.samples_per_second:>12.1f} {ideal:>13} {price:>12}"
            f" {point.num_runs:>5}"
        )
    for note in scaling.notes:
        print(note)
    print(out)
