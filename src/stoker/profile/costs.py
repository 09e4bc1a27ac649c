"""The cost of loading a sample, in parts: getitem with each transform of a Compose, and collate.

A Compose is any object with a list `transforms` of callables, on the dataset or on one that it
wraps. The list is changed: only a worker's copy of the dataset may be timed.
"""

import functools
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from stoker.feed.memory import num_bytes
from stoker.profile import batches
from stoker.profile.loader_phases import Iterate, Loader, TaskSource, run_in_workers
from stoker.profile.rank_results import Cost

_DEPTH = 4
_MAX_CHILDREN = 64
_MAX_BATCHES = 64
# As long as a name in a record may be.
_MAX_NAME = 200


class _Call(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> object: ...


@dataclass(slots=True, kw_only=True)
class Timed:
    """Cost of one transform so far; bytes of all calls, where they are known for each."""

    name: str
    calls: int = 0
    cpu_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    has_bytes: bool = True

    def clear(self) -> None:
        self.calls, self.cpu_seconds, self.bytes_in, self.bytes_out = 0, 0.0, 0, 0
        self.has_bytes = True

    def call(self, transform: _Call, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        before = time.process_time()
        result = transform(*args, **kwargs)
        # CPU of the process, not of this thread: a transform may compute with several.
        self.cpu_seconds += time.process_time() - before
        self.calls += 1
        sizes = size_of([*args, *kwargs.values()]), size_of(result)
        if self.has_bytes and sizes[0] is not None and sizes[1] is not None:
            self.bytes_in += sizes[0]
            self.bytes_out += sizes[1]
        else:
            self.has_bytes = False
        return result


def time_transforms(dataset: object) -> list[Timed]:
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
    return list(used.values())


def size_of(value: object) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes | bytearray | memoryview | str):
        return len(value)
    # About what a number takes in a batch; its Python object is larger.
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
    """Yields owners of a list of transforms, each once, the outermost of nested ones only."""
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(dataset, 0)]
    while waiting:
        value, depth = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        transforms = _list_of(value)
        if transforms is not None:
            yield value, transforms
            # What is nested in them is part of them.
            seen.update(map(id, transforms))
        # Below an owner, too: a dataset with a list may wrap one that has another.
        if depth < _DEPTH:
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
    kept = owner if isinstance(owner, torch.nn.Sequential) else getattr(owner, "transforms", None)
    if isinstance(kept, torch.nn.Sequential | torch.nn.ModuleList):
        for number, transform in enumerate(transforms):
            kept[number] = transform  # type: ignore[assignment]
    elif isinstance(kept, list):
        kept[:] = transforms
    else:
        owner.transforms = tuple(transforms)  # type: ignore[attr-defined]


def _children(value: object) -> list[object]:
    """Returns where transforms may be: attributes with such names, and wrapped datasets."""
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
    """Times the calls of an object, which stays itself (isinstance holds); wraps a function."""
    kind = type(transform)
    # Python looks up `__call__` on the class: so the object gets a separate subclass.
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


def load_in_parts(source: TaskSource, until: float) -> tuple[Cost, ...]:
    """Fetches and collates in a worker, each transform timed; no costs of less than two batches."""
    composed = time_transforms(source.dataset)
    getitem, collate, samples = 0.0, 0.0, 0
    item_bytes: int | None = 0
    bytes_out: list[int] = []
    # The first batch imports, opens and fills caches: it is made and not counted.
    is_first = True
    # One batch at least counts, however long it takes.
    while time.monotonic() < until or not bytes_out:
        is_over = True
        begun = time.process_time()
        for items in source.samples():
            fetched = time.process_time()
            is_over = False
            if source.is_batched:
                count = len(cast("Sequence[object]", items))
            else:
                count = batches.num_samples(items)
            batch = source.collate(items)
            done = time.process_time()
            size = size_of(items)
            del items
            if is_first:
                is_first = False
                for each in composed:
                    each.clear()
            else:
                getitem += fetched - begun
                collate += done - fetched
                samples += count
                item_bytes = None if item_bytes is None or size is None else item_bytes + size
                bytes_out.append(num_bytes(batch))
                if time.monotonic() >= until:
                    break
            begun = time.process_time()
        if is_over:
            break
    if not samples:
        return ()
    rows = [
        Cost(
            name="getitem",
            cpu_seconds=getitem / samples,
            bytes_out=None if item_bytes is None else item_bytes / samples,
            samples=samples,
        ),
        Cost(
            name="collate",
            cpu_seconds=collate / samples,
            bytes_out=sum(bytes_out) / samples,
            samples=len(bytes_out),
        ),
    ]
    rows += [
        Cost(
            name=name_of(each.name),
            within="getitem",
            cpu_seconds=each.cpu_seconds / samples,
            bytes_in=each.bytes_in / each.calls if each.has_bytes else None,
            bytes_out=each.bytes_out / each.calls if each.has_bytes else None,
            samples=each.calls,
        )
        for each in composed
        if each.calls
    ]
    return tuple(rows)


def measure_costs(
    loader: Loader, *, seconds: float, iterate: Iterate
) -> tuple[tuple[Cost, ...], list[str]]:
    reports = run_in_workers(
        loader, load_in_parts, workers=1, num_batches=_MAX_BATCHES, seconds=seconds, iterate=iterate
    )
    costs = cast("tuple[Cost, ...]", reports[0]) if reports else ()
    return costs, [] if costs else ["the parts of loading are not known: too few batches"]


def name_of(text: str) -> str:
    if len(text) <= _MAX_NAME:
        return text
    rest = _MAX_NAME - 1
    return f"{text[: rest // 2]}\u2026{text[-(rest - rest // 2) :]}"
