import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from stoker.feed import random_states, seeding
from stoker.feed.random_states import PreservedRandomStates
from stoker.feed.seeding import Seeder
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


def test_the_draws_of_a_batchs_samples_are_the_same_in_every_version():
    # As above: they are those of each place where a stretch of samples begins.
    seeder = Seeder({"dataset": None, "collate_fn": None}, num_workers=None, seeding="stretch")
    words = (1, 0, 2, 3)
    samples = seeder.make(words, lambda: [draws() for _ in seeder.each(words, range(64))])
    first = (0.04760812712560181, 0.8716637812568423, 0.5403671860694885)
    assert samples[0] == pytest.approx(first, abs=1e-7)
    # It draws behind the first one.
    second = (0.9842091612398206, 0.47080147206852085, 0.6606608629226685)
    assert samples[1] == pytest.approx(second, abs=1e-7)
    last_stretch = (0.3006650967476181, 0.8831765893524746, 0.5778993964195251)
    assert samples[62] == pytest.approx(last_stretch, abs=1e-7)


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
    with PreservedRandomStates():
        draws_of_batch((1, 2))
        random.gauss(0, 1)
    assert draws() == expected


SCRIPTS_DRAWS = {
    "nothing": lambda: None,
    "uniform": np.random.random,
    "one normal": np.random.normal,
    "two normals": lambda: np.random.normal(size=2),
    "three normals": lambda: np.random.normal(size=3),
    "many": lambda: np.random.random(1000),
    "seeds": lambda: np.random.seed(3),
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


# What changes the cached draw, and not the 624 numbers.
CACHED_DRAWS = {
    "set_state": lambda state: np.random.set_state({**state, "has_gauss": 1, "gauss": 0.25}),
    "another one": lambda state: np.random.set_state({**state, "has_gauss": 1, "gauss": 0.5}),
    "used": lambda state: np.random.normal() if state["has_gauss"] else None,
    "dropped": lambda state: np.random.set_state({**state, "has_gauss": 0, "gauss": 0.0}),
    "legacy tuple": lambda state: np.random.set_state((*np.random.get_state()[:3], 1, 0.75)),
    "of the object": lambda state: np.random.mtrand._rand.__setstate__(
        {**state, "has_gauss": 1, "gauss": 0.125}
    ),
}


@pytest.mark.parametrize("after", CACHED_DRAWS.values(), ids=CACHED_DRAWS)
@pytest.mark.parametrize("before", CACHED_DRAWS.values(), ids=CACHED_DRAWS)
@pytest.mark.parametrize("is_half_used", [False, True])
def test_a_cached_normal_draw_that_a_script_restores_is_kept(is_half_used, before, after):
    np.random.seed(11)
    if is_half_used:
        np.random.normal()
    for change in (lambda _: None, before, after, before):
        change(np.random.get_state(legacy=False))
        expected = np.random.get_state()
        with PreservedRandomStates():
            draws_of_batch((1, 2))
        found = np.random.get_state()
        assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


def test_the_cached_normal_draw_is_found_in_this_numpy():
    assert random_states._normal_place() is not None


def test_numpys_state_of_another_bit_generator_is_kept():
    bits = np.random.mtrand._rand._bit_generator
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        with PreservedRandomStates():
            np.random.random(3)
        found = np.random.random(3)
        np.random.set_bit_generator(np.random.PCG64(5))
        assert np.array_equal(found, np.random.random(3))
    finally:
        np.random.set_bit_generator(bits)


@pytest.fixture
def asked_again():
    """What is known of the two libraries' memory is found anew in this test, and after it."""

    def forget():
        random_states._python_of.cache_clear()
        random_states._numpy_of.cache_clear()

    forget()
    yield
    forget()


LAYOUTS = {
    "NumPy keeps the normal draw elsewhere": ("_normal_place", lambda: None),
    "NumPy's words are others": ("_shows_numpy", lambda memory: False),
    "Python's words are others": ("_shows_python", lambda generator: False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_of_another_layout_is_not_believed_and_draws_are_the_same(
    name, monkeypatch, asked_again
):
    expected_of_batch = draws_of_batch((1, 2))
    random_states._python_of.cache_clear()
    random_states._numpy_of.cache_clear()
    function, instead = LAYOUTS[name]
    monkeypatch.setattr(random_states, function, instead)
    libraries = {type(random_states._python()), type(random_states._numpy())}
    assert libraries & {random_states._PythonLibrary, random_states._NumpyLibrary}
    for _ in range(3):
        draws_of_batch((9,))
        expected = draws()
        draws_of_batch((9,))
        with PreservedRandomStates():
            assert draws_of_batch((1, 2)) == expected_of_batch
            random.gauss(0, 1), np.random.normal()
        assert draws() == expected


def test_both_libraries_are_read_as_memory_here():
    assert isinstance(random_states._python(), random_states._PythonMemory)
    assert isinstance(random_states._numpy(), random_states._NumpyMemory)


def test_memory_that_is_not_the_state_is_found_out(asked_again):
    generator, other = random.Random(1), random.Random(2)
    assert random_states._shows_python(generator)
    numpys = random_states._numpy()
    assert isinstance(numpys, random_states._NumpyMemory)
    assert random_states._shows_numpy(numpys)
    numpys._words = memoryview(bytes(2500))
    assert not random_states._shows_numpy(numpys)
    assert not random_states._shows_python(_Subclass(3))
    assert other.random() == random.Random(2).random()


class _Subclass(random.Random):
    pass


@given(st.binary(min_size=32, max_size=32))
@settings(max_examples=examples(50))
def test_numpy_is_seeded_as_by_its_own_function(eight_words):
    for words in (eight_words, eight_words[:28] + bytes(4), bytes(32), bytes(31) + b"\1"):
        np.random.normal()
        np.random.seed(np.frombuffer(words, dtype="<u4"))
        expected = np.random.get_state()
        np.random.normal(size=3)
        numpy = random_states._numpy()
        numpy.write(numpy.seeded(words))
        found = np.random.get_state()
        assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


NORMALS = {
    "none": lambda: None,
    "one of a pair": lambda: random.gauss(0, 1),
    "both": lambda: (random.gauss(0, 1), random.gauss(0, 1)),
}


@pytest.mark.parametrize("after", NORMALS.values(), ids=NORMALS)
@pytest.mark.parametrize("before", NORMALS.values(), ids=NORMALS)
def test_pythons_second_normal_draw_is_the_scripts_after_each_batch(before, after):
    for draw in (before, after, before):
        draw()
        expected = random.getstate()
        with PreservedRandomStates():
            draws_of_batch((1, 2))
            random.gauss(0, 1)
        assert random.getstate() == expected


def test_another_bit_generator_under_the_global_functions_is_seeded():
    bits = np.random.mtrand._rand._bit_generator
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        first = draws_of_batch((1, 2))
        np.random.random(3)
        assert draws_of_batch((1, 2)) == first
        assert draws_of_batch((1, 3)) != first
    finally:
        np.random.set_bit_generator(bits)


def test_a_dataset_that_exchanges_numpys_generator_does_not_break_the_batch():
    bits = np.random.mtrand._rand._bit_generator
    try:
        with PreservedRandomStates():
            np.random.set_bit_generator(np.random.PCG64(5))
            np.random.random()
        assert np.random.mtrand._rand._bit_generator is not bits
        np.random.random()
    finally:
        np.random.set_bit_generator(bits)


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


@pytest.mark.parametrize("kind", KINDS)
def test_samples_do_not_depend_on_their_batches(kind):
    def made(batches: list[list[int]]) -> dict[object, float]:
        dataset = kind()
        own = seeder(dataset)
        found: dict[object, float] = {}
        for number, batch in enumerate(batches):
            each = words_of(number)
            found |= own.make(
                each,
                lambda: {i: dataset.draw() for i in own.each(each, batch)},  # noqa: B023
            )
        return found

    found = made([[1, 2], [3, 4]])
    assert made([[4, 1, 3], [2]]) == found
    assert len(set(found.values())) == 4


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


def test_the_trainers_own_generators_are_as_before():
    dataset = Eager()
    own = seeder(dataset, num_workers=None)
    with own.preserved():
        own.make(words_of(0), dataset.draw)
    with pytest.raises(LookupError), own.preserved():
        own.make(words_of(1), lambda: [dataset.draw(), [][0]])
    assert dataset.draw() == random.Random(7).random()


def test_an_error_that_a_new_generator_may_have_led_to_is_retried():
    dataset = Lazy()
    own = seeder(dataset)
    tries: list[float] = []

    def make() -> float:
        tries.append(dataset.draw())
        if len(tries) == 1:
            raise LookupError("no")
        return tries[-1]

    assert own.make(words_of(0), make) == tries[1]
    with pytest.raises(LookupError):
        own.make(words_of(0), lambda: [][0])


def test_a_dataset_that_makes_a_generator_each_time_is_asked_a_few_times_only():
    class Each:
        def draw(self) -> float:
            self.rng = np.random.default_rng(3)
            return float(self.rng.random())

    dataset = Each()
    assert seeder(dataset).make(words_of(0), dataset.draw) == np.random.default_rng(3).random()


def test_what_cannot_be_seeded_is_told_once(capfd):
    dataset = Eager()
    dataset.rng = random.SystemRandom()
    own = seeder(dataset)
    for number in range(3):
        dataset.__dict__[f"new{number}"] = None
        own.make(words_of(number), dataset.draw)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert "generator_not_seeded" in told[0]
    assert "dataset.rng (a random.SystemRandom)" in told[0]


def test_held_generators_are_put_back_also_where_torchs_state_cannot_be(monkeypatch):
    class Holding:
        def __init__(self) -> None:
            self.drawn_from = random.Random(1)

    dataset = Holding()
    seeder = Seeder({"dataset": dataset, "collate_fn": list}, num_workers=None)
    before = dataset.drawn_from.getstate()

    def fails(*_: object) -> None:
        raise RuntimeError("no such state")

    monkeypatch.setattr(PreservedRandomStates, "__exit__", fails)
    with pytest.raises(RuntimeError, match="no such state"), seeder.preserved():
        seeder.make((7, 0, 0, 1), dataset.drawn_from.random)
    assert dataset.drawn_from.getstate() == before
