"""`stoker compile`: a workload's pipeline as a file, made with no network."""

import json
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import AsJson, Debug, Overrides, WorkloadFile

_TARGETS = ("sagemaker", "kubeflow")


def compile_verb(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="sagemaker or kubeflow.", show_default=False)
    ],
    workload: WorkloadFile,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="F", help="File for the definition.")],
    train_step: Annotated[
        str,
        typer.Option(
            "--train-step",
            metavar="KIND",
            help="launched (what each run decides) or native (groups are parameters).",
        ),
    ] = "launched",
    decision: Annotated[
        Path | None,
        typer.Option("--decision", metavar="D", help="Its groups are native's defaults."),
    ] = None,
    components: Annotated[
        Path | None,
        typer.Option("--components", metavar="DIR", help="Components in place of the project's."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compiles the pipeline of a workload to a file; needs no account and no network."""
    from stoker.cli.progress import say
    from stoker.errors import UsageError
    from stoker.records import Decision, nearest, read_json, write_text
    from stoker.settings import read_workload
    from stoker.targets.compiled import compile_pipeline

    if target == "kubeflow":
        raise UsageError("stoker cannot compile for kubeflow yet", fix="stoker compile sagemaker")
    if target != "sagemaker":
        raise UsageError(f"there is no target {target}", fix=nearest(target, _TARGETS))
    record = read_workload(workload, overrides=overrides or ())
    compiled = compile_pipeline(
        record,
        train_step=train_step,
        decision=read_json(decision, Decision) if decision else None,
        components=components,
    )
    write_text(out, compiled.definition)
    defaults = {p.camel_name: p.default(record) for p in compiled.parameters}
    if as_json:
        summary = {"name": compiled.name, "definition": str(out), "parameters": defaults}
        print(json.dumps({**summary, "inputs": sorted(compiled.uploads)}, indent=2))
        return
    say(
        f"{compiled.name}: {len(compiled.definition.encode()) / 1024:.0f} KiB in {out}", quiet=False
    )
    for parameter in compiled.parameters:
        default = defaults[parameter.camel_name]
        say(f"  {parameter.camel_name:<18} {default if default != '' else '(empty)'}", quiet=False)
    say(f"next:      stoker upload {target} {workload}", quiet=False)
