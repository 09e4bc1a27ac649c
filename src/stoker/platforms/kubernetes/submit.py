"""Submission of a job, exactly once.

The job comes first and owns the other objects, so that they are deleted with it. Its pods wait for
their token until the Secret exists. If this process is killed in between, the next attempt makes
the rest: no account needs the right to read the token.

An attempt that finds its job continues with it. A failed job is replaced under the same name;
another job of that name is left alone.
"""

import secrets
from contextlib import suppress

from stoker.environment import OwnPod, own_pod
from stoker.errors import PlatformError, ServiceError, StokerError
from stoker.logs import EventName, Log
from stoker.platforms.kubernetes.api import (
    PODS,
    RUNTIMES,
    ClusterApi,
    resource_of,
    uid_of,
)
from stoker.platforms.kubernetes.objects import KubernetesRequest
from stoker.platforms.kubernetes.pods import (
    PIPELINE_RUN_LABEL,
    REQUEST_ANNOTATION,
    RUN_ANNOTATION,
    TOKEN_KEY,
    WORKLOAD_LABEL,
)
from stoker.platforms.kubernetes.state import annotation_of, delete_and_wait, job_status
from stoker.records import Json, Workload
from stoker.records.base import Document, mapping, mappings, text
from stoker.repeat import Suppressed

# A failed job of the name, with all it owns.
GONE_SECONDS = 120.0
# What an earlier job of the name owned may be deleted some seconds later than it.
LEFTOVER_TRIES = 10
# As many as the feed needs; the Secret has them as hexadecimal digits.
TOKEN_BYTES = 32


def start(cluster: ClusterApi, request: KubernetesRequest, *, log: Log) -> Document:
    """Creates the job and its parts, or adopts one; returns it."""
    adopted = _existing(cluster, request)
    if adopted:
        log.event(EventName.JOB_RESUMED, job=request.name, namespace=cluster.namespace)
        if job_status(adopted).has_ended:
            return adopted
    try:
        job = adopted or _create_job(cluster, request)
        if adopted is None:
            log.event(EventName.JOB_CREATED, job=request.name, namespace=cluster.namespace)
        owner = {key: text(request.main, key) for key in ("apiVersion", "kind")}
        owner |= {"name": request.name, "uid": uid_of(job)}
        owned: Document = {"ownerReferences": [owner]}
        values: Json = {
            **mapping(request.secret, "stringData"),
            TOKEN_KEY: secrets.token_hex(TOKEN_BYTES),
        }
        # The token first: without it a data host does not even start.
        for part in ({**request.secret, "stringData": values}, request.config):
            _create_part(cluster, _with_metadata(part, owned), is_adopted=adopted is not None)
        if request.runtime:
            cluster.patch(RUNTIMES, request.name, {"metadata": owned})
    except BaseException as err:
        # An adopted job continues when this attempt fails, unless the user asked to stop.
        if adopted is None or not isinstance(err, StokerError):
            _abandon(cluster, request)
        raise
    return job


def is_going_on(cluster: ClusterApi, request: KubernetesRequest) -> bool:
    """Whether a job of this request runs, waits, or has succeeded."""
    job = cluster.find(resource_of(request.main), request.name)
    if job is None or annotation_of(job, REQUEST_ANNOTATION) != request.request_sha256:
        return False
    return job_status(job).phase != "failed"


def _existing(cluster: ClusterApi, request: KubernetesRequest) -> Document | None:
    """Returns this run's job of an earlier attempt; one that failed, or is deleted, goes first."""
    resource = resource_of(request.main)
    found = cluster.find(resource, request.name)
    if found is None:
        return None
    if annotation_of(found, REQUEST_ANNOTATION) != request.request_sha256:
        run = annotation_of(found, RUN_ANNOTATION)
        whose = f"of run {run}, with other settings or another plan" if run else "not stoker's"
        raise PlatformError(
            f"another {request.main['kind']} has the name {request.name}: it is {whose}",
            where=f"namespace {cluster.namespace}",
            fix="choose another --name, or delete it: kubectl delete "
            f"{resource.plural} {request.name} -n {cluster.namespace}",
        )
    is_deleted = "deletionTimestamp" in mapping(found, "metadata")
    if job_status(found).phase != "failed" and not is_deleted:
        return found
    delete_and_wait(cluster, resource, request.name, uid=uid_of(found), seconds=GONE_SECONDS)
    return None


def _create_job(cluster: ClusterApi, request: KubernetesRequest) -> Document:
    pod = own_pod()
    metadata = {"ownerReferences": _workflow_of(cluster, pod)}
    if request.runtime:
        if leftover := cluster.find(RUNTIMES, request.name):
            # Of an attempt that made no TrainJob.
            uid = uid_of(leftover)
            delete_and_wait(cluster, RUNTIMES, request.name, uid=uid, seconds=GONE_SECONDS)
        cluster.create(_with_metadata(request.runtime, metadata))
    settings = request.job.platform_settings
    if pod and pod.run_id and isinstance(settings, Workload):
        # What finds it where this process's record is lost.
        run = {PIPELINE_RUN_LABEL: pod.run_id, WORKLOAD_LABEL: settings.name}
        metadata["labels"] = {**mapping(request.main, "metadata", "labels"), **run}
    try:
        return cluster.create(_with_metadata(request.main, metadata))
    except ServiceError as err:
        # A call that was sent and not answered has made it.
        found = _existing(cluster, request) if err.kind == "taken" else None
        if found is None:
            raise
        return found


def _workflow_of(cluster: ClusterApi, pod: OwnPod | None) -> Json:
    """Returns the owner of a job: the Workflow that controls the pipeline's step, if it is one.

    The job so lasts as long as the pipeline's run.
    """
    shown = None
    with Suppressed("denied"):
        shown = cluster.find(PODS, pod.name) if pod else None
    # Another pod may have its name in this namespace.
    if pod is None or uid_of(shown) != pod.uid:
        return []
    owners = mappings(shown, "metadata", "ownerReferences")
    keys = ("apiVersion", "kind", "name", "uid")
    return [{key: each[key] for key in keys} for each in owners if each["kind"] == "Workflow"]


def _with_metadata(document: Document, changes: Document) -> Document:
    given = {key: value for key, value in changes.items() if value}
    return {**document, "metadata": {**mapping(document, "metadata"), **given}}


def _create_part(cluster: ClusterApi, document: Document, *, is_adopted: bool) -> None:
    for _ in range(LEFTOVER_TRIES):
        try:
            cluster.create(document)
            return
        except ServiceError as err:
            # Taken: an earlier attempt has made it, or a call that was sent and not answered; or it
            # is an earlier job's, and about to be deleted.
            if err.kind != "taken":
                raise
        if is_adopted:
            return
        cluster.sleep(1.0)


def _abandon(cluster: ClusterApi, request: KubernetesRequest) -> None:
    """Deletes what this attempt made: the job will have no follower."""
    made = [(resource_of(request.main), request.request_sha256)]
    if request.runtime:
        made.append((RUNTIMES, ""))
    with suppress(StokerError):
        for resource, digest in made:
            found = cluster.find(resource, request.name)
            if found and annotation_of(found, REQUEST_ANNOTATION) == digest:
                cluster.delete(resource, request.name, uid=uid_of(found))
