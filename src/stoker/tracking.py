"""Keeps a run's figures in MLflow: one run there for each run of stoker, its retries included.

Whoever follows the job writes, before the training (so that the script's own `mlflow.log_metric`
goes to the same run) and after it, from the records. Ranks need no MLflow.

MLflow's library works in a process of its own, for `tracking.timeout_seconds` at most: it waits for
a server that is away for minutes, imports for seconds, and prints. What it cannot do is told in a
line, and changes nothing else.
"""

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import install_command
from stoker.logs import printable
from stoker.platforms.base import MLFLOW_FILES, MLFLOW_RUN, MLFLOW_URI, hyperparameters
from stoker.records import Evaluation, TrackingSettings, Training
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
# A server that is away: two further tries, seconds apart; by default MLflow tries for minutes.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
# No word to others than the server; a folder is as good as a data base for runs one by one.
_ALWAYS = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", MLFLOW_FILES: "true"}


class TrackingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Tells the process with MLflow what to write.

    Attributes:
        address: Address of the server, as MLflow takes it.
        run: Name of stoker's run: the run of MLflow with this tag is continued.
        run_id: Run of MLflow, where it is known.
        is_managed: SageMaker has made a run of this name already, without the tag.
        status: How the run ended; empty: it goes on.
        is_refused: No job of this process began: the end that an earlier one has told stays.
        step: Steps that the training has done, at which the metrics stand.
        files: Kept as artifacts.
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
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    files: tuple[str, ...] = ()


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Names the run of MLflow.

    Attributes:
        run_id: Empty where there is none.
        url: Its page, where the server has pages.
        trouble: What could not be done, in a line; empty where all was.
    """

    run_id: str = ""
    url: str = ""
    trouble: str = ""


def started(
    settings: TrackingSettings, *, run: str, tags: Mapping[str, str], environ: Mapping[str, str]
) -> TrackedRun:
    """Starts the run in MLflow, or goes on with that of an earlier attempt.

    Blocks for `settings.timeout_seconds` at most, and never raises for what MLflow does.
    """
    order = TrackingOrder(
        address=_address(settings), experiment=settings.experiment or run, run=run, tags=dict(tags)
    )
    return _asked(order, timeout=settings.timeout_seconds, environ=environ)


def kept(
    settings: TrackingSettings,
    *,
    run: str,
    tags: Mapping[str, str],
    training: Training | None,
    evaluation: Evaluation | None = None,
    run_id: str | None = None,
    files: Sequence[Path] = (),
    is_refused: bool = False,
    environ: Mapping[str, str],
    timeout: float | None = None,
) -> TrackedRun:
    """Writes what the records say into the run in MLflow, and ends it; may be repeated.

    Parameters that have a value there keep it: the script's own come first.

    Args:
        settings: Where to.
        run: Name of stoker's run.
        tags: As of `started`.
        training: The run's record; None: it failed without one.
        evaluation: Its evaluation, where there is one.
        run_id: The run in MLflow, where no record has it.
        files: Artifacts; those that are not there are left out.
        is_refused: No job began: without a record, the end that an earlier attempt has told stays.
        environ: Environment of this process: MLflow finds its token there.
        timeout: Seconds; absent: as the settings say.
    """
    order = TrackingOrder(
        address=_address(settings),
        experiment=settings.experiment or run,
        run=run,
        run_id=run_id or (training.mlflow_run_id if training else None),
        is_managed=settings.is_managed,
        status=_STATUS[training.status] if training else "FAILED",
        is_refused=is_refused and training is None,
        step=(training and training.num_steps) or 0,
        parameters=parameters_of(training) if training else {},
        metrics=metrics_of(training, evaluation),
        tags={**tags, **(tags_of(training, evaluation) if training else {_STATUS_TAG: "failed"})},
        files=tuple(str(file) for file in files if file.is_file()),
    )
    return _asked(order, timeout=timeout or settings.timeout_seconds, environ=environ)


def handed(
    settings: TrackingSettings, tracked: TrackedRun, *, is_this_machine: bool
) -> dict[str, str]:
    """Returns the variables by which the script's own calls of MLflow go to the same run.

    None where the hosts of the training cannot reach it, or it was not reached from here: a script
    would wait for a server that is away.
    """
    if not tracked.run_id or (settings.is_local and not is_this_machine):
        return {}
    files = {MLFLOW_FILES: "true"} if (settings.mlflow or "").startswith("file:") else {}
    return {MLFLOW_URI: _address(settings), MLFLOW_RUN: tracked.run_id, **files}


def parameters_of(training: Training) -> dict[str, str]:
    """Returns hyperparameters and cluster of a run."""
    cluster = {
        f"{group.name}.{key}": str(value)
        for group in training.groups
        for key, value in (
            ("instance_type", group.instance_type),
            ("count", group.count),
            ("workers_per_host", group.workers_per_host),
            ("processes_per_host", group.processes_per_host),
        )
        if value is not None
    }
    how = {"strategy": training.strategy, "engine": training.engine}
    return {**hyperparameters(training.hyperparameters), **cluster, **how}


def metrics_of(training: Training | None, evaluation: Evaluation | None) -> dict[str, float]:
    """Returns what the script reported, steps as they were, and what the evaluation found."""
    found: dict[str, float | None] = {**(training.metrics if training else {})}
    found["stoker_usd_total"] = training.usd_total if training else None
    measured = training.measured if training else None
    if measured and measured.steps:
        found |= {
            "stoker_step_seconds": measured.step_seconds,
            "stoker_wait_seconds": measured.wait_seconds,
            "stoker_samples_per_second": measured.samples_per_second,
            "stoker_usd_per_1000_steps": measured.usd_per_1000_steps,
        }
    if evaluation:
        performance = evaluation.performance
        found["stoker_passed"] = float(evaluation.passed)
        found |= {each.metric: each.value for each in evaluation.gates}
        if performance:
            found |= {
                "stoker_speedup": performance.speedup,
                "stoker_prediction_error": performance.prediction_error,
                "stoker_cost_change": performance.cost_change,
            }
    return {
        name: value for name, value in found.items() if value is not None and math.isfinite(value)
    }


def tags_of(training: Training, evaluation: Evaluation | None) -> dict[str, str]:
    """Returns how a run came out, and where it is."""
    outcome = outcome_of(training, evaluation.gates if evaluation else ())
    told = {
        _STATUS_TAG: training.status,
        "stoker_job": training.job.name,
        "stoker_job_url": training.job.url,
        "stoker_platform": training.job.platform,
        "stoker_decision": training.decision_id,
        "stoker_model": training.model_uri,
        "stoker_outcome": outcome.state,
        "stoker_failure": outcome.reason,
    }
    # MLflow's own name for it, which its pages show.
    if commit := training.what.get("git"):
        told["mlflow.source.git.commit"] = str(commit)
    # Empty ones take the place of an earlier attempt's.
    return {name: value or "" for name, value in told.items()}


def _address(settings: TrackingSettings) -> str:
    """Returns the address with a folder as it is named from anywhere."""
    address = settings.mlflow or ""
    if address.startswith("file:"):
        return Path(address.removeprefix("file:").removeprefix("//")).absolute().as_uri()
    if address.startswith("sqlite:"):
        file = address.removeprefix("sqlite:").removeprefix("///")
        return f"sqlite:///{Path(file).absolute()}"
    return address.rstrip("/")


def _asked(order: TrackingOrder, *, timeout: float, environ: Mapping[str, str]) -> TrackedRun:
    """Runs an order in a process with MLflow; returns its answer, or why there is none."""
    if not find_spec("mlflow"):
        return TrackedRun(trouble=f"mlflow is not installed: {install_command('mlflow')}")
    if order.address.startswith("arn:") and not find_spec("sagemaker_mlflow"):
        return TrackedRun(trouble="its plugin is missing: pip install sagemaker-mlflow")
    try:
        ended = subprocess.run(
            # -P: no file of the current folder takes the place of a library's.
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
        return TrackedRun(trouble=f"cannot be asked: {err}")
    # MLflow prints, too: the answer is the last line.
    lines = ended.stdout.splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=TrackedRun)
    except msgspec.DecodeError:
        words = ended.stderr.decode(errors="replace").strip().splitlines()
        return TrackedRun(trouble=_short(words[-1] if words else f"code {ended.returncode}"))


def _short(words: str) -> str:
    return printable(" ".join(words.split()))[:_MAX_WORDS]


# --- in the process with MLflow


def main() -> None:
    """Reads an order on standard input, and prints the answer as its last line."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=TrackingOrder)
    try:
        answer = _written(order)
    # A process edge: servers, stores and plugins have errors of their own, and all are told alike.
    except Exception as err:
        answer = TrackedRun(trouble=_words(err))
    print(json.dumps(msgspec.to_builtins(answer)))


