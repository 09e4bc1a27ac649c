"""Runs of commands in MLflow, and the line on the result."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stoker.platforms.base import JobSpec
from stoker.records import Evaluation, TrackingSettings, Training
from stoker.records.platforms import info_of
from stoker.terminal import say
from stoker.tracking import TrackedRun, handed, kept, started

# After Ctrl-C or SIGTERM: a pod has 30 s to end.
_STOPPED_SECONDS = 15.0


def start_tracking(job: JobSpec, *, platform: str, quiet: bool) -> JobSpec:
    """Starts the job's run in MLflow; returns the job with the variables by which it is found.

    Args:
        job: The job that is about to start.
        platform: Name of its platform, which may make the run itself.
        quiet: Whether nothing is printed.
    """
    info = info_of(platform)
    # In its managed MLflow the platform makes the run itself.
    if not job.tracking.mlflow or (job.tracking.is_managed and info.has_mlflow):
        return job
    tracked = started(
        job.tracking, run=job.run_name, tags=_tags(job.settings.workload_sha256), environ=os.environ
    )
    _say(tracked, without="the run continues without it", quiet=quiet)
    variables = handed(job.tracking, tracked, is_this_machine=info.is_this_machine)
    return replace(job, environment={**variables, **job.environment})


def keep_tracked(
    tracking: TrackingSettings,
    *,
    run: str,
    training: Training | None,
    evaluation: Evaluation | None = None,
    run_id: str | None = None,
    files: Sequence[Path] = (),
    is_refused: bool = False,
    is_stopped: bool = False,
    quiet: bool,
) -> str:
    """Writes a run's records to MLflow, where the workload names one; returns its page's address.

    There is little time for it if the process was asked to end (`is_stopped`).

    Args:
        tracking: The workload's settings; without a server nothing is written.
        run: Name of the run.
        training: Its training; None: it left no record.
        evaluation: Its evaluation, if it was judged.
        run_id: Id of the run in MLflow; None: it is found by its name.
        files: Files to keep with it; those that are missing are left out.
        is_refused: Whether no job was started, so that an earlier end stays as it is.
        is_stopped: Whether the process was told to end: then there is little time.
        quiet: Whether nothing is printed.
    """
    if not tracking.mlflow:
        return ""
    tracked = kept(
        tracking,
        run=run,
        tags=_tags(training.workload_sha256 if training else None),
        training=training,
        evaluation=evaluation,
        run_id=run_id,
        files=files,
        is_refused=is_refused,
        environ=os.environ,
        timeout=min(_STOPPED_SECONDS, tracking.timeout_seconds) if is_stopped else None,
    )
    _say(tracked, without="nothing was kept there", quiet=quiet)
    return tracked.url


def _tags(workload_sha256: str | None) -> dict[str, str]:
    from stoker import __version__

    tags = {"stoker_version": __version__, "stoker_workload_sha256": workload_sha256}
    return {name: value for name, value in tags.items() if value}


def _say(tracked: TrackedRun, *, without: str, quiet: bool) -> None:
    if tracked.trouble:
        part = "the run is there, but" if tracked.run_id else f"{without}:"
        say(f"mlflow: {part} {tracked.trouble}", quiet=quiet)
    else:
        say(f"mlflow: {tracked.url or f'run {tracked.run_id}'}", quiet=quiet)
