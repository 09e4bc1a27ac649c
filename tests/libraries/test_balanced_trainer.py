"""Ranks of transformers' Trainer, whose sampler is Accelerate's, are balanced."""

import importlib.util

import pytest

from support.balanced_runs import global_batches, imbalance, ran

pytestmark = [pytest.mark.library, pytest.mark.timeout(400)]


@pytest.mark.parametrize("way", ["transformers", "transformers by length"])
def test_the_trainers_global_batches_are_kept_and_its_ranks_balanced(tmp_path, way):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("no transformers here: make test-libraries")
    before, _ = ran(way, tmp_path / "before", balance=None)
    after, log = ran(way, tmp_path / "after", balance="cost")
    assert "loader_not_balanced" not in log
    assert global_batches(after) == global_batches(before)
    for epoch in (1, 2):
        assert max(imbalance(before)[epoch]) > 1.1
        assert max(imbalance(after)[epoch]) < 1.05
