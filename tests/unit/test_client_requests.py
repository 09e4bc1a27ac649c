"""Checks how long a session waits while nobody makes batches for it."""

import dataclasses
import io
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from stoker.environment import from_environment
from stoker.errors import FeedLostError
from stoker.feed.lost_samples import ALL_SAMPLES, SampleInWork
from stoker.feed.timeline import Timeline
from stoker.feed.trainer.client import Requester
from stoker.feed.trainer.host_watch import ALL_GONE_SECONDS, LOST_GRACE_SECONDS, HostWatch
from stoker.feed.trainer.late_batches import LateBatches
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.trainer.session import (
    LOCAL,
    AskedBatch,
    EpochRequest,
    FeedSession,
    HeadMaker,
    IndexSource,
    SharedState,
)
from stoker.feed.trainer.shards import ShardScheduler
from stoker.feed.wire.codec import pack_value
from stoker.feed.wire.dataset import DatasetSpec, pack_spec
from stoker.feed.wire.protocol import (
    Inquire,
    Make,
    Member,
    Message,
    Open,
    Roster,
    compare_versions,
    own_versions,
)
from stoker.feed.workers.jobs import Result, WorkerJob
from stoker.logs import Log
from stoker.records import FeedSettings

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
        self._hosts = HostWatch(self._shared, settings, {})
        self._asking = Requester(self._shared, settings, {}, self._hosts)
        self.links: dict[str, Answering] = {}
        self._late = LateBatches(self._shared, settings, self.links)
        self._lock = threading.RLock()
        self.session = FeedSession(
            "s", lock=self._lock, wake=lambda: None, schedule=BatchScheduler(max_bytes=1)
        )
        self.session.had_peers = True
        self.session.alone_since = 0.0

    def tell(self, roster: Roster) -> None:
        self._hosts.take_roster(roster, 0.0)

    def check_late(self, now: float) -> None:
        self.now = float(now)
        with self._lock:
            self._late.check(self.session, self.now)

    def check_peers(self, now: float) -> BaseException | None:
        with self._lock:
            self._hosts.check(self.session, now)
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
    part_bytes = 0

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.asked: list[tuple[int, int]] = []

    def ask(self, order: Make) -> list[Result]:
        assert order.stream is not None
        generation = order.stream.generation
        self.asked.append((order.batch_number, generation))
        if self.refused and generation not in self.refused:
            return []
        self.refused.add(generation)
        job = WorkerJob((order.epoch_id, order.batch_number, generation), order)
        return [Result(job, -1, error=b"", summary="no more processes", is_lost=True)]

    def give_late_jobs_again(self) -> list[WorkerJob]:
        return []

    def spare_memory(self, share: float) -> None:
        """It keeps none."""

    def flush(self) -> None:
        """There is nothing to give back."""


class ReadyHost:
    is_up = True

    def __init__(self, workers: int) -> None:
        (self.member,) = roster().lost
        self.member = msgspec.structs.replace(self.member, workers=workers)
        self.ready = {"s"}
        self.opened: dict[str, tuple[str, str]] = {}
        self.sent: list[Message] = []
        self.send = self.sent.append

    def may_open(self, name: str, *, epoch_id: int) -> bool:
        return True

    def attach(self) -> None:
        """It has a connection for batches."""


# A session only refers to it.
SOURCE = IndexSource(iter(()))


def begin(session: FeedSession) -> None:
    request = EpochRequest(
        epoch=0,
        spec=pack_spec(DatasetSpec(dataset=[1], collate_fn=len), max_bytes=1 << 20),
        seeding="torch",
        source=SOURCE,
        asked_each=AskedBatch(b"index", (7,)),
        is_eager=False,
    )
    session.begin(request)


