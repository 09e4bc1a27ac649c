"""The process's entry point: turns errors and signals into exit codes and three lines of text.

`stoker launch`, which a container of a run starts with, continues in `stoker.launch`, without the
parser.

Where the output's reader has gone, as in `stoker catalog | head -1`, its terminal is closed, or its
disk is full, a command that only prints ends, and a training run continues without that output.
"""

import errno
import io
import os
import re
import select
import shlex
import shutil
import signal
import stat
import sys
import traceback
from itertools import pairwise
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

    # Typer's own copy of click, under no public name.
    from typer._click.exceptions import UsageError as ParserError

_LINES = "\n\t"
_NO_NUMBER = re.compile(r"Input should be a valid (number|integer), .*")
# These verbs do work that continues when their output is not read; all others only print.
_WORKING_VERBS = ("run", "profile", "train", "start", "upload", "step")
# They need to know more of a script than how it is called.
_VERBS_OF_WORKLOADS = ("run", "compile", "upload", "start")
# Flags of earlier versions that only pipelines had, by verb, and the step that has them now.
_STEPS = (
    ("train", {"--finish"}, "finish"),
    ("train", {"--profile", "--run-id", "--always", "--executor-input", "--param"}, "train"),
    ("evaluate", {"--gate-of", "--promote"}, "gate"),
    (
        "evaluate",
        {
            "--always",
            "--expires",
            "--remember",
            "--comparison",
            "--branch",
            "--executor-input",
            "--param",
        },
        "evaluate",
    ),
    ("status", {"--besides"}, "alone"),
)


def main() -> NoReturn:
    """Runs the command line of this process and ends it with the right exit code."""
    arguments = sys.argv[1:]
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # As Python has it; `stoker.cli.main` ends without words until here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[:1] == ["launch"]:
        # The launcher handles signals and exit codes itself: it is the job's first process.
        sys.exit(_launch(arguments[1:]))
    try:
        signal.signal(signal.SIGTERM, _terminate)
        guard_standard_streams(arguments)
        code = run(arguments)
    except KeyboardInterrupt:
        # While the parser is imported: nothing has begun.
        code = EXIT_INTERRUPTED
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; prints errors to stderr."""
    # Imported here: a launcher needs no parser.
    from stoker.cli.app import app_for

    debug = "--debug" in arguments
    typed_words = arguments
    arguments = with_step(arguments)
    # `stoker help train`, as in other tools; `stoker` alone asks for help, too.
    if arguments[:1] in ([], ["help"]):
        arguments = [*arguments[1:2], "--help"]
    try:
        _refuse_unprintable(arguments)
        _refuse_bare_choice(arguments)
        _refuse_command(arguments)
        # The words that bash, or another shell, wants completed: they name the verb.
        typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
        # As the object of the context: verbs print the command line that continues a run.
        code = app_for(*arguments[:1], *typed.split()[1:2])(
            args=arguments, prog_name="stoker", standalone_mode=False, obj=typed_words
        )
        # In the `try`: what is still buffered may meet a closed pipe.
        sys.stdout.flush()
        if isinstance(code, int):
            return code
        return 0
    except _parser_error() as err:
        return _say_unparsed(err, arguments)
    except KeyboardInterrupt as err:
        words = printable(str(err)) or "stopping all processes"
        return _say(f"interrupted; {words}", code=EXIT_INTERRUPTED)
    except TerminatedError as err:
        words = printable(str(err)) or "stopping all processes"
        return _say(f"stopped by SIGTERM; {words}", code=EXIT_TERMINATED)
    except ReaderGoneError:
        return 0
    except Exception as err:
        if debug:
            traceback.print_exc()
        return _say_error(err)


def _say_unparsed(err: "ParserError", arguments: list[str]) -> int:
    """Prints why a command line cannot be read, and the right one where it is clear."""
    from stoker.cli.app import VERBS
    from stoker.terminal import program

    begin = _command_at(err, arguments)
    corrected = _without_unit(err, arguments)
    if corrected:
        words = _NO_NUMBER.sub(r"not a \1", err.format_message())
        wanted = corrected
    elif begin:
        words = err.message
        wanted = [*arguments[:begin], "--", *arguments[begin:]]
    else:
        words = err.format_message()
        wanted = ["--help"]
        if arguments[0] in VERBS:
            wanted.insert(0, arguments[0])
    words = words[:1].lower() + words[1:].rstrip(".")
    return _say(
        f"error: {words}\ntry:   {shlex.join([program(), *wanted])}", code=UsageError.exit_code
    )


def _without_unit(err: "ParserError", arguments: list[str]) -> list[str]:
    """Returns the command line with a number as it is to be written; empty: not clear."""
    from stoker.units import without_unit

    parameter = getattr(err, "param", None)
    if parameter is None:
        return []
    for place, word in enumerate(_own(arguments)):
        option, equals, value = word.partition("=")
        if option not in parameter.opts:
            continue
        if not equals:
            value = next(iter(arguments[place + 1 :]), "")
        number = without_unit(value, name=str(parameter.metavar))
        if number:
            behind = arguments[place + 1 + (not equals) :]
            return [*arguments[:place], option, number, *behind]
    return []


def _say_error(err: Exception) -> int:
    if isinstance(err, StokerError):
        return _say(f"error: {printable(str(err), keep=_LINES)}", code=err.exit_code)
    # A file name that is not UTF-8, which Python reads as surrogates.
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


def with_step(arguments: list[str]) -> list[str]:
    """Returns the command line with the verb of a pipeline's step as one word.

    A definition that an earlier version compiled names the verb that people type, with flags that
    only pipelines have.
    """
    if arguments[:1] == ["step"]:
        # Alone, or with `--help`, it lists them.
        if len(arguments) == 1 or arguments[1] in ("--help", "-h"):
            return ["step"]
        return [" ".join(arguments[:2]), *arguments[2:]]
    flags = {word.partition("=")[0] for word in _own(arguments)}
    for verb, named, step in _STEPS:
        if arguments[:1] == [verb] and flags & named:
            return [f"step {step}", *(word for word in arguments[1:] if word != "--finish")]
    return arguments


def _own(arguments: list[str]) -> list[str]:
    """Returns the words before the user's own command."""
    if "--" in arguments:
        return arguments[: arguments.index("--") + 1]
    return arguments


