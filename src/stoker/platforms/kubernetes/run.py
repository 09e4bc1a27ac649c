"""A job on a cluster, followed to its end: polled, with a thread for each pod's log."""

import queue
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stoker.errors import ServiceError
from stoker.failure_reasons import reason_of_failure
from stoker.logs import EventName, now_utc
from stoker.platforms.base import JobEnd, LogLine, leader_record
from stoker.platforms.follow import FollowedRun
from stoker.platforms.kubernetes.api import EVENTS, PODS, ClusterApi, resource_of, uid_of
from stoker.platforms.kubernetes.objects import KubernetesRequest
from stoker.platforms.kubernetes.pod_log import SERVICE, OutputParts, PodLog
from stoker.platforms.kubernetes.pods import JOBSET_LABEL, REPLICATED_JOB_LABEL, object_name
from stoker.platforms.kubernetes.state import (
    JobStatus,
    PodStatus,
    delete_and_wait,
    job_status,
    pod_status,
)
from stoker.platforms.kubernetes.waits import GroupWaits
from stoker.records import Event, Training
from stoker.records.base import Document, text
from stoker.records.training import EndState
from stoker.repeat import repeated

# Between two looks at the job and its pods.
POLL_SECONDS = 2.0
# Between looks at the end while lines are awaited.
TICK_SECONDS = 0.25
# Time after the job's end to read the logs.
DRAIN_SECONDS = 60.0
# Beyond the pods' grace period, until a deleted job is gone; and then for the last lines.
STOP_SECONDS = 60.0
LAST_LINES_SECONDS = 10.0
# Above it, threads that read logs wait.
MAX_LINES = 10_000
# Reason of a job that has failed by a rule of its own: only `out_of_time` does that.
_OUT_OF_TIME = "FailJobSetFailurePolicyAction"
_WORDS = {
    "running": "the job is admitted",
    "suspended": "the job waits for admission: it is suspended, by a queue or a person",
    "succeeded": "the job has succeeded",
}


