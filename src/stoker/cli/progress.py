"""Progress on stderr: a bar or a spinner on a terminal, an occasional line elsewhere.

Several sources report the loss of a host: the trainer's connection ends at once, the platform or
the host itself gives the reason a moment later, and the leader's lease for it expires. The first
report with a reason is shown; a lost connection alone only after SETTLE_SECONDS.
"""

import contextlib
import json
import os
import select
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import UsageError
from stoker.failure_reasons import RANK_MARK
from stoker.logs import EventName, LogEvent, parted, shown
from stoker.units import duration, ms, percentage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn
    from rich.status import Status

    from stoker.platforms.base import LogLine

# From a lost connection to the report with the reason.
SETTLE_SECONDS = 2.0
# After one of these events of the leader, hosts leave because the training is over.
_ENDS = (
    EventName.COMMAND_ENDED,
    EventName.SIGNAL_RECEIVED,
    EventName.TRAINING_FAILED,
    EventName.TRAINING_ENDED,
)
# Time for an answer to a question about a job that is billed.
ANSWER_SECONDS = 60.0
# Without a terminal, one line in 15 s keeps the log of a CI job short.
_QUIET_SECONDS = 15.0
# A line of a step: its name, words, and its time at the right.
_WIDTH = 87
_INDENT = 11
_TIME_WIDTH = 9
# What a platform reports of a job, in the place of a host's name.
CAPACITY = "capacity"
_OF_PLATFORM = ("status", CAPACITY, "load")
# The first steps include the start of the workers, so they do not count for an estimate.
_ESTIMATE_STEPS = 20
# A spinner appears after this time: most waits are shorter.
_SPINNER_SECONDS = 1.5
# Events whose text is shown as a warning.
_WARNINGS = (
    EventName.BATCH_HANGS,
    EventName.BUDGET_NEARLY_SPENT,
    EventName.CODE_DIFFERS,
    EventName.FEED_UNUSED,
    EventName.FEED_WRITE_FAILED,
    EventName.FEW_SHARDS,
    EventName.GENERATOR_NOT_SEEDED,
    EventName.GPU_LOST,
    EventName.GPU_WRITE_FAILED,
    EventName.HOST_EXCLUDED,
    EventName.HOSTS_NOT_COMPARABLE,
    EventName.LARGE_DATASET,
    EventName.LOADER_MADE_HERE,
    EventName.LOADER_NOT_SHIPPABLE,
    EventName.LOADERS_TOO_SHORT,
    EventName.METRICS_SERVE_FAILED,
    EventName.MLFLOW_FAILED,
    EventName.NO_PROGRESS,
    EventName.PINNING_FAILED,
    EventName.RECORD_WRITE_FAILED,
    EventName.TOKEN_EXPOSED,
)
# Events whose text is shown as a note: no action is needed.
_NOTES = (
    EventName.BATCHES_PINNED,
    EventName.BATCHES_SEEDED,
    EventName.DATASET_COPIED,
    EventName.GPU_LOAD_INCOMPLETE,
    EventName.GPU_LOAD_UNREAD,
    EventName.PROGRESS_RESUMED,
    EventName.SETTINGS_NOT_SENT,
    EventName.WATCHDOG_IDLE,
    EventName.WORKERS_STARTING,
)


