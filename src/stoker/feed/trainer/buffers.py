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
from stoker.feed.wire.blocks import BlockBatch, BlockLayout, contiguous_part
from stoker.feed.wire.codec import TENSOR_DTYPES, Bytes1D, Tag, decode
from stoker.feed.wire.dataset import unpack_error
from stoker.feed.wire.protocol import NO_NOTES, SampleNotes
from stoker.feed.wire.stream import BufferPool, Bytes
from stoker.pending_error import PendingError

# Kinds that are remembered: full batches and the last one, of a few loaders.
MAX_PLANS = 16
# A tensor takes about 30 bytes. Larger trees (texts, labels as numbers) are hardly ever equal.
_MAX_TREE_BYTES = 64 << 10

_Build = Callable[[Sequence[torch.Tensor]], object]
_decoder = msgspec.msgpack.Decoder()


class BatchLayout(BlockLayout):
    """How the batches of a kind lie in payloads that `decode` has checked one of them against.

    Attributes:
        has_tuples: torch makes lists of them where it pins a batch.
    """

    def __init__(self, build: _Build, leaves: "Sequence[_Leaf]", *, has_tuples: bool) -> None:
        super().__init__([leaf.part for leaf in leaves], build)
        self.has_tuples = has_tuples
        self._leaves = leaves

    def batch_in(self, payload: Bytes1D) -> object:
        pinned = pinned_block(payload)
        if pinned is not None:
            return self.batch(pinned)
        return self.build([leaf.tensor(payload) for leaf in self._leaves])

    def block_in(self, payload: Bytes1D) -> BlockBatch:
        pinned = pinned_block(payload)
        return BlockBatch(self, torch.from_numpy(payload) if pinned is None else pinned)


def pinned_block(payload: Bytes1D) -> torch.Tensor | None:
    """Returns torch's pinned memory, whose allocator knows of copies under way; None: pageable."""
    return payload.base if isinstance(payload.base, torch.Tensor) else None


