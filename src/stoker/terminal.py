"""The person at the terminal: lines on stderr, and questions."""

import contextlib
import json
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

from stoker.errors import UsageError
from stoker.logs import shown

# A line of a step: its name, words, and its time at the right.
_WIDTH = 87
INDENT = 11
_TIME_WIDTH = 9


def say(text: str) -> None:
    """Prints one line on stderr; stdout is for what other programs read."""
    print(shown(text), file=sys.stderr, flush=True)


def typed() -> str:
    """Returns the command line of this process."""
    return shlex.join(["stoker", *sys.argv[1:]])


def print_result(document: object, text: str, *, as_json: bool) -> None:
    """Prints what a command found on standard output.

    Args:
        document: For programs; anything that JSON has.
        text: For people.
        as_json: Whether the document is printed.
    """
    if as_json:
        text = json.dumps(document, indent=2)
    # At once: a command may go on and wait.
    print(text, flush=True)


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, *, assume_yes: bool, refused: UsageError) -> None:
    """Asks for confirmation, only on a terminal; raises `refused` if the answer is no.

    Args:
        question: Without its question mark.
        assume_yes: Whether nothing is asked.
        refused: The error that a no raises.
    """
    # In a pipeline there is no terminal, and nothing would ever start.
    if assume_yes or not is_interactive():
        return
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = ""
    # The terminal may be closed by now.
    with contextlib.suppress(OSError):
        answer = sys.stdin.readline()
    if answer.strip().lower() not in ("y", "yes"):
        raise refused


def step_line(verb: str, text: str, seconds: float | None) -> str:
    """Returns `verb  words ...... 12.3 s`: the time at the right, long words wrapped.

    Args:
        verb: Name of the step, at the left.
        text: What it did.
        seconds: How long it took; None: no time is shown.
    """
    right = "" if seconds is None else f"{seconds:.1f} s"
    line_width = max(48, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))
    width = line_width - _TIME_WIDTH
    begin = f"{verb:<{INDENT}}"
    indent = " " * INDENT
    lines = textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=indent) or [begin]
    lines[0] = f"{lines[0]:<{width}}{right:>{_TIME_WIDTH}}".rstrip()
    return "\n".join(lines)


def relative(path: Path) -> str:
    """Returns the path as it is typed from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
