"""The kind of memory that a batch lies in, and copies of tensors in memory of the same kind.

How long an accelerator takes to copy a batch depends on it: pinned memory is copied by the device
alone; other memory is read by a CPU, and a batch of a loader's worker is mapped into the trainer
page by page when it is first read. A replayed batch costs what the loader's own did only if it lies
in the same kind of memory.
"""

import mmap
import os
import weakref
from typing import Literal

import torch

# own: ordinary memory of this process; worker: shared with a worker, not read here before.
MemoryKind = Literal["own", "worker", "pinned"]

# Mapping a smaller tensor takes less than a microsecond a page, but some system calls a tensor.
_LEAST_MAPPED = 1 << 20


def kind_of(tensor: torch.Tensor) -> MemoryKind:
    if tensor.device.type != "cpu":
        return "own"
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return "worker"
    return "pinned" if _is_pinned(tensor) else "own"


def copy_of(tensor: torch.Tensor, kind: MemoryKind) -> torch.Tensor:
    """Returns a copy in memory of `kind`, or in ordinary memory where there is none of it."""
    plain = tensor.detach()
    # A subclass may hold more than its values.
    if kind == "own" or type(plain) is not torch.Tensor or plain.device.type != "cpu":
        return plain.clone()
    try:
        return _pinned(plain) if kind == "pinned" else _mapped(plain)
    except (OSError, RuntimeError):
        # No memory of this kind is left: a copy in another one is nearly as good as none.
        return plain.clone()


def _is_pinned(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.is_pinned())
    except RuntimeError:
        return False


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _mapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose pages this process has not seen, as one that a worker made.

    It is the only one that holds them: they are freed with it, which takes as long as to read them.
    """
    source = tensor.clone()
    num_bytes = source.untyped_storage().nbytes()
    if num_bytes < _LEAST_MAPPED or not hasattr(os, "memfd_create"):
        return source
    file = _file_of(source)
    try:
        pages = mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
    return _tensor_in(pages, like=source)


class KeptPages:
    """Pages of a tensor that stay when its copies go, as of a dataset that returns what it holds.

    A worker that holds the memory of its batches maps the same pages for each: a trainer that drops
    one unmaps them, and frees none.

    Raises:
        OSError: If no memory is left for them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like = tensor.detach().clone()
        self._file = -1
        if self._num_bytes >= _LEAST_MAPPED and hasattr(os, "memfd_create"):
            self._file = _file_of(self._like)
            weakref.finalize(self, os.close, self._file)

    @property
    def _num_bytes(self) -> int:
        return self._like.untyped_storage().nbytes()

    def copy(self) -> torch.Tensor:
        """Returns the tensor in pages that this process has not mapped yet."""
        if self._file < 0:
            return self._like.clone()
        # Private: what a script changes in its batch is in no later one.
        pages = mmap.mmap(self._file, self._num_bytes, flags=mmap.MAP_PRIVATE)
        return _tensor_in(pages, like=self._like)


def _file_of(tensor: torch.Tensor) -> int:
    """Returns a file in memory with the bytes of the tensor's storage."""
    file = os.memfd_create("stoker-batch", os.MFD_CLOEXEC)
    content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    try:
        _write(file, memoryview(content.numpy()).cast("B"))  # type: ignore[arg-type]
    except OSError:
        os.close(file)
        raise
    return file


def _tensor_in(pages: mmap.mmap, *, like: torch.Tensor) -> torch.Tensor:
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    mapped = torch.empty(0, dtype=like.dtype)
    return mapped.set_(storage, 0, like.size(), like.stride())


def _write(file: int, content: "memoryview[int]") -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written:], written)
