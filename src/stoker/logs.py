"""Log lines, one per event: `event key=value ...`, always with run ID and host.

Example: `stoker 2026-11-20T08:00:00.123Z run=mnist-1 host=algo-1 agent_ready workers=4`.
`parse_line` reads them back, so that a job can be followed by its log.
"""

import atexit
import os
import re
import select
import shlex
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TextIO

LogValue = str | int | float | bool | None

_PREFIX = "stoker "
# Start of an event, anywhere in a line: platforms prepend a time, progress bars and other processes
# half a line. `parse_line` needs the whole line.
EVENT_HEAD = re.compile(r"stoker \d{4}-\d\d-\d\dT[\d:.]+Z run=")
_HEAD = re.compile(r"stoker \S+ run=")
# A word as `_quote` writes it; what begins with a quote ends with one.
_WORD = re.compile(r"""\s*+((?:[^\s'"\\]++|'[^']*+'|"[^"]*+")++)""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")
# A terminal's colours.
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
# Characters of a line that a terminal shows; logs have all of them.
MAX_SHOWN_CHARACTERS = 64 << 10
# How long a line is waited for whose reader stands still; and once more, as the process ends.
LATE_SECONDS = 0.5
LAST_SECONDS = 5.0
# Above it the oldest are left out.
MAX_LATE_TEXTS = 1000
# Neither ends a line, moves the cursor, nor is a command: spaces in figures, and what lines have.
_SHOWN = "\n\t\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"


class EventName(StrEnum):
    """Names of the log events; docs/reference/events.md is made from the comments."""

    AGENT_ADDRESS_REUSED = auto()  # The address of a lost data host now belongs to another host.
    AGENT_CONNECTION_LOST = auto()  # A trainer lost its connection to a data host and tries again.
    AGENT_DRAINING = auto()  # A data host takes no new work and finishes what it has begun.
    AGENT_ENDED = auto()  # A data host's agent ended.
    AGENT_LISTENING = auto()  # A data host accepts trainers.
    AGENT_READY = auto()  # A trainer may ask a data host for batches.
    BACKEND_FALLBACK = auto()  # The communication backend cannot run here; another one is used.
    BATCH_DROPPED = auto()  # A data host gave up a batch; the trainer asks another host for it.
    BATCH_HANGS = auto()  # A rank waits for a batch for a minute or more; the text names it.
    BATCH_LOST = auto()  # A data worker failed while it made a batch.
    BATCH_OVERDUE = auto()  # A batch takes much longer than others.
    BATCH_SHARED = auto()  # A host made samples of a batch that another one puts together.
    BATCHES_LOST = auto()  # The connection that carries a data host's batches broke.
    BATCHES_PINNED = auto()  # Batches are in pinned memory although the script did not ask for it.
    BATCHES_SEEDED_AS_BEFORE = auto()  # A resumed run is seeded as by an earlier version.
    BATCHES_SEEDED = auto()  # Each batch has its own seed, unlike in a run without stoker.
    BUDGET_NEARLY_SPENT = auto()  # 80% of constraints.max_usd has been spent.
    BUDGET_SPENT = auto()  # constraints.max_usd has been spent; the script may save before it ends.
    CALL_REPEATED = auto()  # A service did not answer; the call is retried.
    CLOCK_JUMP = auto()  # The process was suspended; leases do not count that time.
    CODE_DIFFERS = auto()  # A data host's code differs from the trainer's.
    COMMAND_ENDED = auto()  # The training command ended, with its exit code and CPU time.
    COMMAND_KILLED = auto()  # The training command did not end in time and was killed.
    COMMAND_NOT_FOUND = auto()  # The training command does not exist.
    COMMAND_STARTED = auto()  # The training command started.
    COMMAND_STOPPING = auto()  # The training command was asked to end.
    CONNECTIONS_REJECTED = auto()  # Connections without the run's token were closed.
    COORDINATOR_FAILED = auto()  # The run's coordinator failed.
    COORDINATOR_LISTENING = auto()  # The run's coordinator accepts hosts.
    DATA_GROUP_IDLE = auto()  # A data group made almost no batch; the text says what it cost.
    DATA_HOST_ENDED = auto()  # A data host ends because the run does.
    DATA_HOST_FAILED = auto()  # A data host failed.
    DATA_HOST_RESTARTING = auto()  # A data host restarts to join the run again.
    DATA_HOSTS_RELEASED = auto()  # The leader told the data hosts to end.
    DATA_WORKER_DIED = auto()  # A worker process of a data host died; another one is started.
    DATASET_COPIED = auto()  # Each data worker has its own copy of a dataset; the text says why.
    DISRUPTION_BUDGET_CREATE_FAILED = auto()  # The PodDisruptionBudget could not be created.
    ENGINE_ENDED = auto()  # A process of the data engine (tf.data service, Ray) ended.
    ENGINE_FAILED = auto()  # The data engine failed.
    ENGINE_READY = auto()  # A process of the data engine accepts connections.
    ENGINE_SERVING = auto()  # All processes of the data engine are ready.
    ENGINE_STARTED = auto()  # A process of the data engine started.
    ENGINE_WAITING = auto()  # The data engine waits for hosts.
    FAILED_JOB_REPLACED = auto()  # A failed job of the same name was deleted to start this one.
    FAILURE_WRITE_FAILED = auto()  # The reason why the training failed could not be written.
    FEED = auto()  # Figures of the feed since the last line of this kind.
    FEED_UNUSED = auto()  # The script did not use the data hosts; the text says why.
    FEED_WRITE_FAILED = auto()  # The feed's figures could not be saved.
    FEW_SHARDS = auto()  # An iterable dataset has fewer shards than the data hosts have workers.
    GENERATOR_NOT_SEEDED = auto()  # A random generator of the dataset is not seeded per batch.
    GPU_LOAD = auto()  # Load of the GPUs of all dnn hosts, now.
    GPU_LOAD_INCOMPLETE = auto()  # A GPU does not report some figures, or whose processes it runs.
    GPU_LOAD_UNREAD = auto()  # The load of the GPUs cannot be read; the text says why.
    GPU_LOST = auto()  # A GPU no longer answers; the training continues.
    GPU_WRITE_FAILED = auto()  # The load of the GPUs could not be saved.
    HOST_ABSENT = auto()  # A host did not join in time.
    HOST_ENDED = auto()  # A local host's process ended.
    HOST_EXCLUDED = auto()  # A data host makes no batches in this epoch; the text says why.
    HOST_JOINED = auto()  # A host joined the run.
    HOST_LEFT = auto()  # A host left the run.
    HOST_LOST = auto()  # A host was silent for longer than its lease and is considered lost.
    HOST_MEMORY = auto()  # How much of its memory each host uses now.
    HOST_REJOINED = auto()  # A lost host joined the run again.
    HOST_ROLE = auto()  # The group and the role of a host.
    HOSTS_NOT_COMPARABLE = auto()  # Timings on shared cores do not carry over to a cluster.
    HYPERPARAMETERS_READ_FAILED = auto()  # The job's hyperparameters could not be read.
    JOB_CREATED = auto()  # The job was created.
    JOB_DELETE_FAILED = auto()  # The job could not be deleted.
    JOB_DELETED = auto()  # The job was deleted.
    JOB_DETACHED = auto()  # The job keeps running and is no longer followed.
    JOB_NAME_CONFLICT = auto()  # Another job has this name.
    JOB_OWNER_FAILED = auto()  # The job could not be tied to the workflow that started it.
    JOB_RESUMED = auto()  # The job of an earlier attempt is followed.
    JOB_STILL_STOPPING = auto()  # The job was asked to stop and has not ended yet.
    JOB_STOP_FAILED = auto()  # The job could not be stopped.
    JOB_STOPPING = auto()  # The job was asked to stop.
    JOIN_REFUSED = auto()  # A host was not allowed to join the run.
    LARGE_DATASET = auto()  # The dataset that is sent to the data hosts is large.
    LEASE_CREATE_FAILED = auto()  # The lease that ends an abandoned job could not be created.
    LEASE_RENEW_FAILED = auto()  # The job's lease could not be renewed.
    LEASE_RENEWED = auto()  # The job's lease was renewed.
    LOADER_MADE_HERE = auto()  # The trainer's host makes a DataLoader's batches; the text says why.
    LOADER_NOT_BALANCED = auto()  # Samples are not dealt to ranks by cost; the text says why.
    RANKS_BALANCED = auto()  # Samples are dealt to ranks by cost; the text says the gain.
    LOADER_NOT_SHIPPABLE = auto()  # A DataLoader cannot be sent; its batches are made locally.
    LOADERS_TOO_SHORT = auto()  # A data host costs more than it saves; batches are made locally.
    LOCAL_BATCH_OVERDUE = auto()  # A batch made locally takes much longer than others.
    LOCAL_WORKER_DIED = auto()  # A worker process on the trainer's host died; a new one starts.
    LOGS_READ_FAILED = auto()  # The job's log could not be read.
    MALFORMED_PEER = auto()  # A peer sent something that is not a valid message.
    MAX_BYTES_SMALL = auto()  # No batch fits into feed.max_bytes: one at a time is made.
    MEMORY_SHORT = auto()  # Fewer batches wait on a host, whose memory is nearly used up.
    MESSAGE_REFUSED = auto()  # A message was malformed or not authenticated.
    MESSAGE_SEND_FAILED = auto()  # A message could not be sent.
    METRIC_NOT_A_NUMBER = auto()  # A metric of the script is NaN, infinite or not a number.
    METRIC_NOT_IN_LOG = auto()  # No line that the script printed matches a gate's pattern.
    METRIC_PATTERN_SLOW = auto()  # A gate's pattern took over 0.25 s of CPU on a line.
    METRIC_READ_FAILED = auto()  # A metric in the script's file is not a number.
    METRICS = auto()  # Figures of one epoch.
    METRICS_READ_FAILED = auto()  # The script's metrics file could not be read.
    METRICS_WRITE_FAILED = auto()  # Metrics of the script could not be written.
    METRICS_SERVE_FAILED = auto()  # The endpoint for Prometheus could not be opened.
    METRICS_SERVED = auto()  # The endpoint for Prometheus is open.
    MLFLOW_FAILED = auto()  # MLflow could not be reached.
    MODEL_COPIED = auto()  # The model was copied to its place.
    MODEL_COPY_FAILED = auto()  # The model could not be copied to its place.
    MPI_DAEMON_REQUESTED = auto()  # The leader asked a host to start an MPI daemon.
    MPI_DAEMON_STARTED = auto()  # A host started its MPI daemon.
    NO_DATA_HOST_LEFT = auto()  # All data hosts have been lost.
    NO_PROGRESS = auto()  # No step for watchdog.no_progress_minutes; the text says what follows.
    OUTPUT_LOG_FAILED = auto()  # A file of the job's output could not be read.
    OUTPUT_PART = auto()  # A part of a file of the job's output.
    OUTPUT_SKIPPED = auto()  # A file of the job's output was too large to be taken.
    OUTPUT_TRUNCATED = auto()  # A file of the job's output was too long for the log and was cut.
    OUTPUT_WRITE_FAILED = auto()  # A file of the job's output could not be saved.
    OUTPUTS_READ_FAILED = auto()  # The archive of the job's output could not be read.
    OWNER_UNKNOWN = auto()  # The owner of a pod could not be read.
    PASSIVE_PROFILE_WRITE_FAILED = auto()  # The profile of this training run could not be saved.
    PERMISSION_MISSING = auto()  # The service account lacks a permission.
    PINNING_FAILED = auto()  # Memory could not be pinned; batches are in pageable memory.
    PROFILE_ACCELERATOR = auto()  # The profiler measured steps with cached batches.
    PROFILE_AS_IS = auto()  # The profiler measured the script unchanged.
    PROFILE_ENDED = auto()  # The profiler ended.
    PROFILE_FAILED = auto()  # The profiler failed.
    PROFILE_GUARDED = auto()  # The profiler kept the script from changing its files.
    PROFILE_INTERRUPTED = auto()  # The script ended during the profile.
    PROFILE_LOADER = auto()  # The profiler measured the loader alone.
    PROFILE_PROGRESS = auto()  # The profiler's first figures.
    PROFILE_STARTED = auto()  # The profiler started.
    PROFILE_WRITTEN = auto()  # The profile was saved.
    PROGRESS = auto()  # Steps so far, their time and their wait.
    PROGRESS_RESUMED = auto()  # The run makes steps again after no_progress.
    RECORD_READ_FAILED = auto()  # A record of the job could not be read.
    RECORD_SAVE_FAILED = auto()  # A record of the job could not be saved.
    RECORD_WRITE_FAILED = auto()  # The training's record could not be written.
    RECORDS_READ_FAILED = auto()  # The records of the job could not be read.
    REQUIREMENTS_INSTALLED = auto()  # The packages of the code's requirements were installed.
    ROSTER = auto()  # All groups and hosts of the run.
    RUN_ABANDONED = auto()  # Nobody follows the run any more; its leader ends it.
    RUN_JOINED = auto()  # This host joined the run.
    RUN_OUT_OF_TIME = auto()  # All attempts of the run together took longer than allowed.
    RUN_RESTARTED = auto()  # All hosts were restarted; counts the restarts without progress.
    RUNTIME_REPLACED = auto()  # The TrainingRuntime was replaced.
    SAMPLE_BAD = auto()  # The first bad sample of a process; bad_samples.csv has all of them.
    SAMPLES_UNWATCHED = auto()  # Samples of a loader that hang or end their process are not found.
    SESSION_ENDED = auto()  # A trainer's session on a data host ended.
    SESSION_OPENED = auto()  # A trainer opened a session on a data host.
    SETTINGS_NOT_SENT = auto()  # The data hosts lack settings of the script's process.
    SIGNAL_RECEIVED = auto()  # The launcher received a signal.
    SPEC_FAILED = auto()  # A data host could not load a dataset.
    SPEC_RECEIVED = auto()  # A data host received a dataset.
    STACKS_WRITTEN = auto()  # A training process writes the stacks of its threads to the log.
    STREAM_NOT_CARRIED = auto()  # What a stream changes in itself does not reach the next epoch.
    STREAM_STATE_REFUSED = auto()  # A dataset's own state is not used: the text says why.
    STREAM_RESUMED = auto()  # An iterable dataset resumes in mid-epoch; the text says what it took.
    TOKEN_DELETE_FAILED = auto()  # The run's token could not be deleted from S3.
    TOKEN_EXPOSED = auto()  # Other users of the host can change the run's token.
    TOKEN_MISSING = auto()  # There is no token: hosts cannot join, and a lost one is noticed late.
    TRAINING_CONTINUES = auto()  # Training continues after a wait for data.
    TRAINING_ENDED = auto()  # Training ended, with its status.
    TRAINING_FAILED = auto()  # Training failed, with the reason.
    TRAINING_NOT_STARTED = auto()  # Training was not started; the reason says why.
    TRAINING_WAITING = auto()  # No batch is ready: training waits for data.
    VERSIONS_DIFFER = auto()  # A trainer and a data host run different versions of a library.
    WATCHDOG_IDLE = auto()  # No step was ever seen, so the watchdog has nothing to watch.
    WORKERS_STARTING = auto()  # No worker is ready for a minute or more; the text says where it is.
    WORKFLOW_READ_FAILED = auto()  # The Argo workflow could not be read.


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
        self._late = LateText()

    def event(self, name: EventName, **values: LogValue) -> None:
        """Writes one line. A stream that cannot take it is ignored: logging must not end a job.

        Blocks for LATE_SECONDS at most: a pipe whose reader stands still gets the line later.
        """
        pairs = "".join(f" {key}={_quote(_text(value))}" for key, value in values.items())
        self.write(f"{_PREFIX}{now_utc()} {self._head} {name}{pairs}\n")

    def write(self, text: str) -> None:
        """Writes lines of other programs likewise, such as the stacks of a worker."""
        # A full disk, a closed pipe or stream, a script that sets sys.stderr to None, whatever a
        # console raises that took its place.
        with self._lock, suppress(Exception):
            # Looked up at each event: tests and notebooks replace it.
            stream = self._stream or sys.stderr
            if self._late.is_waiting or not _takes(stream, text):
                self._late.write(stream.fileno(), text)
                return
            stream.write(text)
            stream.flush()


class LateText:
    """Text for a stream whose reader may stand still, written by a thread of its own.

    A terminal that was stopped by Ctrl-S, or a container's log that its driver cannot deliver, must
    not hold up the threads that answer other hosts.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque(maxlen=MAX_LATE_TEXTS)
        self._thread: threading.Thread | None = None
        self._waits_at_exit = False

    @property
    def is_waiting(self) -> bool:
        # In a forked child no such thread is alive: the parent writes what waits.
        # Read once: the thread sets it to None at its end.
        thread = self._thread
        return thread is not None and thread.is_alive()

    def write(self, descriptor: int, text: str) -> None:
        """Writes as soon as that can be; waits for it a moment, where nothing waits before it."""
        data = text.encode("utf-8", "replace")
        with self._lock:
            if self.is_waiting:
                self._waiting.append(data)
                return
            self._waiting.clear()
            self._waiting.append(data)
            # A descriptor of its own: the stream may be closed meanwhile, and Python does not end
            # well while a thread holds a stream's lock.
            duplicate = os.dup(descriptor)
            thread = threading.Thread(
                target=self._run, args=(duplicate,), name="stoker-log", daemon=True
            )
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:
                # Python ends, or no thread is left: here, however long it takes.
                _write_all(duplicate, self._waiting.popleft())
                os.close(duplicate)
                return
        thread.join(LATE_SECONDS)
        if thread.is_alive() and not self._waits_at_exit:
            self._waits_at_exit = True
            # The last lines of a process say how it ended.
            atexit.register(self._wait_for_last)

    def _wait_for_last(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(LAST_SECONDS)

    def _run(self, descriptor: int) -> None:
        while text := self._next():
            _write_all(descriptor, text)
        os.close(descriptor)

    def _next(self) -> bytes:
        """Returns what is to be written; empty: nothing, and the thread ends."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            return b""


def _write_all(descriptor: int, text: bytes) -> None:
    with suppress(OSError):
        while text:
            # A script may have set that writes to it do not wait.
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()
            with suppress(BlockingIOError):
                text = text[os.write(descriptor, text) :]


def _takes(stream: TextIO, text: str) -> bool:
    """Returns whether a text can be written at once; also where that is not known."""
    try:
        descriptor = stream.fileno()
        if os.isatty(descriptor):
            # It may have room for one character.
            return False
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        # A pipe that has any room has as much as this.
        is_short = len(text) <= select.PIPE_BUF // 4
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return bool(ready.poll(0)) and (is_short or is_file)
    except (OSError, ValueError, AttributeError):
        # A file in memory, or an object that took stderr's place.
        return True


def parse_line(line: str) -> LogEvent | None:
    """Returns the event in `line`, or None if there is none; takes time with the line's length."""
    # Platforms prepend a time or the name of a stream.
    head = _HEAD.search(line)
    if head is None:
        return None
    words = []
    at = head.start() + len(_PREFIX)
    while word := _WORD.match(line, at):
        words.append(_QUOTED.sub(lambda each: each[1] or each[2] or "", word[1]))
        at = word.end()
    if line[at:].strip() or len(words) < 4 or not words[2].startswith("host="):
        return None
    values = dict(word.split("=", 1) for word in words[4:] if "=" in word)
    return LogEvent(words[0], words[1][4:], words[2][5:], words[3], values)


def parted(line: str) -> tuple[str, LogEvent | None]:
    """Splits a line into the script's text, as a terminal shows it, and stoker's event behind it.

    A progress bar ends with a carriage return: only its last state is kept.
    """
    head = EVENT_HEAD.search(line)
    event = parse_line(line[head.start() :]) if head else None
    written = (line[: head.start()] if head and event else line).rstrip("\r")
    return written.rpartition("\r")[2], event


def now_utc() -> str:
    """Returns the UTC time, ISO 8601 with milliseconds."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


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
    """Returns text of others for a terminal: control characters escaped, no colours, bounded."""
    more = len(text) - MAX_SHOWN_CHARACTERS
    end = f" ... {more} more characters" if more > 0 else ""
    return printable(_COLOUR.sub("", text[:MAX_SHOWN_CHARACTERS]), keep=_SHOWN) + end


def _quote(text: str) -> str:
    # One line per event: line breaks become spaces.
    flat = printable(" ".join(text.split()))
    if flat and not set(flat) & set(" '\"\\"):
        return flat
    return shlex.quote(flat)
