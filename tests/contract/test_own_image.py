"""A step's pod tells which image a tag names now: by what its node reports of its own container."""

import pytest

from stoker.environment import own_pod
from stoker.errors import PlatformError, UsageError
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.own_image import own_image_digest
from stoker.records import KubernetesSettings
from support.kubernetes_api import KubernetesApi, kube_config
from support.platform_jobs import use_kube_config

IMAGE = "registry.example/stoker:digits"
DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def asked(api, tmp_path, monkeypatch):
    """Returns what asks for the image of a pod with these containers and their reports."""
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url))
    environment = api.make_step("compare-1", workflow="")
    now = 0.0

    def ask(*reports: str, image: str = IMAGE, waits: str = "") -> str:
        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            if waits:
                report(api, waits)

        report(api, *reports)
        return own_image_digest(
            own_pod(environment),
            image=image,
            settings=KubernetesSettings(),
            cluster=ClusterApi(),
            clock=lambda: now,
            sleep=sleep,
        )

    return ask


def report(api: KubernetesApi, *image_ids: str) -> None:
    """Reports the image of the step's container, and that of Argo's beside it."""
    statuses = [{"name": "wait", "imageID": f"argo/exec@sha256:{'b' * 64}"}]
    statuses += [{"name": "main", "imageID": each} for each in image_ids]
    containers = [{"name": "wait", "image": "argo/exec:1"}, {"name": "main", "image": IMAGE}]
    changed = {"spec": {"containers": containers}, "status": {"containerStatuses": statuses}}
    api.change("pods", "compare-1", changed)


@pytest.mark.parametrize(
    "image_id",
    [
        f"registry.example/stoker@{DIGEST}",
        f"docker-pullable://registry.example/stoker@{DIGEST}",
        # Of an image that was loaded into the node.
        DIGEST,
    ],
)
def test_the_digest_is_the_nodes_of_the_container_with_that_image(image_id, asked):
    assert asked(image_id) == DIGEST


def test_a_digest_that_is_reported_later_is_waited_for(asked):
    assert asked(waits=f"registry.example/stoker@{DIGEST}") == DIGEST


@pytest.mark.parametrize("reports", [(), ("",), ("docker://abc",)])
def test_a_digest_that_is_not_reported_is_not_known(reports, asked):
    with pytest.raises(UsageError, match="does not report"):
        asked(*reports)


def test_a_pod_of_another_image_knows_nothing_of_it(asked):
    with pytest.raises(UsageError, match="another image"):
        asked(DIGEST, image="registry.example/stoker:letters")


def test_no_pod_knows_no_image():
    with pytest.raises(UsageError, match="no digest in its name"):
        own_image_digest(None, image=IMAGE, settings=KubernetesSettings())


def test_a_pod_that_may_not_be_read_is_the_services_refusal(api, asked):
    api.remove("pods", "compare-1")
    with pytest.raises(PlatformError):
        own_image_digest(
            own_pod({"POD_NAME": "compare-1", "POD_UID": "u"}),
            image=IMAGE,
            settings=KubernetesSettings(),
            cluster=ClusterApi(),
        )
