"""What a stream keeps in itself from epoch to epoch, given to a stream built anew."""

import array
import bz2
import contextlib
import csv
import datetime
import gzip
import hashlib
import io
import itertools
import lzma
import os
import queue
import random
import sqlite3
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from stoker.feed.kept_values import (
    as_changed,
    changed_values,
    live_iterator_in,
    script_changes,
    set_values,
    unkept,
    values_of,
)
from stoker.feed.seeding import states_here, values_in
from stoker.feed.shared_places import shared_places


class Stream(IterableDataset[object]):
    def __iter__(self) -> Iterator[object]:
        raise NotImplementedError


class OfClass(Stream):
    """It has no attribute before its first epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[object]:
        self.epoch += 1
        yield self.epoch


class Connected(Stream):
    """Connects at its first use, and has a place in what it reads."""

    connection: object = None

    def __init__(self) -> None:
        self.last_row = -1
        self.after = ""
        self.is_connected = False
        self.path = ""

    def __iter__(self) -> Iterator[object]:
        if not self.is_connected:
            self.connection, self.is_connected, self.path = object(), True, "data/rows.db"
        assert self.connection is not None
        self.last_row += 1
        self.after += "a"
        yield self.last_row, self.after, self.path


class OfReader(Stream):
    """A reader of the standard library counts its lines, which nobody may set."""

    def __init__(self) -> None:
        self.reader = csv.reader(["1,2", "3,4"])
        self.epoch = 0

    def __iter__(self) -> Iterator[object]:
        next(self.reader, None)
        self.epoch += 1
        yield self.epoch


def counting() -> Callable[[], int]:
    count = 0

    def next_count() -> int:
        nonlocal count
        count += 1
        return count

    return next_count


class OfClosure(Stream):
    def __init__(self) -> None:
        self.count = counting()

    def __iter__(self) -> Iterator[object]:
        yield self.count()


class Mixed(Stream):
    """A dictionary that is plain at first has something else later."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {"epoch": 0, "file": None}

    def __iter__(self) -> Iterator[object]:
        epoch = self.state["epoch"]
        assert isinstance(epoch, int)
        self.state |= {"epoch": epoch + 1, "file": object()}
        yield self.state["epoch"]


class OfLibrary(Stream):
    """A stage of a library, as webdataset's `detshuffle`, counts from -1."""

    def __init__(self) -> None:
        self.stage = Stage()

    def __iter__(self) -> Iterator[object]:
        self.stage.epoch += 1
        self.stage.is_open = True
        yield self.stage.epoch


class Stage:
    def __init__(self) -> None:
        self.epoch = -1
        self.fd = -1
        self.is_open = False


Stage.__module__ = "numpy"


class Part:
    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 0


class OfObjects(Stream):
    """Shuffles objects, counts in them, and holds one of them: more than a walk looks into."""

    def __init__(self) -> None:
        self.parts = [Part(number) for number in range(200)]
        self.turning = deque(Part(number) for number in range(5))
        self.todo = [Part(number) for number in range(5)]
        self.current = self.parts[0]

    def __iter__(self) -> Iterator[object]:
        self.current.epoch += 1
        self.current = self.parts[self.current.number + 1]
        random.Random(self.current.epoch).shuffle(self.parts)
        self.turning.rotate(2)
        self.todo.pop(1)
        yield from [(part.number, part.epoch) for part in self.parts]
        yield self.current.number, [part.number for part in (*self.turning, *self.todo)]


class Config(dict[str, int]):
    def __getattr__(self, name: str) -> int:
        return self[name]


class OfConfig(Stream):
    def __init__(self) -> None:
        self.config = Config(epoch=0)

    def __iter__(self) -> Iterator[object]:
        self.config["epoch"] += 1
        yield self.config.epoch


