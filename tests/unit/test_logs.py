import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.logs import Log, parse_line, printable


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
