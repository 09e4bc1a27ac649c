"""`stoker evaluate` checks a training run against its quality gates and its prediction."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stoker.cli.options import HIDDEN, AsJson, OutFile, OutputFiles, Overrides, StepParams
from stoker.errors import GateError, UsageError
from stoker.terminal import say

if TYPE_CHECKING:
    from stoker.records import Decision, Evaluation, Training, Workload
    from stoker.run.outputs import Outputs


def evaluate_verb(
    workload: str | None = None,
    *,
    profile: Path | None = None,
    decision: Path | None = None,
    training: str | None = None,
    champion: str | None = None,
    gate_of: Path | None = None,
    promote: bool = False,
    always: Annotated[bool, HIDDEN] = False,
    expires: Annotated[bool, HIDDEN] = False,
    remember: Annotated[Path | None, HIDDEN] = None,
    comparison: Annotated[Path | None, HIDDEN] = None,
    branch: Annotated[str, HIDDEN] = "",
    files: OutputFiles,
    report: OutFile = None,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Check a training run against its quality gates and its prediction.

    The record is evaluation.json, unless --out names another file. Exit code 3 means that a gate
    did not pass, or that the training did no step; a run that failed or was stopped has its own
    exit code.

    Args:
        workload ([WORKLOAD]): The workload file (.yaml), for its gates; not needed for a command
            after --.
        profile (F): The run's profile.json (required).
        decision (F): The run's decision.json (required).
        training (F): The run's training.json (required).
        champion (F): Compare with the model in use, for gates such as accuracy>=champion-0.005: its
            evaluation.json, a folder of champions, or registry:GROUP for the last approved model in
            SageMaker's registry (default: none; such gates are then refused).
        gate_of (F): Only read this evaluation.json, and exit with 3 if it did not pass (default:
            evaluate the run).
        promote: With --gate-of: make a model that passed the new champion, in the folder of
            --champion.
        always: Exit with 0, and also judge a training run whose record is lost; the record's passed
            says how it was judged.
        expires: Tag a refused model in S3, so that a rule of the bucket deletes it.
        remember (DIR): Add a run that passed to the pipeline's memory, in this folder.
        comparison (F): With --remember: the comparison.json of the run's first step.
        branch (NAME): With --remember: name of the branch that this training job belongs to.
        report (F): Also write an HTML report to this file (default: none).

    Examples:
        stoker evaluate w.yaml --profile p.json --decision d.json --training t.json
        stoker evaluate --profile p.json --decision d.json --training t.json
    """
    from stoker.cli.workloads import read_with_params, workload_of_records
    from stoker.environment import pipeline_run
    from stoker.records import Profile, Training, read_json
    from stoker.records.outcome import outcome_of
    from stoker.run.cloudwatch_metrics import publish
    from stoker.run.outputs import EVALUATE_PARAMETERS, outputs_of, step_inputs
    from stoker.run.pipeline_memory import keep_remembered
    from stoker.run.webhook import telling

    given = step_inputs(files)
    workload, training = workload or given.workload, training or given.training
    # A pipeline without a champion leaves it out.
    champion = given.champion or "" if files.executor_input and champion is None else champion
    if promote and not (gate_of and champion is not None):
        raise UsageError(
            "--promote needs --gate-of and --champion",
            where="--promote",
            fix="stoker evaluate --gate-of evaluation.json --champion FOLDER --promote",
        )
    if gate_of:
        _gate(gate_of, champions=champion if promote else None)
        if remember:
            _remember(
                remember,
                workload=read_with_params(workload or "", overrides=overrides or (), params=()),
                records=_records(profile, decision, training),
                comparison=comparison or given.comparison,
                quiet=as_json,
            )
        return 0
    profile, decision, training = _records(profile, decision, training)
    destinations = outputs_of(files, parameters=EVALUATE_PARAMETERS)
    params = [*given.params, *(params or ())]
    if workload:
        of = read_with_params(workload, overrides=overrides or (), params=params)
    else:
        # Of `-- CMD`: the records have the command, and --set may name gates.
        of = workload_of_records(
            read_json(training, Training), read_json(profile, Profile), overrides=overrides or ()
        )
    run = pipeline_run()
    # On Kubeflow the run's last step notifies, and who types this command sees the result.
    with telling(
        of, run=run, step="evaluate", quiet=as_json, is_told=bool(run) and not destinations.executor
    ) as ending:
        trained, record = judged(
            of,
            records=(profile, decision, training),
            may_be_lost=always,
            champion=champion,
            destinations=destinations,
            report=report,
            links=ending.links,
            as_json=as_json,
        )
        if expires:
            _mark(trained, record, workload=of, quiet=as_json)
        if remember and record.passed:
            keep_remembered(
                remember,
                workload=of,
                branch=branch or given.branch,
                run=run or trained.job.name,
                records=(profile, decision),
                training=trained,
                comparison=comparison,
                quiet=as_json,
            )
        ending.run = run or trained.job.name
        ending.links |= {"job": trained.job.url} if trained.job.url else {}
        outcome = outcome_of(trained, record.gates)
        ending.tells(record.notices)
        if run and of.platform_info.has_model_registry:
            publish(of, record.notices, quiet=as_json)
        if not outcome.is_good:
            ending.failed(outcome.words, exit_code=outcome.exit_code)
        if outcome.state == "stopped":
            ending.status = "stopped"
    return 0 if always else outcome.exit_code


