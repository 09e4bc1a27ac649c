"""A component delivers its record as a file, words, JSON and Markdown, and to Kubeflow."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stoker.cli.executor_output import (
    MODEL,
    ExecutorInput,
    check_parameters,
    read_executor_input,
    write_executor_output,
)
from stoker.records import Record, to_json, write_json, write_text

_RecordT = TypeVar("_RecordT", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The destinations of a component's outputs.

    Attributes:
        out: File for the record; absent: NAME.json in this folder.
        summary: File for a summary in Markdown.
        model: Folder for a copy of the model.
        executor: What Kubeflow wants to be told.
    """

    out: Path | None = None
    summary: Path | None = None
    model: Path | None = None
    executor: ExecutorInput | None = None


def outputs_of(
    *,
    out: Path | None,
    summary: Path | None = None,
    model: Path | None = None,
    executor_input: str | None = None,
    parameters: frozenset[str] = frozenset(),
) -> Outputs:
    """Returns the outputs that the command line names, checked before the work begins.

    Args:
        out: As in `Outputs`.
        summary: As in `Outputs`.
        model: As in `Outputs`.
        executor_input: Kubeflow's document.
        parameters: All that the component can publish.

    Raises:
        UsageError: If Kubeflow's document is none, or asks for other parameters.
    """
    executor = read_executor_input(executor_input) if executor_input else None
    if executor:
        check_parameters(executor, parameters)
    return Outputs(out=out, summary=summary, model=model, executor=executor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The values of a record that Kubeflow is told.

    Attributes:
        parameters: Values by name, for conditions and later steps.
        metrics: Numbers by name, for the page of the run.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def deliver(
    record: _RecordT,
    *,
    outputs: Outputs,
    name: str,
    explain: Callable[[_RecordT], str],
    as_json: bool,
    told: Told,
    model_uri: str = "",
) -> None:
    """Writes and prints a component's record.

    Args:
        record: The outcome.
        outputs: Where it goes.
        name: Of the record: names its file, and heads the summary.
        explain: The record in words.
        as_json: The record on stdout in place of words.
        told: For Kubeflow.
        model_uri: For Kubeflow, where there is a model.

    Raises:
        UsageError: If a file cannot be written.
    """
    out = outputs.out or Path(f"{name}.json")
    write_json(out, record)
    if outputs.summary:
        words = explain(record)
        outputs.summary.parent.mkdir(parents=True, exist_ok=True)
        write_text(outputs.summary, f"# {name.capitalize()}\n\n```text\n{words}\n```\n")
    if outputs.executor:
        write_executor_output(
            outputs.executor,
            parameters=told.parameters,
            metrics=told.metrics,
            model_uri=model_uri,
        )
    if as_json:
        sys.stdout.write(to_json(record))
    else:
        print(explain(record))
        print(f"written: {out}")


def kept_model(model_uri: str | None, outputs: Outputs) -> str | None:
    """Copies a model that is on this machine; gives the address where it is to stay.

    One that is elsewhere stays there.
    """
    source = Path(model_uri) if model_uri and "://" not in model_uri else None
    if outputs.model is None or source is None or not source.is_dir():
        return model_uri
    shutil.copytree(source, outputs.model, dirs_exist_ok=True)
    address = outputs.executor.address_of(MODEL) if outputs.executor else ""
    return address or str(outputs.model)
