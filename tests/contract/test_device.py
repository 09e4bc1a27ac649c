"""stoker.to_device moves, casts and normalises batches on the device that trains."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.feed import device as device_module


@pytest.fixture(autouse=True)
def _torch_waits_half_a_second(monkeypatch):
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


class Streams:
    """A double of torch.cuda: streams by name, and who waits for whom."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []
        self.copying: list[bool] = [False]
        self.compute = self._stream("compute")

    def _stream(self, name: str) -> SimpleNamespace:
        def wait_stream(other: SimpleNamespace) -> None:
            self.waits.append((name, other.name))

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream("copies")

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.copying.append(stream.name == "copies")
        yield
        self.copying.pop()


@pytest.fixture
def streams(monkeypatch):
    double = Streams()
    monkeypatch.setattr(device_module, "_streams_of", lambda device: double)
    device_module._copy_stream.cache_clear()
    yield double
    device_module._copy_stream.cache_clear()


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(params=["cpu", "cpu, ahead", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request):
    if request.param == "cpu, ahead":
        request.getfixturevalue("streams")
    return str(request.param).split(",")[0]


class Whole(data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 2, 2), index * 20, dtype=torch.uint8), index


class Pair(NamedTuple):
    pixels: torch.Tensor
    name: str


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


def test_everything_in_a_batch_is_moved_and_keeps_its_type(device):
    tensor = torch.ones(2)
    batch = {"pair": Pair(tensor, "name"), "own": Own(tensor), "none": None}
    batch |= {"more": [tensor], "ordered": OrderedDict(a=(tensor, 3))}
    (found,) = list(stoker.to_device([batch], device))
    assert [type(found[name]) for name in batch] == [type(each) for each in batch.values()]
    assert found["pair"].name == "name"
    moved = [found["pair"].pixels, found["own"].values, found["ordered"]["a"][0]]
    moved += found["more"]
    assert {each.device.type for each in moved} == {device}
    assert found["ordered"]["a"][1] == 3


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [
        (torch.float32, None, None),
        (torch.float32, [0.1, 0.5, 0.9], [0.1, 0.2, 0.4]),
        (torch.bfloat16, 0.4, 0.2),
        (torch.float16, [0.5], None),
    ],
)
def test_pixels_are_what_three_steps_in_twice_the_precision_give(device, dtype, mean, std):
    pixels = torch.arange(256, dtype=torch.uint8).repeat(12).reshape(4, 3, 16, 16)
    pixels = pixels.to(memory_format=torch.channels_last)
    (found,) = stoker.to_device([pixels], device, dtype=dtype, mean=mean, std=std)
    numbers = pixels.double() / 255
    for values, change in ((mean, numbers.sub_), (std, numbers.div_)):
        if values is not None:
            change(torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1))
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.cpu(), numbers.to(dtype))


def test_copies_wait_for_the_steps_and_steps_for_their_copy(streams):
    next(iter(stoker.to_device(loader(), "cpu")))
    # The first batch is copied, awaited by the script's kernels, and the second is under way.
    assert streams.waits == [("copies", "compute"), ("compute", "copies"), ("copies", "compute")]
    assert streams.copying == [False]


def many(number: int) -> dict[str, torch.Tensor]:
    tensors = {f"feature_{index}": torch.full((16,), number + index) for index in range(100)}
    return tensors | {"pixels": torch.full((3, 64, 64), number, dtype=torch.uint8)}


@NEEDS_CUDA
def test_batches_in_pinned_memory_arrive_whole_while_the_device_is_busy():
    busy = torch.zeros(4096, 4096, device="cuda")
    pinned = [{name: value.pin_memory() for name, value in many(n).items()} for n in range(20)]
    kept: list[torch.Tensor] = []
    for batch in stoker.to_device(pinned, "cuda", mean=0.5):
        for _ in range(10):
            busy = (busy @ busy).clamp_(-1, 1)
        kept.append(batch["feature_7"] + 0)
        del batch
    assert [values.tolist() for values in kept] == [[n + 7] * 16 for n in range(20)]


@pytest.mark.parametrize("num_batches", [1, 5])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_its_state_counts_what_the_script_got(device, num_batches, num_workers):
    batches = stoker.to_device(loader(num_workers=num_workers), device)
    iterator = iter(batches)
    for _ in range(num_batches):
        next(iterator)
    state = batches.state_dict()
    assert state["num_yielded"] == num_batches
    other = stoker.to_device(loader(), device)
    other.load_state_dict(state)
    rest = [labels.tolist()[0] for _, labels in other]
    assert rest == list(range(2 * num_batches, 10, 2))


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
