import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.logs import Log, parse_line, printable
from stoker.platforms.aws import Aws
from stoker.platforms.base import LogLine
from stoker.platforms.sagemaker.job import LATE_MILLIS, LOG_GROUP, JobLog
from support.log_stubs import stubbed_logs


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


@pytest.fixture
def stub():
    with stubbed_logs() as made:
        yield made


def page(stub, *events, begin=0, sent="", gives=""):
    """Adds a page of events (milliseconds, host, text), each with an id of its own."""
    asked = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": "job/", "startTime": begin}
    listed = [
        {"timestamp": at, "message": text, "eventId": f"{host}{at}", "logStreamName": f"job/{host}"}
        for at, host, text in events
    ]
    answer = {"events": listed, **({"nextToken": gives} if gives else {})}
    stub.add_response("filter_log_events", answer, asked | ({"nextToken": sent} if sent else {}))


def texts(lines: list[LogLine]) -> list[str]:
    return [f"{each.host} {each.text}" for each in lines]


def test_hosts_are_merged_by_time_and_late_lines_come_once(stub):
    one, two, again = "algo-1-1700000000", "algo-2-1700000001", "algo-2-1700003600"
    late = LATE_MILLIS
    page(stub, (1, one, "a"), gives="more")
    page(stub, (late + 5, one, "c\r\nd\n"), (late + 3, two, "b\n"), sent="more")
    page(stub, (late + 5, one, "c\r\nd\n"), (late + 4, again, "e"), begin=5)
    logs = JobLog(Aws(clients={"logs": stub.client}), job_name="job", groups=["dnn"])
    assert texts(logs.read()) == ["algo-1 a", "algo-2 b", "algo-1 c", "algo-1 d"]
    assert texts(logs.read()) == ["algo-2 e"]
