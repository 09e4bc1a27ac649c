"""What a user's code makes in a forked child: none stays behind."""

import os
import time

import pytest

from stoker.feed.wire import in_child


class StoppedError(Exception):
    pass


def stop(*_, **__):
    raise StoppedError


def hang():
    time.sleep(60)
    yield b""


def test_no_child_stays_where_a_signals_handler_raises(monkeypatch):
    forked: list[int] = []
    fork = in_child._fork

    def note_fork():
        pid = fork()
        if pid:
            forked.append(pid)
        return pid

    # As where a handler raises while the child is waited for.
    monkeypatch.setattr(in_child, "_read", stop)
    monkeypatch.setattr(in_child, "_fork", note_fork)
    with pytest.raises(StoppedError):
        in_child.last_made(hang, max_seconds=60.0)
    (pid,) = forked
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
