"""`stoker run` runs the four steps in a row, with their records in one folder."""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    Overrides,
    Prices,
    ReplaceDataLoader,
    WorkloadFile,
    Yes,
    offered,
)
from stoker.errors import EXIT_TERMINATED, DeclinedError, StokerError, UsageError
from stoker.logs import printable
from stoker.run.plan_price import with_plan_price
from stoker.terminal import program, relative, say, step_line

if TYPE_CHECKING:
    from stoker.records import Decision, Evaluation, Group, Profile, Training, Workload
    from stoker.records.base import RecordT

_LINES = "\n\t"
STEPS = ("profile", "decide", "train", "evaluate")
_RECORD_OF = dict(zip(STEPS, ("profile", "decision", "training", "evaluation"), strict=True))


def run_verb(
    context: typer.Context,
    workload: WorkloadFile,
    *,
    from_step: Annotated[str | None, typer.Option("--from", autocompletion=offered(*STEPS))] = None,
    groups: Annotated[list[str] | None, typer.Option("--group")] = None,
    replace_dataloader: ReplaceDataLoader = None,
    prices: Prices = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Run the whole chain: profile, decide, train, evaluate, report.

    All records, logs and the report are in a new folder, runs/ID. The ID is NAME-DATE-TIME.

    Args:
        from_step (STEP): Begin with this step (decide, train or evaluate), with the earlier records
            of the latest run (default: run all steps).
        groups (ROLE=[TYPE:]HOSTS[:WORKERS]): Train on these instance groups if other programs
            disturb the profile too much to choose a plan; may be repeated (default: today's
            cluster).

    Examples:
        stoker run configs/mnist.yaml
        stoker run configs/mnist.yaml --from train --set training.epochs=3
        stoker run configs/mnist.yaml --group dnn=local.c1:1 --group data=local.c1:1
    """
    from stoker.cli.workloads import resolve
    from stoker.project.unreported import unreported_words
    from stoker.records import Group, Training, nearest, read_json, to_json, write_json
    from stoker.records.outcome import outcome_of
    from stoker.run.billing import say_unused_types
    from stoker.run.champions import champion_metrics
    from stoker.run.clusters import groups_of, todays_cluster
    from stoker.run.run_folders import RUNS, latest_run_dir, new_run_dir, run_base
    from stoker.run.unchanged import since_last_run
    from stoker.run.webhook import telling

    sets = [*(overrides or ())]
    sets += [f"feed.replace_dataloader={replace_dataloader}"] if replace_dataloader else []
    record = resolve([workload], overrides=sets)
    if warning := unreported_words(record, folder=Path()):
        say(f"warning: {warning}", quiet=as_json)
    # Before anything runs: no champion is configured here, so a gate that needs one is refused.
    champion_metrics("", workload=record, region=None)
    today = todays_cluster(record).dnn
    say_unused_types(record, [Group.of_today(today)], quiet=as_json)
    if from_step is not None and from_step not in STEPS:
        raise UsageError(f"--from {from_step} is not a step", fix=nearest(from_step, STEPS))
    first = STEPS.index(from_step) if from_step else 0
    fallback = groups_of(record, groups) if groups else ()
    if record.skip_unchanged and not first and not groups:
        since = since_last_run(record, runs=RUNS)
        say(since.words, quiet=as_json)
        if since.is_unchanged:
            if as_json:
                print("null")
            return 0
    needs = [f"{_RECORD_OF[step]}.json" for step in STEPS[:first]]
    run_dir = latest_run_dir(record, needs=needs) if first else new_run_dir(run_base(record))
    if not first:
        # By it `--from` finds the run.
        write_json(run_dir / "workload.json", record)
    chain = Chain(
        workload=record,
        source=workload,
        run_dir=run_dir,
        first=first,
        fallback=fallback,
        prices=prices,
        quiet=as_json,
        assume_yes=yes,
        arguments=context.obj or ["run", workload],
    )
    # Before the first step: a chain that ends early must not leave an earlier run's records.
    forget_later(run_dir, first)
    say(f"stoker run {workload}  →  {relative(run_dir)}", quiet=as_json)
    with telling(record, run=run_dir.name, step=STEPS[first], quiet=as_json) as ending:
        try:
            code, evaluation = steps(chain)
        except DeclinedError as err:
            report_of_chain(chain, failure=str(err))
            raise
        except StokerError as err:
            report = report_of_chain(chain, failure=str(err))
            ending.step, ending.links["report"] = chain.doing, str(report)
            track(chain, report)
            raise
        except BaseException as err:
            ending.step = chain.doing
            # Ctrl-C or SIGTERM; any other error is a bug of stoker, and needs no report.
            if not isinstance(err, Exception):
                say_stopped(chain)
                report = report_of_chain(chain, failure=f"stopped in {chain.doing}")
                if chain.doing == "evaluate":
                    # A training that was stopped has written its end to MLflow already.
                    track(chain, report, is_stopped=True)
            raise
        report = report_of_chain(chain)
        ending.step, ending.links["report"] = chain.doing, str(report)
        ending.tells(evaluation.notices if evaluation else ())
        if page := track(chain, report):
            ending.links["mlflow"] = page
        if code:
            # Without an evaluation, the training failed.
            training = read_json(run_dir / "training.json", Training)
            why = evaluation.reason if evaluation else outcome_of(training).words
            ending.failed(why, exit_code=code)
            if code == EXIT_TERMINATED:
                # A training that was stopped has not failed.
                ending.status = "stopped"
    if as_json:
        print(to_json(evaluation) if evaluation else "null", end="")
    # Not wrapped: a terminal opens an address that is in one piece.
    say(f"{'report':<11}{report.resolve().as_uri()}", quiet=as_json)
    say(next_step(record, workload, code), quiet=as_json)
    return code


def next_step(workload: "Workload", file: str, code: int) -> str:
    # An example has shown that it works; the user's own workload may be trained again.
    if code == 0 and any(word.startswith("examples/") for word in workload.command):
        return f"next:      {program()} profile -- python YOUR_SCRIPT.py"
    return f"next:      {program()} run {shlex.quote(file)} --from train     (trains again)"


@dataclass(slots=True, kw_only=True)
class Chain:
    """A run of the chain of steps in `run_dir`."""

    workload: "Workload"
    source: str
    run_dir: Path
    first: int
    fallback: "tuple[Group, ...]"
    prices: Path | None
    quiet: bool
    assume_yes: bool
    arguments: Sequence[str]
    doing: str = STEPS[0]
    has_submitted: bool = False

    def step(
        self,
        name: str,
        kind: "type[RecordT]",
        make: "Callable[[], RecordT]",
        words: "Callable[[RecordT], str]",
    ) -> "RecordT":
        """Makes the step's record and writes it (`train` itself does), or reads an earlier one."""
        from stoker.records import read_json, write_json

        file = self.run_dir / f"{_RECORD_OF[name]}.json"
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
        from stoker.records import Profile
        from stoker.run.earlier_profiles import reused_words

        if isinstance(record, Profile) and (reused := reused_words(record, self.workload)):
            say(step_line("  age", reused.words, None), quiet=self.quiet)
            for text in reused.warnings:
                say(step_line("  warning", text, None), quiet=self.quiet)


def say_stopped(chain: Chain) -> None:
    """Prints what is kept of a chain that was stopped before or after its training."""
    from stoker.cli.train import command_line

    if chain.doing == "train":
        # `keep_stopped` has printed it.
        return
    done = STEPS[: STEPS.index(chain.doing)]
    kept = ", ".join(relative(chain.run_dir / f"{_RECORD_OF[step]}.json") for step in done)
    again = command_line(chain.arguments, from_step=chain.doing if done else None)
    say(f"stopped in {chain.doing}\nkept:  {kept or 'nothing'}\nagain: {again}", quiet=chain.quiet)


def steps(chain: Chain) -> "tuple[int, Evaluation | None]":
    """Runs the steps; returns the exit code, and the evaluation if the training succeeded."""
    from stoker.catalog import catalog_of
    from stoker.cli.kept_training import train_and_keep
    from stoker.cli.profile import following_profile
    from stoker.cli.train import command_line
    from stoker.decide import decide, followed, local_core_words, refuse_unfed
    from stoker.evaluate import evaluate
    from stoker.platforms import platform_named
    from stoker.platforms.service_limits import is_training_type
    from stoker.profile import profile
    from stoker.record_words import decision_words, evaluation_words, profile_words, training_words
    from stoker.records import Decision, Evaluation, Group, Profile, Training
    from stoker.records.outcome import outcome_of, training_exit_code
    from stoker.records.training import BUSY
    from stoker.run.billing import confirm
    from stoker.run.clusters import todays_cluster
    from stoker.run.earlier_profiles import with_age
    from stoker.run.earlier_runs import memory_of
    from stoker.run.outputs import free_advice
    from stoker.train import prepare

    workload, run_dir = chain.workload, chain.run_dir
    platform = platform_named(workload.platform, settings=workload)
    # Once for all steps: prediction and bill have the same prices.
    catalog = catalog_of(workload, chain.prices, is_service_type=is_training_type)
    catalog = with_plan_price(catalog, workload, quiet=False)

    def ask(
        groups: "Sequence[Group]", decision: "Decision | None" = None, *, is_profile: bool = False
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

    def measured() -> "Profile":
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
    # Before anything else is rented: data hosts could do nothing for this training.
    refuse_unfed(profiled, workload)

    def decided() -> "Decision":
        memory = memory_of(workload, runs=run_dir.parent, besides=run_dir)
        found = decide(
            profiled,
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
        found = with_age(found, profiled, workload)
        if memory.why_not:
            say(
                f"warning: decided without the last run's plan: {memory.why_not}", quiet=chain.quiet
            )
        # A cluster that was named on the command line is what the user wants.
        return found if chain.fallback else memory.applied(found)

    decision = chain.step("decide", Decision, decided, decision_words)
    # A decision of an earlier run may have been followed otherwise.
    decision = followed(decision, workload.constraints.follow)
    # Fixes that cost nothing are not part of the plan.
    for text in free_advice(profiled, decision):
        say(step_line("  free", text, None), quiet=chain.quiet)

    def trained() -> "Training":
        ask(decision.plan.groups, decision)
        job = prepare(
            workload=workload, groups=decision.plan.groups, run_dir=run_dir, decision=decision
        )
        return train_and_keep(
            job,
            workload=workload,
            platform=platform,
            catalog=catalog,
            decision=decision,
            again=command_line(chain.arguments, from_step="train"),
            quiet=chain.quiet,
            echo=False,
            on_submit=partial(setattr, chain, "has_submitted", True),
            assume_yes=chain.assume_yes,
        )

    training = chain.step("train", Training, trained, training_words)
    if code := training_exit_code(training):
        say(
            f"{printable(training.failure or '', keep=_LINES)}\nlogs: {relative(run_dir / 'logs')}",
            quiet=chain.quiet,
        )
        # Gates and prediction are only for a training that ended well.
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
    from stoker.cli.report import found_in
    from stoker.platforms.base import tracking_of
    from stoker.records import Evaluation, Training
    from stoker.run.mlflow_run import keep_tracked

    folder = chain.run_dir
    if not chain.workload.tracking.mlflow:
        return ""
    return keep_tracked(
        tracking_of(chain.workload),
        run=folder.name,
        training=found_in(folder / "training.json", Training),
        evaluation=found_in(folder / "evaluation.json", Evaluation),
        files=[*(folder / f"{_RECORD_OF[step]}.json" for step in STEPS), report],
        is_refused=not chain.has_submitted,
        is_stopped=is_stopped,
        quiet=chain.quiet,
    )


def forget_later(run_dir: Path, first: int) -> None:
    """Removes what the steps to come will write: an old record must not pass for a new one."""
    from stoker.platforms.local import lock_run_folder

    if run_dir.is_dir():
        # Taken and released: no other process writes what is removed here.
        os.close(lock_run_folder(run_dir, run=run_dir.name))
    for step in STEPS[first:]:
        (run_dir / f"{_RECORD_OF[step]}.json").unlink(missing_ok=True)
    if first <= STEPS.index("train"):
        # This training may have fewer hosts: earlier logs must not pass for its own.
        for folder in ("hosts", "logs"):
            shutil.rmtree(run_dir / folder, ignore_errors=True)


def reproducing(arguments: Sequence[str]) -> str:
    """Returns the command line that makes such a run again, with what it was given to train on."""
    words, rest = ["stoker"], iter(arguments)
    for word in rest:
        if word == "--from":
            # All steps are to be made again.
            next(rest, None)
        elif not word.startswith("--from=") and word not in ("--yes", "-y", "--json", "--debug"):
            words.append(word)
    return shlex.join(words)


def report_of_chain(chain: Chain, *, failure: str | None = None) -> Path:
    from stoker.cli.report import report_of_run

    command = reproducing(chain.arguments)
    return report_of_run(chain.run_dir, workload=chain.workload, command=command, failure=failure)
