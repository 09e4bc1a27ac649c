"""The cost of loading a sample is split: getitem and collate, each transform, each function.

A Compose is anything with a list `transforms` of callables (torchvision's, albumentations', one's
own), on the dataset or on what it wraps. The list is changed, so only a worker's copy of the
dataset may be timed.
"""

import functools
import inspect
import random
import signal
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Literal, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from stoker.feed.wire.sizes import num_bytes
from stoker.profile import batches
from stoker.profile.loader_phases import TaskSource, run_in_workers
from stoker.profile.raw import Cost

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
    """Returns the bytes of tensors, arrays, pictures, texts and containers; None: not known."""
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
    """Returns where transforms may be: attributes named so, and datasets that this one wraps."""
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
    """Times the calls of an object in place: isinstance still holds; wraps a function."""
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


# The kernel's clock ticks every 1 to 10 ms. Looks at equal distances would fall on the same place
# of each sample where one takes a multiple of it.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.001, 0.008
_MAX_DEPTH = 200


# Names of frames that only pass an item on.
_PASSING = frozenset(
    {"__getitem__", "__getitems__", "__iter__", "__next__", "<listcomp>", "<genexpr>", "<lambda>"}
)
# A function with more than this of a row's time is taken apart further.
_DOMINATES = 0.7

Path = tuple[str, ...]


class StackSampler:
    """Adds up CPU-seconds by place while it is entered; in the main thread only.

    A look comes when the CPU clock has moved on, and counts for what it moved since the look
    before: a long call into C, in which none can come, is charged to who called it.

    Args:
        marks: Name of a row for the code of the frame that the row is below.
        skipped: Code of frames below which nothing is counted: it is, elsewhere.

    Attributes:
        seconds: CPU-seconds by row and path: functions from the outermost on, of a library's only
            the one that the user's called.
        looks: Looks, by the same.
    """

    def __init__(
        self, marks: dict[CodeType, str], *, skipped: frozenset[CodeType] = frozenset()
    ) -> None:
        self.seconds: dict[tuple[str, Path], float] = {}
        self.looks: Counter[tuple[str, Path]] = Counter()
        self._marks = marks
        self._skipped = skipped
        self._before = 0.0
        # Not the script's: what it draws stays as it is.
        self._random = random.Random(0)
        self._libraries = _library_folders()

    def __enter__(self) -> "StackSampler":
        signal.signal(signal.SIGPROF, self._look)
        self._before = time.process_time()
        self._wind()
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        # One that is still on its way must not end the process.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def clear(self) -> None:
        """Forgets what was seen."""
        self.seconds.clear()
        self.looks.clear()
        self._before = time.process_time()

    def _look(self, number: int, frame: FrameType | None) -> None:
        now = time.process_time()
        passed, self._before = now - self._before, now
        found = self._place(frame)
        if found is not None:
            self.seconds[found] = self.seconds.get(found, 0.0) + passed
            self.looks[found] += 1
        self._wind()

    def _wind(self) -> None:
        pause = self._random.uniform(_SHORTEST_SECONDS, _LONGEST_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, pause)

    def _place(self, frame: FrameType | None) -> tuple[str, Path] | None:
        below: list[FrameType] = []
        for _ in range(_MAX_DEPTH):
            if frame is None or frame.f_code in self._skipped:
                return None
            row = self._marks.get(frame.f_code)
            if row is not None:
                return (row, self._path(below[::-1])) if below else None
            below.append(frame)
            frame = frame.f_back
        return None

    def _path(self, frames: "list[FrameType]") -> Path:
        path: list[str] = []
        is_users = False
        for frame in frames:
            is_library = frame.f_code.co_filename.startswith(self._libraries)
            path.append(_name_of_code(frame))
            if is_library and is_users:
                break
            is_users = is_users or not is_library
        kept = [name for name in path if name.rpartition(".")[2] not in _PASSING]
        return tuple(kept or path[-1:])


def functions_of(seconds: Mapping[Path, float]) -> dict[str, list[Path]]:
    """Groups the paths by the function that tells most.

    That is the outermost one, or, where that holds nearly all, it with those that it calls:
    `outer > inner`.
    """
    return _expanded(seconds, depth=0)


def _expanded(seconds: Mapping[Path, float], *, depth: int) -> dict[str, list[Path]]:
    whole = sum(seconds.values())
    groups: dict[str, dict[Path, float]] = {}
    for path, spent in seconds.items():
        name = path[min(depth, len(path) - 1)]
        groups.setdefault(name, {})[path] = spent
    found: dict[str, list[Path]] = {}
    for name, paths in groups.items():
        is_all = sum(paths.values()) > _DOMINATES * whole
        if is_all and any(len(path) > depth + 1 for path in paths):
            parts = _expanded(paths, depth=depth + 1)
            inner = {
                part if part == name else f"{name} > {part}": own for part, own in parts.items()
            }
        else:
            inner = {name: list(paths)}
        for each, own in inner.items():
            found.setdefault(each, []).extend(own)
    return found


