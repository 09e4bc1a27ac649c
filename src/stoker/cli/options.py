"""Options that several verbs share, and the checks of their values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

PlatformChoice = Literal["local", "sagemaker", "kubernetes"]


def sets_of(
    values: Sequence[str] | None,
    overrides: Sequence[str] | None,
    flags: Mapping[str, str | float | None] | None = None,
) -> list[str]:
    """Returns the overrides of a workload: files of --values first, then --set, then flags.

    Args:
        values: Files.
        overrides: KEY.PATH=VALUE texts.
        flags: Values of flags that set a key; None: the flag was not typed.
    """
    from stoker.workload_file import VALUES_MARK

    typed = {key: value for key, value in (flags or {}).items() if value is not None}
    return [
        *(f"{VALUES_MARK}{file}" for file in values or ()),
        *(overrides or ()),
        *(f"{key}={value}" for key, value in typed.items()),
    ]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORKLOAD | -- CMD",
        help="A workload file (.yaml), or a training command after --.",
        show_default=False,
    ),
]
WorkloadFile = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="The workload file (.yaml).", show_default=False)
]
WorkloadIfAny = Annotated[
    str | None,
    typer.Argument(metavar="[WORKLOAD]", help="The workload file (.yaml).", show_default=False),
]
Target = Annotated[
    Literal["sagemaker", "kubeflow"],
    typer.Argument(metavar="TARGET", help="The pipeline's service.", show_default=False),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        metavar="F",
        help="Merge this file of keys, such as prod.yaml, into the workload, before --set; may be "
        "repeated.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override one key of the workload, such as feed.max_errors=10; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
Platform = Annotated[
    PlatformChoice | None,
    typer.Option(help="Use this platform (default: from the workload, or local)."),
]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        metavar="ROLE=[TYPE:]HOSTS[:WORKERS]",
        help="Use this instance group, such as dnn=1 or data=ml.c7i.8xlarge:2:32 (2 hosts with 32 "
        "data workers each); one for each role, may be repeated (default: today's cluster).",
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        metavar="F", help="Add the prices in this CSV file to the catalog, or replace its rows."
    ),
]
ReplaceDataLoader = Annotated[
    Literal["true", "false"] | None,
    typer.Option(
        help="Serve plain torch.utils.data.DataLoader objects, too (default: from the workload, or "
        "true).",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="F",
        dir_okay=False,
        writable=True,
        help="Write the record to this file (default: above).",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="F", dir_okay=False, writable=True, help="Also write an HTML report to this file."
    ),
]
RecordFile = Annotated[Path, typer.Option(metavar="F", help="The run's record of that name.")]
Champion = Annotated[
    str,
    typer.Option(
        metavar="F",
        help="Compare with the model in use, for gates such as accuracy>=champion-0.005: its "
        "evaluation.json, a folder of champions, or registry:GROUP for the last approved model "
        "in SageMaker's registry.",
    ),
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="Set a parameter of the pipeline's run, such as epochs=3; may be repeated.",
    ),
]
# Of the steps of pipelines.
ExecutorInput = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        hidden=True,
        help="In a step of Kubeflow: the value of {{$}}, with its inputs and outputs.",
    ),
]
