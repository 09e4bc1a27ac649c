"""Judgement of a run's training: gates, prediction, report, and the model in use."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

from stoker.environment import pipeline_run
from stoker.errors import GateError, ServiceError, UsageError
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
from stoker.records.outcome import outcome_of_gates
from stoker.records.training import with_leader
from stoker.run.champions import champion_metrics, promote
from stoker.run.mlflow_run import keep_tracked
from stoker.run.outputs import Outputs, deliver, told_of_evaluation
from stoker.terminal import say


def mark_model(training: Training, record: Evaluation, *, workload: Workload, quiet: bool) -> None:
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
        group, below = settings.model.group or workload.name, f"{settings.output_uri.rstrip('/')}/"
        for kept in keep_registered(aws, group, below=below):
            say(f"model:   {kept} is registered, and expires no more", quiet=quiet)
    except ServiceError as err:
        say(f"model:   not tagged, so it stays until stoker prune: {err.what}", quiet=quiet)


def judged(
    workload: Workload,
    *,
    records: tuple[Path, Path, str],
    may_be_lost: bool,
    champion: str | None,
    destinations: Outputs,
    report: Path | None,
    links: dict[str, str],
    as_json: bool,
) -> tuple[Training, Evaluation]:
    """Judges a run, and writes evaluation and report to files and to MLflow; `links` gets its page.

    `records` are the files of profile, decision and training, or the text of the training, which
    `may_be_lost`.
    """
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
        from stoker.report import ReportedRun, write_report
        from stoker.run.reports import environment, existing, timeline_of

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
            words = err.what if isinstance(err, UsageError) else str(err)
            say(f"mlflow: files not kept: {words}", quiet=quiet)
        yield files


def pass_gate(evaluation_file: Path, *, champions: str | None) -> None:
    """Raises GateError unless an evaluation passed; promotes its model, if there is a folder."""
    record = read_json(evaluation_file, Evaluation)
    if not record.passed:
        raise GateError(record.reason or "the evaluation did not pass", where="the gate")
    told = [promote(evaluation_file, named=champions)] if champions else []
    print("\n".join([outcome_of_gates(record.gates).words, *told]))


def _fetched(training: Training, *, workload: Workload) -> Training:
    """Returns the record, with the leader's part that could not be read before."""
    platform = platform_named(workload.platform, settings=workload)
    with tempfile.TemporaryDirectory() as folder:
        found = platform.fetched(training.unfetched or "", folder=Path(folder))
        return with_leader(training, leader_record(found))


def _training(
    training: str, *, workload: Workload, decision: Decision, may_be_lost: bool
) -> tuple[Training, Path]:
    """Returns the training's record, from a file or its own text, and its timeline's folder."""
    # A step of Kubeflow gets the record as a parameter (`outputs.carried`).
    if training.lstrip().startswith("{"):
        return read_json(training, Training), Path()
    file = Path(training)
    # A pipeline judges every run: one whose hosts died without a record has failed.
    if may_be_lost and not file.is_file():
        return lost_training(workload, decision), file.parent
    return read_json(file, Training), file.parent
