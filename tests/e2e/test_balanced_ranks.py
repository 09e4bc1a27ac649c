"""Ranks whose samples are dealt by their measured cost, with data hosts, stopped and resumed."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from stoker.records import FeedSettings
from support.local_job import LocalJob

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "balanced_script.py"
BALANCED = FeedSettings(lease_seconds=20, balance="cost")
EPOCHS = 3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def steps_of(folder: Path) -> list[list]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def train(folder: Path, *words: str, feed: FeedSettings = BALANCED, data: int = 1) -> LocalJob:
    command = ("python", str(SCRIPT), str(folder), str(EPOCHS), *words)
    name = f"job-{'-'.join(words).replace(':', '-') or 'whole'}"
    with LocalJob(folder / name, command, data=data, processes=2, feed=feed) as job:
        job.succeeds()
    return job


@pytest.fixture(scope="module")
def balanced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    train(folder)
    return steps_of(folder)


def global_batches(ranks: list[list]) -> list[list[int]]:
    return [sorted(ours[1] + theirs[1]) for ours, theirs in zip(*ranks, strict=True)]


def imbalance(ranks: list[list]) -> dict[int, list[float]]:
    """Of each step, by epoch: the higher cost over the mean."""
    ratios = defaultdict(list)
    for ours, theirs in zip(*ranks, strict=True):
        ratios[ours[0]].append(2 * max(ours[2], theirs[2]) / (ours[2] + theirs[2]))
    return ratios


def test_global_batches_are_those_of_the_script_and_costs_are_within_five_percent(
    tmp_path, balanced
):
    train(tmp_path, feed=FeedSettings(lease_seconds=20))
    own = steps_of(tmp_path)
    assert global_batches(balanced) == global_batches(own)
    # In the first epoch nothing is measured yet.
    assert [step for step in balanced[0] if step[0] == 0] == [s for s in own[0] if s[0] == 0]
    before, after = imbalance(own), imbalance(balanced)
    for epoch in (1, 2):
        assert max(before[epoch]) > 1.2
        assert max(after[epoch]) < 1.05


@pytest.mark.parametrize("stop", ["1:3", "2:1", "0:4"])
def test_a_resumed_training_deals_as_the_whole_one(tmp_path, balanced, stop):
    train(tmp_path, "--stop", stop)
    train(tmp_path, "--resume", data=2)
    assert steps_of(tmp_path) == balanced
