"""Sealed messages come out as they went in, in their order, or not at all."""

import hashlib
import itertools
import re

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ProtocolError
from stoker.feed.wire import sealing
from stoker.feed.wire.protocol import Ticket
from stoker.feed.wire.sealing import FIRST_BYTES, HEAD_BYTES, TAG_BYTES, Sealer, Unsealer

KEY = bytes(range(32))
Sealed = list[bytearray]


def seal(sealer, packed, payload, *, session="s", epoch=0):
    made = [bytearray(sealer.head(packed, payload_bytes=len(payload), of=(session, epoch)))]
    for text in (packed[FIRST_BYTES:], payload):
        for start, end in sealing.records(len(text)):
            record = bytearray(end - start + TAG_BYTES)
            sealer.record(memoryview(text)[start:end], memoryview(record))
            made.append(record)
    return made


def unseal(unsealer, sealed):
    left = iter(sealed)
    head = unsealer.head(memoryview(next(left)))
    texts = [b"", b""]
    for number, nbytes in enumerate((head.missing_bytes, head.payload_bytes)):
        for start, end in sealing.records(nbytes):
            record = memoryview(bytearray(next(left)))
            assert record.nbytes == end - start + TAG_BYTES
            # In place, as the trainer does.
            unsealer.record(record, record[: end - start])
            texts[number] += record[: end - start]
    return head.packed + texts[0], texts[1]


@pytest.fixture
def small_records(monkeypatch):
    monkeypatch.setattr(sealing, "RECORD_BYTES", 100)


def refused(what, *args, match="failed authentication"):
    with pytest.raises(ProtocolError, match=match):
        what(*args)


def test_records_are_the_pinned_ones():
    sealer = Sealer(KEY)
    first = seal(sealer, b"packed", b"hello")
    second = seal(sealer, b"next pass", b"world", epoch=1)
    assert [bytes(part).rstrip(b"\0").hex() for part in first + second] == [
        "000000000000000600000000000000057eddd6b5d048b97d6c0ec96ac2a96500ad031944bbca",
        "7db3d3902b668586cf2edee656e1ea5fe36d7bf3d1",
        # Under HKDF-SHA256(key 00 01 .. 1f, salt "stoker", info "stoker feed v1 next batch key")
        # = e86048cd687df8b5fef152b50036f98102d90ad7166b40a942844426a3825a75
        "00000001000000090000000000000005769e26ccbb3ad766fe4ba26b90c92f3de9f66538e8eba12fb9",
        "9b234388bc64fd387fbb82ac463145ba2aee7ac1a9",
    ]
    wire = b"".join(first + second)
    assert len(wire) == 2 * (HEAD_BYTES + 5 + TAG_BYTES)
    assert hashlib.sha256(wire).hexdigest() == (
        "4e3839603549144e9b6f7404edf93b9112595c347bfee81b4980e0d6ff433997"
    )


@given(st.lists(st.tuples(st.binary(max_size=3000), st.binary(max_size=5000)), max_size=5))
def test_what_was_sealed_comes_out(batches):
    sealer, unsealer = Sealer(KEY), Unsealer(KEY)
    for packed, payload in batches:
        assert unseal(unsealer, seal(sealer, packed, payload)) == (packed, payload)


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 1000])
def test_what_is_longer_than_a_record_comes_in_several(nbytes):
    payload, packed = bytes(range(256)) * 4, b"m" * (FIRST_BYTES + 350)
    sealed = seal(Sealer(KEY), packed, payload[:nbytes])
    assert [len(each) for each in sealed[1:5]] == [116, 116, 116, 66]
    assert max(map(len, sealed[1:])) <= 116
    assert unseal(Unsealer(KEY), sealed) == (packed, payload[:nbytes])


@given(data=st.data())
def test_any_bit_that_is_changed_is_found(data):
    sealed = seal(Sealer(KEY), b"p" * (FIRST_BYTES + 50), bytes(1000))
    part = data.draw(st.sampled_from(sealed))
    at = data.draw(st.integers(0, len(part) - 1))
    part[at] ^= 1 << data.draw(st.integers(0, 7))
    refused(unseal, Unsealer(KEY), sealed, match=None)


