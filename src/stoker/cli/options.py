"""Options that several verbs share, one by one or as a dataclass of options.

A verb takes such a dataclass as one parameter; typer sees its fields, each with its own flag. An
option's help is its entry in the docstring. Typer has neither; a verb without them would repeat the
same annotated options, or have twenty parameters. Options that only steps of pipelines use are
hidden from help.
"""

import contextlib
import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_args, get_origin

import typer
from typer.models import OptionInfo

from stoker.errors import UsageError
from stoker.platforms import PLATFORMS

_TARGETS = ("sagemaker", "kubeflow")

# How help shows the argument of verbs that take a command.
WORKLOAD_OR_COMMAND = "WORKLOAD | -- CMD"
PLATFORM_WORDS = " or ".join((", ".join(PLATFORMS[:-1]), PLATFORMS[-1]))
HIDDEN = typer.Option(hidden=True)
# The part of a docstring on the options, and one of them.
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"(\w+)(?: \(([^)]*)\))?: (.+)")
# Of verbs that take --set.
_VALUES = inspect.Parameter(
    "values",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str] | None,
        typer.Option(
            "--values",
            metavar="F",
            help="Merge this file of keys, such as prod.yaml, into the workload, before --set; may "
            "be repeated.",
        ),
    ],
)


class Verb(Protocol):
    """A command function; returns the exit code or None for 0."""

    def __call__(self, **values: object) -> int | None: ...


def with_options(verb: Verb) -> Verb:
    """Returns the verb in the form that typer reads: with one parameter for each option.

    A parameter without a help text has it, and its metavar, from the docstring's arguments, as
    `name (METAVAR): help`. Parameters that are dataclasses become one option for each field. Adds
    --values to verbs that take --set, and --debug, which `stoker.cli.main` reads from the command
    line.
    """
    groups = {}
    options: list[inspect.Parameter] = []
    described = _described(verb)
    for parameter in inspect.signature(verb).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            # Typer knows no dataclasses: `called` puts their fields together again.
            groups[parameter.name] = kind
            texts: dict[str, tuple[str | None, str]] = {}
            for documented in kind.__mro__:
                texts |= _described(documented)
            fields_ = inspect.signature(kind).parameters.values()
            options += [_option_of(each, texts) for each in fields_]
        else:
            options.append(_option_of(parameter, described))
    has_values = any(option.name == "overrides" for option in options)
    if has_values:
        options.append(_VALUES)
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, annotation=Debug)
    options.append(debug.replace(default=False))

    def called(**values: object) -> int | None:
        # `main` reads it from the command line, as errors may come before a verb is known.
        del values["debug"]
        if has_values:
            values["overrides"] = _with_files(values.pop("values"), values["overrides"])
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        return verb(**values)

    called.__doc__ = verb.__doc__
    # Typer reads types from here, and names and defaults from the signature.
    called.__annotations__ = {option.name: option.annotation for option in options}
    # Typer asks `inspect`, which believes this attribute.
    vars(called)["__signature__"] = inspect.Signature(options)
    return called


def _with_files(files: object, overrides: object) -> list[str] | None:
    """Returns the overrides of --values and --set; the files come first, wherever they stand."""
    from stoker.workload_file import VALUES_MARK

    words = []
    # None: the option is not there.
    if isinstance(files, list):
        words += [f"{VALUES_MARK}{file}" for file in files]
    if isinstance(overrides, list):
        words += overrides
    return words or None


def _described(documented: object) -> dict[str, tuple[str | None, str]]:
    """Returns metavar and help of each `name (METAVAR): help` in a docstring."""
    section = _SECTION.search(inspect.getdoc(documented) or "")
    if section is None:
        return {}
    entries = re.split(r"^    (?=\w)", section[1], flags=re.MULTILINE)
    found = (_ENTRY.fullmatch(" ".join(entry.split())) for entry in entries)
    return {entry[1]: (entry[2], entry[3]) for entry in found if entry}


def _option_of(
    parameter: inspect.Parameter, texts: Mapping[str, tuple[str | None, str]]
) -> inspect.Parameter:
    """Returns a parameter with what its docstring says of it; its flag is made of its name."""
    kind = parameter.annotation
    if parameter.name not in texts:
        return parameter
    is_option = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    if get_origin(kind) is Annotated:
        # A copy: verbs share some of them.
        kind, info = map(copy, get_args(kind))
    else:
        info = typer.Option() if is_option else typer.Argument(show_default=False)
    info.metavar, info.help = texts[parameter.name]
    # Typer takes the first flag that it is given for a default, at first.
    if is_option and not isinstance(info.default, str):
        info.param_decls = (f"--{parameter.name.replace('_', '-')}",)
    return parameter.replace(annotation=Annotated[kind, info])


