"""Ranks of frameworks, which make their own samplers, are balanced; what cannot be, is said."""

from pathlib import Path

import pytest

from support.balanced_runs import global_batches, imbalance, ran

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("way", ["accelerate", "lightning", "made in each epoch"])
def test_a_frameworks_global_batches_are_kept_and_its_ranks_balanced(tmp_path, way):
    before, _ = ran(way, tmp_path / "before", balance=None)
    after, log = ran(way, tmp_path / "after", balance="cost")
    assert "loader_not_balanced" not in log
    assert log.count(" ranks_balanced ") == 1
    assert global_batches(after) == global_batches(before)
    for epoch in (1, 2):
        assert max(imbalance(before)[epoch]) > 1.1
        assert max(imbalance(after)[epoch]) < 1.05


def test_ranks_that_draw_by_other_seeds_keep_their_samples_and_are_told(tmp_path: Path):
    way = "a seed of each rank"
    before, _ = ran(way, tmp_path / "before", balance=None)
    after, log = ran(way, tmp_path / "after", balance="cost")
    assert after == before
    assert log.count("loader_not_balanced") == 1
    assert "rank 0 draws samples by seed 0, rank 1 by seed 1: " in log


def test_a_rank_that_makes_its_batches_itself_takes_its_part(tmp_path: Path):
    way, local = "one rank makes its own", {"unshippable": "local"}
    before, _ = ran(way, tmp_path / "before", balance=None, **local)
    after, log = ran(way, tmp_path / "after", balance="cost", **local)
    assert "loader_not_shippable" in log
    assert global_batches(after) == global_batches(before)
    assert after != before
