"""A job is submitted by a caller with the rights for it, exactly once; its state is read back.

The job comes first, and owns the rest: whatever ends this process in between, nothing is left
behind that would not go with the job. Its pods wait for their token until the Secret is there, a
moment later; a process that was killed in that moment leaves a job that waits, and the next attempt
makes up for it. So the token is never read back, and nobody needs the right to.

An attempt that finds its own job continues with it. One that has failed is deleted and made anew
under the same name; another job of that name is left alone.

Submitting needs rights in the namespace (configs/kubernetes/rbac.yaml), which neither Kubeflow's
`pipeline-runner` nor a profile's `default-editor` has. The caller's rights are checked first.

Network policies are for a namespace, and applied once: pods of all runs are known by their labels.
A run's own keys keep the runs of one namespace apart.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.errors import PlatformError, ServiceError, StokerError, TerminatedError
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.kubernetes.api import (
    ACCESS_REVIEWS,
    BUDGETS,
    CONFIG_MAPS,
    JOBSETS,
    OF_KIND,
    RUNTIMES,
    SECRETS,
    TRAINJOBS,
    WORKFLOWS,
    Action,
    ClusterApi,
    Resource,
    name_of,
    text,
    texts,
)
from stoker.platforms.kubernetes.follower import Follower, LeaseKeeper
from stoker.platforms.kubernetes.objects import (
    MANAGED_BY_LABEL,
    PIPELINE_RUN_ANNOTATION,
    REQUEST_ANNOTATION,
    RUN_ANNOTATION,
    TOKEN_KEY,
    WORKLOAD_NAME_ANNOTATION,
    finished_map,
    lease_map,
    name_of_workload,
    records_map,
)
from stoker.platforms.kubernetes.request import (
    KubernetesRequest,
    follower_budget,
    manifest,
    metadata,
)
from stoker.records import Json, KubernetesSettings, is_run_of
from stoker.records.base import Document, mapping, mappings
from stoker.settings import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE

Phase = Literal["suspended", "running", "succeeded", "failed"]

# The jobs of all runs.
_OURS = {"labelSelector": f"{MANAGED_BY_LABEL}=stoker"}
# Of a JobSet, and of a TrainJob.
_SUCCEEDED = ("Completed", "Complete")
# A runtime goes when the last TrainJob that uses it has gone.
GONE_SECONDS = 120.0
POLL_SECONDS = 1.0
# As many as the feed needs; the Secret has them as hexadecimal digits.
TOKEN_BYTES = 32
# What an earlier job of the name owned may be deleted a little later than it.
LEFTOVER_SECONDS = 30.0
# Runs whose records are kept, the last ones of a workload; and bytes, of the 1 MiB that a ConfigMap
# may have.
KEPT_RUNS = 10
_KEPT_BYTES = 900 << 10
# A run goes on without them: pods tell most of what events would; a new attempt's Workflow does not
# become an owner of its predecessor's job; there is no lease and no disruption budget; no cancelled
# run is told apart; a retried step knows no record of a job that is gone.
_USEFUL = (
    "events",
    "poddisruptionbudgets",
    "workflows",
    "patch jobsets",
    "patch trainjobs",
    "get configmaps",
    "patch configmaps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectState:
    """Tells how its cluster sees a job.

    Attributes:
        phase: running also while its pods wait for nodes.
        reason: Kubernetes' own word for the phase, such as FailedJobs; empty where there is none.
        message: The same in words.
        since: When the phase began, ISO 8601 in UTC; empty where it is not known.
        restarts: How often all pods were started again.
        is_deleted: Whether it is about to go.
    """

    uid: str
    phase: Phase
    reason: str = ""
    message: str = ""
    since: str = ""
    restarts: int = 0
    is_deleted: bool = False

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing of it will run again."""
        return self.phase in ("succeeded", "failed")


def job_state(document: Document) -> ObjectState:
    """Returns the state of a JobSet or TrainJob."""
    described, status = mapping(document, "metadata"), mapping(document, "status")
    restarts = status.get("restarts")
    phase, condition = _phase(document)
    return ObjectState(
        uid=text(described, "uid"),
        phase=phase,
        reason=text(condition, "reason"),
        message=text(condition, "message"),
        since=text(condition, "lastTransitionTime"),
        restarts=restarts if isinstance(restarts, int) else 0,
        is_deleted="deletionTimestamp" in described,
    )


