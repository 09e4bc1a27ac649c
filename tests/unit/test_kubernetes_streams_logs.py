"""A log is read again and again: nothing is lost, nothing comes twice."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.platforms.kubernetes.streams import OVERLAP_SECONDS, LogPosition, split_time

BEGIN = datetime(2026, 11, 20, 9, tzinfo=UTC)


def stamped(seconds: float, text: str) -> str:
    when = BEGIN + timedelta(seconds=seconds)
    return f"{when.strftime('%Y-%m-%dT%H:%M:%S.%f')}Z {text}"


def served(lines: list[str], query: dict[str, str]) -> list[str]:
    """Serves lines as a kubelet does: from a whole second on."""
    since = query.get("sinceTime", "")[:-1]
    return [line for line in lines if line[: len(since)] >= since]


def read(position: LogPosition, lines: list[str]) -> list[str]:
    query = position.query()
    taken = [position.take(line) for line in served(lines, query)]
    return [text for text in taken if text is not None]


# Times of a log: ever later, but for a second now and then, as two writers come.
STEPS = st.lists(st.floats(min_value=-0.9, max_value=3.0), min_size=1, max_size=40)


@given(STEPS, st.lists(st.integers(min_value=0, max_value=40), max_size=6), st.integers(1, 3))
def test_whatever_breaks_off_every_line_comes_once_and_in_order(steps, cuts, num_texts):
    at, latest, lines = 0.0, 0.0, []
    for index, step in enumerate(steps):
        at = max(0.0, latest + step)
        latest = max(latest, at)
        lines.append(stamped(at, f"text {index % num_texts}"))
    position, seen = LogPosition(), []
    for cut in sorted(cuts):
        seen += read(position, lines[:cut])
    seen += read(position, lines)
    assert seen == [line.partition(" ")[2] for line in lines]


def test_what_is_asked_for_is_a_little_before_the_last_line():
    position = LogPosition()
    assert position.query() == {}
    position.take(stamped(10.7, "x"))
    since = (BEGIN + timedelta(seconds=10 - OVERLAP_SECONDS + 1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert position.query() == {"sinceTime": since}


def test_only_the_lines_of_the_last_seconds_are_kept():
    position = LogPosition()
    for second in range(1000):
        position.take(stamped(second, "x"))
    assert len(position._recent) <= OVERLAP_SECONDS + 2


@pytest.mark.parametrize(
    ("line", "when", "text"),
    [
        ("2026-11-20T09:00:00.123456789Z hello you", BEGIN, "hello you"),
        ("2026-11-20T09:00:00Z hello", BEGIN, "hello"),
        ("2026-11-20T10:00:00.5+01:00 hello", BEGIN, "hello"),
        ("2026-11-20T09:00:00.1Z ", BEGIN, ""),
        ("2026-11-20T09:00:00.1Z", BEGIN, ""),
        ("2026-11-20T09:00:00.1Z  two blanks", BEGIN, " two blanks"),
        ("no time", None, "no time"),
        ("2026-99-20T09:00:00Z x", None, "2026-99-20T09:00:00Z x"),
    ],
)
def test_time_and_text_of_a_line(line, when, text):
    assert split_time(line) == (when, text)
