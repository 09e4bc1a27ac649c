"""Jobs are pinned to the worker of their shard, and others go to any worker."""

import contextlib
import gc
import os
import random
import select
import socket
import weakref

import pytest

from stoker.feed.wire import codec
from stoker.feed.wire.protocol import Make, Stream
from stoker.feed.workers import worker_handle
from stoker.feed.workers.crashes import LossRules
from stoker.feed.workers.jobs import Result, SplitBatch, WorkerJob
from stoker.feed.workers.pipe import Error, MakeAgain, PartMade, Pipe, Slot, Up, pack, to_worker
from stoker.feed.workers.pool import (
    FIRST_OVERDUE_SECONDS,
    MAX_STUCK_IN_A_ROW,
    STUCK_SECONDS,
    WorkerPool,
    WorkerRole,
)
from stoker.feed.workers.worker_handle import DEPTH


class Child:
    def __init__(self, role, sock):
        self.role = role
        self.pid = None
        self.exitcode: int | None = None
        self.channel = Pipe(socket.socket(fileno=os.dup(sock.fileno())), blocking=True)

    def kill(self):
        self.exitcode = -9
        self.channel.close()

    def join(self, timeout=None):
        """It ends when it is killed."""

    def numbers(self, count):
        orders: list[int] = []
        while len(orders) < count:
            orders += [to_worker.decode(data).batch_number for data, _ in self.channel.receive()]
        return orders

    def next_order(self):
        return to_worker.decode(next(self.channel.receive())[0])

    def next_part(self):
        part = self.next_order()
        return part.first, part.last

    def send_part(self):
        self.channel.send(pack(PartMade(1, b"", 0, 0.0, 0.0, 0.0)))

    def be_ready(self):
        self.channel.send(pack(Up(os.getpid())))

    def answer(self):
        self.channel.send(pack(Error(b"", "made")))

    def write(self, data):
        """Writes into its end of the channel, as a sample may that writes to any descriptor."""
        os.write(self.channel.fileno(), data)


class Children(list):
    error = None
    are_quick = True

    def start(self, role, sock):
        if self.error is not None:
            raise self.error
        self.append(Child(role, sock))
        if self.are_quick:
            self[-1].be_ready()
        return self[-1]


@pytest.fixture
def children():
    return Children()


@pytest.fixture
def pool(children):
    made = WorkerPool(children.start, num_workers=1)
    results_of(made)
    yield made
    made.close()
    assert all(child.exitcode is not None for child in children)


def job(number, *, shard=None, generation=1, epoch=0, **more):
    stream = None
    if shard is not None:
        stream = Stream(shard=shard, num_shards=4, generation=generation, **more)
    order = Make(
        session="s", epoch_id=epoch, batch_number=number, index=b"", seed_words=(7,), stream=stream
    )
    return WorkerJob((number, generation), order)


def results_of(pool):
    ready, _, _ = select.select(list(pool.sockets()), [], [], 10.0)
    return [result for fileno in ready for result in pool.handle(fileno)]


def numbers_of(results):
    return [result.job.key[0] for result in results]


def test_a_shard_has_a_worker_of_its_own_that_takes_any_number_of_its_jobs(pool, children):
    for number in (2, 6, 10, 14):
        assert pool.assign(job(number, shard=2)) == []
    (any_worker, of_shard) = children
    assert of_shard.role == WorkerRole(number=2, num_shards=4, base_seed=7)
    assert of_shard.numbers(4) == [2, 6, 10, 14]
    assert (pool.num_alive, pool.idle_count, pool.busy_count, pool.room) == (1, 1, 0, 2)
    pool.assign(job(0))
    assert any_worker.numbers(1) == [0]
    of_shard.answer()
    (result,) = results_of(pool)
    assert (result.job.key, result.worker, result.is_lost) == ((2, 1), 2, False)


def test_a_dead_worker_of_a_shard_is_not_started_again_and_its_jobs_are_lost(pool, children):
    pool.assign(job(1, shard=1))
    pool.assign(job(5, shard=1))
    children[-1].kill()
    results = results_of(pool)
    assert numbers_of(results) == [1, 5]
    assert all(result.is_lost for result in results)
    assert "data worker 1 ended with signal 9 (SIGKILL)" in results[0].summary
    assert numbers_of(pool.assign(job(9, shard=1))) == [9]
    assert len(children) == 2


def test_answers_that_came_whole_before_nonsense_count_though_they_are_read_with_it(pool, children):
    (child,) = children
    pool.assign(job(0))
    pool.assign(job(1))
    assert child.numbers(2) == [0, 1]
    child.answer()
    child.write(b"\xff" * 100)
    child.answer()
    assert numbers_of(results_of(pool)) == [0]
    assert child.exitcode is not None
    assert "malformed message" in pool.last_death
    # The job in which it was written is given to the next one, and is not lost.
    _, after = children
    assert results_of(pool) == []
    assert after.numbers(1) == [1]
    after.answer()
    assert numbers_of(results_of(pool)) == [1]


