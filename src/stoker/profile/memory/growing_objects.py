"""What of a dataset, and of the script's own modules, grows as samples are made.

Looked at: attributes of the dataset, of objects in it and of their classes; variables, closures and
default arguments of the script's functions; variables of a stream's generators; what writes the
log; and elements of its collections, which may keep what they have loaded.
"""

import functools
import gc
import itertools
import logging
import queue
import sys
import threading
from collections import defaultdict, deque
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import NamedTuple, cast

import numpy as np

from stoker.feed import reachable
from stoker.feed.reachable import is_users_name, read_slot, slots_of
from stoker.profile.loader_phases import attributes_of
from stoker.profile.memory.loop_growth import variables_of
from stoker.profile.memory.python_objects import (
    OF_BYTES,
    collections_of,
    is_table,
    kept_bytes,
    limit_among,
    num_bytes_of,
    reachable_from,
    some_of,
)
from stoker.records import GrowingObjects

# Of samples made: a cache that is hit as often as not still grows by half of them.
_LEAST_GROWTH = 0.1
_LEAST_GROWN = 8
# As fast as before, at the end: what has filled up is no growth.
_LEAST_LATE = 0.3
# Bytes of a sample, of arrays, texts and buffers that become longer.
_LEAST_LONGER = 100
# Of what grows in a collection of collections: then that part is what grows.
_MOST_OF_IT = 0.8
# Collections in a collection: so many are named, more are added up, of its first elements.
_MOST_NAMED = 16
_LOOKED_INTO = 1000
_DEPTH = 3
# Of the elements that should have been read, and bytes that one keeps more.
_LEAST_LOADED = 0.3
_LEAST_LOADED_BYTES = 1000
# Times that an element was read, as few are in a validation's look.
_SEVERAL = 2
# Iterators of a stream that are looked at, and where those of Python around generators are from.
_MOST_ITERATORS = 100
_OF_PYTHON = ("builtins", "itertools")
_COLLECTIONS = (MutableMapping, MutableSequence, MutableSet)
_NESTED = (list, dict, set, deque)
_ALL = "[...]"
# Their names come from what refers to them.
_NO_OWNERS = (*_COLLECTIONS, tuple, frozenset, type, FunctionType, ModuleType)


