"""A job on a cluster, followed from here: its states, its pods and their logs, to its end."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

from stoker.errors import PlatformError, StokerError
from stoker.logs import Log
from stoker.platforms.base import JobEnd, LogLine
from stoker.platforms.kubernetes.api import Cluster
from stoker.platforms.kubernetes.api_errors import ApiError
from stoker.platforms.kubernetes.ending import conclude
from stoker.platforms.kubernetes.following import Following
from stoker.platforms.kubernetes.picture import SERVICE, Picture
from stoker.platforms.kubernetes.pod_logs import LogLost, LogText
from stoker.platforms.kubernetes.reading import text
from stoker.platforms.kubernetes.request import KubernetesRequest
from stoker.platforms.kubernetes.resources import EVENTS, OF_KIND
from stoker.platforms.kubernetes.rights import explained_denial
from stoker.platforms.kubernetes.start import Started, delete_and_wait
from stoker.platforms.kubernetes.troubles import TroubleLog
from stoker.platforms.kubernetes.watching import Changed, Disturbed, Gone, Listed, Lost
from stoker.platforms.log_files import LogFiles
from stoker.platforms.output_lines import OutputParts
from stoker.records import Event

# Between looks at what lasts.
TICK_SECONDS = 0.25
# The same trouble is told again after it.
REPEAT_SECONDS = 600.0
# After the job's end, until the dnn hosts' logs have been read, and then the data hosts'.
DRAIN_SECONDS = 60.0
DATA_DRAIN_SECONDS = 15.0
# Beyond the pods' grace, until a deleted job is gone.
STOP_SECONDS = 60.0
# After that, for the last lines of its hosts.
LAST_LINES_SECONDS = 10.0


class KubernetesRun:
    """A submitted job.

    Args:
        cluster: That runs it.
        request: What was submitted.
        started: What came of it.
    """

    def __init__(self, cluster: Cluster, *, request: KubernetesRequest, started: Started) -> None:
        layout = request.layout
        self.name = request.name
        self.is_adopted = started.is_adopted
        self._cluster = cluster
        self._layout = layout
        self._uid = started.uid
        self._resource = OF_KIND[text(request.main, "kind")]
        self._log = Log(run=request.job.name, host=SERVICE)
        self._files = LogFiles(layout.job.run_dir / "logs")
        self._output = OutputParts()
        self._picture = Picture(
            layout,
            main=self._resource,
            uid=started.uid,
            since=started.created_at,
        )
        self._troubles = TroubleLog(repeat_seconds=REPEAT_SECONDS)
        self._following = Following(
            cluster,
            resource=self._resource,
            name=self.name,
            containers={group.group.name: group.job for group in layout.groups},
        )
        self._queue: deque[LogLine] = deque()
        self._disturbed: set[str] = set()
        self._is_stopped = threading.Event()
        # Nothing more comes but what has been read.
        self._is_let_go = threading.Event()
        self._looked_at = float("-inf")
        self._ended_at: float | None = None
        self._read_at: float | None = None
        self._is_drained = False
        self._end: JobEnd | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened so far that only the cluster sees."""
        return tuple(self._picture.events)

    def lines(self) -> Iterator[LogLine]:
        """Log lines of all hosts and what becomes of them; ends when the job has ended.

        Raises:
            PlatformError: If the hosts will never run (no such image, say), a right is missing, or
                the cluster does not answer for UNREACHABLE_SECONDS.
        """
        self._following.begin()
        while True:
            while self._queue:
                yield self._queue.popleft()
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
            state = self._picture.state
            self._end = conclude(
                state if state and state.has_ended else None,
                is_stopped=self._is_stopped.is_set(),
                layout=self._layout,
                pods=self._picture.all_pods,
                output=self._output,
                events=self.events,
                log=self._log,
            )
        return self._end

    def stop(self) -> None:
        """Deletes the job unless it has ended, and blocks until its pods are gone.

        That is STOP_SECONDS beyond their grace at most. May be called twice and by another thread
        than that which reads the lines, and never raises: what hinders it is logged.
        """
        state = self._picture.state
        if self._is_stopped.is_set() or self._picture.is_gone or (state and state.has_ended):
            self._close()
            return
        self._is_stopped.set()
        seconds = self._layout.settings.grace_seconds + STOP_SECONDS
        try:
            self._log.event("job_is_stopping", job=self.name, at_most_seconds=seconds)
            is_gone = delete_and_wait(
                self._cluster, self._resource, self.name, uid=self._uid, seconds=seconds
            )
            self._log.event("job_is_deleted" if is_gone else "job_still_stops", job=self.name)
        except StokerError as err:
            self._log.event("job_not_deleted", job=self.name, why=err.what)
        self._following.await_logs(LAST_LINES_SECONDS)
        self._picture.is_gone = True
        self._is_let_go.set()
        self._close()

    def _close(self) -> None:
        self._following.close()
        self._files.close()

    def _look(self) -> None:
        """Takes one piece of news, or waits for it a while."""
        item = self._following.next(0.0 if self._is_let_go.is_set() else TICK_SECONDS)
        match item:
            case LogText(pod, line):
                if not self._output.take(line):
                    self._emit(LogLine(group=pod.group, host=pod.host, text=line))
                if self._cluster.clock() < self._looked_at + TICK_SECONDS:
                    return
            case LogLost(pod, error):
                # A training is worth more than its log: it goes on, and this is said.
                self._say(f"the log of {pod.host} cannot be read: {error.what}")
            case Lost(resource, error):
                if resource != EVENTS:
                    raise explained_denial(
                        error, self._layout.settings, namespace=self._cluster.namespace
                    )
                self._say(f"events are not told: {error.what}")
            case Disturbed(resource, error):
                if resource.plural not in self._disturbed:
                    self._disturbed.add(resource.plural)
                    self._say(f"{error.what}; asking again")
            case Listed() | Changed() | Gone():
                self._disturbed.discard(item.resource.plural)
                for words in self._picture.take(item):
                    self._say(words)
                for pod in self._picture.changed_pods():
                    self._following.follow(pod)
        self._looked_at = self._cluster.clock()
        self._look_at_troubles()
        self._look_for_end()

    def _look_at_troubles(self) -> None:
        if self._picture.has_ended or self._is_stopped.is_set():
            return
        now = self._cluster.clock()
        troubles = self._picture.troubles()
        for _, words in self._troubles.news(troubles, now=now):
            self._say(words)
        over = self._troubles.over(troubles, now=now)
        if over:
            raise PlatformError(
                over.what, where=f"{self._resource.plural} {self.name}", fix=over.fix
            )

    def _look_for_end(self) -> None:
        """The end is there when the job has ended, and its hosts' logs have been read."""
        if not self._picture.has_ended:
            return
        now = self._cluster.clock()
        if self._ended_at is None:
            self._ended_at = now
            self._look_at_pods()
        is_read = self._following.is_read(self._picture.uids_of("dnn")) and self._picture.is_over
        if self._read_at is None and (is_read or now >= self._ended_at + DRAIN_SECONDS):
            self._read_at = now
        if self._read_at is None and not self._is_let_go.is_set():
            return
        data_is_read = self._following.is_read(self._picture.uids_of("data"))
        is_late = self._read_at is not None and now >= self._read_at + DATA_DRAIN_SECONDS
        if (data_is_read or is_late or self._is_let_go.is_set()) and self._following.is_empty:
            self._is_drained = True
            self._close()

    def _look_at_pods(self) -> None:
        """The job's end may be told before its pods' ends are, or before there was word of them."""
        with contextlib.suppress(ApiError):
            for words in self._picture.take(self._following.pods_now()):
                self._say(words)
        for pod in self._picture.changed_pods():
            self._following.follow(pod)

    def _say(self, words: str) -> None:
        self._emit(LogLine(group=SERVICE, host="status", text=words))

    def _emit(self, line: LogLine) -> None:
        self._files.write(line)
        self._queue.append(line)
