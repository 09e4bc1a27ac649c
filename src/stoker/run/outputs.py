"""Outputs of a component: its record as file, text or JSON, and what it passes to Kubeflow.

Kubeflow gives a step `{{$}}`, a JSON document with its inputs and the places of its outputs. Inputs
that the run left out are missing in it, or null, and are then as the workload says. A container
component sets output parameters and metrics only by writing the file `outputs.outputFile`.
"""

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.environment import step_workload
from stoker.errors import UsageError
from stoker.failure_reasons import shortened
from stoker.parameters import (
    BRANCH_INPUT,
    BRANCH_ITEM_INPUT,
    HYPERPARAMETER_INPUT,
    HYPERPARAMETERS_INPUT,
)
from stoker.record_words import free_words, whole_step_of
from stoker.records import (
    Comparison,
    Decision,
    EpochTimes,
    Evaluation,
    GpuLoad,
    Json,
    Profile,
    Training,
    Workload,
    to_document,
    to_json,
    write_json,
    write_text,
)
from stoker.records.base import Record, RecordT, item_at, mapping, mappings, text
from stoker.records.gpu import busy_share
from stoker.records.hyperparameters import argument
from stoker.records.notices import notice_figures
from stoker.records.profile_key import PARTIAL_SCHEMA

# The size that Kubeflow and its database accept.
MAX_PARAMETER_BYTES = 32 << 10

_WHERE = "--executor-input"
_METRICS = "system.Metrics"
MODEL = "system.Model"
# No parameter of the run: the pod's own image.
_OF_THE_POD = ("image",)
# Empty, they name nothing, also to a workload that has neither channels nor pools.
_MAY_BE_EMPTY = ("input_data", "pools_file")
COMPARE_PARAMETERS = frozenset({"comparison", "has_changed", "since", "words"})
DECIDE_PARAMETERS = frozenset({"action", "verdict"})
TRAIN_PARAMETERS = frozenset({"status", "training"})
EVALUATE_PARAMETERS = frozenset({"passed"})
# The record is a text in Kubeflow's JSON, where its quotes make it up to twice as long.
_MAX_RECORD_BYTES = MAX_PARAMETER_BYTES // 2
_MAX_FAILURE = 2000
_OF_STEP = ("step_seconds", "whole_step_seconds", "gpu_utilization")
_MAX_CARRIED_GPUS = 16


