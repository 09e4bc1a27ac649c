"""The person at the terminal: lines on stderr, questions, a line that is redrawn, a spinner."""

import contextlib
import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import UsageError
from stoker.logs import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn
    from rich.status import Status

# A line of a step: its name, words, and its time at the right.
_WIDTH = 87
INDENT = 11
_TIME_WIDTH = 9
# A spinner appears after this time: most waits are shorter.
_SPINNER_SECONDS = 1.5


def say(text: str, *, quiet: bool) -> None:
    """Prints one line on stderr; stdout is for what other programs read."""
    if not quiet:
        print(shown(text), file=sys.stderr, flush=True)


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
    try:
        line_width = max(48, min(_WIDTH, os.get_terminal_size(sys.stderr.fileno()).columns))
    except (OSError, ValueError):
        line_width = _WIDTH
    width = line_width - _TIME_WIDTH
    first, *rest = textwrap.wrap(text, width - INDENT) or [""]
    line = f"{f'{verb:<{INDENT}}{first}':<{width}}{right:>{_TIME_WIDTH}}".rstrip()
    return "\n".join([line, *(" " * INDENT + more for more in rest)])


@contextmanager
def terminal_bar(
    columns: "Callable[[Console], Sequence[ProgressColumn]]", *, quiet: bool
) -> "Iterator[Bar | None]":
    """Shows a line that is redrawn; yields None where stderr is no terminal for it."""
    console = _console(quiet=quiet)
    if console is None:
        yield None
        return
    # Imported here: verbs that only print a line start faster.
    from rich.progress import Progress as Bar

    # Hosts of the local platform are cores of this machine, whose time a bar must not use.
    with Bar(*columns(console), console=console, transient=True, refresh_per_second=2) as bar:
        yield bar


def _console(*, quiet: bool) -> "Console | None":
    if quiet or not sys.stderr.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def title_column(title: str) -> "ProgressColumn":
    from rich.progress import TextColumn

    return TextColumn(f"{title:<{INDENT - 1}}")


def words_column(console: "Console", *, taken: int) -> "ProgressColumn":
    """Returns the column of the field `words`, cut to what the other columns leave."""
    from rich.progress import TextColumn
    from rich.table import Column

    most = max(1, console.width - taken)
    # Without markup: brackets stay.
    return TextColumn(
        "{task.fields[words]}",
        markup=False,
        table_column=Column(no_wrap=True, overflow="ellipsis", max_width=most),
    )


@contextmanager
def working(words: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows a spinner on the terminal if the block takes long; the block must not print."""
    console = _console(quiet=quiet)
    if console is None:
        yield
        return
    shown: list[Status] = []

    def show() -> None:
        shown.append(console.status(words, spinner="line"))
        shown[0].start()

    timer = threading.Timer(_SPINNER_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # It may be about to start the spinner.
        timer.join()
        for line in shown:
            line.stop()


def program() -> str:
    """Returns the word, or the path, by which stoker was called."""
    typed = Path(sys.argv[0])
    on_path = shutil.which("stoker")
    # `python -m stoker.cli` and tests have another name; `make run` calls .venv/bin/stoker.
    if typed.name != "stoker" or not typed.is_file() or (on_path and typed.samefile(on_path)):
        return "stoker"
    return relative(typed)


def relative(path: Path) -> str:
    """Returns the path as it is typed from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
