import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from stoker.feed.seeding import PreservedRandomStates, Seeder
from support.property_tests import examples

Draws = tuple[float, float, float]


def draws() -> Draws:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draws_of_batch(words: tuple[int, ...]) -> Draws:
    roots = {"dataset": None, "collate_fn": None}
    return Seeder(roots, num_workers=None).make(words, draws)


words = st.lists(st.integers(0, (1 << 64) - 1), max_size=8).map(tuple)


@given(words, words)
@settings(max_examples=examples(50))
def test_equal_words_give_equal_draws_and_others_give_others(a, b):
    first = draws_of_batch(a)
    random.random(), np.random.rand(), torch.rand(3)
    assert draws_of_batch(a) == first
    if a != b:
        assert all(x != y for x, y in zip(first, draws_of_batch(b), strict=True))


def test_the_draws_are_the_same_in_every_version():
    # A change here changes the batches of every run that is resumed.
    assert draws_of_batch((1, 0, 2, 3)) == pytest.approx(
        (0.47516921017931557, 0.9921970348680385, 0.9558907747268677), abs=1e-7
    )


def test_the_trainers_own_random_state_is_restored():
    draws_of_batch((9,))
    expected = draws()
    draws_of_batch((9,))
    with PreservedRandomStates():
        draws_of_batch((1, 2))
        random.gauss(0, 1)
    assert draws() == expected


SCRIPTS_DRAWS = {
    "nothing": lambda: None,
    "one normal": np.random.normal,
    "back to a half used pair": lambda: np.random.set_state(("MT19937", *_half_used()[1:])),
}


def _half_used():
    own = np.random.RandomState(4)
    own.normal()
    return own.get_state()


@pytest.mark.parametrize("after", SCRIPTS_DRAWS.values(), ids=SCRIPTS_DRAWS)
@pytest.mark.parametrize("before", SCRIPTS_DRAWS.values(), ids=SCRIPTS_DRAWS)
def test_numpys_state_is_the_scripts_after_each_batch_whatever_it_draws(before, after):
    for draw in (before, before, after, after, before):
        draw()
        expected = np.random.get_state()
        with PreservedRandomStates():
            draws_of_batch((1, 2))
            np.random.normal()
        found = np.random.get_state()
        assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


class Lazy:
    rng: np.random.Generator | None = None

    def draw(self) -> float:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(None if info is None else info.seed)
        return float(self.rng.random())


class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed: int) -> None:
        self.R = np.random.RandomState(seed)

    def draw(self) -> float:
        return float(self.R.uniform())


class Eager:
    def __init__(self) -> None:
        self.rng = random.Random(7)

    def draw(self) -> float:
        return self.rng.random()


class Global:
    def draw(self) -> float:
        return random.random()


KINDS = [Lazy, Randomizable, Eager, Global]


@pytest.fixture(autouse=True)
def _kept_state(monkeypatch):
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    with PreservedRandomStates():
        yield


def words_of(number: int) -> tuple[int, ...]:
    return (10, 0, 0, number)


def seeder(dataset: object, num_workers: int | None = 2) -> Seeder:
    return Seeder({"dataset": dataset, "collate_fn": list}, num_workers=num_workers)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_do_not_depend_on_which_process_makes_them(kind):
    def made(numbers: range) -> dict[int, list[float]]:
        dataset = kind()
        own = seeder(dataset)
        return {
            number: own.make(words_of(number), lambda: [dataset.draw() for _ in range(3)])
            for number in numbers
        }

    whole = made(range(40))
    parts = made(range(0, 40, 3)) | made(range(1, 40, 3)) | made(range(38, 0, -3))
    assert parts == whole
    assert len({draw for batch in whole.values() for draw in batch}) == 120


def test_worker_info_is_that_of_the_worker_that_torch_would_have_take_the_batch():
    dataset = Global()
    # The trainer's own process is no worker.
    assert seeder(dataset, num_workers=None).make(words_of(1), get_worker_info) is None
    own = seeder(dataset, num_workers=3)
    for number in (0, 4, 5, 3):
        info = own.make(words_of(number), get_worker_info)
        assert (info.id, info.num_workers, info.seed) == (number % 3, 3, 10 + number % 3)
        assert info.dataset is dataset
    assert own.make((50, 0, 1, 0), get_worker_info).seed == 50
