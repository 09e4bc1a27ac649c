"""Encoding of a batch: a small description (the tree) and one payload of raw buffers.

A node of the tree is a scalar of msgpack, or a list that begins with a tag. Numbers, strings,
lists, tuples and dicts are in the tree. Tensors and arrays lie in the payload at 64-byte aligned
offsets and are decoded as views of it, so a received batch is not copied again. Everything else is
pickled by cloudpickle (only so a class of the training script comes back intact), but tensors and
arrays inside it are still sent as raw buffers.

Tensors that share memory are views of one region of the payload, and share it again (`aliases`).
Others have the strides that they had: last bits of sums follow from them. Of those with gaps in
their memory, as crops, only the values are in the payload, and are laid out again.

A peer's bytes are checked before anything is built from them: offsets, shapes and sizes against the
payload, depth against a bound; pickles are opened only if the caller allows it.
"""

import contextlib
import io
import math
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.errors import ProtocolError, ShippingError
from stoker.feed.why_unfed import OF_TRAINER
from stoker.feed.wire.aliases import (
    GappedLayout,
    Region,
    SpreadBudget,
    SpreadLayout,
    View,
    are_apart,
    order_of,
    regions_of,
    spread_of,
    strided,
    with_gaps,
)
from stoker.feed.wire.pickling import (
    FLOAT8_KINDS,
    RARE_DTYPES,
    AnswerPickler,
    AnswerUnpickler,
    reduced,
)
from stoker.feed.wire.rebuilding import why_not_rebuilt

if TYPE_CHECKING:
    import torch


Bytes1D = np.ndarray[tuple[int], np.dtype[np.uint8]]

# A cache line, as torch's own allocator gives.
ALIGNMENT = 64
# What is nested deeper is pickled. Keeps the decoder far below Python's recursion limit of 1,000.
MAX_DEPTH = 64
MAX_DIMENSIONS = 64

