"""A job on a cluster, followed to its end: polled, with a thread for each pod's log."""

import queue
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from stoker.errors import PlatformError, ServiceError, StokerError
from stoker.failure_reasons import TRACE, reason_of_failure
from stoker.logs import EventName, now_utc
from stoker.platforms.base import JobEnd, LogLine, leader_record
from stoker.platforms.follow import FollowedRun
from stoker.platforms.kubernetes.api import EVENTS, PODS, ClusterApi, resource_of, uid_of
from stoker.platforms.kubernetes.objects import KubernetesRequest
from stoker.platforms.kubernetes.pod_log import PodLine, PodLog
from stoker.platforms.kubernetes.pod_outputs import OutputParts
from stoker.platforms.kubernetes.pods import JOBSET_LABEL, object_name
from stoker.platforms.kubernetes.state import (
    JobStatus,
    PodStatus,
    by_host,
    delete_and_wait,
    job_status,
    pod_status,
)
from stoker.platforms.kubernetes.waits import GroupWaits
from stoker.records import Event, Training
from stoker.records.base import Document, text
from stoker.records.training import EndState
from stoker.repeat import repeated

# Host name of lines that no host wrote.
SERVICE = "kubernetes"
# Between two looks at the job and its pods; longer with more than a hundred of them.
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
# Reason of a container that its node killed because of its memory.
_OUT_OF_MEMORY = "OOMKilled"
# Reasons of a TrainJob and of a JobSet, where only the rule `out_of_time` fails the JobSet.
_OUT_OF_TIME = ("DeadlineExceeded", "FailJobSetFailurePolicyAction")


