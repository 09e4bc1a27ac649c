"""An iterable dataset resumes in mid-epoch with the bytes of a run that was not interrupted."""

import itertools
import multiprocessing
import os
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, Dataset, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import stoker
from stoker.errors import FeedError

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Divided(IterableDataset):
    """Each worker has its part of the numbers, of another length, with random noise."""

    def __init__(self, length: int = 30) -> None:
        self.length = length

    def ids(self) -> list[int]:
        info = get_worker_info()
        if info is None:
            return list(range(self.length))
        return list(range(info.id, self.length, info.num_workers))[: 5 + 6 * info.id]

    def __iter__(self) -> Iterator[dict[str, object]]:
        for index in self.ids():
            yield {
                "id": index,
                "python": random.random(),
                "torch": torch.rand(3),
                "n": np.random.rand(2),
            }


class Shuffled(Divided):
    """A shuffle buffer with a generator of its own, which lasts over epochs."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[dict[str, object]]:
        buffer: list[dict[str, object]] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 4:
                yield buffer.pop(self.rng.randrange(len(buffer)))
        self.rng.shuffle(buffer)
        yield from buffer


class Counted(Divided):
    """Shuffles by the number of its epochs, which it counts itself, in an object that it holds."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.order = Order()

    def __iter__(self) -> Iterator[dict[str, object]]:
        samples = list(super().__iter__())
        random.Random(self.order.epoch).shuffle(samples)
        self.order.epoch += 1
        yield from samples


class Reordered(Divided):
    """Shuffles its lists in place: each epoch begins with the order in which the last one ended."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.files = [f"{number}.tar" for number in range(length)]
        self.pairs = [(f"{number % 3}", number % 2) for number in range(length)]
        self.places = np.arange(length)
        self.share = 1.0
        self.turning = deque(range(length))
        self.order = torch.arange(length)
        self.facts = {"epoch": 0}

    def __iter__(self) -> Iterator[dict[str, object]]:
        random.shuffle(self.files)
        random.shuffle(self.pairs)
        np.random.shuffle(self.places)
        self.share *= 0.5
        self.turning.rotate(7)
        self.order = self.order[torch.randperm(self.length)]
        self.facts["epoch"] += 1
        for sample in super().__iter__():
            index = cast("int", sample["id"])
            facts = [self.files[index], self.pairs[index], int(self.places[index]), self.share]
            facts += [self.turning[index], int(self.order[index]), self.facts["epoch"]]
            yield {**sample, "facts": str(facts)}


class Cursor:
    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 0


class Remembering(Divided):
    """Keeps plain values of all kinds: each epoch begins with those of the last one."""

    number = 0
    is_over: bool
    folder: object

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.is_forward = True
        self.last_key = ""
        self.rest = b""
        self.words = ["a", "b"]
        self.seen: set[int] = set()
        self.place: tuple[str, int] = ("0.tar", 0)
        self.offsets: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.parts: defaultdict[str, list[int]] = defaultdict(list)
        self.best: float | None = None
        self.epoch = -1
        self.cursor = Cursor()
        self.total = np.int64(0)
        self.buckets: list[list[int]] = [[], []]
        self.nested: dict[str, object] = {"at": {"file": "0.tar", "line": 0}}
        self.bytes = bytearray(b"ab")

    def change(self) -> None:
        self.epoch += 1
        self.number += 1
        self.is_forward = not self.is_forward
        self.last_key += str(random.randrange(10))
        self.rest += bytes([self.epoch])
        self.words = [*self.words[1:], self.last_key]
        self.seen.add(random.randrange(1000))
        self.place = (f"{self.epoch}.tar", self.epoch)
        self.offsets[self.last_key] = self.epoch
        self.counts[self.last_key[-1]] += 1
        self.parts["a"].append(self.epoch)
        self.best = random.random() if self.best is None else self.best / 2
        self.cursor.place += 3
        self.total += np.int64(7)
        self.buckets[self.epoch % 2].append(random.randrange(10))
        self.nested["at"] = {"file": self.last_key, "line": self.epoch}
        self.bytes += b"c"
        self.is_over = self.epoch > 0

    def __iter__(self) -> Iterator[dict[str, object]]:
        self.change()
        facts = {**vars(self), "place": self.cursor.place, "number": self.number}
        facts["seen"] = sorted(self.seen)
        del facts["cursor"]
        for sample in super().__iter__():
            yield {**sample, "facts": str(facts)}


class Cycling(Divided):
    """Each epoch goes on where the last one has stopped in a cycle, and in a generator."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.files = itertools.cycle(range(7))
        self.numbers: Iterator[int] | None = None

    def __iter__(self) -> Iterator[dict[str, object]]:
        if self.numbers is None:
            self.numbers = (number * number for number in itertools.count())
        for sample in super().__iter__():
            yield {**sample, "file": next(self.files), "number": next(self.numbers)}


