"""Jobs on a cluster with nodes: what is lost, refused and ended, and what becomes of the training.

Each test has a namespace of its own, under the *restricted* profile. What a cluster is needed for
is in tests/cluster/README.md; what it lacks is skipped, and said.
"""

import json
import os
import signal

import pytest

from support.node_cluster import (
    FAILED_TRAINING,
    LOST,
    MINUTES,
    PLATFORM_ERROR,
    are_gone,
    described,
    fails,
    spellings,
    succeeds,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

OUT_OF_MEMORY = "kept = [b'x' * (1 << 26) for _ in range(1 << 20)]"


def test_doctor_finds_all_that_the_workload_needs(cluster):
    told = json.loads(cluster.typed("doctor", "--cluster", str(cluster.workload()), "--json"))
    rows = {check["name"]: check["state"] for check in told["checks"]}
    assert [rows[name] for name in ("cluster", "api", "rights", "job")] == ["ok"] * 4


@pytest.mark.parametrize("api_name", ["jobset", "trainer"])
@pytest.mark.parametrize("data", [0, 1])
def test_a_training_with_and_without_data_hosts(cluster, api_name, data):
    groups = [each["name"] for each in cluster.call("GET", "apis")["groups"]]
    if api_name == "trainer" and "trainer.kubeflow.org" not in groups:
        pytest.skip("the cluster has no Kubeflow Trainer")
    file = cluster.workload(kubernetes={"api": api_name})
    succeeds(cluster, cluster.train(file, *cluster.groups(data=data)))
    assert len(cluster.record()["groups"]) == 1 + bool(data)


def test_two_dnn_hosts(cluster):
    file = cluster.workload(strategy={"name": "torchrun"})
    command = cluster.train(file, *cluster.groups(dnn=2, data=1))
    cluster.trains()
    assert len(cluster.pods_of("t", "dnn")) == 2
    succeeds(cluster, command)


@pytest.mark.parametrize("how", [*LOST, "out of memory"])
def test_a_data_pod_that_is_lost_serves_again(cluster, how):
    command = cluster.train(cluster.workload(), *cluster.groups(data=2))
    cluster.trains()
    first, second = cluster.pods_of("t", "data")
    assert cluster.lose(first, how)

    def serves() -> bool:
        there = cluster.running("stoker/role=data")
        if how in ("killed", "out of memory"):
            return first in there and cluster.container_restarts(first) > 0
        return len(there) == 2 and first not in there and second in there

    wait_for(serves, what="another one serves", seconds=5 * MINUTES)
    succeeds(cluster, command)


def test_a_training_goes_on_without_any_data_pod(cluster):
    command = cluster.train(cluster.workload(), *cluster.groups(data=2))
    cluster.trains()
    for pod in cluster.pods_of("t", "data"):
        cluster.lose(pod, "deleted")
    succeeds(cluster, command)


def test_a_drain_of_a_data_node_takes_its_pods_and_the_training_goes_on(cluster):
    command = cluster.train(cluster.workload(), *cluster.groups(data=1))
    cluster.trains()
    (pod,) = cluster.pods_of("t", "data")
    node = cluster.node_of(pod)
    assert cluster.drain(node, "stoker/role=data") == []
    wait_for(lambda: pod not in cluster.names("pods"), what="it has left the node")
    cluster.uncordon(node)
    succeeds(cluster, command)


def test_a_drain_waits_for_a_dnn_pod(cluster):
    command = cluster.train(cluster.workload(), *cluster.groups())
    pod = cluster.trains()
    assert cluster.drain(cluster.node_of(pod), "stoker/role=dnn") == [pod]
    succeeds(cluster, command)


def test_a_dnn_pod_that_is_let_go_starts_all_hosts_again(cluster):
    output = cluster.claim("runs")
    file = cluster.workload(kubernetes={"output": f"pvc://{output}/stoker"})
    command = cluster.train(file, *cluster.groups(data=1))
    pod = cluster.trains()
    assert not cluster.lose(pod, "evicted")
    # As docs/kubeflow.md says: somebody allows the interruption.
    cluster.delete("poddisruptionbudgets", "t")
    assert cluster.lose(pod, "evicted")
    wait_for(lambda: cluster.pods_of("t", "dnn") not in ([], [pod]), what="it is started again")
    succeeds(cluster, command)


@pytest.mark.parametrize("role", ["data", "dnn"])
def test_a_node_that_is_cut_off(cluster, role):
    file = cluster.workload(kubernetes={"dead_node_minutes": 2})
    command = cluster.train(file, *cluster.groups(data=1))
    leader = cluster.trains()
    pod = leader if role == "dnn" else cluster.pods_of("t", "data")[0]
    if role == "data" and cluster.node_of(pod) == cluster.node_of(leader):
        pytest.skip("the data pod is on the node that trains: the pools share it")
    # A node counts as unreachable after a minute, and its pods are evicted five minutes later.
    with cluster.cut_off(cluster.node_of(pod)):
        if role == "dnn":
            # It names pod and node, and what frees them.
            words = (pod, cluster.node_of(pod), "out-of-service")
            fails(cluster, command, *words, code=PLATFORM_ERROR)
        else:
            succeeds(cluster, command)


def test_a_quota_that_is_used_up_is_named(cluster):
    cluster.quota({"count/jobsets.jobset.x-k8s.io": "0"})
    file = cluster.workload(on_no_capacity={"wait_minutes": 0})
    fails(cluster, cluster.train(file, *cluster.groups()), "quota", code=PLATFORM_ERROR)
    assert cluster.names("jobsets") == []


def test_pods_that_the_restricted_profile_refuses_are_no_jobs_of_stoker(cluster):
    from kubernetes.client.exceptions import ApiException

    command = cluster.train(cluster.workload(), *cluster.groups(data=1))
    # The namespace does enforce it: what is privileged is refused there, and stoker's pods run.
    privileged = {"name": "x", "image": "x", "securityContext": {"privileged": True}}
    pod = {**described("v1", "Pod", "refused"), "spec": {"containers": [privileged]}}
    with pytest.raises(ApiException, match="violates PodSecurity"):
        cluster.make("pods", pod)
    succeeds(cluster, command)


def test_an_image_that_is_missing_is_named_and_nothing_is_left(cluster):
    image = f"{cluster.given.image.rpartition(':')[0]}:no-such-tag"
    command = cluster.train(cluster.workload(image=image), *cluster.groups())
    fails(cluster, command, "image", "no-such-tag", code=PLATFORM_ERROR)
    are_gone(cluster)


def test_a_claim_that_is_missing_is_named(cluster):
    file = cluster.workload(kubernetes={"output": "pvc://no-such-claim/stoker"})
    told = cluster.type("doctor", "--cluster", str(file))
    assert told.ended() == PLATFORM_ERROR
    assert "claim no-such-claim not found" in told.text
    # It waits ten minutes for somebody who makes it.
    command = cluster.train(file, *cluster.groups())
    fails(cluster, command, "no-such-claim", code=PLATFORM_ERROR)


def test_a_host_that_is_out_of_memory_says_so(cluster):
    command = cluster.train(cluster.workload(command=["python", "-c", OUT_OF_MEMORY]))
    assert command.ended() in (PLATFORM_ERROR, FAILED_TRAINING), command.tail
    assert "memory" in cluster.record()["failure"]


def test_a_script_that_fails_ends_the_run_with_its_own_words(cluster):
    words = "ValueError: no such layer"
    script = ["python", "-c", "raise ValueError('no such layer')"]
    command = cluster.train(cluster.workload(command=script), *cluster.groups())
    fails(cluster, command, words, code=FAILED_TRAINING)
    assert words in cluster.record()["failure"]


def test_an_api_server_that_is_away_for_a_while(cluster, given):
    restart = given.need(given.restart, "RESTART", "it takes the API server away")
    command = cluster.train(cluster.workload(), *cluster.groups(data=1))
    cluster.trains()
    assert os.system(restart) == 0
    succeeds(cluster, command)


def test_a_follower_that_is_killed_leaves_a_job_that_the_next_one_follows(cluster):
    file = cluster.workload()
    first = cluster.train(file, *cluster.groups())
    pod = cluster.trains()
    first.signal(signal.SIGKILL)
    first.ended()
    succeeds(cluster, cluster.train(file, *cluster.groups()))
    # No second job was made.
    assert pod in cluster.names("pods")


def test_a_follower_that_is_told_to_end_leaves_the_job_and_ctrl_c_deletes_it(cluster):
    file = cluster.workload()
    first = cluster.train(file, *cluster.groups(data=1))
    pod = cluster.trains()
    first.signal(signal.SIGTERM)
    assert first.ended() == 143
    assert "keeps running" in first.tail
    second = cluster.train(file, *cluster.groups(data=1))
    wait_for(lambda: "job_resumed" in second.text, what="it is followed again")
    assert pod in cluster.names("pods")
    second.signal(signal.SIGINT)
    assert second.ended() == 130
    are_gone(cluster)


def test_secrets_are_in_no_object_and_no_log(cluster):
    own = "a-secret-of-the-user-7f3a"
    secret = described("v1", "Secret", "keys")
    cluster.make("secrets", {**secret, "stringData": {"SECRET_KEY": own}})
    keys = [{"secretRef": {"name": "keys"}}]
    taken = {"pod": {"spec": {"containers": [{"envFrom": keys}]}}}
    file = cluster.workload(kubernetes={"dnn": taken, "data": taken})
    command = cluster.train(file, *cluster.groups(data=1))
    cluster.trains()
    secrets = [*spellings(own), *spellings(cluster.token())]
    kinds = ("jobsets", "pods", "configmaps", "events")
    shown = {kind: json.dumps(cluster.objects(kind)) for kind in kinds}
    succeeds(cluster, command)
    for pod in cluster.names("pods"):
        shown[f"log of {pod}"] = cluster.logs(pod)
    shown["stoker train"] = command.text
    for file in cluster.folder.rglob("*"):
        if file.is_file():
            shown[str(file)] = file.read_text(errors="replace")
    assert [place for place, text in shown.items() if any(s in text for s in secrets)] == []
