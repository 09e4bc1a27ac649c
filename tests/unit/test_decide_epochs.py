"""Decisions count whole epochs: their steps, the wait for each first batch, what lies between."""

import re

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.decide import explain
from stoker.decide.scaled_profile import TakeAs
from stoker.records import (
    Check,
    EpochPause,
    EpochTimes,
    FeedSettings,
    Group,
    Observed,
    Profile,
    ProfiledHost,
    ProfiledLoader,
    TrainingSize,
)
from support.decisions import decided
from support.gpu_profiles import H100
from support.sample_records import write_page

LOCAL = load_catalog("local", cores=16)


def pause(seconds: float, *, count: int = 3) -> EpochPause:
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=count)


# The H100 of 2026-11-26: four cores, 42 steps an epoch, one worker makes a batch in 0.6 s.
STEP = H100.timed_step


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


def test_unknown_epochs_leave_the_step_to_count():
    keep, data = plans_of(h100(None))
    assert (keep.whole_step_seconds, data.whole_step_seconds) == (None, None)
    assert data.counted_seconds == data.step_seconds
    assert data.counted_high == data.step_seconds_high


def test_validation_takes_as_long_with_any_data_hosts():
    times = EpochTimes(steps=42.0, start=pause(0.65), between=pause(8.4))
    keep, data = plans_of(h100(times))
    assert keep.whole_step_seconds - keep.step_seconds == pytest.approx((0.65 + 8.4) / 42)
    assert data.whole_step_seconds - data.step_seconds == pytest.approx((0.65 + 8.4) / 42)
    assert data.speedup < 1.5


def test_hours_and_cost_are_of_whole_epochs():
    size = TrainingSize(epochs=10, samples_per_epoch=42 * 128, global_batch_size=128)
    times = EpochTimes(steps=42.0, start=pause(0.65), between=pause(2.0))
    keep, data = plans_of(h100(times), training=size)
    for outcome, cores in ((keep, 4), (data, 16)):
        seconds = 420 * outcome.whole_step_seconds
        assert outcome.total_hours == pytest.approx(seconds / 3600)
        assert outcome.cpu_seconds == pytest.approx(cores * outcome.whole_step_seconds)
        assert outcome.accelerator_seconds == pytest.approx(outcome.whole_step_seconds)


def test_dollars_are_of_whole_epochs():
    profile = h100(EpochTimes(steps=10.0, start=pause(0.6), between=pause(1.0)))
    profile = msgspec.structs.replace(
        profile, host=ProfiledHost(instance_type="ml.g5.xlarge", vcpus=4)
    )
    decision = decided(profile)
    for plan in decision.plans:
        outcome = plan.predicted
        if outcome is not None:
            expected = outcome.whole_step_seconds * outcome.usd_per_hour * 1000 / 3600
            assert outcome.usd_per_1000_steps == pytest.approx(expected)


def test_first_batch_of_a_script_without_workers_is_made_by_one_with_data_hosts():
    times = EpochTimes(steps=42.0, start=pause(0.0), between=pause(1.0))
    keep, data = plans_of(h100(times, num_workers=0, step_seconds=0.7, wait_seconds=0.65))
    assert keep.whole_step_seconds == pytest.approx(0.7 + 1 / 42)
    assert data.whole_step_seconds == pytest.approx(data.step_seconds + (1 + 0.6034) / 42)


def test_slower_workers_make_the_first_batch_later():
    profile = h100(EPOCHS)
    profile = msgspec.structs.replace(
        profile,
        host=ProfiledHost(instance_type="ml.g5.xlarge", vcpus=4, accelerator_model="NVIDIA A10G"),
    )

    def start(speed: float) -> float:
        take = TakeAs(instance_type="ml.g6e.xlarge", cpu_speed=speed, accelerator_step_seconds=0.05)
        decision = decided(profile, take_as=take)
        keep = next(plan for plan in decision.plans if plan.action == "keep").predicted
        return 42 * (keep.whole_step_seconds - keep.step_seconds)

    assert start(0.5) == pytest.approx(2 * start(1.0), rel=0.01)


def test_band_of_whole_epochs_holds_both_the_steps_and_the_pauses():
    wide = EpochPause(seconds=2.0, low_seconds=1.0, high_seconds=4.0, count=9)
    _, data = plans_of(h100(EpochTimes(steps=42.0, start=pause(0.6), between=wide)))
    assert data.whole_step_seconds_low < data.step_seconds_low + (0.6 + 1.0) / 42
    assert data.whole_step_seconds_low > data.step_seconds_low + 1.0 / 42
    assert data.whole_step_seconds_high > data.step_seconds_high + (0.6 + 4.0) / 42


def test_texts_are_of_whole_epochs_with_the_step_beside_them():
    decision = decided(h100(EPOCHS), catalog=LOCAL, objective="time", extra_clusters=(THREE,))
    text = " ".join(explain(decision).split())
    assert "175 ms per step over whole epochs, 160 ms within them" in text
    assert "step: over whole epochs" in text
    assert "An epoch of 42 steps begins with 0.65 s of waiting, with any data hosts" in text
    assert "what lies between epochs (validation, checkpoints) was not seen" in text
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    assert keep.predicted.counted_seconds == pytest.approx(0.175, abs=5e-4)
    # Epochs that are as long as their steps are worth no word.
    long = EpochTimes(steps=100_000.0, start=pause(0.65))
    text = explain(decided(h100(long), catalog=LOCAL, objective="time"))
    assert "whole epochs" not in text


