"""A batch travels as a small description (the tree) and one payload of raw buffers.

A node of the tree is a scalar of msgpack, or a list that begins with a tag. Numbers, strings,
lists, tuples and dicts are in the tree. Tensors and arrays lie in the payload at 64-byte aligned
offsets and come back as views of it, so that a received batch is never copied again. Anything else
is pickled by cloudpickle (a class of the training script comes back intact only so), but the
tensors and arrays inside it still travel as raw buffers.

Bytes of a peer are checked before anything is made of them: offsets, shapes and sizes against the
payload, depth against a bound, and pickles are opened only where the caller allows it.
"""

import contextlib
import io
import math
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import cloudpickle
import msgspec
import numpy as np

from stoker.errors import ProtocolError, ShippingError
from stoker.feed.wire.pickling import class_at, place_of
from stoker.feed.wire.pickling import reduced as reduced_anew

if TYPE_CHECKING:
    import torch


Bytes1D = np.ndarray[tuple[int], np.dtype[np.uint8]]

# A cache line, as torch's own allocator gives.
ALIGNMENT = 64
# What is nested deeper is pickled. The decoder calls itself for each level of a peer's tree: the
# bound keeps it far below Python's limit of 1,000 calls.
MAX_DEPTH = 64
MAX_DIMENSIONS = 64

