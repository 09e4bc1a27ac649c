"""stoker.timed passes on any batches as they are, with the timeline of a loader of stoker."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker.feed.bookkeeping import this_process
from stoker.feed.resource_usage import LoaderUsage, read_usage
from stoker.feed.timed import num_samples
from stoker.feed.timeline import MeasuredStep, read_timeline
from stoker.keras import _FitSteps


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_OUTPUT", str(tmp_path))
    _new_process()
    yield tmp_path
    monkeypatch.delenv("STOKER_OUTPUT")
    _new_process()


def _new_process() -> None:
    from stoker.feed.bookkeeping import _process

    _process.cache_clear()


def written(folder: Path) -> list[MeasuredStep]:
    this_process().timeline.close()
    return read_timeline(folder / "timeline-rank0.csv")


def usage(folder: Path) -> dict[int, LoaderUsage]:
    this_process().timeline.close()
    (found,) = read_usage(folder)
    return found.loaders


class Numbers:
    kind = "numbers"

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.count):
            yield [number] * 4


def test_outside_of_a_run_the_sources_own_iterator_is_given():
    source = iter(Numbers())
    assert iter(stoker.timed(source)) is source


def test_batches_are_the_same_and_each_pass_is_an_epoch_with_its_steps(run):
    batches = stoker.timed(Numbers())
    assert [list(batches) for _ in range(2)] == [[[n] * 4 for n in range(3)]] * 2
    steps = written(run)
    assert [(step.loader, step.epoch, step.samples) for step in steps] == [
        (0, epoch, 4) for epoch in (0, 0, 0, 1, 1, 1)
    ]


def test_a_new_source_each_epoch_is_one_loaders_where_the_line_or_the_name_is_the_same(run):
    for _ in range(2):
        for _ in stoker.timed(iter(Numbers())):
            pass
    list(stoker.timed(Numbers(), name="validation"))
    list(stoker.timed(Numbers(), name="validation"))
    steps = written(run)
    assert [(step.loader, step.epoch) for step in steps[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_each_source_has_a_number_of_its_own_which_torchs_loaders_share(run):
    list(stoker.timed(Numbers()))
    list(stoker.DataLoader([1, 2]))
    list(stoker.timed(Numbers()))
    assert {step.loader for step in written(run)} == {0, 1, 2}


def test_an_early_break_leaves_the_steps_that_were_taken(run):
    for batch in stoker.timed(Numbers(9)):
        if batch[0] == 2:
            break
    gc.collect()
    assert len(written(run)) == 3


def test_epochs_may_overlap(run):
    batches = stoker.timed(Numbers())
    pairs = list(zip(batches, batches, strict=True))
    assert len(pairs) == 3
    assert sorted(step.epoch for step in written(run)) == [0, 0, 0, 1, 1, 1]


def test_an_error_of_the_source_is_passed_on_and_the_steps_before_it_are_kept(run):
    def broken() -> Iterator[int]:
        yield 1
        raise LookupError("no second batch")

    with pytest.raises(LookupError, match="no second batch"):
        list(stoker.timed(broken()))
    assert len(written(run)) == 1


def test_a_source_that_goes_on_after_an_error_is_followed(run):
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
    def spin(seconds: float) -> None:
        import time

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def slow() -> Iterator[int]:
        for number in range(3):
            spin(0.02)
            yield number

    for _ in stoker.timed(slow()):
        spin(0.01)
    for step in written(run):
        assert step.wait_seconds >= 0.02
        assert step.compute_seconds >= 0.01


def test_a_length_is_passed_on_where_there_is_one():
    assert len(stoker.timed(Numbers(7))) == 7
    assert stoker.timed(Numbers(7))
    assert not stoker.timed([])
    assert not hasattr(stoker.timed(iter([1])), "__len__")


def test_what_the_source_has_beside_its_batches_is_had():
    batches = stoker.timed(Numbers())
    assert batches.kind == "numbers"
    with pytest.raises(AttributeError, match="no_such"):
        _ = batches.no_such


class _Scalar:
    shape = ()


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
        (_Scalar(), 1),
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


def loaders_that_time_themselves() -> list[Iterable[object]]:
    loader = stoker.DataLoader([1, 2])
    return [loader, stoker.to_device(loader, "cpu"), stoker.timed(Numbers(2))]


@pytest.mark.parametrize("index", range(3))
def test_what_is_timed_already_is_not_timed_twice(run, index):
    assert len(list(stoker.timed(loaders_that_time_themselves()[index]))) == 2
    assert len(written(run)) == 2


def test_torchs_own_loader_is_timed_but_in_a_profile_which_measures_it(run, monkeypatch):
    list(stoker.timed(DataLoader([1, 2])))
    assert len(written(run)) == 2
    monkeypatch.setenv("STOKER_PROFILE", "{}")
    _new_process()
    list(stoker.timed(DataLoader([1, 2])))
    assert len(written(run)) == 2


def test_usage_says_that_the_batches_are_made_elsewhere(run):
    list(stoker.timed(Numbers(20)))
    list(stoker.DataLoader(list(range(20))))
    own = usage(run)
    assert (own[0].is_elsewhere, own[0].steps) == (True, 20)
    assert not own[1].is_elsewhere


class _Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def fit(folder: Path) -> tuple[_FitSteps, _Clock, list[float]]:
    said, clock = [0.0, 0.0], _Clock()
    process = this_process()
    books = process.books_of_source("fit")
    steps = _FitSteps(process, lambda: (said[0], said[1]), books=books, clock=clock)
    return steps, clock, said


def test_a_fit_for_each_epoch_is_one_training(run):
    for _ in range(3):
        steps, clock, _ = fit(run)
        steps.epoch_begins()
        clock.now += 0.5
        steps.batch_ended(0)
        steps.epoch_ended()
    assert [(row.loader, row.epoch) for row in written(run)] == [(0, 0), (0, 1), (0, 2)]


def test_a_step_of_keras_is_from_one_end_of_a_batch_to_the_next(run):
    steps, clock, said = fit(run)
    for _ in range(2):
        steps.epoch_begins()
        for batch in range(3):
            clock.now += 0.5
            said[0] += 0.125
            said[1] += 64
            steps.batch_ended(batch)
        steps.epoch_ended()
        # A validation.
        clock.now += 30
    rows = written(run)
    assert [row.epoch for row in rows] == [0, 0, 0, 1, 1, 1]
    assert {(row.wait_seconds, row.compute_seconds, row.samples) for row in rows} == {
        (0.125, 0.375, 64)
    }


def test_steps_of_one_execution_of_keras_are_equal_shares(run):
    steps, clock, said = fit(run)
    steps.epoch_begins()
    clock.now += 2.0
    said[:] = [1.0, 128.0]
    steps.batch_ended(3)
    steps.epoch_ended()
    rows = written(run)
    assert [(row.wait_seconds, row.compute_seconds, row.samples) for row in rows] == [
        (0.25, 0.25, 32)
    ] * 4