def _phase(document: Document) -> tuple[Phase, Document]:
    status = mapping(document, "status")
    held = {
        text(condition, "type"): condition
        for condition in mappings(status, "conditions")
        if condition.get("status") == "True"
    }
    for kind in _SUCCEEDED:
        if kind in held:
            return "succeeded", held[kind]
    if "Failed" in held:
        return "failed", held["Failed"]
    match text(status, "terminalState"):
        case "Completed":
            return "succeeded", {}
        case "Failed":
            return "failed", {}
    if "Suspended" in held or mapping(document, "spec").get("suspend") is True:
        return "suspended", held.get("Suspended", {})
    return "running", {}


def object_reference(document: Document, *, is_waited_for: bool) -> Document:
    """Returns an object as an owner.

    Args:
        document: The object as the cluster gives it.
        is_waited_for: Whether the owner is gone only after what it owns: a new owner of its name
            then finds nothing of the old one.
    """
    reference = {
        "apiVersion": text(document, "apiVersion"),
        "kind": text(document, "kind"),
        "name": name_of(document),
        "uid": text(mapping(document, "metadata"), "uid"),
    }
    return {**reference, "blockOwnerDeletion": True} if is_waited_for else reference


def owners_of(document: Document) -> list[Document]:
    """Returns the owners of an object."""
    return mappings(document, "metadata", "ownerReferences")


def owned(document: Document, owners: Sequence[Document]) -> Document:
    """Returns the object with these owners."""
    references: list[Json] = [dict(owner) for owner in owners]
    metadata = {**mapping(document, "metadata"), "ownerReferences": references}
    return {**document, "metadata": metadata}


def provide_runtime(
    cluster: ClusterApi, request: KubernetesRequest, owners: Sequence[Document], *, log: Log
) -> bool:
    """Makes the runtime unless it is there; returns whether it was made now.

    Args:
        cluster: Cluster that is to have it.
        request: Request with the runtime.
        owners: Owners of a runtime that is made, until the TrainJob owns it.
        log: Gets what happens.

    Raises:
        PlatformError: If there is another one of that name, or none where one should be.
    """
    wanted = request.runtime
    assert wanted is not None
    name, digest = name_of(wanted), _digest(wanted)
    if not request.runtime_is_ours:
        found = cluster.find(RUNTIMES, name)
        if found is None or _digest(found) != digest:
            what = "is of another plan or workload" if found else "is not there"
            raise PlatformError(
                f"TrainingRuntime {name} {what}",
                where=f"namespace {cluster.namespace}, key kubernetes.runtime",
                fix="let an administrator apply the TrainingRuntime of stoker train --dry-run, "
                "or leave kubernetes.runtime out",
            )
        return False
    deadline = cluster.clock() + GONE_SECONDS
    while True:
        try:
            cluster.create(RUNTIMES, owned(wanted, owners))
            return True
        except ServiceError as err:
            if err.kind != "taken":
                raise
        found = cluster.find(RUNTIMES, name)
        if found is None:
            continue
        if not job_state(found).is_deleted:
            if _digest(found) == digest:
                return False
            # Without a TrainJob it is left over from an attempt that got no further.
            if any(text(owner, "kind") == "TrainJob" for owner in owners_of(found)):
                _refuse_runtime(name, cluster.namespace)
            log.event(EventName.RUNTIME_REPLACED, runtime=name)
            cluster.delete(RUNTIMES, name)
        if cluster.clock() >= deadline:
            _refuse_runtime(name, cluster.namespace)
        cluster.sleep(POLL_SECONDS)


