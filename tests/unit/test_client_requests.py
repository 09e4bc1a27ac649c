"""Checks how long a session waits while nobody makes batches for it."""

import dataclasses
import io
import threading

import msgspec
import pytest

from stoker.errors import FeedLostError
from stoker.feed.timeline import Timeline
from stoker.feed.trainer.client import ALL_GONE_SECONDS, LOST_GRACE_SECONDS, Requester
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.trainer.session import LOCAL, AskedBatch, FeedSession, SharedState
from stoker.feed.trainer.shards import ShardScheduler
from stoker.feed.wire.codec import pack_value
from stoker.feed.wire.dataset import DatasetSpec, pack_spec
from stoker.feed.wire.protocol import (
    Make,
    Member,
    Message,
    Open,
    Roster,
    compare_versions,
    own_versions,
)
from stoker.feed.workers.pool import Result, WorkerJob
from stoker.logs import Log
from stoker.records import FeedSettings
from stoker.settings import from_environment

PATIENCE = 4.0 + LOST_GRACE_SECONDS


class Alone:
    def __init__(self, *, comes_back: bool, lease_seconds: float = 4.0, **more: float) -> None:
        self.log = io.StringIO()
        self._shared = SharedState(
            timeline=Timeline(None), log=Log(run="run", host="dnn", stream=self.log)
        )
        self._shared.close()
        feed = FeedSettings(lease_seconds=lease_seconds, start_deadline_seconds=60.0, **more)
        settings = dataclasses.replace(from_environment({}), feed=feed, comes_back=comes_back)
        self._asking = Requester(self._shared, settings, {})
        self._lock = threading.Lock()
        self.session = FeedSession(
            "s", lock=self._lock, wake=lambda: None, schedule=BatchScheduler(max_bytes=1)
        )
        self.session.had_peers = True
        self.session.alone_since = 0.0

    def tell(self, roster: Roster) -> None:
        self._asking.take_roster(roster, 0.0)

    def check_hang(self, now: int) -> None:
        with self._lock:
            self._asking.check_hang(self.session, float(now))

    def check_peers(self, now: float) -> BaseException | None:
        with self._lock:
            self._asking.check_peers(self.session, now)
        return self.session.failure


def roster(*, listed: bool = False, awaited: tuple[str, ...] = ()) -> Roster:
    place = {"host": "d1", "group": "data", "address": "10.0.0.1", "port": 7600, "batch_port": 7601}
    member = Member(**place, workers=1, incarnation="a", silent_seconds=0.0)
    agents, lost = ((member,), ()) if listed else ((), (member,))
    return Roster(agents=agents, lost=lost, expected=1 + len(awaited), awaited=awaited)


def test_the_error_names_every_lost_host_and_when_it_was_heard():
    alone = Alone(comes_back=False)
    (first,) = roster().lost
    second = msgspec.structs.replace(first, host="d2", silent_seconds=2.0)
    alone.tell(Roster(agents=(), lost=(first, second), expected=2, awaited=()))
    error = alone.check_peers(PATIENCE + 0.1)
    assert isinstance(error, FeedLostError)
    assert "d1 (lost, last heard 7.1 s ago), d2 (lost, last heard 9.1 s ago)" in str(error)


@pytest.mark.parametrize(
    ("comes_back", "lease_seconds", "had_peers", "told", "patience"),
    [
        (False, 4.0, True, None, PATIENCE),
        # However long the lease: all are gone.
        (False, 60.0, True, roster(), ALL_GONE_SECONDS),
        # Hosts that reconnect, or were never there: the start deadline.
        (True, 4.0, True, None, 60.0),
        (True, 4.0, False, None, 60.0),
        (False, 4.0, False, None, 60.0),
    ],
)
def test_hosts_are_waited_for_as_long_as_they_may_come(
    comes_back, lease_seconds, had_peers, told, patience
):
    alone = Alone(comes_back=comes_back, lease_seconds=lease_seconds)
    alone.session.had_peers = had_peers
    if told:
        alone.tell(told)
    assert alone.check_peers(patience) is None
    assert isinstance(alone.check_peers(patience + 0.1), FeedLostError)


def test_a_network_hole_of_a_minute_is_survived_where_the_leader_has_heartbeats():
    alone = Alone(comes_back=False, lease_seconds=60.0)
    alone.tell(roster(listed=True))
    # The connection is lost 18 s after the hole began, by its heartbeats.
    assert alone.check_peers(42.0) is None
    alone.session.schedule.grant("d1", 2)
    assert alone.check_peers(43.0) is None


def test_a_host_that_has_yet_to_come_is_waited_for():
    alone = Alone(comes_back=False, lease_seconds=60.0)
    alone.tell(roster(awaited=("d2",)))
    assert alone.check_peers(60.0) is None


def test_waiting_and_going_on_are_said_once():
    alone = Alone(comes_back=True)
    for now in (1.0, PATIENCE, 8.0, 9.0):
        assert alone.check_peers(now) is None
    alone.session.schedule.grant("data-0", 2)
    for now in (10.0, 11.0):
        assert alone.check_peers(now) is None
    said = alone.log.getvalue().splitlines()
    assert len(said) == 2
    assert "training_waiting" in said[0]
    assert "training_continues waited_seconds=10" in said[1]


