"""Tensors of a batch that share memory share it again, and are sent once; every dtype is sent."""

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.errors import ShippingError
from stoker.feed.trainer.buffers import LayoutCache
from stoker.feed.wire import codec
from stoker.feed.wire.codec import Arena
from stoker.feed.wire.dataset import DatasetSpec, pack_spec, unpack_spec
from support.property_tests import examples

# torch warns of complex32 once a process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def sent(value, **words):
    encoded = codec.encode(value, allow_pickle=True, **words)
    payload = np.full(encoded.nbytes, 0xAB, dtype=np.uint8)
    if encoded.nbytes:
        encoded.write_into(memoryview(payload))
    return encoded, codec.decode(encoded.tree, payload, allow_pickle=True)


def matrix():
    return torch.arange(48.0).reshape(6, 8)


# Two tensors or more of one memory, and how many bytes they take at most.
ALIASES = {
    "one under two names": (lambda x: (x, x), 192),
    "a slice": (lambda x: (x, x[1:3]), 192),
    "a slice first": (lambda x: (x[2:], x), 192),
    "a transpose": (lambda x: (x, x.t()), 192),
    "a column": (lambda x: (x, x[:, 3]), 192),
    "an element": (lambda x: (x, x[2, 3]), 192),
    "another shape": (lambda x: (x, x.view(-1), x.view(2, 3, 8)), 192),
    "another dtype": (lambda x: (x, x.view(torch.int32), x.view(torch.uint8)), 192),
    "windows": (lambda x: tuple(x.unfold(0, 3, 1).unbind(0)), 192),
    "overlapping windows": (lambda x: (x.unfold(0, 3, 1), x), 192),
    "steps": (lambda x: (x[::2], x[::3]), 192),
    "a diagonal": (lambda x: (x.diagonal(), x[0]), 192),
    "overlapping columns": (lambda x: (x[:, :5], x[:, 3:]), 192),
    "detached": (lambda x: (x.requires_grad_(), x.detach()), 192),
    "rows that repeat": (lambda x: (x[1].expand(1000, 8), x[1]), 32),
    "an array's": (lambda x: (x, torch.from_numpy(x.numpy())), 192),
    "the imaginary part": (lambda x: (torch.view_as_complex(x.view(24, 2)), x), 192),
    "a chain": (lambda x: (x[:3], x[2:5], x[4:]), 192),
    "odd bytes": (lambda x: (x.view(torch.uint8).view(-1)[3:50], x.view(torch.uint8)[0]), 192),
}


def changed_by(tensors):
    """What each tensor holds after each is filled, one after the other."""
    held = []
    for number, tensor in enumerate(tensors):
        target = tensor.detach()
        # Elements that repeat cannot be filled in place.
        for size in range(target.ndim):
            if target.stride(size) == 0 and target.shape[size]:
                target = target.narrow(size, 0, 1)
        target.fill_(number + 1)
        held.append([each.detach().clone() for each in tensors])
    return held


def equal(first, second):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ALIASES)
def test_what_shares_memory_shares_it_again_and_is_sent_once(name):
    make, most = ALIASES[name]
    tensors = make(matrix())
    encoded, back = sent(tensors)
    # With its place in a line of the caches.
    assert encoded.nbytes <= most + 64
    assert equal(tensors, back)
    # As where a batch is received into pinned memory.
    received = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(memoryview(received))
    pinned = torch.from_numpy(received).numpy()
    again = codec.decode(encoded.tree, pinned, allow_pickle=False)
    assert equal(tensors, again)
    assert len({each.untyped_storage().data_ptr() for each in again}) == 1
    facts = [(each.shape, each.dtype, each.requires_grad) for each in tensors]
    assert facts == [(each.shape, each.dtype, each.requires_grad) for each in back]
    for mine, theirs in zip(changed_by(tensors), changed_by(back), strict=True):
        assert equal(mine, theirs)


def test_memory_that_is_shared_is_there_until_it_is_written():
    # As where a stream makes batches again, only for their checksums.
    encoded = codec.encode([*torch.arange(1e6).expand(2, -1)], allow_pickle=True)
    others = [torch.full((1000,), -1.0) for _ in range(2000)]
    payload = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(memoryview(payload))
    assert np.array_equal(payload.view("<f4"), np.arange(1e6, dtype="<f4"))
    assert len(others) == 2000


@pytest.mark.parametrize("name", ALIASES)
def test_what_shares_memory_in_a_workers_slot_is_not_copied(name):
    make, _ = ALIASES[name]
    arena = Arena(np.zeros(1 << 12, dtype=np.uint8))
    # Something is in front of it.
    arena.reserve(100)
    offset = arena.reserve(192)
    x = torch.frombuffer(arena.memory, dtype=torch.float32, count=48, offset=offset).view(6, 8)
    x.copy_(matrix())
    tensors = make(x)
    encoded = codec.encode(tensors, allow_pickle=True, arena=arena)
    assert encoded.nbytes == arena.end
    assert 0 < encoded.in_place <= 192
    payload = arena.memory[: encoded.nbytes].copy()
    back = codec.decode(encoded.tree, payload, allow_pickle=True)
    for mine, theirs in zip(changed_by(tensors), changed_by(back), strict=True):
        assert equal(mine, theirs)


