"""An iterable dataset with a state_dict resumes from it, if that gives the same batches."""

import atexit
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import stoker
from stoker.feed import stream_progress
from stoker.feed.stream_progress import own_before, owns_with
from stoker.feed.wire.protocol import OwnState
from stoker.feed.workers import own_states

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
COUNT = 48
SOURCE = Path(__file__).open("rb")  # noqa: SIM115
atexit.register(SOURCE.close)
# How often workers have made each sample.
READ = torch.zeros(COUNT, dtype=torch.int64).share_memory_()


class Counting(IterableDataset[dict[str, object]]):
    """Its state says how many samples it gave."""

    def __init__(self) -> None:
        self.place = 0
        self.data: dict[str, object] = {}

    def ids(self) -> list[int]:
        info = get_worker_info()
        return list(range(COUNT)) if info is None else list(range(info.id, COUNT, info.num_workers))

    def __iter__(self) -> Iterator[dict[str, object]]:
        ids = self.ids()
        for place in range(self.place, len(ids)):
            READ[ids[place]] += 1
            self.place = place + 1
            yield {"id": ids[place], "noise": random.random(), "torch": torch.rand(2)}
        self.place = 0

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Forgetful(Counting):
    """Forgets its shuffle buffer, as Hugging Face's datasets do."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        buffer: list[dict[str, object]] = []
        rng = random.Random(5)
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 6:
                yield buffer.pop(rng.randrange(len(buffer)))
        yield from buffer


class Refusing(Counting):
    def load_state_dict(self, state: dict[str, int]) -> None:
        if get_worker_info() is not None:
            self.place = 5
        raise ValueError("not this one")


class Wordy(Counting):
    """Its state wants arguments, as LitData's does."""

    def state_dict(self, num_samples: int, batch_size: int) -> dict[str, object]:  # type: ignore[override]
        return {}


class Sticky(Counting):
    """Begins every epoch where a state was loaded, as Hugging Face's datasets do."""

    loaded = 0

    def __iter__(self) -> Iterator[dict[str, object]]:
        self.place = self.loaded
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["place"]


class Buffered(Counting):
    """Its state has the samples that it keeps for shuffling."""

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place, "buffer": bytes(5 << 20)}


class Itself(Sticky):
    """It is its own iterator, as LitData's."""

    def __iter__(self) -> Any:
        self.place = self.loaded
        self.left = self.ids()
        return self

    def __next__(self) -> dict[str, object]:
        if self.place >= len(self.left):
            raise StopIteration
        self.place += 1
        return {"id": self.left[self.place - 1]}


class Carrying(Counting):
    """Each epoch begins with the order in which the last one ended, which its state has."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(COUNT))

    def ids(self) -> list[int]:
        mine = set(super().ids())
        self.order = [self.order[0], *reversed(self.order[1:])]
        self.order = self.order[7:] + self.order[:7]
        return [index for index in self.order if index in mine]

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.order = list(state["order"])


class Drawing(Counting):
    """Draws random numbers for its state."""

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place, "name": random.random(), "noise": torch.rand(1).item()}


class Locking(Counting):
    """Holds a lock and an open file."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.file = SOURCE


class Unique(Counting):
    """Holds what exists in one process alone."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(3))


class OfIterator(Counting):
    """Its iterator has the state, as Grain's has."""

    def __iter__(self) -> "Places":  # type: ignore[override]
        return Places(self)

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Places:
    def __init__(self, data: OfIterator) -> None:
        self.data = data
        self.place = 0

    def __iter__(self) -> "Places":
        return self

    def __next__(self) -> dict[str, object]:
        ids = self.data.ids()
        if self.place == len(ids):
            raise StopIteration
        index = ids[self.place]
        READ[index] += 1
        self.place += 1
        return {"id": index, "noise": random.random(), "torch": torch.rand(2)}

    def get_state(self) -> bytes:
        return str(self.place).encode()

    def set_state(self, state: bytes) -> None:
        self.place = int(state)