# Longer byte strings are part of the payload, not of the tree.
INLINE_BYTES = 1024
# Other dtypes are refused: objects (O) are pointers, and `dtype.str` does not have the names of
# fields (V); these are pickled.
ARRAY_DTYPE = re.compile(
    r"[<>|=](?:[biufc][1-9]\d?|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)"
)
# C's long double has the same size on x86 and arm64, but different bits.
LONG_DOUBLE_IS_X86 = np.finfo(np.longdouble).nmant == 63
# An allowlist: names that a peer sends are looked up in torch's module.
TENSOR_DTYPES = frozenset(
    {"bool", "bfloat16", "float16", "float32", "float64", "complex32", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    | {f"float8_{kind}" for kind in FLOAT8_KINDS}
    | RARE_DTYPES.keys()
)
# Up to protocol 4 a pickled array has the order of C or of Fortran, whatever it had.
PICKLES_KEEP_ORDER = pickle.DEFAULT_PROTOCOL >= 5
_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def _aligned(offset: int) -> int:
    """Returns the first multiple of ALIGNMENT that is not below an offset."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Arena:
    """Memory that a batch is built in; parts of it are not copied."""

    memory: Bytes1D
    end: int = 0

    def reserve(self, nbytes: int) -> int | None:
        """Returns an aligned offset for `nbytes` bytes; None if they do not fit."""
        # For the decoder's views.
        offset = _aligned(self.end)
        if offset + nbytes > self.memory.nbytes:
            return None
        self.end = offset + nbytes
        return offset

    def offset_of(self, address: int, nbytes: int, itemsize: int) -> int | None:
        """Returns the offset of the bytes at `address`; None if they have to be copied.

        Args:
            address: Of the first byte.
            nbytes: From the first byte to the last, gaps included.
            itemsize: Bytes of an element.
        """
        offset = address - self.memory.ctypes.data
        # Elements at odd addresses are copied: the decoder takes others only.
        is_inside = offset >= 0 and offset + nbytes <= self.end
        return offset if is_inside and offset % itemsize == 0 else None


class Tag(IntEnum):
    """Kinds of nodes."""

    LIST = 0
    TUPLE = 1
    DICT = 2
    TENSOR = 3
    ARRAY = 4
    SCALAR = 5
    BYTES = 6
    INTEGER = 7
    COMPLEX = 8
    TEXT = 9
    PICKLE = 10
    STRIDED_TENSOR = 11
    STRIDED_ARRAY = 12
    SPREAD_TENSOR = 13
    SPREAD_ARRAY = 14


TAGS_IN_MEMORY = frozenset(
    {
        Tag.TENSOR,
        Tag.ARRAY,
        Tag.SCALAR,
        Tag.STRIDED_TENSOR,
        Tag.STRIDED_ARRAY,
        Tag.SPREAD_TENSOR,
        Tag.SPREAD_ARRAY,
    }
)


class Encoded:
    """An encoded value: its tree, and functions that copy the payload, but for bytes `in_place`."""

    def __init__(
        self,
        value: object,
        *,
        allow_pickle: bool,
        arena: Arena | None = None,
        shares_arrays: bool = False,
        keeps_gaps: bool = False,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.keeps_gaps = keeps_gaps
        self.arena = arena
        self._begin()
        self._shares_arrays = shares_arrays
        # First and last address of what may share memory with others.
        self._ranges: list[tuple[int, int]] = []
        self._regions: dict[int, Region] = {}
        node = self.node(value, "batch", 0)
        if not are_apart(self._ranges):
            # Rare, so that others need not wait for it: described once more, as views of regions.
            first = self._nodes
            self._regions = regions_of(
                [view for node, _ in first.values() for view in _views(node)]
            )
            self._begin()
            node = self.node(value, "batch", 0)
        self.tree = _encoder.encode(node)
        # Needed no more; a view of the arena would keep its slot from being reused.
        self.arena = None
        self._nodes.clear()

    def _begin(self) -> None:
        self.in_place = 0
        # Behind what the batch was built in comes what has to be copied.
        self.nbytes = self.arena.end if self.arena else 0
        # Offset, length, and what writes it.
        self._leaves: list[tuple[int, int, Callable[[Bytes1D], None]]] = []
        # By id: each tensor and array with its node, which a second occurrence gets, too.
        self._nodes: dict[int, tuple[object, list[object]]] = {}
        self.budget = SpreadBudget()

    def write_into(self, target: memoryview) -> None:
        flat: Bytes1D = np.frombuffer(target, dtype=np.uint8)
        for offset, nbytes, copy in self._leaves:
            copy(flat[offset : offset + nbytes])

    def checksum(self, target: memoryview, start: int) -> int:
        """Returns CRC-32 over tree and payload in `target`, continued from `start`; 0.2 s/GB."""
        digest = zlib.crc32(self.tree, start)
        # Without the gaps between the parts: a reused slot has bytes of older batches there.
        for offset, nbytes, _ in self._leaves:
            digest = zlib.crc32(target[offset : offset + nbytes], digest)
        return digest

    def node(self, value: object, path: str, depth: int) -> object:
        """Returns the node of `value`; `path` names it in a ShippingError."""
        # The exact type: an IntEnum would come back as int. isinstance() is for the type checker.
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if isinstance(value, int) and kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            # With a bit for the sign.
            nbytes = value.bit_length() // 8 + 1
            return [Tag.INTEGER, value.to_bytes(nbytes, "little", signed=True)]
        if isinstance(value, str) and kind is str:
            # A lone surrogate is valid in a str, but not in UTF-8.
            return value if value.isascii() else [Tag.TEXT, value.encode("utf-8", "surrogatepass")]
        if isinstance(value, bytes) and kind is bytes:
            return value if len(value) <= INLINE_BYTES else self._bytes(value)
        if isinstance(value, complex) and kind is complex:
            return [Tag.COMPLEX, value.real, value.imag]
        if depth < MAX_DEPTH:
            container = self._container(value, path, depth)
            if container is not None:
                return container
        leaf = self.leaf(value)
        return self._pickled(value, path) if leaf is None else leaf

    def _container(self, value: object, path: str, depth: int) -> list[object] | None:
        """Returns the node of a list, tuple or dict; None for all others, also subclasses."""
        kind = type(value)
        if isinstance(value, list | tuple) and kind in (list, tuple):
            nodes = (self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value))
            return [Tag.LIST if kind is list else Tag.TUPLE, *nodes]
        if not isinstance(value, dict) or kind is not dict:
            return None
        items: list[object] = [Tag.DICT]
        for key, item in value.items():
            items.append(self.node(key, f"key {key!r} of {path}", depth + 1))
            items.append(self.node(item, f"{path}[{key!r}]", depth + 1))
        return items

    def leaf(self, value: object) -> list[object] | None:
        """Returns the node of a tensor, array or NumPy scalar; None if it cannot be sent raw."""
        # A tensor that occurs twice is sent once, and both places share its memory again.
        entry = self._nodes.get(id(value))
        if entry is not None:
            return entry[1]
        is_numpy = isinstance(value, np.ndarray | np.generic)
        node = self._array(value) if is_numpy else _tensor(self, value)
        if node is not None:
            # The value is kept so that no other object gets its id.
            self._nodes[id(value)] = (value, node)
        return node

    def reserve(self, nbytes: int, copy: Callable[[Bytes1D], None], *, first: int = 0) -> int:
        """Returns the offset of `nbytes` bytes of the payload, which `copy` writes.

        Args:
            nbytes: How many.
            copy: Writes them.
            first: Place of the first of them within a line of the caches.
        """
        if not nbytes:
            return 0
        offset = _aligned(self.nbytes) + first
        self._leaves.append((offset, nbytes, copy))
        self.nbytes = offset + nbytes
        return offset

    def note(self, begin: int, end: int) -> None:
        """Remembers first and last address of a tensor or array."""
        self._ranges.append((begin, end))

    def note_strided(self, view: View) -> None:
        self._ranges.append((view.begin, view.end))

    def place_in_region(self, value: object, address: int) -> int | None:
        """Returns the place in the payload of what shares memory with others; None: it does not.

        Args:
            value: The tensor or array.
            address: Of its first element.
        """
        region = self._regions.get(id(value))
        if region is None:
            return None
        if region.offset is None:
            region.offset = self._place_of(region, value)
        return region.offset + address - region.begin

    def _place_of(self, region: Region, owner: object) -> int:
        if self.arena is not None:
            offset = region.begin - self.arena.memory.ctypes.data
            if offset >= 0 and offset + region.nbytes <= self.arena.end:
                self.in_place += region.nbytes
                return offset
        offset = _aligned(self.nbytes) + region.gap(_base(owner))

        def copy(target: Bytes1D) -> None:
            # Its memory is there as long as this refers to one of those that share it.
            assert owner is not None
            region.copy(target)

        self._leaves.append((offset, region.nbytes, copy))
        self.nbytes = offset + region.nbytes
        return offset

    def _array(self, value: object) -> list[object] | None:
        if isinstance(value, np.generic):
            array = np.asarray(value)
            tag = Tag.SCALAR
        elif isinstance(value, np.ndarray) and type(value) is np.ndarray:
            array = value
            tag = Tag.ARRAY
        else:
            return None
        # `dtype.str` does not contain metadata.
        if not ARRAY_DTYPE.fullmatch(array.dtype.str) or array.dtype.metadata:
            return None
        if _is_other_long_double(array.dtype.str):
            raise ShippingError(
                f"the batch has numpy's {array.dtype}, which has different bits on x86",
                fix="use float64 or complex128",
            )
        if tag == Tag.ARRAY and self._shares_arrays and array.size:
            address = array.ctypes.data
            self.note_strided(
                strided(address, id(value), array.shape, array.strides, array.itemsize)
            )
            place = self.place_in_region(value, address)
            if place is not None:
                shape = list(array.shape)
                strides = list(array.strides)
                return [Tag.STRIDED_ARRAY, array.dtype.str, shape, strides, place]
        return self._array_apart(array, tag)

    def _array_apart(
        self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]", tag: Tag
    ) -> list[object]:
        """Returns the node of an array that shares memory with no other."""
        laid = array
        axes: list[int] = []
        keeps_order = self._shares_arrays or PICKLES_KEEP_ORDER or array.flags.f_contiguous
        if keeps_order and not array.flags.c_contiguous:
            axes = order_of(array.strides)
            laid = array.transpose(axes)
        if not laid.flags.c_contiguous:
            node = self._spread_array(array)
            if node is not None:
                return node
            if self.keeps_gaps:
                return self._array_with_gaps(array)
            laid = array
            axes = []
        offset = self._reserve_copy(laid)
        return [tag, array.dtype.str, list(laid.shape), offset, *_back(axes)]

    def _reserve_copy(
        self, laid: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]"
    ) -> int:
        """Returns the offset of an array's values, in the order of its axes."""

        def copy(target: Bytes1D) -> None:
            np.copyto(target.view(laid.dtype).reshape(laid.shape), laid)

        return self.reserve(laid.nbytes, copy)

    def _spread_array(
        self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]"
    ) -> list[object] | None:
        """Returns the node of an array whose values are sent without gaps; None: it has none."""
        # Torch's workers pickle arrays, which closes gaps.
        if not self._shares_arrays:
            return None
        shape = array.shape
        strides = array.strides
        first = strided(array.ctypes.data, id(array), shape, strides, array.itemsize).begin
        if not self.keeps_gaps:
            first -= _base(array)
        first %= ALIGNMENT
        spread = spread_of(shape, strides, array.itemsize, first=first)
        if not self.budget.allows(spread):
            return None
        laid = np.lib.stride_tricks.as_strided(array, spread.shape, spread.strides, writeable=False)
        offset = self._reserve_copy(laid)
        return [Tag.SPREAD_ARRAY, array.dtype.str, list(shape), list(strides), offset, first]

    def _array_with_gaps(
        self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]"
    ) -> list[object]:
        address = array.ctypes.data
        layout = _layout_of(strided(address, id(array), array.shape, array.strides, array.itemsize))

        def copy(target: Bytes1D) -> None:
            spread = np.ndarray(array.shape, array.dtype, target, layout.start, layout.strides)
            np.copyto(spread, array)

        place = self.reserve(layout.nbytes, copy) + layout.start
        shape = list(array.shape)
        return [Tag.STRIDED_ARRAY, array.dtype.str, shape, list(layout.strides), place]

    def _bytes(self, value: bytes | memoryview) -> list[object]:
        source: Bytes1D = np.frombuffer(value, dtype=np.uint8)
        offset = self.reserve(len(value), lambda target: np.copyto(target, source))
        return [Tag.BYTES, offset, len(value)]

    def _pickled(self, value: object, path: str) -> list[object]:
        kind = type(value)
        if not self.allow_pickle:
            raise ShippingError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which is sent only pickled, "
                "and pickles are not allowed here",
                fix="return tensors, arrays, numbers, strings, lists, tuples or dicts",
            )
        buffer = io.BytesIO()
        leaves: list[object] = []
        pickler = _LeafPickler(buffer, self, leaves)
        try:
            pickler.dump(value)
        except ShippingError:
            raise
        except Exception as err:
            if pickler.last_tensor is not None:
                raise _unsent(pickler.last_tensor, value, path) from err
            raise ShippingError(
                f"{path} is a {kind.__module__}.{kind.__qualname__} and cannot be pickled: "
                f"{type(err).__name__}: {err}",
                fix="return tensors, arrays, numbers, strings, lists, tuples or dicts",
            ) from err
        return [Tag.PICKLE, self._bytes(buffer.getbuffer()), leaves]


