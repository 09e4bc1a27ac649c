"""Kubernetes runs a job as a JobSet, or as a TrainJob with its TrainingRuntime."""

from stoker.logs import Log
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.api import JOBSETS, TRAINJOBS, ApiError, ClusterApi, mapping
from stoker.platforms.kubernetes.follower import follower_of
from stoker.platforms.kubernetes.job import SERVICE, KubernetesRun
from stoker.platforms.kubernetes.objects import RUN_ANNOTATION, object_name
from stoker.platforms.kubernetes.request import KubernetesRequest, manifest, plan_request
from stoker.platforms.kubernetes.submit import (
    check_rights,
    explained_denial,
    job_state,
    start,
)
from stoker.records import Json, KubernetesSettings, PlatformSettings
from stoker.settings import own_pod

__all__ = ["KubernetesPlatform", "KubernetesRequest"]

_SECRET_NOTE = (
    "stoker puts a new token of 64 hexadecimal digits here when it submits the job.\n"
    "To apply this by hand: stoker train --make-token FILE, and put what is in the file here."
)


class KubernetesPlatform:
    """Runs jobs on a Kubernetes cluster with JobSet, or with Kubeflow Trainer on top of it.

    Args:
        cluster: Absent: that of the workload's settings.
    """

    name = "kubernetes"

    def __init__(self, *, cluster: ClusterApi | None = None) -> None:
        self._cluster = cluster

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
            started = start(cluster, request, follower=follower, log=log)
        except ApiError as err:
            raise explained_denial(err, settings, namespace=cluster.namespace) from err
        return KubernetesRun(cluster, request=request, started=started, follower=follower)

    def clean_up(self, name: str, settings: PlatformSettings) -> str:
        """Deletes the job of a run if it has not ended; returns in words what it ended.

        A TrainJob is deleted when it has ended, too: it has no TTL. Does not wait for its pods.

        Args:
            name: Of the run.
            settings: Of its workload.

        Raises:
            PlatformError: If the cluster refuses, or does not answer.
        """
        known = settings.kubernetes or KubernetesSettings()
        cluster = self._cluster_of(known)
        resource = TRAINJOBS if known.api == "trainer" else JOBSETS
        job = object_name(name)
        try:
            found = cluster.find(resource, job)
            state = job_state(found) if found else None
            if found is None or state is None or state.is_deleted:
                return ""
            if state.has_ended and resource != TRAINJOBS:
                return ""
            # Somebody else's job, which happens to have the name.
            if RUN_ANNOTATION not in mapping(found, "metadata", "annotations"):
                return ""
            cluster.delete(resource, job, uid=state.uid)
        except ApiError as err:
            raise explained_denial(err, known, namespace=cluster.namespace) from err
        place = f"{found.get('kind')} {job} in namespace {cluster.namespace}"
        return f"{place} {'had ended' if state.has_ended else 'was still there'}: deleted"

    def _cluster_of(self, settings: KubernetesSettings) -> ClusterApi:
        return self._cluster or ClusterApi(context=settings.context, namespace=settings.namespace)