class Size(NamedTuple):
    """Length of a collection, what it holds at most, and its latest element, where it has them.

    Of an array, a text or a buffer, or of several in a collection, the length is in bytes.
    """

    container: str
    length: int
    limit: int | None = None
    latest: object = None
    is_bytes: bool = False
    num_arrays: int = 0
    """In a collection, of which this is the length."""

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of the latest element; 0: they are not known."""
        if self.is_bytes:
            return 1
        return kept_bytes(self.latest) if self.latest is not None else 0

    def beside(self, other: "Size | None") -> "Size":
        """Returns the size of both, as of one attribute of several objects of a class."""
        if other is None:
            return self
        limit = None
        if self.limit is not None and other.limit is not None:
            limit = self.limit + other.limit
        return self._replace(length=self.length + other.length, limit=limit)

    @property
    def is_full(self) -> bool:
        """Whether it holds what it may."""
        return self.limit is not None and self.length >= self.limit


def sizes_of(dataset: object) -> dict[str, Size]:
    """Returns the lengths, and limits, of collections and caches of a dataset or a function.

    Those of its module and of modules of the script that it uses are among them, and results that
    `functools.lru_cache` keeps of functions and methods.
    """
    sizes = _Sizes()
    if isinstance(dataset, functools.partial):
        sizes.add_arguments(dataset)
    modules: list[str] = []
    kinds = set[type]()
    for owner in _owners(dataset):
        kind = type(owner)
        sizes.add_attributes(kind.__name__, owner)
        if kind not in kinds:
            kinds.add(kind)
            for base in kind.__mro__:
                sizes.add_attributes(kind.__name__, base)
        if isinstance(owner, FunctionType):
            sizes.add_function(owner.__name__, owner)
        # A function's own: its type is of builtins.
        modules.append(str(getattr(owner, "__module__", None) or kind.__module__))
    for handler in _log_handlers():
        sizes.add_attributes(type(handler).__name__, handler)
    for module in _modules_from(modules):
        prefix = ""
        if module.__name__ not in modules:
            prefix = f"{module.__name__}."
        sizes.add_module(prefix, module)
    return sizes.by_name


def stream_sizes(samples: Iterator[object]) -> dict[str, Size]:
    """Returns the lengths of collections in variables of a stream's generators.

    Such as a shuffle buffer's, `buffer in __iter__()`; `samples` is a generator around the stream.
    """
    sizes = _Sizes()
    for generator in itertools.islice(_generators(samples), 1, None):
        if generator.gi_frame is not None:
            for name, value in variables_of(generator.gi_frame).items():
                sizes.add(f"{name} in {generator.__name__}()", value)
    return sizes.by_name


def _generators(samples: Iterator[object]) -> Iterator["GeneratorType[object, object, object]"]:
    """Yields a generator and those that it goes through, by `for`, `yield from` or a variable."""
    waiting: deque[object] = deque([samples])
    seen = set[int]()
    while waiting and len(seen) < _MOST_ITERATORS:
        iterator = waiting.popleft()
        if id(iterator) in seen:
            continue
        seen.add(id(iterator))
        if isinstance(iterator, GeneratorType):
            yield iterator
        waiting += filter(_is_iterator, gc.get_referents(iterator))


def _is_iterator(value: object) -> bool:
    kind = type(value)
    # Those that `map` and `zip` go through are in a tuple.
    return kind is tuple or (kind.__module__ in _OF_PYTHON and hasattr(kind, "__next__"))


def grown_between(
    before: Mapping[str, Size],
    after: Mapping[str, Size],
    *,
    samples: int,
) -> tuple[GrowingObjects, ...]:
    """Returns what grew by a good part of the samples that were made, and is not full; most first.

    The most is what takes most bytes, as far as those of an element are known.
    """
    more = _longer(before, after)
    return _most_first(_grown(more, after, samples), more)


def _grown(
    more: Mapping[str, int], after: Mapping[str, Size], samples: int
) -> dict[str, GrowingObjects]:
    """Returns by name what became longer by a good part of the samples, and is not full.

    Args:
        more: By how much each became longer.
        after: Sizes now.
        samples: That were made.
    """
    grown = {}
    for name, longer in more.items():
        size = after[name]
        if size.is_full or longer < _least_longer(size, samples):
            continue
        grown[name] = GrowingObjects(
            name=name,
            container=size.container,
            count_per_sample=longer / samples,
            max_count=size.limit,
            element_bytes=size.element_bytes,
        )
    return grown


def _most_first(
    grown: Mapping[str, GrowingObjects], more: Mapping[str, int]
) -> tuple[GrowingObjects, ...]:
    named = [grown[name] for name in _outermost(grown, more)]
    return tuple(
        sorted(named, key=lambda growing: -growing.count_per_sample * max(1, growing.element_bytes))
    )


class Stretch(NamedTuple):
    """Samples, or batches, that were made until half-way, and in all."""

    half_way: int
    all: int


def grown_to_the_end(
    looks: Sequence[Mapping[str, Size]], half_way: Mapping[str, Size], made: Stretch
) -> tuple[GrowingObjects, ...]:
    """Returns what grew, and since half-way about as fast as in all, as no cache does that is full.

    Args:
        looks: Sizes at the start, then, and now. What was ever shorter than before is left out,
            such as the latest picture, whose size is another one each time.
        half_way: Sizes then.
        made: Samples, or batches.
    """
    samples = max(1, made.all)
    more = _longer(looks[0], looks[-1])
    late = _longer(half_way, looks[-1])
    shorter = _shrunk(looks)
    grown = {}
    for name, growing in _grown(more, looks[-1], samples).items():
        usual = growing.count_per_sample * (made.all - made.half_way)
        if late[name] < _LEAST_LATE * usual or name in shorter:
            continue
        if not _has_others(half_way.get(name), looks[-1][name]):
            grown[name] = growing
    return _most_first(grown, more)


def _has_others(before: Size | None, after: Size) -> bool:
    """Whether of arrays in a collection some are new: then none of them became longer."""
    num_before = before.num_arrays if before else 0
    return num_before != after.num_arrays


def _shrunk(looks: Sequence[Mapping[str, Size]]) -> set[str]:
    names = set[str]()
    for earlier, later in itertools.pairwise(looks):
        names |= {name for name, longer in _longer(earlier, later).items() if longer < 0}
    return names


def _longer(before: Mapping[str, Size], after: Mapping[str, Size]) -> dict[str, int]:
    """Returns by how much each is longer than before."""
    longer = {}
    for name, size in after.items():
        longer[name] = size.length
        if name in before:
            longer[name] -= before[name].length
    return longer


def _least_longer(size: Size, samples: int) -> float:
    if size.is_bytes:
        return _LEAST_LONGER * samples
    return max(_LEAST_GROWN, _LEAST_GROWTH * samples)


def _outermost(grown: Mapping[str, object], longer: Mapping[str, int]) -> list[str]:
    """Returns what grew by itself: not within an element of something that grows.

    Of parts of one collection it is the one that has most of what was added, or all of them.
    """
    parts: dict[str, list[str]] = defaultdict(list)
    for name in grown:
        around = _around(name)
        # What is added to a list are other arrays, not longer ones.
        if around and name.rpartition("[")[0] not in grown:
            parts[around].append(name)
    outermost = [name for name in grown if not _around(name)]
    for around, names in parts.items():
        if around in grown:
            continue
        whole = f"{around}{_ALL}"
        single = [name for name in names if name != whole]
        # The innermost one of those that have as much.
        most = max(single, key=lambda name: (longer[name], not name.endswith(_ALL)), default=whole)
        if whole in names and longer[most] < _MOST_OF_IT * longer[whole]:
            most = whole
        outermost.append(most)
    return outermost


def _around(name: str) -> str:
    if name.endswith("]"):
        return name.partition("[")[0]
    return ""


class _Sizes:
    """Lengths by the name of what is as long, each collection once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Size] = {}
        self._seen = set[int]()

    def add_module(self, prefix: str, module: ModuleType) -> None:
        """Adds a module's variables, functions and classes.

        Args:
            prefix: Stands before their names.
            module: One of the script's.
        """
        for name, value in attributes_of(module).items():
            if name.startswith("__"):
                continue
            self.add(prefix + name, value)
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType):
                self.add_function(prefix + name, value)
            elif isinstance(value, type):
                self.add_attributes(prefix + name, value)

    def add_attributes(self, owner_name: str, owner: object) -> None:
        """Adds the attributes of an object or a class.

        Args:
            owner_name: Stands before their names.
            owner: The object or class.
        """
        attributes = {**attributes_of(owner)}
        kind: type = type(owner)
        for name, slot in slots_of(kind):
            if not name.startswith("__"):
                attributes[name] = read_slot(slot, owner)
        limit = limit_among(attributes)
        for name, value in attributes.items():
            self.add(f"{owner_name}.{name}", value, limit=limit)
            if isinstance(value, FunctionType):
                self.add_function(f"{owner_name}.{name}", value)

    def add_arguments(self, partial: "functools.partial[object]") -> None:
        """Adds collections among the arguments that a function is always called with."""
        function = getattr(partial.func, "__name__", "partial")
        arguments = [*enumerate(partial.args), *partial.keywords.items()]
        for name, value in arguments:
            self.add(f"{name} of {function}()", value)

    def add_function(self, name: str, function: FunctionType, *, depth: int = 0) -> None:
        """Adds what a function's closure and its default arguments hold.

        Args:
            name: The function's, as a user calls it.
            function: A decorator's wrapper may hold the decorated function, which is looked at too.
            depth: How many wrappers are around it.
        """
        for attribute, value in attributes_of(function).items():
            if not attribute.startswith("__"):
                self.add(f"{name}.{attribute}", value)
        for variable, value in _held_by(function):
            self.add(f"{variable} of {name}()", value)
            if isinstance(value, FunctionType) and depth < _DEPTH:
                self.add_function(name, value, depth=depth + 1)

    def add(self, name: str, value: object, *, limit: int | None = None) -> None:
        """Adds a collection with those in it, a cache, an array or a buffer; else nothing.

        Args:
            name: As a user writes it.
            value: What has that name.
            limit: What its owner says that it holds at most.
        """
        if id(value) in self._seen:
            return
        # Not isinstance, which asks a lazy object what it is.
        kind = type(value)
        if issubclass(kind, threading.local):
            for attribute, part in (reachable.attributes_of(value) or {}).items():
                self.add(f"{name}.{attribute}", part)
        elif issubclass(kind, tuple):
            self._seen.add(id(value))
            self._add_nested(name, value)
        else:
            self._add_measured(name, value, limit=limit)

    def _add_measured(self, name: str, value: object, *, limit: int | None) -> None:
        size = _measured(value, limit)
        if size is None:
            return
        self._seen.add(id(value))
        self.by_name[name] = size.beside(self.by_name.get(name))
        self._add_nested(name, value)

    def _add_nested(self, name: str, collection: object, depth: int = 1) -> None:
        nested = _nested_in(collection)
        if not nested:
            self._add_arrays(name, collection)
        if len(nested) > 1:
            latest = _latest_of(nested[-1][1])
            if isinstance(latest, _NESTED):
                # What is added is deeper.
                latest = None
            length = sum(_deep_length(part, depth + 1) for _, part in nested)
            kind = type(nested[0][1]).__name__
            self.by_name[f"{name}{_ALL}"] = Size(kind, length, latest=latest)
        if len(nested) > _MOST_NAMED or depth > _DEPTH:
            return
        for key, part in nested:
            inner = f"{name}[{key!r}]"
            self.by_name[inner] = Size(type(part).__name__, len(part), latest=_latest_of(part))
            self._add_nested(inner, part, depth + 1)

    def _add_arrays(self, name: str, collection: object) -> None:
        """Adds what of a short collection may become longer: `by[key] = np.append(by[key], x)`.

        Args:
            name: The collection's, as a user writes it.
            collection: One that has no other collections in it.
        """
        parts = list(_parts_of(collection))
        if len(parts) > _LOOKED_INTO:
            return
        for key, part in parts[:_MOST_NAMED]:
            size = _measured(part, None)
            if size is not None:
                self.by_name[f"{name}[{key!r}]"] = size._replace(num_arrays=1)
        arrays = [part for _, part in parts if issubclass(type(part), OF_BYTES)]
        if len(arrays) > 1:
            self.by_name[f"{name}{_ALL}"] = Size(
                type(arrays[-1]).__name__,
                sum(map(num_bytes_of, arrays)),
                is_bytes=True,
                num_arrays=len(arrays),
            )


