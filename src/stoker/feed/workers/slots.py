"""Shared memory of a worker that its batches are sent in.

A *slot* is a memfd, made as needed, whose descriptor is sent once; it has no name that could
outlive its processes. The pool reads it without a copy, and returns it when the last view of its
batch is gone. A worker never waits for a slot: the pool bounds memory by what it requests.
"""

import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from stoker.feed.wire import codec
from stoker.feed.wire.codec import Arena, Bytes1D
from stoker.feed.wire.pickling import RARE_DTYPES
from stoker.feed.workers.fitness import Fitness
from stoker.feed.workers.pipe import SPARE_SLOTS, Pipe, Slot, SlotClosed, pack

# Torch stacks them into new memory only.
_RARE = frozenset(getattr(torch, name) for name in RARE_DTYPES if hasattr(torch, name))
# Useless bytes that may be sent where a batch was changed after it was built in its slot.
_UNUSED_BYTES = 64 << 10


class Slots:
    """Shared memory of a worker, which batches are written to, or built in.

    Attributes:
        fitness: Whether they can be made and sent.
    """

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self.fitness = Fitness(channel)
        self._pid = os.getpid()
        self.shares_arrays = False
        # By number: slots to be used again, and those whose batch the pool has or will get.
        self._free: dict[int, mmap.mmap] = {}
        self._held: dict[int, mmap.mmap] = {}
        # Of slots in which a batch was built: alive as long as the dataset keeps a part of it.
        self._views: dict[int, weakref.ref[Bytes1D]] = {}
        self._next = 0
        # The slot of the batch that is being built, and what is taken of it.
        self._built: int | None = None
        self._arena: Arena | None = None
        self._last_nbytes = 0
        self._num_spare = SPARE_SLOTS

    def keep(self, number: int) -> None:
        """Keeps so many free slots from now on."""
        self._num_spare = number
        self._close_spare()

    def reuse(self, slot: int) -> None:
        memory = self._held.pop(slot, None)
        if memory is None:
            return
        self._free[slot] = memory
        # A dataset may keep a batch (a cache, a running mean): its memory must not be overwritten.
        view = self._views.pop(slot, None)
        if view is not None and view() is not None:
            self._close_slot(slot)
        self._close_spare()

    def begin(self) -> None:
        """Begins a batch, which may be built in a slot of the last one's size."""
        self.close_batch()
        if self._last_nbytes:
            slot, memory = self._take(self._last_nbytes)
            view: Bytes1D = np.frombuffer(memory, dtype=np.uint8)
            self._built, self._arena = slot, Arena(view)
            self._views[slot] = weakref.ref(view)

    def collate(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """Stacks tensors into the slot, not into torch's shared memory: a copy less."""
        self._end_child()
        first = batch[0]
        is_plain = type(first) is torch.Tensor and first.layout is torch.strided
        if not is_plain or first.is_nested or first.dtype in _RARE:
            stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch)
            return stacked
        # torch.stack refuses `out` with gradients.
        out = None if any(tensor.requires_grad for tensor in batch) else self._room(batch)
        return torch.stack(list(batch), 0, out=out)

    def end(self, value: object) -> tuple[codec.Encoded, int]:
        """Describes the batch and puts its payload into a slot; -1: there is none."""
        self._end_child()
        arena = self._arena
        slot = self._built
        if arena is not None and slot is not None and arena.end:
            encoded = self.encoded(value, arena)
            is_fit = encoded.nbytes <= arena.memory.nbytes
            # What was stacked but is not part of the batch (collate_fn changed it afterwards) would
            # be sent, too.
            if is_fit and arena.end - encoded.in_place <= _UNUSED_BYTES:
                self._last_nbytes = encoded.nbytes
                encoded.write_into(arena.memory.data)
                self._built = None
                self._arena = None
                return encoded, slot
        encoded = self.encoded(value)
        self._last_nbytes = encoded.nbytes
        if not encoded.nbytes:
            return encoded, -1
        slot, memory = self._take(encoded.nbytes)
        encoded.write_into(memoryview(memory))
        return encoded, slot

    def encoded(self, value: object, arena: Arena | None = None) -> codec.Encoded:
        return codec.encode(value, allow_pickle=True, arena=arena, shares_arrays=self.shares_arrays)

    def memory(self, slot: int) -> memoryview:
        return memoryview(self._held[slot] if slot >= 0 else b"")

    def close_batch(self) -> None:
        slot = self._built
        self._built = None
        self._arena = None
        if slot is not None:
            self.reuse(slot)

    def _end_child(self) -> None:
        """Ends a child that a sample has forked, and that comes back: it shares the slots."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _room(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        first = batch[0]
        count = len(batch) * first.numel()
        # Without room here torch stacks in new memory, from which `end` copies.
        if self._arena is None or not count or first.device.type != "cpu":
            return None
        offset = self._arena.reserve(count * first.element_size())
        if offset is None:
            return None
        flat = torch.frombuffer(self._arena.memory, dtype=first.dtype, count=count, offset=offset)
        return flat.view(len(batch), *first.shape)

    def _take(self, nbytes: int) -> tuple[int, mmap.mmap]:
        fitting = [n for n, memory in self._free.items() if len(memory) >= nbytes]
        if fitting:
            # The smallest that fits: larger ones are left for larger batches.
            slot = min(fitting, key=lambda number: len(self._free[number]))
            memory = self._free.pop(slot)
        else:
            if self._free:
                # Batches have grown: one slot replaces another, so that memory does not grow.
                self._close_slot(min(self._free, key=lambda number: len(self._free[number])))
            slot, memory = self._make(nbytes)
        self._held[slot] = memory
        return slot, memory

    def _make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        # An eighth more, so that batches of slightly different sizes share slots; in whole pages.
        wanted = nbytes + nbytes // 8
        num_pages = -(-wanted // mmap.PAGESIZE)
        size = num_pages * mmap.PAGESIZE
        slot = self._next
        self._next += 1
        descriptor = os.memfd_create(f"stoker-{os.getpid()}-{slot}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            # The pool maps it, too: after this neither needs the descriptor.
            self._channel.send(pack(Slot(slot, size)), [descriptor])
        finally:
            os.close(descriptor)
        return slot, memory

    def _close_spare(self) -> None:
        # The smallest: a larger one is good for smaller batches, too.
        while len(self._free) > self._num_spare:
            self._close_slot(min(self._free, key=lambda number: len(self._free[number])))

    def _close_slot(self, slot: int) -> None:
        self._free.pop(slot)
        self._channel.send(pack(SlotClosed(slot)))
