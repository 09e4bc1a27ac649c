"""The verbs of `stoker`; only the module of the verb that was typed is imported.

Click's formatter lays help out: with `rich`, `stoker --help` would take twice as long (its import
takes 0.14 CPU-seconds, all else 0.15).
"""

import inspect
import textwrap
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from stoker.cli.options import Verb, print_version, with_options

if TYPE_CHECKING:
    # Typer's own copy of click, under no public name.
    from typer._click import Context, HelpFormatter

# The panels of `stoker --help`, with the first line of each verb's docstring, as a test checks:
# `stoker --help` imports no verb.
PANELS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Start here": {
            "profile": "Measure what a training step waits for.",
            "run": "Run the whole chain: profile, decide, train, evaluate, report.",
        },
        "One stage": {
            "decide": "Rank clusters for the workload by predicted time and cost.",
            "train": "Train on the cluster of a decision, or on groups that you name.",
            "evaluate": "Check a training run against its quality gates and its prediction.",
            "report": "Write the HTML report of a run again, or compare several runs.",
        },
        "Pipelines (SageMaker, Kubeflow)": {
            "compile": "Compile the pipeline of a workload to a file, without a network.",
            "upload": "Create or update the pipeline, after showing what changes.",
            "start": "Start a run of the uploaded pipeline.",
            "schedule": "Start runs of the uploaded pipeline at regular times.",
            "status": "Show the steps of a run; exit with 3 if its gate failed.",
            "stop": "Stop a run and its jobs, and wait until they have ended.",
            "prune": "List or delete what earlier uploads and runs left behind.",
        },
        "Look inside": {
            "watch": "Show the hosts, rates and waits of a run while it trains.",
            "catalog": "List the instance types and prices that decide uses.",
            "schema": "Print the JSON Schema of a record.",
        },
        "Set up": {
            "init": "Create a project from a script, a training job or an example.",
            "doctor": "Check a host, a cluster or an AWS account for what a run needs.",
            "launch": "Start this host's part of a job; the entry point of the image.",
        },
    }
)
VERBS: Mapping[str, str] = MappingProxyType(
    {name: line for verbs in PANELS.values() for name, line in verbs.items()}
)
# Only steps of pipelines use them: they work, and `stoker --help` does not show them.
STEP_VERBS: Mapping[str, str] = MappingProxyType(
    {
        "compare": "Compare what a pipeline's run would train with its last run that passed.",
        "step": "List the verbs of a pipeline's steps.",
        "step train": "Train on the cluster that a pipeline's run has decided on.",
        "step evaluate": "Judge a pipeline's training run, and keep what later runs need.",
        "step gate": "Exit with 3 if an evaluation did not pass; else keep what came of it.",
        "step finish": "End what is left of a run that is over, and follow its lost jobs.",
        "step alone": "Fail with 4 if a run of the pipeline that began before this one is active.",
    }
)
# In one module, `pipelines`; each other verb is in the module of its name.
_OF_PIPELINES = ("start", "status", "stop")
_NAME_WIDTH = max(map(len, VERBS))
_EXAMPLES = "\n\nExamples:\n"


class PanelGroup(TyperGroup):
    """`stoker --help`, with the verbs in panels, each in a line that is never cut off."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        for title, verbs in PANELS.items():
            with formatter.section(title):
                # Padded, so that the columns of all panels are aligned.
                formatter.write_dl([(f"{name:<{_NAME_WIDTH}}", verbs[name]) for name in verbs])
        write_options(self, ctx, formatter)


class VerbCommand(TyperCommand):
    """A verb's help, with its arguments as they are typed, without braces and Python types."""

    def format_usage(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        names = [name for name, _ in self._arguments()]
        formatter.write_usage(ctx.command_path, " ".join(["[OPTIONS]", *names]))

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        if arguments := self._arguments():
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        write_options(self, ctx, formatter)

    def _arguments(self) -> list[tuple[str, str]]:
        return [
            (str(each.metavar), str(each.help))
            for each in self.params
            if isinstance(each, typer.core.TyperArgument)
        ]


def write_options(
    command: TyperCommand | TyperGroup, ctx: "Context", formatter: "HelpFormatter"
) -> None:
    options = [each for each in command.get_params(ctx) if each.param_type_name == "option"]
    with formatter.section("Options"):
        rows = [row for each in options if (row := each.get_help_record(ctx))]
        # A long flag gets a separate line, so that it does not indent the help of all others.
        formatter.write_dl(rows, col_max=24)


def app_for(*words: str) -> typer.Typer:
    """Returns the parser: verbs among `words` with their options, the others with help alone."""
    app = typer.Typer(
        name="stoker",
        cls=PanelGroup,
        # Else `stoker --help` would import rich, and brackets in a help text would be markup.
        rich_markup_mode=None,
        # Errors are shown by `main`, in three lines.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Each verb shows examples: stoker profile --help",
    )
    app.callback()(_stoker)
    hidden = {name: line for name, line in STEP_VERBS.items() if name in words}
    for name, line in {**VERBS, **hidden}.items():
        if name not in words:
            app.command(name, help=line)(_no_verb)
            continue
        # A verb imports its parts inside its function: help and usage errors need only its options.
        module, _, step = name.partition(" ")
        if name in _OF_PIPELINES:
            module = "pipelines"
        function = f"{name}_verb"
        if step:
            function = f"{step}_step"
        verb: Verb = getattr(import_module(f"stoker.cli.{module}"), function)
        text, _, examples = (inspect.getdoc(verb) or line).partition(_EXAMPLES)
        app.command(
            name,
            cls=VerbCommand,
            hidden=name in STEP_VERBS,
            help=text.partition("\n\nArgs:\n")[0],
            # A paragraph after \b keeps its lines.
            epilog="\b\nExamples:\n" + textwrap.indent(textwrap.dedent(examples), "  "),
            # `launch` is followed by another command with its options.
            context_settings={"ignore_unknown_options": True} if name == "launch" else None,
        )(verb if name == "launch" else with_options(verb))
    return app


def _stoker(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Find out why your GPUs wait for data, and feed them from CPU hosts."""


def _no_verb() -> None:
    """Placeholder of a verb that was not typed: only its line of help is needed."""
