"""Checks the schedule without processes: in virtual time, with any order of events."""

import heapq
import math
import random
from collections.abc import Hashable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.feed import memory
from stoker.feed.agent.dispatch import credits_for
from stoker.feed.memory import allowance, num_bytes
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.host import machine
from stoker.records import FeedSettings
from support.property_tests import examples

BIG = 1 << 40


def simulate(*, costs, step_seconds, batches, credits=2):
    schedule = BatchScheduler(max_bytes=BIG)
    for peer in range(len(costs)):
        schedule.grant(peer, credits)
    free_at = [0.0] * len(costs)
    events: list[tuple[float, int, int, int]] = []  # (time, kind, peer, number)
    now, ready, delivered, supplied, busy_until = 0.0, set[int](), 0, 0, 0.0

    def push() -> None:
        nonlocal supplied
        more = min(schedule.wanted(now), batches - supplied)
        schedule.supply(more)
        supplied += more
        if supplied == batches:
            schedule.mark_complete()
        schedule.overdue(now)
        for peer, number in schedule.assign(now):
            free_at[peer] = max(free_at[peer], now) + costs[peer](number)
            heapq.heappush(events, (free_at[peer], 0, peer, number))

    push()
    while delivered < batches:
        while schedule.head in ready and busy_until <= now:
            ready.discard(schedule.head)
            schedule.take(now)
            delivered += 1
            busy_until = now + step_seconds
            heapq.heappush(events, (busy_until, 1, 0, 0))
            push()
        assert events, f"deadlock at batch {schedule.head}"
        now, kind, peer, number = heapq.heappop(events)
        if kind == 0 and schedule.arrived(peer, number, frame_bytes=1000, now=now):
            ready.add(number)
        push()
    return now / batches


def uneven(number: int) -> float:
    return random.Random(number).expovariate(1 / 0.06)


def starved(number: int) -> float:
    # As a local worker next to a busy trainer.
    return 0.4 if random.Random(number).random() < 0.3 else 0.04


EQUAL, SLOW = (lambda n: 0.06), (lambda n: 0.18)
MEAN_STARVED = sum(starved(number) for number in range(1000)) / 1000


@pytest.mark.parametrize(
    ("costs", "step_seconds", "bound"),
    [
        *(([EQUAL] * workers, 0.02, 1.02 * max(0.02, 0.06 / workers)) for workers in (1, 2, 3, 6)),
        # The bound is the step itself: together they make a batch in 18 ms.
        ([EQUAL] * 3 + [SLOW], 0.02, 1.03 * 0.02),
        ([EQUAL] * 3 + [SLOW], 0.001, 1.05 / (3 / 0.06 + 1 / 0.18)),
        ([lambda n: 0.04] * 2 + [starved], 0.012, 1.05 / (2 / 0.04 + 1 / MEAN_STARVED)),
        ([lambda n: 0.04] * 2 + [starved], 0.018, 1.05 * 0.018),
    ],
)
def test_steps_are_as_short_as_the_workers_rates_allow(costs, step_seconds, bound):
    assert simulate(costs=costs, step_seconds=step_seconds, batches=1000) <= bound


@pytest.mark.parametrize(("workers", "excess"), [(3, 1.03), (4, 1.02)])
def test_credits_that_follow_the_variation_bring_exponential_costs_to_the_bound(workers, excess):
    costs = [uneven(n) for n in range(600)]
    bound = max(0.02, sum(costs) / len(costs) / workers)
    fixed, adapted = (
        simulate(costs=[uneven] * workers, step_seconds=0.02, batches=600, credits=credits) / bound
        for credits in (2, credits_for(costs, at_least=2))
    )
    assert adapted < fixed <= excess


def made_in_turn(schedule: BatchScheduler, seconds: Sequence[float], frame_bytes: int = 1) -> float:
    """Has a peer "a" make a batch after the other, and returns the time when all are taken."""
    now = 0.0
    for number, latency in enumerate(seconds):
        schedule.supply(1)
        assert schedule.assign(now) == [("a", number)]
        now += latency
        schedule.arrived("a", number, frame_bytes=frame_bytes, now=now)
        schedule.take(now)
    return now


def test_the_prefetch_window_reaches_further_where_batches_vary_and_only_there():
    def window_of(costs: Sequence[float]) -> int:
        schedule = BatchScheduler(max_bytes=BIG)
        schedule.grant("a", 1)
        return schedule.window(made_in_turn(schedule, costs))

    assert window_of([0.1] * 40) in (3 + 1, 3 + 2)
    # p95 is 1.0 s; the mean of the interval, without its longest, 0.2 s.
    assert window_of([1.0, *[0.1] * 7] * 5) in range(3 + 5 + 8, 3 + 5 + 13)
    # One cold start is no habit.
    assert window_of([3.0, *[0.1] * 30]) <= 3 + 2


