"""`stoker render` prints what somebody with more rights applies to a cluster or an account once."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import Overrides, WorkloadFile, offered
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Workload

_OF_AWS = ("iam", "cloudformation")
_KINDS = _OF_AWS


def render_verb(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help=f"One of {', '.join(_KINDS)}.",
            show_default=False,
            autocompletion=offered(*_KINDS),
        ),
    ],
    workload: WorkloadFile,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="For iam: writes a file for each policy to this folder (default: stdout).",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Prints what an administrator applies once.

    iam is the policies and trust policies of the roles, as JSON, cloudformation a template that
    makes these roles and a schedule.

    Examples:
        stoker render iam configs/mnist-sagemaker.yaml --out policies
    """
    from stoker.cli.workloads import read_with_params
    from stoker.records import nearest

    if kind not in _KINDS:
        raise UsageError(
            f"stoker cannot render {kind}",
            where="command line",
            fix=nearest(kind, _KINDS),
        )
    record = read_with_params(workload, overrides=[*(overrides or ()), "platform=sagemaker"])
    text = _for_account(kind, record, out=out)
    print(text, end="")


def _for_account(kind: str, workload: "Workload", *, out: Path | None) -> str:
    """Returns the text to print; the policies themselves may go to files instead."""
    from stoker.orchestrators.sagemaker.roles import iam_files, stack

    if kind == "cloudformation":
        return stack(workload)
    files = iam_files(workload)
    if out is None:
        return json.dumps(files, indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, policy in files.items():
            (out / name).write_text(json.dumps(policy, indent=2) + "\n")
    except OSError as err:
        raise UsageError(f"cannot write to {out}: {err.strerror}", where="--out") from None
    return "".join(f"{out / name}\n" for name in files)