class ComponentFiles(Protocol):
    """Output files of a component, and Kubeflow's `{{$}}`, as a command line names them."""

    @property
    def out(self) -> Path | None: ...
    @property
    def summary(self) -> Path | None: ...
    @property
    def executor_input(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInput:
    """Inputs of a step, and the outputs that Kubeflow expects of it.

    Attributes:
        artifacts: Type (such as system.Metrics) and URI of each output, by name.
    """

    inputs: Mapping[str, str]
    output_file: Path
    parameters: frozenset[str]
    artifacts: Mapping[str, tuple[str, str]]

    def address_of(self, kind: str) -> str:
        """Returns the URI of the first artifact of a type; empty: none."""
        return next((uri for of_kind, uri in self.artifacts.values() if of_kind == kind), "")


def read_executor_input(written: str) -> ExecutorInput:
    """Reads what Kubeflow puts in place of `{{$}}`; raises UsageError for another text."""
    try:
        document: Json = json.loads(written)
    except ValueError as err:
        raise _wrong(f"not JSON: {err}") from None
    outputs = mapping(item_at(document, "outputs"))
    file = outputs.get("outputFile")
    if not isinstance(file, str) or not file:
        raise _wrong("it names no outputs.outputFile")
    artifacts = {}
    for name, described in mapping(outputs.get("artifacts")).items():
        # A list of one: our steps have no lists of artifacts.
        first = next(iter(mappings(described, "artifacts")), {})
        artifacts[name] = (text(first, "type", "schemaTitle"), text(first, "uri"))
    values = mapping(document, "inputs", "parameterValues")
    return ExecutorInput(
        inputs={name: _text_of(value) for name, value in values.items() if value is not None},
        output_file=Path(file),
        parameters=frozenset(mapping(outputs.get("parameters"))),
        artifacts=artifacts,
    )


def _text_of(value: Json) -> str:
    """Returns a value as `--param` takes it; protobuf turns 3 into 3.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of a component's step, as texts.

    Attributes:
        cache_key: Text of the time for which a profile may be used again; None: it may not.
        memory: Folder of the pipeline's memory; empty: it has none.
        comparison: The comparison.json of the run's first step; empty: it has none.
        channels: Folders of channels in this container, by their addresses.
        params: All others, as `NAME=VALUE`.
    """

    workload: str | None = None
    run_id: str | None = None
    branch: str = ""
    cache_key: str | None = None
    training: str | None = None
    champion: str | None = None
    outcome: str | None = None
    memory: str = ""
    comparison: str = ""
    channels: Mapping[str, Path] = field(default_factory=dict)
    params: tuple[str, ...] = ()

    def run_name(self, workload: Workload) -> str | None:
        """Returns the name by which a retry of the step finds the first attempt's job."""
        if self.run_id:
            return workload.run_name(self.run_id, branch=self.branch)
        return None

    @property
    def words(self) -> list[str]:
        if self.workload:
            return [self.workload]
        return []


def step_inputs(files: ComponentFiles) -> StepInputs:
    if not files.executor_input:
        return StepInputs()
    given = dict(read_executor_input(files.executor_input).inputs)
    empty = [name for name in _MAY_BE_EMPTY if not given.get(name)]
    for name in (*_OF_THE_POD, *empty):
        given.pop(name, None)
    if "job_image" in given:
        given["image"] = given.pop("job_image")
    workload = given.pop("workload", None)
    if not step_workload() and PARTIAL_SCHEMA in (workload or ""):
        what = "this step's pod does not have the workload, only what its cache is looked up by"
        fix = "in the pipeline: follower(profile(**run.inputs(profile)), run, name='Profile')"
        raise UsageError(what, where=_WHERE, fix=fix)
    given |= _hyperparameters_of(given.pop(HYPERPARAMETERS_INPUT, ""))
    return StepInputs(
        workload=step_workload() or workload,
        run_id=given.pop("run_id", None),
        branch=_branch_of(given),
        cache_key=given.pop("cache_key", None),
        training=given.pop("training", None),
        champion=given.pop("champion", None),
        outcome=given.pop("outcome", None),
        memory=given.pop("memory", ""),
        comparison=given.pop("comparison", ""),
        channels=_folders_in(given.pop("channels", "")),
        # Last: what is left.
        params=tuple(f"{n.removeprefix(HYPERPARAMETER_INPUT)}={v}" for n, v in given.items()),
    )


def _folders_in(text: str) -> dict[str, Path]:
    """Returns the folders of channels by their addresses; empty for a text that is not ours."""
    try:
        folders: Json = json.loads(text or "{}")
    except ValueError:
        return {}
    return {address: Path(str(folder)) for address, folder in mapping(folders).items()}


def _branch_of(given: dict[str, str]) -> str:
    """Takes the branch from a step's inputs: its name, then the items of the loops around it."""
    items = sorted(name for name in given if name.startswith(BRANCH_ITEM_INPUT))
    parts = [given.pop(name, "") for name in (BRANCH_INPUT, *items)]
    return "-".join(part for part in parts if part)


def _hyperparameters_of(text: str) -> dict[str, str]:
    """Returns inputs of the hyperparameters that a step got as one JSON object; empty: none.

    Raises:
        UsageError: If the text is something else.
    """
    try:
        values: Json = json.loads(text or "{}")
    except ValueError as err:
        raise _no_hyperparameters(f"is not JSON: {err}") from None
    if not isinstance(values, dict):
        raise _no_hyperparameters("is no object of JSON")
    return {f"{HYPERPARAMETER_INPUT}{name}": _value_text(each) for name, each in values.items()}


def _value_text(value: Json) -> str:
    """Returns a hyperparameter's value as `--param` takes it: null is empty, a list its words."""
    if isinstance(value, list):
        return shlex.join(argument(each) for each in value)
    if value is None:
        return ""
    return _text_of(value)


def _no_hyperparameters(what: str) -> UsageError:
    return UsageError(
        f"the input {HYPERPARAMETERS_INPUT} {what}",
        where=_WHERE,
        fix='write an object, such as {"batch-size": 128, "lr": 0.1}',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Values of a record for Kubeflow: `metrics` on the run's page, `origin` on the model's."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


def write_executor_output(executor: ExecutorInput, told: Told, *, model_uri: str = "") -> None:
    """Writes the file that Kubeflow reads after the step.

    Parameters that the component does not declare, and metrics that are not finite, are left out.
    """
    names = sorted(executor.parameters & told.parameters.keys())
    values = {name: told.parameters[name] for name in names}
    for name, value in values.items():
        if len(value.encode()) > MAX_PARAMETER_BYTES:
            raise UsageError(
                f"output parameter {name} has {len(value.encode())} bytes; "
                f"at most {MAX_PARAMETER_BYTES} are allowed",
                where=_WHERE,
            )
    # JSON has no NaN: Kubeflow would reject the whole file.
    metrics: dict[str, Json] = {n: v for n, v in sorted(told.metrics.items()) if math.isfinite(v)}
    origin: dict[str, Json] = {**told.origin, "model_uri": model_uri}
    about = {_METRICS: metrics, MODEL: origin}
    artifacts: dict[str, Json] = {
        name: {"artifacts": [{"name": name, "uri": uri, "metadata": about.get(kind, {})}]}
        for name, (kind, uri) in sorted(executor.artifacts.items())
    }
    document: dict[str, Json] = {"parameterValues": {**values}, "artifacts": artifacts}
    executor.output_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(executor.output_file, json.dumps(document, indent=1) + "\n")


def _wrong(what: str) -> UsageError:
    return UsageError(
        f"{_WHERE} is not what Kubeflow gives a step: {what}", fix="pass '{{$}}' as its value"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where a component's outputs go; without `out`, the record is NAME.json here."""

    out: Path | None = None
    summary: Path | None = None
    model: Path | None = None
    executor: ExecutorInput | None = None


def outputs_of(
    files: ComponentFiles, *, model: Path | None = None, parameters: frozenset[str] = frozenset()
) -> Outputs:
    """Returns a command's outputs; raises UsageError if Kubeflow asks for other `parameters`.

    Args:
        files: As the command line names them.
        model: Folder to which the model is copied.
        parameters: Output parameters that the component has.
    """
    outputs = Outputs(out=files.out, summary=files.summary, model=model)
    if not files.executor_input:
        return outputs
    executor = read_executor_input(files.executor_input)
    unknown = sorted(executor.parameters - parameters)
    if unknown:
        fix = "leave it out"
        if parameters:
            fix = "known are: " + ", ".join(sorted(parameters))
        what = f"this step has no output parameter {unknown[0]}"
        raise UsageError(what, where=_WHERE, fix=fix)
    return replace(outputs, executor=executor)


def deliver(
    record: RecordT,
    *,
    outputs: Outputs,
    name: str,
    explain: Callable[[RecordT], str],
    as_json: bool,
    told: Told,
    model_uri: str = "",
) -> None:
    """Writes and prints a component's record; raises UsageError if a file cannot be written.

    Args:
        record: The component's record.
        outputs: Where it goes.
        name: Of the record; its file is NAME.json by default.
        explain: Makes the text for people.
        as_json: Whether JSON is printed instead of that text.
        told: Values for Kubeflow.
        model_uri: Address of the model for Kubeflow; empty: there is none.
    """
    out = outputs.out or Path(f"{name}.json")
    write_json(out, record)
    if outputs.summary:
        words = explain(record)
        outputs.summary.parent.mkdir(parents=True, exist_ok=True)
        write_text(outputs.summary, f"# {name.capitalize()}\n\n```text\n{words}\n```\n")
    if outputs.executor:
        write_executor_output(outputs.executor, told, model_uri=model_uri)
    if as_json:
        # With its final newline, which `print` would double.
        sys.stdout.write(to_json(record))
    else:
        print(explain(record))
        print(f"written: {out}")


def kept_model(model_uri: str | None, outputs: Outputs) -> str | None:
    """Copies a local model to `outputs.model`; returns its address, new or unchanged."""
    if outputs.model is None or not model_uri or "://" in model_uri:
        return model_uri
    if not Path(model_uri).is_dir():
        return model_uri
    # Kubeflow makes the folder, and uploads it after the step.
    shutil.copytree(model_uri, outputs.model, dirs_exist_ok=True)
    if outputs.executor and (address := outputs.executor.address_of(MODEL)):
        return address
    return str(outputs.model)


def told_of_profile(record: Profile) -> Told:
    terms = ("step_seconds", "wait_seconds", "accelerator_step_seconds", "loader_cpu_seconds")
    loads = ("cpu_utilization", "gpu_utilization")
    metrics = {**_values(record.step, terms), **_values(record.observed, loads)}
    if (whole := whole_step_of(record)) is not None:
        metrics["whole_step_seconds"] = whole
    return Told(metrics={**metrics, **_epochs(record.epochs)})


def told_of_comparison(record: Comparison) -> Told:
    has_changed = "true" if record.has_changed else "false"
    texts = {"has_changed": has_changed, "since": record.since, "words": record.words}
    # A later step of Kubeflow gets it as a parameter, as not every pipeline compares.
    texts["comparison"] = json.dumps(to_document(record), sort_keys=True)
    return Told(parameters=texts, metrics={"has_changed": float(record.has_changed)})


def told_of_decision(record: Decision) -> Told:
    promise = record.plan.predicted
    parameters = {"action": record.action, "verdict": record.kind}
    if promise is None:
        return Told(parameters=parameters)
    return Told(parameters=parameters, metrics=_values(promise, promise.__struct_fields__))


def told_of_training(record: Training) -> Told:
    """Returns the script's metrics and the measured step; and the record, for the next step."""
    names = (
        "step_seconds",
        "wait_seconds",
        "whole_step_seconds",
        "samples_per_second",
        "usd_per_1000_steps",
    )
    metrics = {**record.metrics, **_values(record.measured, names)}
    if record.measured:
        metrics |= _epochs(record.measured.epochs)
    metrics |= record.dollars
    busy = busy_share(record.gpus)
    if busy is not None:
        metrics["gpu_utilization"] = busy
    return Told(
        parameters={"status": record.status, "training": carried(record)},
        metrics=metrics,
        origin=record.lineage.facts(),
    )


def told_of_evaluation(record: Evaluation) -> Told:
    performance = record.performance
    return Told(
        parameters={"passed": "true" if record.passed else "false"},
        metrics={
            **{gate.metric: gate.value for gate in record.gates if gate.value is not None},
            **_values(performance and performance.measured, _OF_STEP),
            **_values(performance, ("speedup", "prediction_error", "cost_change")),
            "passed": float(record.passed),
            **notice_figures(record.notices),
        },
    )


def _epochs(times: EpochTimes | None) -> dict[str, float]:
    if times:
        return times.figures
    return {}


def _values(record: Record | None, names: Sequence[str]) -> dict[str, float]:
    """Returns those fields of a record that are known numbers."""
    figures: dict[str, object] = {name: getattr(record, name, None) for name in names}
    return {name: value for name, value in figures.items() if isinstance(value, float | int)}


def carried(record: Training, *, max_bytes: int = _MAX_RECORD_BYTES) -> str:
    """Returns the record as JSON of bounded length: events are dropped first, then hosts.

    A parameter of Kubeflow, unlike a file, is shown on the run's page and can be a condition.
    """
    failure = record.failure
    if failure:
        failure = shortened(failure, most=_MAX_FAILURE)
    measured = record.measured
    if measured:
        # The file stays in the step that trained.
        measured = msgspec.structs.replace(measured, timeline_file=None)
    lineage = msgspec.structs.replace(record.lineage, packages={})
    # Of a GPU only its busy share is read later.
    gpus = tuple(_shortened_load(gpu) for gpu in record.gpus[:_MAX_CARRIED_GPUS])
    short = msgspec.structs.replace(
        record, failure=failure, measured=measured, lineage=lineage, gpus=gpus
    )
    # What an evaluation needs least goes first: it reads status, metrics and times.
    for less in (
        {},
        {"events": record.events[-20:]},
        {"events": ()},
        {"events": (), "hosts": record.hosts[:50]},
        {"events": (), "hosts": (), "metrics": dict(sorted(record.metrics.items())[:100])},
    ):
        text = json.dumps(to_document(msgspec.structs.replace(short, **less)))
        if len(text.encode()) <= max_bytes:
            break
    return text


def _shortened_load(gpu: GpuLoad) -> GpuLoad:
    return msgspec.structs.replace(
        gpu,
        memory_bytes=None,
        power_watts=None,
        sm_clock_mhz=None,
        pcie_received_bytes_per_second=None,
        throttled={},
    )


def free_advice(profiled: Profile, decision: Decision) -> list[str]:
    """Returns the advice that costs nothing and helps with any plan."""
    # `num-workers` is from decide, the others are fixes of the profile.
    free = {fix.id for fix in profiled.fixes if fix.cost == "none"} | {"num-workers"}
    first = free_words(decision)
    texts = [advice.text for advice in decision.advice if advice.id in free]
    if first:
        return [first, *texts]
    return texts