def keep_runtime(
    cluster: ClusterApi, name: str, owners: Sequence[Document], *, job_uid: str
) -> None:
    """Takes a runtime from a TrainJob that is about to go: the next TrainJob is to use it.

    Another attempt may have made that one already: then it stays its.

    Args:
        cluster: Cluster that has both.
        name: Name of the runtime.
        owners: Owners of the runtime until the next TrainJob owns it.
        job_uid: Of the TrainJob that goes.
    """
    while (found := cluster.find(RUNTIMES, name)) is not None:
        known = owners_of(found)
        kept = [owner for owner in known if text(owner, "uid") != job_uid]
        if not any(text(owner, "kind") == "TrainJob" for owner in kept):
            uids = {text(owner, "uid") for owner in kept}
            kept += [owner for owner in owners if text(owner, "uid") not in uids]
        if kept == known:
            return
        references: list[Json] = [dict(owner) for owner in kept]
        version = text(mapping(found, "metadata"), "resourceVersion")
        described: Document = {"ownerReferences": references, "resourceVersion": version}
        try:
            cluster.patch(RUNTIMES, name, {"metadata": described})
            return
        except ServiceError as err:
            # Changed or gone since it was read: looked at again.
            if err.code not in ("404", "409"):
                raise


def _refuse_runtime(name: str, namespace: str) -> None:
    raise PlatformError(
        f"there is another TrainingRuntime {name}, and a TrainJob that uses it",
        where=f"namespace {namespace}",
        fix="choose another --name",
    )


def _digest(document: Document) -> str:
    return text(mapping(document, "metadata", "annotations"), REQUEST_ANNOTATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedObjects:
    """The cluster has this job: it runs, or has run.

    Attributes:
        lease: Lease by which its leader knows that it is followed; None: it has none.
    """

    uid: str
    created_at: str
    is_adopted: bool
    lease: LeaseKeeper | None = None


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """An attempt to start a job notes what has been done so far, to undo it if it fails."""

    has_asked: bool = False
    runtime_is_made: bool = False
    is_adopted: bool = False


def adopt(
    cluster: ClusterApi, request: KubernetesRequest, *, follower: Follower, log: Log
) -> StartedObjects:
    """Adopts the job of an earlier attempt, whatever became of it; makes no other.

    Args:
        cluster: Cluster that has the job.
        request: The request that the job was made for.
        follower: This process.
        log: Log for what is worth telling.

    Raises:
        PlatformError: If there is no job of this request.
    """
    found = cluster.find(_resource(request.main), request.name)
    if found is None:
        raise PlatformError(
            f"the job {request.name} is gone", where=_place(request, cluster.namespace)
        )
    _check_is_ours(found, request, namespace=cluster.namespace)
    log.event(EventName.JOB_RESUMED, job=request.name, namespace=cluster.namespace)
    _guard_follower(cluster, request, follower, log=log)
    described = mapping(found, "metadata")
    return StartedObjects(
        uid=text(described, "uid"),
        created_at=text(described, "creationTimestamp"),
        is_adopted=True,
        lease=_lease(cluster, request, found, follower, is_adopted=True, log=log),
    )


def start(
    cluster: ClusterApi, request: KubernetesRequest, *, follower: Follower, log: Log
) -> StartedObjects:
    """Creates the job and what belongs to it, or adopts what an earlier attempt created.

    Args:
        cluster: Cluster that is to run it.
        request: What to make.
        follower: This process; its Workflow, if it has one, owns the job.
        log: Log for what is worth telling.

    Raises:
        PlatformError: If the cluster refuses, or another job has the name.
    """
    attempt = _Attempt()
    owners = [follower.owner] if follower.owner else []
    try:
        if request.runtime is not None:
            attempt.runtime_is_made = provide_runtime(cluster, request, owners, log=log)
        run_id = follower.pod.run_id if follower.pod else ""
        job = _create_or_adopt(cluster, request, owners, attempt, log, run_id=run_id)
        _provide_parts(cluster, request, job, is_adopted=attempt.is_adopted, log=log)
        _guard_follower(cluster, request, follower, log=log)
    except BaseException as err:
        # An adopted job goes on when this attempt fails, unless the user asked to stop.
        is_over = not isinstance(err, StokerError)
        if isinstance(err, TerminatedError) and follower.pod:
            is_over = follower.is_cancelled(cluster)
        if is_over or not attempt.is_adopted:
            _abandon(cluster, request, attempt, log)
        raise
    described = mapping(job, "metadata")
    return StartedObjects(
        uid=text(described, "uid"),
        created_at=text(described, "creationTimestamp"),
        is_adopted=attempt.is_adopted,
        lease=_lease(cluster, request, job, follower, is_adopted=attempt.is_adopted, log=log),
    )


def _lease(
    cluster: ClusterApi,
    request: KubernetesRequest,
    job: Document,
    follower: Follower,
    *,
    is_adopted: bool,
    log: Log,
) -> LeaseKeeper | None:
    """Returns the lease, renewed once; None where the run goes on for as long as it takes."""
    minutes = follower.lease_minutes(request.layout.settings)
    if job_state(job).has_ended or not (minutes or is_adopted):
        return None
    keeper = LeaseKeeper(cluster, job=request.name, minutes=minutes, log=log)
    if is_adopted and keeper.renew():
        return keeper if minutes else None
    if not minutes:
        return None
    # Made as one that lasts for ever: who may not renew it must not have it end the run.
    document: Document = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(request.layout, name=lease_map(request.name)),
        "data": {LEASE_RENEWED_FILE: "", LEASE_MINUTES_FILE: "0"},
    }
    try:
        _create_part(cluster, CONFIG_MAPS, document, job, is_adopted=True)
    except ServiceError as err:
        log.event(EventName.LEASE_CREATE_FAILED, job=request.name, why=err.what)
        return None
    return keeper if keeper.renew() else None


