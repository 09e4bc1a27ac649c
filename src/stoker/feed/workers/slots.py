"""A worker writes its batches into slots of shared memory, which its pool reads without a copy.

A *slot* is a memfd, made as needed, whose descriptor is sent once; it has no name that could
outlive its processes. The reader frees a slot when the last view of its batch is gone. A worker
never waits for a slot: how much is held is the reader's to bound, by what it asks for.
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
from stoker.feed.workers.pipe import Pipe, Retired, Slot, pack

# Free slots that a worker keeps, warm for its next batches.
_SPARE_SLOTS = 3
# Of a batch that was built in its slot and changed then, bytes that may travel for nothing.
_UNUSED_BYTES = 64 << 10


class Slots:
    """The shared memory that batches are written to, or built in."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self._free: dict[int, mmap.mmap] = {}
        self._held: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[Bytes1D]] = {}
        self._next = 0
        self._built: int | None = None
        self._arena: Arena | None = None
        self._last_nbytes = 0

    def free(self, slot: int) -> None:
        """Frees a slot that the reader is done with."""
        memory = self._held.pop(slot, None)
        if memory is None:
            return
        self._free[slot] = memory
        if self._is_kept(slot):
            self._retire(slot)
        while len(self._free) > _SPARE_SLOTS:
            self._retire(min(self._free, key=lambda number: len(self._free[number])))

    def begin(self) -> None:
        """Begins a batch, perhaps anew: it may be built in a slot of the last one's size."""
        self.clear()
        if self._last_nbytes:
            slot, memory = self._take(self._last_nbytes)
            view: Bytes1D = np.frombuffer(memory, dtype=np.uint8)
            self._built, self._arena = slot, Arena(view)
            self._views[slot] = weakref.ref(view)

    def collate(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """Stacks tensors as torch's default_collate does, but into the slot.

        Torch's own stacks into shared memory of its own, which would be copied once more, and for
        which a small /dev/shm (64 MiB in a container) is a limit.
        """
        first = batch[0]
        if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested:
            stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch)
            return stacked
        out = None if any(tensor.requires_grad for tensor in batch) else self._room(batch)
        return torch.stack(list(batch), 0, out=out)

    def end(self, value: object) -> tuple[codec.Encoded, int]:
        """Describes the batch and sees that its payload is in a slot: -1 without a payload.

        Raises:
            ShippingError: If it cannot travel.
        """
        arena, slot = self._arena, self._built
        if arena is not None and slot is not None and arena.end:
            encoded = codec.encode(value, allow_pickle=True, arena=arena)
            is_fit = encoded.nbytes <= arena.memory.nbytes
            if is_fit and arena.end - encoded.in_place <= _UNUSED_BYTES:
                self._last_nbytes = encoded.nbytes
                encoded.write_into(arena.memory.data)
                self._built, self._arena = None, None
                return encoded, slot
        encoded = codec.encode(value, allow_pickle=True)
        self._last_nbytes = encoded.nbytes
        if not encoded.nbytes:
            return encoded, -1
        slot, memory = self._take(encoded.nbytes)
        encoded.write_into(memoryview(memory))
        return encoded, slot

    def memory(self, slot: int) -> memoryview:
        """Returns the memory of a slot that `end` named."""
        return memoryview(self._held[slot] if slot >= 0 else b"")

    def clear(self) -> None:
        """Ends a batch that is made, or was given up: a slot that it did not use is free again."""
        slot, self._built, self._arena = self._built, None, None
        if slot is not None:
            self.free(slot)

    def _room(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns a tensor in the slot for the stacked batch; None: it does not fit."""
        first = batch[0]
        count = len(batch) * first.numel()
        if self._arena is None or not count or first.device.type != "cpu":
            return None
        offset = self._arena.reserve(count * first.element_size())
        if offset is None:
            return None
        flat = torch.frombuffer(self._arena.memory, dtype=first.dtype, count=count, offset=offset)
        return flat.view(len(batch), *first.shape)

    def _take(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """Returns a free slot of so many bytes; a new one, if none is large enough."""
        fitting = [n for n, memory in self._free.items() if len(memory) >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda number: len(self._free[number]))
            memory = self._free.pop(slot)
        else:
            if self._free:
                self._retire(min(self._free, key=lambda number: len(self._free[number])))
            slot, memory = self._make(nbytes)
        self._held[slot] = memory
        return slot, memory

    def _is_kept(self, slot: int) -> bool:
        """Tells whether the dataset still holds a view of what was built there."""
        view = self._views.pop(slot, None)
        return view is not None and view() is not None

    def _make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        # A little more: batches of samples of different sizes then share slots.
        size = -(-(nbytes + nbytes // 8) // mmap.PAGESIZE) * mmap.PAGESIZE
        slot, self._next = self._next, self._next + 1
        descriptor = os.memfd_create(f"stoker-{os.getpid()}-{slot}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            self._channel.send(pack(Slot(slot, size)), [descriptor])
        finally:
            os.close(descriptor)
        return slot, memory

    def _retire(self, slot: int) -> None:
        self._free.pop(slot)
        self._channel.send(pack(Retired(slot)))
