"""A batch that was encoded and decoded has the same types, values, strides and identities."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ProtocolError
from stoker.feed.engine.batch_socket import layout
from stoker.feed.engine.codec import TensorMemory, decode, encode


def blocks(leaves: list[memoryview], *, as_tensor: bool = False) -> list[object]:
    """Returns the leaves as views of one block, as the trainer receives them."""
    offsets, nbytes = layout([leaf.nbytes for leaf in leaves])
    block = torch.empty(nbytes, dtype=torch.uint8)
    flat = block.numpy()
    parts: list[object] = []
    for offset, leaf in zip(offsets, leaves, strict=True):
        flat[offset : offset + leaf.nbytes] = np.frombuffer(leaf, dtype=np.uint8)
        part = block[offset : offset + leaf.nbytes]
        parts.append(TensorMemory.of(part) if as_tensor else part.numpy())
    return parts


def again(batch, **options):
    pickled, leaves = encode(batch)
    return decode(pickled, blocks(leaves), **options)


@dataclasses.dataclass
class Sample:
    pixels: torch.Tensor
    name: str


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.uint8,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(4, 6).T,
        torch.rand(3, 1, 4).permute(2, 0, 1),
    ],
)
def test_a_dense_tensor_keeps_its_strides(tensor):
    back = again(tensor)
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6)[:, ::2],
        torch.rand(3, 1).expand(3, 5),
        torch.rand(8)[2:6],
        torch.rand(5, 5).to_sparse(),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.rand(3, requires_grad=True),
        torch.nn.Parameter(torch.rand(3)),
    ],
    ids=["gaps", "expanded", "slice", "sparse", "conjugate", "grad", "parameter"],
)
def test_any_other_tensor_has_its_class_and_values(tensor):
    back = again(tensor)
    assert type(back) is type(tensor)
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back.to_dense().resolve_conj(), tensor.to_dense().resolve_conj())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.random.default_rng(1).random((3, 4))),
        np.arange(12)[::3],
        np.array(["a", "bc"]),
        np.array([("a", 1)], dtype=[("name", "U3"), ("count", "i4")]),
        np.array(["2026-11-30"], dtype="datetime64[D]"),
        np.array(3.5),
        np.array([{"a": 1}, None], dtype=object),
        np.empty((0, 3)),
    ],
    ids=["c", "fortran", "gaps", "texts", "records", "dates", "scalar", "objects", "empty"],
)
def test_an_array_has_its_dtype_shape_values_and_is_writable(array):
    back = again(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    if array.flags.forc:
        assert back.flags.f_contiguous == array.flags.f_contiguous
    assert back.flags.writeable
    assert np.array_equal(back, array)


def test_an_object_that_occurs_twice_is_one_again():
    tensor = torch.rand(3)
    array = np.arange(3)
    pickled, leaves = encode([tensor, tensor, array, array])
    assert len(leaves) == 2
    first, second, third, fourth = decode(pickled, blocks(leaves))
    assert first is second
    assert third is fourth


def test_tensors_share_the_allocation_of_a_block_that_torch_made():
    batch = [torch.rand(3, 4), torch.arange(5, dtype=torch.int16), np.arange(3)]
    pickled, leaves = encode(batch)
    parts = blocks(leaves, as_tensor=True)
    back = decode(pickled, parts)
    assert torch.equal(back[0], batch[0])
    assert torch.equal(back[1], batch[1])
    assert np.array_equal(back[2], batch[2])
    storages = {tensor.untyped_storage().data_ptr() for tensor in back[:2]}
    assert storages == {parts[0].tensor.untyped_storage().data_ptr()}


def test_a_class_of_the_script_goes_by_its_name(monkeypatch):
    import __main__

    class OfScript(dict):
        pass

    OfScript.__module__ = "__main__"
    OfScript.__qualname__ = "OfScript"
    pickled, leaves = encode(OfScript(a=torch.ones(1)))
    # The trainer's, which has the same name.
    monkeypatch.setattr(__main__, "OfScript", OfScript, raising=False)
    back = decode(pickled, blocks(leaves))
    assert type(back) is OfScript
    assert torch.equal(back["a"], torch.ones(1))


def test_without_pickles_only_plain_containers_are_accepted():
    plain = [torch.ones(2), np.arange(3), {"a": (1, "b")}, collections.OrderedDict(a=1), {1, 2}]
    back = again(plain, accept_pickles=False)
    assert back[2:] == plain[2:]
    with pytest.raises(ProtocolError, match="Sample"):
        again([Sample(torch.zeros(1), "a")], accept_pickles=False)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(DTYPES),
)
def test_any_permuted_tensor_is_the_same(shape, order, dtype):
    dimensions = list(range(len(shape)))
    order.shuffle(dimensions)
    tensor = (torch.rand(shape) * 100).to(dtype).permute(dimensions)
    back = again(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride() or tensor.numel() == 0
