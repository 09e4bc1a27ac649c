"""A spec that comes in pieces is what was sent, or is refused."""

import os

import pytest

from stoker.errors import ProtocolError
from stoker.feed.wire.dataset import Arrival, digest

WHOLE = bytes(range(256)) * 40


@pytest.fixture
def arrival():
    made = Arrival(digest(WHOLE), nbytes=len(WHOLE))
    yield made
    made.close()


def test_pieces_in_order_are_the_whole(arrival):
    pieces = [(offset, WHOLE[offset : offset + 3000]) for offset in range(0, len(WHOLE), 3000)]
    ends = [arrival.take(piece, offset=offset) for offset, piece in pieces]
    assert ends == [False] * (len(pieces) - 1) + [True]
    assert arrival.is_right()
    assert os.pread(arrival.descriptor, len(WHOLE) + 1, 0) == WHOLE


def test_other_bytes_are_not_the_spec(arrival):
    assert arrival.take(bytes(len(WHOLE)), offset=0)
    assert not arrival.is_right()


@pytest.mark.parametrize("offset", [0, 999, 1001])
def test_a_piece_out_of_order_is_refused(arrival, offset):
    arrival.take(WHOLE[:1000], offset=0)
    with pytest.raises(ProtocolError, match="expected 1000"):
        arrival.take(WHOLE[1000:2000], offset=offset)


@pytest.mark.parametrize("piece", [b"", WHOLE + b"x"], ids=["empty", "more"])
def test_an_empty_piece_and_more_than_was_said_are_refused(arrival, piece):
    with pytest.raises(ProtocolError):
        arrival.take(piece, offset=0)
    assert os.fstat(arrival.descriptor).st_size == 0


def test_closing_frees_the_memory_and_may_be_done_twice():
    arrival = Arrival("a", nbytes=1)
    descriptor = arrival.descriptor
    arrival.close()
    arrival.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
