import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stoker.profile.rank_results import Evidence
from stoker.profile.states import MIN_KNOCKS
from stoker.profile.steps import KNOCK_SECONDS, StepWatch


@contextlib.contextmanager
def running(target: Callable[[threading.Event], None]) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=target, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


rest = threading.Event.wait


def watched() -> Evidence:
    """Returns what a watch sees in epochs of 12 steps, as many as it takes for MIN_KNOCKS."""
    watch = StepWatch()
    deadline = time.monotonic() + 60.0
    while watch.result().knocks < MIN_KNOCKS:
        assert time.monotonic() < deadline, f"{watch.result().knocks} knocks"
        for _ in range(12):
            watch.asked()
            watch.got(now=time.monotonic(), wait=0.0, receive=0.0, is_counted=True)
            time.sleep(2 * KNOCK_SECONDS)
        watch.epoch_ended()
    return watch.result()


@pytest.mark.alone
def test_a_gil_probe_waits_where_another_thread_holds_the_interpreter_lock_and_not_else():
    with running(spin):
        held = watched()
    with running(rest):
        free = watched()
    assert held.held_share > 0.5
    assert held.other_threads_seconds > 0.05 * held.seconds > free.other_threads_seconds
    assert free.held_share < 0.3
    assert free.idle_seconds > 0.5 * free.seconds


@contextlib.contextmanager
def timer_slack(seconds: float) -> Iterator[None]:
    """Timers of this thread, and of those that it starts, wake them so late."""
    prctl, set_slack = ctypes.CDLL(None).prctl, 29
    assert prctl(set_slack, ctypes.c_ulong(round(seconds * 1e9))) == 0
    try:
        yield
    finally:
        prctl(set_slack, ctypes.c_ulong(0))


@pytest.mark.alone
def test_a_machine_that_wakes_threads_late_does_not_look_like_a_held_lock():
    with timer_slack(0.01), running(rest):
        free = watched()
    assert free.held_share < 0.3
