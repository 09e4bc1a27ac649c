"""Kubeflow reads the executor-output file: what a step tells it next to the files that it writes.

Kubeflow hands a step `{{$}}`, a JSON document: its inputs, and where its outputs belong. A
container that writes `outputs.outputFile` gives output parameters their values, and metrics to the
page of the run; of a container component nothing else does. That its artifacts are named there,
too, lets kfp's local runner hand them on.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.records import Json, write_text

# What Kubeflow and its database carry from step to step without complaint.
MAX_PARAMETER_BYTES = 32 << 10

_WHERE = "--executor-input"
_METRICS = "system.Metrics"
MODEL = "system.Model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInput:
    """The outputs that a step is to write, as Kubeflow names them.

    Attributes:
        output_file: Where it looks for the executor's output.
        parameters: Names of the step's output parameters.
        artifacts: Name to its type (such as system.Metrics) and address.
    """

    output_file: Path
    parameters: frozenset[str]
    artifacts: Mapping[str, tuple[str, str]]

    def address_of(self, kind: str) -> str:
        """Returns the address of the first artifact of that type; empty where there is none."""
        return next((uri for found, uri in self.artifacts.values() if found == kind), "")


def read_executor_input(text: str) -> ExecutorInput:
    """Reads what Kubeflow puts in place of `{{$}}`.

    Raises:
        UsageError: If it is something else.
    """
    try:
        document: Json = json.loads(text)
    except ValueError as err:
        raise _wrong(f"not JSON: {err}") from None
    outputs = _mapping(_mapping(document).get("outputs"))
    file = outputs.get("outputFile")
    if not isinstance(file, str) or not file:
        raise _wrong("it names no outputs.outputFile")
    artifacts = {}
    for name, described in _mapping(outputs.get("artifacts")).items():
        found = _mapping(described).get("artifacts")
        first = _mapping(found[0]) if isinstance(found, list) and found else {}
        kind = _mapping(first.get("type")).get("schemaTitle")
        artifacts[name] = (str(kind or ""), str(first.get("uri") or ""))
    return ExecutorInput(
        output_file=Path(file),
        parameters=frozenset(_mapping(outputs.get("parameters"))),
        artifacts=artifacts,
    )


def check_parameters(executor: ExecutorInput, known: frozenset[str]) -> None:
    """Refuses a component that asks for parameters which its step does not publish.

    Raises:
        UsageError: Naming those that it does.
    """
    unknown = sorted(executor.parameters - known)
    if unknown:
        raise UsageError(
            f"this step publishes no parameter {unknown[0]}",
            where=_WHERE,
            fix="known are: " + ", ".join(sorted(known)) if known else "leave it out",
        )


def write_executor_output(
    executor: ExecutorInput,
    *,
    parameters: Mapping[str, str],
    metrics: Mapping[str, float],
    model_uri: str = "",
) -> None:
    """Writes the file that Kubeflow reads when the step has ended.

    Args:
        executor: As read before the work began.
        parameters: Values; those that the component does not declare are left out.
        metrics: Shown on the run's page, by every artifact for metrics; not a number: left out.
        model_uri: Where the model is, told by every artifact for models.

    Raises:
        UsageError: If a parameter is longer than Kubeflow carries, or the file cannot be written.
    """
    values = {name: parameters[name] for name in sorted(executor.parameters & set(parameters))}
    for name, value in values.items():
        if len(value.encode()) > MAX_PARAMETER_BYTES:
            raise UsageError(
                f"output parameter {name} has {len(value.encode())} bytes, "
                f"at most {MAX_PARAMETER_BYTES}",
                where=_WHERE,
            )
    told: dict[str, Json] = {n: v for n, v in sorted(metrics.items()) if math.isfinite(v)}
    about: dict[str, dict[str, Json]] = {_METRICS: told, MODEL: {"model_uri": model_uri}}
    artifacts: dict[str, Json] = {
        name: {"artifacts": [{"name": name, "uri": uri, "metadata": about.get(kind, {})}]}
        for name, (kind, uri) in sorted(executor.artifacts.items())
    }
    document: dict[str, Json] = {"parameterValues": {**values}, "artifacts": artifacts}
    executor.output_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(executor.output_file, json.dumps(document, indent=1) + "\n")


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _wrong(what: str) -> UsageError:
    return UsageError(
        f"{_WHERE} is not what Kubeflow hands a step: {what}", fix="pass '{{$}}' as its value"
    )
