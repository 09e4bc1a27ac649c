"""Samples of a global batch are dealt to the ranks by what they cost."""

import io
import itertools
import random
import re
import sys
from dataclasses import dataclass
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
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stoker.feed.balance import (
    BalancedSampler,
    MeasuringCollate,
    RankOrder,
    SampleCosts,
    _closest,
    class_of,
    cost_of,
    deal,
    difference_of,
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
        least = least_of(costs, num_ranks=num_ranks)
        assert max(loads) <= max(1.05 * mean, 1.02 * least), seed


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_lengths_that_are_cut_as_texts_are_within_a_tenth_of_a_percent(num_ranks):
    for seed in range(100):
        costs = [min(cost, 10_000) for cost in pareto(num_ranks * 16, seed=seed)]
        loads = loads_of(deal(costs, num_ranks=num_ranks), costs)
        assert max(loads) <= 1.001 * sum(costs) / num_ranks, seed


def drawn_lengths(kind: str, count: int, *, seed: int) -> list[int]:
    drawn = random.Random(seed)
    one = {
        "log-normal": lambda: round(1000 * drawn.lognormvariate(0, 1)),
        "bimodal": lambda: drawn.choice((100, 5000)) + drawn.randrange(50),
        "sorted": lambda: round(1000 * drawn.paretovariate(1.5)),
        "equal": lambda: 700,
        "a giant": lambda: 1000,
    }[kind]
    lengths = [max(1, one()) for _ in range(count)]
    if kind == "sorted":
        lengths.sort()
    if kind == "a giant":
        lengths[drawn.randrange(count)] = 1_000_000
    return lengths


def least_of(costs: list[int], *, num_ranks: int) -> int:
    """Returns what no deal can go below: some rank has its part of the longest samples."""
    per_rank = len(costs) // num_ranks
    ordered = sorted(costs)
    least = 0
    for num_long in range(1, len(costs) + 1):
        part = -(-num_long // num_ranks)
        shortest_of_long = ordered[-num_long:][:part]
        least = max(least, sum(shortest_of_long) + sum(ordered[: per_rank - part]))
    return least


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["log-normal", "bimodal", "sorted", "equal", "a giant"])
def test_the_most_loaded_rank_is_within_five_percent_of_the_mean_or_of_what_is_possible(
    kind, num_ranks
):
    per_rank = 16
    for seed in range(40):
        costs = drawn_lengths(kind, num_ranks * per_rank, seed=seed)
        loads = loads_of(deal(costs, num_ranks=num_ranks), costs)
        mean = sum(costs) / num_ranks
        least = least_of(costs, num_ranks=num_ranks)
        assert max(loads) <= max(1.05 * mean, 1.02 * least), seed
        if kind == "a giant":
            assert max(loads) == least
        if kind == "equal":
            assert max(loads) == mean


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_an_exchange_takes_the_best_pair_of_the_most_and_the_least_loaded_rank(num_ranks):
    for seed in range(50):
        drawn = np.random.default_rng(seed)
        longer, shorter = drawn.integers(1, 1000, (2, 7 * num_ranks))
        gap = int(drawn.integers(1, 2000))
        ours, theirs = _closest(longer, shorter, gap=gap)
        misses = np.abs(2 * (longer[:, None] - shorter[None, :]) - gap)
        assert abs(2 * (longer[ours] - shorter[theirs]) - gap) == misses.min()


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


@dataclass(slots=True)
class Slotted:
    row: torch.Tensor
    label: int


class Table:
    """Like a library's: its bytes are not among its attributes."""

    nbytes = 4000


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (torch.zeros(3, 5), 60),
        (Slotted(torch.zeros(10), 3), 48),
        ({"table": Table()}, 4000),
        (np.array([np.zeros(4), np.zeros(6)], dtype=object), 80),
        (io.BytesIO(b"12345"), 5),
        (np.zeros(10, dtype=np.int16), 20),
        ({"ids": torch.zeros(7, dtype=torch.int64), "label": 3}, 64),
        (("a text", b"12", 1.5), 16),
        (Image.new("RGB", (4, 5)), 60),
        ([1] * 4000, 32_000),
        ([], 0),
        (None, 8),
    ],
    ids=[
        *("tensor", "slots", "table", "objects", "file"),
        *("array", "dict", "tuple", "image", "long list", "empty list", "None"),
    ],
)
def test_a_sample_costs_its_bytes(sample, expected):
    assert sample_bytes(sample) == expected