class StartsOnlyOnce:
    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.asked: list[tuple[int, int]] = []

    def ask(self, order: Make) -> list[Result]:
        assert order.stream is not None
        generation = order.stream.generation
        self.asked.append((order.number, generation))
        if self.refused and generation not in self.refused:
            return []
        self.refused.add(generation)
        job = WorkerJob((order.epoch_id, order.number, generation), order)
        return [Result(job, -1, error=b"", summary="no more processes", is_lost=True)]

    def give_late_jobs_again(self) -> list[WorkerJob]:
        return []

    def flush(self) -> None:
        """There is nothing to give back."""


class ReadyHost:
    is_up = True

    def __init__(self, workers: int) -> None:
        (self.member,) = roster().lost
        self.member = msgspec.structs.replace(self.member, workers=workers)
        self.ready = {"s"}
        self.opened: dict[str, str] = {}
        self.sent: list[Message] = []
        self.send = self.sent.append

    def may_open(self, name: str, *, epoch_id: int) -> bool:
        return True

    def attach(self) -> None:
        """It has a connection for batches."""


def begin(session: FeedSession) -> None:
    session.begin(
        epoch=0,
        spec=pack_spec(DatasetSpec(dataset=[1], collate_fn=len), max_bytes=1 << 20),
        seeding="torch",
        local=None,
        indices=iter(()),
        asked_each=AskedBatch(b"index", (7,)),
        is_eager=False,
        pins_on=None,
    )


@pytest.mark.parametrize("name", own_versions())
def test_a_data_host_is_told_of_all_that_it_compares(name):
    alone, host = Alone(comes_back=False), ReadyHost(1)
    begin(alone.session)
    alone._asking._links = {"d1": host}
    alone._asking.announce(alone.session)
    opening = host.sent[0]
    assert isinstance(opening, Open)
    assert compare_versions(opening, own_versions()) == ("", "")
    assert name in "".join(compare_versions(opening, own_versions() | {name: "1.2"})).lower()


def test_data_workers_without_a_shard_are_told_of_once():
    alone = Alone(comes_back=False)
    schedule = ShardScheduler(num_shards=1, prefetch=2, max_bytes=1 << 20)
    session = FeedSession("s", lock=threading.Lock(), wake=lambda: None, schedule=schedule)
    alone._asking._links = {"d1": ReadyHost(4)}
    for _ in range(3):
        schedule.settle()
        alone._asking.ask(session, 0.0)
    assert alone.log.getvalue().count("few_shards") == 1
    assert "3 of 4 data workers have nothing to do" in alone.log.getvalue()


def test_no_batch_of_a_shard_is_asked_of_a_new_process_before_its_first_one():
    alone = Alone(comes_back=False)
    schedule = ShardScheduler(num_shards=1, prefetch=3, max_bytes=1 << 20)
    session = FeedSession("s", lock=threading.Lock(), wake=lambda: None, schedule=schedule)
    begin(session)
    local = StartsOnlyOnce()
    session.local = local
    schedule.grant(LOCAL, 2)
    schedule.settle()
    for _ in range(2):
        alone._asking.ask(session, 0.0)
    assert local.asked == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    assert session.failure is None


def test_hosts_that_failed_before_they_made_a_batch_are_not_waited_for():
    alone = Alone(comes_back=False)
    alone.session.had_peers = False
    # It said goodbye: neither listed, nor lost, nor awaited.
    alone.tell(Roster(agents=(), expected=1))
    assert alone.check_peers(PATIENCE - 0.1) is None
    assert isinstance(alone.check_peers(PATIENCE + 0.1), FeedLostError)


def hanging(**feed: float) -> Alone:
    """Returns a session that waits for batch 0, which host d1 was asked for at 100 s."""
    alone = Alone(comes_back=False, **feed)
    session = alone.session
    session.epoch, session.waits_since = 0, 0.1
    session._asked[0] = AskedBatch(pack_value([7, 3], allow_pickle=True), ())
    session.schedule.grant("d1", 2)
    session.schedule.supply(1)
    assert session.schedule.assign(100.0) == [("d1", 0)]
    session.slow[0] = {"d1": [3]}
    return alone


def test_a_batch_that_is_waited_for_is_named_after_1_5_and_30_minutes():
    alone = hanging()
    told = []
    for second in range(100, 100 + 3 * 3600):
        alone.check_hang(second)
        if alone.log.tell():
            told.append((second - 100, alone.log.getvalue()))
            alone.log.seek(0)
            alone.log.truncate()
    assert [second for second, _ in told] == [60, 300, 1800, 3600, 5400, 7200, 9000]
    words = (
        "batch 0 of epoch 0 (samples 7, 3) is being made for 60 s, on d1 (worker 3); rank 0 waits"
    )
    assert words in told[0][1]
    assert alone.session.failure is None


def test_batches_that_always_take_long_are_named_later():
    alone = hanging()
    alone.session.schedule.peers["d1"].p95_seconds = 100.0
    for second in range(100, 500):
        alone.check_hang(second)
    assert alone.log.getvalue() == ""
    alone.check_hang(501)
    assert "is being made for 401 s" in alone.log.getvalue()


def test_a_batch_is_given_up_after_the_timeout_and_named_at_half_of_it():
    alone = hanging(sample_timeout_seconds=20.0)
    for second in range(100, 120):
        alone.check_hang(second)
    assert alone.log.getvalue().count("is being made for 10 s") == 1
    assert alone.session.failure is None
    alone.check_hang(120)
    assert "samples 7, 3" in str(alone.session.failure)
    assert "feed.sample_timeout_seconds (20)" in str(alone.session.failure)
