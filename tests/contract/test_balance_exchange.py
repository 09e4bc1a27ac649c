"""Ranks that deal samples by cost exchange what they measured, or say who did not come."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stoker.errors import FeedError
from stoker.feed import balance
from stoker.feed.balance import SampleCosts, class_of, cost_of, sizes_of


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
    balance._EXCHANGE_SECONDS = 1.0
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
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
    assert fix == "let all ranks iterate over this loader, or leave feed.balance out"


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
        assert "rank 0 draws samples by epoch 1, 4 samples, rank 1 by epoch 0, 4 samples" in text
        assert "call set_epoch(epoch) on all of them" in text
