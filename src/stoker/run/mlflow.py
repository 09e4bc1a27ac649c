"""A run's figures in MLflow: one run there for each run of stoker, its retries included.

The process that follows the job writes before the training (so that the script's own
`mlflow.log_metric` goes to the same run) and after it, from the records. Ranks need no MLflow. An
error of MLflow, or no answer within TIMEOUT_SECONDS, is one line of output and changes nothing.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import install_command
from stoker.logs import printable
from stoker.platforms.base import MLFLOW_FILES, MLFLOW_RUN, MLFLOW_URI, JobSpec
from stoker.records import Evaluation, TrackingSettings, Training, groups_in_words
from stoker.records.hyperparameters import shown, values_of
from stoker.records.outcome import outcome_of
from stoker.records.platforms import info_of
from stoker.repeat import within
from stoker.run.outputs import figures_of, metrics_of
from stoker.terminal import say

if TYPE_CHECKING:
    from mlflow import MlflowClient

TIMEOUT_SECONDS = 30.0
_RUN_TAG = "stoker_run"
# MLflow's own ends of a run.
_STATUS: Mapping[str, str] = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# What MLflow takes of parameters in one request.
_BATCH = 100
_MAX_VALUE = 6000
# If the server is down: two retries, seconds apart; by default MLflow retries for minutes. No
# telemetry. A folder suffices as a store for one run at a time.
_VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    MLFLOW_FILES: "true",
}


def start_run(job: JobSpec, *, platform: str, quiet: bool) -> JobSpec:
    """Starts or continues the job's run in MLflow; returns the job with its variables.

    Args:
        job: The job that is about to start.
        platform: Name of its platform, which may make the run itself.
        quiet: Whether nothing is printed.
    """
    tracking = job.tracking
    info = info_of(platform)
    # In its managed MLflow the platform makes the run itself.
    if not tracking.mlflow or (tracking.is_managed and info.has_mlflow):
        return job
    run_id, _ = _asked(lambda: _run_of(_client(tracking), tracking, job.run_name), quiet=quiet)
    # A script would wait for a server that it cannot reach.
    if not run_id or (tracking.is_local and not info.is_this_machine):
        return job
    variables = {MLFLOW_URI: _address(tracking), MLFLOW_RUN: run_id, MLFLOW_FILES: "true"}
    return replace(job, environment={**variables, **job.environment})


def log_run(
    tracking: TrackingSettings,
    *,
    run: str,
    training: Training | None,
    evaluation: Evaluation | None = None,
    files: Sequence[Path] = (),
    quiet: bool,
) -> str:
    """Writes a run's records to MLflow, if the workload names one; returns its page's address.

    May be repeated. Parameters that have a value there keep it: the script's own take precedence.

    Args:
        tracking: The workload's settings.
        run: Name of the run.
        training: None: it failed without a record.
        evaluation: None: it was not judged.
        files: Artifacts; missing ones are left out.
        quiet: Whether nothing is printed.
    """
    if not tracking.mlflow:
        return ""

    def write() -> tuple[str, str]:
        client = _client(tracking)
        known = training.mlflow_run_id if training else None
        run_id, page = _run_of(client, tracking, run, run_id=known)
        _write(client, run_id, training, evaluation, files)
        return run_id, page

    _, page = _asked(write, quiet=quiet)
    return page


def _asked(work: Callable[[], tuple[str, str]], *, quiet: bool) -> tuple[str, str]:
    """Returns id and page of a run that MLflow has written; empty, with a line, if it has not."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        run_id, page = within(TIMEOUT_SECONDS, work)
    # Servers, stores and plugins raise many kinds of errors.
    except Exception as err:
        trouble = printable(" ".join(str(err).split()))[:300] or type(err).__name__
        if isinstance(err, ModuleNotFoundError):
            trouble += f": {install_command('mlflow')}"
        say(f"mlflow: the run continues without it: {trouble}", quiet=quiet)
        return "", ""
    say(f"mlflow: {page or f'run {run_id}'}", quiet=quiet)
    return run_id, page


def _client(tracking: TrackingSettings) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=_address(tracking))


