"""A run's figures in MLflow: one run there for each run of stoker, its retries included.

The process that follows the job writes before the training (so that the script's own
`mlflow.log_metric` goes to the same run) and after it, from the records. Ranks need no MLflow. An
error of MLflow, or no answer within TIMEOUT_SECONDS, is one line of output and changes nothing.
"""

import os
import re
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
    from mlflow.entities import Run

TIMEOUT_SECONDS = 30.0
_RUN_TAG = "stoker_run"
# MLflow's own ends of a run.
_STATUS: Mapping[str, str] = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# If the server is down: two retries, seconds apart; by default MLflow retries for minutes. No
# telemetry. A folder suffices as a store for one run at a time.
_VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    MLFLOW_FILES: "true",
}


def start_run(job: JobSpec, *, platform: str) -> JobSpec:
    """Starts or continues the job's run in MLflow; returns the job with its variables."""
    tracking = job.tracking
    info = info_of(platform)
    # In its managed MLflow the platform makes the run itself.
    if not tracking.mlflow or (tracking.is_managed and info.has_mlflow):
        return job
    run_id, _ = _asked(tracking, lambda: _run_of(tracking, job.run_name))
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
) -> str:
    """Writes a run's records to MLflow, if the workload names one; returns its page's address.

    May be repeated. Parameters that have a value there keep it: the script's own take precedence.

    Args:
        tracking: The workload's settings.
        run: Name of the run.
        training: None: it failed without a record.
        evaluation: None: it was not judged.
        files: Artifacts; missing ones are left out.
    """
    if not tracking.mlflow:
        return ""

    def write() -> "Run":
        import mlflow

        known = training.mlflow_run_id if training else None
        found = mlflow.get_run(known) if known else _run_of(tracking, run)
        # An earlier attempt's end stays.
        status = found.info.status if found.info.status != "RUNNING" else "FAILED"
        mlflow.start_run(found.info.run_id)
        if training:
            status = _STATUS[training.status]
            there = found.data.params
            parameters = _named(_parameters_of(training))
            mlflow.log_params({key: parameters[key] for key in parameters.keys() - there.keys()})
            known_metrics = found.data.metrics
            metrics = {
                name: value
                for name, value in _metrics(training, evaluation).items()
                # The same value again would be a second point of its curve.
                if str(known_metrics.get(name)) != str(value)
            }
            mlflow.log_metrics(metrics, step=training.num_steps or 0)
            mlflow.set_tags(_named(_tags_of(training, evaluation)))
            for file in files:
                if file.is_file():
                    mlflow.log_artifact(str(file))
        # Last: programs that wait for the end then find everything.
        mlflow.end_run(status)
        return found

    return _asked(tracking, write)[1]


def _asked(tracking: TrackingSettings, work: Callable[[], "Run"]) -> tuple[str, str]:
    """Returns id and page of a run that MLflow has written; empty, with a line, if it has not."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    address = _address(tracking)

    def asked() -> "Run":
        import mlflow

        mlflow.set_tracking_uri(address)
        return work()

    try:
        info = within(TIMEOUT_SECONDS, asked).info
    # Servers, stores and plugins raise many kinds of errors.
    except Exception as err:
        trouble = printable(" ".join(str(err).split()))[:300] or type(err).__name__
        if isinstance(err, ModuleNotFoundError):
            trouble += f": {install_command('mlflow')}"
        say(f"mlflow: the run continues without it: {trouble}")
        return "", ""
    page = ""
    if address.startswith("http"):
        page = f"{address}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    say(f"mlflow: {page or f'run {info.run_id}'}")
    return str(info.run_id), page


def _address(tracking: TrackingSettings) -> str:
    address = str(tracking.mlflow).rstrip("/")
    kind, _, file = address.partition(":")
    # The script may have another working folder.
    if kind == "file":
        return Path(file.removeprefix("//")).absolute().as_uri()
    if kind == "sqlite":
        return f"sqlite:///{Path(file.removeprefix('///')).absolute()}"
    return address


def _run_of(tracking: TrackingSettings, run: str) -> "Run":
    """Returns the run of that name, or a new one."""
    import mlflow

    experiment = mlflow.set_experiment(tracking.experiment or run)
    # SageMaker makes runs of its managed MLflow, without the tag.
    mark = "attributes.run_name" if tracking.is_managed else f"tags.`{_RUN_TAG}`"
    client = mlflow.MlflowClient()
    number = experiment.experiment_id
    for found in client.search_runs([number], f"{mark} = '{run}'", max_results=1):
        return found
    return client.create_run(number, tags={_RUN_TAG: run}, run_name=run)


def _parameters_of(training: Training) -> dict[str, str]:
    parameters = {name: shown(value) for name, value in values_of(training.hyperparameters).items()}
    parameters["hosts"] = groups_in_words(training.groups)
    return {**parameters, "strategy": training.strategy, "engine": training.engine}


def _metrics(training: Training, evaluation: Evaluation | None) -> dict[str, float]:
    """Returns the script's metrics, and stoker's own as `stoker_NAME`."""
    metrics: dict[str, float] = {}
    for record in filter(None, (training, evaluation)):
        metrics |= metrics_of(record)
        metrics |= {f"stoker_{name}": value for name, value in figures_of(record).items()}
    return {name: float(value) for name, value in _named(metrics).items()}


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
    # Empty values replace an earlier attempt's; the commit has MLflow's own name, too.
    named = {f"stoker_{name}": value or "" for name, value in tags.items()}
    return {**named, "mlflow.source.git.commit": training.lineage.get("git", "")}


def _named(values: Mapping[str, object]) -> dict[str, str]:
    """Returns values as texts by names of characters that MLflow allows."""
    return {
        re.sub(r"[^A-Za-z0-9_\-. /]", "_", name): str(value)[:6000]
        for name, value in values.items()
    }
