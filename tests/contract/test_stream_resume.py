"""An iterable dataset resumes in mid-epoch with the bytes of a run that was not interrupted."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stoker

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


KINDS: dict[str, Callable[[], Dataset[object]]] = {
    "divided": Divided,
    "shuffled": Shuffled,
}
LOADERS: dict[str, dict[str, object]] = {
    "inline": {},
    "three workers": {"num_workers": 3},
    "two workers": {"num_workers": 2},
}
# Where a dataset's state is: in the script, or in workers. The other loaders differ in how samples
# become batches, which no dataset knows.
WITH_ALL_KINDS = ("inline", "two workers")
WITH_ALL_LOADERS = ("shuffled",)


def of_loaders(kinds: Iterable[str]) -> list:
    cases = []
    for kind in kinds:
        for name, options in LOADERS.items():
            # In the script's own process its generator lasts over epochs, and is in no state.
            is_kept = (kind, name) == ("shuffled", "inline")
            if not is_kept and (name in WITH_ALL_KINDS or kind in WITH_ALL_LOADERS):
                cases.append(pytest.param(kind, options, id=f"{kind}-{name}"))
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
    places = (1, last // 2)
    for at, state in zip(places, states_at(places, kind, options, expected[1]), strict=True):
        loader = resumed(kind, options, state)
        assert taken(iter(loader)) == expected[1][at:]
        assert taken(iter(loader)) == expected[2]


@pytest.mark.parametrize(("kind", "options"), of_loaders(["shuffled"]))
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


@pytest.mark.parametrize("saved", ["inline", "three workers"])
@pytest.mark.parametrize("loaded", ["inline", "two workers"])
def test_a_state_keeps_its_shards_on_any_number_of_workers(saved, loaded):
    options = {"batch_size": 4, "drop_last": False}
    expected = uninterrupted("shuffled", LOADERS[saved] | options, 1)
    before, state = interrupted("shuffled", LOADERS[saved] | options, epoch=0, at=3)
    assert before == expected[0][:3]
    loader = resumed("shuffled", LOADERS[loaded] | options, state)
    assert taken(iter(loader)) == expected[0][3:]
    # Later epochs have the workers of the script.
    assert ids_of(loader) == ids_of(loader_of("shuffled", LOADERS[loaded] | options))


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


COUNT = 48
# How often workers have made each sample.
READ = torch.zeros(COUNT, dtype=torch.int64).share_memory_()


class Counting(IterableDataset):
    """Its state says how many samples it gave."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, object]]:
        info = get_worker_info()
        assert info is not None
        ids = range(info.id, COUNT, info.num_workers)
        for place in range(self.place, len(ids)):
            READ[ids[place]] += 1
            self.place = place + 1
            yield {"id": ids[place]}
        self.place = 0

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_dataset_with_a_state_resumes_exactly_and_reads_nothing_again():
    seed()
    loader, again = (stoker.DataLoader(Counting(), batch_size=3, num_workers=2) for _ in range(2))
    list(loader)
    iterator = iter(loader)
    taken(iterator, 9)
    again.load_state_dict(loader.state_dict())
    rest = taken(iterator)
    READ.zero_()
    assert taken(iter(again)) == rest
    assert int(READ.sum()) < COUNT
