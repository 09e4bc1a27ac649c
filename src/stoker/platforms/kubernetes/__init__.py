"""Kubernetes platform: a job is a JobSet, or a TrainJob with its TrainingRuntime.

A plan is made by `checks`, `layout`, `pod_template`, `jobset` and `request`, in this order; none of
them asks the cluster. `submit` sends it; `job` follows it to its end, reading `streams`, and
`troubles` decides for how long a host that does not run is waited for.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from stoker.environment import own_pod
from stoker.errors import ServiceError, StokerError
from stoker.logs import EventName, Log
from stoker.platforms.base import JobSpec, Platform
from stoker.platforms.kubernetes.api import (
    CONFIG_MAPS,
    JOBSETS,
    OF_KIND,
    TRAINJOBS,
    ClusterApi,
    name_of,
    text,
)
from stoker.platforms.kubernetes.follower import Follower, follower_of
from stoker.platforms.kubernetes.job import SERVICE, KubernetesRun
from stoker.platforms.kubernetes.layout import name_of_workload
from stoker.platforms.kubernetes.manifest import manifest
from stoker.platforms.kubernetes.project import PROJECT
from stoker.platforms.kubernetes.request import KubernetesRequest, plan_request
from stoker.platforms.kubernetes.rights import check_rights, explained_denial
from stoker.platforms.kubernetes.state import (
    finished_record,
    job_state,
    jobs_of_run,
    keep_finished,
    keep_profile,
    kept_profile,
    records_of,
    run_of,
    told_jobs,
    uids_of_run,
)
from stoker.platforms.kubernetes.submit import (
    adopt,
    has_submitted,
    is_going_on,
    note_submitted,
    start,
    vanished,
)
from stoker.records import Json, KubernetesSettings, PlatformSettings
from stoker.records.base import Document

__all__ = ["KubernetesPlatform", "KubernetesRequest"]

_SECRET_NOTE = (
    "stoker writes a new token of 64 hexadecimal digits here when it submits the job.\n"
    "To apply this by hand, create one with openssl rand -hex 32."
)


def _patient(cluster: ClusterApi, log: Log) -> ClusterApi:
    return cluster.patient(
        lambda err: log.event(EventName.CALL_REPEATED, action=err.action, why=err.what)
    )


def _unread(err: ServiceError, *, run: str) -> str:
    """Logs that a record may not be read, and returns "" in its place; raises another error."""
    if err.kind != "denied":
        raise err
    Log(run=run, host=SERVICE).event(EventName.RECORD_READ_FAILED, why=err.what)
    return ""


def _is_lost(job: Document, told: Collection[str]) -> bool:
    """Returns whether a job's end is recorded nowhere, and it is not being deleted."""
    state = job_state(job)
    return not (state.is_deleted or state.uid in told)


def _created_at(job: Document) -> str:
    return text(job, "metadata", "creationTimestamp")