def _address(tracking: TrackingSettings) -> str:
    address = tracking.mlflow or ""
    if address.startswith("file:"):
        return Path(address.removeprefix("file:").removeprefix("//")).absolute().as_uri()
    if address.startswith("sqlite:"):
        file = address.removeprefix("sqlite:").removeprefix("///")
        return f"sqlite:///{Path(file).absolute()}"
    return address.rstrip("/")


def _run_of(
    client: "MlflowClient", tracking: TrackingSettings, run: str, *, run_id: str | None = None
) -> tuple[str, str]:
    """Returns id and page of the run of that id, else of that name, else of a new one."""
    name = tracking.experiment or run
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    if run_id is None:
        # SageMaker makes runs of its managed MLflow, without the tag.
        mark = "attributes.run_name" if tracking.is_managed else f"tags.`{_RUN_TAG}`"
        runs = [*client.search_runs([number], f"{mark} = '{run}'", max_results=1)]
        runs = runs or [client.create_run(number, tags={_RUN_TAG: run}, run_name=run)]
        run_id = str(runs[0].info.run_id)
    address = _address(tracking)
    page = f"{address}/#/experiments/{number}/runs/{run_id}"
    return run_id, page if address.startswith("http") else ""


def _write(
    client: "MlflowClient",
    run_id: str,
    training: Training | None,
    evaluation: Evaluation | None,
    files: Sequence[Path],
) -> None:
    from mlflow.entities import Metric, Param, RunTag

    there = client.get_run(run_id)
    if training is None:
        # An earlier attempt's end stays.
        if there.info.status == "RUNNING":
            client.set_terminated(run_id, "FAILED")
        return
    parameters = [
        Param(name, value)
        for name, value in _named(_parameters_of(training)).items()
        if name not in there.data.params
    ]
    now = int(time.time() * 1000)
    metrics = [
        Metric(name, float(value), now, training.num_steps or 0)
        for name, value in _named(_metrics_of(training, evaluation)).items()
        # The same value again would be a second point of its curve.
        if str(there.data.metrics.get(name)) != value
    ]
    tags = [RunTag(name, value) for name, value in _tags_of(training, evaluation).items()]
    client.log_batch(run_id, params=parameters[:_BATCH], metrics=metrics, tags=tags)
    for file in files:
        if file.is_file():
            client.log_artifact(run_id, str(file))
    # Last: programs that wait for the end then find everything.
    client.set_terminated(run_id, _STATUS[training.status])


def _named(values: Mapping[str, object]) -> dict[str, str]:
    """Returns values as texts by names of characters that MLflow allows."""
    return {
        re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)[:250]: str(value)[:_MAX_VALUE]
        for name, value in values.items()
    }


def _parameters_of(training: Training) -> dict[str, str]:
    parameters = {name: shown(value) for name, value in values_of(training.hyperparameters).items()}
    parameters["hosts"] = groups_in_words(training.groups)
    return {**parameters, "strategy": training.strategy, "engine": training.engine}


def _metrics_of(training: Training, evaluation: Evaluation | None) -> dict[str, float]:
    """Returns the script's metrics, and stoker's own as `stoker_NAME`."""
    metrics: dict[str, float] = {}
    for record in filter(None, (training, evaluation)):
        metrics |= metrics_of(record)
        metrics |= {f"stoker_{name}": value for name, value in figures_of(record).items()}
    return {name: float(value) for name, value in metrics.items()}


def _tags_of(training: Training, evaluation: Evaluation | None) -> dict[str, str]:
    from stoker import __version__

    outcome = outcome_of(training, evaluation.gates if evaluation else ())
    tags = {
        "version": __version__,
        "status": training.status,
        "job": training.job.name,
        "job_url": training.job.url,
        "model": training.model_uri,
        "outcome": outcome.state,
        "failure": outcome.reason,
        **training.lineage,
    }
    # Empty values replace an earlier attempt's.
    named = _named({f"stoker_{name}": value or "" for name, value in tags.items()})
    # MLflow's own name, which its pages show.
    return {**named, "mlflow.source.git.commit": training.lineage.get("git", "")}
