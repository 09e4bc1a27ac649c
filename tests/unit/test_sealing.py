"""What is sealed comes out as it went in, or not at all."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ProtocolError
from stoker.feed import sealing
from stoker.feed.landing import Bytes, Landing
from stoker.feed.messages import BatchKey, Ready
from stoker.feed.sealing import Sealer, Unsealer, key_number, payload_bytes

Frames = tuple[bytearray, bytearray]


def sealed(sealer: Sealer, header: bytes, payload: bytes) -> Frames:
    first = sealer.header(header, nbytes=len(payload))
    second = sealer.payload(memoryview(payload), Landing())
    sealer.sent()
    return bytearray(first), bytearray(second.tobytes())


def unsealed(unsealer: Unsealer, frames: Frames) -> tuple[bytes, bytes]:
    first, second = map(memoryview, frames)
    nbytes = payload_bytes(second)
    header = unsealer.header(first, nbytes=nbytes)
    into: Bytes = np.empty(nbytes, dtype=np.uint8)
    unsealer.payload(second, into)
    return header, into.tobytes()


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=5000)), max_size=5))
def test_what_was_sealed_comes_out(batches: list[tuple[bytes, bytes]]) -> None:
    sealer = Sealer(7)
    unsealer = Unsealer(sealer.key)
    for header, payload in batches:
        frames = sealed(sealer, header, payload)
        assert key_number(memoryview(frames[0])) == 7
        assert unsealed(unsealer, frames) == (header, payload)


def test_a_batch_without_payload_is_one_frame() -> None:
    sealer = Sealer(0)
    unsealer = Unsealer(sealer.key)
    for header in (b"first", b"second"):
        frame = memoryview(sealer.header(header, nbytes=None))
        sealer.sent()
        assert unsealer.header(frame, nbytes=None) == header


@given(data=st.data())
def test_any_bit_that_is_changed_is_found(data: st.DataObject) -> None:
    sealer = Sealer(1)
    frames = sealed(sealer, b"header", bytes(1000))
    frame = frames[data.draw(st.integers(0, 1))]
    # Not the key's number: that chooses the key, and proves nothing.
    at = data.draw(st.integers(4 if frame is frames[0] else 0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        unsealed(Unsealer(sealer.key), frames)


@pytest.mark.parametrize("length", [0, 15, 16, 1015, 1017, 5000])
def test_a_payload_of_another_length_is_refused_before_there_is_memory_for_it(length: int) -> None:
    sealer = Sealer(1)
    first, second = sealed(sealer, b"header", bytes(1000))
    other = memoryview((bytes(second) + bytes(5000))[:length])
    with pytest.raises(ProtocolError):
        Unsealer(sealer.key).header(memoryview(first), nbytes=payload_bytes(other))


def test_no_frame_is_longer_than_what_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MAX_BYTES", 1000)
    payload_bytes(memoryview(bytes(1016)))
    key_number(memoryview(bytes(1028)))
    with pytest.raises(ProtocolError, match="1017 bytes"):
        payload_bytes(memoryview(bytes(1017)))
    with pytest.raises(ProtocolError, match="1029 bytes"):
        key_number(memoryview(bytes(1029)))


@pytest.mark.parametrize("size", range(28))
def test_a_header_that_is_too_short_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"{size} bytes"):
        key_number(memoryview(bytes(size)))


def test_a_payload_belongs_to_its_header() -> None:
    sealer = Sealer(1)
    first, second = (sealed(sealer, b"header", bytes(100)) for _ in range(2))
    with pytest.raises(ProtocolError, match="payload"):
        unsealed(Unsealer(sealer.key), (first[0], second[1]))


def test_a_payload_can_be_neither_left_out_nor_put_in() -> None:
    sealer = Sealer(1)
    frames = sealed(sealer, b"header", bytes(100))
    with pytest.raises(ProtocolError, match="header"):
        Unsealer(sealer.key).header(memoryview(frames[0]), nbytes=None)
    for nbytes in (0, 1, 100):
        alone = memoryview(Sealer(1).header(b"header", nbytes=None))
        with pytest.raises(ProtocolError, match="header"):
            Unsealer(sealer.key).header(alone, nbytes=nbytes)


def test_nothing_comes_twice_nor_out_of_order_nor_is_left_out() -> None:
    sealer = Sealer(1)
    first, second, third = (sealed(sealer, b"header", bytes(100)) for _ in range(3))
    unsealer = Unsealer(sealer.key)
    with pytest.raises(ProtocolError, match="sealed next"):
        unsealed(unsealer, second)
    unsealed(unsealer, first)
    for frames in (first, third):
        with pytest.raises(ProtocolError, match="sealed next"):
            unsealed(unsealer, frames)
    unsealed(unsealer, second)
    unsealed(unsealer, third)


def test_what_could_not_be_sent_is_not_missed() -> None:
    sealer = Sealer(1)
    unsealer = Unsealer(sealer.key)
    unsealed(unsealer, sealed(sealer, b"first", bytes(100)))
    for _ in range(3):
        sealer.header(b"nobody there", nbytes=100)
        sealer.payload(memoryview(bytes(100)), Landing())
    assert unsealed(unsealer, sealed(sealer, b"second", bytes(100)))[0] == b"second"


def test_what_is_refused_moves_nothing() -> None:
    """A forged header with a high number does not shut out what comes after it."""
    sealer = Sealer(1)
    frames = sealed(sealer, b"header", b"payload")
    unsealer = Unsealer(sealer.key)
    forged = memoryview(struct.pack(">IQ", 1, 1 << 62) + bytes(100))
    with pytest.raises(ProtocolError):
        unsealer.header(forged, nbytes=7)
    assert unsealed(unsealer, frames) == (b"header", b"payload")


def test_no_two_messages_of_a_key_share_a_nonce() -> None:
    """Equal plain texts never give equal bytes, of header or payload."""
    sealer = Sealer(1)
    pairs = [sealed(sealer, bytes(64), bytes(64)) for _ in range(50)]
    alone = [sealer.header(bytes(64), nbytes=None) for _ in range(50)]
    bodies = [bytes(first[12:]) for first, _ in pairs] + [first[12:] for first in alone]
    bodies += [bytes(second) for _, second in pairs]
    assert len({body[:64] for body in bodies}) == len(bodies) == 150


def test_each_sealer_has_a_key_of_its_own() -> None:
    keys = [Sealer(0).key.key for _ in range(20)]
    assert len(set(keys)) == 20
    frames = sealed(Sealer(0), b"header", b"payload")
    with pytest.raises(ProtocolError):
        unsealed(Unsealer(Sealer(0).key), frames)


def test_no_text_shows_a_key() -> None:
    key = BatchKey(number=3, key=b"k" * 32)
    ready = Ready(session="s", spec="d", credits=1, workers=1, batch_key=key)
    assert "kkk" not in f"{key} {key!r} {ready} {ready!r}"
