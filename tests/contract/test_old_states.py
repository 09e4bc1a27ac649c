"""A run that goes on from an earlier version's state: the numbers it would have drawn."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.feed import bookkeeping


class Drawing(Dataset[list[float]]):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]


def loader_of(num_workers, *, persists=False):
    torch.manual_seed(3)
    return stoker.DataLoader(
        Drawing(),
        batch_size=4,
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


def test_a_state_of_this_version_resumes_with_its_seeding(process):
    loader = loader_of(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state["seeding"] == "place"
    resumed = loader_of(2)
    resumed.load_state_dict(state)
    assert rows(resumed) == rows(iterator)