@pytest.mark.parametrize("message", [Slot(0, 100), PartMade(1, b"", 100, 0.0, 0.0, 0.0)])
def test_a_message_without_the_descriptor_of_its_memory_is_nonsense(message, pool, children):
    pool.assign(job(0))
    children[0].channel.send(pack(message))
    assert results_of(pool) == []
    assert "malformed message" in pool.last_death
    results_of(pool)
    assert children[1].numbers(1) == [0]


def test_a_shard_that_is_pinned_anew_begins_with_a_new_worker_and_an_old_start_is_refused(
    pool, children
):
    pool.assign(job(1, shard=1))
    assert pool.assign(job(1, shard=1, generation=2)) == []
    _, before, after = children
    assert before.exitcode is not None
    assert after.numbers(1) == [1]
    (lost,) = pool.assign(job(5, shard=1, generation=1))
    assert lost.is_lost
    assert after.exitcode is None


def test_jobs_of_a_shard_whose_worker_cannot_be_started_are_lost_until_it_is_pinned_anew(
    pool, children
):
    children.error = OSError(11, "no more processes")
    assert numbers_of(pool.assign(job(1, shard=1))) == [1]
    children.error = None
    (lost,) = pool.assign(job(5, shard=1))
    assert "no more processes" in lost.summary
    assert pool.assign(job(1, shard=1, generation=2)) == []


def order_of_two_samples():
    index = codec.pack_value([4, 5], allow_pickle=False)
    return Make(session="s", epoch_id=0, batch_number=0, index=index, seed_words=(7,))


def test_one_worker_makes_a_batch_of_whose_part_one_died_though_another_has_a_part_still(children):
    rules = LossRules(on_error="skip")
    pool = WorkerPool(children.start, num_workers=2, splits=True, rules=rules)
    with contextlib.closing(pool):
        while pool.num_ready < 2:
            results_of(pool)
        pool.assign(WorkerJob((0,), order_of_two_samples()))
        slow, dying = children
        assert (slow.next_part(), dying.next_part()) == ((0, 1), (1, 2))
        dying.kill()
        while len(children) < 3 or pool.num_ready < 2:
            results_of(pool)
        slow.send_part()
        assert results_of(pool) == []
        # It was ordered before another worker was ready.
        assert isinstance(slow.next_order(), MakeAgain)
        slow.answer()
        assert numbers_of(results_of(pool)) == [0]


def test_parts_of_a_batch_that_is_divided_anew_have_other_keys():
    job = WorkerJob((0,), order_of_two_samples())
    first, second = (SplitBatch(job, size=2, step=1).next_job() for _ in range(2))
    assert (first.first, first.last) == (second.first, second.last)
    assert first.key != second.key


class Asked:
    """Stands for what a job is for; the job's key holds it."""


def test_a_job_that_was_late_and_is_answered_is_held_no_longer_when_its_worker_dies(children):
    now = 0.0
    asked = Asked()
    pool = WorkerPool(children.start, num_workers=2, clock=lambda: now)
    with contextlib.closing(pool):
        assert results_of(pool) == []
        pool.assign(WorkerJob((asked,), job(0).order))
        now = FIRST_OVERDUE_SECONDS
        assert len(pool.give_late_jobs_again()) == 1
        late, other = children
        assert (late.numbers(1), other.numbers(1)) == ([0], [0])
        other.answer()
        assert [result.job.key for result in results_of(pool)] == [(asked,)]
        late.kill()
        assert results_of(pool) == []
        held = weakref.ref(asked)
        del asked
        gc.collect()
        assert held() is None


def test_workers_of_shards_end_with_their_epoch_all_killed_before_one_is_waited_for(
    pool, children, monkeypatch
):
    seen = []

    def join(self, timeout=None):
        seen.append([child.exitcode for child in children])

    monkeypatch.setattr(Child, "join", join)
    pool.assign(job(0, shard=0, epoch=3))
    pool.assign(job(1, shard=1, epoch=3, persists=True))
    pool.assign(job(2, shard=2, epoch=3))
    pool.assign(job(3, shard=3, epoch=4))
    pool.stop_shards(before_epoch_id=4)
    assert seen == [[None, -9, None, -9, None]] * 2
    assert len(pool.sockets()) == 3