class KubernetesPlatform(Platform[KubernetesRequest]):
    """Runs jobs on a Kubernetes cluster with JobSet, or with Kubeflow Trainer on top of it.

    Args:
        cluster: Absent: the cluster of the workload's settings.
        adopts_only: Never creates a job, and also adopts a failed one.
    """

    name = "kubernetes"
    project = PROJECT

    def __init__(self, *, cluster: ClusterApi | None = None, adopts_only: bool = False) -> None:
        self._cluster = cluster
        self._adopts_only = adopts_only

    def plan(self, job: JobSpec) -> KubernetesRequest:
        """Returns the objects of `job`; needs no cluster and reads no file."""
        return plan_request(job)

    def describe(self, request: KubernetesRequest) -> dict[str, Json]:
        """Returns the objects as a list for `kubectl`, without the token."""
        return {"apiVersion": "v1", "kind": "List", "items": list(request.objects)}

    def manifest(self, request: KubernetesRequest) -> str:
        """Returns the objects as YAML documents for `kubectl apply`."""
        return manifest(request.objects, notes={"Secret": _SECRET_NOTE})

    def submit(self, request: KubernetesRequest) -> KubernetesRun:
        """Creates the objects, or adopts an earlier attempt's job; a failed job is replaced.

        In a pod that its environment names (POD_NAME, POD_UID) the Workflow that controls the pod
        owns the job.
        """
        settings = request.layout.settings
        pod = own_pod()
        log = Log(run=request.job.name, host=SERVICE)
        with self._explained(settings) as cluster:
            # Before anything is created: a later refusal would leave half of a run.
            check_rights(cluster, settings, is_pod=pod is not None, log=log)
            follower = follower_of(cluster, pod, log=log)
            begin = adopt if self._adopts_only else start
            started = begin(_patient(cluster, log), request, follower=follower, log=log)
        note_submitted(request, uid=started.uid, namespace=cluster.namespace)
        return KubernetesRun(
            cluster,
            request=request,
            started=started,
            follower=follower,
            is_last=self._adopts_only,
        )

    def vanished(self, request: KubernetesRequest) -> str:
        """Returns words on an earlier job of the run's folder that is gone; empty without one."""
        if not has_submitted(request.job.run_dir):
            # Without a question to the cluster.
            return ""
        with self._explained(request.layout.settings) as cluster:
            return vanished(cluster, request)

    def resumed(self, requests: Sequence[KubernetesRequest]) -> int:
        with self._explained(requests[0].layout.settings) as cluster:
            for index, request in reversed([*enumerate(requests)][1:]):
                if is_going_on(cluster, request, or_failed=self._adopts_only):
                    return index
        return 0

    def adopting(self) -> "KubernetesPlatform":
        """Returns the platform for a last follower, which polls whether the run is cancelled."""
        return KubernetesPlatform(cluster=self._cluster, adopts_only=True)

    def kept(self, request: KubernetesRequest) -> str:
        settings = request.layout.settings
        run = request.job.name
        workload = name_of_workload(request.job.platform_settings)
        cluster = self._cluster_of(settings)
        digest = request.request_sha256
        try:
            return finished_record(cluster, workload, run, request_sha256=digest)
        except ServiceError as err:
            return _unread(err, run=run)

    def keep(self, request: KubernetesRequest, record: str) -> None:
        run = request.job.name
        workload = name_of_workload(request.job.platform_settings)
        log = Log(run=run, host=SERVICE)
        digest = request.request_sha256
        cluster = _patient(self._cluster_of(request.layout.settings), log)
        try:
            keep_finished(
                cluster,
                workload,
                run,
                request_sha256=digest,
                jobs=uids_of_run(cluster, request),
                record=record,
            )
        except StokerError as err:
            log.event(EventName.RECORD_SAVE_FAILED, why=err.what)

    def kept_profile(self, settings: PlatformSettings, key: str) -> str:
        workload = name_of_workload(settings)
        try:
            cluster = self._cluster_of(settings.kubernetes_settings)
            return kept_profile(cluster, workload, key)
        except ServiceError as err:
            return _unread(err, run=workload)

    def keep_profile(self, settings: PlatformSettings, key: str, record: str) -> None:
        workload = name_of_workload(settings)
        log = Log(run=workload, host=SERVICE)
        try:
            cluster = self._cluster_of(settings.kubernetes_settings)
            keep_profile(_patient(cluster, log), workload, key, record)
        except StokerError as err:
            log.event(EventName.RECORD_SAVE_FAILED, why=err.what)

    def is_cancelled(self, settings: PlatformSettings) -> bool:
        meaning = "the run counts as not cancelled"
        return bool(self._of_workflow(settings, Follower.is_cancelled, meaning))

    def has_failed(self, settings: PlatformSettings) -> bool:
        has_failed = self._of_workflow(settings, Follower.has_failed, "the run counts as failed")
        return has_failed is None or has_failed

    def _of_workflow(
        self,
        settings: PlatformSettings,
        ask: Callable[[Follower, ClusterApi], bool | None],
        meaning: str,
    ) -> bool | None:
        """Asks the run's Workflow; `meaning` is logged if it does not answer."""
        log = Log(run=name_of_workload(settings), host=SERVICE)
        with self._explained(settings.kubernetes_settings) as cluster:
            answer = ask(follower_of(cluster, own_pod(), log=log), cluster)
        if answer is None:
            log.event(EventName.WORKFLOW_READ_FAILED, meaning=meaning)
        return answer

    def lost(
        self, name: str, settings: PlatformSettings, *, run_id: str
    ) -> Sequence[Mapping[str, str]]:
        """Returns the records of the run's jobs without a recorded end, the profile's first."""
        workload = name_of_workload(settings)
        with self._explained(settings.kubernetes_settings) as cluster:
            try:
                told = told_jobs(cluster, workload)
                jobs = self._jobs_of(cluster, name, settings, run_id=run_id)
                left = [job for job in jobs if _is_lost(job, told)]
                found = [
                    (_created_at(job), run_of(job), records_of(cluster, name_of(job)))
                    for job in left
                ]
            except ServiceError as err:
                if err.kind == "denied" and CONFIG_MAPS.plural in err.action:
                    Log(run=name, host=SERVICE).event(EventName.RECORDS_READ_FAILED, why=err.what)
                    return ()
                raise
        found.sort(key=lambda one: one[0])
        return [{**records, "run": run} for _, run, records in found if records]

    def clean_up(self, name: str, settings: PlatformSettings, *, run_id: str = "") -> str:
        """Deletes the run's unfinished jobs, without waiting for their pods; returns their names.

        A finished TrainJob is deleted, too: it has no TTL.

        Args:
            settings: The workload, whose name identifies its profile's job.
            run_id: Id of the pipeline's run, whose profile may be a job, too.
        """
        known = settings.kubernetes_settings
        deleted = []
        kind = "TrainJob" if known.api == "trainer" else "JobSet"
        with self._explained(known) as asked:
            cluster = _patient(asked, Log(run=name, host=SERVICE))
            for found in self._jobs_of(cluster, name, settings, run_id=run_id):
                state = job_state(found)
                job = name_of(found)
                if state.is_deleted or (state.has_ended and kind == "JobSet"):
                    continue
                cluster.delete(OF_KIND[kind], job, uid=state.uid)
                how = "had ended" if state.has_ended else "was still there"
                deleted.append(f"{kind} {job} in namespace {cluster.namespace} {how}: deleted")
        return "; ".join(deleted)

    def _jobs_of(
        self, cluster: ClusterApi, name: str, settings: PlatformSettings, *, run_id: str
    ) -> Iterator[Document]:
        resource = TRAINJOBS if settings.kubernetes_settings.api == "trainer" else JOBSETS
        return jobs_of_run(
            cluster, resource, name, run_id=run_id, workload=name_of_workload(settings)
        )

    @contextlib.contextmanager
    def _explained(self, settings: KubernetesSettings) -> Iterator[ClusterApi]:
        """Yields the cluster; a refusal in the block names the Role that is missing."""
        cluster = self._cluster_of(settings)
        try:
            yield cluster
        except ServiceError as err:
            raise explained_denial(err, settings, namespace=cluster.namespace) from err

    def _cluster_of(self, settings: KubernetesSettings) -> ClusterApi:
        return self._cluster or ClusterApi(
            context=settings.context, namespace=settings.namespace, strict_tls=settings.strict_tls
        )
