"""stoker.timed passes on any batches as they are, with the timeline of a loader of stoker."""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker.feed.bookkeeping import _process, this_process
from stoker.feed.timed import num_samples
from stoker.feed.timeline import MeasuredStep, read_timeline


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_OUTPUT", str(tmp_path))
    _process.cache_clear()
    yield tmp_path
    monkeypatch.delenv("STOKER_OUTPUT")
    _process.cache_clear()


def written(folder: Path) -> list[MeasuredStep]:
    this_process().timeline.close()
    return read_timeline(folder / "timeline-rank0.csv")


class Numbers:
    kind = "numbers"

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.count):
            yield [number] * 4


def test_batches_are_the_same_and_each_pass_is_an_epoch_with_its_steps(run):
    batches = stoker.timed(Numbers())
    assert [list(batches) for _ in range(2)] == [[[n] * 4 for n in range(3)]] * 2
    # Two that overlap, and one that is left early.
    assert len(list(zip(batches, batches, strict=True))) == 3
    assert next(iter(batches)) == [0] * 4
    gc.collect()
    steps = written(run)
    assert {(step.loader, step.samples) for step in steps} == {(1000, 4)}
    assert Counter(step.epoch for step in steps) == {0: 3, 1: 3, 2: 3, 3: 3, 4: 1}


def test_a_new_source_each_epoch_is_one_loaders_where_the_line_or_the_name_is_the_same(run):
    for _ in range(2):
        for _ in stoker.timed(iter(Numbers())):
            pass
    list(stoker.timed(Numbers(), name="validation"))
    list(stoker.timed(Numbers(), name="validation"))
    list(stoker.DataLoader([1, 2, 3]))
    list(stoker.timed(Numbers()))
    steps = written(run)
    assert [(step.loader, step.epoch) for step in steps[::3]] == [
        *((1000, 0), (1000, 1), (1001, 0), (1001, 1), (0, 0), (1002, 0))
    ]


def test_wait_is_in_the_source_and_compute_in_the_loop(run):
    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.02)
            yield number

    for _ in stoker.timed(slow()):
        time.sleep(0.01)
    for step in written(run):
        assert step.wait_seconds >= 0.02
        assert step.compute_seconds >= 0.01


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 2), 5),
        ({"id": "x", "pixels": torch.zeros(6, 2)}, 6),
        (["a", "b"], 2),
        (object(), 1),
    ],
)
def test_samples_are_the_first_dimension_or_the_length(batch, expected):
    assert num_samples(batch) == expected


def test_torchs_own_loader_is_timed_but_in_a_profile_which_measures_it(run, monkeypatch):
    list(stoker.timed(DataLoader([1, 2])))
    assert len(written(run)) == 2
    monkeypatch.setenv("STOKER_RUN", '{"profile": {}}')
    _process.cache_clear()
    list(stoker.timed(DataLoader([1, 2])))
    assert len(written(run)) == 2
