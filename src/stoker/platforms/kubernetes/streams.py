"""Objects are watched, and logs of pods followed, for as long as it takes.

A log is asked for from a time on, in whole seconds, and lines of several writers come a little out
of the order of their times: so the lines of the last seconds are kept, and left out when they come
again.

A watch breaks off all the time: servers end it after minutes, proxies sooner, and a version that is
too old (410 Gone) means to list anew. Callers hear only of what has changed.
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

from stoker.errors import ServiceError
from stoker.platforms.follow import UNREACHABLE_SECONDS
from stoker.platforms.kubernetes.api import (
    EVENTS,
    PODS,
    Action,
    ByteStream,
    ClusterApi,
    Resource,
    failed,
    text,
)
from stoker.platforms.kubernetes.objects import JOBSET_LABEL
from stoker.platforms.kubernetes.pods import (
    PodState,
)
from stoker.records.base import Document, mapping

# A line may be that much older than one that came before it.
OVERLAP_SECONDS = 2

_TIME = re.compile(
    r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?", re.ASCII
)
# After it the server ends a watch, and a dead connection is noticed.
WATCH_SECONDS = 60
WATCH_READ_SECONDS = WATCH_SECONDS + 15.0
# Between attempts, doubling, back to the first with the first thing that comes.
MIN_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 15.0
_TOO_OLD = "410"
# A training may be silent for long; a dead connection is noticed after this.
LOG_READ_SECONDS = 300.0
LOG_MAX_DELAY_SECONDS = 10.0
# How long the log of a pod that has ended is asked for while the cluster does not answer.
LAST_WORDS_SECONDS = 60.0
# Beyond it threads that read logs wait, and so does the cluster.
MAX_WAITING = 10_000
_PUT_SECONDS = 0.5
# A closed reader ends at once, unless it waits for its cluster.
_JOIN_SECONDS = 2.0


class LogPosition:
    """Remembers how much of a log has been read.

    The lines are those that Kubernetes gives with `timestamps=true`: a time, a blank, the text.
    """

    def __init__(self) -> None:
        self._latest: datetime | None = None
        self._recent: deque[tuple[datetime, str]] = deque()
        self._again: Counter[str] = Counter()

    def query(self) -> dict[str, str]:
        """Returns the query of the next request; called before each reading."""
        self._again = Counter(line for _, line in self._recent)
        if self._latest is None:
            return {}
        since = self._latest - timedelta(seconds=OVERLAP_SECONDS - 1)
        return {"sinceTime": since.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def take(self, line: str) -> str | None:
        """Returns the text of a line; None if it has been read before."""
        when, text = split_time(line)
        if self._again[line] > 0:
            self._again[line] -= 1
            return None
        if when is None:
            return text
        if self._latest is None or when > self._latest:
            self._latest = when
        self._recent.append((when, line))
        oldest = self._latest - timedelta(seconds=OVERLAP_SECONDS)
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return text


def split_time(line: str) -> tuple[datetime | None, str]:
    """Returns time (to the second, in UTC) and text of a line; no time where it has none."""
    found = _TIME.match(line)
    if not found:
        return None, line
    zone = "+00:00" if found.group(3) == "Z" else found.group(3)
    try:
        when = datetime.fromisoformat(found.group(1) + zone).astimezone(UTC)
    except ValueError:
        return None, line
    return when, line[found.end() :]


class StreamSlot:
    """Holds the stream that is read now, if any."""

    def __init__(self) -> None:
        self._stream: ByteStream | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Closes what is read now and what would be read later; may be called twice."""
        with self._lock:
            self._is_closed = True
            if self._stream:
                self._stream.close()

    @contextlib.contextmanager
    def reading(self, stream: ByteStream) -> Iterator[ByteStream]:
        """Holds `stream` while the context lasts, then releases it."""
        with self._lock:
            self._stream = stream
            # It was closed while the stream was being opened.
            if self._is_closed:
                stream.close()
        try:
            yield stream
        finally:
            with self._lock:
                self._stream = None
            stream.release()


@dataclass(frozen=True, slots=True)
class Listed:
    """Holds all objects that there are now; what was there and is not among them is gone."""

    resource: Resource
    items: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """An object is new, or is not what it was."""

    resource: Resource
    item: Document


