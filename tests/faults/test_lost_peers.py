"""Two dnn hosts, one is lost: the survivor's exit code says so, and a real failure keeps its own.

Each pod is a real launcher in a network of its own. Which exit codes restart a job is the pod
failure policy's (tests/contract/test_kubernetes_run.py).
"""

import itertools

import psutil
import pytest

from stoker.errors import EXIT_PEER_LOST, PlatformError
from support.local_job import until
from support.pods import Pod, Pods

pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(300)]

# Nobody is lost by it, however long a busy machine stands still.
FEED = {"lease_seconds": 60.0, "start_deadline_seconds": 60.0}
# Where one is lost: long enough for the others, if the machine stands still for some seconds.
LOSING = {**FEED, "lease_seconds": 8.0}
# It does not notice that a peer is gone: only the launcher does.
ALONE = "import os, time; print('trains', flush=True); time.sleep(300)"
# It fails with a peer: gloo's error comes long before the lease ends.
TOGETHER = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("trains", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""
SCRIPTS = {
    "plain": (ALONE, "none"),
    "torchrun": (TOGETHER, "torchrun"),
    # The survivor's ranks are started again, and wait for a host that does not come back.
    "restarts": (TOGETHER, {"name": "torchrun", "max_restarts": 2}),
}
SIGTERM_CODE = 143


def kill_container(pod: Pod) -> None:
    """Kills all of it at once, as a kubelet's SIGKILL does; its network stays."""
    psutil.Process(pod.process.pid).children()[0].kill()


STRIKES = {"node lost": Pod.lose_node, "killed": kill_container, "drained": Pod.terminate}


def started(pods: Pods) -> tuple[Pod, Pod]:
    pods.start("data", 0)
    leader, follower = pods.start("dnn", 0), pods.start("dnn", 1)
    for pod in (leader, follower):
        until(
            lambda pod=pod: "trains" in pod.log or pod.process.poll() is not None,
            what=f"{pod.host} trains",
        )
    leader.wait_for("host_joined", about=follower.host)
    return leader, follower


# Each strike without ranks, and ranks of each kind with one strike; the others with `make soak`.
CASES = [
    pytest.param(
        strike, script, marks=() if script == "plain" or strike == "killed" else pytest.mark.soak
    )
    for strike, script in itertools.product(STRIKES, SCRIPTS)
]


@pytest.mark.parametrize(("strike", "script"), CASES)
@pytest.mark.parametrize("struck", ["leader", "follower"])
def test_the_survivor_of_a_lost_host_says_so(tmp_path, struck, strike, script):
    code, strategy = SCRIPTS[script]
    feed = FEED if strike == "drained" else LOSING
    with Pods(tmp_path, dnn=2, data=1, feed=feed, code=code, strategy=strategy) as pods:
        leader, follower = started(pods)
        lost, survivor = (leader, follower) if struck == "leader" else (follower, leader)
        STRIKES[strike](lost)
        assert survivor.code() == EXIT_PEER_LOST
        if strike == "drained":
            assert lost.code() == SIGTERM_CODE
        if struck == "follower":
            assert f"dnn host {follower.host}" in (pods.record(leader).failure or "")


FAILS = """
import os, sys, time
print('trains', flush=True)
if os.environ["STOKER_HOST"].startswith("mnist-1-dnn-0-{index}"):
    time.sleep(2)
    print("LookupError: of this rank only", file=sys.stderr, flush=True)
    os._exit({code})
time.sleep(300)
"""


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("code", "ends_with"),
    # Codes that would restart the job are not passed on.
    [(7, 7), (1, 1), (EXIT_PEER_LOST, 1), (137, 1), (143, 1)],
)
def test_a_failure_of_the_script_is_no_lost_host(tmp_path, index, code, ends_with):
    script = FAILS.format(index=index, code=code)
    with Pods(tmp_path, dnn=2, data=1, feed=FEED, code=script, strategy="none") as pods:
        leader, follower = started(pods)
        assert [leader.code(), follower.code()] == [ends_with, ends_with]
        record = pods.record(leader)
        assert (record.status, record.exit_code) == ("failed", code)
        assert "LookupError: of this rank only" in (record.failure or "")


# As scripts do that handle SIGTERM.
ENDS_WITH_7 = f"import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); {ALONE}"


@pytest.mark.parametrize("struck", ["leader", "follower"])
def test_a_host_that_was_told_to_end_says_so_whatever_its_script_s_code(tmp_path, struck):
    # A pod that somebody deletes has no DisruptionTarget: its code alone says what happened.
    with Pods(tmp_path, dnn=2, data=1, feed=FEED, code=ENDS_WITH_7, strategy="none") as pods:
        leader, follower = started(pods)
        told, survivor = (leader, follower) if struck == "leader" else (follower, leader)
        told.terminate()
        assert [told.code(), survivor.code()] == [SIGTERM_CODE, EXIT_PEER_LOST]


@pytest.mark.parametrize("struck", ["leader", "follower"])
def test_a_survivor_that_is_told_to_end_while_it_waits_for_the_cause_says_so(tmp_path, struck):
    # As on a cluster: the job controller deletes the other pods of a Job that has failed.
    with Pods(tmp_path, dnn=2, data=1, feed=FEED, code=TOGETHER, strategy="torchrun") as pods:
        leader, follower = started(pods)
        lost, survivor = (leader, follower) if struck == "leader" else (follower, leader)
        kill_container(lost)
        survivor.wait_for("command_ended")
        survivor.terminate()
        assert survivor.code() == SIGTERM_CODE


def test_a_host_that_never_comes_is_no_lost_host(tmp_path):
    feed = {**FEED, "start_deadline_seconds": 3.0}
    with Pods(tmp_path, dnn=2, data=1, feed=feed, code=ALONE, strategy="none") as pods:
        pods.start("data", 0)
        assert pods.start("dnn", 0).code() == PlatformError.exit_code
