"""Batches go over a real TCP connection, by both ends' code: written, read, cut, slowed down."""

import contextlib
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from stoker.errors import ProtocolError
from stoker.feed.wire import sealing
from stoker.feed.wire.sealing import HEAD_BYTES, Sealer, Unsealer
from stoker.feed.wire.stream import BatchReader, BatchWriter, BufferPool, tune

KEY = bytes(range(32))
MAX_HEAD_BYTES = 1 << 20


@contextlib.contextmanager
def connected(**limits):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sink = socket.create_connection(listener.getsockname())
        source, _ = listener.accept()
    with source, sink:
        tune(source)
        tune(sink)
        limits = {"max_head_bytes": MAX_HEAD_BYTES, "receive_timeout_seconds": 30.0} | limits
        reader = BatchReader(sink, Unsealer(KEY), BufferPool(), **limits)
        writer = BatchWriter(source, Sealer(KEY), BufferPool())
        yield SimpleNamespace(source=source, writer=writer, reader=reader)


@pytest.fixture
def pair():
    with connected() as made:
        yield made


def head_of(packed, *, payload_bytes):
    return Sealer(KEY).head(packed, payload_bytes=payload_bytes, of=("s", 0))


@contextlib.contextmanager
def written(writer, packed, payload):
    view = memoryview(payload) if payload else None
    thread = threading.Thread(target=writer.write, args=(packed, view), kwargs={"of": ("s", 0)})
    thread.start()
    yield
    thread.join(150)
    assert not thread.is_alive()


def read(reader):
    packed, nbytes = reader.head()
    memory = bytearray(nbytes)
    reader.read(memoryview(memory))
    return packed, bytes(memory)


@pytest.mark.parametrize("packed_bytes", [0, 300, 5000])
@pytest.mark.parametrize("payload_bytes", [0, 1, 70_000, sealing.RECORD_BYTES + 1])
def test_what_is_written_is_read(pair, packed_bytes, payload_bytes):
    for _ in range(2):
        packed, payload = os.urandom(packed_bytes), os.urandom(payload_bytes)
        with written(pair.writer, packed, payload):
            assert read(pair.reader) == (packed, payload)


def test_a_description_that_is_too_long_is_refused_before_there_is_memory_for_it(pair):
    pair.source.sendall(head_of(bytes(2 * MAX_HEAD_BYTES), payload_bytes=0))
    with pytest.raises(ProtocolError, match="description"):
        pair.reader.head()


@pytest.mark.parametrize(
    "sent", [bytes(HEAD_BYTES // 2), head_of(b"p", payload_bytes=1000)], ids=["head", "batch"]
)
def test_an_end_in_the_middle_of_a_head_or_a_batch_is_an_error(pair, sent):
    pair.source.sendall(sent)
    pair.source.close()
    with pytest.raises(ConnectionResetError):
        read(pair.reader)


def test_a_batch_may_take_longer_than_the_silence_that_ends_a_connection():
    payload, wire = os.urandom(200_000), bytearray()

    class Slow(socket.socket):
        def sendall(self, data, *_):
            wire.extend(data)

    # Long, so that a busy machine lets no byte come so late.
    with connected(receive_timeout_seconds=3.0) as pair, Slow() as slow:
        writer = BatchWriter(slow, Sealer(KEY), BufferPool())
        writer.write(b"packed", memoryview(payload), of=("s", 0))
        began = time.monotonic()

        def trickle():
            step = len(wire) // 8 + 1
            for at in range(0, len(wire), step):
                time.sleep(0.5)
                pair.source.sendall(wire[at : at + step])

        thread = threading.Thread(target=trickle)
        thread.start()
        assert read(pair.reader) == (b"packed", payload)
        thread.join()
        assert time.monotonic() - began > 3.0


def test_silence_in_the_middle_of_a_batch_ends_the_connection_in_words():
    with connected(receive_timeout_seconds=0.2) as pair:
        pair.source.sendall(head_of(b"packed", payload_bytes=1000) + b"x")
        pair.reader.head()
        with pytest.raises(TimeoutError, match=r"no byte for 0\.2 s"):
            pair.reader.read(memoryview(bytearray(1000)))


def test_silence_between_batches_does_not_unless_one_is_awaited():
    with connected(receive_timeout_seconds=0.1) as pair:
        with pytest.raises(TimeoutError):
            pair.reader.head(is_awaited=True)
        timer = threading.Timer(0.5, pair.writer.write, (b"packed", None), {"of": ("s", 0)})
        timer.start()
        assert pair.reader.head() == (b"packed", 0)
        timer.join()
