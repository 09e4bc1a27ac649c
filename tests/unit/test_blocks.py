"""Tensors are cut from a block where they lie, each for itself."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.wire.blocks import BlockPart, contiguous_part, cut, merged

KINDS = st.tuples(
    st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]),
    st.sampled_from([(), (1,), (3,), (2, 4)]),
    st.sampled_from([0, 0, 0, 64]),
)


def laid(kinds: list[tuple[torch.dtype, tuple[int, ...], int]]) -> list[BlockPart]:
    parts, end = [], 0
    for dtype, shape, gap in kinds:
        offset = -(-end // 64) * 64 + gap
        parts.append(contiguous_part(dtype, shape, offset=offset))
        end = offset + math.prod(shape) * dtype.itemsize
    return parts


@given(kinds=st.lists(KINDS, max_size=30))
def test_merged_parts_are_the_same_tensors(kinds):
    parts = laid(kinds)
    block = torch.arange(4096).to(torch.uint8)
    rows = merged(parts)
    assert sum(row.num_equal for row in rows) == len(parts)
    for found, part in zip(cut(block, rows), parts, strict=True):
        expected = block.view(part.dtype)[part.start : part.start + math.prod(part.shape)]
        assert (found.dtype, found.shape, found.stride()) == (
            part.dtype,
            part.shape,
            part.strides,
        )
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.view(torch.uint8))


def test_equal_tensors_in_a_row_are_one_part():
    parts = laid([(torch.float32, (3,), 0)] * 300)
    assert [row.num_equal for row in merged(parts)] == [300]
    # Backwards, and one twice at one place.
    assert len(merged(parts[::-1])) == 300
    assert [row.num_equal for row in merged([parts[0], parts[0], parts[1]])] == [1, 2]


def test_merged_tensors_are_changed_one_without_the_other():
    weight = torch.nn.Parameter(torch.ones(3))
    block = torch.ones(3 * 64).view(torch.uint8)
    first, second, third = cut(block, merged(laid([(torch.float32, (3,), 0)] * 3)))
    loss = (first * weight).sum()
    second.mul_(2)
    third.mul_(weight)
    loss.backward()
    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert not second._is_view()