@pytest.mark.parametrize(
    ("field", "claimed"),
    [(slice(8, 16), claimed) for claimed in (0, 1, 999, 1001, 1 << 40, (1 << 64) - 1)]
    + [(slice(4, 8), each) for each in (0, 5, 7, FIRST_BYTES, FIRST_BYTES + 1, (1 << 32) - 1)],
)
def test_a_length_that_was_changed_is_refused_before_there_is_memory_for_it(field, claimed):
    (head, _) = seal(Sealer(KEY), b"packed", bytes(1000))
    head[field] = claimed.to_bytes(field.stop - field.start, "big")
    refused(Unsealer(KEY).head, memoryview(head), match="head")


@pytest.mark.usefixtures("small_records")
def test_nothing_comes_twice_nor_out_of_order_nor_is_left_out():
    sealer = Sealer(KEY)
    batches = [seal(sealer, b"packed", bytes([number]) * 150) for number in range(3)]
    parts = [part for batch in batches for part in batch]
    kinds = ["head", "record", "record"] * 3
    for order in ([1], [3], [0, 2], [0, 3], [0, 1, 1], [0, 1, 3], [0, 1, 2, 0], [0, 1, 2, 6]):
        unsealer = Unsealer(KEY)
        *right, wrong = order
        for number in right:
            take(unsealer, kinds[number], parts[number])
        refused(take, unsealer, kinds[wrong], parts[wrong])
    unsealer = Unsealer(KEY)
    for kind, part in zip(kinds, parts, strict=True):
        take(unsealer, kind, part)


def take(unsealer, kind, part):
    if kind == "head":
        unsealer.head(memoryview(part.ljust(HEAD_BYTES, b"\0")))
    else:
        unsealer.record(memoryview(part), memoryview(bytearray(len(part) - TAG_BYTES)))


def test_a_record_is_no_head_nor_of_another_connection():
    sealed = seal(Sealer(KEY), b"packed", bytes(1000))
    head = bytes(sealed[1])[:1000].ljust(HEAD_BYTES, b"\0")
    refused(Unsealer(KEY).head, memoryview(head), match=None)
    refused(unseal, Unsealer(bytes(32)), sealed, match=None)


def test_what_is_refused_moves_nothing():
    sealed = seal(Sealer(KEY), b"packed", b"payload")
    unsealer = Unsealer(KEY)
    for generation in (0, 1, 2, 1 << 31):
        forged = bytearray(sealed[0])
        forged[:4] = generation.to_bytes(4, "big")
        forged[20] ^= 1
        refused(unsealer.head, memoryview(forged), match=None)
    assert unseal(unsealer, sealed) == (b"packed", b"payload")


@pytest.mark.parametrize(
    ("of", "generations"),
    [
        ([("s", epoch) for epoch in (0, 0, 1, 1, 2)], [0, 0, 1, 1, 2]),
        ([("s", 0)] * 6, [0, 0, 0, 1, 1, 1]),
        # Sessions that take turns.
        ([("a", 0), ("b", 3), ("a", 0)], [0, 0, 0]),
    ],
)
def test_each_epoch_of_a_session_and_each_limit_of_bytes_has_another_key(of, generations):
    sealer, unsealer = Sealer(KEY, rekey_bytes=1000), Unsealer(KEY)
    seen = []
    for session, epoch in of:
        sealed = seal(sealer, b"packed", bytes(400), session=session, epoch=epoch)
        seen.append(int.from_bytes(sealed[0][:4], "big"))
        assert unseal(unsealer, sealed) == (b"packed", bytes(400))
    assert seen == generations


def test_no_nonce_comes_twice_not_even_across_keys(monkeypatch):
    seen = []

    class Recorded:
        def __init__(self, key):
            self._key = key

        def __getattr__(self, name):
            def encrypt(nonce, *more):
                seen.append((self._key, nonce))
                return getattr(AESGCM(self._key), name)(nonce, *more)

            return encrypt

    monkeypatch.setattr(sealing, "AESGCM", Recorded)
    monkeypatch.setattr(sealing, "RECORD_BYTES", 100)
    sealer = Sealer(KEY, rekey_bytes=3000)
    for epoch, _ in itertools.product(range(4), range(10)):
        seal(sealer, b"m" * 1200, bytes(250), epoch=epoch)
    assert len({key for key, _ in seen}) > 10
    assert len({nonce for _, nonce in seen}) == len(seen) == 40 * (1 + 3 + 3)


def test_no_text_shows_a_ticket():
    ticket = Ticket(ticket=b"t" * 32, key=b"k" * 32)
    assert not re.search("kkk|ttt", f"{ticket} {ticket!r}")
