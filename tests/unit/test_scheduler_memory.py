"""Waiting batches of all loaders have one budget of bytes, and one batch always goes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed import memory
from stoker.feed.memory import allowance
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.host import machine
from stoker.records import FeedSettings
from support.property_tests import examples

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
def test_all_loaders_together_stay_within_the_budget_and_each_comes_to_its_end(
    sizes, credits, total, seed
):
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
                lambda one=loader, beside=others: one.ask(allowance(total, others=beside)),
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
    feed = FeedSettings(max_bytes=1 << 20)
    assert memory.max_message_bytes(feed) > machine.host_bytes()
