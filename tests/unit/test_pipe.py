"""What the other end of a channel has said before it ended is read, and is the cause."""

import os
import struct
import time
from types import MappingProxyType

import pytest

from stoker.errors import ProtocolError
from stoker.feed.agent.dataset_process import DatasetProcess, HostedSpec, Loaded
from stoker.feed.workers.pipe import Pipe, Up, channel_pair, pack


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


def test_a_dataset_process_whose_dataset_writes_to_its_channel_fails_alone(ends):
    here, there, raw = ends
    process = DatasetProcess(here)
    spec = HostedSpec("digest", "loading", since=time.monotonic(), dataset_process=process)
    there.send(pack(Up(os.getpid())))
    raw.send(NONSENSE["text"])
    there.send(pack(Loaded()))
    assert spec.handle({here.fileno()}) == []
    assert process.up == Up(os.getpid())
    assert spec.update_state()
    assert spec.state == "failed"
    assert "malformed message" in spec.reason


# What a sample may write into its worker's end of the channel.
NONSENSE = MappingProxyType(
    {
        "0xff": b"\xff" * 100,
        "zeros": bytes(64),
        "text": b"no message at all\n" * 4,
        "one byte": b"\n",
        # Read as a length, these are 168 MB, which a message may have.
        "length": b"\n" * 5,
        "short length": struct.pack("<IB", 9, 2),
    }
)


@pytest.fixture
def ends():
    """Both ends of a channel, and the socket of the second one; no descriptor may be left."""
    # Some may be of tests before, whose garbage is collected meanwhile.
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = channel_pair()
    here, there = Pipe(ours, blocking=False), Pipe(theirs, blocking=False)
    yield here, there, theirs
    here.close()
    there.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def send_with_memory(channel: Pipe, data: bytes, *, number: int) -> None:
    memory = os.memfd_create("test", os.MFD_CLOEXEC)
    channel.send(data, [memory] * number)
    os.close(memory)


def read_until_nonsense(channel: Pipe) -> list[tuple[bytes, int]]:
    messages: list[tuple[bytes, int]] = []

    def read() -> None:
        for data, descriptors in channel.receive():
            messages.append((data, len(descriptors)))
            for descriptor in descriptors:
                os.close(descriptor)

    with pytest.raises(ProtocolError):
        read()
    assert channel.is_closed
    return messages


@pytest.mark.parametrize("what", NONSENSE)
def test_what_came_whole_before_nonsense_is_read_though_both_are_read_at_once(what, ends):
    here, there, raw = ends
    there.send(b"first")
    send_with_memory(there, b"second", number=1)
    raw.send(NONSENSE[what])
    assert read_until_nonsense(here) == [(b"first", 0), (b"second", 1)]


@pytest.mark.parametrize("what", NONSENSE)
def test_what_follows_nonsense_is_thrown_away_and_its_descriptors_are_closed(what, ends):
    here, there, raw = ends
    send_with_memory(there, b"first", number=1)
    raw.send(NONSENSE[what])
    send_with_memory(there, b"second", number=2)
    assert read_until_nonsense(here) == [(b"first", 1)]
    assert list(here.receive()) == []


def test_a_message_that_was_cut_off_by_its_senders_end_is_none(ends):
    here, there, raw = ends
    there.send(b"first")
    # As it is sent, but for its last byte.
    here.send(b"second")
    raw.send(raw.recv(100)[:-1])
    there.close()
    assert [data for data, _ in here.receive()] == [b"first"]
    assert here.is_closed