@dataclass(frozen=True, slots=True)
class Gone:
    """An object was deleted; `item` is what it was last."""

    resource: Resource
    item: Document


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing more can be learned of these objects."""

    resource: Resource
    error: ServiceError


@dataclass(frozen=True, slots=True)
class Disturbed:
    """The cluster does not answer; it is asked again."""

    resource: Resource
    error: ServiceError


News = Listed | Changed | Gone | Lost | Disturbed


class ObjectWatch(threading.Thread):
    """Tells changes of the objects that `query` selects, from a thread of its own.

    Args:
        cluster: Cluster that has them.
        resource: Their kind.
        query: Selectors.
        tell: Called with each piece of news; may block.
    """

    def __init__(
        self,
        cluster: ClusterApi,
        resource: Resource,
        *,
        query: Mapping[str, str],
        tell: Callable[[News], None],
    ) -> None:
        super().__init__(name=f"watch {resource.plural}", daemon=True)
        self._cluster = cluster
        self._resource = resource
        self._query = dict(query)
        self._tell = tell
        self._is_closed = threading.Event()
        self._slot = StreamSlot()
        self._has_news = False

    def close(self) -> None:
        """Ends the watch; may be called twice, by any thread."""
        self._is_closed.set()
        self._slot.close()

    def run(self) -> None:
        """Watches until it is closed, or the cluster refuses."""
        version = ""
        delay = MIN_DELAY_SECONDS
        reached_at = self._cluster.clock()
        while not self._is_closed.is_set():
            self._has_news = False
            try:
                if not version:
                    items, version = self._cluster.list(self._resource, query=self._query)
                    self._tell(Listed(self._resource, tuple(items)))
                version = self._watch(version)
                reached_at = self._cluster.clock()
            except ServiceError as err:
                if err.code == _TOO_OLD:
                    version = ""
                elif err.kind not in ("away", "stale") or self._is_lost(reached_at):
                    if not self._is_closed.is_set():
                        self._tell(Lost(self._resource, err))
                    return
                elif not self._is_closed.is_set():
                    self._tell(Disturbed(self._resource, err))
            delay = MIN_DELAY_SECONDS if self._has_news else min(delay * 2, MAX_DELAY_SECONDS)
            self._is_closed.wait(delay)

    def _is_lost(self, reached_at: float) -> bool:
        return self._cluster.clock() >= reached_at + UNREACHABLE_SECONDS

    def _watch(self, version: str) -> str:
        """Watches until the server ends it; returns the version to go on from."""
        query = {
            **self._query,
            "watch": "true",
            # They renew the version where nothing changes; else it would soon be too old (410).
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        stream = self._cluster.open(self._resource, query=query, read_seconds=WATCH_READ_SECONDS)
        try:
            with self._slot.reading(stream):
                for line, is_whole in stream.lines():
                    if not is_whole or not line:
                        continue
                    self._has_news = True
                    version = self._take(line) or version
        except ServiceError as err:
            # Broken off: what came so far counts, and the next watch continues from there.
            if err.kind != "away":
                raise
        return version

    def _take(self, line: str) -> str:
        """Tells what a line of the watch says; returns its version."""
        try:
            event = loads(line)
        except JSONDecodeError:
            return ""
        item = mapping(event, "object")
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._tell(Changed(self._resource, item))
            case "DELETED":
                self._tell(Gone(self._resource, item))
            case "ERROR":
                raise _error(item, self._resource, self._cluster.namespace)
        return text(mapping(item, "metadata"), "resourceVersion")


def _error(status: Document, resource: Resource, namespace: str) -> ServiceError:
    action = Action(
        verb="watch", group=resource.group, resource=resource.plural, namespace=namespace
    )
    # Whatever the reason is: a watch that cannot continue starts again.
    return failed(text(status, "message"), action, code=_TOO_OLD, kind="refused")


@dataclass(frozen=True, slots=True)
class LogText:
    """A pod wrote this line to its log."""

    pod: PodState
    text: str


@dataclass(frozen=True, slots=True)
class LogLost:
    """A pod's log cannot be read to its end."""

    pod: PodState
    error: ServiceError


