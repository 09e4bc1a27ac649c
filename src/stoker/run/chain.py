"""The chain of steps of `stoker run`: profile, decide, train, evaluate, in one folder."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from stoker.catalog import catalog_of
from stoker.decide import DecisionInputs, decide, followed, local_core_words, refuse_unfed
from stoker.evaluate import evaluate
from stoker.logs import printable
from stoker.platforms import platform_named
from stoker.platforms.base import tracking_of
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
from stoker.terminal import relative, say, step_line
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
        if STEPS.index(name) < self.first:
            record = read_json(file, kind)
            say(step_line(name, f"reused: {words(record)}", None), quiet=self.quiet)
            self.tell_age(record)
            return record
        began, self.doing = time.monotonic(), name
        record = make()
        if name != "train":
            write_json(file, record)
        say(step_line(name, words(record), time.monotonic() - began), quiet=self.quiet)
        return record

    def tell_age(self, record: object) -> None:
        """Prints the age of a profile that is used again, and what has changed since."""
        if isinstance(record, Profile) and (reused := reused_words(record, self.workload)):
            say(step_line("  age", reused.words, None), quiet=self.quiet)
            for text in reused.warnings:
                say(step_line("  warning", text, None), quiet=self.quiet)


def say_stopped(chain: Chain) -> None:
    """Prints what is kept of a chain that was stopped before or after its training."""
    if chain.doing == "train":
        # The follower of the training has printed it.
        return
    done = STEPS[: STEPS.index(chain.doing)]
    kept = ", ".join(relative(chain.run_dir / f"{RECORD_OF[step]}.json") for step in done)
    again = command_line(chain.arguments, from_step=chain.doing if done else None)
    say(f"stopped in {chain.doing}\nkept:  {kept or 'nothing'}\nagain: {again}", quiet=chain.quiet)


def steps(chain: Chain) -> tuple[int, Evaluation | None]:
    """Runs the steps; returns the exit code, and the evaluation if the training succeeded."""
    workload, run_dir = chain.workload, chain.run_dir
    platform = platform_named(workload.platform, settings=workload)
    # Once for all steps: prediction and bill have the same prices.
    catalog = catalog_of(workload, chain.prices, is_service_type=is_training_type)
    catalog = with_plan_price(catalog, workload, quiet=False)

    def ask(
        groups: Sequence[Group], decision: Decision | None = None, *, is_profile: bool = False
    ) -> None:
        confirm(
            workload,
            groups,
            catalog=catalog,
            decision=decision,
            assume_yes=chain.assume_yes,
            quiet=chain.quiet,
            is_profile=is_profile,
        )

    def measured() -> Profile:
        cluster = todays_cluster(workload)
        ask([Group.of_today(cluster.dnn)], is_profile=True)
        with following_profile(workload, quiet=chain.quiet) as followed:
            return profile(
                workload,
                cluster=cluster,
                platform=platform,
                run_dir=run_dir / "profile",
                name=f"{run_dir.name}-profile",
                on_line=followed.line,
                # Ctrl-C ends the chain: half a profile must not be decided on.
                verdict_on_interrupt=False,
            )

    profiled = chain.step("profile", Profile, measured, profile_words)
    # Before anything else is rented: data hosts could do nothing for this training run.
    refuse_unfed(profiled, workload)

    def decided() -> Decision:
        memory = memory_of(workload, runs=run_dir.parent, besides=run_dir)
        new_decision = decide(
            DecisionInputs(
                profile=profiled,
                catalog=catalog,
                constraints=workload.known_constraints,
                training=workload.training,
                feed=workload.feed,
                fallback=chain.fallback,
                last=memory.last_groups,
                today=date.today(),
                processes_per_host=todays_cluster(workload).dnn.processes_per_host,
                calibration=memory.calibration(like=profiled, catalog=catalog),
                subject=(chain.source,),
            )
        )
        new_decision = with_age(new_decision, profiled, workload)
        if memory.why_not:
            say(
                f"warning: decided without the last run's plan: {memory.why_not}", quiet=chain.quiet
            )
        # A cluster that was named on the command line is what the user wants.
        return new_decision if chain.fallback else memory.applied(new_decision)

    decision = chain.step("decide", Decision, decided, decision_words)
    # A decision of an earlier run may have been followed otherwise.
    decision = followed(decision, workload.constraints.follow)
    # Fixes that cost nothing are not part of the plan.
    for text in free_advice(profiled, decision):
        say(step_line("  free", text, None), quiet=chain.quiet)

    def trained() -> Training:
        ask(decision.plan.groups, decision)
        job = prepare(
            workload=workload, groups=decision.plan.groups, run_dir=run_dir, decision=decision
        )
        run = FollowedTraining(
            job=job,
            workload=workload,
            platform=platform,
            catalog=catalog,
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

    training = chain.step("train", Training, trained, training_words)
    if code := training_exit_code(training):
        say(
            f"{printable(training.failure or '', keep=_LINES)}\nlogs: {relative(run_dir / 'logs')}",
            quiet=chain.quiet,
        )
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
    if decision.is_noisy or training.busy:
        say(step_line("  busy", BUSY, None), quiet=chain.quiet)
    elif words := local_core_words(decision):
        say(step_line("  local", words, None), quiet=chain.quiet)
    return outcome_of(training, evaluation.gates).exit_code, evaluation


def track(chain: Chain, report: Path, *, is_stopped: bool = False) -> str:
    folder = chain.run_dir
    if not chain.workload.tracking.mlflow:
        return ""
    return keep_tracked(
        tracking_of(chain.workload),
        run=folder.name,
        training=found_in(folder / "training.json", Training),
        evaluation=found_in(folder / "evaluation.json", Evaluation),
        files=[*(folder / f"{RECORD_OF[step]}.json" for step in STEPS), report],
        is_refused=not chain.has_submitted,
        is_stopped=is_stopped,
        quiet=chain.quiet,
    )


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
