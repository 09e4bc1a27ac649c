"""What a cluster's controllers do to stoker's jobs, on the double and a real control plane.

They run on the cluster that KUBECONFIG names: it has JobSet's controller, and
needs no node. STOKER_TEST_RESTART may hold a shell command that starts its API server again.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.errors import EXIT_PEER_LOST, PlatformError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.run import KubernetesRun
from support.cluster_files import rbac
from support.control_planes import DoublePlane, Plane, RealPlane, argo_crd
from support.kubernetes_api import kubernetes_api
from support.kubernetes_jobs import job as described_job
from support.kubernetes_rules import security_problems
from support.local_job import until
from support.platform_jobs import follower

NAME = "mnist-1"
EXIT_CODE = 7
SECONDS = 60.0
PARTS = ("jobsets", "secrets", "configmaps")
PARTS_OF_TRAINER = ("trainjobs", "trainingruntimes", *PARTS)
BOTH = pytest.mark.parametrize("api_name", ["jobset", "trainer"])
# Time in which a controller would have done what it must not do.
SETTLED_SECONDS = 2.0


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.cluster)])
def plane(request, tmp_path, monkeypatch):
    if request.param == "double":
        with kubernetes_api() as api:
            yield DoublePlane(api, tmp_path, monkeypatch)
        return
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    # Nobody reads logs where there is no kubelet: they are not waited for.
    monkeypatch.setattr("stoker.platforms.kubernetes.run.DRAIN_SECONDS", 1.0)
    monkeypatch.setattr("stoker.platforms.kubernetes.run.DATA_DRAIN_SECONDS", 0.0)
    request.getfixturevalue("workflows_are_known")
    found = RealPlane(tmp_path, restart=os.environ.get("STOKER_TEST_RESTART", ""))
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def workflows_are_known():
    with argo_crd():
        yield


@pytest.fixture
def follow():
    yield from follower()


def described(plane: Plane, folder: Path, *, num_dnn: int = 1, **settings: Any) -> JobSpec:
    """Describes dnn hosts and two data hosts, which ask for no node of a certain kind."""
    small = {"cpu": "100m", "memory": "64Mi"}
    pools = {"gpu": {**small, "gpus": 0}, "cpu": small}
    dnn, data = described_job().groups
    groups = (
        msgspec.structs.replace(dnn, instance_type="gpu", count=num_dnn),
        msgspec.structs.replace(data, instance_type="cpu", count=2),
    )
    settings = {"namespace": plane.namespace, "pools": pools, **settings}
    spec = described_job(*groups, name=NAME, channels={}, settings=settings)
    return dataclasses.replace(spec, run_dir=folder / "run")


def submit(plane: Plane, spec: JobSpec) -> KubernetesRun:
    return plane.platform.submit(plane.platform.plan(spec))


@pytest.fixture
def step(plane, monkeypatch):
    """Makes this process the pod of a step of the Workflow w, which it makes first."""
    plane.make_workflow("w")

    def become(name):
        for key, value in plane.make_step(name, workflow="w").items():
            monkeypatch.setenv(key, value)

    return become


def need(plane: Plane, api_name: str) -> None:
    if api_name == "trainer" and not plane.has_trainer():
        pytest.skip("the cluster has no Kubeflow Trainer")


def nothing_is_left(plane: Plane, parts: Sequence[str] = PARTS) -> bool:
    # A namespace may have objects of its own.
    found = [name for plural in parts for name in plane.names(plural)]
    return not any(name.startswith(NAME) for name in found)


wait_until = functools.partial(until, seconds=SECONDS)


@pytest.fixture
def start(plane, tmp_path, follow):
    return lambda **about: follow(submit(plane, described(plane, tmp_path, **about)))


def has_new(plane, group, count, old):
    pods = plane.pods(NAME, group)
    return len(pods) == count and not {*pods} & {*old}


def succeed(plane, followed):
    plane.run_pods(NAME)
    plane.end(NAME, 0)
    assert followed.ended().status == "succeeded"


def test_the_workflow_owns_the_job_and_the_pod_of_its_step_does_not(plane, tmp_path, step):
    step("step-1")
    run = submit(plane, described(plane, tmp_path))
    assert "keeps running" in run.leave()
    run.stop()
    plane.delete("pods", "step-1")
    wait_until(lambda: "step-1" not in plane.names("pods"), what="it is gone")
    time.sleep(SETTLED_SECONDS)
    assert plane.names("jobsets") == [NAME]
    step("step-2")
    adopted = submit(plane, described(plane, tmp_path))
    assert adopted._uid == run._uid
    assert "keeps running" in adopted.leave()
    adopted.stop()
    plane.delete("workflows", "w")
    wait_until(lambda: nothing_is_left(plane), what="all is collected")


def test_a_job_that_has_ended_goes_by_its_ttl(plane, start):
    followed = start(jobset={"spec": {"ttlSecondsAfterFinished": 3}})
    succeed(plane, followed)
    assert plane.names("jobsets") == [NAME]
    plane.pass_seconds_after_end(3)
    wait_until(lambda: nothing_is_left(plane), what="all is gone")


def test_the_rendered_role_is_enough(plane, tmp_path, start):
    plane.platform = plane.as_account(rbac(namespace=plane.namespace, account="runner"))
    followed = start()
    succeed(plane, followed)
    followed.run.stop()
    again = submit(plane, described(plane, tmp_path))
    assert again._uid == followed.run._uid


def test_pods_pass_the_restricted_profile(plane, tmp_path):
    spec = described(plane, tmp_path)
    run = submit(plane, spec)
    # A real namespace enforces it: pods that do not pass are never made.
    plane.run_pods(NAME)
    jobs = plane.platform.plan(spec).main["spec"]["replicatedJobs"]
    for pods in [each["template"]["spec"]["template"]["spec"] for each in jobs]:
        assert list(security_problems(pods)) == []
    run.stop()


def test_a_quota_that_is_used_up_is_named_and_nothing_is_left(plane, tmp_path):
    plane.allow_no_jobs()
    with pytest.raises(PlatformError, match="exceeded quota"):
        submit(plane, described(plane, tmp_path))
    wait_until(lambda: nothing_is_left(plane), what="nothing is left")


def test_a_follower_outlasts_an_api_server_that_is_started_again(plane, start):
    followed = start()
    plane.run_pods(NAME)
    wait_until(lambda: f"{NAME}-dnn-0-0: runs" in followed.status, what="it runs")
    plane.restart()
    plane.end(NAME, 0)
    assert followed.ended().status == "succeeded"


def test_a_data_pod_that_is_evicted_is_replaced_and_the_job_goes_on(plane, start):
    followed = start()
    plane.run_pods(NAME)
    first, second = plane.pods(NAME, "data")
    assert plane.evict(first)
    wait_until(lambda: has_new(plane, "data", 2, {first}), what="another one is there")
    assert second in plane.pods(NAME, "data")
    succeed(plane, followed)


def test_a_lost_node_restarts_the_job(plane, start):
    followed = start(output="pvc://runs/stoker")
    plane.run_pods(NAME)
    (leader,) = plane.pods(NAME, "dnn")
    plane.take_away(leader)
    wait_until(lambda: plane.pods(NAME, "dnn") not in ([], [leader]), what="it is started again")
    succeed(plane, followed)


@BOTH
def test_a_failed_dnn_pod_ends_the_run_and_a_retry_replaces_it(plane, tmp_path, follow, api_name):
    need(plane, api_name)
    spec = described(plane, tmp_path, api=api_name)
    followed = follow(submit(plane, spec))
    plane.run_pods(NAME)
    wait_until(lambda: "-0-0: runs" in followed.status, what="it runs")
    plane.end(NAME, EXIT_CODE)
    end = followed.ended()
    assert (end.status, end.exit_code) == ("failed", EXIT_CODE)
    plane.pass_seconds_after_end(SETTLED_SECONDS)
    assert not plane.pods(NAME, "dnn")
    again = submit(plane, spec)
    assert again._uid != followed.run._uid
    succeed(plane, follow(again))


def test_the_code_of_a_lost_host_s_survivor_starts_all_hosts_again(plane, start):
    followed = start(num_dnn=2, output="pvc://runs/stoker")
    plane.run_pods(NAME)
    first = plane.pods(NAME, "dnn")
    # The other one still runs.
    plane.fail(first[1], EXIT_PEER_LOST)
    wait_until(lambda: has_new(plane, "dnn", 2, first), what="the job is started again")
    assert plane.get("jobsets", NAME)["status"].get("restartsCountTowardsMax", 0) == 0
    succeed(plane, followed)


@BOTH
def test_a_job_that_runs_too_long_is_ended_and_that_is_said(plane, tmp_path, follow, api_name):
    need(plane, api_name)
    seconds = 5
    spec = described(plane, tmp_path, api=api_name, max_run_seconds=seconds)
    followed = follow(submit(plane, spec))
    plane.run_pods(NAME)
    plane.pass_deadline(NAME)
    end = followed.ended()
    assert end.status == "failed"
    assert f"longer than kubernetes.max_run_seconds, {seconds} s" in str(end.failure)
    wait_until(lambda: not plane.pods(NAME, "data"), what="no host is left")


def test_a_train_job_s_jobset_has_no_ttl_and_its_follower_deletes_it_all(plane, tmp_path, follow):
    need(plane, "trainer")
    role = rbac(namespace=plane.namespace, account="runner", api="trainer")
    plane.platform = plane.as_account(role)
    spec = described(plane, tmp_path, api="trainer")
    followed = follow(submit(plane, spec))
    wait_until(lambda: plane.names("jobsets") == [NAME], what="its JobSet is there")
    assert "ttlSecondsAfterFinished" not in plane.get("jobsets", NAME)["spec"]
    succeed(plane, followed)
    plane.pass_seconds_after_end(SETTLED_SECONDS)
    assert plane.names("jobsets") == plane.names("trainjobs") == [NAME]
