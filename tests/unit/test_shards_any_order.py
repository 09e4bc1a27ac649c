"""Shards give every batch once, in the order of torch's loader, whatever happens in any order."""

import itertools
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.feed.trainer.shards import MAX_LOSSES_IN_A_ROW, ShardScheduler
from support.property_tests import examples

Ask = tuple[str, int, int]


def torchs_order(lengths: list[int]) -> list[int]:
    rounds = range(max(lengths, default=0))
    return [p * len(lengths) + s for p in rounds for s, n in enumerate(lengths) if p < n]


def torchs_asks(lengths: list[int], *, prefetch: int, taken: int) -> list[int]:
    """Returns what torch's loader has asked of each worker once `taken` batches are returned.

    As its code does it, where batches arrive in their order.
    """
    asked, is_active, tasks = [0] * len(lengths), [True] * len(lengths), deque[tuple[int, int]]()
    turns = itertools.cycle(range(len(lengths)))

    def put() -> None:
        worker = next((w for w in itertools.islice(turns, len(lengths)) if is_active[w]), None)
        if worker is not None:
            tasks.append((worker, asked[worker]))
            asked[worker] += 1

    for _ in range(prefetch * len(lengths)):
        put()
    while taken:
        worker, position = tasks.popleft()
        if not is_active[worker]:
            continue
        is_active[worker] = position < lengths[worker]
        taken -= is_active[worker]
        put()
    return asked


def digest_of(shard: int, count: int) -> int:
    return 1000 * shard + count if count else 0


class AnyOrderOfShards(RuleBasedStateMachine):
    @initialize(
        lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
        prefetch=st.integers(1, 3),
        max_bytes=st.sampled_from([1, 25, 1000]),
        persists=st.booleans(),
    )
    def start(self, lengths: list[int], prefetch: int, max_bytes: int, persists: bool) -> None:
        self.lengths, self.prefetch = lengths, prefetch
        self.schedule = ShardScheduler(
            num_shards=len(lengths), prefetch=prefetch, max_bytes=max_bytes, persists=persists
        )
        self.now = 0.0
        self.peers: set[str] = set()
        self.deaths = [0] * len(lengths)
        self.persists = persists
        self.epochs: list[list[int]] = []
        self.begin()

    def begin(self) -> None:
        self.schedule.begin()
        self.flying: set[Ask] = set()
        self.late: set[Ask] = set()
        self.arrived: set[int] = set()
        self.delivered: list[int] = []
        self.step()

    def step(self) -> None:
        for peer, number in self.schedule.assign(self.now):
            start = self.schedule.stream_of(number, shared_seed=None)
            position, shard = divmod(number, len(self.lengths))
            assert peer in self.peers
            assert shard == start.shard
            if self.persists:
                counts = [epoch.num_made for epoch in start.earlier]
                assert counts == [epoch[shard] for epoch in self.epochs]
                assert start.epochs_before == len(self.epochs)
            assert start.digest == digest_of(shard, start.made)
            assert start.made <= position < self.taken_of(shard) + self.prefetch
            ask = (str(peer), number, start.generation)
            assert ask not in self.flying | self.late, "asked twice of the same process"
            self.flying.add(ask)
        for peer in self.peers:
            asked = self.schedule.peers[peer].asked
            assert len(asked) == sum(ask[0] == peer for ask in self.flying)

    def taken_of(self, shard: int) -> int:
        return sum(number % len(self.lengths) == shard for number in self.delivered)

    def answer(self, ask: Ask) -> bool:
        peer, number, generation = ask
        position, shard = divmod(number, len(self.lengths))
        if position >= self.lengths[shard]:
            self.schedule.ended(peer, number, generation=generation)
            return False
        return self.schedule.arrived(
            peer,
            number,
            generation=generation,
            digest=digest_of(shard, position + 1),
            frame_bytes=10,
            now=self.now,
        )

    @rule(peer=st.sampled_from("abc"), credits=st.integers(1, 5))
    def grant(self, peer: str, credits: int) -> None:
        self.peers.add(peer)
        self.schedule.grant(peer, credits)
        self.step()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(sorted(self.flying)))
        self.flying.discard(ask)
        if self.answer(ask):
            assert ask[1] not in self.arrived
            self.arrived.add(ask[1])
            if self.schedule.is_there(ask[1]):
                self.deaths[ask[1] % len(self.lengths)] = 0
        self.step()

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive_from_a_process_that_was_lost(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(sorted(self.late)))
        self.late.discard(ask)
        assert not self.answer(ask)
        self.step()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        _, dead, generation = data.draw(st.sampled_from(sorted(self.flying)))
        shard = dead % len(self.lengths)
        lost = {
            ask
            for ask in self.flying
            if ask[1] % len(self.lengths) == shard and ask[2] == generation
        }
        hopeless = [self.schedule.mark_failed(*ask[:2], generation=ask[2]) for ask in sorted(lost)]
        self.flying -= lost
        self.forget_what_overtook(lost)
        self.deaths[shard] += 1
        assert any(hopeless) <= (self.deaths[shard] >= MAX_LOSSES_IN_A_ROW)
        self.step()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), drains=st.booleans())
    def lose_a_host(self, data: st.DataObject, drains: bool) -> None:
        peer = data.draw(st.sampled_from(sorted(self.peers)))
        self.peers.discard(peer)
        lost = {ask for ask in self.flying if ask[0] == peer}
        self.flying -= lost
        self.late |= lost
        if drains:
            self.schedule.mark_draining(peer)
        self.schedule.mark_lost(peer)
        self.forget_what_overtook(lost)
        self.step()

    def forget_what_overtook(self, lost: set[Ask]) -> None:
        shards = {ask[1] % len(self.lengths) for ask in lost}
        self.arrived -= {
            number
            for number in self.arrived
            if number % len(self.lengths) in shards and not self.schedule.is_there(number)
        }

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        assert self.schedule.overdue(self.now) == []
        self.step()

    @precondition(lambda self: self.schedule.is_there(self.schedule.head))
    @rule()
    def take(self) -> None:
        assert self.schedule.head in self.arrived
        self.delivered.append(self.schedule.head)
        self.schedule.take(self.now)
        self.step()

    @precondition(lambda self: self.flying)
    @rule(rounds=st.integers(1, 6))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.step()
            for ask in sorted(self.flying):
                self.flying.discard(ask)
                if self.answer(ask):
                    self.arrived.add(ask[1])
                    self.deaths[ask[1] % len(self.lengths)] = 0
            while self.schedule.is_there(self.schedule.head) and not self.schedule.is_over():
                self.take()

    @rule()
    def leave_the_epoch(self) -> None:
        taken = len(self.delivered)
        self.epochs.append(torchs_asks(self.lengths, prefetch=self.prefetch, taken=taken))
        self.schedule.begin()
        self.schedule.mark_complete()
        assert self.schedule.is_over()
        assert self.schedule.assign(self.now) == []
        self.begin()

    @invariant()
    def order_is_kept(self) -> None:
        if hasattr(self, "delivered"):
            assert self.delivered == torchs_order(self.lengths)[: len(self.delivered)]

    def teardown(self) -> None:
        if not hasattr(self, "schedule"):
            return
        self.now += 100.0
        self.grant("rescue", 2)
        self.now += 100.0
        self.go_on(rounds=4 * sum(self.lengths) + 20)
        assert self.schedule.is_over()
        assert self.delivered == torchs_order(self.lengths)


TestAnyOrderOfShards = AnyOrderOfShards.TestCase
TestAnyOrderOfShards.settings = settings(max_examples=examples(60), stateful_step_count=40)