# Longer ones are payload: they need no copy into the message's head.
INLINE_BYTES = 1024
# A peer's bytes become an array of such a dtype only. Not of objects (O), which are pointers, and
# none with fields (V), whose names `dtype.str` does not say: these are pickled.
ARRAY_DTYPE = re.compile(
    r"[<>|=](?:[biufc][1-9]\d?|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)"
)
# C's long double has one size on x86 and arm64, and different bits.
LONG_DOUBLE_IS_X86 = np.finfo(np.longdouble).nmant == 63
# A list, for the names that a peer sends are looked up in torch itself.
TENSOR_DTYPES = frozenset(
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
_LENGTH = struct.Struct("<Q")


@dataclass(slots=True)
class Arena:
    """A batch is built in an arena: parts of it that lie there already are not copied.

    Attributes:
        memory: What tensors of the batch are views of; its base is no array.
        end: Bytes that were given out.
    """

    memory: Bytes1D
    end: int = 0

    def reserve(self, nbytes: int) -> int | None:
        """Returns the offset of `nbytes` free bytes, aligned; None: they do not fit."""
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        if offset + nbytes > self.memory.nbytes:
            return None
        self.end = offset + nbytes
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Returns where in the arena the bytes at `address` lie, if they can stay there."""
        offset = address - self.memory.ctypes.data
        # A view that begins in the middle of what was stacked is copied: the decoder takes aligned
        # offsets only.
        is_inside = offset >= 0 and offset + nbytes <= self.end
        return offset if is_inside and offset % ALIGNMENT == 0 else None


class Tag(IntEnum):
    """Names the kind of a node."""

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


class Encoder:
    """Describes values; copies nothing.

    Attributes:
        end: Bytes of the payload so far.
        leaves: Offset, bytes and copy function of each part of the payload that is to be copied.
        in_place: Bytes of the parts that lie in the arena.
    """

    def __init__(self, *, allow_pickle: bool, arena: Arena | None = None) -> None:
        self.allow_pickle = allow_pickle
        self.arena = arena
        self.has_pickle = False
        self.in_place = 0
        self.end = arena.end if arena else 0
        self.leaves: list[tuple[int, int, Callable[[Bytes1D], None]]] = []
        self._nodes: dict[int, tuple[object, list[object]]] = {}

    def node(self, value: object, path: str, depth: int) -> object:
        """Returns the node of `value`, which is the part `path` of the batch.

        Raises:
            ShippingError: If it cannot travel.
        """
        # By its very type: an IntEnum or a numpy.float64 would come back as int or float.
        # isinstance() next to it is for the type checker.
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if isinstance(value, int) and kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            return [
                Tag.INTEGER,
                value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
            ]
        if isinstance(value, str) and kind is str:
            # A lone surrogate is a legal str, but no legal UTF-8.
            return value if value.isascii() else [Tag.TEXT, value.encode("utf-8", "surrogatepass")]
        if isinstance(value, bytes) and kind is bytes:
            return value if len(value) <= INLINE_BYTES else self._bytes(value)
        if isinstance(value, complex) and kind is complex:
            return [Tag.COMPLEX, value.real, value.imag]
        if depth < MAX_DEPTH:
            if isinstance(value, list | tuple) and kind in (list, tuple):
                tag = Tag.LIST if kind is list else Tag.TUPLE
                return [
                    tag,
                    *(self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)),
                ]
            if isinstance(value, dict) and kind is dict:
                items: list[object] = [Tag.DICT]
                for key, item in value.items():
                    items.append(self.node(key, f"key {key!r} of {path}", depth + 1))
                    items.append(self.node(item, f"{path}[{key!r}]", depth + 1))
                return items
        leaf = self.leaf(value)
        return self._pickled(value, path) if leaf is None else leaf

    def leaf(self, value: object) -> list[object] | None:
        """Returns the node of a tensor, array or NumPy scalar; None if it does not travel raw."""
        # A tensor that the batch holds twice is sent once, and both places share its memory again.
        known = self._nodes.get(id(value))
        if known is not None:
            return known[1]
        node = (
            self._array(value)
            if isinstance(value, np.ndarray | np.generic)
            else _tensor(self, value)
        )
        if node is not None:
            # With the value: while it is held, no other object gets its id.
            self._nodes[id(value)] = (value, node)
        return node

    def reserve(self, nbytes: int, copy: Callable[[Bytes1D], None]) -> int:
        """Returns a place in the payload for `nbytes` bytes that `copy` writes."""
        if not nbytes:
            return 0
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.leaves.append((offset, nbytes, copy))
        self.end = offset + nbytes
        return offset

    def _array(self, value: object) -> list[object] | None:
        if isinstance(value, np.generic):
            array, tag = np.asarray(value), Tag.SCALAR
        elif isinstance(value, np.ndarray) and type(value) is np.ndarray:
            array, tag = value, Tag.ARRAY
        else:
            return None
        # `dtype.str` says nothing of metadata: it would be lost.
        if not ARRAY_DTYPE.fullmatch(array.dtype.str) or array.dtype.metadata:
            return None
        if _is_other_long_double(array.dtype.str):
            raise ShippingError(
                f"the batch holds numpy's {array.dtype}, which has other bits on x86 than here",
                fix="use float64 or complex128",
            )
        axes = [] if array.flags.c_contiguous else _order(array.strides)
        laid = array.transpose(axes) if axes else array
        if not laid.flags.c_contiguous:
            axes, laid = [], array
        offset = self.reserve(laid.nbytes, lambda target: _copy_array(laid, target))
        return [tag, array.dtype.str, list(laid.shape), offset, *_back(axes)]

    def _bytes(self, value: bytes | memoryview) -> list[object]:
        source: Bytes1D = np.frombuffer(value, dtype=np.uint8)
        offset = self.reserve(len(value), lambda target: np.copyto(target, source))
        return [Tag.BYTES, offset, len(value)]

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
        return [Tag.PICKLE, self._bytes(buffer.getbuffer()), leaves]


def _tensor(encoder: Encoder, value: object) -> list[object] | None:
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested:
        return None
    name = str(value.dtype).removeprefix("torch.")
    if name not in TENSOR_DTYPES:
        return None
    if value.device.type == "meta":
        # It has no bytes.
        return None
    if value.device.type != "cpu":
        raise ShippingError(
            f"the batch holds a tensor on {value.device}",
            fix="make batches on the CPU and move them in the training loop",
        )
    # Conjugate and negative views are marks on the tensor: its raw bytes are other values.
    tensor = value.detach().resolve_conj().resolve_neg()
    axes = [] if tensor.is_contiguous() else _order(tensor.stride())
    if axes and tensor.permute(axes).is_contiguous():
        # Channels last, or another order of dense memory: it comes back so.
        tensor = tensor.permute(axes)
    else:
        axes = []
    end: list[object] = [*_back(axes)]
    if value.requires_grad:
        # With an empty order of axes before it: the decoder knows the mark by its place.
        end = [*(end or [[]]), True]
    nbytes = tensor.numel() * tensor.element_size()
    if encoder.arena is not None and nbytes and tensor.is_contiguous():
        place = encoder.arena.offset_of(tensor.data_ptr(), nbytes)
        if place is not None:
            encoder.in_place += nbytes
            return [Tag.TENSOR, name, list(tensor.shape), place, *end]
    offset = encoder.reserve(nbytes, lambda target: _copy_tensor(tensor, target))
    return [Tag.TENSOR, name, list(tensor.shape), offset, *end]


def _order(strides: Sequence[int]) -> list[int]:
    """Returns the axes, from the longest steps in memory to the shortest."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _back(axes: list[int]) -> list[list[int]]:
    """Returns the permutation that undoes `axes`, as a node's last part; none for none."""
    return [sorted(range(len(axes)), key=axes.__getitem__)] if axes else []


def _copy_tensor(tensor: "torch.Tensor", target: Bytes1D) -> None:
    import torch

    torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _copy_array(
    array: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]", target: Bytes1D
) -> None:
    np.copyto(target.view(array.dtype).reshape(array.shape), array)