def running(peer: Hashable, step_seconds: float) -> tuple[BatchScheduler, float, list[int]]:
    """Returns a schedule under way, its time, and how many batches each turn asked for."""
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant(peer, 4)
    now, flying, sizes = 0.0, list[int](), []
    for _ in range(60):
        schedule.supply(schedule.wanted(now))
        made = schedule.assign(now)
        flying += [number for _, number in made]
        sizes.append(len(made))
        now += step_seconds
        schedule.arrived(peer, flying.pop(0), frame_bytes=1, now=now)
        schedule.take(now)
    return schedule, now, sizes[20:]


@pytest.mark.parametrize(
    ("peer", "step_seconds", "expected"),
    # Children of this process cost no message.
    [("a", 0.0005, {0, 2}), ("a", 0.002, {1}), (("local",), 0.0005, {1})],
)
def test_where_steps_are_shorter_than_a_millisecond_a_host_is_asked_for_two_at_once(
    peer, step_seconds, expected
):
    assert set(running(peer, step_seconds)[2]) == expected


def test_what_was_lost_is_retried_at_once_however_short_the_steps():
    schedule, now, _ = running("a", 0.0005)
    schedule.grant("b", 1)
    ((peer, number),) = [ask for ask in schedule.assign(now) if ask[0] == "b"]
    assert len(schedule.peers["a"].asked) == 3
    schedule.mark_lost(peer)
    assert ("a", number) in schedule.assign(now)


@given(st.lists(st.floats(0.001, 20.0), min_size=1, max_size=40), st.floats(0.0, 200.0))
def test_the_head_is_asked_for_elsewhere_after_2_s_or_4_times_p95_and_not_before(latencies, waited):
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("a", 1)
    now = made_in_turn(schedule, latencies)
    schedule.supply(1)
    schedule.assign(now)
    schedule.grant("b", 1)
    recent = sorted(latencies[-32:])
    due = max(2.0, 4 * recent[math.ceil(0.95 * len(recent)) - 1])
    if abs(waited - due) > 1e-6:
        assert 0 <= schedule.next_check(now + waited) <= max(0.0, due - waited) + 1e-6
        again = schedule.overdue(now + waited)
        assert again == ([len(latencies)] if waited > due else [])
        assert schedule.assign(now + waited) == [("b", n) for n in again]


def test_batch_of_a_hung_peer_is_asked_for_elsewhere_after_its_deadline():
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("hung", 1)
    schedule.grant("well", 1)
    schedule.supply(10)
    asked = dict(schedule.assign(0.0))
    hung = asked["hung"]
    now = 0.1
    number = asked["well"]
    while True:
        schedule.arrived("well", number, frame_bytes=1, now=now)
        if schedule.head == number != hung:
            schedule.take(now)
        new = dict(schedule.assign(now))
        if "well" not in new:
            break
        number = new["well"]
        now += 0.1
    assert schedule.head == hung == 0
    assert schedule.overdue(1.9) == []
    assert schedule.next_check(1.9) == pytest.approx(0.1)
    assert schedule.overdue(2.1) == [0]
    assert schedule.assign(2.1) == [("well", 0)]
    assert schedule.arrived("well", 0, frame_bytes=1, now=2.2)
    assert not schedule.arrived("hung", 0, frame_bytes=1, now=9.0)


def test_first_batches_go_to_different_peers_and_those_of_a_lost_one_come_before_new_ones():
    schedule = BatchScheduler(max_bytes=BIG)
    for peer in "abc":
        schedule.grant(peer, 2)
    schedule.supply(3)
    assert sorted(schedule.assign(0.0)) == [("a", 0), ("b", 1), ("c", 2)]
    schedule.supply(4)
    schedule.mark_lost("a")
    assert [number for _, number in schedule.assign(0.0)] == [0, 3]


def test_late_duplicates_and_answers_that_were_not_asked_for_are_refused():
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("a", 1)
    schedule.supply(5)
    schedule.assign(0.0)
    assert not schedule.arrived("a", 4, frame_bytes=1, now=1.0)
    assert schedule.arrived("a", 0, frame_bytes=1, now=1.0)
    assert not schedule.arrived("b", 0, frame_bytes=1, now=1.0)
    schedule.take(1.0)
    assert not schedule.arrived("b", 0, frame_bytes=1, now=2.0)


