"""Command lines that make or continue a run, as a person would type them again."""

import shlex
from collections.abc import Sequence

from stoker.terminal import program


def command_line(arguments: Sequence[str], *, from_step: str | None = None) -> str:
    """Returns the command line as a person would type it again, with this `--from` if any."""
    words = [program(), *arguments]
    if from_step is not None:
        if "--from" in words:
            at = words.index("--from")
            # `--from STEP`; `--from=STEP` below.
            del words[at : at + 2]
        words = [word for word in words if not word.startswith("--from=")]
        words += ["--from", from_step]
    return shlex.join(words)


def reproducing(arguments: Sequence[str]) -> str:
    """Returns the command line that makes such a run again, with what it was given to train on."""
    words = ["stoker"]
    rest = iter(arguments)
    for word in rest:
        if word == "--from":
            # All steps are to be made again.
            next(rest, None)
        elif not word.startswith("--from=") and word not in ("--yes", "-y", "--json", "--debug"):
            words.append(word)
    return shlex.join(words)
