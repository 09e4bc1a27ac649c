import io

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
    assert parse_line("stoker 'unbalanced run=a host=b x") is None


def test_a_closed_stream_does_not_end_the_job():
    stream = io.StringIO()
    stream.close()
    Log(run="r", host="h", stream=stream).event("still_here")
