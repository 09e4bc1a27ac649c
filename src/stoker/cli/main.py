"""The parser, and the process's exit: errors and signals become exit codes and three lines of text.

`stoker launch`, which a container of a run starts with, continues in `stoker.launch` without the
parser.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from stoker.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    StokerError,
    TerminatedError,
    UsageError,
)
from stoker.logs import printable


def main() -> NoReturn:
    """Runs the command line of this process and ends it with the right exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["launch"] and arguments[1:2] not in ([], ["-h"], ["--help"]):
        # The launcher handles signals and exit codes itself: it is the job's first process.
        sys.exit(launched(arguments[1:]))
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = run(arguments)
    except KeyboardInterrupt:
        # While the parser is imported: nothing has begun.
        code = EXIT_INTERRUPTED
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; prints errors to stderr."""
    # Imported here: a launcher needs no parser.
    from stoker.cli.parser import app

    try:
        # As the object of the context: `init` asks for what stands after `--`.
        code: object = app(
            args=[*arguments] or ["--help"],
            prog_name="stoker",
            standalone_mode=False,
            obj=[*arguments],
        )
        # In the `try`: what is still buffered may meet a closed pipe.
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TerminatedError as err:
        words = printable(str(err)) or "stopping all processes"
        return _say(f"stopped by SIGTERM; {words}", code=EXIT_TERMINATED)
    except StokerError as err:
        if os.environ.get("STOKER_DEBUG"):
            traceback.print_exc()
        words = printable(str(err), keep="\n\t")
        return _say(f"error: {words}", code=err.exit_code)
    except Exception as err:
        # The parser's own errors.
        if callable(words_of := getattr(err, "format_message", None)):
            text = str(words_of()).rstrip(".")
            text = f"error: {text[:1].lower()}{text[1:]}"
            verb = getattr(getattr(err, "ctx", None), "command_path", "stoker")
            return _say(f"{text}\ntry:   {verb} --help", code=UsageError.exit_code)
        traceback.print_exc()
        words = f"{type(err).__name__}: {err}\nwhere: inside stoker: this is a bug"
        return _say(f"error: {words}\ntry:   report the traceback above", code=1)


def _say(text: str, *, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def launched(arguments: Sequence[str]) -> int:
    command = [*arguments[1:]] if arguments[0] == "--" else [*arguments]
    try:
        from stoker.environment import from_environment

        if from_environment().profile:
            # Imported only for a profile: it needs the statistics of the profile.
            from stoker.profile.leader import launch_profile

            return launch_profile(command, os.environ)
        from stoker.launch import launch

        return launch(command, os.environ)
    except StokerError as err:
        return _say(f"error: {err}", code=err.exit_code)


def _terminate(signum: int, frame: FrameType | None) -> None:
    # Raised wherever the main thread is: `with` blocks and `finally` end what was started.
    raise TerminatedError
