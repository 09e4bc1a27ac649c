"""The chain of steps of `stoker run`: profile, decide, train, evaluate, in one folder."""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from stoker.catalog import Catalog, catalog_of
from stoker.decide import DecisionInputs, decide
from stoker.decide.explain import decision_words
from stoker.errors import StokerError, TerminatedError
from stoker.evaluate import evaluate, evaluation_words
from stoker.logs import printable
from stoker.platforms.aws import is_training_type
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
from stoker.records.outcome import Outcome, outcome_of, training_exit_code
from stoker.run.advising import age_of, measure, with_age
from stoker.run.cost import confirm, todays_cluster
from stoker.run.folders import RECORD, latest_run_dir, run_dir_of
from stoker.run.judging import champion_metrics
from stoker.run.outputs import free_advice
from stoker.run.train import conclude, follow, prepare
from stoker.run.webhook import RunEnding, telling
from stoker.terminal import relative, say, step_line

# Each step leaves a record.
_FILES = {
    "profile": "profile.json",
    "decide": "decision.json",
    "train": RECORD,
    "evaluate": "evaluation.json",
}
_STEPS = tuple(_FILES)


@dataclass(slots=True, kw_only=True)
class Chain:
    """A run of the chain of steps, in a new folder, or in the latest with the earlier records.

    Attributes:
        subject: The workload's file, or the command after `--`, as typed.
        begin: The first step that is made; records of earlier ones are read.
        fallback: Groups to train on if other programs disturb the profile too much.
        prices: File of prices that adds to the catalog.
        typed: The command line.
        doing: The step that runs.
    """

    workload: Workload
    subject: tuple[str, ...]
    begin: str
    fallback: tuple[Group, ...]
    prices: Path | None
    typed: Sequence[str]
    quiet: bool
    assume_yes: bool
    run_dir: Path = field(init=False)
    doing: str = field(init=False)

    def run(self) -> int:
        """Runs the steps, and tells report, webhook and MLflow how the run ended.

        Returns the exit code; raises what a step raises.
        """
        workload = self.workload
        # What would be refused at the end of the run, or in its middle.
        champion_metrics("", workload=workload)
        todays_cluster(workload)
        self.doing = self.begin
        self._take_folder()
        self._say(f"stoker run {shlex.join(self.subject)}  →  {relative(self.run_dir)}")
        name = self.run_dir.name
        with telling(workload, run=name, step=self.begin, quiet=self.quiet) as ending:
            try:
                outcome, evaluation = self._run_steps()
            except (StokerError, KeyboardInterrupt, TerminatedError) as err:
                # In its training, who follows it has said so.
                if not isinstance(err, StokerError) and self.doing != "train":
                    kept = ", ".join(file.name for file in self._files(_STEPS) if file.is_file())
                    self._say(f"stopped in {self.doing}\nkept:  {kept or 'nothing'}")
                    self._say(f"again: {self._again(self.doing)}")
                self._conclude(ending, err)
                raise
            report = self._conclude(ending)
            if evaluation:
                ending.warnings = evaluation.warnings
            ending.take(outcome)
        if self.quiet:
            print(to_json(evaluation) if evaluation else "null", end="")
        # Not wrapped: a terminal opens an address that is in one piece.
        self._say(f"{'report':<11}{report}")
        self._say(f"next:      {self._again('train')}     (trains again)")
        return outcome.exit_code

    def _take_folder(self) -> None:
        """Makes or finds the run's folder, and removes what the steps to come will write."""
        begin = _STEPS.index(self.begin)
        if begin:
            self.run_dir = latest_run_dir(
                self.workload, needs=[_FILES[step] for step in _STEPS[:begin]]
            )
        else:
            self.run_dir = run_dir_of(self.workload)
            # By it `--from` finds the run.
            write_json(self.run_dir / "workload.json", self.workload)
        # Taken and released: no other process writes what is removed here.
        os.close(lock_run_folder(self.run_dir, run=self.run_dir.name))
        # An old record or log must not pass for a new one.
        for file in self._files(_STEPS[begin:]):
            file.unlink(missing_ok=True)
        if self.begin != "evaluate":
            for folder in ("hosts", "logs"):
                shutil.rmtree(self.run_dir / folder, ignore_errors=True)

    def _run_steps(self) -> tuple[Outcome, Evaluation | None]:
        """Runs the steps; returns the result, and the evaluation if the training succeeded."""
        workload = self.workload
        # Once for all steps: prediction and bill have the same prices.
        catalog = catalog_of(workload, self.prices, is_service_type=is_training_type)
        profiled = self._step(
            "profile",
            Profile,
            lambda: measure(
                workload,
                cluster=todays_cluster(workload),
                run_dir=self.run_dir / "profile",
                name=f"{self.run_dir.name}-profile",
                catalog=catalog,
                quiet=self.quiet,
                assume_yes=self.assume_yes,
            ),
            profile_words,
        )
        if self.begin != "profile":
            for text in age_of(profiled, workload):
                self._say(step_line("  age", text, None))
        decision = self._step(
            "decide", Decision, lambda: self._decide(profiled, catalog), decision_words
        )
        # Fixes that cost nothing are not part of the plan.
        for text in free_advice(profiled, decision):
            self._say(step_line("  free", text, None))
        training = self._step(
            "train", Training, lambda: self._train(decision, catalog), training_words
        )
        if training_exit_code(training):
            failure = printable(training.failure or "", keep="\n\t")
            self._say(f"{failure}\nlogs: {relative(self.run_dir / 'logs')}")
            # Gates and prediction are only for a training run that ended well.
            return outcome_of(training), None
        evaluation = self._step(
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
        return outcome_of(training, evaluation.gates), evaluation

    def _step(
        self,
        name: str,
        kind: type[RecordT],
        make: Callable[[], RecordT],
        words: Callable[[RecordT], str],
    ) -> RecordT:
        """Makes the step's record and writes it (`train` itself does), or reads an earlier one."""
        file = self.run_dir / _FILES[name]
        if _STEPS.index(name) < _STEPS.index(self.begin):
            record = read_json(file, kind)
            self._say(step_line(name, f"reused: {words(record)}", None))
            return record
        began = time.monotonic()
        # Before it is made, so that who stops the run is told in which step.
        self.doing = name
        record = make()
        if name != "train":
            write_json(file, record)
        self._say(step_line(name, words(record), time.monotonic() - began))
        return record

    def _decide(self, profiled: Profile, catalog: Catalog) -> Decision:
        """Chooses the cluster."""
        workload = self.workload
        decision = decide(
            DecisionInputs(
                profile=profiled,
                catalog=catalog,
                constraints=workload.known_constraints,
                training=workload.training,
                feed=workload.feed,
                fallback=self.fallback,
                today=date.today(),
                processes_per_host=todays_cluster(workload).dnn.processes_per_host,
                subject=self.subject,
            )
        )
        return with_age(decision, profiled, workload)

    def _train(self, decision: Decision, catalog: Catalog) -> Training:
        """Trains on the decision's cluster, and follows the job to its end."""
        workload, groups = self.workload, decision.plan.groups
        confirm(
            workload,
            groups,
            catalog=catalog,
            decision=decision,
            assume_yes=self.assume_yes,
            quiet=self.quiet,
        )
        return follow(
            prepare(workload=workload, groups=groups, run_dir=self.run_dir, decision=decision),
            workload,
            catalog=catalog,
            decision=decision,
            again=self._again("train"),
            quiet=self.quiet,
            echo=False,
        )

    def _files(self, steps: Sequence[str]) -> list[Path]:
        return [self.run_dir / _FILES[step] for step in steps]

    def _again(self, step: str) -> str:
        """Returns the command line that continues with a step."""
        words = [word for word in self.typed[1:] if not word.startswith("--from=")]
        if "--from" in words:
            del words[words.index("--from") : words.index("--from") + 2]
        return shlex.join(["stoker", "run", "--from", step, *words])

    def _say(self, words: str) -> None:
        say(words, quiet=self.quiet)

    def _conclude(self, ending: RunEnding, err: BaseException | None = None) -> str:
        ending.step = self.doing
        typed = shlex.join(["stoker", *self.typed])
        return conclude(
            self.run_dir,
            workload=self.workload,
            ending=ending,
            typed=typed,
            quiet=self.quiet,
            err=err,
        )
