import random

from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.agent.dispatch import (
    MAX_CREDITS_PER_WORKER,
    AgentSession,
    BatchRequest,
    CreditPool,
    Queue,
    credits_for,
)
from stoker.feed.wire.protocol import Make


def session(name="s", *, rank=0):
    return AgentSession(name=name, identity=b"", rank=rank, spec="spec", seeding="batch")


def request(number, *, spec="spec", epoch=0):
    make = Make(session="s", epoch_id=epoch, batch_number=number, index=b"", seed_words=())
    return BatchRequest(session(), spec, "batch", make)


def queued(*requests):
    queue = Queue()
    for one in requests:
        queue.push(one)
    return queue


@given(st.lists(st.integers(0, 50)))
def test_requests_are_served_in_order_of_number_and_then_of_arrival(numbers):
    requests = [request(number) for number in numbers]
    queue = queued(*requests)
    served = [queue.pop(specs={"spec"}) for _ in numbers]
    assert served == sorted(requests, key=lambda r: r.batch_number)
    assert queue.pop(specs={"spec"}) is None


def test_a_request_waits_for_its_own_spec():
    first, second = request(0, spec="a"), request(1, spec="b")
    queue = queued(first, second)
    assert queue.pop(specs={"b"}) is second
    assert queue.pop(specs={"b"}) is None
    assert queue.pop(specs={"a"}) is first


def test_a_request_that_cannot_be_taken_yet_keeps_its_place():
    first, second = request(0), request(0)
    queue = queued(first, second)
    assert queue.pop(specs={"spec"}) is first
    queue.push(first)
    assert queue.pop(specs={"spec"}) is first
    assert queue.pop(specs={"spec"}) is second


def test_a_dropped_request_is_not_served():
    dropped, other = request(0), request(1)
    queue = queued(dropped, other)
    dropped.is_cancelled = True
    assert len(queue) == 1
    assert queue.pop(specs={"spec"}) is other


@given(st.integers(1, 64), st.integers(1, 8), st.lists(st.integers(0, 7), min_size=1, max_size=20))
def test_active_sessions_have_a_credit_each_and_ranks_have_equal_parts(workers, per_worker, ranks):
    sessions = [session(str(number), rank=rank) for number, rank in enumerate(ranks)]
    for one in sessions:
        one.asked_at = 100.0
    idle, total = session("idle"), workers * per_worker
    credits = CreditPool(workers=workers, per_worker=per_worker)
    shares = [credits.share(one, [*sessions, idle], 101.0) for one in sessions]
    assert min(shares) >= 1
    assert total <= sum(shares) <= total + len(ranks)
    if total >= len(ranks) * len(set(ranks)):
        parts = [sum(s for s, of in zip(shares, ranks, strict=True) if of == r) for r in set(ranks)]
        assert max(parts) - min(parts) <= 1
        assert sum(parts) == total
    assert credits.share(idle, [idle], 101.0) == total


def test_credits_grow_while_workers_run_dry_up_to_four():
    credits = CreditPool(workers=2, per_worker=2)
    for _ in range(20):
        credits.count(is_dry=False)
    assert not credits.adapt()
    for _ in range(5):
        for _ in range(10):
            credits.count(is_dry=True)
        credits.adapt()
    assert credits.per_worker == 4


@given(st.lists(st.floats(1e-6, 1e3), max_size=64), st.integers(1, 12))
def test_credits_are_between_what_is_set_and_the_bound(costs, at_least):
    credits = credits_for(costs, at_least=at_least)
    assert at_least <= credits <= max(at_least, MAX_CREDITS_PER_WORKER)


def test_credits_follow_the_variation_of_what_batches_cost():
    draw = random.Random(3)
    assert credits_for([0.06] * 64, at_least=2) == 2
    assert credits_for([0.06, 0.18] * 32, at_least=2) in (3, 4)
    assert credits_for([draw.expovariate(1.0) for _ in range(64)], at_least=2) in (4, 5, 6)
    assert credits_for([0.01] * 60 + [1.0] * 4, at_least=2) == MAX_CREDITS_PER_WORKER


def test_credits_rise_at_once_and_come_back_one_by_one():
    credits = CreditPool(workers=2, per_worker=2)
    rises = [
        number
        for number in range(65)
        if credits.add_cost(1.0 if number % 16 == 1 else 0.01, worker=0)
    ]
    # The first is left out, and of the others the longest: there is only one in sixteen.
    assert rises == [24]
    assert credits.per_worker == 8
    assert not credits.adapt()
    for _ in range(64):
        credits.add_cost(0.01, worker=0)
    seen = []
    for _ in range(40):
        credits.adapt()
        seen.append(credits.per_worker)
    assert [seen.count(each) for each in (8, 7, 6, 5, 4, 3)] == [4, 1, 1, 1, 1, 1]
    assert credits.per_worker == 2


def test_the_first_batch_of_each_worker_tells_nothing_of_what_batches_cost():
    credits = CreditPool(workers=4, per_worker=2)
    for number in range(40):
        credits.add_cost(3.0 if number < 4 else 0.01, worker=number % 4)
    assert not credits.adapt()
    assert credits.per_worker == 2
