from collections import namedtuple

import numpy as np
import pytest
import torch

from stoker.profile import batches
from stoker.profile.loader_phases import (
    Round,
    Stamp,
    room_for_batches,
    summarize,
    waiting_counts,
    worker_counts,
)
from support.profiled_ranks import drained

Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: leaf,
        lambda leaf: [leaf, 1],
        lambda leaf: (leaf, "text"),
        lambda leaf: {"image": leaf, "meta": {"n": 3}},
        lambda leaf: Pair(leaf, 2),
        lambda leaf: [[{"deep": (leaf,)}]],
    ],
)
@pytest.mark.parametrize("leaf", [torch.ones(4, 3), np.ones((4, 3))])
def test_a_clone_keeps_its_values_when_the_script_changes_the_batch(make, leaf):
    leaf[...] = 1
    batch = make(leaf)
    copy = batches.clone(batch)
    assert type(copy) is type(batch)
    leaf[...] = 7
    (kept,) = batches.leaves(copy)
    assert kept.sum() == 12
    assert batches.num_samples(copy) == 4


@pytest.mark.parametrize(
    ("images", "is_alike"),
    [
        (torch.arange(256).float().reshape(4, 1, 8, 8), True),
        (torch.arange(256).float().reshape(4, 1, 8, 8) / 255, True),
        (torch.randn(4, 1, 8, 8), False),
        (torch.rand(4, 1, 8, 8), False),
        (torch.full((4, 1, 8, 8), 300.0), False),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), False),
    ],
)
def test_floats_that_were_bytes_are_recognised(images, is_alike):
    facts = batches.facts([images, torch.zeros(4)])
    assert facts.is_uint8_like is is_alike
    assert facts.float_image_bytes == (1024 if images.dtype.is_floating_point else 0)
    assert facts.num_bytes == images.nbytes + 16
    assert facts.samples == 4


def test_costs_are_of_one_worker_from_batch_to_batch_and_the_rate_of_all():
    def worker(pid: int, start: float) -> list[Stamp]:
        # 30 ms of CPU and 50 ms of wall a batch, of which it was kept from the CPU for 10 ms.
        return [(pid, 5 + n * 0.03, start + n * 0.05, n * 0.01) for n in range(21)]

    drained = summarize([Round([worker(1, 0.0), worker(2, 0.025)])], workers=2)
    assert drained.cpu_seconds.mean == pytest.approx(0.03)
    assert drained.wall_seconds.median == pytest.approx(0.04)
    assert drained.batches_per_second == pytest.approx(40.0, rel=0.05)
    assert drained.cpu_seconds.samples == 40


def test_a_rate_is_over_all_rounds_and_a_round_that_lacks_a_worker_gives_none():
    def round_of(gap: float) -> Round:
        return Round([[(1, 0.01 * n, gap * n, 0.0) for n in range(5)]])

    drained = summarize([round_of(0.1), round_of(0.3)], workers=1)
    assert drained.batches_per_second == pytest.approx(8 / 1.6)
    assert drained.cpu_seconds.samples == 8
    assert summarize([round_of(0.1), round_of(0.3)], workers=2).batches_per_second == 0.0
    # A first batch alone says nothing.
    assert summarize([Round([[(1, 1.0, 1.0, 0.0)]])], workers=1) is None


def test_a_batch_that_only_waited_for_a_cpu_takes_no_time_and_not_less():
    stamps = [(1, 0.0, 1.000, 0.000), (1, 0.0, 1.010, 0.012)]
    assert summarize([Round([stamps])], workers=1).wall_seconds.low == 0.0


@pytest.mark.parametrize(
    ("script", "vcpus", "ranks", "seconds", "counts"),
    [
        (0, 1, 1, 54, [1]),
        (1, 2, 1, 54, [2, 1]),
        (0, 4, 1, 54, [4, 1, 2]),
        (6, 8, 1, 54, [8, 1, 6, 4]),
        (8, 2, 4, 54, [1, 8]),
        # Too few are more by doubling, as far as there is time.
        (0, 16, 1, 54, [16, 1, 8, 2, 4]),
        (4, 32, 1, 54, [32, 1, 4, 16, 8]),
        (4, 32, 4, 54, [8, 1, 4]),
        (0, 96, 1, 54, [96, 1, 48, 2, 4, 8, 16, 32, 64]),
        (0, 96, 1, 18, [96, 1, 48, 2, 4, 8]),
        (0, 96, 1, 6, [96, 1, 48]),
    ],
)
def test_loaders_are_tried_at_one_at_todays_and_from_there_up_to_all_vcpus(
    script, vcpus, ranks, seconds, counts
):
    tried = worker_counts(script=script, vcpus=vcpus, ranks_on_host=ranks, seconds=seconds)
    assert tried == counts


@pytest.mark.parametrize(
    ("wall", "batch_bytes", "more"),
    [
        (0.10, 1000, []),
        (0.12, 1000, []),
        (0.40, 1000, [8, 16]),
        # Three batches of each of 16 workers do not fit.
        (0.40, 400_000, [8]),
        (0.40, 4_000_000, []),
    ],
)
def test_a_loader_that_waits_is_tried_with_more_workers_than_vcpus_where_they_fit(
    wall, batch_bytes, more
):
    drains = [drained(4, 0.1, wall=wall), drained(1, 0.1, wall=wall)]
    room = 12_000_000
    found = waiting_counts(drains, vcpus=4, batch_bytes=batch_bytes, room_bytes=room)
    assert found == more
    assert waiting_counts([], vcpus=1, batch_bytes=1, room_bytes=room) == []
    large = [drained(32, 0.1, wall=1.0)]
    assert waiting_counts(large, vcpus=32, batch_bytes=1, room_bytes=room) == [64]
    # The script has as many already.
    script = [drained(8, 0.1, wall=1.0), *drains]
    assert 8 not in waiting_counts(script, vcpus=4, batch_bytes=1, room_bytes=room)
    assert room_for_batches() > 0