class KubernetesRun(FollowedRun):
    """A submitted job.

    Args:
        cluster: Where it runs.
        request: What was submitted.
        job: The object that was made or adopted.
        is_step: Whether a pipeline's step follows it.
    """

    def __init__(
        self,
        cluster: ClusterApi,
        *,
        request: KubernetesRequest,
        job: Document,
        is_step: bool,
    ) -> None:
        self._resource = resource_of(request.main)
        self._place = f"{self._resource.plural} {request.name}"
        super().__init__(
            request.name,
            job=request.job,
            service=SERVICE,
            way_to_stop=f"kubectl delete {self._place} -n {cluster.namespace}",
            is_step=is_step,
        )
        self._cluster = cluster
        self._request = request
        self._uid = uid_of(job)
        self._groups = {group.job: group for group in request.groups}
        self._waits: list[GroupWaits] = []
        self._output = OutputParts()
        self._events: list[Event] = []
        # The job's last state; None until it is known.
        self._status: JobStatus | None = None
        self._is_gone = False
        # All pods as they were last seen, the oldest first, and those that exist; by their uid.
        self._pods: dict[str, PodStatus] = {}
        self._existing: dict[str, PodStatus] = {}
        self._attempt = 0
        self._lines: queue.Queue[LogLine] = queue.Queue(MAX_LINES)
        self._logs: dict[str, PodLog] = {}
        self._poll_at = self._seen_at = self._drain_until = cluster.clock()
        self._is_stopped = False

    def _stop(self) -> None:
        """Deletes the job and reads its pods' last lines.

        That takes at most STOP_SECONDS beyond their grace period. May be called by any thread.
        """
        grace = max(group.grace_seconds for group in self._request.groups)
        seconds = grace + STOP_SECONDS
        self._log.event(EventName.JOB_STOPPING, job=self.name, at_most_seconds=seconds)
        # Before the deletion: hosts that end from now on are awaited no more.
        self._is_stopped = True
        try:
            repeated(
                lambda: delete_and_wait(
                    self._cluster, self._resource, self.name, uid=self._uid, seconds=seconds
                ),
                seconds=seconds,
                sleep=self._cluster.sleep,
                clock=self._cluster.clock,
            )
        finally:
            deadline = self._cluster.clock() + LAST_LINES_SECONDS
            for log in list(self._logs.values()):
                log.end()
                log.join(max(0.0, deadline - self._cluster.clock()))
            self._is_gone = True

    @property
    def _has_ended(self) -> bool:
        return self._is_gone or (self._status is not None and self._status.has_ended)

    def _close(self) -> None:
        self._is_drained = self._is_drained or self._is_left
        for log in list(self._logs.values()):
            log.close()
        super()._close()

    def _look(self) -> None:
        """Takes a line of a log, or looks at the cluster when it is time to."""
        if self._cluster.clock() >= self._poll_at and not self._is_gone:
            self._poll()
            self._poll_at = self._cluster.clock() + POLL_SECONDS
        with suppress(queue.Empty):
            line = self._lines.get(timeout=0.0 if self._is_stopped else TICK_SECONDS)
            if not self._output.take(line.text):
                self._emit(line)
            return
        is_over = self._is_stopped or self._cluster.clock() >= self._drain_until
        is_reading = any(log.is_alive() for log in self._logs.values())
        if self._has_ended and self._lines.empty() and (is_over or not is_reading):
            self._is_drained = True
            self._close()

    def _poll(self) -> None:
        now = self._cluster.clock()
        try:
            job = self._cluster.find(self._resource, self.name)
            pods = self._cluster.list(PODS, label_selector=f"{JOBSET_LABEL}={self.name}")
            self._seen_at = now
            if not self._has_ended:
                self._take_job(job)
                self._drain_until = now + DRAIN_SECONDS
            self._take_pods(pods)
            # A suspended job has no hosts, for as long as a queue likes.
            is_suspended = self._status is None or self._status.phase == "suspended"
            if not (self._has_ended or self._is_stopped or is_suspended):
                for waits in self._waits:
                    existing = list(self._existing.values())
                    words = waits.look(
                        existing, now=now, where=self._place, last_event=self._last_event
                    )
                    if words:
                        self._say(words)
        except ServiceError as err:
            self._endure(err, failing_seconds=now - self._seen_at)

    def _take_job(self, document: Document | None) -> None:
        # Once this job is gone, another may have its name.
        if document is None or uid_of(document) != self._uid:
            self._is_gone = True
            self._note("the job was deleted")
            return
        before = self._status
        self._status = now = job_status(document)
        if before is None or before.phase != now.phase:
            # Time for which it is suspended is no wait for hosts.
            capacity = self._request.job.platform_settings.on_no_capacity
            seconds = 60.0 * capacity.wait_minutes
            self._waits = [GroupWaits(g, node_seconds=seconds) for g in self._request.groups]
            words = _WORDS.get(now.phase) or f"the job has failed: {self._reason_of_job(now)}"
            is_new = before is None and now.phase == "running"
            self._note("the job exists" if is_new else words)

    def _take_pods(self, documents: Sequence[Document]) -> None:
        self._existing = {}
        for document in sorted(documents, key=lambda d: text(d, "metadata", "creationTimestamp")):
            group = self._groups.get(text(document, "metadata", "labels", REPLICATED_JOB_LABEL))
            if group is None:
                continue
            pod = pod_status(document, group, run=self.name)
            before = self._pods.get(pod.uid)
            self._pods[pod.uid] = self._existing[pod.uid] = pod
            if pod.attempt > self._attempt:
                self._attempt = pod.attempt
                self._note(f"all hosts are restarted (restart {pod.attempt})")
            for words in pod.news:
                if before is None or words not in before.news:
                    self._note(words, pod.host)
            if pod.image_digest and pod.uid not in self._logs:
                self._logs[pod.uid] = log = PodLog(self._cluster, pod, lines=self._lines)
                log.start()
        for uid, log in self._logs.items():
            if self._is_gone or uid not in self._existing or self._existing[uid].is_final:
                log.end()

    def _last_event(self, name: str) -> str:
        """Returns the cluster's last warning about an object; empty without one."""
        selector = f"involvedObject.name={name},type=Warning"
        with suppress(ServiceError):
            events = self._cluster.list(EVENTS, field_selector=selector)
            last = max(events, key=lambda event: text(event, "lastTimestamp"), default={})
            return ": ".join(filter(None, (text(last, "reason"), text(last, "message"))))
        return ""

    def _note(self, what: str, host: str | None = None) -> None:
        self._events.append(Event(when=now_utc(), what=what, host=host))
        self._say(what if host is None else f"{host}: {what}")

    # How it ended.

    def _conclude(self) -> JobEnd:
        output_dir: Path | None = None
        if self._output.files:
            output_dir = self._request.job.run_dir / "output"
            self._output.write(output_dir)
        training = leader_record(output_dir)
        # The last pod of each host.
        pods = {pod.host: pod for pod in self._pods.values()}
        leader = pods.get(f"{self.name}-{self._request.dnn.job}-0-0")
        exit_code = leader.exit_code if leader else None
        if training and training.exit_code is not None:
            exit_code = training.exit_code
        status: EndState = "stopped"
        failure = None
        if self._status and self._status.phase == "succeeded":
            status = "succeeded"
        elif self._status and self._status.phase == "failed":
            status = "failed"
            dnn = [pod for pod in pods.values() if pod.group.is_dnn]
            failure = self._failure(self._status, training, dnn)
        is_read = leader and leader.uid in self._logs and self._logs[leader.uid].is_whole
        is_missing = status == "succeeded" and not (self._output.files or is_read)
        model_uri = None
        if self._request.settings.output:
            # Its folder in the claim for outputs.
            folder = self._request.settings.output.rstrip("/")
            model_uri = f"{folder}/{object_name(self._request.job.run_name)}/model"
        lineage = {"job_id": self._uid}
        if leader and leader.image_digest:
            lineage["image_digest"] = leader.image_digest
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure,
            output_dir=output_dir,
            model_uri=model_uri,
            events=tuple(self._events),
            unfetched=f"the log of the leader of {self.name}" if is_missing else None,
            lineage=lineage,
        )

    def _failure(
        self, status: JobStatus, training: Training | None, dnn: Sequence[PodStatus]
    ) -> str:
        """Returns why the job failed; dnn pods know it better than their controllers."""
        # First: the failures of pods that were killed for it are consequences.
        if status.reason == _OUT_OF_TIME:
            return self._reason_of_job(status)
        if training and training.failure:
            return training.failure
        for pod in dnn:
            if pod.lost:
                return (
                    f"dnn host {pod.host} was lost ({pod.lost}); then all hosts are restarted "
                    "where kubernetes.output keeps checkpoints, else kubernetes.max_restarts times"
                )
        for pod in dnn:
            if pod.exit_code:
                what = "took more memory than its limit; raise kubernetes.dnn.memory"
                return reason_of_failure(
                    text(pod.end, "message").splitlines(),
                    who=f"dnn host {pod.host}",
                    exit_code=pod.exit_code,
                    # Its node killed it.
                    out_of_memory=what if text(pod.end, "reason") == "OOMKilled" else "",
                )
        return self._reason_of_job(status)

    def _reason_of_job(self, status: JobStatus) -> str:
        if status.reason == _OUT_OF_TIME:
            limit = self._request.settings.max_run_seconds
            return f"it ran longer than kubernetes.max_run_seconds, {limit} s"
        return status.message or status.reason or "the cluster gives no reason"
