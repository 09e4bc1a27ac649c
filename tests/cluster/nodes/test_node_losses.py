"""What takes dnn hosts away on a cluster with nodes, and what becomes of the training.

Two hosts and one; scripts that save, that do not, and that do not listen.
"""

import signal

import pytest

from support.node_cluster import (
    FAILED_TRAINING,
    MINUTES,
    PLATFORM_ERROR,
    NodeCluster,
    TypedCommand,
    are_gone,
    fails,
    succeeds,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

CHECKPOINTS = "/opt/ml/checkpoints"
# Each attempt saves something new, and the last one of three ends.
ADVANCES = f"""
import pathlib, time
folder = pathlib.Path("{CHECKPOINTS}")
number = len(list(folder.glob("*.pt")))
(folder / f"{{number}}.pt").write_text("saved")
print("epoch 1/", number, flush=True)
time.sleep(0 if number == 3 else 3600)
"""
STANDS_STILL = "import time; print('epoch 1/', flush=True); time.sleep(3600)"
# On SIGTERM it saves for a minute; what it has saved is found by the next attempt.
SAVES_FOR_A_MINUTE = f"""
import pathlib, signal, sys, time
started, saved = (pathlib.Path("{CHECKPOINTS}", name) for name in ("started", "saved"))
def save(*_):
    time.sleep(60)
    saved.write_text("all of it")
    sys.exit(0)
if started.exists():
    sys.exit(0 if saved.exists() else "nothing was saved")
signal.signal(signal.SIGTERM, save)
started.write_text("")
print("epoch 1/", flush=True)
time.sleep(3600)
"""
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STANDS_STILL}"
# More than the job folder's size on the node, which the kubelet measures every ten seconds.
FILLS_ITS_DISK = """
import time
print("epoch 1/", flush=True)
with open("/opt/ml/model/filling", "wb") as file:
    for _ in range(64):
        file.write(bytes(1 << 24))
        file.flush()
time.sleep(3600)
"""


def of_script(cluster: NodeCluster, script: str, **kubernetes: object) -> TypedCommand:
    """Trains with a script whose checkpoints outlive its pods."""
    given = {"output": f"pvc://{cluster.claim('runs')}/stoker", **kubernetes}
    file = cluster.workload(command=["python", "-c", script], hyperparameters={}, kubernetes=given)
    return cluster.train(file, *cluster.groups())


def of_two_hosts(cluster: NodeCluster) -> tuple[TypedCommand, list[str]]:
    """Trains on two dnn hosts; returns their pods, the leader's first, once an epoch is saved."""
    file = cluster.workload(
        strategy={"name": "torchrun"},
        hyperparameters={"epochs": cluster.given.epochs, "checkpoints": CHECKPOINTS},
        kubernetes={"output": f"pvc://{cluster.claim('runs')}/stoker"},
    )
    command = cluster.train(file, *cluster.groups(dnn=2, data=1))
    cluster.trains(epoch=2)
    return command, cluster.pods_of("t", "dnn")


def drain(cluster: NodeCluster, pod: str) -> None:
    """Does to one pod what a drain does that somebody has allowed."""
    assert not cluster.lose(pod, "evicted")
    node = cluster.node_of(pod)
    cluster.cordon(node)
    cluster.delete("poddisruptionbudgets", "t")
    assert cluster.lose(pod, "evicted")
    wait_for(lambda: pod not in cluster.names("pods"), what="it is let go")
    cluster.uncordon(node)


TAKEN = {
    "drained": drain,
    "deleted": lambda cluster, pod: cluster.lose(pod, "deleted"),
    "container killed": NodeCluster.kill_container,
}


def is_taken_once(cluster: NodeCluster, how: str = "deleted") -> None:
    cluster.trains()
    pods = cluster.pods_of("t", "dnn")
    TAKEN[how](cluster, pods[0])
    cluster.restarted(pods)


