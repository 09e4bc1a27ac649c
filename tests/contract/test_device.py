"""stoker.to_device moves, casts and normalises batches on the device that trains."""

import contextlib
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.errors import UsageError
from stoker.feed import device as device_module
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.wire.blocks import BlockBatch
from stoker.feed.wire.codec import encode
from support.loader_draws import Counting


@pytest.fixture(autouse=True)
def _torch_waits_half_a_second(monkeypatch):
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


class Streams:
    """A double of torch.cuda: streams by name, and who waits for whom."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []
        self.num_made = 0
        self.copying: list[bool] = [False]
        self.compute = self._stream("compute")

    def _stream(self, name: str) -> SimpleNamespace:
        def wait_stream(other: SimpleNamespace) -> None:
            self.waits.append((name, other.name))

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def Stream(self, device: torch.device) -> SimpleNamespace:
        self.num_made += 1
        return self._stream("copies")

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.copying.append(stream.name == "copies")
        yield
        self.copying.pop()

    def current_device(self) -> int:
        return 0


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [None, 0.4, [0.5], [0.1, 0.5, 0.9]])
@pytest.mark.parametrize("std", [None, 0.2, [0.1, 0.2, 0.4]])
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


def test_means_of_other_channels_are_refused(device):
    for pixels in (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="3 channels, and uint8 pixels of"):
            next(iter(stoker.to_device([pixels], device, mean=[0.1, 0.2, 0.3])))


@pytest.mark.parametrize(
    "device", ["cpu, ahead", pytest.param("cuda", marks=NEEDS_CUDA)], indirect=True
)
def test_one_tensor_at_two_places_stays_one(device):
    tensor = torch.zeros(4, dtype=torch.uint8)
    batch = {"first": tensor, "again": [tensor], "other": torch.zeros(4, dtype=torch.uint8)}
    for options in ({}, {"mean": 0.5}):
        (found,) = stoker.to_device([batch], device, **options)
        found["first"].add_(3)
        assert torch.equal(found["again"][0], found["first"])
        assert not torch.equal(found["other"], found["first"])


class Fresh(UserDict[str, torch.Tensor]):
    """A mapping that makes its tensors each time it is asked."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return super().__getitem__(key).clone()


def test_tensors_that_are_made_when_asked_for_are_moved(device):
    batch = Fresh({str(number): torch.tensor([number]) for number in range(50)})
    (found,) = stoker.to_device([batch], device)
    assert {name: found[name].item() for name in found} == {str(n): n for n in range(50)}


def test_copies_wait_for_the_steps_and_steps_for_their_copy(streams):
    next(iter(stoker.to_device(loader(), "cpu")))
    # The first batch is copied, awaited by the script's kernels, and the second is under way.
    assert streams.waits == [("copies", "compute"), ("compute", "copies"), ("copies", "compute")]
    assert streams.copying == [False]


def test_all_loaders_and_epochs_share_the_stream_of_a_device(streams):
    batches = stoker.to_device(loader(), "cpu")
    for epochs in (batches, batches, stoker.to_device(loader(), "cpu:0")):
        assert len(list(epochs)) == 5
    assert streams.num_made == 1


def test_other_devices_with_streams_copy_ahead_and_those_without_do_not(monkeypatch):
    names = dict.fromkeys(("Stream", "current_stream", "stream"))
    monkeypatch.setattr(torch, "newer", SimpleNamespace(**names), raising=False)
    monkeypatch.setattr(torch, "plain", SimpleNamespace(Stream=None), raising=False)
    assert device_module._streams_of(SimpleNamespace(type="plain")) is None
    assert device_module._streams_of(SimpleNamespace(type="newer")) is torch.newer
    for name in ("cuda", "xpu", "mtia"):
        assert device_module._streams_of(torch.device(name)) is getattr(torch, name)
    for name in ("cpu", "mps", "meta"):
        assert device_module._streams_of(torch.device(name)) is None


