import random

import pytest

from stoker.profile.rank_results import block_steps, cycle_of
from stoker.profile.steps import WARM_UP_STEPS, WarmUp


def over_after(
    busy: list[float], *, waits_from: int | None = None, prefetched: int = 0, **given: float
) -> int | None:
    """Returns after how many steps of `busy` seconds a warm-up was over, for good; None: never."""
    warm_up, over = WarmUp(prefetched=prefetched, **given), None
    for number, seconds in enumerate(busy):
        warm_up.add(
            busy_seconds=seconds,
            seconds=seconds,
            had_to_wait=waits_from is not None and number >= waits_from,
            may_be_full=False,
        )
        if not warm_up.is_over:
            over = None
        elif over is None:
            over = number + 1
    return over


@pytest.mark.parametrize(
    ("busy", "slow_at"),
    [
        ([0.03] * 60, -1),
        ([40.0] + [0.03] * 60, 0),
        ([40.0, 2.0] + [0.03] * 60, 1),
        ([40.0, 20.0, 20.0, 20.0, 20.0, 20.0] + [0.03] * 60, 5),
        ([40.0] + [0.03] * 6 + [20.0] + [0.03] * 60, 7),
        ([1.2] + [0.03] * 60, 0),
        ([40.0] + [0.03] * 19 + [15.0] + [0.03] * 60, 20),
        # Kernels that become faster while they are tuned.
        ([8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.12, 0.06] + [0.03] * 60, 4),
    ],
    ids=["even", "compile", "two", "six", "recompile", "benchmark", "late", "falling"],
)
@pytest.mark.parametrize("prefetched", [0, 8, 28])
def test_it_ends_when_steps_are_steady_and_as_many_as_were_prefetched_are_over(
    busy, slow_at, prefetched
):
    over = over_after(busy, prefetched=prefetched)
    assert over is not None
    since_slow = over - 1 - slow_at
    assert since_slow >= max(WARM_UP_STEPS, prefetched + 1 if prefetched else 0)
    # Not much later either.
    assert since_slow <= max(WARM_UP_STEPS, prefetched + 1) + 8


def test_a_batch_that_was_waited_for_shows_that_nothing_prefetched_is_left():
    busy = [40.0] + [0.03] * 60
    assert over_after(busy, prefetched=28) == 30
    assert over_after(busy, prefetched=28, waits_from=5) == 11
    # Not one that was waited for before the slow step.
    late = [0.03] * 3 + [40.0] + [0.03] * 60
    warm_up = WarmUp(prefetched=28)
    for number, seconds in enumerate(late[:20]):
        warm_up.add(
            busy_seconds=seconds, seconds=seconds, had_to_wait=number < 3, may_be_full=False
        )
    assert not warm_up.is_over


@pytest.mark.parametrize("length", [2, 4, 8, 16])
@pytest.mark.parametrize("dear", [0.06, 0.3])
@pytest.mark.parametrize("place", [0, 1])
def test_gradient_accumulation_is_the_training_and_no_warm_up(length, dear, place):
    busy = ([0.02] * (length - 1) + [dear]) * (200 // length)
    # In whichever step of a cycle the first one, which compiles, is.
    over = over_after([30.0, *busy[place:]], prefetched=8)
    assert over is not None
    assert over <= 14 + 3 * length


def test_texts_of_any_length_count_at_last():
    dice = random.Random(7)
    busy = [dice.choice([0.02, 0.05, 0.2, 0.7]) for _ in range(200)]
    assert over_after(busy, prefetched=8) is not None


def test_evaluations_do_not_start_it_over_for_ever():
    busy = ([0.03] * 24 + [5.0]) * 12
    assert over_after(busy) is not None


def test_a_first_step_longer_than_any_warm_up_is_one_all_the_same():
    assert over_after([100.0] + [0.03] * 30, longest_seconds=45.0) == 11


def test_few_steps_are_enough_where_they_are_slow():
    assert over_after([2.0] * 20, soon_seconds=5.0) == 3
    # After the compiler, not with it.
    assert over_after([40.0] + [2.0] * 20, soon_seconds=5.0) == 4


@pytest.mark.parametrize("length", [2, 3, 8, 32])
def test_a_cycle_is_found_through_noise_and_rare_long_steps(length):
    dice = random.Random(length)
    values = [0.1 if at % length == 0 else 0.02 for at in range(6 * length + 5)]
    noisy = [value * dice.uniform(0.95, 1.05) for value in values]
    assert cycle_of(noisy) == length
    noisy[len(noisy) // 2] += 5.0
    assert cycle_of(noisy) in (1, length)


@pytest.mark.parametrize("length", [2, 4, 8])
def test_a_cycle_is_found_though_the_script_evaluates_now_and_then(length):
    values = [0.1 if at % length == 0 else 0.02 for at in range(120)]
    values[49] += 5.0
    values[99] += 5.0
    assert cycle_of(values) == length


def test_noise_is_no_cycle():
    for seed in range(50):
        dice = random.Random(seed)
        assert cycle_of([dice.lognormvariate(0, 0.5) for _ in range(120)]) == 1
    assert cycle_of([0.1] * 100) == 1


@pytest.mark.parametrize(
    ("workers", "cycle", "steps"),
    [(0, 1, 4), (1, 1, 4), (3, 1, 6), (14, 1, 14), (1, 8, 8), (4, 6, 12), (14, 8, 16), (8, 16, 16)],
)
def test_a_block_holds_whole_bursts_and_whole_cycles(workers, cycle, steps):
    assert block_steps(workers=workers, cycle=cycle) == steps