def delete_and_wait(
    cluster: ClusterApi, resource: Resource, name: str, *, uid: str, seconds: float
) -> bool:
    """Deletes an object after all that it owns; returns whether it was gone in `seconds`."""
    deadline = cluster.clock() + seconds
    cluster.delete(resource, name, uid=uid)
    while (found := cluster.find(resource, name)) is not None:
        if text(mapping(found, "metadata"), "uid") != uid:
            return True
        if cluster.clock() >= deadline:
            return False
        cluster.sleep(POLL_SECONDS)
    return True


def is_going_on(
    cluster: ClusterApi, request: KubernetesRequest, *, or_failed: bool = False
) -> bool:
    """Returns whether a job of this request runs, waits or has succeeded, `or_failed`."""
    found = cluster.find(_resource(request.main), request.name)
    annotations = mapping(found, "metadata", "annotations")
    if found is None or annotations.get(REQUEST_ANNOTATION) != request.request_sha256:
        return False
    state = job_state(found)
    return (or_failed or state.phase != "failed") and not state.is_deleted


def records_of(cluster: ClusterApi, job: str) -> dict[str, str]:
    """Returns the records that were kept with a job, by name; {} if there are none."""
    data = mapping(cluster.find(CONFIG_MAPS, records_map(job)), "data")
    return {name: text(data, name) for name in data}


def finished_record(cluster: ClusterApi, workload: str, run: str, *, request_sha256: str) -> str:
    """Returns the record of a run that has ended; empty where it is not known, or of another job.

    Args:
        cluster: Cluster that ran it.
        workload: Name of the workload.
        run: Name of the run.
        request_sha256: Digest of the run's request.
    """
    kept = mapping(cluster.find(CONFIG_MAPS, finished_map(workload)), "data")
    entry = _entry(text(kept, run))
    return text(entry, "record") if entry.get("request_sha256") == request_sha256 else ""


def told_jobs(cluster: ClusterApi, workload: str) -> frozenset[str]:
    """Returns the uids of a workload's jobs whose steps have told how they ended."""
    kept = mapping(cluster.find(CONFIG_MAPS, finished_map(workload)), "data")
    return frozenset(uid for run in kept for uid in texts(_entry(text(kept, run)), "jobs"))


