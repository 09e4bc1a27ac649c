"""A person sees progress while something runs: a bar on a terminal, quiet lines elsewhere."""

import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from stoker.cli.host_news import HostNews
from stoker.logs import parse_line
from stoker.platforms.base import LogLine
from stoker.train import LoggedProgress

# One line this often where there is no terminal: a log of a CI job stays short.
_QUIET_SECONDS = 15.0
_WIDTH = 78
_INDENT = 11
# Events of stoker that say in a text what the user should know.
_WARNINGS = (
    "feed_not_asked",
    "generator_not_seeded",
    "host_makes_nothing",
    "hosts_not_comparable",
    "large_dataset",
    "made_locally",
    "module_values_differ",
)


def say(text: str, *, quiet: bool) -> None:
    """Prints one line for people, on stderr so that stdout stays the machine's."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def step_line(verb: str, text: str, seconds: float | None) -> str:
    """Returns `verb  what came of it ...... 12.3 s`: the time at the right, long words wrapped."""
    right = "" if seconds is None else f"{seconds:.1f} s"
    first, *rest = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    line = f"{f'{verb:<{_INDENT}}{first}':<{_WIDTH}}{right:>9}".rstrip()
    return "\n".join([line, *(" " * _INDENT + more for more in rest)])


class Follow:
    """Shows a run's log lines and its progress."""

    def __init__(self, *, bar: Bar | None, quiet: bool, echo: bool) -> None:
        self._bar = bar
        self._task = bar.add_task("train", total=None, words="starting") if bar else None
        self._quiet = quiet
        self._echo = echo
        self._said_at = time.monotonic()
        self._warned: set[str] = set()
        self._news = HostNews()

    def line(self, line: LogLine) -> None:
        """Takes one log line: shows the user's own; stoker's stay in the files but for warnings."""
        if not line.text.startswith("stoker "):
            if self._echo:
                self._show(f"{line.group}/{line.host} {line.text}")
            return
        event = parse_line(line.text)
        if event is None:
            return
        for text in self._news.take(event):
            self._show(text)
        if event.event in _WARNINGS:
            # Once, however many ranks have it.
            text = event.values.get("text", "")
            if text not in self._warned:
                self._warned.add(text)
                self._show(f"warning: {line.group}/{line.host}: {text}")

    def _show(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, progress: LoggedProgress) -> None:
        """Shows how far the run is."""
        wait = progress.wait_seconds / progress.step_seconds if progress.step_seconds else 0.0
        words = f"{progress.step_seconds * 1000:.1f} ms a step, {wait:.0%} of it waiting"
        if self._bar and self._task is not None:
            self._bar.update(
                self._task, completed=progress.steps, total=progress.total_steps, words=words
            )
        elif not self._quiet and time.monotonic() - self._said_at >= _QUIET_SECONDS:
            self._said_at = time.monotonic()
            of = f" of {progress.total_steps}" if progress.total_steps else ""
            say(f"           step {progress.steps}{of}, {words}", quiet=False)


@contextmanager
def following(*, quiet: bool, echo: bool) -> Iterator[Follow]:
    """Shows a bar while the block runs, where stderr is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Follow(bar=None, quiet=quiet, echo=echo)
        return
    columns = (
        TextColumn("train     "),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    # Hosts of the local platform are cores of this machine: a bar must not take their time.
    with Bar(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        yield Follow(bar=bar, quiet=quiet, echo=echo)


def relative(path: Path) -> str:
    """Returns the path as a person would type it from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