def test_nobody_is_asked_twice_and_what_two_peers_refuse_has_no_more_retries():
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("a", 2)
    schedule.supply(1)
    assert schedule.assign(0.0) == [("a", 0)]
    assert schedule.overdue(1000.0) == []
    assert schedule.next_check(1000.0) is None
    schedule.grant("b", 1)
    schedule.grant("c", 1)
    assert not schedule.mark_failed("a", 0)
    ((second, _),) = schedule.assign(0.0)
    assert second != "a"
    assert schedule.mark_failed(second, 0)


def test_batch_that_a_leaving_peer_refuses_goes_elsewhere():
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("a", 1)
    schedule.supply(1)
    schedule.assign(0.0)
    schedule.mark_draining("a")
    assert not schedule.mark_failed("a", 0)
    schedule.grant("b", 1)
    assert schedule.assign(0.0) == [("b", 0)]


@pytest.mark.parametrize("lost", ["b", "ab"])
def test_what_a_peer_refused_it_is_asked_for_again_where_the_other_one_is_lost(lost):
    schedule = BatchScheduler(max_bytes=BIG)
    for peer in "ab":
        schedule.grant(peer, 1)
    schedule.supply(1)
    assert schedule.assign(0.0) == [("a", 0)]
    assert not schedule.mark_failed("a", 0)
    assert schedule.assign(1.0) == [("b", 0)]
    for peer in lost:
        schedule.mark_lost(peer)
    # It may be back: under its name comes another process.
    schedule.grant("a", 1)
    assert schedule.assign(2.0) == [("a", 0)]
    # Nobody else is there: no third time.
    assert schedule.mark_failed("a", 0)


def test_what_two_peers_refused_while_a_third_one_made_it_comes_though_that_one_is_lost():
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("a", 1)
    schedule.supply(1)
    schedule.assign(0.0)
    for peer in "bc":
        schedule.grant(peer, 1)
        schedule.overdue(1000.0 + ord(peer) * 1000)
        assert schedule.assign(1000.0 + ord(peer) * 1000) == [(peer, 0)]
    assert not schedule.mark_failed("a", 0)
    assert not schedule.mark_failed("b", 0)
    schedule.mark_lost("c")
    ((first, _),) = schedule.assign(1e6)
    assert not schedule.mark_failed(first, 0)
    ((second, _),) = schedule.assign(1e6)
    assert {first, second} == {"a", "b"}
    assert schedule.mark_failed(second, 0)


