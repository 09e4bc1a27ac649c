"""Steps on an accelerator that runs behind its host: simulated, on a virtual clock."""

import pytest

from stoker.profile.steps import AsIsSteps, ReplaySteps, StepClock, WarmUp, lack_of
from support.device_double import DeviceDouble, LoaderDouble
from support.device_steps import compiled, host_ahead, train

# ResNet-152 of the audit: 84 ms on the device, launched in 30; a batch comes each 71 ms.
RESNET = host_ahead(0.0845, host_seconds=0.030)


def test_a_step_is_the_devices_though_its_host_runs_ahead():
    found = train(RESNET, batch_seconds=14 * 0.071, workers=14).result()
    assert found.clock == "cuda:0"
    assert found.step_seconds.median == pytest.approx(0.0845, rel=0.02)
    assert found.wait_seconds.median < 0.001
    assert found.step_seconds.samples >= 20


def test_by_the_hosts_clock_the_same_steps_are_as_fast_as_their_launches():
    # What the profile said before: a queue of 1024 kernels takes ten steps that the host is ahead.
    device = DeviceDouble()
    host = StepClock(find=lambda: None, now=device.now)
    found = train(
        RESNET, batch_seconds=14 * 0.071, workers=14, device=device, clock=host, most=45
    ).result()
    assert found.clock == "host"
    assert found.step_seconds.mean < 0.075


@pytest.mark.parametrize("workers", [1, 4, 14])
def test_a_wait_is_the_time_for_which_the_device_had_nothing_to_do(workers):
    # A batch each 100 ms; 60 ms on the device, launched in 20: the host waits 80 ms of each step.
    step = host_ahead(0.060, host_seconds=0.020)
    found = train(step, batch_seconds=workers * 0.1, workers=workers).result()
    assert found.step_seconds.median == pytest.approx(0.1, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.04, rel=0.1)


def test_a_loader_without_workers_makes_its_batch_while_the_device_computes():
    found = train(host_ahead(0.060, host_seconds=0.020), batch_seconds=0.05, workers=0).result()
    assert found.step_seconds.median == pytest.approx(0.070, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.010, rel=0.2)
    assert found.host_wait_seconds == pytest.approx(0.050, rel=0.01)
    assert found.hidden_seconds == pytest.approx(0.040, rel=0.05)


@pytest.mark.parametrize("budget", [45.0, 180.0])
@pytest.mark.parametrize(
    "slow",
    [
        {0: 25.0, 1: 4.0},
        {0: 25.0, 7: 20.0},
        {0: 3.0},
        {0: 30.0, 1: 1.5, 2: 1.5, 3: 1.5},
        {0: 25.0, 20: 10.0},
        {0: 1.0, 12: 6.0, 13: 6.0},
    ],
    ids=["compile", "recompile", "cudnn.benchmark", "autotune", "late", "two late"],
)
def test_batches_prefetched_while_a_model_compiles_are_no_rate(slow, budget):
    # The audit's torch.compile: 165 ms a batch, of which the device computes 34 (g3: 30.2 ms told).
    step = compiled(host_ahead(0.034, host_seconds=0.015), slow)
    found = train(step, batch_seconds=4 * 0.165, workers=4, budget_seconds=budget).result()
    assert found.step_seconds.median == pytest.approx(0.165, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.131, rel=0.02)
    assert found.step_seconds.samples >= 20


@pytest.mark.parametrize("factor", [0.5, 0.8, 0.9, 0.95])
def test_a_loader_a_little_too_slow_is_seen_when_its_stock_is_used_up(factor):
    step = compiled(host_ahead(0.050, host_seconds=0.015), {0: 30.0})
    found = train(step, batch_seconds=8 * 0.050 / factor, workers=8).result()
    assert found.step_seconds.mean == pytest.approx(0.050 / factor, rel=0.03)


