"""The chain of steps of `stoker run`: profile, decide, train, evaluate, in one folder."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from stoker.catalog import Catalog, catalog_of
from stoker.decide import DecisionInputs, decide, followed, local_core_words, refuse_unfed
from stoker.errors import EXIT_TERMINATED, DeclinedError, StokerError, TerminatedError
from stoker.evaluate import evaluate
from stoker.logs import printable
from stoker.notify import RunEnding
from stoker.platforms import platform_named
from stoker.platforms.base import Platform, tracking_of
from stoker.platforms.local import lock_run_folder
from stoker.platforms.service_limits import is_training_type
from stoker.profile import profile
from stoker.record_words import decision_words, evaluation_words, profile_words, training_words
from stoker.records import (
    Decision,
    Evaluation,
    Group,
    Profile,
    Training,
    Workload,
    read_json,
    write_json,
)
from stoker.records.base import RecordT
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.records.training import BUSY
from stoker.run import STEPS
from stoker.run.billing import confirm
from stoker.run.clusters import todays_cluster
from stoker.run.command_lines import command_line, reproducing
from stoker.run.earlier_profiles import reused_words, with_age
from stoker.run.earlier_runs import memory_of
from stoker.run.mlflow_run import keep_tracked
from stoker.run.outputs import free_advice
from stoker.run.plan_price import with_plan_price
from stoker.run.profile_progress import following_profile
from stoker.run.reports import found_in, report_of_run
from stoker.run.training_run import FollowedTraining, train_and_keep
from stoker.run.webhook import telling
from stoker.terminal import relative, say, step_line
from stoker.tracking import TrackedRecords
from stoker.train import prepare

_LINES = "\n\t"
RECORD_OF = dict(zip(STEPS, ("profile", "decision", "training", "evaluation"), strict=True))


@dataclass(slots=True, kw_only=True)
class Chain:
    """A run of the chain of steps in `run_dir`."""

    workload: Workload
    source: str
    run_dir: Path
    first: int
    fallback: tuple[Group, ...]
    prices: Path | None
    quiet: bool
    assume_yes: bool
    arguments: Sequence[str]
    doing: str = STEPS[0]
    has_submitted: bool = False

    def step(
        self,
        name: str,
        kind: type[RecordT],
        make: Callable[[], RecordT],
        words: Callable[[RecordT], str],
    ) -> RecordT:
        """Makes the step's record and writes it (`train` itself does), or reads an earlier one."""
        file = self.run_dir / f"{RECORD_OF[name]}.json"
        # `--from` a later step: this one has been paid for.
        if STEPS.index(name) < self.first:
            record = read_json(file, kind)
            self.say_line(name, f"reused: {words(record)}")
            self.tell_age(record)
            return record
        began = time.monotonic()
        # Before it is made, so that who stops the run is told in which step.
        self.doing = name
        record = make()
        if name != "train":
            write_json(file, record)
        self.say(step_line(name, words(record), time.monotonic() - began))
        return record

    def tell_age(self, record: object) -> None:
        """Prints the age of a profile that is used again, and what has changed since."""
        if isinstance(record, Profile) and (reused := reused_words(record, self.workload)):
            self.say_line("  age", reused.words)
            for text in reused.warnings:
                self.say_line("  warning", text)

    def say(self, text: str) -> None:
        say(text, quiet=self.quiet)

    def say_line(self, title: str, words: str) -> None:
        self.say(step_line(title, words, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEnd:
    """How a chain without an error ended; no evaluation: the training failed."""

    code: int
    evaluation: Evaluation | None
    report: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSteps:
    """What each step of a chain makes.

    Attributes:
        chain: The run.
        platform: Where it profiles and trains.
        catalog: Types and prices, once for all steps: prediction and bill have the same.
    """

    chain: Chain
    platform: Platform[object]
    catalog: Catalog

    def profile(self) -> Profile:
        """Measures the training command on today's cluster."""
        workload = self.chain.workload
        run_dir = self.chain.run_dir
        cluster = todays_cluster(workload)
        self._confirm([Group.of_today(cluster.dnn)], is_profile=True)
        with following_profile(workload, quiet=self.chain.quiet) as progress:
            return profile(
                workload,
                cluster=cluster,
                platform=self.platform,
                run_dir=run_dir / "profile",
                name=f"{run_dir.name}-profile",
                on_line=progress.line,
                # Ctrl-C ends the chain: half a profile must not be decided on.
                verdict_on_interrupt=False,
            )

    def decide(self, profiled: Profile) -> Decision:
        """Chooses the cluster; the last run's plan stays unless another one is clearly better."""
        chain = self.chain
        workload = self.chain.workload
        memory = memory_of(workload, runs=chain.run_dir.parent, besides=chain.run_dir)
        decision = decide(
            DecisionInputs(
                profile=profiled,
                catalog=self.catalog,
                constraints=workload.known_constraints,
                training=workload.training,
                feed=workload.feed,
                fallback=chain.fallback,
                last=memory.last_groups,
                today=date.today(),
                processes_per_host=todays_cluster(workload).dnn.processes_per_host,
                calibration=memory.calibration(like=profiled, catalog=self.catalog),
                subject=(chain.source,),
            )
        )
        decision = with_age(decision, profiled, workload)
        if memory.why_not:
            chain.say(f"warning: decided without the last run's plan: {memory.why_not}")
        # A cluster that was named on the command line is what the user wants.
        if chain.fallback:
            return decision
        return memory.applied(decision)

    def train(self, decision: Decision) -> Training:
        """Trains on the decision's cluster, and follows the job to its end."""
        chain = self.chain
        groups = decision.plan.groups
        self._confirm(groups, decision)
        job = prepare(
            workload=chain.workload, groups=groups, run_dir=chain.run_dir, decision=decision
        )
        run = FollowedTraining(
            job=job,
            workload=chain.workload,
            platform=self.platform,
            catalog=self.catalog,
            decision=decision,
            again=command_line(chain.arguments, from_step="train"),
            quiet=chain.quiet,
            echo=False,
            assume_yes=chain.assume_yes,
        )
        try:
            return train_and_keep(run)
        finally:
            chain.has_submitted = run.has_submitted

    def _confirm(
        self,
        groups: Sequence[Group],
        decision: Decision | None = None,
        *,
        is_profile: bool = False,
    ) -> None:
        confirm(
            self.chain.workload,
            groups,
            catalog=self.catalog,
            decision=decision,
            assume_yes=self.chain.assume_yes,
            quiet=self.chain.quiet,
            is_profile=is_profile,
        )


def run_chain(chain: Chain) -> ChainEnd:
    """Runs the steps, and tells report, webhook and MLflow how the run ended, also by an error.

    Raises what a step raises.
    """
    workload = chain.workload
    name = chain.run_dir.name
    with telling(workload, run=name, step=STEPS[chain.first], quiet=chain.quiet) as ending:
        try:
            code, evaluation = steps(chain)
        except DeclinedError as err:
            report_of_chain(chain, failure=str(err))
            raise
        except StokerError as err:
            report = report_of_chain(chain, failure=str(err))
            ending.links["report"] = str(report)
            track(chain, report)
            raise
        except (KeyboardInterrupt, TerminatedError):
            _report_stopped(chain)
            raise
        finally:
            # Also after an error: the webhook says in which step it came.
            ending.step = chain.doing
        end = ChainEnd(code=code, evaluation=evaluation, report=report_of_chain(chain))
        _tell_end(chain, end, ending)
    return end


def steps(chain: Chain) -> tuple[int, Evaluation | None]:
    """Runs the steps; returns the exit code, and the evaluation if the training succeeded."""
    workload = chain.workload
    catalog = catalog_of(workload, chain.prices, is_service_type=is_training_type)
    make = ChainSteps(
        chain=chain,
        platform=platform_named(workload.platform, settings=workload),
        catalog=with_plan_price(catalog, workload, quiet=False),
    )
    profiled = chain.step("profile", Profile, make.profile, profile_words)
    # Before anything else is rented: data hosts could do nothing for this training run.
    refuse_unfed(profiled, workload)
    decision = chain.step("decide", Decision, lambda: make.decide(profiled), decision_words)
    # A decision of an earlier run may have been followed otherwise.
    decision = followed(decision, workload.constraints.follow)
    # Fixes that cost nothing are not part of the plan.
    for text in free_advice(profiled, decision):
        chain.say_line("  free", text)
    training = chain.step("train", Training, lambda: make.train(decision), training_words)
    if code := training_exit_code(training):
        logs = relative(chain.run_dir / "logs")
        chain.say(f"{printable(training.failure or '', keep=_LINES)}\nlogs: {logs}")
        # Gates and prediction are only for a training run that ended well.
        return code, None
    evaluation = chain.step(
        "evaluate",
        Evaluation,
        lambda: evaluate(
            workload=workload,
            profile=profiled,
            decision=decision,
            training=training,
            today=date.today(),
        ),
        evaluation_words,
    )
    # On a busy machine train and evaluate have said that the figures do not count.
    if decision.is_noisy and not training.busy:
        chain.say_line("  busy", BUSY)
    is_quiet = not (decision.is_noisy or training.busy)
    if is_quiet and (words := local_core_words(decision)):
        chain.say_line("  local", words)
    return outcome_of(training, evaluation.gates).exit_code, evaluation


def _report_stopped(chain: Chain) -> None:
    """Prints and reports what is kept of a chain that Ctrl-C or SIGTERM ended."""
    # In its training, the follower of the training has printed it.
    if chain.doing != "train":
        done = STEPS[: STEPS.index(chain.doing)]
        kept = ", ".join(relative(chain.run_dir / f"{RECORD_OF[step]}.json") for step in done)
        # In its first step nothing is kept, from which it could continue.
        from_step = chain.doing if done else None
        again = command_line(chain.arguments, from_step=from_step)
        chain.say(f"stopped in {chain.doing}\nkept:  {kept or 'nothing'}\nagain: {again}")
    report = report_of_chain(chain, failure=f"stopped in {chain.doing}")
    if chain.doing == "evaluate":
        # A training run that was stopped has written its end to MLflow already.
        track(chain, report, is_stopped=True)


def _tell_end(chain: Chain, end: ChainEnd, ending: RunEnding) -> None:
    """Notes for the webhook how a chain without an error ended, and writes it to MLflow."""
    ending.links["report"] = str(end.report)
    if end.evaluation:
        ending.tells(end.evaluation.notices)
    if page := track(chain, end.report):
        ending.links["mlflow"] = page
    if not end.code:
        return
    if end.evaluation:
        reason = end.evaluation.reason
    else:
        # The training run failed.
        training = read_json(chain.run_dir / "training.json", Training)
        reason = outcome_of(training).words
    ending.failed(reason, exit_code=end.code)
    if end.code == EXIT_TERMINATED:
        # A training run that was stopped has not failed.
        ending.status = "stopped"


def track(chain: Chain, report: Path, *, is_stopped: bool = False) -> str:
    folder = chain.run_dir
    if not chain.workload.tracking.mlflow:
        return ""
    records = TrackedRecords(
        run=folder.name,
        training=found_in(folder / "training.json", Training),
        evaluation=found_in(folder / "evaluation.json", Evaluation),
        files=[*(folder / f"{RECORD_OF[step]}.json" for step in STEPS), report],
        is_refused=not chain.has_submitted,
    )
    tracking = tracking_of(chain.workload)
    return keep_tracked(tracking, records, is_stopped=is_stopped, quiet=chain.quiet)


def forget_later(run_dir: Path, first: int) -> None:
    """Removes what the steps to come will write: an old record must not pass for a new one."""
    if run_dir.is_dir():
        # Taken and released: no other process writes what is removed here.
        os.close(lock_run_folder(run_dir, run=run_dir.name))
    for step in STEPS[first:]:
        (run_dir / f"{RECORD_OF[step]}.json").unlink(missing_ok=True)
    if first <= STEPS.index("train"):
        # This training run may have fewer hosts: earlier logs must not pass for its own.
        for folder in ("hosts", "logs"):
            shutil.rmtree(run_dir / folder, ignore_errors=True)


def report_of_chain(chain: Chain, *, failure: str | None = None) -> Path:
    command = reproducing(chain.arguments)
    return report_of_run(chain.run_dir, workload=chain.workload, command=command, failure=failure)
