"""Following the log of one pod, from its first line to its last."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from stoker.platforms.kubernetes.api import Cluster
from stoker.platforms.kubernetes.api_errors import ApiError
from stoker.platforms.kubernetes.log_position import LogPosition
from stoker.platforms.kubernetes.pod_state import PodState
from stoker.platforms.kubernetes.resources import PODS
from stoker.platforms.kubernetes.stream_slot import StreamSlot

# A training may be silent for long; a connection that has died without a word is found out so.
SILENT_SECONDS = 300.0
MIN_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 10.0
# How long the log of a pod that has ended is asked for while the cluster does not answer.
LAST_WORDS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LogText:
    """A line of a pod's log."""

    pod: PodState
    text: str


@dataclass(frozen=True, slots=True)
class LogLost:
    """A pod's log cannot be read to its end."""

    pod: PodState
    error: ApiError


class PodLog(threading.Thread):
    """Tells the lines of a pod's container, from a thread of its own.

    Args:
        cluster: That runs it.
        pod: Whose container has started.
        container: Its name.
        tell: Is called with each line; may block.
    """

    def __init__(
        self,
        cluster: Cluster,
        pod: PodState,
        *,
        container: str,
        tell: Callable[[LogText | LogLost], None],
    ) -> None:
        super().__init__(name=f"log {pod.name}", daemon=True)
        self._cluster = cluster
        self._pod = pod
        self._container = container
        self._tell = tell
        self._is_closed = threading.Event()
        self._is_changed = threading.Event()
        self._position = LogPosition()
        self._slot = StreamSlot()
        self._told = False

    def update(self, pod: PodState) -> None:
        """What the pod is now; a log is at its end when it was read after its pod's end."""
        self._pod = pod
        self._is_changed.set()

    def close(self) -> None:
        """Ends the reading; may be called twice, by any thread."""
        self._is_closed.set()
        self._is_changed.set()
        self._slot.close()

    def run(self) -> None:
        """Reads until the pod's end."""
        delay = MIN_DELAY_SECONDS
        restarts = 0
        failing_since: float | None = None
        while not self._is_closed.is_set():
            pod = self._pod
            self._is_changed.clear()
            self._told = False
            try:
                if pod.restarts > restarts:
                    restarts = pod.restarts
                    self._read_previous()
                is_complete = self._read(is_final=pod.is_final)
                failing_since = None
                if is_complete and pod.is_final:
                    return
            except ApiError as err:
                if err.is_missing or self._is_closed.is_set():
                    return
                # 400: the container that is started again has not started yet.
                if not err.is_passing and err.code != 400:
                    self._tell(LogLost(pod, err))
                    return
                now = self._cluster.clock()
                failing_since = now if failing_since is None else failing_since
                if pod.is_final and now >= failing_since + LAST_WORDS_SECONDS:
                    self._tell(LogLost(pod, err))
                    return
            delay = MIN_DELAY_SECONDS if self._told else min(delay * 2, MAX_DELAY_SECONDS)
            self._is_changed.wait(delay)

    def _read_previous(self) -> None:
        """Reads the end of the container that went before, if that is there, and not read yet."""
        try:
            self._read(is_final=True, previous=True)
        except ApiError as err:
            # Nodes keep one container that has ended, or none.
            if err.code != 400:
                raise

    def _read(self, *, is_final: bool, previous: bool = False) -> bool:
        """Reads what there is, and what comes; gives whether it came to a whole end."""
        query = {"container": self._container, "timestamps": "true", **self._position.query()}
        query |= {"previous": "true"} if previous else {"follow": "true"}
        stream = self._cluster.open(
            PODS, self._pod.name, part="log", query=query, read_seconds=SILENT_SECONDS
        )
        try:
            with self._slot.reading(stream):
                for line, is_whole in stream.lines():
                    # Half a line of a log that goes on comes again as a whole one.
                    if is_whole or is_final:
                        self._take(line)
        except ApiError as err:
            if not err.is_passing:
                raise
            return False
        return True

    def _take(self, line: str) -> None:
        text = self._position.take(line)
        if text is not None:
            self._told = True
            self._tell(LogText(self._pod, text.rstrip("\r")))
