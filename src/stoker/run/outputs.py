"""Outputs of a component: its record as file, text or JSON, and what it passes to Kubeflow.

Kubeflow gives a step `{{$}}`, a JSON document with its inputs and the places of its outputs. Inputs
that the run left out are missing in it, or null. A container component sets output parameters and
metrics only by writing the file `outputs.outputFile`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from stoker.errors import UsageError
from stoker.parameters import PARAMETER_INPUT, PARAMETERS_INPUT
from stoker.records import (
    Decision,
    Evaluation,
    Json,
    Profile,
    Training,
    Workload,
    to_json,
    write_json,
    write_text,
)
from stoker.records.base import Document, Record, RecordT, mapping, mappings, text
from stoker.records.profile import busy_share


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowStep:
    """What Kubeflow gives a step, and expects of it; empty outside Kubeflow.

    Attributes:
        inputs: As texts.
        outputs: Names of its parameters; type (such as system.Metrics) and URI of each artifact;
            the file that the step writes.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Document = field(default_factory=dict)

    @property
    def workload(self) -> str:
        return self.inputs.get("workload", "")

    def run_name(self, workload: Workload) -> str | None:
        """Returns the name by which a retry of the step finds the first attempt's job."""
        run_id = self.inputs.get("run_id")
        return workload.run_name(run_id, branch=self.inputs.get("branch", "")) if run_id else None

    @property
    def params(self) -> list[str]:
        """The run's parameters, as `NAME=VALUE`."""
        whole = _document(self.inputs.get(PARAMETERS_INPUT) or "{}")
        found = {name: _as_text(value) for name, value in whole.items()}
        for name, value in self.inputs.items():
            if name.startswith(PARAMETER_INPUT):
                found[name.removeprefix(PARAMETER_INPUT)] = value
        return [f"{name}={value}" for name, value in found.items()]


NO_STEP = KubeflowStep()


def read_step(written: str | None) -> KubeflowStep:
    """Reads what Kubeflow puts in place of `{{$}}`; raises UsageError for another text."""
    if not written:
        return NO_STEP
    document = _document(written)
    values = mapping(document, "inputs", "parameterValues")
    return KubeflowStep(
        inputs={name: _as_text(value) for name, value in values.items() if value is not None},
        outputs=mapping(document, "outputs"),
    )


def _document(written: str) -> Document:
    try:
        found: Json = json.loads(written)
    except ValueError as err:
        where = "--executor-input, or its input params"
        raise UsageError(f"no JSON: {err}", where=where, fix="pass '{{$}}'") from None
    return mapping(found)


def _as_text(value: Json) -> str:
    """Returns a value as `--param` takes it: null is empty, others as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)


def deliver(
    record: RecordT,
    *,
    out: Path | None,
    step: KubeflowStep = NO_STEP,
    explain: Callable[[RecordT], str],
    as_json: bool = False,
    parameters: Mapping[str, str] = MappingProxyType({}),
    model: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes and prints a component's record; raises UsageError if a file cannot be written.

    Args:
        record: The component's record.
        out: Its file. None: NAME.json here.
        step: Of Kubeflow.
        explain: Makes the text for people.
        as_json: Whether JSON is printed instead of that text.
        parameters: Output parameters for Kubeflow.
        model: For Kubeflow: address and origin of the model.
    """
    out = out or Path(f"{type(record).__name__.lower()}.json")
    write_json(out, record)
    words = explain(record)
    if step.outputs:
        metrics = {**metrics_of(record), **figures_of(record)}
        write_step(step, parameters=parameters, metrics=metrics, model=model)
    # A record's JSON has its final newline.
    print(to_json(record), end="") if as_json else print(f"{words}\nwritten: {out}")


def write_step(
    step: KubeflowStep,
    *,
    parameters: Mapping[str, str],
    metrics: Mapping[str, float],
    model: Mapping[str, str],
) -> None:
    """Writes the file that Kubeflow reads after the step: only what the component declares."""
    # JSON has no NaN: Kubeflow would reject the whole file.
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    about: dict[str, Mapping[str, Json]] = {"system.Metrics": finite, "system.Model": model}
    artifacts: dict[str, Json] = {}
    for name, described in mapping(step.outputs, "artifacts").items():
        # A list of one: our steps have no lists of artifacts.
        (first,) = mappings(described, "artifacts")
        metadata = about.get(text(first, "type", "schemaTitle"), {})
        made: Json = {"name": name, "uri": text(first, "uri"), "metadata": metadata}
        artifacts[name] = {"artifacts": [made]}
    declared = mapping(step.outputs, "parameters").keys()
    values = {name: parameters[name] for name in declared & parameters.keys()}
    document = {"parameterValues": values, "artifacts": artifacts}
    write_text(text(step.outputs, "outputFile"), json.dumps(document, indent=1))


def figures_of(record: Record) -> dict[str, float]:
    """Returns the figures of a component's record by name, without the metrics of its script."""
    match record:
        case Profile():
            return _numbers(record.step)
        case Decision():
            return _numbers(record.plan.predicted)
        case Training():
            busy = busy_share(record.gpus)
            figures = {**_numbers(record.measured), **record.dollars}
            return figures if busy is None else {**figures, "gpu_utilization": busy}
        case Evaluation():
            found = record.performance
            figures = {**_numbers(found and found.measured), **_numbers(found)}
            return {**figures, "passed": float(record.passed)}
    return {}


def metrics_of(record: Record) -> dict[str, float]:
    """Returns the metrics that a component's script reported, as far as its record has them."""
    match record:
        case Training() | Evaluation():
            return record.numbers
    return {}


def _numbers(record: Record | None) -> dict[str, float]:
    """Returns the fields of a record that are numbers, by name."""
    fields = msgspec.structs.asdict(record) if record else {}
    return {name: value for name, value in fields.items() if type(value) in (int, float)}


def free_advice(profiled: Profile, decision: Decision) -> list[str]:
    """Returns the advice that costs nothing and helps with any plan."""
    # `num-workers` is from decide, the others are fixes of the profile.
    free = {fix.id for fix in profiled.fixes if fix.cost == "none"} | {"num-workers"}
    return [advice.text for advice in decision.advice if advice.id in free]
