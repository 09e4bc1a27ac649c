"""Pods in a network of their own are moved, preempted and cut off: no batch of the run changes."""

import functools
import time

import pytest

from support.cluster import Line, reference
from support.local_job import until
from support.pods import WAIT_SECONDS, Pods

# One training that is struck four times takes a minute.
pytestmark = [pytest.mark.fault, pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(300)]

# Nobody is lost by it, however long a busy machine stands still.
FEED = {"lease_seconds": 60.0, "start_deadline_seconds": 60.0}


# Between two stops, and after the last one, are more batches than are asked for ahead (18): who is
# struck in a stop, or soon after, has more to do.
STOPS = (8, 30, 54, 96, 120)
GIVEN: Line = {"samples": 584, "batch_size": 4, "epochs": 1, "sample_seconds": 0.02}


def test_training_is_exact_while_data_pods_are_lost_cut_off_preempted_and_all_gone(tmp_path):
    # A cut of 5 s does not end this lease.
    feed = {**FEED, "lease_seconds": 20.0}
    with Pods(tmp_path, feed=feed, given={**GIVEN, "pause_at": STOPS}) as pods:
        # A node is lost. Its pod comes back under a new address; another one has the old address.
        trainer, lost = pods.start("dnn", 0), pods.start("data", 0)
        trainer.wait_for_pause(STOPS[0])
        lost.lose_node()
        other = pods.start("data", 1, address=lost.sandbox.address)
        # The trainer looks for data-0 where data-1 is now.
        trainer.wait_for("agent_address_reused", agent=lost.host)
        again = pods.start("data", 0, named_after_seconds=None)
        pods.go_on(STOPS[0])
        # First its name is as it was, then there are both: nobody has told the old one's end.
        asked = functools.partial(pods.names.count, again.host, lost.sandbox.address)
        before = asked()
        until(lambda: asked() > before, what="the trainer asks for its address again")
        pods.publish(lost, again)
        trainer.wait_for_pause(STOPS[1])
        trainer.wait_for("agent_ready", agent=again.host, count=2)
        pods.publish(again)

        # A pod is cut off, and reconnects as the same.
        given_up = len(trainer.events("host_lost", about=again.host))
        again.sandbox.disconnect()
        pods.go_on(STOPS[1])
        time.sleep(5.0)  # the fault
        again.sandbox.connect()
        trainer.wait_for_pause(STOPS[2])

        # A pod is preempted: it ends while the next one of its name starts.
        pods.go_on(STOPS[2])
        trainer.wait_for_batch(STOPS[2] + 3)
        other.terminate()
        after_preemption = pods.start("data", 1, named_after_seconds=None)
        # Its Job starts the next one whatever the code is, but for 0.
        assert other.code() == 143
        # Until the next one has its name, only the one that was cut off makes batches.
        trainer.wait_for_pause(STOPS[3])
        assert len(trainer.events("host_lost", about=again.host)) == given_up
        pods.publish(other, after_preemption)
        trainer.wait_for("agent_ready", agent=other.host, count=2)
        pods.publish(after_preemption)

        # All are gone: the training waits.
        pods.go_on(STOPS[3])
        trainer.wait_for_pause(STOPS[4])
        for pod in (again, after_preemption):
            pod.terminate()
        assert [pod.code() for pod in (again, after_preemption)] == [143, 143]
        pods.go_on(STOPS[4])
        time.sleep(25.0)  # longer than the lease
        at_last = pods.start("data", 0)
        trainer.process.wait(WAIT_SECONDS)

        # Every batch came once, in order, with the same bytes.
        assert [pod.code() for pod in (trainer, at_last)] == [0, 0]
        assert trainer.lines() == reference(**GIVEN)
        assert all(pod.events("spec_received") for pod in (other, again, after_preemption))


# Where ranks meet: torchrun's store on the leader. What two hosts are fed: e2e/test_strategies.py.
REACH = """
import os, socket
store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
socket.create_connection(store, timeout=30).close()
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} reaches the store", flush=True)
"""


def test_pods_start_in_any_order_and_are_named_late(tmp_path):
    with Pods(tmp_path, dnn=2, data=1, feed=FEED, code=REACH) as pods:
        started = [
            pods.start(group, index, named_after_seconds=None)
            for group, index in (("dnn", 1), ("data", 0), ("dnn", 0))
        ]
        follower, data, leader = started
        until(lambda: pods.names.count(leader.host) > 8, what="nobody knows the leader yet")
        for pod in started:
            pods.publish(pod)
        assert [pod.code() for pod in started] == [0, 0, 0]
        assert data.events("run_joined")
        assert "rank 0 of 2 reaches the store" in leader.log
        assert "rank 1 of 2 reaches the store" in follower.log


STAY = "import time; print('trains', flush=True); time.sleep(300)"


def test_data_pods_end_by_their_leases_when_the_node_that_trains_is_lost(tmp_path):
    # Long enough for the data pod, if the machine stands still for some seconds before the strike.
    feed = {**FEED, "lease_seconds": 8.0}
    with Pods(tmp_path, data=1, feed=feed, code=STAY) as pods:
        trainer, data = pods.start("dnn", 0), pods.start("data", 0)
        data.wait_for("run_joined")
        until(lambda: "trains" in trainer.log, what="it trains")
        trainer.lose_node()
        # Started again, it waits for the next leader until the job is deleted.
        assert data.code() == 5
