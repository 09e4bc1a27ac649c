"""`stoker report` writes the HTML report of a run, or compares several runs."""

import json
import platform as machine
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.options import AsJson
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Decision, Json, Profile, Training, Workload
    from stoker.records.base import RecordT


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
    first, *others = runs
    # A folder of that name is a run like any other.
    if others and str(first) == "scaling" and not first.exists():
        runs, scaling = others, True
    if scaling:
        report_scaling(runs, as_json=as_json)
        return
    if compare:
        if len(runs) != 1:
            raise UsageError("--compare takes one run", fix="stoker report ID --compare OTHER")
        print(compared(runs[0], compare, as_json=as_json))
        return
    files: list[Json] = [str(report_of_run(run)) for run in runs]
    print(json.dumps({"reports": files}) if as_json else "\n".join(map(str, files)))


def report_scaling(runs: Sequence[Path], *, as_json: bool) -> None:
    from stoker.records import Training, read_json
    from stoker.report import scaling_of_runs

    trainings = {}
    for run in runs:
        if (run / "training.json").is_file():
            trainings[str(run)] = read_json(run / "training.json", Training)
        else:
            # Not an error: `runs/*` holds profiles and broken runs, too.
            print(f"left out: {run} has no training.json", file=sys.stderr)
    if not trainings:
        raise UsageError("no training.json in these folders", where="report scaling", fix="ls runs")
    found = scaling_of_runs(trainings)
    print(json.dumps(asdict(found)) if as_json else "\n".join(found.table()))


def compared(run: Path, other: Path, *, as_json: bool) -> str:
    """Returns what differs in the lineage of two runs (folders, or their training.json)."""
    from stoker.records import Training, read_json

    one, two = (
        read_json(each / "training.json" if each.is_dir() else each, Training)
        for each in (run, other)
    )
    found = one.lineage.differences(two.lineage)
    if as_json:
        return json.dumps({name: {"run": here, "other": there} for name, here, there in found})
    return (
        "\n".join(
            f"{name}: {here or 'not known'} | {there or 'not known'}" for name, here, there in found
        )
        or "no difference is known"
    )


def report_of_run(
    run_dir: Path,
    *,
    workload: "Workload | None" = None,
    command: str | None = None,
    failure: str | None = None,
) -> Path:
    """Writes report.html from the files of a run, and returns its path.

    By default the workload is that in the folder. `failure` is an error that is in no record.
    """
    from stoker.records import Decision, Evaluation, Profile, Training, Workload, read_json
    from stoker.report import ReportedRun, write_report

    if workload is None:
        if not (run_dir / "workload.json").is_file():
            raise UsageError(f"no run in {run_dir}", where="no workload.json there", fix="ls runs")
        workload = read_json(run_dir / "workload.json", Workload)
    # A run that ended early has a report, too.
    profile = found_in(run_dir / "profile.json", Profile)
    decision = found_in(run_dir / "decision.json", Decision)
    training = found_in(run_dir / "training.json", Training)
    evaluation = found_in(run_dir / "evaluation.json", Evaluation)
    if training and decision and training.decision_id is None:
        # The other records are of an earlier run of this name.
        profile = decision = evaluation = None
    file = run_dir / "report.html"
    write_report(
        file,
        ReportedRun(
            run_id=run_dir.name,
            workload=workload,
            profile=profile,
            decision=decision,
            training=training,
            evaluation=evaluation,
            before_timeline=existing(run_dir / "profile" / "baseline-timeline.csv"),
            after_timeline=timeline_of(training, folder=run_dir),
            feed_file=existing(run_dir / "feed.csv"),
            before_gpus=existing(run_dir / "profile" / "baseline-gpu.csv"),
            after_gpus=existing(run_dir / "gpu.csv"),
            environment={**environment(), **({"command": command} if command else {})},
            log_files=sorted((run_dir / "logs").glob("*.log")),
            failure=failure,
        ),
    )
    return file


def report_of_decision(
    file: Path, *, workload: "Workload", profile: "Profile", decision: "Decision"
) -> None:
    from stoker.report import ReportedRun, write_report

    write_report(
        file,
        ReportedRun(
            run_id="none yet",
            workload=workload,
            profile=profile,
            decision=decision,
            training=None,
            evaluation=None,
            environment=environment(),
            is_planned=True,
        ),
    )


def environment() -> dict[str, str]:
    import psutil

    from stoker import __version__
    from stoker.logs import now_utc

    packages = {}
    for name in ("torch", "numpy", "pyzmq"):
        try:
            # Importing torch would take seconds.
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "when": now_utc(),
        "stoker": __version__,
        "python": machine.python_version(),
        **packages,
        "system": f"{machine.system()} {machine.release()} {machine.machine()}",
        "cores": str(len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else ""),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }


def found_in(file: Path, kind: "type[RecordT]") -> "RecordT | None":
    from stoker.records import read_json

    return read_json(file, kind) if file.is_file() else None


def existing(file: Path) -> Path | None:
    return file if file.is_file() else None


def timeline_of(training: "Training | None", *, folder: Path) -> Path | None:
    file = training.measured.timeline_file if training and training.measured else None
    return existing(folder / file) if file else None
