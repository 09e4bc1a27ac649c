import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import stoker
from stoker.environment import from_environment
from stoker.feed import bookkeeping
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.timeline import Timeline, read_timeline, steady
from stoker.feed.training_steps import read_timelines, training_steps
from stoker.figures.passive_profile import measure


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


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def cyclic() -> Dataset[tuple[torch.Tensor, ...]]:
    data = numbers(4)
    # It is not gone when the script drops it.
    data.itself = data
    return data


@pytest.mark.parametrize("kind", [lambda: numbers(4), Stream, cyclic])
def test_a_dataset_or_stream_made_in_each_epoch_is_no_other_loader(timeline, kind):
    for _ in range(3):
        read(made(kind()))
    assert found(timeline) == [(0, 12)]


def test_a_list_has_no_weak_references_and_is_known_by_its_length(timeline):
    for size in (4, 4, 5):
        read(made(list(range(size))))
    assert found(timeline) == [(0, 8), (1, 5)]


def test_training_and_validation_through_one_helper_are_two(timeline):
    for _ in range(2):
        read(made(numbers(4)))
        read(made(numbers(4)))
    assert found(timeline) == [(0, 8), (1, 8)]


def test_training_and_validation_of_one_line_are_two(timeline):
    data = numbers(4)
    for _ in range(2):
        loaders = [made(data) for _ in ("train", "val")]
        for loader in loaders:
            read(loader)
    assert found(timeline) == [(0, 8), (1, 8)]


def test_training_and_validation_in_one_loop_over_phases_are_two(timeline):
    phases = [numbers(4), numbers(3)]
    for data in phases * 3:
        read(made(data))
    assert found(timeline) == [(0, 12), (1, 9)]


def test_a_loader_that_is_read_twice_stays_one(timeline):
    train, val = made(numbers(3)), made(numbers(3))
    for _ in range(2):
        read(train)
        read(val)
    assert found(timeline) == [(0, 6), (1, 6)]


def test_batches_of_a_loader_made_anew_are_seeded_as_its_own_first_epoch(timeline):
    orders = []
    for _ in range(2):
        torch.manual_seed(7)
        loader = stoker.DataLoader(numbers(50), batch_size=None, shuffle=True)
        orders.append([int(value) for (value,) in loader])
        assert loader.state_dict()["epoch"] == 1
    assert orders[0] == orders[1]


class Clients:
    """Holds a dataset as scripts do."""

    def __init__(self, data: object) -> None:
        self.data = data


KEPT = {
    "dropped": lambda data: None,
    "in a list": lambda data: [data],
    "in a mapping": lambda data: {"data": data},
    "in an attribute": Clients,
    "in a closure": lambda data: lambda: data,
}
SORTS = {"map-style": numbers, "a list": lambda size: [0] * size, "a stream": lambda size: Stream()}


@pytest.mark.parametrize("sort", SORTS.values(), ids=SORTS)
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_equal_datasets_read_in_turn_are_one_loader_however_the_script_keeps_them(
    timeline, monkeypatch, keep, sort
):
    def refuse(*_: object) -> None:
        raise AssertionError("iter() neither sleeps nor collects garbage")

    monkeypatch.setattr(time, "sleep", refuse)
    monkeypatch.setattr(gc, "collect", refuse)
    kept = []
    for _ in range(4):
        data = sort(4)
        kept.append(keep(data))
        read(made(data))
    assert found(timeline) == [(0, 16)]


@pytest.mark.parametrize("others", [{"size": 5}, {"batch_size": 2}], ids=["length", "batch size"])
def test_datasets_of_another_length_or_batch_size_are_another_loader(timeline, others):
    sizes = {"size": 4, "batch_size": 1}
    for of_loader in (sizes, sizes | others, sizes, sizes | others):
        read(stoker.DataLoader(numbers(of_loader["size"]), batch_size=of_loader["batch_size"]))
    assert [number for number, _ in found(timeline)] == [0, 1]


def test_equal_loaders_of_one_line_that_are_read_at_the_same_time_are_two(timeline):
    def batches(data: object) -> Iterator[object]:
        yield from made(data)

    for _ in zip(batches(numbers(4)), batches(numbers(4)), strict=True):
        pass
    assert found(timeline) == [(0, 4), (1, 4)]
