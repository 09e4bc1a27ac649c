"""`stoker evaluate` checks a training against its quality gates and its prediction."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, OutputFiles, Overrides, Params, Report
from stoker.errors import GateError, UsageError

if TYPE_CHECKING:
    from stoker.records import Decision, Training, Workload


def evaluate_verb(
    workload: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help="The workload file (.yaml).", show_default=False),
    ] = None,
    *,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="F", help="The run's profile.json.")
    ] = None,
    decision: Annotated[
        Path | None, typer.Option("--decision", metavar="F", help="The run's decision.json.")
    ] = None,
    training: Annotated[
        str | None,
        typer.Option("--training", metavar="F", help="The run's training.json, or its text."),
    ] = None,
    champion: Annotated[
        str | None,
        typer.Option(
            "--champion",
            metavar="F",
            help="The model in use, for gates such as accuracy>=champion-0.005: its "
            "evaluation.json, a folder of champions, or registry:GROUP for the last approved one "
            "of SageMaker's registry.",
        ),
    ] = None,
    gate_of: Annotated[
        Path | None,
        typer.Option(
            "--gate-of",
            metavar="F",
            help="Only reads this evaluation.json, and exits with 3 if it did not pass.",
        ),
    ] = None,
    promote: Annotated[
        bool,
        typer.Option(
            "--promote",
            help="With --gate-of: a model that passed becomes the champion, in the folder of "
            "--champion.",
        ),
    ] = False,
    always: Annotated[
        bool,
        typer.Option(
            "--always",
            help="Exits with 0, and also judges a training whose record is lost; see passed "
            "in the record.",
        ),
    ] = False,
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs", metavar="URI", help="S3 folder of the job's outputs, with training.json."
        ),
    ] = None,
    delete: Annotated[
        str | None,
        typer.Option(
            "--delete", metavar="URI", help="First deletes this s3:// object: the run's token."
        ),
    ] = None,
    files: OutputFiles,
    report: Report = None,
    params: Params = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Checks a training against its quality gates and its prediction.

    The record is evaluation.json, unless --out names another file.
    """
    from stoker.cli.champions import champion_metrics
    from stoker.cli.outputs import (
        EVALUATE_PARAMETERS,
        deliver,
        exit_code_of,
        outputs_of,
        told_of_evaluation,
    )
    from stoker.cli.workloads import read_with_params, region_of
    from stoker.evaluate import evaluate, model_quality, summary
    from stoker.platforms.aws import Aws
    from stoker.records import Decision, Profile, read_json, write_text

    if promote and not (gate_of and champion is not None):
        raise UsageError(
            "--promote needs to know which model passed, and where champions are",
            where="--promote",
            fix="stoker evaluate --gate-of evaluation.json --champion FOLDER --promote",
        )
    if gate_of:
        _gate(gate_of, champions=champion if promote else None)
        return 0
    if not (profile and decision and training):
        named = {"--profile": profile, "--decision": decision, "--training": training}
        lacking = next(flag for flag, value in named.items() if not value)
        raise UsageError(
            f"{lacking} is missing: an evaluation needs all three records of a run",
            fix="name them with --profile, --decision and --training",
        )
    if workload is None:
        raise typer.BadParameter("name the workload that was trained", param_hint="WORKLOAD")
    destinations = outputs_of(files, parameters=EVALUATE_PARAMETERS)
    if delete:
        # Before the records are read, which may fail: a token must not outlive its run.
        Aws().delete_object(delete)
    of = read_with_params(workload, overrides=overrides or (), params=params or ())
    profiled = read_json(profile, Profile)
    decided = read_json(decision, Decision)
    trained, folder = _training(
        training, outputs_uri=outputs, workload=of, decision=decided, may_be_lost=always
    )
    record = evaluate(
        workload=of,
        profile=profiled,
        decision=decided,
        training=trained,
        champion=champion_metrics(champion or "", workload=of, region=region_of(of)),
    )
    quality = model_quality(trained)
    deliver(
        record,
        outputs=destinations,
        name="evaluation",
        explain=summary,
        as_json=as_json,
        told=told_of_evaluation(record),
    )
    if of.platform == "sagemaker" and destinations.out:
        # Next to it, for the model registry: evaluation.json says more than Studio shows.
        write_text(destinations.out.with_name("model-quality.json"), json.dumps(quality))
    if report:
        # Imports the templates of the page: only where a report is wanted.
        from stoker.cli.report import report_of_records

        report_of_records(
            report,
            workload=of,
            profile=profiled,
            decision=decided,
            training=trained,
            evaluation=record,
            training_file=folder / "training.json",
            profile_file=profile,
        )
    if always:
        return 0
    # A failed training has its own code, whatever its gates say.
    return exit_code_of(trained) or (0 if all(gate.passed for gate in record.gates) else 3)


def _gate(evaluation_file: Path, *, champions: str | None) -> None:
    """Checks whether an evaluation passed, for a gate; then its model becomes the champion.

    Args:
        evaluation_file: The evaluation.
        champions: Folder of champions; empty or absent: there is none.

    Raises:
        GateError: If it did not pass; the message is the evaluation's reason.
        UsageError: If there is no such evaluation, or the champion cannot be written.
    """
    from stoker.cli.champions import promote
    from stoker.records import Evaluation, read_json

    record = read_json(evaluation_file, Evaluation)
    if not record.passed:
        raise GateError(record.reason or "the evaluation did not pass", where="the gate")
    told = promote(evaluation_file, named=champions) if champions else ""
    held = f"{len(record.gates)} of {len(record.gates)} gates passed"
    print(f"passed: {held if record.gates else 'the training succeeded; it has no gates'}")
    if told:
        print(told)


def _training(
    training: str,
    *,
    outputs_uri: str | None,
    workload: "Workload",
    decision: "Decision",
    may_be_lost: bool,
) -> "tuple[Training, Path]":
    """Returns the training's record, and the folder that its timeline is in.

    Args:
        training: A file, or the record's own text.
        outputs_uri: S3 folder of a job's outputs, which may also have a training.json.
        workload: The workload that was trained.
        decision: The decision that it was trained on.
        may_be_lost: Whether a training without a record is judged as lost.
    """
    from stoker.cli.workloads import new_run_dir, region_of
    from stoker.evaluate import lost_training
    from stoker.platforms.aws import Aws
    from stoker.platforms.sagemaker.job import fetch_training
    from stoker.records import Training, read_json

    # A step of Kubeflow gets the record as a parameter (`outputs.carried`).
    if training.lstrip().startswith("{"):
        return read_json(training, Training), Path()
    file = Path(training)
    if outputs_uri:
        account = Aws(region=region_of(workload))
        folder = new_run_dir(workload.name)
        # The job's own record, where it left one: it knows more than what the step was handed.
        file = fetch_training(outputs_uri, folder=folder, aws=account) or file
    # A pipeline judges every run: one whose hosts died without a word is a failed one.
    if may_be_lost and not file.is_file():
        return lost_training(workload, decision), file.parent
    return read_json(file, Training), file.parent
