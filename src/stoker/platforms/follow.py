"""The loop that follows a job on a service, and the log files of its hosts.

SageMaker is polled, Kubernetes is watched. Local hosts write their log files themselves.
"""

import contextlib
import errno
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from stoker.errors import PlatformError, ServiceError
from stoker.logs import EventName, Log
from stoker.platforms.base import JobEnd, LogLine

# How long a terminal follows a job that it cannot see: control planes are upgraded while jobs run.
# A pipeline's step follows it for as long as the job may last.
UNREACHABLE_SECONDS = 900.0
# A reason that was not seen for this time is reported again.
TOLD_SECONDS = 600.0
_CHUNK_BYTES = 1 << 16
# Of all log files of a run, about: a follower's pod has a small disk.
MAX_LOG_BYTES = 1 << 30
# A longer line is taken in pieces.
MAX_LINE_BYTES = 1 << 20


class FollowedRun(ABC):
    """A submitted job; it is looked at only while `lines`, `wait` or `stop` runs.

    Args:
        name: Name of the job at its service.
        run: Its name in stoker's log.
        service: Name of the service, in lines that no host wrote.
        way_back: The command that follows the job again.
        way_to_stop: The command that ends it.
        is_step: Whether a pipeline's step follows it, whose next attempt adopts it.
        may_last_seconds: How long the job may last; for a step.
    """

    def __init__(
        self,
        name: str,
        *,
        run: str,
        service: str,
        log_folder: Path,
        way_back: str,
        way_to_stop: str,
        is_step: bool,
        may_last_seconds: float,
    ) -> None:
        self.name = name
        self._service = service
        self._is_step = is_step
        self._patience_seconds = may_last_seconds if is_step else UNREACHABLE_SECONDS
        self._way_back = way_back
        self._way_to_stop = way_to_stop
        # Reasons of failed looks, and when each was last seen.
        self._failures: dict[tuple[str, ...], float] = {}
        self._log = Log(run=run, host=service)
        self._files = LogFiles(log_folder)
        self._waiting: deque[LogLine] = deque()
        self._is_drained = False
        # Left to the next follower: `stop` does not end it.
        self._is_left = False
        self._end: JobEnd | None = None

    def lines(self) -> Iterator[LogLine]:
        """Yields log lines of all hosts and changes of the job's state, until the job has ended.

        Raises:
            JobStoppedError: If the hosts will never run.
            PlatformError: If the job cannot be seen for UNREACHABLE_SECONDS, in a pipeline's step
                for as long as it may last. It is left running.
        """
        self._begin()
        while True:
            # Before the look at `_is_drained`: the last look may have brought lines.
            while self._waiting:
                yield self._waiting.popleft()
            if self._is_drained:
                return
            self._look()

    def wait(self) -> JobEnd:
        """Blocks until the job has ended; writes its records to the run's folder."""
        for _ in self.lines():
            pass
        if self._end is None:
            self._end = self._conclude()
        return self._end

    def leave(self) -> str:
        """Leaves the job to the next follower, unless its pipeline's run is being cancelled.

        A SIGTERM to a pod does not mean that: its node may be drained.
        """
        # First: a second signal may interrupt the question, and must not end the job.
        self._is_left = True
        if self._has_ended:
            return f"the job {self.name} has ended and is kept"
        if self._is_cancelled():
            self._is_left = False
            return ""
        self._log.event(EventName.JOB_DETACHED, job=self.name)
        return self._words_of_leaving

    @property
    def _words_of_leaving(self) -> str:
        then = f"to follow it again: {self._way_back}; to stop it: {self._way_to_stop}"
        then = "the next attempt adopts it" if self._is_step else then
        return f"the job {self.name} keeps running; {then}"

    @property
    @abstractmethod
    def _has_ended(self) -> bool: ...

    @abstractmethod
    def _is_cancelled(self) -> bool:
        """Returns whether the pipeline's run is known to be cancelled; blocks for seconds only."""

    def _endure(self, error: PlatformError, *, now: float, failing_seconds: float) -> None:
        """Reports a failed look at the job, once for each reason.

        Raises:
            PlatformError: If the last successful look is too long ago; the job is left.
        """
        if failing_seconds >= self._patience_seconds:
            self._is_left = True
            self._close_files()
            what = f"{error.what}, for {failing_seconds / 60:.0f} minutes"
            fix = "; ".join(filter(None, (error.fix, self._words_of_leaving)))
            raise PlatformError(what, where=error.where, fix=fix) from error
        reason: tuple[str, ...] = (error.what,)
        # Texts of services have ids that differ each time, but a missing right is named.
        if isinstance(error, ServiceError) and error.kind != "denied":
            reason = (error.kind, error.code)
        last = self._failures.get(reason, float("-inf"))
        self._failures[reason] = now
        if now >= last + TOLD_SECONDS:
            fix = f"; {error.fix}" if error.fix else ""
            self._say(f"{error.what}; retrying, and the job continues{fix}")

    def _begin(self) -> None:  # noqa: B027
        """Prepares the first look; called again with each `lines`."""

    @abstractmethod
    def _look(self) -> None:
        """Takes or awaits news; sets `_is_drained` when everything has been read."""

    @abstractmethod
    def _conclude(self) -> JobEnd:
        """Returns the end of the job, after `lines` has ended."""

    def _say(self, words: str) -> None:
        self._emit(LogLine(group=self._service, host="status", text=words))

    def _emit(self, *lines: LogLine) -> None:
        for line in lines:
            self._waiting.append(line)
            if words := self._files.write(line):
                self._waiting.append(LogLine(group=self._service, host="status", text=words))

    def _close_files(self) -> None:
        self._files.close()