class Order:
    epoch = 0

    def __init__(self) -> None:
        self.epoch = 0


class Broken(Divided):
    """Its iterator goes on after an error."""

    def __iter__(self) -> "Broken":
        self.places = iter(self.ids())
        return self

    def __next__(self) -> dict[str, object]:
        place = next(self.places)
        if place % 7 == 3:
            raise LookupError(f"sample {place}")
        return {"id": place, "drawn": random.random()}


class Clock(Divided):
    def __iter__(self) -> Iterator[dict[str, object]]:
        for index in self.ids():
            yield {"id": index, "drawn": int.from_bytes(os.urandom(4), "little")}


def drawn(index: int) -> dict[str, object]:
    return {"id": index, "drawn": torch.rand(2)}


def piped(length: int = 30) -> Dataset[object]:
    ids = IterableWrapper(range(length)).shuffle(buffer_size=9).sharding_filter()
    return ids.map(drawn)


def forked() -> Dataset[object]:
    ids, others = IterableWrapper(range(30)).sharding_filter().fork(2, buffer_size=100)
    return ids.map(drawn).zip(others.shuffle(buffer_size=5)).map(first_of)


def first_of(pair: tuple[dict[str, object], int]) -> dict[str, object]:
    return {**pair[0], "other": pair[1]}


def chained() -> Dataset[object]:
    return ChainDataset([Divided(11), Shuffled(13)])


KINDS: dict[str, Callable[[], Dataset[object]]] = {
    "divided": Divided,
    "shuffled": Shuffled,
    "counted": Counted,
    "reordered": Reordered,
    "remembering": Remembering,
    "an error": Broken,
    "data pipe": piped,
    "data pipe in two": forked,
    "chain": chained,
}
LOADERS: dict[str, dict[str, object]] = {
    "inline": {},
    "one worker": {"num_workers": 1},
    "three workers": {"num_workers": 3},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "no batches": {"num_workers": 2, "batch_size": None},
    "last dropped": {"num_workers": 2, "drop_last": True, "prefetch_factor": 3},
}
# Where a dataset's state is: in the script, in workers of one epoch, in those of all epochs. The
# other loaders differ in how samples become batches, which no dataset knows: `make soak` has them
# with all kinds.
WITH_ALL_KINDS = ("inline", "three workers", "persistent")
WITH_ALL_LOADERS = ("shuffled", "an error")


def of_loaders(kinds: Iterable[str]) -> list:
    cases = []
    for kind in kinds:
        for name, options in LOADERS.items():
            is_often = name in WITH_ALL_KINDS or kind in WITH_ALL_LOADERS
            marks = () if is_often else pytest.mark.soak
            cases.append(pytest.param(kind, options, id=f"{kind}-{name}", marks=marks))
    return cases


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def loader_of(kind: str, options: dict[str, object]) -> "stoker.DataLoader[object]":
    given: dict[str, Any] = {"batch_size": 4} | options
    return stoker.DataLoader(KINDS[kind](), **given)


