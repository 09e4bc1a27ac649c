"""Samples of a global batch are dealt to the ranks by what they cost."""

import dataclasses
import io
import itertools
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stoker import DataLoader as StokersLoader
from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.feed.balance import (
    BalancedSampler,
    MeasuringCollate,
    RankGroup,
    RankOrder,
    SampleCosts,
    _closest,
    _why_unseen,
    class_of,
    classes_of,
    cost_of,
    deal,
    difference_of,
    sample_bytes,
    sizes_of,
    why_unbalanced,
)
from stoker.feed.balance_figures import BalanceFile, BalanceNews, DealtSteps, read_balance
from stoker.feed.bookkeeping import LoaderBooks, TrainerProcess, line_words, note_making
from stoker.feed.loader_state import load, state_of
from stoker.feed.remote_iterators import _begins_balance, _name_of
from stoker.feed.sampler import SamplerOrder, yielded
from stoker.feed.timeline import Timeline
from stoker.logs import Log
from stoker.records import FeedSettings
from stoker.records.training import BalancedLoader


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


def known_costs(num_samples: int, **options: Any) -> SampleCosts:
    """Costs that differ from sample to sample, known before the first epoch."""
    costs = SampleCosts(num_samples, **options)
    sizes = np.array(pareto(num_samples, seed=1), dtype="<u8")
    costs._set_table(classes_of(sizes))
    return costs


