from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stoker
from stoker.environment import from_environment
from stoker.feed import bookkeeping
from stoker.feed.bookkeeping import EpochProgress, TrainerProcess
from stoker.feed.iterators import IndexDraws
from stoker.feed.step_times import read_timelines, training_steps
from stoker.feed.timeline import Timeline, read_timeline, steady
from stoker.figures.measured import measure
from stoker.profile.facts import early_digests, facts_of


@pytest.fixture
def timeline(tmp_path, monkeypatch):
    path = tmp_path / "timeline-rank0.csv"
    settings = replace(from_environment(), output=tmp_path)
    process = TrainerProcess(settings, Timeline(path))
    monkeypatch.setattr(bookkeeping, "_process", lambda pid: process)
    return path


def numbers(size: int) -> Dataset[tuple[torch.Tensor, ...]]:
    return TensorDataset(torch.arange(size))


def made(data: object) -> "stoker.DataLoader[object]":
    return stoker.DataLoader(data, batch_size=1)


def read(loader: "stoker.DataLoader[object]") -> None:
    for _ in loader:
        pass


def found(path: Path) -> list[tuple[int, int]]:
    steps = read_timeline(path)
    return [(n, sum(s.loader == n for s in steps)) for n in sorted({s.loader for s in steps})]


def test_a_loader_made_in_each_epoch_is_one_loader_with_all_epochs(timeline):
    data = numbers(20)
    for _ in range(6):
        loader = stoker.DataLoader(data, batch_size=1)
        read(loader)
    steps = training_steps(read_timeline(timeline))
    assert len(steps) == 120
    assert [step.epoch for step in steps] == [epoch for epoch in range(6) for _ in range(20)]
    # Of each epoch's 20 not the first two, nor a last one that is unlike the one before it.
    batches = [step.batch for step in steady(steps)]
    assert set(batches) in ({*range(2, 19)}, {*range(2, 20)})
    assert Counter(batches)[18] == 6
    measured = measure(read_timelines(timeline.parent), {})
    assert (measured.steps, measured.spread["step_seconds"].samples) == (120, 6)


def test_training_and_validation_of_one_line_are_two(timeline):
    for _ in range(2):
        loaders = [made(numbers(size)) for size in (8, 4)]
        for loader in loaders:
            read(loader)
    assert found(timeline) == [(0, 16), (1, 8)]


# A profile sees what changes between the steps of a loader without workers.


class Replay(Dataset):
    def __init__(self):
        self.items = [1.0]
        self.count = 0
        self.file = None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.items[-1]


class Counting(Replay):
    def __getitem__(self, index):
        self.count += 1
        return self.count


class OpenedLater(Replay):
    def __getitem__(self, index):
        if self.file is None and index > 16:
            self.file = open(__file__)  # noqa: SIM115
        return 1.0


def words_of(dataset, change=lambda step: None, **options):
    loader = DataLoader(dataset, batch_size=2, **options)
    before: dict[str, str] = {}
    for step in range(20):
        if not options:
            dataset[step]
        if step == 1:
            before = early_digests(loader)
        change(step)
    return facts_of(loader, before=before).unsendable


def test_nothing_is_said_where_nothing_changes_or_workers_make_the_batches():
    assert words_of(Replay()) == words_of(Counting(), num_workers=1) == ""


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_member_that_changes_is_named():
    dataset = Replay()
    words = words_of(dataset, lambda step: dataset.items.append(step))
    assert words.startswith("dataset.items changed between two batches, and num_workers=0 means")
    assert words_of(Counting()).startswith("dataset.count changed")
    assert words_of(OpenedLater()).startswith("dataset.file changed")


# What a sampler gives is taken as it was when it gave it.


class OneList:
    """A batch sampler that gives the same list again and again."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for number in range(4):
            batch[:] = [number, number + 1]
            yield batch


def test_a_sampler_may_give_one_list_again_and_again():
    progress = EpochProgress(epoch=0)
    draws = IndexDraws(iter(OneList()), progress, replica=0, is_batched=True)
    assert [numbered.index for numbered in [*draws]] == [[0, 1], [1, 2], [2, 3], [3, 4]]