def _measured(value: object, limit: int | None) -> Size | None:
    """Returns the length of a collection, a queue, a table, a cache, an array or a buffer.

    Args:
        value: An object of any type; others have none.
        limit: What its owner says that it holds at most.
    """
    kind = type(value)
    if issubclass(kind, _COLLECTIONS):
        return _size_of(cast("MutableMapping[object, object]", value), limit)
    if issubclass(kind, queue.Queue):
        return _size_of_queue(cast("queue.Queue[object]", value))
    if issubclass(kind, queue.SimpleQueue):
        return Size(kind.__name__, cast("queue.SimpleQueue[object]", value).qsize())
    if issubclass(kind, OF_BYTES):
        return Size(kind.__name__, num_bytes_of(value), is_bytes=True)
    if is_table(value):
        return Size(kind.__name__, len(cast("Sequence[object]", value)))
    if not issubclass(kind, type) and _has_cache_info(value):
        return _size_of_cache(cast("functools._lru_cache_wrapper[object]", value))
    return None


def _size_of_queue(waiting: "queue.Queue[object]") -> Size:
    limit = waiting.maxsize if waiting.maxsize > 0 else None
    held = waiting.queue
    return Size(type(waiting).__name__, len(held), limit, _latest_of(held))


def _size_of(collection: "MutableMapping[object, object]", limit: int | None) -> Size:
    limit_of_type = getattr(collection, "maxlen", getattr(collection, "maxsize", None))
    if isinstance(limit_of_type, int):
        limit = limit_of_type
    elif limit is not None and len(collection) > limit:
        # Of something else.
        limit = None
    latest = _latest_of(collection)
    is_bytes = isinstance(collection, bytearray)
    return Size(type(collection).__name__, len(collection), limit, latest, is_bytes)


