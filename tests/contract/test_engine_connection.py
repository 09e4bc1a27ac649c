"""A worker's connection carries what was sent, in order, and nothing that was changed."""

import contextlib
import socket
import threading
from io import StringIO

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ProtocolError
from stoker.feed.engine import batch_socket
from stoker.feed.engine.batch_socket import BufferPool, Connection, layout
from stoker.feed.engine.codec import decode, encode
from stoker.feed.engine.host import LocalLink
from stoker.feed.engine.records import (
    HEAD_BYTES,
    RECORD_BYTES,
    Sealer,
    Unsealer,
    keys_of,
    new_key,
)
from stoker.logs import Log
from support.processes import until

MAX_PACKED = 1 << 20
# Sealed by another implementation, with the key of bytes 0 to 31.
HEAD = "00000000000000040000000000000005f67e798c539ae6b3a122b6f0c37f762eacc15357"
PAYLOAD = "c7ecbeefa8894f8354a46c18282740fc475170a448"


@contextlib.contextmanager
def ends(key=None, other_key=None):
    """Gives a worker's end and the trainer's end of one connection."""
    key = key or new_key()
    one, other = socket.socketpair()
    worker = Connection(one, key, is_workers=True, max_packed_bytes=MAX_PACKED)
    trainer = Connection(other, other_key or key, is_workers=False, max_packed_bytes=MAX_PACKED)
    try:
        yield worker, trainer
    finally:
        worker.close()
        trainer.close()


def sent(worker: Connection, batch: object, packed: bytes = b"made") -> threading.Thread:
    pickled, leaves = encode(batch)
    words = packed + pickled

    def send() -> None:
        worker.write(words, leaves)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def received(trainer: Connection, sizes, packed: bytes = b"made") -> object:
    words, nbytes = trainer.head()
    block = BufferPool().take(nbytes)
    trainer.read(block.data)
    offsets, _ = layout(sizes)
    leaves = [block[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
    return decode(words.removeprefix(packed), leaves)


@pytest.mark.parametrize(
    "batch",
    [
        [],
        [torch.arange(7)],
        [torch.rand(300, 300, 40), torch.arange(3)],
        [torch.rand(1500, 1000), torch.rand(700, 1000), torch.arange(9, dtype=torch.uint8)],
        [torch.rand(3) for _ in range(300)],
        "x" * 5000,
        [np.frombuffer(bytes(RECORD_BYTES), dtype=np.uint8), np.arange(5)],
        [torch.empty(0), torch.rand(2), torch.empty(0)],
    ],
    ids=["none", "small", "long first", "two long", "many", "long pickle", "a record", "empty"],
)
def test_batches_of_any_size_arrive(batch):
    with ends() as (worker, trainer):
        for _ in range(3):
            thread = sent(worker, batch)
            back = received(trainer, [leaf.nbytes for leaf in encode(batch)[1]])
            thread.join()
            assert type(back) is type(batch)
            assert all(
                np.array_equal(np.asarray(one), np.asarray(other))
                for one, other in zip(back, batch, strict=True)
            )


def test_another_key_is_refused():
    with ends(other_key=new_key()) as (worker, trainer):
        worker.write(b"hello")
        with pytest.raises(ProtocolError):
            trainer.head()


def test_an_own_message_does_not_pass_for_the_others():
    """Both directions have keys of their own."""
    key = new_key()
    one, other = socket.socketpair()
    worker = Connection(one, key, is_workers=True, max_packed_bytes=MAX_PACKED)
    mirror = Connection(other, key, is_workers=True, max_packed_bytes=MAX_PACKED)
    worker.write(b"hello")
    with pytest.raises(ProtocolError):
        mirror.head()
    worker.close()
    mirror.close()


def test_a_long_message_is_refused_before_memory_is_taken():
    key = new_key()
    with ends(key) as (worker, trainer):
        # As much as the kernel takes without a reader.
        sealer = Sealer(keys_of(key)[1])
        worker.socket.sendall(sealer.head(b"x" * 1_100_000, payload_bytes=0))
        with pytest.raises(ProtocolError, match="bytes"):
            trainer.head()


def test_silence_within_a_batch_is_a_lost_connection(monkeypatch):
    monkeypatch.setattr(batch_socket, "SILENCE_SECONDS", 1)
    with ends() as (worker, trainer):
        sealer = Sealer(new_key())
        worker.socket.sendall(sealer.head(b"made", payload_bytes=10)[:-1])
        with pytest.raises(TimeoutError):
            trainer.head()


def sealed(messages, key) -> list[bytes]:
    sealer = Sealer(key, rekey_bytes=1000)
    return [sealer.head(message, payload_bytes=0) for message in messages]


@given(
    messages=st.lists(st.binary(max_size=900), min_size=1, max_size=6),
    at=st.integers(0, 15),
    change=st.sampled_from(["flip", "repeat", "swap", "omit"]),
)
def test_what_is_changed_repeated_omitted_or_reordered_is_refused(messages, at, change):
    key = new_key()
    heads = sealed([*messages, b"last", b"more"], key)
    at %= len(heads) - 1
    if change == "flip":
        # Of the prefix or the record: padding is not read.
        position = at % (16 + len([*messages, b"last"][at]) + 16)
        flipped = bytearray(heads[at])
        flipped[position] ^= 1
        heads[at] = bytes(flipped)
    elif change == "repeat":
        heads.insert(at, heads[at])
    elif change == "swap":
        heads[at], heads[at + 1] = heads[at + 1], heads[at]
    else:
        del heads[at]
    unsealer = Unsealer(key)
    opened: list[bytes] = []
    with pytest.raises(ProtocolError):
        opened.extend(unsealer.head(memoryview(head))[0] for head in heads)
    assert opened == [*messages, b"last", b"more"][: len(opened)]


def test_a_direction_changes_its_key_and_goes_on():
    key = new_key()
    messages = [bytes([number]) * 400 for number in range(20)]
    unsealer = Unsealer(key)
    heads = sealed(messages, key)
    assert [unsealer.head(memoryview(head))[0] for head in heads] == messages
    generations = {int.from_bytes(head[:4], "big") for head in heads}
    assert len(generations) > 5
    assert all(len(head) == HEAD_BYTES for head in heads)


def test_records_have_the_bytes_of_their_layout():
    sealer = Sealer(keys_of(bytes(range(32)))[1])
    head = sealer.head(b"made", payload_bytes=5)
    payload = memoryview(bytearray(5 + 16))
    sealer.record(memoryview(b"batch"), payload)
    assert head[:36].hex() == HEAD
    assert head[36:] == bytes(HEAD_BYTES - 36)
    assert payload.hex() == PAYLOAD


def test_local_workers_take_what_the_training_leaves_of_its_cpus():
    link = LocalLink("here", Log(run="run", host="here", stream=StringIO()), wake=lambda: None)
    try:
        assert link.turn({}, lambda _: None)
        process = psutil.Process().children()[-1]
        until(lambda: process.nice() == 10, what="a lower priority")
    finally:
        link.close()
