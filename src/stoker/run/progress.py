"""What a terminal shows of a training or a profile while it runs, from the events of its log."""

import select
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stoker.failure_reasons import without_marks
from stoker.figures.intervals import Interval, interval_in
from stoker.logs import EventName, LogEvent, parted, shown
from stoker.platforms.base import LogLine
from stoker.record_words import gpu_noun
from stoker.terminal import INDENT, is_interactive, say, step_line
from stoker.units import duration, ms, numbered, percentage

# Time for an answer to a question about a job that is billed.
ANSWER_SECONDS = 60.0
# Without a terminal, one line in 15 s keeps the log of a CI job short.
_QUIET_SECONDS = 15.0
# What a platform reports of a job, in the place of a host's name.
_OF_PLATFORM = ("status", "capacity")
# A host that left in good order has no reason.
_LOSSES = (EventName.HOST_LOST, EventName.HOST_LEFT)
# Of the events with a text, which are for people, those that need no action.
_NOTES = (EventName.BATCHES_SEEDED, EventName.GPU_LOAD_UNREAD)
# Phases of a profile: title, words, and the figure that they show.
_PHASES: Mapping[str, tuple[str, str, str]] = {
    EventName.PROFILE_STARTED: ("begins", "the script asks for its first batch", ""),
    EventName.PROFILE_AS_IS: (
        "as is",
        "a step takes {}, {} of it waiting for data",
        "step_seconds",
    ),
    EventName.PROFILE_ACCELERATOR: ("no loader", "without loading a step takes {}", "step_seconds"),
    EventName.PROFILE_LOADER: ("loader", "alone, a batch takes {} of CPU", "cpu_seconds"),
}


class Follow:
    """Shows log lines and progress of a run; `total_steps` counts the whole training."""

    def __init__(self, *, echo: bool, total_steps: int | None = None, title: str = "train") -> None:
        self._echo = echo
        self._total_steps = total_steps
        self._title = title
        self._began = time.monotonic()
        self._shown_at = self._began
        self._shown: set[str] = set()
        # The last line of a terminal; lines of `say` are printed above it.
        self._live: Live | None = None
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
            self._show("starts the hosts")

    def close(self) -> None:
        """Erases the last line of a terminal."""
        if self._live:
            self._live.stop()
            self._live = None

    def _show(self, words: str) -> None:
        """Writes the last line of a terminal again; elsewhere, a line now and then."""
        now = time.monotonic()
        if self._live:
            line = shown(f"{self._title:<{INDENT}}{duration(now - self._began)}  {words}")
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now - self._shown_at >= _QUIET_SECONDS:
            self._shown_at = now
            say(step_line("", words, None))

    def ask_to_stop(self) -> bool:
        """Asks after Ctrl-C whether the job is to be stopped; a second Ctrl-C means yes.

        Without a terminal the answer is yes, and without an answer in ANSWER_SECONDS it is no.
        """
        self.close()
        if not is_interactive():
            return True
        question = "\nCtrl-C: stop the job, which is billed while it runs? [Y/n] "
        try:
            print(question, end="", file=sys.stderr, flush=True)
            is_answered, _, _ = select.select([sys.stdin], [], [], ANSWER_SECONDS)
            answer = sys.stdin.readline() if is_answered else ""
        except KeyboardInterrupt:
            return True
        # A terminal that was closed gives an empty text.
        return answer.lower() in ("\n", "y\n", "yes\n")

    def line(self, line: LogLine) -> None:
        """Shows a script's line, or of an event what is news to the user."""
        if line.host in _OF_PLATFORM and not self._echo:
            say(step_line("", line.text, None))
            return
        written, event = parted(line.text)
        # A bar that was erased leaves blanks; a rank's mark may stand before an event.
        if self._echo and without_marks(written).strip():
            say(f"{line.group}/{line.host} {written}")
        if event:
            self._take(event, line)

    def _take(self, event: LogEvent, line: LogLine) -> None:
        values = event.values
        row = interval_in(event)
        if row and row.steps:
            self._show(step_words(row, total=self._total_steps))
        elif event.event in _LOSSES and values.get("role") == "data" and values.get("reason"):
            self._once(f"data host {values.get('about')} was lost: {values['reason']}")
        elif event.event in _PHASES and values.get("rank", "0") == "0":
            title, words, figure = _PHASES[event.event]
            seconds, share = (float(values.get(name) or 0) for name in (figure, "wait_share"))
            self._once(step_line(title, words.format(ms(seconds), percentage(share)), None))
        elif text := values.get("text"):
            head = "note:" if event.event in _NOTES else f"warning: {line.group}/{line.host}:"
            self._once(f"{head} {text}", text)

    def _once(self, words: str, key: str = "") -> None:
        """Prints a line, however many ranks log it."""
        if (key or words) not in self._shown:
            self._shown.add(key or words)
            say(words)


def step_words(row: Interval, *, total: int | None = None) -> str:
    """Returns the training's progress; `total`: its steps, if known."""
    progress = row.steps
    if progress is None:
        return "no step yet"
    words = numbered(progress.steps, "step")
    end = ""
    # A script may make more steps than its workload says.
    if total and total >= progress.steps:
        words = f"{progress.steps:,}/{numbered(total, 'step')}"
        end = f", {duration((total - progress.steps) * progress.counted_seconds)} left"
    words += f", {ms(progress.step_seconds)} each, {progress.wait_words('waiting for data')}{end}"
    if row.gpu_utilization is not None:
        words += f", {gpu_noun(len(row.gpus))} {percentage(row.gpu_utilization)} busy"
    return words