class HostNews:
    """Lines for people on the hosts of a run, from its events; times are the log's."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()
        self._gone: set[str] = set()
        self._unsure: dict[str, datetime] = {}
        self._leader = ""
        self._is_alone = False
        self._is_over = False

    def take(self, event: LogEvent) -> Iterator[str]:
        try:
            now = datetime.fromisoformat(event.when)
        except ValueError:
            # Any program may write such a line.
            return
        if now.tzinfo is None:
            # It cannot be compared with the others.
            return
        for host, since in list(self._unsure.items()):
            if (now - since).total_seconds() >= SETTLE_SECONDS:
                yield from self._loses(host, "no longer answers: its connection was lost")
        values = event.values
        host = values.get("about") or values.get("agent") or event.host
        is_agent = values.get("kind") == "agent"
        match event.event:
            # First: after its end a run loses all hosts, as expected.
            case _ if self._is_over:
                return
            case EventName.ROSTER:
                self._begin(event.host, values.get("groups", ""))
            case EventName.AGENT_CONNECTION_LOST if host in self._hosts - self._gone:
                # The first trainer's report counts; the others lose the same host a moment later.
                self._unsure.setdefault(host, now)
            case EventName.HOST_ENDED if host in self._hosts:
                yield from self._loses(host, f"ended with {values.get('how', '')}")
            case EventName.HOST_LOST if is_agent:
                yield from self._loses(host, f"was lost: {values.get('reason', '')}")
            case EventName.HOST_LEFT if is_agent:
                yield from self._loses(host, f"left: {values.get('reason', '')}")
            case EventName.NO_DATA_HOST_LEFT if not self._is_alone:
                self._is_alone = True
                yield f"no data host is left: {values.get('text', '')}"
            case EventName.AGENT_READY | EventName.HOST_REJOINED:
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
            # The log of another version, without the hosts' names.
            self._hosts = set()

    def _loses(self, host: str, fate: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone or host not in self._hosts:
            return
        self._gone.add(host)
        left = len(self._hosts - self._gone)
        rest = (
            f"{left} of {len(self._hosts)} data hosts left" if left else "no other data host left"
        )
        yield f"data host {host} {fate}; {rest}"

    def _regains(self, host: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone:
            self._gone.discard(host)
            self._is_alone = False
            there = len(self._hosts - self._gone)
            yield f"data host {host} is back: {there} of {len(self._hosts)} data hosts make batches"


def say(text: str, *, quiet: bool) -> None:
    """Prints one line on stderr; stdout is for what other programs read."""
    if not quiet:
        print(shown(text), file=sys.stderr, flush=True)


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, *, assume_yes: bool, refused: UsageError) -> None:
    """Asks for confirmation, only on a terminal; raises `refused` if the answer is no."""
    # In a pipeline there is no terminal, and nothing would ever start.
    if assume_yes or not is_interactive():
        return
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = ""
    # The terminal may be closed meanwhile.
    with contextlib.suppress(OSError):
        answer = sys.stdin.readline()
    if answer.strip().lower() not in ("y", "yes"):
        raise refused


def step_line(verb: str, text: str, seconds: float | None) -> str:
    """Returns `verb  words ...... 12.3 s`: the time at the right, long words wrapped."""
    right = "" if seconds is None else f"{seconds:.1f} s"
    try:
        line_width = max(48, min(_WIDTH, os.get_terminal_size(sys.stderr.fileno()).columns))
    except (OSError, ValueError):
        line_width = _WIDTH
    width = line_width - _TIME_WIDTH
    first, *rest = textwrap.wrap(text, width - _INDENT) or [""]
    line = f"{f'{verb:<{_INDENT}}{first}':<{width}}{right:>{_TIME_WIDTH}}".rstrip()
    return "\n".join([line, *(" " * _INDENT + more for more in rest)])


def is_of_platform(line: "LogLine") -> bool:
    return line.host in _OF_PLATFORM


class Follow:
    """Shows log lines and progress of a run; `total_steps` counts the whole training.

    An event counts if it has the run ID of the first one, which a launcher writes before the script
    begins. Others are text that the script prints, such as another run's log.
    """

    def __init__(
        self, *, bar: "Bar | None", quiet: bool, echo: bool, total_steps: int | None
    ) -> None:
        self._bar = bar
        self._task = bar.add_task("train", total=None, words="starts the hosts") if bar else None
        self._quiet = quiet
        self._echo = echo
        self._total_steps = total_steps
        self._said_at = time.monotonic()
        self._busy = ""
        self._warned: set[str] = set()
        self._run = ""
        self._news = HostNews()

    def ask_to_stop(self) -> bool:
        """Asks after Ctrl-C whether the job is to be stopped; a second Ctrl-C means yes.

        Without a terminal the answer is yes, and without an answer in ANSWER_SECONDS it is no.
        """
        if not is_interactive():
            return True
        if self._bar:
            self._bar.stop()
        question = "\nCtrl-C: stop the job, which is billed while it runs? [Y/n] "
        try:
            print(question, end="", file=sys.stderr, flush=True)
            is_answered, _, _ = select.select([sys.stdin], [], [], ANSWER_SECONDS)
            # Without its line end: the terminal was closed.
            answer = sys.stdin.readline().lower() if is_answered else "n"
        except KeyboardInterrupt:
            answer = "\n"
        except OSError:
            answer = "n"
        return answer.endswith("\n") and answer.strip() in ("", "y", "yes")

    def line(self, line: "LogLine") -> LogEvent | None:
        """Shows a script's line, or of an event, which it returns, what is news to the user."""
        if line.host == CAPACITY:
            # The next job is another run.
            self._run = ""
        if is_of_platform(line) and not self._echo:
            self._show(step_line("", line.text, None))
            return None
        written, event = parted(line.text)
        if event and (self._run or event.run) != event.run:
            written, event = line.text, None
        elif event:
            self._run = event.run
        # A bar that is erased leaves blanks; a rank's mark may stand before an event.
        has_words = bool(RANK_MARK.sub("", written).strip())
        if self._echo and (has_words or not (event or "\r" in line.text)):
            self._show(f"{line.group}/{line.host} {written}")
        if event is None:
            return None
        if event.event in (EventName.PROGRESS, EventName.GPU_LOAD):
            self._progress(event)
        for text in self._news.take(event):
            self._show(text)
        # Once, however many ranks log it.
        text = event.values.get("text", "")
        if event.event in (*_WARNINGS, *_NOTES) and text not in self._warned:
            self._warned.add(text)
            is_note = event.event in _NOTES
            self._show(f"note: {text}" if is_note else f"warning: {line.group}/{line.host}: {text}")
        return event

    def _show(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar:
            # As it is: a script's brackets are not markup, and its numbers get no colour.
            self._bar.console.print(shown(text), markup=False, highlight=False)
        else:
            say(text, quiet=False)

    def _progress(self, event: LogEvent) -> None:
        # Imported here: verbs that only print a line start faster.
        from stoker.figures.gpu_log import gpus_in
        from stoker.figures.step_progress import progress_in

        if gpus := gpus_in(event):
            self._busy = f", {gpus.words}" if gpus.words else ""
        progress = progress_in(event)
        if progress is None:
            return
        total, left = self._total_steps, ""
        done = f"{progress.steps}/{total} steps" if total else f"{progress.steps} steps"
        # A restarted run repeats some steps; or a hyperparameter asks for more.
        if total and progress.steps > total:
            done, total = f"{progress.steps} steps ({total} were planned)", None
        if total and progress.steps >= _ESTIMATE_STEPS:
            seconds = max(0, total - progress.steps) * progress.counted_seconds
            left = f", {duration(seconds)} left"
        now = "between epochs, after steps of " if progress.is_between_epochs else ""
        each = "" if progress.is_between_epochs else " each"
        words = f"{done}, {now}{ms(progress.step_seconds)}{each}, "
        words += progress.wait_words("waiting for data")
        if progress.whole_wait_share is not None:
            words += f", {percentage(progress.whole_wait_share)} of whole epochs"
        words += f"{self._busy}{left}"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=progress.steps, total=total, words=words)
        elif not self._quiet and time.monotonic() - self._said_at >= _QUIET_SECONDS:
            self._said_at = time.monotonic()
            say(step_line("", words, None), quiet=False)