class Node:
    """Of a tree, whose parts know their parent."""

    def __init__(self, parent: "Node | None") -> None:
        self.parent = parent
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)
        self.row = torch.zeros(100)


def test_a_sample_whose_parts_hold_each_other_is_measured():
    root = last = Node(None)
    for _ in range(2000):
        last = Node(last)
    assert sample_bytes(root) > 400
    circle: list[object] = []
    circle.append(circle)
    assert sample_bytes(circle) > 0


class Broken:
    @property
    def size(self) -> int:
        raise RuntimeError("not loaded")


def measuring(collate: Any) -> MeasuringCollate:
    return MeasuringCollate(collate)


def test_a_sample_that_cannot_be_measured_stays_unknown_and_breaks_nothing():
    collate = measuring(len)
    assert collate([Broken(), b"1234"]) == 2
    costs = SampleCosts(2)
    costs.note([0, 1], collate.sizes)
    assert costs._fresh.tolist() == [0, class_of(4)]


def test_what_can_be_read_only_once_is_left_to_the_collate_function():
    # As a dataset's own __getitems__ may return it.
    collate = measuring(list)
    assert collate(iter([b"1", b"22"])) == [b"1", b"22"]
    assert collate.sizes == b""


def test_columns_are_not_taken_for_samples():
    collate = measuring(dict)
    assert collate({"ids": [1, 2, 3]}) == {"ids": [1, 2, 3]}
    assert collate.sizes == b""


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
    assert later._fresh.tolist() == [class_of(4), 0, class_of(2), 0]


def test_a_state_of_an_earlier_version_is_loaded():
    costs = SampleCosts(4)
    costs.note([2], sizes_of([b"12"]))
    later = SampleCosts(4)
    later.load({"table": costs.state()["table"], "fresh": {2: class_of(2)}})
    assert later.state() == costs.state()


def test_a_state_has_six_bytes_of_each_sample_that_an_epoch_has_measured():
    costs = SampleCosts(100_000)
    costs.note(range(50_000), np.arange(50_000, dtype="<u8").tobytes())
    state = costs.state()
    assert len(state["fresh"]) == 6 * 50_000
    assert len(state["table"]) < 1000


def test_a_sample_that_is_left_out_of_its_batch_costs_nothing():
    costs = SampleCosts(3)
    costs.note([0, 2], sizes_of([bytes(100), bytes(100)]))
    costs.note_skipped([1])
    assert costs._fresh.tolist() == [class_of(100), class_of(0), class_of(100)]


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


