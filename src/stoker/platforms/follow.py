"""The loop that follows a job on a service; its hosts' log files, and a file that grows, read."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

from stoker.errors import PlatformError, ServiceError, StokerError
from stoker.logs import EventName, Log
from stoker.platforms.base import JobEnd, JobSpec, LogLine, Run

# How long a terminal follows a job that it cannot see: control planes are upgraded while jobs run.
# A pipeline's step follows it for as long as the step may last.
UNREACHABLE_SECONDS = 900.0


class LogFiles:
    """GROUP-HOST.log files of a run; those of an earlier attempt are replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[str]] = {}
        self._written: set[str] = set()

    def write(self, line: LogLine) -> None:
        # Both names come from a log: no name must lead out of the folder.
        name = f"{line.group}-{line.host}.log".replace("/", "_")
        # On a full disk the job continues without its log; another thread may have closed it.
        with suppress(OSError, ValueError):
            if name not in self._open:
                self._folder.mkdir(parents=True, exist_ok=True)
                mode = "a" if name in self._written else "w"
                self._open[name] = (self._folder / name).open(mode, encoding="utf-8")
                self._written.add(name)
            self._open[name].write(line.text + "\n")
            self._open[name].flush()

    def close(self) -> None:
        """Closes the files, which the next line opens again; may be called twice."""
        while self._open:
            with suppress(OSError):
                self._open.popitem()[1].close()


class FileTail:
    """Whole lines that were added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Yields the new lines, without their ends; with `is_last` also an unfinished one."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        for piece in self._file:
            self._rest += piece
            if piece.endswith(b"\n"):
                yield self._rest.decode(errors="replace").rstrip("\r\n")
                self._rest = b""
        # A progress bar may have no line end for hours: its last state is kept.
        self._rest = self._rest[self._rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class FollowedRun(Run):
    """A submitted job; it is looked at only while `lines`, `wait` or `stop` runs.

    Args:
        name: Name of the job at its service.
        job: What was submitted.
        service: Name of the service, in lines that no host wrote.
        way_to_stop: The command that ends it.
        is_step: Whether a pipeline's step follows it, whose next attempt adopts it.
    """

    outlives_stoker = True

    def __init__(
        self,
        name: str,
        *,
        job: JobSpec,
        service: str,
        way_to_stop: str,
        is_step: bool,
    ) -> None:
        self.name = name
        self._service = service
        self._is_step = is_step
        self._way_back = f"the same command with --name {job.run_name}"
        self._way_to_stop = way_to_stop
        # Reasons of failed calls that were told.
        self._failures: set[str] = set()
        self._log = Log(run=job.name, host=service)
        self._files = LogFiles(job.run_dir / "logs")
        self._waiting: deque[LogLine] = deque()
        self._is_drained = False
        # Left to the next follower: `stop` does not end it.
        self._is_left = False
        # Why `stop` could not end the job.
        self._remains = ""
        self._end: JobEnd | None = None

    def lines(self) -> Iterator[LogLine]:
        """Yields log lines of all hosts and changes of the job's state, until the job has ended.

        Raises:
            JobStoppedError: If the hosts will never run.
            PlatformError: If the job cannot be seen for UNREACHABLE_SECONDS, except in a pipeline's
                step. It is left running.
        """
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

    def stop(self) -> None:
        """Stops the job unless it has ended or is left; blocks until its end, for minutes at most.

        What keeps it from ending is in `remaining`.
        """
        if not (self._is_left or self._has_ended or self._remains):
            try:
                self._stop()
            except StokerError as err:
                self._remains = err.what
                self._log.event(EventName.JOB_STOP_FAILED, job=self.name, why=err.what)
        self._close()

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
        return self._words_of_leaving

    def remaining(self) -> PlatformError | None:
        what = f"the job {self.name} is not stopped: {self._remains}"
        fix = f"stop it, its hosts may be billed: {self._way_to_stop}"
        return PlatformError(what, where=f"job {self.name}", fix=fix) if self._remains else None

    @property
    def _words_of_leaving(self) -> str:
        then = f"to follow it again: {self._way_back}; to stop it: {self._way_to_stop}"
        then = "the next attempt adopts it" if self._is_step else then
        return f"the job {self.name} keeps running; {then}"

    @property
    @abstractmethod
    def _has_ended(self) -> bool: ...

    def _is_cancelled(self) -> bool:
        """Returns whether the pipeline's run is known to be cancelled; blocks for seconds only."""
        return False

    def _endure(self, error: PlatformError, *, failing_seconds: float) -> None:
        """Reports a failed look at the job.

        Raises:
            PlatformError: If the last successful look is too long ago; the job is left.
        """
        if failing_seconds >= UNREACHABLE_SECONDS and not self._is_step:
            self._is_left = True
            self._files.close()
            raise PlatformError(
                f"{error.what}, for {failing_seconds / 60:.0f} minutes",
                where=error.where,
                fix="; ".join(filter(None, (error.fix, self._words_of_leaving))),
            ) from error
        self._tell_failure(error)

    def _tell_failure(self, error: PlatformError) -> None:
        """Tells of a failed call, once for each reason."""
        # Texts of services have ids that differ each time, but a missing right is named.
        reason = error.what
        if isinstance(error, ServiceError) and error.kind != "denied":
            reason = f"{error.kind} {error.code}"
        if reason not in self._failures:
            self._failures.add(reason)
            fix = f"; {error.fix}" if error.fix else ""
            self._say(f"{error.what}; retrying, and the job continues{fix}")

    @abstractmethod
    def _stop(self) -> None:
        """Stops the job and waits for its end; raises StokerError if it cannot."""

    def _close(self) -> None:
        self._files.close()

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
            self._files.write(line)
