"""The device of a training is the one on which its process holds memory."""

import sys
from types import SimpleNamespace

import pytest

from stoker.feed.device_events import find_device

# Which device a script trains on: told from torch's own modules, here doubles of them.


def never() -> None:
    raise AssertionError("ranks that are forked later could not use CUDA any more")


def torch_with(
    *, held: tuple[int, ...] = (), current: int = 0, is_initialized: bool = True
) -> SimpleNamespace:
    """Makes a torch that holds so many bytes on each CUDA device."""
    cuda = SimpleNamespace(
        is_initialized=lambda: is_initialized,
        is_available=never,
        current_device=lambda: current,
        device_count=lambda: len(held),
        memory_allocated=lambda index: held[index],
    )
    return SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize(
    ("torch", "name"),
    [
        (torch_with(is_initialized=False), None),
        (torch_with(held=(0, 0), is_initialized=False), None),
        (torch_with(held=(10, 90)), "cuda:0"),
        (torch_with(held=(0, 5, 70, 0)), "cuda:2"),
    ],
    ids=["cpu", "not used", "current", "named"],
)
def test_the_device_is_the_one_on_which_the_process_holds_memory(monkeypatch, torch, name):
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = find_device()
    assert (device and device.name) == name


def test_without_torch_there_is_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert find_device() is None
