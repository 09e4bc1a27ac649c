import pytest

from stoker.feed.wire.protocol import Progress
from stoker.launch.coordinator import MAX_PROCESSES, RANK_TIMEOUT_SECONDS, Attendance


def report(steps, rank=0):
    return Progress(rank=rank, steps=steps, samples=steps, wait_seconds=0.0, compute_seconds=0.0)


def test_every_process_of_a_rank_is_told_until_it_is_gone():
    ranks = Attendance()
    ranks.attend(0, b"first")
    ranks.attend(0, b"second")
    ranks.attend(1, b"third")
    assert set(ranks.senders()) == {b"first", b"second", b"third"}
    for _ in range(2):
        ranks.forget(b"second")
        assert set(ranks.senders()) == {b"first", b"third"}


def test_of_too_many_processes_the_one_that_was_silent_longest_is_dropped():
    ranks = Attendance()
    ranks.attend(0, b"trainer")
    for number in range(3 * MAX_PROCESSES):
        ranks.attend(0, b"%d" % number)
        ranks.report(b"trainer", report(number), now=float(number))
    assert len(ranks.senders()) == MAX_PROCESSES
    assert b"trainer" in ranks.senders()


@pytest.mark.parametrize(
    ("steps", "now", "counted"),
    [
        (3, 0.5, 100),
        # The rank has a new connection, or was started again, and the first process is silent.
        (101, 0.5, 101),
        (1, 1.0 + RANK_TIMEOUT_SECONDS, 1),
    ],
)
def test_a_second_process_counts_once_it_is_ahead_or_the_first_is_silent(steps, now, counted):
    ranks = Attendance()
    ranks.report(b"first", report(100), now=0.0)
    ranks.report(b"second", report(steps), now=now)
    assert ranks.progress[0].steps == counted