class OfRows(Stream):
    """A manifest: too many rows to be compared one by one."""

    def __init__(self) -> None:
        self.rows = [{"name": f"{number}.jpg", "label": number % 7} for number in range(3000)]

    def __iter__(self) -> Iterator[object]:
        random.Random(3).shuffle(self.rows)
        yield [row["name"] for row in self.rows]


class Phase(Enum):
    FIRST = 1
    SECOND = 2
    THIRD = 3


class Size(IntEnum):
    SMALL = 1
    LARGE = 2
    HUGE = 3


class Place(NamedTuple):
    file: int
    row: int


@dataclass(frozen=True)
class Offset:
    value: int


NOWHERE = Offset(0)


class Whole(int):
    """A number with a class of its own."""


class OfValues(Stream):
    """Values of small classes, each another one in each epoch."""

    def __init__(self) -> None:
        self.phase = Phase.FIRST
        self.size = Size.SMALL
        self.place = Place(0, 0)
        self.offset = NOWHERE
        self.whole = Whole(1)
        self.seen: frozenset[int] = frozenset()
        self.day = datetime.date(2026, 11, 28)
        self.length = datetime.timedelta()
        self.share = Fraction(1, 3)
        self.rate = Decimal("0.10")
        self.left = range(9)
        self.counts = array.array("l", [0])
        self.rng = np.random.default_rng(3)
        self.seeds = np.random.SeedSequence(5)

    def __iter__(self) -> Iterator[object]:
        self.phase = Phase(self.phase.value % 3 + 1)
        self.size = Size(self.size % 3 + 1)
        self.place = self.place._replace(row=self.place.row + 1)
        self.offset = Offset(self.offset.value + 1)
        self.whole = Whole(self.whole + 1)
        self.seen |= {int(self.whole)}
        self.day += datetime.timedelta(days=1)
        self.length += datetime.timedelta(seconds=1)
        self.share += Fraction(1, 7)
        self.rate *= 3
        self.left = self.left[1:]
        self.counts[0] += 1
        rngs = self.rng.spawn(2)
        rngs += [np.random.default_rng(seed) for seed in self.seeds.spawn(1)]
        yield [self.phase, self.size, self.place, self.offset, self.whole, self.seen, self.day]
        yield [self.length, self.share, self.rate, self.left, NOWHERE, self.counts[0]]
        yield [rng.integers(1 << 30) for rng in rngs]
        # The same ones for all of the process.
        yield [phase.value for phase in Phase], self.phase is Phase(self.phase.value)


class Files(list[Any]):
    """Containers of the user's may have code of their own, which is not asked."""

    def __setitem__(self, place: object, value: object) -> None:
        raise NotImplementedError

    def append(self, value: str) -> None:
        raise NotImplementedError


class Counts(Counter[int]):
    def clear(self) -> None:
        raise NotImplementedError


class Waiting(deque[int]):
    pass


class Ids(set[int]):
    pass


