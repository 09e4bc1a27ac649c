"""The terminal shows a bar while something runs; without a terminal, a line now and then.

Several sources report the loss of a host: the trainer's connection ends at once, the platform or
the host itself tells the reason a moment later, and the leader gives it up when its lease ends. The
first report with a reason is shown; a lost connection alone is shown after SETTLE_SECONDS.
`HostNews` is pure: it takes the time from the log.
"""

import json
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import UsageError
from stoker.logs import LogEvent, parse_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from stoker.platforms.base import LogLine

# From the end of a connection to the report that tells why.
SETTLE_SECONDS = 2.0
# After one of these events of the leader, hosts leave because the training is over.
_ENDS = ("command_ended", "signal_received", "training_failed", "training_ended")


def _time_of(when: str) -> datetime | None:
    """Returns an event's time, or None if it is not one: any program may write such a line."""
    try:
        found = datetime.fromisoformat(when)
    except ValueError:
        return None
    # Without a zone it cannot be compared with the others.
    return found if found.tzinfo else None


class HostNews:
    """Turns a run's events into lines for people."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()
        self._gone: set[str] = set()
        self._unsure: dict[str, datetime] = {}
        self._leader = ""
        self._is_alone = False
        self._is_over = False

    def take(self, event: LogEvent) -> Iterator[str]:
        """Yields the lines that are due with one event."""
        now = _time_of(event.when)
        if now is None:
            return
        for host, since in list(self._unsure.items()):
            if (now - since).total_seconds() >= SETTLE_SECONDS:
                yield from self._loses(host, "no longer answers: its connection was lost")
        values = event.values
        host = values.get("about") or values.get("agent") or event.host
        is_agent = values.get("kind") == "agent"
        match event.event:
            # First: after its end a run loses all hosts, which is no news.
            case _ if self._is_over:
                return
            case "roster":
                self._begin(event.host, values.get("groups", ""))
            case "agent_connection_lost" if host in self._hosts - self._gone:
                # The first trainer's report counts: others lose the same host a moment later.
                self._unsure.setdefault(host, now)
            case "host_ended" if host in self._hosts:
                yield from self._loses(host, f"ended with {values.get('how', '')}")
            case "host_lost" if is_agent:
                yield from self._loses(host, f"was lost: {values.get('reason', '')}")
            case "host_left" if is_agent:
                yield from self._loses(host, f"left: {values.get('reason', '')}")
            case "no_data_host_left" if not self._is_alone:
                self._is_alone = True
                yield f"no data host is left: {values.get('text', '')}"
            case "agent_ready" | "host_rejoined":
                yield from self._regains(host)
            case ended if ended in _ENDS and event.host == self._leader:
                self._is_over = True

    def _begin(self, leader: str, groups: str) -> None:
        self._leader = leader
        try:
            described = json.loads(groups)
            self._hosts = {
                str(host)
                for group in described.values()
                if group["role"] == "data"
                for host in group["hosts"]
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            # The log of another version: without the hosts' names there is no news of them.
            return

    def _loses(self, host: str, fate: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone or host not in self._hosts:
            return
        self._gone.add(host)
        left = len(self._hosts - self._gone)
        others = f"the other {left} of {len(self._hosts)} data hosts" if left else ""
        goes_on = f"{others} go on" if left > 1 else f"{others} goes on" if left else ""
        yield f"data host {host} {fate}; {goes_on or 'no other data host is left'}"

    def _regains(self, host: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone:
            self._gone.discard(host)
            self._is_alone = False
            there = len(self._hosts - self._gone)
            yield f"data host {host} is back: {there} of {len(self._hosts)} data hosts make batches"


# Without a terminal one line per 15 s: the log of a CI job stays short.
_QUIET_SECONDS = 15.0
_WIDTH = 78
_INDENT = 11
# Events whose text is shown as a warning.
_WARNINGS = (
    "feed_not_asked",
    "generator_not_seeded",
    "host_makes_nothing",
    "hosts_not_comparable",
    "large_dataset",
    "made_locally",
)


def say(text: str, *, quiet: bool) -> None:
    """Prints one line for people, on stderr so that stdout stays the machine's."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def ask(question: str, *, assume_yes: bool, refused: UsageError) -> None:
    """Asks whether to go on; without a terminal there is no question.

    Raises:
        UsageError: `refused`, if the person says no.
    """
    # In a pipeline nobody answers, and nothing would ever start.
    if assume_yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise refused


def step_line(verb: str, text: str, seconds: float | None) -> str:
    """Returns `verb  what came of it ...... 12.3 s`: the time at the right, long words wrapped."""
    right = "" if seconds is None else f"{seconds:.1f} s"
    first, *rest = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    line = f"{f'{verb:<{_INDENT}}{first}':<{_WIDTH}}{right:>9}".rstrip()
    return "\n".join([line, *(" " * _INDENT + more for more in rest)])


class Follow:
    """Shows a run's log lines and its progress; `total_steps` are those of the whole training."""

    def __init__(
        self, *, bar: "Bar | None", quiet: bool, echo: bool, total_steps: int | None
    ) -> None:
        self._bar = bar
        self._task = bar.add_task("train", total=None, words="starting") if bar else None
        self._quiet = quiet
        self._echo = echo
        self._total_steps = total_steps
        self._said_at = time.monotonic()
        self._warned: set[str] = set()
        self._news = HostNews()

    def line(self, line: "LogLine") -> None:
        """Shows a line of the user's script; of stoker's: warnings, progress, news of hosts."""
        event = parse_line(line.text)
        if event is not None and event.event == "progress":
            self._progress(event)
        # `parse_line` finds stoker's words anywhere: a line of the script may quote them.
        if not line.text.startswith("stoker "):
            if self._echo:
                self._show(f"{line.group}/{line.host} {line.text}")
            return
        if event is None:
            return
        for text in self._news.take(event):
            self._show(text)
        if event.event in _WARNINGS:
            # Shown once, however many ranks log it.
            text = event.values.get("text", "")
            if text not in self._warned:
                self._warned.add(text)
                self._show(f"warning: {line.group}/{line.host}: {text}")

    def _show(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar:
            # As it is: a script's brackets are no markup, its numbers need no colour.
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _progress(self, event: LogEvent) -> None:
        """Shows how far the run is."""
        # Imported here: verbs that only print a line start faster.
        from stoker.launch.telemetry import progress_in

        progress = progress_in(event)
        if progress is None:
            return
        words, of = progress.words, f" of {self._total_steps}" if self._total_steps else ""
        if self._bar and self._task is not None:
            self._bar.update(
                self._task, completed=progress.steps, total=self._total_steps, words=words
            )
        elif not self._quiet and time.monotonic() - self._said_at >= _QUIET_SECONDS:
            self._said_at = time.monotonic()
            say(f"           step {progress.steps}{of}, {words}", quiet=False)


@contextmanager
def following(*, quiet: bool, echo: bool, total_steps: int | None = None) -> Iterator[Follow]:
    """Shows a bar while the block runs, where stderr is a terminal."""
    # Imported here: verbs that only print a line start faster.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Follow(bar=None, quiet=quiet, echo=echo, total_steps=total_steps)
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
        yield Follow(bar=bar, quiet=quiet, echo=echo, total_steps=total_steps)


def relative(path: Path) -> str:
    """Returns the path as a person would type it from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
