"""The kinds of objects that stoker asks a cluster for."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object as its API's paths name it.

    Attributes:
        is_everywhere: Those of all namespaces are meant.
    """

    group: str
    version: str
    plural: str
    is_everywhere: bool = False

    @property
    def api(self) -> str:
        """The path of its API."""
        prefix = f"apis/{self.group}" if self.group else "api"
        return f"/{prefix}/{self.version}"


JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
TRAINJOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs")
RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
PODS = Resource("", "v1", "pods")
ALL_PODS = Resource("", "v1", "pods", is_everywhere=True)
EVENTS = Resource("", "v1", "events")
NODES = Resource("", "v1", "nodes")
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews")
# Those that belong to no namespace, or are meant in all of them.
OF_CLUSTER = (NODES, ACCESS_REVIEWS, ALL_PODS)

OF_KIND: Mapping[str, Resource] = {
    "JobSet": JOBSETS,
    "TrainJob": TRAINJOBS,
    "TrainingRuntime": RUNTIMES,
    "Secret": SECRETS,
    "ConfigMap": CONFIG_MAPS,
}
