"""Memory for batches in a trainer, used again, pinned or not.

The trees of a loader's batches are mostly equal to the last byte. From the second of a kind on,
only the views are made.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from stoker.errors import FeedError
from stoker.feed.wire.codec import TENSOR_DTYPES, Bytes1D, Tag, decode
from stoker.feed.wire.dataset import unpack_error
from stoker.feed.wire.stream import BufferPool, Bytes

# Kinds that are remembered: full batches and the last one, of a few loaders.
MAX_PLANS = 16
# Larger trees (texts, labels as numbers) are hardly ever equal.
_MAX_TREE_BYTES = 4096

_Plan = Callable[[Bytes1D], object]
_decoder = msgspec.msgpack.Decoder()


# torch.accelerator has these names from 2.7 on; before, torch pins for CUDA.
def current_device() -> int:
    """Returns the number of this thread's accelerator, which batches are pinned for."""
    accelerator = getattr(torch, "accelerator", None)
    return int(getattr(accelerator, "current_device_index", torch.cuda.current_device)())


def set_device(number: int) -> None:
    accelerator = getattr(torch, "accelerator", None)
    getattr(accelerator, "set_device_index", torch.cuda.set_device)(number)


class LayoutCache:
    """Decoder of the batches of a process; used by one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], _Plan] = {}
        self._last: tuple[bytes, int] | None = None

    def decode(self, tree: bytes, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
        if payload is None or len(tree) > _MAX_TREE_BYTES:
            return decode(tree, payload, allow_pickle=allow_pickle)
        key = (tree, payload.nbytes)
        plan = self._known.get(key)
        if plan is not None:
            return plan(payload)
        value = decode(tree, payload, allow_pickle=allow_pickle)
        # From the second in a row on: a tree with numbers of its batch never comes again.
        if key == self._last:
            # `decode` has checked that it fits a payload of this size.
            plan = _plan(_decoder.decode(tree))
            if plan is not None:
                while len(self._known) >= MAX_PLANS:
                    del self._known[next(iter(self._known))]
                self._known[key] = plan
        self._last = key
        return value


def _plan(node: object) -> _Plan | None:
    """Returns a function that makes the value of a checked node; None: use `decode`."""
    if not isinstance(node, list):
        return lambda _: node
    match node:
        case [Tag.TENSOR, str(name), [*shape], int(offset)]:
            return _tensor_plan(name, tuple(shape), offset)
        case [Tag.LIST | Tag.TUPLE | Tag.DICT as tag, *items]:
            plans = [plan for plan in map(_plan, items) if plan is not None]
            if len(plans) < len(items):
                return None
            if tag == Tag.LIST:
                return lambda payload: [plan(payload) for plan in plans]
            if tag == Tag.TUPLE:
                return lambda payload: tuple([plan(payload) for plan in plans])
            pairs = list(zip(plans[::2], plans[1::2], strict=True))
            return lambda payload: {key(payload): value(payload) for key, value in pairs}
    return None


def _tensor_plan(name: str, shape: tuple[int, ...], offset: int) -> _Plan | None:
    count = math.prod(shape)
    if name not in TENSOR_DTYPES or not count:
        return None
    dtype: torch.dtype = getattr(torch, name)
    end = offset + count * dtype.itemsize
    array_dtype = _array_dtype(name, dtype)

    def tensor(payload: Bytes1D) -> torch.Tensor:
        pinned: object = payload.base
        if isinstance(pinned, torch.Tensor):
            # Views of torch's own pinned memory: its allocator knows of copies under way.
            return pinned[offset:end].view(dtype).view(shape)
        if array_dtype is not None:
            # Half of what `frombuffer` and `view` take.
            return torch.from_numpy(np.ndarray(shape, array_dtype, payload, offset))
        return torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(shape)

    return tensor


def _array_dtype(name: str, dtype: torch.dtype) -> "np.dtype[np.generic[object]] | None":
    try:
        found: np.dtype[np.generic[object]] = np.dtype(name)
        return found if torch.from_numpy(np.empty(0, found)).dtype == dtype else None
    except TypeError:
        return None


class BatchOutcome(msgspec.Struct):
    """A batch, or the error to raise in its place."""

    value: object = None
    error: BaseException | None = None


class BatchBuffers:
    """Memory where batches will live; used by one thread."""

    def __init__(self, pool: BufferPool | None = None) -> None:
        self._pool = pool or BufferPool()
        self._plans = LayoutCache()
        self._pins_on: int | None = None

    def copied(self, source: Bytes, pins_on: int | None) -> Bytes:
        payload = self.room(source.nbytes, pins_on)
        np.copyto(payload, source)
        return payload

    def room(self, nbytes: int, pins_on: int | None) -> Bytes:
        """Returns memory for a batch, pinned for that accelerator if `pins_on` is not None."""
        if pins_on is None:
            return self._pool.take(nbytes)
        if self._pins_on != pins_on:
            # The device is set per thread; without this, every rank would open device 0.
            set_device(pins_on)
            self._pins_on = pins_on
        # torch's allocator, unlike ours, knows of the copies to the accelerator under way. The base
        # of the array is a tensor: see `_tensor_plan`.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def decoded(self, tree: bytes, payload: Bytes | None, *, allow_pickle: bool) -> BatchOutcome:
        try:
            return BatchOutcome(self._plans.decode(tree, payload, allow_pickle=allow_pickle))
        except FeedError as err:
            return BatchOutcome(error=err)


def error_in(data: bytes | memoryview) -> Exception:
    """Returns the error that was sent, or why it cannot be rebuilt."""
    try:
        return unpack_error(data)
    except FeedError as err:
        return err
