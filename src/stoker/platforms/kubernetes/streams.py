"""Watches of a run's objects, and logs of its pods, read by threads until the run ends.

A log is requested from a whole second on, and its lines may be slightly out of order: so the lines
of the last seconds are kept, and skipped when they come again.

A watch breaks off often: servers end it after minutes, proxies sooner, and if its version is too
old (410 Gone) the objects are listed again. Callers see only what changed.

Polling, as on SageMaker, would lose last lines and exit codes of pods that are deleted
(benchmarks/following.py).
"""

import contextlib
import queue
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from json import JSONDecodeError, loads
from typing import Literal

from stoker.errors import ServiceError
from stoker.platforms.kubernetes.api import EVENTS, PODS, ByteStream, ClusterApi, Resource, text
from stoker.platforms.kubernetes.layout import JOBSET_LABEL
from stoker.platforms.kubernetes.pods import PodState
from stoker.records.base import Document, mapping
from stoker.repeat import Suppressed

# How much older a line may be than the one before it.
OVERLAP_SECONDS = 2

_TIME = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d) ?", re.ASCII)
# The server ends a watch after this; a longer silence means a dead connection.
WATCH_SECONDS = 60
WATCH_READ_SECONDS = WATCH_SECONDS + 15.0
# Between attempts; doubled each time, and reset by any data.
MIN_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 15.0
_TOO_OLD = "410"
# A silent training is normal; this long a silence may be a dead connection.
LOG_READ_SECONDS = 300.0
LOG_MAX_DELAY_SECONDS = 10.0
# How long to retry the log of a pod that has ended.
LAST_WORDS_SECONDS = 60.0
# Above it, threads that read logs wait.
MAX_WAITING = 10_000
_PUT_SECONDS = 0.5
# A closed reader ends at once unless it waits for the cluster.
_JOIN_SECONDS = 2.0


