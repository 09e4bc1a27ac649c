"""The train component runs a workload on a chosen cluster and records what it did."""

import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.catalog import Catalog
from stoker.errors import StokerError, UsageError
from stoker.logs import now_utc, parse_line
from stoker.platforms.base import JobEnd, JobSpec, LogLine, ObservedRun, Platform, Run
from stoker.records import (
    Decision,
    Event,
    Group,
    Job,
    Profile,
    Training,
    Workload,
    read_json,
    sha256_of,
    write_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProgress:
    """The progress of a run.

    Attributes:
        steps: Steps done.
        total_steps: Steps of the whole training, where known.
        step_seconds: Mean step after the last report.
        wait_seconds: Of it, waiting for data.
    """

    steps: int
    total_steps: int | None
    step_seconds: float
    wait_seconds: float


def progress_in(line: LogLine, *, total_steps: int | None) -> LoggedProgress | None:
    """Returns the progress that rank 0 reports in `line`, or None."""
    event = parse_line(line.text) if "progress" in line.text else None
    if event is None or event.event != "progress":
        return None
    try:
        return LoggedProgress(
            steps=int(event.values["steps"]),
            total_steps=total_steps,
            step_seconds=float(event.values["step_seconds"]),
            wait_seconds=float(event.values["wait_seconds"]),
        )
    except (KeyError, ValueError):
        return None


RequestT = TypeVar("RequestT")

_LAST_WORDS = 20
# Of a run that was stopped, for what it has left to be read.
STOPPED_SECONDS = 30.0
# In the leader's output, and in the run's folder: a profile that `stoker decide` takes.
PASSIVE_PROFILE = "passive-profile.json"


def prepare(
    *,
    workload: Workload,
    groups: Sequence[Group],
    run_dir: Path,
    decision: Decision | None = None,
    replace_dataloader: bool = False,
) -> JobSpec:
    """Returns the job that runs `workload` on `groups`.

    Raises:
        UsageError: If the decision was made for another workload.
    """
    digest = workload.digest()
    if decision and decision.workload_sha256 and decision.workload_sha256 != digest:
        raise UsageError(
            f"the decision was made for another workload ({decision.workload_sha256[:12]})",
            where=f"workload {workload.name} ({digest[:12]})",
            fix="decide again: stoker decide PROFILE --workload WORKLOAD",
        )
    return JobSpec.of(
        workload,
        groups=groups,
        run_dir=run_dir,
        replace_dataloader=replace_dataloader,
        next_best=_next_best(decision) if decision else "",
    )


def _next_best(decision: Decision) -> str:
    """Names the best feasible plan with another data type, else the next feasible one."""
    chosen = decision.plan
    others = [plan for plan in decision.plans if plan.feasible and plan.groups != chosen.groups]
    types = {group.instance_type for group in chosen.groups if group.role == "data"}
    other_type = (
        plan
        for plan in others
        if types and not types & {g.instance_type for g in plan.groups if g.role == "data"}
    )
    plan = next(other_type, next(iter(others), None))
    if plan is None:
        return ""
    words = " + ".join(f"{group.count} x {group.instance_type}" for group in plan.groups)
    if plan.predicted is None:
        return words
    step = plan.predicted.step_seconds * 1000
    return f"{words} ({step:.1f} ms a step, ${plan.predicted.usd_per_hour:.2f} an hour)"


def train(
    job: JobSpec,
    *,
    platform: Platform[RequestT],
    catalog: Catalog,
    decision: Decision | None = None,
    total_steps: int | None = None,
    on_line: Callable[[LogLine], None] | None = None,
    on_progress: Callable[[LoggedProgress], None] | None = None,
    on_stop: Callable[[Training], None] | None = None,
) -> Training:
    """Submits the job, follows it to its end and gives its record, which belongs in `job.run_dir`.

    Blocks until all hosts have ended. When the caller is interrupted (Ctrl-C, SIGTERM) the job is
    stopped first, so that nothing keeps running; then `on_stop` gets the record so far, its status
    `stopped`, and the interrupt goes on.

    Raises:
        UsageError: If the platform cannot run such a job.
        PlatformError: If the platform refuses it.
    """
    run = platform.submit(platform.plan(job))
    last_words: deque[str] = deque(maxlen=_LAST_WORDS)
    try:
        for line in run.lines():
            if line.group == job.groups[0].name:
                last_words.append(line.text)
            if on_line:
                on_line(line)
            progress = progress_in(line, total_steps=total_steps) if on_progress else None
            if progress and on_progress:
                on_progress(progress)
        end = run.wait()
    except BaseException as err:
        run.stop()
        # Not for an error: what is a KeyboardInterrupt or a signal is no Exception.
        if on_stop and not isinstance(err, Exception):
            ran = Job(platform=platform.name, name=run.name)
            on_stop(_stopped(job, run, ran=ran, catalog=catalog, decision=decision))
        raise
    finally:
        run.stop()
    load = _load(run, catalog)
    for words in load:
        if on_line:
            on_line(LogLine(group=platform.name, host="load", text=words))
    # The platform may have had to take another name than was asked for.
    ran = Job(platform=platform.name, name=run.name, url=end.job_url)
    record = _record(job, end, ran=ran, catalog=catalog, decision=decision)
    seen = tuple(Event(when=now_utc(), what=f"utilisation: {words}") for words in load)
    record = msgspec.structs.replace(record, events=(*record.events, *seen))
    if record.status == "failed" and not record.hosts:
        # Not even the launcher came to its work: its log is all there is.
        words = "\n".join([record.failure or "", *last_words]).strip()
        record = msgspec.structs.replace(record, failure=words)
    return record


def _stopped(
    job: JobSpec, run: Run, *, ran: Job, catalog: Catalog, decision: Decision | None
) -> Training:
    """Returns the record of a run that was stopped: what was measured until then."""
    ends: queue.SimpleQueue[JobEnd | StokerError] = queue.SimpleQueue()

    def wait() -> None:
        try:
            ends.put(run.wait())
        except StokerError as err:
            ends.put(err)

    # In a thread: a job that could not be stopped is not waited for by whoever pressed Ctrl-C.
    threading.Thread(target=wait, name="stopped run", daemon=True).start()
    try:
        end = ends.get(timeout=STOPPED_SECONDS)
        if isinstance(end, StokerError):
            raise end
        record = _record(job, end, ran=ran, catalog=catalog, decision=decision)
    except (StokerError, queue.Empty) as err:
        why = err.what if isinstance(err, StokerError) else "the job has not ended yet"
        seen = Event(when=now_utc(), what=f"no record was left: {why}")
        record = Training(
            status="stopped",
            workload_sha256=job.workload_sha256,
            groups=job.groups,
            strategy=job.strategy.name,
            job=ran,
            events=(seen,),
        )
    return msgspec.structs.replace(record, status="stopped", failure=None)


def _load(run: Run, catalog: Catalog) -> Sequence[str]:
    """Says how busy the hosts were, where the platform measures that."""
    if not isinstance(run, ObservedRun):
        return ()
    sizes = {each.type: (each.vcpus, each.accelerators) for each in catalog.instances}
    return run.load_words(sizes)


def _record(
    job: JobSpec,
    end: JobEnd,
    *,
    ran: Job,
    catalog: Catalog,
    decision: Decision | None,
) -> Training:
    written = _written_by_leader(job, end, ran=ran)
    measured = written.measured
    if measured and measured.steps:
        usd_per_hour = catalog.usd_per_hour(job.groups)
        plan = decision.plan if decision else None
        if usd_per_hour is None and plan and plan.predicted and plan.groups == job.groups:
            # In the pod of a pipeline's step the local platform knows no price of its host.
            usd_per_hour = plan.predicted.usd_per_hour
        if usd_per_hour is not None:
            usd = measured.step_seconds * usd_per_hour / 3600 * 1000
            measured = msgspec.structs.replace(measured, usd_per_1000_steps=usd)
    if measured and measured.timeline_file and end.output_dir:
        measured = msgspec.structs.replace(
            measured, timeline_file=_keep(end.output_dir / "stoker" / measured.timeline_file, job)
        )
    if end.output_dir:
        _keep_feed(end.output_dir / "stoker" / "feed.csv", job)
        _keep_passive(end.output_dir / "stoker" / PASSIVE_PROFILE, job)
    return msgspec.structs.replace(
        written,
        workload_sha256=job.workload_sha256,
        # The platform saw more than the leader could write: its end counts.
        status=end.status,
        exit_code=end.exit_code if written.exit_code is None else written.exit_code,
        failure=written.failure or end.failure,
        decision_id=sha256_of(decision)[:12] if decision else None,
        groups=job.groups,
        measured=measured,
        data_group_release_seconds=end.data_group_release_seconds,
        model_uri=end.model_uri or written.model_uri,
        job=ran,
    )


def _keep(timeline: Path, job: JobSpec) -> str | None:
    """Copies the leader's timeline next to the record; gives its name there."""
    if not timeline.is_file():
        return None
    shutil.copyfile(timeline, job.run_dir / "timeline.csv")
    return "timeline.csv"


def _keep_feed(file: Path, job: JobSpec) -> None:
    """Copies what the leader wrote down of the feed; what an earlier try left is of another run."""
    kept = job.run_dir / "feed.csv"
    kept.unlink(missing_ok=True)
    if file.is_file():
        shutil.copyfile(file, kept)


def _keep_passive(file: Path, job: JobSpec) -> None:
    """Keeps what the run says of its own steps; what an earlier try left is of another run."""
    kept = job.run_dir / PASSIVE_PROFILE
    kept.unlink(missing_ok=True)
    if not file.is_file():
        return
    found = read_json(file, Profile)
    what = {**found.what, "command": [*job.command]}
    found = msgspec.structs.replace(found, workload_sha256=job.workload_sha256, what=what)
    write_json(kept, found)


def _written_by_leader(job: JobSpec, end: JobEnd, *, ran: Job) -> Training:
    file = end.output_dir / "stoker" / "training.json" if end.output_dir else None
    if file and file.is_file():
        return read_json(file, Training)
    lost = Event(when=now_utc(), what="the dnn leader ended without writing its record")
    return Training(
        status="failed",
        groups=job.groups,
        strategy=job.strategy.name,
        job=ran,
        events=(lost,),
    )