def taken(iterator: Iterator[object], count: int | None = None) -> list[str]:
    """Returns what `count` batches are, or what their making raised."""
    batches: list[str] = []
    while count is None or len(batches) < count:
        try:
            batches.append(repr(next(iterator)))
        except StopIteration:
            break
        except LookupError as err:
            batches.append(str(err).strip().splitlines()[-1])
    return batches


def uninterrupted(kind: str, options: dict[str, object], epochs: int = 3) -> list[list[str]]:
    seed()
    loader = loader_of(kind, options)
    return [taken(iter(loader)) for _ in range(epochs)]


def interrupted(
    kind: str, options: dict[str, object], *, epoch: int, at: int
) -> tuple[list[str], dict[str, object]]:
    """Returns the batches up to there in that epoch, and the state."""
    seed()
    loader = loader_of(kind, options)
    for _ in range(epoch):
        taken(iter(loader))
    iterator = iter(loader)
    return taken(iterator, at), loader.state_dict()


def states_at(
    places: Sequence[int], kind: str, options: dict[str, object], expected: list[str]
) -> list[dict[str, object]]:
    """Returns the states there in the second epoch, all of one loader, which reads on."""
    seed()
    loader = loader_of(kind, options)
    taken(iter(loader))
    iterator = iter(loader)
    batches: list[str] = []
    states = []
    for at in places:
        batches += taken(iterator, at - len(batches))
        assert batches == expected[:at]
        states.append(loader.state_dict())
    return states


def ids_of(loader: "stoker.DataLoader") -> list[int]:
    return sorted(itertools.chain.from_iterable(batch["id"].tolist() for batch in loader))


def resumed(kind: str, options: dict[str, object], state: dict[str, object]) -> "stoker.DataLoader":
    random.seed(99)
    torch.manual_seed(99)
    loader = loader_of(kind, options)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize(("kind", "options"), of_loaders(KINDS))
