"""Each batch is delivered once and in order, whoever is slow, late or lost; memory is bounded."""

import heapq
import itertools
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed.engine.scheduler import ORDERS_PER_WORKER, BatchScheduler, WorkerPace

MB = 1 << 20


class Worker(WorkerPace):
    """A worker that is known by its name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __repr__(self):
        return str(self.name)


def scheduler(*names, supply=0, max_bytes=1 << 40):
    made = BatchScheduler(max_bytes=max_bytes, unknown_bytes=MB)
    for name in names:
        made.join(Worker(name))
    made.supplied = supply
    return made


class Simulation:
    """An epoch on a virtual clock: workers that take time, and a trainer that takes its step."""

    def __init__(self, schedule, *, seconds, step=0.0, num_batches, nbytes=MB):
        self.schedule = schedule
        self.seconds = seconds
        self.step = step
        self.nbytes = nbytes
        self.num_batches = num_batches
        self.taken = []
        self.most_held = 0
        self._events = []
        self._ids = itertools.count()
        self._free_at = {}
        self.now = 0.0
        self.lost = set()

    def at(self, when, action):
        heapq.heappush(self._events, (when, next(self._ids), action))

    def _order(self):
        for worker, number in self.schedule.assign(self.now):
            start = max(self.now, self._free_at.get(worker, 0.0))
            end = start + self.seconds(worker, number)
            self._free_at[worker] = end
            if end < math.inf:
                self.at(end, lambda worker=worker, number=number: self._answer(worker, number))

    def _answer(self, worker, number):
        if worker not in self.lost:
            self.schedule.arrived(worker, number, nbytes=self.nbytes, now=self.now)

    def lose(self, worker):
        self.lost.add(worker)
        self.schedule.lose(worker)

    def run(self):
        schedule = self.schedule
        schedule.supplied = self.num_batches
        schedule.is_complete = True
        may_take_at = 0.0
        while not schedule.is_over:
            if schedule.head in schedule.arrivals and self.now >= may_take_at:
                self.taken.append(schedule.head)
                schedule.take(self.now)
                may_take_at = self.now + self.step
                self.at(may_take_at, lambda: None)
            schedule.repeat_late(self.now)
            self._order()
            self.most_held = max(self.most_held, len(schedule.arrivals) * self.nbytes)
            if schedule.head in schedule.arrivals and self.now >= may_take_at:
                continue
            if schedule.is_over:
                break
            # As the feed's thread, which looks four times a second.
            look_at = self.now + 0.25
            if not self._events or self._events[0][0] > look_at:
                self.now = look_at
                assert look_at < 10_000, f"stuck at {schedule.head}"
                continue
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self.now


def test_the_oldest_numbers_go_first_to_whoever_is_free():
    made = scheduler("a", "b", supply=3)
    a, b = made.workers
    assert made.assign(0.0) == [(a, 0), (b, 1), (a, 2)]
    assert made.assign(0.0) == []
    made.supplied += 5
    assert made.assign(0.0) == [(b, 3)]


def test_what_a_lost_worker_had_goes_to_others_oldest_first():
    made = scheduler("a", "b", supply=4)
    a, b = made.workers
    made.assign(0.0)
    made.lose(a)
    made.arrived(b, 1, nbytes=1, now=1.0)
    assert made.assign(1.0) == [(b, 0)]


def test_the_third_death_over_a_batch_is_the_last():
    made = scheduler("a", supply=4)
    (a,) = made.workers
    assert [made.note_death(0) for _ in range(3)] == [False, False, True]
    made.assign(0.0)
    made.arrived(a, 0, nbytes=1, now=1.0)
    # It came from another worker meanwhile.
    assert not made.note_death(0)


def test_a_late_head_is_asked_of_a_second_worker_and_the_first_answer_counts():
    made = scheduler("a", "b", supply=2)
    a, b = made.workers
    made.assign(0.0)
    made.arrived(b, 1, nbytes=1, now=0.5)
    assert made.repeat_late(1.9) is None
    assert made.repeat_late(2.0) == 0
    assert made.assign(2.0) == [(b, 0)]
    assert made.arrived(b, 0, nbytes=1, now=2.1)
    made.take(2.2)
    assert not made.arrived(a, 0, nbytes=1, now=2.3)


def test_memory_bounds_the_window_and_one_batch_always_may():
    made = scheduler("a", "b", "c", supply=50, max_bytes=3 * MB)
    assert len(made.assign(0.0)) == 3
    made = scheduler("a", supply=50, max_bytes=1)
    (a,) = made.workers
    assert made.assign(0.0) == [(a, 0)]
    made.arrived(a, 0, nbytes=MB, now=0.0)
    made.take(0.1)
    assert made.assign(0.1) == [(a, 1)]


def test_one_worker_of_four_three_times_slower_costs_little():
    def seconds(worker, number):
        return 0.12 if worker.name == "d" else 0.04

    # As many as all four together make; the bound is a trainer that never waits.
    rate = 3 / 0.04 + 1 / 0.12
    num_batches = 600
    step = 1.02 / rate
    run = Simulation(scheduler(*"abcd"), seconds=seconds, step=step, num_batches=num_batches)
    assert run.run() <= num_batches * step * 1.03 + 0.3
    assert run.taken == list(range(num_batches))


def test_a_worker_that_hangs_costs_one_wait():
    def seconds(worker, number):
        return math.inf if worker.name == "d" and number > 20 else 0.02

    run = Simulation(scheduler(*"abcd"), seconds=seconds, step=0.01, num_batches=300)
    assert run.run() < 300 * 0.01 + 2.0 + 0.5
    assert run.taken == list(range(300))


def test_while_a_batch_arrives_its_worker_gets_one_more_order():
    schedule = scheduler("a", supply=10)
    (a,) = schedule.workers
    assert schedule.assign(0.0) == [(a, 0), (a, 1)]
    schedule.comes(a, 0)
    assert schedule.assign(0.1) == [(a, 2)]
    schedule.comes(a, 0)
    assert schedule.assign(0.1) == []
    schedule.arrived(a, 0, nbytes=MB, now=0.2)
    assert schedule.assign(0.2) == []
    schedule.arrived(a, 1, nbytes=MB, now=0.3)
    assert schedule.assign(0.3) == [(a, 3)]


@settings(max_examples=50)
@given(
    num_workers=st.integers(1, 6),
    num_batches=st.integers(0, 60),
    max_mb=st.integers(1, 40),
    losses=st.integers(0, 8),
    seed=st.integers(0, 1 << 30),
)
def test_any_epoch_is_delivered_once_and_in_order(num_workers, num_batches, max_mb, losses, seed):
    draw = random.Random(seed)
    names = list(range(num_workers))
    schedule = scheduler(*names, max_bytes=max_mb * MB)
    paces = {}

    def seconds(worker, number):
        base = paces.setdefault(worker, draw.choice([0.01, 0.05, 0.3]))
        return draw.choice([base, base, base * draw.random() * 3, base * 100])

    run = Simulation(
        schedule, seconds=seconds, step=draw.choice([0.0, 0.02, 0.2]), num_batches=num_batches
    )

    def lose_one():
        alive = list(schedule.workers)
        if alive:
            run.lose(draw.choice(alive))
        schedule.join(Worker("new"))

    for _ in range(losses):
        run.at(draw.random() * 3, lose_one)
    run.run()
    assert run.taken == list(range(num_batches))
    assert all(len(pace.asked) <= ORDERS_PER_WORKER for pace in schedule.workers)
    # Late batches are asked for twice, and what is begun stays so.
    assert run.most_held <= max(max_mb + ORDERS_PER_WORKER * num_workers, 1) * MB