@pytest.mark.parametrize("name", own_versions())
def test_a_data_host_is_told_of_all_that_it_compares(name):
    alone, host = Alone(comes_back=False), ReadyHost(1)
    begin(alone.session)
    alone._asking._links = {"d1": host}
    alone._asking.announce(alone.session)
    opening = host.sent[0]
    assert isinstance(opening, Open)
    assert compare_versions(opening, own_versions(), host="d1") == (None, "")
    other = own_versions() | {name: "1.2"}
    why, warning = compare_versions(opening, other, host="d1")
    assert name in (why.what if why else warning).lower()


def test_data_workers_without_a_shard_are_told_of_once():
    alone = Alone(comes_back=False)
    schedule = ShardScheduler(num_shards=1, prefetch=2, max_bytes=1 << 20)
    session = FeedSession("s", lock=threading.RLock(), wake=lambda: None, schedule=schedule)
    alone._asking._links = {"d1": ReadyHost(4)}
    for _ in range(3):
        schedule.settle()
        alone._asking.ask(session, 0.0)
    assert alone.log.getvalue().count("few_shards") == 1
    assert "3 of 4 data workers have nothing to do" in alone.log.getvalue()


@pytest.mark.parametrize(
    ("max_bytes", "rank", "is_said"),
    [(10, 0, True), (10, 1, False), (10, 2, True), (4000, 0, False), (None, 0, False)],
)
def test_a_feed_whose_memory_holds_no_batch_says_so_once_a_host(max_bytes, rank, is_said):
    alone = Alone(comes_back=False, max_bytes=max_bytes)
    asking = alone._asking
    asking._settings = dataclasses.replace(asking._settings, rank=rank, local_world_size=2)
    schedule = BatchScheduler(max_bytes=max_bytes or 1 << 20)
    session = FeedSession("s", lock=threading.RLock(), wake=lambda: None, schedule=schedule)
    asking.ask(session, 0.0)
    schedule._sizes.append(4000)
    schedule._batch_bytes = 4000
    for _ in range(3):
        asking.ask(session, 0.0)
    assert alone.log.getvalue().count("max_bytes_small") == is_said
    if is_said:
        assert "feed.max_bytes (10 B) holds no batch" in alone.log.getvalue()


def test_no_batch_of_a_shard_is_asked_of_a_new_process_before_its_first_one():
    alone = Alone(comes_back=False)
    schedule = ShardScheduler(num_shards=1, prefetch=3, max_bytes=1 << 20)
    session = FeedSession("s", lock=threading.RLock(), wake=lambda: None, schedule=schedule)
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
    left = {"d1": "failed: the agent cannot start: address in use"}
    alone.tell(Roster(agents=(), expected=1, left=left))
    assert alone.check_peers(PATIENCE - 0.1) is None
    error = alone.check_peers(PATIENCE + 0.1)
    assert isinstance(error, FeedLostError)
    assert "d1 (left: failed: the agent cannot start: address in use)" in str(error)


class Answering:
    """Host d1: since when (seconds) its worker 3 has the batch, or None; silent if it `hangs`."""

    def __init__(
        self, alone: Alone, begun_at: float | None, sample: SampleInWork | None = None
    ) -> None:
        self.alone, self.begun_at, self.hangs = alone, begun_at, False
        self.num_asked = 0
        self.sample = sample

    def send(self, message: Message) -> None:
        assert isinstance(message, Inquire)
        self.num_asked += 1
        if self.hangs:
            return
        session, now, begun_at = self.alone.session, self.alone.now, self.begun_at
        session.inquiries.pop("d1", None)
        has_begun = begun_at is not None and begun_at <= now
        session.makers["d1"] = HeadMaker(
            heard_at=now,
            begun_at=begun_at if has_begun else None,
            workers=(3,) if has_begun else (),
            stacks=STACKS if has_begun else "",
            sample=self.sample if has_begun else None,
        )


