"""The process edge turns errors and signals into exit codes and three lines of text.

A container of a run starts here, too: `stoker launch` goes on in `stoker.launch`, past the parser.

It also handles an output that takes no more: a pipe that its reader closes, as `stoker catalog |
head -1` does, or a file on a full disk. A command that only prints ends then, without an error
where a reader has gone; a training goes on, and the output that nobody takes is dropped.
"""

import difflib
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from stoker.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    StokerError,
    TerminatedError,
    UsageError,
)
from stoker.logs import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    # Typer brings a copy of click, under no public name.
    from typer._click import Context


_LINES = "\n\t"
# How alike a wrong option and the one that is suggested are, 0 to 1: `--epochs` is no `--help`.
_NEAR = 0.8
# These verbs do work that goes on when nobody reads their output; all others only print.
_WORKING_VERBS = ("run", "profile", "train", "start", "upload")


class _UsageError(Exception):
    """The parser's errors have these attributes.

    Attributes:
        message: The error in words, without a guess of what was meant.
        option_name: The option that is unknown, where that is the error.
        possibilities: The options that are near to it.
        ctx: The verb, where it is known.
    """

    message: str
    option_name: str
    possibilities: Sequence[str] | None
    ctx: "Context | None"

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
    try:
        code = run(arguments)
    except KeyboardInterrupt:
        # While the parser is imported: nothing has begun.
        code = EXIT_INTERRUPTED
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; prints errors to stderr."""
    # Imported here: a launcher needs no parser.
    from stoker.cli.app import VERBS, app_for
    from stoker.cli.progress import program

    debug = "--debug" in arguments
    # People type `stoker help train`, as other tools take it; `stoker` alone asks for help, too.
    if arguments[:1] in ([], ["help"]):
        arguments = [*arguments[1:2], "--help"]
    try:
        _refuse_unprintable(arguments)
        # As the object of the context: verbs print how to go on, with the words that were typed.
        code = app_for(*arguments[:1], *_words_to_complete())(
            args=arguments, prog_name="stoker", standalone_mode=False, obj=arguments
        )
        # Inside of the `try`: what is still buffered may meet a pipe that was closed.
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except _usage_error() as err:
        wanted = _corrected(err, arguments, verbs=VERBS) or (
            [arguments[0], "--help"] if arguments[0] in VERBS else ["--help"]
        )
        # Of an option that is unknown the parser would add its own guesses, --yes among them.
        words = err.message if _is_unknown_option(err) else err.format_message()
        words = words[:1].lower() + words[1:].rstrip(".")
        return _say(
            f"error: {words}\ntry:   {shlex.join([program(), *wanted])}",
            code=UsageError.exit_code,
        )
    except KeyboardInterrupt:
        return _say("interrupted; everything that ran was told to stop", code=EXIT_INTERRUPTED)
    except TerminatedError as err:
        words = printable(str(err)) or "everything that ran was told to stop"
        return _say(f"stopped by SIGTERM; {words}", code=EXIT_TERMINATED)
    except StokerError as err:
        if debug:
            traceback.print_exc()
        return _say(f"error: {printable(str(err), keep=_LINES)}", code=err.exit_code)
    except ReaderGoneError:
        return 0
    except Exception as err:
        if debug:
            traceback.print_exc()
        # A file's name of bytes that are no UTF-8, which Python reads as surrogates.
        if isinstance(err, UnicodeEncodeError) and err.reason.startswith("surrogates"):
            return _say(
                f"error: a name that is not UTF-8: {printable(str(err.object))[:200]}\n"
                f"where: folder {printable(os.getcwd())}\ntry:   rename it",
                code=UsageError.exit_code,
            )
        return _say(
            f"error: {type(err).__name__}: {err}\nwhere: inside stoker: this is a bug\n"
            "try:   run it again with --debug, and report the traceback",
            code=StokerError.exit_code,
        )


def _corrected(
    err: "_UsageError", arguments: list[str], *, verbs: Collection[str]
) -> list[str] | None:
    """Returns the command line that was most likely meant; None if no verb or option is near."""
    if _is_unknown_option(err) and (begin := _command_at(err, arguments)):
        return [*arguments[:begin], "--", *arguments[begin:]]
    # Of an option that the verb does not have, click names those that are near.
    if _is_unknown_option(err) and (options := err.possibilities):
        typed = err.option_name
        # A guess must not confirm what costs money, and one that is far off is only confusing.
        safe = [option for option in options if option != "--yes"]
        best = difflib.get_close_matches(typed, safe, n=1, cutoff=_NEAR)
        # Words after `--` are the user's own command.
        end = arguments.index("--") if "--" in arguments else len(arguments)
        own = [
            best[0] + word.removeprefix(typed) if best and word.partition("=")[0] == typed else word
            for word in arguments[:end]
        ]
        return [*own, *arguments[end:]] if best else None
    first, *others = arguments
    near = [] if first in verbs else difflib.get_close_matches(first, verbs, n=1)
    return [*near, *others] if near else None


def _is_unknown_option(err: "_UsageError") -> bool:
    return hasattr(err, "option_name") and hasattr(err, "possibilities")


def _command_at(err: "_UsageError", arguments: list[str]) -> int | None:
    """Returns where the user's own command begins that lacks its `--`; None where there is none."""
    import shutil

    from stoker.cli.options import WORKLOAD_OR_COMMAND

    known = err.ctx.command.params if err.ctx else []
    if "--" in arguments or not any(each.metavar == WORKLOAD_OR_COMMAND for each in known):
        return None
    with_value = {
        name for each in known if not getattr(each, "is_flag", False) for name in each.opts
    }
    at = 1
    while at < len(arguments) and arguments[at].startswith("-"):
        name, equals, _ = arguments[at].partition("=")
        if name == err.option_name:
            return None
        at += 2 if name in with_value and not equals else 1
    command = arguments[at:]
    if not command or command[0].lower().endswith((".yaml", ".yml", ".json")):
        return None
    # Anything else may be the name of a workload, with a slip.
    is_script = any(word.endswith((".py", ".sh")) for word in command)
    return at if is_script or shutil.which(command[0]) else None