def _command_at(err: "ParserError", arguments: list[str]) -> int | None:
    """Returns where the user's own command begins that lacks its `--`; None where there is none."""
    from stoker.cli.options import WORKLOAD_OR_COMMAND

    unknown = getattr(err, "option_name", None)
    if not unknown or not err.ctx or "--" in arguments:
        return None
    parameters = err.ctx.command.params
    if all(parameter.metavar != WORKLOAD_OR_COMMAND for parameter in parameters):
        return None
    with_value: set[str] = set()
    for parameter in parameters:
        if not getattr(parameter, "is_flag", False):
            with_value.update(parameter.opts)
    at = 1
    while at < len(arguments) and arguments[at].startswith("-"):
        name, equals, _ = arguments[at].partition("=")
        if name == unknown:
            return None
        at += 1
        # Its value is the next word.
        if not equals and name in with_value:
            at += 1
    if _is_command(arguments[at:]):
        return at
    return None


def _is_command(words: list[str]) -> bool:
    """Whether words are a command; anything else may be a misspelt name of a workload."""
    if not words or words[0].lower().endswith((".yaml", ".yml", ".json")):
        return False
    is_script = any(word.endswith((".py", ".sh")) for word in words)
    return is_script or shutil.which(words[0]) is not None


def _refuse_bare_choice(arguments: list[str]) -> None:
    """Raises UsageError for `--replace-dataloader -- CMD`, which the parser takes for its value."""
    name = "--replace-dataloader"
    values = ("auto", "true", "false")
    for word, value in pairwise(_own(arguments)):
        if word == name and value not in values:
            raise UsageError(
                f"{name} needs a value, not {value}",
                where="the command line",
                fix=f"one of {', '.join(values)}: {name} true",
            )


def _refuse_command(arguments: list[str]) -> None:
    """Raises UsageError for a command in place of a workload."""
    command = arguments[len(_own(arguments)) :]
    if arguments[0] not in _VERBS_OF_WORKLOADS or not command:
        return
    script = next((word for word in command if word.endswith((".py", ".sh"))), "train.py")
    raise UsageError(
        f"stoker {arguments[0]} takes a workload, not a command",
        where="the command line",
        fix=f"stoker init --script {shlex.quote(script)}     makes a workload of it",
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


def _parser_error() -> "type[ParserError]":
    # Of click, or of typer's own copy, which has no public name.
    import typer

    return typer.BadParameter.__mro__[1]


def _launch(arguments: list[str]) -> int:
    command = arguments
    if arguments[:1] == ["--"]:
        command = arguments[1:]
    if not command or command[0] in ("-h", "--help"):
        print(
            "Usage: stoker launch -- CMD\n       stoker launch train\n\n"
            "  Start this host's part of a job. `train` stands for the command that the job\n"
            "  names."
        )
        return 0 if command else UsageError.exit_code
    try:
        from stoker.environment import from_environment

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
    """The reader of this command's output has closed it."""


def guard_standard_streams(arguments: list[str]) -> None:
    """Replaces sys.stdout and sys.stderr by streams that may be lost, as the verb allows it."""
    goes_on = arguments[:1] in [[verb] for verb in _WORKING_VERBS]
    sys.stdout = _guarded(sys.stdout, goes_on=goes_on)
    # Closing stderr never ends a command.
    sys.stderr = _guarded(sys.stderr, goes_on=True)


def _guarded(stream: TextIO, *, goes_on: bool) -> TextIO:
    """Returns a stream that handles a closed pipe, a terminal that is gone, and a full disk."""
    # A test or a notebook has replaced it.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
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
        """Writes; drops what a full disk refuses, and all after the reader or terminal has gone."""
        try:
            while (written := super().write(data)) is None:
                # Another program has made this pipe or terminal non-blocking for all.
                select.select([], [self.fileno()], [])
            return written
        except OSError as err:
            # EIO: of a terminal that is gone while SIGHUP is ignored, as after nohup or disown.
            is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if err.errno == errno.EPIPE or (err.errno == errno.EIO and is_terminal):
                self._drop_the_rest()
                if not self._goes_on:
                    raise ReaderGoneError from None
            # A disk may have room again: a command that continues tries its next lines.
            elif not self._goes_on:
                self._drop_the_rest()
                raise UsageError(
                    f"cannot write the output: {err.strerror}", fix="free some space"
                ) from None
        # In bytes, as the buffer counts: a smaller number would be written again.
        return len(memoryview(data).cast("B"))

    def _drop_the_rest(self) -> None:
        """Sends all later output nowhere; else Python's flush at exit would fail again."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
