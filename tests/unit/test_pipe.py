"""What the other end of a channel has said before it ended is read, and is the cause."""

import os
import time

import pytest

from stoker.feed.agent.dataset_process import DatasetProcess, HostedSpec, Loaded
from stoker.feed.workers.pipe import Pipe, channel_pair, pack


@pytest.mark.parametrize("num_orders", [0, 1, 3])
def test_the_last_message_is_read_though_an_order_could_not_be_sent(num_orders):
    ours, theirs = channel_pair()
    here, there = Pipe(ours, blocking=False), Pipe(theirs, blocking=False)
    here.send(b"an order that nobody reads")
    there.send(b"why it ends")
    there.close()
    for _ in range(num_orders):
        here.send(b"one more")
    assert [data for data, _ in here.receive()] == [b"why it ends"]
    assert here.is_closed
    here.close()


def test_a_dataset_process_that_ended_is_judged_by_what_it_said():
    ours, theirs = channel_pair()
    process = DatasetProcess(Pipe(ours, blocking=False))
    spec = HostedSpec("digest", "loading", since=time.monotonic(), dataset_process=process)
    there = Pipe(theirs, blocking=False)
    there.send(pack(Loaded(summary="other code", is_of_host=True)))
    there.close()
    readable, writable = os.pipe()
    try:
        process.channel.send(b"an order to fork", [readable])
        assert spec.update_state()
    finally:
        os.close(readable)
        os.close(writable)
        process.close()
    assert (spec.state, spec.reason) == ("failed", "other code")