def keep_finished(
    cluster: ClusterApi,
    workload: str,
    run: str,
    *,
    request_sha256: str,
    jobs: Sequence[str],
    record: str,
) -> None:
    """Keeps the record of a run that has ended, also after its job; the oldest ones go.

    Args:
        cluster: Cluster that ran it.
        workload: Name of the workload.
        run: Name of the run.
        request_sha256: Digest of the run's request.
        jobs: Uids of the run's jobs.
        record: The record, as JSON; empty: it left none.

    Raises:
        ServiceError: If the cluster refuses, or does not answer.
    """
    entry: Document = {
        "request_sha256": request_sha256,
        "jobs": list(jobs),
        "when": now_utc(),
        "record": record,
    }
    made = json.dumps(entry, sort_keys=True)
    name = finished_map(workload)
    found = cluster.find(CONFIG_MAPS, name)
    others = {key: str(value) for key, value in mapping(found, "data").items() if key != run}
    newest = sorted(others, key=lambda key: text(_entry(others[key]), "when"), reverse=True)
    room = _KEPT_BYTES - len(made.encode())
    data: dict[str, Json] = {run: made}
    for place, key in enumerate(newest, 2):
        room -= len(others[key].encode())
        if place > KEPT_RUNS or room < 0:
            # In a merge patch null takes a key away.
            data[key] = None
    if found is None:
        labels: dict[str, Json] = {MANAGED_BY_LABEL: "stoker"}
        described: dict[str, Json] = {"name": name, "labels": labels}
        document: Document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": described,
            "data": data,
        }
        try:
            cluster.create(CONFIG_MAPS, document)
            return
        except ServiceError as err:
            # Made by another run meanwhile.
            if err.kind != "taken":
                raise
    cluster.patch(CONFIG_MAPS, name, {"data": data})


def _entry(kept: str) -> Document:
    try:
        return mapping(json.loads(kept or "{}"))
    except ValueError:
        return {}


def uids_of_run(cluster: ClusterApi, request: KubernetesRequest) -> list[str]:
    """Returns the uids of the jobs that a request's run has."""
    jobs = jobs_of_run(cluster, _resource(request.main), request.job.run_name)
    return [job_state(job).uid for job in jobs]


def jobs_of_run(
    cluster: ClusterApi, resource: Resource, run: str, *, run_id: str = "", workload: str = ""
) -> Iterator[Document]:
    """Yields the jobs of a workload's run that are still there.

    Args:
        cluster: That has them.
        resource: JobSets or TrainJobs.
        run: Its name: one job for each of its tries.
        run_id: Of the pipeline's run, whose profile may be a job, too.
        workload: Its name: the pipeline's run may train others as well.
    """
    try:
        found, _ = cluster.list(resource, query=_OURS)
    except ServiceError as err:
        # A cluster that does not know the kind has no job of it.
        if err.kind != "missing":
            raise
        return
    for job in found:
        is_workloads = bool(workload) and _annotation(job, WORKLOAD_NAME_ANNOTATION) == workload
        if (is_workloads and _is_step_of(job, run_id)) or _run_of(job) == run:
            yield job


def _annotation(job: Document, key: str) -> str:
    return text(mapping(job, "metadata", "annotations"), key)


def _run_of(job: Document) -> str:
    return _annotation(job, RUN_ANNOTATION)


def _is_step_of(job: Document, run_id: str) -> bool:
    return bool(run_id) and _annotation(job, PIPELINE_RUN_ANNOTATION) == run_id


def delete_jobs_of(cluster: ClusterApi, run_id: str) -> list[str]:
    """Deletes the jobs of a pipeline's run that have not ended; returns what it deleted, in words.

    Does not wait for their pods.

    Args:
        cluster: That runs them.
        run_id: The pipeline's own: the names of its trainings end with its first characters.

    Raises:
        ServiceError: If the cluster refuses, or does not answer.
    """
    deleted, refusals = [], []
    for resource in (JOBSETS, TRAINJOBS):
        try:
            found, _ = cluster.list(resource, query=_OURS)
        except ServiceError as err:
            # A cluster need not have both, nor a Role rights on both.
            if err.kind not in ("missing", "denied"):
                raise
            refusals.append(err)
            continue
        for job in found:
            state, name = job_state(job), name_of(job)
            is_its = _is_step_of(job, run_id) or is_run_of(_run_of(job), run_id)
            if is_its and not (state.has_ended or state.is_deleted):
                cluster.delete(resource, name, uid=state.uid)
                deleted.append(f"{job.get('kind') or resource.plural} {name}")
    if len(refusals) > 1:
        raise refusals[0]
    return deleted