def many(number: int) -> dict[str, torch.Tensor]:
    tensors = {f"feature_{index}": torch.full((16,), number + index) for index in range(100)}
    return tensors | {"pixels": torch.full((3, 64, 64), number, dtype=torch.uint8)}


class Fed:
    """A double of a fed loader, whose batches arrive in the memory of `pins_on`."""

    def __init__(
        self, *, pins_on: int | None, make: Callable[[int], dict[str, torch.Tensor]] = many
    ) -> None:
        self._pins_on = pins_on
        self._make = make
        self.hands_blocks = False
        self.blocks: list[BlockBatch] = []

    def hand_blocks(self) -> None:
        self.hands_blocks = True

    def __iter__(self) -> "Fed":
        self._batches = self._received()
        return self

    def __next__(self) -> object:
        return next(self._batches)

    def _received(self) -> Iterator[object]:
        buffers = BatchBuffers()
        for number in range(20):
            encoded = encode(self._make(number), allow_pickle=False)
            payload = buffers.room(encoded.nbytes, self._pins_on)
            encoded.write_into(payload.data)
            outcome = buffers.decoded(
                encoded.tree, payload, allow_pickle=False, keeps_block=self.hands_blocks
            )
            if isinstance(outcome.value, BlockBatch):
                self.blocks.append(outcome.value)
            yield outcome.value


@pytest.mark.parametrize(
    ("device", "is_pinned"),
    [
        ("cpu, ahead", False),
        pytest.param("cuda", False, marks=NEEDS_CUDA),
        pytest.param("cuda", True, marks=NEEDS_CUDA),
    ],
    indirect=["device"],
)
def test_blocks_of_a_fed_loader_become_its_batches(device, is_pinned):
    fed = Fed(pins_on=0 if is_pinned else None)
    for number, batch in enumerate(stoker.to_device(fed, device, mean=0.5)):
        expected = many(number)
        pixels = expected.pop("pixels").float() / 255 - 0.5
        torch.testing.assert_close(batch.pop("pixels").cpu(), pixels)
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name].cpu(), expected[name]) for name in batch)
        assert {tensor.device.type for tensor in batch.values()} == {device}
        if number > 2:
            # One transfer: all share a memory.
            addresses = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
            assert len(addresses) == 1
    assert len(fed.blocks) == 18
    assert [block.block.is_pinned() for block in fed.blocks] == [is_pinned] * 18


def of_one_memory(number: int) -> dict[str, torch.Tensor]:
    whole = torch.arange(64.0).reshape(8, 8) + number
    parts = {"first": whole[:2], "rest": whole[2:], "inner": whole[2:5]}
    return {"whole": whole, "again": whole, "flat": whole.view(-1), **parts}


def with_strides(number: int) -> dict[str, torch.Tensor]:
    batch = of_one_memory(number)
    whole = batch["whole"]
    odd = {"column": whole[:, 3], "turned": whole.t(), "rows": whole[0].expand(5, 8)}
    return batch | odd | {"steps": whole[1::3]}


@pytest.mark.parametrize("make", [of_one_memory, with_strides])
@pytest.mark.parametrize(
    ("device", "is_pinned"),
    [
        ("cpu, ahead", False),
        pytest.param("cuda", False, marks=NEEDS_CUDA),
        pytest.param("cuda", True, marks=NEEDS_CUDA),
    ],
    indirect=["device"],
)
def test_tensors_of_one_memory_arrive_with_their_values(device, is_pinned, make):
    fed = Fed(pins_on=0 if is_pinned else None, make=make)
    for number, batch in enumerate(stoker.to_device(fed, device)):
        expected = make(number)
        assert all(torch.equal(batch[name].cpu(), expected[name]) for name in expected)
        assert batch["whole"] is batch["again"]
    assert bool(fed.blocks) is (make is of_one_memory)


def test_without_streams_no_blocks_are_asked_for():
    fed = Fed(pins_on=None)
    assert len(list(stoker.to_device(fed, "cpu"))) == 20
    assert not fed.hands_blocks


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
