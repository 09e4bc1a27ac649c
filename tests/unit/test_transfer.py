"""Small tensors of a batch go to the device together, and are there what they were here."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from stoker.feed import transfer
from stoker.feed.transfer import (
    MAX_GAP_BYTES,
    MAX_TRANSFER_BYTES,
    transferred,
    transferred_block,
)
from stoker.feed.wire.blocks import BlockBatch, BlockLayout, BlockPart, contiguous_part, cut

DEVICES = [torch.device("cpu")]
if torch.cuda.is_available():
    DEVICES.append(torch.device("cuda"))
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64]


@pytest.fixture
def copied(monkeypatch):
    """Sizes of the transfers that join tensors."""
    sizes: list[int] = []
    copy = transfer._copied

    def noted(source, transfer, device):
        sizes.append(transfer.nbytes)
        return copy(source, transfer, device)

    monkeypatch.setattr(transfer, "_copied", noted)
    return sizes


def batch_in_a_block(parts: list[BlockPart]) -> list[torch.Tensor]:
    last = parts[-1]
    nbytes = (last.start + math.prod(last.shape)) * last.dtype.itemsize
    return cut(torch.arange(nbytes).to(torch.uint8), parts)


def laid(*kinds: tuple[torch.dtype, tuple[int, ...]], gap: int = 0) -> list[BlockPart]:
    parts, end = [], 0
    for dtype, shape in kinds:
        offset = -(-end // 64) * 64
        parts.append(contiguous_part(dtype, shape, offset=offset))
        end = offset + math.prod(shape) * dtype.itemsize + gap
    return parts


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    is_like = (found.dtype, found.shape, found.stride(), found.requires_grad) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
        expected.requires_grad,
    )
    # As bytes: there are NaNs among arbitrary numbers.
    same = torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))
    return is_like and same


@pytest.mark.parametrize("device", DEVICES)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 6), min_size=1, max_size=3)),
        min_size=1,
        max_size=20,
    ),
    gap=st.sampled_from([0, 100, MAX_GAP_BYTES - 64, MAX_GAP_BYTES + 64]),
)
def test_tensors_are_what_each_alone_would_be(device, kinds, gap):
    tensors = batch_in_a_block(laid(*[(dtype, tuple(shape)) for dtype, shape in kinds], gap=gap))
    found = transferred(tensors, device)
    assert all(equal(there, tensor) for there, tensor in zip(found, tensors, strict=True))
    assert {there.device.type for there in found} == {device.type}
    assert not any(there._is_view() for there in found)


@pytest.mark.parametrize("device", DEVICES)
@given(sizes=st.permutations([1, 1, 2, 3, 5, 1000, 1000, MAX_TRANSFER_BYTES // 4 + 1]))
def test_tensors_of_a_block_come_in_the_batchs_order_wherever_they_lie(device, sizes):
    parts = laid(*[(torch.int32, (size,)) for size in sizes])
    # As a batch that was built in place lists them: in another order, one at two places.
    parts = [*sorted(parts, key=lambda part: (part.shape, -part.start)), parts[0]]
    nbytes = 64 * len(sizes) + 4 * sum(sizes)
    layout = BlockLayout(parts, list)
    received = BlockBatch(layout, torch.arange(nbytes).to(torch.uint8))
    found = transferred_block(received, device)
    expected = received.batch()
    assert all(equal(there, here) for there, here in zip(found, expected, strict=True))
    found[-1].zero_()
    assert not found[[part.start for part in parts].index(parts[-1].start)].any()


@pytest.mark.parametrize("device", DEVICES)
def test_three_hundred_small_tensors_are_one_transfer(device, copied):
    tensors = batch_in_a_block(laid(*[(torch.float32, (16, 8))] * 300))
    found = transferred(tensors, device)
    assert copied == [300 * 512]
    assert len({there.untyped_storage().data_ptr() for there in found}) == 1


class Counting(TorchFunctionMode):
    """Counts what is asked of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_equal_tensors_asks_as_much_of_torch_however_many_they_are(device):
    # Each question takes the host some microseconds: 300 of them were the most of its time.
    counts = []
    for number in (3, 300):
        parts = laid(*[(torch.float32, (16, 8))] * number)
        layout = BlockLayout(parts, lambda tensors: dict(enumerate(tensors)))
        received = BlockBatch(layout, torch.zeros(number * 512, dtype=torch.uint8))
        with Counting() as asked:
            found = layout.build(transferred_block(received, device))
        assert isinstance(found, dict)
        assert len(found) == number
        counts.append(asked.count)
    assert counts[0] == counts[1] <= 10


