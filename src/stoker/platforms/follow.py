"""A job on a service is followed from here: it is looked at again and again, to its end.

There is one loop for all services. What a look is differs: SageMaker is asked, Kubernetes tells.
Lines of hosts go to files, one for each host; on this machine the hosts write those themselves.
"""

import contextlib
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from stoker.errors import PlatformError
from stoker.logs import Log
from stoker.platforms.base import JobEnd, LogLine

# A service may be out of reach for so long: control planes are upgraded while jobs run.
UNREACHABLE_SECONDS = 900.0
_CHUNK_BYTES = 1 << 16


def job_left(error: PlatformError, *, run: str) -> PlatformError:
    """Returns the error for a service that stayed away so long that its job is left alone.

    Args:
        error: What the service answered last, if anything.
        run: Name of the run.
    """
    try_first = f"{error.fix}; then " if error.fix else ""
    return PlatformError(
        f"{error.what}, for {UNREACHABLE_SECONDS / 60:.0f} minutes; the job goes on without stoker",
        where=error.where,
        fix=f"{try_first}the same command with --name {run} follows the job again",
    )


class FollowedRun(ABC):
    """Follows a submitted job; it is looked at only while `lines`, `wait` or `stop` runs.

    Args:
        name: Name of the job, as its service calls it.
        run: Its name in stoker's own log.
        service: Who speaks where it is not a host.
        log_folder: Gets a file for each host.
    """

    def __init__(self, name: str, *, run: str, service: str, log_folder: Path) -> None:
        self.name = name
        self._service = service
        self._log = Log(run=run, host=service)
        self._files = LogFiles(log_folder)
        self._waiting: deque[LogLine] = deque()
        self._is_drained = False
        # Left to whoever follows it next: `stop` does not end it.
        self._is_left = False
        self._end: JobEnd | None = None

    def lines(self) -> Iterator[LogLine]:
        """Yields log lines of all hosts and what becomes of them, until the job has ended.

        Raises:
            PlatformError: If the hosts will never run, the job is not to be found, or the service
                refuses, or does not answer for UNREACHABLE_SECONDS.
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
        """Blocks until the job has ended; writes its records to the run's folder.

        Raises:
            PlatformError: As `lines`.
        """
        for _ in self.lines():
            pass
        if self._end is None:
            self._end = self._conclude()
        return self._end

    def _begin(self) -> None:  # noqa: B027
        """Prepares the first look; is called again with each `lines`."""

    @abstractmethod
    def _look(self) -> None:
        """Takes what is new, or waits for it a while; sets `_is_drained` when all has been read."""

    @abstractmethod
    def _conclude(self) -> JobEnd:
        """Returns the end of the job, which has been read to its end."""

    def _say(self, words: str) -> None:
        self._emit(LogLine(group=self._service, host="status", text=words))

    def _emit(self, line: LogLine) -> None:
        self._waiting.append(line)
        if words := self._files.write(line):
            self._waiting.append(LogLine(group=self._service, host="status", text=words))

    def _close_files(self) -> None:
        self._files.close()


def full_disk(folder: Path) -> str:
    """Returns a warning where the disk of a folder is full; else nothing."""
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(folder).free:
            return f"no space is left for {folder}: its logs lack lines; the job goes on"
    return ""


class LogFiles:
    """Writes GROUP-HOST.log files; those of an earlier attempt are replaced.

    Args:
        folder: Made with the first line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[str]] = {}
        self._begun: set[str] = set()
        self._missing: Counter[str] = Counter()
        # A run may be stopped by another thread than the one that reads its lines.
        self._lock = threading.Lock()

    def write(self, line: LogLine) -> str:
        """Adds a line to its host's file, or leaves it out where the disk is full.

        Returns:
            What people are to know, once: that lines are left out, and later that they no longer
            are; else nothing. A log that cannot be kept must not end what it tells of.
        """
        # Both names come from a log: no name must lead out of the folder.
        name = f"{line.group}-{line.host}.log".replace("/", "_")
        with self._lock:
            try:
                self._add(name, line.text)
            except OSError as err:
                # It is opened again for the next line: what is in its buffer is lost.
                with contextlib.suppress(KeyError, OSError):
                    self._open.pop(name).close()
                self._missing[name] += 1
                if self._missing[name] > 1:
                    return ""
                return f"cannot write {self._folder / name}: {err.strerror}; the job goes on"
            missing = self._missing.pop(name, 0)
        if not missing:
            return ""
        return f"{self._folder / name} is written again; it lacks {missing} lines"

    def _add(self, name: str, text: str) -> None:
        if name not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            # A file that was closed in this run is continued, one of an earlier attempt is not.
            mode = "a" if name in self._begun else "w"
            self._open[name] = (self._folder / name).open(mode, encoding="utf-8")
            self._begun.add(name)
        file = self._open[name]
        file.write(text + "\n")
        # Others read the file while the job runs.
        file.flush()

    def close(self) -> None:
        """Closes the files, which the next line opens again; may be called twice."""
        with self._lock:
            for file in self._open.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._open.clear()


class FileTail:
    """Reads the whole lines that were added to a file after the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Returns the new lines, without their ends; with `is_last` also one that has no end."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            # The host has not written anything yet.
            except FileNotFoundError:
                return
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            # Of a progress bar, which may have no end of line for hours, the last state counts.
            states = self._rest.rstrip(b"\r").rfind(b"\r")
            self._rest = self._rest[max(0, states) :]
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
