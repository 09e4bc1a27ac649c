"""Which data hosts make which samples of a batch, and when that pays."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.trainer.scheduler import BatchScheduler, Peer, PeerState
from stoker.feed.trainer.shared_batch import BatchSharing, shares_of
from stoker.feed.wire.protocol import BatchPart
from stoker.feed.workers.pipe import MAX_DESCRIPTORS


@given(
    size=st.integers(2, 400),
    workers=st.lists(st.integers(1, 64), min_size=2, max_size=8),
    collator=st.integers(0, 7),
)
def test_each_sample_has_one_host_in_proportion_to_workers(size, workers, collator):
    by_host: dict[Peer, int] = {f"algo-{number}": each for number, each in enumerate(workers)}
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
    assert -(-1000 // shares.part_samples) + 2 <= MAX_DESCRIPTORS


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


def test_what_did_not_pay_in_a_busy_moment_is_tried_again():
    sharing = costs(seconds=0.6)
    dear = BatchPart(
        session="s",
        epoch_id=0,
        batch_number=0,
        first=0,
        num_samples=32,
        tree=b"",
        cpu_seconds=0.3,
        wall_seconds=0.3,
        send_seconds=0.5,
    )
    sharing.add_part(dear, nbytes=1 << 19)
    for _ in range(16):
        assert not sharing.pays(fewer=0.25, share=0.5)
        sharing.add_batch(0.6, nbytes=1 << 20, read_seconds=0.001)
    assert sharing.pays(fewer=0.25, share=0.5)


def test_nothing_is_shared_where_each_host_has_a_first_batch():
    assert not costs(seconds=10.0).pays(fewer=0.0, share=0.5)


@given(
    size=st.integers(2, 400),
    workers=st.lists(st.integers(1, 64), min_size=2, max_size=8),
    begin=st.integers(0, 400),
)
def test_nobody_has_a_share_of_what_is_made_already(size, workers, begin):
    by_host: dict[Peer, int] = {f"algo-{number}": each for number, each in enumerate(workers)}
    shares = shares_of(size, collator="algo-0", workers=by_host, begin=begin)
    if shares is None:
        return
    ranges = sorted(shares.places.values())
    assert begin <= ranges[0][0]
    assert ranges[-1][1] == size


def at_its_end(*, num_batches=4):
    """A schedule of two hosts that have all batches of the epoch, the first one at `a`."""
    schedule = BatchScheduler(max_bytes=1 << 30)
    for host in ("a", "b"):
        schedule.grant(host, 2)
    schedule.supply(num_batches)
    schedule.mark_complete()
    asked = {number: host for host, number in schedule.assign(now=0.0)}
    return schedule, asked


def come(schedule, asked, *numbers, now=1.0):
    for number in numbers:
        schedule.arrived(asked[number], number, frame_bytes=10, now=now)
        if number == schedule.head:
            schedule.take(now)


def test_last_batches_are_shared_once_a_host_has_none():
    schedule, asked = at_its_end()
    assert asked == {0: "a", 1: "b", 2: "a", 3: "b"}
    come(schedule, asked, 0, 1)
    assert not schedule.may_share()
    come(schedule, asked, 2)
    assert schedule.may_share()
    assert schedule.unfinished() == [(3, "b")]


def test_nothing_is_shared_as_long_as_the_trainer_has_a_batch():
    schedule, asked = at_its_end()
    come(schedule, asked, 0, 3)
    schedule.arrived(asked[1], 1, frame_bytes=10, now=1.0)
    assert schedule.unfinished() == [(2, "a")]
    assert not schedule.may_share()


def test_nothing_is_shared_before_all_batches_are_handed_out():
    schedule, asked = at_its_end(num_batches=5)
    come(schedule, asked, 0, 2)
    assert not schedule.may_share()


def test_a_host_that_helps_is_free_once_its_samples_are_there():
    schedule, asked = at_its_end()
    come(schedule, asked, 0, 1, 2)
    schedule.peers["a"].helps_with[3] = 12
    schedule.came_part("a", 3, num_samples=5)
    assert not schedule.may_share()
    schedule.came_part("a", 3, num_samples=7)
    assert schedule.may_share()


@pytest.mark.parametrize(("now", "due"), [(1.0, 2.0), (2.0, 2.0), (3.5, 0.5), (4.5, -0.5)])
def test_when_a_batch_is_due_follows_from_when_it_was_asked_for(now, due):
    # Its worker makes a batch in 2 s, and has made one of two that it was asked for at 0 s.
    host = PeerState(is_remote=True, asked={3: (0.0, 2)}, service_seconds=2.0)
    seconds = host.due_seconds(3, workers=1, usual=2.0, now=now)
    assert seconds == pytest.approx(due)
    # One that waits behind another one is not begun.
    host.asked[2] = (0.0, 1)
    assert host.due_seconds(3, workers=1, usual=2.0, now=now) == 2.0
