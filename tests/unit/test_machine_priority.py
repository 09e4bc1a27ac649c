"""Threads interrupt nobody for as long as they say so, and never against the user's will."""

import contextlib
import os
import threading

import pytest

from stoker.host.machine import without_preempting


@pytest.fixture(autouse=True)
def same_policy_after():
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_it_ends_with_the_block():
    with contextlib.suppress(KeyError), without_preempting():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_threads_that_are_started_meanwhile_keep_it():
    seen: list[int] = []
    is_over = threading.Event()

    def look():
        is_over.wait()
        seen.append(os.sched_getscheduler(0))

    with without_preempting():
        thread = threading.Thread(target=look)
        thread.start()
    is_over.set()
    thread.join()
    assert seen == [os.SCHED_BATCH]


@pytest.mark.parametrize("flag", [0, os.SCHED_RESET_ON_FORK])
def test_a_policy_that_somebody_chose_stays(flag):
    own = os.SCHED_BATCH | flag
    os.sched_setscheduler(0, own, os.sched_param(0))
    with without_preempting():
        assert os.sched_getscheduler(0) == own
    assert os.sched_getscheduler(0) == own


@pytest.mark.parametrize("forbidden", ["sched_getscheduler", "sched_setscheduler"])
def test_where_it_is_forbidden_all_goes_on(forbidden, monkeypatch):
    def forbid(*_):
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, forbidden, forbid)
        with without_preempting():
            pass
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
