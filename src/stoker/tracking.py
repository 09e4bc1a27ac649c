"""A run's figures in MLflow: one run there for each run of stoker, its retries included.

The process that follows the job writes before the training (so that the script's own
`mlflow.log_metric` goes to the same run) and after it, from the records. Ranks need no MLflow.

MLflow's library runs in a separate process, `tracking.timeout_seconds` at most: it waits minutes
for a server that is down, imports for seconds, and prints. Its errors are one line of output, and
change nothing else.
"""

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import install_command
from stoker.logs import printable
from stoker.platforms.base import MLFLOW_FILES, MLFLOW_RUN, MLFLOW_URI
from stoker.records import Evaluation, TrackingSettings, Training
from stoker.records.base import word_of
from stoker.records.gpu import busy_share
from stoker.records.hyperparameters import shown, values_of
from stoker.records.notices import notice_figures
from stoker.records.outcome import outcome_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "stoker_run"
_STATUS_TAG = "stoker_status"
# MLflow's own ends of a run.
_STATUS: Mapping[str, str] = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# What one request to a server may hold of each kind.
_BATCH = 100
_MAX_VALUE = 6000
_MAX_WORDS = 300
# If the server is down: two retries, seconds apart; by default MLflow retries for minutes.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
# No telemetry. A folder suffices as a store for one run at a time.
_ALWAYS = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", MLFLOW_FILES: "true"}


class TrackingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the process with MLflow is to write.

    Attributes:
        run: Name of stoker's run; the run of MLflow with this tag is continued.
        run_id: Run of MLflow, where it is known.
        is_managed: SageMaker has already made a run of this name, without the tag.
        status: How the run ended; empty: it continues.
        is_refused: This process started no job: the status of an earlier attempt stays.
        step: Steps that the training has done, at which the metrics are written.
        metrics: Numbers, or the words NaN, Infinity and -Infinity, which JSON lacks.
    """

    address: str
    experiment: str
    run: str
    run_id: str | None = None
    is_managed: bool = False
    status: str = ""
    is_refused: bool = False
    step: int = 0
    parameters: dict[str, str] = msgspec.field(default_factory=dict)
    metrics: dict[str, float | str] = msgspec.field(default_factory=dict)
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    files: tuple[str, ...] = ()


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of MLflow, with its page where the server has pages; or what failed, in a line."""

    run_id: str = ""
    url: str = ""
    trouble: str = ""


