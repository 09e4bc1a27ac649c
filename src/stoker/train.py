"""The train component runs a workload on a chosen cluster and records what it did."""

import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.catalog import Catalog
from stoker.errors import NoCapacityError, StokerError, UsageError
from stoker.logs import now_utc
from stoker.platforms.base import (
    MLFLOW_RUN,
    JobEnd,
    JobSpec,
    LogLine,
    ObservedRun,
    Platform,
    ResumableRun,
    ResumingPlatform,
    Run,
    leader_record,
    leave_or_stop,
)
from stoker.records import (
    Decision,
    Event,
    Group,
    Job,
    Profile,
    Training,
    Workload,
    bare_type,
    groups_in_words,
    read_json,
    sha256_of,
    write_json,
)
from stoker.records.decision import NOMINAL
from stoker.records.training import TrainingFacts, write_training
from stoker.records.workload import refuse_foreign, workload_keys
from stoker.text import ms, usd

RequestT = TypeVar("RequestT")

_LAST_WORDS = 20
# Of a run that was stopped, for what it has left to be read.
STOPPED_SECONDS = 30.0
# In the leader's output, and in the run's folder: a profile that `stoker decide` takes.
PASSIVE_PROFILE = "passive-profile.json"
# Between two tries of a plan for which there are no hosts.
RETRY_SECONDS = 300.0
# Of a decision: the further down, the less they pay.
MAX_PLANS = 5


def prepare(
    *,
    workload: Workload,
    groups: Sequence[Group],
    run_dir: Path,
    decision: Decision | None = None,
) -> JobSpec:
    """Returns the job that runs `workload` on `groups`.

    Raises:
        UsageError: If the decision was made for another workload.
    """
    if decision:
        refuse_foreign(
            "decision",
            keys=decision.workload_keys,
            digest=decision.workload_sha256,
            workload=workload,
            where=f"workload {workload.name}",
            fix="decide again: stoker decide PROFILE --workload WORKLOAD",
        )
    return JobSpec.of(
        workload,
        groups=groups,
        run_dir=run_dir,
        next_best=_next_best(decision) if decision else "",
    )


def _next_best(decision: Decision) -> str:
    """Names the best feasible plan with another data type, else the next feasible one."""
    chosen = decision.plan
    others = [plan for plan in decision.plans if plan.feasible and plan.groups != chosen.groups]
    # Another data type, as the plan is for those who cannot get the chosen one.
    types = {group.instance_type for group in chosen.groups if group.role == "data"}
    other_type = (
        plan
        for plan in others
        if types and not types & {g.instance_type for g in plan.groups if g.role == "data"}
    )
    plan = next(other_type, next(iter(others), None))
    if plan is None:
        return ""
    words = groups_in_words(plan.groups)
    if plan.predicted is None:
        return words
    price = "" if decision.prices.is_nominal else f", {usd(plan.predicted.usd_per_hour)} per hour"
    return f"{words} ({ms(plan.predicted.step_seconds)} per step{price})"


