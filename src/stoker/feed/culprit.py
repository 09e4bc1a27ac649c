"""Which part of a whole keeps it from travelling: it cannot be pickled, or is too large."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from types import FunctionType

import cloudpickle

from stoker.feed.spec_pickle import SpecPickler, is_proxy


def culprit(parts: Mapping[str, object]) -> str:
    """The part that cannot be pickled, as `dataset.lock (_thread.lock)`.

    Args:
        parts: By name; the first one that cannot is looked into.
    """
    for name, part in parts.items():
        if part is None or _pickles(part):
            continue
        path, value = name, part
        for _ in range(8):
            inner = next(((n, v) for n, v in _attributes(value) if not _pickles(v)), None)
            if inner is None:
                break
            path, value = path + inner[0], inner[1]
        kind = type(value)
        return f"{path} ({kind.__module__}.{kind.__qualname__})"
    return "the dataset"


def largest(parts: Mapping[str, object]) -> str:
    """A clause that names the largest of the parts' attributes, and its size."""
    sizes = [
        (len(pickle_of(value) or b""), f"{name}{attribute}")
        for name, part in parts.items()
        for attribute, value in [("", part), *_attributes(part)]
        if attribute or not hasattr(part, "__dict__")
    ]
    size, name = max(sizes, default=(0, "dataset"))
    return f"its largest part is {name} with {size >> 20} MiB"


def pickle_of(value: object) -> bytes | None:
    """What cloudpickle makes of it; None if it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception:
        return None
    return data


def _pickles(value: object) -> bool:
    try:
        SpecPickler(io.BytesIO()).dump(value)
    except Exception:
        return False
    return True


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):
                # A cell may be empty yet.
                yield f" variable {name}", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f" global {name}", value.__globals__[name]
    elif not is_proxy(value):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            # Others travel by name.
            if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
                for name, item in vars(kind).items():
                    if isinstance(item, FunctionType) or not name.startswith("__"):
                        yield f".{name}", item
