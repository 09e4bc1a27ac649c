"""What grows of a dataset and of a script's modules is found wherever a script keeps it."""

import functools
import io
import itertools
import logging
import logging.handlers
import queue
import random
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from stoker.profile.loader_phases import TaskSource
from stoker.profile.memory.growing_objects import (
    Stretch,
    elements_of,
    grown_between,
    loaded_since,
    sizes_of,
)
from stoker.profile.memory.watch import ObjectsGrowth

SAMPLES = 200


class Made(Dataset[object]):
    """A dataset whose samples a function makes."""

    def __init__(self, make: Callable[[int], object]) -> None:
        self.source = make

    def __getitem__(self, index: int) -> object:
        return self.source(index)


def growing_of(dataset: Any, *, samples: int = SAMPLES) -> list[Any]:
    before = sizes_of(dataset)
    for index in range(samples):
        dataset[index]
    return list(grown_between(before, sizes_of(dataset), samples=samples))


HELPERS = """
import functools

CACHE = {}


def cached(index):
    return CACHE.setdefault(index, [index])


@functools.lru_cache(maxsize=None)
def remembered(index):
    return [index]


def memoize(function):
    kept = {}

    @functools.wraps(function)
    def wrapper(index):
        if index not in kept:
            kept[index] = function(index)
        return kept[index]

    return wrapper


@memoize
def wrapped(index):
    return [index]


def with_default(index, kept={}):
    return kept.setdefault(index, [index])


class Reader:
    opened = {}

    def read(self, index):
        return self.opened.setdefault(index, [index])


def read(index):
    return Reader().read(index)
"""


class ReadsByHelpers(Dataset[object]):
    """Calls a function of another module of the script, by that function's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: int) -> object:
        return getattr(sys.modules["own_helpers"], self.name)(index)


@pytest.fixture
def helpers(tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """A module of the script beside the one of its dataset."""
    (tmp_path / "own_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_helpers", raising=False)
    import own_helpers

    monkeypatch.setattr(sys.modules[__name__], "own_helpers", own_helpers, raising=False)
    yield own_helpers
    monkeypatch.delitem(sys.modules, "own_helpers")


@pytest.mark.parametrize(
    ("function", "name", "container"),
    [
        ("cached", "own_helpers.CACHE", "dict"),
        ("remembered", "own_helpers.remembered", "lru_cache"),
        ("wrapped", "kept of own_helpers.wrapped()", "dict"),
        ("with_default", "kept of own_helpers.with_default()", "dict"),
        ("read", "own_helpers.Reader.opened", "dict"),
    ],
    ids=["variable", "lru_cache", "closure", "default argument", "class attribute"],
)
def test_what_grows_in_another_module_of_the_script_is_named(helpers, function, name, container):
    (growing,) = growing_of(ReadsByHelpers(function))
    assert (growing.name, growing.container) == (name, container)


class ByClass(Dataset[object]):
    """Keeps what it has seen by its class, as of statistics."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.seen: dict[int, list[int]] = defaultdict(list)
        for number in range(num_classes):
            self.seen[number] = []

    def __getitem__(self, index: int) -> int:
        self.seen[index % self.num_classes].append(index)
        return index


def test_lists_within_a_dict_are_named():
    (growing,) = growing_of(ByClass(1))
    assert (growing.name, growing.container) == ("ByClass.seen[0]", "list")
    (growing,) = growing_of(ByClass(100))
    assert (growing.name, growing.container) == ("ByClass.seen[...]", "list")
    assert growing.count_per_sample == pytest.approx(1)


class ListsByIndex(Dataset[object]):
    def __init__(self) -> None:
        self.cache: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> object:
        return self.cache.setdefault(index, [1, 2, 3])


def test_a_cache_of_lists_is_named_once_and_by_itself():
    (growing,) = growing_of(ListsByIndex())
    assert (growing.name, growing.count_per_sample) == ("ListsByIndex.cache", 1)