class OfContainers(Stream):
    """Containers of classes of the user's, and others within containers."""

    def __init__(self) -> None:
        self.files = Files(["a", "b", "c"])
        self.counts = Counts({3: 1})
        self.waiting = Waiting([1, 2], maxlen=3)
        self.ids = Ids()
        self.parts = Files([Part(0), Part(1), Part(2)])
        self.seen: list[set[int]] = [set(), set()]
        self.words: dict[str, Any] = {"a": Counter(), "b": OrderedDict(c=1, d=2)}
        self.names = np.array(["a", "b", "c"])
        self.days = np.array(["2026-11-28"], dtype="datetime64[D]")
        self.rows = np.zeros((2, 2), dtype=np.dtype([("at", "i4"), ("w", "f8", 2)], align=True))
        self.things = np.array([["a", 1], [None, 2.5]], dtype=object)
        self.pairs = np.empty(3, dtype=object)
        self.pairs[:] = [("a", 1), Path("b"), 3]
        # More parts than one of other lists may have.
        self.mixed = [None, *((n, "x") for n in range(9000))]

    def __iter__(self) -> Iterator[object]:
        list.append(self.files, f"{len(self.files)}")
        list.reverse(self.parts)
        self.counts[len(self.counts)] = self.counts[3]
        self.counts[3] += 1
        self.waiting.append(self.waiting[-1] + 1)
        self.ids.add(len(self.ids))
        self.seen[1].add(len(self.seen[1]))
        self.words["a"]["x"] += 1
        self.words["b"].move_to_end(next(iter(self.words["b"])))
        self.names = np.roll(self.names, 1)
        self.days += 1
        self.rows["at"][0, 1] += 1
        self.things[1] = self.things[0, ::-1].copy()
        self.pairs = np.roll(self.pairs, 1)
        self.mixed[self.mixed.index(None) + 1] = (0, str(self.rows["at"][0, 1]))
        yield list(self.files), dict(self.counts), list(self.waiting), sorted(self.ids)
        yield [part.number for part in self.parts], self.seen, self.words
        yield self.names.tolist(), str(self.days), type(self.files), self.waiting.maxlen
        yield str(self.rows), self.rows.dtype, self.things.tolist(), self.pairs.tolist()
        yield [*self.mixed]


class OfPlaces(Stream):
    """Paths, identifiers, and files in memory."""

    def __init__(self) -> None:
        self.path = Path("data/0.tar")
        self.next = (Path("a"), 0)
        self.todo = [Path(f"{number}.tar") for number in range(4)]
        self.at: dict[object, Any] = {"file": PurePosixPath("a"), Path("b"): 1}
        self.id = uuid.UUID(int=3)
        self.text = io.StringIO("a\nb\nc\nd\n")
        self.bytes = io.BytesIO()
        self.text.readline()

    def __iter__(self) -> Iterator[object]:
        self.path = self.path.with_name(f"{int(self.path.stem) + 1}.tar")
        self.next = (self.next[0] / "b", self.next[1] + 1)
        self.todo = [*self.todo[1:], self.todo[0].with_suffix(".x")]
        self.at["file"] /= "c"
        self.id = uuid.UUID(int=self.id.int + 1)
        self.bytes.write(b"x")
        yield self.path, self.next, self.todo, dict(self.at), self.id
        yield self.text.readline(), self.bytes.getvalue()


EPOCHS = 0
SEEN: list[int] = []
FACTS = {"epoch": 0}


def counted(counts: dict[str, int] = {"n": 0}) -> int:  # noqa: B006
    counts["n"] += 1
    function: Any = counted
    function.calls = getattr(function, "calls", 0) + 1
    return counts["n"] + 100 * int(function.calls)


class OfCode(Stream):
    """What its methods and their functions keep outside of it."""

    def drawn(self, seen: list[int] = [], *, names: set[int] = set()) -> object:  # noqa: B006
        seen.append(len(seen))
        names.add(len(names))
        return list(seen), sorted(names)

    def __iter__(self) -> Iterator[object]:
        global EPOCHS
        EPOCHS += 1
        SEEN.append(EPOCHS)
        FACTS["epoch"] += 1
        yield EPOCHS, list(SEEN), dict(FACTS), counted(), self.drawn()


@contextlib.contextmanager
def fresh_code() -> Iterator[None]:
    """Has globals and default arguments be as in a new process."""
    global EPOCHS
    EPOCHS = 0
    SEEN.clear()
    FACTS["epoch"] = 0
    drawn: Any = OfCode.drawn
    drawn.__defaults__[0].clear()
    drawn.__kwdefaults__["names"].clear()
    function: Any = counted
    function.__defaults__[0]["n"] = 0
    counted.__dict__.clear()
    yield


