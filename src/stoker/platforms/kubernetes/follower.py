"""The follower of a job, and the lease by which the job knows that it has one.

In a pipeline a small pod follows the job. It may be evicted at any time, so the Workflow that
controls the pod owns the job: it lasts as long as the pipeline's run, and its deletion cleans up.
After a SIGTERM the job continues unless the run is being cancelled; the next attempt adopts it.

The follower writes the time into a ConfigMap of the job once a minute. The dnn leader reads it from
a volume, without a right on the cluster, and ends the run when it has not changed for too long
(`stoker.launch.follower_lease`).
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.environment import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE, OwnPod
from stoker.errors import ServiceError, StokerError
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.kubernetes.api import CONFIG_MAPS, PODS, WORKFLOWS, ClusterApi, text
from stoker.platforms.kubernetes.layout import ROLE_LABEL, STEP_LABEL, ObjectNames
from stoker.records import KubernetesSettings
from stoker.records.base import Document, mapping, mappings
from stoker.repeat import within

# A part of the pod's grace of 30 s, in which the record is written, too.
CANCELLED_SECONDS = 2.0
# Kubelets bring a changed ConfigMap into pods within about two minutes.
RENEW_SECONDS = 60.0
# For followers in pods: a replacement may wait for a node that is full of this training run.
# Closing a laptop does not abandon a training run.
LEASE_MINUTES = 240
FOLLOWER_LABELS = {ROLE_LABEL: "follower"}
_WORKFLOW = (WORKFLOWS.group, "Workflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The process that follows a job.

    Attributes:
        pod: Pod of the process; None: a terminal.
        workflow: Workflow that controls the pod, as an owner.
        home: Namespace of pod and Workflow; None: the job's.
        labels: Labels that distinguish the pod from others of the Workflow.
    """

    pod: OwnPod | None = None
    workflow: Document | None = None
    home: ClusterApi | None = None
    labels: Document = field(default_factory=dict)

    @property
    def owner(self) -> Document | None:
        """The Workflow as an owner; None if it is not in the job's namespace."""
        return None if self.home else self.workflow

    def lease_minutes(self, settings: KubernetesSettings) -> int:
        """Returns the minutes without a follower after which the run ends; 0: never."""
        if settings.follower_lease_minutes is not None:
            return settings.follower_lease_minutes
        return LEASE_MINUTES if self.pod else 0

    def is_cancelled(self, cluster: ClusterApi) -> bool | None:
        """Whether the pipeline's run is being cancelled; None: unknown after CANCELLED_SECONDS."""
        return self._ask(cluster, _is_ending)

    def has_failed(self, cluster: ClusterApi) -> bool | None:
        """Whether a part of the pipeline's run has failed; None if unknown, as above."""
        return self._ask(cluster, _has_failed)

    def _ask(self, cluster: ClusterApi, answer: Callable[[Document], bool]) -> bool | None:
        """Returns the answer of the Workflow; True if it is gone."""
        if self.workflow is None:
            return None
        workflow = self.workflow
        api = self.home or cluster

        def look() -> bool:
            there = api.find(WORKFLOWS, text(workflow, "name"))
            is_same = there and text(there, "metadata", "uid") == text(workflow, "uid")
            return not (there and is_same) or answer(there)

        # A silent name service or server must not block the process.
        with contextlib.suppress(StokerError, TimeoutError):
            return within(CANCELLED_SECONDS, look)
        return None


def follower_of(cluster: ClusterApi, pod: OwnPod | None, *, log: Log) -> Follower:
    """Returns this process as a follower of jobs in the cluster's namespace."""
    if pod is None:
        return Follower()
    home = None
    if pod.namespace and pod.namespace != cluster.namespace:
        home = cluster.in_namespace(pod.namespace)
    try:
        shown = (home or cluster).find(PODS, pod.name)
    except ServiceError as err:
        if not (err.kind == "denied" or home):
            raise
        log.event(EventName.OWNER_UNKNOWN, pod=pod.name, why=err.what)
        return Follower(pod=pod)
    # Another pod may have its name by now.
    if text(shown, "metadata", "uid") != pod.uid:
        return Follower(pod=pod)
    for owner in mappings(shown, "metadata", "ownerReferences"):
        group = text(owner, "apiVersion").partition("/")[0]
        if owner.get("controller") is True and (group, owner.get("kind")) == _WORKFLOW:
            reference = {key: text(owner, key) for key in ("apiVersion", "kind", "name", "uid")}
            labels = mapping(shown, "metadata", "labels")
            own_labels = {
                key: text(labels, key) for key in (ROLE_LABEL, STEP_LABEL) if key in labels
            }
            return Follower(pod=pod, workflow=reference, home=home, labels=own_labels)
    return Follower(pod=pod)


def _is_ending(workflow: Document) -> bool:
    spec = mapping(workflow, "spec")
    # Kubeflow cancels a run by a deadline of 0 s; Argo's commands set `shutdown`.
    is_cancelled = bool(spec.get("shutdown")) or spec.get("activeDeadlineSeconds") == 0
    return is_cancelled or "deletionTimestamp" in mapping(workflow, "metadata")


def _has_failed(workflow: Document) -> bool:
    """Whether a group of steps has failed; True if Argo keeps the nodes elsewhere."""
    nodes = [mapping(node) for node in mapping(workflow, "status", "nodes").values()]
    # Of a step that was tried again only the pod has failed, not its group.
    phases = {text(node, "phase") for node in nodes if text(node, "type") == "DAG"}
    return not phases or bool(phases & {"Failed", "Error"})


class LeaseKeeper(threading.Thread):
    """A thread that renews the lease of a job: the run ends `minutes` after the last renewal."""

    def __init__(self, cluster: ClusterApi, *, job: str, minutes: int, log: Log) -> None:
        super().__init__(name="follower's lease", daemon=True)
        self._cluster = cluster
        self._job = job
        self.minutes = minutes
        self._log = log
        self._is_over = threading.Event()
        self._why = ""

    def renew(self) -> bool:
        """Renews the lease once; returns False if there is none, or no right to change it."""
        data = {LEASE_RENEWED_FILE: now_utc(), LEASE_MINUTES_FILE: str(self.minutes)}
        try:
            self._cluster.patch(CONFIG_MAPS, ObjectNames(self._job).lease, {"data": dict(data)})
        except StokerError as err:
            kind = err.kind if isinstance(err, ServiceError) else ""
            if kind == "missing":
                return False
            if not self._why:
                self._log.event(EventName.LEASE_RENEW_FAILED, job=self._job, why=err.what)
            self._why = err.what
            return kind != "denied"
        if self._why:
            self._log.event(EventName.LEASE_RENEWED, job=self._job)
        self._why = ""
        return True

    def run(self) -> None:
        while not self._is_over.wait(RENEW_SECONDS):
            self.renew()

    def close(self) -> None:
        self._is_over.set()