def test_prefetch_window_is_bounded_by_bytes_whatever_the_credits():
    schedule = BatchScheduler(max_bytes=5000)
    schedule.grant("a", 4)
    now = made_in_turn(schedule, [0.9] * 40, frame_bytes=1000)
    for credits in (4, 9):
        schedule.grant("a", credits)
        assert schedule.window(now) == 5
    schedule.max_bytes = 1
    assert schedule.window(now) == 1


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        batches=st.integers(0, 30),
        max_bytes=st.sampled_from([1, 3000, BIG]),
        is_rescued=st.booleans(),
    )
    def start(self, batches: int, max_bytes: int, is_rescued: bool) -> None:
        self.is_rescued = is_rescued
        self.schedule = BatchScheduler(max_bytes=max_bytes)
        self.batches = batches
        self.supplied = 0
        self.now = 0.0
        self.flying: set[tuple[str, int]] = set()
        self.zombies: set[tuple[str, int]] = set()
        self.credits: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.ready: set[int] = set()
        self.delivered: list[int] = []
        self.step()

    def step(self) -> None:
        more = min(self.schedule.wanted(self.now), self.batches - self.supplied)
        self.schedule.supply(more)
        self.supplied += more
        if self.supplied == self.batches:
            self.schedule.mark_complete()
        for ask in self.schedule.assign(self.now):
            assert ask not in self.flying, "asked twice of the same peer"
            self.flying.add(ask)
        for peer in self.credits:
            assert sum(p == peer for p, _ in self.flying) <= self.peak[peer]

    @rule(peer=st.sampled_from("abcd"), credits=st.integers(1, 5))
    def grant(self, peer: str, credits: int) -> None:
        self.peak[peer] = max(self.peak.get(peer, 0), credits)
        self.credits[peer] = credits
        self.schedule.grant(peer, credits)
        self.step()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), seconds=st.floats(0, 20))
    def arrive(self, data: st.DataObject, seconds: float) -> None:
        peer, number = data.draw(st.sampled_from(sorted(self.flying)))
        self.now += seconds
        self.flying.discard((peer, number))
        if self.schedule.arrived(peer, number, frame_bytes=1000, now=self.now):
            assert number not in self.ready
            self.ready.add(number)
        self.step()

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def arrive_from_a_lost_peer(self, data: st.DataObject) -> None:
        peer, number = data.draw(st.sampled_from(sorted(self.zombies)))
        self.zombies.discard((peer, number))
        if (peer, number) not in self.flying and self.schedule.arrived(
            peer, number, frame_bytes=1000, now=self.now
        ):
            self.ready.add(number)
        self.step()

    @precondition(lambda self: self.credits)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.lose_one(data.draw(st.sampled_from(sorted(self.credits))))

    def lose_one(self, peer: str) -> None:
        del self.credits[peer]
        gone = {ask for ask in self.flying if ask[0] == peer}
        self.flying -= gone
        self.zombies |= gone
        self.schedule.mark_lost(peer)
        self.step()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        peer, number = data.draw(st.sampled_from(sorted(self.flying)))
        self.flying.discard((peer, number))
        if self.schedule.mark_failed(peer, number) and self.schedule.arrived(
            peer, number, frame_bytes=0, now=self.now
        ):
            self.ready.add(number)
        self.step()

    @rule(seconds=st.floats(0, 50))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.schedule.overdue(self.now)
        self.step()

    @precondition(lambda self: self.schedule.head in self.ready)
    @rule()
    def take(self) -> None:
        self.ready.discard(self.schedule.head)
        self.delivered.append(self.schedule.head)
        self.schedule.take(self.now)
        self.step()

    @invariant()
    def order_is_kept(self) -> None:
        if hasattr(self, "delivered"):
            assert self.delivered == list(range(len(self.delivered)))

    def teardown(self) -> None:
        if not hasattr(self, "schedule"):
            return
        # A new host is enough, where the others hang; so is one of those, where they are lost.
        last = "rescue"
        if self.is_rescued or not self.credits:
            self.grant(last, 2)
        else:
            last, *others = sorted(self.credits)
            for peer in others:
                self.lose_one(peer)
        for _ in range(10 * self.batches + 10):
            self.now += 100.0
            self.schedule.overdue(self.now)
            self.step()
            for ask in [a for a in sorted(self.flying) if a[0] == last]:
                self.flying.discard(ask)
                if self.schedule.arrived(*ask, frame_bytes=1, now=self.now):
                    self.ready.add(ask[1])
            while self.schedule.head in self.ready:
                self.ready.discard(self.schedule.head)
                self.delivered.append(self.schedule.head)
                self.schedule.take(self.now)
        assert self.schedule.is_over()
        assert self.delivered == list(range(self.batches))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=40)


NUM_BATCHES = 30


class Loader:
    def __init__(self, *, batch_bytes: int, credits: int) -> None:
        self.batch_bytes = batch_bytes
        self.schedule = BatchScheduler(max_bytes=0)
        self.schedule.grant("host", credits)
        self.asked: list[int] = []
        self.ready: set[int] = set()
        self.supplied = 0

    def ask(self, max_bytes: int) -> None:
        schedule = self.schedule
        schedule.max_bytes = max_bytes
        more = min(schedule.wanted(0.0), NUM_BATCHES - self.supplied)
        self.supplied += more
        schedule.supply(more)
        self.asked += [number for _, number in schedule.assign(0.0)]

    def arrive(self) -> None:
        if self.asked:
            number = self.asked.pop(0)
            self.schedule.arrived("host", number, frame_bytes=self.batch_bytes, now=0.0)
            self.ready.add(number)

    def take(self) -> None:
        if self.schedule.head in self.ready:
            self.ready.discard(self.schedule.head)
            self.schedule.take(0.0)

    @property
    def is_over(self) -> bool:
        return self.schedule.head == NUM_BATCHES

    @property
    def waiting_bytes(self) -> int:
        return (len(self.asked) + len(self.ready)) * self.batch_bytes


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=4),
    credits=st.integers(1, 40),
    total=st.integers(1, 20_000),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(120))
