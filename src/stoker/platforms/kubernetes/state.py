"""A run in the cluster: its jobs, their state, and the records kept of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from stoker.errors import ServiceError
from stoker.logs import now_utc
from stoker.platforms.kubernetes.api import (
    CONFIG_MAPS,
    JOBSETS,
    OF_KIND,
    TRAINJOBS,
    ClusterApi,
    Resource,
    name_of,
    number,
    text,
)
from stoker.platforms.kubernetes.layout import (
    MANAGED_BY_LABEL,
    PIPELINE_RUN_ANNOTATION,
    RUN_ANNOTATION,
    WORKLOAD_NAME_ANNOTATION,
    ObjectNames,
    finished_map,
    profiles_map,
)
from stoker.platforms.kubernetes.request import KubernetesRequest
from stoker.records import Json, is_run_of
from stoker.records.base import Document, item_at, mapping, mappings, texts
from stoker.repeat import Suppressed

Phase = Literal["suspended", "running", "succeeded", "failed"]

# The jobs of all runs.
_OURS = {"labelSelector": f"{MANAGED_BY_LABEL}=stoker"}
POLL_SECONDS = 1.0
# Runs of a workload whose records are kept; and bytes, of the 1 MiB that a ConfigMap may have.
# A pipeline's run may train for each item of a loop.
KEPT_RUNS = 50
_KEPT_BYTES = 900 << 10


def resource_of(document: Document) -> Resource:
    return OF_KIND[text(document, "kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectState:
    """State of a job in its cluster.

    Attributes:
        phase: running also while pods wait for nodes.
        reason: Kubernetes' word for the phase, such as FailedJobs; empty without one.
        restarts: Number of restarts of all pods.
        is_deleted: Whether its deletion has begun.
    """

    uid: str
    phase: Phase
    reason: str = ""
    message: str = ""
    restarts: int = 0
    is_deleted: bool = False

    @property
    def has_ended(self) -> bool:
        return self.phase in ("succeeded", "failed")


def job_state(document: Document) -> ObjectState:
    described = mapping(document, "metadata")
    phase, condition = _phase(document)
    return ObjectState(
        uid=text(described, "uid"),
        phase=phase,
        reason=text(condition, "reason"),
        message=text(condition, "message"),
        restarts=number(mapping(document, "status"), "restarts"),
        is_deleted="deletionTimestamp" in described,
    )


def _phase(document: Document) -> tuple[Phase, Document]:
    status = mapping(document, "status")
    held = {
        text(condition, "type"): condition
        for condition in mappings(status, "conditions")
        if condition.get("status") == "True"
    }
    # Completed is a JobSet's, Complete a TrainJob's.
    ends = ("Completed", "Complete", "Failed")
    end = next((kind for kind in ends if kind in held), text(status, "terminalState"))
    if end in ends:
        return "failed" if end == "Failed" else "succeeded", held.get(end, {})
    # Kueue suspends a job by its spec; the controller's condition follows.
    if "Suspended" in held or item_at(document, "spec", "suspend") is True:
        return "suspended", held.get("Suspended", {})
    return "running", {}


def object_reference(document: Document, *, is_waited_for: bool) -> Document:
    """Returns an object as an owner, which `is_waited_for` if it goes only after what it owns.

    A new owner of its name then finds nothing of the old one.
    """
    metadata = mapping(document, "metadata")
    reference = {key: text(document, key) for key in ("apiVersion", "kind")}
    reference |= {key: text(metadata, key) for key in ("name", "uid")}
    if is_waited_for:
        return {**reference, "blockOwnerDeletion": True}
    return reference


def owners_of(document: Document) -> list[Document]:
    return mappings(document, "metadata", "ownerReferences")


def owned(document: Document, owners: Sequence[Document]) -> Document:
    metadata = {**mapping(document, "metadata"), "ownerReferences": owners}
    return {**document, "metadata": metadata}


def delete_and_wait(
    cluster: ClusterApi, resource: Resource, name: str, *, uid: str, seconds: float
) -> bool:
    """Deletes an object after what it owns; returns whether it was gone in `seconds`."""
    deadline = cluster.clock() + seconds
    cluster.delete(resource, name, uid=uid)
    while (left := cluster.find(resource, name)) is not None:
        # Deleted, and made again under its name.
        if text(left, "metadata", "uid") != uid:
            return True
        if cluster.clock() >= deadline:
            return False
        cluster.sleep(POLL_SECONDS)
    return True


def jobs_of_run(
    cluster: ClusterApi, resource: Resource, run: str, *, run_id: str = "", workload: str = ""
) -> Iterator[Document]:
    """Yields the existing jobs of a run, one for each attempt.

    With the id of a pipeline's run, which may train others, its jobs of the workload count, too.
    """
    jobs: list[Document] = []
    # The cluster may not know the kind.
    with Suppressed("missing"):
        jobs, _ = cluster.list(resource, query=_OURS)
    for job in jobs:
        is_workloads = bool(workload) and _annotation(job, WORKLOAD_NAME_ANNOTATION) == workload
        if (is_workloads and _is_step_of(job, run_id)) or _annotation(job, RUN_ANNOTATION) == run:
            yield job


def delete_jobs_of(cluster: ClusterApi, run_id: str) -> list[str]:
    """Deletes a pipeline run's unfinished jobs, without a wait; returns kind and name of each."""
    deleted = []
    refusals = []
    for resource in (JOBSETS, TRAINJOBS):
        try:
            jobs, _ = cluster.list(resource, query=_OURS)
        except ServiceError as err:
            # A cluster need not have both, nor a Role rights on both.
            if err.kind not in ("missing", "denied"):
                raise
            refusals.append(err)
            continue
        for job in jobs:
            state = job_state(job)
            name = name_of(job)
            is_its = _is_step_of(job, run_id) or is_run_of(_annotation(job, RUN_ANNOTATION), run_id)
            if is_its and not (state.has_ended or state.is_deleted):
                cluster.delete(resource, name, uid=state.uid)
                deleted.append(f"{job.get('kind') or resource.plural} {name}")
    if len(refusals) > 1:
        raise refusals[0]
    return deleted


