"""`stoker` has these verbs; only the module of the verb that was typed is imported."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated

import typer

from stoker.cli.options import Verb, print_version, with_options

# The first line of each verb's help: `stoker --help` imports no verb. A test holds them against
# the verbs' docstrings.
VERBS: Mapping[str, str] = MappingProxyType(
    {
        "run": "Runs the whole chain: profile, decide, train, evaluate, report.",
        "profile": "Measures what a training step waits for.",
        "decide": "Ranks clusters for the workload by predicted time and cost.",
        "train": "Trains on the cluster of a decision, or on groups that you name.",
        "evaluate": "Checks a training against its quality gates and its prediction.",
        "report": "Writes the HTML report of a run again, or compares several runs.",
        "watch": "Shows the hosts, rates and waits of a run while it trains.",
        "doctor": "Checks what a host, an account or a cluster lacks.",
        "init": "Makes a project folder with pipelines, configs and examples.",
        "catalog": "Lists the instance types and prices that decide uses.",
        "schema": "Prints the JSON Schema of a record.",
        "render": "Prints what an administrator applies once.",
        "compile": "Compiles the pipeline of a workload to a file, without network.",
        "upload": "Creates or updates the pipeline, after showing what changes.",
        "start": "Starts a run of the uploaded pipeline.",
        "schedule": "Starts runs of the uploaded pipeline at regular times.",
        "status": "Shows the steps of a run, with times, errors and links.",
        "logs": "Prints the logs of all steps and hosts so far.",
        "retry": "Runs the failed steps of a run again; what succeeded stays.",
        "stop": "Stops a run or a training job, and waits until it has ended.",
        "launch": "Starts this host's part of a job; the entry point of the image.",
    }
)
# These verbs are in one module, `pipelines`; each other one is in the module of its name.
_OF_PIPELINES = ("upload", "start", "schedule", "status", "logs", "retry", "stop")


def app_for(*words: str) -> typer.Typer:
    """Returns the parser: verbs among `words` with their options, the others with help alone."""
    app = typer.Typer(
        name="stoker",
        help="Keeps accelerators fed: profile, decide, train, evaluate.",
        no_args_is_help=True,
        add_completion=False,
        # With it, `stoker --help` would import rich, and brackets in a help text would be markup.
        rich_markup_mode=None,
        # Errors are shown by `edge`, in three lines.
        pretty_exceptions_enable=False,
    )
    app.callback()(_stoker)
    for name, line in VERBS.items():
        if name not in words:
            app.command(name, help=line)(_no_verb)
        elif name == "launch":
            # All that follows `launch` is another command, with options of its own.
            settings = {"ignore_unknown_options": True}
            app.command(name, context_settings=settings)(verb_named(name))
        else:
            app.command(name)(with_options(verb_named(name)))
    return app


def verb_named(name: str) -> Verb:
    """Returns the function of a verb."""
    # What a verb works with it imports inside its function: help and slips need its options only.
    module = "pipelines" if name in _OF_PIPELINES else name
    verb: Verb = getattr(import_module(f"stoker.cli.{module}"), f"{name}_verb")
    return verb


def _stoker(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Prints the version and exits.",
            callback=print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Keeps accelerators fed: profile, decide, train, evaluate."""


def _no_verb() -> None:
    """Stands for a verb that was not typed."""
