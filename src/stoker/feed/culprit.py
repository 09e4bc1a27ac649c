"""Which part of a whole keeps it from travelling: it cannot be pickled, or is too large."""

from collections.abc import Iterator, Mapping, Sequence

import cloudpickle


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
    return pickle_of(value) is not None


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif callable(value) and getattr(value, "__closure__", None):
        names: Sequence[str] = value.__code__.co_freevars  # type: ignore[attr-defined]
        for name, cell in zip(names, value.__closure__, strict=False):  # type: ignore[attr-defined]
            yield f" variable {name}", cell.cell_contents
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