def test_a_training_on_the_cpu_uses_up_its_stock_too():
    # A first step of 20 s: 8 batches are ready then, and the next ones come each 165 ms.
    device = DeviceDouble()

    def step(device: DeviceDouble, number: int) -> None:
        device.work(20.0 if number == 0 else 0.034)

    host = StepClock(find=lambda: None, now=device.now)
    found = train(step, batch_seconds=4 * 0.165, workers=4, device=device, clock=host).result()
    assert found.step_seconds.median == pytest.approx(0.165, rel=0.02)


@pytest.mark.parametrize("accumulated", [2, 4, 8, 16])
@pytest.mark.parametrize("batch_seconds", [0.001, 0.05])
def test_blocks_hold_whole_accumulations(accumulated, batch_seconds):
    def step(device: DeviceDouble, number: int) -> None:
        is_last = number % accumulated == accumulated - 1
        device.launch_step(0.120 if is_last else 0.020, host_seconds=0.010)

    found = train(step, batch_seconds=2 * batch_seconds, workers=2).result()
    bound = (0.120 + 0.020 * (accumulated - 1)) / accumulated
    assert found.step_seconds.median == pytest.approx(max(bound, batch_seconds), rel=0.06)
    assert found.step_seconds.high == pytest.approx(found.step_seconds.low, rel=0.15)


def test_evaluations_are_steps_of_the_training_and_move_no_median():
    def step(device: DeviceDouble, number: int) -> None:
        device.launch_step(0.034, host_seconds=0.015)
        if number % 50 == 49:
            device.launch_step(5.0, host_seconds=0.1)
            device.synchronize()

    found = train(step, batch_seconds=4 * 0.165, workers=4).result()
    assert found.step_seconds.median == pytest.approx(0.165, rel=0.02)


def test_a_script_that_waits_for_its_loss_each_step_is_timed_alike():
    def step(device: DeviceDouble, _number: int) -> None:
        device.launch_step(0.034, host_seconds=0.015)
        device.synchronize()

    found = train(step, batch_seconds=4 * 0.165, workers=4).result()
    assert found.step_seconds.median == pytest.approx(0.165, rel=0.02)
    assert found.wait_seconds.median == pytest.approx(0.131, rel=0.02)


def test_no_synchronisation_is_added_to_the_script():
    device = DeviceDouble()
    steps = train(RESNET, batch_seconds=14 * 0.071, workers=14, device=device)
    # The last steps only, when the phase has ended.
    assert steps.count > 20
    assert device.waited_seconds < 11 * 0.0845


def test_graphs_that_launch_a_step_at_once_let_the_host_run_far_ahead():
    step = host_ahead(0.010, host_seconds=0.0002, kernels=1)
    found = train(step, batch_seconds=8 * 0.004, workers=8).result()
    assert found.step_seconds.median == pytest.approx(0.010, rel=0.02)
    assert found.wait_seconds.median < 0.0005


@pytest.mark.parametrize(("seconds", "workers"), [(3.0, 14), (20.0, 4)])
def test_steps_too_slow_for_the_budget_say_which_one_would_do(seconds, workers):
    step = compiled(host_ahead(seconds, host_seconds=0.1), {0: 10.0})
    loading = {"batch_seconds": 2.0 * seconds * workers, "workers": workers}
    steps = train(step, **loading, budget_seconds=45.0)
    lack = lack_of(steps, budget_seconds=45.0)
    assert lack is not None
    assert "of the " in lack.text
    # With that budget it is enough, and right.
    again = train(step, **loading, budget_seconds=lack.needed_seconds)
    assert lack_of(again, budget_seconds=lack.needed_seconds) is None
    assert again.result().step_seconds.median == pytest.approx(2 * seconds, rel=0.05)


