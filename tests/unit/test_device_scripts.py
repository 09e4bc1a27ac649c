"""Scripts of other kinds on an accelerator that runs behind its host: how their steps are timed."""

import random
from functools import partial

import pytest

from support.device_double import DeviceDouble
from support.device_steps import compiled, host_ahead, train

FAST = host_ahead(0.034, host_seconds=0.015)
# A batch each 165 ms from four workers, as on the audit's four cores.
STARVED_SECONDS = 0.165
train_starved = partial(train, batch_seconds=4 * STARVED_SECONDS, workers=4)
# Five times as many as the accelerator takes.
FED_SECONDS = 0.006
train_fed = partial(train, batch_seconds=4 * FED_SECONDS, workers=4)


@pytest.mark.parametrize("budget", [45.0, 180.0])
@pytest.mark.parametrize(
    "pattern",
    [(0.020, 0.020, 0.080), (0.030, 0.050), (0.010,) * 5 + (0.110,), (0.040, 0.001)],
    ids=["critic", "two optimizers", "every sixth", "one that skips"],
)
def test_optimizers_that_take_turns_are_timed_in_whole_cycles(pattern, budget):
    def step(device: DeviceDouble, number: int) -> None:
        device.launch_step(pattern[number % len(pattern)], host_seconds=0.008)

    mean = sum(pattern) / len(pattern)
    found = train_fed(step, budget_seconds=budget).result()
    assert found.step_seconds.median == pytest.approx(max(mean, 0.006), rel=0.05)
    assert found.wait_seconds.median < 0.05 * mean


@pytest.mark.parametrize(("skipped", "first"), [(0.0, 0), (0.1, 0), (0.0, 9)])
def test_gradients_of_eight_batches_whose_scaler_skips_some_steps(skipped, first):
    # Some, or the first ones, until the scale fits.
    chance = random.Random(46)

    def step(device: DeviceDouble, number: int) -> None:
        device.launch_step(0.020, host_seconds=0.010)
        if number % 8 == 7:
            # The scaler reads whether there was an overflow.
            device.synchronize()
            if number // 8 >= first and chance.random() >= skipped:
                device.launch_step(0.024, host_seconds=0.002)

    found = train_fed(step).result()
    mean = 0.020 + (1 - skipped) * 0.024 / 8
    assert found.step_seconds.median == pytest.approx(mean, rel=0.06)
    assert found.wait_seconds.median < 0.001


@pytest.mark.parametrize("at", [15, 35, 60, 90])
@pytest.mark.parametrize("budget", [45.0, 180.0])
def test_a_model_that_is_compiled_again_in_mid_run_gives_no_faster_steps(at, budget):
    # Another shape comes: 15 s, in which all workers fill their stock.
    step = compiled(FAST, {0: 25.0, at: 15.0})
    found = train_starved(step, budget_seconds=budget).result()
    assert found.step_seconds.median == pytest.approx(0.165, rel=0.03)
    assert found.wait_seconds.median == pytest.approx(0.131, rel=0.05)


@pytest.mark.parametrize(("every", "usual"), [(7, 0.103), (20, 0.066), (100, 0.050)])
def test_a_validation_every_so_many_steps_counts_once(every, usual):
    def step(device: DeviceDouble, number: int) -> None:
        FAST(device, number)
        if number % every == every - 1:
            # Its batches are read from another loader, and its results are waited for.
            for _ in range(20):
                device.work(0.020)
                device.launch_step(0.010, host_seconds=0.004)
            device.synchronize()

    found = train(step, batch_seconds=2 * 0.050, workers=2).result()
    # Of up to 32 steps it is a part of their cycle; of more it lies in no usual step.
    assert found.step_seconds.median == pytest.approx(usual, rel=0.1)


@pytest.mark.parametrize("budget", [45.0, 180.0])
@pytest.mark.parametrize("batches", [2, 3, 5])
def test_epochs_of_few_steps_are_timed_within_them(batches, budget):
    # All batches of an epoch are there together: its first one is waited for, and no other.
    found = train_starved(
        FAST,
        budget_seconds=budget,
        epoch_batches=batches,
        between=lambda device: device.work(0.100),
    ).result()
    assert found.step_seconds.samples >= 20
    if batches <= 4:
        assert found.step_seconds.median == pytest.approx(0.034, rel=0.1)
        assert found.wait_seconds.median < 0.002
    assert found.first_wait_seconds == pytest.approx(0.66, rel=0.1)


