"""Decisions count whole epochs: their steps, the wait for each first batch, what lies between."""

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.records import (
    Check,
    EpochPause,
    EpochTimes,
    Group,
    Observed,
    Profile,
    ProfiledHost,
    TrainingSize,
)
from support.decisions import decided
from support.gpu_profiles import H100

LOCAL = load_catalog("local", cores=16)


def pause(seconds: float, *, count: int = 3) -> EpochPause:
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=count)


# The H100 of 2026-11-26: four cores, 42 steps an epoch, one worker makes a batch in 0.6 s.
STEP = H100.step


def h100(epochs: EpochTimes | None, **step) -> Profile:
    return Profile(
        host=ProfiledHost(instance_type="local.c4", vcpus=4, accelerators=1),
        step=msgspec.structs.replace(STEP, **step),
        observed=Observed(cpu_utilization=0.883),
        check=Check(predicted_step_seconds=0.1508, error=-0.055, explained=True),
        epochs=epochs,
    )


THREE = (
    Group(name="dnn", role="dnn", instance_type="local.c4", count=1, workers_per_host=4),
    Group(name="data", role="data", instance_type="local.c4", count=3),
)
EPOCHS = EpochTimes(steps=42.0, start=pause(0.65))


def types_of(groups):
    return [(group.role, group.instance_type, group.count) for group in groups]


def plans_of(profile, **more):
    decision = decided(profile, catalog=LOCAL, objective="time", extra_clusters=(THREE,), **more)
    keep = next(plan for plan in decision.plans if plan.action == "keep").predicted
    data = next(plan for plan in decision.plans if types_of(plan.groups) == types_of(THREE))
    return keep, data.predicted


def test_speedup_is_of_whole_epochs():
    keep, data = plans_of(h100(EPOCHS))
    alone = plans_of(h100(None))[1]
    # Data hosts shorten the steps, not the wait for an epoch's first batch.
    assert data.step_seconds == alone.step_seconds
    assert alone.speedup == pytest.approx(0.1596 / alone.step_seconds)
    assert keep.whole_step_seconds == pytest.approx(0.1596 + 0.65 / 42)
    assert data.whole_step_seconds == pytest.approx(data.step_seconds + 0.65 / 42)
    assert data.speedup == pytest.approx(keep.whole_step_seconds / data.whole_step_seconds)
    assert data.speedup < alone.speedup - 0.3


def test_hours_and_cost_are_of_whole_epochs():
    size = TrainingSize(epochs=10, samples_per_epoch=42 * 128, global_batch_size=128)
    times = EpochTimes(steps=42.0, start=pause(0.65), between=pause(2.0))
    keep, data = plans_of(h100(times), training=size)
    for outcome, cores in ((keep, 4), (data, 16)):
        seconds = 420 * outcome.whole_step_seconds
        assert outcome.total_hours == pytest.approx(seconds / 3600)
        assert outcome.cpu_seconds == pytest.approx(cores * outcome.whole_step_seconds)


def test_first_batch_of_a_script_without_workers_is_made_by_one_with_data_hosts():
    times = EpochTimes(steps=42.0, start=pause(0.0), between=pause(1.0))
    keep, data = plans_of(h100(times, num_workers=0, step_seconds=0.7, wait_seconds=0.65))
    assert keep.whole_step_seconds == pytest.approx(0.7 + 1 / 42)
    assert data.whole_step_seconds == pytest.approx(data.step_seconds + (1 + 0.6034) / 42)


def test_band_of_whole_epochs_holds_both_the_steps_and_the_pauses():
    wide = EpochPause(seconds=2.0, low_seconds=1.0, high_seconds=4.0, count=9)
    _, data = plans_of(h100(EpochTimes(steps=42.0, start=pause(0.6), between=wide)))
    assert data.whole_step_seconds_low < data.step_seconds_low + (0.6 + 1.0) / 42
    assert data.whole_step_seconds_low > data.step_seconds_low + 1.0 / 42
    assert data.whole_step_seconds_high > data.step_seconds_high + (0.6 + 4.0) / 42
