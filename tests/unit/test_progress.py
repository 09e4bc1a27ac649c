import io
from contextlib import closing

import msgspec
import pytest

from stoker.figures.intervals import Interval
from stoker.figures.progress import StepProgress
from stoker.logs import Log
from stoker.platforms.base import LogLine
from stoker.run import progress
from stoker.run.progress import Follow


def show(lines, **how):
    with closing(Follow(**how)) as follow:
        for text in lines:
            follow.line(LogLine(group="dnn", host="algo-1", text=text))


def test_progress_says_steps_their_time_and_the_time_that_is_left(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    lines = [
        step_row(steps=10, step_seconds=0.5, wait_seconds=0.4),
        step_row(steps=40, step_seconds=0.1, wait_seconds=0.025),
    ]
    for total in (100, None, 39):
        show(lines, echo=False, total_steps=total)
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        "10/100 steps, 500 ms each, 80% waiting for data, 45 s left",
        "40/100 steps, 100 ms each, 25% waiting for data, 6 s left",
        "10 steps, 500 ms each, 80% waiting for data",
        "40 steps, 100 ms each, 25% waiting for data",
        "10/39 steps, 500 ms each, 80% waiting for data, 14 s left",
        "40 steps, 100 ms each, 25% waiting for data",
    ]


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
        "dnn/algo-1 stoker is a nice tool",
    ]


def step_row(**steps):
    interval = Interval(start_seconds=0.0, seconds=2.0, steps=StepProgress(**steps))
    return event_line("r", "interval", row=msgspec.json.encode(interval).decode())


def event_line(run, event, **values):
    stream = io.StringIO()
    Log(run=run, host="algo-1", stream=stream).event(event, **values)
    return stream.getvalue().rstrip()


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
    with closing(Follow(echo=True)) as follow:
        follow.line(LogLine(group="sagemaker", host="status", text=text))
    assert "\x1b" not in capsys.readouterr().err


def test_a_data_host_that_is_lost_is_one_line(capsys):
    lost = event_line("r", "host_lost", about="data-1", role="data", reason="it was silent")
    ready = event_line("r", "agent_ready", agent="data-1", workers="1", credits="2")
    left = event_line("r", "host_left", about="data-2", role="data", reason="")
    show([ready, lost, ready, lost, left], echo=False)
    assert capsys.readouterr().err.splitlines() == [
        "data host data-1 was lost: it was silent",
    ]
