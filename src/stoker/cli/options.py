"""Several verbs share these options."""

import os
from pathlib import Path
from typing import Annotated

import typer

from stoker.errors import UsageError


def print_version(*, value: bool) -> None:
    """Prints the version and ends, if it is asked for."""
    if value:
        from stoker import __version__

        print(f"stoker {__version__}")
        raise typer.Exit(0)


def writable_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuses a file that cannot be written: before the work, not after it.

    Raises:
        UsageError: Saying why.
    """
    if value is None:
        return None
    flag = param.opts[0]
    if value.is_dir():
        raise UsageError(
            f"cannot write {value}: it is a folder", where=flag, fix="name a file in it"
        )
    folder = value.parent
    # Those that lack are made.
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(
            f"cannot write {value}: {folder} is no folder", where=flag, fix="name another file"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"cannot write {value}: this user may not write to {folder.absolute()}",
            where=flag,
            fix="name another file, or change that folder's rights",
        )
    return value


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORKLOAD | -- CMD", help="A workload file, or a bare command.", show_default=False
    ),
]
WorkloadFile = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="A workload file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Overrides a key of the workload."),
]
Params = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="Sets a parameter of a pipeline run."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The record on stdout, for machines.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="F", help="File for the record.", callback=writable_file),
]
Summary = Annotated[
    Path | None,
    typer.Option(
        "--summary", metavar="F", help="File for a summary in Markdown.", callback=writable_file
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="F", help="Writes an HTML report, too.", callback=writable_file
    ),
]
ExecutorInput = Annotated[
    str | None,
    typer.Option(
        "--executor-input", metavar="JSON", help="Kubeflow's {{$}}: tells it outputs and metrics."
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option("--prices", metavar="F", help="CSV that extends or replaces the catalog's rows."),
]
Region = Annotated[
    str | None, typer.Option("--region", metavar="R", help="Of AWS; absent: as its own tools find.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Asks nothing.")]
Groups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="ROLE=[TYPE:]HOSTS[:WORKERS]", help="An instance group."),
]
Debug = Annotated[bool, typer.Option("--debug", help="A traceback with each error.")]
Host = Annotated[
    str | None,
    typer.Option("--host", metavar="URL", help="Of Kubeflow, as https://SITE/pipeline."),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="N", help="The profile's, on Kubeflow with many users."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="F", help="The token that Kubeflow knows you by."),
]
CaFile = Annotated[
    Path | None, typer.Option("--ca-file", metavar="F", help="Certificates to trust, of Kubeflow.")
]
OfWorkload = Annotated[
    str | None,
    typer.Option("--workload", metavar="W", help="Whose settings say where Kubeflow is."),
]
Experiment = Annotated[
    str | None,
    typer.Option("--experiment", metavar="E", help="On Kubeflow; absent: named as the workload."),
]
ServiceAccount = Annotated[
    str | None,
    typer.Option("--service-account", metavar="A", help="Of the steps' pods on Kubeflow."),
]
Version = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="V",
        help="On Kubeflow: name or id of a version, or current; absent: the latest at each start.",
    ),
]
