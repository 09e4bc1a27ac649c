from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.requests import MAX_CREDITS_PER_WORKER, Credits, Queue, Request, Session


def session(name: str = "s") -> Session:
    return Session(
        name=name, identity=b"", rank=0, spec="spec", seeding="batch", plain_identity=b""
    )


def request(number: int, *, spec: str = "spec", epoch: int = 0) -> Request:
    return Request(session(), spec, "batch", epoch, number, b"", ())


@given(st.lists(st.integers(0, 50)))
def test_requests_are_served_in_order_of_number_and_then_of_arrival(numbers: list[int]) -> None:
    queue = Queue()
    requests = [request(number) for number in numbers]
    for one in requests:
        queue.push(one)
    served = [queue.pop(specs=[("spec", "batch")]) for _ in numbers]
    assert served == sorted(requests, key=lambda r: r.number)
    assert queue.pop(specs=[("spec", "batch")]) is None


def test_a_request_waits_for_its_own_spec() -> None:
    queue = Queue()
    first, second = request(0, spec="a"), request(1, spec="b")
    queue.push(first)
    queue.push(second)
    assert queue.pop(specs=[("b", "batch")]) is second
    assert queue.pop(specs=[("b", "batch")]) is None
    assert queue.pop(specs=[("a", "sample")]) is None
    assert queue.pop(specs=[("a", "batch")]) is first


def test_a_dropped_request_is_not_served() -> None:
    queue = Queue()
    dropped, other = request(0), request(1)
    queue.push(dropped)
    queue.push(other)
    dropped.is_dropped = True
    assert len(queue) == 1
    assert queue.pop(specs=[("spec", "batch")]) is other


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 20))
def test_active_sessions_share_the_credits_and_none_has_less_than_one(
    workers: int, per_worker: int, count: int
) -> None:
    sessions = [session(str(i)) for i in range(count)]
    for one in sessions:
        one.asked_at = 100.0
    idle = session("idle")
    credits = Credits(workers=workers, per_worker=per_worker)
    shares = [credits.share(one, [*sessions, idle], 101.0) for one in sessions]
    assert min(shares) >= 1
    assert workers * per_worker <= sum(shares) <= workers * per_worker + count
    assert credits.share(idle, [idle], 101.0) == workers * per_worker


def test_credits_grow_while_workers_run_dry_up_to_the_bound() -> None:
    credits = Credits(workers=2, per_worker=2)
    for _ in range(20):
        credits.count(is_dry=False)
    assert not credits.adapt()
    for _ in range(5):
        for _ in range(10):
            credits.count(is_dry=True)
        credits.adapt()
    assert credits.per_worker == MAX_CREDITS_PER_WORKER
