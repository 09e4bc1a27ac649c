"""`stoker watch` shows how a run is doing until it ends."""

from contextlib import ExitStack
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
    from stoker.cli.live_view import RunView
    from stoker.cli.log_sources import follow, print_once, read_all, shower, source_of

    source = source_of(run)
    view = RunView()
    try:
        if once:
            read_all(source, view)
            print_once(view, as_json=as_json)
        else:
            with ExitStack() as stack:
                follow(source, view, shower(stack, as_json=as_json))
    finally:
        source.close()
