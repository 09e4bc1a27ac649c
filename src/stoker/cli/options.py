"""Several verbs share these options, one by one or as a dataclass of options.

A verb takes such a dataclass as one parameter; typer sees its fields, each with its own flag.
Options that only steps of pipelines use are hidden from help.
"""

import contextlib
import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import typer
from typer.models import OptionInfo

from stoker.errors import UsageError
from stoker.platforms import PLATFORMS

# How help shows the argument of verbs that take a command.
WORKLOAD_OR_COMMAND = "WORKLOAD | -- CMD"
GROUP_METAVAR = "ROLE=[TYPE:]HOSTS[:WORKERS]"
PLATFORM_WORDS = " or ".join((", ".join(PLATFORMS[:-1]), PLATFORMS[-1]))


class Verb(Protocol):
    """A verb of the command line returns its exit code; None means 0."""

    def __call__(self, **values: object) -> int | None:
        """Runs the verb with the values that the command line names."""


def with_options(verb: Verb) -> Verb:
    """Returns the verb in the form that typer reads: with one parameter for each option.

    Adds --debug, which `stoker.cli.main` reads from the command line.

    Args:
        verb: Some of its parameters may be dataclasses whose fields are options.
    """
    groups = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            # Typer knows no dataclasses: their fields become parameters of the verb, and are put
            # together again below.
            groups[parameter.name] = kind
            options += inspect.signature(kind).parameters.values()
        else:
            options.append(parameter)
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, annotation=Debug)
    options.append(debug.replace(default=False))

    def called(**values: object) -> int | None:
        # `main` reads it from the command line, as errors may come before a verb is known.
        del values["debug"]
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        return verb(**values)

    called.__doc__ = verb.__doc__
    # Typer reads types from here, and names and defaults from the signature.
    called.__annotations__ = {option.name: option.annotation for option in options}
    # Typer asks `inspect`, which believes this attribute.
    vars(called)["__signature__"] = inspect.Signature(options)
    return called


def print_version(*, value: bool) -> None:
    """Prints the version and exits, if --version is given."""
    if value:
        from stoker import __version__

        print(f"stoker {__version__}")
        raise typer.Exit(0)


