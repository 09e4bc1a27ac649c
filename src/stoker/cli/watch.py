"""`stoker watch` shows how a run does now, from its folder or its log."""

from typing import Annotated

import typer

from stoker.cli.options import AsJson, Debug


def watch_verb(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A folder runs/ID or its ID, a log file, or - for a log on stdin.",
            show_default=False,
        ),
    ],
    *,
    once: Annotated[bool, typer.Option("--once", help="Says how it does now, and ends.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Shows a run's hosts, rates and waits as they are, and what limits it; ends with the run."""
    from stoker.cli.live_view import watch_command

    watch_command(run, once=once, as_json=as_json)
