"""A report is made of the files of a run, or of records."""

import platform as machine
import sys
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil

from stoker import __version__
from stoker.errors import UsageError
from stoker.logs import now_utc
from stoker.records import (
    Decision,
    Evaluation,
    Profile,
    Record,
    Training,
    Workload,
    read_json,
)
from stoker.report import write_report

_RecordT = TypeVar("_RecordT", bound=Record)


def report_of_run(
    run_dir: Path,
    *,
    workload: Workload | None = None,
    command: str | None = None,
    failure: str | None = None,
) -> Path:
    """Writes RUN/report.html from the files of a run, and returns its path.

    Args:
        run_dir: The run's folder.
        workload: The workload; None: as in the folder.
        command: Command that repeats the run.
        failure: An error that is in no record.

    Raises:
        UsageError: If the folder holds no run.
    """
    if workload is None:
        if not (run_dir / "workload.json").is_file():
            if (run_dir / "training.json").is_file():
                raise UsageError(
                    f"{run_dir} has no report: `stoker run` makes one, `stoker train` does not",
                    where="no workload.json there",
                    fix=f"see {run_dir / 'training.json'}, or: stoker report scaling {run_dir}",
                )
            raise UsageError(f"no run in {run_dir}", where="no workload.json there", fix="ls runs")
        workload = read_json(run_dir / "workload.json", Workload)
    training = _read(run_dir / "training.json", Training)
    file = run_dir / "report.html"
    write_report(
        file,
        run_id=run_dir.name,
        workload=workload,
        profile=_read(run_dir / "profile.json", Profile),
        decision=_read(run_dir / "decision.json", Decision),
        training=training,
        evaluation=_read(run_dir / "evaluation.json", Evaluation),
        before_timeline=_existing(run_dir / "profile" / "baseline-timeline.csv"),
        after_timeline=_timeline(run_dir / "training.json", training),
        feed_file=_existing(run_dir / "feed.csv"),
        environment={**environment(), **({"command": command} if command else {})},
        log_files=sorted((run_dir / "logs").glob("*.log")),
        failure=failure,
    )
    return file


def report_of_records(
    file: Path,
    *,
    workload: Workload,
    profile: Profile,
    decision: Decision,
    training: Training,
    evaluation: Evaluation,
    training_file: Path,
    profile_file: Path,
) -> None:
    """Writes a report from records that may be in any folder."""
    write_report(
        file,
        run_id=training.job.name,
        workload=workload,
        profile=profile,
        decision=decision,
        training=training,
        evaluation=evaluation,
        before_timeline=_existing(profile_file.with_name("baseline-timeline.csv")),
        after_timeline=_timeline(training_file, training),
        feed_file=_existing(training_file.with_name("feed.csv")),
        environment=environment(),
    )


def report_of_decision(
    file: Path, *, workload: Workload, profile: Profile, decision: Decision
) -> None:
    """Writes a report of a decision, before anything has run."""
    write_report(
        file,
        run_id="none yet",
        workload=workload,
        profile=profile,
        decision=decision,
        training=None,
        evaluation=None,
        before_timeline=None,
        after_timeline=None,
        environment=environment(),
        is_planned=True,
    )


def environment() -> dict[str, str]:
    """Returns versions and machine, as the report prints them."""
    packages = {}
    for name in ("torch", "numpy", "pyzmq"):
        try:
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


def _read(file: Path, kind: type[_RecordT]) -> _RecordT | None:
    return read_json(file, kind) if file.is_file() else None


def _existing(file: Path) -> Path | None:
    return file if file.is_file() else None


def _timeline(training_file: Path, training: Training | None) -> Path | None:
    if training is None or training.measured is None or not training.measured.timeline_file:
        return None
    return _existing(training_file.parent / training.measured.timeline_file)