def _records(
    profile: Path | None, decision: Path | None, training: str | None
) -> tuple[Path, Path, str]:
    """Returns the three records of a run; raises UsageError for one that is missing."""
    if profile and decision and training:
        return profile, decision, training
    named = {"--profile": profile, "--decision": decision, "--training": training}
    lacking = next(flag for flag, value in named.items() if not value)
    fix = "evaluate needs --profile, --decision and --training"
    raise UsageError(f"missing {lacking}", fix=fix)


def _remember(
    folder: Path,
    *,
    workload: "Workload",
    records: tuple[Path, Path, str],
    comparison: Path | str,
    quiet: bool,
) -> None:
    """Adds a run to its pipeline's memory, of which the gate has just been passed."""
    from stoker.records import Training, read_json
    from stoker.run.pipeline_memory import keep_remembered

    profile, decision, text = records
    training = read_json(text, Training)
    keep_remembered(
        folder,
        workload=workload,
        branch="",
        run=training.job.name,
        records=(profile, decision),
        training=training,
        comparison=comparison,
        quiet=quiet,
    )


def _mark(training: "Training", record: "Evaluation", *, workload: "Workload", quiet: bool) -> None:
    """Tags a model that was refused, and its copy; a line names what cannot be tagged."""
    from stoker.errors import ServiceError
    from stoker.platforms.aws import Aws, region_of
    from stoker.platforms.sagemaker.registry import keep_registered, mark_models

    settings = workload.sagemaker
    if not settings:
        return
    aws = Aws(region=region_of(workload))
    try:
        for uri in mark_models(aws, training, is_refused=not record.passed):
            say(f"model:   {uri} was refused, and expires by the bucket's rule", quiet=quiet)
        group, below = settings.model.group or workload.name, f"{settings.output_uri.rstrip('/')}/"
        for kept in keep_registered(aws, group, below=below):
            say(f"model:   {kept} is registered, and expires no more", quiet=quiet)
    except ServiceError as err:
        say(f"model:   not tagged, so it stays until stoker prune: {err.what}", quiet=quiet)


