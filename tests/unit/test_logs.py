import atexit
import io
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import logs
from stoker.logs import EventName, Log, parse_line, printable
from support.processes import until


@given(st.text(max_size=40), st.text(min_size=1, max_size=40))
def test_what_is_logged_is_read_back(value, host):
    stream = io.StringIO()
    Log(run="r 1", host=host, stream=stream).event("agent_listening", port=7600, reason=value)
    (line,) = stream.getvalue().splitlines()
    event = parse_line("data/algo-1 " + line)
    assert event.event == "agent_listening"
    assert event.run == "r 1"
    assert event.values["port"] == "7600"
    assert event.values["reason"] == printable(" ".join(value.split()))
    # Control characters do not reach a terminal.
    assert stream.getvalue().rstrip("\n").isprintable()


class Interrupted(io.StringIO):
    """A stream as whose first write a signal comes."""

    is_first = True

    def write(self, text: str) -> int:
        if self.is_first:
            self.is_first = False
            signal.raise_signal(signal.SIGUSR1)
        return super().write(text)


@pytest.mark.timeout(60)
def test_a_signals_handler_may_log_while_a_line_is_written():
    stream = Interrupted()
    log = Log(run="r", host="h", stream=stream)
    before = signal.signal(
        signal.SIGUSR1, lambda number, frame: log.event(EventName.PROFILE_INTERRUPTED)
    )
    try:
        log.event(EventName.PROFILE_STARTED)
    finally:
        signal.signal(signal.SIGUSR1, before)
    seen = [parse_line(line) for line in stream.getvalue().splitlines()]
    assert [line.event for line in seen if line] == ["profile_interrupted", "profile_started"]


def test_other_lines_are_not_events():
    assert parse_line("epoch 1 loss 0.3") is None
    assert parse_line("stoker is a nice tool") is None
    begin = "stoker 2026-11-20T08:00:00.123Z run=a host=b"
    assert parse_line(f"{begin} feed 'unbalanced") is None
    assert parse_line(f"{begin} feed \\ x") is None
    assert parse_line(begin) is None
    assert parse_line(f"{begin} feed") is not None


@pytest.mark.parametrize(
    "end", ["a='" + "x" * 100_000, "a=" + "'x'" * 30_000 + "\\", "a= " * 50_000]
)
def test_a_line_that_only_looks_like_an_event_is_read_in_time_with_its_length(end):
    # Backtracking would not end.
    parse_line(f"stoker 2026-11-20T08:00:00.123Z run=a host=b feed {end}" * 10)


class TrackersConsole:
    """A console that took the place of stderr, and lost its connection."""

    def write(self, text: str) -> None:
        raise RuntimeError("the tracker is gone")


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [closed_stream(), TrackersConsole(), None])
def test_a_stream_that_takes_no_line_does_not_end_the_job(stream, monkeypatch):
    Log(run="r", host="h", stream=stream).event("still_here")
    monkeypatch.setattr("sys.stderr", stream)
    Log(run="r", host="h").event("still_here")


def events_in(read: BinaryIO, *, count: int) -> list[str]:
    events: list[str] = []
    while len(events) < count:
        event = parse_line(read.readline().decode())
        events += [event.event] if event else []
    return events


def test_lines_that_nobody_reads_come_later_and_in_order(full_pipe):
    read, stream = full_pipe
    log = Log(run="r", host="h", stream=stream)
    log.event(EventName.RUN_JOINED)
    # Longer than a pipe takes in one piece.
    log.event(EventName.HOST_LOST, reason="x" * 100_000)
    log.event(EventName.HOST_REJOINED)
    assert events_in(read, count=3) == ["run_joined", "host_lost", "host_rejoined"]
    log.event(EventName.RUN_RESTARTED)
    assert events_in(read, count=1) == ["run_restarted"]


def test_lines_come_later_where_the_script_has_set_that_writes_do_not_wait(full_pipe):
    read, stream = full_pipe
    os.set_blocking(stream.fileno(), False)
    log = Log(run="r", host="h", stream=stream)
    log.event(EventName.RUN_JOINED)
    assert events_in(read, count=1) == ["run_joined"]


def test_a_log_that_nobody_ever_reads_keeps_the_last_lines(full_pipe, monkeypatch):
    monkeypatch.setattr(logs, "MAX_LATE_TEXTS", 2)
    read, stream = full_pipe
    log = Log(run="r", host="h", stream=stream)
    names = EventName.RUN_JOINED, EventName.HOST_LOST
    for name in (*names, EventName.HOST_REJOINED, EventName.RUN_RESTARTED):
        log.event(name)
    # The first one is being written.
    assert events_in(read, count=3) == ["run_joined", "host_rejoined", "run_restarted"]


def test_a_reader_that_stands_still_again_and_again_adds_nothing_to_the_end(full_pipe, monkeypatch):
    read, stream = full_pipe
    monkeypatch.setattr(logs, "LATE_SECONDS", 0.0)
    at_the_end: list[Callable[[], None]] = []
    monkeypatch.setattr(
        atexit, "register", lambda wait, *args: at_the_end.append(partial(wait, *args))
    )
    log = Log(run="r", host="h", stream=stream)
    for _ in range(3):
        # Longer than a pipe takes in one piece.
        log.event(EventName.HOST_LOST, reason="x" * 100_000)
        assert events_in(read, count=1) == ["host_lost"]
        until(lambda: not log._late.is_waiting, "all is written")
    (wait,) = at_the_end
    wait()
