"""Submission of a job, exactly once.

The job comes first and owns the other objects, so that they are deleted with it. Its pods wait for
their token until the Secret exists. If this process is killed in between, the next attempt makes
the rest: no account needs the right to read the token.

An attempt that finds its job continues with it. A failed job is replaced under the same name;
another job of that name is left alone.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.environment import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE
from stoker.errors import PlatformError, ServiceError, StokerError, TerminatedError
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.kubernetes.api import (
    BUDGETS,
    RUNTIMES,
    ClusterApi,
    name_of,
    text,
)
from stoker.platforms.kubernetes.follower import Follower, LeaseKeeper
from stoker.platforms.kubernetes.jobset import metadata
from stoker.platforms.kubernetes.layout import (
    PIPELINE_RUN_ANNOTATION,
    REQUEST_ANNOTATION,
    RUN_ANNOTATION,
    TOKEN_KEY,
    WORKLOAD_NAME_ANNOTATION,
    name_of_workload,
)
from stoker.platforms.kubernetes.owned import follower_budget
from stoker.platforms.kubernetes.request import KubernetesRequest
from stoker.platforms.kubernetes.state import (
    POLL_SECONDS,
    ObjectState,
    delete_and_wait,
    job_state,
    object_reference,
    owned,
    owners_of,
    resource_of,
)
from stoker.records.base import Document, mapping, write_text
from stoker.repeat import Suppressed

# A runtime is deleted when the last TrainJob that uses it has gone.
GONE_SECONDS = 120.0
# As many as the feed needs; the Secret has them as hexadecimal digits.
TOKEN_BYTES = 32
# What an earlier job of the name owned may be deleted a little later than it.
LEFTOVER_SECONDS = 30.0


# In the run's folder: the last job that was submitted from it, and when it had ended.
_SUBMITTED = "submitted.json"


def note_submitted(request: KubernetesRequest, *, uid: str, namespace: str) -> None:
    """Writes down in the run's folder which job exists now, for a command that finds it gone."""
    facts = {"platform": "kubernetes", "kind": text(request.main, "kind"), "job": request.name}
    facts |= {"namespace": namespace, "uid": uid, "request_sha256": request.request_sha256}
    _note(request.job.run_dir, {**facts, "when": now_utc()})


def note_ended(run_dir: Path, *, uid: str) -> None:
    """Adds that the job has ended, if it is the last one."""
    note = _submitted(run_dir)
    if text(note, "uid") == uid and "ended" not in note:
        _note(run_dir, {**note, "ended": now_utc()})


def has_submitted(run_dir: Path) -> bool:
    """Whether a job was submitted from this folder whose end was not seen."""
    note = _submitted(run_dir)
    return bool(note) and "ended" not in note


def vanished(cluster: ClusterApi, request: KubernetesRequest) -> str:
    """Returns words on a job of the run's folder that is gone without an end; empty: none is."""
    note = _submitted(request.job.run_dir)
    is_left = bool(note) and "ended" not in note and note.get("namespace") == cluster.namespace
    name = text(note, "job")
    if not is_left or cluster.find(resource_of(request.main), name) is not None:
        return ""
    return (
        f"{text(note, 'kind')} {name} was submitted at {text(note, 'when')} and is gone: it may "
        "have trained to its end, and its record is lost"
    )


def _submitted(run_dir: Path) -> Document:
    with contextlib.suppress(OSError, ValueError):
        return mapping(json.loads((run_dir / _SUBMITTED).read_text(encoding="utf-8")))
    return {}


def _note(run_dir: Path, facts: Document) -> None:
    # The job runs, whatever the disk says.
    with contextlib.suppress(OSError, StokerError):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / _SUBMITTED, json.dumps(facts, indent=2) + "\n")


def provide_runtime(
    cluster: ClusterApi, request: KubernetesRequest, owners: Sequence[Document], *, log: Log
) -> bool:
    """Makes the runtime, first owned by `owners`, unless it exists; returns whether it was made."""
    wanted = request.runtime
    assert wanted is not None
    name = name_of(wanted)
    digest = _digest(wanted)
    if not request.runtime_is_ours:
        runtime = cluster.find(RUNTIMES, name)
        if _digest(runtime) != digest:
            what = "is for another plan or workload" if runtime else "does not exist"
            raise PlatformError(
                f"TrainingRuntime {name} {what}",
                where=f"namespace {cluster.namespace}, key kubernetes.runtime",
                fix="let an administrator apply the TrainingRuntime of stoker train --dry-run, "
                "or leave kubernetes.runtime out",
            )
        return False
    deadline = cluster.clock() + GONE_SECONDS
    while True:
        with Suppressed("taken"):
            cluster.create(RUNTIMES, owned(wanted, owners))
            return True
        runtime = cluster.find(RUNTIMES, name)
        if runtime is None:
            continue
        if not job_state(runtime).is_deleted:
            if _digest(runtime) == digest:
                return False
            # Without a TrainJob it is an earlier attempt's.
            if any(text(owner, "kind") == "TrainJob" for owner in owners_of(runtime)):
                _refuse_runtime(name, cluster.namespace)
            log.event(EventName.RUNTIME_REPLACED, runtime=name)
            cluster.delete(RUNTIMES, name)
        if cluster.clock() >= deadline:
            _refuse_runtime(name, cluster.namespace)
        cluster.sleep(POLL_SECONDS)


