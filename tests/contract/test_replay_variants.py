"""Replayed steps beside a loader's own workers, which are real."""

import multiprocessing
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.profile.batches import Cache
from stoker.profile.script_phases import VariantPhases
from stoker.profile.steps import StepClock
from support.cluster import wait_until

MADE = multiprocessing.get_context("fork").Value("i", 0)


class Counted(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        with MADE.get_lock():
            MADE.value += 1
        return torch.full((4,), float(index))


class Failing(Counted):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("no such picture")


class Short(IterableDataset[torch.Tensor]):
    def __iter__(self):
        yield from torch.zeros(12, 4)


def variants_of(loader: DataLoader[torch.Tensor]) -> VariantPhases:
    cache = Cache()
    cache.add(torch.ones(2, 4))
    return VariantPhases(
        cache,
        clock=StepClock(find=lambda: None),
        loader=loader,
        inner=lambda: None,
        iterate=DataLoader.__iter__,
        budget_seconds=100.0,
        elapsed_seconds=lambda: 0.0,
        is_stopped=lambda: False,
    )


def workers() -> set[int]:
    """Returns the living processes that torch's loaders have forked here."""
    return {child.pid for child in multiprocessing.active_children()}


def is_taking() -> bool:
    """Whether a variant still takes batches of its workers, one for each step."""
    return any(thread.name == "stoker-beside" for thread in threading.enumerate())


def train(variants: VariantPhases, *, steps: int) -> None:
    for number in range(steps):
        assert torch.equal(variants.running.batch(number), torch.ones(2, 4))
        time.sleep(0.002)
        variants.running.asked()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Counted(), batch_size=2, num_workers=2),
        DataLoader(Counted(), batch_size=2, num_workers=1, shuffle=True, persistent_workers=True),
        DataLoader(Counted(), batch_size=None, num_workers=2),
    ],
    ids=["two", "one", "samples"],
)
def test_workers_make_a_batch_for_each_step_as_long_as_the_variant_lasts(loader):
    MADE.value = 0
    before = workers()
    variants = variants_of(loader)
    variants.begin("beside-workers")
    begun = MADE.value
    assert len(workers() - before) == loader.num_workers
    samples = loader.batch_size or 1
    assert begun >= samples * loader.num_workers
    train(variants, steps=40)
    wait_until(lambda: MADE.value >= begun + 40 * samples, "a batch was made for each step")
    # No more than are prefetched: the training would not need them.
    ahead = 4 * loader.num_workers * samples
    assert MADE.value <= begun + 40 * samples + ahead
    variants.end()
    assert variants.result().beside_workers.samples >= 20
    assert not variants.notes
    wait_until(lambda: not workers() - before, "the workers have ended")


@pytest.mark.parametrize(
    ("dataset", "words"),
    [(Failing(), "ValueError"), (Short(), "the data ended too soon")],
    ids=["fails", "ends"],
)
def test_a_dataset_that_fails_or_ends_is_said_and_the_steps_go_on(dataset, words):
    variants = variants_of(DataLoader(dataset, batch_size=2, num_workers=2))
    variants.begin("beside-workers")
    train(variants, steps=30)
    wait_until(lambda: not is_taking(), "no more batches are taken")
    variants.end()
    assert variants.result() is None
    (note,) = variants.notes
    assert note.startswith("not measured: what loading adds to a step (")
    assert words in note


def test_a_profile_that_ends_in_a_variant_leaves_no_worker():
    # Those of tests before may still be there.
    before = workers()
    variants = variants_of(DataLoader(Counted(), batch_size=2, num_workers=2))
    variants.begin("beside-workers")
    train(variants, steps=3)
    variants.end()
    variants.end()
    assert variants.notes == ["not measured: what loading adds to a step (too few steps)"]
    wait_until(lambda: not workers() - before, "the workers have ended")
