"""The image of this process's own pod: which one a tag names now, as its node has pulled it."""

import time

from stoker.environment import OwnPod
from stoker.errors import UsageError
from stoker.platforms.kubernetes.api import PODS, ClusterApi, text
from stoker.records import KubernetesSettings
from stoker.records.base import Document, mapping, mappings
from stoker.repeat import Clock, Sleep

# A container runs for some seconds before its node reports its image.
_REPORT_SECONDS = 60.0
_POLL_SECONDS = 2.0


def own_image_digest(
    pod: OwnPod | None,
    *,
    image: str,
    settings: KubernetesSettings,
    cluster: ClusterApi | None = None,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> str:
    """Returns the digest of an image that this process's own pod runs.

    Blocks for a minute at most, if the node reports no image.

    Args:
        pod: This process's pod.
        image: Name of the image, as the pod has it.
        settings: Connection to the cluster.
        cluster: The pod's cluster; None: by the settings.

    Raises:
        UsageError: If it runs in no pod, or in one of another image, or no image is reported.
        ServiceError: If the cluster refuses, or does not answer.
    """
    if pod is None:
        raise UsageError(f"{image} has no digest in its name, and no pod of it compares")
    pods = cluster or ClusterApi(
        context=settings.context,
        namespace=pod.namespace or settings.namespace,
        strict_tls=settings.strict_tls,
    )
    until = clock() + _REPORT_SECONDS
    while True:
        document = pods.get(PODS, pod.name)
        name = _container_of(document, image)
        if name is None:
            raise UsageError(f"{image} has no digest in its name, and this pod runs another image")
        if digest := _digest_of(document, name):
            return digest
        if clock() > until:
            raise UsageError(f"the cluster does not report the digest of {image}")
        sleep(_POLL_SECONDS)


def _container_of(pod: Document, image: str) -> str | None:
    """Returns the name of the pod's container of an image."""
    containers = mappings(mapping(pod, "spec"), "containers")
    names = (text(one, "name") for one in containers if one.get("image") == image)
    return next(names, None)


def _digest_of(pod: Document, container: str) -> str:
    """Returns the digest of a container's image; empty: not reported."""
    statuses = mappings(mapping(pod, "status"), "containerStatuses")
    images = (text(one, "imageID") for one in statuses if one.get("name") == container)
    digest = next(images, "").rpartition("@")[2]
    return digest if digest.startswith("sha256:") else ""