def _size_of_cache(function: "functools._lru_cache_wrapper[object]") -> Size:
    cached = function.cache_info()
    return Size("lru_cache", int(cached.currsize), cached.maxsize)


def _nested_in(collection: object) -> list[tuple[object, list[object]]]:
    """Returns collections in a collection, with their keys or places, of its first elements."""
    return [
        (key, cast("list[object]", part))
        for key, part in _parts_of(collection)
        if isinstance(part, _NESTED)
    ]


def _parts_of(collection: object) -> Iterator[tuple[object, object]]:
    """Returns keys or places of a collection with what is there, of its first elements."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(collection, dict):
        parts = collection.items()
    elif isinstance(collection, list | deque | tuple):
        parts = enumerate(collection)
    return itertools.islice(parts, _LOOKED_INTO + 1)


def _deep_length(collection: list[object], depth: int) -> int:
    """Returns how many elements are in a collection and in those in it."""
    length = len(collection)
    if depth <= _DEPTH:
        length += sum(_deep_length(part, depth + 1) for _, part in _nested_in(collection))
    return length


def _latest_of(collection: object) -> object:
    if isinstance(collection, dict):
        return next(reversed(collection.values()), None)
    if isinstance(collection, set):
        return next(iter(collection), None)
    if isinstance(collection, list | deque) and collection:
        return cast("list[object]", collection)[-1]
    return None


def _has_cache_info(value: object) -> bool:
    # Not getattr of the value: `ctypes.cdll` loads a library of that name.
    return callable(getattr(type(value), "cache_info", attributes_of(value).get("cache_info")))


def _log_handlers() -> Iterator[logging.Handler]:
    """Yields what writes the log of this process, some of which keeps all lines."""
    loggers: list[object] = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        # Names in between have no logger.
        if isinstance(logger, logging.Logger):
            yield from logger.handlers


def _owners(dataset: object) -> Iterator[object]:
    """Yields a dataset, or what a function is bound to, and the objects that these refer to."""
    roots = [dataset]
    if isinstance(dataset, functools.partial):
        roots = [dataset.func, *dataset.args, *dataset.keywords.values()]
    elif isinstance(dataset, MethodType):
        roots = [dataset.__self__, dataset.__func__]
    seen = set[int]()
    for root in roots:
        for item in reachable_from(root):
            # Into others the search did not look: of Python, of torch or long.
            is_open = bool(item.parts) and not issubclass(type(item.value), _NO_OWNERS)
            is_owner = is_open or item.value is root
            if is_owner and id(item.value) not in seen:
                seen.add(id(item.value))
                yield item.value


def _held_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # Not assigned yet.
            continue
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _modules_from(names: Iterable[str]) -> Iterator[ModuleType]:
    """Yields these modules, and those of the script that they import, or import something of."""
    waiting = deque(names)
    seen = set[str]()
    while waiting:
        name = waiting.popleft()
        module = sys.modules.get(name)
        if name in seen or module is None or _is_of_library(name):
            continue
        seen.add(name)
        yield module
        for value in attributes_of(module).values():
            other = _module_of(value)
            if is_users_name(other):
                waiting.append(other)


def _module_of(value: object) -> str:
    if type(value) is ModuleType:
        return value.__name__
    if isinstance(value, FunctionType | type | functools._lru_cache_wrapper):
        return str(value.__module__)
    return ""


def _is_of_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in ("torch", "torchvision", "datasets")


class Elements(NamedTuple):
    """Some elements of a collection, with the bytes that each keeps.

    Attributes:
        container: Type of the collection.
        length: Of the collection.
        num_candidates: Of how many elements these are some, read about as often as others.
        kept: The elements.
    """

    container: str
    length: int
    num_candidates: int
    kept: list[tuple[object, int]]


def elements_of(dataset: object, indices: Sequence[int]) -> dict[str, Elements]:
    """Returns some elements of each collection in a dataset's attributes, as they are now.

    Args:
        dataset: The dataset.
        indices: The first ones that will be read of it. Where a collection has elements for most of
            them, those are looked at.
    """
    by_name: dict[str, Elements] = {}
    for name, holder, collection in collections_of(dataset):
        length = len(cast("list[object]", collection))
        elements = _at(collection, indices)
        num_candidates = len(elements)
        if 2 * len(elements) < len(indices) or not elements:
            elements = some_of(collection)
            num_candidates = length
        if elements:
            kept = [(element, kept_bytes(element)) for element in elements]
            elements_now = Elements(type(holder).__name__, length, num_candidates, kept)
            by_name.setdefault(name, elements_now)
    return by_name


def _at(collection: object, indices: Sequence[int]) -> list[object]:
    if isinstance(collection, list | tuple | np.ndarray):
        return [collection[index] for index in indices if index < len(collection)]
    if isinstance(collection, dict):
        return [collection[index] for index in indices if index in collection]
    return []


def measured_again(before: Mapping[str, Elements]) -> dict[str, Elements]:
    """Returns the same elements with the bytes that each keeps now."""
    now = {}
    for name, elements in before.items():
        kept = [(element, kept_bytes(element)) for element, _ in elements.kept]
        now[name] = elements._replace(kept=kept)
    return now


def loaded_since(
    before: Mapping[str, Elements], half_way: Mapping[str, Elements], made: Stretch
) -> tuple[GrowingObjects, ...]:
    """Returns collections whose elements keep more than before, as files that were opened do.

    Args:
        before: Their elements as they were.
        half_way: The same ones then.
        made: Samples.
    """
    loaded = []
    for name, elements in before.items():
        share = _loaded_share(elements)
        read = min(1.0, made.all / elements.num_candidates)
        if share and share >= _LEAST_LOADED * read:
            # All were read several times, and each time they keep more.
            is_endless = (
                made.half_way >= _SEVERAL * elements.num_candidates
                and _loaded_share(half_way[name]) >= _LEAST_LOADED
            )
            loaded.append(
                GrowingObjects(
                    name=name,
                    container=elements.container,
                    count_per_sample=min(1.0, share / read),
                    max_count=None if is_endless else elements.length,
                    of_elements=True,
                )
            )
    return tuple(sorted(loaded, key=lambda growing: -growing.count_per_sample))


def _loaded_share(elements: Elements) -> float:
    """Returns the share of some elements that keep more now than when they were measured."""
    more = [
        kept_bytes(element) >= before + _LEAST_LOADED_BYTES for element, before in elements.kept
    ]
    return sum(more) / len(more)
