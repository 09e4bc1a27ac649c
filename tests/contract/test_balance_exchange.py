"""Ranks that deal samples by cost exchange what they measured, or say who did not come."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stoker.errors import FeedError
from stoker.feed import balance
from stoker.feed.balance import RankGroup, SampleCosts, class_of, cost_of, sizes_of


def results_of_two_ranks(measure: Callable[..., None], folder: Path) -> list[Any]:
    """Returns what two ranks put into their queue, in the order in which it came.

    Args:
        measure: Runs in each rank, with a file to meet at, its number, and the queue.
        folder: Where the file lies.
    """
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    arguments = [(str(folder / "store"), rank, queue) for rank in range(2)]
    ranks = [context.Process(target=measure, args=args) for args in arguments]
    for rank in ranks:
        rank.start()
    results = [queue.get(), queue.get()]
    for rank in ranks:
        rank.join(150)
    return results


def exchange_alone(store: str, told) -> None:
    balance._MIN_EXCHANGE_SECONDS = 1.0
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=2, timeout=timedelta(seconds=1)
    )
    try:
        SampleCosts(3).exchange()
    except FeedError as err:
        told.put((err.what, err.fix))


def wait_as_the_other_rank(store: str, told) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    # Until the first one has given up.
    told.put(told.get())


def test_a_rank_that_does_not_iterate_is_an_error_and_no_hang(tmp_path):
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    store = str(tmp_path / "store")
    ranks = [
        context.Process(target=target, args=(store, told), daemon=True)
        for target in (exchange_alone, wait_as_the_other_rank)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(150)
        assert rank.exitcode == 0
    what, fix = told.get()
    assert what.startswith("the ranks could not exchange what samples cost")
    assert fix.startswith("let all ranks iterate over this loader, also where one only looks at")


def exchange_with_another(store: str, rank: int, told) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    costs = SampleCosts(4)
    costs.note([rank, 2 + rank], sizes_of([bytes(100 + rank), bytes(200)]))
    costs.exchange()
    told.put((costs.costs_of([0, 1, 2, 3]), costs.state()))


def test_all_ranks_know_afterwards_what_each_has_measured(tmp_path):
    first, second = results_of_two_ranks(exchange_with_another, tmp_path)
    assert first == second
    assert 0 not in first[0]
    assert first[0][2] == first[0][3] > first[0][1] >= first[0][0]
    assert first[1]["fresh"] == b""


def measure_in_two_epochs(store: str, rank: int, told) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    costs = SampleCosts(4)
    # Longer in each epoch, and measured by the other rank.
    for epoch in range(2):
        index = (rank + epoch) % 2
        costs.note([index], sizes_of([bytes(100 * (1 + epoch + index))]))
        costs.exchange()
    told.put(costs.costs_of([0, 1]))


def test_a_sample_whose_length_changes_counts_as_it_was_measured_last(tmp_path):
    costs = results_of_two_ranks(measure_in_two_epochs, tmp_path)
    assert costs == [[cost_of(class_of(200)), cost_of(class_of(300))]] * 2


def exchange_with_another_order(store: str, rank: int, told) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    said: list[str] = []
    costs = SampleCosts(4, say=said.append)
    is_known = []
    # The second rank forgets `set_epoch` once.
    for epoch in ((0, 0), (1, 0), (2, 2), (3, 3)):
        costs.note([rank], sizes_of([bytes(100)]))
        costs.exchange(f"epoch {epoch[rank]}")
        is_known.append(costs.is_known)
    told.put((rank, is_known, said))


def test_an_epoch_whose_order_the_ranks_do_not_share_is_not_dealt(tmp_path):
    results = results_of_two_ranks(exchange_with_another_order, tmp_path)
    for _, is_known, said in results:
        assert is_known == [True, False, True, True]
        (text,) = said
        assert "rank 0 draws samples by epoch 1, rank 1 by epoch 0: " in text
        assert "call set_epoch(epoch) on all of them" in text


def exchange_by_new_loaders(store: str, rank: int, told) -> None:
    groups = []
    made = dist.new_group

    def counted(*args, **options):
        groups.append(made(*args, **options))
        return groups[-1]

    dist.new_group = counted
    group = RankGroup()
    for start in range(2):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}-{start}", rank=rank, world_size=2
        )
        # Another dataset each time, as of many files.
        for number in range(3):
            costs = SampleCosts(4 + number, group=group)
            costs.note([rank], sizes_of([bytes(100)]))
            costs.exchange()
            assert costs.is_known
        dist.destroy_process_group()
    told.put(len(groups))


def test_all_loaders_of_a_rank_exchange_by_one_group_also_where_ranks_meet_again(tmp_path):
    assert results_of_two_ranks(exchange_by_new_loaders, tmp_path) == [2, 2]


def exchange_of_two_loaders(store: str, rank: int, told) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = RankGroup()
    said: list[str] = []
    loaders = [
        SampleCosts(4, name=name, say=said.append, group=group)
        for name in ("Clips, train.py:12", "Texts, train.py:13")
    ]
    # The second rank opens them in another order.
    for costs in loaders if rank == 0 else reversed(loaders):
        costs.note([rank], sizes_of([bytes(100)]))
        costs.exchange("epoch 1")
    told.put(([costs.is_known for costs in loaders], said))


def test_ranks_that_open_two_loaders_in_another_order_do_not_mix_their_costs(tmp_path):
    for is_known, said in results_of_two_ranks(exchange_of_two_loaders, tmp_path):
        assert is_known == [False, False]
        assert "4 samples of Clips, train.py:12, rank 1" in said[0]


def exchange_without_measures(store: str, rank: int, told) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = []
    for indices, samples in (([0, 1], b""), (["a", "b"], sizes_of([bytes(9)] * 2)), ([], b"")):
        said: list[str] = []
        costs = SampleCosts(4, say=said.append)
        costs.exchange()
        if indices:
            costs.note(indices, samples)
        costs.num_taken = 1
        costs.exchange()
        results.append(said)
    told.put(results)


def test_an_epoch_in_which_no_sample_was_measured_is_named(tmp_path):
    for results in results_of_two_ranks(exchange_without_measures, tmp_path):
        assert results == [
            ["what its samples cost is not seen where they are collated"],
            ["its sampler gives other things than places in the dataset"],
            ["no data host has made its batches"],
        ]
