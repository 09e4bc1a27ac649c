"""Train component: runs a workload on a chosen cluster and records the result."""

import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from stoker.catalog import Catalog
from stoker.errors import NoCapacityError, StokerError, TerminatedError, UsageError
from stoker.feed.bad_samples import FILE as BAD_SAMPLES_FILE
from stoker.feed.bad_samples import join_lists_of_hosts
from stoker.logs import now_utc
from stoker.platforms.base import (
    MLFLOW_RUN,
    JobEnd,
    JobSpec,
    LogLine,
    Platform,
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
from stoker.records.decision import NOMINAL, predicted_of
from stoker.records.hyperparameters import record_of
from stoker.records.training import Budget, InputVersion, Lineage, TrainingFacts, write_training
from stoker.records.workload import refuse_foreign, workload_keys
from stoker.repeat import (
    Clock,
    Sleep,
    within,
)
from stoker.units import ms, usd

RequestT = TypeVar("RequestT")

_LAST_WORDS = 20
# Time to read the outputs of a stopped run.
STOPPED_SECONDS = 30.0
# A profile for `stoker decide`, in the leader's output and in the run's folder.
PASSIVE_PROFILE = "passive-profile.json"
# Between two tries of a plan without hosts.
RETRY_SECONDS = 300.0
MAX_PLANS = 5
_LOST = "the dnn leader left no record that can be read"


class JobObserver:
    """Whoever follows a training job; by default it sees nothing, and Ctrl-C stops the job."""

    def submitted(self) -> None:
        """Called whenever the platform has accepted a job, or has found an earlier one."""

    def line(self, line: LogLine) -> None:
        """Called with each line of a host's log, and with news of the platform."""

    def may_stop(self) -> bool:
        """Returns whether Ctrl-C is to stop the job."""
        return True

    def stopped(self, record: Training) -> None:
        """Called with the record so far, whose status is stopped, after Ctrl-C or SIGTERM."""


NOBODY = JobObserver()


def prepare(
    *,
    workload: Workload,
    groups: Sequence[Group],
    run_dir: Path,
    decision: Decision | None = None,
) -> JobSpec:
    """Returns the job that runs `workload`; raises UsageError for another workload's decision."""
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


def _data_types(groups: Sequence[Group]) -> set[str]:
    return {group.instance_type for group in groups if group.role == "data"}


def _next_best(decision: Decision) -> str:
    """Describes the best feasible plan with another data type, else the next feasible one."""
    chosen = decision.plan
    others = [plan for plan in decision.plans if plan.feasible and plan.groups != chosen.groups]
    types = _data_types(chosen.groups)
    other_type = (plan for plan in others if types and not types & _data_types(plan.groups))
    plan = next(other_type, next(iter(others), None))
    if plan is None:
        return ""
    words = groups_in_words(plan.groups)
    if plan.predicted is None:
        return words
    cost = usd(plan.predicted.usd_per_hour, is_estimate=plan.predicted.is_estimate)
    price = f", {cost} per hour" if decision.prices.is_billed else ""
    return f"{words} ({ms(plan.predicted.counted_seconds)} per step{price})"


def train(
    job: JobSpec,
    *,
    platform: Platform[RequestT],
    catalog: Catalog,
    decision: Decision | None = None,
    observer: JobObserver = NOBODY,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> Training:
    """Submits the job, follows it to its end, and writes its record to `job.run_dir`.

    Blocks until all hosts have ended. After Ctrl-C the job is stopped if the observer agrees, which
    then gets the record so far, and the interrupt is raised again. After SIGTERM, or an error of
    following it, a job that outlives this process keeps running; the interrupt or error says how to
    follow it again (`leave_or_stop`).

    Without capacity the job is retried, and then the decision's next plans are tried, as the
    workload's `on_no_capacity` says; each try is logged.

    Raises:
        UsageError: If the platform cannot run the job, or the record cannot be written.
        PlatformError: If the platform refuses it, or a job without hosts could not be deleted.
        NoCapacityError: If no plan got hosts in time; a record with status `failed` is written.
    """
    attempts = _Attempts(
        job=job,
        platform=platform,
        catalog=catalog,
        decision=decision,
        observer=observer,
        sleep=sleep,
        clock=clock,
    )
    return attempts.train()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts(Generic[RequestT]):
    """The plans of a job, tried one after the other until one gets hosts.

    Attributes:
        events: What was tried without success.
    """

    job: JobSpec
    platform: Platform[RequestT]
    catalog: Catalog
    decision: Decision | None
    observer: JobObserver
    sleep: Sleep
    clock: Clock
    events: list[Event] = field(default_factory=list)

    def train(self) -> Training:
        plans = self._plans()
        if len(plans) > 1:
            # A job that an earlier attempt got hosts for.
            first = self.platform.resumed([self.platform.plan(plan) for plan in plans])
            plans = plans[first:]
        short: frozenset[str] = frozenset()
        while True:
            plan = plans[0]
            try:
                return self._train_when_there_are_hosts(plan)
            except NoCapacityError as err:
                shortage = err
            if shortage.still_there:
                # It may get hosts later, and would run in parallel with the next plan's job.
                raise shortage.still_there from shortage
            short |= {bare_type(name) for name in shortage.types}
            plans = [other for other in plans[1:] if not _needs(other, short)]
            if not plans:
                self._record_shortage(plan, shortage)
                raise shortage
            self._say(
                f"no hosts for {groups_in_words(plan.groups)}: "
                f"taking the next plan, {groups_in_words(plans[0].groups)}: {shortage.what}"
            )

    def _say(self, words: str) -> None:
        self.events.append(Event(when=now_utc(), what=words))
        self.observer.line(LogLine(group=self.platform.name, host="capacity", text=words))

    def _plans(self) -> list[JobSpec]:
        """Returns the job, and those that may replace it if the platform has no hosts for it."""
        plans = [self.job]
        if self.decision and self.job.platform_settings.on_no_capacity.then == "next_plan":
            for alternative in _further(self.job, self.decision):
                try:
                    self.platform.plan(alternative)
                except UsageError as err:
                    # The decision does not know the platform's rules.
                    words = groups_in_words(alternative.groups)
                    self._say(f"{words} cannot replace it: {err.what}")
                else:
                    plans.append(alternative)
        return plans

    def _train_when_there_are_hosts(self, plan: JobSpec) -> Training:
        """Raises NoCapacityError if the plan got no hosts within the time that it may wait."""
        wait_seconds = 60 * plan.platform_settings.on_no_capacity.wait_minutes
        until = None
        while True:
            try:
                return self._train_once(replace(plan, wait_seconds=_rest(until, now=self.clock())))
            except NoCapacityError as err:
                # The time with hosts is not part of the wait.
                if until is None or err.had_hosts:
                    until = self.clock() + wait_seconds - err.waited_seconds
                left = until - self.clock()
                if left <= 0 or not err.may_pass:
                    raise
                pause = min(left, RETRY_SECONDS)
                self._say(
                    f"no hosts for {groups_in_words(plan.groups)}: retry in "
                    f"{pause / 60:.0f} min, for {left / 60:.0f} min more: {err.what}"
                )
            self.sleep(pause)

    def _record_shortage(self, plan: JobSpec, shortage: NoCapacityError) -> None:
        facts = self._facts(
            plan,
            JobEnd(status="failed", failure=shortage.what),
            ran=Job(platform=self.platform.name, name=plan.name),
            lost=f"no hosts for {groups_in_words(plan.groups)}, and no other plan is left",
        )
        facts = replace(facts, events=(*self.events, *facts.events))
        write_training(facts, file=self.job.run_dir / "training.json")

    def _train_once(self, job: JobSpec) -> Training:
        job = self._priced(job)
        run = self.platform.submit(self.platform.plan(job))
        self.observer.submitted()
        last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        try:
            end = self._followed(run, last_words, job=job)
        finally:
            run.stop()
        load = self._load_words(run)
        ran = Job(platform=self.platform.name, name=run.name, url=end.job_url)
        facts = self._facts(job, end, ran=ran)
        seen = (Event(when=now_utc(), what=f"utilisation: {words}") for words in load)
        facts = replace(
            facts,
            events=(*self.events, *facts.events, *seen),
            last_words=tuple(last_words),
        )
        try:
            record = write_training(facts, file=job.run_dir / "training.json")
        except UsageError as err:
            raise UsageError(
                f"the training run {facts.status}, but its record could not be written: {err.what}",
                fix="free some space, or use another disk",
            ) from None
        # A later attempt reads what this one could not.
        if not record.is_unknown:
            run.clean_up()
        return record

    def _priced(self, job: JobSpec) -> JobSpec:
        """Returns the job with its budget, and with the prices that are known."""
        clusters = self.platform.choices(job)
        budget = limiting_budget(job, clusters, catalog=self.catalog, decision=self.decision)
        prices = {
            group.instance_type: budget.usd_per_hour[group.name]
            for group in job.groups
            if group.name in budget.usd_per_hour
        }
        settings = replace(job.settings, budget=budget if prices else None)
        return replace(job, prices=prices, settings=settings)

    def _followed(self, run: Run, last_words: deque[str], *, job: JobSpec) -> JobEnd:
        """Follows a run to its end; `last_words` get the lines of the dnn group's log."""
        try:
            for line in run.lines():
                # Lines of data hosts do not say why a training run failed.
                if line.group == job.groups[0].name:
                    last_words.append(line.text)
                self.observer.line(line)
            return run.wait()
        except BaseException as err:
            leave_or_stop(run, err, may_stop=self.observer.may_stop)
            if isinstance(err, NoCapacityError):
                err.still_there = run.remaining()
            # KeyboardInterrupt and TerminatedError only.
            if not isinstance(err, Exception):
                facts = self._stopped(job, run)
                record = write_training(facts, file=job.run_dir / "training.json")
                self.observer.stopped(record)
            raise

    def _load_words(self, run: Run) -> Sequence[str]:
        """Returns how busy the hosts were, where the platform measures it, and shows it."""
        sizes = {
            instance.type: (instance.vcpus, instance.accelerators)
            for instance in self.catalog.instances
        }
        load = run.load_words(sizes)
        for words in load:
            self.observer.line(LogLine(group=self.platform.name, host="load", text=words))
        return load

    def _stopped(self, job: JobSpec, run: Run) -> TrainingFacts:
        ran = Job(platform=self.platform.name, name=run.name)
        try:
            # Ctrl-C must not wait for a job that could not be stopped.
            facts = self._facts(job, within(STOPPED_SECONDS, run.wait), ran=ran)
        # An interrupt: also who does not wait gets a record.
        except (StokerError, OSError, KeyboardInterrupt, TerminatedError) as err:
            why = err.what if isinstance(err, StokerError) else "the job has not ended yet"
            facts = self._facts(
                job, JobEnd(status="stopped"), ran=ran, lost=f"no record was left: {why}"
            )
        return replace(facts, is_interrupted=True)

    def _facts(self, job: JobSpec, end: JobEnd, *, ran: Job, lost: str = _LOST) -> TrainingFacts:
        catalog = self.catalog
        decision = self.decision
        return facts_of(job, end, ran=ran, catalog=catalog, decision=decision, lost=lost)


def _further(job: JobSpec, decision: Decision) -> Iterator[JobSpec]:
    """Yields jobs of the decision's next plans that have other types, best first.

    A plan with the same types would lack hosts, too.
    """
    seen = [{group.instance_type for group in job.groups}]
    for number, plan in enumerate(decision.plans, 1):
        types = {group.instance_type for group in plan.groups}
        if not plan.feasible or types in seen:
            continue
        seen.append(types)
        # A stable name: a retry of a pipeline's step finds the job again.
        name = f"{job.name}-plan{number}"
        yield replace(job, name=name, run=job.run_name, groups=plan.groups, next_best="")
        if len(seen) == MAX_PLANS:
            return


def _rest(until: float | None, *, now: float) -> float | None:
    """Returns how long a plan may still wait for hosts; None: it has not waited yet."""
    if until is None:
        return None
    return max(0.0, until - now)


def _needs(job: JobSpec, short: frozenset[str]) -> bool:
    return bool(short & {bare_type(group.instance_type) for group in job.groups})


def facts_of(
    job: JobSpec,
    end: JobEnd,
    *,
    ran: Job,
    catalog: Catalog,
    decision: Decision | None = None,
    lost: str = _LOST,
) -> TrainingFacts:
    """Returns the facts about an ended job, and copies the leader's files to `job.run_dir`.

    `lost` is the event to record if the leader's record is missing.
    """
    # Billed by what the platform selected.
    job = replace(job, groups=end.groups or job.groups)
    leader = leader_record(end.output_dir)
    if end.unfetched:
        lost = f"the outputs could not be read: {end.unfetched}"
    events = end.events if leader else (*end.events, Event(when=now_utc(), what=lost))
    timeline_file = None
    if end.output_dir:
        timeline_file, problems = _keep_files(end.output_dir / "stoker", job, leader)
        leader, more = _with_all_bad_samples(end.output_dir / "stoker", job, leader)
        events = (*events, *problems, *more)
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
        budget=budget_of(job, catalog=catalog, decision=decision),
        timeline_file=timeline_file,
        model_uri=end.model_uri,
        model_copy_uri=end.model_copy_uri,
        lineage=_lineage_of(job, decision).joined(job.lineage, end.lineage),
        host_seconds=end.host_seconds,
        mlflow_run_id=end.mlflow_run_id or job.environment.get(MLFLOW_RUN),
        unfetched=end.unfetched,
    )


def _lineage_of(job: JobSpec, decision: Decision | None) -> Lineage:
    _, _, digest = (job.image or "").partition("@")
    seeds = {name: value for name, value in job.hyperparameters.items() if "seed" in name.lower()}
    return Lineage(
        image=job.image,
        image_digest=digest or None,
        profile_sha256=decision.profile_sha256 if decision else None,
        decision_sha256=sha256_of(decision) if decision else None,
        inputs={name: InputVersion(address=channel.uri) for name, channel in job.channels.items()},
        seeds=record_of(seeds),
    )


def budget_of(job: JobSpec, *, catalog: Catalog, decision: Decision | None) -> Budget:
    """Returns a job's prices, limit and prediction; prices are empty where nothing is billed."""
    promise = predicted_of(job.groups, decision)
    limit = job.settings.budget.max_usd if job.settings.budget else None
    if catalog.purchase == NOMINAL:
        return Budget(max_usd=limit)
    single = {group.name: msgspec.structs.replace(group, count=1) for group in job.groups}
    prices = {name: catalog.usd_per_hour([group]) for name, group in single.items()}
    return Budget(
        usd_per_hour={name: price for name, price in prices.items() if price is not None},
        max_usd=limit,
        predicted_usd=promise.run_usd if promise else None,
        estimated=tuple(name for name, group in single.items() if catalog.estimates([group])),
    )


def limiting_budget(
    job: JobSpec,
    clusters: Sequence[tuple[Group, ...]],
    *,
    catalog: Catalog,
    decision: Decision | None,
) -> Budget:
    """Returns a job's budget with the prices of the dearest cluster that it may get.

    Args:
        job: On the plan's cluster, of which the prediction is.
        clusters: Those of which the platform takes one: a limit holds on any.
        catalog: Prices.
        decision: Of the plan.
    """
    budget = budget_of(job, catalog=catalog, decision=decision)
    for groups in clusters:
        other = budget_of(replace(job, groups=groups), catalog=catalog, decision=None)
        dearest = budget.total_usd_per_hour(job.groups)
        usd = other.total_usd_per_hour(groups)
        if dearest is not None and usd is not None and usd > dearest:
            prices = other.usd_per_hour
            estimated = other.estimated
            budget = msgspec.structs.replace(budget, usd_per_hour=prices, estimated=estimated)
    return budget


def _keep_files(
    folder: Path, job: JobSpec, leader: Training | None
) -> tuple[str | None, Sequence[Event]]:
    """Copies the leader's files to the run's folder; returns its timeline's name and problems."""
    timeline_file = None
    try:
        # Timeline of the first rank that has one.
        if leader and leader.measured and leader.measured.timeline_file:
            timeline = folder / leader.measured.timeline_file
            if _keep(timeline, job.run_dir / "timeline.csv"):
                timeline_file = "timeline.csv"
        _keep(folder / "feed.csv", job.run_dir / "feed.csv")
        _keep(folder / "gpu.csv", job.run_dir / "gpu.csv")
        _keep_passive(folder / PASSIVE_PROFILE, job)
    # On a full disk the report lacks a picture.
    except (OSError, UsageError) as err:
        return timeline_file, [Event(when=now_utc(), what=f"a file was not kept: {err}")]
    return timeline_file, ()


def _with_all_bad_samples(
    folder: Path, job: JobSpec, leader: Training | None
) -> tuple[Training | None, Sequence[Event]]:
    """Keeps the list of all hosts' bad samples; returns the record with their number, problems."""
    # In SageMaker's archive they are below the leader's, on this machine apart.
    others = job.run_dir.glob("hosts/*/output/data/stoker")
    try:
        num_listed = join_lists_of_hosts({folder, *others}, job.run_dir / BAD_SAMPLES_FILE)
    except (OSError, ValueError) as err:
        return leader, [Event(when=now_utc(), what=f"bad samples were not listed: {err}")]
    if leader is None or num_listed <= leader.bad_samples:
        return leader, ()
    # Without data hosts the other hosts do not tell the leader theirs.
    return msgspec.structs.replace(leader, bad_samples=num_listed), ()


def _keep(file: Path, kept: Path) -> bool:
    # An earlier try may have left one.
    kept.unlink(missing_ok=True)
    if file.is_file():
        shutil.copyfile(file, kept)
    return kept.is_file()


def _keep_passive(file: Path, job: JobSpec) -> None:
    kept = job.run_dir / PASSIVE_PROFILE
    kept.unlink(missing_ok=True)
    if not file.is_file():
        return
    profile = read_json(file, Profile)
    profile = msgspec.structs.replace(
        profile,
        workload_sha256=job.settings.workload_sha256,
        what={**profile.what, "command": [*job.command]},
    )
    write_json(kept, profile)
