"""Which data hosts make which samples of a batch, and when that pays."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.trainer.shared_batch import BatchSharing, shares_of


@given(
    size=st.integers(2, 400),
    workers=st.lists(st.integers(1, 64), min_size=2, max_size=8),
    collator=st.integers(0, 7),
)
def test_each_sample_has_one_host_in_proportion_to_workers(size, workers, collator):
    by_host = {f"algo-{number}": each for number, each in enumerate(workers)}
    chosen = f"algo-{collator % len(workers)}"
    shares = shares_of(size, collator=chosen, workers=by_host)
    if shares is None:
        return
    assert chosen not in shares.places
    ranges = sorted(shares.places.values())
    # The host that collates has the first ones.
    assert ranges[-1][1] == size
    for before, behind in itertools.pairwise(ranges):
        assert before[1] == behind[0]
    for host, (first, last) in shares.places.items():
        assert first % shares.part_samples == 0
        fair = size * by_host[host] / sum(workers)
        assert abs(last - first - fair) <= 2 * shares.part_samples


def test_parts_are_few_enough_for_one_message():
    shares = shares_of(1000, collator="a", workers={"a": 32, "b": 32})
    assert shares is not None
    assert -(-1000 // shares.part_samples) <= 30


def costs(*, seconds, nbytes=1 << 20, rate=1e9):
    sharing = BatchSharing()
    for _ in range(3):
        sharing.add_batch(seconds, nbytes=nbytes, read_seconds=nbytes / rate)
    return sharing


def test_before_any_batch_one_host_makes_it():
    assert not BatchSharing().pays(fewer=0.5, share=0.5)


def test_long_batches_of_few_bytes_are_shared():
    assert costs(seconds=0.6).pays(fewer=0.25, share=0.5)


def test_short_batches_are_not_shared():
    assert not costs(seconds=0.015, nbytes=100).pays(fewer=0.5, share=0.5)


def test_batches_that_take_longer_on_the_network_than_they_gain_are_not_shared():
    # 100 MB at 1 Gbit/s: half of them takes 0.8 s, there and back.
    large = {"nbytes": 100 << 20, "rate": 125e6}
    assert not costs(seconds=2.0, **large).pays(fewer=0.25, share=0.5)
    assert costs(seconds=20.0, **large).pays(fewer=0.25, share=0.5)


def test_nothing_is_shared_where_each_host_has_a_first_batch():
    assert not costs(seconds=10.0).pays(fewer=0.0, share=0.5)
