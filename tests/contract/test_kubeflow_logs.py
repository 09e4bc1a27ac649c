"""Logs of a run's steps come from the pods of a cluster's API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import PlatformError, UsageError
from support.kfp_server import KfpServer
from support.kubeflow_orchestrator import put_pod, step_pod, target_at, upload, workload
from support.kubernetes_api import (
    NAMESPACE,
    KubernetesApi,
    kube_config,
    kubernetes_api,
)

pytestmark = pytest.mark.usefixtures("quick_kfp")


@pytest.fixture
def server() -> Iterator[KfpServer]:
    with KfpServer(multi_user=True) as made:
        yield made
    assert made.problems == []


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    with kubernetes_api() as api:
        use_config(monkeypatch, kube_config(tmp_path, api.url))
        yield api


def use_config(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The kubernetes client reads KUBECONFIG when it is imported, once a process."""
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path), raising=True
    )


def started(server: KfpServer) -> str:
    upload(server, namespace=NAMESPACE)
    return target_at(server, namespace=NAMESPACE).start(workload(), parameters=()).run


def shown(server: KfpServer, run: str, *, group: str | None = None) -> list[str]:
    target = target_at(server, namespace=NAMESPACE)
    return [f"{line.group}/{line.host} {line.text}" for line in target.logs(run, group=group)]


def test_logs_of_all_steps_in_the_order_in_which_they_began(
    server: KfpServer, cluster: KubernetesApi
) -> None:
    run = started(server)
    put_pod(
        cluster, step_pod(run, "root.condition-1.train.executor", minute=5), "epoch 1", "epoch 2"
    )
    put_pod(cluster, step_pod(run, "root.profile.executor(0)", minute=1), "as is")
    put_pod(cluster, step_pod(run, "root.profile-driver"), "driver")
    put_pod(cluster, step_pod("another", "root.profile.executor"), "not this run's")
    assert shown(server, run) == [
        "profile/mnist-x-root-profile-executor0 as is",
        "train/mnist-x-root-condition-1-train-executor epoch 1",
        "train/mnist-x-root-condition-1-train-executor epoch 2",
    ]
    assert shown(server, run, group="profile") == ["profile/mnist-x-root-profile-executor0 as is"]


def test_a_step_that_is_not_there_is_named_with_the_nearest(
    server: KfpServer, cluster: KubernetesApi
) -> None:
    run = started(server)
    put_pod(cluster, step_pod(run, "root.train.executor"), "epoch 1")
    with pytest.raises(UsageError, match="did you mean train"):
        shown(server, run, group="tran")


def test_a_container_that_has_not_begun_has_no_log_and_is_no_error(
    server: KfpServer, cluster: KubernetesApi
) -> None:
    run = started(server)
    waiting = step_pod(run, "root.train.executor", minute=2)
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {}}
    put_pod(cluster, waiting)
    put_pod(cluster, step_pod(run, "root.profile.executor"), "as is")
    assert len(shown(server, run)) == 1


def test_pods_that_are_gone_are_said_to_be_with_the_page(
    server: KfpServer, cluster: KubernetesApi
) -> None:
    run = started(server)
    with pytest.raises(PlatformError, match=f"no pod of run {run} is left") as caught:
        shown(server, run)
    assert f"{server.url}/#/runs/details/{run}" in caught.value.fix


def test_pods_that_are_out_of_reach_are_said_to_be_with_the_page(
    server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(monkeypatch, tmp_path / "none")
    run = started(server)
    with pytest.raises(PlatformError, match="which are out of reach") as caught:
        shown(server, run)
    assert f"the page shows them: {server.url}/#/runs/details/{run}" in caught.value.fix
