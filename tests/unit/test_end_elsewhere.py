"""Objects that may wait as they end do not do so in a thread of stoker's."""

import gc
import threading

import pytest

from stoker.feed.abandoned_workers import end_elsewhere
from support.processes import until

DEADLINE_SECONDS = 60.0


class Waiting:
    """An object whose end waits, as that of torch's iterators does for their workers."""

    def __init__(self, is_told: threading.Event, ended_in: list[threading.Thread]) -> None:
        self.is_told = is_told
        self.ended_in = ended_in

    def __del__(self) -> None:
        assert self.is_told.wait(DEADLINE_SECONDS)
        self.ended_in.append(threading.current_thread())


end_elsewhere(Waiting)


@pytest.fixture(autouse=True)
def _only_the_thread_looks_for_cycles():
    gc.disable()
    yield
    gc.enable()


def leave_in_a_cycle(is_told: threading.Event, ended_in: list[threading.Thread]) -> None:
    cycle: list[object] = [Waiting(is_told, ended_in)]
    cycle.append(cycle)


def collected_by(name: str) -> threading.Thread:
    thread = threading.Thread(target=gc.collect, name=name, daemon=True)
    thread.start()
    return thread


def test_a_thread_of_stokers_waits_for_nothing_that_it_finds():
    is_told = threading.Event()
    ended_in: list[threading.Thread] = []
    for _ in range(3):
        leave_in_a_cycle(is_told, ended_in)
    thread = collected_by("stoker-feed")
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert ended_in == []
    is_told.set()
    until(lambda: len(ended_in) == 3, "all three have ended", seconds=DEADLINE_SECONDS)
    assert thread not in ended_in


def test_a_thread_of_the_script_waits_as_before():
    is_told = threading.Event()
    is_told.set()
    ended_in: list[threading.Thread] = []
    leave_in_a_cycle(is_told, ended_in)
    thread = collected_by("validation")
    thread.join(DEADLINE_SECONDS)
    assert ended_in == [thread]


def test_what_is_found_ends_also_where_no_thread_can_be_started(monkeypatch):
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def start_but_one(thread):
        if thread.name == "ends-workers" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_one)
    is_told = threading.Event()
    is_told.set()
    ended_in: list[threading.Thread] = []
    for _ in range(2):
        leave_in_a_cycle(is_told, ended_in)
    collected_by("stoker-feed").join(DEADLINE_SECONDS)
    until(lambda: len(ended_in) == 2, "both have ended", seconds=DEADLINE_SECONDS)
    assert refused
    # The refused one is kept by this test alone.
    refused.clear()
