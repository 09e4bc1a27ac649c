"""A batch as bytes: its pickle, and the memory of its tensors and arrays.

`encode` pickles by protocol 5 and takes the memory of dense CPU tensors and of NumPy arrays out of
the pickle as *leaves*. They follow as the payload, each at a multiple of 64 bytes. `decode` makes
tensors and arrays that are views of one block. Strides of dense tensors stay (channels last);
others become contiguous. An object that occurs twice is one object again; two views of a tensor
arrive apart. Whatever else a batch has (sparse tensors, objects of the script) is pickled as usual.
"""

import io
import pickle
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from stoker.errors import ProtocolError
from stoker.feed.engine.raised import SCRIPT_NAMES, NamingPickler

Bytes = npt.NDArray[np.uint8]


def encode(batch: object) -> tuple[bytes, list[memoryview]]:
    """Returns a batch's pickle, and the memory of its leaves, which is read when it is sent.

    Raises:
        Exception: What pickling the batch raises.
    """
    leaves: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> None:
        leaves.append(buffer.raw())

    file = io.BytesIO()
    BatchPickler(file, protocol=5, buffer_callback=take).dump(batch)
    return file.getvalue(), leaves


class BatchPickler(NamingPickler):
    """Pickler of batches."""

    # typeshed's type of it has Any.
    def reducer_override(self, value: object) -> object:  # type: ignore[override]
        if type(value) is torch.Tensor:
            if _is_plain(value):
                return _reduced(value)
        elif type(value).__module__ in SCRIPT_NAMES and "__slots__" in vars(type(value)):
            return _slotted(value)
        return super().reducer_override(value)


def _reduced(tensor: torch.Tensor) -> tuple[object, ...]:
    dense = tensor if _is_dense(tensor) else tensor.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))
    memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
    return (tensor_of, (memory, dense.dtype, tuple(dense.shape), dense.stride()))


def _slotted(value: object) -> object:
    """Returns the reduction of an object of a class of the script with slots.

    The class that cloudpickle makes again keeps the slots' values in attributes, too.
    """
    reduction = value.__reduce_ex__(5)
    is_usual = not hasattr(type(value), "__setstate__")
    if not is_usual or not isinstance(reduction, tuple) or not isinstance(reduction[2], tuple):
        return NotImplemented
    attributes, slots = reduction[2]
    others = {name: value for name, value in (attributes or {}).items() if name not in slots}
    return (*reduction[:2], (others or None, slots))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        # A subclass that lost its class, or attributes that a script has set.
        and not tensor.__dict__
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill their memory, each once, in some order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class TensorMemory(np.ndarray):  # type: ignore[explicit-any]
    """The bytes of a leaf in memory that torch allocated.

    A tensor that is made of it shares the allocation, so that torch knows of copies from pinned
    memory that are under way.

    Attributes:
        tensor: The same bytes.
    """

    tensor: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorMemory":
        memory = tensor.numpy().view(cls)
        memory.tensor = tensor
        return memory


def parts_of(block: Bytes, offsets: Sequence[int], sizes: Sequence[int]) -> list[Bytes]:
    """Returns the leaves of a payload."""
    places = [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]
    if isinstance(block, TensorMemory):
        return [TensorMemory.of(block.tensor[place]) for place in places]
    return [block[place] for place in places]


def tensor_of(
    memory: Bytes, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Returns a tensor that is a view of `memory`; pickles name this function."""
    if isinstance(memory, TensorMemory):
        flat = memory.tensor.view(dtype)
    elif len(memory):
        flat = torch.frombuffer(memory, dtype=dtype)
    else:
        # torch.frombuffer refuses no bytes.
        flat = torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, strides)


def decode(pickled: bytes, leaves: Sequence[Bytes], *, accept_pickles: bool = True) -> object:
    """Returns the batch.

    Args:
        pickled: As `encode` made it.
        leaves: Writable memory of each leaf.
        accept_pickles: False: only tensors, arrays and plain containers are accepted.

    Raises:
        ProtocolError: It holds something else, and `accept_pickles` is False.
    """
    if accept_pickles:
        return pickle.loads(pickled, buffers=leaves)
    return _PlainUnpickler(io.BytesIO(pickled), buffers=leaves).load()


_ALLOWED: dict[str, set[str]] = {
    __name__: {"tensor_of"},
    "builtins": {"set", "frozenset", "complex", "bytearray", "slice", "range"},
    "collections": {"OrderedDict", "deque", "defaultdict"},
    "torch": {"Size"},
    "numpy": {"dtype", "ndarray"},
}
# Of NumPy, whatever its version calls the module.
_OF_NUMPY = {"_frombuffer", "_reconstruct", "scalar"}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_numpys = module.split(".")[0] == "numpy" and name in _OF_NUMPY
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_numpys or is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ProtocolError(
            f"a batch holds {module}.{name}, and feed.accept_pickles is false",
            fix="have collate_fn return tensors, arrays and plain containers; or accept pickles",
        )
