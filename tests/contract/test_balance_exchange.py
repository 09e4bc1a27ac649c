"""Ranks that deal samples by cost exchange what they measured, or say who did not come."""

import multiprocessing

import torch.distributed as dist

from stoker.errors import FeedError
from stoker.feed import balance
from stoker.feed.balance import SampleCosts, sizes_of


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
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    arguments = [(str(tmp_path / "store"), rank, told) for rank in range(2)]
    ranks = [context.Process(target=exchange_with_another, args=args) for args in arguments]
    for rank in ranks:
        rank.start()
    first, second = told.get(), told.get()
    for rank in ranks:
        rank.join(150)
    assert first == second
    assert 0 not in first[0]
    assert first[0][2] == first[0][3] > first[0][1] >= first[0][0]
    assert first[1]["fresh"] == {}
