"""The profile component: submits the profiled job, follows it, and fetches its profile."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.errors import PlatformError, UsageError
from stoker.host.processes import git_state
from stoker.logs import now_utc
from stoker.platforms.base import JobEnd, JobSpec, LogLine, Platform, Run, leave_or_stop
from stoker.profile.leader import FILE, TIMELINE_FILE, keep_file
from stoker.profile.unmeasured import read_reason
from stoker.records import Cluster, Group, Profile, Workload, read_json

RequestT = TypeVar("RequestT")


def profile(
    workload: Workload,
    *,
    platform: Platform[RequestT],
    run_dir: Path,
    cluster: Cluster | None = None,
    name: str | None = None,
    may_go_on: bool = False,
    on_line: Callable[[LogLine], None] = lambda line: None,
    verdict_on_interrupt: bool = True,
) -> Profile:
    """Runs the workload's command on today's cluster in profiling mode; returns the profile.

    Blocks for about `workload.profile.budget_seconds` after the first batch; the job's leader stops
    the command 120 s later, and writes the profile.
    Interrupted (KeyboardInterrupt), it stops the job and gives the verdict so far, if there is one;
    after SIGTERM or an error it leaves a job that the next attempt can adopt (`may_go_on`). Copies
    the steps as is to `run_dir`/baseline-timeline.csv.

    Args:
        cluster: Today's; absent: the workload's own.
        name: Name of the job; None: the name of `run_dir`.
        may_go_on: Whether a later attempt can follow the job, so that an error does not stop it.
        on_line: Called with each line of the job's log.
        verdict_on_interrupt: False: an interrupt is raised again, even if there is a verdict.

    Raises:
        UsageError: If the workload names no cluster, or the script never read from a DataLoader, or
            not in time, or ended before enough was measured.
        WorkloadError: If the command failed, with its traceback.
        PlatformError: If the platform refused or lost the job.
    """
    cluster = cluster or workload.cluster
    if cluster is None:
        raise UsageError(
            "the workload has no cluster to profile on",
            where=f"workload {workload.name}, key cluster.dnn",
            fix="add cluster: {dnn: {instance_type: TYPE, count: 1}}",
        )
    group = cluster.dnn
    job = JobSpec.of(
        workload,
        groups=(Group.of_today(group),),
        run_dir=run_dir,
        name=name,
        profile=workload.profile,
    )
    run = platform.submit(platform.plan(job))
    end, interrupt = _follow(run, on_line=on_line, may_go_on=may_go_on)
    # Without its files a run looks like one that measured nothing.
    if end.unfetched and not interrupt:
        words = "the job has ended, but what it measured could not be read"
        raise PlatformError(words, where=end.unfetched, fix="see its log, and profile again")
    output = end.output_dir / "stoker" if end.output_dir else None
    if output is None or not (output / FILE).is_file():
        raise interrupt or read_reason(output, exit_code=end.exit_code, failure=end.failure)
    if interrupt and not verdict_on_interrupt:
        raise interrupt
    keep_file(output / TIMELINE_FILE, run_dir / TIMELINE_FILE)
    record = read_json(output / FILE, Profile)
    return msgspec.structs.replace(
        record,
        workload_keys=workload.profile_keys(today=group),
        what={**record.what, "command": [*workload.command], **git_state(Path.cwd())},
        measured_at=now_utc(),
    )


def _follow(
    run: Run, *, on_line: Callable[[LogLine], None], may_go_on: bool
) -> tuple[JobEnd, KeyboardInterrupt | None]:
    """Follows a profile job to its end; returns it, and the interrupt that stopped it, if any.

    Args:
        on_line: Called with each line of the job's log.
        may_go_on: A later attempt can follow the job, so that an error does not stop it.
    """
    try:
        for line in run.lines():
            on_line(line)
        return run.wait(), None
    except KeyboardInterrupt as err:
        run.stop()
        return run.wait(), err
    except BaseException as err:
        if may_go_on:
            leave_or_stop(run, err)
        raise
    finally:
        run.stop()
