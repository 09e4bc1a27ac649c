"""A script's copies of a replayed batch are answered; its other copies are its own.

The device is torch's `meta`: tensors without memory, on any machine.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.profile.script_phases import DeviceCopies, room_on_device

WAYS = {
    "to": lambda tensor: tensor.to("meta"),
    "to a device": lambda tensor: tensor.to(torch.device("meta"), non_blocking=True),
    "to, by name": lambda tensor: tensor.to(device="meta"),
    "to as another": lambda tensor: tensor.to(torch.empty(0, device="meta")),
    "to another type": lambda tensor: tensor.to("meta", torch.bfloat16),
    "channels last": lambda tensor: tensor.to("meta", memory_format=torch.channels_last),
    "copy_": lambda tensor: torch.empty_like(tensor, device="meta").copy_(tensor),
    "copy_, by name": lambda tensor: torch.empty_like(tensor, device="meta").copy_(other=tensor),
}


def images() -> torch.Tensor:
    return torch.rand(4, 3, 8, 8)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_given_batch_is_answered_and_is_what_the_script_would_have(way):
    batch, copies = {"x": images(), "y": torch.arange(4)}, DeviceCopies("there")
    expected = WAYS[way](batch["x"])
    with copies.answering():
        for _ in range(2):
            copies.give(batch, place=0)
            answer = WAYS[way](batch["x"])
            assert copies.copied_bytes == batch["x"].nbytes
    assert (answer.device, answer.dtype) == (expected.device, expected.dtype)
    assert (answer.shape, answer.stride()) == (expected.shape, expected.stride())
    # As torch has it again.
    assert "to" not in vars(torch.Tensor)
    assert torch.ones(1).to(torch.float64).dtype == torch.float64


def test_what_is_no_copy_of_the_batch_to_a_device_is_the_scripts_own():
    batch, copies = images(), DeviceCopies("there")
    own = images()
    with copies.answering():
        copies.give(batch, place=0)
        assert torch.equal(batch.to(torch.float64), batch.double())
        assert batch.to("cpu") is batch
        assert torch.equal(torch.empty_like(batch).copy_(batch), batch)
        assert own.to("meta").shape == own.shape
        # Computed by the script: copied, as ever.
        assert (batch * 2).to("meta").shape == batch.shape
        assert torch.eye(3).to_sparse().to(torch.float64).is_sparse
        assert copies.copied_bytes == 0
        # Taken ahead by a script, a batch is still given; one of long ago is not.
        copies.give(own, place=1)
        batch.to("meta")
        assert copies.copied_bytes == batch.nbytes
        for place in range(4):
            copies.give(images(), place=place)
        batch.to("meta")
        assert copies.copied_bytes == 0


@pytest.mark.parametrize(
    ("copy", "is_waiting"),
    [
        (lambda tensor: tensor.to("meta"), True),
        (lambda tensor: tensor.to("meta", torch.float32, True), False),
        (lambda tensor: tensor.to("meta", non_blocking=True), False),
        (lambda tensor: tensor.to("meta", non_blocking=False), True),
        (lambda tensor: torch.empty_like(tensor, device="meta").copy_(tensor), True),
        (lambda tensor: torch.empty_like(tensor, device="meta").copy_(tensor, True), False),
    ],
)
def test_a_copy_that_is_waited_for_is_known(copy, is_waiting):
    for mode in ("there", "pinned"):
        batch, copies = images(), DeviceCopies(mode)
        with copies.answering():
            copies.give([batch], place=0)
            assert copy(batch).device.type == "meta"
        assert copies.is_waiting == is_waiting


def test_a_copy_that_is_changed_in_place_leaves_the_next_one_as_it_was():
    # On a device with values: another kind of memory of the host stands for it.
    batch, copies = images(), DeviceCopies("there")
    kept = batch.clone()
    with copies.answering():
        copies.give(batch, place=0)
        first = copies._on_device(batch, torch.device("cpu"))
        first.zero_()
        assert torch.equal(copies._on_device(batch, torch.device("cpu")), kept)
        assert torch.equal(batch, kept)


@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_views_of_a_batch_are_views_of_its_copy(start, channels, height, is_transposed):
    batch, copies = images(), DeviceCopies("there")

    def view(tensor):
        part = tensor[start:, :channels, :height]
        return part.transpose(1, 3) if is_transposed else part

    with copies.answering():
        copies.give(batch, place=0)
        found = copies._on_device(view(batch), torch.device("cpu"))
        assert torch.equal(found, view(batch))
        assert copies._is_given(view(batch))


def test_a_device_without_memory_is_not_asked_again(monkeypatch):
    batch, copies = images(), DeviceCopies("there")

    def fail(*given, **named):
        raise RuntimeError("CUDA out of memory")

    with copies.answering():
        copies.give(batch, place=0)
        monkeypatch.setattr(copies, "_move", fail)
        assert batch.to("meta").device.type == "meta"
        assert copies.has_failed
    assert room_on_device(batch, "cpu:0")


@pytest.mark.parametrize(("peak", "has_room"), [(0, True), (1000, False)])
def test_what_a_step_takes_at_most_is_no_room_for_a_batch_more(monkeypatch, peak, has_room):
    batch = torch.zeros(100, dtype=torch.uint8)
    memory = SimpleNamespace(
        mem_get_info=lambda device: (100, 2000),
        memory_reserved=lambda device: 1000,
        max_memory_allocated=lambda device: peak,
    )
    monkeypatch.setattr("torch.get_device_module", lambda kind: memory)
    assert room_on_device(batch, "cuda:0") == has_room


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", ["there", "pinned"])
def test_values_arrive_on_a_gpu(mode):
    batch, copies = images().pin_memory(), DeviceCopies(mode)
    with copies.answering():
        for _ in range(2):
            copies.give(batch, place=0)
            assert torch.equal(batch.cuda().cpu(), batch)
            assert torch.equal(batch.cuda(0, True).cpu(), batch)
            assert torch.equal(batch[:2].to("cuda", non_blocking=True).cpu(), batch[:2])
            assert copies.copied_bytes == 2.5 * batch.nbytes
    assert room_on_device(batch, "cuda:0")
