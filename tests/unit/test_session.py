"""Each epoch of a session has an id of its own, also one that is gone through again."""

import threading
from collections.abc import Iterator

import pytest

from stoker.feed.seeding import Numbered
from stoker.feed.trainer.buffers import BatchOutcome
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.trainer.session import FeedSession
from stoker.feed.wire.dataset import DatasetSpec, PackedSpec, pack_spec

SPEC = pack_spec(DatasetSpec(dataset=[1], collate_fn=len), max_bytes=1 << 20)


def session_at(epoch: int, *, known: FeedSession | None = None) -> tuple[FeedSession, int]:
    session = known or FeedSession(
        "s", lock=threading.Lock(), wake=lambda: None, schedule=BatchScheduler(max_bytes=1 << 20)
    )
    return session, begin(session, epoch, SPEC)


def begin(session: FeedSession, epoch: int, spec: PackedSpec) -> int:
    indices: Iterator[Numbered] = iter([Numbered((1, 0, epoch, 0), [0])])
    return session.begin(
        epoch=epoch,
        spec=spec,
        seeding="batch",
        local=None,
        indices=indices,
        is_eager=True,
        pins_on=None,
    )


def test_who_left_an_epoch_ends_no_later_one_of_the_same_number():
    session, before = session_at(3)
    _, number = session_at(3, known=session)
    session.cancel(before)
    assert session.is_busy
    session.schedule.grant("host", 1)
    session.schedule.assign(0.0)
    assert session.schedule.arrived("host", 0, frame_bytes=1, now=0.0)
    session.deliver(0, BatchOutcome("batch"))
    with pytest.raises(StopIteration):
        session.next(before, timeout_seconds=1)
    assert session.next(number, timeout_seconds=1) == "batch"


def test_an_epoch_that_was_left_frees_its_session_for_one_more():
    session, number = session_at(3)
    assert not session.is_idle()
    session.cancelled_epoch_id = number
    assert session.is_idle()
    session.reserve()
    assert not session.is_idle()
    session.cancel(number)  # What the epoch before left behind comes late.
    assert not session.is_idle()
