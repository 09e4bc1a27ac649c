"""Whoever calls the I/O thread is heard, and pays for it only where the I/O thread is asleep."""

import os
import select
import sys

from stoker.feed.timeline import Timeline
from stoker.feed.trainer.session import SharedState
from stoker.logs import Log


def shared() -> SharedState:
    return SharedState(timeline=Timeline(None), log=Log(run="r", host="h", stream=sys.stderr))


def is_rung(feed: SharedState) -> bool:
    return bool(select.select([feed.wake_fd], [], [], 0)[0])


def test_calls_wake_the_io_thread_once_and_only_where_it_sleeps():
    feed = shared()
    feed.wake()
    assert not is_rung(feed)
    assert not feed.sleeps()
    feed.is_up(is_rung=False)
    assert feed.sleeps()
    feed.wake()
    feed.wake()
    assert is_rung(feed)
    assert os.eventfd_read(feed.wake_fd) == 1
    feed.close()


def test_a_wake_up_that_came_too_late_ends_the_next_sleep():
    feed = shared()
    done: list[int] = []
    assert feed.sleeps()
    # It woke for something else, when somebody called.
    feed.post(lambda: done.append(1))
    feed.is_up(is_rung=False)
    feed.run_posted()
    assert done == [1]
    assert feed.sleeps()
    assert is_rung(feed)
    feed.is_up(is_rung=True)
    assert not is_rung(feed)
    feed.close()
