"""Help of `stoker launch`; the launcher itself is started by `cli/main.py`."""

import os
from typing import Annotated

import typer


def launch_verb(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The training command.")],
) -> int:
    """Start this host's part of a job; the entry point of the image.

    Examples:
        stoker launch -- python train.py
    """
    from stoker.profile.entrypoint import launch_profile

    return launch_profile(command, os.environ)
