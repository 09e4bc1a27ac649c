"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

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
Out = Annotated[Path | None, typer.Option("--out", metavar="F", help="File for the record.")]
Summary = Annotated[
    Path | None, typer.Option("--summary", metavar="F", help="File for a summary in Markdown.")
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
Yes = Annotated[bool, typer.Option("--yes", help="Asks nothing.")]
Groups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="ROLE=[TYPE:]HOSTS[:WORKERS]", help="An instance group."),
]
Debug = Annotated[bool, typer.Option("--debug", help="A traceback with each error.")]