@contextmanager
def following(*, quiet: bool, echo: bool, total_steps: int | None = None) -> Iterator[Follow]:
    with terminal_bar(_training_columns, quiet=quiet) as bar:
        yield Follow(bar=bar, quiet=quiet, echo=echo, total_steps=total_steps)


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


def _training_columns(console: "Console") -> "Sequence[ProgressColumn]":
    from rich.progress import BarColumn, TimeElapsedColumn

    # The bar gets what the words leave: nothing on a terminal of 80 columns.
    room = min(40, console.width - 85)
    bar = [BarColumn(bar_width=room)] if room >= 8 else []
    taken = _INDENT + 8 + (room + 1 if bar else 0)
    return (title_column("train"), TimeElapsedColumn(), *bar, words_column(console, taken=taken))


def title_column(title: str) -> "ProgressColumn":
    from rich.progress import TextColumn

    return TextColumn(f"{title:<{_INDENT - 1}}")


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
        for each in shown:
            each.stop()


def program() -> str:
    """Returns the word, or the path, by which stoker was called."""
    typed = Path(sys.argv[0])
    found = shutil.which("stoker")
    # `python -m stoker.cli` and tests have another name; `make run` calls .venv/bin/stoker.
    if typed.name != "stoker" or not typed.is_file() or (found and typed.samefile(found)):
        return "stoker"
    return relative(typed)


def relative(path: Path) -> str:
    """Returns the path as it is typed from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
