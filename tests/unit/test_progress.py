import io

import pytest

from stoker.cli.progress import following, step_line
from stoker.logs import Log
from stoker.platforms.base import LogLine


def test_the_time_stands_at_the_right_and_nothing_is_wider_than_88_columns() -> None:
    text = "keep 1 x local.c1: no plan costs less by more than its own error band, far from it"
    first, second = step_line("decide", text, 1.24).splitlines()
    assert first.startswith("decide     keep 1 x")
    assert first.endswith("    1.2 s")
    assert len(first) == 87
    assert second.startswith(" " * 11)
    assert " ".join(f"{first[:78]} {second}".split()) == f"decide {text}"


def test_without_a_time_the_line_ends_with_its_words() -> None:
    assert step_line("report", "runs/a/report.html", None) == "report     runs/a/report.html"


def test_stokers_own_lines_stay_in_the_files_but_warnings_are_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    log = Log(run="r", host="algo-1", stream=stream)
    log.event("agent_ready", agent="algo-2")
    for _ in range(2):
        log.event("generator_not_seeded", text="Data.rng keeps its own seed")
    log.event("large_dataset", text="70 MiB")
    for quiet in (True, False):
        with following(quiet=quiet, echo=False) as follow:
            for text in ("the script's own", *stream.getvalue().splitlines()):
                follow.line(LogLine(group="dnn", host="algo-1", text=text))
    assert capsys.readouterr().err.splitlines() == [
        "warning: dnn/algo-1: Data.rng keeps its own seed",
        "warning: dnn/algo-1: 70 MiB",
    ]