def _tensor(encoder: Encoded, value: object) -> list[object] | None:
    """Returns the node of a tensor whose bytes are its values; None for all others."""
    import torch

    if type(value) is not torch.Tensor or not _is_raw(value):
        return None
    if value.device.type != "cpu":
        raise ShippingError(
            f"the batch has a tensor on {value.device}",
            fix="make batches on the CPU and move them in the training loop",
        )
    tensor = value.detach() if value.requires_grad else value
    # Conjugate and negative views are flags of the tensor: its raw bytes are other values. One
    # without memory consists of zeros.
    is_flagged = tensor.is_conj() or tensor.is_neg()
    if encoder.keeps_gaps and is_flagged and not tensor.is_contiguous():
        raise ShippingError("a sample is a conjugate or negative view with gaps")
    if is_flagged or (tensor.nbytes and not tensor.data_ptr()):
        tensor = tensor.resolve_conj().resolve_neg().clone()
    elif tensor.nbytes:
        node = _in_region(encoder, value, tensor.data_ptr())
        if node is not None:
            return node
    return _tensor_apart(encoder, tensor, requires_grad=value.requires_grad)


def _tensor_apart(encoder: Encoded, tensor: "torch.Tensor", *, requires_grad: bool) -> list[object]:
    """Returns the node of a tensor that shares memory with no other."""
    as_it_is = tensor
    axes: list[int] = []
    if not tensor.is_contiguous():
        tensor, axes = _dense(tensor)
    shape = list(tensor.shape)
    if not tensor.is_contiguous() or (1 in shape and not _has_usual_strides(tensor)):
        node = _strided(encoder, as_it_is, requires_grad=requires_grad)
        if node is not None:
            return node
    end: list[object] = [*_back(axes)]
    if requires_grad:
        # The flag comes after the order of axes, empty if there is none.
        end = [*(end or [[]]), True]
    offset = _offset(encoder, tensor, first=_first(encoder, as_it_is))
    name = str(tensor.dtype).removeprefix("torch.")
    return [Tag.TENSOR, name, shape, offset, *end]


