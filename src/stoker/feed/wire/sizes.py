"""Batches are as large as their tensors and arrays, of any library, say of themselves."""

from collections.abc import Mapping, Sequence

_MAX_DEPTH = 16


def num_bytes(batch: object, *, depth: int = 0) -> int:
    """Returns the bytes of its tensors and arrays; looks one level into other classes' objects.

    Args:
        batch: Any nesting of lists, tuples and dicts.
        depth: At which it stands in another one.
    """
    if hasattr(batch, "dtype"):
        return _own_bytes(batch)
    if depth >= _MAX_DEPTH:
        return 0
    if isinstance(batch, Mapping):
        return sum(num_bytes(item, depth=depth + 1) for item in batch.values())
    if isinstance(batch, Sequence):
        if isinstance(batch, str | bytes | bytearray):
            return 0
        return sum(num_bytes(item, depth=depth + 1) for item in batch)
    held = getattr(batch, "__dict__", None)
    if not isinstance(held, dict):
        return 0
    return sum(_own_bytes(value) for value in held.values() if hasattr(value, "dtype"))


def _own_bytes(array: object) -> int:
    try:
        size = getattr(array, "nbytes", 0)
        return size if isinstance(size, int) else 0
    except (RuntimeError, NotImplementedError):
        # A sparse tensor of torch has no size; its parts do.
        return _sparse_bytes(array)


def _sparse_bytes(tensor: object) -> int:
    try:
        parts = (tensor._indices(), tensor._values())  # type: ignore[attr-defined]
        return sum(int(part.nbytes) for part in parts)
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
