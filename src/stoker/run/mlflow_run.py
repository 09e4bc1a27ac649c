"""Runs of commands in MLflow, and the line on the result."""

import os
from dataclasses import replace

from stoker.platforms.base import JobSpec
from stoker.records import TrackingSettings
from stoker.records.platforms import info_of
from stoker.terminal import say
from stoker.tracking import TrackedRecords, TrackedRun, handed, kept, started

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
    records: TrackedRecords,
    *,
    is_stopped: bool = False,
    quiet: bool,
) -> str:
    """Writes a run's records to MLflow, where the workload names one; returns its page's address.

    Args:
        tracking: The workload's settings; without a server nothing is written.
        records: The run, and what it left.
        is_stopped: Whether the process was told to end: then there is little time.
        quiet: Whether nothing is printed.
    """
    if not tracking.mlflow:
        return ""
    workload_sha256 = None
    if records.training:
        workload_sha256 = records.training.workload_sha256
    timeout = None
    if is_stopped:
        timeout = min(_STOPPED_SECONDS, tracking.timeout_seconds)
    tags = _tags(workload_sha256)
    tracked = kept(tracking, records, tags=tags, environ=os.environ, timeout=timeout)
    _say(tracked, without="nothing was kept there", quiet=quiet)
    return tracked.url


def _tags(workload_sha256: str | None) -> dict[str, str]:
    from stoker import __version__

    tags = {"stoker_version": __version__, "stoker_workload_sha256": workload_sha256}
    return {name: value for name, value in tags.items() if value}


def _say(tracked: TrackedRun, *, without: str, quiet: bool) -> None:
    if tracked.trouble and tracked.run_id:
        say(f"mlflow: the run is there, but {tracked.trouble}", quiet=quiet)
    elif tracked.trouble:
        say(f"mlflow: {without}: {tracked.trouble}", quiet=quiet)
    else:
        say(f"mlflow: {tracked.url or f'run {tracked.run_id}'}", quiet=quiet)
