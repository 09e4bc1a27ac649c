"""When batches are made in parts: what has not paid once is tried again, ever more seldom."""

import pytest

from stoker.feed.wire import codec
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.jobs import FinishedPart, SplitBatch, WorkerJob
from stoker.feed.workers.pipe import PartMade
from stoker.feed.workers.splitting import SplitCosts, split_of

NUM_SAMPLES = 64
BATCH_SECONDS = 0.6
# Of a batch in 16 parts.
USUAL_SEND_SECONDS = 0.0005
DEAR_SEND_SECONDS = 0.026


def split() -> SplitBatch:
    index = codec.pack_value(list(range(NUM_SAMPLES)), allow_pickle=True)
    order = Make(session="s", epoch_id=0, batch_number=0, index=index, seed_words=(7, 0, 0, 0))
    divided = split_of(WorkerJob((0,), order), num_workers=4)
    assert divided is not None
    return divided


def part(*, send_seconds: float, seconds: float = BATCH_SECONDS / 16) -> FinishedPart:
    """Returns a part of four samples."""
    return FinishedPart(
        PartMade(
            num_samples=4,
            tree=b"",
            nbytes=0,
            cpu_seconds=0.0,
            wall_seconds=seconds,
            send_seconds=send_seconds,
        )
    )


def num_batches_until_next_try(costs: SplitCosts) -> int:
    """Adds batches that one worker made until the next one would be made in parts."""
    for number in range(1, 1000):
        costs.add_batch(BATCH_SECONDS)
        if costs.pays():
            return number
    return 0


@pytest.fixture
def costs():
    """Of a loader whose first part was written in a busy moment."""
    costs = SplitCosts(always_pays=False)
    costs.add_first_part(split(), part(send_seconds=DEAR_SEND_SECONDS))
    assert not costs.pays_as_expected()
    return costs


def test_what_did_not_pay_in_a_busy_moment_is_tried_again(costs):
    assert num_batches_until_next_try(costs) == 16
    costs.add_first_part(split(), part(send_seconds=USUAL_SEND_SECONDS))
    assert costs.pays_as_expected()
    for _ in range(200):
        costs.add_batch(BATCH_SECONDS)
        assert costs.pays()


def test_what_never_pays_is_tried_ever_more_seldom(costs):
    batches = []
    for _ in range(3):
        batches.append(num_batches_until_next_try(costs))
        costs.add_first_part(split(), part(send_seconds=DEAR_SEND_SECONDS))
        assert not costs.pays()
    assert batches == [16, 64, 256]


def test_short_batches_are_not_tried():
    costs = SplitCosts(always_pays=False)
    for _ in range(1000):
        costs.add_batch(0.002)
        assert not costs.pays()


def test_a_first_part_of_quick_samples_does_not_make_a_quick_batch():
    costs = SplitCosts(always_pays=False)
    quick = part(send_seconds=USUAL_SEND_SECONDS, seconds=0.0004)
    # Nothing else is known.
    costs.add_first_part(split(), quick)
    assert not costs.pays_as_expected()
    costs.add_batch(BATCH_SECONDS)
    costs.add_first_part(split(), quick)
    assert costs.pays_as_expected()


def test_a_first_part_shows_what_writing_costs_whatever_is_usual():
    costs = SplitCosts(always_pays=False)
    costs.add_batch(BATCH_SECONDS)
    costs.add_first_part(split(), part(send_seconds=DEAR_SEND_SECONDS))
    assert not costs.pays_as_expected()
