"""Samples of a global batch are dealt to the ranks by what they cost."""

import itertools
import random
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stoker.feed.balance import (
    BalancedSampler,
    SampleCosts,
    class_of,
    cost_of,
    deal,
    sample_bytes,
    sizes_of,
    why_unbalanced,
)
from stoker.feed.bookkeeping import line_words, note_making


def pareto(count: int, *, seed: int, alpha: float = 1.5) -> list[int]:
    drawn = random.Random(seed)
    return [round(1000 * drawn.paretovariate(alpha)) for _ in range(count)]


def loads_of(hands: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[place] for place in hand) for hand in hands]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("per_rank", [1, 2, 8, 32])
def test_each_rank_gets_as_many_and_each_sample_goes_to_one(num_ranks, per_rank):
    costs = pareto(num_ranks * per_rank, seed=per_rank)
    hands = deal(costs, num_ranks=num_ranks)
    assert [len(hand) for hand in hands] == [per_rank] * num_ranks
    assert sorted(place for hand in hands for place in hand) == list(range(len(costs)))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_the_most_loaded_rank_is_within_five_percent_of_the_mean_where_lengths_are_pareto(
    num_ranks, alpha
):
    for seed in range(100):
        costs = pareto(num_ranks * 16, seed=seed, alpha=alpha)
        loads = loads_of(deal(costs, num_ranks=num_ranks), costs)
        mean = sum(costs) / num_ranks
        # As many samples on each rank: the longest has at least the shortest ones beside it.
        least = max(costs) + sum(sorted(costs)[:15])
        assert max(loads) <= max(1.05 * mean, 1.02 * least), seed


def test_without_a_deal_the_most_loaded_rank_is_far_above_the_mean():
    ratios = []
    for seed in range(100):
        costs = pareto(64, seed=seed)
        strided = [sum(costs[rank::4]) for rank in range(4)]
        ratios.append(max(strided) / (sum(costs) / 4))
    assert np.median(ratios) > 1.3


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [64, 61, 7, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_global_batches_are_those_of_torch(num_samples, shuffle, drop_last):
    ours, torchs = [], []
    for rank in range(4):
        batches = sampler_of(num_samples, rank=rank, shuffle=shuffle, drop_last=drop_last)
        costs = SampleCosts(num_samples)
        sizes = np.array(pareto(num_samples, seed=1), dtype="<u8")
        costs.note(range(num_samples), sizes.tobytes())
        costs._table[:] = [costs._fresh[index] for index in range(num_samples)]
        torchs.append(list(batches))
        ours.append(list(BalancedSampler(batches, costs, num_ranks=4, rank=rank)))
        assert len(ours[-1]) == len(torchs[-1])
    for of_torch, of_us in zip(zip(*torchs, strict=True), zip(*ours, strict=True), strict=True):
        assert sorted(itertools.chain(*of_torch)) == sorted(itertools.chain(*of_us))
        assert len({len(batch) for batch in of_us}) == 1
    assert ours != torchs or num_samples < 8


@pytest.mark.parametrize(
    "options",
    [{}, {"even_batches": False}, {"split_batches": True}],
    ids=["even", "not even", "split"],
)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [64, 61, 7, 100])
def test_global_batches_are_those_of_accelerate(num_samples, drop_last, options):
    sizes = np.array(pareto(num_samples, seed=1), dtype="<u8").tobytes()
    ours, accelerates = [], []
    for rank in range(4):
        drawn = torch.Generator()
        drawn.manual_seed(5)
        order = RandomSampler(TensorDataset(torch.arange(num_samples)), generator=drawn)
        batches = BatchSampler(order, batch_size=8, drop_last=drop_last)
        shard = BatchSamplerShard(batches, 4, rank, **options)
        drawn.manual_seed(5)
        accelerates.append([list(batch) for batch in shard])
        costs = SampleCosts(num_samples)
        costs.note(range(num_samples), sizes)
        costs._table[:] = [costs._fresh[index] for index in range(num_samples)]
        drawn.manual_seed(5)
        ours.append(list(BalancedSampler(shard, costs, num_ranks=4, rank=rank)))
    assert [len(rank) for rank in ours] == [len(rank) for rank in accelerates]
    for step in range(max(map(len, ours))):
        assert sorted(itertools.chain(*(rank[step] for rank in ours if len(rank) > step))) == (
            sorted(itertools.chain(*(rank[step] for rank in accelerates if len(rank) > step)))
        )
    assert ours != accelerates or num_samples < 32


def test_until_something_is_measured_each_rank_has_torchs_own_batches():
    batches = sampler_of(100, rank=2, shuffle=True, drop_last=False)
    batches.sampler.set_epoch(3)
    balanced = BalancedSampler(batches, SampleCosts(100), num_ranks=4, rank=2)
    assert list(balanced) == list(batches)