def _words_to_complete() -> list[str]:
    """Returns the words of the command line that a shell wants completed: they name the verb."""
    # Of bash, and of the other shells.
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return typed.split()[1:2]


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
            "  Starts this host's part of a job. `train` stands for the command that the job\n"
            "  names."
        )
        return 0 if command else UsageError.exit_code
    try:
        from stoker.settings import from_environment

        if from_environment().profile_file:
            # Imported only for a profile: it needs the statistics of the profile.
            from stoker.profile.entrypoint import launch_profile

            return launch_profile(command, os.environ)
        from stoker.launch import launch

        return launch(command, os.environ)
    except StokerError as err:
        return _say(f"error: {err}", code=err.exit_code)


def _say(text: str, *, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _terminate(signum: int, frame: FrameType | None) -> None:
    # Raised wherever the main thread is: `with` blocks and `finally` end what was started.
    raise TerminatedError


class ReaderGoneError(BaseException):
    """The reader of this command's output has gone."""


def guard_standard_streams(arguments: list[str]) -> None:
    """Replaces sys.stdout and sys.stderr where they are not a terminal.

    Args:
        arguments: The command line, whose verb decides what an output that takes no more means.
    """
    goes_on = any(verb in arguments[:1] for verb in _WORKING_VERBS)
    sys.stdout = _guarded(sys.stdout, goes_on=goes_on)
    # A person who closes stderr has read enough of it; the command goes on.
    sys.stderr = _guarded(sys.stderr, goes_on=True)


def _guarded(stream: TextIO, *, goes_on: bool) -> TextIO:
    """Returns the stream, or one in its place that handles a closed pipe and a full disk."""
    # A test or a notebook has put something of its own there.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        # A terminal has no reader that goes away, and no disk.
        if os.isatty(stream.fileno()):
            return stream
        raw = _Output(stream.fileno(), goes_on=goes_on)
    except (OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Output(io.FileIO):
    def __init__(self, descriptor: int, *, goes_on: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._goes_on = goes_on

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes; drops what a full disk refuses, and all after the reader has gone."""
        try:
            return super().write(data)
        except BrokenPipeError:
            self._drop_the_rest()
            if not self._goes_on:
                raise ReaderGoneError from None
        except OSError as err:
            # A disk may have room again: a command that goes on tries its next lines.
            if not self._goes_on:
                self._drop_the_rest()
                raise UsageError(
                    f"cannot write the output: {err.strerror}", fix="free some space"
                ) from None
        # The buffer above counts bytes: less would be written again.
        return len(memoryview(data).cast("B"))

    def _drop_the_rest(self) -> None:
        """Sends all later output nowhere, also that of Python's end, which would fail again."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
