"""Checks which exit code `stoker train` has for a training that failed."""

import msgspec
import pytest

from stoker.cli.outputs import exit_code_of, training_words
from stoker.records import Event, Training
from support.sample_records import training

LOST = """\
rank 0 on algo-3: FeedLostError: no data worker is left after 5 s: 2 data hosts expected
where: rank 0
try:   see the logs of the data hosts
Traceback (most recent call last):
stoker.errors.FeedLostError: no data worker is left after 5 s: 2 data hosts expected
where: rank 0
try:   see the logs of the data hosts
"""
OWN = "rank 0 on algo-3: ValueError: no FeedLostError: of the script's own\nTraceback ..."


def test_times_that_cannot_be_compared_are_said_to_be_so() -> None:
    shared = msgspec.structs.replace(
        training(),
        events=(Event(when="2026-11-21T12:00:00Z", what="not comparable: hosts share cores"),),
    )
    assert training_words(shared).endswith("; not comparable: hosts share cores")


def failed(failure: str, exit_code: int) -> Training:
    return msgspec.structs.replace(
        training(), status="failed", failure=failure, exit_code=exit_code
    )


@pytest.mark.parametrize(
    ("failure", "code", "expected"), [(LOST, 5, 5), (OWN, 5, 6), (LOST, 1, 6), ("", 5, 6)]
)
def test_an_error_of_the_feed_is_5_and_anything_else_6(
    failure: str, code: int, expected: int
) -> None:
    assert exit_code_of(failed(failure, code)) == expected


def test_the_words_of_a_lost_feed_are_what_was_lost_and_not_what_to_try() -> None:
    assert training_words(failed(LOST, 5)).endswith("(exit code 5): " + LOST.splitlines()[0])