def test_what_code_keeps_outside_of_a_stream_goes_on(monkeypatch):
    info = WorkerInfo(id=0, num_workers=1, seed=1, dataset=Stream())
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", info)
    with fresh_code():
        stream = OfCode()
        roots = {"dataset": stream}
        since = values_of(roots)
        for _ in range(2):
            list(stream)
        packed = states_here(roots, values=changed_values(roots, since=since))
        expected = list(stream)
    with fresh_code():
        anew = {"dataset": OfCode()}
        set_values(anew, values_in(packed), since=values_of(anew))
        assert list(anew["dataset"]) == expected


def test_in_the_scripts_process_only_what_methods_set_is_of_the_stream():
    with fresh_code():
        stream = OfCode()
        since = values_of({"dataset": stream})
        list(stream)
        changes = changed_values({"dataset": stream}, since=since)
        globals_kept = [path for path in changes if path.startswith("globals")]
        assert [path.rpartition(".")[2] for path in globals_kept] == ["EPOCHS"]


def test_of_a_librarys_object_neither_handles_nor_truth_values_are_kept():
    stream = OfLibrary()
    since = values_of({"dataset": stream})
    list(stream)
    stream.stage.fd = 7
    assert changed_values({"dataset": stream}, since=since) == {"dataset.stage.epoch": 0}


