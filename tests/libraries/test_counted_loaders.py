"""Loaders that libraries read in turn, or one after the other, are all counted."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from stoker.environment import from_environment
from stoker.feed import bookkeeping
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.loader import replaced_iterator_of
from stoker.feed.timeline import Timeline, steps_in
from stoker.feed.training_steps import read_timelines

# Lightning's own use of torch's trees.
pytestmark = [pytest.mark.library, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def process(tmp_path, monkeypatch):
    settings = replace(from_environment(), output=tmp_path)
    process = TrainerProcess(settings, Timeline(tmp_path / "timeline-rank0.csv"))
    monkeypatch.setattr(bookkeeping, "_process", lambda pid: process)
    # As where torch's class is replaced: libraries make loaders of it.
    monkeypatch.setattr(DataLoader, "_get_iterator", replaced_iterator_of)
    return process


def made(size, *, salt=0):
    data = TensorDataset(torch.arange(size) + salt)
    return DataLoader(data, batch_size=4, shuffle=True)


def lightnings():
    """Two loaders of one training step, and of unequal size."""
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader
    loaders = combined({"labelled": made(40), "other": made(80)}, mode="max_size_cycle")
    for _ in range(2):
        for batch, _, _ in iter(loaders):
            yield from batch.values()


def accelerates():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    real, drawn = accelerator.prepare(made(40), made(40, salt=100))
    for _ in range(3):
        for pair in zip(real, drawn, strict=True):
            yield from pair


def folds():
    folds_of = pytest.importorskip("sklearn.model_selection").KFold(5).split
    data = TensorDataset(torch.arange(60))
    kept = []
    for train, check in folds_of(range(60)):
        for part in (train, check):
            # All are kept, so none is one that is made again.
            kept.append(DataLoader(Subset(data, part.tolist()), batch_size=4))
            yield from kept[-1]


@pytest.mark.parametrize("batches", [lightnings, accelerates, folds])
def test_all_loaders_of_a_library_are_counted(process, tmp_path, batches):
    taken = sum(1 for _ in batches())
    process.timeline.close()
    (rows,) = read_timelines(tmp_path).values()
    # A library that reads a batch ahead leaves the last step of a loader open.
    assert taken - 2 <= steps_in(rows) <= taken + 2
    assert len({row.loader for row in rows}) >= 2
    assert process.timeline.training.steps == steps_in(rows)
