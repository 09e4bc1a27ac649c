"""`stoker train --platform kubernetes` is a real process, stopped and killed while a job runs."""

import json
import os
import signal

import pytest
import yaml

from support.kubernetes_api import KubernetesApi, kube_config, kubernetes_api
from support.kubernetes_jobs import WORKLOAD
from support.local_job import until
from support.train_command import END_SECONDS, Train, trainings

pytestmark = pytest.mark.fault

NAME = "mnist-1"
LEADER = f"{NAME}-dnn-0-0"


@pytest.fixture
def api():
    with kubernetes_api() as found:
        yield found


@pytest.fixture
def start(tmp_path, api):
    environ = {**os.environ, "KUBECONFIG": str(kube_config(tmp_path, api.url))}
    workload = yaml.safe_dump(dict(WORKLOAD))
    with trainings(tmp_path, workload, name=NAME, data="c7i.4xlarge", environ=environ) as make:
        yield make


def leader_of(api: KubernetesApi) -> str:
    (found,) = api.pods(NAME, "dnn")
    return found


def pods_of(api: KubernetesApi) -> list[str]:
    return [name for name in api.names("pods") if name.startswith(f"{NAME}-")]


def follow(train: Train, api: KubernetesApi) -> None:
    until(lambda: api.has("configmaps", f"{NAME}-config"), what="the job is made")
    api.run_pods(NAME)
    api.say(leader_of(api), "a line of the leader")
    until(lambda: "a line of the leader" in train.said, what="the job is followed")


# SIGTERM in test_sagemaker_train, which runs always; and below, where a step is ended by it.
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT]
)
def test_a_signal_while_following_deletes_the_job_with_all_it_owns(start, api, number):
    train = start()
    follow(train, api)
    train.process.send_signal(number)
    assert train.ended_with() == 128 + number, train.said
    for plural in ("jobsets", "secrets", "configmaps", "pods"):
        assert api.names(plural) == []
    assert "Traceback" not in train.said


@pytest.mark.parametrize("plural", ["jobsets", "secrets"])
def test_sigterm_while_the_job_is_made_leaves_nothing(start, api, plural):
    api.holds.add(plural)
    train = start()
    until(lambda: bool(api.names(plural)), what="the server has the request")
    train.process.terminate()
    assert train.ended_with() == 143, train.said
    assert api.names("jobsets") == []
    assert api.names("secrets") == []


# Also a pod of no pipeline leaves its job: tests/contract/test_kubernetes_run.py.
@pytest.mark.parametrize("workflow", ["mnist-w1", pytest.param(None, marks=pytest.mark.soak)])
def test_a_follower_whose_node_is_taken_leaves_the_job_and_the_next_attempt_follows_it_to_its_end(
    start, api, workflow
):
    api.make_workflow()
    first = start(**api.make_step("step-1", workflow=workflow))
    follow(first, api)
    uid, pods = api.get("jobsets", NAME)["metadata"]["uid"], pods_of(api)
    assert api.take_node("step-1", first.process, seconds=END_SECONDS) == 143, first.said
    last = first.said.splitlines()[-1]
    assert last.startswith(f"stopped by SIGTERM; the job {NAME} keeps running"), first.said
    assert "the next attempt adopts it; without a follower it ends after 240 minutes" in last
    assert (api.get("jobsets", NAME)["metadata"]["uid"], pods_of(api)) == (uid, pods)
    assert api.names("secrets") == [f"{NAME}-token"]
    second = start(**api.make_step("step-2", workflow=workflow))
    until(lambda: "job_resumed" in second.said, what="the job is adopted")
    api.end_pod(leader_of(api))
    api.end_job(NAME)
    assert second.ended_with() == 0, second.said
    assert api.count("DELETE") == 0
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid


# Of any process SIGINT deletes the job: the test of signals above.
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
def test_a_step_whose_run_is_cancelled_deletes_the_job(start, api, number):
    api.make_workflow()
    train = start(**api.make_step("step-1"))
    follow(train, api)
    if number == signal.SIGTERM:
        api.terminate_workflow()
    train.process.send_signal(number)
    assert train.ended_with() == 128 + number, train.said
    for plural in ("jobsets", "secrets", "configmaps"):
        assert api.names(plural) == []
    assert pods_of(api) == []


def test_an_attempt_after_kill_9_goes_on_with_the_same_job_and_token(start, api, tmp_path):
    first = start()
    follow(first, api)
    token, uid = api.token(NAME), api.get("jobsets", NAME)["metadata"]["uid"]
    first.kill()
    api.say(leader_of(api), "said to nobody")
    second = start()
    until(lambda: "job_resumed" in second.said, what="the job is adopted")
    until(lambda: "said to nobody" in second.said, what="the log is read on")
    assert api.token(NAME) == token
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid
    api.end_pod(leader_of(api))
    api.end_job(NAME)
    assert second.ended_with() == 0, second.said
    assert api.count("DELETE") == 0
    record = json.loads((tmp_path / "runs" / NAME / "training.json").read_text())
    assert record["status"] == "succeeded"
    assert record["job"] == {"platform": "kubernetes", "name": NAME}
    log = (tmp_path / "runs" / NAME / "logs" / f"dnn-{LEADER}.log").read_text()
    assert log == "a line of the leader\nsaid to nobody\n"


def test_a_run_that_the_cluster_ends_for_want_of_an_image_leaves_no_job(start, api):
    train = start()
    until(lambda: api.has("configmaps", f"{NAME}-config"), what="the job is made")
    api.make_pods(NAME)
    api.pod_waits(leader_of(api), "InvalidImageName", "couldn't parse image name")
    assert train.ended_with() == 4, train.said
    assert "couldn't parse image name" in train.said
    assert "Traceback" not in train.said
    assert api.names("jobsets") == []
