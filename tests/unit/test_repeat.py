import threading

import pytest

from stoker.errors import ServiceError
from stoker.repeat import repeated, within
from support.aws_answers import Clock


class Faltering:
    def __init__(self, times, **facts):
        self.left = times
        self.facts = {"kind": "away", **facts}

    def __call__(self):
        if self.left == 0:
            return "answer"
        self.left -= 1
        raise ServiceError(f"failed, {self.left} left", **self.facts)


@pytest.fixture
def clock():
    return Clock()


def call(service, clock, **options):
    return repeated(service, sleep=clock.sleep, clock=clock, **options)


def test_a_call_is_repeated_with_longer_pauses_and_told_once(clock):
    told = []
    assert call(Faltering(8), clock, tell=told.append) == "answer"
    assert clock.slept == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [err.what for err in told] == ["failed, 7 left"]


def test_the_last_error_is_raised_after_the_time(clock):
    with pytest.raises(ServiceError, match="failed, 95 left"):
        call(Faltering(100), clock, seconds=10)
    assert clock.now == 10


@pytest.mark.parametrize("kind", ["denied", "missing", "taken", "refused"])
def test_a_final_refusal_is_raised_at_once(clock, kind):
    with pytest.raises(ServiceError):
        call(Faltering(1, kind=kind), clock)
    assert clock.slept == []


def test_the_caller_may_repeat_other_refusals(clock):
    assert call(Faltering(1, kind="denied"), clock, is_passing=lambda err: True) == "answer"


def test_a_service_may_ask_for_a_longer_pause(clock):
    assert call(Faltering(1, retry_after_seconds=120.0), clock) == "answer"
    assert clock.slept == [120]


def test_a_wait_has_a_deadline_and_hands_on_errors():
    release = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            within(0.05, release.wait)
    finally:
        release.set()
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