def keep_runtime(
    cluster: ClusterApi, name: str, owners: Sequence[Document], *, job_uid: str
) -> None:
    """Takes a runtime from a TrainJob that will be deleted, by its uid, for the next TrainJob.

    Until that exists, `owners` own the runtime.
    """
    while (runtime := cluster.find(RUNTIMES, name)) is not None:
        owners_now = owners_of(runtime)
        kept = [owner for owner in owners_now if text(owner, "uid") != job_uid]
        if not any(text(owner, "kind") == "TrainJob" for owner in kept):
            kept = _joined(kept, owners)
        if kept == owners_now:
            return
        version = text(runtime, "metadata", "resourceVersion")
        described: Document = {"ownerReferences": kept, "resourceVersion": version}
        try:
            cluster.patch(RUNTIMES, name, {"metadata": described})
            return
        except ServiceError as err:
            # Changed or gone since it was read.
            if err.code not in ("404", "409"):
                raise


def _joined(owners: list[Document], others: Sequence[Document]) -> list[Document]:
    uids = {text(owner, "uid") for owner in owners}
    return [*owners, *(other for other in others if text(other, "uid") not in uids)]


def _refuse_runtime(name: str, namespace: str) -> None:
    raise PlatformError(
        f"another TrainingRuntime has the name {name}, and a TrainJob uses it",
        where=f"namespace {namespace}",
        fix="choose another --name",
    )


