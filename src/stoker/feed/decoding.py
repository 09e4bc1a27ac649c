"""From a tree and its payload to a batch; everything is judged before anything is made of it."""

import contextlib
import io
import math
import pickle
import pickletools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.errors import ProtocolError, ShippingError
from stoker.feed.layout import (
    ALIGNMENT,
    ARRAY_DTYPE,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    TENSOR_DTYPES,
    Bytes1D,
    Tag,
)

if TYPE_CHECKING:
    import torch


def _dtype(name: str) -> "np.dtype[np.generic[object]]":
    if not ARRAY_DTYPE.fullmatch(name):
        raise ProtocolError("an array of an unknown dtype")
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        raise ProtocolError("an array of an unknown dtype") from None


def _order(axes: list[object], ndim: int) -> list[int]:
    """The axes, if they are the `ndim` axes in some order."""
    order = [axis for axis in axes if type(axis) is int]
    if len(order) != len(axes) or sorted(order) != list(range(ndim)):
        raise ProtocolError(f"axes that are no order of {ndim}")
    return order


def _arranged(tensor: "torch.Tensor", end: list[object]) -> "torch.Tensor":
    """The tensor with its axes in the order, and with the gradient, that the node's end names."""
    match end:
        case []:
            return tensor
        case [list(axes)]:
            return tensor.permute(_order(axes, tensor.ndim))
        case [list(axes), True]:
            permuted = tensor.permute(_order(axes, tensor.ndim)) if axes else tensor
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                return permuted.requires_grad_()
    raise ProtocolError("a tensor with parts that do not fit it")


class _LeafUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, leaves: Sequence[object]) -> None:
        super().__init__(io.BytesIO(data))
        self._leaves = leaves

    def persistent_load(self, pid: object) -> object:
        """The leaf of that number."""
        if not isinstance(pid, int) or not 0 <= pid < len(self._leaves):
            raise ProtocolError(f"a pickle names leaf {pid!r} of {len(self._leaves)}")
        return self._leaves[pid]


def _type_in(data: bytes) -> str:
    """The first class that a pickle names, as far as its opcodes tell: nothing of it is run."""
    words: list[str] = []
    with contextlib.suppress(ValueError, IndexError, UnicodeDecodeError):
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "EMPTY_SET":
                return "set"
            if opcode.name == "FROZENSET":
                return "frozenset"
            if opcode.name == "STACK_GLOBAL":
                return ".".join(words[-2:])[:200]
            if opcode.name == "GLOBAL":
                return str(argument).replace(" ", ".")[:200]
            if isinstance(argument, str):
                words.append(argument)
    return "value of no known type"


