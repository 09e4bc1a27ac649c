"""Memory for batches: sealed or unsealed into it, or copied where they cannot stay.

Blocks are used again once their last view is gone.

Fresh memory for each batch costs its page faults (0.02 to 0.08 CPU-s/GB). A tensor's end says
nothing about its memory: `detach()`, `numpy()` and slices outlive it. So the finalizer sits on the
one array that exports the block's buffer; every view, of torch or NumPy, holds that array.
"""

import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Below this, the allocator's own reuse is as good.
SMALL_BYTES = 64 << 10


class _Lent(weakref.ref["Bytes"]):
    """A block and the array that exports it: a third of what `weakref.finalize` costs."""

    __slots__ = ("block", "free")
    block: mmap.mmap
    free: deque[mmap.mmap]


class Landing:
    """Hands out writable byte arrays; safe to use from several threads.

    Args:
        max_idle_bytes: Free blocks are kept up to this size in all.
    """

    def __init__(self, *, max_idle_bytes: int = 256 << 20) -> None:
        self._max_idle_bytes = max_idle_bytes
        # Size class to free blocks. Only atomic operations: a finalizer may run in any thread, at
        # any allocation, also while this object's own methods are on the stack.
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._lent: dict[int, _Lent] = {}

    def take(self, size: int) -> Bytes:
        """An array of `size` bytes with arbitrary content; free again with its last view."""
        if size < SMALL_BYTES:
            return np.empty(size, dtype=np.uint8)
        size_class = _size_class(size)
        free = self._free.setdefault(size_class, deque())
        try:
            block = free.pop()
        except IndexError:
            block = mmap.mmap(-1, size_class)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        lent = _Lent(array, self._give_back)
        lent.free, lent.block = free, block
        self._lent[id(lent)] = lent
        return array

    def idle_bytes(self) -> int:
        """Bytes of the blocks that wait to be used again."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _give_back(self, lent: "_Lent") -> None:
        del self._lent[id(lent)]
        if self.idle_bytes() + len(lent.block) <= self._max_idle_bytes:
            lent.free.append(lent.block)


def _size_class(size: int) -> int:
    """`size` rounded up: four classes to each doubling, at most 25 % is unused."""
    step = max(mmap.PAGESIZE, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step