def judged(
    workload: "Workload",
    *,
    records: tuple[Path, Path, str],
    may_be_lost: bool,
    champion: str | None,
    destinations: "Outputs",
    report: Path | None,
    links: dict[str, str],
    as_json: bool,
) -> "tuple[Training, Evaluation]":
    """Judges a run, and writes evaluation and report to files and to MLflow; `links` gets its page.

    `records` are the files of profile, decision and training, or the text of the training, which
    `may_be_lost`.
    """
    from stoker.environment import pipeline_run
    from stoker.evaluate import evaluate, model_metadata, model_quality
    from stoker.platforms.aws import region_of
    from stoker.platforms.base import tracking_of
    from stoker.record_words import evaluation_table
    from stoker.records import Decision, Profile, read_json, write_text
    from stoker.run.champions import champion_metrics
    from stoker.run.mlflow_run import keep_tracked
    from stoker.run.outputs import deliver, told_of_evaluation

    profile, decision, training = records
    profiled = read_json(profile, Profile)
    decided = read_json(decision, Decision)
    trained, folder = _training(
        training, workload=workload, decision=decided, may_be_lost=may_be_lost
    )
    if trained.is_unknown:
        trained = _fetched(trained, workload=workload)
    record = evaluate(
        workload=workload,
        profile=profiled,
        decision=decided,
        training=trained,
        champion=champion_metrics(champion or "", workload=workload, region=region_of(workload)),
        today=date.today(),
        is_registered=bool(pipeline_run()),
    )
    deliver(
        record,
        outputs=destinations,
        name="evaluation",
        explain=evaluation_table,
        as_json=as_json,
        told=told_of_evaluation(record),
    )
    if workload.platform_info.has_model_registry and destinations.out:
        # For the model registry: Studio cannot show all of evaluation.json.
        quality = json.dumps(model_quality(trained))
        write_text(destinations.out.with_name("model-quality.json"), quality)
        metadata = model_metadata(workload, trained, decided)
        write_text(destinations.out.with_name("model-metadata.json"), json.dumps(metadata))
    if report:
        # Imported here, with the templates of the page.
        from stoker.cli.report import environment, existing, timeline_of
        from stoker.report import ReportedRun, write_report

        write_report(
            report,
            ReportedRun(
                run_id=trained.job.name,
                workload=workload,
                profile=profiled,
                decision=decided,
                training=trained,
                evaluation=record,
                before_timeline=existing(profile.with_name("baseline-timeline.csv")),
                after_timeline=timeline_of(trained, folder=folder),
                feed_file=existing(folder / "feed.csv"),
                before_gpus=existing(profile.with_name("baseline-gpu.csv")),
                after_gpus=existing(folder / "gpu.csv"),
                environment=environment(),
            ),
        )
    if workload.tracking.mlflow:
        # Under stoker's names: a pipeline names its files itself.
        named = {"profile.json": profile, "decision.json": decision, "report.html": report}
        named["evaluation.json"] = destinations.out or Path("evaluation.json")
        with _copies(named, training=trained, quiet=as_json) as files:
            page = keep_tracked(
                tracking_of(workload),
                run=pipeline_run() or trained.job.name,
                run_id=trained.mlflow_run_id,
                training=trained,
                evaluation=record,
                files=files,
                quiet=as_json,
            )
        links |= {"mlflow": page} if page else {}
    return trained, record


@contextlib.contextmanager
def _copies(
    named: Mapping[str, Path | None], *, training: "Training", quiet: bool
) -> Iterator[list[Path]]:
    """Copies files for MLflow; if that fails, prints why, and MLflow gets the figures alone."""
    from stoker.records import write_json

    with contextlib.ExitStack() as stack:
        files: list[Path] = []
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, file in named.items():
                if file:
                    shutil.copyfile(file, folder / name)
            write_json(folder / "training.json", training)
            files = sorted(folder.iterdir())
        except (OSError, UsageError) as err:
            words = err.what if isinstance(err, UsageError) else str(err)
            say(f"mlflow: files not kept: {words}", quiet=quiet)
        yield files


def _gate(evaluation_file: Path, *, champions: str | None) -> None:
    """Raises GateError unless an evaluation passed; promotes its model, if there is a folder."""
    from stoker.records import Evaluation, read_json
    from stoker.records.outcome import outcome_of_gates
    from stoker.run.champions import promote

    record = read_json(evaluation_file, Evaluation)
    if not record.passed:
        raise GateError(record.reason or "the evaluation did not pass", where="the gate")
    told = [promote(evaluation_file, named=champions)] if champions else []
    print("\n".join([outcome_of_gates(record.gates).words, *told]))


def _fetched(training: "Training", *, workload: "Workload") -> "Training":
    """Returns the record, with the leader's part that could not be read before."""
    from stoker.platforms import platform_named
    from stoker.platforms.base import leader_record
    from stoker.records.training import with_leader

    platform = platform_named(workload.platform, settings=workload)
    with tempfile.TemporaryDirectory() as folder:
        found = platform.fetched(training.unfetched or "", folder=Path(folder))
        return with_leader(training, leader_record(found))


def _training(
    training: str, *, workload: "Workload", decision: "Decision", may_be_lost: bool
) -> "tuple[Training, Path]":
    """Returns the training's record, from a file or its own text, and its timeline's folder."""
    from stoker.evaluate import lost_training
    from stoker.records import Training, read_json

    # A step of Kubeflow gets the record as a parameter (`outputs.carried`).
    if training.lstrip().startswith("{"):
        return read_json(training, Training), Path()
    file = Path(training)
    # A pipeline judges every run: one whose hosts died without a record has failed.
    if may_be_lost and not file.is_file():
        return lost_training(workload, decision), file.parent
    return read_json(file, Training), file.parent
