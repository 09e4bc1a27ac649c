"""A signal's handler raises in a wait, or a batch fails, and the script goes on: each counts."""

import itertools
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from stoker.environment import ProcessSettings
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.numbered_workers import AheadIterator
from stoker.feed.placement import placed_iterator
from stoker.feed.remote_iterators import FeedIterator
from stoker.feed.timeline import Timeline
from stoker.feed.watched_workers import WatchedBatches
from stoker.records import FeedSettings

ERRORS = [KeyboardInterrupt, RuntimeError]
NUMBERS: Any = range(24)
BATCHES = [[index, index + 1] for index in range(0, 24, 2)]

pytestmark = [
    pytest.mark.timeout(200),
    # The machine may have two CPUs.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Ordered:
    """A sampler whose iterators call something before each index."""

    def __init__(self, before_each: Callable[[], None] = lambda: None) -> None:
        self.before_each = before_each

    def __len__(self) -> int:
        return len(BATCHES)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.given, BATCHES)

    def given(self, batch: list[int]) -> list[int]:
        self.before_each()
        return batch


@pytest.fixture
def error() -> type[BaseException]:
    return RuntimeError


@pytest.fixture
def raise_once(error):
    """Returns a function that has the handler raise at its call of a number."""

    def handler(number: int, frame: object) -> None:
        raise error("the handler's")

    calls = itertools.count(1)
    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda at: signal.raise_signal(signal.SIGUSR1) if next(calls) == at else None
    signal.signal(signal.SIGUSR1, before)


def process_of(*, is_planned: bool, is_watched: bool) -> TrainerProcess:
    feed = FeedSettings(on_error="skip", max_errors=9) if is_watched else FeedSettings()
    workers = {"dnn": 2} if is_planned else {}
    return TrainerProcess(ProcessSettings(feed=feed, workers=workers), Timeline(None))


def epoch(loader: Any, process: TrainerProcess) -> tuple[list[list[int]], list[int]]:
    """Returns the batches, and how many had come each time that the handler raised."""
    iterator: Any = placed_iterator(loader, process)
    taken: list[list[int]] = []
    raised_at: list[int] = []
    while True:
        try:
            taken.append(next(iterator).tolist())
        except StopIteration:
            return taken, raised_at
        except (KeyboardInterrupt, RuntimeError) as err:
            if str(err) != "the handler's":
                raise
            raised_at.append(len(taken))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("workers", "is_watched", "owner", "name"),
    [
        (0, False, AheadIterator, "_get_data"),
        (0, True, WatchedBatches, "_turn"),
        (2, True, WatchedBatches, "_turn"),
    ],
)
def test_no_batch_is_lost_and_none_is_counted_twice(
    workers, is_watched, owner, name, raise_once, monkeypatch
):
    wait = getattr(owner, name)

    def interrupted_wait(self: Any, *args: Any) -> Any:
        raise_once(at=3)
        return wait(self, *args)

    monkeypatch.setattr(owner, name, interrupted_wait)
    process = process_of(is_planned=not workers, is_watched=is_watched)
    loader: Any = DataLoader(NUMBERS, num_workers=workers, batch_size=2)
    taken, raised_at = epoch(loader, process)
    assert taken == BATCHES
    assert len(raised_at) == 1
    position = process.books(loader).position
    assert position is not None
    assert position.num_yielded == len(BATCHES)


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_handler_raises_in_the_sampler_comes_at_once(raise_once):
    sampler = Ordered(lambda: raise_once(at=7))
    loader: Any = DataLoader(NUMBERS, num_workers=2, batch_sampler=sampler)
    process = process_of(is_planned=False, is_watched=True)
    taken, raised_at = epoch(loader, process)
    # Four batches are asked for ahead: the seventh index belongs to the third batch.
    assert raised_at == [2]
    # As with torch: the sampler does not give that index again.
    assert taken == BATCHES[:6] + BATCHES[7:]


class Failing(Dataset[int]):
    """Its fifth sample raises."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error("the handler's")
        return index


@pytest.mark.parametrize("error", ERRORS)
def test_a_batch_that_fails_as_the_trainer_makes_it_for_a_plan_is_counted(error):
    loader = DataLoader(Failing(error), batch_sampler=Ordered())
    process = process_of(is_planned=True, is_watched=False)
    taken, raised_at = epoch(loader, process)
    assert raised_at == [2]
    assert taken == BATCHES[:2] + BATCHES[3:]
    position = process.books(loader).position
    assert position is not None
    assert position.num_yielded == len(BATCHES)


@pytest.mark.parametrize("error", ERRORS)
def test_a_batch_that_fails_as_the_trainer_makes_it_for_data_hosts_is_counted(error):
    iterator: Any = FeedIterator.__new__(FeedIterator)
    iterator._num_before, iterator._pin_memory = 0, False
    iterator._indices = iter([4, 5, 6])
    iterator._in_step = SimpleNamespace(next_index=next)
    dataset = Failing(error)
    assert iterator._data_made_here(dataset.__getitem__) == 4
    with pytest.raises(error):
        iterator._data_made_here(dataset.__getitem__)
    assert iterator._data_made_here(dataset.__getitem__) == 6
    assert iterator._num_before == 3


def test_a_timeout_counts_no_batch(monkeypatch):
    process = process_of(is_planned=False, is_watched=True)
    loader: Any = DataLoader(NUMBERS, num_workers=2, batch_size=2)
    iterator: Any = placed_iterator(loader, process)
    first = next(iterator).tolist()
    position = process.books(loader).position
    assert position is not None
    with monkeypatch.context() as patch:
        patch.setattr(iterator, "_timeout", 1e-9)
        patch.setattr(WatchedBatches, "_turn", lambda self, seconds: None)
        iterator._batches._results.clear()
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
    assert position.num_yielded == 1
    iterator._shutdown_workers()
    assert first == BATCHES[0]
