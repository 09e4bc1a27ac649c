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
    process.setenv("STOKER_FEED", '{"split_batches": false}')
    loader = loader_of(0)
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    state = loader.state_dict()
    rest = [*iterator, *loader]
    assert state.pop("seeding") == "batch"
    process.delenv("STOKER_FEED")
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
# the version made them that seeded each sample.
BY_PLACE = [
    (71.0, 0.278005359750538, 0.9325069257984624, 0.6915503144264221),
    (11.0, 0.3810855324772525, 0.7144370309783539, 0.18765413761138916),
    (25.0, 0.05021357717178876, 0.7035102966977974, 0.05092811584472656),
]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_seeded_each_sample_resumes_as_it_began(num_workers, process, capfd):
    loader = loader_of(0, size=96, batch_size=48)
    iterator = iter(loader)
    next(iterator)
    # That version's state had another word for its seeding.
    state = loader.state_dict() | {"seeding": "place"}
    resumed = loader_of(num_workers, size=96, batch_size=48)
    resumed.load_state_dict(state)
    ((*columns,),) = rows(resumed)
    samples = list(zip(*columns, strict=True))
    assert [samples[place] for place in (0, 1, 47)] == [pytest.approx(row) for row in BY_PLACE]
    assert resumed.state_dict()["seeding"] == "place"
    assert capfd.readouterr().err.count("seeded sample by sample: its random numbers") == 1


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