def test_cores_of_a_plan_are_whole_numbers():
    decision = decided(h100(EPOCHS), catalog=LOCAL, objective="time", extra_clusters=(THREE,))
    for plan in decision.plans:
        if plan.predicted:
            cores = plan.predicted.cpu_seconds / plan.predicted.counted_seconds
            assert cores == pytest.approx(round(cores))


@pytest.mark.parametrize(
    ("splits", "feed", "share"),
    [
        (True, FeedSettings(), 1 / 4),
        (None, FeedSettings(), 1),
        (False, FeedSettings(), 1),
        (True, FeedSettings(split_batches=False), 1),
        (True, FeedSettings(seeding="torch"), 1),
        (True, FeedSettings(on_error="skip"), 1 / 4),
    ],
)
def test_first_batch_that_all_workers_of_a_host_make_comes_that_much_sooner(splits, feed, share):
    loader = ProfiledLoader(class_name="torch.DataLoader", reach="torch", splits=splits)
    profile = msgspec.structs.replace(h100(EPOCHS), loader=loader)
    keep, data = plans_of(profile, feed=feed)
    assert keep.whole_step_seconds == pytest.approx(0.1596 + 0.65 / 42)
    start = 42 * (data.whole_step_seconds - data.step_seconds)
    assert start == pytest.approx(0.65 * share)
    # Samples that cannot be shared out are made by one worker.
    high = 42 * (data.whole_step_seconds_high - data.step_seconds_high)
    assert high == pytest.approx(0.65 * 1.25)


def test_who_makes_the_first_batch_is_said_as_it_is():
    loader = ProfiledLoader(class_name="torch.DataLoader", reach="torch", splits=True)
    profile = msgspec.structs.replace(h100(EPOCHS), loader=loader)

    def text_on(cores: int) -> str:
        catalog = load_catalog("local", cores=cores)
        return " ".join(explain(decided(profile, catalog=catalog, objective="time")).split())

    alone = text_on(4)
    assert "as one worker makes its first batch" in alone
    assert "All workers of a data host make it together" in alone
    # The chosen plan has data hosts, and the prediction that sooner start.
    assert "begins with" not in text_on(16)


def start_on(
    count: int,
    *,
    feed: FeedSettings,
    batch_bytes: int = 1 << 20,
    global_batch_size: int | None = None,
) -> float:
    """The predicted wait for an epoch's first batch where so many data hosts make all batches."""
    loader = ProfiledLoader(class_name="torch.DataLoader", reach="torch", splits=True)
    profile = h100(EPOCHS, batch_bytes=batch_bytes, global_batch_size=global_batch_size)
    groups = (
        Group(name="dnn", role="dnn", instance_type="local.c4", count=1, workers_per_host=0),
        Group(name="data", role="data", instance_type="local.c4", count=count),
    )
    decision = decided(
        msgspec.structs.replace(profile, loader=loader),
        catalog=LOCAL,
        objective="time",
        extra_clusters=(groups,),
        feed=feed,
    )
    alike = [plan for plan in decision.plans if types_of(plan.groups) == types_of(groups)]
    (outcome,) = [plan.predicted for plan in alike if plan.groups[0].workers_per_host == 0]
    assert outcome is not None
    assert outcome.whole_step_seconds is not None
    return 42 * (outcome.whole_step_seconds - outcome.step_seconds)


def test_first_batch_that_three_data_hosts_make_comes_that_much_sooner():
    assert start_on(1, feed=FeedSettings()) == pytest.approx(0.65 / 4)
    assert start_on(3, feed=FeedSettings()) == pytest.approx(0.65 / 12)
    assert start_on(3, feed=FeedSettings(split_batches=False)) == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("samples", "of_one_host", "of_three"),
    # Workers of a host: 4.
    [(1, 1, 1), (2, 1 / 2, 1 / 2), (6, 2 / 6, 1 / 6), (64, 8 / 32, 3 / 32), (100, 7 / 25, 3 / 25)],
)
def test_a_first_batch_is_shared_by_as_many_workers_as_it_has_samples_for(
    samples, of_one_host, of_three
):
    given = {"feed": FeedSettings(), "global_batch_size": samples}
    assert start_on(1, **given) == pytest.approx(0.65 * of_one_host)
    assert start_on(3, **given) == pytest.approx(0.65 * of_three)


def test_first_batch_whose_samples_take_long_on_the_network_is_one_hosts():
    assert start_on(3, feed=FeedSettings(), batch_bytes=80 << 20) == pytest.approx(0.65 / 4)


def test_how_busy_accelerators_are_is_said_of_the_time_within_epochs(tmp_path):
    """Epochs of 20 steps with eight seconds between them: of that time they compute 13%."""
    times = EpochTimes(steps=20.0, start=pause(2.1), between=pause(6.0))
    decision = decided(h100(times), catalog=LOCAL, objective="time")
    said = " ".join(explain(decision).split())
    assert re.search(r"accelerators busy 78% instead of 28% within epochs", said)
    assert not re.search(r"accelerators busy \d+%(?! instead of| within epochs)", said)
    assert "busy: share of a step within epochs" in said
    records = {"profile": h100(times), "decision": decision, "training": None, "evaluation": None}
    page = " ".join(write_page(tmp_path, **records, is_planned=True).split())
    assert re.search(r"predicted; today 28%, within epochs; hosts added", page)
