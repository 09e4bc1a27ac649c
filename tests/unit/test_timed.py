"""stoker.timed passes on any batches as they are, with the timeline of a loader of stoker."""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker.feed.bookkeeping import _process, this_process
from stoker.feed.resource_usage import read_usage
from stoker.feed.timed import num_samples
from stoker.feed.timeline import MeasuredStep, read_timeline
from stoker.keras import _FitSteps


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
    assert {(step.loader, step.samples) for step in steps} == {(0, 4)}
    assert Counter(step.epoch for step in steps) == {0: 3, 1: 3, 2: 3, 3: 3, 4: 1}


def test_a_new_source_each_epoch_is_one_loaders_where_the_line_or_the_name_is_the_same(run):
    for _ in range(2):
        for _ in stoker.timed(iter(Numbers())):
            pass
    list(stoker.timed(Numbers(), name="validation"))
    list(stoker.timed(Numbers(), name="validation"))
    # Loaders of torch share the numbers of the sources.
    list(stoker.DataLoader([1, 2, 3]))
    list(stoker.timed(Numbers()))
    steps = written(run)
    assert [(step.loader, step.epoch) for step in steps[::3]] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0))
    ]


def test_an_error_of_the_source_is_passed_on_and_what_comes_after_it_is_followed(run):
    class Bumpy(Iterator[int]):
        asked = 0

        def __next__(self) -> int:
            self.asked += 1
            if self.asked == 2:
                raise ValueError("one bad batch")
            if self.asked > 4:
                raise StopIteration
            return self.asked

    batches = iter(stoker.timed(Bumpy()))
    assert next(batches) == 1
    with pytest.raises(ValueError, match="one bad batch"):
        next(batches)
    assert list(batches) == [3, 4]
    assert len(written(run)) == 3


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


def test_outside_of_a_run_the_source_is_as_it_was():
    source = iter(Numbers())
    assert iter(stoker.timed(source)) is source
    batches = stoker.timed(Numbers(7))
    assert batches
    assert len(batches) == 7
    assert not stoker.timed([])
    assert not hasattr(stoker.timed(source), "__len__")
    assert batches.kind == "numbers"
    with pytest.raises(AttributeError, match="no_such"):
        _ = batches.no_such


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(5, 2), torch.zeros(5)), 5),
        ({"id": "x", "pixels": torch.zeros(6, 2)}, 6),
        ([[torch.tensor(1.0)], torch.zeros(3)], 3),
        (["a", "b"], 2),
        ({"text": ["a", "b", "c"]}, 3),
        ("text", 1),
        (object(), 1),
        (SimpleNamespace(shape=()), 1),
        ({}, 0),
    ],
    ids=range(10),
)
def test_samples_are_the_first_dimension_or_the_length(batch, expected):
    assert num_samples(batch) == expected


@pytest.mark.parametrize("samples", [32, lambda batch: len(batch) * 8])
def test_the_script_may_say_how_many_samples_a_batch_has(run, samples):
    list(stoker.timed(Numbers(), samples=samples))
    assert {step.samples for step in written(run)} == {32}


@pytest.mark.parametrize(
    "timed",
    [
        lambda: stoker.DataLoader([1, 2]),
        lambda: stoker.to_device(stoker.DataLoader([1, 2]), "cpu"),
        lambda: stoker.timed(Numbers(2)),
    ],
)
def test_what_is_timed_already_is_not_timed_twice(run, timed):
    assert len(list(stoker.timed(timed()))) == 2
    assert len(written(run)) == 2


def test_torchs_own_loader_is_timed_but_in_a_profile_which_measures_it(run, monkeypatch):
    list(stoker.timed(DataLoader([1, 2])))
    assert len(written(run)) == 2
    monkeypatch.setenv("STOKER_PROFILE", "{}")
    _process.cache_clear()
    list(stoker.timed(DataLoader([1, 2])))
    assert len(written(run)) == 2


def test_what_iter_takes_is_a_part_of_the_first_wait(run):
    class Slow(Numbers):
        def __iter__(self):
            time.sleep(0.05)
            return super().__iter__()

    list(stoker.timed(Slow(3)))
    first, *others = written(run)
    assert first.wait_seconds >= 0.05
    assert all(row.start_seconds >= 0.05 for row in others)


def test_usage_says_that_the_batches_are_made_elsewhere(run):
    list(stoker.timed(Numbers(20)))
    list(stoker.DataLoader(list(range(20))))
    this_process().timeline.close()
    (usage,) = read_usage(run)
    assert (usage.loaders[0].is_elsewhere, usage.loaders[0].steps) == (True, 20)
    assert not usage.loaders[1].is_elsewhere


class Fit:
    """An epoch of `fit`, whose progress a clock and Keras' sums of wait and samples tell."""

    def __init__(self) -> None:
        self.now, self.wait, self.samples = 10.0, 0.0, 0.0
        process = this_process()
        books = process.books_of_source("fit")
        self.steps = _FitSteps(
            process, lambda: (self.wait, self.samples), books=books, clock=lambda: self.now
        )

    def epoch(self, *ends: int, seconds: float, wait: float, samples: int) -> None:
        self.steps.epoch_begins()
        for batch in ends:
            self.now += seconds
            self.wait += wait
            self.samples += samples
            self.steps.batch_ended(batch)
        self.steps.epoch_ended()


def test_a_step_of_keras_is_from_one_end_of_a_batch_to_the_next(run):
    fit = Fit()
    for _ in range(2):
        fit.epoch(0, 1, 2, seconds=0.5, wait=0.125, samples=64)
        # A validation.
        fit.now += 30
    # Another `fit` is the same training; the steps of one execution are equal shares.
    Fit().epoch(3, seconds=2.0, wait=0.5, samples=256)
    rows = written(run)
    assert [(row.loader, row.epoch) for row in rows] == [
        *((0, epoch) for epoch in (0, 0, 0, 1, 1, 1, 2, 2, 2, 2))
    ]
    times = {(row.wait_seconds, row.compute_seconds, row.samples) for row in rows}
    assert times == {(0.125, 0.375, 64)}
