import itertools
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.feed.bookkeeping import LoaderBooks, Position
from stoker.feed.sampler import SamplerOrder, yielded

Draw = Callable[[torch.Generator], data.Sampler[int]]

LENGTH = 70


class Unseen(data.Sampler[int]):
    def __init__(self, generator: torch.Generator) -> None:
        self.all = [generator]

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, (), generator=self.all[0]))


class Drawn(data.Sampler[int]):
    """Draws from any generator, which it may hold."""

    def __init__(self, draw: Callable[[], float], held: object) -> None:
        self.held = held
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(self.draw() * LENGTH)


def held_twister() -> Drawn:
    rng = np.random.RandomState(1)
    return Drawn(rng.random_sample, rng)


def held_python() -> Drawn:
    rng = random.Random(1)
    return Drawn(rng.random, rng)


def held_numpy() -> Drawn:
    rng = np.random.default_rng(1)
    return Drawn(rng.random, rng)


def of_process() -> Drawn:
    def drawn() -> float:
        return (random.random() + np.random.random_sample() + float(torch.rand(()))) / 3

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return Drawn(drawn, None)


SAMPLERS: dict[str, Draw] = {
    "random": lambda g: data.RandomSampler(range(LENGTH), generator=g),
    "replacing": lambda g: data.RandomSampler(range(LENGTH), replacement=True, generator=g),
    "some": lambda g: data.SubsetRandomSampler(range(9, 50), generator=g),
    "weighted": lambda g: data.WeightedRandomSampler([1.0, 2.0] * 35, LENGTH, generator=g),
    "own": Unseen,
}


class EpochRead:
    def __init__(self, loader: data.DataLoader[object], books: LoaderBooks, ahead: int) -> None:
        self.order = SamplerOrder(loader, books, is_inline=False, is_fed=True)
        self.position: Position = self.order.position
        self.draws = iter(self.order)
        self.ahead = ahead
        # As a session does it.
        draws = self.order.global_draws
        self.least_ahead = 0 if draws is None else draws.num_ahead
        self.given: list[object] = []
        self.num_taken = 0

    def take(self, count: int) -> list[object]:
        for _ in range(count):
            self.num_taken += 1
            wanted = self.num_taken + max(self.ahead, self.least_ahead) - len(self.given)
            self.given += itertools.islice(self.draws, max(0, wanted))
            yielded(self.position, self.num_taken - self.position.first)
        return self.given[: self.num_taken]


def made(draw, workers=0, factor=2):
    generator = torch.Generator().manual_seed(3)
    loader = stoker.DataLoader(
        range(LENGTH),
        4,
        sampler=draw(generator),
        generator=generator,
        num_workers=workers,
        prefetch_factor=factor if workers else None,
    )
    return loader, generator


def drawn_by_torch(draw: Draw, count: int) -> torch.Tensor:
    loader, generator = made(draw)
    draws = iter(loader._index_sampler)
    for _ in range(count):
        next(draws, None)
    return generator.get_state()


@pytest.mark.parametrize("ahead", [1, 4, 12, 40])
@pytest.mark.parametrize(("workers", "factor"), [(0, 2), (2, 2), (2, 7)])
@pytest.mark.parametrize("taken", [1, 7, 16, 18])
@pytest.mark.parametrize("name", SAMPLERS)
def test_an_early_stop_leaves_the_generator_as_torch_does(name, taken, workers, factor, ahead):
    loader, generator = made(SAMPLERS[name], workers, factor)
    one = EpochRead(loader, LoaderBooks(0), ahead)
    one.take(taken)
    one.position.cancel_in_finalizer()
    expected = drawn_by_torch(SAMPLERS[name], taken + workers * factor)
    assert torch.equal(generator.get_state(), expected)


@pytest.mark.parametrize("ahead", [1, 40])
@pytest.mark.parametrize(
    ("make", "workers"),
    [(held_python, 2), (held_numpy, 2), (held_twister, 0), (of_process, 0)],
)
def test_an_early_stop_leaves_generators_of_all_libraries_as_torch_does(make, workers, ahead):
    loader, _ = made(lambda _: make())
    draws = iter(loader._index_sampler)
    for _ in range(7 + 2 * workers):
        next(draws)
    expected = next(iter(loader._index_sampler))

    loader, _ = made(lambda _: make(), workers)
    one = EpochRead(loader, LoaderBooks(0), ahead)
    one.take(7)
    one.position.cancel_in_finalizer()
    assert next(iter(loader._index_sampler)) == expected


@pytest.mark.parametrize("when", ["after the last draw", "between draws"])
def test_what_others_drew_is_not_undone(when):
    loader, generator = made(SAMPLERS["own"])
    one = EpochRead(loader, LoaderBooks(0), 5)
    one.take(2)
    theirs = torch.rand(1, generator=generator)
    if when == "between draws":
        one.take(1)
    present = generator.get_state()
    one.position.cancel()
    if when == "after the last draw":
        assert torch.equal(generator.get_state(), present)
    again = torch.Generator()
    again.set_state(generator.get_state())
    assert not torch.equal(torch.rand(1, generator=again), theirs)


def test_another_epoch_stops_the_one_before_early_also_if_another_thread_dropped_it():
    loader, generator = made(SAMPLERS["random"])
    expected = drawn_by_torch(SAMPLERS["random"], 2)
    books = LoaderBooks(0)
    one = EpochRead(loader, books, 30)
    one.take(2)
    thread = threading.Thread(target=one.position.cancel_in_finalizer)
    thread.start()
    thread.join()
    assert not torch.equal(generator.get_state(), expected)
    SamplerOrder(loader, books, is_inline=False, is_fed=True)
    assert torch.equal(generator.get_state(), expected)
    one.position.cancel_in_finalizer()
    assert torch.equal(generator.get_state(), expected)


def test_as_many_states_are_kept_as_were_prefetched():
    loader, _ = made(SAMPLERS["own"], 2)
    one = EpochRead(loader, LoaderBooks(0), 10)
    for _ in range(6):
        one.take(1)
        assert len(one.position.rewind) <= 10 + 2


def test_an_error_of_the_sampler_comes_after_what_it_gave_before():
    class Failing(Unseen):
        def __iter__(self) -> Iterator[int]:
            yield from range(8)
            raise LookupError("no more")

    loader, _ = made(Failing, 2, 8)
    order = SamplerOrder(loader, LoaderBooks(0), is_inline=False, is_fed=True)
    draws = iter(order)
    assert [next(draws), next(draws)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(LookupError, match="no more"):
        next(draws)


@pytest.mark.parametrize("is_left_first", [False, True])
@pytest.mark.parametrize("name", ["random", "replacing", "own"])
def test_a_resumed_epoch_goes_on_and_is_left_as_torchs(name, is_left_first):
    process = stoker.feed.loader.this_process()
    loader, _ = made(SAMPLERS[name])
    one = EpochRead(loader, process.books(loader), 6)
    one.take(5)
    if is_left_first:
        one.position.cancel_in_finalizer()
    state = loader.state_dict()

    again, generator = made(SAMPLERS[name])
    again.load_state_dict(state)
    two = EpochRead(again, process.books(again), 6)
    two.given = [None] * 5
    two.num_taken = 5
    found = two.take(3)[5:]
    expected = list(itertools.islice(made(SAMPLERS[name])[0]._index_sampler, 8))[5:]
    assert found == expected
    two.position.cancel_in_finalizer()
    assert torch.equal(generator.get_state(), drawn_by_torch(SAMPLERS[name], 8))
