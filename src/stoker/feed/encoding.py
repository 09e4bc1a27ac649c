"""From a batch to its tree and its payload."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np

from stoker.errors import ShippingError
from stoker.feed.layout import (
    ALIGNMENT,
    ARRAY_DTYPE,
    INLINE_BYTES,
    MAX_DEPTH,
    TENSOR_DTYPES,
    Arena,
    Bytes1D,
    Tag,
)
from stoker.feed.reductions import class_at, place_of
from stoker.feed.reductions import reduced as reduced_anew

if TYPE_CHECKING:
    import torch


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
        """The node of `value`, which is the part `path` of the batch.

        Raises:
            ShippingError: If it cannot travel.
        """
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
        """A place in the payload for `nbytes` bytes that `copy` writes."""
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
        if not ARRAY_DTYPE.fullmatch(array.dtype.str) or array.dtype.metadata:
            return None
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
    tensor = value.detach().resolve_conj().resolve_neg()
    axes = [] if tensor.is_contiguous() else _order(tensor.stride())
    if axes and tensor.permute(axes).is_contiguous():
        # Channels last, or another order of dense memory: it comes back so.
        tensor = tensor.permute(axes)
    else:
        axes = []
    end: list[object] = [*_back(axes)]
    if value.requires_grad:
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
    """The axes from the one with the longest steps in memory to the one with the shortest."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _back(axes: list[int]) -> list[list[int]]:
    """The permutation that undoes `axes`, as a node's last part; none for none."""
    return [sorted(range(len(axes)), key=axes.__getitem__)] if axes else []


def _copy_tensor(tensor: "torch.Tensor", target: Bytes1D) -> None:
    import torch

    torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _copy_array(
    array: "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]", target: Bytes1D
) -> None:
    np.copyto(target.view(array.dtype).reshape(array.shape), array)


class _LeafPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves tensors and arrays out of the pickle.

    A class with `__slots__` that came here by value has lost them on its way (cloudpickle), but has
    them in the trainer, whose objects then take no `__dict__`.
    """

    def __init__(self, file: io.BytesIO, encoder: Encoder, leaves: list[object]) -> None:
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

    def reducer_override(self, obj: object) -> object:
        """As cloudpickle's; the state of an object with slots is one of slots."""
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
