"""The platform kubernetes: plans, describes and submits JobSets and TrainJobs."""

from stoker.errors import PlatformError
from stoker.platforms.base import JobSpec, Run
from stoker.platforms.kubernetes.manifest import manifest
from stoker.platforms.kubernetes.request import KubernetesRequest, plan_request
from stoker.records import Json

_SECRET_NOTE = (
    "stoker puts a new token of 64 hexadecimal digits here when it submits the job.\n"
    "To apply this by hand: stoker train --make-token FILE, and put what is in the file here."
)


class KubernetesPlatform:
    """Runs jobs on a Kubernetes cluster with JobSet, or with Kubeflow Trainer on top of it."""

    name = "kubernetes"

    def plan(self, job: JobSpec) -> KubernetesRequest:
        """The objects of `job`, every rule of schemas, webhooks and pods checked.

        Needs no cluster, and reads no file.

        Raises:
            UsageError: If the cluster would refuse them, with the rule, the reason and a fix.
        """
        return plan_request(job)

    def describe(self, request: KubernetesRequest) -> dict[str, Json]:
        """The objects as a list that `kubectl` takes; the token is not made yet."""
        return {"apiVersion": "v1", "kind": "List", "items": list(request.objects)}

    def manifest(self, request: KubernetesRequest) -> str:
        """The objects as YAML documents that `kubectl apply` takes."""
        return manifest(request.objects, notes={"Secret": _SECRET_NOTE})

    def submit(self, request: KubernetesRequest) -> Run:
        """Makes the objects; adopts an earlier attempt's job.

        Raises:
            PlatformError: Always: this cannot be done yet.
        """
        raise PlatformError(
            "jobs cannot be submitted to Kubernetes yet",
            where=f"job {request.name}",
            fix="stoker train --dry-run WORKLOAD | kubectl apply -f -",
        )