def shuffled(num_samples: int, *, seed: int = 5) -> RandomSampler:
    data = TensorDataset(torch.arange(num_samples))
    return RandomSampler(data, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("num_samples", [61, 64, 70, 100])
def test_who_drops_the_repeated_samples_of_the_last_step_keeps_each_sample_once(
    num_samples, split_batches
):
    # As Accelerate's gather_for_metrics: so many of the last step, in the order of the ranks.
    ranks = []
    for rank in range(4):
        batches = BatchSampler(shuffled(num_samples), batch_size=8, drop_last=False)
        shard = BatchSamplerShard(batches, 4, rank, split_batches=split_batches)
        costs = known_costs(num_samples)
        ranks.append(list(BalancedSampler(shard, costs, num_ranks=4, rank=rank)))
    steps = [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    of_step = 8 if split_batches else 32
    steps[-1] = steps[-1][: num_samples % of_step or of_step]
    assert sorted(itertools.chain(*steps)) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [61, 64, 66])
def test_the_repeated_samples_of_torchs_last_step_stay_the_last_ones(num_samples):
    ranks = []
    for rank in range(4):
        batches = sampler_of(num_samples, rank=rank, shuffle=True, drop_last=False)
        balanced = BalancedSampler(batches, known_costs(num_samples), num_ranks=4, rank=rank)
        ranks.append(list(balanced))
        assert len(ranks[0]) == 4
    # Samples of all ranks in turn, as they were dealt out.
    steps = [itertools.chain(*zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    read = list(itertools.chain(*steps))
    assert sorted(read[:num_samples]) == list(range(num_samples))


class Grouping(Sampler):
    """Chooses samples for each other, as for a triplet loss."""

    def __iter__(self):
        return iter([0, 3, 6, 1, 4, 7])


class GroupedBatches(BatchSampler):
    """Batches of similar lengths."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("of_all", "words"),
    [
        (BatchSampler(Grouping(), 3, drop_last=True), "its sampler, a Grouping, may decide which"),
        (BatchSampler([3, 2, 1, 0], 2, drop_last=True), "its sampler, a list, may decide which"),
        (
            GroupedBatches(RandomSampler(range(4)), 2, drop_last=True),
            "its batch_sampler, a GroupedBatches, may decide which samples are together in a batch",
        ),
        ([[0, 1, 2], [3]], "its batch_sampler, a list, may decide which"),
        (BatchSampler(RandomSampler(range(4)), 2, drop_last=True), ""),
        (BatchSampler(SeedableRandomSampler(range(4)), 2, drop_last=True), ""),
        (BatchSampler(SubsetRandomSampler(range(4)), 2, drop_last=True), ""),
        (BatchSampler(WeightedRandomSampler([1.0] * 4, 4), 2, drop_last=True), ""),
    ],
)
def test_samples_that_a_script_puts_together_stay_together_on_their_rank(of_all, words):
    shard = BatchSamplerShard(of_all, 2, 0, even_batches=False)
    why = _why_unseen(shard)
    assert why.startswith(words)
    assert bool(why) == bool(words)


def test_what_dealing_changes_is_told_at_each_end_of_an_epoch_of_all_its_steps():
    told: list[int] = []
    costs = known_costs(256, tell=lambda steps: told.append(steps.num_steps))
    for _ in range(2):
        shard = BatchSamplerShard(BatchSampler(shuffled(256), 8, drop_last=True), 4, 1)
        list(BalancedSampler(shard, costs, num_ranks=4, rank=1))
    assert told == [8, 16]
    assert re.fullmatch(
        r"in 16 steps the rank with the most had \d\d\.\d% more than the mean of all ranks, by the "
        r"bytes of its samples, and has \d+\.\d% now.*",
        costs.steps.words,
    )


def test_an_epoch_that_a_rank_leaves_is_told_at_the_next_one(one_rank_for_two_hours):
    told: list[int] = []
    costs = known_costs(256, tell=lambda steps: told.append(steps.num_steps))
    shard = BatchSamplerShard(BatchSampler(shuffled(256), 8, drop_last=True), 4, 1)
    next(iter(BalancedSampler(shard, costs, num_ranks=4, rank=1)))
    assert told == []
    costs.exchange()
    assert told == [1]


def news_of(folder: Path, *, rank: int = 0) -> BalanceNews:
    log = Log(run="r", host="algo-1")
    file = BalanceFile(folder)
    return BalanceNews(log, rank=rank, number=0, where="train.py:12", file=file)


def test_the_runs_record_has_what_dealing_has_changed_last_and_the_log_what_it_did_first(
    capfd, tmp_path
):
    news = news_of(tmp_path)
    steps = DealtSteps()
    for _ in range(3):
        steps.add([4, 4, 2, 2], drawn=[8, 4], dealt=[6, 6])
        news.tell(steps)
    for _ in range(2):
        news.say_not("the ranks differ")
    assert read_balance(tmp_path) == (
        BalancedLoader(
            loader="train.py:12", steps=3, drawn_excess=0.333333, why_not="the ranks differ"
        ),
    )
    log = "".join(capfd.readouterr())
    assert log.count("ranks_balanced") == log.count("loader_not_balanced") == 1
    assert "of the loader of train.py:12, in 1 steps the rank with the most had 33.3% more" in log


def test_only_rank_0_tells_and_a_broken_file_is_none(capfd, tmp_path):
    news_of(tmp_path, rank=1).say_not("the ranks differ")
    assert read_balance(tmp_path) == ()
    assert "balanced" not in "".join(capfd.readouterr())
    (tmp_path / "balance.json").write_text('[{"loader": ')
    assert read_balance(tmp_path) == ()


def test_samples_that_are_longer_than_a_ranks_share_are_named():
    steps = DealtSteps()
    steps.add([4, 4, 2, 2], drawn=[8, 4], dealt=[6, 6])
    assert "had 33.3% more" in steps.words
    assert steps.words.endswith("and has 0.0% now")
    steps.add([20, 1, 1, 2], drawn=[21, 3], dealt=[21, 3])
    assert "and has 50.0% now; in 1 of them one sample alone is more" in steps.words
    assert steps.words.endswith("cut such samples, or make batches larger")


def test_a_loader_that_is_made_again_still_sees_that_ranks_drew_other_samples():
    firsts = []
    for seed in (1, 2):
        costs = known_costs(48)
        shard = accelerates(shuffled(48, seed=seed))
        list(BalancedSampler(shard, costs, num_ranks=4, rank=1))
        again = SampleCosts(48)
        again.go_on_from(costs)
        firsts.append(again.first)
    assert "" not in firsts
    assert firsts[0] != firsts[1]


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
            [RankOrder(words=f"seed {seed}, epoch 3, batches of 8") for seed in (1, 1, 2)],
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


def sampler_with(generator: torch.Generator) -> RandomSampler:
    return RandomSampler(NINE, generator=generator)


def sampler_at(epoch: int) -> SeedableRandomSampler:
    # A rank that left the epoch before it was over has not begun the next one.
    sampler = SeedableRandomSampler(NINE, generator=torch.Generator().manual_seed(1), data_seed=1)
    sampler.set_epoch(epoch)
    return sampler


def sampler_without_generator(seed: int) -> WeightedRandomSampler:
    torch.manual_seed(seed)
    return WeightedRandomSampler([1.0] * 9, 9)


@pytest.mark.parametrize(
    "shard_of",
    [
        lambda change: accelerates(sampler_with(torch.Generator().manual_seed(change))),
        lambda change: accelerates(sampler_at(change)),
        lambda change: accelerates(sampler_without_generator(change)),
        lambda change: accelerates(sampler_at(0), size=change),
        lambda change: BatchSamplerShard(
            BatchSampler(sampler_at(0), 4, drop_last=True), 4, 1, split_batches=change == 1
        ),
    ],
    ids=["generator", "epoch", "no generator", "batch", "split batches"],
)
def test_what_decides_the_order_of_accelerates_samplers_is_said(shard_of):
    def words(change: int) -> str:
        shard = shard_of(change)
        found = getattr(shard.batch_sampler.sampler, "generator", None)
        generators = [] if found is None else [found]
        dealing = BalancedSampler(shard, SampleCosts(9), num_ranks=4, rank=1)
        return dealing.order_words(generators)

    assert words(1) == words(1) != words(2)


def test_a_seedable_samplers_order_does_not_depend_on_torchs_own_state():
    texts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        shard = accelerates(SeedableRandomSampler(NINE, data_seed=1))
        dealing = BalancedSampler(shard, SampleCosts(9), num_ranks=4, rank=1)
        texts.append(dealing.order_words([]))
    assert texts[0] == texts[1]


@pytest.fixture
def one_rank_for_two_hours(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    hours = timedelta(hours=2)
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=hours)
    yield
    dist.destroy_process_group()


def test_ranks_wait_for_each_other_as_long_as_the_scripts_own_group(one_rank_for_two_hours):
    # One rank alone may evaluate before it begins its epoch.
    group = RankGroup().group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=2)


def test_a_group_of_other_ranks_than_the_runs_is_named(one_rank_for_two_hours):
    why = why_unbalanced(loader_of(), world_size=4, rank=1)
    assert why == (
        "torch.distributed has 1 of the 4 ranks of the run, and the others cannot be asked"
    )


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
        # As where rank 0 alone evaluates: with a DistributedSampler it would wait.
        (loader_of(SequentialSampler(NINE)), "^it reads in order"),
        # As Lightning's, which repeats no sample.
        (loader_of(Own(NINE, num_replicas=4, rank=1, shuffle=False)), "it reads in order"),
        (
            DataLoader(Endless(), batch_sampler=accelerates([1, 2, 3]), num_workers=1),
            "its dataset has no length",
        ),
        (DataLoader(Stream(), 3, num_workers=1), r"it reads a stream \(IterableDataset\), and .*"),
        (DataLoader(Stream(), None, num_workers=1), "it reads a stream"),
        (
            loader_of(WeightedRandomSampler([1.0] * 9, 9)),
            "a WeightedRandomSampler, is not .*: dealt are the samples of torch's Distributed",
        ),
        (
            DataLoader(NINE, batch_sampler=[[0, 1], [2, 3]], num_workers=1),
            "its batch_sampler, a list, is not torch's BatchSampler, .*: dealt are the samples of",
        ),
        (
            DataLoader(NINE, batch_sampler=SkipBatchSampler(accelerates([1]), 2), num_workers=1),
            # A script that resumes so has no costs: the next epoch is as drawn, too.
            "it skips what was read of an epoch before .* after the next whole epoch, or in it if",
        ),
        (loader_of(Own(NINE, num_replicas=4, rank=1)), "an Own, is not torch's Distributed"),
        (loader_of(batch_size=None), r"no batches of its own \(batch_size=None\)"),
        (
            DataLoader(NINE, batch_sampler=OwnBatches(range(9), 3, False), num_workers=1),
            "its batch_sampler, an OwnBatches, is not torch's BatchSampler",
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


def test_a_run_of_one_rank_is_told_how_to_have_several():
    loader = loader_of(DistributedSampler(NINE, num_replicas=1, rank=0))
    why = why_unbalanced(loader, world_size=1, rank=0)
    assert why.startswith("the run has one rank; for several set cluster.dnn.processes_per_host")
    process = balancing_process(world_size=1)
    assert not _begins_balance(loader, process)
    assert process.balance_news(loader)._loader.why_not == why


def test_a_plain_loader_is_told_how_to_show_what_other_ranks_get(monkeypatch):
    # As Accelerate's dispatch_batches leaves it to rank 0.
    loader = DataLoader(NINE, 3, sampler=SeedableRandomSampler(NINE), num_workers=1)

    def why() -> str:
        return why_unbalanced(loader, world_size=4, rank=1)

    assert why().endswith(": have Accelerate prepare it, without dispatch_batches")
    monkeypatch.delitem(sys.modules, "accelerate.data_loader")
    assert why().endswith(": give it sampler=DistributedSampler(dataset)")


def test_a_loader_that_a_package_makes_is_named_by_the_scripts_line():
    loader = SimpleNamespace()
    package: dict[str, Any] = {"__name__": "accelerate.data_loader", "note_making": note_making}
    text = "def prepare(loader):\n    note_making(loader)\n"
    exec(compile(text, "/env/site-packages/accelerate/data_loader.py", "exec"), package)
    line = sys._getframe().f_lineno + 1
    package["prepare"](loader)
    assert line_words(loader) == f"test_balance.py:{line}"
    assert line_words(SimpleNamespace()) == ""


def balancing_process(**settings: Any) -> TrainerProcess:
    feed = FeedSettings(balance="cost")
    return TrainerProcess(ProcessSettings(feed=feed, **settings), Timeline(None))


def test_loaders_of_one_line_have_names_of_their_own():
    # Ranks may open them in another order, and would mix what their samples cost.
    loaders = [StokersLoader(NINE, 3, num_workers=1) for _ in range(2)]
    first, second = map(_name_of, loaders)
    assert first == f"TensorDataset, {line_words(loaders[0])}"
    assert second == f"{first} (loader 2 of that line)"


def test_a_loader_that_gets_another_sampler_is_dealt_no_more(one_rank_for_two_hours):
    process = balancing_process(world_size=1)
    process.settings = dataclasses.replace(process.settings, world_size=2)
    loader = loader_of(DistributedSampler(NINE, num_replicas=1, rank=0))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "get_world_size", lambda *_: 2)
        loader.batch_sampler.sampler = DistributedSampler(NINE, num_replicas=2, rank=0)
        assert _begins_balance(loader, process)
        loader.batch_sampler.sampler = WeightedRandomSampler([1.0] * 9, 9)
        assert not _begins_balance(loader, process)
    assert process.books(loader).costs is None


def books_of(loader: Any, process: TrainerProcess, costs: SampleCosts | None) -> LoaderBooks:
    books = process.books(loader)
    books.costs = costs
    return books


def order_of(loader: Any, books: LoaderBooks) -> SamplerOrder:
    return SamplerOrder(loader, books, is_inline=False, is_fed=True)


def state_in_mid_epoch(loader: Any, costs: SampleCosts | None) -> tuple[list[Any], Any]:
    """Returns all batches of a loader's epoch, and its state after the first of them."""
    process = balancing_process()
    order = order_of(loader, books_of(loader, process, costs))
    batches = iter(order)
    first = next(batches)
    yielded(order.position, 1)
    state = state_of(loader, process)
    return [first, *batches], state


def resumed(loader: Any, state: Any, costs: SampleCosts | None) -> list[Any]:
    process = balancing_process()
    books = books_of(loader, process, costs)
    load(loader, process, state)
    return list(order_of(loader, books))


def stokers_loader() -> StokersLoader:
    data = TensorDataset(torch.arange(48))
    sampler: DistributedSampler = DistributedSampler(data, num_replicas=4, rank=1)
    return StokersLoader(data, 3, sampler=sampler, num_workers=1)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_a_state_is_refused_by_another_number_of_ranks(before, after, one_rank_for_two_hours):
    loader = stokers_loader()
    process = balancing_process(world_size=before)
    costs = known_costs(48) if before > 1 else None
    order = order_of(loader, books_of(loader, process, costs))
    next(iter(order))
    yielded(order.position, 1)
    state = state_of(loader, process)
    words = f"world size: {before} in the state, {after} here"
    with pytest.raises(UsageError, match=words):
        load(loader, balancing_process(world_size=after), state)


def test_a_state_of_a_run_that_did_not_balance_goes_on_as_it_was_drawn(one_rank_for_two_hours):
    drawn, state = state_in_mid_epoch(stokers_loader(), None)
    # The loader that resumes has dealt epochs of its own before.
    assert resumed(stokers_loader(), state, known_costs(48)) == drawn[1:]


def test_a_dealt_epoch_is_not_resumed_where_nothing_is_dealt(one_rank_for_two_hours):
    costs = known_costs(48)
    costs._fresh = costs._table
    dealt, state = state_in_mid_epoch(stokers_loader(), costs)
    assert resumed(stokers_loader(), state, SampleCosts(48)) == dealt[1:]
    with pytest.raises(UsageError, match="were dealt to the ranks by cost") as caught:
        resumed(stokers_loader(), state, None)
    fix = "resume with feed.balance: cost, data hosts and loader workers (num_workers), or save "
    assert caught.value.fix == f"{fix}between epochs"