def test_a_worker_that_still_starts_has_no_job_and_its_start_is_no_batchs_time(children):
    now = 0.0
    children.are_quick = False
    with contextlib.closing(WorkerPool(children.start, num_workers=2, clock=lambda: now)) as pool:
        assert (pool.num_alive, pool.num_ready, pool.room) == (2, 0, 0)
        now = 50.0
        children[1].be_ready()
        results_of(pool)
        assert (pool.num_ready, pool.room, pool.idle_count) == (1, 2, 1)
        pool.assign(job(0))
        now = 50.0 + FIRST_OVERDUE_SECONDS - 0.1
        assert pool.give_late_jobs_again() == []
        (maker,) = pool.makers(lambda each: each.key[0] == 0)
        assert (maker.number, round(maker.seconds, 1)) == (1, FIRST_OVERDUE_SECONDS - 0.1)


def test_a_pinned_job_begins_when_its_worker_is_ready(children):
    now = 0.0
    children.are_quick = False
    with contextlib.closing(WorkerPool(children.start, num_workers=0, clock=lambda: now)) as pool:
        pool.assign(job(0, shard=0))
        now = 30.0
        assert pool.makers(lambda each: True) == []
        children[0].be_ready()
        results_of(pool)
        now = 31.0
        assert [maker.seconds for maker in pool.makers(lambda each: True)] == [1.0]


def test_a_shards_worker_that_stands_at_a_lock_as_it_starts_is_replaced_a_few_times(
    children, monkeypatch
):
    now = 0.0
    children.are_quick = False
    monkeypatch.setattr(worker_handle, "wait_without_end", lambda pid: f"a lock of {pid}")
    with contextlib.closing(WorkerPool(children.start, num_workers=0, clock=lambda: now)) as pool:
        for number in (1, 5):
            assert pool.assign(job(number, shard=1)) == []
        results: list[Result] = []
        while not results:
            child = children[-1]
            child.pid = len(children)
            assert child.numbers(2) == [1, 5]
            pool.kill_hanging()
            now += 0.9 * STUCK_SECONDS
            pool.kill_hanging()
            assert child.exitcode is None
            now += 0.1 * STUCK_SECONDS
            pool.kill_hanging()
            results = results_of(pool)
        assert numbers_of(results) == [1, 5]
        assert "waited, as it started, for a lock" in results[0].summary
    assert len(children) == MAX_STUCK_IN_A_ROW


def test_the_job_of_a_worker_that_dies_begins_again_with_the_next_that_is_ready(children):
    now = 0.0
    with contextlib.closing(WorkerPool(children.start, num_workers=1, clock=lambda: now)) as pool:
        results_of(pool)
        pool.assign(job(0))
        children.are_quick = False
        now = 8.0
        children[0].kill()
        assert results_of(pool) == []
        now = 20.0
        assert pool.makers(lambda each: True) == []
        children[1].be_ready()
        results_of(pool)
        assert children[1].numbers(1) == [0]
        now = 21.0
        assert [maker.seconds for maker in pool.makers(lambda each: True)] == [1.0]


def handled(pool):
    """Handles what is there, which may be nothing."""
    ready, _, _ = select.select(list(pool.sockets()), [], [], 0.0)
    for fileno in ready:
        pool.handle(fileno)


def counted(pool):
    """Counts by looking at each worker."""
    in_time = [each for each in pool._workers.values() if each.is_ready and not each.is_late]
    num_jobs = [len(each.jobs) for each in in_time]
    waiting = len(pool._retries)
    idle, busy = num_jobs.count(0), sum(map(bool, num_jobs))
    free = sum(DEPTH - count for count in num_jobs)
    return max(0, idle - waiting), busy + waiting, max(0, free - waiting)


@pytest.mark.parametrize("seed", range(12))
def test_counts_are_those_of_all_workers_whatever_happens(children, seed):
    now, draws = 0.0, random.Random(seed)
    children.are_quick = seed % 2 == 0
    with contextlib.closing(WorkerPool(children.start, num_workers=4, clock=lambda: now)) as pool:
        for number in range(80):
            living = [child for child in children if child.exitcode is None]
            match draws.choice(["assign", "assign", "shard", "answer", "answer", "ready", "late"]):
                case "assign" if pool.room:
                    pool.assign(job(number))
                case "shard":
                    pool.assign(job(number, shard=number % 3))
                case "answer" if living:
                    draws.choice(living).answer()
                case "ready" if living:
                    draws.choice(living).be_ready()
                case "late":
                    now += draws.choice([1.0, 50.0])
                    pool.give_late_jobs_again()
            if draws.random() < 0.05 and living:
                draws.choice(living).kill()
            assert (pool.idle_count, pool.busy_count, pool.room) == counted(pool)
            handled(pool)
            assert (pool.idle_count, pool.busy_count, pool.room) == counted(pool)
            sockets = {each.channel.fileno() for each in pool._all()}
            assert set(pool.sockets()) == sockets == set(pool.among([*sockets, 9999]))