def _create_or_adopt(
    cluster: ClusterApi,
    request: KubernetesRequest,
    owners: list[Document],
    attempt: _Attempt,
    log: Log,
    *,
    run_id: str,
) -> Document:
    resource = _resource(request.main)
    seconds = request.layout.settings.grace_seconds + GONE_SECONDS
    deadline = cluster.clock() + 2 * seconds
    while cluster.clock() < deadline:
        try:
            attempt.has_asked = True
            job = cluster.create(resource, owned(_of_pipeline(request, run_id), owners))
            log.event(EventName.JOB_CREATED, job=request.name, namespace=cluster.namespace)
            return job
        except ServiceError as err:
            if err.kind != "taken":
                raise
        # Its state decides: it may have failed, be about to go, or be an earlier attempt's.
        found = cluster.find(resource, request.name)
        # It was deleted between the two calls: made again.
        if found is None:
            continue
        state = job_state(found)
        _check_is_ours(found, request, namespace=cluster.namespace)
        if state.phase != "failed" and not state.is_deleted:
            attempt.is_adopted = True
            _adopt(cluster, found, state, owners, log)
            return found
        if request.runtime is not None and request.runtime_is_ours:
            keep_runtime(cluster, name_of(request.runtime), owners, job_uid=state.uid)
            attempt.runtime_is_made = True
        if state.is_deleted:
            cluster.sleep(POLL_SECONDS)
        else:
            log.event(EventName.FAILED_JOB_REPLACED, job=request.name, reason=state.message)
            delete_and_wait(cluster, resource, request.name, uid=state.uid, seconds=seconds)
        if request.runtime is not None:
            provide_runtime(cluster, request, owners, log=log)
    raise PlatformError(
        f"an earlier {request.main['kind']} of that name is not gone after {2 * seconds:g} s",
        where=_place(request, cluster.namespace),
        fix="check what keeps it: kubectl get pods; or choose another --name",
    )


def _of_pipeline(request: KubernetesRequest, run_id: str) -> Document:
    """Returns the job with the run of the pipeline that a step makes it for, and its workload."""
    if not run_id:
        return request.main
    described = mapping(request.main, "metadata")
    annotations = {**mapping(described, "annotations"), PIPELINE_RUN_ANNOTATION: run_id}
    if workload := name_of_workload(request.job.platform_settings):
        annotations[WORKLOAD_NAME_ANNOTATION] = workload
    return {**request.main, "metadata": {**described, "annotations": annotations}}


def _check_is_ours(found: Document, request: KubernetesRequest, *, namespace: str) -> None:
    annotations = mapping(found, "metadata", "annotations")
    if annotations.get(REQUEST_ANNOTATION) == request.request_sha256:
        return
    run = text(annotations, RUN_ANNOTATION)
    whose = f"of run {run}, with other settings or another plan" if run else "not stoker's"
    raise PlatformError(
        f"there is another {request.main['kind']} of that name: it is {whose}",
        where=_place(request, namespace),
        fix="choose another --name, or delete it: kubectl delete "
        f"{_resource(request.main).plural} {request.name} -n {namespace}",
    )


def _adopt(
    cluster: ClusterApi, found: Document, state: ObjectState, owners: list[Document], log: Log
) -> None:
    name = name_of(found)
    log.event(EventName.JOB_RESUMED, job=name, namespace=cluster.namespace, phase=state.phase)
    known = owners_of(found)
    new = [o for o in owners if o["uid"] not in {text(known_one, "uid") for known_one in known}]
    if not new or state.has_ended:
        return
    # Next to the owner that an earlier attempt had: the job goes with the last of them.
    references: Document = {"metadata": {"ownerReferences": [*known, *new]}}
    try:
        cluster.patch(_resource(found), name, references)
    except ServiceError as err:
        log.event(EventName.JOB_OWNER_FAILED, job=name, why=err.what)


def _provide_parts(
    cluster: ClusterApi,
    request: KubernetesRequest,
    job: Document,
    *,
    is_adopted: bool,
    log: Log,
) -> None:
    """Makes Secret, configuration and disruption budget, which the job owns."""
    if is_adopted and job_state(job).has_ended:
        return
    token = {TOKEN_KEY: secrets.token_bytes(TOKEN_BYTES).hex()}
    # The token first: without it a data host does not even start.
    for resource, document in (
        (SECRETS, {**request.secret, "stringData": token}),
        (CONFIG_MAPS, request.config),
        *([(CONFIG_MAPS, request.records)] if request.records else []),
    ):
        _create_part(cluster, resource, document, job, is_adopted=is_adopted)
    with _unless_denied(request.name, log):
        _create_part(cluster, BUDGETS, request.budget, job, is_adopted=is_adopted)
    if request.runtime is not None and request.runtime_is_ours and not is_adopted:
        # Not waited for: a runtime goes only when no TrainJob uses it any more.
        reference = object_reference(job, is_waited_for=False)
        name = name_of(request.runtime)
        cluster.patch(RUNTIMES, name, {"metadata": {"ownerReferences": [dict(reference)]}})


