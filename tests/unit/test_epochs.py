"""Times of whole epochs."""

import pytest

from stoker.records.epochs import EpochPause, EpochTimes


def pause(seconds: float, *, count: int = 2) -> EpochPause:
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=count)


# The H100 of 2026-11-26 with 3 data hosts, and before: 42 steps an epoch.
FED = EpochTimes(steps=42.0, start=pause(0.76))


def test_whole_epochs_of_short_steps_are_slower_than_their_steps() -> None:
    assert FED.whole_step_seconds(0.0478) == pytest.approx(0.0659, abs=1e-4)


def test_run_is_so_many_epochs_of_their_steps_and_pauses() -> None:
    times = EpochTimes(steps=42.0, start=pause(0.7), between=pause(2.0), inside_seconds=0.001)
    expected = 5 * (42 * (0.0478 + 0.001) + 0.7 + 2.0)
    assert times.run_seconds(step_seconds=0.0478, epochs=5) == pytest.approx(expected)


def test_unknown_epochs_add_nothing_to_a_step() -> None:
    assert EpochTimes().whole_step_seconds(0.1) == 0.1
    assert EpochTimes(start=pause(0.7)).whole_step_seconds(0.1) == 0.1


def test_bounds_are_those_of_the_pauses() -> None:
    wide = EpochPause(seconds=1.0, low_seconds=0.5, high_seconds=2.0, count=5)
    times = EpochTimes(steps=10.0, between=wide)
    assert times.at_low().whole_step_seconds(0.1) == pytest.approx(0.15)
    assert times.at_high().whole_step_seconds(0.1) == pytest.approx(0.3)


def test_what_a_profile_did_not_see_is_taken_from_the_run_but_not_its_start() -> None:
    profiled = EpochTimes(steps=42.0, start=pause(0.6, count=0))
    run = EpochTimes(steps=42.0, start=pause(0.9), between=pause(3.0), inside_seconds=0.002)
    filled = profiled.as_in(run)
    assert filled.start == profiled.start
    assert filled.between == run.between
    assert filled.inside_seconds == 0.002


def test_run_of_one_epoch_has_no_pauses() -> None:
    profiled = EpochTimes(steps=42.0, start=pause(0.6), between=pause(3.0))
    assert profiled.as_in(EpochTimes(inside_seconds=0.0)).whole_step_seconds(0.1) == 0.1