KINDS: dict[str, type[Counting]] = {
    "counting": Counting,
    "its iterator": OfIterator,
    "forgetful": Forgetful,
    "refusing": Refusing,
    "wordy": Wordy,
    "locking": Locking,
    "unique": Unique,
}
# Their states lead to where they were taken.
LEADING = ("counting", "locking")


@pytest.fixture(autouse=True)
def _states_are_due_at_once(monkeypatch):
    monkeypatch.setattr(own_states, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(own_states, "_SHARE", 0.0)
    monkeypatch.setattr(stream_progress, "MIN_COMPARED", 1)


def loader_of(dataset: Counting, num_workers: int, persistent: bool) -> Any:
    return stoker.DataLoader(
        dataset, batch_size=3, num_workers=num_workers, persistent_workers=persistent
    )


def run(dataset: Counting, num_workers: int, persistent: bool, *, at: int) -> tuple[list[str], Any]:
    """Returns two epochs' batches, and the state in the second one's middle."""
    torch.manual_seed(3)
    random.seed(3)
    loader = loader_of(dataset, num_workers, persistent)
    list(loader)
    batches, state = [], None
    for number, batch in enumerate(loader):
        if number == at - 1:
            state = loader.state_dict()
        batches.append(repr(batch))
    return batches, state


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_with_a_state_resumes_exactly(kind, num_workers, persistent, capfd):
    at = 9
    batches, state = run(KINDS[kind](), num_workers, persistent, at=at)
    random.seed(9)
    READ.zero_()
    dataset = KINDS[kind]()
    loader = loader_of(dataset, num_workers, persistent)
    loader.load_state_dict(state)
    assert [repr(batch) for batch in loader] == batches[at:]
    num_read = int(READ.sum())
    err = capfd.readouterr().err
    # A dataset that outlives the epoch is not asked: its iterator is.
    is_kept = persistent or not num_workers
    if kind == "its iterator" or (kind in LEADING and not is_kept):
        # Two workers made again one batch each, to compare it.
        assert num_read <= COUNT - (at - max(1, num_workers)) * 3 + 3
        assert "own state was loaded for" in err
        assert "stream_state_refused" not in err
    else:
        assert num_read >= COUNT
        assert ("stream_state_refused" in err) == (not is_kept)
        assert f"{at} batches were made again" in err
        is_wordy = kind == "wordy" and not is_kept
        assert ("missing 2 required positional arguments" in err) == is_wordy
        assert ("cannot be copied" in err) == (kind == "unique" and not is_kept)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [Sticky, Itself])
def test_the_epoch_after_a_resumed_one_is_whole(kind, num_workers, persistent):
    _, state = run(kind(), num_workers, persistent, at=9)
    loader = loader_of(kind(), num_workers, persistent)
    loader.load_state_dict(state)
    list(loader)
    ids = [index for batch in loader for index in batch["id"].tolist()]
    assert sorted(ids) == list(range(COUNT))


def test_persistent_workers_use_no_state_of_others_that_were_not(capfd):
    _, state = run(Itself(), 2, False, at=9)
    loader = loader_of(Itself(), 2, True)
    loader.load_state_dict(state)
    list(loader)
    ids = [index for batch in loader for index in batch["id"].tolist()]
    assert sorted(ids) == list(range(COUNT))
    assert "persistent workers keep their dataset" in capfd.readouterr().err


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_random_numbers_that_a_state_draws_change_no_batch(num_workers, persistent):
    asked, _ = run(Drawing(), num_workers, persistent, at=9)
    never_asked, _ = run(Wordy(), num_workers, persistent, at=9)
    assert asked == never_asked


@pytest.mark.parametrize("at", [1, 9])
@pytest.mark.parametrize("kind", [Itself, Carrying])
def test_a_dataset_in_the_trainer_resumes_in_its_second_epoch(kind, at):
    batches, state = run(kind(), 0, persistent=False, at=at)
    loader = loader_of(kind(), 0, persistent=False)
    loader.load_state_dict(state)
    assert [repr(batch) for batch in loader] == batches[at:]