def _first(encoder: Encoded, tensor: "torch.Tensor") -> int:
    """Returns the place of a tensor's first byte within a line of the caches.

    Products of matrices take another way through memory that begins elsewhere.
    """
    itemsize = tensor.itemsize
    if encoder.keeps_gaps and tensor.nbytes:
        first = tensor.data_ptr() % ALIGNMENT
        return first - first % itemsize
    # As torch's workers: what a script made of an array's memory begins with a line there, too.
    return int(tensor.storage_offset()) * itemsize % ALIGNMENT


def _base(value: object) -> int:
    """Returns the address at which the memory begins that a tensor or array is a view of.

    Places are given from there on: addresses are others each time that a batch is made.
    """
    if not isinstance(value, np.ndarray):
        import torch

        assert isinstance(value, torch.Tensor)
        return value.untyped_storage().data_ptr()
    while isinstance(value.base, np.ndarray):
        value = value.base
    return int(value.ctypes.data)


def _has_usual_strides(tensor: "torch.Tensor") -> bool:
    """Whether strides of axes of one element, by which libraries choose their way, are usual."""
    step = 1
    strides = tensor.stride()
    shape = tensor.shape
    for axis in range(len(strides) - 1, -1, -1):
        if strides[axis] != step:
            return False
        step *= shape[axis]
    return True


