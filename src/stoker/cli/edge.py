"""The process edge: exit codes, signals, and errors in three lines."""

import os
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

from stoker.errors import StokerError

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class TerminatedError(BaseException):
    """SIGTERM came: unwinds the stack as Ctrl-C does, so that all that runs is ended."""


class _UsageError(Exception):
    """What the parser's errors look like."""

    def format_message(self) -> str:
        """The error in words."""
        raise NotImplementedError


def main() -> NoReturn:
    """Runs the command line of this process and ends it with the right exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["launch"]:
        # The launcher has signals and exit codes of its own: it is the job's first process.
        sys.exit(_launch(arguments[1:]))
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Runs one command line and gives its exit code; prints errors to stderr."""
    debug = "--debug" in arguments
    try:
        from stoker.cli.app import app

        code = app(args=arguments, prog_name="stoker", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _usage_error() as err:
        verb = f" {arguments[0]}" if arguments and not arguments[0].startswith("-") else ""
        message = err.format_message().rstrip(".")
        return _say(f"error: {message}\ntry:   stoker{verb} --help", code=EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted; all that ran was told to stop", code=EXIT_INTERRUPTED)
    except TerminatedError:
        return _say("asked to stop; all that ran was told to stop", code=EXIT_TERMINATED)
    except StokerError as err:
        if debug:
            traceback.print_exc()
        return _say(f"error: {err}", code=err.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as err:
        if debug:
            traceback.print_exc()
        return _say(
            f"error: {type(err).__name__}: {err}\nwhere: inside stoker: this is a bug\n"
            "try:   the same command with --debug, and report the traceback",
            code=EXIT_BUG,
        )


def _usage_error() -> type["_UsageError"]:
    """The command line parser's own error: typer brings a copy of click, under no public name."""
    import typer

    return typer.BadParameter.__mro__[1]


def _launch(arguments: list[str]) -> int:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command or command[0] in ("-h", "--help"):
        print(
            "Usage: stoker launch -- CMD\n       stoker launch train\n\n"
            "  Plays this host's part in a job; `train` stands for the command that the job names."
        )
        return 0 if command else EXIT_USAGE
    try:
        from stoker.settings import from_environment

        if from_environment().profile_file:
            # Only there: it brings the statistics of the profile along.
            from stoker.cli.launching import launch_profile

            return launch_profile(command, os.environ)
        from stoker.launch import launch

        return launch(command, os.environ)
    except StokerError as err:
        return _say(f"error: {err}", code=err.exit_code)


def _say(text: str, *, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise TerminatedError