@contextlib.contextmanager
def _unless_denied(job: str, log: Log) -> Iterator[None]:
    """Lets a job be without a disruption budget: then no drain waits for it."""
    try:
        yield
    except ServiceError as err:
        if err.kind != "denied":
            raise
        log.event(EventName.DISRUPTION_BUDGET_CREATE_FAILED, job=job, why=err.what)


def _guard_follower(
    cluster: ClusterApi, request: KubernetesRequest, follower: Follower, *, log: Log
) -> None:
    """Makes a drain wait for a step's pod that follows the job, until it has ended."""
    if not (follower.owner and follower.labels):
        return
    budget = follower_budget(request.layout, follower.owner, follower.labels)
    with _unless_denied(request.name, log):
        try:
            cluster.create(BUDGETS, budget)
        except ServiceError as err:
            # Of an earlier attempt.
            if err.kind != "taken":
                raise


def _create_part(
    cluster: ClusterApi, resource: Resource, document: Document, job: Document, *, is_adopted: bool
) -> None:
    is_waited_for = True
    deadline = cluster.clock() + LEFTOVER_SECONDS
    while True:
        reference = object_reference(job, is_waited_for=is_waited_for)
        try:
            cluster.create(resource, owned(document, [reference]))
            return
        except ServiceError as err:
            if is_waited_for and "blockOwnerDeletion" in err.what:
                # Some clusters let only those wait who may change the owner's finalizers.
                is_waited_for = False
                continue
            if err.kind != "taken":
                raise
            # If the first attempt was sent and not answered, the object is this run's.
            if is_adopted or err.is_repeated:
                return
            if cluster.clock() >= deadline:
                raise PlatformError(
                    f"there is a {document['kind']} {name_of(document)} that is not this run's",
                    where=f"namespace {cluster.namespace}",
                    fix=f"kubectl delete {resource.plural} {name_of(document)} -n "
                    f"{cluster.namespace}, or choose another --name",
                ) from err
        cluster.sleep(POLL_SECONDS)


def _abandon(cluster: ClusterApi, request: KubernetesRequest, attempt: _Attempt, log: Log) -> None:
    """Deletes what this attempt made of a job that nobody will follow."""
    try:
        if attempt.has_asked:
            resource = _resource(request.main)
            found = cluster.find(resource, request.name)
            annotations = mapping(found, "metadata", "annotations")
            if found and annotations.get(REQUEST_ANNOTATION) == request.request_sha256:
                state = job_state(found)
                if not state.has_ended:
                    cluster.delete(resource, request.name, uid=state.uid)
                    log.event(EventName.JOB_DELETED, job=request.name)
        if attempt.runtime_is_made and request.runtime:
            cluster.delete(RUNTIMES, name_of(request.runtime))
    except StokerError as err:
        log.event(EventName.JOB_DELETE_FAILED, job=request.name, why=err.what)


def _resource(document: Document) -> Resource:
    return OF_KIND[text(document, "kind")]


def _place(request: KubernetesRequest, namespace: str) -> str:
    return f"{request.main['kind']} {request.name} in namespace {namespace}"


