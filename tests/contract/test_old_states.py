"""A run that goes on from an earlier version's state: the numbers it would have drawn."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.feed import bookkeeping


class Drawing(Dataset[list[float]]):
    def __init__(self, size=24):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]


def loader_of(num_workers, *, persists=False, size=24, batch_size=4):
    torch.manual_seed(3)
    return stoker.DataLoader(
        Drawing(size),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=persists and num_workers > 0,
    )


def rows(batches):
    return [torch.stack(list(batch)).tolist() for batch in batches]


@pytest.fixture
def process(monkeypatch):
    bookkeeping._process.cache_clear()
    yield monkeypatch
    bookkeeping._process.cache_clear()


@pytest.fixture
def of_an_earlier_version(process):
    """What an earlier version made of two epochs, and its state after two batches."""
    loader = loader_of(0)
    # One that is not begun; its random numbers are pinned below (BY_BATCH).
    loader.load_state_dict(loader.state_dict() | {"seeding": "batch"})
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    state = loader.state_dict()
    rest = [*iterator, *loader]
    assert state.pop("seeding") == "batch"
    bookkeeping._process.cache_clear()
    return rows(first), rows(rest), state


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_as_the_version_that_saved_it_seeded(
    num_workers, of_an_earlier_version, capfd
):
    first, rest, state = of_an_earlier_version
    fresh = loader_of(num_workers)
    assert rows(fresh)[:2] != first
    loader = loader_of(num_workers, persists=True)
    loader.load_state_dict(state)
    assert rows([*loader, *loader]) == rest
    assert loader.state_dict()["seeding"] == "batch"
    assert capfd.readouterr().err.count("its random numbers continue") == 1


def test_workers_that_persist_change_their_seeding_with_the_state(of_an_earlier_version):
    _, rest, state = of_an_earlier_version
    loader = loader_of(2, persists=True)
    list(loader)
    loader.load_state_dict(state)
    assert rows([*loader, *loader]) == rest


# Of an epoch of 96 samples in two batches, the second one's first two samples and its last one, as
# versions made them that seeded each batch once, or each sample.
BY_BATCH = [
    (71.0, 0.5800858421149971, 0.9117929844867606, 0.712165117263794),
    (11.0, 0.12336995303209286, 0.8346434106637817, 0.9860959053039551),
    (25.0, 0.8025708937915063, 0.751667717935701, 0.7978082299232483),
]
BY_PLACE = [
    (71.0, 0.278005359750538, 0.9325069257984624, 0.6915503144264221),
    (11.0, 0.3810855324772525, 0.7144370309783539, 0.18765413761138916),
    (25.0, 0.05021357717178876, 0.7035102966977974, 0.05092811584472656),
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("splits", ["auto", "true", "false"])
@pytest.mark.parametrize(
    ("seeding", "words", "expected"),
    [("batch", "batch by batch", BY_BATCH), ("place", "sample by sample", BY_PLACE)],
)
def test_a_run_that_seeded_otherwise_resumes_as_it_began(
    num_workers, splits, seeding, words, expected, process, capfd
):
    if splits != "auto":
        process.setenv("STOKER_FEED", f'{{"split_batches": {splits}}}')
    loader = loader_of(0, size=96, batch_size=48)
    iterator = iter(loader)
    next(iterator)
    # That version's state had another word for its seeding.
    state = loader.state_dict() | {"seeding": seeding}
    resumed = loader_of(num_workers, size=96, batch_size=48)
    resumed.load_state_dict(state)
    ((*columns,),) = rows(resumed)
    samples = list(zip(*columns, strict=True))
    assert [samples[place] for place in (0, 1, 47)] == [pytest.approx(row) for row in expected]
    assert resumed.state_dict()["seeding"] == seeding
    assert capfd.readouterr().err.count(f"seeded {words}: its random numbers") == 1


@pytest.mark.parametrize("batch_size", [4, 12, 48])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_of_this_version_resumes_with_its_seeding(num_workers, batch_size, process):
    loader = loader_of(0, size=96, batch_size=batch_size)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state["seeding"] == "stretch"
    resumed = loader_of(num_workers, size=96, batch_size=batch_size)
    resumed.load_state_dict(state)
    assert rows(resumed) == rows(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_draws_the_same_whether_batches_are_split_or_not(num_workers, process):
    def epochs_with(splits):
        bookkeeping._process.cache_clear()
        process.setenv("STOKER_FEED", f'{{"split_batches": {splits}}}')
        loader = loader_of(num_workers, size=96, batch_size=64)
        return rows([*loader, *loader]), loader.state_dict()["seeding"]

    expected = epochs_with('"auto"')
    assert expected[1] == "stretch"
    assert epochs_with("true") == expected
    assert epochs_with("false") == expected


@pytest.mark.parametrize(("before", "after"), [('"auto"', "false"), ("false", '"auto"')])
def test_a_run_resumes_the_same_with_another_split(before, after, process):
    process.setenv("STOKER_FEED", f'{{"split_batches": {before}}}')
    loader = loader_of(0, size=192, batch_size=64)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    process.setenv("STOKER_FEED", f'{{"split_batches": {after}}}')
    bookkeeping._process.cache_clear()
    resumed = loader_of(2, size=192, batch_size=64)
    resumed.load_state_dict(state)
    assert rows(resumed) == rows(iterator)
