import threading
from collections.abc import Iterator

import pytest

from stoker.feed.seeding import Numbered
from stoker.feed.trainer.buffers import BatchOutcome
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.trainer.session import FeedSession
from stoker.feed.wire.dataset import DatasetSpec, pack_spec

SPEC = pack_spec(DatasetSpec(dataset=[1], collate_fn=len), max_bytes=1 << 20)


def begin(session: FeedSession) -> int:
    indices: Iterator[Numbered] = iter([Numbered((1, 0, 3, 0), [0])])
    given = {"seeding": "batch", "local": None, "is_eager": True, "pins_on": None}
    return session.begin(epoch=3, spec=SPEC, indices=indices, **given)  # type: ignore[arg-type]


@pytest.fixture
def session() -> FeedSession:
    schedule = BatchScheduler(max_bytes=1 << 20)
    return FeedSession("s", lock=threading.Lock(), wake=lambda: None, schedule=schedule)


def test_who_left_an_epoch_ends_no_later_one_of_the_same_number(session):
    before, number = begin(session), begin(session)
    assert number > before
    session.cancel(before)
    assert session.is_busy
    session.schedule.grant("host", 1)
    session.schedule.assign(0.0)
    assert session.schedule.arrived("host", 0, frame_bytes=1, now=0.0)
    session.deliver(0, BatchOutcome("batch"))
    with pytest.raises(StopIteration):
        session.next(before, timeout_seconds=1)
    assert session.next(number, timeout_seconds=1) == "batch"


def test_an_epoch_that_was_left_frees_its_session_for_one_more(session):
    number = begin(session)
    assert not session.is_idle()
    session.cancelled_epoch_id = number
    assert session.is_idle()
    session.reserve()
    assert not session.is_idle()
    session.cancel(number)  # What the epoch before left behind comes late.
    assert not session.is_idle()
