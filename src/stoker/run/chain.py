"""The chain of steps of `stoker run`: profile, decide, train, evaluate, in one folder."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from stoker.catalog import catalog_of
from stoker.decide import DecisionInputs, decide
from stoker.decide.explain import decision_words
from stoker.evaluate import evaluate, evaluation_words
from stoker.platforms.local import lock_run_folder
from stoker.record_words import profile_words, training_words
from stoker.records import (
    Decision,
    Evaluation,
    Group,
    Profile,
    Training,
    Workload,
    read_json,
    to_json,
    write_json,
)
from stoker.records.base import RecordT
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.run.advising import measure, with_age
from stoker.run.cost import confirm, todays_cluster
from stoker.run.folders import FILES, RunFiles, latest_run_dir, run_dir_of
from stoker.run.judging import champion_metrics
from stoker.run.outputs import free_advice
from stoker.run.train import concluding, follow, prepare
from stoker.run.webhook import RunEnding
from stoker.terminal import relative, say, step_line

STEPS = ("profile", "decide", "train", "evaluate")


def run_chain(
    workload: Workload,
    *,
    subject: tuple[str, ...],
    begin: str,
    fallback: tuple[Group, ...],
    prices: Path | None,
    as_json: bool,
    assume_yes: bool,
) -> int:
    """Runs the steps, and tells report, webhook and MLflow how the run ended.

    Returns the exit code; raises what a step raises.

    Args:
        subject: The workload's file, or the command after `--`, as typed.
        begin: The first step that is made; records of earlier ones are read.
        fallback: Groups to train on if other programs disturb the profile too much.
        prices: File of prices that adds to the catalog.
    """
    # What would be refused at the end of the run, or in its middle.
    champion = champion_metrics("", workload=workload)
    today = todays_cluster(workload)
    # Once for all steps: prediction and bill have the same prices.
    catalog = catalog_of(workload, prices)
    first = STEPS.index(begin)
    folder = _folder(workload, first)
    say(f"stoker run {shlex.join(subject)}  →  {relative(folder)}")
    run = folder.name
    with concluding(RunFiles.of(folder), workload, run=run, step=begin, again=_again) as ending:
        steps = _Steps(folder, first, ending)
        profile = steps.record(
            "profile",
            Profile,
            profile_words,
            lambda: measure(
                workload,
                cluster=today,
                run_dir=folder / "profile",
                name=f"{folder.name}-profile",
                catalog=catalog,
                assume_yes=assume_yes,
            ),
        )
        inputs = DecisionInputs(
            profile=profile,
            catalog=catalog,
            constraints=workload.known_constraints,
            training=workload.training,
            feed=workload.feed,
            fallback=fallback,
            today=date.today(),
            processes_per_host=today.dnn.processes_per_host,
            subject=subject,
        )
        decision = steps.record(
            "decide",
            Decision,
            decision_words,
            lambda: with_age(decide(inputs), profile),
        )
        # Fixes that cost nothing are not part of the plan.
        for text in free_advice(profile, decision):
            say(step_line("  free", text, None))

        def trained() -> Training:
            hosts = decision.plan.groups
            confirm(workload, hosts, catalog=catalog, decision=decision, assume_yes=assume_yes)
            return follow(
                prepare(workload=workload, groups=hosts, run_dir=folder, decision=decision),
                workload,
                catalog=catalog,
                decision=decision,
                echo=False,
            )

        training = steps.record("train", Training, training_words, trained)
        evaluation = None
        # Gates and prediction are only for a training run that ended well.
        if not training_exit_code(training):
            evaluation = steps.record(
                "evaluate",
                Evaluation,
                evaluation_words,
                lambda: evaluate(
                    workload=workload,
                    profile=profile,
                    decision=decision,
                    training=training,
                    champion=champion,
                    today=inputs.today,
                ),
            )
            ending.warnings = evaluation.warnings
        outcome = outcome_of(training, evaluation.gates if evaluation else ())
        ending.take(outcome)
    if not evaluation:
        say(f"{training.failure or ''}\nlogs: {relative(folder / 'logs')}")
    if as_json:
        print(to_json(evaluation) if evaluation else "null", end="")
    # Not wrapped: a terminal opens an address that is in one piece.
    say(f"{'report':<11}{ending.report}")
    say(f"next:      {_again('train')}     (trains again)")
    return outcome.exit_code


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of one run, from `first` on made, before read."""

    folder: Path
    first: int
    ending: RunEnding

    def record(
        self,
        name: str,
        kind: type[RecordT],
        words: Callable[[RecordT], str],
        make: Callable[[], RecordT],
    ) -> RecordT:
        """Makes the step's record and writes it, or reads an earlier one."""
        number = STEPS.index(name)
        file = self.folder / FILES[number]
        if number < self.first:
            record = read_json(file, kind)
            say(step_line(name, f"reused: {words(record)}", None))
            return record
        began = time.monotonic()
        # Before it is made, so that who stops the run is told in which step.
        self.ending.step = name
        record = make()
        write_json(file, record)
        say(step_line(name, words(record), time.monotonic() - began))
        return record


def _folder(workload: Workload, first: int) -> Path:
    """Makes or finds the run's folder, and removes what the steps from `first` on will write."""
    if first:
        folder = latest_run_dir(workload, needs=FILES[:first])
    else:
        folder = run_dir_of(workload)
        # By it `--from` finds the run.
        write_json(folder / "workload.json", workload)
    # Taken and released: no other process writes what is removed here.
    os.close(lock_run_folder(folder, run=folder.name))
    # An old record or log must not pass for a new one.
    for name in FILES[first:]:
        (folder / name).unlink(missing_ok=True)
    if first < STEPS.index("evaluate"):
        for name in ("hosts", "logs"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _again(step: str) -> str:
    """Returns the command line that continues with a step."""
    words = [word for word in sys.argv[2:] if not word.startswith("--from=")]
    with suppress(ValueError):
        at = words.index("--from")
        del words[at : at + 2]
    return shlex.join(["stoker", "run", "--from", step, *words])