def _words(err: Exception) -> str:
    # Of a server that is away requests, urllib3 and MLflow each tell the story once more.
    found = re.match(r"API request to (https?://[^/]+)\S* failed with exception", str(err))
    return f"{found[1]} cannot be reached" if found else _short(str(err) or type(err).__name__)


def _written(order: TrackingOrder) -> TrackedRun:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(tracking_uri=order.address)
    run_id, experiment_id = _run_of(client, order)
    there = client.get_run(run_id).data
    now = int(time.time() * 1000)
    parameters = {_name(name): text[:_MAX_VALUE] for name, text in order.parameters.items()}
    for names in _parts(sorted(set(parameters) - set(there.params))):
        client.log_batch(run_id, params=[Param(name, parameters[name]) for name in names])
    metrics = {_name(name): value for name, value in order.metrics.items()}
    # A value that is there already would be a second point of its curve.
    new = [name for name, value in sorted(metrics.items()) if there.metrics.get(name) != value]
    for names in _parts(new):
        points = [Metric(name, metrics[name], now, order.step) for name in names]
        client.log_batch(run_id, metrics=points)
    ended = _STATUS.get(there.tags.get(_STATUS_TAG, "")) if order.is_refused else None
    told = {name: value for name, value in order.tags.items() if value or name in there.tags}
    if ended:
        del told[_STATUS_TAG]
    tags = {**told, RUN_TAG: order.run}
    client.log_batch(run_id, tags=[RunTag(name, tags[name]) for name in sorted(tags)])
    trouble = _with_files(client, run_id, order.files)
    # Last: whoever waits for the end finds all of it.
    if order.status:
        client.set_terminated(run_id, ended or order.status)
    else:
        client.update_run(run_id, status="RUNNING")
    changed = sorted(n for n in parameters if there.params.get(n, parameters[n]) != parameters[n])
    if changed and not trouble:
        trouble = "it keeps the first value of " + _short(", ".join(changed))
    page = f"{order.address}/#/experiments/{experiment_id}/runs/{run_id}"
    url = page if order.address.startswith("http") else ""
    return TrackedRun(run_id=run_id, url=url, trouble=trouble)


