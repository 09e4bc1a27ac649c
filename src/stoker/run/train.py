"""A training run: price and question, folder, job, record, MLflow, webhook, report, exit code.

`train_run` is `stoker train` and a pipeline's step, `follow` the training of both and of
`stoker run`, and `train` what happens between the job's request and its record.
"""

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from stoker.catalog import Catalog, catalog_of
from stoker.errors import (
    DeclinedError,
    NoCapacityError,
    PlatformError,
    StokerError,
    TerminatedError,
    UsageError,
)
from stoker.failure_reasons import said_in
from stoker.feed.bad_samples import FILE as BAD_SAMPLES_FILE
from stoker.feed.bad_samples import join_lists
from stoker.host.processes import git_state
from stoker.logs import now_utc
from stoker.platforms import platform_named
from stoker.platforms.base import (
    MAX_PLANS,
    MLFLOW_RUN,
    JobEnd,
    JobSpec,
    LogLine,
    Platform,
    leader_record,
    leave_or_stop,
    tracking_of,
)
from stoker.platforms.local import lock_run_folder
from stoker.record_words import training_words
from stoker.records import (
    Decision,
    Evaluation,
    Event,
    Group,
    Job,
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
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.records.training import Budget, completed, copied_to
from stoker.records.workload import refuse_foreign, workload_keys
from stoker.repeat import Clock, Sleep, within
from stoker.run.cost import confirm, groups_of
from stoker.run.folders import RECORD, RUNS, RunFiles, found_in, run_dir_of, write_report_of
from stoker.run.mlflow import log_run, start_run
from stoker.run.outputs import NO_STEP, KubeflowStep, deliver
from stoker.run.progress import Follow
from stoker.run.webhook import RunEnding, post
from stoker.terminal import relative, say, typed

RequestT = TypeVar("RequestT")

_TIMELINE = "timeline.csv"
_METRICS = "metrics.jsonl"
_NO_RECORD = "the dnn leader left no record that can be read"
# Lines of the leader that tell why a launcher failed early.
_LAST_WORDS = 20
# Time to read the outputs of a stopped run.
STOPPED_SECONDS = 30.0
# Between two tries of a plan without hosts.
RETRY_SECONDS = 300.0


def plan_of(
    workload: Workload, *, decision_file: Path | None, groups: Sequence[str] = ()
) -> tuple[tuple[Group, ...], Decision | None]:
    """Returns the hosts of a decision, or of groups on a command line, and the decision."""
    if decision_file is None:
        return groups_of(workload, groups), None
    if groups:
        raise UsageError("--decision cannot be used with --group", fix="leave one of them out")
    decision = read_json(decision_file, Decision)
    return decision.plan.groups, decision


def prepare(
    *,
    workload: Workload,
    groups: Sequence[Group],
    run_dir: Path,
    decision: Decision | None = None,
) -> JobSpec:
    """Returns the job that runs `workload`; raises UsageError for another workload's decision."""
    job = JobSpec.of(workload, groups=groups, run_dir=run_dir)
    if decision is None:
        return job
    refuse_foreign(
        "decision",
        decision.workload_keys,
        workload=workload,
        where=f"workload {workload.name}",
        fix="decide again: stoker decide PROFILE --workload WORKLOAD",
    )
    return replace(job, settings=replace(job.settings, loader_workers=decision.loader_workers))


def request_text(
    workload: Workload,
    groups: Sequence[Group],
    *,
    decision: Decision | None,
    name: str | None,
    as_json: bool,
) -> str:
    """Returns the request that the platform would get, as text; makes and sends nothing."""
    platform = platform_named(workload.platform, settings=workload)
    folder = RUNS / (name or "dry-run")
    job = prepare(workload=workload, groups=groups, run_dir=folder, decision=decision)
    request = platform.plan(job)
    if as_json:
        return json.dumps(platform.describe(request), indent=2)
    return platform.manifest(request)


def train_run(
    workload: Workload,
    groups: Sequence[Group],
    *,
    decision: Decision | None,
    name: str | None,
    prices: Path | None = None,
    out: Path | None,
    step: KubeflowStep = NO_STEP,
    as_json: bool = False,
    assume_yes: bool,
    is_step: bool = False,
) -> int:
    """Asks for the price, trains, writes record and report; returns the exit code.

    Args:
        workload: What is trained.
        groups: On which hosts.
        decision: The decision that they are of; None: they were named.
        name: Name of the run and its job; None: made from the workload and the time.
        prices: File of prices that adds to the catalog.
        out: File of the record, by default in the run's folder.
        step: Of Kubeflow.
        as_json: Whether the record is printed as JSON.
        assume_yes: Whether nothing is asked.
        is_step: Whether a pipeline's later step notifies the webhook.

    Raises:
        UsageError: If the platform refuses the request, with its key.
        DeclinedError: If the answer is no.
        PlatformError: If a run of that name still runs here.
        NoCapacityError: If there were no hosts, once the record is written.
    """
    # On Kubeflow the next step judges a failed training run, so this one must not end the pipeline.
    always = bool(step.outputs)
    for line, count in (decision.loader_workers if decision else {}).items():
        say(f"note: the loader at {line} is read as if it had num_workers={count}")
    catalog = catalog_of(workload, prices)
    confirm(workload, groups, catalog=catalog, decision=decision, assume_yes=assume_yes)
    folder = run_dir_of(workload, name=name)
    job = prepare(workload=workload, groups=groups, run_dir=folder, decision=decision)
    # Before anything starts: a wrong request is refused here, with its key; and a run of that name
    # that still runs keeps its files, and its run in MLflow.
    platform_named(workload.platform, settings=workload).plan(job)
    os.close(lock_run_folder(folder, run=folder.name))
    # For the report of the run, now and from `stoker report`.
    write_json(folder / "workload.json", workload)
    if decision:
        write_json(folder / "decision.json", decision)
    # An evaluation goes with the training run that it judged.
    (folder / "evaluation.json").unlink(missing_ok=True)
    say(f"train of {workload.name} on {groups_in_words(groups)}: {relative(folder)}")
    files = RunFiles.of(folder)
    with concluding(files, workload, run=folder.name, step="train", is_told=not is_step) as ending:
        try:
            record = follow(job, workload, catalog=catalog, decision=decision)
        except NoCapacityError:
            # A further attempt of a pipeline's step would wait as long again for hosts.
            if not always:
                raise
            record = read_json(files.training, Training)
        ending.warnings = tuple(group.made_words for group in record.useless_groups)
        code = training_exit_code(record)
        if code:
            ending.take(outcome_of(record))
    # The record may go elsewhere, and its timeline, which it names by a relative path.
    file = out or files.training
    copied = copied_to(file, record, run_dir=folder)
    deliver(
        copied,
        out=file,
        step=step,
        explain=training_words,
        as_json=as_json,
        parameters={"status": copied.status},
        model={**copied.lineage, "model_uri": copied.model_uri or ""},
    )
    say(f"logs: {folder / 'logs'}\nreport: {ending.report}")
    return 0 if always else code


@contextmanager
def concluding(
    files: RunFiles,
    workload: Workload,
    *,
    run: str,
    step: str,
    is_told: bool = True,
    again: Callable[[str], str] = lambda step: typed(),
) -> Iterator[RunEnding]:
    """At the end of the block, writes the run's report and MLflow, and notifies the webhook.

    Args:
        files: Where the run's records are, as far as the block writes them.
        workload: With its webhook and tracking.
        run: Name of the run.
        step: What the block does.
        is_told: Whether this process notifies; else another one does.
        again: Returns the command line that continues with a step.
    """
    ending = RunEnding(run=run, step=step, is_told=is_told)
    failure = ""
    try:
        yield ending
    except (DeclinedError, KeyboardInterrupt, TerminatedError) as err:
        # What a person stops is not sent. An interrupt's words are on a job that keeps running.
        ending.is_told = False
        failure = str(err)
        if not failure:
            failure = f"stopped in {ending.step}"
            if files.training.is_file():
                failure += f"\nkept:  {relative(files.training)}, and what the script saved"
            say(f"{failure}\nagain: {again(ending.step)}")
        elif isinstance(err, KeyboardInterrupt):
            say(failure)
        raise
    except Exception as err:
        ending.failure = getattr(err, "what", "") or repr(err)
        failure = str(err)
        raise
    finally:
        if files.report:
            try:
                command = typed() if is_told else ""
                write_report_of(files, workload=workload, command=command, failure=failure)
                ending.report = files.report.resolve().as_uri()
            except StokerError as err:
                ending.report = f"not written: {err.what}"
        training = found_in(files.training, Training)
        ending.page = (training and training.job.url) or ""
        # A job that keeps running has no end yet.
        if training or ending.failure:
            records = (files.profile, files.decision, files.training, files.evaluation)
            ending.mlflow = log_run(
                tracking_of(workload),
                run=ending.run,
                training=training,
                evaluation=found_in(files.evaluation, Evaluation),
                files=[*records, *filter(None, [files.report])],
            )
        post(workload, ending)


def follow(
    job: JobSpec,
    workload: Workload,
    *,
    catalog: Catalog,
    decision: Decision | None,
    echo: bool = True,
) -> Training:
    """Trains and shows the progress; with `echo` the lines of the script, too."""
    # An earlier attempt's must not pass for this one's.
    (job.run_dir / RECORD).unlink(missing_ok=True)
    lineage = {"workload_sha256": sha256_of(workload)}
    lineage |= {name: str(fact).lower() for name, fact in git_state(Path.cwd()).items()}
    job = start_run(replace(job, lineage=lineage), platform=workload.platform)
    steps = workload.training.total_steps()
    with closing(Follow(echo=echo, total_steps=steps)) as shown:
        return train(
            job,
            platform=platform_named(workload.platform, settings=workload),
            catalog=catalog,
            decision=decision,
            on_line=shown.line,
            may_stop=shown.ask_to_stop,
        )


def train(
    job: JobSpec,
    *,
    platform: Platform[RequestT],
    catalog: Catalog,
    decision: Decision | None = None,
    on_line: Callable[[LogLine], object] = lambda line: None,
    may_stop: Callable[[], bool] = lambda: True,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> Training:
    """Submits the job, follows it to its end, and writes its record to `job.run_dir`.

    Blocks until all hosts have ended. After Ctrl-C the job is stopped if `may_stop`, its record
    is written, and the interrupt is raised again. After SIGTERM, or an error of following it, a
    job that outlives this process keeps running; the interrupt or error says how to follow it again
    (`leave_or_stop`).

    Without capacity the job is retried, and then the decision's next plans are tried, as the
    workload's `on_no_capacity` says; each try is an event of the record.

    Args:
        on_line: Gets each line of a host's log, and news of the platform.
        may_stop: Whether Ctrl-C is to stop the job.

    Raises:
        UsageError: If the platform cannot run the job, or the record cannot be written.
        PlatformError: If the platform refuses it, or a job without hosts could not be deleted.
        NoCapacityError: If no plan got hosts in time; a record with status `failed` is written.
    """
    events: list[Event] = []

    def tell(words: str) -> None:
        events.append(Event(when=now_utc(), what=words))
        on_line(LogLine(group=platform.name, host="capacity", text=words))

    def keep(plan: JobSpec, end: JobEnd, name: str) -> Training:
        of = {"platform": platform.name, "name": name}
        record = record_of_job(plan, end, **of, decision=decision, events=events)
        write_json(job.run_dir / RECORD, record)
        return record

    plans = [job, *_other_plans(job, decision, platform=platform)]
    if len(plans) > 1:
        # A job that an earlier attempt got hosts for.
        plans = plans[platform.resumed([platform.plan(plan) for plan in plans]) :]
    until = clock() + 60 * job.platform_settings.on_no_capacity.wait_minutes
    while True:
        plan = _with_budget(plans[0], catalog=catalog, decision=decision)
        words = f"no hosts for {groups_in_words(plan.groups)}"
        try:
            return _trained(plan, platform=platform, keep=keep, on_line=on_line, may_stop=may_stop)
        except NoCapacityError as err:
            pause = min(until - clock(), RETRY_SECONDS)
            if pause > 0 and err.may_pass:
                tell(f"{words}: retry in {pause / 60:.0f} min: {err.what}")
                sleep(pause)
                continue
            if err.still_there:
                # It may get hosts later, and would run in parallel with the next plan's job.
                raise err.still_there from err
            short = {bare_type(name) for name in err.types}
            plans = [other for other in plans[1:] if not short & _types(other.groups)]
            if not plans:
                tell(f"{words}, and no other plan is left")
                keep(plan, JobEnd(status="failed", failure=err.what), plan.name)
                raise
            tell(f"{words}: taking the next plan, {groups_in_words(plans[0].groups)}: {err.what}")
            until = clock() + 60 * job.platform_settings.on_no_capacity.wait_minutes


def _types(groups: Sequence[Group]) -> set[str]:
    return {bare_type(group.instance_type) for group in groups}


def _other_plans(
    job: JobSpec, decision: Decision | None, *, platform: Platform[RequestT]
) -> Iterator[JobSpec]:
    """Yields jobs of the decision's next plans that have other types, best first.

    A plan with the same types would lack hosts, too.
    """
    if not decision or job.platform_settings.on_no_capacity.then != "next_plan":
        return
    seen = [_types(job.groups)]
    for number, plan in enumerate(decision.plans, 1):
        if not plan.feasible or _types(plan.groups) in seen or len(seen) == MAX_PLANS:
            continue
        seen.append(_types(plan.groups))
        # A stable name: a retry of a pipeline's step finds the job again.
        name = f"{job.name}-plan{number}"
        other = replace(job, name=name, run=job.run_name, groups=plan.groups)
        # The decision does not know the platform's rules.
        with suppress(UsageError):
            platform.plan(other)
            yield other


def _with_budget(job: JobSpec, *, catalog: Catalog, decision: Decision | None) -> JobSpec:
    """Returns the job with prices, limit and prediction; without them where nothing is billed."""
    single = [structs.replace(group, count=1) for group in job.groups]
    prices = {group.name: catalog.usd_per_hour([group]) for group in single}
    known = {name: price for name, price in prices.items() if price is not None}
    promise = predicted_of(job.groups, decision)
    budget = Budget(
        usd_per_hour=known,
        max_usd=job.settings.budget.max_usd if job.settings.budget else None,
        predicted_usd=promise.run_usd if promise else None,
    )
    is_billed = known and catalog.purchase != NOMINAL
    return replace(job, settings=replace(job.settings, budget=budget if is_billed else None))


def _trained(
    job: JobSpec,
    *,
    platform: Platform[RequestT],
    keep: Callable[[JobSpec, JobEnd, str], Training],
    on_line: Callable[[LogLine], object],
    may_stop: Callable[[], bool],
) -> Training:
    """Runs one job; returns its record, or raises NoCapacityError if it got no hosts."""
    run = platform.submit(platform.plan(job))
    # Lines of data hosts do not say why a training run failed.
    last_words: deque[str] = deque(maxlen=_LAST_WORDS)
    try:
        for line in run.lines():
            if line.group == job.groups[0].name:
                last_words.append(line.text)
            on_line(line)
        end = run.wait()
    except BaseException as err:
        leave_or_stop(run, err, may_stop=may_stop)
        if isinstance(err, NoCapacityError):
            err.still_there = run.remaining()
        # KeyboardInterrupt and TerminatedError only: also who does not wait gets a record.
        if not isinstance(err, Exception):
            end = JobEnd(status="stopped")
            with suppress(StokerError, OSError, KeyboardInterrupt, TerminatedError):
                # Ctrl-C must not wait for a job that could not be stopped.
                end = within(STOPPED_SECONDS, run.wait)
            keep(job, replace(end, status="stopped"), run.name)
        raise
    finally:
        run.stop()
    if end.status == "failed" and leader_record(end.output_dir) is None:
        # The launcher failed early: only its log says why.
        words = filter(None, (end.failure, said_in(last_words)))
        end = replace(end, failure=": ".join(words))
    return keep(job, end, run.name)


def record_of_job(
    job: JobSpec,
    end: JobEnd,
    *,
    platform: str,
    name: str,
    decision: Decision | None = None,
    events: Sequence[Event] = (),
) -> Training:
    """Returns the record of an ended job, and copies the leader's files to `job.run_dir`.

    Args:
        job: The plan, with its budget.
        end: How the platform saw it end.
        platform: Where it ran.
        name: Name of the job there.
        decision: Which the plan is of.
        events: What happened before.
    """
    if end.unfetched and end.status == "succeeded":
        raise PlatformError(
            "the training succeeded, but its outputs could not be read",
            where=end.unfetched,
            fix=f"stoker train ... --name {job.name}     reads them again",
        )
    leader = leader_record(end.output_dir)
    seen = [*events, *end.events]
    if end.output_dir:
        if not leader:
            seen.append(Event(when=now_utc(), what=_NO_RECORD))
        try:
            leader = _with_files(leader, end.output_dir / "stoker", job.run_dir)
        # On a full disk the report lacks a picture.
        except (OSError, ValueError) as err:
            seen.append(Event(when=now_utc(), what=f"a file was not kept: {err}"))
    settings = job.settings
    lineage = {f"input_{name}": channel.uri for name, channel in job.channels.items()}
    image = job.image or ""
    lineage |= {"image": image, "image_digest": image.partition("@")[2]}
    if decision:
        lineage["profile_sha256"] = decision.profile_sha256 or ""
        lineage["decision_sha256"] = sha256_of(decision)
    lineage |= {**job.lineage, **end.lineage}
    engine = settings.engine.name
    outside = Training(
        job=Job(platform=platform, name=name, url=end.job_url),
        workload_keys=workload_keys(command=job.command, strategy=settings.strategy, engine=engine),
        groups=job.groups,
        strategy=settings.strategy,
        engine=engine,
        hyperparameters=record_of(job.hyperparameters),
        status=end.status,
        exit_code=end.exit_code,
        failure=end.failure,
        events=tuple(seen),
        model_uri=end.model_uri,
        lineage={name: fact for name, fact in lineage.items() if fact},
        mlflow_run_id=end.mlflow_run_id or job.environment.get(MLFLOW_RUN),
    )
    has_timeline = (job.run_dir / _TIMELINE).is_file()
    return completed(
        outside,
        leader,
        budget=settings.budget or Budget(),
        host_seconds=end.host_seconds,
        timeline_file=_TIMELINE if has_timeline else None,
    )


def _with_files(leader: Training | None, folder: Path, run_dir: Path) -> Training | None:
    """Copies the leader's files to the run's folder, and lists all hosts' bad samples there.

    Returns the leader's record with the number of bad samples.
    """
    timeline = (leader and leader.measured and leader.measured.timeline_file) or ""
    for original, name in ((timeline, _TIMELINE), (_METRICS, _METRICS)):
        # An earlier try may have left one.
        (run_dir / name).unlink(missing_ok=True)
        if original and (folder / original).is_file():
            shutil.copyfile(folder / original, run_dir / name)
    # In SageMaker's archive they are below the leader's, on this machine apart.
    others = run_dir.glob("hosts/*/output/data/stoker")
    num_listed = join_lists({folder, *others}, run_dir / BAD_SAMPLES_FILE)
    # Without data hosts the other hosts do not tell the leader theirs.
    return leader and structs.replace(leader, bad_samples=max(num_listed, leader.bad_samples))
