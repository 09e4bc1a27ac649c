"""`stoker train` on a cluster: what it makes, follows, leaves, deletes and records."""

import os
import signal
from typing import Any

import pytest

from support.black_box import END_SECONDS, Verb, read, refused, stoker, verbs
from support.kubernetes_api import TOKEN, KubernetesApi, kube_config, kubernetes_api
from support.processes import until
from support.workloads import NO_CAPACITY, ON_KUBERNETES, changed, write

pytest.importorskip("kubernetes")

NAME = "mnist-1"
TRAIN = ("train", "workload.yaml", "--name", NAME, "--yes")
BOTH = ("--group", "dnn=1", "--group", "data=c7i.4xlarge:2")
OWNED = ("jobsets", "secrets", "configmaps", "pods")
EXIT_CODE = 7


@pytest.fixture
def api():
    with kubernetes_api() as found:
        yield found


@pytest.fixture
def env(tmp_path, api):
    return {**os.environ, "KUBECONFIG": str(kube_config(tmp_path, api.url))}


@pytest.fixture
def start(tmp_path, env):
    """Starts a training on one dnn host and two data hosts, as often as asked."""
    with verbs(tmp_path, env) as begun:

        def make(workload: Any = ON_KUBERNETES, **more: str) -> Verb:
            write(tmp_path, workload)
            return begun.start(*TRAIN, *BOTH, **more)

        yield make


def leader_of(api: KubernetesApi) -> str:
    (found,) = api.pods(NAME, "dnn")
    return found


def is_made(api: KubernetesApi) -> bool:
    return api.has("jobsets", NAME) and api.has("configmaps", f"{NAME}-config")


def follow(train: Verb, api: KubernetesApi) -> None:
    until(lambda: is_made(api) or train.process.poll() is not None, what="the job is made")
    api.run_pods(NAME)
    api.say(leader_of(api), "a line of the leader")
    train.until_it_says("a line of the leader")


def end(api: KubernetesApi, code: int = 0, *, message: str = "") -> None:
    api.end_pod(leader_of(api), code, message=message)
    api.end_job(NAME, "Failed" if code else "Completed")


def left(api: KubernetesApi) -> list[str]:
    return [name for plural in OWNED for name in api.names(plural) if name.startswith(NAME)]


def test_a_training_is_followed_to_its_end_with_its_record_and_logs(start, api, tmp_path):
    train = start()
    follow(train, api)
    jobs = {job["name"]: job for job in api.get("jobsets", NAME)["spec"]["replicatedJobs"]}
    hosts = {name: job["template"]["spec"]["completions"] for name, job in jobs.items()}
    assert hosts == {"dnn": 1, "data": 2}
    # A data host that is evicted does not end the training.
    again = api.evict_pod(api.pods(NAME, "data")[0])
    api.start_pod(again)
    api.say(again, "back again")
    train.until_it_says("back again")
    token = api.token(NAME)
    end(api)
    train.ends_with(0)
    record = read(tmp_path / "runs" / NAME / "training.json")
    assert record["status"] == "succeeded"
    assert record["job"] == {"platform": "kubernetes", "name": NAME}
    (log,) = (tmp_path / "runs" / NAME / "logs").glob("dnn-*.log")
    assert log.read_text() == "a line of the leader\n"
    kept = [path for path in (tmp_path / "runs" / NAME).rglob("*") if path.is_file()]
    assert "report.html" in {path.name for path in kept}
    texts = [train.said, *(path.read_text(errors="replace") for path in kept)]
    assert not [text for text in texts if token in text or TOKEN in text]


def test_a_failed_training_ends_with_6_and_the_record_has_its_exit_code(start, api, tmp_path):
    train = start()
    follow(train, api)
    end(api, EXIT_CODE, message="ValueError: no such layer")
    train.ends_with(6)
    record = read(tmp_path / "runs" / NAME / "training.json")
    assert (record["status"], record["exit_code"]) == ("failed", EXIT_CODE)
    assert "no such layer" in train.said


