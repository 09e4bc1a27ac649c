"""The process group that a stream finds on a data host."""

import pytest
import torch
import torch.distributed as dist

from stoker.feed.engine.facts import enter_group, group_here


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