def test_loaders_together_stay_in_the_budget_and_each_comes_to_its_end(sizes, credits, total, seed):
    loaders = [Loader(batch_bytes=size, credits=credits) for size in sizes]
    draw = random.Random(seed)
    for _ in range(400 * len(loaders)):
        loader = draw.choice(loaders)
        # One after the other joins, so that those there have taken more than their later part.
        active = [each for each in loaders if each.supplied or each is loader]
        others = [each.schedule for each in active if each is not loader]
        draw.choice(
            [
                loader.arrive,
                loader.take,
                lambda one=loader, beside=others: one.ask(
                    allowance(total, taken=[each.committed_bytes for each in beside])
                ),
            ]
        )()
        one_batch_each = sum(each.batch_bytes for each in active)
        assert sum(each.waiting_bytes for each in active) <= max(total, 0) + one_batch_each
    for loader in loaders:
        for _ in range(3 * NUM_BATCHES):
            loader.ask(0)
            loader.arrive()
            loader.take()
    assert all(loader.is_over for loader in loaders)


def test_larger_batches_than_those_before_shrink_the_prefetch_window_at_once():
    schedule = BatchScheduler(max_bytes=4 * memory.UNKNOWN_BATCH_BYTES)
    schedule.grant("host", 50)
    # Before their size is known, they do not fill the memory.
    assert schedule.window(0.0) == 4
    schedule.max_bytes = 10_000
    for number, nbytes in enumerate([100, 100, 5000]):
        schedule.supply(1)
        assert schedule.assign(0.0) == [("host", number)]
        schedule.arrived("host", number, frame_bytes=nbytes, now=0.0)
        schedule.take(0.0)
    assert schedule.window(0.0) == 2


def test_default_budget_is_a_quarter_of_the_memory_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{400 << 20}\n")
    monkeypatch.setattr(machine, "memory_groups", lambda: [tmp_path])
    assert memory.max_bytes(FeedSettings()) == 100 << 20
    assert memory.max_bytes(FeedSettings(max_bytes=7)) == 7
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.max_bytes(FeedSettings()) == machine.host_bytes() // 4


def test_a_batch_larger_than_the_budget_still_fits_into_a_message():
    assert memory.max_message_bytes(FeedSettings(max_bytes=1 << 20)) > machine.host_bytes()


class Unwilling:
    dtype = "float32"

    @property
    def nbytes(self) -> int:
        raise RuntimeError("on another device")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 4), 64),
        (torch.zeros(3, dtype=torch.bfloat16), 6),
        (np.zeros(3, np.uint8), 3),
        ({"x": [torch.zeros(2), (np.zeros(1), "name")], "y": 7}, 16),
        (SimpleNamespace(x=torch.zeros(2), y=torch.zeros(1), name="graph"), 12),
        # Two indices of 8 bytes and a value of 4 for each of three elements.
        (torch.eye(3).to_sparse(), 3 * (16 + 4)),
        ([[torch.eye(3).to_sparse(), [], [[torch.zeros(1)]]], None], 64),
        *((other, 0) for other in (Unwilling(), "text", b"bytes", None, 3.5)),
    ],
)
def test_the_bytes_of_a_batch_are_those_of_its_tensors(batch, size):
    assert num_bytes(batch) == size


def test_a_batch_that_holds_itself_ends():
    batch: list[object] = [torch.zeros(1)]
    batch.append(batch)
    assert num_bytes(batch) >= 4


def test_the_last_batches_are_told_to_workers_that_the_trainer_waits_for():
    schedule = BatchScheduler(max_bytes=BIG)
    for peer in ("a", "b"):
        # Of two workers each.
        schedule.grant(peer, 4)
    schedule.supply(6)
    assert not any(schedule.is_among_last(number) for number in range(6))
    schedule.mark_complete()
    assert [schedule.is_among_last(number) for number in range(6)] == [False] * 2 + [True] * 4


def schedule_of_last_batches(num_taken: int) -> BatchScheduler:
    """Returns one of two workers, whose trainer found the first batches there, and has taken them.

    Of two more the second is there.
    """
    schedule = BatchScheduler(max_bytes=BIG)
    schedule.grant("a", 4)
    schedule.supply(num_taken + 2)
    schedule.mark_complete()
    for number in range(num_taken + 1):
        schedule.assign(0.0)
        schedule.arrived("a", number, frame_bytes=1, now=1.0)
    for _ in range(num_taken):
        schedule.take(1.0)
    return schedule


def test_the_last_batches_are_told_behind_one_that_took_long():
    # Several were there at once: the trainer waited for the first of them.
    schedule = schedule_of_last_batches(num_taken=4)
    schedule.mark_waiting()
    schedule.take(2.0)
    assert schedule.is_among_last(5)


def test_the_last_batches_are_not_told_where_the_trainer_does_not_wait():
    schedule = schedule_of_last_batches(num_taken=4)
    assert not schedule.is_among_last(5)
