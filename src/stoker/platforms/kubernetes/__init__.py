"""Kubernetes runs a job as a JobSet, or as a TrainJob with its TrainingRuntime."""

from collections.abc import Mapping, Sequence

from stoker.errors import ServiceError, StokerError
from stoker.logs import EventName, Log
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.api import (
    CONFIG_MAPS,
    JOBSETS,
    TRAINJOBS,
    ClusterApi,
    name_of,
    text,
)
from stoker.platforms.kubernetes.follower import follower_of
from stoker.platforms.kubernetes.job import SERVICE, KubernetesRun
from stoker.platforms.kubernetes.objects import name_of_workload
from stoker.platforms.kubernetes.request import KubernetesRequest, manifest, plan_request
from stoker.platforms.kubernetes.submit import (
    adopt,
    check_rights,
    explained_denial,
    finished_record,
    is_going_on,
    job_state,
    jobs_of_run,
    keep_finished,
    records_of,
    start,
    told_jobs,
    uids_of_run,
)
from stoker.records import Json, KubernetesSettings, PlatformSettings
from stoker.records.base import mapping
from stoker.settings import own_pod

__all__ = ["KubernetesPlatform", "KubernetesRequest"]

_SECRET_NOTE = (
    "stoker puts a new token of 64 hexadecimal digits here when it submits the job.\n"
    "To apply this by hand: put 64 of your own here (openssl rand -hex 32)."
)


