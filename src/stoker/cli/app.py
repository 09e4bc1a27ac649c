"""`stoker` has these verbs; what a verb needs is imported when it runs, so that help is quick."""

from typing import Annotated

import typer

from stoker.cli.catalog import catalog_verb
from stoker.cli.compile import compile_verb
from stoker.cli.decide import decide_verb
from stoker.cli.doctor import doctor_verb
from stoker.cli.evaluate import evaluate_verb
from stoker.cli.init import init_verb
from stoker.cli.launch import launch_verb
from stoker.cli.options import print_version, with_options
from stoker.cli.pipelines import (
    logs_verb,
    schedule_verb,
    start_verb,
    status_verb,
    stop_verb,
    upload_verb,
)
from stoker.cli.profile import profile_verb
from stoker.cli.render import render_verb
from stoker.cli.report import report_verb
from stoker.cli.run import run_verb
from stoker.cli.schema import schema_verb
from stoker.cli.train import train_verb
from stoker.cli.watch import watch_verb

app = typer.Typer(
    name="stoker",
    help="Keeps accelerators fed: profile, decide, train, evaluate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def stoker(
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


VERBS = {
    "run": run_verb,
    "profile": profile_verb,
    "decide": decide_verb,
    "train": train_verb,
    "evaluate": evaluate_verb,
    "report": report_verb,
    "watch": watch_verb,
    "doctor": doctor_verb,
    "init": init_verb,
    "catalog": catalog_verb,
    "schema": schema_verb,
    "render": render_verb,
    "compile": compile_verb,
    "upload": upload_verb,
    "start": start_verb,
    "schedule": schedule_verb,
    "status": status_verb,
    "logs": logs_verb,
    "stop": stop_verb,
}
for _name, _verb in VERBS.items():
    app.command(_name)(with_options(_verb))
# All that follows `launch` is another command, with options of its own.
app.command("launch", context_settings={"ignore_unknown_options": True})(launch_verb)
