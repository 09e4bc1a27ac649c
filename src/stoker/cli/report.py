"""`stoker report` writes the HTML report of a run, or compares several runs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.options import AsJson
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Json


def report_verb(
    runs: list[Path],
    *,
    scaling: bool = False,
    compare: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Write the HTML report of a run again, or compare several runs.

    `stoker report FOLDER` writes FOLDER/report.html. `stoker report scaling FOLDER FOLDER` prints
    a table of throughput and cost over cluster sizes.

    Args:
        runs ([scaling] FOLDER...): Folders of runs, such as runs/ID.
        scaling: Compare the runs by cluster size; the same as the word scaling before them.
        compare (FOLDER): Print how the run differs from this one: code, data, image.

    Examples:
        stoker report runs/ID
        stoker report scaling runs/*
        stoker report runs/ID --compare runs/OTHER
    """
    from stoker.run.reports import bad_samples_line, report_of_run

    first, *others = runs
    # A folder of that name is a run like any other.
    if others and str(first) == "scaling" and not first.exists():
        runs = others
        scaling = True
    if scaling:
        report_scaling(runs, as_json=as_json)
        return
    if compare:
        if len(runs) != 1:
            raise UsageError("--compare takes one run", fix="stoker report ID --compare OTHER")
        print(compared(runs[0], compare, as_json=as_json))
        return
    files: list[Json] = [str(report_of_run(run)) for run in runs]
    for line in filter(None, map(bad_samples_line, runs)):
        print(line, file=sys.stderr)
    if as_json:
        print(json.dumps({"reports": files}))
    else:
        print("\n".join(map(str, files)))


def report_scaling(runs: Sequence[Path], *, as_json: bool) -> None:
    from stoker.records import Training, read_json
    from stoker.report import scaling_of_runs

    records_of_runs = {}
    for run in runs:
        if (run / "training.json").is_file():
            records_of_runs[str(run)] = read_json(run / "training.json", Training)
        else:
            # Not an error: `runs/*` holds profiles and broken runs, too.
            print(f"left out: {run} has no training.json", file=sys.stderr)
    if not records_of_runs:
        raise UsageError("no training.json in these folders", where="report scaling", fix="ls runs")
    found = scaling_of_runs(records_of_runs)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print("\n".join(found.table()))


def _record_file(run: Path) -> Path:
    """Returns the file with a run's record: in its folder, or the named file itself."""
    if run.is_dir():
        return run / "training.json"
    return run


def compared(run: Path, other: Path, *, as_json: bool) -> str:
    """Returns what differs in the lineage of two runs (folders, or their training.json)."""
    from stoker.records import Training, read_json

    one, two = (read_json(_record_file(folder), Training) for folder in (run, other))
    found = one.lineage.differences(two.lineage)
    if as_json:
        return json.dumps({name: {"run": here, "other": there} for name, here, there in found})
    return (
        "\n".join(
            f"{name}: {here or 'not known'} | {there or 'not known'}" for name, here, there in found
        )
        or "no difference is known"
    )
