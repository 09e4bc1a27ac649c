"""The process edge turns what happens into exit codes, signals, and errors in three lines."""

import os
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

from stoker.cli.closed_pipes import ReaderGoneError, guard_standard_streams
from stoker.errors import StokerError, UsageError
from stoker.logs import printable

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_LINES = "\n\t"


class TerminatedError(BaseException):
    """SIGTERM came: unwinds the stack as Ctrl-C does, so that all that runs is ended."""


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
    debug = "--debug" in arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        _refuse_unprintable(arguments)
        from stoker.cli.app import app

        # As an object of the context: verbs say how to go on with the very same words.
        code = app(args=arguments, prog_name="stoker", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except _usage_error() as err:
        message = err.format_message().rstrip(".")
        if message.startswith("Usage:"):
            return _say(message, code=EXIT_USAGE)
        verb = f" {arguments[0]}" if _is_verb(arguments) else ""
        return _say(f"error: {message}\ntry:   stoker{verb} --help", code=EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted; all that ran was told to stop", code=EXIT_INTERRUPTED)
    except TerminatedError:
        return _say("asked to stop; all that ran was told to stop", code=EXIT_TERMINATED)
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
            "try:   the same command with --debug, and report the traceback",
            code=EXIT_BUG,
        )


def _refuse_unprintable(arguments: list[str]) -> None:
    """Refuses names that are not UTF-8: records and commands of other hosts are."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"not UTF-8: {printable(argument)}", where="command line", fix="rename it"
            ) from None


def _is_verb(arguments: list[str]) -> bool:
    """Returns whether the first word is a verb, for its help."""
    import typer.main

    from stoker.cli.app import app

    # A group, where there is more than one verb.
    commands: object = getattr(typer.main.get_command(app), "commands", {})
    return isinstance(commands, dict) and arguments[:1] != [] and arguments[0] in commands


def _usage_error() -> type["_UsageError"]:
    """Returns the parser's own error class: typer brings a copy of click, under no public name."""
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
            from stoker.cli.launch import launch_profile

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