def _name_of_code(frame: FrameType) -> str:
    code = frame.f_code
    module = str(frame.f_globals.get("__name__", ""))
    name = code.co_qualname.replace(".<locals>", "")
    return name if module in ("", "__main__", "__mp_main__") else f"{module}.{name}"


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths
    }
    return (*sorted(found), "<frozen")


_MAX_BATCHES = 64
# Functions with less than this share of loading are not worth a row.
_MIN_SHARE = 0.02
_MAX_FUNCTIONS = 8
# As long as a name in a record may be.
_MAX_NAME = 200


class CostTask:
    """The task of a worker: fetches and collates, with every transform timed and the stack seen."""

    def __call__(self, source: TaskSource, *, until: float) -> tuple[Cost, ...]:
        """Returns the rows; none where the dataset gave less than two batches."""
        composed = time_transforms(source.dataset)
        sampler = StackSampler(
            {
                TaskSource.samples.__code__: "getitem",
                TaskSource.get.__code__: "getitem",
                _collate.__code__: "collate",
            },
            skipped=frozenset({Timed.call.__code__}),
        )
        getitem, collate, samples = 0.0, 0.0, 0
        item_bytes: int | None = 0
        bytes_out: list[int] = []
        num_batches = 0
        # The first batch imports, opens and fills caches: it is made and not counted.
        is_first = True
        with sampler:
            while time.monotonic() < until or num_batches < 1:
                is_over = True
                fetching = source.samples()
                while True:
                    begun = time.process_time()
                    items = _fetch(fetching)
                    fetched = time.process_time()
                    if items is None:
                        break
                    is_over = False
                    count = len(items[0]) if source.is_batched else batches.num_samples(items[0])
                    batch = _collate(source.collate, items[0])
                    done = time.process_time()
                    size = size_of(items[0])
                    del items
                    if is_first:
                        is_first = False
                        composed.clear()
                        sampler.clear()
                        continue
                    getitem += fetched - begun
                    collate += done - fetched
                    samples += count
                    item_bytes = None if item_bytes is None or size is None else item_bytes + size
                    num_batches += 1
                    bytes_out.append(num_bytes(batch))
                    if time.monotonic() >= until:
                        break
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
                samples=num_batches,
            ),
        ]
        rows += [_row_of(each, samples=samples) for each in composed.timed if each.calls]
        rest = max(0.0, getitem - sum(each.cpu_seconds for each in composed.timed))
        least = _MIN_SHARE * (getitem + collate) / samples
        rows += _functions(sampler, row="getitem", seconds_a_sample=rest / samples, least=least)
        rows += _functions(sampler, row="collate", seconds_a_sample=collate / samples, least=least)
        return tuple(rows)


def measure_costs(
    loader: "DataLoader[object]",
    *,
    seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> tuple[tuple[Cost, ...], list[str]]:
    """Loads in one worker alone for about `seconds`, and says where its CPU-seconds went.

    Raises:
        Exception: What the dataset raises.
    """
    reports = run_in_workers(
        loader, CostTask(), workers=1, num_batches=_MAX_BATCHES, seconds=seconds, iterate=iterate
    )
    costs = cast("tuple[Cost, ...]", reports[0]) if reports else ()
    return costs, [] if costs else ["what loading is made of is not known: too few batches"]


def name_of(text: str) -> str:
    """Shortens `text` to the length of a row's name: its beginning and its end tell most."""
    if len(text) <= _MAX_NAME:
        return text
    rest = _MAX_NAME - 1
    return f"{text[: rest // 2]}\u2026{text[-(rest - rest // 2) :]}"


def _fetch(fetching: Iterator[object]) -> "tuple[Sequence[object]] | None":
    """Returns the items of the next batch, in a tuple; None at the end."""
    for items in fetching:
        return (cast("Sequence[object]", items),)
    return None


def _collate(collate: Callable[[object], object], items: object) -> object:
    return collate(items)


def _row_of(timed: Timed, *, samples: int) -> Cost:
    has_bytes = timed.has_bytes and timed.calls > 0
    return Cost(
        name=name_of(timed.name),
        within="getitem",
        cpu_seconds=timed.cpu_seconds / samples,
        bytes_in=timed.bytes_in / timed.calls if has_bytes else None,
        bytes_out=timed.bytes_out / timed.calls if has_bytes else None,
        samples=timed.calls,
    )


def _functions(
    sampler: StackSampler,
    *,
    row: Literal["getitem", "collate"],
    seconds_a_sample: float,
    least: float,
) -> list[Cost]:
    """Returns the functions that `seconds_a_sample` were seen in, by their shares of the looks."""
    seconds = {path: spent for (name, path), spent in sampler.seconds.items() if name == row}
    whole = sum(seconds.values())
    rows = []
    for name, paths in functions_of(seconds).items():
        spent = seconds_a_sample * sum(seconds[path] for path in paths) / whole
        if spent >= least:
            looks = sum(sampler.looks[row, path] for path in paths)
            rows.append(Cost(name=name_of(name), within=row, cpu_seconds=spent, samples=looks))
    rows.sort(key=lambda cost: -cost.cpu_seconds)
    return rows[:_MAX_FUNCTIONS]