def full_disk(folder: Path) -> str:
    """Returns a warning where the disk of a folder is full, else an empty text."""
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(folder).free:
            return f"no space is left for {folder}: its logs lack lines; the job continues"
    return ""


class LogFiles:
    """GROUP-HOST.log files of a run; those of an earlier attempt are replaced.

    A host's log that is too long for its share of MAX_LOG_BYTES continues in GROUP-HOST.more.log,
    which has its latest lines: with GROUP-HOST.more.log.old at least a third of the share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[str]] = {}
        self._begun: set[str] = set()
        self._sizes: Counter[str] = Counter()
        # The file that has a host's latest lines, by the name of its first one.
        self._latest: dict[str, str] = {}
        self._missing: Counter[str] = Counter()
        # A run may be stopped by a thread that does not read its lines.
        self._lock = threading.Lock()

    def write(self, line: LogLine) -> str:
        """Adds a line to its host's file, or drops it where the disk is full.

        Returns words for the user: once when lines are dropped, once when it works again.
        """
        # Both names come from a log: no name must lead out of the folder.
        name = f"{line.group}-{line.host}.log".replace("/", "_")
        with self._lock:
            try:
                self._add(name, line.text)
            except OSError as err:
                # Opened again for the next line; its buffer is lost.
                with contextlib.suppress(KeyError, OSError):
                    self._open.pop(name).close()
                self._missing[name] += 1
                words = f"cannot write {self._folder / name}: {err.strerror}; the job continues"
                return words if self._missing[name] == 1 else ""
            missing = self._missing.pop(name, 0)
        words = f"{self._folder / name} is written again; {missing} lines are missing"
        return words if missing else ""

    def _add(self, first: str, text: str) -> None:
        more = f"{first.removesuffix('.log')}.more.log"
        name = self._latest.setdefault(first, first)
        if first not in self._begun:
            self._folder.mkdir(parents=True, exist_ok=True)
            _refuse_link(self._folder)
            for stale in (more, f"{more}.old"):
                (self._folder / stale).unlink(missing_ok=True)
        if self._sizes[name] > MAX_LOG_BYTES // (3 * len(self._latest)):
            if name == first:
                self._write(first, f"(the latest lines are in {more})")
            self._open.pop(name).close()
            if name == more:
                (self._folder / more).replace(self._folder / f"{more}.old")
            self._begun.discard(more)
            self._sizes[more] = 0
            name = self._latest[first] = more
        self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        if name not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            _refuse_link(self._folder / name)
            mode = "a" if name in self._begun else "w"
            self._open[name] = (self._folder / name).open(mode, encoding="utf-8")
            self._begun.add(name)
        file = self._open[name]
        self._sizes[name] += file.write(text + "\n")
        file.flush()

    def close(self) -> None:
        """Closes the files, which the next line opens again; may be called twice."""
        with self._lock:
            for file in self._open.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._open.clear()


def _refuse_link(path: Path) -> None:
    # One to a device overwrites nothing.
    if path.is_symlink() and not path.is_char_device():
        raise OSError(errno.ELOOP, f"{path.name} is a link, which is not followed")


def take_lines(rest: bytearray, chunk: bytes) -> list[bytes]:
    """Adds a chunk to `rest`, and takes the lines out that end in it: in time with the chunk.

    What has no end after MAX_LINE_BYTES is taken for a line.
    """
    begin = len(rest)
    rest += chunk
    end = rest.rfind(b"\n", begin) + 1
    lines = bytes(rest[:end]).split(b"\n")[:-1]
    del rest[:end]
    if len(rest) > MAX_LINE_BYTES:
        lines.append(bytes(rest))
        rest.clear()
    return lines


class FileTail:
    """Whole lines that were added to a file since the last read; a new file of its name is next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = bytearray()

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Yields the new lines, without their ends; with `is_last` also an unfinished one."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
        yield from self._added(self._file)
        with contextlib.suppress(OSError):
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                # What came since the end was read, and then the new file, with the next read.
                yield from self._added(self._file)
                self.close()
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest.clear()

    def _added(self, file: BinaryIO) -> Iterator[str]:
        while chunk := file.read(_CHUNK_BYTES):
            for line in take_lines(self._rest, chunk):
                yield line.decode(errors="replace").rstrip("\r")
            # A progress bar may have no line end for hours: its last state is kept.
            if b"\r" in chunk:
                del self._rest[: max(0, self._rest.rstrip(b"\r").rfind(b"\r"))]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
