import json

import pytest

from stoker.cli.progress import SETTLE_SECONDS, HostNews
from stoker.logs import LogEvent

GROUPS = {
    "dnn": {"role": "dnn", "type": "local.c1", "hosts": ["algo-3"]},
    "data": {"role": "data", "type": "local.c1", "hosts": ["algo-1", "algo-2"]},
}


class Told:
    """Plays a run of one dnn and two data hosts; events are 0.1 s apart unless `after` is given."""

    def __init__(self, groups: dict[str, object] | None = None) -> None:
        self._news = HostNews()
        self._second = 0
        self.lines: list[str] = []
        self.hear("roster", groups=json.dumps(groups or GROUPS))

    def hear(self, event: str, *, host: str = "algo-3", after: float = 0.1, **values: str) -> None:
        self._second += round(after * 1000)
        minutes, milliseconds = divmod(self._second, 60_000)
        when = f"2026-11-21T11:{minutes:02d}:{milliseconds // 1000:02d}.{milliseconds % 1000:03d}Z"
        self.lines += self._news.take(LogEvent(when, "run", host, event, values))


def test_a_killed_host_is_one_line_that_says_why_and_what_goes_on():
    told = Told()
    told.hear("agent_connection_lost", agent="algo-1")
    told.hear("host_ended", host="algo-1", how="signal 9 (SIGKILL), perhaps out of memory")
    told.hear("host_lost", about="algo-1", kind="agent", reason="its connection ended", after=6)
    told.hear("progress", steps="3", after=5)
    assert told.lines == [
        "data host algo-1 ended with signal 9 (SIGKILL), perhaps out of memory; "
        "1 of 2 data hosts left"
    ]


def test_a_host_that_only_fell_silent_is_said_a_moment_later():
    told = Told()
    told.hear("agent_connection_lost", agent="algo-1")
    told.hear("progress", steps="3", after=SETTLE_SECONDS - 0.5)
    assert told.lines == []
    told.hear("progress", steps="4", after=1)
    assert told.lines == [
        "data host algo-1 no longer answers: its connection was lost; 1 of 2 data hosts left"
    ]


@pytest.mark.parametrize(
    ("event", "values"),
    [("agent_ready", {"agent": "algo-1"}), ("host_rejoined", {"about": "algo-1", "kind": "agent"})],
)
def test_a_host_that_is_back_is_said_once(event, values):
    told = Told()
    told.hear("host_lost", about="algo-1", kind="agent", reason="silent for 61 s (lease 60 s)")
    for _ in range(2):
        told.hear(event, **values)
    assert told.lines[1:] == ["data host algo-1 is back: 2 of 2 data hosts make batches"]


def test_a_host_that_was_asked_to_stop_left():
    told = Told()
    told.hear("host_left", about="algo-2", kind="agent", reason="7 batches sent, asked to stop")
    left = "data host algo-2 left: 7 batches sent, asked to stop; 1 of 2 data hosts left"
    assert told.lines == [left]


def test_the_last_host_and_what_happens_then_are_said_once_for_all_ranks():
    told = Told()
    for host in ("algo-1", "algo-2"):
        told.hear("host_lost", about=host, kind="agent", reason="x")
    for _ in range(2):
        told.hear("no_data_host_left", text="local workers make all batches")
    assert told.lines[1:] == [
        "data host algo-2 was lost: x; no other data host left",
        "no data host is left: local workers make all batches",
    ]


LOST = ("host_lost", {"about": "algo-1", "kind": "agent", "reason": "x"})


@pytest.mark.parametrize(
    "events",
    [
        # A reconnect at once.
        [("agent_connection_lost", {"agent": "algo-1"}), ("agent_ready", {"agent": "algo-1"})],
        # The training is over.
        [("command_ended", {"host": "algo-3"}), LOST],
        # A dnn host, whose loss is told as the run's end.
        [("host_lost", {"about": "algo-4", "kind": "follower", "reason": "x"})],
    ],
)
def test_what_is_no_news(events):
    told = Told()
    for event, values in events:
        told.hear(event, **values)
    told.hear("progress", steps="3", after=10)
    assert told.lines == []


def test_the_end_of_a_followers_command_is_not_the_end():
    told = Told()
    told.hear("command_ended", host="algo-4")
    told.hear(LOST[0], **LOST[1])
    assert len(told.lines) == 1


@pytest.mark.parametrize("when", ["T", "2026-11-21T11:00:00", ""])
def test_a_line_with_a_time_that_is_none_is_no_error(when):
    assert list(HostNews().take(LogEvent(when, "run", "algo-3", "agent_ready", {}))) == []


def test_a_roster_that_cannot_be_read_is_no_error():
    told = Told({"data": {"hosts": 3}})
    told.hear("host_lost", about="algo-1", kind="agent", reason="x")
    assert told.lines == []
