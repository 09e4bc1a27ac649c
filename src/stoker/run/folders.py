"""The folders of runs, runs/NAME-DATE-TIME, and their reports; the table of how runs scale."""

import os
import platform as machine
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import UsageError
from stoker.logs import now_utc
from stoker.platforms.base import check_run_name
from stoker.records import Decision, Evaluation, Profile, Training, Workload, read_json
from stoker.records.base import RecordT
from stoker.records.training import file_beside
from stoker.records.workload import refuse_foreign
from stoker.terminal import print_result

RUNS = Path("runs")
RECORD = "training.json"
# Each step leaves a record.
FILES = ("profile.json", "decision.json", RECORD, "evaluation.json")


def run_dir_of(workload: Workload, *, name: str | None = None, kind: str = "") -> Path:
    """Makes the folder of a run, in a temporary folder where this folder cannot be written.

    Args:
        workload: Its name comes first, then its platform's `name_end`.
        name: Name of the run, whose folder an earlier attempt may have made; None: NAME-DATE-TIME.
        kind: What follows the workload's name, such as profile; empty: nothing.
    """
    if name:
        check_run_name(name, most=63)
    begin = f"{workload.name}{workload.platform_info.name_end}{kind}".removesuffix("-")
    runs = RUNS
    if not os.access(RUNS if RUNS.exists() else Path(), os.W_OK):
        # A pipeline's step may not run as the image's user.
        runs = Path(tempfile.gettempdir()) / RUNS
    while True:
        folder = runs / (name or f"{begin}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            folder.mkdir(parents=True, exist_ok=bool(name))
            return folder
        except FileExistsError:
            # Two runs that begin in the same second get two folders.
            time.sleep(0.1)


def latest_run_dir(workload: Workload, *, needs: Sequence[str]) -> Path:
    """Returns the newest run of the same workload that has the files in `needs`.

    Raises:
        UsageError: There is none; or of the newest, what differs from the workload.
    """
    folders = [file.parent for file in RUNS.glob(f"{workload.name}-*/workload.json")]
    whole = [each for each in folders if all((each / name).is_file() for name in needs)]
    if not whole:
        raise UsageError(
            f"no earlier run of this workload has {', '.join(needs)}",
            where=f"folder {RUNS.resolve()}, workload {workload.name}",
            fix="leave --from out",
        )
    newest = max(whole, key=lambda each: (each / "workload.json").stat().st_mtime)
    ran = read_json(newest / "workload.json", Workload)
    refuse_foreign(
        "profile",
        ran.profile_keys(),
        workload=workload,
        where=str(newest),
        fix="leave --from out: what was changed needs a new profile",
    )
    return newest


def found_in(file: Path, kind: type[RecordT]) -> RecordT | None:
    return read_json(file, kind) if file.is_file() else None


def report_of_run(
    run_dir: Path, *, workload: Workload | None = None, command: str = "", failure: str = ""
) -> Path:
    """Writes report.html from the files of a run, which may have ended early; returns its path.

    Args:
        run_dir: Folder of the run.
        workload: By default the one in that folder.
        command: The command line that made the run.
        failure: An error that is in no record.
    """
    workload = workload or found_in(run_dir / "workload.json", Workload)
    if workload is None:
        raise UsageError(f"no run in {run_dir}", where="no workload.json there", fix="ls runs")
    return write_report_of(
        run_dir / "report.html",
        workload=workload,
        files=[run_dir / name for name in FILES],
        profile_folder=run_dir / "profile",
        command=command,
        failure=failure,
    )


def write_report_of(
    file: Path,
    *,
    workload: Workload,
    files: Sequence[Path],
    profile_folder: Path,
    training: Training | None = None,
    command: str = "",
    failure: str = "",
) -> Path:
    """Writes the report of a run's records, and of the files beside them; returns its path.

    Args:
        file: The HTML file.
        workload: Of the run.
        files: Profile, decision, training and evaluation; missing ones are left out.
        profile_folder: Where the steps of the profile are.
        training: The record, where there is no file of it.
        command: The command line that made the run.
        failure: An error that is in no record.
    """
    # Imported here, with the templates of the page.
    from stoker import __version__
    from stoker.figures.intervals import BASELINE_FILE, FILE
    from stoker.report import ReportedRun, write_report

    profile, decision, training_file, evaluation = files
    training = training or found_in(training_file, Training)
    facts = {"when": now_utc(), "stoker": __version__, "python": machine.python_version()}
    facts["system"] = machine.platform()
    if command:
        facts["command"] = command
    timeline = training and training.measured and training.measured.timeline_file
    before = profile_folder / "-"
    write_report(
        file,
        ReportedRun(
            run_id=training.job.name if training else file.parent.name,
            workload=workload,
            profile=found_in(profile, Profile),
            decision=found_in(decision, Decision),
            training=training,
            evaluation=found_in(evaluation, Evaluation),
            before_timeline=file_beside(before, "baseline-timeline.csv"),
            after_timeline=file_beside(training_file, timeline) if timeline else None,
            before_intervals=file_beside(before, BASELINE_FILE),
            intervals=file_beside(training_file, FILE),
            environment=facts,
            failure=failure or None,
        ),
    )
    return file


def report_scaling(runs: Sequence[Path], *, as_json: bool) -> None:
    """Prints a table of throughput and cost over the cluster sizes of runs."""
    from stoker.report import rows_of_runs, table_of_runs

    records = {}
    for run in runs:
        if record := found_in(run / RECORD, Training):
            records[str(run)] = record
        else:
            # Not an error: `runs/*` holds profiles and broken runs, too.
            print(f"left out: {run} has no {RECORD}", file=sys.stderr)
    if not records:
        raise UsageError(f"no {RECORD} in these folders", where="report", fix="ls runs")
    rows = rows_of_runs(records)
    print_result([{**row} for row in rows], table_of_runs(rows), as_json=as_json)
