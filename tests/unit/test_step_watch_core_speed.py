"""One short computation, repeated, shows how unsteady the CPU itself was."""

import random

import pytest

from stoker.profile.step_watch import look, speed_spread


def test_a_look_takes_a_moment_of_cpu():
    assert 1e-5 < look() < 0.1


def test_a_steady_cpu_has_next_to_no_spread_however_much_single_looks_differ():
    random.seed(1)
    looks = [random.choice([0.0002, 0.0003]) for _ in range(300)]
    spread = speed_spread(looks)
    assert spread is not None
    assert spread < 0.05


def test_a_cpu_that_is_slower_for_seconds_has_the_spread_of_its_seconds():
    # Two seconds fast, two seconds slow: 0.2 and 0.3 ms, mean 0.25, deviation 0.05.
    looks = ([0.0002] * 20 + [0.0003] * 20) * 10
    assert speed_spread(looks) == pytest.approx(0.2, rel=0.05)


def test_of_a_few_seconds_nothing_is_said():
    assert speed_spread([0.0002] * 39) is None
    assert speed_spread([0.0002] * 40) == pytest.approx(0.0)