def _digest(document: Document | None) -> str:
    return text(document, "metadata", "annotations", REQUEST_ANNOTATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedObjects:
    """A job in the cluster, with the lease by which its leader knows of the follower."""

    uid: str
    created_at: str
    is_adopted: bool
    lease: LeaseKeeper | None = None


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """Steps of an attempt so far, to be undone if it fails."""

    has_asked: bool = False
    runtime_is_made: bool = False
    is_adopted: bool = False


def adopt(
    cluster: ClusterApi, request: KubernetesRequest, *, follower: Follower, log: Log
) -> StartedObjects:
    """Adopts the job of an earlier attempt, in any state; raises PlatformError if it is gone."""
    job = cluster.find(resource_of(request.main), request.name)
    if job is None:
        raise PlatformError(
            f"the job {request.name} is gone", where=_place(request, cluster.namespace)
        )
    _check_is_ours(job, request, namespace=cluster.namespace)
    log.event(EventName.JOB_RESUMED, job=request.name, namespace=cluster.namespace)
    _guard_follower(cluster, request, follower, log=log)
    return _started(cluster, request, job, follower, is_adopted=True, log=log)


def start(
    cluster: ClusterApi, request: KubernetesRequest, *, follower: Follower, log: Log
) -> StartedObjects:
    """Creates the job, owned by the follower's Workflow, and its parts; or adopts one."""
    attempt = _Attempt()
    owners = [follower.owner] if follower.owner else []
    try:
        if request.runtime is not None:
            attempt.runtime_is_made = provide_runtime(cluster, request, owners, log=log)
        run_id = follower.pod.run_id if follower.pod else ""
        job = _create_or_adopt(cluster, request, owners, attempt, log, run_id=run_id)
        if not (attempt.is_adopted and job_state(job).has_ended):
            _provide_parts(cluster, request, job, is_adopted=attempt.is_adopted, log=log)
        _guard_follower(cluster, request, follower, log=log)
    except BaseException as err:
        # An adopted job continues when this attempt fails, unless the user asked to stop.
        is_over = not isinstance(err, StokerError)
        if isinstance(err, TerminatedError) and follower.pod:
            is_over = bool(follower.is_cancelled(cluster))
        if is_over or not attempt.is_adopted:
            _abandon(cluster, request, attempt, log)
        raise
    return _started(cluster, request, job, follower, is_adopted=attempt.is_adopted, log=log)


def _started(
    cluster: ClusterApi,
    request: KubernetesRequest,
    job: Document,
    follower: Follower,
    *,
    is_adopted: bool,
    log: Log,
) -> StartedObjects:
    described = mapping(job, "metadata")
    return StartedObjects(
        uid=text(described, "uid"),
        created_at=text(described, "creationTimestamp"),
        is_adopted=is_adopted,
        lease=_lease(cluster, request, job, follower, is_adopted=is_adopted, log=log),
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
    """Returns the lease, renewed once; None without minutes, rights, or a job that runs."""
    if job_state(job).has_ended:
        return None
    minutes = follower.lease_minutes(request.layout.settings)
    keeper = LeaseKeeper(cluster, job=request.name, minutes=minutes, log=log)
    if is_adopted and keeper.renew():
        return keeper if minutes else None
    if not minutes:
        return None
    # Unlimited at first: without the right to renew it, it must not end the run.
    document: Document = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(request.layout, name=request.layout.names.lease),
        "data": {LEASE_RENEWED_FILE: "", LEASE_MINUTES_FILE: "0"},
    }
    try:
        _create_part(cluster, document, job, is_adopted=True)
    except ServiceError as err:
        log.event(EventName.LEASE_CREATE_FAILED, job=request.name, why=err.what)
        return None
    return keeper if keeper.renew() else None


def is_going_on(
    cluster: ClusterApi, request: KubernetesRequest, *, or_failed: bool = False
) -> bool:
    """Whether a job of this request runs, waits, or has succeeded (or failed, if `or_failed`)."""
    job = cluster.find(resource_of(request.main), request.name)
    if job is None or _digest(job) != request.request_sha256:
        return False
    state = job_state(job)
    return (or_failed or state.phase != "failed") and not state.is_deleted


def _create_or_adopt(
    cluster: ClusterApi,
    request: KubernetesRequest,
    owners: list[Document],
    attempt: _Attempt,
    log: Log,
    *,
    run_id: str,
) -> Document:
    resource = resource_of(request.main)
    seconds = request.layout.grace_seconds + GONE_SECONDS
    # Twice: it may wait for another's deletion, and then delete a failed job itself.
    deadline = cluster.clock() + 2 * seconds
    while cluster.clock() < deadline:
        attempt.has_asked = True
        with Suppressed("taken"):
            job = cluster.create(resource, owned(_annotated(request, run_id), owners))
            log.event(EventName.JOB_CREATED, job=request.name, namespace=cluster.namespace)
            return job
        existing = cluster.find(resource, request.name)
        if existing is None:  # deleted between the two calls
            continue
        state = job_state(existing)
        _check_is_ours(existing, request, namespace=cluster.namespace)
        if state.phase != "failed" and not state.is_deleted:
            attempt.is_adopted = True
            _adopt(cluster, existing, state, owners, log)
            return existing
        if request.runtime is not None and request.runtime_is_ours:
            keep_runtime(cluster, name_of(request.runtime), owners, job_uid=state.uid)
            attempt.runtime_is_made = True
        # Someone else deletes it: waiting is enough.
        if state.is_deleted:
            cluster.sleep(POLL_SECONDS)
        else:
            log.event(EventName.FAILED_JOB_REPLACED, job=request.name, reason=state.message)
            delete_and_wait(cluster, resource, request.name, uid=state.uid, seconds=seconds)
        if request.runtime is not None:
            provide_runtime(cluster, request, owners, log=log)
    raise PlatformError(
        f"the previous {request.main['kind']} was not deleted within {2 * seconds:g} s",
        where=_place(request, cluster.namespace),
        fix="check what keeps it: kubectl get pods; or choose another --name",
    )


def _annotated(request: KubernetesRequest, run_id: str) -> Document:
    """Returns the job with the pipeline's run and the workload, which a lost record needs."""
    if not run_id:
        return request.main
    described = mapping(request.main, "metadata")
    annotations = {**mapping(described, "annotations"), PIPELINE_RUN_ANNOTATION: run_id}
    if workload := name_of_workload(request.job.platform_settings):
        annotations[WORKLOAD_NAME_ANNOTATION] = workload
    return {**request.main, "metadata": {**described, "annotations": annotations}}


def _check_is_ours(found: Document, request: KubernetesRequest, *, namespace: str) -> None:
    if _digest(found) == request.request_sha256:
        return
    whose = "not stoker's"
    if run := text(found, "metadata", "annotations", RUN_ANNOTATION):
        whose = f"of run {run}, with other settings or another plan"
    raise PlatformError(
        f"another {request.main['kind']} has this name: it is {whose}",
        where=_place(request, namespace),
        fix="choose another --name, or delete it: kubectl delete "
        f"{resource_of(request.main).plural} {request.name} -n {namespace}",
    )


def _adopt(
    cluster: ClusterApi, found: Document, state: ObjectState, owners: list[Document], log: Log
) -> None:
    name = name_of(found)
    log.event(EventName.JOB_RESUMED, job=name, namespace=cluster.namespace, phase=state.phase)
    present_owners = owners_of(found)
    all_owners = _joined(present_owners, owners)
    if all_owners == present_owners or state.has_ended:
        return
    # With an earlier attempt's owner: the job goes with the last of them.
    references: Document = {"metadata": {"ownerReferences": all_owners}}
    try:
        cluster.patch(resource_of(found), name, references)
    except ServiceError as err:
        log.event(EventName.JOB_OWNER_FAILED, job=name, why=err.what)


def _provide_parts(
    cluster: ClusterApi, request: KubernetesRequest, job: Document, *, is_adopted: bool, log: Log
) -> None:
    token = {TOKEN_KEY: secrets.token_hex(TOKEN_BYTES)}
    # The token first: without it a data host does not even start.
    for part in ({**request.secret, "stringData": token}, request.config, request.records):
        if part:
            _create_part(cluster, part, job, is_adopted=is_adopted)
    with _unless_denied(request.name, log):
        _create_part(cluster, request.budget, job, is_adopted=is_adopted)
    if request.runtime is not None and request.runtime_is_ours and not is_adopted:
        # Not waited for: a runtime is deleted only when no TrainJob uses it.
        owners = [object_reference(job, is_waited_for=False)]
        patch: Document = {"metadata": {"ownerReferences": owners}}
        cluster.patch(RUNTIMES, name_of(request.runtime), patch)


@contextlib.contextmanager
def _unless_denied(job: str, log: Log) -> Iterator[None]:
    """Logs a refusal: without a disruption budget no drain waits for the job."""
    try:
        yield
    except ServiceError as err:
        if err.kind != "denied":
            raise
        log.event(EventName.DISRUPTION_BUDGET_CREATE_FAILED, job=job, why=err.what)


def _guard_follower(
    cluster: ClusterApi, request: KubernetesRequest, follower: Follower, *, log: Log
) -> None:
    """Makes a drain wait for the pod that follows the job."""
    if not (follower.owner and follower.labels):
        return
    budget = follower_budget(request.layout, follower.owner, follower.labels)
    # It may be an earlier attempt's.
    with _unless_denied(request.name, log), Suppressed("taken"):
        cluster.create(BUDGETS, budget)


def _create_part(
    cluster: ClusterApi, document: Document, job: Document, *, is_adopted: bool
) -> None:
    is_waited_for = True
    resource = resource_of(document)
    deadline = cluster.clock() + LEFTOVER_SECONDS
    while True:
        reference = object_reference(job, is_waited_for=is_waited_for)
        try:
            cluster.create(resource, owned(document, [reference]))
            return
        except ServiceError as err:
            if is_waited_for and "blockOwnerDeletion" in err.what:
                # Some clusters allow it only with the right to change the owner's finalizers.
                is_waited_for = False
                continue
            if err.kind != "taken":
                raise
            # A call that was sent and not answered made the object.
            if is_adopted or err.is_repeated:
                return
            if cluster.clock() >= deadline:
                name = name_of(document)
                namespace = cluster.namespace
                what = f"the {document['kind']} {name} exists and is not this run's"
                fix = f"kubectl delete {resource.plural} {name} -n {namespace}, or choose another"
                raise PlatformError(
                    what, where=f"namespace {namespace}", fix=f"{fix} --name"
                ) from err
        cluster.sleep(POLL_SECONDS)


def _abandon(cluster: ClusterApi, request: KubernetesRequest, attempt: _Attempt, log: Log) -> None:
    """Deletes what this attempt made: the job will have no follower."""
    try:
        if attempt.has_asked:
            resource = resource_of(request.main)
            job = cluster.find(resource, request.name)
            is_ours = _digest(job) == request.request_sha256
            if job and is_ours and not (state := job_state(job)).has_ended:
                cluster.delete(resource, request.name, uid=state.uid)
                log.event(EventName.JOB_DELETED, job=request.name)
        if attempt.runtime_is_made and request.runtime:
            cluster.delete(RUNTIMES, name_of(request.runtime))
    except StokerError as err:
        log.event(EventName.JOB_DELETE_FAILED, job=request.name, why=err.what)


def _place(request: KubernetesRequest, namespace: str) -> str:
    return f"{request.main['kind']} {request.name} in namespace {namespace}"
