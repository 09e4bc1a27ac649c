"""A pipeline's first step with `skip_unchanged`: whether a run would train another model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, OutputFiles, Overrides, StepParams
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Comparison, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFacts:
    """What the step cannot read itself.

    Attributes:
        code (DIGEST): Digest of the code's package (default: the version of the archive that the
            workload names).
        image_digest (DIGEST): Digest of the image (default: as its name or ECR has it).
        channels (NAME=DIR): Where a channel's files are; may be repeated (default: in S3).
    """

    code: str = ""
    image_digest: str = ""
    channels: Annotated[list[str] | None, typer.Option("--channel")] = None


def compare_verb(
    workload: str | None = None,
    *,
    memory: Path | None = None,
    branch: str = "",
    given_facts: GivenFacts,
    files: OutputFiles,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare what a pipeline's run would train with its last run that passed.

    The record is comparison.json, unless --out names another file. What cannot be read counts as
    changed, and does not fail the step.

    Args:
        workload ([WORKLOAD]): The workload file (.yaml).
        memory (DIR): Folder with the pipeline's runs that passed (required).
        branch (NAME): Which of the pipeline's training jobs it is (default: its only one).

    Examples:
        stoker compare w.yaml --memory memory
    """
    from stoker.cli.workloads import read_with_params
    from stoker.run.outputs import (
        COMPARE_PARAMETERS,
        deliver,
        outputs_of,
        step_inputs,
        told_of_comparison,
    )
    from stoker.run.pipeline_facts import PipelineFacts, compared_with

    inputs = step_inputs(files)
    workload = workload or inputs.workload
    if not (workload and memory):
        lacking = "--memory" if workload else "WORKLOAD"
        raise UsageError(f"missing {lacking}", fix="compare needs a workload and --memory")
    outputs = outputs_of(files, parameters=COMPARE_PARAMETERS)
    params = [*inputs.params, *(params or ())]
    record = read_with_params(workload, overrides=overrides or (), params=params)
    mounted = {name: inputs.channels.get(channel.uri) for name, channel in record.channels.items()}
    folders = {name: folder for name, folder in mounted.items() if folder}
    facts = PipelineFacts(
        workload=record,
        code=given_facts.code,
        image_digest=given_facts.image_digest,
        folders=folders | _folders(given_facts.channels or ()),
    )
    comparison = compared_with(memory, facts=facts, branch=branch or inputs.branch)
    deliver(
        comparison,
        outputs=outputs,
        name="comparison",
        explain=lambda compared: compared.words,
        as_json=as_json,
        told=told_of_comparison(comparison),
    )
    _notify(record, comparison, quiet=as_json)


def _notify(workload: "Workload", comparison: "Comparison", *, quiet: bool) -> None:
    """Notifies the webhook of a SageMaker pipeline's run that ends here."""
    from stoker.environment import pipeline_run
    from stoker.run.webhook import telling

    run = pipeline_run()
    is_last = bool(run) and not comparison.has_changed
    with telling(workload, run=run, step="compare", quiet=quiet, is_told=is_last) as ending:
        ending.note = comparison.words


def _folders(texts: Sequence[str]) -> dict[str, Path]:
    folders = dict(text.partition("=")[::2] for text in texts)
    if not all((*folders, *folders.values())):
        raise UsageError("a --channel is not NAME=DIR", fix="for example --channel train=/data")
    return {name: Path(folder) for name, folder in folders.items()}