# Parts of one memory without a common element: they are sent as small as they are.
APART = {
    "halves": lambda x: (x[:3], x[3:]),
    "columns": lambda x: (x[:, :-1], x[:, -1]),
    "every other": lambda x: (x[::2], x[1::2]),
    "channels": lambda x: tuple(x.view(2, 3, 8).unbind(1)),
    "last axis": lambda x: tuple(x.view(6, 4, 2).unbind(2)),
}


@pytest.mark.parametrize("name", APART)
def test_parts_without_a_common_element_are_sent_once(name):
    tensors = APART[name](matrix())
    encoded, back = sent(tensors)
    assert encoded.nbytes <= 192 + 64 * len(tensors)
    assert equal(tensors, back)
    assert [each.stride() for each in back] == [each.stride() for each in tensors]


@pytest.mark.parametrize(
    "view",
    [lambda x: x[5:7], lambda x: x[::1000, ::1000], lambda x: x[0, :10], lambda x: x.t()[3:5, :9]],
)
def test_a_small_view_of_much_memory_sends_what_it_uses(view):
    small = view(torch.zeros(2000, 3000))
    encoded, back = sent([small, torch.ones(3)])
    assert encoded.nbytes <= small.nbytes + 128
    assert torch.equal(back[0], small)


def test_many_columns_of_a_large_matrix_are_sent_as_small_as_they_are():
    # Too many to compare all; their memory lies between each other's.
    matrix = torch.arange(300_000.0).view(100, 3000)
    columns = [matrix[:, place] for place in range(0, 3000, 30)]
    encoded, back = sent(columns)
    # Beyond what gaps of a batch may take, each number has one of its own size behind it.
    assert encoded.nbytes <= 2 * sum(column.nbytes + 64 for column in columns)
    assert equal(tuple(columns), tuple(back))


GAPS = {
    "a crop": lambda x: x[:, 5:45, 7:47],
    "every other frame": lambda x: x[::2, :, :20],
    "a column": lambda x: x[:, :, 3],
    "a crop of a transpose": lambda x: x.permute(1, 2, 0)[3:40, 2:],
    "channels last, cropped": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1)[:, 2:, 3:],
    "every third element": lambda x: x.reshape(-1)[::3],
    "one row of many": lambda x: x[1:2, ::4, ::2],
    "halves": lambda x: x.half()[:, :, 1:],
    "with a gradient": lambda x: x.requires_grad_()[:, 1:, 1:].detach().requires_grad_(),
}