STACKS = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x2 (most recent call first):
  File "/x/site-packages/h5py/_hl/dataset.py", line 841 in __getitem__
  File "/home/me/train.py", line 41 in __getitem__
  File "/x/site-packages/torch/utils/data/_utils/fetch.py", line 52 in fetch
  File "/x/site-packages/stoker/feed/workers/worker.py", line 300 in make
"""


def hanging(
    *, begun_at: float | None = 100.0, sample: SampleInWork | None = None, **feed: float
) -> Alone:
    """Returns a session that waits for batch 0, which host d1 was asked for at 100 s."""
    alone = Alone(comes_back=False, **feed)
    session = alone.session
    session.epoch, session.waits_since, session.called_at = 0, 0.1, 0.1
    session._asked[0] = AskedBatch(pack_value([7, 3], allow_pickle=True), ())
    session.schedule.grant("d1", 2)
    session.schedule.supply(1)
    assert session.schedule.assign(100.0) == [("d1", 0)]
    alone.host = Answering(alone, begun_at, sample)
    alone.links["d1"] = alone.host
    return alone


def said_in(alone: Alone, seconds: range) -> list[tuple[int, str]]:
    told = []
    for second in seconds:
        # The second look has the answer.
        alone.check_late(second)
        alone.check_late(second)
        if alone.log.tell():
            told.append((second - 100, alone.log.getvalue()))
            alone.log.seek(0)
            alone.log.truncate()
    return told


def test_a_batch_that_is_waited_for_is_named_after_1_5_and_30_minutes():
    alone = hanging()
    told = said_in(alone, range(100, 100 + 3 * 3600))
    assert [second for second, _ in told] == [60, 300, 1800, 3600, 5400, 7200, 9000]
    words = "batch 0 of epoch 0 (samples 7, 3) is being made for 60 s, on d1 (worker 3: "
    assert words in told[0][1]
    assert alone.session.failure is None


def test_a_batch_that_hangs_is_named_with_the_innermost_frame_of_the_user():
    ((_, told), *_) = said_in(hanging(), range(100, 200))
    words = "worker 3: in __getitem__ (train.py:41), calls __getitem__ (_hl/dataset.py:841))"
    assert words in told
    assert "; rank 0 waits for it" in told


@pytest.mark.parametrize("late", [20.0, 50.0])
def test_a_batchs_time_begins_when_a_ready_worker_has_it(late):
    alone = hanging(begun_at=100.0 + late, sample_timeout_seconds=30.0)
    told = said_in(alone, range(100, 100 + round(late) + 30))
    assert [second for second, _ in told] == [late + 15]
    assert alone.session.failure is None
    alone.check_late(130 + late)
    alone.check_late(130 + late)
    assert "is being made for 30 s" in str(alone.session.failure)


def test_a_batch_that_no_worker_is_ready_for_ends_with_the_deadline_of_the_start():
    alone = hanging(begun_at=None)
    assert said_in(alone, range(100, 160)) == []
    assert alone.session.failure is None
    said_in(alone, range(160, 161))
    assert "no worker was ready for batch 0 of epoch 0 (samples 7, 3) within 60 s" in str(
        alone.session.failure
    )


@pytest.mark.parametrize("late", [0.0, 2.5, 40.0])
def test_a_loaders_timeout_begins_when_a_ready_worker_has_the_batch(late):
    alone = hanging(begun_at=100.0 + late)
    alone.session.timeout_seconds = 3
    end = 103 + late
    for tenth in range(1000, round(10 * end)):
        alone.check_late(tenth / 10)
        assert not alone.session.has_timed_out
    for now in (end, end + 0.1, end + 0.2):
        alone.check_late(now)
    assert alone.session.has_timed_out
    # A host is asked when it may be due, and not all the time.
    assert alone.host.num_asked < 20


def test_a_timeout_begins_again_with_each_call():
    alone = hanging()
    alone.session.timeout_seconds, alone.session.called_at = 3, 200.0
    for tenth in range(1000, 2030):
        alone.check_late(tenth / 10)
        assert not alone.session.has_timed_out
    for now in (203.0, 203.1):
        alone.check_late(now)
    assert alone.session.has_timed_out


def test_a_host_that_does_not_answer_is_named_and_is_no_timeout():
    alone = hanging()
    alone.host.hangs, alone.session.timeout_seconds = True, 3
    told = said_in(alone, range(100, 170))
    assert "is being made for 60 s, on d1, which does not answer; rank 0" in told[0][1]
    assert not alone.session.has_timed_out


def test_hosts_that_have_no_worker_ready_for_a_minute_say_where_they_are():
    alone = hanging()
    session = alone.session
    session.schedule.mark_lost("d1")
    session.waits_since = 100.0
    (member,) = roster().lost
    host: ReadyHost = alone.host
    host.is_up, host.member, host.opened = True, member, {"s": ("spec", "stretch")}
    told = said_in(alone, range(100, 2000))
    assert [second for second, _ in told] == [60, 300, 1800]
    assert "workers_starting" in told[0][1]
    words = "rank 0 waits for a worker that is ready for 60 s: d1 is in __getitem__ (train.py:41)"
    assert words in told[0][1]


def test_batches_that_always_take_long_are_named_later():
    alone = hanging()
    alone.session.schedule.peers["d1"].p95_seconds = 100.0
    assert [second for second, _ in said_in(alone, range(100, 502))] == [400]


def test_a_batch_is_given_up_after_the_timeout_and_named_at_half_of_it():
    alone = hanging(sample_timeout_seconds=20.0)
    told = said_in(alone, range(100, 120))
    assert [second for second, _ in told] == [10]
    assert "is being made for 10 s" in told[0][1]
    assert alone.session.failure is None
    said_in(alone, range(120, 121))
    assert "samples 7, 3" in str(alone.session.failure)
    assert "feed.sample_timeout_seconds (20)" in str(alone.session.failure)


@pytest.mark.parametrize(
    ("index", "sample", "words"),
    [
        ([7, 3], SampleInWork(1, 18.0), "sample 3 for 18.0 s"),
        (torch.tensor([7, 3]), SampleInWork(0, 18.0), "sample 7 for 18.0 s"),
        (np.array([7, 3]), SampleInWork(0, 18.0), "sample 7 for 18.0 s"),
        (range(5, 9), SampleInWork(2, 18.0), "sample 7 for 18.0 s"),
        (("a.jpg", "b.jpg"), SampleInWork(1, 18.0), "sample 'b.jpg' for 18.0 s"),
        ([(0, 4), (1, 4)], SampleInWork(1, 18.0), "sample (1, 4) for 18.0 s"),
        ((1, 4), SampleInWork(0, 18.0, is_lone=True), "sample (1, 4) for 18.0 s"),
        ("a.jpg", SampleInWork(0, 18.0, is_lone=True), "sample 'a.jpg' for 18.0 s"),
        ([7, 3], SampleInWork(ALL_SAMPLES, 18.0), "one call that makes all of its samples"),
    ],
)
def test_the_sample_that_takes_too_long_is_named_with_its_host_and_stack(index, sample, words):
    alone = hanging(sample=sample, sample_timeout_seconds=20.0)
    alone.session._asked[0] = AskedBatch(pack_value(index, allow_pickle=True), ())
    said_in(alone, range(100, 121))
    failure = str(alone.session.failure)
    assert f"on d1 (worker 3: {words}" in failure
    assert "in __getitem__ (train.py:41)" in failure


def test_local_workers_that_start_are_waited_for_as_long_as_hosts_may_take():
    alone = Alone(comes_back=False)
    alone.tell(Roster(agents=(), expected=1))
    alone.session.local = SimpleNamespace(is_alive=True, last_death="")
    alone.session.schedule.grant(LOCAL, 0)
    assert alone.check_peers(59.9) is None
    assert "they still start" in str(alone.check_peers(60.1))
