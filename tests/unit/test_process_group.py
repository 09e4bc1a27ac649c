"""The process group that a stream finds on a data host."""

import pytest
import torch
import torch.distributed as dist

from stoker.feed.wire.process_group import enter_group, group_here
from stoker.feed.wire.process_settings import InheritedSettings


@pytest.fixture(autouse=True)
def no_group():
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_an_answering_group_answers_what_a_stream_asks():
    enter_group((2, 5, "gloo"))
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (2, 5, "gloo")
    assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2, 3, 4]
    assert group_here() == (2, 5, "gloo")


@pytest.mark.parametrize(
    "communicate",
    [
        dist.barrier,
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.broadcast(torch.ones(1), 0),
        lambda: dist.all_gather_object([None] * 2, "a"),
        lambda: dist.send(torch.ones(1), 0),
        lambda: dist.gather(torch.ones(1), None),
    ],
)
def test_an_answering_group_refuses_to_communicate(communicate):
    enter_group((1, 2, "gloo"))
    with pytest.raises(RuntimeError, match="cannot communicate with other ranks"):
        communicate()


def test_only_a_stream_is_sent_its_rank():
    enter_group((1, 2, "gloo"))
    # A map-style dataset is held once for all ranks.
    of_map_style = InheritedSettings.of_this_process()
    of_stream = InheritedSettings.of_this_process(of_stream=True)
    dist.destroy_process_group()
    of_map_style.enter()
    of_map_style.set()
    assert not dist.is_initialized()
    of_stream.enter()
    of_stream.set()
    assert (dist.get_rank(), dist.get_world_size()) == (1, 2)


def test_without_a_group_there_is_none():
    InheritedSettings.of_this_process(of_stream=True).set()
    assert not dist.is_initialized()


@pytest.fixture
def states():
    module = pytest.importorskip("accelerate.state")
    shared = module.PartialState._shared_state
    before = dict(shared)
    shared.clear()
    yield module
    shared.clear()
    shared.update(before)


@pytest.mark.parametrize("is_made", [True, False], ids=["made in the script", "made in __iter__"])
def test_accelerate_says_the_rank_of_a_stream(states, monkeypatch, is_made):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    enter_group((3, 4, "nccl"))
    shared = states.PartialState._shared_state
    if is_made:
        facts = {"_cpu": False, "backend": "nccl", "device": torch.device("cuda:1"), "debug": False}
        facts |= {"num_processes": 4, "process_index": 3, "local_process_index": 1}
        shared.update(facts, distributed_type=states.DistributedType.MULTI_GPU)
    settings = InheritedSettings.of_this_process(of_stream=True)
    dist.destroy_process_group()
    shared.clear()
    # A data host has no accelerator.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings.enter()
    settings.set()
    state = states.PartialState()
    assert (state.process_index, state.num_processes, state.local_process_index) == (3, 4, 1)
    assert state.device == torch.device("cpu")
    with state.split_between_processes(list(range(8))) as mine:
        assert mine == [6, 7]