@pytest.mark.parametrize("name", GAPS)
def test_what_keeps_its_gaps_has_the_same_sums_and_few_more_bytes(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        views = [GAPS[name](torch.rand(6, 64, 64)) for _ in range(8)]
        arrays = [GAPS[name](torch.rand(6, 64, 64)).detach().numpy() for _ in range(8)]
    assert not any(view.is_contiguous() for view in views)
    encoded, (back, back_arrays) = sent((views, arrays), keeps_gaps=True, shares_arrays=True)
    assert encoded.nbytes < 3 * sum(view.nbytes for view in [*views, *arrays])
    for view, received in zip(views, back, strict=True):
        assert torch.equal(view, received)
        assert view.requires_grad == received.requires_grad
        assert not received.is_contiguous()
        for axis in (None, 0, -1):
            assert torch.equal(view.mean(axis), received.mean(axis))
            assert torch.equal(view.float().square().sum(axis), received.float().square().sum(axis))
    for array, received in zip(arrays, back_arrays, strict=True):
        for axis in (None, 0, -1):
            assert np.array_equal(array.mean(axis), received.mean(axis))
    flipped = [array[..., ::-1] for array in arrays]
    _, back = sent(flipped, keeps_gaps=True, shares_arrays=True)
    assert np.array_equal(flipped[0], back[0])
    assert back[0].strides[-1] < 0


def test_a_sum_follows_from_gaps_which_a_batch_keeps():
    drawn = torch.Generator().manual_seed(2)
    crops = [torch.rand(3, 64, 64, generator=drawn)[:, 5:45, 7:47] for _ in range(20)]
    _, back = sent(crops)
    sums = [float(crop.sum()) for crop in crops]
    assert [float(crop.sum()) for crop in back] == sums
    assert [float(crop.contiguous().sum()) for crop in crops] != sums


def test_gaps_that_are_too_large_are_not_closed_where_that_would_change_sums():
    # Elements that share memory with each other cannot have smaller gaps.
    windows = torch.zeros(2, 1 << 25).unfold(1, 3, 1)[:, :2]
    with pytest.raises(ShippingError):
        sent([windows], keeps_gaps=True)
    _, (back,) = sent([windows])
    assert back.is_contiguous()


def test_one_tensor_at_two_places_is_one_object():
    x, array = matrix(), np.arange(5)
    for batch in ([x, x], {"a": x, "b": (x, 1)}, [array, array]):
        _, back = sent(batch)
        flat = list(back.values()) if isinstance(back, dict) else back
        second = flat[1][0] if isinstance(flat[1], tuple) else flat[1]
        assert flat[0] is second
    empty = torch.zeros(0)
    _, back = sent([empty, torch.zeros(0), empty])
    assert back[0] is not back[1]


def test_arrays_share_memory_as_they_do_where_the_loop_makes_its_batches():
    whole = np.arange(24.0).reshape(4, 6)
    arrays = [whole, whole[::-1, ::2], whole.T, whole[1, 2:5]]
    encoded, back = sent([*arrays, torch.from_numpy(whole)], shares_arrays=True)
    assert encoded.nbytes == whole.nbytes
    for mine, theirs in zip(arrays, back, strict=False):
        assert np.array_equal(mine, theirs)
        assert mine.strides == theirs.strides
    back[1][:] = -1
    assert (back[0][:, ::2] == -1).all()
    assert (back[4][:, ::2] == -1).all()
    # Torch's workers pickle each array.
    apart, back = sent(arrays)
    assert apart.nbytes >= 2 * whole.nbytes
    back[1][:] = -1
    assert np.array_equal(back[0], whole)


def test_tensors_in_a_pickled_part_share_memory_with_others():
    x = matrix()
    batch = [x, np.array([x[2:4], "a"], dtype=object), {1: torch.Size([2])}]
    encoded, back = sent(batch)
    assert encoded.nbytes < x.nbytes + 1024
    back[1][0][:] = 5
    assert (back[0][2:4] == 5).all()


def test_a_batch_of_tensors_that_share_memory_is_one_block():
    x = torch.arange(64.0)
    encoded = codec.encode([x, x, x[16:], x[:16]], allow_pickle=True)
    payload = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(memoryview(payload))
    layouts = LayoutCache()
    # A layout is made where a second batch has it.
    for _ in range(2):
        layouts.decode(encoded.tree, payload, allow_pickle=False)
    layout = layouts.layout_of(encoded.tree, payload)
    assert layout is not None
    assert len(layout.parts) == 3
    first, second, rest, part = layout.batch_in(payload)
    assert first is second
    first[:] = 3
    assert (rest == 3).all()
    assert (part == 3).all()


@pytest.mark.parametrize("dtype", ["<f4", [("x", "<f4"), ("y", "<i4")]], ids=["plain", "fields"])
def test_a_part_of_a_mapped_file_is_sent_by_value(tmp_path, dtype):
    # The trainer may not have the file.
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(240)) * 8)
    rows = np.memmap(path, dtype=dtype, mode="r")[16:32]
    encoded = codec.encode([rows, np.asarray(rows)], allow_pickle=True)
    path.unlink()
    payload = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(memoryview(payload))
    for back in codec.decode(encoded.tree, payload, allow_pickle=True):
        assert back.tobytes() == rows.tobytes()
        assert back.dtype == rows.dtype


BUFFERS = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@st.composite
def views(draw):
    """Tensors that are views of one to three memories."""
    memories = [torch.arange(float(size)) + 100 * n for n, size in enumerate(draw(BUFFERS))]
    tensors = []
    for _ in range(draw(st.integers(1, 6))):
        tensor = memories[draw(st.integers(0, len(memories) - 1))]
        for _ in range(draw(st.integers(0, 3))):
            tensor = draw(viewed(tensor))
        tensors.append(tensor)
    return tensors


@st.composite
def viewed(draw, tensor):
    kind = draw(st.sampled_from(["slice", "transpose", "row", "fold", "repeat", "bytes", "window"]))
    if kind == "slice" and tensor.ndim:
        axis = draw(st.integers(0, tensor.ndim - 1))
        start, step = draw(st.integers(0, tensor.shape[axis])), draw(st.integers(1, 3))
        stop = draw(st.integers(start, tensor.shape[axis]))
        index = [slice(None)] * tensor.ndim
        index[axis] = slice(start, stop, step)
        return tensor[tuple(index)]
    if kind == "transpose" and tensor.ndim > 1:
        return tensor.transpose(0, 1)
    if kind == "row" and tensor.ndim and tensor.shape[0]:
        return tensor[draw(st.integers(0, tensor.shape[0] - 1))]
    if kind == "fold" and tensor.ndim == 1 and tensor.is_contiguous() and tensor.numel() % 2 == 0:
        return tensor.view(2, -1)
    if kind == "repeat":
        return tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
    if kind == "window" and tensor.ndim == 1 and tensor.numel() > 2:
        return tensor.unfold(0, 2, 1)
    if kind == "bytes" and tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.ndim:
        return tensor.view(torch.int32)
    return tensor


