"""`stoker launch` shows its help here; a container's first process goes by `cli/main.py`."""

import os
from typing import Annotated

import typer


def launch_verb(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The training command.")],
) -> int:
    """Starts this host's part of a job; the entry point of the image.

    Examples:
        stoker launch -- python train.py
    """
    # A job's launcher never comes here (see `main.main`): this is for `stoker help launch`.
    from stoker.profile.entrypoint import launch_profile

    return launch_profile(command, os.environ)
