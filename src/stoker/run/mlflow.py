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
    run_id, _ = _asked(tracking, lambda client: _run_of(client, tracking, job.run_name))
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

    def write(client: "MlflowClient") -> "Run":
        known = training.mlflow_run_id if training else None
        found = client.get_run(known) if known else _run_of(client, tracking, run)
        if training:
            _write(client, found, training, evaluation)
            for file in files:
                if file.is_file():
                    client.log_artifact(found.info.run_id, str(file))
        # An earlier attempt's end stays. Last: programs that wait for it then find everything.
        if training or found.info.status == "RUNNING":
            status = training.status if training else "failed"
            client.set_terminated(found.info.run_id, _STATUS[status])
        return found

    return _asked(tracking, write)[1]


def _asked(tracking: TrackingSettings, work: Callable[["MlflowClient"], "Run"]) -> tuple[str, str]:
    """Returns id and page of a run that MLflow has written; empty, with a line, if it has not."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    address = _address(tracking)

    def asked() -> "Run":
        from mlflow import MlflowClient

        return work(MlflowClient(tracking_uri=address))

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


def _run_of(client: "MlflowClient", tracking: TrackingSettings, run: str) -> "Run":
    """Returns the run of that name, or a new one."""
    name = tracking.experiment or run
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    # SageMaker makes runs of its managed MLflow, without the tag.
    mark = "attributes.run_name" if tracking.is_managed else f"tags.`{_RUN_TAG}`"
    runs = client.search_runs([number], f"{mark} = '{run}'", max_results=1)
    return next(iter(runs), None) or client.create_run(number, tags={_RUN_TAG: run}, run_name=run)


def _write(
    client: "MlflowClient", run: "Run", training: Training, evaluation: Evaluation | None
) -> None:
    from mlflow.entities import Metric, Param, RunTag

    from stoker import __version__

    parameters = {name: shown(value) for name, value in values_of(training.hyperparameters).items()}
    parameters["hosts"] = groups_in_words(training.groups)
    parameters |= {"strategy": training.strategy, "engine": training.engine}
    # The script's metrics, and stoker's own as `stoker_NAME`.
    metrics: dict[str, float] = {}
    for record in filter(None, (training, evaluation)):
        metrics |= metrics_of(record)
        metrics |= {f"stoker_{name}": float(value) for name, value in figures_of(record).items()}
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
    tags = {f"stoker_{name}": value or "" for name, value in tags.items()}
    # MLflow's own name, which its pages show.
    tags["mlflow.source.git.commit"] = training.lineage.get("git", "")
    now = int(time.time() * 1000)
    there = run.data
    client.log_batch(
        run.info.run_id,
        # What MLflow takes of parameters in one request.
        params=[Param(*pair) for pair in _named(parameters) if pair[0] not in there.params][:100],
        metrics=[
            Metric(name, float(value), now, training.num_steps or 0)
            for name, value in _named(metrics)
            # The same value again would be a second point of its curve.
            if str(there.metrics.get(name)) != value
        ],
        tags=[RunTag(*pair) for pair in _named(tags)],
    )


def _named(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns values as texts by names of characters that MLflow allows."""
    allowed = r"[^A-Za-z0-9_\-. /]"
    return [(re.sub(allowed, "_", name)[:250], str(value)[:6000]) for name, value in values.items()]
