"""The folders of runs, runs/NAME-DATE-TIME, and their reports; the table of how runs scale."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run.

    Attributes:
        report: None: no report is written.
        profile_folder: Where the steps of the profile are.
    """

    profile: Path
    decision: Path
    training: Path
    evaluation: Path
    report: Path | None
    profile_folder: Path

    @classmethod
    def of(cls, folder: Path) -> "RunFiles":
        profile, decision, training, evaluation = (folder / name for name in FILES)
        return cls(
            profile=profile,
            decision=decision,
            training=training,
            evaluation=evaluation,
            report=folder / "report.html",
            profile_folder=folder / "profile",
        )


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


def report_of_run(folder: Path) -> Path:
    """Writes the report of a run's folder; returns its path."""
    files = RunFiles.of(folder)
    workload = found_in(folder / "workload.json", Workload)
    if workload is None:
        raise UsageError(f"no run in {folder}", where="no workload.json there", fix="ls runs")
    write_report_of(files, workload=workload)
    return folder / "report.html"


def write_report_of(
    files: RunFiles, *, workload: Workload, command: str = "", failure: str = ""
) -> None:
    """Writes the report of a run, which may have ended early; nothing if it has no file.

    Args:
        files: Of the run.
        workload: Of the run.
        command: The command line that made the run.
        failure: An error that is in no record.
    """
    if files.report is None:
        return
    # Imported here, with the templates of the page.
    from stoker import __version__
    from stoker.figures.intervals import FILE
    from stoker.report import ReportedRun, write_report

    training = found_in(files.training, Training)
    facts = {"when": now_utc(), "stoker": __version__, "command": command}
    timeline = (training and training.measured and training.measured.timeline_file) or ""
    before = files.profile_folder / "-"
    write_report(
        files.report,
        ReportedRun(
            run_id=training.job.name if training else files.report.parent.name,
            workload=workload,
            profile=found_in(files.profile, Profile),
            decision=found_in(files.decision, Decision),
            training=training,
            evaluation=found_in(files.evaluation, Evaluation),
            before_timeline=file_beside(before, "baseline-timeline.csv"),
            after_timeline=file_beside(files.training, timeline) if timeline else None,
            intervals=file_beside(files.training, FILE),
            environment=facts,
            failure=failure or None,
        ),
    )


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
