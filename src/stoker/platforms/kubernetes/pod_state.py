"""What a cluster says of a run's pods."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from stoker.platforms.kubernetes.groups import PodGroup
from stoker.platforms.kubernetes.names import COMPLETION_INDEX, REPLICATED_JOB_LABEL
from stoker.platforms.kubernetes.reading import Document, mapping, mappings, number, text

# Newer JobSets count their attempts so.
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a container ended; `at` is ISO 8601, empty where it is not known."""

    exit_code: int
    reason: str
    message: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """A pod of the run.

    Attributes:
        name: Of the pod; a pod that takes its place has another.
        group: Of the plan.
        host: The same for all pods that have this place in the group.
        index: Of the host in its group.
        is_started: Whether its container has, or had, a process.
        is_running: Whether it has one now.
        restarts: How often the container was started again.
        attempt: Of the whole job.
        ended: How its container ended, if it has; a container that is started again has not.
        waits_for: Why its container does not run, in one word: ImagePullBackOff.
        waits_because: The same in words.
        unschedulable: Why no node takes it; empty where one does.
        lost: Why it was taken away: evicted, preempted, its node lost.
        is_final: Whether nothing of it runs any more.
        is_deleted: Whether it is about to go.
    """

    name: str
    uid: str
    group: str
    role: str
    host: str
    index: int
    node: str
    created_at: str
    is_started: bool
    is_running: bool
    restarts: int
    attempt: int
    ended: Ended | None
    waits_for: str
    waits_because: str
    unschedulable: str
    lost: str
    is_final: bool
    is_deleted: bool


def pod_state(document: Document, groups: Mapping[str, PodGroup], *, run: str) -> PodState | None:
    """The state of a pod; None where it is none of the run's groups.

    Args:
        document: The pod.
        groups: Of the run, by the name of their replicated job.
        run: Name of the JobSet.
    """
    described, status = mapping(document, "metadata"), mapping(document, "status")
    labels, annotations = mapping(described, "labels"), mapping(described, "annotations")
    group = groups.get(text(labels, REPLICATED_JOB_LABEL))
    if group is None:
        return None
    place = text(labels, COMPLETION_INDEX) or text(annotations, COMPLETION_INDEX)
    index = int(place) if place.isdigit() else 0
    container = _container(status, group.job)
    state, last = mapping(container, "state"), mapping(container, "lastState")
    waiting = mapping(state, "waiting")
    attempt = text(labels, _ATTEMPT)
    phase = text(status, "phase")
    return PodState(
        name=text(described, "name"),
        uid=text(described, "uid"),
        group=group.group.name,
        role=group.group.role,
        host=f"{run}-{group.job}-0-{index}",
        index=index,
        node=text(mapping(document, "spec"), "nodeName"),
        created_at=text(described, "creationTimestamp"),
        is_started=bool(mapping(state, "running") or mapping(state, "terminated") or last),
        is_running=bool(mapping(state, "running")),
        restarts=number(container, "restartCount"),
        attempt=int(attempt) if attempt.isdigit() else 0,
        ended=_ended(state),
        waits_for=text(waiting, "reason"),
        waits_because=text(waiting, "message"),
        unschedulable=_unschedulable(status),
        lost=_lost(status),
        is_final=phase in ("Succeeded", "Failed"),
        is_deleted="deletionTimestamp" in described,
    )


def seconds_between(begin: str, end: str) -> float | None:
    """Seconds from one time of Kubernetes' to another; None where one is not known."""
    try:
        difference = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
    except (ValueError, TypeError):
        return None
    return difference.total_seconds()


def _container(status: Document, name: str) -> Document:
    found = mappings(status, "containerStatuses")
    return next((c for c in found if text(c, "name") == name), found[0] if found else {})


def _ended(state: Document) -> Ended | None:
    terminated = mapping(state, "terminated")
    if not terminated:
        return None
    return Ended(
        exit_code=number(terminated, "exitCode", -1),
        reason=text(terminated, "reason"),
        message=text(terminated, "message"),
        at=text(terminated, "finishedAt"),
    )


def _unschedulable(status: Document) -> str:
    for condition in mappings(status, "conditions"):
        if (
            text(condition, "type") == "PodScheduled"
            and condition.get("status") == "False"
            and text(condition, "reason") == "Unschedulable"
        ):
            return text(condition, "message") or "no node takes it"
    return ""


def _lost(status: Document) -> str:
    for condition in mappings(status, "conditions"):
        if text(condition, "type") == "DisruptionTarget" and condition.get("status") == "True":
            words = (text(condition, "reason"), text(condition, "message"))
            return ": ".join(word for word in words if word)
    if text(status, "reason") in ("Evicted", "NodeLost", "Shutdown", "Preempting", "NodeShutdown"):
        return ": ".join(w for w in (text(status, "reason"), text(status, "message")) if w)
    return ""
