import pickle
import threading

import pytest

from stoker.errors import MissingExtraError, ServiceError, UsageError
from stoker.repeat import repeated, within
from stoker.units import (
    digits,
    duration,
    ms,
    percent,
    percentage,
    size,
    usd,
)
from support.aws_answers import Clock


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (ms(0.000061), "0.0610 ms"),
        (ms(0.9996), "1.00 s"),
        (size(7e12), "7.00 TB"),
        (duration(192), "3 min 12 s"),
        (percentage(-0.08, signed=True), "-8%"),
        (percent(0.022), "2.2%"),
        (percent(0.0001), "0%"),
        (digits(0.000812345, 3), "0.000812"),
        (digits(-2.5, 2), "-2.5"),
        (usd(12345.678), "$12,345.68"),
        (usd(None), "not known"),
    ],
)
def test_figures_keep_what_is_significant_and_are_never_in_powers_of_ten(written, text):
    assert written == text


GIT = {"vcs_info": {"vcs": "git", "commit_id": "abc"}}


def test_a_missing_extra_is_an_import_error_that_travels_between_processes():
    err = MissingExtraError.of(ImportError(name="kfp"), extra="kubeflow")
    again = pickle.loads(pickle.dumps(err))
    assert isinstance(again, ImportError)
    assert isinstance(again, UsageError)
    assert again.what == "kfp is not installed"
    assert "[kubeflow]" in again.fix


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


def test_a_wait_has_a_deadline_and_hands_on_errors():
    release = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            within(0.05, release.wait)
    finally:
        release.set()
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
