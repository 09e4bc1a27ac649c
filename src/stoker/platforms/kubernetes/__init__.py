"""Kubernetes platform: a job is a JobSet, or a TrainJob with its TrainingRuntime.

`objects` and `pods` plan a job and ask the cluster nothing; `submit` sends it; `run` follows it to
its end, with a thread of `pod_log` for each pod.
"""

from collections.abc import Sequence

from stoker.environment import own_pod
from stoker.logs import Log
from stoker.platforms.base import JobSpec, Platform
from stoker.platforms.kubernetes.api import ClusterApi, resource_of
from stoker.platforms.kubernetes.objects import KubernetesRequest, manifest, plan_request
from stoker.platforms.kubernetes.run import KubernetesRun
from stoker.platforms.kubernetes.state import delete_jobs
from stoker.platforms.kubernetes.submit import is_going_on, start
from stoker.records import Json, KubernetesSettings, PlatformSettings, Workload

__all__ = ["KubernetesPlatform", "KubernetesRequest"]


class KubernetesPlatform(Platform[KubernetesRequest]):
    """Runs jobs on a Kubernetes cluster with JobSet, or with Kubeflow Trainer on top of it.

    Args:
        cluster: Absent: the cluster of the workload's settings.
    """

    name = "kubernetes"

    def __init__(self, *, cluster: ClusterApi | None = None) -> None:
        self._cluster = cluster

    def plan(self, job: JobSpec) -> KubernetesRequest:
        """Returns the objects of `job`; needs no cluster and reads no file."""
        return plan_request(job)

    def describe(self, request: KubernetesRequest) -> dict[str, Json]:
        """Returns the objects as a list for `kubectl`, without the token."""
        return {"apiVersion": "v1", "kind": "List", "items": list(request.objects)}

    def manifest(self, request: KubernetesRequest) -> str:
        """Returns the objects as YAML documents for `kubectl apply`."""
        return manifest(request.objects)

    def submit(self, request: KubernetesRequest) -> KubernetesRun:
        """Creates the objects, or adopts an earlier attempt's job; a failed job is replaced.

        In a pod that its environment names (POD_NAME, POD_UID) the Workflow that controls the pod
        owns the job.
        """
        cluster = self._cluster_of(request.settings)
        # Before calls are repeated: a cluster that does not answer is told at once.
        cluster.find(resource_of(request.main), request.name)
        log = Log(run=request.job.name, host=self.name)
        job = start(cluster.patient(), request, log=log)
        return KubernetesRun(cluster, request=request, job=job, is_step=own_pod() is not None)

    def resumed(self, requests: Sequence[KubernetesRequest]) -> int:
        cluster = self._cluster_of(requests[0].settings)
        for index in range(len(requests) - 1, 0, -1):
            if is_going_on(cluster, requests[index]):
                return index
        return 0

    def clean_up(self, name: str, settings: PlatformSettings, *, run_id: str = "") -> str:
        """Deletes what is left of the jobs of a pipeline's run; returns their names."""
        cluster = self._cluster_of(settings.kubernetes_settings)
        workload = settings.name if isinstance(settings, Workload) else ""
        deleted = ", ".join(delete_jobs(cluster.patient(), run_id, workload=workload))
        return f"deleted in namespace {cluster.namespace}: {deleted}" if deleted else ""

    def _cluster_of(self, settings: KubernetesSettings) -> ClusterApi:
        return self._cluster or ClusterApi(context=settings.context, namespace=settings.namespace)
