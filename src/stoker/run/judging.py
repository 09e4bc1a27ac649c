"""Judgement of a run's training: gates, prediction, report, and the model in use."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from stoker.environment import pipeline_run
from stoker.errors import GateError, ServiceError, UsageError, what_of
from stoker.evaluate import evaluate, lost_training, model_metadata, model_quality
from stoker.platforms import platform_named
from stoker.platforms.aws import Aws, region_of
from stoker.platforms.base import leader_record, tracking_of
from stoker.platforms.sagemaker.registry import keep_registered, mark_models
from stoker.record_words import evaluation_table
from stoker.records import (
    Decision,
    Evaluation,
    Profile,
    Training,
    Workload,
    read_json,
    write_json,
    write_text,
)
from stoker.records.outcome import outcome_of, outcome_of_gates
from stoker.records.training import file_beside, with_leader
from stoker.run.champions import champion_metrics, promote
from stoker.run.cloudwatch_metrics import publish
from stoker.run.mlflow_run import keep_tracked
from stoker.run.outputs import Outputs, deliver, told_of_evaluation
from stoker.run.pipeline_memory import PlaceInMemory, keep_remembered
from stoker.run.webhook import telling
from stoker.terminal import say
from stoker.tracking import TrackedRecords


def _mark_model(training: Training, record: Evaluation, *, workload: Workload, quiet: bool) -> None:
    """Tags a model that was refused, and its copy; a line names what cannot be tagged.

    Args:
        training: Names the model, and its copy.
        record: Says whether the model passed.
        workload: Names the bucket and the group of the registry.
        quiet: Whether nothing is printed.
    """
    settings = workload.sagemaker
    if not settings:
        return
    aws = Aws(region=region_of(workload))
    try:
        for uri in mark_models(aws, training, is_refused=not record.passed):
            say(f"model:   {uri} was refused, and expires by the bucket's rule", quiet=quiet)
        group = settings.model.group or workload.name
        below = f"{settings.output_uri.rstrip('/')}/"
        for kept in keep_registered(aws, group, below=below):
            say(f"model:   {kept} is registered, and expires no more", quiet=quiet)
    except ServiceError as err:
        say(f"model:   not tagged, so it stays until stoker prune: {err.what}", quiet=quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A training run that is to be judged, and where the results go.

    Attributes:
        training: File of its record, or the text of the record.
        champion: Names the model in use; empty: none is configured.
        always: Whether a run without a record has failed, and the exit code is 0 in any case.
        report: File of the HTML report; None: none is written.
        expires: Whether a refused model is tagged, so that a rule of its bucket deletes it.
        memory: Where the pipeline's memory gets a run that passed; None: nothing is kept.
    """

    workload: Workload
    profile: Path
    decision: Path
    training: str
    champion: str = ""
    always: bool = False
    outputs: Outputs
    report: Path | None = None
    expires: bool = False
    memory: PlaceInMemory | None = None
    as_json: bool = False


def judge_run(judgement: Judgement) -> int:
    """Judges a run, keeps what its pipeline needs, and notifies; returns the exit code."""
    workload = judgement.workload
    quiet = judgement.as_json
    run = pipeline_run()
    # On Kubeflow the run's last step notifies, and who types this command sees the result.
    is_told = bool(run) and not judgement.outputs.executor
    with telling(workload, run=run, step="evaluate", quiet=quiet, is_told=is_told) as ending:
        training, record, page = judged(judgement)
        if page:
            ending.links["mlflow"] = page
        if judgement.expires:
            _mark_model(training, record, workload=workload, quiet=quiet)
        if judgement.memory and record.passed:
            keep_remembered(
                judgement.memory,
                workload=workload,
                run=run or training.job.name,
                records=(judgement.profile, judgement.decision),
                training=training,
                quiet=quiet,
            )
        ending.run = run or training.job.name
        if training.job.url:
            ending.links["job"] = training.job.url
        outcome = outcome_of(training, record.gates)
        ending.tells(record.notices)
        if run and workload.platform_info.has_model_registry:
            publish(workload, record.notices, quiet=quiet)
        if not outcome.is_good:
            ending.failed(outcome.words, exit_code=outcome.exit_code)
        if outcome.state == "stopped":
            ending.status = "stopped"
    if judgement.always:
        return 0
    return outcome.exit_code


