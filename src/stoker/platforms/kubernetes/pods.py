"""State of a run's pods, as the API server describes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from stoker.platforms.kubernetes.api import number, text
from stoker.platforms.kubernetes.layout import COMPLETION_INDEX, REPLICATED_JOB_LABEL, PodGroup
from stoker.records.base import Document, mapping, mappings

# Label of newer JobSets.
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
# Reasons of a lost pod's status.
_LOST = ("Evicted", "NodeLost", "Shutdown", "Preempting", "NodeShutdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """How a container ended. Times are ISO 8601, and empty if unknown."""

    exit_code: int
    reason: str
    message: str
    at: str
    began_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """State of a pod of the run.

    Attributes:
        host: Stable name of this place in the group; a pod's replacement has another name.
        image_digest: Digest of the image that its container runs; empty: not known.
        placed_at: When its node took it, ISO 8601, or empty: from then on it is paid for.
        is_started: Whether its container has, or had, a process.
        attempt: Attempt of the whole job.
        ended: How its container ended; None if it is restarted.
        waits_for: Why its container does not run, as Kubernetes' reason: ImagePullBackOff.
        unschedulable: Why no node can run it; empty if one does.
        lost: Why it was lost: evicted, preempted, its node lost.
        is_final: Whether nothing of it runs any more.
        is_node_unready: Whether the node controller has marked it unready, as its node is.
        deleted_at: When it should be gone, ISO 8601; empty unless it is deleted.
        grace_seconds: Time from its deletion to `deleted_at`.
        gates: Names of the scheduling gates that hold it.
    """

    name: str
    uid: str
    group: str
    role: str
    host: str
    index: int
    node: str
    created_at: str
    image_digest: str
    placed_at: str
    is_started: bool
    is_running: bool
    restarts: int
    attempt: int
    ended: PodEnd | None
    waits_for: str
    waits_because: str
    unschedulable: str
    lost: str
    is_final: bool
    is_node_unready: bool
    deleted_at: str
    grace_seconds: float
    gates: tuple[str, ...]

    @property
    def ended_at(self) -> str:
        """When its container ended, ISO 8601; empty if it has not, or it is unknown."""
        if self.ended is None:
            return ""
        return self.ended.at

    @property
    def has_succeeded(self) -> bool:
        return self.is_final and self.ended is not None and not self.ended.exit_code


def pod_state(document: Document, groups: Mapping[str, PodGroup], *, run: str) -> PodState | None:
    """Returns the state of a pod; None if it is in none of the groups (by replicated job)."""
    described = mapping(document, "metadata")
    status = mapping(document, "status")
    labels = mapping(described, "labels")
    group = groups.get(text(labels, REPLICATED_JOB_LABEL))
    if group is None:
        return None
    # An annotation before Kubernetes 1.28, a label since.
    place = text(labels, COMPLETION_INDEX) or text(described, "annotations", COMPLETION_INDEX)
    index = _natural(place)
    container = _container(status, group.job)
    state = mapping(container, "state")
    is_running = bool(mapping(state, "running"))
    # One with a last state is about to be restarted.
    has_ended = bool(mapping(state, "terminated") or mapping(container, "lastState"))
    gates = mappings(document, "spec", "schedulingGates")
    return PodState(
        name=text(described, "name"),
        uid=text(described, "uid"),
        group=group.group.name,
        role=group.group.role,
        host=f"{run}-{group.job}-0-{index}",
        index=index,
        node=text(document, "spec", "nodeName"),
        created_at=text(described, "creationTimestamp"),
        image_digest=text(container, "imageID").rpartition("@")[2],
        placed_at=text(status, "startTime"),
        is_started=is_running or has_ended,
        is_running=is_running,
        restarts=number(container, "restartCount"),
        attempt=_natural(text(labels, _ATTEMPT)),
        ended=_ended(state),
        waits_for=text(state, "waiting", "reason"),
        waits_because=text(state, "waiting", "message"),
        unschedulable=_unschedulable(status),
        lost=_lost(status),
        is_final=text(status, "phase") in ("Succeeded", "Failed"),
        is_node_unready=_is_node_unready(status),
        deleted_at=text(described, "deletionTimestamp"),
        grace_seconds=number(described, "deletionGracePeriodSeconds"),
        gates=tuple(text(gate, "name") for gate in gates),
    )


def _natural(digits: str) -> int:
    """Returns the number that a label holds; 0 if it holds none."""
    if digits.isdigit():
        return int(digits)
    return 0


def by_attempt(pods: Iterable[PodState]) -> list[PodState]:
    """Returns the pods, those of a host's earlier attempts first."""
    return sorted(pods, key=lambda pod: (pod.attempt, pod.created_at))


def seconds_between(begin: str, end: str) -> float | None:
    """Returns seconds between two of Kubernetes' times; None if one is unknown."""
    try:
        difference = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
    except (ValueError, TypeError):
        return None
    return difference.total_seconds()


def _container(status: Document, name: str) -> Document:
    statuses = mappings(status, "containerStatuses")
    for container in statuses:
        if text(container, "name") == name:
            return container
    return next(iter(statuses), {})


def _ended(state: Document) -> PodEnd | None:
    terminated = mapping(state, "terminated")
    if not terminated:
        return None
    return PodEnd(
        exit_code=number(terminated, "exitCode", -1),
        reason=text(terminated, "reason"),
        message=text(terminated, "message"),
        at=text(terminated, "finishedAt"),
        began_at=text(terminated, "startedAt"),
    )


def _condition(status: Document, kind: str, value: str) -> Document:
    conditions = mappings(status, "conditions")
    return next((c for c in conditions if (c.get("type"), c.get("status")) == (kind, value)), {})


def _unschedulable(status: Document) -> str:
    condition = _condition(status, "PodScheduled", "False")
    if text(condition, "reason") != "Unschedulable":
        return ""
    return text(condition, "message") or "no node can run it"


def _is_node_unready(status: Document) -> bool:
    # The node controller sets the status alone (MarkPodsNotReady); a kubelet gives a reason, such
    # as ContainersNotReady.
    condition = _condition(status, "Ready", "False")
    return bool(condition) and not text(condition, "reason")


def _lost(status: Document) -> str:
    # Since Kubernetes 1.26; for some causes still in the reason.
    told_by = _condition(status, "DisruptionTarget", "True")
    if not told_by and text(status, "reason") in _LOST:
        told_by = status
    words = (text(told_by, "reason"), text(told_by, "message"))
    return ": ".join(filter(None, words))


def by_job(groups: Sequence[PodGroup]) -> Mapping[str, PodGroup]:
    """Returns the groups by the name of their replicated job."""
    return {group.job: group for group in groups}