def rules(settings: KubernetesSettings) -> list[Json]:
    """Returns the Role's rules; deleting a job deletes what it owns, without another right."""
    # Patched: an attempt that adopts a job adds its own Workflow to the owners.
    job = ("create", "get", "list", "watch", "patch", "delete")
    found = [_rule("jobset.x-k8s.io", ["jobsets"], job)]
    if settings.api == "trainer":
        found = [
            _rule("trainer.kubeflow.org", ["trainjobs"], job),
            # Patched: it is there before the TrainJob that comes to own it. Or only read.
            _rule(
                "trainer.kubeflow.org",
                ["trainingruntimes"],
                ("get",) if settings.runtime else ("create", "get", "patch", "delete"),
            ),
        ]
    return [
        *found,
        # Made after the job, which owns them: a token is never read back.
        _rule("", ["secrets"], ("create",)),
        # Patched: the lease of whoever follows the job. Read: what a pipeline's last step needs to
        # follow a job, and the records by which a retried step need not train again.
        _rule("", ["configmaps"], ("create", "get", "patch")),
        # A drain waits for the dnn group.
        _rule(BUDGETS.group, [BUDGETS.plural], ("create",)),
        # One is read alone: the follower's own, whose Workflow owns the job.
        _rule("", ["pods"], ("get", "list", "watch")),
        _rule("", ["events"], ("list", "watch")),
        _rule("", ["pods/log"], ("get",)),
        # Whether the run is being cancelled: else a follower that is told to end leaves its job.
        _rule(WORKFLOWS.group, [WORKFLOWS.plural], ("get",)),
    ]


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> dict[str, Json]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def check_rights(
    cluster: ClusterApi, settings: KubernetesSettings, *, is_pod: bool, log: Log
) -> None:
    """Checks that the caller has the rights that a run takes.

    Args:
        cluster: Cluster that is to run it.
        settings: Settings of the workload.
        is_pod: Whether the caller is a pod, which a run of a pipeline may have.
        log: Told of rights that a run can do without.

    A cluster that does not answer such questions need not refuse the calls themselves: then the
    first call that it refuses tells.

    Raises:
        PlatformError: With all rights that are missing, and the Role that has them.
    """
    try:
        missing = [
            action
            for action in needed_rights(settings, cluster.namespace)
            if (is_pod or action.resource != WORKFLOWS.plural) and not is_allowed(cluster, action)
        ]
    except ServiceError as err:
        # Not reached, or not known: the calls themselves would fare the same.
        if err.code in ("", "401"):
            raise
        return
    vital = [action for action in missing if not is_useful(action)]
    if vital:
        raise denied([action.right for action in vital], settings, namespace=cluster.namespace)
    for action in missing:
        log.event(EventName.PERMISSION_MISSING, right=action.right, namespace=action.namespace)


def explained_denial(
    err: ServiceError, settings: KubernetesSettings, *, namespace: str
) -> PlatformError:
    """Returns the error itself, or, where a right was missing, with the Role that has it."""
    if err.kind != "denied":
        return err
    return denied([err.action], settings, namespace=namespace, user=err.user)


def denied(
    rights: Sequence[str], settings: KubernetesSettings, *, namespace: str, user: str = ""
) -> PlatformError:
    """Returns the error for missing rights: all of them by name, and what to apply."""
    named = ", ".join(rights)
    role: dict[str, Json] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "stoker-submit", "namespace": namespace},
        "rules": rules(settings),
    }
    return PlatformError(
        f"rights are missing in namespace {namespace}: {named}",
        where=f"role of {user or 'the caller'}",
        fix="let an administrator add the account to configs/kubernetes/kustomization.yaml "
        f"(kubectl apply -k configs/kubernetes). This is its Role:\n{manifest([role])}".rstrip(),
    )


def needed_rights(settings: KubernetesSettings, namespace: str) -> Iterator[Action]:
    """Yields the rights of the Role: what is asked is what an administrator applies."""
    for rule in mappings({"rules": rules(settings)}, "rules"):
        for group in texts(rule, "apiGroups"):
            for resource in texts(rule, "resources"):
                for verb in texts(rule, "verbs"):
                    yield Action(verb=verb, group=group, resource=resource, namespace=namespace)


def is_allowed(cluster: ClusterApi, action: Action) -> bool:
    """Returns whether the caller may do it, as the cluster says."""
    resource, _, part = action.resource.partition("/")
    asked = {
        "namespace": action.namespace,
        "verb": action.verb,
        "group": action.group,
        "resource": resource,
        "subresource": part,
    }
    review: Document = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in asked.items() if value}},
    }
    return mapping(cluster.create(ACCESS_REVIEWS, review), "status").get("allowed") is True


def is_useful(action: Action) -> bool:
    """Returns whether a run does without the right, and loses something."""
    return action.resource in _USEFUL or f"{action.verb} {action.resource}" in _USEFUL