class Decoder:
    """Makes the values of one payload."""

    def __init__(self, payload: Bytes1D, *, allow_pickle: bool) -> None:
        self._payload = payload
        self._allow_pickle = allow_pickle
        # What is copied out of the payload may in all not be more than the payload.
        self._copies_left = payload.nbytes

    def value(self, node: object, depth: int) -> object:
        """The value of a node that lies `depth` nodes deep.

        Raises:
            ProtocolError: If it is no node, or does not fit the payload.
            ShippingError: If a pickled part cannot be rebuilt here.
        """
        if not isinstance(node, list):
            if isinstance(node, dict | msgspec.msgpack.Ext):
                raise ProtocolError(f"a node of kind {type(node).__name__}")
            return node
        # Pickled values lie one node deeper than what the encoder counts.
        if depth > MAX_DEPTH + 1:
            raise ProtocolError(f"a batch nested deeper than {MAX_DEPTH}")
        if not node or not isinstance(node[0], int):
            raise ProtocolError("a node without a tag")
        tag, *rest = node
        if tag in (Tag.LIST, Tag.TUPLE):
            values = [self.value(item, depth + 1) for item in rest]
            return values if tag == Tag.LIST else tuple(values)
        if tag == Tag.DICT:
            return self._dict([self.value(item, depth + 1) for item in rest])
        return self._leaf(tag, rest)

    def _dict(self, flat: list[object]) -> dict[object, object]:
        if len(flat) % 2:
            raise ProtocolError("a dict with a key too many")
        try:
            return dict(zip(flat[::2], flat[1::2], strict=True))
        except TypeError as err:
            raise ProtocolError(f"a key of a dict: {err}") from None

    def _leaf(self, tag: int, rest: list[object]) -> object:
        match tag, rest:
            case (Tag.PICKLE, [list() as place, list() as leaves]) if place[:1] == [Tag.BYTES]:
                return self._unpickled(place, leaves)
            case (Tag.TENSOR, [str(dtype), list(shape), int(offset), *end]):
                return _arranged(self._tensor(dtype, shape, offset), end)
            case (Tag.SCALAR, [str(dtype), list(shape), int(offset)]):
                return self._scalar(dtype, shape, offset)
            case (Tag.ARRAY, [str(dtype), list(shape), int(offset)]):
                return self._array(dtype, shape, offset)
            case (Tag.ARRAY, [str(dtype), list(shape), int(offset), list(axes)]):
                return self._array(dtype, shape, offset).transpose(_order(axes, len(shape)))
            case (Tag.BYTES, [int(offset), int(nbytes)]):
                return self._bytes(offset, nbytes)
            case (Tag.INTEGER, [bytes(digits)]):
                return int.from_bytes(digits, "little", signed=True)
            case (Tag.COMPLEX, [float(real), float(imaginary)]):
                return complex(real, imaginary)
            case (Tag.TEXT, [bytes(text)]):
                return text.decode("utf-8", "surrogatepass")
        raise ProtocolError(f"a node with tag {tag} and {len(rest)} parts that do not fit it")

    def _place(self, offset: int, nbytes: int) -> Bytes1D:
        if offset < 0 or nbytes < 0 or offset % ALIGNMENT or offset + nbytes > self._payload.nbytes:
            raise ProtocolError(
                f"{nbytes} bytes at {offset} in a payload of {self._payload.nbytes} bytes"
            )
        return self._payload[offset : offset + nbytes]

    def _shape(self, shape: list[object]) -> tuple[int, ...]:
        sizes = tuple(size for size in shape if type(size) is int and 0 <= size < 1 << 48)
        if len(sizes) != len(shape) or len(sizes) > MAX_DIMENSIONS:
            raise ProtocolError(f"a shape of {len(shape)} dimensions that is none")
        if math.prod(max(size, 1) for size in sizes) >= 1 << 48:
            raise ProtocolError("a shape of more than 2**48 elements")
        return sizes

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        place = self._place(offset, nbytes)
        self._copies_left -= nbytes
        if self._copies_left < 0:
            raise ProtocolError("byte strings that overlap")
        return place.tobytes()

    def _tensor(self, name: str, shape: list[object], offset: int) -> "torch.Tensor":
        import torch

        sizes = self._shape(shape)
        if name not in TENSOR_DTYPES:
            raise ProtocolError("a tensor of an unknown dtype")
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ShippingError(
                f"this torch has no {name}", fix="install the same torch everywhere"
            )
        count = math.prod(sizes)
        self._place(offset, count * dtype.itemsize)
        if not count:
            return torch.empty(sizes, dtype=dtype)
        pinned: object = self._payload.base
        if isinstance(pinned, torch.Tensor):
            # Views of torch's own pinned memory: its allocator knows of copies under way.
            return pinned[offset : offset + count * dtype.itemsize].view(dtype).view(sizes)
        return torch.frombuffer(self._payload, dtype=dtype, count=count, offset=offset).view(sizes)

    def _array(
        self, name: str, shape: list[object], offset: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]":
        sizes = self._shape(shape)
        dtype = _dtype(name)
        place = self._place(offset, math.prod(sizes) * dtype.itemsize)
        return place.view(dtype).reshape(sizes)

    def _scalar(self, name: str, shape: list[object], offset: int) -> object:
        if shape:
            raise ProtocolError("a scalar with a shape")
        dtype = _dtype(name)
        # A scalar of NumPy is a copy by nature.
        scalar: object = self._place(offset, dtype.itemsize).view(dtype)[0]
        return scalar

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
        for leaf in leaves:
            if not isinstance(leaf, list) or leaf[:1] not in (
                [Tag.TENSOR],
                [Tag.ARRAY],
                [Tag.SCALAR],
            ):
                raise ProtocolError("a leaf of a pickle that is neither tensor nor array")
            values.append(self._leaf(leaf[0], leaf[1:]))
        try:
            value: object = _LeafUnpickler(data, values).load()
        except ProtocolError:
            raise
        except Exception as err:
            raise ShippingError(
                f"a part of the batch cannot be rebuilt here: {type(err).__name__}: {err}",
                fix="see that its class can be imported, or constructed again, in the trainer",
            ) from err
        return value