def _strided(
    encoder: Encoded, tensor: "torch.Tensor", *, requires_grad: bool
) -> list[object] | None:
    """Returns the node of a tensor with strides that do not follow from its shape.

    None: it has no elements, or so few of such large memory that its gaps are closed.

    Args:
        encoder: Of the batch.
        tensor: The tensor, without its gradient.
        requires_grad: Whether it has one.
    """
    if not tensor.nbytes:
        return None
    steps = list(tensor.stride())
    itemsize = tensor.itemsize
    name = str(tensor.dtype).removeprefix("torch.")
    first = _first(encoder, tensor)
    spread = spread_of(tensor.shape, [step * itemsize for step in steps], itemsize, first=first)
    laid = tensor.as_strided(spread.shape, [stride // itemsize for stride in spread.strides])
    shape = list(tensor.shape)
    end: list[object] = [True] * requires_grad
    if laid.is_contiguous():
        place = _offset(encoder, laid, first=first)
        return [Tag.STRIDED_TENSOR, name, shape, steps, place, *end]
    in_arena = _in_arena(encoder, tensor, span=spread.span - first, nbytes=spread.nbytes)
    if in_arena is not None:
        return [Tag.STRIDED_TENSOR, name, shape, steps, in_arena, *end]
    if encoder.budget.allows(spread):
        return [Tag.SPREAD_TENSOR, name, shape, steps, _offset(encoder, laid), first, *end]
    return _tensor_with_gaps(encoder, tensor, requires_grad=requires_grad)


def _in_arena(encoder: Encoded, tensor: "torch.Tensor", *, span: int, nbytes: int) -> int | None:
    """Returns where memory with gaps lies in the payload already; None: nowhere.

    Args:
        encoder: Of the batch.
        tensor: The tensor.
        span: Bytes from its first to its last one.
        nbytes: Bytes of its values.
    """
    if encoder.arena is None:
        return None
    place = encoder.arena.offset_of(tensor.data_ptr(), span, tensor.itemsize)
    if place is not None:
        encoder.note_strided(_view(tensor))
        encoder.in_place += min(nbytes, span)
    return place


def _tensor_with_gaps(
    encoder: Encoded, tensor: "torch.Tensor", *, requires_grad: bool
) -> list[object] | None:
    """Returns the node of a tensor whose gaps are as small as can be; None: they are closed."""
    import torch

    view = _view(tensor)
    layout = _layout_of(view) if encoder.keeps_gaps else with_gaps(view)
    if layout is None:
        return None
    encoder.note_strided(view)
    steps = [stride // view.itemsize for stride in layout.strides]
    name = str(tensor.dtype).removeprefix("torch.")
    rare = RARE_DTYPES.get(name)
    if rare is not None:
        tensor = tensor.view(getattr(torch, rare))

    def copy(target: Bytes1D) -> None:
        flat = torch.from_numpy(target[layout.start :]).view(tensor.dtype)
        flat.as_strided(tensor.shape, steps).copy_(tensor)

    place = encoder.reserve(layout.nbytes, copy) + layout.start
    end: list[object] = [True] if requires_grad else []
    return [Tag.STRIDED_TENSOR, name, list(tensor.shape), steps, place, *end]


def _layout_of(view: View) -> GappedLayout:
    layout = with_gaps(view)
    if layout is None:
        raise ShippingError("a sample has elements that share memory with each other")
    return layout


def _is_raw(tensor: "torch.Tensor") -> bool:
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return False
    return str(tensor.dtype).removeprefix("torch.") in TENSOR_DTYPES


def _dense(tensor: "torch.Tensor") -> "tuple[torch.Tensor, list[int]]":
    """Returns a tensor whose memory is dense in the order of its axes, and that order.

    Channels last, or another order of dense memory, is restored by the decoder. Where there is no
    such order, this is the tensor itself and no order.
    """
    axes = order_of(tensor.stride())
    if axes and tensor.permute(axes).is_contiguous():
        return tensor.permute(axes), axes
    return tensor, []


def _offset(encoder: Encoded, tensor: "torch.Tensor", *, first: int = 0) -> int:
    """Returns a tensor's place in the payload: where it lies already, or where it is copied.

    Args:
        encoder: Of the batch.
        tensor: The tensor.
        first: Place of the first byte of its copy within a line of the caches.
    """
    import torch

    nbytes = tensor.nbytes
    if nbytes and tensor.is_contiguous():
        address = tensor.data_ptr()
        encoder.note(address, address + nbytes)
        arena = encoder.arena
        place = None if arena is None else arena.offset_of(address, nbytes, tensor.itemsize)
        if place is not None:
            encoder.in_place += nbytes
            return place
    elif nbytes:
        encoder.note_strided(_view(tensor))
    rare = RARE_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if rare is not None:
        tensor = tensor.view(getattr(torch, rare))

    def copy(target: Bytes1D) -> None:
        torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return encoder.reserve(nbytes, copy, first=first)


def _in_region(encoder: Encoded, tensor: "torch.Tensor", address: int) -> list[object] | None:
    """Returns the node of a tensor that shares memory with others; None for all others."""
    place = encoder.place_in_region(tensor, address)
    if place is None:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    shape = list(tensor.shape)
    end: list[object] = [True] if tensor.requires_grad else []
    if place % tensor.itemsize == 0 and tensor.is_contiguous() and _has_usual_strides(tensor):
        # As others are: batches of such tensors go to a device as one block.
        return [Tag.TENSOR, name, shape, place, *([[], *end] if end else [])]
    return [Tag.STRIDED_TENSOR, name, shape, list(tensor.stride()), place, *end]


def _views(value: object) -> Iterator[View]:
    """Yields the memory of a tensor or array, if it has any."""
    import torch

    if isinstance(value, torch.Tensor) and value.nbytes and value.data_ptr():
        if not (value.is_conj() or value.is_neg()):
            yield _view(value)
    elif isinstance(value, np.ndarray) and value.size:
        yield strided(value.ctypes.data, id(value), value.shape, value.strides, value.itemsize)


def _view(tensor: "torch.Tensor") -> View:
    size = tensor.itemsize
    strides = tuple([stride * size for stride in tensor.stride()])
    return strided(tensor.data_ptr(), id(tensor), tuple(tensor.shape), strides, size)


def _back(axes: list[int]) -> list[list[int]]:
    """Returns the permutation that undoes one of axes, as the last part of a node; [] for none."""
    if not axes:
        return []
    return [sorted(range(len(axes)), key=axes.__getitem__)]


def _unsent(tensor: "torch.Tensor", value: object, path: str) -> ShippingError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    place = path if tensor is value else f"{path} is a {kind} with a tensor that"
    return ShippingError(
        f"{place} is a tensor of {tensor.layout} and {tensor.dtype}, which torch cannot pickle",
        fix="return tensors with their own memory: tensor.to_dense(), or "
        "tensor.view(torch.uint8) and its dtype as a text",
    )


class _LeafPickler(AnswerPickler):
    def __init__(self, file: io.BytesIO, encoder: Encoded, leaves: list[object]) -> None:
        super().__init__(file, protocol=5)
        self._encoder = encoder
        self._leaves = leaves
        # The last one that is not sent raw.
        self.last_tensor: torch.Tensor | None = None

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, np.ndarray) and not type(obj).__module__.startswith("torch"):
            return None
        node = self._encoder.leaf(obj)
        if node is None:
            self.note(obj)
            return None
        self._leaves.append(node)
        return len(self._leaves) - 1

    def note(self, obj: object) -> None:
        import torch

        if isinstance(obj, torch.Tensor):
            self.last_tensor = obj

    def reducer_override(self, obj: object) -> object:
        """Also keeps the state of objects with slots."""
        reduction = reduced(obj)
        if reduction is not None:
            return reduction
        usual = super().reducer_override(obj)
        if usual is not NotImplemented or not _has_lost_slots(obj):
            return usual
        plain = obj.__reduce_ex__(5)
        if isinstance(plain, tuple) and len(plain) > 2 and plain[2] is not None:
            # cloudpickle loses the `__slots__` of a class that is pickled by value. In a state
            # (dict, slots), pickle sets the slots with setattr.
            return (*plain[:2], (None, vars(obj)), *plain[3:])
        return usual


def _has_lost_slots(obj: object) -> bool:
    kinds = type(obj).__mro__[:-1]
    return (
        not isinstance(obj, type)
        and hasattr(obj, "__dict__")
        and all("__slots__" in vars(kind) for kind in kinds)
        and "__setstate__" not in dir(obj)
        and not any("__dict__" in vars(kind)["__slots__"] for kind in kinds)
    )


def _is_other_long_double(name: str) -> bool:
    return not LONG_DOUBLE_IS_X86 and name[1:] in ("f16", "c32")


def _dtype(name: str) -> "np.dtype[np.generic[object]]":
    if not ARRAY_DTYPE.fullmatch(name):
        raise ProtocolError("unknown dtype of an array")
    if _is_other_long_double(name):
        raise ProtocolError(
            "the batch has numpy's long double, whose bits differ where it was made",
            fix="use float64 or complex128",
        )
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        raise ProtocolError("unknown dtype of an array") from None


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    if name not in TENSOR_DTYPES:
        raise ProtocolError("unknown dtype of a tensor")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShippingError(f"this torch has no {name}", fix="install the same torch everywhere")
    return dtype


def _steps(strides: list[object], ndim: int, *, least: int) -> tuple[int, ...]:
    steps = tuple(step for step in strides if type(step) is int and least <= step < 1 << 48)
    if len(steps) != len(strides) or len(steps) != ndim:
        raise ProtocolError(f"invalid strides for {ndim} dimensions")
    return steps


def _order_of_node(axes: list[object], ndim: int) -> list[int]:
    order = [axis for axis in axes if type(axis) is int]
    if len(order) != len(axes) or sorted(order) != list(range(ndim)):
        raise ProtocolError(f"invalid axis order for {ndim} dimensions")
    return order


def _arranged(tensor: "torch.Tensor", end: list[object]) -> "torch.Tensor":
    match end:
        case []:
            return tensor
        case [list(axes)]:
            return tensor.permute(_order_of_node(axes, tensor.ndim))
        case [list(axes), True]:
            permuted = tensor.permute(_order_of_node(axes, tensor.ndim)) if axes else tensor
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                return permuted.requires_grad_()
    raise ProtocolError("inconsistent tensor description")


class _LeafUnpickler(AnswerUnpickler):
    def __init__(self, data: bytes, leaves: Sequence[object]) -> None:
        super().__init__(io.BytesIO(data))
        self._leaves = leaves

    def persistent_load(self, pid: object) -> object:
        if not isinstance(pid, int) or not 0 <= pid < len(self._leaves):
            raise ProtocolError(f"leaf {pid!r} of a pickle with {len(self._leaves)} leaves")
        return self._leaves[pid]


def _type_in(data: bytes) -> str:
    """Returns the first class in a pickle, by its opcodes: nothing is executed."""
    words: list[str] = []
    with contextlib.suppress(ValueError, IndexError, UnicodeDecodeError):
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("EMPTY_SET", "FROZENSET"):
                return opcode.name.removeprefix("EMPTY_").lower()
            if opcode.name == "STACK_GLOBAL":
                return ".".join(words[-2:])[:200]
            if opcode.name == "GLOBAL":
                return str(argument).replace(" ", ".")[:200]
            if isinstance(argument, str):
                words.append(argument)
    return "value of unknown type"


def _invalid_node(tag: int, rest: list[object]) -> ProtocolError:
    return ProtocolError(f"invalid node: tag {tag} with {len(rest)} parts")


class Decoder:
    """Values of one payload."""

    def __init__(self, payload: Bytes1D, *, allow_pickle: bool) -> None:
        self._payload = payload
        self._allow_pickle = allow_pickle
        # What occurs at two places of a batch is one object again.
        self._known: dict[int, tuple[list[object], object]] = {}
        # Copies out of the payload must not exceed its size in total.
        self._copies_left = payload.nbytes
        self._budget = SpreadBudget()

    def value(self, node: object, depth: int) -> object:
        """Returns a node's value; raises ProtocolError if malformed, ShippingError for pickles."""
        if not isinstance(node, list):
            if isinstance(node, dict | msgspec.msgpack.Ext):
                raise ProtocolError(f"invalid node: {type(node).__name__}")
            return node
        # Pickled values are one node deeper than the encoder counts.
        if depth > MAX_DEPTH + 1:
            raise ProtocolError(f"batch nested deeper than {MAX_DEPTH}")
        if not node or not isinstance(node[0], int):
            raise ProtocolError("invalid node: no tag")
        tag, *rest = node
        if tag in (Tag.LIST, Tag.TUPLE):
            values = [self.value(item, depth + 1) for item in rest]
            return values if tag == Tag.LIST else tuple(values)
        if tag != Tag.DICT:
            return self._leaf(tag, rest)
        flat = [self.value(item, depth + 1) for item in rest]
        try:
            return dict(zip(flat[::2], flat[1::2], strict=True))
        # A key that cannot be hashed, or has no value.
        except (TypeError, ValueError) as err:
            raise ProtocolError(f"malformed dict: {err}") from None

    def _leaf(self, tag: int, rest: list[object]) -> object:
        if tag in TAGS_IN_MEMORY:
            return self._in_memory(tag, rest)
        match tag, rest:
            case (Tag.PICKLE, [list() as place, list() as leaves]) if place[:1] == [Tag.BYTES]:
                return self._unpickled(place, leaves)
            case (Tag.BYTES, [int(offset), int(nbytes)]):
                return self._bytes(offset, nbytes)
            case (Tag.INTEGER, [bytes(digits)]):
                return int.from_bytes(digits, "little", signed=True)
            case (Tag.COMPLEX, [float(real), float(imaginary)]):
                return complex(real, imaginary)
            case (Tag.TEXT, [bytes(text)]):
                return text.decode("utf-8", "surrogatepass")
        raise _invalid_node(tag, rest)

    def _in_memory(self, tag: int, rest: list[object]) -> object:
        """Returns a tensor, array or NumPy scalar, a view of the payload."""
        match tag, rest:
            case (Tag.TENSOR, [str(dtype), list(shape), int(offset), *end]):
                earlier = self._earlier(offset, rest, shape)
                if earlier is not None:
                    return earlier
                tensor = _arranged(self._tensor(dtype, shape, offset), end)
                self._known.setdefault(offset, (rest, tensor))
                return tensor
            case (Tag.ARRAY, [str(dtype), list(shape), int(offset)]):
                earlier = self._earlier(offset, rest, shape)
                if earlier is not None:
                    return earlier
                array = self._array(dtype, shape, offset)
                self._known.setdefault(offset, (rest, array))
                return array
            case (Tag.ARRAY, [str(dtype), list(shape), int(offset), list(axes)]):
                return self._array(dtype, shape, offset).transpose(_order_of_node(axes, len(shape)))
            case (Tag.SCALAR, [str(dtype), [], int(offset)]):
                scalar: object = self._array(dtype, [], offset)[()]
                return scalar
            case (_, [str(), list(shape), list(), int(offset), *_]):
                earlier = self._earlier(offset, rest, shape)
                if earlier is not None:
                    return earlier
                view = self._view(tag, rest)
                self._known.setdefault(offset, (rest, view))
                return view
        raise _invalid_node(tag, rest)

    def _view(self, tag: int, rest: list[object]) -> object:
        """Returns a tensor or array whose strides do not follow from its shape."""
        match tag, rest:
            case (Tag.STRIDED_TENSOR, [str(dtype), list(shape), list(strides), int(place), *end]):
                strided = self._strided_tensor(dtype, shape, strides, place)
                return _arranged(strided, [[], *end] if end else [])
            case (Tag.STRIDED_ARRAY, [str(dtype), list(shape), list(strides), int(place)]):
                return self._strided_array(dtype, shape, strides, place)
            case (
                Tag.SPREAD_TENSOR,
                [str(dtype), list(shape), list(strides), int(offset), int(first), *end],
            ):
                spread = self._spread_tensor(dtype, shape, strides, offset, first=first)
                return _arranged(spread, [[], *end] if end else [])
            case (
                Tag.SPREAD_ARRAY,
                [str(dtype), list(shape), list(strides), int(offset), int(first)],
            ):
                return self._spread_array(dtype, shape, strides, offset, first=first)
        raise _invalid_node(tag, rest)

    def _earlier(self, offset: int, rest: list[object], shape: list[object]) -> object:
        """Returns the tensor or array that the same node has given before, else None."""
        earlier = self._known.get(offset)
        if earlier is None or earlier[0] != rest:
            return None
        # All that has no elements is at offset 0.
        return None if 0 in shape else earlier[1]

    def _place(self, offset: int, nbytes: int, *, alignment: int = ALIGNMENT) -> Bytes1D:
        if offset < 0 or nbytes < 0 or offset % alignment or offset + nbytes > self._payload.nbytes:
            raise ProtocolError(
                f"{nbytes} bytes at {offset} do not fit a payload of {self._payload.nbytes} bytes"
            )
        return self._payload[offset : offset + nbytes]

    def _shape(self, shape: list[object]) -> tuple[int, ...]:
        sizes = tuple(size for size in shape if type(size) is int and 0 <= size < 1 << 48)
        if len(sizes) != len(shape) or len(sizes) > MAX_DIMENSIONS:
            raise ProtocolError(f"invalid shape with {len(shape)} dimensions")
        # A size of 0 must not hide the others: torch multiplies them to strides anyway.
        if math.prod(max(size, 1) for size in sizes) >= 1 << 48:
            raise ProtocolError("shape of more than 2**48 elements")
        return sizes

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        return self._copied(offset, nbytes).tobytes()

    def _copied(self, offset: int, nbytes: int) -> Bytes1D:
        """Returns bytes of the payload of which one copy may be made."""
        place = self._place(offset, nbytes)
        self._copies_left -= nbytes
        if self._copies_left < 0:
            raise ProtocolError("overlapping parts of the payload")
        return place

    def _values_of(self, spread: SpreadLayout, sizes: tuple[int, ...], offset: int) -> Bytes1D:
        """Returns the values of what has gaps, if memory with these may be made."""
        if 0 in sizes:
            raise ProtocolError("gaps without an element")
        values = self._copied(offset, spread.nbytes)
        if not self._budget.allows(spread):
            raise ProtocolError(f"{spread.span} bytes for {spread.nbytes} bytes of values")
        return values

    def _tensor(self, name: str, shape: list[object], offset: int) -> "torch.Tensor":
        import torch

        from stoker.feed.wire.blocks import contiguous_part, cut

        sizes = self._shape(shape)
        dtype = _torch_dtype(name)
        count = math.prod(sizes)
        self._place(offset, count * dtype.itemsize, alignment=dtype.itemsize)
        if not count:
            return torch.empty(sizes, dtype=dtype)
        pinned: object = self._payload.base
        if isinstance(pinned, torch.Tensor):
            # In torch's pinned memory, whose allocator tracks copies to the device.
            return cut(pinned, [contiguous_part(dtype, sizes, offset=offset)])[0]
        return torch.frombuffer(self._payload, dtype=dtype, count=count, offset=offset).view(sizes)

    def _strided_tensor(
        self, name: str, shape: list[object], strides: list[object], offset: int
    ) -> "torch.Tensor":
        import torch

        from stoker.feed.wire.blocks import BlockPart, cut

        sizes = self._shape(shape)
        dtype = _torch_dtype(name)
        steps = _steps(strides, len(sizes), least=0)
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        end = offset + (last + 1) * dtype.itemsize
        if 0 in sizes or offset % dtype.itemsize or offset < 0 or end > self._payload.nbytes:
            raise ProtocolError(f"a view of the bytes {offset} to {end} does not fit the payload")
        pinned: object = self._payload.base
        block = pinned if isinstance(pinned, torch.Tensor) else torch.from_numpy(self._payload)
        return cut(block, [BlockPart(dtype, sizes, steps, offset // dtype.itemsize)])[0]

    def _spread_tensor(
        self, name: str, shape: list[object], strides: list[object], offset: int, *, first: int
    ) -> "torch.Tensor":
        """Returns a tensor in new memory with gaps.

        Args:
            name: Of its type.
            shape: Its sizes.
            strides: In elements.
            offset: Of its values in the payload, which have no gaps.
            first: Place of the first one within a line of the caches.
        """
        import torch

        from stoker.feed.wire.blocks import BlockPart, block_beside, cut

        sizes = self._shape(shape)
        dtype = _torch_dtype(name)
        itemsize = dtype.itemsize
        steps = _steps(strides, len(sizes), least=0)
        if not 0 <= first < ALIGNMENT or first % itemsize:
            raise ProtocolError(f"a tensor at {first} of a line")
        spread = spread_of(sizes, [step * itemsize for step in steps], itemsize, first=first)
        values = torch.from_numpy(self._values_of(spread, sizes, offset))
        block = block_beside(self._payload.base, spread.span)
        # Of types that torch does not copy, the bytes are copied.
        plain = _torch_dtype(RARE_DTYPES.get(name, name))
        packed_steps = tuple(stride // itemsize for stride in spread.strides)
        start = spread.start // itemsize
        laid, tensor = cut(
            block,
            [
                BlockPart(plain, spread.shape, packed_steps, start),
                BlockPart(dtype, sizes, steps, start),
            ],
        )
        laid.copy_(values.view(plain).view(spread.shape))
        return tensor

    def _spread_array(
        self, name: str, shape: list[object], strides: list[object], offset: int, *, first: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]":
        """Returns the same for an array, whose strides are in bytes."""
        sizes = self._shape(shape)
        dtype = _dtype(name)
        steps = _steps(strides, len(sizes), least=-(1 << 48))
        if not 0 <= first < ALIGNMENT:
            raise ProtocolError(f"an array at {first} of a line")
        spread = spread_of(sizes, steps, dtype.itemsize, first=first)
        values = self._values_of(spread, sizes, offset)
        memory: Bytes1D = np.empty(spread.span + ALIGNMENT, dtype=np.uint8)
        start = spread.start - memory.ctypes.data % -ALIGNMENT
        laid = np.ndarray(spread.shape, dtype, memory, start, spread.strides)
        np.copyto(laid, values.view(dtype).reshape(spread.shape))
        array = np.ndarray(sizes, dtype, memory, start, steps)
        # As NumPy's `broadcast_to`: one number would be several.
        array.flags.writeable = spread.nbytes == array.nbytes
        return array

    def _strided_array(
        self, name: str, shape: list[object], strides: list[object], offset: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]":
        sizes = self._shape(shape)
        dtype = _dtype(name)
        steps = _steps(strides, len(sizes), least=-(1 << 48))
        try:
            # NumPy compares them with the payload.
            return np.ndarray(sizes, dtype, self._payload, offset, steps)
        except (TypeError, ValueError, OverflowError) as err:
            raise ProtocolError(f"a view does not fit the payload: {err}") from None

    def _array(
        self, name: str, shape: list[object], offset: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]":
        sizes = self._shape(shape)
        dtype = _dtype(name)
        place = self._place(offset, math.prod(sizes) * dtype.itemsize)
        return place.view(dtype).reshape(sizes)

    def _unpickled(self, place: list[object], leaves: list[object]) -> object:
        data = self._leaf(Tag.BYTES, place[1:])
        assert isinstance(data, bytes)
        if not self._allow_pickle:
            raise ProtocolError(
                f"a part of the batch is pickled (a {_type_in(data)}), and pickles are not "
                "accepted (feed.accept_pickles is false)",
                fix="have collate_fn return tensors, arrays, numbers, strings, lists, tuples or "
                "dicts, or trust the data hosts: feed.accept_pickles: true",
            )
        values: list[object] = []
        # No other nodes: a pickle within a pickle would evade the bound on depth.
        for leaf in leaves:
            match leaf:
                case [int(tag), *rest] if tag in TAGS_IN_MEMORY:
                    values.append(self._in_memory(tag, rest))
                case _:
                    raise ProtocolError("leaf of a pickle that is neither tensor nor array")
        try:
            value: object = _LeafUnpickler(data, values).load()
        except ProtocolError:
            raise
        except Exception as err:
            raise why_not_rebuilt(err, OF_TRAINER).error(ShippingError) from err
        return value


def encode(
    value: object,
    *,
    allow_pickle: bool,
    arena: Arena | None = None,
    shares_arrays: bool = False,
    keeps_gaps: bool = False,
) -> Encoded:
    """Describes `value`, which only `Encoded.write_into` copies.

    Raises ShippingError if a part must not or cannot be pickled.

    Args:
        value: The batch.
        allow_pickle: Whether parts may be pickled.
        arena: Memory that parts of it may be in already.
        shares_arrays: Whether arrays that share memory share it again, as in a loop that makes its
            batches itself. Torch's workers pickle each; tensors share memory in either case.
        keeps_gaps: Whether it is better to raise than to close gaps of memory, as of crops, that
            are too large: what computes with them gets the same bits.
    """
    return Encoded(
        value,
        allow_pickle=allow_pickle,
        arena=arena,
        shares_arrays=shares_arrays,
        keeps_gaps=keeps_gaps,
    )


def decode(tree: bytes | memoryview, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
    """Returns the value; its tensors and arrays are writable views of `payload`.

    Args:
        tree: The packed description.
        payload: Owns its memory (its base is no array); None: there is none.
        allow_pickle: Parts may be pickled, as an authenticated sender has encoded it.

    Raises:
        ProtocolError: The description is malformed.
        ShippingError: A pickled part cannot be rebuilt here.
    """
    flat: Bytes1D = np.empty(0, dtype=np.uint8) if payload is None else payload
    try:
        node: object = _decoder.decode(tree)
        return Decoder(flat, allow_pickle=allow_pickle).value(node, 0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"malformed description of a batch: {err}") from None


def pack_value(value: object, *, allow_pickle: bool) -> bytes:
    """Returns `value` as one frame: length of the tree, tree, payload."""
    flat = _flat(value)
    if flat is not None:
        return flat
    encoded = encode(value, allow_pickle=allow_pickle)
    # Separate memory: after the tree the payload would not be aligned, as torch needs it.
    payload: Bytes1D = np.zeros(encoded.nbytes, dtype=np.uint8)
    if encoded.nbytes:
        encoded.write_into(payload.data)
    return b"".join((_LENGTH.pack(len(encoded.tree)), encoded.tree, payload.data))


def _flat(value: object) -> bytes | None:
    """Returns the frame of a list of integers, as indices mostly are: 40 times faster for 128."""
    if type(value) is not list or set(map(type, value)) != {int}:
        return None
    try:
        tree = _encoder.encode([int(Tag.LIST), *value])
    # More than 64 bits: `encode` sends the digits.
    except OverflowError:
        return None
    return _LENGTH.pack(len(tree)) + tree


def unpack_value(data: bytes | memoryview, *, allow_pickle: bool) -> object:
    """Returns the value of a frame of `pack_value`; raises as `decode`."""
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ProtocolError(f"value of {len(view)} bytes, expected at least {_LENGTH.size}")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    start = _LENGTH.size + length
    if start > len(view):
        raise ProtocolError(f"tree of {length} bytes in a frame of {len(view)}")
    # Copied: the frame is read-only, and the payload is not aligned in it.
    payload: Bytes1D = np.array(np.frombuffer(view[start:], dtype=np.uint8))
    return decode(view[_LENGTH.size : start], payload, allow_pickle=allow_pickle)
