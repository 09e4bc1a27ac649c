from pathlib import Path

import pytest

from stoker.environment import from_environment
from stoker.profile.ranks import LEAD_STEPS, Ranks
from stoker.profile.steps import (
    BLOCK_STEPS,
    BurstStart,
    Mark,
    TimedSteps,
    WarmUp,
    quartiles,
)


def over_after(busy: list[float], *, prefetched: int = 0, **given: float) -> int | None:
    """Returns after how many steps of `busy` seconds a warm-up was over; None: never."""
    warm_up = WarmUp(prefetched=prefetched, **given)
    for number, seconds in enumerate(busy):
        warm_up.add(busy_seconds=seconds, seconds=seconds)
        if warm_up.is_over:
            return number + 1
    return None


@pytest.mark.parametrize(
    ("busy", "prefetched", "over"),
    [
        ([0.03] * 60, 8, 16),
        ([0.03] * 60, 16, 24),
        ([40.0, 2.0] + [0.03] * 60, 8, 24),
        ([0.03] * 20 + [20.0] + [0.03] * 60, 16, 48),
        ([0.02, 0.02, 0.02, 0.3] * 20, 0, 16),
        ([0.1 * 1.5**number for number in range(60)], 0, None),
    ],
    ids=["even", "prefetched", "compiles", "compiles late", "accumulates", "never"],
)
def test_the_warm_up_ends_with_two_blocks_alike_once_what_was_prefetched_is_used(
    busy, prefetched, over
):
    assert over_after(busy, prefetched=prefetched) == over


def test_steps_that_are_not_steady_count_after_their_share_of_the_budget():
    busy = [0.1 * (1 + number % 17) for number in range(200)]
    assert over_after(busy, longest_seconds=20.0) in range(15, 40)


def at(seconds: float) -> Mark:
    return Mark(host_seconds=seconds)


def take(steps: TimedSteps, *, count: int, every: float, start: float = 0.0) -> float:
    now = start
    for _ in range(count):
        now += every
        steps.got([(at(now - every / 4), at(now))], cpu=now / 2)
    return now


def test_block_means_see_the_wait_that_ends_a_burst():
    # Four workers deliver together: three short steps, then a long one. The median step is short.
    steps = [0.02, 0.02, 0.02, 0.14] * 10
    found = quartiles(steps, workers=4)
    assert (found.median, found.samples) == (pytest.approx(0.05), 40)
    assert quartiles([1.0, 2.0, 6.0], workers=2).high == 3.0


def test_the_first_steps_of_a_burst_do_not_count():
    steps = TimedSteps(warm_up=BurstStart(seconds=0.3))
    now = take(steps, count=5, every=0.1)
    take(steps, count=3, every=0.02, start=now)
    found = steps.result()
    assert found.step_seconds.samples == 4
    assert found.compute_seconds.mean == pytest.approx(0.75 * 0.04)


def test_a_step_never_spans_the_warm_up_or_the_end_of_an_epoch():
    steps = TimedSteps(warm_up=WarmUp())
    now = take(steps, count=2 * BLOCK_STEPS + 1, every=7.0)
    assert steps.count == 0
    now = take(steps, count=5, every=1.0, start=now)
    assert steps.count == 5
    steps.epoch_ended()
    take(steps, count=6, every=1.0, start=now + 500.0)
    result = steps.result()
    assert result.step_seconds.high == pytest.approx(1.0)
    assert result.step_seconds.samples == 10


def ranks(folder: Path, count: int) -> list[Ranks]:
    made = []
    for rank in range(count):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(count), "STOKER_HOST": "h"}
        made.append(Ranks(from_environment(variables), folder=folder))
    return made


def test_all_ranks_change_at_the_step_that_rank_0_named_first(tmp_path):
    first, second = ranks(tmp_path, 2)
    assert first.on_host == second.on_host == 2
    assert not second.is_due(at_step=100)
    first.announce("16 3", at_step=50, lead_steps=LEAD_STEPS)
    due = [
        next(step for step in range(50, 60) if rank.is_due(at_step=step))
        for rank in (first, second)
    ]
    assert second.text == "16 3"
    assert due == [50 + LEAD_STEPS] * 2


def test_a_single_rank_changes_at_once_and_leaves_no_file(tmp_path):
    (only,) = ranks(tmp_path, 1)
    only.announce("16 3", at_step=7, lead_steps=LEAD_STEPS)
    assert only.is_due(at_step=7)
    assert list(tmp_path.iterdir()) == []


def test_ranks_meet(tmp_path):
    first, second = ranks(tmp_path, 2)
    assert not first.meet("end", seconds=0.05)
    assert second.meet("end", seconds=1.0)
