"""The transforms of a dataset, found by their shape, and timed in place.

A Compose is anything with a list `transforms` of callables (torchvision's, albumentations', one's
own), on the dataset or on what it wraps. Only for a worker's copy: the list is changed.
"""

import functools
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch

_DEPTH = 4
_MAX_CHILDREN = 64


class _Call(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> object: ...


@dataclass(slots=True, kw_only=True)
class Timed:
    """One transform so far; bytes are of all calls, where they can be told of each."""

    name: str
    calls: int = 0
    cpu_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    has_bytes: bool = True

    def clear(self) -> None:
        """Forgets all calls."""
        self.calls, self.cpu_seconds, self.bytes_in, self.bytes_out = 0, 0.0, 0, 0
        self.has_bytes = True

    def call(self, transform: _Call, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Calls the transform, and keeps what it cost."""
        before = time.process_time()
        result = transform(*args, **kwargs)
        self.cpu_seconds += time.process_time() - before
        self.calls += 1
        sizes = size_of([*args, *kwargs.values()]), size_of(result)
        if self.has_bytes and sizes[0] is not None and sizes[1] is not None:
            self.bytes_in += sizes[0]
            self.bytes_out += sizes[1]
        else:
            self.has_bytes = False
        return result


@dataclass(slots=True)
class Composed:
    """All transforms of a dataset."""

    timed: list[Timed] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets all calls."""
        for each in self.timed:
            each.clear()


def time_transforms(dataset: object) -> Composed:
    """Times every transform of each Compose below `dataset` from now on; finds none, perhaps."""
    known: dict[int, tuple[Timed, object]] = {}
    used: dict[int, Timed] = {}
    for owner, transforms in _composes(dataset):
        timed = []
        for transform in transforms:
            if id(transform) not in known:
                one = Timed(name=_name_of(transform))
                known[id(transform)] = one, _in_place(transform, one)
            timed.append(known[id(transform)])
        try:
            _set_list(owner, [each for _, each in timed])
        except (AttributeError, TypeError):
            continue
        used.update({id(one): one for one, _ in timed})
    return Composed(list(used.values()))


def size_of(value: object) -> int | None:
    """Bytes of tensors, arrays, pictures, texts, and of what holds them; None: cannot be told."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes | bytearray | memoryview | str):
        return len(value)
    if isinstance(value, bool | int | float | complex | np.generic) or value is None:
        return 8
    if isinstance(value, dict):
        return _sum(value.values())
    if isinstance(value, list | tuple):
        return _sum(value)
    size, bands = getattr(value, "size", None), getattr(value, "getbands", None)
    if isinstance(size, tuple) and callable(bands):
        # A picture of PIL: a byte a band and pixel, but for the two modes of four.
        each = 4 if getattr(value, "mode", "") in ("I", "F") else 1
        return int(size[0] * size[1] * len(bands()) * each)
    return None


def _sum(values: Iterable[object]) -> int | None:
    sizes = [size_of(value) for value in values]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _composes(dataset: object) -> Iterator[tuple[object, Sequence[object]]]:
    """Owners of a list of transforms, each once, the outermost of nested ones only."""
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(dataset, 0)]
    while waiting:
        value, depth = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        transforms = _list_of(value) if value is not dataset else None
        if transforms is not None:
            yield value, transforms
        elif depth < _DEPTH:
            waiting += [(child, depth + 1) for child in _children(value)]


def _list_of(value: object) -> Sequence[object] | None:
    found = getattr(value, "transforms", None)
    if found is None and isinstance(value, torch.nn.Sequential):
        found = list(value)
    if isinstance(found, list | tuple | torch.nn.ModuleList) and len(found):
        items = list(found)
        return items if all(callable(each) for each in items) else None
    return None


def _set_list(owner: object, transforms: list[object]) -> None:
    if isinstance(owner, torch.nn.Sequential):
        for number, transform in enumerate(transforms):
            owner[number] = transform  # type: ignore[assignment]
        return
    kept = getattr(owner, "transforms", None)
    if isinstance(kept, torch.nn.ModuleList):
        for number, transform in enumerate(transforms):
            kept[number] = transform  # type: ignore[assignment]
    elif isinstance(kept, list):
        kept[:] = transforms
    else:
        owner.transforms = tuple(transforms)  # type: ignore[attr-defined]


def _children(value: object) -> list[object]:
    """Where transforms may be: attributes named so, and the datasets that this one wraps."""
    try:
        named = vars(value)
    except TypeError:
        return []
    found: list[object] = []
    for name, child in list(named.items()):
        if "transform" in name or "aug" in name or "dataset" in name or "pipeline" in name:
            found += list(child)[:_MAX_CHILDREN] if isinstance(child, list | tuple) else [child]
    return found


def _name_of(transform: object) -> str:
    if inspect.isroutine(transform) or inspect.isclass(transform):
        return str(getattr(transform, "__qualname__", None) or transform)
    return type(transform).__qualname__


def _in_place(transform: object, timed: Timed) -> object:
    """The same object with a call that is timed, so that who looks at its class finds it; a
    function is wrapped.
    """
    kind = type(transform)
    call = getattr(kind, "__call__")  # noqa: B004, B009 - the class's own, unbound

    def timed_call(own: object, *args: object, **kwargs: object) -> object:
        return timed.call(functools.partial(call, own), args, kwargs)

    if not inspect.isroutine(transform) and not inspect.isclass(transform):
        try:
            transform.__class__ = type(
                kind.__name__,
                (kind,),
                {"__call__": timed_call, "__module__": kind.__module__, "__doc__": kind.__doc__},
            )
        except TypeError:
            pass
        else:
            return transform

    def timed_function(*args: object, **kwargs: object) -> object:
        return timed.call(cast("_Call", transform), args, kwargs)

    return timed_function