class OfPoints(Stream):
    """A Sobol sequence, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.points = torch.quasirandom.SobolEngine(2, scramble=True, seed=3)

    def __iter__(self) -> Iterator[object]:
        for _ in range(3):
            yield self.points.draw(1).tolist()


class OfOneList(Stream):
    """What is written to one of two attributes is in the other."""

    def __init__(self) -> None:
        self.files = [*range(9)]
        self.order = self.files

    def __iter__(self) -> Iterator[object]:
        random.Random(1).shuffle(self.order)
        self.order.append(len(self.order))
        yield from self.files


class OfPartedLists(Stream):
    """They are one as the dataset is built, and two from the first epoch on."""

    def __init__(self) -> None:
        self.files = [*range(9)]
        self.order = self.files

    def __iter__(self) -> Iterator[object]:
        self.order = random.Random(self.order[0]).sample(self.order, 9)
        yield from zip(self.files, self.order, strict=True)


class OfEqualLists(Stream):
    """They have parted, and are equal: what is written to one later is not in the other."""

    def __init__(self) -> None:
        self.files = [2, 1, 0]
        self.order = self.files

    def __iter__(self) -> Iterator[object]:
        if self.order is self.files:
            self.order = [*self.files]
        else:
            self.order.append(7)
        yield from (self.files, self.order)


class OfJoinedLists(Stream):
    """They are two as the dataset is built, and one from the first epoch on."""

    def __init__(self) -> None:
        self.best = [0]
        self.latest = [0]

    def __iter__(self) -> Iterator[object]:
        self.latest.append(len(self.latest))
        self.best = self.latest
        yield from [*self.best]


class OfPartsOfOthers(Stream):
    """Places within containers have what an attribute has, or another place."""

    def __init__(self) -> None:
        self.rows = [0, 1, 2]
        self.by_name = {"train": self.rows, "test": [9]}
        self.pair = [self.by_name["test"], self.by_name["test"]]
        self.deep = deque([[[self.rows]]])

    def __iter__(self) -> Iterator[object]:
        self.by_name["train"][1] += 3
        self.pair[1][0] += 1
        self.deep[0][0][0][2] += 5
        yield from (*self.rows, *self.by_name["test"], *self.pair[0])


class OfPartedParts(Stream):
    """A place within a dictionary has had what an attribute has."""

    def __init__(self) -> None:
        self.seen = [0]
        self.by_name = {"train": self.seen}

    def __iter__(self) -> Iterator[object]:
        self.by_name["train"] = [self.by_name["train"][0] + 1]
        yield from (self.seen[0], self.by_name["train"][0])


class OfArrays(Stream):
    """Two names of an array, a view of another one, two of a tensor, and two that part."""

    def __init__(self) -> None:
        self.order = self.places = np.arange(9)
        self.rows = np.arange(12)
        self.behind = self.rows[3:]
        self.weights = self.counts = torch.arange(4)
        self.first = self.latest = np.arange(5)

    def __iter__(self) -> Iterator[object]:
        np.random.default_rng(1).shuffle(self.order)
        np.random.default_rng(2).shuffle(self.behind)
        self.weights.add_(1)
        self.latest = np.random.default_rng(int(self.latest[0])).permutation(self.first)
        arrays = (self.places, self.rows, self.counts, self.first, self.latest)
        yield from (array.tolist() for array in arrays)


KINDS = [OfClass, Connected, OfReader, OfClosure, Mixed, OfLibrary, OfConfig]
KINDS += [OfObjects, OfRows, OfValues, OfContainers, OfPlaces, OfPoints]
KINDS += [OfOneList, OfPartedLists, OfEqualLists, OfJoinedLists, OfPartsOfOthers]
KINDS += [OfPartedParts, OfArrays]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_stream_built_anew_goes_on(kind, epochs):
    stream = kind()
    roots = {"dataset": stream}
    since = values_of(roots)
    for _ in range(epochs):
        list(stream)
    packed = states_here(roots, values=changed_values(roots, since=since))
    assert not unkept(roots, since=since)
    anew = {"dataset": kind()}
    set_values(anew, values_in(packed), since=values_of(anew))
    for _ in range(2):
        assert list(anew["dataset"]) == list(stream)


class Keeping(Stream):
    def __init__(self, kept: object) -> None:
        self.kept = kept


@pytest.mark.parametrize(
    ("kept", "is_live"),
    [
        (itertools.cycle([1, 2]), True),
        (itertools.count(), True),
        ((number for number in range(3)), True),
        (map(str, iter([1, 2])), True),
        (enumerate(number for number in range(3)), True),
        (iter([1]), True),
        ([iter([1])], True),
        ((iter([]), 1), False),
        (itertools.product([1]), True),
        (itertools.tee([])[1], True),
        (itertools.accumulate(iter([1])), True),
        (itertools.accumulate(iter([])), False),
        (itertools.zip_longest(iter([]), iter([1])), True),
        (iter(()), False),
        (map(str, iter([])), False),
        (range(3), False),
        ([1, 2], False),
    ],
)
def test_an_iterator_that_has_more_is_noticed(kept, is_live):
    assert bool(live_iterator_in({"dataset": Keeping(kept)})) == is_live


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
@pytest.mark.parametrize("mode", ["r", "rb"])
def test_a_file_that_is_read_on_is_said(place, mode):
    with Path(__file__).open(mode) as file:
        stream = Keeping(file)
        roots = {"dataset": stream}
        since = values_of(roots)
        if place == "middle":
            next(file)
        elif place == "end":
            list(file)
        assert ("dataset.kept is a file that is read on" in unkept(roots, since=since)) == (
            place == "middle"
        )


@pytest.mark.parametrize(
    "rows_of",
    [csv.reader, csv.DictReader, enumerate, lambda file: map(str.strip, file)],
)
def test_rows_that_are_read_on_from_a_file_are_noticed(rows_of):
    with Path(__file__).open() as file:
        rows = rows_of(file)
        roots = {"dataset": Keeping(rows)}
        next(rows)
        assert live_iterator_in(roots).startswith("dataset.kept")
        for _ in rows:
            pass
        assert not live_iterator_in(roots)


def test_rows_of_a_cursor_are_noticed():
    connection = sqlite3.connect(":memory:")
    with contextlib.closing(connection):
        rows = connection.execute("values (1), (2), (3)")
        roots = {"dataset": Keeping(rows)}
        next(rows)
        assert live_iterator_in(roots) == "dataset.kept"
        for _ in rows:
            pass
        assert not live_iterator_in(roots)


def test_a_folder_that_is_read_on_is_noticed(tmp_path):
    with os.scandir(tmp_path) as entries:
        assert live_iterator_in({"dataset": Keeping(entries)}) == "dataset.kept"


def test_a_counter_that_has_not_changed_is_put_nowhere():
    stream = Keeping(Counter(a=1, b=2))
    roots = {"dataset": stream}
    since = values_of(roots)
    assert changed_values(roots, since=since) == {}
    with as_changed(roots, {}, since=since):
        assert stream.kept == Counter(a=1, b=2)


def test_a_dictionary_of_more_parts_than_a_state_may_have_is_said():
    kept = Counter({Path(str(number)): 0 for number in range(5000)})
    roots = {"dataset": Keeping(kept)}
    since = values_of(roots)
    assert not unkept(roots, since=since)
    kept[Path("3")] += 1
    assert changed_values(roots, since=since) == {}
    assert "dataset.kept has changed" in unkept(roots, since=since)


@pytest.mark.parametrize("opened", [gzip.open, bz2.open, lzma.open])
@pytest.mark.parametrize("mode", ["rt", "rb"])
def test_a_compressed_file_that_is_read_on_is_said(tmp_path, opened, mode):
    path = tmp_path / "rows"
    with opened(path, "wt") as file:
        file.write("row\n" * 5000)
    with opened(path, mode) as file:
        roots = {"dataset": Keeping(file)}
        since = values_of(roots)
        file.readline()
        assert "dataset.kept is a file that is read on" in unkept(roots, since=since)
        file.read()
        assert not unkept(roots, since=since)


@pytest.mark.parametrize("kept", [hashlib.sha256(), hashlib.shake_128(), queue.SimpleQueue()])
def test_what_no_state_can_hold_is_said(kept):
    roots = {"dataset": Keeping(kept)}
    since = values_of(roots)
    assert not unkept(roots, since=since)
    change = kept.put if isinstance(kept, queue.SimpleQueue) else kept.update
    change(b"a")
    assert "dataset.kept, a " in unkept(roots, since=since)
    roots["dataset"].kept = type(kept)() if isinstance(kept, queue.SimpleQueue) else kept.copy()
    assert not unkept(roots, since=since)


def test_places_are_compared_of_as_many_containers_as_can_be_looked_at():
    row = [0]
    many = [[number] for number in range(10_000)]
    assert shared_places([("dataset.rows", [row, row])]) == [
        [["dataset.rows", 0], ["dataset.rows", 1]]
    ]
    assert shared_places([("dataset.rows", [row, row]), ("dataset.many", many)]) is None


def test_without_a_change_no_state_says_which_places_have_one_list():
    stream = OfOneList()
    roots = {"dataset": stream}
    since = values_of(roots)
    assert changed_values(roots, since=since) == {}


def test_a_state_of_an_earlier_version_fills_a_list_under_both_of_its_names():
    stream = OfOneList()
    roots = {"dataset": stream}
    set_values(roots, {"dataset.order": [2, 1, 0]}, since=values_of(roots))
    assert stream.order is stream.files
    assert stream.files == [2, 1, 0]


def test_a_list_that_is_too_long_to_be_kept_is_said():
    stream = Keeping([1])
    roots = {"dataset": stream}
    since = values_of(roots)
    stream.kept = list(range(90_000))
    assert changed_values(roots, since=since) == {}
    assert "dataset.kept has changed, and has 720,002 bytes" in unkept(roots, since=since)


def test_what_a_script_has_set_is_put_back_and_the_same_objects_are_there_again():
    items = [3, 1, 2]
    stream = Keeping(items)
    roots = {"dataset": stream}
    made = values_of(roots)
    items.sort()
    at_start = script_changes(roots, since=made)
    items.reverse()
    with as_changed(roots, at_start, since=made):
        assert stream.kept is items
        assert items == [1, 2, 3]
    assert items == [3, 2, 1]
