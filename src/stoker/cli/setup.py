"""The verbs that set up and look inside: init, doctor, catalog, schema and launch."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from stoker.cli.options import AsJson, Overrides, PlatformChoice, Prices, Values, sets_of
from stoker.errors import PlatformError, UsageError
from stoker.terminal import print_result

app = typer.Typer()


@app.command()
def init(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR] [-- CMD]",
            help="Folder of the workload (default: this folder); a training command after --.",
            show_default=False,
        ),
    ] = None,
    *,
    from_training_job: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Take command, image, hosts, channels and hyperparameters from this SageMaker "
            "training job.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a workload for a command, or from a SageMaker training job.

    The last options of the command that have a value become hyperparameters. A file that exists is
    never overwritten.

    \b
    stoker init -- python train.py --lr 0.1 --epochs 3
    stoker init my-project --from-training-job my-job
    """
    from stoker.records import write_text

    words = words or []
    typed: list[str] = context.obj
    command = typed[typed.index("--") + 1 :] if "--" in typed else []
    folders = words[: len(words) - len(command)]
    if len(folders) > 1 or bool(command) == bool(from_training_job):
        raise UsageError(
            "expected a folder if any, and a command or a training job",
            fix="stoker init -- python train.py, or: stoker init --from-training-job NAME",
        )
    if from_training_job:
        from stoker.platforms.aws import Aws
        from stoker.project.from_training_job import from_training_job as workload_of_job

        name, text = workload_of_job(from_training_job, aws=Aws())
    else:
        from stoker.run.workloads import workload_text

        name, text = workload_text(command)
    file = Path(*folders) / f"{name}.yaml"
    if file.exists() and file.read_text() != text:
        raise UsageError(f"{file} exists", fix="remove it, or name another folder")
    write_text(file, text)
    following = f"read {file}, then stoker run {file.name}"
    document = {"file": str(file), "next": following}
    print_result(document, f"made: {file}\nnext: {following}", as_json=as_json)


@app.command()
def doctor(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="Check where this workload file runs (default: this host).",
            show_default=False,
        ),
    ] = None,
    *,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Check this host, a cluster or an AWS account for what a run needs.

    Changes nothing. Exit code 4 means that something is missing.

    \b
    stoker doctor
    stoker doctor configs/mnist-sagemaker.yaml
    """
    from stoker.doctor import examine
    from stoker.run.workloads import read_with_params

    of = read_with_params(workload, overrides=sets_of(values, overrides)) if workload else None
    checks = []
    for check in examine(of):
        checks.append(asdict(check))
        if not as_json:
            # At once: some checks take seconds, and the last line shows which one hangs.
            print(check, flush=True)
    is_healthy = all(check["state"] != "fail" for check in checks)
    if as_json:
        print(json.dumps({"healthy": is_healthy, "checks": checks}, indent=2))
    # A host that a run cannot use is the platform's error, not one of the command line.
    return 0 if is_healthy else PlatformError.exit_code


@app.command()
def catalog(
    *,
    platform: Annotated[
        PlatformChoice, typer.Option(help="List the types of this platform.")
    ] = "sagemaker",
    prices: Prices = None,
    as_json: AsJson = False,
) -> None:
    """List the instance types and prices that decide uses.

    tools/refresh_prices.py writes a table of today's prices, tools/node_pools.py one of a cluster's
    node pools.

    \b
    stoker catalog --platform sagemaker
    stoker catalog --prices prices.csv
    """
    from stoker.catalog import load_catalog

    rows = load_catalog(platform, prices=prices)
    print_result(rows.to_document(), rows.table(), as_json=as_json)


@app.command()
def schema(
    record: Annotated[
        Literal["workload", "profile", "decision", "training", "evaluation"],
        typer.Argument(metavar="RECORD", help="The record.", show_default=False),
    ],
    *,
    as_json: AsJson = True,
) -> None:
    """Print the JSON Schema of a record.

    \b
    stoker schema workload > workload.schema.json
    """
    from stoker.records import RECORDS, schema_of

    document = schema_of(RECORDS[record])
    print_result(document, "", as_json=as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The training command.")],
) -> int:
    """Start this host's part of a job; the entry point of the image.

    \b
    stoker launch -- python train.py
    """
    from stoker.launch import launch as launch_host

    return launch_host(command, os.environ)
