"""All that a cluster has to tell of a run, in one queue: its job, its pods, their logs, events."""

import queue
import threading
from collections.abc import Mapping

from stoker.platforms.kubernetes.api import Cluster
from stoker.platforms.kubernetes.names import JOBSET_LABEL
from stoker.platforms.kubernetes.pod_logs import LogLost, LogText, PodLog
from stoker.platforms.kubernetes.pod_state import PodState
from stoker.platforms.kubernetes.resources import EVENTS, PODS, Resource
from stoker.platforms.kubernetes.watching import Listed, News, ObjectWatch

# Beyond it those who read logs wait, and so does the cluster.
MAX_WAITING = 10_000
_PUT_SECONDS = 0.5
# A closed reader ends at once, but for what its cluster keeps it waiting for.
_JOIN_SECONDS = 2.0

Item = News | LogText | LogLost


class Following:
    """Watches a run with threads of its own until it is closed.

    Args:
        cluster: That runs it.
        resource: JobSets or TrainJobs.
        name: Of the run's objects.
        containers: Group to the name of its pods' container.
    """

    def __init__(
        self, cluster: Cluster, *, resource: Resource, name: str, containers: Mapping[str, str]
    ) -> None:
        self._cluster = cluster
        self._containers = dict(containers)
        self._items: queue.Queue[Item] = queue.Queue(MAX_WAITING)
        self._is_closed = threading.Event()
        self._logs: dict[str, PodLog] = {}
        self._of_pods = {"labelSelector": f"{JOBSET_LABEL}={name}"}
        self._watches = [
            ObjectWatch(cluster, kind, query=query, tell=self._put)
            for kind, query in (
                (resource, {"fieldSelector": f"metadata.name={name}"}),
                (PODS, self._of_pods),
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
        """The next piece of news; None if there is none for so long."""
        try:
            return self._items.get(timeout=seconds)
        except queue.Empty:
            return None

    @property
    def is_empty(self) -> bool:
        """Whether there is no news at this moment."""
        return self._items.empty()

    def pods_now(self) -> Listed:
        """The run's pods, asked for now.

        Raises:
            ApiError: If the cluster refuses, or does not answer.
        """
        items, _ = self._cluster.list(PODS, query=self._of_pods)
        return Listed(PODS, tuple(items))

    def follow(self, pod: PodState) -> None:
        """Follows the log of a pod whose container has started, or tells its reader what it is."""
        if pod.uid in self._logs:
            self._logs[pod.uid].update(pod)
        elif pod.is_started and not self._is_closed.is_set():
            container = self._containers[pod.group]
            log = PodLog(self._cluster, pod, container=container, tell=self._put)
            self._logs[pod.uid] = log
            log.start()

    def is_read(self, uids: frozenset[str]) -> bool:
        """Whether the logs of these pods have been read to their end."""
        return not any(uid in uids and log.is_alive() for uid, log in tuple(self._logs.items()))

    def await_logs(self, seconds: float) -> None:
        """Blocks until all logs have been read to their end, `seconds` at most."""
        deadline = self._cluster.clock() + seconds
        for log in tuple(self._logs.values()):
            log.join(max(0.0, deadline - self._cluster.clock()))

    def close(self) -> None:
        """Ends all threads; what they told stays to be read. May be called twice."""
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