def sampler_of(num_samples: int, *, rank: int, shuffle: bool, drop_last: bool) -> BatchSampler:
    data = TensorDataset(torch.arange(num_samples))
    sampler: DistributedSampler = DistributedSampler(
        data, num_replicas=4, rank=rank, shuffle=shuffle
    )
    return BatchSampler(sampler, batch_size=5, drop_last=drop_last)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (torch.zeros(3, 5), 60),
        (np.zeros(10, dtype=np.int16), 20),
        ({"ids": torch.zeros(7, dtype=torch.int64), "label": 3}, 64),
        (("a text", b"12", 1.5), 16),
        (Image.new("RGB", (4, 5)), 60),
        ([1] * 4000, 32_000),
        ([], 0),
        (None, 8),
    ],
    ids=["tensor", "array", "dict", "tuple", "image", "long list", "empty list", "None"],
)
def test_a_sample_costs_its_bytes(sample, expected):
    assert sample_bytes(sample) == expected


def test_a_class_is_within_one_percent_of_its_bytes():
    for nbytes in (1, 100, 4_800_000, 1 << 40):
        assert abs(cost_of(class_of(nbytes)) / 1024 / nbytes - 1) < 0.011


def test_costs_are_known_from_the_first_measured_sample_on_also_after_a_load():
    costs = SampleCosts(4)
    assert not costs.is_known
    measured = SampleCosts(4)
    measured._table[2] = class_of(100)
    costs.load(measured.state())
    assert costs.is_known
    assert costs.costs_of([0, 2]) == [cost_of(class_of(100))] * 2


def test_a_state_goes_on_with_the_table_and_what_was_measured_since():
    costs = SampleCosts(4)
    costs.note([0, torch.tensor(2)], sizes_of([b"1234", b"12"]))
    later = SampleCosts(4)
    later.load(costs.state())
    assert later.state() == costs.state()
    assert later.state()["fresh"] == {0: class_of(4), 2: class_of(2)}


NINE = TensorDataset(torch.arange(9))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Own(DistributedSampler):
    def __iter__(self):
        return iter(range(self.rank, 9, self.num_replicas))


class OwnBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def loader_of(sampler: Any = None, **options: Any) -> DataLoader:
    sampler = sampler or DistributedSampler(NINE, num_replicas=4, rank=1)
    return DataLoader(NINE, sampler=sampler, **{"num_workers": 1, **options})


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (loader_of(RandomSampler(NINE)), "its RandomSampler is no DistributedSampler"),
        (DataLoader(Stream(), 3, num_workers=1), r"it reads a stream \(IterableDataset\), and .*"),
        (DataLoader(Stream(), None, num_workers=1), "it reads a stream"),
        (DataLoader(NINE, 3, shuffle=True, num_workers=1), "sampler=DistributedSampler"),
        (
            loader_of(WeightedRandomSampler([1.0] * 9, 9)),
            "its WeightedRandomSampler is no DistributedSampler, .*: give it sampler=Distributed",
        ),
        (
            DataLoader(NINE, batch_sampler=[[0, 1], [2, 3]], num_workers=1),
            "its batch_sampler, a list, is not torch's BatchSampler, .*: give it sampler=Distri",
        ),
        (loader_of(Own(NINE, num_replicas=4, rank=1)), "its Own is no Distributed"),
        (loader_of(batch_size=None), r"no batches of its own \(batch_size=None\)"),
        (
            DataLoader(NINE, batch_sampler=OwnBatches(range(9), 3, False), num_workers=1),
            "its batch_sampler, a OwnBatches, is not torch's BatchSampler",
        ),
        (
            loader_of(DistributedSampler(NINE, num_replicas=2, rank=0)),
            "its sampler is for rank 0 of 2, and this is rank 1 of 4",
        ),
        (loader_of(num_workers=0), "it has no workers"),
        (loader_of(), "torch.distributed is not initialised"),
    ],
)
def test_what_cannot_be_dealt_is_named(loader, words):
    assert re.search(words, why_unbalanced(loader, world_size=4, rank=1))


def test_a_loader_that_a_package_makes_is_named_by_the_scripts_line():
    loader = SimpleNamespace()
    package: dict[str, Any] = {"__name__": "accelerate.data_loader", "note_making": note_making}
    text = "def prepare(loader):\n    note_making(loader)\n"
    exec(compile(text, "/env/site-packages/accelerate/data_loader.py", "exec"), package)
    line = sys._getframe().f_lineno + 1
    package["prepare"](loader)
    assert line_words(loader) == f"test_balance.py:{line}"
    assert line_words(SimpleNamespace()) == ""
