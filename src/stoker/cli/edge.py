"""The process edge turns errors and signals into exit codes and three lines of text."""

import os
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

from stoker.cli.closed_pipes import ReaderGoneError, guard_standard_streams
from stoker.cli.exit_codes import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    TerminatedError,
)
from stoker.errors import StokerError, UsageError
from stoker.logs import printable

_LINES = "\n\t"


class _UsageError(Exception):
    """The shape of the parser's errors."""

    def format_message(self) -> str:
        """Returns the error in words."""
        raise NotImplementedError


def main() -> NoReturn:
    """Runs the command line of this process and ends it with the right exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["launch"]:
        # The launcher has signals and exit codes of its own: it is the job's first process.
        sys.exit(_launch(arguments[1:]))
    signal.signal(signal.SIGTERM, _terminate)
    guard_standard_streams(arguments)
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Runs one command line and gives its exit code; prints errors to stderr."""
    # Imported here: a launcher needs no parser.
    from stoker.cli.app import app

    debug = "--debug" in arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        _refuse_unprintable(arguments)
        # As the object of the context: verbs print how to go on, with the words that were typed.
        code = app(args=arguments, prog_name="stoker", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except _usage_error() as err:
        message = err.format_message().rstrip(".")
        if message.startswith("Usage:"):
            return _say(message, code=EXIT_USAGE)
        verbs = [each.name for each in app.registered_commands]
        verb = f" {arguments[0]}" if arguments and arguments[0] in verbs else ""
        return _say(f"error: {message}\ntry:   stoker{verb} --help", code=EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted; everything that ran was told to stop", code=EXIT_INTERRUPTED)
    except TerminatedError:
        return _say(
            "stopped by SIGTERM; everything that ran was told to stop", code=EXIT_TERMINATED
        )
    except StokerError as err:
        if debug:
            traceback.print_exc()
        return _say(f"error: {printable(str(err), keep=_LINES)}", code=err.exit_code)
    except ReaderGoneError:
        return 0
    except Exception as err:
        if debug:
            traceback.print_exc()
        if isinstance(err, UnicodeEncodeError) and err.reason.startswith("surrogates"):
            return _say(
                f"error: a name that is not UTF-8: {printable(str(err.object))[:200]}\n"
                f"where: folder {printable(os.getcwd())}\ntry:   rename it",
                code=EXIT_USAGE,
            )
        return _say(
            f"error: {type(err).__name__}: {err}\nwhere: inside stoker: this is a bug\n"
            "try:   run it again with --debug, and report the traceback",
            code=EXIT_BUG,
        )


def _refuse_unprintable(arguments: list[str]) -> None:
    """Refuses words that are not UTF-8: records and commands on other hosts are UTF-8."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"not UTF-8: {printable(argument)}", where="command line", fix="rename it"
            ) from None


def _usage_error() -> type["_UsageError"]:
    """Returns the parser's own error class: typer brings a copy of click, under no public name."""
    import typer

    return typer.BadParameter.__mro__[1]


def _launch(arguments: list[str]) -> int:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command or command[0] in ("-h", "--help"):
        print(
            "Usage: stoker launch -- CMD\n       stoker launch train\n\n"
            "  Starts this host's part of a job; `train` stands for the command that the job names."
        )
        return 0 if command else EXIT_USAGE
    try:
        from stoker.settings import from_environment

        if from_environment().profile_file:
            # Imported only for a profile: it needs the statistics of the profile.
            from stoker.cli.profile_job import launch_profile

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