class Awkward(Counting):
    """Its state holds an object that the state of a loader cannot, or should not."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place, "held": self.held}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "held",
    [lambda: 1, Places, {"ids": np.arange(4)}, bytes(5 << 20), {1, 2}, np.float32(0.5)],
    ids=["function", "class", "array", "buffer", "set", "numpy number"],
)
def test_whatever_a_datasets_state_holds_the_loaders_is_short_and_plain(
    tmp_path, held, num_workers
):
    at = 9
    batches, state = run(Awkward(held), num_workers, persistent=False, at=at)
    path = tmp_path / "state.pt"
    torch.save(state, path)
    assert path.stat().st_size < 1 << 18
    loader = loader_of(Awkward(held), num_workers, persistent=False)
    loader.load_state_dict(torch.load(path, weights_only=True))
    assert [repr(batch) for batch in loader] == batches[at:]


def test_a_dataset_that_changes_what_its_state_holds_resumes_exactly():
    at = 9
    shared: dict[str, object] = {"place": 0}

    class Sharing(Counting):
        def state_dict(self) -> dict[str, object]:
            shared["place"] = self.place
            return shared

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            state["place"] = -1

    batches, state = run(Sharing(), 0, persistent=False, at=at)
    for _ in range(2):
        loader = loader_of(Sharing(), 0, persistent=False)
        loader.load_state_dict(state)
        assert [repr(batch) for batch in loader] == batches[at:]


def test_a_state_costs_little_of_the_time_that_batches_take(monkeypatch):
    monkeypatch.undo()
    now = [0.0]
    states = own_states.OwnStates(clock=lambda: now[0])

    def make(seconds: float) -> None:
        now[0] += seconds

    class Slow(Counting):
        num_asked = 0

        def state_dict(self) -> dict[str, object]:
            self.num_asked += 1
            make(0.1)
            return {"place": 1}

    dataset = Slow()
    for _ in range(60):
        states.timed(lambda: make(0.25))
        states.due(dataset, iter(()), {})
    # After 1 s, and then after 50 times as long as it took.
    assert dataset.num_asked == 3


# How often workers were asked for a state.
ASKED = torch.zeros(1, dtype=torch.int64).share_memory_()


class Expensive(Counting):
    def state_dict(self) -> dict[str, object]:
        ASKED.add_(1)
        time.sleep(0.05)
        return {"place": self.place, **self.data}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [{}, {"buffer": bytes(5 << 20)}], ids=["short", "too long"])
def test_what_a_state_takes_is_known_to_the_workers_of_later_epochs(monkeypatch, num_workers, data):
    # An epoch is much shorter than 1000 times of it.
    monkeypatch.setattr(own_states, "_SHARE", 1000.0)
    dataset = Expensive()
    dataset.data = data
    # A dataset in the trainer's process outlives the epoch: its iterator is asked, which has none.
    loader = loader_of(dataset, num_workers, persistent=False)
    asked: list[int] = []
    for _ in range(3):
        ASKED.zero_()
        assert len(list(loader)) == COUNT // 3
        asked.append(int(ASKED))
    assert asked == ([2, 0, 0] if num_workers else [1, 1, 1])


@pytest.mark.parametrize(
    ("state", "words"),
    [(b"0" * (5 << 20), "5.0 MiB, more than 4 MiB"), (object(), "plain values, tensors")],
    ids=["long", "not plain"],
)
def test_a_state_that_is_long_or_not_plain_is_not_taken_again(state, words):
    class Large(Counting):
        num_asked = 0

        def state_dict(self) -> dict[str, object]:
            self.num_asked += 1
            return {"buffer": state}

    dataset, states = Large(), own_states.OwnStates(clock=time.monotonic)
    assert states.due(dataset, iter(()), {}) == b""
    assert states.due(dataset, iter(()), {}) == b""
    assert dataset.num_asked == 1
    unused = states.unused()
    assert unused is not None
    assert words in unused.why_unused
    assert states.unused() is None


def test_a_state_that_is_not_used_is_said_once_with_what_to_do(capfd):
    loader = loader_of(Buffered(), 2, persistent=False)
    list(loader)
    list(loader)
    err = capfd.readouterr().err
    assert err.count("stream_state_refused") == 1
    assert "it has 5.0 MiB, more than 4 MiB; return from state_dict where the stream is" in err


def test_an_earlier_state_is_kept_when_a_later_one_is_too_long():
    earlier = OwnState(num_made=2, digest=1, state=b"at 2")
    assert owns_with([earlier], OwnState(why_unused="too long"), num_made=9) == [earlier]
    assert owns_with([earlier], OwnState(), num_made=9) == []


class Mixed(IterableDataset[int]):
    """A mixture of two sources by draws of its own, which its state forgets."""

    def __init__(self) -> None:
        self.places = [0, 0]
        self.is_loaded = False

    def __iter__(self) -> Iterator[int]:
        draws = random.Random(4)
        if not self.is_loaded:
            self.places = [0, 0]
        self.is_loaded = False
        while sum(self.places) < COUNT:
            source = draws.randrange(2)
            self.places[source] += 1
            yield 100 * source + self.places[source]

    def state_dict(self) -> dict[str, object]:
        return {"places": list(self.places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = list(state["places"])
        self.is_loaded = True


class Passing(IterableDataset[dict[str, object]]):
    """Passes on what it is asked for, and knows no other names."""

    def __init__(self) -> None:
        self.names = {"inner": Counting()}

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.names[name]

    def __iter__(self) -> Iterator[dict[str, object]]:
        yield from self.names["inner"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_raises_for_unknown_names_has_no_state(num_workers, capfd):
    loader = stoker.DataLoader(Passing(), batch_size=3, num_workers=num_workers)
    assert len(list(loader)) == COUNT // 3
    assert loader.state_dict()["num_yielded"] == 0
    assert "stream_state_refused" not in capfd.readouterr().err


def test_a_state_whose_next_batch_is_the_same_by_chance_is_refused(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(own_states, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(own_states, "_SHARE", 0.0)
    expected = [batch.item() for batch in stoker.DataLoader(Mixed(), num_workers=1)]
    loader = stoker.DataLoader(Mixed(), num_workers=1)
    for place, _ in enumerate(loader, 1):
        if place not in (16, 17, 18, 19, 20):
            continue
        again = stoker.DataLoader(Mixed(), num_workers=1)
        again.load_state_dict(loader.state_dict())
        assert [batch.item() for batch in again] == expected[place:]


def test_of_states_close_to_each_other_few_are_kept(monkeypatch):
    monkeypatch.undo()
    states: list[OwnState] = []
    for num_made in range(1, 101):
        own = OwnState(num_made=num_made, digest=1, state=b"it")
        states = owns_with(states, own, num_made=num_made)
        loaded = own_before(states, num_made)
        # Held back: a checkpoint may be of some batches before.
        assert num_made < 16 or own_before(states, num_made - 4) is not None
        assert loaded is None or 8 <= num_made - loaded.num_made < 12
        assert len(states) <= 5


def test_a_copy_of_a_dataset_shares_its_large_arrays(tmp_path):
    tokens = np.memmap(tmp_path / "tokens", dtype=np.uint8, mode="w+", shape=(2 << 20,))
    dataset = Counting()
    dataset.data = {"tokens": tokens, "table": torch.zeros(1 << 20), "buffer": [1, 2]}
    spare = own_states.spare_of(own_states.Spare(dataset, None))
    assert spare is not None
    assert isinstance(spare[0], Counting)
    copied = spare[0].data
    assert copied["tokens"] is tokens
    assert copied["table"] is dataset.data["table"]
    assert copied["buffer"] is not dataset.data["buffer"]
