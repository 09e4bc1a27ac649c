"""How the trainer grows from step to step, and what its loop keeps of each of them.

`losses.append(loss)` keeps a step's graph with all that it holds, and so do `total += loss`, and a
hidden state that is never detached. The process's memory tells that something is kept; the lengths
of all lists, sets, dicts and deques of Python, before and after some steps, tell what, and so do
graphs that reach back to earlier steps; and those that refer to it tell its name.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import queue
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from types import CellType, FrameType, FunctionType, ModuleType
from typing import NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
import torch

import stoker
from stoker.feed.reachable import cached_results, is_users_name, read_slot, slots_of
from stoker.host.memory_usage import asked_bytes, give_back_freed, written_bytes
from stoker.profile.loader_phases import attributes_of
from stoker.profile.memory.kept_graphs import GraphWatch, numbers_of
from stoker.profile.memory.python_objects import (
    has_length_in_bytes,
    kept_bytes,
    limit_among,
    num_bytes_of,
)
from stoker.profile.rank_results import LoopGrowth
from stoker.records import KeptObjects

_EVERY_SECONDS = 0.05
# Allocators and caches of libraries grow in the first third.
_WARM_UP_SHARE = 1 / 3
_LEAST_LOOKS = 8
# An allocator takes memory in lumps, so that short intervals have none or much.
_INTERVALS = 6
# Of them at the end: a buffer that has filled up grows no more.
_LAST_INTERVALS = 2
_LEAST_LATE = 0.3
# Of what was seen: memory that was freed, and that glibc keeps.
_MUCH_FREED = 0.5
# Less is not searched for, in bytes a step.
_LEAST_GROWN = 1000
# Of the steps: what is kept in every second step still grows.
_LEAST_KEPT = 0.5
_LEAST_STEPS = 8
# Of what a step adds: each copy is longer, so that glibc takes ten times as much for a while.
_LEAST_JOINED = 0.05
_LONGER = 1.2
# Of one that comes and goes, four are in order once in 24 times.
_LEAST_SIZES = 4
# Of what a step adds, for numbers, texts and lists of them.
_LEAST_PLAIN = 0.3
# Elements that were added at least, in whichever steps, and what of all such are most.
_LEAST_SELDOM = 4
_MOST_OF_IT = 0.6
_SHORT = 4
_SIZED = (list, tuple, dict, set, deque)
_KINDS = (list, dict, deque, set, defaultdict, OrderedDict, Counter, functools._lru_cache_wrapper)
# Collections in a collection that grow together.
_MOST_TOGETHER = 1000
# Operations of a sum, and of its parts: a moving mean is `0.9 * mean + 0.1 * loss`.
_ADDING = ("AddBackward", "SubBackward", "LerpBackward")
_SCALING = ("MulBackward", "DivBackward")
# Of a sum that are counted. Torch frees those that were, one within the other: of a sum of 50,000
# losses the stack overflowed.
_MOST_ADDED = 2000
# How deep an element is searched for tensors, and how many collections may be around it.
_MAX_DEPTH = 3
_MAX_PARTS = 32
# Objects of the script that are looked at for what becomes longer.
_MOST_LOOKED_AT = 5000
_OURS = str(Path(stoker.__file__).parent)


# As a type checker sees it: Python itself does not know the last of them with brackets.
_Collection: TypeAlias = (
    "list[object] | set[object] | dict[object, object] | deque[object] "
    "| functools._lru_cache_wrapper[object]"
)
_PythonQueue: TypeAlias = "queue.Queue[object] | queue.SimpleQueue[object]"


class _Look(NamedTuple):
    """Memory of this process after so many steps."""

    steps: int
    written_bytes: int


class LoopWatch:
    """Looks at this process's memory up to 20 times a second, which takes 0.05 ms."""

    def __init__(
        self,
        *,
        used: Callable[[], int] = written_bytes,
        asked: Callable[[], int] = asked_bytes,
        give_back: Callable[[], None] = give_back_freed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._used = used
        self._asked = asked
        self._give_back = give_back
        self._clock = clock
        self._due_at = 0.0
        self._looks: list[_Look] = []
        self._asked_before = 0
        self._lengths: dict[int, int] = {}
        # Bytes, or elements, by the name, at some looks.
        self._sizes: list[dict[str, int]] = []
        self._graphs = GraphWatch()
        # Objects of the script's classes.
        self._instances: Counter[type] = Counter()
        self._added: dict[str, int] = {}
        self._began_at = self._arrays_at = 0
        self._arrays_due = _LEAST_LOOKS

    def look(self, steps: int) -> None:
        """Looks if it is time for it; the first time it blocks for some 50 ms.

        Args:
            steps: Batches that the script took so far.
        """
        if self._graphs.is_due(steps):
            self._graphs.compare(_latest_of(_sized_by_name()))
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + _EVERY_SECONDS
        if not self._looks:
            self._began_at = steps
            self._asked_before = self._asked()
            # Shorter ones count as empty: most collections of a process are.
            lengths = ((id(kept), _length(kept)) for kept in _collections())
            self._lengths = {kept: length for kept, length in lengths if length > _SHORT}
        if len(self._looks) == self._arrays_due:
            # Seldom: it takes some milliseconds.
            named = _sized_by_name()
            self._sizes.append({name: sized.size for name, sized in named.items()})
            self._graphs.mark(_latest_of(named), steps)
            self._arrays_due += self._arrays_due // 2
        if len(self._looks) == _LEAST_LOOKS:
            self._added = _sums_by_name(_LEAST_KEPT * (steps - self._began_at))
            self._instances = Counter(map(type, _instances()))
            self._arrays_at = steps
        if len(self._looks) in (0, _LEAST_LOOKS):
            # What the script has freed before, and these walks through all objects, would be taken
            # for what its steps add, and free again.
            self._give_back()
        self._looks.append(_Look(steps, self._used()))

    def result(self, steps: int) -> LoopGrowth | None:
        """Returns what a step adds, and what keeps it; None: there were too few looks.

        Blocks for some 50 ms where something is kept. Call it in the thread of the loop, whose
        variables it names.

        Args:
            steps: Batches that the script took so far.
        """
        grown = grown_per_step(self._looks)
        if grown is None:
            return None
        kept: tuple[KeptObjects, ...] = ()
        seen = self._looks[-1].written_bytes - _after_warm_up(self._looks)[0].written_bytes
        if grown >= _LEAST_GROWN:
            # Before the search, which frees much itself.
            freed = self._freed_bytes()
            kept = tuple(self._kept(steps, grown))
            if not kept:
                if freed >= _MUCH_FREED * seen:
                    grown = 0.0
                # Pages of an array of zeros that is written step by step were asked for before.
                seen = min(seen - max(0, freed), self._asked() - self._asked_before)
        return LoopGrowth(grown_bytes_per_step=grown, seen_bytes=max(0, seen), kept=kept)

    def _freed_bytes(self) -> int:
        """Gives back what the process has freed; returns how much that was."""
        before = self._used()
        self._give_back()
        return before - self._used()

    def _kept(self, steps: int, grown: float) -> list[KeptObjects]:
        """Returns what keeps something of each step, graphs first.

        Args:
            steps: Batches that the script took so far.
            grown: Bytes that a step adds.
        """
        since = steps - self._began_at
        if since < _LEAST_STEPS:
            return []
        names = _Names()
        named = _sized_by_name()
        kept = [*self._kept_collections(since, names, named, grown), *self._kept_sums(steps)]
        if not kept:
            kept += self._kept_parts(since, names, grown)
        if self._sizes:
            kept += self._joined(named, _LEAST_JOINED * (steps - self._arrays_at) * grown)
            kept += self._kept_tuples(named, steps - self._arrays_at, grown)
            kept = _without_doubles(kept, self._kept_graphs(named, steps), named)
        if self._sizes and not kept:
            kept += self._kept_instances(steps - self._arrays_at, names, grown)
        return sorted(kept, key=lambda kept: (not kept.has_graph, -kept.count_per_step))

    def _kept_collections(
        self, steps: int, names: "_Names", named: Mapping[str, "_Sized"], grown: float
    ) -> Iterator[KeptObjects]:
        """Yields collections that grew by an element in half of the steps.

        They hold tensors, or their elements are a good part of what a step adds.

        Args:
            steps: Batches that the script took since the lengths were noted.
            names: Of the script's variables.
            named: What they are now.
            grown: Bytes that a step adds.
        """
        histories = _lbfgs_histories()
        for collection in _collections():
            more = _length(collection) - self._lengths.get(id(collection), 0)
            if more < min(_LEAST_SELDOM, _LEAST_KEPT * steps):
                continue
            element = _last_of(collection)
            if not _is_cause(element, more / steps, grown):
                continue
            whole = _queue_of(collection) or collection
            most = histories.get(id(collection))
            name = names.of(whole) if most is None else "LBFGS.old_dirs"
            if name and not self._is_made_anew(name, named):
                kept = _kept_of(element, name, _kind_of(whole), more / steps)
                limit = most or _limit_of(whole) or _limit_beside(collection)
                if limit != _length(collection):
                    yield msgspec.structs.replace(kept, max_count=limit)

    def _kept_parts(self, steps: int, names: "_Names", grown: float) -> Iterator[KeptObjects]:
        """Yields collections of lists that grew together, as `scores[label].append(score)` does.

        Args:
            steps: Batches that the script took since the lengths were noted.
            names: Of the script's variables.
            grown: Bytes that a step adds.
        """
        for collection in _collections():
            parts = _parts_that_grow(collection)
            if len(parts) < 2:
                continue
            more = 0
            for part in parts:
                # Short ones were not noted.
                before = self._lengths.get(id(part), min(len(part), _SHORT))
                more += len(part) - before
            if more < _LEAST_KEPT * steps:
                continue
            longest = max(parts, key=len)
            element = _last_of(longest)
            if _is_cause(element, more / steps, grown) and (name := names.of(collection)):
                container = type(longest).__name__
                yield _kept_of(element, _part_name(name, ...), container, more / steps)

    def _kept_sums(self, steps: int) -> Iterator[KeptObjects]:
        """Yields tensors to which one was added in half of the steps, each with its graph.

        Args:
            steps: Batches that the script took so far.
        """
        least = min(_LEAST_KEPT * _MOST_ADDED, max(1.0, _LEAST_KEPT * (steps - self._arrays_at)))
        for name, added in _sums_by_name(least).items():
            # A loss of many terms is as long in each step.
            if added - self._added.get(name, 0) >= least:
                yield KeptObjects(
                    name=name,
                    container="sum",
                    element="Tensor",
                    has_graph=True,
                    count_per_step=1.0,
                )

    def _is_made_anew(self, name: str, named: Mapping[str, "_Sized"]) -> bool:
        """Whether a collection is another one in each step, as a list of a batch's outputs is.

        Args:
            name: Of the collection.
            named: What the script's variables are now.
        """
        sizes = self._sizes_of(name, named)
        return len(sizes) >= _LEAST_SIZES and not _has_grown(sizes)

    def _sizes_of(self, name: str, named: Mapping[str, "_Sized"]) -> list[int]:
        """Returns the sizes that what has a name had at some looks, and has now.

        Args:
            name: Of a variable, or of a part of it.
            named: What the script's variables are now.
        """
        if name not in named:
            return []
        return [*(seen[name] for seen in self._sizes if name in seen), named[name].size]

    def _kept_tuples(
        self, named: Mapping[str, "_Sized"], steps: int, grown: float
    ) -> Iterator[KeptObjects]:
        """Yields tuples that are longer than before, as after `history += (loss,)`.

        Args:
            named: What the script's variables are now.
            steps: Batches that the script took since their first sizes.
            grown: Bytes that a step adds.
        """
        for name, sized in named.items():
            sizes = self._sizes_of(name, named)
            if not isinstance(sized.latest, tuple) or len(sizes) < _LEAST_SIZES:
                continue
            more = sizes[-1] - sizes[0]
            is_longer = more >= _LEAST_KEPT * steps and _has_grown(sizes)
            if is_longer and _is_cause(sized.latest[-1], more / steps, grown):
                yield _kept_of(sized.latest[-1], name, "tuple", more / steps)

    def _kept_graphs(self, named: Mapping[str, "_Sized"], steps: int) -> Iterator[KeptObjects]:
        """Yields tensors that were computed from themselves in half of the steps.

        Args:
            named: What the script's variables are now.
            steps: Batches that the script took so far.
        """
        least = max(1.0, _LEAST_KEPT * (steps - self._arrays_at))
        numbers = numbers_of(_latest_of(named))
        since = self._graphs.steps_kept(steps)
        # The latest first: what else a step computes of its hidden state was made before.
        for name in sorted(numbers, key=lambda name: -numbers[name]):
            if since.get(name, 0) >= least:
                yield _kept_of(named[name].latest, name, "graph", 1.0)

    def _kept_instances(self, steps: int, names: "_Names", grown: float) -> Iterator[KeptObjects]:
        """Yields classes of which there are more objects with each step, as in a linked list.

        Args:
            steps: Batches that the script took since they were counted.
            names: Of the script's variables.
            grown: Bytes that a step adds.
        """
        by_kind = defaultdict[type, list[object]](list)
        for instance in _instances():
            by_kind[type(instance)].append(instance)
        for kind, instances in by_kind.items():
            more = len(instances) - self._instances[kind]
            # Variables refer to the latest one, too.
            usual = instances[len(instances) // 2]
            if more >= _LEAST_KEPT * steps and _is_cause(usual, more / steps, grown):
                name = names.of(usual) or kind.__name__
                yield _kept_of(usual, name, "objects", more / steps)

    def _joined(self, named: Mapping[str, "_Sized"], least_bytes: float) -> Iterator[KeptObjects]:
        """Yields tensors and arrays that are longer than before, as after `torch.cat`.

        Args:
            named: What the script's variables are now.
            least_bytes: Those that are longer by less are left out.
        """
        for name, sized in named.items():
            sizes = self._sizes_of(name, named)
            if not has_length_in_bytes(sized.latest) or len(sizes) < _LEAST_SIZES:
                # A variable of another function, which was not there before.
                continue
            is_longer = sizes[-1] - sizes[0] >= least_bytes and sizes[-1] > _LONGER * sizes[0]
            # Batches of other lengths come and go, and so do variables.
            if is_longer and _has_grown(sizes):
                yield _kept_of(sized.latest, name, "joined", 1.0)


def _without_doubles(
    kept: Sequence[KeptObjects], graphs: Iterable[KeptObjects], named: Mapping[str, "_Sized"]
) -> list[KeptObjects]:
    """Returns what is kept, each name once: a sum of losses is one number, a hidden state many.

    Args:
        kept: Collections, sums and others.
        graphs: Tensors that are computed from themselves, sums among them.
        named: What the script's variables are now.
    """
    names = {one.name for one in kept}
    added = [
        one
        for one in graphs
        if one.name not in names or cast("torch.Tensor", named[one.name].latest).numel() > 1
    ]
    graph_names = {one.name for one in added}
    return [*(one for one in kept if one.name not in graph_names), *added]


def _has_grown(sizes: Sequence[int]) -> bool:
    """Whether something became longer, and was never shorter than before.

    Args:
        sizes: Of it, at some looks.
    """
    return sizes[-1] > sizes[0] and list(sizes) == sorted(sizes)


def _kept_of(element: object, name: str, container: str, count_per_step: float) -> KeptObjects:
    """Returns the record of what is kept, by one of it.

    Args:
        element: The latest one.
        name: Of what keeps it.
        container: Type of that.
        count_per_step: So many are added.
    """
    return KeptObjects(
        name=name,
        container=container,
        element=type(element).__name__,
        has_graph=any(map(_has_graph, _tensors_in(element))),
        count_per_step=count_per_step,
    )


class _Sized(NamedTuple):
    """What may become longer, all of one name, such as of several objects of a class.

    Attributes:
        size: Bytes of all arrays, texts, buffers or tables, or elements of all collections.
        latest: One of them.
    """

    size: int
    latest: object


def grown_per_step(looks: Sequence[_Look]) -> float | None:
    """Returns the bytes that a usual step adds after a warm-up; None: there were too few looks.

    A median of intervals: what is allocated once is no growth, nor what ends before the last steps.
    """
    usual = _after_warm_up(looks)
    if len(usual) < _LEAST_LOOKS:
        return None
    marks = [usual[place * (len(usual) - 1) // _INTERVALS] for place in range(_INTERVALS + 1)]
    rates = [
        (later.written_bytes - earlier.written_bytes) / (later.steps - earlier.steps)
        for earlier, later in itertools.pairwise(marks)
        if later.steps > earlier.steps
    ]
    usual_rate = median(rates)
    if fmean(rates[-_LAST_INTERVALS:]) < _LEAST_LATE * usual_rate:
        return 0.0
    return max(0.0, usual_rate)


def _after_warm_up(looks: Sequence[_Look]) -> list[_Look]:
    return [look for look in looks if look.steps > _WARM_UP_SHARE * looks[-1].steps]


class _Names:
    """Names of objects as a script writes them: of its variables, attributes and modules."""

    def __init__(self) -> None:
        # A module's variables are found by their dictionary.
        self._frames = [
            frame for frame in _frames() if frame.f_code.co_flags & inspect.CO_OPTIMIZED
        ]

    def of(self, value: object, *, depth: int = 0) -> str:
        """Returns the name of an object, such as `losses`; empty: only libraries refer to it."""
        for frame in self._frames:
            if name := _key_of(variables_of(frame), value):
                return f"{name} in {frame.f_code.co_name}()"
        for owner in gc.get_referrers(value):
            if name := self._name_by(owner, value, depth=depth):
                return name
        return ""

    def _name_by(self, owner: object, value: object, *, depth: int) -> str:
        if isinstance(owner, dict):
            return self._name_in_dict(owner, value, depth=depth)
        if isinstance(owner, CellType):
            return _closure_name(owner)
        if isinstance(owner, tuple):
            return _default_name(owner, value)
        if isinstance(owner, list | deque):
            return self._name_in_list(owner, value, depth=depth)
        if isinstance(owner, ModuleType | FrameType):
            return ""
        return _attribute_name(owner, value)

    def _name_in_list(
        self, owner: list[object] | deque[object], value: object, *, depth: int
    ) -> str:
        if len(owner) > _MAX_PARTS or depth >= _MAX_DEPTH:
            return ""
        name = self.of(owner, depth=depth + 1)
        for place, part in enumerate(owner):
            if name and part is value:
                return _part_name(name, place)
        return ""

    def _name_in_dict(self, owner: dict[object, object], value: object, *, depth: int) -> str:
        key = _key_of(owner, value)
        if key is None:
            return ""
        module = owner.get("__name__")
        if isinstance(module, str) and getattr(sys.modules.get(module), "__dict__", None) is owner:
            if _is_library(module):
                return ""
            return key
        for holder in gc.get_referrers(owner):
            if isinstance(holder, FunctionType) and holder.__dict__ is owner:
                if _is_library(str(holder.__module__)):
                    return ""
                return f"{holder.__name__}.{key}"
            if getattr(holder, "__dict__", None) is owner:
                return _attribute_name(holder, value)
            if isinstance(holder, type) and not _is_library(holder.__module__):
                return f"{holder.__name__}.{key}"
        if depth >= _MAX_DEPTH:
            return ""
        name = self.of(owner, depth=depth + 1)
        return name and _part_name(name, key)


def _sized_by_name() -> dict[str, _Sized]:
    """Returns what may become longer, of the script's variables and of what those refer to.

    Tensors, arrays, texts, buffers, tables and collections: in short ones, and in attributes of
    objects.
    """
    sized: dict[str, _Sized] = {}
    seen = set[int]()
    waiting = deque(_variables())
    while waiting and len(seen) < _MOST_LOOKED_AT:
        name, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if (size := _size_of(value)) is not None:
            before = sized[name].size if name in sized else 0
            sized[name] = _Sized(before + size, value)
        if depth < _MAX_DEPTH and not has_length_in_bytes(value):
            waiting += ((inner, part, depth + 1) for inner, part in _named_parts(name, value))
    return sized


def _size_of(value: object) -> int | None:
    """Returns the bytes of an array, a text, a buffer or a table, or the elements of a collection.

    Args:
        value: An object of any type; others have no size.
    """
    if has_length_in_bytes(value):
        return num_bytes_of(value)
    # Not isinstance, which asks a lazy object what it is.
    if issubclass(type(value), _SIZED):
        return len(cast("list[object]", value))
    return None


def _latest_of(named: Mapping[str, _Sized]) -> Iterator[tuple[str, object]]:
    return ((name, sized.latest) for name, sized in named.items())


def _instances() -> Iterator[object]:
    """Yields the objects of the script's classes."""
    for value in gc.get_objects():
        if is_users_name(str(type(value).__module__)):
            yield value


def _variables() -> Iterator[tuple[str, object, int]]:
    """Yields the script's variables with their names; 0 for their depth."""
    for frame in _frames():
        where = f" in {frame.f_code.co_name}()"
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            where = ""
            if _is_library(str(frame.f_globals.get("__name__"))):
                continue
        for name, value in variables_of(frame).items():
            if not name.startswith("__"):
                yield f"{name}{where}", value, 0


def _named_parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields what a short collection, or an object of the script, refers to, with its names.

    Args:
        name: As a script writes it.
        value: What has that name.
    """
    # Not isinstance, which asks a lazy object what it is.
    kind: type = type(value)
    if issubclass(kind, dict):
        entries = cast("dict[object, object]", value).items()
        for key, part in list(itertools.islice(entries, _MAX_PARTS)):
            yield _part_name(name, key), part
    elif issubclass(kind, list | tuple):
        for place, part in enumerate(cast("list[object]", value)[:_MAX_PARTS]):
            yield _part_name(name, place), part
    elif not _is_library(kind.__module__) and not issubclass(kind, type | ModuleType):
        attributes = attributes_of(value)
        buffers = attributes.get("_buffers")
        if issubclass(kind, torch.nn.Module) and isinstance(buffers, dict):
            attributes = {**attributes, **buffers}
        for attribute, part in list(attributes.items()):
            yield f"{kind.__name__}.{attribute}", part
        cls: type = kind
        for attribute, slot in slots_of(cls):
            yield f"{kind.__name__}.{attribute}", read_slot(slot, value)


def _part_name(name: str, key: object) -> str:
    """Returns the name of a collection's part, as `metrics['loss'] in train()`."""
    variable, separator, function = name.partition(" in ")
    shown = "..." if key is ... else repr(key)
    return f"{variable}[{shown}]{separator}{function}"


def variables_of(frame: FrameType) -> dict[str, object]:
    """Returns a frame's variables; Python before 3.13 keeps a copy, which would keep them alive."""
    shown = frame.f_locals
    variables = dict(shown)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        shown.clear()
    return variables


def _attribute_name(owner: object, value: object) -> str:
    kind = type(owner)
    name = _key_of(attributes_of(owner), value) or _slot_of(owner, value)
    # Hooks of a layer are a script's own.
    if _is_library(kind.__module__) and not name.endswith("_hooks"):
        return ""
    if not name:
        return ""
    return f"{kind.__name__}.{name}"


def _slot_of(owner: object, value: object) -> str:
    kind: type = type(owner)
    for name, member in slots_of(kind):
        if read_slot(member, owner) is value:
            return name
    return ""


def _closure_name(cell: CellType) -> str:
    """Returns the name of a function's variable, such as of a hook's; empty: only of libraries."""
    for cells in gc.get_referrers(cell):
        for function in _functions_with(cells):
            names = function.__code__.co_freevars
            for name, other in zip(names, function.__closure__ or (), strict=True):
                if other is cell:
                    return f"{name} of {function.__name__}()"
    return ""


def _default_name(defaults: tuple[object, ...], value: object) -> str:
    """Returns the name of an argument whose default is a value; empty: only of libraries."""
    for function in _functions_with(defaults):
        if function.__defaults__ is defaults:
            code = function.__code__
            arguments = code.co_varnames[: code.co_argcount]
            named = zip(reversed(arguments), reversed(defaults), strict=False)
            for name, default in named:
                if default is value:
                    return f"{name} of {function.__name__}()"
    return ""


def _functions_with(part: object) -> Iterator[FunctionType]:
    """Yields the script's functions that refer to a tuple, of defaults or of a closure."""
    if type(part) is tuple:
        for function in gc.get_referrers(part):
            if isinstance(function, FunctionType) and not _is_library(str(function.__module__)):
                yield function


def _key_of(values: Mapping[object, object] | Mapping[str, object], value: object) -> str | None:
    for key, held in list(values.items()):
        if held is value and isinstance(key, str):
            return key
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("stoker", "torch", "builtins", "gc")


def _collections() -> Iterator[_Collection]:
    """Yields what Python has of collections, and of functions that keep their results."""
    for value in gc.get_objects():
        if type(value) in _KINDS:
            yield value
    # Python's garbage collector knows no dictionary of numbers, texts and arrays alone.
    seen = set[int]()
    for frame in _frames():
        for variable in variables_of(frame).values():
            for value in (variable, *_held_by(variable)):
                if type(value) is dict and not gc.is_tracked(value) and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def _length(collection: _Collection) -> int:
    if isinstance(collection, functools._lru_cache_wrapper):
        return int(collection.cache_info().currsize)
    return len(collection)


def _queue_of(collection: _Collection) -> "_PythonQueue | None":
    """Returns the queue whose elements a collection holds; None: it is no queue's."""
    if not isinstance(collection, list | deque):
        return None
    for owner in gc.get_referrers(collection):
        holders = [owner]
        if type(owner) is dict:
            # Of attributes, perhaps.
            holders = gc.get_referrers(owner)
        for holder in holders:
            # Not isinstance, which asks a lazy object what it is.
            if issubclass(type(holder), queue.Queue | queue.SimpleQueue):
                return cast("_PythonQueue", holder)
    return None


def _kind_of(collection: "_Collection | _PythonQueue") -> str:
    if isinstance(collection, functools._lru_cache_wrapper):
        return "lru_cache"
    return type(collection).__name__


def _limit_of(collection: "_Collection | _PythonQueue") -> int | None:
    if isinstance(collection, functools._lru_cache_wrapper):
        return collection.cache_info().maxsize
    return getattr(collection, "maxlen", getattr(collection, "maxsize", None))


def _limit_beside(collection: _Collection) -> int | None:
    """Returns what the object whose attribute a collection is says that it holds at most."""
    for owner in gc.get_referrers(collection):
        attributes = attributes_of(owner)
        if type(owner) is dict and "__name__" not in owner:
            attributes = dict(owner)
        limit = limit_among(attributes)
        if limit is not None and limit >= _length(collection):
            return limit
    return None


def _lbfgs_histories() -> dict[int, int]:
    """Returns how many directions each L-BFGS optimizer keeps at most, by its list's identity."""
    histories: dict[int, int] = {}
    for optimizer in gc.get_objects():
        # Not isinstance, which asks a lazy object what it is.
        if issubclass(type(optimizer), torch.optim.LBFGS):
            most = optimizer.param_groups[0]["history_size"]
            # As many steps of gradients follow with them, in a list of their own.
            histories |= {id(kept.get("old_dirs")): most for kept in optimizer.state.values()}
    return histories


def _parts_that_grow(collection: _Collection) -> Sequence["list[object]"]:
    """Returns the collections in a collection of them, such as of one for each class."""
    if not isinstance(collection, dict | list) or not 2 <= len(collection) <= _MOST_TOGETHER:
        return []
    parts = list(collection)
    if isinstance(collection, dict):
        parts = list(collection.values())
    kind = type(parts[0])
    if kind not in _KINDS or kind is functools._lru_cache_wrapper:
        return []
    return [cast("list[object]", part) for part in parts if type(part) is kind]


def _is_cause(element: object, count_per_step: float, grown: float) -> bool:
    """Whether elements are, or hold, tensors, or are a good part of what a step adds.

    Tensors that are added in few steps have to be most of it.

    Args:
        element: The latest one.
        count_per_step: So many are added.
        grown: Bytes that a step adds.
    """
    if count_per_step < _LEAST_KEPT:
        # Objects may refer to much that was there before.
        is_plain = isinstance(element, torch.Tensor | np.ndarray | dict | list | tuple)
        added = count_per_step * sum(map(num_bytes_of, _tensors_in(element)))
        return is_plain and added >= _MOST_OF_IT * grown
    if any(True for _ in _tensors_in(element)):
        return True
    return count_per_step * kept_bytes(element) >= _LEAST_PLAIN * grown


def _held_by(value: object) -> list[object]:
    """Returns what a short collection or an object of the script holds."""
    if type(value) in (dict, defaultdict, OrderedDict):
        return list(itertools.islice(cast("dict[object, object]", value).values(), _MAX_PARTS))
    if type(value) is list:
        return value[:_MAX_PARTS]
    if _is_library(type(value).__module__):
        return []
    attributes = list(attributes_of(value).values())
    nested = [part for part in attributes if type(part) in (dict, defaultdict, OrderedDict)]
    return [*attributes, *itertools.chain.from_iterable(map(_held_by, nested))]


def _last_of(collection: _Collection) -> object:
    if isinstance(collection, dict):
        return next(reversed(collection.values()), None)
    if isinstance(collection, set):
        return next(iter(collection), None)
    if isinstance(collection, functools._lru_cache_wrapper):
        results = [result for _, result in cached_results(collection)]
        return results[-1] if results else None
    if not collection:
        return None
    return collection[-1]


def _tensors_in(element: object, depth: int = 0) -> Iterator[object]:
    """Yields the tensors and arrays of an element, such as a dict of losses."""
    if isinstance(element, torch.Tensor | np.ndarray):
        yield element
        return
    parts: list[object] = []
    if isinstance(element, dict):
        parts = list(itertools.islice(element.values(), _MAX_PARTS))
    elif isinstance(element, list | tuple):
        parts = list(element[:_MAX_PARTS])
    elif isinstance(element, FunctionType):
        cells = itertools.islice(element.__closure__ or (), _MAX_PARTS)
        parts = [*_contents(cells), *(element.__defaults__ or ())[:_MAX_PARTS]]
    elif not _is_library(type(element).__module__):
        # A dataclass, say, or a structure of attrs or msgspec.
        parts = [part for _, part in itertools.islice(_named_parts("", element), _MAX_PARTS)]
    if depth < _MAX_DEPTH:
        for part in parts:
            yield from _tensors_in(part, depth + 1)


def _contents(cells: Iterable[CellType]) -> Iterator[object]:
    """Yields the values of a closure's variables that have one."""
    for cell in cells:
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _has_graph(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None


def _sums_by_name(least: float) -> dict[str, int]:
    """Returns how many tensors were added to those of the script's that are such sums.

    Args:
        least: Tensors with fewer are left out.
    """
    names = _Names()
    sums: dict[str, int] = {}
    for value in gc.get_objects():
        # Not isinstance, which asks a lazy object what it is.
        if issubclass(type(value), torch.Tensor):
            added = _num_added(value)
            if added >= max(least, 1) and (name := names.of(value)):
                sums[name] = max(added, sums.get(name, 0))
    return sums


def _num_added(total: torch.Tensor) -> int:
    """Returns how many tensors were added to one, by its graph."""
    node = total.grad_fn
    added = 0
    while node is not None and added < _MOST_ADDED and _is(node, _ADDING):
        added += 1
        node = _earlier_sum(node)
    return added


def _earlier_sum(node: torch.autograd.graph.Node) -> torch.autograd.graph.Node | None:
    """Returns the sum that another one was added to, scaled or not; None: there is none."""
    parts = _parts_of(node)
    scaled = itertools.chain.from_iterable(_parts_of(part) for part in parts if _is(part, _SCALING))
    sums = (part for part in itertools.chain(parts, scaled) if _is(part, _ADDING))
    return next(sums, None)


def _parts_of(node: torch.autograd.graph.Node) -> list[torch.autograd.graph.Node]:
    return [earlier for earlier, _ in node.next_functions if earlier is not None]


def _is(node: torch.autograd.graph.Node, kinds: tuple[str, ...]) -> bool:
    return node.name().startswith(kinds)
