"""A run's figures in MLflow: one run there for each run of stoker, its retries included.

The process that follows the job writes before the training (so that the script's own
`mlflow.log_metric` goes to the same run) and after it, from the records. Ranks need no MLflow. An
error of MLflow, or no answer within TIMEOUT_SECONDS, is one line of output and changes nothing.
"""

import os
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
from stoker.repeat import within
from stoker.run.outputs import figures_of
from stoker.terminal import say

if TYPE_CHECKING:
    from mlflow.entities import Run

TIMEOUT_SECONDS = 30.0
# MLflow's own ends of a run.
_STATUS: Mapping[str, str] = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# By default MLflow retries for minutes. A folder suffices as a store for one run at a time.
_VARIABLES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", MLFLOW_FILES: "true"}


def start_run(job: JobSpec, *, platform: str) -> JobSpec:
    """Starts or continues the job's run in MLflow; returns the job with its variables."""
    tracking = job.tracking
    # In its managed MLflow SageMaker makes the run; a file is not there on other machines.
    is_made_there = tracking.is_managed and platform == "sagemaker"
    if not tracking.mlflow or is_made_there or (tracking.is_local and platform != "local"):
        return job
    run_id, _ = _asked(tracking, lambda: _run_of(tracking, job.run_name))
    if not run_id:
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

        run_id = training and training.mlflow_run_id
        found = mlflow.get_run(run_id) if run_id else _run_of(tracking, run)
        mlflow.start_run(found.info.run_id)
        if training:
            parameters = _parameters_of(training)
            new = parameters.keys() - found.data.params.keys()
            mlflow.log_params({name: parameters[name] for name in new})
            metrics = _metrics_of(training, evaluation)
            # The same value again would be a second point of its curve.
            changed = dict(metrics.items() - found.data.metrics.items())
            mlflow.log_metrics(changed, step=training.num_steps or 0)
            mlflow.set_tags(_tags_of(training, evaluation))
            for file in filter(Path.is_file, files):
                mlflow.log_artifact(str(file))
        # Last: programs that wait for the end then find everything.
        mlflow.end_run(_STATUS[training.status] if training else "FAILED")
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
        is_missing = isinstance(err, ModuleNotFoundError)
        words = install_command("mlflow") if is_missing else printable(repr(err))[:300]
        say(f"mlflow: the run continues without it: {words}")
        return "", ""
    page = ""
    if address.startswith("http"):
        page = f"{address}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    say(f"mlflow: {page or f'run {info.run_id}'}")
    return info.run_id, page


def _address(tracking: TrackingSettings) -> str:
    """Returns the address of the server or store as MLflow spells it."""
    kind, _, file = str(tracking.mlflow).rstrip("/").partition(":")
    return f"{kind}:///{file.removeprefix('///')}" if kind == "sqlite" else f"{kind}:{file}"


def _run_of(tracking: TrackingSettings, run: str) -> "Run":
    """Returns the run of that name, or a new one."""
    import mlflow

    experiment = mlflow.set_experiment(tracking.experiment or run).experiment_id
    client = mlflow.MlflowClient()
    named = f"attributes.run_name = '{run}'"
    for found in client.search_runs([experiment], named, max_results=1):
        return found
    return client.create_run(experiment, run_name=run)


def _parameters_of(training: Training) -> dict[str, str]:
    parameters = {name: shown(value) for name, value in values_of(training.hyperparameters).items()}
    return {**parameters, "hosts": groups_in_words(training.groups), "strategy": training.strategy}


def _metrics_of(training: Training, evaluation: Evaluation | None) -> dict[str, float]:
    """Returns the script's metrics, and stoker's own as `stoker_NAME`."""
    figures = figures_of(training) | (figures_of(evaluation) if evaluation else {})
    own = {f"stoker_{name}": float(value) for name, value in figures.items()}
    return {**training.numbers, **own}


def _tags_of(training: Training, evaluation: Evaluation | None) -> dict[str, str]:
    return {
        "stoker_job": training.job.url or training.job.name,
        "stoker_model": training.model_uri or "",
        "stoker_outcome": outcome_of(training, evaluation.gates if evaluation else ()).words,
        # The commit has MLflow's own name.
        "mlflow.source.git.commit": training.lineage.get("git", ""),
    }