class LogPosition:
    """How much of a log has been read, whose lines are a time, a blank and the text."""

    def __init__(self) -> None:
        self._latest: datetime | None = None
        self._recent: deque[tuple[datetime, str]] = deque()
        self._again: Counter[str] = Counter()

    def query(self) -> dict[str, str]:
        """Returns the query of the next request; call it before each."""
        self._again = Counter(line for _, line in self._recent)
        if self._latest is None:
            return {}
        since = self._latest - timedelta(seconds=OVERLAP_SECONDS - 1)
        return {"sinceTime": since.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def take(self, line: str) -> str | None:
        """Returns the text of a line, or None if it was read before."""
        when, text = split_time(line)
        if self._again[line] > 0:
            self._again[line] -= 1
            return None
        if when is None:
            return text
        if self._latest is None or when > self._latest:
            self._latest = when
        self._recent.append((when, line))
        # Lines of the overlap come again after a reconnect, as `sinceTime` counts whole seconds.
        oldest = self._latest - timedelta(seconds=OVERLAP_SECONDS)
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return text


def split_time(line: str) -> tuple[datetime | None, str]:
    """Returns a line's time (UTC, whole seconds; None if it has none) and text."""
    if match := _TIME.match(line):
        with contextlib.suppress(ValueError):
            when = datetime.fromisoformat(match[1] + match[2]).astimezone(UTC)
            return when, line[match.end() :]
    return None, line


@dataclass(frozen=True, slots=True)
class ObjectNews:
    """Objects of one kind: all existing ones, changed ones, or deleted ones."""

    resource: Resource
    what: Literal["all", "changed", "deleted"]
    items: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class WatchError:
    """A failed watch, which is retried; the last successful one was `failing_seconds` ago."""

    resource: Resource
    error: ServiceError
    failing_seconds: float


class StreamReader(threading.Thread):
    """A thread that reads streams of a cluster, one after the other, until it is closed."""

    def __init__(self, cluster: ClusterApi, *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._cluster = cluster
        self._is_closed = threading.Event()
        self._stream: ByteStream | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the reading; may be called twice, by any thread."""
        self._is_closed.set()
        with self._lock:
            if self._stream:
                self._stream.close()

    def _lines(self, stream: ByteStream) -> Iterator[tuple[str, bool]]:
        with self._lock:
            self._stream = stream
            # Closed while the stream was being opened.
            if self._is_closed.is_set():
                stream.close()
        try:
            yield from stream.lines()
        finally:
            with self._lock:
                self._stream = None
            stream.release()


class ObjectWatch(StreamReader):
    """A thread that reports changes of objects by calling `tell`, which may block."""

    def __init__(
        self,
        cluster: ClusterApi,
        resource: Resource,
        *,
        query: Mapping[str, str],
        tell: Callable[[ObjectNews | WatchError], None],
    ) -> None:
        super().__init__(cluster, name=f"watch {resource.plural}")
        self._resource = resource
        self._query = dict(query)
        self._tell = tell
        self._has_news = False

    def run(self) -> None:
        """Watches until it is closed."""
        version = ""
        delay = MIN_DELAY_SECONDS
        reached_at = self._cluster.clock()
        while not self._is_closed.is_set():
            self._has_news = False
            try:
                if not version:
                    items, version = self._cluster.list(self._resource, query=self._query)
                    self._tell(ObjectNews(self._resource, "all", tuple(items)))
                version = self._watch(version)
                reached_at = self._cluster.clock()
            except ServiceError as err:
                if err.code == _TOO_OLD:
                    version = ""
                elif not self._is_closed.is_set():
                    failing_seconds = self._cluster.clock() - reached_at
                    self._tell(WatchError(self._resource, err, failing_seconds))
            delay = min(delay * 2, MAX_DELAY_SECONDS)
            if self._has_news:
                delay = MIN_DELAY_SECONDS
            self._is_closed.wait(delay)

    def _watch(self, version: str) -> str:
        """Watches until the server ends it; returns the version to continue from."""
        query = {
            **self._query,
            "watch": "true",
            # They renew the version where nothing changes; otherwise it is soon too old (410).
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        stream = self._cluster.open(self._resource, query=query, read_seconds=WATCH_READ_SECONDS)
        # Where it breaks off, the next watch continues.
        with Suppressed("away"):
            for line, is_whole in self._lines(stream):
                if is_whole and line:
                    self._has_news = True
                    version = self._take(line) or version
        return version

    def _take(self, line: str) -> str:
        """Reports an event of the watch; returns its version."""
        try:
            event = loads(line)
        except JSONDecodeError:
            return ""
        item = mapping(event, "object")
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._tell(ObjectNews(self._resource, "changed", (item,)))
            case "DELETED":
                self._tell(ObjectNews(self._resource, "deleted", (item,)))
            case "ERROR":
                # Whatever the reason is, the objects are listed again.
                raise ServiceError(text(item, "message"), code=_TOO_OLD)
        return text(item, "metadata", "resourceVersion")


@dataclass(frozen=True, slots=True)
class LogText:
    """A line of a pod's log."""

    pod: PodState
    text: str


@dataclass(frozen=True, slots=True)
class LogLost:
    """Why the rest of a pod's log is missing."""

    pod: PodState
    error: ServiceError


class PodLog(StreamReader):
    """A thread that reads the log of a started pod's container; `tell` may block."""

    def __init__(
        self,
        cluster: ClusterApi,
        pod: PodState,
        *,
        container: str,
        tell: Callable[[LogText | LogLost], None],
    ) -> None:
        super().__init__(cluster, name=f"log {pod.name}")
        self._pod = pod
        self._container = container
        self._tell = tell
        self._is_changed = threading.Event()
        self._position = LogPosition()
        self._told = False
        self._is_deleted = False
        # Whether it was read after the pod's end, to its last line.
        self.is_whole = False

    def update(self, pod: PodState, *, is_deleted: bool = False) -> None:
        """Takes the pod's new state: a log is complete when it was read after the pod's end."""
        self._pod = pod
        self._is_deleted = is_deleted
        self._is_changed.set()

    def close(self) -> None:
        super().close()
        self._is_changed.set()

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
                # A new container has a new log: first the rest of the old one.
                if pod.restarts > restarts:
                    restarts = pod.restarts
                    try:
                        self._read(is_final=True, previous=True)
                    except ServiceError as err:
                        # 400: nodes keep at most one ended container.
                        if err.code != "400":
                            raise
                is_complete = self._read(is_final=pod.is_final)
                failing_since = None
                if is_complete and pod.is_final:
                    self.is_whole = True
                    return
            except ServiceError as err:
                if self._is_closed.is_set():
                    return
                now = self._cluster.clock()
                failing_since = now if failing_since is None else failing_since
                # A log is deleted with its pod.
                if err.kind == "missing" and self._is_deleted:
                    return
                if pod.is_final and now >= failing_since + LAST_WORDS_SECONDS:
                    self._tell(LogLost(pod, err))
                    return
            delay = MIN_DELAY_SECONDS if self._told else min(delay * 2, LOG_MAX_DELAY_SECONDS)
            self._is_changed.wait(delay)

    def _read(self, *, is_final: bool, previous: bool = False) -> bool:
        """Reads and follows the log; returns whether it came to its end."""
        query = {"container": self._container, "timestamps": "true", **self._position.query()}
        query |= {"previous": "true"} if previous else {"follow": "true"}
        stream = self._cluster.open(
            PODS, self._pod.name, part="log", query=query, read_seconds=LOG_READ_SECONDS
        )
        with Suppressed("away"):
            for line, is_whole in self._lines(stream):
                # A kubelet's error in place of the rest of a log: without a time and a line end.
                if not is_whole and split_time(line)[0] is None:
                    raise ServiceError(line, kind="missing")
                # A partial line of a log that continues comes again as a whole one.
                if is_whole or is_final:
                    self._take(line)
            return True
        return False

    def _take(self, line: str) -> None:
        text = self._position.take(line)
        if text is not None:
            self._told = True
            self._tell(LogText(self._pod, text.rstrip("\r")))


Item = ObjectNews | WatchError | LogText | LogLost


class Following:
    """The threads that watch a run, and the queue of their news.

    Args:
        containers: Group to the name of its pods' container.
    """

    def __init__(
        self, cluster: ClusterApi, *, resource: Resource, name: str, containers: Mapping[str, str]
    ) -> None:
        self._cluster = cluster
        self._containers = dict(containers)
        self._items: queue.Queue[Item] = queue.Queue(MAX_WAITING)
        self._is_closed = threading.Event()
        self._logs: dict[str, PodLog] = {}
        self._starting = threading.Lock()
        self._of_pods = {"labelSelector": f"{JOBSET_LABEL}={name}"}
        job = {"fieldSelector": f"metadata.name={name}"}
        # Events of the whole namespace: no selector covers the job, its pods and Kueue's workload.
        watched = ((resource, job), (PODS, self._of_pods), (EVENTS, dict[str, str]()))
        self._watches = [ObjectWatch(cluster, r, query=q, tell=self._put) for r, q in watched]
        self._is_begun = False

    def begin(self) -> None:
        """Starts the watches; may be called again."""
        if not self._is_begun and not self._is_closed.is_set():
            self._is_begun = True
            for watch in self._watches:
                watch.start()

    def next(self, seconds: float) -> Item | None:
        """Returns the next news, or None if there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._items.get(timeout=seconds)
        return None

    @property
    def is_empty(self) -> bool:
        return self._items.empty()

    def pods_now(self) -> ObjectNews:
        items, _ = self._cluster.list(PODS, query=self._of_pods)
        return ObjectNews(PODS, "all", tuple(items))

    def follow(self, pod: PodState, *, is_deleted: bool = False) -> None:
        """Follows the log of a pod once its container has started, or updates its reader."""
        if pod.uid in self._logs:
            self._logs[pod.uid].update(pod, is_deleted=is_deleted)
        elif pod.is_started:
            log = PodLog(self._cluster, pod, container=self._containers[pod.group], tell=self._put)
            # It is started before `close` collects the threads, or never.
            with self._starting:
                if not self._is_closed.is_set():
                    log.start()
                    self._logs[pod.uid] = log

    def is_read(self, uids: frozenset[str]) -> bool:
        """Returns whether the logs of these pods were read to their end."""
        return not any(uid in uids and log.is_alive() for uid, log in tuple(self._logs.items()))

    def is_whole(self, uid: str) -> bool:
        return uid in self._logs and self._logs[uid].is_whole

    def await_logs(self, seconds: float) -> None:
        """Blocks until all logs were read to their end, `seconds` at most."""
        deadline = self._cluster.clock() + seconds
        for log in tuple(self._logs.values()):
            log.join(max(0.0, deadline - self._cluster.clock()))

    def close(self) -> None:
        """Ends all threads; queued news can still be read. May be called twice."""
        with self._starting:
            self._is_closed.set()
            threads: list[StreamReader] = [*self._watches, *self._logs.values()]
        for thread in threads:
            thread.close()
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _put(self, item: Item) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=_PUT_SECONDS)
                return
            if self._is_closed.is_set():
                return