class Bounded(MutableMapping[int, object]):
    """A cache with a limit, as cachetools has them."""

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self._kept: OrderedDict[int, object] = OrderedDict()

    def __getitem__(self, key: int) -> object:
        return self._kept[key]

    def __setitem__(self, key: int, value: object) -> None:
        self._kept[key] = value
        while len(self._kept) > self.maxsize:
            self._kept.popitem(last=False)

    def __delitem__(self, key: int) -> None:
        del self._kept[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class OwnMapping(Dataset[object]):
    def __init__(self, maxsize: int) -> None:
        self.pages = Bounded(maxsize)

    def __getitem__(self, index: int) -> object:
        return self.pages.setdefault(index, [index])


def test_a_mapping_that_is_no_dict_is_named_with_its_limit():
    (growing,) = growing_of(OwnMapping(1000))
    assert (growing.name, growing.container, growing.max_count) == (
        "OwnMapping.pages",
        "Bounded",
        1000,
    )
    # A small cache is full at once.
    assert growing_of(OwnMapping(10)) == []


def collate_of() -> Callable[[object], object]:
    batches: list[object] = []

    def collate(samples: object) -> object:
        batches.append(samples)
        return samples

    return collate


class Collator:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def collate(self, samples: list[int]) -> int:
        self.lengths.append(len(samples))
        return len(samples)


def keeping(samples: object, kept: list[object]) -> object:
    kept.append(samples)
    return samples


@pytest.mark.parametrize(
    ("collate", "name"),
    [
        (collate_of(), "batches of collate()"),
        (Collator().collate, "Collator.lengths"),
        (functools.partial(keeping, kept=[]), "kept of keeping()"),
    ],
    ids=["closure", "method", "partial"],
)
def test_what_a_collate_function_keeps_is_named(collate, name):
    before = sizes_of(collate)
    for number in range(SAMPLES):
        collate([number])
    (growing,) = grown_between(before, sizes_of(collate), samples=SAMPLES)
    assert growing.name == name


class Pictures(Dataset[object]):
    """Opens all its files at the start, and leaves them open."""

    def __init__(self, folder: Any, count: int) -> None:
        file = folder / "picture.png"
        Image.fromarray(np.zeros((64, 48, 3), dtype=np.uint8)).save(file)
        self.images = [Image.open(file) for _ in range(count)]

    def __getitem__(self, index: int) -> object:
        return np.asarray(self.images[index])


class Episode:
    def __init__(self) -> None:
        self.frames: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self.frames is None:
            self.frames = torch.zeros(5000)
        return self.frames


class Episodes(Dataset[object]):
    def __init__(self, count: int) -> None:
        self.episodes = [Episode() for _ in range(count)]

    def __getitem__(self, index: int) -> object:
        return self.episodes[index].read().clone()


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("indices", [range(256), ()], ids=["that are read", "from all over"])
@pytest.mark.parametrize("case", ["Pictures.images", "Episodes.episodes"])
def test_elements_that_keep_what_they_have_read_are_named(case, indices, tmp_path):
    dataset: Any = Episodes(1000)
    if case.startswith("Pictures"):
        dataset = Pictures(tmp_path, 1000)
    sizes, elements = sizes_of(dataset), elements_of(dataset, indices)
    for index in range(SAMPLES):
        dataset[index]
    assert grown_between(sizes, sizes_of(dataset), samples=SAMPLES) == ()
    (growing,) = loaded_since(elements, elements, Stretch(0, SAMPLES))
    assert (growing.name, growing.container, growing.max_count) == (case, "list", 1000)
    assert growing.of_elements
    assert growing.count_per_sample == pytest.approx(1, abs=0.1)


def test_elements_that_are_only_read_are_not_named():
    dataset: Any = Made(lambda index: index)
    dataset.rows = [{"path": f"/data/{index}", "box": [index]} for index in range(1000)]
    elements = elements_of(dataset, ())
    assert list(elements) == ["Made.rows"]
    for row in dataset.rows:
        dict(row)
    assert loaded_since(elements, elements, Stretch(0, 1000)) == ()


class Source:
    """A loader's dataset and collate function in a worker, as a profile hands them over."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.collate = list
        self.indices = [list(range(start, start + 50)) for start in range(0, 10_000, 50)]


def test_elements_are_named_where_no_collection_grows():
    # Of so many, few are read: those that will be are looked at.
    source: Any = Source(dataset := Episodes(100_000))
    growth = ObjectsGrowth(source, iter(()))
    for index in range(SAMPLES):
        dataset[index]
    growth.made(SAMPLES)
    (growing,) = growth.growing()
    assert growing.name == "Episodes.episodes"


LOOKS = 20


def growing_to_the_end(dataset: Any, *, samples: int = SAMPLES) -> list[Any]:
    """Returns what grows of a dataset that a worker looks at as it makes samples."""
    source: Any = Source(dataset)
    growth = ObjectsGrowth(source, iter(()))
    for index in range(samples):
        dataset[index]
        growth.made(index + 1)
        if (index + 1) % (samples // LOOKS) == 0:
            growth.look()
    return list(growth.growing())


class Keeps(Dataset[object]):
    """Keeps something of each sample, as a function does it.

    Args:
        keep: Is called with this dataset, whose attributes are its own, and an index.
        kept: What it keeps, at the start.
        others: Other attributes.
    """

    def __init__(self, keep: Callable[[Any, int], object], kept: object, **others: object) -> None:
        self.keep = keep
        self.kept = kept
        vars(self).update(others)

    def __getitem__(self, index: int) -> int:
        self.keep(self, index)
        return index


def remembering(maxsize: int | None) -> Callable[[int], list[int]]:
    @functools.lru_cache(maxsize=maxsize)
    def load(index: int) -> list[int]:
        return [index]

    return load


def evicts(dataset: Any, index: int) -> None:
    dataset.kept[index] = [index]
    if len(dataset.kept) > SAMPLES // 4:
        del dataset.kept[next(iter(dataset.kept))]


def evicts_of_a_list(dataset: Any, index: int) -> None:
    dataset.kept.append(index)
    if len(dataset.kept) > SAMPLES // 4:
        del dataset.kept[0]


@pytest.mark.parametrize(
    "dataset",
    [
        Keeps(lambda dataset, index: dataset.kept(index), remembering(SAMPLES // 2)),
        Keeps(evicts, {}),
        Keeps(evicts, OrderedDict()),
        Keeps(evicts_of_a_list, []),
        Keeps(lambda dataset, index: dataset.kept.append(index), deque(maxlen=SAMPLES // 3)),
        Keeps(lambda dataset, index: dataset.kept.add(index % 60), set()),
        Keeps(lambda dataset, index: dataset.kept.update({index % 60: index}), Counter()),
        Keeps(lambda dataset, index: setattr(dataset, "kept", torch.zeros(1000)), torch.zeros(0)),
    ],
    ids=["lru_cache", "dict", "OrderedDict", "list", "deque", "classes", "counts", "buffer"],
)
def test_what_has_filled_up_does_not_grow(dataset):
    assert growing_to_the_end(dataset) == []


@pytest.mark.parametrize(
    "dataset",
    [
        Keeps(lambda dataset, index: dataset.kept(index), remembering(10 * SAMPLES)),
        Keeps(lambda dataset, index: dataset.kept.append(index), deque(maxlen=10 * SAMPLES)),
        Keeps(
            lambda dataset, index: dataset.kept.update({index: index}),
            {},
            _cache_size=10 * SAMPLES,
        ),
    ],
    ids=["lru_cache", "deque", "attribute"],
)
def test_what_is_not_full_yet_is_said_with_its_limit(dataset):
    (growing,) = growing_to_the_end(dataset)
    assert growing.max_count == 10 * SAMPLES
    assert growing.is_bounded


def test_a_number_that_a_collection_has_passed_is_not_its_limit():
    dataset = Keeps(lambda dataset, index: dataset.kept.append(index), [], buffer_size=20)
    (growing,) = growing_to_the_end(dataset)
    assert growing.max_count is None


class Seen:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


def joins(dataset: Any, index: int) -> None:
    dataset.kept = torch.cat([dataset.kept, torch.ones(500)])


def joins_in(key: Any) -> Callable[[Any, int], None]:
    def join(dataset: Any, index: int) -> None:
        if key == "x":
            dataset.kept.setdefault("x", torch.zeros(0))
        dataset.kept[key] = torch.cat([dataset.kept[key], torch.ones(500)])

    return join


def joins_by_class(dataset: Any, index: int) -> None:
    label = index % 30
    dataset.kept[label] = np.append(dataset.kept.get(label, np.zeros(0)), np.ones(500))


def test_a_table_that_rows_are_added_to_is_named():
    pandas = pytest.importorskip("pandas")

    def add(dataset: Any, index: int) -> None:
        dataset.kept = pandas.concat([dataset.kept, pandas.DataFrame({"row": [index] * 50})])

    (growing,) = growing_to_the_end(Keeps(add, pandas.DataFrame({"row": []})))
    assert (growing.name, growing.container, growing.count_per_sample) == (
        *("Keeps.kept", "DataFrame"),
        50,
    )


class InASlot:
    __slots__ = ("cache",)

    def __init__(self) -> None:
        self.cache: dict[int, object] = {}


def by_function(dataset: Any, index: int) -> None:
    vars(by_function)["cache"][index] = index


vars(by_function)["cache"] = {}


def thread_local() -> threading.local:
    local = threading.local()
    local.cache = {}
    return local


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (
            Keeps(lambda dataset, index: dataset.kept.cache.update({index: 1}), InASlot()),
            "InASlot.cache",
        ),
        (Keeps(by_function, None), "Keeps.keep.cache"),
        (
            Keeps(lambda dataset, index: dataset.kept.cache.update({index: 1}), thread_local()),
            "Keeps.kept.cache",
        ),
    ],
    ids=["slot", "function", "thread"],
)
def test_a_cache_is_named_in_a_slot_of_a_function_and_of_a_thread(dataset, name):
    (growing,) = growing_to_the_end(dataset)
    assert (growing.name, growing.container) == (name, "dict")


@pytest.mark.parametrize("where", ["attribute", "dict", "list"])
def test_the_latest_of_something_does_not_grow_however_large_it_is(where):
    def keep(dataset: Any, index: int) -> None:
        # Larger in the end than half-way, and smaller once.
        latest = np.zeros(1000 * (index if index < SAMPLES * 0.8 else SAMPLES - index))
        dataset.kept = latest
        if where == "dict":
            dataset.kept = {"image": latest, "mask": latest}
        elif where == "list":
            dataset.kept = [latest]

    def looked_at_last(dataset: Any, index: int) -> None:
        keep(dataset, index if index < SAMPLES - 1 else SAMPLES * 3 // 4)

    assert growing_to_the_end(Keeps(looked_at_last, None)) == []


def test_a_list_that_is_emptied_now_and_then_does_not_grow():
    chance = random.Random(5)

    def keep(dataset: Any, index: int) -> None:
        dataset.kept.append(index)
        if len(dataset.kept) > chance.randrange(30, 100):
            dataset.kept.clear()

    for _ in range(20):
        assert growing_to_the_end(Keeps(keep, [])) == []


def test_arrays_that_are_added_to_a_dict_slowly_are_not_longer_ones():
    def keep(dataset: Any, index: int) -> None:
        dataset.kept.setdefault(index // 20, np.zeros(10_000))

    assert growing_to_the_end(Keeps(keep, {})) == []


@pytest.mark.parametrize(
    ("dataset", "name", "container"),
    [
        (
            Keeps(
                lambda dataset, index: dataset.kept[index % 8][index % 3].append(index),
                {place: {inner: [] for inner in range(3)} for place in range(8)},
            ),
            *("Keeps.kept[...]", "dict"),
        ),
        (
            Keeps(
                lambda dataset, index: dataset.kept["train"]["loss"].append(index),
                {"train": {"loss": [], "hits": []}, "rest": {}},
            ),
            *("Keeps.kept['train']['loss']", "list"),
        ),
        (
            Keeps(
                lambda dataset, index: dataset.kept[index % 12].append(index),
                [[] for _ in range(12)],
            ),
            *("Keeps.kept[...]", "list"),
        ),
        (Keeps(joins, torch.zeros(0)), "Keeps.kept", "Tensor"),
        (
            Keeps(lambda dataset, index: dataset.kept.write(bytes(3000)), io.BytesIO()),
            *("Keeps.kept", "BytesIO"),
        ),
        (Keeps(joins_in("x"), {"x": torch.zeros(0)}), "Keeps.kept['x']", "Tensor"),
        (Keeps(joins_in("x"), {}), "Keeps.kept['x']", "Tensor"),
        (Keeps(joins_in(0), [torch.zeros(0)]), "Keeps.kept[0]", "Tensor"),
        (Keeps(joins_by_class, {}), "Keeps.kept[...]", "ndarray"),
        (
            Keeps(lambda dataset, index: dataset.kept["a"].extend(bytes(500)), {"a": bytearray()}),
            *("Keeps.kept['a']", "bytearray"),
        ),
        (
            Keeps(lambda dataset, index: dataset.kept[0].append(index), ([], [])),
            *("Keeps.kept[0]", "list"),
        ),
        (
            Keeps(lambda dataset, index: dataset.kept.write("a line of it\n" * 20), io.StringIO()),
            *("Keeps.kept", "StringIO"),
        ),
        (
            Keeps(lambda dataset, index: dataset.kept.put(index), queue.Queue()),
            "Keeps.kept",
            "Queue",
        ),
        (
            Keeps(lambda dataset, index: dataset.kept.put(index), queue.SimpleQueue()),
            *("Keeps.kept", "SimpleQueue"),
        ),
        (
            Keeps(lambda dataset, index: dataset.kept["a"].put(index), {"a": queue.LifoQueue()}),
            *("Keeps.kept['a']", "LifoQueue"),
        ),
    ],
    ids=[
        *("dicts in a dict", "one of them", "twelve lists", "joined", "file in memory"),
        *("joined in a dict", "made there", "in a list", "by class", "bytearray in a dict"),
        *("tuple of lists", "text", "queue", "simple queue", "queue in a dict"),
    ],
)
def test_what_grows_deep_in_a_dataset_is_named(dataset, name, container):
    (growing,) = growing_to_the_end(dataset)
    assert (growing.name, growing.container) == (name, container)
    # Not those of a collection in which it is.
    assert growing.element_bytes < 50


def test_objects_that_keep_more_each_time_have_no_limit():
    dataset = Keeps(
        lambda dataset, index: dataset.kept[index % 70].seen.append(torch.ones(5000)),
        [Seen() for _ in range(70)],
    )
    (growing,) = growing_to_the_end(dataset, samples=500)
    assert (growing.name, growing.of_elements, growing.max_count) == ("Keeps.kept", True, None)
    # Those that are read once keep no more than they read.
    (growing,) = growing_to_the_end(Episodes(100), samples=100)
    assert growing.max_count == 100


def test_lists_of_several_objects_are_added_up():
    dataset = Keeps(
        lambda dataset, index: dataset.kept[index % 20].seen.append(index),
        [Seen() for _ in range(20)],
    )
    (growing,) = growing_to_the_end(dataset)
    assert (growing.name, growing.count_per_sample) == ("Seen.seen", 1)


def test_what_takes_most_is_named_first():
    dataset = Keeps(
        lambda dataset, index: (dataset.ids.append(index), dataset.kept.append(bytes(9000))),
        [],
        ids=[],
    )
    assert [growing.name for growing in growing_to_the_end(dataset)] == ["Keeps.kept", "Keeps.ids"]


class Stream:
    """A stream with a variable of each generator that its samples go through.

    Args:
        buffer_size: Of what is shuffled; it grows by a sample for each that is given on.
    """

    def __init__(self, buffer_size: int, *, keeps: bool = False) -> None:
        self.buffer_size = buffer_size
        self.keeps = keeps

    def read(self) -> Iterator[int]:
        lines: list[int] = []
        for line in itertools.count():
            if self.keeps:
                lines.append(line)
            yield line

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        lines = map(int, self.read())
        for line in lines:
            buffer.append(line)
            if len(buffer) < self.buffer_size:
                buffer.append(next(lines))
            yield buffer.pop(0)


@pytest.mark.parametrize(
    ("stream", "names"),
    [
        (Stream(10**6), ["buffer in __iter__()"]),
        (Stream(1, keeps=True), ["lines in read()"]),
        (Stream(1), []),
    ],
    ids=["a buffer that fills", "a generator below", "nothing"],
)
def test_what_a_streams_generators_keep_is_named(stream, names):
    source: Any = TaskSource(
        dataset=stream,
        collate=repr,
        indices=range(50),
        is_stream=True,
        is_batched=True,
        batch_size=4,
    )
    samples = source.samples()
    growth = ObjectsGrowth(source, samples)
    for number, _ in enumerate(samples, start=1):
        growth.made(4 * number)
        growth.look()
    growing = growth.growing()
    assert [grown.name for grown in growing] == names
    assert all(grown.is_of_a_stream for grown in growing)


class Logs(Dataset[object]):
    """Logs each sample, to a handler that keeps all of them."""

    def __init__(self, log: logging.Logger) -> None:
        self.log = log

    def __getitem__(self, index: int) -> int:
        self.log.info("sample %d", index)
        return index


@pytest.fixture
def kept_log() -> Iterator[logging.Logger]:
    log = logging.getLogger("of a dataset that logs")
    handler = logging.handlers.MemoryHandler(capacity=10**6)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield log
    handler.buffer.clear()
    log.removeHandler(handler)


def test_a_handler_that_keeps_the_log_is_named(kept_log):
    # What collects the log of a test keeps it, too.
    named = {growing.name: growing.container for growing in growing_of(Logs(kept_log))}
    assert named["MemoryHandler.buffer"] == "list"


class ByMethod(Dataset[object]):
    """Loads by a method that remembers all that it has loaded."""

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033  # As people write it.
    def load(self, index: int) -> list[int]:
        return [index]

    def __getitem__(self, index: int) -> object:
        return self.load(index)


def test_the_cache_of_a_method_is_named():
    (growing,) = growing_of(ByMethod())
    assert (growing.name, growing.container) == ("ByMethod.load", "lru_cache")


class OpenFiles(Dataset[object]):
    """Opens the file of each sample, and leaves it open."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.opened: dict[int, Any] = {}

    def __getitem__(self, index: int) -> object:
        if index not in self.opened:
            self.opened[index] = self.file.open("rb")
        return self.opened[index].read(1)


def test_files_that_are_left_open_are_named(tmp_path):
    file = tmp_path / "sample"
    file.write_bytes(b"1")
    dataset = OpenFiles(file)
    try:
        (growing,) = growing_of(dataset, samples=50)
        assert growing.name == "OpenFiles.opened"
    finally:
        for opened in dataset.opened.values():
            opened.close()


class Tables(Dataset[object]):
    """Keeps each table of pyarrow that it has read."""

    def __init__(self) -> None:
        self.tables: dict[int, object] = {}

    def __getitem__(self, index: int) -> object:
        arrow = pytest.importorskip("pyarrow")
        return self.tables.setdefault(index, arrow.table({"row": [index]}))


def test_tables_of_pyarrow_that_are_kept_are_named():
    (growing,) = growing_of(Tables(), samples=50)
    assert (growing.name, growing.container) == ("Tables.tables", "dict")
