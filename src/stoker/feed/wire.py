"""How a batch travels: a small description (the tree) and one payload of raw buffers.

Tensors and arrays lie in the payload at 64-byte aligned offsets and come back as views of it, so
that a received batch is never copied again. Numbers, strings, lists, tuples and dicts are in the
tree. Anything else is pickled by cloudpickle (a class of the training script comes back intact only
so), but the tensors and arrays inside it still travel as raw buffers.

Bytes of a peer are judged before anything is made of them: offsets, shapes and sizes against the
payload, depth against a bound, and pickles are opened only where the caller allows it.

A node of the tree is a scalar of msgpack, or a list that begins with one of the tags below.
"""

import io
import math
import pickle
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import cloudpickle
import msgspec
import numpy as np

from stoker.errors import ProtocolError, ShippingError

if TYPE_CHECKING:
    import torch

Bytes1D = np.ndarray[tuple[int], np.dtype[np.uint8]]

ALIGNMENT = 64
MAX_DEPTH = 64
MAX_DIMENSIONS = 64

# Longer ones are payload: they need no copy into the message's head.
_INLINE_BYTES = 1024
_ARRAY_DTYPE = re.compile(
    r"[<>|=](?:[biufc][1-9]\d?|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)"
)
_TENSOR_DTYPES = frozenset(
    (
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()
_LENGTH = struct.Struct("<Q")


class _Tag(IntEnum):
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


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value ready to travel.

    Attributes:
        tree: The description, for `decode`.
        nbytes: Bytes of the payload.
        has_pickle: Whether the receiver must allow pickles.
    """

    tree: bytes
    nbytes: int
    has_pickle: bool
    _leaves: Sequence[tuple[int, int, Callable[[Bytes1D], None]]]

    def write_into(self, target: memoryview) -> None:
        """Copies the payload into `target`, which has at least `nbytes` writable bytes."""
        flat: Bytes1D = np.frombuffer(target, dtype=np.uint8)
        for offset, nbytes, copy in self._leaves:
            copy(flat[offset : offset + nbytes])


def encode(value: object, *, allow_pickle: bool) -> Encoded:
    """Describes `value`; its tensors and arrays are copied by `Encoded.write_into` only.

    Raises:
        ShippingError: If a part of it would have to be pickled and must not, or cannot be, naming
            the part.
    """
    encoder = _Encoder(allow_pickle=allow_pickle)
    tree = _encoder.encode(encoder.node(value, "batch", 0))
    return Encoded(tree, encoder.end, encoder.has_pickle, encoder.leaves)


def decode(tree: bytes | memoryview, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
    """The value again: its tensors and arrays are writable views of `payload`.

    Args:
        payload: 1-D uint8 array that owns the memory (its base is no array); None: no bytes.

    Raises:
        ProtocolError: If the description does not fit the payload, or is none.
        ShippingError: If a pickled part cannot be rebuilt here.
    """
    flat: Bytes1D = np.empty(0, dtype=np.uint8) if payload is None else payload
    try:
        node: object = _decoder.decode(tree)
        return _Decoder(flat, allow_pickle=allow_pickle).value(node, 0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"not a description of a batch: {err}") from None


def pack_value(value: object, *, allow_pickle: bool) -> bytes:
    """`value` as one frame: the length of its tree, the tree, the payload.

    Raises:
        ShippingError: As `encode`.
    """
    encoded = encode(value, allow_pickle=allow_pickle)
    data = bytearray(_LENGTH.size + len(encoded.tree) + encoded.nbytes)
    data[: _LENGTH.size] = _LENGTH.pack(len(encoded.tree))
    start = _LENGTH.size + len(encoded.tree)
    data[_LENGTH.size : start] = encoded.tree
    if encoded.nbytes:
        encoded.write_into(memoryview(data)[start:])
    return bytes(data)


def unpack_value(data: bytes | memoryview, *, allow_pickle: bool) -> object:
    """The value in a frame of `pack_value`.

    Raises:
        ProtocolError: If it is no such frame.
        ShippingError: As `decode`.
    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ProtocolError(f"a value needs at least {_LENGTH.size} bytes, found {len(view)}")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    start = _LENGTH.size + length
    if start > len(view):
        raise ProtocolError(f"a tree of {length} bytes in a frame of {len(view)}")
    payload: Bytes1D = np.array(np.frombuffer(view[start:], dtype=np.uint8))
    return decode(view[_LENGTH.size : start], payload, allow_pickle=allow_pickle)


class _Encoder:
    def __init__(self, *, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.has_pickle = False
        self.end = 0
        self.leaves: list[tuple[int, int, Callable[[Bytes1D], None]]] = []
        self._nodes: dict[int, tuple[object, list[object]]] = {}

    def node(self, value: object, path: str, depth: int) -> object:
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if isinstance(value, int) and kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            return [
                _Tag.INTEGER,
                value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
            ]
        if isinstance(value, str) and kind is str:
            # A lone surrogate is a legal str, but no legal UTF-8.
            return value if value.isascii() else [_Tag.TEXT, value.encode("utf-8", "surrogatepass")]
        if isinstance(value, bytes) and kind is bytes:
            return value if len(value) <= _INLINE_BYTES else self._bytes(value)
        if isinstance(value, complex) and kind is complex:
            return [_Tag.COMPLEX, value.real, value.imag]
        if depth < MAX_DEPTH:
            if isinstance(value, list | tuple) and kind in (list, tuple):
                tag = _Tag.LIST if kind is list else _Tag.TUPLE
                return [
                    tag,
                    *(self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)),
                ]
            if isinstance(value, dict) and kind is dict:
                items: list[object] = [_Tag.DICT]
                for key, item in value.items():
                    items.append(self.node(key, f"key {key!r} of {path}", depth + 1))
                    items.append(self.node(item, f"{path}[{key!r}]", depth + 1))
                return items
        leaf = self.leaf(value)
        return self._pickled(value, path) if leaf is None else leaf

    def leaf(self, value: object) -> list[object] | None:
        """The node of a tensor, array or scalar of NumPy; None if it is none that travels raw."""
        known = self._nodes.get(id(value))
        if known is not None:
            return known[1]
        node = (
            self._array(value)
            if isinstance(value, np.ndarray | np.generic)
            else _tensor(self, value)
        )
        if node is not None:
            self._nodes[id(value)] = (value, node)
        return node

    def reserve(self, nbytes: int, copy: Callable[[Bytes1D], None]) -> int:
        if not nbytes:
            return 0
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.leaves.append((offset, nbytes, copy))
        self.end = offset + nbytes
        return offset

    def _array(self, value: object) -> list[object] | None:
        if isinstance(value, np.generic):
            array, tag = np.asarray(value), _Tag.SCALAR
        elif isinstance(value, np.ndarray) and type(value) is np.ndarray:
            array, tag = value, _Tag.ARRAY
        else:
            return None
        if not _ARRAY_DTYPE.fullmatch(array.dtype.str) or array.dtype.metadata:
            return None
        offset = self.reserve(array.nbytes, lambda target: _copy_array(array, target))
        return [tag, array.dtype.str, list(array.shape), offset]

    def _bytes(self, value: bytes | memoryview) -> list[object]:
        source: Bytes1D = np.frombuffer(value, dtype=np.uint8)
        offset = self.reserve(len(value), lambda target: np.copyto(target, source))
        return [_Tag.BYTES, offset, len(value)]

    def _pickled(self, value: object, path: str) -> list[object]:
        if not self.allow_pickle:
            raise ShippingError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which travels "
                "only pickled, and pickles are not allowed here",
                fix="return tensors, arrays, numbers, strings, lists, tuples or dicts",
            )
        buffer = io.BytesIO()
        leaves: list[object] = []
        try:
            _LeafPickler(buffer, self, leaves).dump(value)
        except ShippingError:
            raise
        except Exception as err:
            raise ShippingError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__} and cannot be "
                f"pickled: {type(err).__name__}: {err}",
                fix="return tensors, arrays, numbers, strings, lists, tuples or dicts",
            ) from err
        self.has_pickle = True
        return [_Tag.PICKLE, self._bytes(buffer.getbuffer()), leaves]