class _LeafPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves tensors and arrays out of the pickle."""

    def __init__(self, file: io.BytesIO, encoder: Encoder, leaves: list[object]) -> None:
        super().__init__(file, protocol=5)
        self._encoder = encoder
        self._leaves = leaves

    def persistent_id(self, obj: object) -> int | None:
        """Returns the number of the leaf; None: pickle it as usual."""
        if not isinstance(obj, np.ndarray) and not type(obj).__module__.startswith("torch"):
            return None
        node = self._encoder.leaf(obj)
        if node is None:
            return None
        self._leaves.append(node)
        return len(self._leaves) - 1

    def reducer_override(self, obj: object) -> object:
        """Reduces as cloudpickle does; the state of an object with slots is one of slots."""
        known = reduced_anew(obj)
        if known is not None:
            return known
        place = place_of(obj) if isinstance(obj, type) else None
        if place is not None:
            return (class_at, place)
        reduced: object = super().reducer_override(obj)
        if reduced is not NotImplemented or not _has_lost_slots(obj):
            return reduced
        plain = obj.__reduce_ex__(5)
        if isinstance(plain, tuple) and len(plain) > 2 and plain[2] is not None:
            # The class came here by value, and cloudpickle lost its `__slots__` on the way: here
            # its objects have a `__dict__`, in the trainer they have none. A pair as state is (for
            # `__dict__`, for slots): pickle sets the latter with setattr.
            return (*plain[:2], (None, vars(obj)), *plain[3:])
        return reduced


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
    """Returns whether a dtype's bits are not those of x86, or not all hosts have it."""
    return not LONG_DOUBLE_IS_X86 and name[1:] in ("f16", "c32")


def _dtype(name: str) -> "np.dtype[np.generic[object]]":
    if not ARRAY_DTYPE.fullmatch(name):
        raise ProtocolError("an array of an unknown dtype")
    if _is_other_long_double(name):
        raise ProtocolError(
            "the batch holds numpy's long double, which has other bits where it was made",
            fix="use float64 or complex128",
        )
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        raise ProtocolError("an array of an unknown dtype") from None


def _order_of_node(axes: list[object], ndim: int) -> list[int]:
    """Returns the axes, if they are the `ndim` axes in some order."""
    order = [axis for axis in axes if type(axis) is int]
    if len(order) != len(axes) or sorted(order) != list(range(ndim)):
        raise ProtocolError(f"axes that are no order of {ndim}")
    return order


def _arranged(tensor: "torch.Tensor", end: list[object]) -> "torch.Tensor":
    """Returns the tensor with the axes' order and the gradient that the node's end names."""
    match end:
        case []:
            return tensor
        case [list(axes)]:
            return tensor.permute(_order_of_node(axes, tensor.ndim))
        case [list(axes), True]:
            permuted = tensor.permute(_order_of_node(axes, tensor.ndim)) if axes else tensor
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                return permuted.requires_grad_()
    raise ProtocolError("a tensor with parts that do not fit it")


class _LeafUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, leaves: Sequence[object]) -> None:
        super().__init__(io.BytesIO(data))
        self._leaves = leaves

    def persistent_load(self, pid: object) -> object:
        """Returns the leaf of that number."""
        if not isinstance(pid, int) or not 0 <= pid < len(self._leaves):
            raise ProtocolError(f"a pickle names leaf {pid!r} of {len(self._leaves)}")
        return self._leaves[pid]