@pytest.mark.parametrize("index", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("how", TAKEN)
def test_one_of_two_dnn_hosts_is_lost_and_both_resume(cluster, how, index):
    command, pods = of_two_hosts(cluster)
    TAKEN[how](cluster, pods[index])
    leader, _ = cluster.restarted(pods)
    # No failure of the training: it counts for nothing.
    assert cluster.restarts_counted() == 0
    succeeds(cluster, command)
    log = cluster.logs(leader)
    assert f"epoch {cluster.given.epochs}/" in log
    assert "epoch 1/" not in log


def test_one_of_two_dnn_hosts_loses_its_node_and_both_resume(cluster):
    command, pods = of_two_hosts(cluster)
    with cluster.without_node(cluster.node_of(pods[1])):
        wait_for(lambda: pods[1] not in cluster.names("pods"), what="it is collected")
    cluster.restarted(pods)
    assert cluster.restarts_counted() == 0
    succeeds(cluster, command)


@pytest.mark.parametrize("index", [0, 1], ids=["leader", "follower"])
def test_one_of_two_dnn_hosts_is_cut_off_and_both_resume_once_its_node_is_back(cluster, index):
    command, pods = of_two_hosts(cluster)
    lost, node = pods[index], cluster.node_of(pods[index])
    if node == cluster.node_of(pods[1 - index]):
        pytest.skip("both dnn hosts are on one node: two nodes that train are needed")
    with cluster.cut_off(node):
        # The survivor does not wait for the node's eviction after five minutes: its lease ends.
        words = f"pod {lost} should have ended"
        wait_for(lambda: words in command.text, what=f"{lost} is named", seconds=10 * MINUTES)
        assert node in command.text
        assert "out-of-service" in command.text
    cluster.restarted(pods)
    assert cluster.restarts_counted() == 0
    succeeds(cluster, command)


def test_a_script_that_fails_on_one_of_two_hosts_restarts_nothing(cluster):
    script = "import os, time; os.environ['STOKER_HOST'].startswith('t-dnn-0-1') and 1 / 0"
    file = cluster.workload(
        command=["python", "-c", f"{script}; time.sleep(3600)"],
        strategy={"name": "none"},
        hyperparameters={},
        kubernetes={"output": f"pvc://{cluster.claim('runs')}/stoker"},
    )
    command = cluster.train(file, *cluster.groups(dnn=2))
    fails(cluster, command, "ZeroDivisionError", code=FAILED_TRAINING)
    assert cluster.restarts() == 0


def test_a_run_that_does_not_advance_ends_after_some_restarts(cluster):
    command = of_script(cluster, STANDS_STILL, max_fresh_starts=1)
    is_taken_once(cluster)
    cluster.lose(cluster.trains(), "deleted")
    # The refusal is stoker's own, and the training has no code.
    assert command.ended() in (PLATFORM_ERROR, FAILED_TRAINING), command.tail
    assert "without progress" in command.tail


def test_a_run_that_advances_restarts_as_often_as_its_pods_are_taken(cluster):
    command = of_script(cluster, ADVANCES, max_fresh_starts=1)
    for _ in range(3):
        is_taken_once(cluster)
    succeeds(cluster, command)
    assert cluster.restarts() == 3


def test_a_pod_that_is_preempted_by_priority_trains_again_once_there_is_room(cluster):
    command = of_script(cluster, ADVANCES)
    cluster.trains()
    pods = cluster.pods_of("t", "dnn")
    with cluster.preempting(pods[0]):
        wait_for(lambda: pods[0] not in cluster.names("pods"), what="it is preempted")
    cluster.restarted(pods)
    assert cluster.restarts_counted() == 0
    for _ in range(2):
        is_taken_once(cluster)
    succeeds(cluster, command)


def test_a_pod_that_writes_more_than_its_disk_is_evicted_and_the_reason_is_named(cluster):
    # The kubelet evicts it for its own limit, which is no disruption: it would only fill it again.
    script = {"command": ["python", "-c", FILLS_ITS_DISK], "hyperparameters": {}}
    file = cluster.workload(**script, kubernetes={"scratch": "256Mi"})
    command = cluster.train(file, *cluster.groups())
    assert command.ended() in (PLATFORM_ERROR, FAILED_TRAINING), command.tail
    assert "exceeds the limit" in str(cluster.record()["failure"])
    assert cluster.restarts() == 0


def test_pressure_of_memory_on_its_node_takes_others_first(cluster):
    command = cluster.train(cluster.workload(), *cluster.groups())
    pod = cluster.trains()
    hog = cluster.hog(cluster.node_of(pod))

    def is_taken() -> bool:
        return cluster.get("pods", hog)["status"]["phase"] == "Failed"

    wait_for(is_taken, what="the pod without requests is evicted")
    succeeds(cluster, command)
    assert cluster.restarts() == 0
    assert pod in cluster.names("pods")


def test_a_script_that_saves_for_a_minute_has_the_time_for_it(cluster):
    command = of_script(cluster, SAVES_FOR_A_MINUTE)
    is_taken_once(cluster, "drained")
    succeeds(cluster, command)


def test_a_script_that_ignores_sigterm_holds_nothing_up(cluster):
    command = of_script(cluster, IGNORES_SIGTERM)
    is_taken_once(cluster, "drained")
    cluster.trains()
    # Ctrl-C deletes the job; its pod has two minutes.
    command.signal(signal.SIGINT)
    assert command.ended() == 130
    are_gone(cluster)
