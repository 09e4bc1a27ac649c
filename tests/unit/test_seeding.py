import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed import seeding
from support.property_tests import examples

Draws = tuple[float, float, float]


def draws() -> Draws:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draws_of_batch(words: tuple[int, ...]) -> Draws:
    seeding.seed_batch(words)
    return draws()


def draws_of_sample(words: tuple[int, ...], index: object, occurrence: int = 0) -> Draws:
    seeding.seed_sample(words, index, occurrence)
    return draws()


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


def test_seed_of_a_batch_fits_a_tensor():
    for number in range(64):
        seeding.seed_batch((1, 0, 2, number))
        assert torch.tensor(torch.initial_seed()).dtype == torch.int64
        seeding.seed_sample((1, 2), number, 0)
        assert torch.tensor(torch.initial_seed()).item() == torch.initial_seed()


def test_a_sample_does_not_depend_on_the_kind_of_its_index():
    first = draws_of_sample((1, 2, 3), 5)
    for index in [np.int64(5), torch.tensor(5), np.uint8(5)]:
        assert draws_of_sample((1, 2, 3), index) == first
    assert draws_of_sample((1, 2, 3), (5, 6)) == draws_of_sample((1, 2, 3), [np.int32(5), 6])


def test_samples_differ_by_index_and_by_occurrence():
    indices: list[object] = [5, "5", b"5", (5,), ((5,),), 5.0, None, (5, 5), (55,)]
    seen = {draws_of_sample((1,), index) for index in indices}
    seen.add(draws_of_sample((1,), 5, 1))
    seen.add(draws_of_sample((2,), 5))
    seen.add(draws_of_batch((1,)))
    assert len(seen) == len(indices) + 3


def test_the_trainers_own_random_state_is_restored():
    draws_of_batch((9,))
    expected = draws()
    draws_of_batch((9,))
    with seeding.preserved_random_state():
        draws_of_batch((1, 2))
        random.gauss(0, 1)
    assert draws() == expected
