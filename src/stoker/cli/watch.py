"""`stoker watch` shows how a run is doing until it ends."""

from contextlib import ExitStack, closing
from typing import Annotated

import typer

from stoker.cli.options import AsJson


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
    once: Annotated[
        bool, typer.Option("--once", help="Shows the current state once, and exits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Shows the hosts, rates and waits of a run while it trains.

    It also says what limits the run. It ends when the run ends.
    """
    from stoker.cli.live_view import shower
    from stoker.cli.log_sources import follow, source_of

    with closing(source_of(run)) as source, ExitStack() as stack:
        follow(source, shower(stack, as_json=as_json, once=once), once=once)
