"""A job outlives whoever follows it: who that is, and how the job learns that nobody does any more.

In a pipeline a small pod follows the job. It may be drained, evicted or preempted at any time, and
its object be deleted, so that it must not own the job: what it owned would be collected with it.
The Workflow that controls the pod owns the job: it lasts as long as the run of the pipeline, and
its deletion still cleans up. A pod that no Workflow controls gives the job no owner.

A SIGTERM to such a pod says nothing of the run. So the cluster is asked whether the run is being
cancelled; if it is not, the job goes on, and the next attempt adopts it.

What covers the rest is a lease. The follower writes the time into a ConfigMap of the job once a
minute; the dnn leader reads it from a volume, with no right on the cluster, and ends the run when
the text has not changed for too long (`stoker.launch.follower_lease`).
"""

import queue
import threading
from dataclasses import dataclass, field

from stoker.errors import ServiceError, StokerError
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.kubernetes.api import CONFIG_MAPS, PODS, WORKFLOWS, ClusterApi, text
from stoker.platforms.kubernetes.objects import (
    ROLE_LABEL,
    STEP_LABEL,
    lease_map,
)
from stoker.records import KubernetesSettings
from stoker.records.base import Document, mapping, mappings
from stoker.settings import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE, OwnPod

# Of a pod's grace, which is 30 s by default: the record has to be written, too.
CANCELLED_SECONDS = 2.0
# Kubelets bring a changed ConfigMap into pods within about two minutes.
RENEW_SECONDS = 60.0
# In a pod. A person who closes a laptop has not abandoned the training.
LEASE_MINUTES = 60
FOLLOWER_LABELS = {ROLE_LABEL: "follower"}
_WORKFLOW = (WORKFLOWS.group, "Workflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """Names the process that follows a job.

    Attributes:
        pod: The pod it runs in; None: somebody's terminal.
        workflow: The Workflow that controls the pod, as an owner; None where there is none.
        home: The pod's own namespace, where the Workflow is; None: the job's.
        labels: Labels of the pod, by which it is told apart from other pods of the Workflow.
    """

    pod: OwnPod | None = None
    workflow: Document | None = None
    home: ClusterApi | None = None
    labels: Document = field(default_factory=dict)

    @property
    def owner(self) -> Document | None:
        """Returns the Workflow as an owner; None where it is not in the job's namespace."""
        return None if self.home else self.workflow

    def lease_minutes(self, settings: KubernetesSettings) -> int:
        """Returns after how many minutes without a follower the run is abandoned; 0: never."""
        if settings.follower_lease_minutes is not None:
            return settings.follower_lease_minutes
        return LEASE_MINUTES if self.pod else 0

    def is_cancelled(self, cluster: ClusterApi) -> bool:
        """Returns whether the run of the pipeline is known to be cancelled.

        Blocks for CANCELLED_SECONDS at most. Who cannot be asked is not cancelled: a job that runs
        in vain costs its time, and one that is deleted in vain costs the training.
        """
        return self.cancellation(cluster) is True

    def cancellation(self, cluster: ClusterApi) -> bool | None:
        """Returns whether the run of the pipeline is being cancelled; None where nobody says.

        Blocks for CANCELLED_SECONDS at most.
        """
        if self.workflow is None:
            return None
        workflow, answers = self.workflow, queue.SimpleQueue[bool | None]()
        asked = self.home or cluster

        def ask() -> None:
            try:
                found = asked.find(WORKFLOWS, text(workflow, "name"))
                answers.put(found is None or _is_ending(found, uid=text(workflow, "uid")))
            except StokerError:
                answers.put(None)

        # In a thread: neither a name service nor a server that is silent keeps the process here.
        threading.Thread(target=ask, name="asks for the workflow", daemon=True).start()
        try:
            return answers.get(timeout=CANCELLED_SECONDS)
        except queue.Empty:
            return None


def follower_of(cluster: ClusterApi, pod: OwnPod | None, *, log: Log) -> Follower:
    """Returns this process as a follower of jobs in the cluster's namespace.

    Args:
        cluster: Asked for the pod, which names its controller.
        pod: Pod that this process runs in.
        log: Told where the pod cannot be read.
    """
    if pod is None:
        return Follower()
    home = None
    if pod.namespace and pod.namespace != cluster.namespace:
        home = cluster.in_namespace(pod.namespace)
    try:
        found = (home or cluster).find(PODS, pod.name)
    except ServiceError as err:
        if not (err.kind == "denied" or home):
            raise
        log.event(EventName.OWNER_UNKNOWN, pod=pod.name, why=err.what)
        return Follower(pod=pod)
    is_same = found is not None and text(mapping(found, "metadata"), "uid") == pod.uid
    for owner in mappings(found, "metadata", "ownerReferences") if is_same else ():
        group = text(owner, "apiVersion").partition("/")[0]
        if owner.get("controller") is True and (group, owner.get("kind")) == _WORKFLOW:
            reference = {key: text(owner, key) for key in ("apiVersion", "kind", "name", "uid")}
            labels = mapping(found, "metadata", "labels")
            told = {key: text(labels, key) for key in (ROLE_LABEL, STEP_LABEL) if key in labels}
            return Follower(pod=pod, workflow=reference, home=home, labels=told)
    return Follower(pod=pod)


def _is_ending(workflow: Document, *, uid: str) -> bool:
    """Returns whether somebody has cancelled, stopped or deleted the run.

    Kubeflow cancels a run by a deadline of 0 s; Argo's own commands set `shutdown`.
    """
    described, spec = mapping(workflow, "metadata"), mapping(workflow, "spec")
    return (
        text(described, "uid") != uid
        or "deletionTimestamp" in described
        or bool(spec.get("shutdown"))
        or spec.get("activeDeadlineSeconds") == 0
    )


class LeaseKeeper(threading.Thread):
    """Renews the lease of a job, from a thread of its own.

    Args:
        cluster: Cluster that has the job.
        job: Name of the job.
        minutes: After so many without a renewal the run is abandoned; 0: never.
        log: Told when the lease cannot be renewed, and when it can again.
    """

    def __init__(self, cluster: ClusterApi, *, job: str, minutes: int, log: Log) -> None:
        super().__init__(name="follower's lease", daemon=True)
        self._cluster = cluster
        self._job = job
        self.minutes = minutes
        self._log = log
        self._is_over = threading.Event()
        self._why = ""

    def renew(self) -> bool:
        """Renews the lease once; returns False where there is none, or it may not be changed."""
        data = {LEASE_RENEWED_FILE: now_utc(), LEASE_MINUTES_FILE: str(self.minutes)}
        try:
            self._cluster.patch(CONFIG_MAPS, lease_map(self._job), {"data": dict(data)})
        except StokerError as err:
            if isinstance(err, ServiceError) and err.kind == "missing":
                return False
            if not self._why:
                self._log.event(EventName.LEASE_RENEW_FAILED, job=self._job, why=err.what)
            self._why = err.what
            return not (isinstance(err, ServiceError) and err.kind == "denied")
        if self._why:
            self._log.event(EventName.LEASE_RENEWED, job=self._job)
        self._why = ""
        return True

    def run(self) -> None:
        """Renews the lease until it is closed."""
        while not self._is_over.wait(RENEW_SECONDS):
            self.renew()

    def close(self) -> None:
        """Ends the renewals; may be called twice, and before the start."""
        self._is_over.set()