def test_ctrl_c_deletes_the_job_with_all_it_owns(start, api):
    train = start()
    follow(train, api)
    train.send(signal.SIGINT)
    train.ends_with(130)
    assert left(api) == []


def test_sigterm_while_the_job_is_made_leaves_nothing(start, api):
    api.holds.add("jobsets")
    train = start()
    until(lambda: bool(api.names("jobsets")), what="the server has the request")
    train.send(signal.SIGTERM)
    train.ends_with(143)
    assert left(api) == []


def test_an_attempt_after_kill_9_goes_on_with_the_same_job_and_token(start, api, tmp_path):
    first = start()
    follow(first, api)
    token, uid = api.token(NAME), api.get("jobsets", NAME)["metadata"]["uid"]
    first.kill()
    api.say(leader_of(api), "said to nobody")
    second = start()
    second.until_it_says("said to nobody")
    assert api.token(NAME) == token
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid
    end(api)
    second.ends_with(0)
    assert api.count("DELETE") == 0
    assert read(tmp_path / "runs" / NAME / "training.json")["status"] == "succeeded"
    (log,) = (tmp_path / "runs" / NAME / "logs").glob("dnn-*.log")
    assert log.read_text() == "a line of the leader\nsaid to nobody\n"


def test_a_step_whose_node_is_taken_leaves_the_job_and_the_next_attempt_follows_it(start, api):
    api.make_workflow()
    first = start(**api.make_step("step-1"))
    follow(first, api)
    uid = api.get("jobsets", NAME)["metadata"]["uid"]
    assert api.take_node("step-1", first.process, seconds=END_SECONDS) == 143, first.said
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid
    second = start(**api.make_step("step-2"))
    api.say(leader_of(api), "said later")
    second.until_it_says("said later")
    end(api)
    second.ends_with(0)
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid


def test_an_image_that_cannot_be_had_is_the_platforms_refusal_and_leaves_no_job(start, api):
    train = start()
    until(lambda: is_made(api), what="the job is made")
    api.make_pods(NAME)
    api.pod_waits(leader_of(api), "InvalidImageName", "couldn't parse image name")
    train.ends_with(4)
    assert "couldn't parse image name" in train.said
    assert api.names("jobsets") == []


def test_without_the_right_to_make_a_job_nothing_is_made(start, api):
    api.denied.add(("create", "jobsets"))
    train = start()
    train.ends_with(4)
    assert "jobsets" in train.said
    assert left(api) == []


def test_a_job_that_somebody_else_made_under_that_name_is_left_alone(start, api):
    first = start()
    follow(first, api)
    first.kill()
    uid = api.get("jobsets", NAME)["metadata"]["uid"]
    other = start(changed(ON_KUBERNETES, command=["python", "another.py"]))
    assert other.process.wait(END_SECONDS) in (2, 4), other.said
    assert "Traceback" not in other.said
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid


def test_hosts_without_a_node_for_wait_minutes_are_no_capacity(start, api):
    train = start({**ON_KUBERNETES, NO_CAPACITY: {"wait_minutes": 0, "then": "fail"}})
    until(lambda: is_made(api), what="the job is made")
    api.make_pods(NAME)
    for pod in api.names("pods"):
        api.pod_finds_no_node(pod, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    train.ends_with(4)
    assert api.names("jobsets") == []


def test_a_dry_run_asks_the_cluster_nothing(api, env, tmp_path):
    write(tmp_path, ON_KUBERNETES)
    stoker("train", "workload.yaml", "--dry-run", *BOTH, cwd=tmp_path, env=env)
    assert api.calls == []


def test_a_context_that_is_not_there_is_named(env, tmp_path):
    write(tmp_path, changed(ON_KUBERNETES, kubernetes={"context": "there"}))
    assert "there" in refused(*TRAIN, *BOTH, cwd=tmp_path, env=env, code=4)