class KubernetesRun(FollowedRun):
    """A submitted job.

    Args:
        cluster: Where it runs.
        request: What was submitted.
        job: The object that was made or adopted.
        is_adopted: Whether an earlier attempt had made it.
        is_step: Whether a pipeline's step follows it.
    """

    def __init__(
        self,
        cluster: ClusterApi,
        *,
        request: KubernetesRequest,
        job: Document,
        is_adopted: bool,
        is_step: bool,
    ) -> None:
        spec = request.job
        self._resource = resource_of(request.main)
        self._place = f"{self._resource.plural} {request.name}"
        super().__init__(
            request.name,
            run=spec.name,
            service=SERVICE,
            log_folder=spec.run_dir / "logs",
            way_back=f"the same command with --name {spec.run_name}",
            way_to_stop=f"kubectl delete {self._place} -n {cluster.namespace}",
            is_step=is_step,
            # Without a limit the bound of the pipeline's step counts.
            may_last_seconds=request.settings.max_run_seconds or float("inf"),
        )
        self.is_adopted = is_adopted
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
        # All pods as they were last seen, and those that exist, by their uid.
        self._pods: dict[str, PodStatus] = {}
        self._existing: list[PodStatus] = []
        self._attempt = 0
        self._lines: queue.Queue[PodLine] = queue.Queue(MAX_LINES)
        self._logs: dict[str, PodLog] = {}
        self._poll_at = self._seen_at = cluster.clock()
        self._ended_at = 0.0
        self._is_stopped = False
        # Why `stop` could not delete the job.
        self._remains = ""

    def stop(self) -> None:
        """Deletes the job unless it has ended, and blocks until its pods are gone.

        That takes at most STOP_SECONDS beyond their grace period. May be called by any thread.
        """
        if not (self._is_stopped or self._is_left or self._has_ended):
            # Before the deletion: hosts that end from now on are awaited no more.
            self._is_stopped = True
            self._delete()
            deadline = self._cluster.clock() + LAST_LINES_SECONDS
            for log in list(self._logs.values()):
                log.end()
                log.join(max(0.0, deadline - self._cluster.clock()))
            self._is_gone = True
        self._is_drained = self._is_drained or self._is_left
        self._close()

    def _delete(self) -> None:
        grace = max(group.grace_seconds for group in self._request.groups)
        seconds = grace + STOP_SECONDS
        self._log.event(EventName.JOB_STOPPING, job=self.name, at_most_seconds=seconds)
        try:
            is_gone = repeated(
                lambda: delete_and_wait(
                    self._cluster, self._resource, self.name, uid=self._uid, seconds=seconds
                ),
                seconds=seconds,
                sleep=self._cluster.sleep,
                clock=self._cluster.clock,
            )
            self._remains = "" if is_gone else f"it is not gone after {seconds:g} s"
        except StokerError as err:
            self._remains = err.what
        if self._remains:
            self._log.event(EventName.JOB_STOP_FAILED, job=self.name, why=self._remains)

    def remaining(self) -> PlatformError | None:
        if not self._remains:
            return None
        return PlatformError(
            f"the job {self.name} could not be deleted: {self._remains}",
            where=f"{self._place} in namespace {self._cluster.namespace}",
            fix=f"{self._way_to_stop}, then {self._way_back}",
        )

    @property
    def _has_ended(self) -> bool:
        return self._is_gone or (self._status is not None and self._status.has_ended)

    def _close(self) -> None:
        for log in list(self._logs.values()):
            log.close()
        self._close_files()

    def _look(self) -> None:
        """Takes a line of a log, or looks at the cluster when it is time to."""
        seconds = self._poll_at - self._cluster.clock()
        if seconds <= 0 and not self._is_gone:
            self._poll()
            pause = POLL_SECONDS * max(1.0, len(self._existing) / 100)
            self._poll_at = self._cluster.clock() + pause
        with suppress(queue.Empty):
            self._take_line(self._lines.get(timeout=0.0 if self._is_stopped else TICK_SECONDS))
            return
        if self._has_ended and self._lines.empty() and self._are_logs_read():
            self._is_drained = True
            self._close()

    def _take_line(self, line: PodLine) -> None:
        pod = line.pod
        if line.error:
            self._say(f"the log of {pod.host} cannot be read: {line.error.what}")
        elif not self._output.take(line.text):
            self._emit(LogLine(group=pod.group.group.name, host=pod.host, text=line.text))

    def _are_logs_read(self) -> bool:
        is_reading = any(log.is_alive() for log in self._logs.values())
        is_over = self._is_stopped or self._cluster.clock() >= self._ended_at + DRAIN_SECONDS
        return is_over or not is_reading

    def _poll(self) -> None:
        now = self._cluster.clock()
        has_ended = self._has_ended
        try:
            job = self._cluster.find(self._resource, self.name)
            pods = self._cluster.list(PODS, label_selector=f"{JOBSET_LABEL}={self.name}")
            self._seen_at = now
            self._take_job(job)
            self._take_pods(pods)
            if self._has_ended:
                self._ended_at = self._ended_at if has_ended else now
            # A suspended job has no hosts, for as long as a queue likes.
            elif self._status and self._status.phase == "running" and not self._is_stopped:
                self._tell_waits(now)
        except ServiceError as err:
            self._endure(err, now=now, failing_seconds=now - self._seen_at)

    def _take_job(self, document: Document | None) -> None:
        before = self._status
        # Once this job is gone, another may have its name.
        if document is None or uid_of(document) != self._uid:
            if not self._has_ended:
                self._note("the job was deleted")
            self._is_gone = True
            return
        self._status = now = job_status(document)
        if before is None or before.phase != now.phase:
            # Time for which it is suspended is no wait for hosts.
            groups = self._request.groups
            self._waits = [GroupWaits(group, self._request.job) for group in groups]
            self._note(
                {
                    "running": "the job is admitted" if before else "the job exists",
                    "suspended": "the job waits for admission: it is suspended, by a queue or a "
                    "person",
                    "succeeded": "the job has succeeded",
                    "failed": f"the job has failed: {self._reason_of_job(now)}",
                }[now.phase]
            )

    def _take_pods(self, documents: Sequence[Document]) -> None:
        seen = (pod_status(each, self._groups, run=self.name) for each in documents)
        self._existing = [pod for pod in seen if pod]
        for pod in self._existing:
            before = self._pods.get(pod.uid)
            self._pods[pod.uid] = pod
            if pod.attempt > self._attempt:
                self._attempt = pod.attempt
                self._note(f"all hosts are restarted (restart {pod.attempt})")
            if pod.is_running and not (before and before.is_running):
                self._note(f"runs on node {pod.node}", pod.host)
            if pod.end and not (before and before.end):
                self._note(f"ended with exit code {pod.exit_code}", pod.host)
            if pod.lost and not (before and before.lost):
                self._note(f"lost: {pod.lost}", pod.host)
            if pod.is_started and pod.uid not in self._logs:
                log = PodLog(self._cluster, pod, lines=self._lines)
                self._logs[pod.uid] = log
                log.start()
        alive = {pod.uid for pod in self._existing if not pod.is_final}
        for uid, log in self._logs.items():
            if uid not in alive or self._is_gone:
                log.end()

    def _tell_waits(self, now: float) -> None:
        """Tells why hosts wait; raises JobStoppedError for a wait that has lasted too long."""
        for waits in self._waits:
            if words := waits.look(
                self._existing, now=now, where=self._place, last_event=self._last_event
            ):
                self._say(words)

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
        leader = by_host(self._pods.values()).get((self._request.dnn.group.name, 0))
        exit_code = training.exit_code if training else None
        if exit_code is None and leader:
            exit_code = leader.exit_code
        status: EndState = "stopped"
        failure = None
        if self._status and self._status.phase == "succeeded":
            status = "succeeded"
        elif self._status and self._status.phase == "failed":
            status = "failed"
            failure = self._failure(self._status, training)
        elif training and not self._is_stopped:
            # With a TTL of 0 a job may be gone before its end is seen.
            status = training.status
            failure = training.failure
        digest = {}
        if leader and leader.image_digest:
            digest["image_digest"] = leader.image_digest
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure,
            output_dir=output_dir,
            model_uri=f"{self._output_uri}/model" if self._output_uri else None,
            events=tuple(self._events),
            unfetched=self._unfetched(status, leader),
            lineage={"job_id": self._uid, **digest},
        )

    @property
    def _output_uri(self) -> str:
        """Address of the run's folder in the claim for outputs; empty without a claim."""
        claim = (self._request.settings.output or "").rstrip("/")
        return f"{claim}/{object_name(self._request.job.run_name)}" if claim else ""

    def _unfetched(self, status: EndState, leader: PodStatus | None) -> str | None:
        """Returns where the record is of a job that succeeded, if its log could not be read."""
        is_read = leader and leader.uid in self._logs and self._logs[leader.uid].is_whole
        if status != "succeeded" or self._output.files or is_read:
            return None
        if self._output_uri:
            return f"{self._output_uri}/output/0/data/stoker/training.json"
        return f"the log of the leader of {self.name}"

    def _failure(self, status: JobStatus, training: Training | None) -> str:
        """Returns why the job failed; dnn pods know it better than their controllers."""
        # First: the failures of pods that were killed for it are consequences.
        if status.reason in _OUT_OF_TIME:
            return self._reason_of_job(status)
        if training and training.failure:
            return training.failure
        pods = [pod for pod in by_host(self._pods.values()).values() if pod.group.is_dnn]
        for pod in pods:
            if pod.lost:
                return (
                    f"dnn host {pod.host} was lost ({pod.lost}); then all hosts are restarted "
                    "where kubernetes.output keeps checkpoints, else kubernetes.max_restarts times"
                )
            if text(pod.end, "reason") == _OUT_OF_MEMORY:
                limit = text(pod.group.container, "resources", "limits", "memory")
                what = f"took more memory than its limit, {limit}; raise kubernetes.dnn.memory"
                return _reason(pod, out_of_memory=what)
        failed = next((pod for pod in pods if pod.exit_code), None)
        return _reason(failed) if failed else self._reason_of_job(status)

    def _reason_of_job(self, status: JobStatus) -> str:
        if status.reason in _OUT_OF_TIME:
            limit = self._request.settings.max_run_seconds
            return f"it ran longer than kubernetes.max_run_seconds, {limit} s"
        return status.message or status.reason or "the cluster gives no reason"


def _reason(pod: PodStatus, *, out_of_memory: str = "") -> str:
    message = text(pod.end, "message")
    lines = message.splitlines()
    if message.startswith("error:"):
        # The launcher's, whose traceback follows.
        lines = list(takewhile(lambda line: not TRACE.match(line), lines))
    if not message and text(pod.end, "reason") != "Error":
        lines = [text(pod.end, "reason")]
    return reason_of_failure(
        lines,
        who=f"dnn host {pod.host}",
        exit_code=pod.exit_code or 0,
        out_of_memory=out_of_memory,
    )