def test_a_large_tensor_goes_alone_and_shares_nothing_with_the_labels(copied):
    pixels = (torch.uint8, (MAX_TRANSFER_BYTES + 1,))
    tensors = batch_in_a_block(laid(pixels, (torch.int64, (256,)), (torch.int64, (256,))))
    _, labels, _ = transferred(tensors, DEVICES[-1])
    assert copied == [2 * 2048]
    assert labels.untyped_storage().nbytes() == 2 * 2048


def test_a_kept_tensor_keeps_no_more_than_a_transfer(copied):
    transferred(batch_in_a_block(laid(*[(torch.float32, (50_000,))] * 20)), DEVICES[-1])
    assert max(copied) <= MAX_TRANSFER_BYTES
    assert len(copied) == 4


def test_what_lies_far_apart_is_not_copied_with_what_lies_between(copied):
    base = torch.zeros(1 << 19, dtype=torch.uint8)
    tensors = [base[:10], base[20:40], base[1 << 18 : (1 << 18) + 10]]
    transferred(tensors, DEVICES[-1])
    assert copied == [40]


class Marked(torch.Tensor):
    pass


SPECIAL = {
    "a gradient": lambda: torch.ones(4, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "a subclass": lambda: torch.ones(4).as_subclass(Marked),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.tensor([1 + 2j, 3j]),
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "expanded": lambda: torch.ones(1).expand(4),
    "transposed": lambda: torch.arange(6).reshape(2, 3).T,
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "empty": lambda: torch.empty(0, 3),
    "a number": lambda: torch.tensor(3),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:.*quantize.*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SPECIAL)
def test_other_tensors_copy_themselves(kind, device):
    tensor, around = SPECIAL[kind](), torch.ones(4)
    for tensors in ([tensor], [around[:2], tensor, around[2:]], [tensor, tensor, tensor]):
        found = transferred(tensors, device)[len(tensors) // 2]
        expected = tensor.to(device)
        assert type(found) is type(expected)
        assert (found.shape, found.dtype, found.layout) == (
            expected.shape,
            expected.dtype,
            expected.layout,
        )
        assert str(found) == str(expected)


def test_one_memory_under_two_storages_is_read_within_each():
    memory = bytearray(range(64))
    short = torch.frombuffer(memory, dtype=torch.uint8, count=8)
    long = torch.frombuffer(memory, dtype=torch.uint8)
    for tensors in ([short[:4], long[8:9], long[48:]], [long[48:], long[:9], short[:4]]):
        found = transferred(tensors, DEVICES[-1])
        assert [there.tolist() for there in found] == [tensor.tolist() for tensor in tensors]


def test_tensors_of_torchs_own_loader_are_not_looked_at_one_by_one(monkeypatch):
    monkeypatch.setattr(transfer, "_Storages", None)
    tensors = [torch.full((4,), number) for number in range(10)]
    found = transferred(tensors, DEVICES[-1])
    assert [there.tolist() for there in found] == [tensor.tolist() for tensor in tensors]


def test_slices_at_odd_places_keep_their_values():
    numbers = torch.arange(100, dtype=torch.int64)
    tensors = [numbers[3:5], numbers[7:8], numbers[7:9], numbers.view(torch.int16)[15:18]]
    found = transferred(tensors, DEVICES[-1])
    assert [there.tolist() for there in found] == [tensor.tolist() for tensor in tensors]