def judged(judgement: Judgement) -> tuple[Training, Evaluation, str]:
    """Judges a run, and writes evaluation and report to files and to MLflow.

    Returns:
        The training, its evaluation, and the page in MLflow; empty: there is none.
    """
    workload = judgement.workload
    outputs = judgement.outputs
    profile = read_json(judgement.profile, Profile)
    decision = read_json(judgement.decision, Decision)
    training, file = _training(judgement, decision)
    if training.is_unknown:
        training = _fetched(training, workload=workload)
    region = region_of(workload)
    record = evaluate(
        workload=workload,
        profile=profile,
        decision=decision,
        training=training,
        champion=champion_metrics(judgement.champion, workload=workload, region=region),
        today=date.today(),
        is_registered=bool(pipeline_run()),
    )
    deliver(
        record,
        outputs=outputs,
        name="evaluation",
        explain=evaluation_table,
        as_json=judgement.as_json,
        told=told_of_evaluation(record),
    )
    if workload.platform_info.has_model_registry and outputs.out:
        _write_for_registry(workload, training, decision, folder=outputs.out.parent)
    if judgement.report:
        # Imported here, with the templates of the page.
        from stoker.report import ReportedRun, write_report
        from stoker.run.reports import BAD_SAMPLES, environment, existing, timeline_of

        write_report(
            judgement.report,
            ReportedRun(
                run_id=training.job.name,
                workload=workload,
                profile=profile,
                decision=decision,
                training=training,
                evaluation=record,
                before_timeline=existing(judgement.profile.with_name("baseline-timeline.csv")),
                after_timeline=timeline_of(training, folder=file.parent),
                feed_file=file_beside(file, "feed.csv"),
                before_gpus=existing(judgement.profile.with_name("baseline-gpu.csv")),
                after_gpus=file_beside(file, "gpu.csv"),
                bad_samples_file=file_beside(file, BAD_SAMPLES),
                environment=environment(),
            ),
        )
    return training, record, _tracked(judgement, training, record)


def _write_for_registry(
    workload: Workload, training: Training, decision: Decision, *, folder: Path
) -> None:
    """Writes what the model registry shows: Studio cannot show all of evaluation.json."""
    quality = model_quality(training)
    write_text(folder / "model-quality.json", json.dumps(quality))
    metadata = model_metadata(workload, training, decision)
    write_text(folder / "model-metadata.json", json.dumps(metadata))


def _tracked(judgement: Judgement, training: Training, record: Evaluation) -> str:
    """Writes the records to MLflow, if the workload has it; returns the page of the run."""
    if not judgement.workload.tracking.mlflow:
        return ""
    # Under stoker's names: a pipeline names its files itself.
    named = {
        "profile.json": judgement.profile,
        "decision.json": judgement.decision,
        "report.html": judgement.report,
        "evaluation.json": judgement.outputs.out or Path("evaluation.json"),
    }
    with _copies(named, training=training, quiet=judgement.as_json) as files:
        records = TrackedRecords(
            run=pipeline_run() or training.job.name,
            training=training,
            evaluation=record,
            files=files,
        )
        tracking = tracking_of(judgement.workload)
        return keep_tracked(tracking, records, quiet=judgement.as_json)


@contextlib.contextmanager
def _copies(
    named: Mapping[str, Path | None], *, training: Training, quiet: bool
) -> Iterator[list[Path]]:
    """Copies files for MLflow; if that fails, prints why, and MLflow gets the figures alone."""
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
            say(f"mlflow: files not kept: {what_of(err)}", quiet=quiet)
        yield files


def pass_gate(evaluation_file: Path, *, champions: str | None) -> None:
    """Raises GateError unless an evaluation passed; promotes its model, if there is a folder."""
    record = read_json(evaluation_file, Evaluation)
    if not record.passed:
        raise GateError(record.reason or "the evaluation did not pass", where="the gate")
    lines = [outcome_of_gates(record.gates).words]
    if champions:
        lines.append(promote(evaluation_file, named=champions))
    print("\n".join(lines))


def _fetched(training: Training, *, workload: Workload) -> Training:
    """Returns the record, with the leader's part that could not be read before."""
    platform = platform_named(workload.platform, settings=workload)
    with tempfile.TemporaryDirectory() as folder:
        outputs = platform.fetched(training.unfetched or "", folder=Path(folder))
        return with_leader(training, leader_record(outputs))


def _training(judgement: Judgement, decision: Decision) -> tuple[Training, Path]:
    """Returns the training's record, from a file or its own text, and that file."""
    text = judgement.training
    # A step of Kubeflow gets the record as a parameter (`outputs.carried`).
    if text.lstrip().startswith("{"):
        return read_json(text, Training), Path("training.json")
    file = Path(text)
    # A pipeline judges every run: one whose hosts died without a record has failed.
    if judgement.always and not file.is_file():
        return lost_training(judgement.workload, decision), file
    return read_json(file, Training), file
