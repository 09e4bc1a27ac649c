import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stoker.logs import Log, LogEvent
from stoker.platforms.base import LogLine
from stoker.run import progress
from stoker.run.progress import SETTLE_SECONDS, HostNews, following
from stoker.terminal import program, step_line, working


def show(lines, *, quiet=False, **how):
    with following(quiet=quiet, **how) as follow:
        for text in lines:
            follow.line(LogLine(group="dnn", host="algo-1", text=text))


def test_the_time_stands_at_the_right_and_nothing_is_wider_than_88_columns():
    text = "keep 1 x local.c1: no plan costs less by more than its own error band, far from it"
    first, second = step_line("decide", text, 1.24).splitlines()
    assert first.startswith("decide     keep 1 x")
    assert first.endswith("    1.2 s")
    assert len(first) == 87
    assert second.startswith(" " * 11)
    assert " ".join(f"{first[:78]} {second}".split()) == f"decide {text}"
    assert step_line("report", "runs/a/report.html", None) == "report     runs/a/report.html"


def test_the_time_and_the_words_fit_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((60, 24)))
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    lines = step_line("decide", "keep dnn 1 x local.c1: no plan costs less by far", 1.24)
    assert max(map(len, lines.splitlines())) == 60


def test_progress_says_steps_their_time_and_the_time_that_is_left(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    lines = [
        event_line("r", "progress", steps=10, step_seconds=5.0, wait_seconds=4.0),
        event_line("r", "progress", steps=40, step_seconds=0.1, wait_seconds=0.025),
    ]
    for total in (100, None, 39):
        show(lines, echo=False, total_steps=total)
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        "10/100 steps, 5.00 s each, 80% waiting for data",
        "40/100 steps, 100 ms each, 25% waiting for data, 6 s left",
        "10 steps, 5.00 s each, 80% waiting for data",
        "40 steps, 100 ms each, 25% waiting for data",
        "10/39 steps, 5.00 s each, 80% waiting for data",
        "40 steps (39 were planned), 100 ms each, 25% waiting for data",
    ]


def test_progress_says_how_busy_the_gpus_are(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    step = event_line("r", "progress", steps=10, step_seconds=5.0, wait_seconds=4.0)
    lines = [
        event_line("r", "gpu_load", count=2, gpu_utilization=0.28, rows="a,0,0.28\na,1,0"),
        step,
        event_line("r", "gpu_load", count=2, rows="a,0\na,1"),
        step,
    ]
    show(lines, echo=False, total_steps=None)
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        "10 steps, 5.00 s each, 80% waiting for data, GPUs 28% busy",
        "10 steps, 5.00 s each, 80% waiting for data",
    ]


def test_a_gpu_that_is_lost_or_not_read_is_one_line(capsys):
    lost, unread = "GPU 0 (GPU-1): GPU is lost", "GPU load: NVML: Driver Not Loaded"
    lines = [
        *[event_line("r", "gpu_lost", text=lost)] * 2,
        event_line("r", "gpu_load_unread", text=unread),
    ]
    show(lines, echo=False)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: dnn/algo-1: {lost}",
        f"note: {unread}",
    ]


def test_what_the_platform_says_is_shown_where_the_script_is_not(capsys):
    with following(quiet=False, echo=False) as follow:
        follow.line(LogLine(group="sagemaker", host="status", text="Starting: preparing hosts"))
        follow.line(LogLine(group="dnn", host="algo-1", text="the script's own"))
    assert capsys.readouterr().err.strip() == "Starting: preparing hosts"


