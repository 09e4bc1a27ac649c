"""Two dnn hosts, one is lost: the survivor's exit code says so, and a real failure keeps its own.

Each pod is a real launcher in a network of its own. Which exit codes restart a job is the pod
failure policy's (tests/contract/test_kubernetes_run.py).
"""

import psutil
import pytest

from stoker.errors import EXIT_PEER_LOST, PlatformError
from support.local_job import until
from support.pods import Pod, Pods

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(300)]

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


@pytest.mark.parametrize(
    ("struck", "strike", "script"),
    [
        ("leader", "node lost", "plain"),
        ("leader", "killed", "torchrun"),
        ("follower", "killed", "torchrun"),
        ("follower", "drained", "plain"),
    ],
)
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


# Codes that would restart the job are not passed on.
@pytest.mark.parametrize(("code", "ends_with"), [(7, 7), (EXIT_PEER_LOST, 1)])
def test_a_failure_of_the_script_is_no_lost_host(tmp_path, code, ends_with):
    script = FAILS.format(index=1, code=code)
    with Pods(tmp_path, dnn=2, data=1, feed=FEED, code=script, strategy="none") as pods:
        leader, follower = started(pods)
        assert [leader.code(), follower.code()] == [ends_with, ends_with]
        record = pods.record(leader)
        assert (record.status, record.exit_code) == ("failed", code)
        assert "LookupError: of this rank only" in (record.failure or "")


def test_a_host_that_never_comes_is_no_lost_host(tmp_path):
    feed = {**FEED, "start_deadline_seconds": 3.0}
    with Pods(tmp_path, dnn=2, data=1, feed=feed, code=ALONE, strategy="none") as pods:
        pods.start("data", 0)
        assert pods.start("dnn", 0).code() == PlatformError.exit_code
