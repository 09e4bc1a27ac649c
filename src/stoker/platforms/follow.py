"""A job on a service is followed from here: it is looked at again and again, to its end.

There is one loop for all services. What a look is differs: SageMaker is asked, Kubernetes tells.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from stoker.logs import Log
from stoker.platforms.base import JobEnd, LogLine
from stoker.platforms.logs import LogFiles

# A service may be out of reach for so long: control planes are upgraded while jobs run.
UNREACHABLE_SECONDS = 900.0


class FollowedRun(ABC):
    """A submitted job. Nothing runs here but what `lines`, `wait` and `stop` do.

    Args:
        name: Of the job, as its service calls it.
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
        self._end: JobEnd | None = None

    def lines(self) -> Iterator[LogLine]:
        """Yields log lines of all hosts and what becomes of them, until the job has ended.

        Raises:
            PlatformError: If the hosts will never run, the job is not to be found, or the service
                refuses, or does not answer for UNREACHABLE_SECONDS.
        """
        self._begin()
        while True:
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
        self._files.write(line)
        self._waiting.append(line)

    def _close_files(self) -> None:
        self._files.close()
