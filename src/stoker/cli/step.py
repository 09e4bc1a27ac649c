"""Verbs of a pipeline's steps, `stoker step NAME`: no list of verbs shows them.

A step has the flags of the verb that people type, what a pipeline passes from step to step, and in
Kubeflow its inputs and outputs as one JSON document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.clients import client_of
from stoker.cli.options import (
    AsJson,
    ModelFiles,
    OutputFiles,
    Overrides,
    Reach,
    ReportFiles,
    StepParams,
    TargetName,
    Words,
    Yes,
)
from stoker.cli.training_flags import TrainingFlags
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Workload
    from stoker.run.outputs import StepInputs
    from stoker.run.pipeline_memory import PlaceInMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlags:
    """What the step of a pipeline's run is given, in Kubeflow by --executor-input.

    Attributes:
        run_id (ID): Id of the pipeline's run.
        always: Exit with 0 though the training failed or its record is lost: see the record.
    """

    run_id: str | None = None
    always: bool = False
    params: StepParams = None

    def inputs(self, files: OutputFiles) -> "StepInputs":
        """Returns the inputs of the step, with what these flags add."""
        from stoker.run.outputs import step_inputs

        given = step_inputs(files)
        params = (*given.params, *(self.params or ()))
        return replace(given, run_id=self.run_id or given.run_id, params=params)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep(StepFlags):
    """The same for the step that trains.

    Attributes:
        profile (F): The decision's profile.json.
    """

    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """The records of a run that are judged.

    Attributes:
        profile (F): The run's profile.json (required).
        decision (F): The run's decision.json (required).
        training (F): The run's training.json (required).
    """

    profile: Path | None = None
    decision: Path | None = None
    training: str | None = None

    def named(self, training: str | None = None) -> tuple[Path, Path, str]:
        """Returns the three; raises UsageError for one that is missing."""
        training = self.training or training
        if self.profile and self.decision and training:
            return self.profile, self.decision, training
        flags = {"--profile": self.profile, "--decision": self.decision, "--training": training}
        lacking = next(flag for flag, value in flags.items() if not value)
        fix = "evaluate needs --profile, --decision and --training"
        raise UsageError(f"missing {lacking}", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """What becomes of a run that was judged.

    Attributes:
        expires: Tag a refused model in S3, so that a rule of the bucket deletes it.
        remember (DIR): Add a run that passed to the pipeline's memory, in this folder.
        comparison (F): With --remember: the comparison.json of the run's first step.
        branch (NAME): With --remember: name of the branch that this training job belongs to.
    """

    expires: bool = False
    remember: Path | None = None
    comparison: str | None = None
    branch: str = ""

    def place(self, *, branch: str = "", comparison: str = "") -> "PlaceInMemory | None":
        """Returns where the run goes; the arguments stand for flags that are missing."""
        from stoker.run.pipeline_memory import PlaceInMemory

        if self.remember is None:
            return None
        return PlaceInMemory(
            folder=self.remember,
            branch=self.branch or branch,
            comparison=self.comparison or comparison,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFlags:
    """The gate of a pipeline's run.

    Attributes:
        gate_of (F): The evaluation.json (required).
        champion (DIR): With --promote: the folder of champions; empty: the pipeline has none.
        promote: Make a model that passed the new champion.
    """

    gate_of: Path
    champion: str | None = None
    promote: bool = False


def train_step(
    context: typer.Context,
    words: Words = None,
    *,
    flags: TrainingFlags,
    step: TrainStep,
    files: ModelFiles,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Train on the cluster that a pipeline's run has decided on.

    Examples:
        stoker step train w.yaml --run-id ID --profile p.json --decision d.json
    """
    from stoker.environment import pipeline_run
    from stoker.records import Profile, read_json
    from stoker.run.command_lines import command_line
    from stoker.run.outputs import TRAIN_PARAMETERS, outputs_of
    from stoker.run.training_run import lead

    given = step.inputs(files)
    outputs = outputs_of(files, model=files.model, parameters=TRAIN_PARAMETERS)
    words = words or given.words
    again = command_line(context.obj or ["step", "train", *words])
    order = flags.order(
        words, given, overrides=overrides, again=again, quiet=as_json, assume_yes=yes
    )
    if flags.dry_run:
        print(order.request(as_json=as_json))
        return 0
    if step.profile:
        order = replace(order, profile=read_json(step.profile, Profile))
    # A pipeline's last step notifies of its run, or the step that judges the training.
    is_told = not (outputs.executor or given.run_id or pipeline_run())
    return lead(order.begin(), outputs=outputs, is_told=is_told, always=step.always)


