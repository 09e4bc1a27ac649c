"""Balanced ranks of many shapes, killed in mid-epoch and resumed: always torch's global batches."""

import itertools
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset

from stoker.feed.balance import BalancedSampler, SampleCosts, class_of, sample_bytes
from stoker.records import FeedSettings
from support.balanced_script import SEED, lengths_of
from support.local_job import LocalJob

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "balanced_script.py"
EPOCHS = 3
# Hosts and ranks of each, before the death and after it.
PLACES = (
    ((1, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 3), (3, 1)),
    ((1, 4), (2, 2)),
    ((2, 2), (1, 4)),
)
# What is saved, stopped and resumed: test_balanced_ranks. Here a rank is killed, too.
OFTEN = 1
SEEDS = 100

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Shape:
    before: tuple[int, int]
    after: tuple[int, int]
    data_hosts: tuple[int, int]
    num_samples: int
    batch_size: int
    drop_last: bool
    in_order: bool
    kill: str

    @classmethod
    def of(cls, seed: int) -> "Shape":
        drawn = random.Random(seed)
        before, after = drawn.choice(PLACES)
        ranks = before[0] * before[1]
        batch_size = drawn.randint(1, 9)
        # Whole steps, and a rest that is none.
        steps = drawn.randint(2, 6)
        num_samples = ranks * batch_size * steps + drawn.randrange(ranks * batch_size)
        rank, epoch = drawn.randrange(ranks), drawn.randrange(EPOCHS)
        # The first step is saved in any case: without a state nothing is resumed.
        step = drawn.randint(2, steps)
        return cls(
            before=before,
            after=after,
            data_hosts=(drawn.randint(1, 2), drawn.randint(1, 2)),
            num_samples=num_samples,
            batch_size=batch_size,
            drop_last=drawn.random() < 0.5,
            in_order=drawn.random() < 0.25,
            kill=f"{rank}:{epoch}:{step}",
        )

    @property
    def num_ranks(self) -> int:
        return self.before[0] * self.before[1]

    @property
    def words(self) -> list[str]:
        words = ["--samples", str(self.num_samples), "--batch", str(self.batch_size)]
        words += ["--drop-last"] * self.drop_last
        return words + ["--in-order"] * self.in_order

    def sampler(self, rank: int, epoch: int) -> BatchSampler:
        of_rank: DistributedSampler = DistributedSampler(
            TensorDataset(torch.arange(self.num_samples)),
            num_replicas=self.num_ranks,
            rank=rank,
            seed=SEED,
            shuffle=not self.in_order,
        )
        of_rank.set_epoch(epoch)
        return BatchSampler(of_rank, self.batch_size, self.drop_last)


def expected_of(shape: Shape) -> list[list[list[int]]]:
    """Returns for each rank the batches of all epochs, dealt here by what was read before."""
    costs = SampleCosts(shape.num_samples)
    classes = np.zeros(shape.num_samples, dtype=np.uint16)
    rows = [(0, torch.zeros(length)) for length in lengths_of(shape.num_samples)]
    dealt: list[list[list[int]]] = [[] for _ in range(shape.num_ranks)]
    for epoch in range(EPOCHS):
        for rank in range(shape.num_ranks):
            sampler = shape.sampler(rank, epoch)
            balanced = BalancedSampler(sampler, costs, num_ranks=shape.num_ranks, rank=rank)
            # In order nothing is dealt: an evaluation may count on it.
            batches = list(sampler if shape.in_order else balanced)
            dealt[rank] += batches
            for index in itertools.chain.from_iterable(batches):
                classes[index] = class_of(sample_bytes(rows[index]))
        # Only now: all ranks of an epoch deal by the same costs.
        costs.load({"table": zlib.compress(classes.tobytes()), "fresh": b""})
    return dealt


def torchs_of(shape: Shape) -> list[list[int]]:
    """Returns the global batch of each step with torch alone, without its order."""
    steps = []
    for epoch in range(EPOCHS):
        of_ranks = [list(shape.sampler(rank, epoch)) for rank in range(shape.num_ranks)]
        steps += [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]
    return steps


def job_of(shape: Shape, folder: Path, *words: str, is_resumed: bool) -> LocalJob:
    hosts, processes = shape.after if is_resumed else shape.before
    command = ("python", str(SCRIPT), str(folder), str(EPOCHS), *shape.words, *words)
    return LocalJob(
        folder / f"job-{is_resumed}",
        command,
        dnn=hosts,
        data=shape.data_hosts[is_resumed],
        processes=processes,
        feed=FeedSettings(lease_seconds=20, balance="cost"),
    )


def seeds() -> list:
    often = list(range(OFTEN))
    return often + [pytest.param(seed, marks=pytest.mark.soak) for seed in range(OFTEN, SEEDS)]


@pytest.mark.parametrize("seed", seeds())
def test_ranks_that_are_killed_and_resumed_read_torchs_global_batches(tmp_path, seed):
    shape = Shape.of(seed)
    with job_of(shape, tmp_path, "--kill", shape.kill, is_resumed=False) as job:
        assert job.end().status == "failed", shape
    with job_of(shape, tmp_path, "--resume", is_resumed=True) as job:
        job.succeeds()
    ranks = []
    for rank in range(shape.num_ranks):
        steps = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        ranks.append([indices for _, indices, _, _ in steps])
    # As many steps on each rank, too.
    together = [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    assert together == torchs_of(shape), shape
    assert ranks == expected_of(shape), shape
    if not shape.drop_last:
        whole = set(range(shape.num_samples))
        num_steps = len(together) // EPOCHS
        assert set(itertools.chain(*together[:num_steps])) == whole