class KubernetesPlatform:
    """Runs jobs on a Kubernetes cluster with JobSet, or with Kubeflow Trainer on top of it.

    Args:
        cluster: Absent: that of the workload's settings.
        adopts_only: Whether it makes no job, and adopts also one that has failed.
    """

    name = "kubernetes"

    def __init__(self, *, cluster: ClusterApi | None = None, adopts_only: bool = False) -> None:
        self._cluster = cluster
        self._adopts_only = adopts_only

    def plan(self, job: JobSpec) -> KubernetesRequest:
        """Returns the objects of `job`, every rule of schemas, webhooks and pods checked.

        Needs no cluster, and reads no file.

        Raises:
            UsageError: If the cluster would refuse them, with the rule, the reason and a fix.
        """
        return plan_request(job)

    def describe(self, request: KubernetesRequest) -> dict[str, Json]:
        """Returns the objects as a list that `kubectl` takes; the token is not made yet."""
        return {"apiVersion": "v1", "kind": "List", "items": list(request.objects)}

    def manifest(self, request: KubernetesRequest) -> str:
        """Returns the objects as YAML documents that `kubectl apply` takes."""
        return manifest(request.objects, notes={"Secret": _SECRET_NOTE})

    def submit(self, request: KubernetesRequest) -> KubernetesRun:
        """Makes the objects; adopts an earlier attempt's job.

        A job of that name that has failed is deleted and made anew. In a pod whose environment
        names it (POD_NAME, POD_UID) the job is owned by the Workflow that controls the pod.

        Raises:
            PlatformError: If the cluster refuses (a missing right or a quota, for example), another
                job has the name, or no cluster is configured.
        """
        settings = request.layout.settings
        log = Log(run=request.job.name, host=SERVICE)
        cluster = self._cluster_of(settings)
        pod = own_pod()
        # Before anything is made: a refusal halfway would leave half of a run.
        check_rights(cluster, settings, is_pod=pod is not None, log=log)
        try:
            follower = follower_of(cluster, pod, log=log)
            begin = adopt if self._adopts_only else start
            started = begin(cluster, request, follower=follower, log=log)
        except ServiceError as err:
            raise explained_denial(err, settings, namespace=cluster.namespace) from err
        return KubernetesRun(
            cluster,
            request=request,
            started=started,
            follower=follower,
            is_last=self._adopts_only,
        )

    def resumed(self, requests: Sequence[KubernetesRequest]) -> int:
        """Returns which of a run's requests an earlier attempt has come to; else 0.

        Raises:
            PlatformError: If the cluster cannot be asked.
        """
        settings = requests[0].layout.settings
        cluster = self._cluster_of(settings)
        try:
            for index, request in reversed([*enumerate(requests)][1:]):
                if is_going_on(cluster, request, or_failed=self._adopts_only):
                    return index
        except ServiceError as err:
            raise explained_denial(err, settings, namespace=cluster.namespace) from err
        return 0

    def adopting(self) -> "KubernetesPlatform":
        """Returns the platform for a last follower, which only adopts jobs, failed ones too.

        It asks again and again whether somebody has ended the run: Argo does not tell the pods of
        an exit handler.
        """
        return KubernetesPlatform(cluster=self._cluster, adopts_only=True)

    def kept(self, request: KubernetesRequest) -> str:
        """Returns the record with which an earlier attempt ended; empty where there is none.

        Raises:
            PlatformError: If the cluster does not answer.
        """
        settings, run = request.layout.settings, request.job.name
        workload = name_of_workload(request.job.platform_settings)
        try:
            return finished_record(
                self._cluster_of(settings), workload, run, request_sha256=request.request_sha256
            )
        except ServiceError as err:
            if err.kind != "denied":
                raise
            Log(run=run, host=SERVICE).event(EventName.RECORD_READ_FAILED, why=err.what)
            return ""

    def keep(self, request: KubernetesRequest, record: str) -> None:
        """Keeps the record of a job that has ended, for a retry of its step; never raises."""
        cluster, run = self._cluster_of(request.layout.settings), request.job.name
        try:
            keep_finished(
                cluster,
                name_of_workload(request.job.platform_settings),
                run,
                request_sha256=request.request_sha256,
                jobs=uids_of_run(cluster, request),
                record=record,
            )
        except StokerError as err:
            Log(run=run, host=SERVICE).event(EventName.RECORD_SAVE_FAILED, why=err.what)

    def is_cancelled(self, settings: PlatformSettings) -> bool:
        """Returns whether somebody has ended, or is ending, the run of the pipeline.

        Raises:
            PlatformError: If the cluster refuses, or does not answer.
        """
        known = settings.kubernetes or KubernetesSettings()
        cluster = self._cluster_of(known)
        log = Log(run=name_of_workload(settings), host=SERVICE)
        try:
            found = follower_of(cluster, own_pod(), log=log).cancellation(cluster)
        except ServiceError as err:
            raise explained_denial(err, known, namespace=cluster.namespace) from err
        if found is None:
            log.event(
                EventName.WORKFLOW_READ_FAILED, meaning="nobody is known to have ended the run"
            )
        return bool(found)

    def lost(
        self, name: str, settings: PlatformSettings, *, run_id: str
    ) -> Sequence[Mapping[str, str]]:
        """Returns the records of the run's jobs of which no step has told how they ended.

        The profile's comes first. A job that a retry has made again under its name is another one.

        Raises:
            PlatformError: If the cluster refuses, or does not answer.
        """
        known = settings.kubernetes or KubernetesSettings()
        cluster = self._cluster_of(known)
        log = Log(run=name, host=SERVICE)
        resource = TRAINJOBS if known.api == "trainer" else JOBSETS
        workload = name_of_workload(settings)
        try:
            told = told_jobs(cluster, workload)
            jobs = jobs_of_run(cluster, resource, name, run_id=run_id, workload=workload)
            found = [
                (text(mapping(job, "metadata"), "creationTimestamp"), records_of(cluster, each))
                for job in jobs
                if not ((state := job_state(job)).is_deleted or state.uid in told)
                if (each := name_of(job))
            ]
        except ServiceError as err:
            if err.kind == "denied" and CONFIG_MAPS.plural in err.action:
                log.event(EventName.RECORDS_READ_FAILED, why=err.what)
                return ()
            raise explained_denial(err, known, namespace=cluster.namespace) from err
        return [records for _, records in sorted(found, key=lambda one: one[0]) if records]

    def clean_up(self, name: str, settings: PlatformSettings, *, run_id: str = "") -> str:
        """Deletes the jobs of a run that have not ended; returns in words what it ended.

        Jobs that the pipeline's run has of other workloads are left alone: they may go on.
        A TrainJob is deleted when it has ended, too: it has no TTL. Does not wait for its pods.

        Args:
            name: Of the run.
            settings: Its workload: settings alone have no name to know its profile's job by.
            run_id: Of the pipeline's run, whose profile may be a job, too.

        Raises:
            PlatformError: If the cluster refuses, or does not answer.
        """
        known = settings.kubernetes or KubernetesSettings()
        cluster = self._cluster_of(known)
        resource = TRAINJOBS if known.api == "trainer" else JOBSETS
        deleted = []
        try:
            jobs = jobs_of_run(
                cluster, resource, name, run_id=run_id, workload=name_of_workload(settings)
            )
            for found in jobs:
                state, job = job_state(found), name_of(found)
                if state.is_deleted or (state.has_ended and resource != TRAINJOBS):
                    continue
                cluster.delete(resource, job, uid=state.uid)
                how = "had ended" if state.has_ended else "was still there"
                # Items of a list do not say it.
                kind = "TrainJob" if resource == TRAINJOBS else "JobSet"
                deleted.append(f"{kind} {job} in namespace {cluster.namespace} {how}: deleted")
        except ServiceError as err:
            raise explained_denial(err, known, namespace=cluster.namespace) from err
        return "; ".join(deleted)

    def _cluster_of(self, settings: KubernetesSettings) -> ClusterApi:
        return self._cluster or ClusterApi(
            context=settings.context,
            namespace=settings.namespace,
            strict_tls=settings.strict_tls,
        )