class PodLog(threading.Thread):
    """Tells the lines of a pod's container, from a thread of its own.

    Args:
        cluster: Cluster that runs it.
        pod: The one whose container has started.
        container: Its name.
        tell: Called with each line; may block.
    """

    def __init__(
        self,
        cluster: ClusterApi,
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
        """Takes the pod's state; a log is at its end when it was read after its pod's end."""
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
                # A new container has a new log: the rest of the old one comes first.
                if pod.restarts > restarts:
                    restarts = pod.restarts
                    self._read_previous()
                is_complete = self._read(is_final=pod.is_final)
                failing_since = None
                if is_complete and pod.is_final:
                    return
            except ServiceError as err:
                # With a pod its log is gone, too.
                if err.kind == "missing" or self._is_closed.is_set():
                    return
                # 400: the container that is started again has not started yet.
                if err.kind not in ("away", "stale") and err.code != "400":
                    self._tell(LogLost(pod, err))
                    return
                now = self._cluster.clock()
                failing_since = now if failing_since is None else failing_since
                if pod.is_final and now >= failing_since + LAST_WORDS_SECONDS:
                    self._tell(LogLost(pod, err))
                    return
            delay = MIN_DELAY_SECONDS if self._told else min(delay * 2, LOG_MAX_DELAY_SECONDS)
            self._is_changed.wait(delay)

    def _read_previous(self) -> None:
        """Reads the rest of the previous container's log, if there is one."""
        try:
            self._read(is_final=True, previous=True)
        except ServiceError as err:
            # Nodes keep at most one container that has ended.
            if err.code != "400":
                raise

    def _read(self, *, is_final: bool, previous: bool = False) -> bool:
        """Reads the log so far and what follows; returns whether it came to its end."""
        query = {"container": self._container, "timestamps": "true", **self._position.query()}
        query |= {"previous": "true"} if previous else {"follow": "true"}
        stream = self._cluster.open(
            PODS, self._pod.name, part="log", query=query, read_seconds=LOG_READ_SECONDS
        )
        try:
            with self._slot.reading(stream):
                for line, is_whole in stream.lines():
                    # Half a line of a log that continues comes again as a whole one.
                    if is_whole or is_final:
                        self._take(line)
        except ServiceError as err:
            if err.kind != "away":
                raise
            return False
        return True

    def _take(self, line: str) -> None:
        text = self._position.take(line)
        if text is not None:
            self._told = True
            self._tell(LogText(self._pod, text.rstrip("\r")))


Item = News | LogText | LogLost


class Following:
    """Watches a run with threads of its own until it is closed.

    Args:
        cluster: Cluster that runs it.
        resource: JobSets or TrainJobs.
        name: Name of the run's objects.
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
        self._watches = [
            ObjectWatch(cluster, kind, query=query, tell=self._put)
            for kind, query in (
                (resource, {"fieldSelector": f"metadata.name={name}"}),
                (PODS, self._of_pods),
                # Of the whole namespace: one selector cannot name the job, its pods to come and
                # Kueue's workload.
                (EVENTS, {}),
            )
        ]
        self._is_begun = False

    def begin(self) -> None:
        """Starts the watches; may be called again."""
        if not self._is_begun and not self._is_closed.is_set():
            self._is_begun = True
            for watch in self._watches:
                watch.start()

    def next(self, seconds: float) -> Item | None:
        """Returns the next piece of news; None if there is none within `seconds`."""
        try:
            return self._items.get(timeout=seconds)
        except queue.Empty:
            return None

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no news at this moment."""
        return self._items.empty()

    def pods_now(self) -> Listed:
        """Returns the run's pods, asked for now.

        Raises:
            ServiceError: If the cluster refuses, or does not answer.
        """
        items, _ = self._cluster.list(PODS, query=self._of_pods)
        return Listed(PODS, tuple(items))

    def follow(self, pod: PodState) -> None:
        """Follows the log of a pod whose container has started, or updates its reader."""
        if pod.uid in self._logs:
            self._logs[pod.uid].update(pod)
        elif pod.is_started:
            container = self._containers[pod.group]
            log = PodLog(self._cluster, pod, container=container, tell=self._put)
            # A thread that closes finds it started, or it never starts.
            with self._starting:
                if not self._is_closed.is_set():
                    log.start()
                    self._logs[pod.uid] = log

    def is_read(self, uids: frozenset[str]) -> bool:
        """Returns whether the logs of these pods have been read to their end."""
        return not any(uid in uids and log.is_alive() for uid, log in tuple(self._logs.items()))

    def await_logs(self, seconds: float) -> None:
        """Blocks until all logs have been read to their end, `seconds` at most."""
        deadline = self._cluster.clock() + seconds
        for log in tuple(self._logs.values()):
            log.join(max(0.0, deadline - self._cluster.clock()))

    def close(self) -> None:
        """Ends all threads; news that they have put can still be read. May be called twice."""
        with self._starting:
            self._is_closed.set()
            threads: list[ObjectWatch | PodLog] = [*self._watches, *self._logs.values()]
        for thread in threads:
            thread.close()
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _put(self, item: Item) -> None:
        while True:
            try:
                self._items.put(item, timeout=_PUT_SECONDS)
                break
            except queue.Full:
                if self._is_closed.is_set():
                    break
