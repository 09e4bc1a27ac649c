import pytest

from stoker.profile.timed_probe import Counting


def counted_of(steps: list[tuple[float, float]], *, budget: float) -> tuple[int, float, float]:
    """Returns what counts of steps that wait and compute for so long, up to the end."""
    counting, wait, busy = Counting(budget_seconds=budget), 0.0, 0.0
    for number, (waits, computes) in enumerate(steps):
        wait, busy = wait + waits, busy + computes
        counting.look((number + 1, wait, busy))
        if counting.is_enough():
            break
    else:
        raise AssertionError("it never was enough")
    return counting.counted()


def test_steps_count_when_what_was_loaded_while_the_model_compiled_is_used_up():
    compiled = [(0.5, 40.0)] + [(0.0, 0.03)] * 12 + [(0.13, 0.03)] * 500
    steps, wait, busy = counted_of(compiled, budget=60.0)
    assert wait / steps == pytest.approx(0.13)
    assert busy / steps == pytest.approx(0.03)
    # The warm-up is a small part of the timeline, of which medians are taken.
    assert steps >= 3 * 13


def test_few_slow_steps_are_enough():
    steps, wait, busy = counted_of([(0.0, 1.0)] * 40, budget=5.0)
    assert 2 <= steps <= 6
    assert (wait + busy) / steps == pytest.approx(1.0)
