"""Log lines, one per event: `event key=value ...`, always with run ID and host.

Example: `stoker 2026-11-20T08:00:00.123Z run=mnist-1 host=algo-1 agent_ready workers=4`.
`parse_line` reads them back, so that a job can be followed by its log.
"""

import re
import shlex
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum, auto
from typing import TextIO

LogValue = str | int | float | bool | None

_PREFIX = "stoker "
# Start of an event, anywhere in a line: platforms prepend a time, progress bars and other processes
# half a line.
EVENT_HEAD = re.compile(r"stoker \d{4}-\d\d-\d\dT[\d:.]+Z run=")
# A terminal's colours.
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
# Neither ends a line, moves the cursor, nor is a command: spaces in figures, and what lines have.
_SHOWN = "\n\t\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"


class EventName(StrEnum):
    """Names of the log events; docs/reference/events.md is made from the comments."""

    AGENT_ADDRESS_REUSED = auto()  # The address of a lost data host now belongs to another host.
    AGENT_ENDED = auto()  # A data host's agent ended.
    AGENT_LISTENING = auto()  # A data host accepts trainers.
    AGENT_READY = auto()  # A trainer may ask a data host for batches.
    BATCH_HANGS = auto()  # A rank waits for a batch for a minute or more; the text names it.
    BATCH_OVERDUE = auto()  # A batch takes much longer than others.
    BATCHES_LOST = auto()  # A connection to a data host broke.
    BATCHES_SEEDED = auto()  # Each batch has its own seed, unlike in a run without stoker.
    BUDGET_SPENT = auto()  # constraints.max_usd has been spent; the script may save before it ends.
    CALL_REPEATED = auto()  # A service did not answer; the call is retried.
    COMMAND_ENDED = auto()  # The training command ended, with its exit code and CPU time.
    COMMAND_STOPPING = auto()  # The training command was asked to end.
    CONNECTIONS_REJECTED = auto()  # Connections without the run's token were closed.
    DATA_HOST_ENDED = auto()  # A data host ends, with the reason.
    ENGINE_READY = auto()  # A process of the data engine accepts connections.
    FEED_UNUSED = auto()  # The script did not use the data hosts; the text says why.
    FIRST_BATCH = auto()  # A first batch was not compared, or differs; the text says how.
    GPU_LOAD_UNREAD = auto()  # The load of the GPUs cannot be read; the text says why.
    HOST_EXCLUDED = auto()  # A data host makes no batches of a DataLoader; the text says why.
    HOST_JOINED = auto()  # A host joined the run.
    HOST_LEFT = auto()  # A host left the run.
    HOST_LOST = auto()  # A host was silent beyond its lease, or never came.
    HOST_ROLE = auto()  # The group and the role of a host.
    INTERVAL = auto()  # A row of metrics.jsonl: steps, feed, GPUs and memory since the last.
    JOB_CREATED = auto()  # The job was created.
    JOB_RESUMED = auto()  # The job of an earlier attempt is followed.
    JOB_STOP_FAILED = auto()  # The job could not be stopped or deleted, or has not ended in time.
    JOB_STOPPING = auto()  # The job was asked to stop.
    LOADER_MADE_HERE = auto()  # The trainer's host makes a DataLoader's batches; the text says why.
    MEMORY_SHORT = auto()  # Fewer batches wait on a host, whose memory is nearly used up.
    MESSAGE_REFUSED = auto()  # A message was malformed, not authenticated, or not taken.
    METRIC_NOT_A_NUMBER = auto()  # A metric of the script is NaN, infinite or not a number.
    METRICS = auto()  # Figures of one epoch.
    METRICS_FAILED = auto()  # The script's metrics could not be written or read.
    METRICS_SERVE_FAILED = auto()  # The endpoint for Prometheus could not be opened.
    NO_PROGRESS = auto()  # No step for watchdog_minutes: the run is ended.
    OUTPUT_FAILED = auto()  # A file or the log of the job could not be read, kept or sent whole.
    OUTPUT_PART = auto()  # A part of a file of the job's output.
    PROFILE_ACCELERATOR = auto()  # The profiler measured steps without loading.
    PROFILE_AS_IS = auto()  # The profiler measured the script unchanged.
    PROFILE_LOADER = auto()  # The profiler measured the loader alone.
    PROFILE_STARTED = auto()  # The profiler started.
    RECORD_WRITE_FAILED = auto()  # A file of the run could not be written; the text names it.
    REQUIREMENTS_INSTALLED = auto()  # The packages of the code's requirements were installed.
    RUN_JOINED = auto()  # This host joined the run.
    SAMPLE_BAD = auto()  # The first bad sample of a process; bad_samples.csv has all of them.
    SESSION_OPENED = auto()  # A trainer opened a session on a data host.
    TICK_FAILED = auto()  # A figure or a limit of the run could not be looked at; told once.
    SIGNAL_RECEIVED = auto()  # The launcher received a signal.
    SPEC_FAILED = auto()  # A data host could not load a dataset.
    SPEC_RECEIVED = auto()  # A data host received a dataset.
    TRAINING_ENDED = auto()  # Training ended, with its status.
    TRAINING_FAILED = auto()  # Training failed, with the reason.
    TRAINING_NOT_STARTED = auto()  # Training was not started; the reason says why.
    WORKER_DIED = auto()  # A worker process died; another one is started.


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A parsed event line; `when` is in UTC, ISO 8601 with milliseconds."""

    when: str
    run: str
    host: str
    event: str
    values: Mapping[str, str]


class Log:
    """Event log of one host and run; safe to use from several threads."""

    def __init__(self, *, run: str, host: str, stream: TextIO | None = None) -> None:
        self._head = f"run={_quote(run)} host={_quote(host)}"
        self._stream = stream
        # A signal's handler that comes as a line is written may write one, too.
        self._lock = threading.RLock()

    def event(self, name: EventName, **values: LogValue) -> None:
        """Writes one line. A stream that cannot take it is ignored: logging must not end a job."""
        pairs = "".join(f" {key}={_quote(_text(value))}" for key, value in values.items())
        self.write(f"{_PREFIX}{now_utc()} {self._head} {name}{pairs}\n")

    def write(self, text: str) -> None:
        """Writes lines of other programs likewise, such as the stacks of a worker."""
        # A full disk, a closed pipe or stream, a script that sets sys.stderr to None, whatever a
        # console raises that took its place.
        with self._lock, suppress(Exception):
            # Looked up at each event: tests and notebooks replace it.
            stream = self._stream or sys.stderr
            stream.write(text)
            stream.flush()


def parse_line(line: str) -> LogEvent | None:
    """Returns the event in `line`, or None if there is none."""
    head = EVENT_HEAD.search(line)
    if head is None:
        return None
    try:
        words = shlex.split(line[head.start() + len(_PREFIX) :])
    except ValueError:
        return None
    if len(words) < 4 or not words[2].startswith("host="):
        return None
    values = dict(word.split("=", 1) for word in words[4:] if "=" in word)
    return LogEvent(words[0], words[1][4:], words[2][5:], words[3], values)


def parted(line: str) -> tuple[str, LogEvent | None]:
    """Splits a line into the script's text, as a terminal shows it, and stoker's event behind it.

    A progress bar ends with a carriage return: only its last state is kept.
    """
    event = parse_line(line)
    written = EVENT_HEAD.split(line, maxsplit=1)[0] if event else line
    return written.rstrip("\r").rpartition("\r")[2], event


def now_utc() -> str:
    """Returns the UTC time, ISO 8601 with milliseconds."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return now.replace("+00:00", "Z")


def _text(value: LogValue) -> str:
    if isinstance(value, float):
        # Six digits: microseconds of a second, and still readable.
        return f"{value:.6g}"
    if value is None:
        return ""
    return str(value)


def printable(text: str, *, keep: str = "") -> str:
    r"""Returns `text` with control and format characters escaped, such as `\x1b` and `\u202e`.

    Text of others, such as a dataset's error, must not control the terminal. Characters in `keep`,
    such as line ends, stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def shown(text: str) -> str:
    """Returns text of others for a terminal: control characters escaped, and no colours."""
    return printable(_COLOUR.sub("", text), keep=_SHOWN)


def _quote(text: str) -> str:
    # One line per event: line breaks become spaces.
    flat = printable(" ".join(text.split()))
    if flat and not set(flat) & set(" '\"\\"):
        return flat
    return shlex.quote(flat)