def test_replayed_steps_are_the_devices_and_leave_out_what_the_cache_costs():
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    replay = ReplaySteps(clock=clock)
    while replay.count < 60:
        replay.asked(mark=clock.mark(), cpu=device.seconds)
        device.work(0.020)  # copying the batch
        replay.gave(mark=clock.mark(), cpu=device.seconds)
        device.launch_step(0.034, host_seconds=0.030)
    found = replay.result(cached_batches=8)
    # Host: 50 ms a step. The device has its kernels within 34 of launching.
    assert found.step_seconds.median == pytest.approx(0.034, rel=0.05)


def test_steps_that_the_device_passes_only_when_all_are_launched_count_all_the_same():
    # 40 graphs of 20 ms, launched within a few milliseconds.
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    steps = AsIsSteps(workers=0, children_cpu=float, machine_cpu=float, clock=clock)
    for _ in range(40):
        asked = clock.mark()
        steps.got(asked=asked, got=clock.mark(), cpu=device.seconds, receive=0.0)
        steps.gave(mark=clock.mark(), cpu=device.seconds)
        device.launch(0.020)
    with pytest.raises(ValueError, match="no step has counted: all of 40 batches"):
        steps.result()
    steps.settle()
    assert steps.count == 40 - 1 - 10
    assert steps.result().step_seconds.median == pytest.approx(0.020, rel=0.01)


def test_workers_in_lockstep_that_are_waited_for_have_no_stock_though_some_are_ready():
    # 14 workers a little too slow: 75 ms on the device, a batch each 91 ms, as in a first real run.
    step = compiled(host_ahead(0.075, host_seconds=0.030), {0: 20.0})
    for budget in (45.0, 180.0):
        steps = train(step, batch_seconds=14 * 0.091, workers=14, budget_seconds=budget)
        assert steps.is_supplied
        assert steps.result().step_seconds.median == pytest.approx(0.091, rel=0.02)


def test_steps_that_become_slower_as_stock_falls_are_measured_for_longer():
    # Workers that have enough ready rest, and leave their cores to the script; later they do not.
    def step(device: DeviceDouble, number: int) -> None:
        device.work(20.0 if number == 0 else 0.0)
        device.launch_step(0.075 if number < 200 else 0.091, host_seconds=0.030)

    found = train(step, batch_seconds=14 * 0.070, workers=14).result()
    # After 18 s there would have been enough of them, most of the first kind.
    assert found.step_seconds.median == pytest.approx(0.091, rel=0.02)
    assert found.wait_seconds.median < 0.001


def test_a_rank_that_has_to_change_phase_counts_its_last_steps():
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    loader = LoaderDouble(device, batch_seconds=0.4, workers=8)
    steps = AsIsSteps(
        workers=8,
        children_cpu=lambda: 0.0,
        machine_cpu=lambda: 0.0,
        clock=clock,
        prefetched=16,
    )
    for number in range(12):
        ready, asked = loader.ready, clock.mark()
        next(loader)
        steps.got(asked=asked, got=clock.mark(), cpu=device.seconds, receive=0.0, ready=ready)
        if number == 6:
            # Rank 0 has announced the next phase for four steps later.
            assert not steps.warm_up.is_over
            steps.end_warm_up()
        steps.gave(mark=clock.mark(), cpu=device.seconds)
        device.work(20.0 if number == 5 else 0.0)
        device.launch_step(0.060, host_seconds=0.02)
    steps.epoch_ended()
    steps.settle()
    assert 3 <= steps.count <= 5
    assert steps.result().step_seconds.median == pytest.approx(0.06, rel=0.1)


def test_a_step_whose_time_does_not_count_makes_the_others_no_faster():
    """The first steps of short epochs: a budget that is asked for by their pace is too small."""
    warm_up = WarmUp(prefetched=4)
    for number in range(8):
        seconds = 0.0 if number % 4 == 0 else 3.0
        warm_up.add(busy_seconds=3.0, seconds=seconds, had_to_wait=False, may_be_full=False)
    assert warm_up.pace_seconds == pytest.approx(3.0)
