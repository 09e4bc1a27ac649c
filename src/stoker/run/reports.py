"""HTML reports of a run's folder, or of a decision alone."""

import platform as machine
import sys
from importlib import metadata
from pathlib import Path

from stoker.errors import UsageError
from stoker.logs import now_utc
from stoker.records import Decision, Evaluation, Profile, Training, Workload, read_json
from stoker.records.base import RecordT
from stoker.units import size

BAD_SAMPLES = "bad_samples.csv"


def report_of_run(
    run_dir: Path,
    *,
    workload: Workload | None = None,
    command: str | None = None,
    failure: str | None = None,
) -> Path:
    """Writes report.html from the files of a run, and returns its path.

    By default the workload is that in the folder. `failure` is an error that is in no record.

    Args:
        run_dir: Folder of the run.
        workload: By default the one in that folder.
        command: The command line that made the run.
        failure: An error that is in no record.
    """
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
    facts = environment()
    if command:
        facts["command"] = command
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
            bad_samples_file=existing(run_dir / BAD_SAMPLES),
            environment=facts,
            log_files=sorted((run_dir / "logs").glob("*.log")),
            failure=failure,
        ),
    )
    return file


def bad_samples_line(run_dir: Path) -> str:
    """Returns what a terminal says of a run's bad samples; empty: it had none."""
    from stoker.report.bad_sample_rows import bad_sample_story

    training = found_in(run_dir / "training.json", Training)
    file = existing(run_dir / BAD_SAMPLES)
    story = bad_sample_story(training, file=file)
    if story is None:
        return ""
    return f"{run_dir.name}: {story.line}; see {file or BAD_SAMPLES}"


def report_of_decision(
    file: Path, *, workload: Workload, profile: Profile, decision: Decision
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
        "memory": size(psutil.virtual_memory().total),
    }


def found_in(file: Path, kind: type[RecordT]) -> RecordT | None:
    if file.is_file():
        return read_json(file, kind)
    return None


def existing(file: Path) -> Path | None:
    if file.is_file():
        return file
    return None


def timeline_of(training: Training | None, *, folder: Path) -> Path | None:
    if training and training.measured and training.measured.timeline_file:
        return existing(folder / training.measured.timeline_file)
    return None