def train(
    job: JobSpec,
    *,
    platform: Platform[RequestT],
    catalog: Catalog,
    decision: Decision | None = None,
    on_line: Callable[[LogLine], None] | None = None,
    on_stop: Callable[[Training], None] | None = None,
    on_submit: Callable[[], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Training:
    """Submits the job, follows it to its end, and writes its record to `job.run_dir`.

    Blocks until all hosts have ended. When the caller is interrupted (Ctrl-C, SIGTERM) the job is
    stopped first, so that nothing keeps running; then `on_stop` gets the record so far, its status
    `stopped`, and the interrupt goes on. After a SIGTERM a job that the next attempt can adopt may
    go on: then the interrupt says so. `on_submit` is called whenever the platform has taken a job,
    or has found that of an earlier attempt.

    While the platform has no hosts the job is tried again, and then the decision's next plans, as
    the workload's `on_no_capacity` says; each try is a line.

    Raises:
        UsageError: If the platform cannot run such a job, or the record cannot be written.
        PlatformError: If the platform refuses it, or a job without hosts could not be deleted.
        NoCapacityError: If there were no hosts for any of the plans, for as long as was asked for;
            then the record, whose status is `failed`, is written all the same.
    """
    policy = job.platform_settings.on_no_capacity
    tried: list[Event] = []

    def say(words: str) -> None:
        tried.append(Event(when=now_utc(), what=words))
        if on_line:
            on_line(LogLine(group=platform.name, host="capacity", text=words))

    jobs = [job]
    if decision and policy.then == "next_plan":
        for each in _further(job, decision):
            refusal = _refusal(platform, each)
            if refusal:
                words = groups_in_words(each.groups)
                say(f"{words} cannot take its place where hosts are short: {refusal}")
            else:
                jobs.append(each)
    short: frozenset[str] = frozenset()
    last = NoCapacityError(f"there are no hosts for {groups_in_words(job.groups)}")
    for index in range(_resumed(jobs, platform), len(jobs)):
        current = jobs[index]
        if _needs(current, short):
            continue
        until = None
        while True:
            try:
                return _train_once(
                    current,
                    platform=platform,
                    catalog=catalog,
                    decision=decision,
                    tried=tried,
                    on_line=on_line,
                    on_stop=on_stop,
                    on_submit=on_submit,
                )
            except NoCapacityError as err:
                last = err
                # The time in which it had hosts is no part of the wait.
                if until is None or err.had_hosts:
                    until = clock() + 60 * policy.wait_minutes
                left = until - clock()
                if left <= 0 or not err.may_pass:
                    break
                pause = min(left, RETRY_SECONDS)
                say(
                    f"no hosts for {groups_in_words(current.groups)}: again in "
                    f"{pause / 60:.0f} min, for {left / 60:.0f} min more: {err.what}"
                )
                sleep(pause)
        if last.still_there:
            # It may get its hosts later, and would train next to the next plan's.
            raise last.still_there from last
        short |= {bare_type(name) for name in last.types}
        following = next((other for other in jobs[index + 1 :] if not _needs(other, short)), None)
        if following is None:
            break
        say(
            f"no hosts for {groups_in_words(current.groups)}: "
            f"taking the next plan, {groups_in_words(following.groups)}: {last.what}"
        )
    facts = facts_of(
        current,
        JobEnd(status="failed", failure=last.what),
        ran=Job(platform=platform.name, name=current.name),
        catalog=catalog,
        decision=decision,
        lost=f"no hosts for {groups_in_words(current.groups)}, and no other plan to take",
    )
    write_training(replace(facts, events=(*tried, *facts.events)), file=_record_file(job))
    raise last


def _record_file(job: JobSpec) -> Path:
    return job.run_dir / "training.json"


def _further(job: JobSpec, decision: Decision) -> Iterator[JobSpec]:
    """Yields jobs of the decision's next plans, best first: those that have other types.

    What is short is not always said, and another number of the same hosts is short of them, too.
    """
    seen = [{group.instance_type for group in job.groups}]
    for number, plan in enumerate(decision.plans, 1):
        types = {group.instance_type for group in plan.groups}
        if not plan.feasible or types in seen:
            continue
        seen.append(types)
        # By its place in the decision: a further attempt of a pipeline's step finds its job again.
        name = f"{job.name}-plan{number}"
        yield replace(job, name=name, run=job.run_name, groups=plan.groups, next_best="")
        if len(seen) == MAX_PLANS:
            return


def _refusal(platform: Platform[RequestT], job: JobSpec) -> str:
    """Says why the platform would not take such a job; the decision knows types, not its rules."""
    try:
        platform.plan(job)
    except UsageError as err:
        return err.what
    return ""


def _resumed(jobs: Sequence[JobSpec], platform: Platform[RequestT]) -> int:
    """Returns which of the run's jobs an earlier attempt has got hosts for; the first if none."""
    if len(jobs) == 1 or not isinstance(platform, ResumingPlatform):
        return 0
    return platform.resumed([platform.plan(job) for job in jobs])


def _needs(job: JobSpec, short: frozenset[str]) -> bool:
    return bool(short & {bare_type(group.instance_type) for group in job.groups})


def _train_once(
    job: JobSpec,
    *,
    platform: Platform[RequestT],
    catalog: Catalog,
    decision: Decision | None,
    tried: Sequence[Event],
    on_line: Callable[[LogLine], None] | None,
    on_stop: Callable[[Training], None] | None,
    on_submit: Callable[[], None] | None,
) -> Training:
    job = replace(job, prices=_prices(job, catalog))
    run = platform.submit(platform.plan(job))
    if on_submit:
        on_submit()
    last_words: deque[str] = deque(maxlen=_LAST_WORDS)
    file = _record_file(job)
    try:
        for line in run.lines():
            # The dnn group's: lines of data hosts do not say why a training failed.
            if line.group == job.groups[0].name:
                last_words.append(line.text)
            if on_line:
                on_line(line)
        end = run.wait()
    except BaseException as err:
        # Whoever interrupts must not leave hosts that are billed.
        leave_or_stop(run, err)
        if isinstance(err, NoCapacityError) and isinstance(run, ResumableRun):
            err.still_there = run.remaining()
        # Not for an error: what is a KeyboardInterrupt or a signal is no Exception.
        if on_stop and not isinstance(err, Exception):
            ran = Job(platform=platform.name, name=run.name)
            facts = _stopped(job, run, ran=ran, catalog=catalog, decision=decision)
            on_stop(write_training(facts, file=file))
        raise
    finally:
        run.stop()
    load = _load(run, catalog)
    for words in load:
        if on_line:
            on_line(LogLine(group=platform.name, host="load", text=words))
    facts = facts_of(
        job,
        end,
        ran=Job(platform=platform.name, name=run.name, url=end.job_url),
        catalog=catalog,
        decision=decision,
    )
    seen = (Event(when=now_utc(), what=f"utilisation: {words}") for words in load)
    facts = replace(facts, events=(*tried, *facts.events, *seen), last_words=tuple(last_words))
    try:
        record = write_training(facts, file=file)
    except UsageError as err:
        what = f"the training {facts.status}, but its record is lost: {err.what}"
        raise UsageError(what, fix="free some space, or use another disk") from None
    if isinstance(run, ResumableRun):
        run.clean_up()
    return record


def _stopped(
    job: JobSpec, run: Run, *, ran: Job, catalog: Catalog, decision: Decision | None
) -> TrainingFacts:
    """Returns what is known of a run that was stopped: what was measured until then."""
    ends: queue.SimpleQueue[JobEnd | StokerError] = queue.SimpleQueue()

    def wait() -> None:
        try:
            ends.put(run.wait())
        except StokerError as err:
            ends.put(err)

    # In a thread: who pressed Ctrl-C does not wait for a job that could not be stopped.
    threading.Thread(target=wait, name="stopped run", daemon=True).start()
    try:
        end = ends.get(timeout=STOPPED_SECONDS)
        if isinstance(end, StokerError):
            raise end
        facts = facts_of(job, end, ran=ran, catalog=catalog, decision=decision)
    except (StokerError, queue.Empty) as err:
        why = err.what if isinstance(err, StokerError) else "the job has not ended yet"
        end = JobEnd(status="stopped")
        lost = f"no record was left: {why}"
        facts = facts_of(job, end, ran=ran, catalog=catalog, decision=decision, lost=lost)
    return replace(facts, is_interrupted=True)


def _load(run: Run, catalog: Catalog) -> Sequence[str]:
    """Says how busy the hosts were, where the platform measures that."""
    if not isinstance(run, ObservedRun):
        return ()
    sizes = {each.type: (each.vcpus, each.accelerators) for each in catalog.instances}
    return run.load_words(sizes)


def facts_of(
    job: JobSpec,
    end: JobEnd,
    *,
    ran: Job,
    catalog: Catalog,
    decision: Decision | None = None,
    lost: str = "the dnn leader left no record that can be read",
) -> TrainingFacts:
    """Returns what is known of a job that has ended; keeps the leader's files in `job.run_dir`.

    Args:
        job: The job that was asked for.
        end: The end that the platform saw.
        ran: The platform's name for it.
        catalog: Catalog with the prices.
        decision: Decision that it was trained on.
        lost: What to say where the leader's record is not there.
    """
    leader = leader_record(end.output_dir)
    events = end.events if leader else (*end.events, Event(when=now_utc(), what=lost))
    timeline_file = None
    _, _, digest = (job.image or "").partition("@")
    if end.output_dir:
        folder = end.output_dir / "stoker"
        try:
            # The leader names it: that of its first rank which has one.
            if leader and leader.measured and leader.measured.timeline_file:
                timeline_file = _keep(folder / leader.measured.timeline_file, job)
            _keep_feed(folder / "feed.csv", job)
            _keep_passive(folder / PASSIVE_PROFILE, job)
        # A full disk: the report lacks a picture, and the training has ended as it has.
        except (OSError, UsageError) as err:
            events = (*events, Event(when=now_utc(), what=f"a file was not kept: {err}"))
    return TrainingFacts(
        job=ran,
        leader=leader,
        workload_sha256=job.settings.workload_sha256,
        workload_keys=workload_keys(
            command=job.command,
            strategy=job.settings.strategy.name,
            engine=job.settings.engine.name,
        ),
        decision_id=sha256_of(decision)[:12] if decision else None,
        groups=job.groups,
        strategy=job.settings.strategy.name,
        engine=job.settings.engine.name,
        hyperparameters=job.hyperparameters,
        status=end.status,
        exit_code=end.exit_code,
        failure=end.failure,
        events=events,
        release_seconds=end.data_group_release_seconds,
        # Where nobody is billed, dollars would mean nothing.
        usd_per_hour=None if catalog.purchase == NOMINAL else catalog.usd_per_hour(job.groups),
        timeline_file=timeline_file,
        model_uri=end.model_uri,
        what={**job.what, **({"image_digest": digest} if digest else {}), **end.what},
        billed_seconds=end.billed_seconds,
        mlflow_run_id=end.mlflow_run_id or job.environment.get(MLFLOW_RUN),
    )


def _prices(job: JobSpec, catalog: Catalog) -> dict[str, float]:
    """Returns the price of one host of each group, where it is known and anybody is billed."""
    if catalog.purchase == NOMINAL:
        return {}
    single = [msgspec.structs.replace(group, count=1) for group in job.groups]
    prices = {group.instance_type: catalog.usd_per_hour([group]) for group in single}
    return {name: price for name, price in prices.items() if price is not None}


def _keep(timeline: Path, job: JobSpec) -> str | None:
    """Copies the leader's timeline next to the record; returns its name there."""
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
    found = msgspec.structs.replace(found, workload_sha256=job.settings.workload_sha256, what=what)
    write_json(kept, found)