class LayoutCache:
    """Decoder of the batches of a process; used by one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], BatchLayout] = {}
        self._last: tuple[bytes, int] | None = None

    def layout_of(self, tree: bytes, payload: Bytes1D | None) -> BatchLayout | None:
        """Returns how a batch of a known kind lies in its payload."""
        return None if payload is None else self._known.get((tree, payload.nbytes))

    def decode(self, tree: bytes, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
        if payload is None or len(tree) > _MAX_TREE_BYTES:
            return decode(tree, payload, allow_pickle=allow_pickle)
        key = (tree, payload.nbytes)
        layout = self._known.get(key)
        if layout is not None:
            return layout.batch_in(payload)
        value = decode(tree, payload, allow_pickle=allow_pickle)
        # From the second in a row on: a tree with numbers of its batch never comes again.
        if key == self._last:
            # `decode` has checked that it fits a payload of this size.
            layout = _layout(_decoder.decode(tree))
            if layout is not None:
                # The oldest goes: a dictionary keeps the order of insertion.
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
        self._shape = shape
        self._offset = offset
        self._count = math.prod(shape)
        self._array_dtype = _array_dtype(name, dtype)

    def tensor(self, payload: Bytes1D) -> torch.Tensor:
        if self._array_dtype is not None:
            # Half of what `frombuffer` and `view` take.
            array = np.ndarray(self._shape, self._array_dtype, payload, self._offset)
            return torch.from_numpy(array)
        dtype = self.part.dtype
        count = self._count
        offset = self._offset
        numbers = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
        return numbers.view(self._shape)


def _layout(node: object) -> BatchLayout | None:
    """Returns the layout of a checked tree; None: use `decode`."""
    leaves: list[_Leaf] = []
    build = _build(node, leaves, {})
    return None if build is None else BatchLayout(build, leaves, has_tuples=_has_tuples(node))


def _build(node: object, leaves: list[_Leaf], numbers: dict[int, list[int]]) -> _Build | None:
    """Returns a function that makes a node's value of the batch's tensors; adds its `leaves`.

    Args:
        node: Part of a checked tree.
        leaves: The tensors so far.
        numbers: Of the tensors that lie at an offset.
    """
    # A number or a text of the tree: equal in all batches with this tree.
    if not isinstance(node, list):
        return lambda _: node
    match node:
        case [Tag.TENSOR, str(name), [*shape], int(offset)]:
            # Left to `decode`: rare types, and tensors without an element, which lie nowhere.
            if name not in TENSOR_DTYPES or not math.prod(shape):
                return None
            leaf = _Leaf(name, tuple(shape), offset)
            # What occurs at two places of a batch is one tensor again.
            for number in numbers.get(offset, ()):
                if leaves[number].part == leaf.part:
                    return operator.itemgetter(number)
            numbers.setdefault(offset, []).append(len(leaves))
            leaves.append(leaf)
            return operator.itemgetter(len(leaves) - 1)
        case [Tag.LIST | Tag.TUPLE | Tag.DICT as tag, *items]:
            builds: list[_Build] = []
            first = len(leaves)
            for item in items:
                build = _build(item, leaves, numbers)
                if build is None:
                    return None
                builds.append(build)
            num_new = len(leaves) - first
            return _flat_container(tag, items, num_new, first=first) or _container(tag, builds)
    return None


def _flat_container(tag: Tag, items: list[object], num_new: int, *, first: int) -> _Build | None:
    """Returns the same for a container of tensors alone, from number `first` on; None: others.

    One call for 300 tensors by name, not one for each.
    """
    keys: list[object] = []
    values = items
    if tag == Tag.DICT:
        keys = items[::2]
        values = items[1::2]
    if num_new != len(values) or not all(map(_is_tensor, values)):
        return None
    # Keys that are no plain scalars.
    if any(isinstance(key, list) for key in keys):
        return None
    places = slice(first, first + len(values))
    if tag == Tag.DICT:
        return lambda tensors: dict(zip(keys, tensors[places], strict=True))
    make = list if tag == Tag.LIST else tuple
    return lambda tensors: make(tensors[places])


def _is_tensor(node: object) -> bool:
    return isinstance(node, list) and node[0] == Tag.TENSOR


def _has_tuples(node: object) -> bool:
    match node:
        case [Tag.TUPLE, *_]:
            return True
        case [Tag.LIST | Tag.DICT, *items]:
            return any(map(_has_tuples, items))
    return False


def _container(tag: Tag, builds: Sequence[_Build]) -> _Build:
    if tag == Tag.LIST:
        return lambda tensors: [build(tensors) for build in builds]
    if tag == Tag.TUPLE:
        return lambda tensors: tuple([build(tensors) for build in builds])
    pairs = list(zip(builds[::2], builds[1::2], strict=True))
    return lambda tensors: {key(tensors): value(tensors) for key, value in pairs}


def _array_dtype(name: str, dtype: torch.dtype) -> "np.dtype[np.generic[object]] | None":
    try:
        array_dtype: np.dtype[np.generic[object]] = np.dtype(name)
        return array_dtype if torch.from_numpy(np.empty(0, array_dtype)).dtype == dtype else None
    # NumPy lacks bfloat16, for one: torch reads these bytes itself.
    except TypeError:
        return None


class BatchOutcome(msgspec.Struct):
    """A batch, or the error to raise in its place.

    Attributes:
        value: The batch; a BlockBatch, if the session keeps blocks.
        is_pinned: Pinned memory has all of it, as torch would pin it.
        samples: What is known of its samples.
        maker: Host and number of the worker that made it.
    """

    value: object = None
    error: PendingError | None = None
    is_pinned: bool = False
    samples: SampleNotes = NO_NOTES
    maker: tuple[str, int] = ("", -1)


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

    def decoded(
        self,
        tree: bytes,
        payload: Bytes | None,
        *,
        allow_pickle: bool,
        keeps_block: bool = False,
    ) -> BatchOutcome:
        """Returns the batch, or why it is malformed.

        Args:
            tree: Description of the batch.
            payload: Where its tensors lie.
            allow_pickle: Whether pickled parts are opened.
            keeps_block: A batch that can be left in one block is.
        """
        layout = self._layouts.layout_of(tree, payload)
        if layout is not None and payload is not None:
            is_pinned = pinned_block(payload) is not None and not layout.has_tuples
            value = layout.block_in(payload) if keeps_block else layout.batch_in(payload)
            return BatchOutcome(value, is_pinned=is_pinned)
        try:
            return BatchOutcome(self._layouts.decode(tree, payload, allow_pickle=allow_pickle))
        except FeedError as err:
            return BatchOutcome(error=PendingError(err))


def error_in(data: bytes | memoryview) -> Exception:
    """Returns the error that was sent, or why it cannot be rebuilt."""
    try:
        return unpack_error(data)
    except FeedError as err:
        return err
