import itertools
import threading

import pytest

from stoker.host.counters import StrayCpu
from stoker.profile.rank_results import block_means, quartiles
from stoker.profile.steps import (
    AS_IS_ENOUGH,
    WARM_UP_REPLAYS,
    WARM_UP_STEPS,
    Alarm,
    AsIsSteps,
    Mark,
    ReplaySteps,
    look,
    missing_of,
    speed_spread,
)


def at(seconds: float) -> Mark:
    return Mark(host_seconds=seconds)


def as_is(*, children: float = 0.0, machine: float = 0.0, **given: object) -> AsIsSteps:
    """Makes steps whose processes use so many CPU-seconds from one look to the next."""
    return AsIsSteps(
        workers=1,
        children_cpu=itertools.count(step=children).__next__,
        machine_cpu=itertools.count(step=machine).__next__,
        **given,
    )


def take(steps: AsIsSteps, *, count: int, every: float, start: float = 0.0) -> float:
    now = start
    for _ in range(count):
        now += every
        steps.got(asked=at(now - every / 4), got=at(now), cpu=now / 2, receive=0.001)
    return now


def test_block_means_see_the_wait_that_ends_a_burst():
    # Four workers deliver together: three short steps, then a long one. The median step is short.
    steps = [0.02, 0.02, 0.02, 0.14] * 10
    assert quartiles(steps).median == pytest.approx(0.02)
    assert quartiles(block_means(steps, workers=4)).median == pytest.approx(0.05)
    assert block_means([1.0, 2.0, 6.0], workers=2) == [3.0]


def test_a_step_never_spans_the_warm_up_or_the_end_of_an_epoch():
    steps = as_is()
    now = take(steps, count=WARM_UP_STEPS + 1, every=7.0)
    assert steps.count == 0
    now = take(steps, count=5, every=1.0, start=now)
    assert steps.count == 5
    steps.epoch_ended()
    take(steps, count=6, every=1.0, start=now + 500.0)
    result = steps.result()
    assert result.step_seconds.high == pytest.approx(1.0)
    assert result.step_seconds.samples == 10


def test_cpu_of_workers_and_of_others_is_told_apart():
    steps = as_is(children=4.0, machine=20.0)
    take(steps, count=WARM_UP_STEPS + 11, every=1.0)
    steps.epoch_ended()
    result = steps.result()
    assert result.children_cpu_seconds == pytest.approx(0.4)
    assert result.trainer_cpu_seconds == pytest.approx(0.5)
    # 20 CPU-seconds of the machine in 10 s, of which 4 the workers' and 5 the trainer's.
    assert result.others_vcpus == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("machine", "inside", "outside", "others"),
    [
        # 4 CPU-seconds of a helper in 10 s. All elsewhere: the trainer's 5 and the others' 1 here.
        (6.0, 0.0, 0.4, 0.1),
        # It may use this vCPU for half of its time, on which nothing else ran.
        (7.0, 2.0, 0.2, 0.0),
        # It may, but nothing ran here beside the trainer.
        (5.0, 2.0, 0.4, 0.0),
        (5.5, 2.0, 0.35, 0.0),
    ],
)
def test_a_helper_that_left_is_neither_a_neighbour_nor_on_these_vcpus(
    machine, inside, outside, others
):
    looks = (StrayCpu(4.0 * look, inside * look) for look in itertools.count())
    steps = as_is(children=4.0, machine=machine, stray_cpu=looks.__next__)
    take(steps, count=WARM_UP_STEPS + 11, every=1.0)
    steps.epoch_ended()
    result = steps.result()
    assert result.outside_cpu_seconds == pytest.approx(outside)
    assert result.children_cpu_seconds == pytest.approx(0.4 - outside)
    assert result.others_vcpus == pytest.approx(others)


def test_what_is_looked_at_between_steps_is_none_of_them():
    steps = as_is(machine=26.5)
    for index in range(WARM_UP_STEPS + 6):
        now = 3.0 * index
        steps.got(asked=at(now - 0.5), got=at(now), cpu=2.0 * index, receive=0.0)
        steps.gave(mark=at(now + 1.0), cpu=2.0 * index + 0.5)
    steps.epoch_ended()
    result = steps.result()
    assert result.step_seconds.mean == pytest.approx(2.0)
    assert result.trainer_cpu_seconds == pytest.approx(1.5)
    # 26.5 CPU-seconds of the machine in 16 s, of which 10.5 the trainer's, looks included.
    assert result.others_vcpus == pytest.approx(1.0)


