"""What a terminal shows of a training or a profile while it runs, from the events of its log."""

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator

from stoker.failure_reasons import without_marks
from stoker.figures.intervals import interval_in
from stoker.figures.progress import StepProgress
from stoker.logs import EventName, LogEvent, parted, shown
from stoker.platforms.base import LogLine
from stoker.record_words import gpu_noun
from stoker.terminal import INDENT, is_interactive, say, step_line
from stoker.units import duration, ms, numbered, percentage

_ERASE = "\r\x1b[K"
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
_CAPACITY = "capacity"
_OF_PLATFORM = ("status", _CAPACITY, "load")
# The first steps include the start of the workers, so they do not count for an estimate.
_ESTIMATE_STEPS = 20
# Of the events with a text, which are for people, those that need no action.
_NOTES = (
    EventName.BATCHES_SEEDED,
    EventName.GPU_LOAD_UNREAD,
)
# Of data hosts: how they left.
_LOSSES = (EventName.HOST_LOST, EventName.HOST_LEFT)
_RETURNS = (EventName.AGENT_READY, EventName.HOST_REJOINED)
_AS_IS = "a step takes {}, {} of it waiting for data"
# Phases of a profile: title, words, and the figure that they show.
_PHASES = {
    EventName.PROFILE_STARTED: ("begins", "the script asks for its first batch", ""),
    EventName.PROFILE_AS_IS: ("as is", _AS_IS, "step_seconds"),
    EventName.PROFILE_ACCELERATOR: ("no loader", "without loading a step takes {}", "step_seconds"),
    EventName.PROFILE_LOADER: ("loader", "alone, a batch takes {} of CPU", "cpu_seconds"),
}


class Follow:
    """Shows log lines and progress of a run; `total_steps` counts the whole training.

    An event counts if it has the run ID of the first one, which a launcher writes before the script
    begins. Others are text that the script prints, such as another run's log.
    """

    def __init__(
        self, *, quiet: bool, echo: bool, total_steps: int | None = None, title: str = "train"
    ) -> None:
        self._quiet = quiet
        self._is_live = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        # The last line of a terminal, which is written again.
        self._status = ""
        self._title = title
        self._began = time.monotonic()
        self._echo = echo
        self._total_steps = total_steps
        self._shown_at = self._began
        self._shown: set[str] = set()
        self._lost_hosts: set[str] = set()
        self._is_over = False
        self._run = ""
        self.show("starts the hosts")

    def close(self) -> None:
        """Erases the last line of a terminal."""
        if self._status:
            self._write(_ERASE)
        self._status = ""

    def show(self, words: str) -> None:
        """Writes the last line of a terminal again; elsewhere nothing is shown."""
        if self._is_live:
            seconds = duration(time.monotonic() - self._began)
            line = shown(f"{self._title:<{INDENT}}{seconds}  {words}")
            self._status = line[: shutil.get_terminal_size().columns - 1]
            self._write(_ERASE + self._status)

    def _say(self, text: str) -> None:
        """Prints a line above it."""
        if self._status:
            self._write(_ERASE)
        say(text, quiet=self._quiet)
        self._write(self._status)

    def _write(self, text: str) -> None:
        # A run outlives its terminal.
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)

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
            answer = sys.stdin.readline().lower() if is_answered else ""
        except KeyboardInterrupt:
            return True
        except OSError:
            return False
        # Without its line end: the terminal was closed.
        return answer.endswith("\n") and answer.strip() in ("", "y", "yes")

    def line(self, line: LogLine) -> None:
        """Shows a script's line, or of an event what is news to the user."""
        if line.host == _CAPACITY:
            # The next job is another run.
            self._run = ""
        if line.host in _OF_PLATFORM and not self._echo:
            self._say(step_line("", line.text, None))
            return
        written, event = parted(line.text)
        if event and (self._run or event.run) != event.run:
            written = line.text
            event = None
        # A bar that is erased leaves blanks; a rank's mark may stand before an event.
        has_words = bool(without_marks(written).strip())
        if self._echo and (has_words or not (event or "\r" in line.text)):
            self._say(f"{line.group}/{line.host} {written}")
        if event:
            self._run = event.run
            self._take(event, line)

    def _take(self, event: LogEvent, line: LogLine) -> None:
        values = event.values
        host = values.get("about") or values.get("agent") or event.host
        if event.event == EventName.INTERVAL:
            self._progress(event)
        elif event.event in _ENDS and line.group != "data":
            self._is_over = True
        elif event.event in _LOSSES and values.get("kind") == "agent":
            # Several report the same loss; after its end a run loses all hosts, as expected.
            if host not in self._lost_hosts and not self._is_over:
                self._say(f"data host {host} was lost: {values.get('reason', '')}")
            self._lost_hosts.add(host)
        elif event.event in _RETURNS and host in self._lost_hosts:
            self._say(f"data host {host} is back")
            self._lost_hosts.discard(host)
        elif event.event in _PHASES and values.get("rank", "0") == "0":
            title, words, figure = _PHASES[EventName(event.event)]
            seconds, share = (float(values.get(name) or 0) for name in (figure, "wait_share"))
            words = words.format(ms(seconds), percentage(share))
            self._once(event.event, step_line(title, words, None))
            self.show(words)
        elif text := values.get("text", ""):
            head = "note:" if event.event in _NOTES else f"warning: {line.group}/{line.host}:"
            self._once(text, f"{head} {text}")

    def _once(self, key: str, words: str) -> None:
        """Prints a line, however many ranks log it."""
        if key not in self._shown:
            self._shown.add(key)
            self._say(words)

    def _progress(self, event: LogEvent) -> None:
        interval = interval_in(event)
        if interval is None or interval.steps is None:
            return
        parts = [*self._parts(interval.steps)]
        if interval.gpu_utilization is not None:
            noun = gpu_noun(len(interval.gpus))
            parts.append(f"{noun} {percentage(interval.gpu_utilization)} busy")
        words = ", ".join(parts)
        if self._is_live:
            self.show(words)
        elif time.monotonic() - self._shown_at >= _QUIET_SECONDS:
            self._shown_at = time.monotonic()
            self._say(step_line("", words, None))

    def _parts(self, progress: StepProgress) -> Iterator[str]:
        """Yields what the line of progress says."""
        # A restarted run repeats some steps; or a hyperparameter asks for more.
        left = (self._total_steps or 0) - progress.steps
        if left >= 0:
            yield f"{progress.steps:,}/{numbered(progress.steps + left, 'step')}"
        else:
            yield numbered(progress.steps, "step")
        yield f"{ms(progress.step_seconds)} each"
        yield progress.wait_words("waiting for data")
        if left >= 0 and progress.steps >= _ESTIMATE_STEPS:
            yield f"{duration(left * progress.counted_seconds)} left"