def test_a_stream_resumes_exactly(kind, options):
    expected = uninterrupted(kind, options)
    last = len(expected[1])
    places = (0, 1, last // 2, last - 1, last)
    for at, state in zip(places, states_at(places, kind, options, expected[1]), strict=True):
        loader = resumed(kind, options, state)
        assert taken(iter(loader)) == expected[1][at:]
        assert taken(iter(loader)) == expected[2]


@pytest.mark.parametrize(
    ("kind", "options"),
    of_loaders(["divided", "shuffled", "counted", "reordered", "remembering", "an error", "chain"]),
)
def test_a_state_between_epochs_resumes_exactly(kind, options):
    expected = uninterrupted(kind, options, 4)
    seed()
    loader = loader_of(kind, options)
    for _ in range(2):
        taken(iter(loader))
    state = loader.state_dict()
    again = resumed(kind, options, state)
    # Also a state that is saved again before anything was read.
    state = again.state_dict()
    again = resumed(kind, options, state)
    assert [taken(iter(again)) for _ in range(2)] == expected[2:]


@pytest.mark.parametrize("place", [0, 1, 4, None])
def test_an_iterator_that_persistent_workers_keep_is_read_again_from_the_first_epoch(place, capfd):
    options = LOADERS["persistent"]
    expected = uninterrupted_of(Cycling(), options, 4)
    loader = built(Cycling(), options)
    seed()
    batches = [taken(iter(loader)) for _ in range(2)]
    if place is not None:
        batches.append(taken(iter(loader), place))
    state = loader.state_dict()
    again = built(Cycling(), options)
    again.load_state_dict(state)
    rest = [taken(iter(again)) for _ in range(2)]
    if place is not None:
        rest[0] = batches.pop() + rest[0]
    assert batches + rest == expected
    assert "batches of the epochs before it" in capfd.readouterr().err


def test_an_iterator_that_a_stream_without_workers_keeps_is_said(capfd):
    loader = built(Cycling(), {})
    taken(iter(loader))
    assert "stream_state_refused" not in capfd.readouterr().err
    loader.state_dict()
    assert "dataset.files is an iterator that has not ended" in capfd.readouterr().err
    other = built(Cycling(), {})
    taken(iter(other))
    taken(iter(other))
    assert "dataset.files is an iterator that has not ended" in capfd.readouterr().err
    again = built(Cycling(), {})
    iterator = iter(other)
    next(iterator)
    again.load_state_dict(other.state_dict())
    with pytest.raises(FeedError, match=r"dataset\.files is an iterator that has not ended"):
        iter(again)


class Buffered(Divided):
    """Each epoch begins with the buffer of the last one, which is too large for a state."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.buffer = np.arange(100_000.0)

    def __iter__(self) -> Iterator[dict[str, object]]:
        np.random.shuffle(self.buffer)
        for sample in super().__iter__():
            yield {**sample, "first": self.buffer[0]}


@pytest.mark.parametrize("options", [LOADERS["inline"], LOADERS["persistent"]], ids=["0", "2"])
def test_what_is_too_large_for_a_state_is_said_where_states_are_saved(options, capfd):
    words = "dataset.buffer, an array of 0.8 MB, changes in each epoch"
    loader = built(Buffered(), options)
    for _ in range(3):
        taken(iter(loader))
    assert "stream_state_refused" not in capfd.readouterr().err
    # From here on it asks for states: two epochs' beginnings are compared.
    for _ in range(2):
        state = loader.state_dict()
        taken(iter(loader))
    loader.state_dict()
    assert capfd.readouterr().err.count(words) == 1
    again = built(Buffered(), options)
    again.load_state_dict(state)
    for _ in range(2):
        taken(iter(again))
    again.state_dict()
    assert capfd.readouterr().err.count(words) == 1


@pytest.mark.parametrize("options", [LOADERS["inline"], LOADERS["persistent"]], ids=["0", "2"])
def test_the_only_state_of_a_run_says_what_is_too_large_for_it(options, capfd):
    loader = built(Buffered(), options)
    for _ in range(3):
        taken(iter(loader))
    assert "stream_state_refused" not in capfd.readouterr().err
    loader.state_dict()
    words = "dataset.buffer, an array of 0.8 MB, changes in each epoch"
    assert capfd.readouterr().err.count(words) == 1


class Sharing(Divided):
    """Counts its epochs in memory that workers share, as MosaicML's StreamingDataset does."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.epoch = multiprocessing.Value("i", 0)

    def __iter__(self) -> Iterator[dict[str, object]]:
        self.epoch.value += 1
        for sample in super().__iter__():
            yield {**sample, "epoch": self.epoch.value}


@pytest.mark.parametrize("persists", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_workers_of_one_epoch_share_is_there_again(num_workers, persists):
    options = {"num_workers": num_workers, "persistent_workers": persists and num_workers > 0}
    expected = uninterrupted_of(Sharing(), options, 3)
    for epoch, place in ((1, 0), (1, 2), (2, 0), (2, 2), (2, None)):
        loader = built(Sharing(), options)
        seed()
        for _ in range(epoch):
            taken(iter(loader))
        if place is not None:
            iterator = iter(loader)
            taken(iterator, place)
        again = built(Sharing(), options)
        again.load_state_dict(loader.state_dict())
        assert taken(iter(again)) == expected[epoch][place or 0 :]


class Opening(Divided):
    """Opens its source at its first use."""

    source: object = None
    is_open = False

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.epoch = -1
        self.last_key = ""
        self.open_path = ""

    def __iter__(self) -> Iterator[dict[str, object]]:
        if not self.is_open:
            self.source, self.is_open, self.open_path = object(), True, "data/0.db"
        assert self.source is not None
        self.epoch += 1
        self.last_key += "k"
        for sample in super().__iter__():
            yield {**sample, "epoch": self.epoch, "key": self.last_key, "path": self.open_path}


@pytest.mark.parametrize("options", [LOADERS["inline"], LOADERS["persistent"]], ids=["0", "2"])
def test_what_says_that_a_source_is_open_is_not_kept_without_it(options):
    expected = uninterrupted_of(Opening(), options, 3)
    seed()
    loader = built(Opening(), options)
    batches = [taken(iter(loader)) for _ in range(2)]
    again = built(Opening(), options)
    again.load_state_dict(loader.state_dict())
    assert [*batches, taken(iter(again))] == expected


def built(dataset: Dataset[object], options: dict[str, object]) -> "stoker.DataLoader[object]":
    given: dict[str, Any] = {"batch_size": 4} | options
    return stoker.DataLoader(dataset, **given)


def uninterrupted_of(
    dataset: Dataset[object], options: dict[str, object], epochs: int
) -> list[list[str]]:
    seed()
    loader = built(dataset, options)
    return [taken(iter(loader)) for _ in range(epochs)]


def test_a_state_between_epochs_takes_the_workers_of_the_script():
    seed()
    options: dict[str, object] = {"num_workers": 2, "persistent_workers": True}
    loader = loader_of("divided", options)
    taken(iter(loader))
    other = options | {"num_workers": 3}
    again = resumed("divided", other, loader.state_dict())
    assert len(taken(iter(again))) == len(uninterrupted("divided", other, 1)[0])
    assert len(vars(again._iterator)["_workers"]) == 3


@pytest.mark.parametrize("saved", ["inline", "three workers", "persistent"])
@pytest.mark.parametrize("loaded", ["inline", "one worker", "persistent", "last dropped"])
def test_a_state_keeps_its_shards_on_any_number_of_workers(saved, loaded, capfd):
    options = {"batch_size": 4, "drop_last": False}
    expected = uninterrupted("shuffled", LOADERS[saved] | options, 1)
    before, state = interrupted("shuffled", LOADERS[saved] | options, epoch=0, at=3)
    assert before == expected[0][:3]
    loader = resumed("shuffled", LOADERS[loaded] | options, state)
    assert taken(iter(loader)) == expected[0][3:]
    # Later epochs have the workers of the script.
    assert ids_of(loader) == ids_of(loader_of("shuffled", LOADERS[loaded] | options))
    assert "3 batches were made again" in capfd.readouterr().err


def test_a_resumed_epoch_is_saved_and_resumed_again():
    options: dict[str, object] = {"num_workers": 3}
    expected = uninterrupted("shuffled", options, 1)[0]
    _, state = interrupted("shuffled", options, epoch=0, at=2)
    loader = resumed("shuffled", options, state)
    # Not begun yet: the same state.
    assert repr(loader.state_dict()["begun"]) == repr(state["begun"])
    iterator = iter(loader)
    assert repr(loader.state_dict()["begun"]) == repr(state["begun"])
    assert taken(iterator, 3) == expected[2:5]
    again = resumed("shuffled", options, loader.state_dict())
    assert taken(iter(again)) == expected[5:]


def test_a_state_is_read_by_torch_without_pickles(tmp_path):
    _, state = interrupted("shuffled", {"num_workers": 2}, epoch=1, at=2)
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True).keys() == state.keys()


@pytest.mark.parametrize(
    "err", [OverflowError, RuntimeError, AttributeError, ValueError], ids=lambda kind: kind.__name__
)
def test_a_stream_whose_length_is_an_error_resumes(err):
    class Endless(Divided):
        def __len__(self) -> int:
            raise err("it has no end")

    loader = stoker.DataLoader(Endless(), batch_size=4)
    batches = taken(iter(loader), 2)
    iterator = iter(loader)
    assert len(taken(iterator, 2)) == len(batches)
    again = stoker.DataLoader(Endless(), batch_size=4)
    again.load_state_dict(loader.state_dict())
    assert len(taken(iter(again), 1)) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_is_not_deterministic_is_an_error_that_names_it(num_workers):
    loader = stoker.DataLoader(Clock(), batch_size=4, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    other = stoker.DataLoader(Clock(), batch_size=4, num_workers=num_workers)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(FeedError, match="the iterable dataset Clock is not deterministic"):
        list(other)
