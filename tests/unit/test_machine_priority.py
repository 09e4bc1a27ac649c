import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoker.host.machine import without_preempting


@pytest.fixture(autouse=True)
def same_policy_after():
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_it_ends_with_the_block_but_for_threads_that_are_started_in_it():
    with ThreadPoolExecutor(1) as threads:
        with contextlib.suppress(KeyError), without_preempting():
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
            threads.submit(int).result(150)
            raise KeyError
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        assert threads.submit(os.sched_getscheduler, 0).result(150) == os.SCHED_BATCH


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