def _tensor(encoder: _Encoder, value: object) -> list[object] | None:
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested:
        return None
    name = str(value.dtype).removeprefix("torch.")
    if name not in _TENSOR_DTYPES:
        return None
    if value.device.type != "cpu":
        raise ShippingError(
            f"the batch holds a tensor on {value.device}",
            fix="make batches on the CPU and move them in the training loop",
        )
    tensor = value.detach().resolve_conj().resolve_neg()
    nbytes = tensor.numel() * tensor.element_size()
    offset = encoder.reserve(nbytes, lambda target: _copy_tensor(tensor, target))
    return [_Tag.TENSOR, name, list(tensor.shape), offset]


def _copy_tensor(tensor: "torch.Tensor", target: Bytes1D) -> None:
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    np.copyto(target, flat.numpy())


def _copy_array(
    array: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]", target: Bytes1D
) -> None:
    np.copyto(target.view(array.dtype).reshape(array.shape), array)


class _LeafPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves tensors and arrays out of the pickle."""

    def __init__(self, file: io.BytesIO, encoder: _Encoder, leaves: list[object]) -> None:
        super().__init__(file, protocol=5)
        self._encoder = encoder
        self._leaves = leaves

    def persistent_id(self, obj: object) -> int | None:
        """Number of the leaf; None: pickle it as usual."""
        if not isinstance(obj, np.ndarray) and not type(obj).__module__.startswith("torch"):
            return None
        node = self._encoder.leaf(obj)
        if node is None:
            return None
        self._leaves.append(node)
        return len(self._leaves) - 1


class _LeafUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, leaves: Sequence[object]) -> None:
        super().__init__(io.BytesIO(data))
        self._leaves = leaves

    def persistent_load(self, pid: object) -> object:
        """The leaf of that number."""
        if not isinstance(pid, int) or not 0 <= pid < len(self._leaves):
            raise ProtocolError(f"a pickle names leaf {pid!r} of {len(self._leaves)}")
        return self._leaves[pid]


class _Decoder:
    def __init__(self, payload: Bytes1D, *, allow_pickle: bool) -> None:
        self._payload = payload
        self._allow_pickle = allow_pickle
        # What is copied out of the payload may in all not be more than the payload.
        self._copies_left = payload.nbytes

    def value(self, node: object, depth: int) -> object:
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
        if tag in (_Tag.LIST, _Tag.TUPLE):
            values = [self.value(item, depth + 1) for item in rest]
            return values if tag == _Tag.LIST else tuple(values)
        if tag == _Tag.DICT:
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
            case (_Tag.PICKLE, [list() as place, list() as leaves]) if place[:1] == [_Tag.BYTES]:
                return self._unpickled(place, leaves)
            case (_Tag.TENSOR, [str(dtype), list(shape), int(offset)]):
                return self._tensor(dtype, shape, offset)
            case (_Tag.ARRAY | _Tag.SCALAR, [str(dtype), list(shape), int(offset)]):
                return self._array(tag, dtype, shape, offset)
            case (_Tag.BYTES, [int(offset), int(nbytes)]):
                return self._bytes(offset, nbytes)
            case (_Tag.INTEGER, [bytes(digits)]):
                return int.from_bytes(digits, "little", signed=True)
            case (_Tag.COMPLEX, [float(real), float(imaginary)]):
                return complex(real, imaginary)
            case (_Tag.TEXT, [bytes(text)]):
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

    def _tensor(self, name: str, shape: list[object], offset: int) -> object:
        import torch

        sizes = self._shape(shape)
        if name not in _TENSOR_DTYPES:
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
        return torch.frombuffer(self._payload, dtype=dtype, count=count, offset=offset).view(sizes)

    def _array(self, tag: int, name: str, shape: list[object], offset: int) -> object:
        sizes = self._shape(shape)
        if not _ARRAY_DTYPE.fullmatch(name):
            raise ProtocolError("an array of an unknown dtype")
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError):
            raise ProtocolError("an array of an unknown dtype") from None
        place = self._place(offset, math.prod(sizes) * dtype.itemsize)
        if tag == _Tag.SCALAR:
            if sizes:
                raise ProtocolError("a scalar with a shape")
            # A scalar of NumPy is a copy by nature.
            scalar: object = place.view(dtype)[0]
            return scalar
        return place.view(dtype).reshape(sizes)

    def _unpickled(self, place: list[object], leaves: list[object]) -> object:
        if not self._allow_pickle:
            raise ProtocolError("a pickle where none is allowed")
        data = self._leaf(_Tag.BYTES, place[1:])
        assert isinstance(data, bytes)
        values: list[object] = []
        for leaf in leaves:
            if not isinstance(leaf, list) or leaf[:1] not in (
                [_Tag.TENSOR],
                [_Tag.ARRAY],
                [_Tag.SCALAR],
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
