"""stoker.to_device moves, casts and normalises batches on the device that trains."""

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.errors import UsageError
from support.loader_draws import Counting


@pytest.fixture(autouse=True)
def _torch_waits_half_a_second(monkeypatch):
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


class NoStream:
    def wait_stream(self, other: "NoStream") -> None:
        pass


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(params=["cpu", "cpu, ahead", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request, monkeypatch):
    if request.param == "cpu, ahead":
        monkeypatch.setattr("stoker.feed.device._copies_ahead", lambda device: True)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: NoStream())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NoStream())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return str(request.param).split(",")[0]


class Whole(data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 2, 2), index * 20, dtype=torch.uint8), index


class Broken(Whole):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            raise LookupError("sample 5 is broken")
        return super().__getitem__(index)


class Pair(NamedTuple):
    pixels: torch.Tensor
    name: str


@dataclass
class Example:
    pixels: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class Own:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device, *, non_blocking: bool) -> "Own":
        return Own(self.values.to(device, non_blocking=non_blocking))


def loader(dataset: data.Dataset[object] | None = None, **options: object) -> stoker.DataLoader:
    return stoker.DataLoader(dataset or Whole(), **({"batch_size": 2} | options))


def test_pixels_become_normalised_numbers_and_labels_stay(device):
    batches = stoker.to_device(loader(), device, mean=0.5, std=[0.1, 0.2, 0.4])
    for (pixels, labels), (raw, expected) in zip(batches, loader(), strict=True):
        assert pixels.device.type == labels.device.type == device
        assert (pixels.dtype, labels.dtype) == (torch.float32, torch.int64)
        deviations = torch.tensor([0.1, 0.2, 0.4]).reshape(3, 1, 1)
        # A GPU divides and contracts otherwise than a CPU: equal as numbers, not as bits.
        torch.testing.assert_close(pixels.cpu(), (raw.float() / 255 - 0.5) / deviations)
        assert torch.equal(labels.cpu(), expected)


@pytest.mark.parametrize(
    ("dtype", "found", "last"),
    [(None, torch.uint8, 20), (torch.bfloat16, torch.bfloat16, pytest.approx(20 / 255, rel=0.01))],
)
def test_pixels_have_the_type_that_is_asked_for_or_stay_uint8(device, dtype, found, last):
    pixels, _ = next(iter(stoker.to_device(loader(), device, dtype=dtype)))
    assert (pixels.dtype, pixels.device.type) == (found, device)
    assert pixels.flatten()[-1].item() == last


def test_everything_in_a_batch_is_moved_and_keeps_its_type(device):
    tensor = torch.ones(2)
    batch = {"pair": Pair(tensor, "name"), "own": Own(tensor), "none": None}
    example = Example(tensor, {"more": [tensor]})
    batch |= {"example": example, "ordered": OrderedDict(a=(tensor, 3))}
    (found,) = list(stoker.to_device([batch], device))
    assert [type(found[name]) for name in batch] == [type(each) for each in batch.values()]
    assert found["pair"].name == "name"
    moved = [found["pair"].pixels, found["own"].values, found["ordered"]["a"][0]]
    moved += [found["example"].pixels, found["example"].rest["more"][0]]
    assert {each.device.type for each in moved} == {device}
    assert found["ordered"]["a"][1] == 3


def test_it_may_be_gone_through_epoch_by_epoch(device):
    batches = stoker.to_device(loader(), device)
    assert len(batches) == 5
    for epoch in range(2):
        assert [labels.tolist()[0] for _, labels in batches] == [0, 2, 4, 6, 8]
        state = batches.state_dict()
        assert (state["epoch"], state["begun"]) == (epoch + 1, None)


def test_a_failing_batch_is_told_in_its_turn_and_the_epoch_goes_on(device):
    iterator = iter(stoker.to_device(loader(Broken()), device))
    found: list[object] = []
    for _ in range(5):
        try:
            found.append(next(iterator)[1].tolist())
        except LookupError:
            found.append("broken")
    assert found == [[0, 1], [2, 3], "broken", [6, 7], [8, 9]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


class Stateful(Counting, data.Sampler[int]):
    pass


@pytest.mark.parametrize("num_batches", [1, 4, 5])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_its_state_counts_what_the_script_got(device, num_batches, num_workers):
    for options in ({}, {"sampler": Stateful()}):
        batches = stoker.to_device(loader(num_workers=num_workers, **options), device)
        iterator = iter(batches)
        for _ in range(num_batches):
            next(iterator)
        state = batches.state_dict()
        assert state["num_yielded"] == num_batches
        other = stoker.to_device(loader(**({"sampler": Stateful()} if options else {})), device)
        other.load_state_dict(state)
        rest = [labels.tolist()[0] for _, labels in other]
        assert rest == list(range(2 * num_batches, 10, 2))


def test_what_is_no_loader_of_stoker_has_no_state():
    for batches in ([1], data.DataLoader(Whole())):
        with pytest.raises(UsageError, match="has no state"):
            stoker.to_device(batches, "cpu").state_dict()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.int64}, "not a floating type"),
        ({"std": [1.0, 0.0]}, "a standard deviation is 0"),
    ],
)
def test_senseless_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        stoker.to_device([], "cpu", **options)
