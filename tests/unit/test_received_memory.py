"""A batch that is neither sealed nor pinned lives where libzmq received it, as long as anything
looks at it; a sealed one where it was unsealed."""

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import zmq

from stoker.feed.landing import SMALL_BYTES, Bytes, Landing
from stoker.feed.placing import Placing
from stoker.feed.sealing import Sealer, Unsealer, payload_bytes
from stoker.feed.security import Keys
from stoker.feed.wire import encode

NBYTES = 300_000
KEYS = Keys.from_token(b"k" * 32)


def in_inference_mode(batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return batch[10:20]


VIEWS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda batch: batch,
    lambda batch: batch.detach(),
    lambda batch: batch[7:9],
    lambda batch: batch.data,
    lambda batch: batch.numpy(),
    lambda batch: batch[5:].numpy()[2:30],
    lambda batch: torch.from_numpy(batch.numpy()),
    lambda batch: batch.view(torch.int32).view(torch.uint8),
    lambda batch: memoryview(batch.numpy()),
    lambda batch: batch.untyped_storage(),
    in_inference_mode,
)

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture(params=["plain", "encrypted"])
def sockets(request: pytest.FixtureRequest) -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    if request.param == "encrypted":
        sender.curve_server = True
        sender.curve_publickey, sender.curve_secretkey = KEYS.server_public, KEYS.server_secret
        receiver.curve_serverkey = KEYS.server_public
        receiver.curve_publickey = KEYS.client_public
        receiver.curve_secretkey = KEYS.client_secret
    receiver.connect(f"tcp://127.0.0.1:{sender.bind_to_random_port('tcp://127.0.0.1')}")
    yield sender, receiver
    context.destroy(linger=0)


def received(sockets: Pair, data: bytes) -> Bytes:
    sender, receiver = sockets
    sender.send(data)
    assert receiver.poll(10_000)
    frame = receiver.recv(copy=False)
    return np.frombuffer(frame.buffer, dtype=np.uint8)


def test_a_large_batch_is_not_copied_and_may_be_written_to(sockets: Pair) -> None:
    source = received(sockets, b"a" * NBYTES)
    kept = Placing().kept(source, None)
    assert kept is source
    assert kept.flags.writeable
    assert torch.frombuffer(kept, dtype=torch.int64).data_ptr() % 8 == 0


def test_what_is_small_or_lies_badly_is_copied(sockets: Pair) -> None:
    small = received(sockets, b"a" * (SMALL_BYTES - 1))
    assert not np.shares_memory(Placing().kept(small, None), small)
    odd = received(sockets, b"a" * NBYTES)[1:]
    copy = Placing().kept(odd, None)
    assert not np.shares_memory(copy, odd)
    assert copy.tobytes() == odd.tobytes()


@pytest.mark.parametrize("is_sealed", [False, True], ids=["as it came", "sealed"])
def test_no_view_is_overwritten_by_what_comes_later(sockets: Pair, is_sealed: bool) -> None:
    placing = Placing()
    sealer = Sealer(0)
    unsealer = Unsealer(sealer.key)
    views: list[object] = []
    for number in range(100):
        encoded = encode(
            torch.from_numpy(np.full(NBYTES, number, dtype=np.uint8)), allow_pickle=False
        )
        sent = bytearray(encoded.nbytes)
        encoded.write_into(memoryview(sent))
        if is_sealed:
            header = sealer.header(b"header", nbytes=len(sent))
            sealed = sealer.payload(memoryview(sent), Landing())
            sealer.sent()
            frame = received(sockets, sealed.tobytes()).data
            payload = placing.room(payload_bytes(frame), None)
            unsealer.header(memoryview(header), nbytes=payload.nbytes)
            unsealer.payload(frame, payload)
        else:
            payload = placing.kept(received(sockets, bytes(sent)), None)
        # From the third on, as all batches that are described alike.
        value = placing.decoded(encoded.tree, payload, allow_pickle=False).value
        assert isinstance(value, torch.Tensor)
        assert value.data_ptr() == payload.ctypes.data
        views.append(VIEWS[number % len(VIEWS)](value))
        del payload, value
    gc.collect()
    # The memory is the batches', not the connection's.
    sockets[1].context.destroy(linger=0)
    for number, view in enumerate(views):
        if isinstance(view, torch.UntypedStorage):
            view = torch.empty(0, dtype=torch.uint8).set_(view)
        array = np.asarray(view)
        assert array.size > 1
        assert (array == number).all()
