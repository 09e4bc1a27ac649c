"""What the cluster says of a run: its jobs, its pods, and the profile that is kept there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.errors import PlatformError
from stoker.platforms.kubernetes.api import (
    CONFIG_MAPS,
    JOBSETS,
    TRAINJOBS,
    ClusterApi,
    Resource,
    name_of,
    uid_of,
)
from stoker.platforms.kubernetes.pods import (
    COMPLETION_INDEX,
    MANAGED_BY_LABEL,
    PIPELINE_RUN_LABEL,
    RESTARTS_ANNOTATION,
    WORKLOAD_LABEL,
    PodGroup,
    object_name,
)
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings, text
from stoker.repeat import Suppressed

Phase = Literal["suspended", "running", "succeeded", "failed"]


# Conditions of a job: Completed is a JobSet's, Complete a TrainJob's.
_PHASES: Mapping[str, Phase] = {
    "Completed": "succeeded",
    "Complete": "succeeded",
    "Failed": "failed",
    "Suspended": "suspended",
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job in its cluster.

    Attributes:
        phase: running also while pods wait for nodes.
        reason: Kubernetes' word for the phase, such as FailedJobs; empty without one.
    """

    phase: Phase
    reason: str = ""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        return self.phase in ("succeeded", "failed")


def job_status(document: Document) -> JobStatus:
    for condition in mappings(document, "status", "conditions"):
        phase = _PHASES.get(text(condition, "type"))
        if phase and condition.get("status") == "True":
            return JobStatus(phase, text(condition, "reason"), text(condition, "message"))
    # Kueue suspends a job by its spec; the controller's condition follows.
    is_suspended = item_at(document, "spec", "suspend") is True
    return JobStatus("suspended" if is_suspended else "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """State of a pod of the run.

    Attributes:
        host: Stable name of this place in the group; a pod's replacement has another name.
        attempt: Attempt of the whole job.
        image_digest: Digest of the image that its container runs, or ran; empty before.
        is_running: Whether its container runs, and the pod is not being deleted.
        is_final: Whether nothing of it runs any more.
        reason: Why it has no node, or its container does not run: Unschedulable, ErrImagePull.
        message: The cluster's words on that.
        lost: Why it was lost: evicted, preempted, its node lost.
        end: Kubernetes' state `terminated` of its container; empty if it has none.
    """

    name: str
    uid: str
    group: PodGroup
    host: str
    attempt: int
    node: str
    image_digest: str
    is_running: bool
    is_final: bool
    reason: str
    message: str
    lost: str
    end: Document

    @property
    def exit_code(self) -> int | None:
        code = self.end.get("exitCode")
        return code if isinstance(code, int) else None

    @property
    def news(self) -> list[str]:
        """What a person would want to know, once."""
        told = {
            f"runs on node {self.node}": self.is_running,
            f"ended with exit code {self.exit_code}": bool(self.end),
            f"lost: {self.lost}": bool(self.lost),
        }
        return [words for words, is_so in told.items() if is_so]


def pod_status(document: Document, group: PodGroup, *, run: str) -> PodStatus:
    status = mapping(document, "status")
    labels = mapping(document, "metadata", "labels")
    containers = {text(each, "name"): each for each in mappings(status, "containerStatuses")}
    container = containers.get(group.job, {})
    state = mapping(container, "state")
    is_running = bool(mapping(state, "running"))
    conditions = {
        (text(each, "type"), text(each, "status")): each for each in mappings(status, "conditions")
    }
    unscheduled = conditions.get(("PodScheduled", "False"))
    # Since Kubernetes 1.26.
    disrupted = conditions.get(("DisruptionTarget", "True"))
    return PodStatus(
        name=name_of(document),
        uid=uid_of(document),
        group=group,
        host=f"{run}-{group.job}-0-{text(labels, COMPLETION_INDEX)}",
        attempt=int(text(labels, RESTARTS_ANNOTATION) or 0),
        node=text(document, "spec", "nodeName"),
        image_digest=text(container, "imageID").rpartition("@")[2],
        is_running=is_running and "deletionTimestamp" not in mapping(document, "metadata"),
        is_final=text(status, "phase") in ("Succeeded", "Failed"),
        reason=text(unscheduled or mapping(state, "waiting"), "reason"),
        message=text(unscheduled or mapping(state, "waiting"), "message"),
        lost=": ".join(filter(None, (text(disrupted, "reason"), text(disrupted, "message")))),
        end=mapping(state, "terminated"),
    )


def delete_and_wait(
    cluster: ClusterApi, resource: Resource, name: str, *, uid: str, seconds: float
) -> None:
    """Deletes an object after what it owns; raises PlatformError if it is not gone in time."""
    deadline = cluster.clock() + seconds
    cluster.delete(resource, name, uid=uid)
    # Another uid: deleted, and made again under its name.
    while uid_of(cluster.find(resource, name)) == uid:
        if cluster.clock() >= deadline:
            raise PlatformError(
                f"{resource.plural} {name} is not gone {seconds:g} s after its deletion",
                where=f"namespace {cluster.namespace}",
                fix=f"kubectl describe {resource.plural} {name} -n {cluster.namespace}",
            )
        cluster.sleep(1.0)


def annotation_of(document: Document | None, key: str) -> str:
    return text(document, "metadata", "annotations", key)


def delete_jobs(cluster: ClusterApi, run_id: str, *, workload: str = "") -> list[str]:
    """Deletes the jobs of a pipeline's run, without a wait; returns kind and name of each.

    A JobSet that has ended stays until its TTL; a TrainJob has none.

    Args:
        cluster: Where they are.
        run_id: Id of the pipeline's run, which may train several workloads.
        workload: Name of the one whose jobs are meant; empty: all.
    """
    selector = f"{PIPELINE_RUN_LABEL}={run_id}"
    if workload:
        selector += f",{WORKLOAD_LABEL}={workload}"
    deleted = []
    for resource in (JOBSETS, TRAINJOBS):
        # A cluster need not have both, nor a Role rights on both.
        with Suppressed("missing", "denied"):
            for job in cluster.list(resource, label_selector=selector):
                if resource == TRAINJOBS or not job_status(job).has_ended:
                    cluster.delete(resource, name_of(job), uid=uid_of(job))
                    deleted.append(f"{resource.plural} {name_of(job)}")
    return deleted


def kept_profile(cluster: ClusterApi, workload: str, key: str) -> str:
    """Returns the profile that was kept under a key, as JSON; empty: none."""
    kept = mapping(cluster.find(CONFIG_MAPS, _profile_name(workload)), "data")
    return text(kept, "record") if text(kept, "key") == key else ""


def keep_profile(cluster: ClusterApi, workload: str, key: str, record: str) -> None:
    """Keeps a workload's newest profile, in place of the one before."""
    name = _profile_name(workload)
    data: Json = {"key": key, "record": record}
    metadata: Json = {"name": name, "labels": {MANAGED_BY_LABEL: "stoker"}}
    with Suppressed("taken"):
        cluster.create(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
        return
    cluster.patch(CONFIG_MAPS, name, {"data": data})


def _profile_name(workload: str) -> str:
    return f"stoker-{object_name(workload)}-profile"