def nbytes_once(tensor):
    """Bytes of the values, of what repeats once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size for size, stride in sizes if stride or not size)


@given(views())
@example([torch.arange(40.0).unfold(0, 2, 1).expand(3, 39, 2)[0:1]])
@example([torch.arange(40.0).unfold(0, 2, 1).expand(3, 39, 2)])
@settings(max_examples=examples(200))
def test_any_views_of_any_memories_come_back_with_what_they_share(tensors):
    apart = sum(map(nbytes_once, tensors))
    encoded, back = sent(tensors)
    assert equal(tensors, back)
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    # Never more than the whole memories, as torch sends them, or each tensor alone.
    most = max(apart, sum(storage.nbytes() for storage in memories.values()))
    assert encoded.nbytes <= most + 80 * len(tensors)
    for mine, theirs in zip(changed_by(tensors), changed_by(back), strict=True):
        assert equal(mine, theirs)


# ---- dtypes


def all_dtypes():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(dtypes, key=str)


def bytes_of(tensor):
    return ctypes.string_at(tensor.data_ptr(), tensor.untyped_storage().nbytes())


def tensor_of(dtype):
    numbers = torch.arange(24.0).reshape(4, 6) / 8
    if str(dtype).startswith("torch.q"):
        return torch.quantize_per_tensor(numbers, 0.1, 3, dtype)
    tensor = torch.empty(4, 6, dtype=dtype)
    values = np.arange(tensor.nbytes, dtype=np.uint8) % (2 if dtype is torch.bool else 251)
    ctypes.memmove(tensor.data_ptr(), values.ctypes.data, tensor.nbytes)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype_is_the_same_after_transport(dtype):
    tensor = tensor_of(dtype)
    spec = pack_spec(DatasetSpec(dataset=[tensor], collate_fn=len), max_bytes=1 << 20)
    for back in (sent([tensor])[1][0], unpack_spec(spec.data).dataset[0]):
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert bytes_of(back)[: tensor.nbytes] == bytes_of(tensor)[: tensor.nbytes]
    if not str(dtype).startswith("torch.q"):
        _, (column, whole) = sent([tensor[:, 1], tensor])
        assert column.dtype == dtype
        assert column.data_ptr() - whole.data_ptr() == tensor.itemsize
        _, (turned,) = sent([tensor.t()])
        assert bytes_of(turned)[: tensor.nbytes] == bytes_of(tensor)


ODD = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "conjugate": lambda x: torch.tensor([1 + 2j, 3j]).conj(),
    "negative": lambda x: torch._neg_view(torch.ones(3)),
    "conjugate imaginary": lambda x: torch.tensor([1 + 2j, 3j]).conj().imag,
    "zeros without memory": lambda x: torch._efficientzerotensor(3),
    "parameter": lambda x: torch.nn.Parameter(x),
    "leaf": lambda x: x.clone().requires_grad_(),
    "with a graph": lambda x: x.clone().requires_grad_() * 2,
    "channels": lambda x: torch.quantize_per_channel(
        x, torch.ones(4), torch.zeros(4), 0, torch.qint8
    ),
    "no elements": lambda x: torch.zeros(0, 3),
    "no dimension": lambda x: torch.tensor(3.5),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_an_odd_tensor_has_the_same_values_after_transport(name):
    tensor = ODD[name](torch.eye(4))
    _, (back,) = sent([tensor])
    assert type(back) is type(tensor)
    assert (back.layout, back.dtype, back.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    assert back.requires_grad == tensor.requires_grad
    if tensor.is_quantized:
        tensor, back = tensor.dequantize(), back.dequantize()
    assert torch.equal(back.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_and_those_without_data_come_back():
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    for layout in (torch.strided, torch.jagged):
        _, (back,) = sent([torch.nested.nested_tensor(parts, layout=layout)])
        assert all(map(torch.equal, back.unbind(), parts))
    _, (back,) = sent([torch.empty(2, 3, device="meta")])
    assert (back.shape, back.device.type) == (torch.Size([2, 3]), "meta")


def test_a_tensor_that_cannot_be_sent_is_named_with_its_place_and_what_to_do():
    batch = {"x": [torch.eye(4).to_mkldnn()]}
    with pytest.raises(ShippingError) as caught:
        codec.encode(batch, allow_pickle=True)
    assert "batch['x'][0] is a tensor of torch._mkldnn" in caught.value.what
    assert "float32" in caught.value.what
    assert "to_dense()" in caught.value.fix
