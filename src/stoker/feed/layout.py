"""The parts of a batch on its way: tags of the tree's nodes, and what may be in the payload.

A node of the tree is a scalar of msgpack, or a list that begins with a tag.
"""

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

Bytes1D = np.ndarray[tuple[int], np.dtype[np.uint8]]

ALIGNMENT = 64
MAX_DEPTH = 64
MAX_DIMENSIONS = 64

# Longer ones are payload: they need no copy into the message's head.
INLINE_BYTES = 1024
ARRAY_DTYPE = re.compile(
    r"[<>|=](?:[biufc][1-9]\d?|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)"
)
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


@dataclass(slots=True)
class Arena:
    """Memory in which a batch is built: parts of it that lie there already are not copied.

    Attributes:
        memory: What tensors of the batch are views of; its base is no array.
        end: Bytes that were given out.
    """

    memory: Bytes1D
    end: int = 0

    def reserve(self, nbytes: int) -> int | None:
        """Offset of `nbytes` free bytes, aligned; None: they do not fit."""
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        if offset + nbytes > self.memory.nbytes:
            return None
        self.end = offset + nbytes
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where in the arena the bytes at `address` lie, if they can stay there."""
        offset = address - self.memory.ctypes.data
        is_inside = offset >= 0 and offset + nbytes <= self.end
        return offset if is_inside and offset % ALIGNMENT == 0 else None


class Tag(IntEnum):
    """What a node is."""

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
