"""`stoker compile` writes a workload's pipeline as a file, with no network."""

import contextlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    Overrides,
    TargetName,
    WorkloadFile,
    writable_file,
)
from stoker.errors import StokerError, UsageError
from stoker.terminal import say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import Compiled
    from stoker.records import Workload


def compile_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    out: Annotated[Path, typer.Option(callback=writable_file)],
    components: Path | None = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compile the pipeline of a workload to a file, without a network.

    Args:
        out (F): Write the pipeline's definition to this file.
        components (DIR): Kubeflow: also write one file per component to this folder (default:
            none).

    Examples:
        stoker compile kubeflow configs/mnist-kubeflow.yaml --out pipeline.yaml
        stoker compile sagemaker configs/mnist-sagemaker.yaml --out pipeline.json
    """
    from stoker.records import write_text
    from stoker.workload_file import read_workload

    record = read_workload(workload, overrides=overrides or ())
    if components and target != "kubeflow":
        raise UsageError(
            "--components is only for kubeflow: the steps of a pipeline on SageMaker are functions "
            "of stoker.sagemaker",
            where="--components",
            fix="put a step of your own into pipelines/sagemaker.py (docs/sagemaker.md shows how)",
        )
    with working(f"compiling {record.name}", quiet=as_json):
        compiled = compiled_for(target, record)
    write_text(out, compiled.definition)
    files: list[Path] = []
    if components:
        files = _written_components(components)
    defaults = {parameter.name: parameter.default(record) for parameter in compiled.parameters}
    if as_json:
        summary = {"name": compiled.name, "definition": str(out), "parameters": defaults}
        inputs = {"inputs": sorted(compiled.uploads), "components": [str(file) for file in files]}
        print(json.dumps({**summary, **inputs}, indent=2))
        return
    size = len(compiled.definition.encode()) / 1024
    say(f"{compiled.name}: {size:.0f} KiB in {out}", quiet=False)
    for name, default in defaults.items():
        say(f"  {name:<18} {_shown_default(default)}", quiet=False)
    for file in files:
        say(f"component: {file}", quiet=False)
    _say_warnings(record, target)
    again = again_words(overrides or ())
    say(f"next:      stoker upload {target} {workload}{again}", quiet=False)


def _written_components(folder: Path) -> list[Path]:
    """Writes one file per component of Kubeflow, and returns the files."""
    from stoker.pipelines.kubeflow.compile import component_files
    from stoker.records import write_text

    files = []
    for name, component in component_files().items():
        files.append(folder / f"{name}.yaml")
        write_text(files[-1], component)
    return files


def _shown_default(default: object) -> str:
    # A pools file is a default of many lines.
    text = str(default).replace("\n", " ") or "(empty)"
    if len(text) > 60:
        return text[:57] + "..."
    return text


def _say_warnings(workload: "Workload", target: str) -> None:
    """Warns of hosts without a price, and of metrics that the script does not report."""
    from stoker.pipelines.base import platform_of
    from stoker.project.unreported import unreported_words
    from stoker.run.billing import say_prices

    say_prices(workload, platform=platform_of(target), quiet=False)
    folder = Path()
    if target == "sagemaker" and workload.sagemaker:
        folder = Path(workload.sagemaker.source or "")
    if warning := unreported_words(workload, folder=folder):
        say(f"warning: {warning}", quiet=False)


def again_words(overrides: Sequence[str]) -> str:
    return "".join(f" {_again(override)}" for override in overrides)


def _again(override: str) -> str:
    from stoker.workload_file import VALUES_MARK

    if override.startswith(VALUES_MARK):
        return f"--values {shlex.quote(override.removeprefix(VALUES_MARK))}"
    return f"--set {shlex.quote(override)}"


def compiled_for(target: str, workload: "Workload") -> "Compiled":
    if target == "kubeflow":
        from stoker.pipelines.kubeflow.compile import compile_kubeflow

        return compile_kubeflow(workload)
    from stoker.pipelines.sagemaker.compile import compile_pipeline

    return compile_pipeline(workload)


def has_parameter(target: str, workload: "Workload", name: str) -> bool:
    from stoker.parameters import spelt_as
    from stoker.pipelines.kubeflow.compile import inputs_of, spec_of_text
    from stoker.records.base import mappings

    with contextlib.suppress(StokerError):
        definition = compiled_for(target, workload).definition
        if target == "kubeflow":
            return name in inputs_of(spec_of_text(definition))
        declared = [str(item["Name"]) for item in mappings(json.loads(definition), "Parameters")]
        return spelt_as(name, declared) in declared
    return False
