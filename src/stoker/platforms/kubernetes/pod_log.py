"""The log of a pod, followed by a thread and resumed by time where it breaks off."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from stoker.errors import ServiceError
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import PodStatus
from stoker.platforms.log_files import take_lines

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

# Between attempts; doubled each time, and reset by any line.
MIN_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 10.0
# How long to retry the log of a pod that has ended.
LAST_WORDS_SECONDS = 60.0
# How much further back than its last line a log is asked for: the cluster's clock is another one.
OVERLAP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class PodLine:
    """A line of a pod's log; or, with an `error`, why the rest of it is missing."""

    pod: PodStatus
    text: str
    error: ServiceError | None = None


def split_time(line: str) -> tuple[str, str]:
    """Returns a line's time (RFC 3339 with nanoseconds) and text; an empty time: it has none."""
    when, _, text = line.partition(" ")
    try:
        datetime.fromisoformat(when)
    except ValueError:
        return "", line
    return when, text


class PodLog(threading.Thread):
    """A thread that puts the lines of a started pod's container into a queue, each once.

    A log is complete when it was read after the pod's end. Lines that are not newer than the last
    one are skipped where it is read again.
    """

    def __init__(
        self, cluster: ClusterApi, pod: PodStatus, *, lines: "queue.Queue[PodLine]"
    ) -> None:
        super().__init__(name=f"log {pod.name}", daemon=True)
        self.pod = pod
        # Whether it was read after the pod's end, to its last line.
        self.is_whole = False
        self._cluster = cluster
        self._lines = lines
        self._response: BaseHTTPResponse | None = None
        self._last = ""
        self._has_ended = threading.Event()
        self._is_closed = threading.Event()
        # Wakes up the thread between two attempts.
        self._changed = threading.Event()

    def end(self) -> None:
        """Tells the thread that the pod has ended, or is gone."""
        self._has_ended.set()
        self._changed.set()

    def close(self) -> None:
        """Ends the reading; may be called twice, by any thread."""
        self._is_closed.set()
        self._changed.set()
        # Wakes up a reader that waits for a line (urllib3 2.3 and newer).
        with suppress(Exception):
            assert self._response
            self._response.shutdown()

    def run(self) -> None:
        """Reads until the pod's end."""
        delay = MIN_DELAY_SECONDS
        failing_since: float | None = None
        while not self._is_closed.is_set():
            is_last = self._has_ended.is_set()
            self._changed.clear()
            before = self._last
            try:
                self._read()
                if is_last:
                    self.is_whole = True
                    return
                failing_since = None
            except ServiceError as err:
                now = self._cluster.clock()
                failing_since = failing_since or now
                # A log is deleted with its pod.
                if err.kind == "missing" and is_last:
                    return
                if is_last and now >= failing_since + LAST_WORDS_SECONDS:
                    self._put(PodLine(self.pod, "", err))
                    return
            delay = min(2 * delay, MAX_DELAY_SECONDS)
            if self._last != before:
                delay = MIN_DELAY_SECONDS
            self._changed.wait(delay)

    def _read(self) -> None:
        response = self._cluster.open_log(
            self.pod.name, container=self.pod.group.job, since_seconds=self._since_seconds()
        )
        self._response = response
        try:
            with self._cluster.explained("get pods/log"):
                for line in _lines_of(response):
                    if self._is_closed.is_set():
                        return
                    self._take(line)
        finally:
            self._response = None
            response.close()

    def _since_seconds(self) -> int | None:
        """Returns how far back the log is asked for; None: from its beginning."""
        if not self._last:
            return None
        last = datetime.fromisoformat(self._last).astimezone(UTC)
        return max(0, int(time.time() - last.timestamp())) + OVERLAP_SECONDS

    def _take(self, line: str) -> None:
        when, text = split_time(line)
        if not when:
            # A kubelet's error in place of the rest of a log.
            raise ServiceError(line, kind="away")
        if when > self._last:
            self._last = when
            self._put(PodLine(self.pod, text.rstrip("\r")))

    def _put(self, line: PodLine) -> None:
        while not self._is_closed.is_set():
            with suppress(queue.Full):
                self._lines.put(line, timeout=0.5)
                return


def _lines_of(response: "BaseHTTPResponse") -> Iterator[str]:
    rest = bytearray()
    for chunk in response.stream(None):
        for line in take_lines(rest, chunk):
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
