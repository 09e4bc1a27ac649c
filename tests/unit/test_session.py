import gc
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from stoker.feed.seeding import Numbered
from stoker.feed.timeline import Timeline
from stoker.feed.trainer.buffers import BatchOutcome
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.trainer.session import EpochRequest, FeedSession, IndexSource, SharedState
from stoker.feed.wire.dataset import DatasetSpec, pack_spec
from stoker.logs import Log

SPEC = pack_spec(DatasetSpec(dataset=[1], collate_fn=len), max_bytes=1 << 20)


def begin(session: FeedSession) -> int:
    return begin_with(session, IndexSource(iter([Numbered((1, 0, 3, 0), [0])])))


def begin_with(session: FeedSession, source: IndexSource) -> int:
    return session.begin(
        EpochRequest(epoch=3, spec=SPEC, seeding="batch", source=source, is_eager=True)
    )


@pytest.fixture
def session() -> FeedSession:
    schedule = BatchScheduler(max_bytes=1 << 20)
    return FeedSession("s", lock=threading.RLock(), wake=lambda: None, schedule=schedule)


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
    assert session.next(number, timeout_seconds=1).value == "batch"


@pytest.mark.timeout(60)
def test_a_signals_handler_may_read_another_loader_while_a_batch_is_taken(session, monkeypatch):
    other = FeedSession(
        "t", lock=session._lock, wake=lambda: None, schedule=BatchScheduler(max_bytes=1 << 20)
    )
    numbers = {one: begin(one) for one in (session, other)}
    for one in numbers:
        one.schedule.grant("host", 1)
        one.schedule.assign(0.0)
        assert one.schedule.arrived("host", 0, frame_bytes=1, now=0.0)
        one.deliver(0, BatchOutcome("batch"))
    read = []

    def evaluate(number, frame):
        read.append(other.next(numbers[other], timeout_seconds=1).value)

    take = session.schedule.take

    def interrupted(now):
        signal.raise_signal(signal.SIGUSR1)
        return take(now)

    monkeypatch.setattr(session.schedule, "take", interrupted)
    before = signal.signal(signal.SIGUSR1, evaluate)
    try:
        assert session.next(numbers[session], timeout_seconds=1).value == "batch"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert read == ["batch"]


def test_an_epoch_that_was_left_frees_its_session_for_one_more(session):
    number = begin(session)
    assert not session.is_idle()
    session.cancelled_epoch_id = number
    assert session.is_idle()
    session.reserve()
    assert not session.is_idle()
    session.cancel(number)  # What the epoch before left behind comes late.
    assert not session.is_idle()


def test_a_session_opens_until_a_peer_has_credits_or_there_is_an_error_to_raise(session):
    begin(session)
    assert session.is_opening()
    session.schedule.grant("host", 0)
    assert session.is_opening()
    session.schedule.grant("other", 2)
    assert not session.is_opening()
    session.schedule.mark_lost("other")
    assert session.is_opening()
    session.failure = RuntimeError("no host can make it")
    assert not session.is_opening()


def test_each_call_of_a_failed_session_raises_an_error_of_its_own(session):
    begin(session)
    session.failure = LookupError("no host can make it")
    raised: list[BaseException] = []
    for _ in range(2):
        with pytest.raises(LookupError, match="no host can make it") as caught:
            session.next(session.epoch_id, timeout_seconds=1)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    # It would have the variables of all callers.
    assert session.failure is not None
    assert session.failure.__traceback__ is None


def failing() -> Iterator[Numbered]:
    yield Numbered((1, 0, 3, 0), [0])
    raise LookupError("the list of samples is not there")


def test_an_error_of_the_sampler_comes_after_the_batches_before_it_once(session):
    source = IndexSource(failing())
    number = begin_with(session, source)
    session.schedule.grant("host", 1)
    session.schedule.assign(0.0)
    assert session.schedule.arrived("host", 0, frame_bytes=1, now=0.0)
    session.deliver(0, BatchOutcome("batch"))
    assert session.next(number, timeout_seconds=1).value == "batch"
    session.unreturned = None
    with pytest.raises(LookupError, match="not there"):
        session.next(number, timeout_seconds=1)
    with pytest.raises(StopIteration):
        session.next(number, timeout_seconds=1)


def test_a_session_keeps_no_error_of_a_sampler(session):
    source = IndexSource(failing())
    next(source.indices)
    begin_with(session, source)
    assert source.failure.is_there
    gone = weakref.ref(source)
    del source
    # The error knows the call that drew.
    gc.collect()
    assert gone() is None


def shared() -> SharedState:
    return SharedState(timeline=Timeline(None), log=Log(run="r", host="h", stream=sys.stderr))


def is_rung(feed: SharedState) -> bool:
    return bool(select.select([feed.wake_fd], [], [], 0)[0])


def test_calls_wake_the_io_thread_once_and_only_where_it_sleeps():
    feed = shared()
    feed.wake()
    assert not is_rung(feed)
    assert not feed.mark_asleep()
    feed.mark_awake(is_rung=False)
    assert feed.mark_asleep()
    feed.wake()
    feed.wake()
    assert is_rung(feed)
    assert os.eventfd_read(feed.wake_fd) == 1
    feed.close()


def test_a_wake_up_that_came_too_late_ends_the_next_sleep():
    feed = shared()
    done: list[int] = []
    assert feed.mark_asleep()
    # It woke for something else, when somebody called.
    feed.post(lambda: done.append(1))
    feed.mark_awake(is_rung=False)
    feed.run_posted()
    assert done == [1]
    assert feed.mark_asleep()
    assert is_rung(feed)
    feed.mark_awake(is_rung=True)
    assert not is_rung(feed)
    feed.close()
