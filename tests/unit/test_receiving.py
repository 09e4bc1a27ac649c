"""How many threads a trainer receives on, and which one a data host is given."""

import pytest

from stoker.feed.receiving import MAX_AUTO, num_receive_threads, quietest
from stoker.records import FeedSettings


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 4), (96, 8, 4), (16, 8, 1)]
)
def test_encrypted_batches_are_received_on_up_to_four_threads_as_the_cores_allow(
    cores: int, processes: int, threads: int
) -> None:
    assert num_receive_threads(FeedSettings(), processes=processes, cores=cores) == threads
    assert threads <= MAX_AUTO


def test_batches_in_plain_text_are_received_on_one() -> None:
    assert num_receive_threads(FeedSettings(encrypt_batches=False), processes=1, cores=96) == 1


@pytest.mark.parametrize("encrypts", [True, False])
def test_what_is_set_counts(encrypts: bool) -> None:
    feed = FeedSettings(receive_threads=7, encrypt_batches=encrypts)
    assert num_receive_threads(feed, processes=8, cores=1) == 7


def test_hosts_are_spread_over_the_threads_and_a_place_that_is_left_is_taken_again() -> None:
    used: list[int] = []
    for _ in range(5):
        used.append(quietest(used, num_threads=2))
    assert sorted(used) == [0, 0, 0, 1, 1]
    used.remove(0)
    used.remove(0)
    assert quietest(used, num_threads=2) == 0