def _is_step_of(job: Document, run_id: str) -> bool:
    return bool(run_id) and _annotation(job, PIPELINE_RUN_ANNOTATION) == run_id


def run_of(job: Document) -> str:
    """Returns the name of the run that a job is an attempt of."""
    return _annotation(job, RUN_ANNOTATION)


def _annotation(job: Document, key: str) -> str:
    return text(job, "metadata", "annotations", key)


def uids_of_run(cluster: ClusterApi, request: KubernetesRequest) -> list[str]:
    jobs = jobs_of_run(cluster, resource_of(request.main), request.job.run_name)
    return [job_state(job).uid for job in jobs]


def records_of(cluster: ClusterApi, job: str) -> dict[str, str]:
    """Returns the records that were kept with a job, by name."""
    data = mapping(cluster.find(CONFIG_MAPS, ObjectNames(job).records), "data")
    return {name: text(data, name) for name in data}


def finished_record(cluster: ClusterApi, workload: str, run: str, *, request_sha256: str) -> str:
    """Returns the record of a finished run; empty if unknown, or another request's."""
    entry = _entries(cluster, workload).get(run, {})
    return text(entry, "record") if entry.get("request_sha256") == request_sha256 else ""


def told_jobs(cluster: ClusterApi, workload: str) -> frozenset[str]:
    """Returns the uids of a workload's jobs whose end is recorded."""
    entries = _entries(cluster, workload).values()
    return frozenset(chain.from_iterable(texts(entry, "jobs") for entry in entries))


def _entries(cluster: ClusterApi, workload: str) -> dict[str, Document]:
    kept = mapping(cluster.find(CONFIG_MAPS, finished_map(workload)), "data")
    return {run: _entry(text(kept, run)) for run in kept}


def keep_finished(
    cluster: ClusterApi,
    workload: str,
    run: str,
    *,
    request_sha256: str,
    jobs: Sequence[str],
    record: str,
) -> None:
    """Keeps the record of a finished run (empty: it left none) beyond its jobs, given by uid.

    Deletes the oldest ones.
    """
    facts = {"request_sha256": request_sha256, "when": now_utc(), "record": record}
    entry = json.dumps({**facts, "jobs": list(jobs)}, sort_keys=True)
    _keep_entry(cluster, finished_map(workload), run, entry)


def kept_profile(cluster: ClusterApi, workload: str, key: str) -> str:
    """Returns the profile that was kept under a key, as JSON; empty: none."""
    kept = mapping(cluster.find(CONFIG_MAPS, profiles_map(workload)), "data")
    return text(_entry(text(kept, key)), "record")


def keep_profile(cluster: ClusterApi, workload: str, key: str, record: str) -> None:
    """Keeps a profile under a key; deletes the oldest ones."""
    entry = json.dumps({"when": now_utc(), "record": record}, sort_keys=True)
    _keep_entry(cluster, profiles_map(workload), key, entry)


def _keep_entry(cluster: ClusterApi, map_name: str, key: str, entry: str) -> None:
    """Writes an entry of a ConfigMap, and takes away the oldest ones beyond its room."""
    before = cluster.find(CONFIG_MAPS, map_name)
    others = {name: str(value) for name, value in mapping(before, "data").items() if name != key}
    newest = sorted(others, key=lambda name: text(_entry(others[name]), "when"), reverse=True)
    room = _KEPT_BYTES - len(entry.encode())
    data: dict[str, Json] = {key: entry}
    for place, name in enumerate(newest, 2):
        room -= len(others[name].encode())
        if place > KEPT_RUNS or room < 0:
            # In a merge patch null takes a key away.
            data[name] = None
    if before is None:
        document: Document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": map_name, "labels": {MANAGED_BY_LABEL: "stoker"}},
            "data": data,
        }
        # Another run may have made it by now.
        with Suppressed("taken"):
            cluster.create(CONFIG_MAPS, document)
            return
    cluster.patch(CONFIG_MAPS, map_name, {"data": data})


def _entry(kept: str) -> Document:
    try:
        return mapping(json.loads(kept or "{}"))
    except ValueError:
        return {}