def evaluate_step(
    workload: str | None = None,
    *,
    records: RunRecords,
    champion: str | None = None,
    step: StepFlags,
    memory: MemoryFlags,
    files: ReportFiles,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Judge a pipeline's training run, and keep what later runs need.

    Args:
        workload ([WORKLOAD]): The workload file (.yaml), for its gates.
        champion (F): The model in use, as for evaluate.

    Examples:
        stoker step evaluate w.yaml --profile p.json --decision d.json --training t.json --always
    """
    from stoker.run.judging import Judgement, judge_run
    from stoker.run.outputs import EVALUATE_PARAMETERS, outputs_of

    given = step.inputs(files)
    profile, decision, training = records.named(given.training)
    judgement = Judgement(
        workload=_judged_workload(
            workload or given.workload,
            (profile, training),
            overrides=overrides or (),
            params=given.params,
        ),
        profile=profile,
        decision=decision,
        training=training,
        champion=champion or given.champion or "",
        always=step.always,
        outputs=outputs_of(files, parameters=EVALUATE_PARAMETERS),
        report=files.report,
        expires=memory.expires,
        memory=memory.place(branch=given.branch),
        as_json=as_json,
    )
    return judge_run(judgement)


def _judged_workload(
    file: str | None,
    records: tuple[Path, str],
    *,
    overrides: Sequence[str],
    params: Sequence[str] = (),
) -> "Workload":
    """Returns the workload with its gates.

    Args:
        file: Its file; None: of `-- CMD`, whose records have the command, and --set its gates.
        records: Of the profile and the training.
        overrides: Keys that --set sets.
        params: Parameters of a pipeline's run.
    """
    from stoker.cli.workloads import read_with_params, workload_of_records
    from stoker.records import Profile, Training, read_json

    if file:
        return read_with_params(file, overrides=overrides, params=params)
    profile, training = records
    return workload_of_records(
        read_json(training, Training), read_json(profile, Profile), overrides=overrides
    )


def gate_step(
    workload: str | None = None,
    *,
    gate: GateFlags,
    records: RunRecords,
    memory: MemoryFlags,
    files: OutputFiles,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Exit with 3 if an evaluation did not pass; else keep what came of it.

    Args:
        workload ([WORKLOAD]): With --remember: the workload file (.yaml).

    Examples:
        stoker step gate --gate-of evaluation.json --champion champions --promote
    """
    from stoker.cli.workloads import read_with_params
    from stoker.records import Training, read_json
    from stoker.run.judging import pass_gate
    from stoker.run.outputs import step_inputs
    from stoker.run.pipeline_memory import keep_remembered

    given = step_inputs(files)
    # A pipeline without a champion leaves it out.
    folder = gate.champion
    if files.executor_input and folder is None:
        folder = given.champion or ""
    if gate.promote and folder is None:
        raise UsageError(
            "--promote needs --champion",
            where="--promote",
            fix="stoker step gate --gate-of evaluation.json --champion FOLDER --promote",
        )
    pass_gate(gate.gate_of, champions=folder if gate.promote else None)
    place = memory.place(comparison=given.comparison)
    if place:
        profile, decision, text = records.named(given.training)
        training = read_json(text, Training)
        keep_remembered(
            place,
            workload=read_with_params(workload or given.workload or "", overrides=overrides or ()),
            run=training.job.name,
            records=(profile, decision),
            training=training,
            quiet=as_json,
        )


def finish_step(
    workload: str | None = None,
    *,
    step: StepFlags,
    files: ModelFiles,
    evaluation: Path | None = None,
    report: Path | None = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """End what is left of a run that is over, and follow its lost jobs.

    Args:
        workload ([WORKLOAD]): The workload file (.yaml).
        evaluation (F): Write the evaluation of a lost job to this file.
        report (F): Write the HTML report of a lost job to this file.

    Examples:
        stoker step finish w.yaml --run-id ID
    """
    from stoker.cli.workloads import read_with_params
    from stoker.run.outputs import outputs_of
    from stoker.run.step_finish import FinishOutputs, finish_run

    given = step.inputs(files)
    file = workload or given.workload
    if not file or not given.run_id:
        raise UsageError(
            "the last step needs a workload and the id of the pipeline's run",
            where="stoker step finish",
            fix="stoker step finish WORKLOAD --run-id ID",
        )
    record = outputs_of(files, model=files.model)
    finish_run(
        read_with_params(file, overrides=overrides or (), params=given.params),
        run_id=given.run_id,
        outcome=given.outcome or "{}",
        outputs=FinishOutputs(record=record, evaluation=evaluation, report=report),
        as_json=as_json,
    )


def alone_step(
    target: TargetName, pipeline: str, *, besides: Annotated[str, typer.Option("--besides")]
) -> None:
    """Fail with 4 if a run of the pipeline that began before this one is active.

    Args:
        pipeline (PIPELINE): Name of the pipeline on SageMaker.
        besides (ID): Id of this run.

    Examples:
        stoker step alone sagemaker PIPELINE --besides ID
    """
    from stoker.pipelines.sagemaker.overlap import refuse_overlap

    client_of(target, None, Reach(), run=pipeline)
    refuse_overlap(pipeline, besides)
    print(f"no run of {pipeline} that began earlier is active")


def step_verb() -> None:
    """List the verbs of a pipeline's steps, which its definition runs.

    Examples:
        stoker step train --help
    """
    from stoker.cli.app import STEP_VERBS

    typer.echo(f"Usage: stoker step NAME --help\n\n{STEP_VERBS['step']}\n")
    for name, line in STEP_VERBS.items():
        if name != "step":
            typer.echo(f"  stoker {name:<14} {line}")
