"""A batch's tensors and arrays have the strides with which they were made, wherever that was."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ProtocolError
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.wire import codec
from stoker.feed.wire.aliases import MAX_SPREAD_BYTES
from stoker.feed.wire.codec import ALIGNMENT, Arena
from support.property_tests import examples


def aligned(nbytes):
    """Memory as a trainer has it, with a byte that is easy to see."""
    memory = np.full(nbytes + ALIGNMENT, 0xAB, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    # Owns its memory: what `decode` asks for.
    return np.frombuffer(memory.data, dtype=np.uint8, count=nbytes, offset=start)


def sent(value, **words):
    encoded = codec.encode(value, allow_pickle=True, **words)
    payload = aligned(encoded.nbytes)
    if encoded.nbytes:
        encoded.write_into(payload.data)
    return encoded, codec.decode(encoded.tree, payload, allow_pickle=True)


def facts(value):
    if isinstance(value, torch.Tensor):
        line = value.storage_offset() * value.itemsize % ALIGNMENT
        return value.shape, value.stride(), value.dtype, line
    return value.shape, value.strides, value.dtype, value.flags.writeable


def received_facts(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % ALIGNMENT
    return facts(value)


def image():
    return torch.arange(2 * 3 * 16 * 20.0).view(2, 3, 16, 20)


VIEWS = {
    "left part": lambda x: x[..., :5],
    "right part": lambda x: x[..., 7:],
    "every other": lambda x: x[:, :, ::2],
    "column": lambda x: x[..., 3],
    "crop": lambda x: x[:, :, 3:11, 5:17],
    "row": lambda x: x[1, 2, 3],
    "second half": lambda x: x.view(-1)[957:],
    "permuted": lambda x: x.permute(0, 2, 3, 1),
    "crop of a permuted one": lambda x: x.permute(3, 0, 2, 1)[2:9, :, 1:],
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "crop of channels last": lambda x: x.to(memory_format=torch.channels_last)[..., 2:, 1:],
    "one channel, channels last": lambda x: x[:, 0, :, :, None].clone().permute(0, 3, 1, 2),
    "one row": lambda x: x.view(96, 20)[:1, :5].t(),
    "expanded row": lambda x: x[0, 0, 0].expand(7, 20),
    "expanded column": lambda x: x[0, 0, :, 3:4].expand(16, 9),
    "expanded number": lambda x: x[0, 0, 0, 5].expand(3, 2),
    "windows": lambda x: x.view(-1).unfold(0, 5, 1),
    "windows of a crop": lambda x: x[..., :9].unfold(3, 3, 2),
    "halves": lambda x: x.half()[..., 1:],
    "bytes": lambda x: x.view(torch.uint8)[..., 3:50],
    "float8": lambda x: x.to(torch.float8_e4m3fn)[..., 3:11],
    "complex": lambda x: torch.view_as_complex(x.view(-1, 2))[1::3],
    "diagonal": lambda x: x[0, 0].diagonal(),
    "a leaf with a gradient": lambda x: x[..., 2:9].requires_grad_(),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("words", [{}, {"shares_arrays": True}, {"keeps_gaps": True}], ids=str)
def test_a_view_comes_back_with_its_strides_and_place_in_a_line(name, words):
    view = VIEWS[name](image())
    encoded, (_, back) = sent([torch.ones(1), view], **words)
    assert received_facts(back)[:3] == facts(view)[:3]
    if "keeps_gaps" not in words:
        assert received_facts(back) == facts(view)
    assert torch.equal(
        view.float() if view.itemsize == 1 else view,
        back.to(view.dtype) if view.itemsize > 1 else back.float(),
    )
    assert back.requires_grad == view.requires_grad
    # Never more than its values.
    assert encoded.nbytes <= view.numel() * view.itemsize + 4 * ALIGNMENT


def test_an_expanded_tensor_sends_each_value_once_and_is_as_it_was_when_written_to():
    _, back = sent([torch.arange(4.0).expand(1000, 4)])
    encoded, (column,) = sent([torch.arange(8.0).view(4, 2)[:, 1:].expand(4, 1000)])
    assert encoded.nbytes <= 64
    for expanded in (back[0], column):
        with pytest.raises(RuntimeError, match="single memory location"):
            expanded.add_(1)
    column[0, 0] = 9
    assert (column[0] == 9).all()
    _, (windows,) = sent([torch.arange(9.0).unfold(0, 3, 1)])
    windows[0, 2] = 7
    assert windows[1, 1] == windows[2, 0] == 7


ARRAYS = {
    "left part": lambda x: x[..., :5],
    "backwards": lambda x: x[:, ::-1],
    "backwards, in steps": lambda x: x[::-1, 1, ::-3, 2::4],
    "permuted": lambda x: x.transpose(0, 2, 3, 1),
    "column": lambda x: x[..., 3],
    "broadcast": lambda x: np.broadcast_to(x[0, 0, 0], (6, 20)),
    "broadcast column": lambda x: np.broadcast_to(x[0, 0, :, 3:4], (16, 6)),
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x[0, 0], (3, 3)),
    "other order of bytes": lambda x: x.astype(">f4")[..., 1::2],
    "field": lambda x: np.zeros(5, dtype=[("a", "u1"), ("b", "<f4")])["b"],
    "texts": lambda x: np.array(["a", "bcd", "ef"])[::2],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_with_its_strides_where_the_loop_makes_its_batches(name):
    view = ARRAYS[name](image().numpy())
    _, (_, back) = sent([torch.ones(1), view], shares_arrays=True)
    # Numbers that repeat are read-only, as NumPy makes them.
    repeats = 0 in view.strides
    assert facts(back) == (view.shape, view.strides, view.dtype, not repeats)
    assert np.array_equal(view, back)


def test_one_view_at_two_places_is_one_object():
    x = image()
    array = x.numpy()[..., ::-1]
    for view in (x[..., :5], array, x[0, 0, 0].expand(3, 20), x[:1, 0, 0].t()):
        _, back = sent([view, view, {"again": view}], shares_arrays=True)
        assert back[0] is back[1] is back[2]["again"]


def test_columns_of_one_matrix_keep_their_strides_and_are_apart():
    matrix = torch.arange(48.0).view(6, 8)
    inputs, labels = matrix[:, :-1], matrix[:, -1]
    encoded, back = sent([inputs, labels])
    assert [each.stride() for each in back] == [(8, 1), (8,)]
    assert encoded.nbytes <= 48 * 4 + ALIGNMENT
    back[0].zero_()
    assert torch.equal(back[1], labels)
    # Neither is copied where it is received: they fill it together.
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()


def test_a_crop_in_a_workers_slot_is_left_where_it_is():
    arena = Arena(aligned(1 << 13))
    offset = arena.reserve(4096)
    assert offset is not None
    x = torch.frombuffer(arena.memory, dtype=torch.float32, count=1024, offset=offset).view(8, 128)
    x.copy_(torch.arange(1024.0).view(8, 128))
    views = [x[:, 1:100], x[2, 100:], x[:, 101:110:2]]
    encoded = codec.encode(views, allow_pickle=True, arena=arena)
    assert encoded.nbytes == arena.end
    payload = aligned(encoded.nbytes)
    payload[:] = arena.memory[: encoded.nbytes]
    back = codec.decode(encoded.tree, payload, allow_pickle=True)
    assert isinstance(back, list)
    assert list(map(received_facts, back)) == list(map(facts, views))
    assert all(map(torch.equal, views, back))


def test_gaps_far_larger_than_the_values_are_smaller_so_that_sums_stay_as_they_are():
    # Pages that nobody looks at take no memory.
    numbers = torch.zeros(3, MAX_SPREAD_BYTES // 4)
    crop = numbers[:, 5:10]
    crop.copy_(torch.rand(3, 5))
    encoded, (back,) = sent([crop])
    assert encoded.nbytes <= 1024
    assert torch.equal(back, crop)
    # Neither as long a step as the matrix has, nor that of rows without gaps.
    assert back.stride() == (16, 1)
    assert back.data_ptr() % ALIGNMENT == 20


def test_batches_have_together_as_much_for_gaps_as_one_may():
    rows = torch.zeros(2, MAX_SPREAD_BYTES // 4 // 3)
    rows[:, :80] = torch.rand(2, 80)
    views = [rows[:, place : place + 1] for place in range(0, 80, 20)]
    _, back = sent(views)
    strides = [each.stride(0) for each in back]
    assert strides[:2] == [rows.stride(0)] * 2
    assert max(strides[3:]) <= 64
    assert all(map(torch.equal, views, back))


def test_a_crop_is_the_same_with_pinned_memory_and_as_the_third_of_its_kind():
    buffers = BatchBuffers()
    crop = image()[..., 3:8]
    for _ in range(4):
        encoded = codec.encode({"x": crop, "y": torch.ones(3)}, allow_pickle=False)
        payload = torch.zeros(encoded.nbytes, dtype=torch.uint8).numpy()
        encoded.write_into(payload.data)
        batch = buffers.decoded(encoded.tree, payload, allow_pickle=False).value
        assert isinstance(batch, dict)
        back = batch["x"]
        assert torch.equal(back, crop)
        assert received_facts(back) == facts(crop)
        back.zero_()


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def any_view(draw):
    sizes = draw(SIZES)
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.int64, torch.bfloat16]))
    tensor = torch.arange(int(np.prod(sizes))).to(dtype).view(sizes)
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, tensor.ndim - 1)) if tensor.ndim else 0
        match draw(
            st.sampled_from(["slice", "permute", "select", "expand", "unfold", "unsqueeze"])
        ):
            case "slice" if tensor.ndim:
                start = draw(st.integers(0, tensor.shape[axis] - 1))
                step = draw(st.integers(1, 3))
                index = [slice(None)] * tensor.ndim
                index[axis] = slice(start, None, step)
                tensor = tensor[tuple(index)]
            case "permute" if tensor.ndim:
                tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
            case "select" if tensor.ndim:
                tensor = tensor.select(axis, draw(st.integers(0, tensor.shape[axis] - 1)))
            case "expand":
                tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
            case "unfold" if tensor.ndim:
                size = draw(st.integers(1, tensor.shape[axis]))
                tensor = tensor.unfold(axis, size, draw(st.integers(1, 2)))
            case "unsqueeze":
                tensor = tensor.unsqueeze(axis)
    return tensor


@given(any_view())
@settings(max_examples=examples(300))
def test_any_view_comes_back_as_it_was(view):
    encoded, (back,) = sent([view])
    assert received_facts(back) == facts(view)
    assert torch.equal(back, view)
    assert encoded.nbytes <= view.numel() * view.itemsize + ALIGNMENT


@given(any_view(), st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=examples(300))
def test_any_array_comes_back_as_it_was(view, flips):
    if view.dtype is torch.bfloat16:
        view = view.view(torch.int16)
    steps = tuple(slice(None, None, -1 if flip else 1) for flip in flips[: view.ndim])
    array = view.numpy()[steps]
    _, (back,) = sent([array], shares_arrays=True)
    moved = [axis for axis, size in enumerate(array.shape) if size > 1]
    assert [back.strides[axis] for axis in moved] == [array.strides[axis] for axis in moved]
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert np.array_equal(back, array)


LIES = [
    [13, "float32", [2, 2], [3, 1], 0, 64],
    [13, "float32", [2, 2], [3, 1], 0, 2],
    [13, "float32", [2, 2], [3, 1], 0, -4],
    [13, "float32", [0, 2], [3, 1], 0, 0],
    [13, "float32", [2, 2], [-3, 1], 0, 0],
    [13, "float32", [2, 2], [3], 0, 0],
    [13, "float32", [2, 2], [3, 1], 4, 0],
    [13, "float32", [20, 2], [3, 1], 0, 0],
    [13, "float32", [2, 2], [MAX_SPREAD_BYTES, 1], 0, 0],
    [13, "int32", [2, 2], [3, 1], 0, 0, True],
    [13, "float32", [2, 2], [3, 1], 0],
    [14, "<f4", [2, 2], [12, 4], 0, 64],
    [14, "<f4", [2, 2], [-MAX_SPREAD_BYTES * 2, 4], 0, 0],
    [14, "<f4", [2, 2], [12, 4], 0, 0, True],
    [14, "|O", [2, 2], [12, 4], 0, 0],
    # More copies than there are bytes.
    [0, *([13, "float32", [4, 4], [step, 1], 0, 0] for step in (5, 6))],
]


@pytest.mark.parametrize("lie", LIES, ids=repr)
def test_gaps_that_lie_are_refused(lie):
    with pytest.raises(ProtocolError):
        codec.decode(msgspec.msgpack.encode(lie), np.zeros(100, np.uint8), allow_pickle=False)