@pytest.mark.parametrize("number", [3, 30, 70])
def test_one_slow_batch_of_a_training_bound_by_its_accelerator_is_no_rate(number):
    found = train(
        host_ahead(0.0845, host_seconds=0.030),
        batch_seconds=14 * 0.071,
        workers=14,
        slow_batches={number: 6.0},
    ).result()
    assert found.step_seconds.median == pytest.approx(0.0845, rel=0.02)
    assert found.wait_seconds.median < 0.001


def test_another_program_on_the_same_gpu_makes_the_steps_longer_and_nothing_else():
    chance = random.Random(1)

    def step(device: DeviceDouble, number: int) -> None:
        # Its kernels come between those of the script.
        device.launch_step(0.034 + chance.choice([0.0, 0.020, 0.050]), host_seconds=0.015)

    found = train_fed(step).result()
    assert found.step_seconds.median == pytest.approx(0.034 + 0.070 / 3, rel=0.1)
    assert found.wait_seconds.median < 0.001


@pytest.mark.parametrize("waits", ["each kernel", "each step", "each tenth step", "never"])
@pytest.mark.parametrize(
    ("trained", "rate"),
    [(train_starved, STARVED_SECONDS), (train_fed, FED_SECONDS)],
    ids=["starved", "fed"],
)
def test_results_that_a_script_asks_for_are_no_wait_for_data(trained, rate, waits):
    def step(device: DeviceDouble, number: int) -> None:
        for _ in range(10):
            device.launch(0.0034, host_seconds=0.0015)
            if waits == "each kernel":
                device.synchronize()
        if waits == "each step" or (waits == "each tenth step" and number % 10 == 9):
            device.synchronize()

    found = trained(step).result()
    # With each kernel waited for, launching is no longer hidden.
    alone = 0.049 if waits == "each kernel" else 0.034
    alone += {"each step": 0.0015, "each tenth step": 0.00015}.get(waits, 0.0)
    assert found.step_seconds.median == pytest.approx(max(alone, rate), rel=0.04)
    assert found.wait_seconds.median == pytest.approx(max(0.0, rate - alone), abs=0.003)


@pytest.mark.parametrize("workers", [0, 2, 8])
@pytest.mark.parametrize(("loading", "is_waiting"), [(0.001, False), (0.005, True)])
def test_steps_of_three_milliseconds(workers, loading, is_waiting):
    batch_seconds = loading * max(1, workers)
    found = train(
        host_ahead(0.003, host_seconds=0.0008, kernels=30),
        batch_seconds=batch_seconds,
        workers=workers,
    ).result()
    usual = 0.003
    if is_waiting:
        # Without workers the host launches, too, and the rest of its time is hidden.
        usual = loading if workers else loading + 0.0008
    assert found.step_seconds.median == pytest.approx(usual, rel=0.06)
    assert (found.wait_seconds.median > 0.0005) == is_waiting


def test_transforms_on_the_device_are_part_of_the_step():
    def step(device: DeviceDouble, number: int) -> None:
        device.copy(0.004)
        device.launch_step(0.020, kernels=200, host_seconds=0.010)
        FAST(device, number)

    found = train_fed(step).result()
    # The copy waits for all that was launched: the host's launches come after it.
    assert found.step_seconds.median == pytest.approx(0.058, rel=0.05)
    assert found.wait_seconds.median < 0.001


def test_a_dataset_on_the_device_has_nothing_to_wait_for():
    def step(device: DeviceDouble, number: int) -> None:
        # The main process cuts each batch out of a tensor on the device.
        device.launch_step(0.002, kernels=4, host_seconds=0.0002)
        FAST(device, number)

    found = train(step, batch_seconds=0.0001, workers=0).result()
    assert found.step_seconds.median == pytest.approx(0.036, rel=0.03)
    assert found.wait_seconds.median < 0.0005


def test_an_input_stage_that_waits_for_another_gpu_is_timed_by_the_whole_step():
    # Two GPUs in a row: the second computes 60 ms between the first's forward and backward pass.
    def step(device: DeviceDouble, _number: int) -> None:
        device.launch(0.010)
        device.launch(0.060)
        device.launch(0.020)

    found = train_fed(step).result()
    assert found.step_seconds.median == pytest.approx(0.090, rel=0.02)
    assert found.wait_seconds.median < 0.001
