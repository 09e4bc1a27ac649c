"""Progress of a training run on stderr: a bar on a terminal, an occasional line elsewhere.

Several sources report the loss of a host: the trainer's connection ends at once, the platform or
the host itself gives the reason a moment later, and the leader's lease for it expires. The first
report with a reason is shown; a lost connection alone only after SETTLE_SECONDS.
"""

import json
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from stoker.figures.step_progress import StepProgress, progress_in
from stoker.logs import EventName, LogEvent, parted, shown
from stoker.platforms.base import LogLine
from stoker.printed_tracebacks import without_marks
from stoker.terminal import (
    INDENT,
    is_interactive,
    say,
    step_line,
    terminal_bar,
    title_column,
    words_column,
)
from stoker.units import duration, ms, numbered, percentage, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn, TaskID


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
# What a platform reports of a job, in the place of a host's name.
CAPACITY = "capacity"
_OF_PLATFORM = ("status", CAPACITY, "load")
# The first steps include the start of the workers, so they do not count for an estimate.
_ESTIMATE_STEPS = 20
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
    EventName.LOADER_NOT_BALANCED,
    EventName.LOADER_NOT_SHIPPABLE,
    EventName.LOADERS_TOO_SHORT,
    EventName.MAX_BYTES_SMALL,
    EventName.MEMORY_SHORT,
    EventName.METRICS_SERVE_FAILED,
    EventName.MLFLOW_FAILED,
    EventName.NO_PROGRESS,
    EventName.PINNING_FAILED,
    EventName.RECORD_WRITE_FAILED,
    EventName.SAMPLE_BAD,
    EventName.SAMPLES_UNWATCHED,
    EventName.TOKEN_EXPOSED,
)
# Events whose text is shown as a note: no action is needed.
_NOTES = (
    EventName.BATCHES_PINNED,
    EventName.BATCHES_SEEDED,
    EventName.BATCHES_SEEDED_AS_BEFORE,
    EventName.DATASET_COPIED,
    EventName.GPU_LOAD_INCOMPLETE,
    EventName.GPU_LOAD_UNREAD,
    EventName.PROGRESS_RESUMED,
    EventName.RANKS_BALANCED,
    EventName.SETTINGS_NOT_SENT,
    EventName.STREAM_NOT_CARRIED,
    EventName.STREAM_RESUMED,
    EventName.STREAM_STATE_REFUSED,
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
        # After its end a run loses all hosts, as expected.
        if not self._is_over:
            yield from self._news(event, now)

    def _news(self, event: LogEvent, now: datetime) -> Iterator[str]:
        values = event.values
        host = values.get("about") or values.get("agent") or event.host
        is_agent = values.get("kind") == "agent"
        match event.event:
            case EventName.ROSTER:
                self._begin(event.host, values.get("groups", ""))
            case EventName.AGENT_CONNECTION_LOST if host in self._hosts - self._gone:
                # The first trainer's report counts; the others lose the same host a moment later.
                self._unsure.setdefault(host, now)
            case EventName.HOST_ENDED if host in self._hosts:
                yield from self._loses(host, f"ended with {values.get('how', '')}")
            case EventName.HOST_LOST | EventName.HOST_LEFT if is_agent:
                fate = "was lost"
                if event.event == EventName.HOST_LEFT:
                    fate = "left"
                yield from self._loses(host, f"{fate}: {values.get('reason', '')}")
            case EventName.NO_DATA_HOST_LEFT if not self._is_alone:
                self._is_alone = True
                yield f"no data host is left: {values.get('text', '')}"
            case EventName.AGENT_READY | EventName.HOST_REJOINED:
                yield from self._regains(host)
            case ended if ended in _ENDS and event.host == self._leader:
                self._is_over = True

    def _begin(self, leader: str, groups: str) -> None:
        self._leader = leader
        self._hosts = set()
        try:
            for group in json.loads(groups).values():
                if group["role"] == "data":
                    self._hosts.update(map(str, group["hosts"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            # The log of another version, without the hosts' names.
            self._hosts.clear()

    def _loses(self, host: str, fate: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone or host not in self._hosts:
            return
        self._gone.add(host)
        rest = "no other data host left"
        if left := len(self._hosts - self._gone):
            rest = f"{left} of {len(self._hosts)} data hosts left"
        yield f"data host {host} {fate}; {rest}"

    def _regains(self, host: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone:
            self._gone.discard(host)
            # One is back: if the last one leaves again, that is news.
            self._is_alone = False
            there = len(self._hosts - self._gone)
            yield f"data host {host} is back: {there} of {len(self._hosts)} data hosts make batches"


def is_of_platform(line: LogLine) -> bool:
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
        self._task: TaskID | None = None
        if bar:
            self._task = bar.add_task("train", total=None, words="starts the hosts")
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
            if not is_answered:
                return False
            answer = sys.stdin.readline().lower()
        except KeyboardInterrupt:
            return True
        except OSError:
            return False
        # Without its line end: the terminal was closed.
        return answer.endswith("\n") and answer.strip() in ("", "y", "yes")

    def line(self, line: LogLine) -> LogEvent | None:
        """Shows a script's line, or of an event, which it returns, what is news to the user."""
        if line.host == CAPACITY:
            # The next job is another run.
            self._run = ""
        if is_of_platform(line) and not self._echo:
            self._show(step_line("", line.text, None))
            return None
        written, event = parted(line.text)
        if event and (self._run or event.run) != event.run:
            written = line.text
            event = None
        elif event:
            self._run = event.run
        # A bar that is erased leaves blanks; a rank's mark may stand before an event.
        has_words = bool(without_marks(written).strip())
        if self._echo and (has_words or not (event or "\r" in line.text)):
            self._show(f"{line.group}/{line.host} {written}")
        if event is None:
            return None
        if event.event in (EventName.PROGRESS, EventName.GPU_LOAD):
            self._progress(event)
        for text in self._news.take(event):
            self._show(text)
        self._warn(event, line)
        return event

    def _warn(self, event: LogEvent, line: LogLine) -> None:
        """Shows what is doubtful or noteworthy: once, however many ranks log it."""
        text = event.values.get("text", "")
        if text in self._warned or event.event not in (*_WARNINGS, *_NOTES):
            return
        self._warned.add(text)
        if event.event in _NOTES:
            self._show(f"note: {text}")
        else:
            self._show(f"warning: {line.group}/{line.host}: {text}")

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

        if gpus := gpus_in(event):
            self._busy = gpus.words
        progress = progress_in(event)
        if progress is None:
            return
        total = self._total_steps
        # A restarted run repeats some steps; or a hyperparameter asks for more.
        if total and progress.steps > total:
            total = None
        words = ", ".join(self._parts(progress, total=total))
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=progress.steps, total=total, words=words)
        elif not self._quiet and time.monotonic() - self._said_at >= _QUIET_SECONDS:
            self._said_at = time.monotonic()
            say(step_line("", words, None), quiet=False)

    def _parts(self, progress: StepProgress, *, total: int | None) -> Iterator[str]:
        """Yields what the line of progress says; `total`: steps of the whole, if still right."""
        if total:
            yield f"{whole(progress.steps)}/{numbered(total, 'step')}"
        elif self._total_steps:
            yield f"{numbered(progress.steps, 'step')} ({whole(self._total_steps)} were planned)"
        else:
            yield numbered(progress.steps, "step")
        if progress.is_between_epochs:
            yield f"between epochs, after steps of {ms(progress.step_seconds)}"
        else:
            yield f"{ms(progress.step_seconds)} each"
        yield progress.wait_words("waiting for data")
        if progress.whole_wait_share is not None:
            yield f"{percentage(progress.whole_wait_share)} over whole epochs"
        if self._busy:
            yield self._busy
        if total and progress.steps >= _ESTIMATE_STEPS:
            yield f"{duration((total - progress.steps) * progress.counted_seconds)} left"


@contextmanager
def following(*, quiet: bool, echo: bool, total_steps: int | None = None) -> Iterator[Follow]:
    with terminal_bar(_training_columns, quiet=quiet) as bar:
        yield Follow(bar=bar, quiet=quiet, echo=echo, total_steps=total_steps)


def _training_columns(console: "Console") -> "Sequence[ProgressColumn]":
    from rich.progress import BarColumn, TimeElapsedColumn

    # The bar gets what the words leave: nothing on a terminal of 80 columns.
    room = min(40, console.width - 85)
    taken = INDENT + 8
    if room < 8:
        words = words_column(console, taken=taken)
        return (title_column("train"), TimeElapsedColumn(), words)
    bar = BarColumn(bar_width=room)
    words = words_column(console, taken=taken + room + 1)
    return (title_column("train"), TimeElapsedColumn(), bar, words)