class Endless(Dataset[int]):
    """A map-style dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


def accelerates(sampler: Any, *, rank: int = 1, size: int = 3) -> BatchSamplerShard:
    return BatchSamplerShard(BatchSampler(sampler, size, drop_last=True), 4, rank)


def test_indices_that_are_no_places_are_left_to_the_ranks_that_drew_them():
    # Such as (index, resolution), or the keys of a dictionary.
    all_keys: list[list[Any]] = [
        [(0, 224), (1, 160), (2, 224), (3, 160)],
        ["a", "b", "c", "d"],
        [0, 1, 2, 9],
    ]
    for keys in all_keys:
        costs = SampleCosts(4)
        costs._table[:] = [class_of(length) for length in (100, 1, 100, 1)]
        for rank in range(2):
            shard = BatchSamplerShard(BatchSampler(keys, 2, drop_last=True), 2, rank)
            dealt = BalancedSampler(shard, costs, num_ranks=2, rank=rank)
            assert list(dealt) == list(shard)
        costs.note(keys, sizes_of([bytes(9)] * 4))


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([RankOrder(words="seed 1")] * 3, ""),
        ([RankOrder(words="seed 1", first="a"), RankOrder(words="seed 1")], ""),
        (
            [RankOrder(words="seed 1"), RankOrder(words="seed 1"), RankOrder(words="seed 2")],
            "rank 0 draws samples by seed 1, rank 2 by seed 2",
        ),
        (
            [RankOrder(words=""), RankOrder(words="", first="a"), RankOrder(words="", first="b")],
            "ranks 1 and 2 drew other samples in the epoch before",
        ),
        (
            [RankOrder(words="", costs=1), RankOrder(words="", costs=2)],
            "some ranks have loaded a state, and others have not, or another one",
        ),
    ],
)
def test_ranks_that_do_not_draw_the_same_are_named(orders, words):
    assert difference_of(orders) == words


@pytest.mark.parametrize("change", ["seed", "epoch", "length", "batch"])
def test_what_decides_torchs_order_is_said(change):
    def words(**options: int) -> str:
        data: Any = range(options.get("length", 9))
        seed = options.get("seed", 0)
        sampler: DistributedSampler[int] = DistributedSampler(data, 4, 1, seed=seed)
        sampler.set_epoch(options.get("epoch", 0))
        batches = BatchSampler(sampler, options.get("batch", 2), drop_last=False)
        return BalancedSampler(batches, SampleCosts(9), num_ranks=4, rank=1).order_words([])

    assert words() == words()
    assert words(**{change: 3 if change == "batch" else 20}) != words()


def test_what_decides_the_order_of_accelerates_sampler_is_its_generators_state():
    def words(seed: int) -> str:
        drawn = torch.Generator().manual_seed(seed)
        shard = accelerates(RandomSampler(NINE, generator=drawn))
        return BalancedSampler(shard, SampleCosts(9), num_ranks=4, rank=1).order_words([drawn])

    assert words(1) == words(1) != words(2)


def test_other_samples_in_the_first_step_are_seen_after_it():
    firsts = []
    for seed in (1, 1, 2):
        # Without a generator that is found.
        torch.manual_seed(seed)
        costs = SampleCosts(48)
        shard = accelerates(RandomSampler(range(48)))
        list(BalancedSampler(shard, costs, num_ranks=4, rank=1))
        firsts.append(costs.first)
    assert firsts[0] == firsts[1] != firsts[2]


def loader_of(sampler: Any = None, **options: Any) -> DataLoader:
    sampler = sampler or DistributedSampler(NINE, num_replicas=4, rank=1)
    return DataLoader(NINE, sampler=sampler, **{"num_workers": 1, **options})


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (loader_of(RandomSampler(NINE)), "its sampler, a RandomSampler, is not torch's Distrib"),
        (
            loader_of(DistributedSampler(NINE, num_replicas=4, rank=1, shuffle=False)),
            "it reads in order",
        ),
        (
            DataLoader(NINE, batch_sampler=accelerates(SequentialSampler(NINE)), num_workers=1),
            "it reads in order",
        ),
        (
            DataLoader(Endless(), batch_sampler=accelerates([1, 2, 3]), num_workers=1),
            "its dataset has no length",
        ),
        (DataLoader(Stream(), 3, num_workers=1), r"it reads a stream \(IterableDataset\), and .*"),
        (DataLoader(Stream(), None, num_workers=1), "it reads a stream"),
        (DataLoader(NINE, 3, shuffle=True, num_workers=1), "sampler=DistributedSampler"),
        (
            loader_of(WeightedRandomSampler([1.0] * 9, 9)),
            "its sampler, a WeightedRandomSampler, is not .*: give it sampler=Distributed",
        ),
        (
            DataLoader(NINE, batch_sampler=[[0, 1], [2, 3]], num_workers=1),
            "its batch_sampler, a list, is not torch's BatchSampler, .*: give it sampler=Distri",
        ),
        (loader_of(Own(NINE, num_replicas=4, rank=1)), "a Own, is not torch's Distributed"),
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
