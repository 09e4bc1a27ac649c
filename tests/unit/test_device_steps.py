"""Steps on an accelerator that runs behind its host: simulated, on a virtual clock."""

import pytest

from stoker.profile.steps import StepClock
from support.device_double import DeviceDouble
from support.device_steps import compiled, host_ahead, train

# ResNet-152 of the audit: 84 ms on the device, launched in 30; a batch comes each 71 ms.
RESNET = host_ahead(0.0845, host_seconds=0.030)


def test_a_step_is_the_devices_though_its_host_runs_ahead():
    found = train(RESNET, batch_seconds=14 * 0.071, workers=14)
    assert found.clock == "cuda:0"
    assert found.step_seconds.median == pytest.approx(0.0845, rel=0.02)
    assert found.wait_seconds.median < 0.001
    assert found.step_seconds.samples >= 20


@pytest.mark.parametrize("workers", [1, 4, 14])
def test_a_wait_is_the_time_for_which_the_device_had_nothing_to_do(workers):
    # A batch each 100 ms; 60 ms on the device, launched in 20: the host waits 80 ms of each step.
    step = host_ahead(0.060, host_seconds=0.020)
    found = train(step, batch_seconds=workers * 0.1, workers=workers)
    assert found.step_seconds.median == pytest.approx(0.1, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.04, rel=0.1)


def test_a_loader_without_workers_makes_its_batch_while_the_device_computes():
    found = train(host_ahead(0.060, host_seconds=0.020), batch_seconds=0.05, workers=0)
    assert found.step_seconds.median == pytest.approx(0.070, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.010, rel=0.2)


@pytest.mark.parametrize(
    "slow",
    [{0: 25.0, 1: 4.0}, {0: 25.0, 20: 10.0}],
    ids=["compile", "late"],
)
def test_batches_prefetched_while_a_model_compiles_are_no_rate(slow):
    # The audit's torch.compile: 165 ms a batch, of which the device computes 34 (g3: 30.2 ms told).
    step = compiled(host_ahead(0.034, host_seconds=0.015), slow)
    found = train(step, batch_seconds=4 * 0.165, workers=4, budget_seconds=45.0)
    assert found.step_seconds.median == pytest.approx(0.165, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.131, rel=0.02)
    assert found.step_seconds.samples >= 20


def test_a_loader_a_little_too_slow_is_seen_when_its_stock_is_used_up():
    factor = 0.9
    step = compiled(host_ahead(0.050, host_seconds=0.015), {0: 30.0})
    found = train(step, batch_seconds=8 * 0.050 / factor, workers=8)
    assert found.step_seconds.mean == pytest.approx(0.050 / factor, rel=0.03)


@pytest.mark.parametrize("batch_seconds", [0.001, 0.05])
def test_blocks_hold_whole_accumulations(batch_seconds):
    accumulated = 4

    def step(device: DeviceDouble, number: int) -> None:
        is_last = number % accumulated == accumulated - 1
        device.launch_step(0.120 if is_last else 0.020, host_seconds=0.010)

    found = train(step, batch_seconds=2 * batch_seconds, workers=2)
    bound = (0.120 + 0.020 * (accumulated - 1)) / accumulated
    assert found.step_seconds.median == pytest.approx(max(bound, batch_seconds), rel=0.06)
    assert found.step_seconds.high == pytest.approx(found.step_seconds.low, rel=0.15)


def test_no_synchronisation_is_added_to_the_script():
    device = DeviceDouble()
    found = train(RESNET, batch_seconds=14 * 0.071, workers=14, device=device)
    # The last steps only, when the phase has ended.
    assert found.step_seconds.samples > 20
    assert device.waited_seconds < 11 * 0.0845


def test_the_device_passes_a_mark_after_the_work_launched_before_it():
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    first = clock.mark()
    device.launch(0.080)
    last = clock.mark()
    assert clock.name == "cuda:0"
    assert not clock.is_passed(last)
    device.work(0.1)
    assert clock.is_passed(last)
    # The host was there after some microseconds.
    assert last.host_seconds - first.host_seconds < 0.001
    assert clock.seconds(first, last) == pytest.approx(0.080, abs=1e-4)


@pytest.mark.parametrize(("queued", "exposed"), [(0.100, 0.0), (0.030, 0.020)])
def test_waiting_counts_as_far_as_the_device_has_nothing_to_do(queued, exposed):
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    device.launch(queued)
    asked = clock.mark()
    device.work(0.050)
    taken = clock.mark()
    clock.wait_for(taken)
    assert clock.seconds(asked, taken) == pytest.approx(exposed, abs=1e-4)
