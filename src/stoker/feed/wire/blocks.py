"""Tensors cut from one block of memory, on the host or on a device.

The tensors share the block's storage, and nothing else. Views in autograd's sense would share a
version too: after a change of one in place, no backward pass could use another.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import torch

# As `Tensor.set_`, in 40% of its time: 0.9 us for each tensor.
_without_views: type[AbstractContextManager[object]] = getattr(
    torch._C, "_AutoDispatchBelowADInplaceOrView", contextlib.nullcontext
)


class BlockPart(NamedTuple):
    """Place of a tensor in a block, or of `num_equal` like it.

    Attributes:
        strides: In elements, as `start` and `step`.
        start: From the beginning of the block.
        step: From each of them to the next.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    num_equal: int = 1
    step: int = 0


def contiguous_part(dtype: torch.dtype, shape: tuple[int, ...], *, offset: int) -> BlockPart:
    """Returns the part of a contiguous tensor, `offset` bytes from the block's beginning.

    Args:
        dtype: Type of the tensor; `offset` is a multiple of its size.
        shape: Shape of the tensor.
        offset: Bytes from the beginning of the block.
    """
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return BlockPart(dtype, shape, strides, offset // dtype.itemsize)


def cut(block: torch.Tensor, parts: Sequence[BlockPart]) -> list[torch.Tensor]:
    """Returns the tensors of a block: one dimension of uint8, from its storage's first byte on."""
    nbytes = block.numel()
    typed: dict[torch.dtype, torch.Tensor] = {}
    tensors: list[torch.Tensor] = []
    with _without_views():
        for dtype, shape, strides, start, num_equal, step in parts:
            numbers = typed.get(dtype)
            if numbers is None:
                # A view has whole elements only; no tensor lies in the rest.
                rest = nbytes % dtype.itemsize
                numbers = (block[:-rest] if rest else block).view(dtype)
                typed[dtype] = numbers
            if num_equal == 1:
                tensors.append(numbers.as_strided(shape, strides, start))
            elif shape and step == shape[0] * strides[0]:
                # One behind the other: 60 us for 300, where each alone takes 200 in all.
                whole = (num_equal * shape[0], *shape[1:])
                rows = numbers.as_strided(whole, strides, start)
                tensors.extend(rows.split_with_sizes([shape[0]] * num_equal))
            else:
                # Numbers without a dimension, or with gaps: 80 us for 300.
                rows = numbers.as_strided((num_equal, *shape), (step, *strides), start)
                tensors.extend(rows.unbind(0))
    return tensors


def block_beside(memory: object, nbytes: int) -> torch.Tensor:
    """Returns a new block, pinned if `memory` is a pinned tensor, and if that can be.

    Args:
        memory: What owns the block that was received.
        nbytes: Of the new one.
    """
    if isinstance(memory, torch.Tensor) and memory.is_pinned():
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


def merged(parts: Sequence[BlockPart]) -> list[BlockPart]:
    """Returns the same tensors in the same order, equal ones at equal distances as one part."""
    rows: list[BlockPart] = []
    for part in parts:
        last = rows[-1] if rows else None
        if last is None or part[:3] != last[:3]:
            rows.append(part)
            continue
        # From the first of them: the next one lies `num_equal` steps behind it.
        step = part.start - last.start
        if last.num_equal == 1 and step > 0:
            rows[-1] = last._replace(num_equal=2, step=step)
        elif last.num_equal > 1 and step == last.num_equal * last.step:
            rows[-1] = last._replace(num_equal=last.num_equal + 1)
        else:
            rows.append(part)
    return rows


# The loader whose epoch begins now and whose batches `to_device` takes as blocks. It is known
# before the first batch is asked for: a whole epoch of tiny ones may be there a moment later.
taken_from: ContextVar[object] = ContextVar("taken_from", default=None)


class BlockLayout:
    """How the batches of a kind lie in their blocks.

    Attributes:
        parts: Places of the tensors.
        build: Makes a batch of its tensors, which come in the order of `parts`.
    """

    def __init__(
        self, parts: Sequence[BlockPart], build: Callable[[Sequence[torch.Tensor]], object]
    ) -> None:
        self.parts = parts
        self.build = build
        self._merged = merged(parts)

    def batch(self, block: torch.Tensor) -> object:
        """Returns the batch in a block, as `cut` takes it."""
        return self.build(cut(block, self._merged))


class BlockBatch:
    """A batch that is still one block of memory, for `to_device`."""

    __slots__ = ("block", "layout")
    # With `nbytes`, what `memory.num_bytes` asks for.
    dtype = torch.uint8

    def __init__(self, layout: BlockLayout, block: torch.Tensor) -> None:
        self.layout = layout
        self.block = block

    @property
    def nbytes(self) -> int:
        return self.block.nbytes

    def batch(self) -> object:
        return self.layout.batch(self.block)