def started(
    settings: TrackingSettings, *, run: str, tags: Mapping[str, str], environ: Mapping[str, str]
) -> TrackedRun:
    """Starts or continues the run in MLflow; blocks for `timeout_seconds`, and raises nothing."""
    order = TrackingOrder(
        address=_address(settings), experiment=settings.experiment or run, run=run, tags=dict(tags)
    )
    return _asked(order, timeout=settings.timeout_seconds, environ=environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRecords:
    """What a run leaves in MLflow.

    Attributes:
        run: Name of the run.
        training: None: it failed without a record.
        evaluation: None: it was not judged.
        files: Artifacts; missing files are left out.
        is_refused: No job began: without a record, the status of an earlier attempt stays.
    """

    run: str
    training: Training | None
    evaluation: Evaluation | None = None
    files: Sequence[Path] = ()
    is_refused: bool = False


def kept(
    settings: TrackingSettings,
    records: TrackedRecords,
    *,
    tags: Mapping[str, str],
    environ: Mapping[str, str],
    timeout: float | None = None,
) -> TrackedRun:
    """Writes the records into the run in MLflow, and ends it; may be repeated.

    Parameters that have a value there keep it: the script's own take precedence.

    Args:
        settings: The workload's, with the server.
        records: The run, and what it left.
        tags: Of the run, more than its records say.
        environ: Variables of the process with MLflow.
        timeout: Seconds that it may take; None: as the settings say.
    """
    training = records.training
    evaluation = records.evaluation
    order = TrackingOrder(
        address=_address(settings),
        experiment=settings.experiment or records.run,
        run=records.run,
        is_managed=settings.is_managed,
        status="FAILED",
        is_refused=records.is_refused,
        metrics={name: _told(value) for name, value in metrics_of(training, evaluation).items()},
        tags={**tags, _STATUS_TAG: "failed"},
        files=tuple(str(file) for file in records.files if file.is_file()),
    )
    if training is not None:
        order = msgspec.structs.replace(
            order,
            run_id=training.mlflow_run_id,
            status=_STATUS[training.status],
            is_refused=False,
            step=training.num_steps or 0,
            parameters=parameters_of(training),
            tags={**tags, **tags_of(training, evaluation)},
        )
    return _asked(order, timeout=timeout or settings.timeout_seconds, environ=environ)


def handed(
    settings: TrackingSettings, tracked: TrackedRun, *, is_this_machine: bool
) -> dict[str, str]:
    """Returns the variables by which the script's own calls of MLflow go to the same run.

    Empty if the hosts of the training cannot reach it, or it was not reached from here: a script
    would wait for a server that is down.
    """
    if not tracked.run_id or (settings.is_local and not is_this_machine):
        return {}
    variables = {MLFLOW_URI: _address(settings), MLFLOW_RUN: tracked.run_id}
    if (settings.mlflow or "").startswith("file:"):
        variables[MLFLOW_FILES] = "true"
    return variables


def parameters_of(training: Training) -> dict[str, str]:
    cluster = {}
    for group in training.groups:
        for key in ("instance_type", "count", "workers_per_host", "processes_per_host"):
            if (value := getattr(group, key)) is not None:
                cluster[f"{group.name}.{key}"] = str(value)
    how = {"strategy": training.strategy, "engine": training.engine}
    given = {
        name: shown(hyperparameter)
        for name, hyperparameter in values_of(training.hyperparameters).items()
    }
    return {**given, **cluster, **how}


def metrics_of(training: Training | None, evaluation: Evaluation | None) -> dict[str, float]:
    metrics: dict[str, float | None] = {}
    if training:
        metrics |= _metrics_of_training(training)
    if evaluation:
        metrics["stoker_passed"] = float(evaluation.passed)
        metrics |= {f"stoker_{name}": v for name, v in notice_figures(evaluation.notices).items()}
        metrics |= {gate.metric: gate.value for gate in evaluation.gates}
        if performance := evaluation.performance:
            results = ("speedup", "prediction_error", "cost_change")
            metrics |= {f"stoker_{name}": getattr(performance, name) for name in results}
    return {name: value for name, value in metrics.items() if value is not None}


def _metrics_of_training(training: Training) -> dict[str, float | None]:
    """Returns the script's metrics and the measured ones; None: not known."""
    metrics: dict[str, float | None] = {**training.metrics}
    metrics |= {f"stoker_{name}": value for name, value in training.dollars.items()}
    metrics["stoker_gpu_utilization"] = busy_share(training.gpus)
    measured = training.measured
    if not measured or not measured.steps:
        return metrics
    steps = (
        *("step_seconds", "wait_seconds", "whole_step_seconds"),
        *("samples_per_second", "usd_per_1000_steps"),
    )
    metrics |= {f"stoker_{name}": getattr(measured, name) for name in steps}
    if measured.epochs:
        metrics |= {f"stoker_{name}": value for name, value in measured.epochs.figures.items()}
    return metrics


def _told(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return word_of(value)


def tags_of(training: Training, evaluation: Evaluation | None) -> dict[str, str]:
    outcome = outcome_of(training)
    if evaluation:
        outcome = outcome_of(training, evaluation.gates)
    tags = {
        _STATUS_TAG: training.status,
        "stoker_job": training.job.name,
        "stoker_job_url": training.job.url,
        "stoker_platform": training.job.platform,
        "stoker_decision": training.decision_id,
        "stoker_model": training.model_uri,
        "stoker_outcome": outcome.state,
        "stoker_failure": outcome.reason,
    }
    tags |= {f"stoker_{name}": value for name, value in training.lineage.facts().items()}
    # MLflow's own name, which its pages show.
    if training.lineage.git:
        tags["mlflow.source.git.commit"] = training.lineage.git
    # Empty values replace an earlier attempt's.
    return {name: value or "" for name, value in tags.items()}


def _address(settings: TrackingSettings) -> str:
    address = settings.mlflow or ""
    if address.startswith("file:"):
        return Path(address.removeprefix("file:").removeprefix("//")).absolute().as_uri()
    if address.startswith("sqlite:"):
        file = address.removeprefix("sqlite:").removeprefix("///")
        return f"sqlite:///{Path(file).absolute()}"
    return address.rstrip("/")


def _asked(order: TrackingOrder, *, timeout: float, environ: Mapping[str, str]) -> TrackedRun:
    """Runs an order in a process with MLflow; returns its answer, or its error as `trouble`."""
    if not find_spec("mlflow"):
        return TrackedRun(trouble=f"mlflow is not installed: {install_command('mlflow')}")
    if order.address.startswith("arn:") and not find_spec("sagemaker_mlflow"):
        return TrackedRun(trouble="its plugin is missing: pip install sagemaker-mlflow")
    try:
        ended = subprocess.run(
            # -P: files in the current folder must not shadow libraries.
            [sys.executable, "-P", "-m", "stoker.tracking"],
            input=msgspec.json.encode(order),
            capture_output=True,
            timeout=timeout,
            env={**_PATIENCE, **environ, **_ALWAYS},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TrackedRun(trouble=f"no answer within {timeout:g} s")
    except OSError as err:
        return TrackedRun(trouble=f"cannot run Python: {err}")
    # MLflow prints as well: the answer is the last line.
    lines = ended.stdout.splitlines() or [b""]
    try:
        return msgspec.json.decode(lines[-1], type=TrackedRun)
    except msgspec.DecodeError:
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
        reasons = errors or [f"code {ended.returncode}"]
        return TrackedRun(trouble=_short(reasons[-1]))


def _short(words: str) -> str:
    return printable(" ".join(words.split()))[:_MAX_WORDS]


# --- in the process with MLflow


def main() -> None:
    """Reads an order on standard input, and prints the answer as its last line."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=TrackingOrder)
    try:
        answer = _written(order)
    # The process's edge: servers, stores and plugins raise many kinds of errors.
    except Exception as err:
        answer = TrackedRun(trouble=_words(err))
    print(json.dumps(msgspec.to_builtins(answer)))


def _words(err: Exception) -> str:
    # If a server is down, requests, urllib3 and MLflow each repeat the error.
    unreachable = re.match(r"API request to (https?://[^/]+)\S* failed with exception", str(err))
    if unreachable:
        return f"{unreachable[1]} cannot be reached"
    return _short(str(err) or type(err).__name__)


def _written(order: TrackingOrder) -> TrackedRun:
    from mlflow import MlflowClient
    from mlflow.entities import RunTag

    client = MlflowClient(tracking_uri=order.address)
    run_id, experiment_id = _run_of(client, order)
    there = client.get_run(run_id).data
    changed = _log_parameters(client, run_id, order.parameters, there=there.params)
    _log_metrics(client, run_id, order, there=there.metrics)
    ended = _STATUS.get(there.tags.get(_STATUS_TAG, "")) if order.is_refused else None
    tags = _tags(order, there.tags, has_ended=ended is not None)
    client.log_batch(run_id, tags=[RunTag(name, tags[name]) for name in sorted(tags)])
    trouble = _with_files(client, run_id, order.files)
    # Last: programs that wait for the end then find everything.
    if order.status:
        client.set_terminated(run_id, ended or order.status)
    else:
        client.update_run(run_id, status="RUNNING")
    if changed and not trouble:
        trouble = "it keeps the first value of " + _short(", ".join(changed))
    url = ""
    if order.address.startswith("http"):
        url = f"{order.address}/#/experiments/{experiment_id}/runs/{run_id}"
    return TrackedRun(run_id=run_id, url=url, trouble=trouble)


def _log_parameters(
    client: "MlflowClient", run_id: str, given: Mapping[str, str], *, there: Mapping[str, str]
) -> list[str]:
    """Writes new parameters; returns the names of those that have another value there."""
    from mlflow.entities import Param

    parameters = {_name(name): text[:_MAX_VALUE] for name, text in given.items()}
    for names in _parts(sorted(parameters.keys() - there.keys())):
        client.log_batch(run_id, params=[Param(name, parameters[name]) for name in names])
    kept_names = sorted(parameters.keys() & there.keys())
    return [name for name in kept_names if there[name] != parameters[name]]


def _log_metrics(
    client: "MlflowClient", run_id: str, order: TrackingOrder, *, there: Mapping[str, float]
) -> None:
    """Writes the metrics that have another value there, or none."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = {_name(name): float(value) for name, value in order.metrics.items()}
    # The same value again would be a second point of its curve.
    new = [name for name in sorted(metrics) if not _is(there.get(name), metrics[name])]
    for names in _parts(new):
        points = [Metric(name, metrics[name], now, order.step) for name in names]
        client.log_batch(run_id, metrics=points)


def _tags(order: TrackingOrder, there: Mapping[str, str], *, has_ended: bool) -> dict[str, str]:
    """Returns the run's tags: an empty one only where it replaces another."""
    tags = {name: value for name, value in order.tags.items() if value or name in there}
    if has_ended:
        del tags[_STATUS_TAG]
    return {**tags, RUN_TAG: order.run}


def _is(there: float | None, value: float) -> bool:
    """Whether MLflow has the value, which keeps NaN, and an infinity as the largest number."""
    if there is None or math.isnan(value):
        return there is not None and math.isnan(there)
    kept = max(-sys.float_info.max, min(sys.float_info.max, value))
    return there in (value, kept)


def _run_of(client: "MlflowClient", order: TrackingOrder) -> tuple[str, str]:
    """Returns run and experiment: of the order, of an earlier attempt, or new."""
    from mlflow.exceptions import MlflowException

    if order.run_id:
        # If it was deleted since, another run continues.
        with contextlib.suppress(MlflowException):
            info = client.get_run(order.run_id).info
            if info.lifecycle_stage == "active":
                return str(info.run_id), str(info.experiment_id)
    experiment = client.get_experiment_by_name(order.experiment)
    if experiment is None:
        try:
            experiment = client.get_experiment(client.create_experiment(order.experiment))
        except MlflowException:
            # Another run has just made it.
            experiment = client.get_experiment_by_name(order.experiment)
            if experiment is None:
                raise
    number = str(experiment.experiment_id)
    marks = [f"tags.`{RUN_TAG}` = '{order.run}'"]
    if order.is_managed:
        marks.append(f"attributes.run_name = '{order.run}'")
    for mark in marks:
        runs = client.search_runs([number], mark, max_results=1)
        if runs:
            return str(runs[0].info.run_id), number
    new_run = client.create_run(number, tags={RUN_TAG: order.run}, run_name=order.run)
    return str(new_run.info.run_id), number


def _with_files(client: "MlflowClient", run_id: str, files: Sequence[str]) -> str:
    """Sends the files; returns an error instead of raising it, as figures matter more."""
    try:
        for file in files:
            client.log_artifact(run_id, file)
    # As in `main`: artifacts may be in any store.
    except Exception as err:
        return f"{Path(file).name} was not kept: {_words(err)}"
    return ""


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(names), _BATCH):
        yield names[begin : begin + _BATCH]


def _name(text: str) -> str:
    # Characters that MLflow allows.
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. /") else "_" for c in text)[:250]


if __name__ == "__main__":
    main()
