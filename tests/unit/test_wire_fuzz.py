"""Any bytes give a ProtocolError or a value, and take no memory that they do not pay for."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.errors import ProtocolError
from stoker.feed.wire import codec, protocol
from stoker.feed.workers.pipe import MAX_MESSAGE_BYTES, Pipe, channel_pair
from support.property_tests import examples

# What judging bytes may take in addition to a few times their own number: objects, errors, caches.
MAX_EXTRA_BYTES = 2 << 20

DIRECTIONS = [
    protocol.ToCoordinator,
    protocol.FromCoordinator,
    protocol.ToAgent,
    protocol.FromAgent,
    protocol.Made,
]
MEMBER = protocol.Member(
    host="d1", group="data", address="d1", port=1, batch_port=2, workers=3, incarnation="x"
)
VALID: list[protocol.Message] = [
    protocol.Attend(protocol=1, run_id="run", rank=0, host="a"),
    protocol.Heartbeat(host="d1", incarnation="x"),
    protocol.Leave(host="d1", incarnation="x", exit_code=3, reason="why"),
    protocol.Roster(agents=(MEMBER,) * 3, expected=4, lost=(MEMBER,), awaited=("d4",)),
    protocol.State(outcome="failed", exit_code=1, reason="x"),
    protocol.Open(protocol=1, session="s", rank=0, spec="d", spec_bytes=3, versions={"torch": "2"}),
    protocol.Ship(spec="d", offset=3),
    protocol.Make(session="s", epoch_id=1, number=2, index=b"4", seed=(1, 2, 3)),
    protocol.Made(
        session="s", epoch_id=1, number=2, tree=b"xyz", cpu_seconds=1.0, wall_seconds=2.0, worker=0
    ),
    protocol.Declined(session="s", epoch_id=1, number=2, reason="r", is_lost=True),
    protocol.Progress(rank=0, steps=1, samples=2, wait_seconds=0.5, compute_seconds=1.5),
]
VALUE = {"x": torch.arange(10), "y": [np.ones(3), "é", 1.5, b"z" * 2000], 3: (1 << 70, 2j, None)}


@contextlib.contextmanager
def little_memory(num_bytes):
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 20 * num_bytes + MAX_EXTRA_BYTES


def judged(read, data):
    with little_memory(len(data)), contextlib.suppress(ProtocolError):
        return read(data)


@st.composite
def mutated(draw, sources):
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "graft", "length"])):
            case "flip" if data:
                data[place] ^= draw(st.integers(1, 255))
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=20))
            case "double" if len(data) < 10_000:
                data += data[place:]
            case "graft":
                other = draw(st.sampled_from(sources))
                data[place:] = other[draw(st.integers(0, len(other))) :]
            case "length":
                # MessagePack's str, bin, array, map and ext of up to 4 GiB.
                head = draw(st.sampled_from([0xDB, 0xC6, 0xDD, 0xDF, 0xC9]))
                size = draw(st.sampled_from([0xFFFFFFFF, 0x7FFFFFFF, 1 << 24, 70_000]))
                data[place : place + 5] = bytes([head]) + struct.pack(">I", size)
    return bytes(data)


@pytest.mark.parametrize("kinds", DIRECTIONS)
@given(st.one_of(st.binary(max_size=300), mutated([protocol.pack(message) for message in VALID])))
@settings(max_examples=examples(150))
def test_bytes_are_a_message_or_a_protocol_error(kinds, data):
    message = judged(protocol.Unpacker(kinds), data)
    assert message is None or isinstance(message, protocol.Message)


@pytest.mark.parametrize("message", VALID, ids=lambda message: type(message).__name__)
def test_every_cut_of_a_message_and_another_direction_is_refused(message):
    packed = protocol.pack(message)
    right = [kinds for kinds in DIRECTIONS if isinstance(message, kinds)]
    assert protocol.Unpacker(right[0])(packed) == message
    cuts = [(right[0], packed[:end]) for end in range(len(packed))]
    for kinds, data in cuts + [(kinds, packed) for kinds in DIRECTIONS if kinds not in right]:
        with pytest.raises(ProtocolError):
            protocol.Unpacker(kinds)(data)


@given(st.one_of(st.binary(max_size=200), mutated([codec.pack_value(VALUE, allow_pickle=False)])))
@example(b"")
@settings(max_examples=examples(500))
def test_any_bytes_are_refused_or_values(data):
    judged(lambda packed: codec.unpack_value(packed, allow_pickle=False), data)


@given(mutated([codec.pack_value({1, 2}, allow_pickle=True)]))
@settings(max_examples=examples(150))
def test_no_mutation_smuggles_a_pickle_in(data):
    value = judged(lambda packed: codec.unpack_value(packed, allow_pickle=False), data)
    assert not isinstance(value, set)


TREE = codec.encode(VALUE, allow_pickle=False)


@given(mutated([TREE.tree]), st.integers(0, 4000))
@settings(max_examples=examples(300))
def test_mutated_trees_fit_the_payload_or_are_refused(tree, num_bytes):
    payload = np.zeros(num_bytes, dtype=np.uint8)
    with little_memory(len(tree) + num_bytes), contextlib.suppress(ProtocolError):
        codec.decode(tree, payload, allow_pickle=False)


HEADS = st.builds(struct.Struct("<IB").pack, st.integers(0, (1 << 32) - 1), st.integers(0, 255))


@given(st.binary(max_size=100) | st.builds(bytes.__add__, HEADS, st.binary(max_size=50)))
@settings(max_examples=examples(150))
def test_channel_takes_no_memory_for_a_length_that_is_only_claimed(data):
    ours, theirs = channel_pair()
    channel = Pipe(ours, blocking=False)
    with theirs:
        theirs.sendall(data)
        with little_memory(len(data)), contextlib.suppress(ProtocolError):
            for received, descriptors in channel.receive():
                assert len(received) <= len(data)
                assert descriptors == ()
    channel.close()
    assert MAX_MESSAGE_BYTES < 1 << 32