def test_a_bar_is_shown_in_its_last_state_and_events_never_in_it(capsys):
    ready = event_line("r", "agent_ready", agent="algo-2", workers=1, credits=2)
    warned = event_line("r", "metrics_serve_failed", text="no metrics are served")
    lines = (
        "  0%|          | 0/40 [00:00<?, ?it/s]" + ready,
        "\r".join(f" {done}%|###| [00:0{done // 10}<?]" for done in (10, 20, 30)),
        "loss 0.5\r",
        "\rvalidation 3/4\r              \r",
        "[default0]:" + ready,
        "[1,0]<stderr>:" + warned,
        "",
        "stoker is a nice tool",
    )
    show(lines, echo=True)
    assert capsys.readouterr().err.splitlines() == [
        "dnn/algo-1   0%|          | 0/40 [00:00<?, ?it/s]",
        "dnn/algo-1  30%|###| [00:03<?]",
        "dnn/algo-1 loss 0.5",
        "warning: dnn/algo-1: no metrics are served",
        "dnn/algo-1 ",
        "dnn/algo-1 stoker is a nice tool",
    ]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Makes a terminal of 60 columns stderr; yields what reads from it until a text has come."""
    keyboard, screen = os.openpty()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")

    def shown(text: str) -> str:
        said = ""
        while text not in said:
            said += os.read(keyboard, 1 << 12).decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)

    with open(screen, "w") as stream:
        # Not in a fixture: pytest puts its own stderr there before the test.
        monkeypatch.setattr(sys, "stderr", stream)
        yield shown
    os.close(keyboard)


def test_a_terminal_shows_a_line_of_progress_that_fits_it(monkeypatch):
    line = event_line("r", "progress", steps=1040, step_seconds=0.123, wait_seconds=0.1)
    with (
        terminal(monkeypatch) as shown,
        following(quiet=False, echo=False, total_steps=100_000) as follow,
    ):
        follow.line(LogLine(group="dnn", host="algo-1", text=line))
        lines = shown("1,040/100,000 steps, 123 ms each").splitlines()
    assert lines[-1].startswith("train      0:00:0")
    assert max(map(len, lines)) <= 60


def test_what_takes_long_shows_a_spinner_on_a_terminal(monkeypatch):
    monkeypatch.setattr("stoker.terminal._SPINNER_SECONDS", 0.0)
    with terminal(monkeypatch) as shown, working("reading prices"):
        assert "reading prices" in shown("reading prices")


@pytest.mark.parametrize(
    ("typed", "found", "word"),
    [
        ("bin/stoker", None, "bin/stoker"),
        ("bin/stoker", "bin/stoker", "stoker"),
        ("bin/pytest", None, "stoker"),
    ],
)
def test_the_next_command_is_called_as_this_one_was(tmp_path, monkeypatch, typed, found, word):
    (tmp_path / "bin").mkdir()
    (tmp_path / typed).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [typed])
    monkeypatch.setattr(shutil, "which", lambda _: found)
    assert program() == word


def test_stokers_own_lines_stay_in_the_files_but_warnings_are_shown_once(capsys):
    events = (
        ("agent_ready", "algo-2"),
        *[("generator_not_seeded", "Data.rng keeps its own seed")] * 2,
        ("large_dataset", "70 MiB"),
        ("batches_seeded", "the numbers differ from a run without stoker"),
    )
    lines = [event_line("r", event, text=text) for event, text in events]
    for quiet in (True, False):
        show(["the script's own", *lines], quiet=quiet, echo=False)
    assert capsys.readouterr().err.splitlines() == [
        "warning: dnn/algo-1: Data.rng keeps its own seed",
        "warning: dnn/algo-1: 70 MiB",
        "note: the numbers differ from a run without stoker",
    ]


def event_line(run, event, **values):
    stream = io.StringIO()
    Log(run=run, host="algo-1", stream=stream).event(event, **values)
    return stream.getvalue().rstrip()


ROSTER = event_line("mnist-1", "host_role", role="dnn")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[31mred\x1b[0m words", "red words"),
        ("bell \x07, title \x1b]0;x\x07, up \x1b[2A", r"bell \x07, title \x1b]0;x\x07, up \x1b[2A"),
        ("c1 \x9b2J, mark \u202e", r"c1 \x9b2J, mark \u202e"),
        ("tab\tand 10\u202f000", "tab\tand 10\u202f000"),
    ],
)
def test_no_line_of_a_host_controls_the_terminal(capsys, text, seen):
    show([text], echo=True)
    assert capsys.readouterr().err == f"dnn/algo-1 {seen}\n"
    # What the platform reports.
    with following(quiet=False, echo=True) as follow:
        follow.line(LogLine(group="sagemaker", host="status", text=text))
    assert "\x1b" not in capsys.readouterr().err


def test_a_very_long_line_is_cut_where_it_is_shown(capsys):
    show(["x" * 1_000_000], echo=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("xxx ... 934475 more characters")
    assert len(line) < 70_000


def test_an_event_of_another_run_is_text_of_the_script(capsys):
    forged = event_line("x", "no_data_host_left", text="all is lost")
    warned = event_line("x", "feed_unused", text="beware")
    own = event_line("mnist-1", "no_data_host_left", text="they are gone")
    show([ROSTER, forged, warned, own], echo=True)
    assert capsys.readouterr().err.splitlines() == [
        f"dnn/algo-1 {forged}",
        f"dnn/algo-1 {warned}",
        "no data host is left: they are gone",
    ]
    show([ROSTER, forged, warned], echo=False)
    assert capsys.readouterr().err == ""


def test_the_next_plan_is_another_run(capsys):
    own = event_line("mnist-1-plan2", "feed_unused", text="beware")
    with following(quiet=False, echo=False) as follow:
        for host, text in (("algo-1", ROSTER), ("capacity", "taking the next plan")):
            follow.line(LogLine(group="dnn", host=host, text=text))
        follow.line(LogLine(group="dnn", host="algo-1", text=own))
    assert "warning: dnn/algo-1: beware" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["n\n", "", None], ids=["no", "closed", "gone"])
def test_a_terminal_that_goes_when_it_is_asked_does_not_stop_the_job(monkeypatch, answer):
    master, slave = os.openpty()
    with open(slave) as stdin, following(quiet=True, echo=False) as follow:
        monkeypatch.setattr(sys, "stdin", stdin)
        # While it was asked both were terminals.
        for stream in (stdin, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        if answer is None:
            os.close(master)
        else:
            # Ctrl-D, the end of input.
            os.write(master, answer.encode() or b"\x04")
        assert follow.ask_to_stop() is False
    if answer is not None:
        os.close(master)


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
