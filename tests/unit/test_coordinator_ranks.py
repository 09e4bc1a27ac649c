"""Checks which processes attend for the ranks, and whose report counts."""

from stoker.feed.wire.protocol import Progress
from stoker.launch.coordinator import MAX_PROCESSES, RANK_TIMEOUT_SECONDS, Attendance


def report(steps, rank=0):
    return Progress(rank=rank, steps=steps, samples=steps, wait_seconds=0.0, compute_seconds=0.0)


def test_every_process_of_a_rank_is_told():
    ranks = Attendance()
    ranks.attend(0, b"first")
    ranks.attend(0, b"second")
    ranks.attend(1, b"third")
    assert set(ranks.senders()) == {b"first", b"second", b"third"}


def test_a_process_that_is_gone_is_told_no_more():
    ranks = Attendance()
    ranks.attend(0, b"first")
    ranks.attend(0, b"second")
    ranks.forget(b"second")
    ranks.forget(b"second")
    assert ranks.senders() == (b"first",)


def test_of_too_many_processes_the_one_that_was_silent_longest_is_dropped():
    ranks = Attendance()
    ranks.attend(0, b"trainer")
    for number in range(3 * MAX_PROCESSES):
        ranks.attend(0, b"%d" % number)
        ranks.report(b"trainer", report(number), now=float(number))
    assert len(ranks.senders()) == MAX_PROCESSES
    assert b"trainer" in ranks.senders()


def test_a_second_process_does_not_replace_what_the_first_one_reports():
    ranks = Attendance()
    ranks.report(b"trainer", report(100), now=0.0)
    ranks.report(b"child", report(3), now=0.5)
    assert ranks.progress[0].steps == 100
    ranks.report(b"trainer", report(101), now=1.0)
    assert ranks.progress[0].steps == 101


def test_a_rank_that_was_started_again_counts_once_the_first_is_silent():
    ranks = Attendance()
    ranks.report(b"before", report(100), now=0.0)
    ranks.report(b"after", report(1), now=1.0 + RANK_TIMEOUT_SECONDS)
    assert ranks.progress[0].steps == 1


def test_a_rank_that_reconnects_goes_on():
    ranks = Attendance()
    ranks.report(b"before", report(100), now=0.0)
    ranks.report(b"after", report(101), now=0.5)
    assert ranks.progress[0].steps == 101
