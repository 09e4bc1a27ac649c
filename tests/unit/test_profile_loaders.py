"""Stock: how much is taken ahead, and which of its steps count."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stoker.profile.explain import explain
from stoker.profile.facts import MAX_BATCHES_WITHOUT_GRADIENTS, MainLoader, facts
from stoker.profile.loader_alone import worker_counts
from stoker.profile.rank_results import BatchFacts
from stoker.profile.stock import (
    bursts_of,
    room_for,
)
from stoker.records import EpochPause, EpochTimes
from support.profiled_ranks import changed, drained, profile_of, rank_of, timed


def bursts(
    *, step=0.05, wait=0.01, budget=180.0, num_bytes=1 << 20, epoch_batches=1000, clock="host"
) -> tuple[int, int]:
    return bursts_of(
        BatchFacts(samples=1, num_bytes=num_bytes, num_tensors=2),
        timed(step, wait=wait, clock=clock),
        epoch_batches=epoch_batches,
        budget_seconds=budget,
        has_workers=True,
    )


def test_a_burst_takes_a_second_of_steps_within_the_epoch_and_a_fifth_of_the_budget():
    assert bursts() == (25, 3)
    # 0.3 s of them do not count there.
    assert bursts(clock="cuda:0") == (33, 3)
    assert bursts(epoch_batches=8)[0] == 8
    assert bursts(epoch_batches=2)[0] == 0
    batches, times = bursts(budget=10.0)
    assert batches * times * 0.09 <= 2.0
    assert bursts(step=9.0, wait=1.0) == (6, 1)


def test_memory_and_open_files_bound_it():
    assert bursts(num_bytes=1 << 40)[0] == 0
    many = BatchFacts(samples=1, num_bytes=1, num_tensors=10**9)
    assert room_for(many, has_workers=True) == 0
    assert room_for(many, has_workers=False) == 512
    assert facts({"x": torch.zeros(2), "y": [torch.ones(3)]}).num_tensors == 2


def make(batch_size: int = 2) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=batch_size)


def test_the_main_loader_is_the_first_of_which_a_second_batch_is_read_with_gradients():
    main, check, looked_at, train = MainLoader(), make(), make(), make()
    with torch.no_grad():
        assert not main.is_(check, delivered=3)
    assert not main.is_(looked_at, delivered=0)
    assert main.is_(train, delivered=1)
    assert not main.is_(check, delivered=500)
    with torch.no_grad():
        assert main.is_(train, delivered=0)


def test_without_any_gradients_a_long_epoch_is_the_main_one():
    with torch.no_grad():
        assert MainLoader().is_(make(), delivered=MAX_BATCHES_WITHOUT_GRADIENTS)


@pytest.mark.parametrize("images", [torch.zeros(4, 1, 8, 8), np.zeros((4, 1, 8, 8), np.float32)])
def test_images_of_floats_are_counted(images):
    found = facts([images, torch.zeros(4), torch.zeros(4, 1, 2, 2, dtype=torch.uint8)])
    assert (found.samples, found.num_tensors, found.float_image_bytes) == (4, 3, 1024)
    assert found.num_bytes == 1024 + 16 + 16


@pytest.mark.parametrize(
    ("script", "vcpus", "seconds", "counts"),
    [
        (0, 1, 54, [1]),
        (6, 8, 54, [8, 1, 6]),
        (0, 16, 54, [16, 1, 2, 4, 8]),
        (4, 8, 54, [8, 1, 4]),
        (0, 96, 18, [96, 1, 2, 4, 8, 16]),
    ],
)
def test_loaders_are_tried_at_one_at_todays_and_from_there_up_to_all_vcpus(
    script, vcpus, seconds, counts
):
    tried = worker_counts(script=script, vcpus=vcpus, seconds=seconds)
    assert tried == counts


# Whole epochs in a profile: seen, or known from its parts, or not known.


# The H100 of 2026-11-26: four workers, each makes a batch in 0.6 s, an epoch has 42.
H100 = rank_of(
    step=0.1596,
    wait=0.1216,
    accelerator=0.0452,
    workers=4,
    vcpus=4,
    trainer_cpu=0.0591,
    children_cpu=0.5394,
    drains=(drained(4, 0.6025), drained(1, 0.6025, wall=0.6034)),
    epoch_times=EpochTimes(steps=42.0, inside_seconds=0.01),
)


def seen(seconds: float) -> EpochPause:
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=4)


def test_start_of_an_epoch_that_was_not_seen_is_one_workers_batch():
    times = profile_of(H100).epochs
    assert times.steps == 42
    assert times.start.seconds == pytest.approx(0.6034 - 0.1216)
    assert times.start.count == 0
    # Warming up is in the mean of a profile's steps.
    assert (times.between, times.inside_seconds) == (None, None)


def test_epochs_that_were_seen_count_as_they_were():
    epochs = EpochTimes(steps=8.0, start=seen(0.7), between=seen(1.5), inside_seconds=0.01)
    times = profile_of(changed(H100, epoch_times=epochs)).epochs
    assert (times.start, times.between) == (seen(0.7), seen(1.5))


def test_profile_says_what_an_epoch_begins_with():
    text = " ".join(explain(profile_of(H100)).split())
    assert "over whole epochs a step takes 171 ms:" in text
    assert "an epoch of 42 steps begins with 0.48 s of waiting" in text
    assert "one worker makes its first batch" in text
    assert "what lies between epochs is not known" in text