def writable_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuses a file that cannot be written, before the work begins.

    Raises:
        UsageError: If the file cannot be written; it says why.
    """
    if value is None:
        return None
    flag = param.opts[0]
    if value.is_dir():
        raise UsageError(
            f"cannot write {value}: it is a folder", where=flag, fix="name a file in it"
        )
    folder = value.parent
    # Missing folders are made later.
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(
            f"cannot write {value}: {folder} is not a folder", where=flag, fix="name another file"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"cannot write {value}: this user has no right to write to {folder.absolute()}",
            where=flag,
            fix="name another file, or change the rights of that folder",
        )
    return value


@contextlib.contextmanager
def told_by_flag(flags: Mapping[str, str]) -> Iterator[None]:
    """Names the flag that was typed in errors of a workload's key that it sets.

    Args:
        flags: Key to flag; only of flags that were typed.
    """
    try:
        yield
    except UsageError as err:
        for key, flag in flags.items():
            if err.where.startswith(f"--set {key}=..."):
                raise UsageError(err.what, where=flag, fix=err.fix) from None
        raise


def typed_keys(
    keys: Mapping[tuple[str, str], str | float | None], overrides: Sequence[str] | None
) -> tuple[dict[str, str], list[str]]:
    """Returns key to flag of the flags that were typed, and the overrides with theirs.

    Args:
        keys: Key and flag to the value that was typed.
        overrides: The values of --set.
    """
    typed = {names: value for names, value in keys.items() if value is not None}
    return dict(typed.keys()), [
        *(overrides or ()),
        *(f"{key}={typed[key, flag]}" for key, flag in typed),
    ]


def offered(*words: str) -> Callable[[str], list[str]]:
    """Returns what a shell asks for the words that complete a value."""
    # Typer finds the parameter by its name.
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=WORKLOAD_OR_COMMAND,
        help="A workload file (.yaml), or a training command after --.",
        show_default=False,
    ),
]
WorkloadFile = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="The workload file (.yaml).", show_default=False)
]
TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The service that runs the pipeline: sagemaker or kubeflow.",
        show_default=False,
        autocompletion=offered("sagemaker", "kubeflow"),
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Overrides one key of the workload, such as feed.credits=8; may be repeated.",
    ),
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="Sets a parameter of the pipeline's run, such as epochs=3; may be repeated.",
    ),
]
StepParams = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="In a pipeline's step: sets a parameter of the run; may be repeated.",
        hidden=True,
    ),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's id, ARN or page, a pipeline (its newest run), or a job."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where Kubeflow is, as far as the command line says it; `workload` for verbs of a run."""

    host: Annotated[
        str | None,
        typer.Option("--host", metavar="URL", help="Kubeflow: its URL (default: the workload's)."),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", metavar="N", help="Kubeflow: your namespace (default: the workload's)."
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="F", help="Kubeflow: your token (default: the workload's)."
        ),
    ] = None
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            metavar="F",
            help="Kubeflow: certificates to trust (default: the workload's, or the system's).",
        ),
    ] = None

    def words(self, file: str | None) -> str:
        """Returns the flags with which `status` and `stop` reach the same place, after a blank."""
        given = {"workload": file, **asdict(self)}
        words = (w for k, v in given.items() if v for w in (f"--{k.replace('_', '-')}", str(v)))
        return "".join(f" {shlex.quote(word)}" for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReach(Reach):
    """The same for verbs that name a run."""

    workload: Annotated[
        str | None,
        typer.Option(
            "--workload", metavar="W", help="Kubeflow: workload that says where (default: --host)."
        ),
    ] = None


AsJson = Annotated[bool, typer.Option("--json", help="Prints JSON on stdout instead of text.")]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="F",
        help="Also writes an HTML report to this file (default: writes none).",
        callback=writable_file,
    ),
]
ReplaceDataLoader = Annotated[
    Literal["auto", "true", "false"] | None,
    typer.Option(
        "--replace-dataloader",
        help="Whether loaders of PyTorch's own class are fed without a change of the script; auto: "
        "unless the script imports stoker's (default: feed.replace_dataloader of the workload, or "
        "auto).",
        show_default=False,
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        metavar="F",
        help="CSV file whose rows add to, or replace, rows of the catalog (default: the catalog "
        "alone).",
    ),
]
Region = Annotated[
    str | None,
    typer.Option("--region", metavar="R", help="AWS region (default: as boto3 finds it)."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Starts without asking for confirmation.")]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        metavar=GROUP_METAVAR,
        help="An instance group, such as dnn=1 or data=ml.c7i.8xlarge:2:32 (2 hosts with 32 data "
        "workers each); once for each role, so it may be repeated (default: today's cluster).",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Prints a traceback with each error.")]


def platform_option(words: str) -> OptionInfo:
    """Returns the option --platform with these words of help; its default stands in the words."""
    option: OptionInfo = typer.Option(
        "--platform",
        metavar="P",
        help=words,
        show_default=False,
        autocompletion=offered(*PLATFORMS),
    )
    return option


PlatformName = Annotated[
    str | None,
    platform_option(
        f"Platform: {PLATFORM_WORDS} (default: as in the workload, or local; decide without a "
        "workload: sagemaker, unless the type is local.cN)."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """Holds the output files that the command line names, the same for all components."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="F",
            help="Writes the record to this file (default: as said above).",
            callback=writable_file,
        ),
    ] = None
    summary: Annotated[
        Path | None,
        typer.Option(
            "--summary",
            metavar="F",
            help="Also writes a summary in Markdown to this file (default: writes none).",
            callback=writable_file,
        ),
    ] = None
    executor_input: Annotated[
        str | None,
        typer.Option(
            "--executor-input",
            metavar="JSON",
            help="In a step of Kubeflow: the value of {{$}}, which holds the step's inputs and "
            "names its outputs.",
            hidden=True,
        ),
    ] = None