def _run_of(client: "MlflowClient", order: TrackingOrder) -> tuple[str, str]:
    """Returns run and experiment: the one that is named, that of an earlier attempt, a new one."""
    from mlflow.exceptions import MlflowException

    if order.run_id:
        # Deleted there meanwhile: then the run goes on in another.
        with contextlib.suppress(MlflowException):
            found = client.get_run(order.run_id).info
            if found.lifecycle_stage == "active":
                return str(found.run_id), str(found.experiment_id)
    experiment = client.get_experiment_by_name(order.experiment)
    if experiment is None:
        try:
            experiment = client.get_experiment(client.create_experiment(order.experiment))
        except MlflowException:
            # Another run has made it in between.
            experiment = client.get_experiment_by_name(order.experiment)
            if experiment is None:
                raise
    number = str(experiment.experiment_id)
    marks = [f"tags.`{RUN_TAG}` = '{order.run}'"]
    marks += [f"attributes.run_name = '{order.run}'"] if order.is_managed else []
    for mark in marks:
        runs = client.search_runs([number], mark, max_results=1)
        if runs:
            return str(runs[0].info.run_id), number
    made = client.create_run(number, tags={RUN_TAG: order.run}, run_name=order.run)
    return str(made.info.run_id), number


def _with_files(client: "MlflowClient", run_id: str, files: Sequence[str]) -> str:
    """Sends the files; returns what could not be sent: figures are worth more than files."""
    try:
        for file in files:
            client.log_artifact(run_id, file)
    # As in `main`: artifacts may be in any store, with errors of its own.
    except Exception as err:
        return f"{Path(file).name} was not kept: {_words(err)}"
    return ""


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(names), _BATCH):
        yield names[begin : begin + _BATCH]


def _name(text: str) -> str:
    """Returns a name that MLflow takes."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. /") else "_" for c in text)[:250]


if __name__ == "__main__":
    main()
