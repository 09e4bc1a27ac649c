"""Memory for batches in a trainer, used again, pinned or not.

The trees of a loader's batches are mostly equal to the last byte. From the second of a kind on,
only the views are made.
"""

import math
import operator
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from stoker.errors import FeedError
from stoker.feed.trainer.pinned import PinnedMemory
from stoker.feed.wire.blocks import contiguous_part, cut
from stoker.feed.wire.codec import TENSOR_DTYPES, Bytes1D, Tag, decode
from stoker.feed.wire.dataset import unpack_error
from stoker.feed.wire.stream import BufferPool, Bytes

# Kinds that are remembered: full batches and the last one, of a few loaders.
MAX_PLANS = 16
# A tensor takes about 30 bytes. Larger trees (texts, labels as numbers) are hardly ever equal.
_MAX_TREE_BYTES = 64 << 10

_Build = Callable[[Sequence[torch.Tensor]], object]
_decoder = msgspec.msgpack.Decoder()


class BatchLayout:
    """How the batches of a kind lie in their payloads."""

    def __init__(self, build: _Build, leaves: "Sequence[_Leaf]") -> None:
        self._build = build
        self._leaves = leaves
        self._parts = [leaf.part for leaf in leaves]

    def batch(self, payload: Bytes1D) -> object:
        """Returns the batch in a payload that `decode` has checked one of this kind against."""
        pinned: object = payload.base
        if isinstance(pinned, torch.Tensor):
            # In torch's own pinned memory: its allocator knows of copies under way.
            return self._build(cut(pinned, self._parts))
        return self._build([leaf.tensor(payload) for leaf in self._leaves])


class LayoutCache:
    """Decoder of the batches of a process; used by one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], BatchLayout] = {}
        self._last: tuple[bytes, int] | None = None

    def decode(self, tree: bytes, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
        if payload is None or len(tree) > _MAX_TREE_BYTES:
            return decode(tree, payload, allow_pickle=allow_pickle)
        key = (tree, payload.nbytes)
        layout = self._known.get(key)
        if layout is not None:
            return layout.batch(payload)
        value = decode(tree, payload, allow_pickle=allow_pickle)
        # From the second in a row on: a tree with numbers of its batch never comes again.
        if key == self._last:
            # `decode` has checked that it fits a payload of this size.
            layout = _layout(_decoder.decode(tree))
            if layout is not None:
                while len(self._known) >= MAX_PLANS:
                    del self._known[next(iter(self._known))]
                self._known[key] = layout
        self._last = key
        return value


class _Leaf:
    """A tensor of a layout."""

    def __init__(self, name: str, shape: tuple[int, ...], offset: int) -> None:
        dtype: torch.dtype = getattr(torch, name)
        self.part = contiguous_part(dtype, shape, offset=offset)
        self._offset = offset
        self._count = math.prod(shape)
        self._array_dtype = _array_dtype(name, dtype)

    def tensor(self, payload: Bytes1D) -> torch.Tensor:
        dtype, shape, offset = self.part.dtype, self.part.shape, self._offset
        if self._array_dtype is not None:
            # Half of what `frombuffer` and `view` take.
            return torch.from_numpy(np.ndarray(shape, self._array_dtype, payload, offset))
        numbers = torch.frombuffer(payload, dtype=dtype, count=self._count, offset=offset)
        return numbers.view(shape)


def _layout(node: object) -> BatchLayout | None:
    """Returns the layout of a checked tree; None: use `decode`."""
    leaves: list[_Leaf] = []
    build = _build(node, leaves)
    return None if build is None else BatchLayout(build, leaves)


def _build(node: object, leaves: list[_Leaf]) -> _Build | None:
    """Returns a function that makes a node's value of the batch's tensors; adds its `leaves`."""
    if not isinstance(node, list):
        return lambda _: node
    match node:
        case [Tag.TENSOR, str(name), [*shape], int(offset)]:
            if name not in TENSOR_DTYPES or not math.prod(shape):
                return None
            leaves.append(_Leaf(name, tuple(shape), offset))
            return operator.itemgetter(len(leaves) - 1)
        case [Tag.LIST | Tag.TUPLE | Tag.DICT as tag, *items]:
            builds: list[_Build] = []
            for item in items:
                build = _build(item, leaves)
                if build is None:
                    return None
                builds.append(build)
            return _container(tag, builds)
    return None


def _container(tag: Tag, builds: Sequence[_Build]) -> _Build:
    if tag == Tag.LIST:
        return lambda tensors: [build(tensors) for build in builds]
    if tag == Tag.TUPLE:
        return lambda tensors: tuple([build(tensors) for build in builds])
    pairs = list(zip(builds[::2], builds[1::2], strict=True))
    return lambda tensors: {key(tensors): value(tensors) for key, value in pairs}


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
    """Memory where batches will live; used by one thread. `pinned` is the process's."""

    def __init__(self, pool: BufferPool | None = None, pinned: PinnedMemory | None = None) -> None:
        self._pool = pool or BufferPool()
        self._pinned = pinned or PinnedMemory()
        self._layouts = LayoutCache()

    def copied(self, source: Bytes, pins_on: int | None) -> Bytes:
        payload = self.room(source.nbytes, pins_on)
        np.copyto(payload, source)
        return payload

    def room(self, nbytes: int, pins_on: int | None) -> Bytes:
        """Returns memory for a batch, pinned for accelerator `pins_on` if that can be."""
        pinned = None if pins_on is None else self._pinned.take(nbytes, pins_on)
        return self._pool.take(nbytes) if pinned is None else pinned

    def decoded(self, tree: bytes, payload: Bytes | None, *, allow_pickle: bool) -> BatchOutcome:
        try:
            return BatchOutcome(self._layouts.decode(tree, payload, allow_pickle=allow_pickle))
        except FeedError as err:
            return BatchOutcome(error=err)


def error_in(data: bytes | memoryview) -> Exception:
    """Returns the error that was sent, or why it cannot be rebuilt."""
    try:
        return unpack_error(data)
    except FeedError as err:
        return err
