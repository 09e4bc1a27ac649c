"""Ranks whose samples are dealt by their measured cost, with data hosts, stopped and resumed."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from stoker.records import FeedSettings
from support.balanced_runs import global_batches, imbalance
from support.balanced_script import BATCH_SIZE, NUM_SAMPLES
from support.local_job import LocalJob

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "balanced_script.py"
BALANCED = FeedSettings(lease_seconds=20, balance="cost")
EPOCHS = 3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def steps_of(folder: Path, *, ranks: int = 2) -> list[list]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def train(
    folder: Path,
    *words: str,
    feed: FeedSettings = BALANCED,
    data: int = 1,
    hosts: int = 1,
    processes: int = 2,
) -> LocalJob:
    command = ("python", str(SCRIPT), str(folder), str(EPOCHS), *words)
    name = f"job-{'-'.join(words).replace(':', '-') or 'whole'}"
    job = LocalJob(folder / name, command, dnn=hosts, data=data, processes=processes, feed=feed)
    with job:
        job.succeeds()
    return job


@pytest.fixture(scope="module")
def balanced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    job = train(folder)
    # NUM_SAMPLES / BATCH_SIZE / 2 steps of the second and of the third epoch.
    (loader,) = job.training().balance
    assert (loader.steps, loader.why_not) == (12, "")
    assert loader.drawn_excess > 0.1 > 0.05 > loader.dealt_excess
    return steps_of(folder)


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


# In mid-epoch and measured, as the first one is: the ranks of two hosts, below.
@pytest.mark.parametrize("stop", [pytest.param("1:3", marks=pytest.mark.soak), "2:1", "0:4"])
def test_a_resumed_training_deals_as_the_whole_one(tmp_path, balanced, stop):
    train(tmp_path, "--stop", stop)
    train(tmp_path, "--resume", data=2)
    assert steps_of(tmp_path) == balanced


def torchs_global_batches(num_ranks: int) -> list[list[int]]:
    """What the script's ranks read together in each step with torch alone, without order."""
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    batches = []
    for epoch in range(EPOCHS):
        of_ranks = []
        for rank in range(num_ranks):
            sampler: DistributedSampler = DistributedSampler(
                data, num_replicas=num_ranks, rank=rank, seed=3
            )
            sampler.set_epoch(epoch)
            of_ranks.append(list(sampler))
        for start in range(0, len(of_ranks[0]), BATCH_SIZE):
            step = [indices[start : start + BATCH_SIZE] for indices in of_ranks]
            batches.append(sorted(itertools.chain.from_iterable(step)))
    return batches


def test_ranks_of_two_hosts_deal_alike_and_resume_on_one_host(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    train(whole, hosts=2, data=2)
    steps = steps_of(whole, ranks=4)
    assert global_batches(steps) == torchs_global_batches(4)
    ratios = imbalance(steps)
    assert max(ratios[0]) > 1.2
    assert max(ratios[1] + ratios[2]) < 1.05
    train(stopped, "--stop", "1:2", hosts=2)
    train(stopped, "--resume", hosts=1, processes=4)
    assert steps_of(stopped, ranks=4) == steps


def test_a_state_is_refused_by_another_number_of_ranks(tmp_path):
    train(tmp_path, "--stop", "1:2", hosts=2)
    command = ("python", str(SCRIPT), str(tmp_path), str(EPOCHS), "--resume")
    with LocalJob(tmp_path / "resumed", command, data=1, processes=2, feed=BALANCED) as job:
        assert job.end().status == "failed"
        log = job.log(job.leader)
    assert "state_dict does not match this loader: world size: 4 in the state, 2 here" in log