def print_version(*, value: bool) -> None:
    if value:
        from stoker import __version__

        print(f"stoker {__version__}")
        raise typer.Exit(0)


def writable_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    if value is not None:
        check_writable(value, flag=param.opts[0])
    return value


def check_writable(file: Path, *, flag: str) -> None:
    """Refuses a file that cannot be written, before the work begins."""
    import tempfile

    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder", where=flag, fix="name a file")
    # Missing folders are made later.
    folder = next(each for each in file.absolute().parents if os.path.exists(each))
    why = f"{folder} is not a folder"
    if folder.is_dir():
        try:
            with tempfile.TemporaryFile(dir=folder):
                return
        except OSError as err:
            why = f"{err.strerror} (folder {folder})"
    raise UsageError(
        f"cannot write {file}: {why}", where=flag, fix=f"choose another file with {flag}"
    )


@contextlib.contextmanager
def told_by_flag(flags: Mapping[str, str]) -> Iterator[None]:
    """In errors about a workload's key, names the flag that set it, of `typed_keys`."""
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
    """Returns key to flag of the flags that were typed, and the overrides with theirs."""
    typed = {names: value for names, value in keys.items() if value is not None}
    return dict(typed.keys()), [
        *(overrides or ()),
        *(f"{key}={typed[key, flag]}" for key, flag in typed),
    ]


def offered(*words: str) -> Callable[[str], list[str]]:
    """Returns the function by which a shell completes a value with one of these words."""
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


def known_target(target: str) -> str:
    from stoker.records import nearest

    if target not in _TARGETS:
        raise UsageError(f"unknown target {target}", fix=nearest(target, _TARGETS))
    return target


TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        callback=known_target,
        help="The service that runs the pipeline: sagemaker or kubeflow.",
        show_default=False,
        autocompletion=offered(*_TARGETS),
    ),
]
GroupTexts = Annotated[list[str] | None, typer.Option("--group")]
RunParams = Annotated[list[str] | None, typer.Option("--param")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override one key of the workload, such as feed.credits=8; may be repeated.",
    ),
]
StepParams = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="In a pipeline's step: set a parameter of the run; may be repeated.",
        hidden=True,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How to reach Kubeflow, as given on the command line.

    Attributes:
        host (URL): URL of Kubeflow (default: from the workload).
        namespace (N): Kubeflow namespace (default: from the workload).
        token_file (F): File with your token for Kubeflow (default: from the workload).
        ca_file (F): File of certificates to trust for Kubeflow (default: from the workload, or the
            system's).
    """

    host: str | None = None
    namespace: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None

    def words(self, file: str | None) -> str:
        """Returns these flags as typed, after a blank, for another command line."""
        words = ""
        for name, value in {"workload": file, **asdict(self)}.items():
            if value:
                words += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReach(Reach):
    """The same for verbs that name a run instead of a workload.

    Attributes:
        workload (W): Kubeflow: the workload that says where Kubeflow is (default: --host).
    """

    workload: str | None = None


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
# A file that is written, if it is named.
OutFile = Annotated[Path | None, typer.Option(callback=writable_file)]
ReplaceDataLoader = Annotated[
    Literal["auto", "true", "false"] | None,
    typer.Option(
        "--replace-dataloader",
        metavar="auto|true|false",
        help="Serve plain torch.utils.data.DataLoader objects too, without a change of the script; "
        "with auto, unless the script imports stoker's loader (default: feed.replace_dataloader of "
        "the workload, or auto).",
        show_default=False,
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        metavar="F",
        help="Add the prices in this CSV file to the catalog, or replace its rows (default: none).",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback with each error.")]


def platform_option(words: str) -> OptionInfo:
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
        f"Use this platform: {PLATFORM_WORDS} (default: from the workload, or local; without a "
        "workload decide uses sagemaker, or local for a type such as local.c4)."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """Output files of a component.

    Attributes:
        out (F): Write the record to this file (default: see above).
        summary (F): Also write a summary in Markdown to this file (default: none).
        executor_input (JSON): In a step of Kubeflow: the value of {{$}}, with the step's inputs and
            outputs.
    """

    out: OutFile = None
    summary: OutFile = None
    executor_input: Annotated[str | None, HIDDEN] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles(OutputFiles):
    """The same for a component that trains.

    Attributes:
        model (DIR): Copy the trained model to this folder (default: leave it where it is).
    """

    model: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles(OutputFiles):
    """The same for a component that reports.

    Attributes:
        report (F): Also write an HTML report to this file (default: none).
    """

    report: OutFile = None
