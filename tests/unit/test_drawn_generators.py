"""A sample's random numbers follow from its batch and place: whoever makes it, after whatever."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torch.utils.data._utils import worker as torch_worker

from stoker.feed import drawn_generators
from stoker.feed.random_states import PreservedRandomStates
from stoker.feed.seeding import Seeder
from stoker.feed.stretches import stretch_samples
from stoker.feed.wire.dataset import DatasetSpec
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.samples import SampleMaker

SIZE = 12


@pytest.fixture(autouse=True)
def _kept_state(monkeypatch):
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    with PreservedRandomStates():
        yield


class Nothing:
    def __getitem__(self, index):
        return index, torch.initial_seed()


class Torch:
    def __getitem__(self, index):
        return index, float(torch.rand(()))


class Python:
    def __getitem__(self, index):
        return index, random.gauss(0, 1)


class Numpy:
    def __getitem__(self, index):
        return index, float(np.random.normal())


class Held:
    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.unused = random.Random(4)
        self.torchs = torch.Generator()

    def __getitem__(self, index):
        return index, float(self.rng.random()), self.torchs.initial_seed()


class Lazy:
    rng: np.random.RandomState | None = None

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.RandomState(3)
        return index, float(self.rng.normal())


class Replaced:
    """Has another generator for each sample, drawn from the one before."""

    def __init__(self):
        self.inner = Held()

    def __getitem__(self, index):
        self.inner.rng = np.random.default_rng(self.inner.rng.integers(1 << 40))
        return index, float(self.inner.rng.random())


class OfIndex:
    """Has another generator for each sample, seeded by its index."""

    rng: random.Random | None = None

    def __getitem__(self, index):
        self.rng = random.Random(index)
        return index, self.rng.random(), float(torch.rand(()))


class Seldom:
    """Draws from each generator for few samples, also none in the first batches."""

    def __init__(self):
        self.rng = random.Random(4)

    def __getitem__(self, index):
        drawn = [index]
        if index % 37 == 36:
            drawn.append(random.random())
        if index % 41 == 40:
            drawn.append(float(np.random.rand()))
        if index % 29 == 28:
            drawn.append(self.rng.gauss(0, 1))
        return drawn


class Failing:
    """Raises, or not, by a generator that it drew from for the first time."""

    def __getitem__(self, index):
        if index >= 100 and random.random() < 0.1:
            raise LookupError(index)
        return index


def drawing(samples):
    numbers = [float(torch.rand(())), random.random(), float(np.random.rand())]
    return [*samples, numbers]


KINDS = [Nothing, Torch, Python, Numpy, Held, Lazy, Replaced, OfIndex, Seldom, Failing]


class Worker:
    def __init__(self, kind, collate_fn, *, seeding="stretch", size=SIZE):
        self.size = size
        spec = DatasetSpec(dataset=kind(), collate_fn=collate_fn)
        roots = {"dataset": spec.dataset, "collate_fn": collate_fn}
        self.seeder = Seeder(roots, num_workers=2, seeding=seeding)
        self.maker = SampleMaker(
            spec,
            seeder=self.seeder,
            note=lambda *_: None,
            on_bad=lambda *_: None,
            is_stopped=lambda place: False,
        )

    def made(self, number, make):
        words = (7, 0, 1, number)
        order = Make(session="s", epoch_id=0, batch_number=number, index=b"", seed_words=words)
        indices = list(range(number * self.size, number * self.size + self.size))
        try:
            return self.seeder.make(words, lambda: make(order, indices))
        except LookupError as err:
            return repr(err)

    def batch(self, number):
        return self.made(number, self.maker.batch)

    def part(self, number, first, last):
        return self.made(
            number, lambda order, indices: self.maker.samples(order, indices, first, last)
        )

    def collated(self, number, samples):
        return self.made(number, lambda order, _: self.maker.collate(samples, order))


def split(chosen, workers, number):
    """A batch of parts, each by another worker; the error of the first sample counts."""
    size = workers[0].size
    begins = range(0, size, stretch_samples(size))[1:]
    cuts = sorted(chosen.sample(begins, chosen.randint(0, 5)))
    samples = []
    for first, last in zip([0, *cuts], [*cuts, size], strict=True):
        part = chosen.choice(workers).part(number, first, last)
        if isinstance(part, str):
            return part
        samples += part
    return chosen.choice(workers).collated(number, samples)


@pytest.mark.parametrize(
    ("seeding", "size", "num_batches", "collate_fn"),
    # Of the large batches, two samples each draw in a row.
    [("place", SIZE, 24, list), ("stretch", 64, 10, list), ("stretch", 64, 10, drawing)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_whoever_makes_which_part(
    kind, seeding, size, num_batches, collate_fn, monkeypatch
):
    numbers = range(num_batches)
    # All generators are seeded for all samples.
    monkeypatch.setattr(drawn_generators, "_NUM_LOOKED_AT", 1 << 30)
    more = {"seeding": seeding, "size": size}
    alone = Worker(kind, collate_fn, **more)
    expected = [alone.batch(number) for number in numbers]
    assert len({str(batch) for batch in expected}) == len(numbers)
    for seed, num_looked_at in enumerate((1, 5, 30, 64) * 3):
        monkeypatch.setattr(drawn_generators, "_NUM_LOOKED_AT", num_looked_at)
        chosen = random.Random(seed)
        monkeypatch.setattr(drawn_generators, "_NUM_AHEAD", chosen.choice([1, 5, SIZE]))
        workers = [Worker(kind, collate_fn, **more) for _ in range(chosen.randint(1, 8))]
        for number in chosen.sample(numbers, len(numbers)):
            if chosen.random() < 0.3:
                batch = chosen.choice(workers).batch(number)
            else:
                batch = split(chosen, workers, number)
            assert batch == expected[number], (seed, number)


def test_a_sample_draws_the_same_in_a_subset_and_alone():
    plain, subset = Worker(Torch, list), Worker(lambda: Subset(Torch(), range(1000)), list)  # type: ignore[type-var,arg-type]
    assert subset.batch(2) == plain.batch(2)


def test_only_what_is_drawn_from_is_seeded_for_each_sample(monkeypatch):
    monkeypatch.setattr(drawn_generators, "_NUM_LOOKED_AT", 5)
    worker = Worker(Seldom, list)
    drawn = worker.seeder._drawn
    worker.batch(0)
    assert len(drawn._each) == 1
    # Index 28 is in it, of the held generator.
    worker.batch(2)
    assert len(drawn._each) == 2


def test_a_batch_is_made_once_after_the_first_samples_were_looked_at(monkeypatch):
    worker = Worker(Python, list)
    calls = []
    for number in range(20):
        worker.made(number, lambda order, indices: calls.append(worker.maker.batch(order, indices)))
    assert len(calls) == 20


@pytest.mark.parametrize("kind", [Replaced, OfIndex])
def test_batches_are_made_once_where_each_sample_has_another_generator(kind):
    worker = Worker(kind, list, size=64)
    calls = []
    for number in range(20):
        worker.made(number, lambda order, indices: calls.append(worker.maker.batch(order, indices)))
    # The first one shows it.
    assert len(calls) <= 20 + 3