def test_a_phase_ends_sooner_when_steps_are_slow_and_never_without_any():
    def holds(steps: int, elapsed: float) -> bool:
        return AS_IS_ENOUGH.holds(steps=steps, elapsed_seconds=elapsed, budget_seconds=100.0)

    assert holds(120, 10.0)
    assert not holds(120, 9.0)
    assert holds(20, 30.0)
    assert not holds(19, 30.0)
    assert holds(5, 50.0)
    assert not holds(4, 49.0)
    # A step of a large part of the budget: two are better than none, one is none.
    assert holds(2, 50.0)
    assert not holds(1, 1000.0)


@pytest.mark.parametrize("step_seconds", [0.001, 0.08, 0.4, 3.0, 20.0])
@pytest.mark.parametrize("steps", [0, 15, 70])
def test_as_many_more_steps_as_are_said_are_needed(step_seconds, steps):
    elapsed = steps * step_seconds

    def holds(more: int) -> bool:
        return AS_IS_ENOUGH.holds(
            steps=steps + more, elapsed_seconds=elapsed + more * step_seconds, budget_seconds=60.0
        )

    more = AS_IS_ENOUGH.more(
        steps=steps, elapsed_seconds=elapsed, step_seconds=step_seconds, budget_seconds=60.0
    )
    assert holds(more)
    assert more == 0 or not holds(more - 1)


def missing(*, batches: int, is_read_out: bool, epoch: int | None = 50) -> str:
    steps = as_is()
    steps.epoch_batches = epoch
    elapsed = take(steps, count=batches, every=0.1)
    spent = {"elapsed_seconds": elapsed, "budget_seconds": 60.0}
    return missing_of(steps, None, is_read_out=is_read_out, **spent)


def test_what_a_script_that_ended_too_soon_lacks_is_one_figure():
    # Its last epoch is made longer: 10 steps to warm up, and 20 that count, of which it had one.
    assert missing(batches=12, is_read_out=True) == (
        "the script ended after 12 batches of its main loader; an epoch has 50; about 19 more, or "
        "one more epoch, are needed"
    )
    # It counts its steps itself: 120 of 100 ms as is, 3 and 60 with cached batches.
    assert missing(batches=100, is_read_out=False) == (
        "the script ended after 100 batches of its main loader; an epoch has 50; about 94 more, or "
        "two more epochs, are needed"
    )
    assert missing(batches=100, is_read_out=False, epoch=None).endswith("about 94 more are needed")
    assert missing(batches=0, is_read_out=True) == "its loader gave no batch"


def test_ranks_whose_first_batches_come_apart_count_from_the_same_step_on():
    # The warm-up of slow steps ends by the clock, and not by their number.
    counts = []
    for first in (0.0, 5.0):
        steps = as_is(warm_up_seconds=2.0, clock_batches=2)
        # The first batch when its own workers are there; then all-reduce holds the ranks together.
        for now in (first, 6.0, 7.0, 8.0, 9.0):
            steps.got(asked=at(now), got=at(now), cpu=0.0, receive=0.0)
        counts.append(steps.count)
    assert counts == [1, 1]


def test_a_replayed_step_leaves_out_what_the_cache_costs():
    replay, now = ReplaySteps(), 0.0
    for _ in range(WARM_UP_REPLAYS + 20):
        replay.asked(mark=at(now), cpu=now)
        now += 0.5  # copying the batch
        replay.gave(mark=at(now), cpu=now)
        now += 2.0
    replay.asked(mark=at(now), cpu=now)
    result = replay.result(cached_batches=8)
    assert result.step_seconds.median == pytest.approx(2.0)
    assert result.trainer_cpu_seconds.median == pytest.approx(2.0)
    assert replay.count == 20


def test_the_spread_of_a_cpus_speed_is_that_of_its_seconds_and_not_of_single_looks():
    assert 1e-5 < look() < 0.1
    assert speed_spread([0.0002] * 39) is None
    assert speed_spread([0.0002, 0.0003, 0.0002, 0.0002, 0.0003] * 60) < 0.05
    # Two seconds fast, two seconds slow: 0.2 and 0.3 ms, mean 0.25, deviation 0.05.
    looks = ([0.0002] * 20 + [0.0003] * 20) * 10
    assert speed_spread(looks) == pytest.approx(0.2, rel=0.05)


def test_a_rung_alarm_ends_a_sleep_and_all_later_ones():
    alarm = Alarm()
    sleeper = threading.Thread(target=alarm.sleep, args=(300.0,), daemon=True)
    sleeper.start()
    alarm.ring()
    sleeper.join(timeout=150)
    assert not sleeper.is_alive()
    assert alarm.sleep(300.0) == 0.0
    alarm.close()
    alarm.close()