def _type_in(data: bytes) -> str:
    """Returns the first class that a pickle names, by its opcodes: nothing of it is run."""
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
        """Returns the value of a node that lies `depth` nodes deep.

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
                return self._array(dtype, shape, offset).transpose(_order_of_node(axes, len(shape)))
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
        # A size of 0 must not hide the others: torch multiplies these to strides all the same.
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
        # Not of any node: a pickle within a pickle would get around the bound on depth.
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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()
_LIST = int(Tag.LIST)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded value is ready to travel: it is described, and its payload can be copied out.

    Attributes:
        tree: The description, for `decode`.
        nbytes: Bytes of the payload.
        has_pickle: Whether the receiver must allow pickles.
        in_place: Bytes of the payload that lie in the arena already.
    """

    tree: bytes
    nbytes: int
    has_pickle: bool
    in_place: int
    _leaves: Sequence[tuple[int, int, Callable[[Bytes1D], None]]]

    def write_into(self, target: memoryview) -> None:
        """Copies the payload into `target`, which has at least `nbytes` writable bytes.

        Of a value in an arena, what does not lie there yet; `target` is the arena's memory.
        """
        flat: Bytes1D = np.frombuffer(target, dtype=np.uint8)
        for offset, nbytes, copy in self._leaves:
            copy(flat[offset : offset + nbytes])

    def checksum(self, target: memoryview, start: int) -> int:
        """Returns CRC-32 over tree and payload, going on from `start`; 0.2 s/GB.

        Args:
            target: Where `write_into` wrote it; the gaps between its parts do not count.
        """
        digest = zlib.crc32(self.tree, start)
        # Not over the gaps between them: a slot is used again, and holds bytes of older batches
        # there.
        for offset, nbytes, _ in self._leaves:
            digest = zlib.crc32(target[offset : offset + nbytes], digest)
        return digest


def encode(value: object, *, allow_pickle: bool, arena: Arena | None = None) -> Encoded:
    """Describes `value`; its tensors and arrays are copied by `Encoded.write_into` only.

    Args:
        value: A batch, or an index.
        allow_pickle: Whether parts may travel pickled.
        arena: Memory that the payload is to be in; the rest is placed after what it holds.

    Raises:
        ShippingError: If a part of it would have to be pickled and must not, or cannot be, naming
            the part.
    """
    encoder = Encoder(allow_pickle=allow_pickle, arena=arena)
    tree = _encoder.encode(encoder.node(value, "batch", 0))
    return Encoded(tree, encoder.end, encoder.has_pickle, encoder.in_place, encoder.leaves)


def decode(tree: bytes | memoryview, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
    """Returns the value again: its tensors and arrays are writable views of `payload`.

    Args:
        payload: 1-D uint8 array that owns the memory (its base is no array); None: no bytes.

    Raises:
        ProtocolError: If the description does not fit the payload, or is none.
        ShippingError: If a pickled part cannot be rebuilt here.
    """
    flat: Bytes1D = np.empty(0, dtype=np.uint8) if payload is None else payload
    try:
        node: object = _decoder.decode(tree)
        return Decoder(flat, allow_pickle=allow_pickle).value(node, 0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"not a description of a batch: {err}") from None


def pack_value(value: object, *, allow_pickle: bool) -> bytes:
    """Returns `value` as one frame: the length of its tree, the tree, the payload.

    Raises:
        ShippingError: As `encode`.
    """
    flat = _flat(value)
    if flat is not None:
        return flat
    encoded = encode(value, allow_pickle=allow_pickle)
    # Written to memory of its own: after the tree it would not be aligned, as torch needs it.
    payload: Bytes1D = np.zeros(encoded.nbytes, dtype=np.uint8)
    if encoded.nbytes:
        encoded.write_into(payload.data)
    return b"".join((_LENGTH.pack(len(encoded.tree)), encoded.tree, payload.data))


def _flat(value: object) -> bytes | None:
    """Returns the frame of a list of integers, as indices mostly are: 40 times faster for 128."""
    if type(value) is not list or set(map(type, value)) != {int}:
        return None
    try:
        tree = _encoder.encode([_LIST, *value])
    # An integer of more than 64 bits: the usual way sends its digits.
    except OverflowError:
        return None
    return _LENGTH.pack(len(tree)) + tree


def unpack_value(data: bytes | memoryview, *, allow_pickle: bool) -> object:
    """Returns the value in a frame of `pack_value`.

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
    # Copied: the frame can only be read, while tensors of an index may be written to; and behind
    # the tree it is not aligned.
    payload: Bytes1D = np.array(np.frombuffer(view[start:], dtype=np.uint8))
    return decode(view[_LENGTH.size : start], payload, allow_pickle=allow_pickle)
