"""Transfers and neighbours: two states that only an accelerator shows, by the figures of one.

One H100 with 16 cores, PCIe 5, 2026-11-26.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.profile.explain import explain
from stoker.profile.rank_results import (
    AcceleratorOnly,
    BatchFacts,
    Quartiles,
    ReplayVariants,
)
from stoker.step_model import Neighbour, Parts, parts_of, with_neighbour
from support.decisions import decided
from support.profiled_ranks import at, changed, drained, profile_of, rank_of

LOCAL = load_catalog("local")
# 154 MB of float32 in a batch that is ready at once: 28 ms of the step are the copy.
COPIED = {"copied_bytes": 154_140_672, "is_waiting": True, "pin_seconds": 0.020}
FLOATS = BatchFacts(
    samples=256, num_bytes=154_140_672, float_image_bytes=154_140_672, is_uint8_like=True
)
READY = {"workers": 4, "trainer_cpu": 0.030, "children_cpu": 0.020, "vcpus": 16, "wait": 0.0004}
PAGEABLE = changed(
    rank_of(
        step=0.0389,
        accelerator=0.0385,
        drains=(drained(16, 0.020), drained(1, 0.020), drained(4, 0.020)),
        **READY,
    ),
    batch=FLOATS,
    uses_cuda=True,
    pin_memory=False,
    variants=ReplayVariants(on_device=at(0.0104), pinned=at(0.0135), **COPIED),
)
# ResNet-50 beside 16 busy loaders: 34.4 ms alone, 38.5 with them.
SLOWED = rank_of(
    step=0.0386,
    wait=0.0003,
    accelerator=0.03436,
    workers=16,
    vcpus=16,
    trainer_cpu=0.030,
    children_cpu=0.50,
    drains=(drained(16, 0.50), drained(1, 0.50)),
    uses_cuda=True,
    variants=ReplayVariants(on_device=at(0.0342), beside_workers=at(0.03853)),
)


def states(profile):
    return {state.id: state for state in profile.states}


def fixes(profile):
    return {fix.id: fix.saves_seconds for fix in profile.fixes}


def with_variants(rank, **fields):
    return changed(rank, variants=msgspec.structs.replace(rank.variants, **fields))


def test_a_wait_for_copies_is_never_told_as_longer_than_its_step():
    # Cached steps were a little longer than those as they are, of which the copies are a part.
    rank = with_variants(changed(PAGEABLE, step_seconds=at(0.0298)), on_device=at(0.0023))
    text = states(profile_of(rank))["transfer"].text
    assert "waits 36.2 ms of a step's 38.5 ms" in text


def test_copies_of_a_batch_are_a_state_with_the_fixes_that_end_it_and_what_each_saves():
    profile = profile_of(PAGEABLE)
    assert profile.check.explained
    assert profile.step.transfer_seconds == pytest.approx(0.0281)
    found = states(profile)
    assert list(found)[:2] == ["transfer", "accelerator"]
    assert found["transfer"].share == pytest.approx(0.73, abs=0.01)
    assert "28.1 ms of a step's 38.9 ms for 154 MB from memory of the host that is not pinned" in (
        found["transfer"].text
    )
    saved = fixes(profile)
    # One thread pins a batch in 20 ms: no step is shorter than that.
    assert saved["pin_memory"] == pytest.approx(0.0185)
    assert saved["to_device"] == pytest.approx(0.0185)
    assert saved["uint8"] == pytest.approx(0.75 * 0.0281)
    words = " ".join(explain(profile).split())
    assert "competes" not in words
    assert (
        "the limit is the accelerator, which waits 28.1 ms of it for copies of its batch" in words
    )


# As benchmarks/gpu.py found it: cached steps of two speeds, the faster one that of the step as is.
TWO_SPEEDS = Quartiles(mean=0.0325, median=0.0348, low=0.0299, high=0.0351, samples=60)


def of_two_speeds(**fields):
    cached = AcceleratorOnly(
        step_seconds=TWO_SPEEDS, trainer_cpu_seconds=at(0.030), cached_batches=8
    )
    rank = changed(
        PAGEABLE,
        clock="cuda:0",
        step_seconds=at(0.0298),
        wait_seconds=at(0.0001),
        num_workers=8,
        accelerator=cached,
    )
    return changed(with_variants(rank, beside_workers=TWO_SPEEDS), **fields)


def test_cached_steps_of_two_speeds_are_no_longer_than_a_step_that_waits_for_nothing():
    profile = profile_of(of_two_speeds())
    assert profile.check.explained
    assert profile.check.error == pytest.approx(0.0, abs=0.05)
    assert list(states(profile)) == ["transfer", "accelerator"]
    assert profile.step.transfer_seconds == pytest.approx(0.0298 - 0.0104, abs=0.0005)
    assert profile.step.neighbour_seconds == pytest.approx(0.0, abs=0.0005)
    decision = decided(profile, catalog=LOCAL)
    assert (decision.bottleneck, decision.action) == ("accelerator", "keep")
    assert fixes(profile)["pin_memory"] == pytest.approx(0.0298 - 0.020, abs=0.0005)


@pytest.mark.parametrize(
    "fields",
    [
        # By the host's clock a step as it is says how fast its kernels are launched.
        {"clock": "host"},
        # Steps that wait leave the accelerator cool and fast.
        {"wait_seconds": at(0.004)},
        # All cached steps are longer: the one or the other was measured wrongly.
        {"accelerator": AcceleratorOnly(
            step_seconds=at(0.0348), trainer_cpu_seconds=at(0.030), cached_batches=8
        )},
    ],
    ids=["host", "waits", "one speed"],
)  # fmt: skip
def test_cached_steps_count_where_the_step_as_it_is_does_not_show_the_same(fields):
    assert not profile_of(of_two_speeds(**fields)).check.explained


def test_pinned_batches_that_are_waited_for_need_no_other_memory():
    rank = with_variants(
        PAGEABLE, is_pinned=True, pin_seconds=None, pinned=at(0.0350), on_device=at(0.0330)
    )
    profile = profile_of(changed(rank, pin_memory=True))
    assert "memory of the host that is pinned" in states(profile)["transfer"].text
    saved = fixes(profile)
    assert saved["non_blocking"] == pytest.approx(0.0035)
    # Copied ahead, nothing is waited for.
    assert saved["to_device"] == pytest.approx(0.0055)
    assert "pin_memory" not in saved


def test_without_workers_the_trainer_pins_between_its_steps():
    rank = changed(PAGEABLE, num_workers=0, children_cpu_seconds=0.0)
    saved = fixes(profile_of(rank))
    assert saved["pin_memory"] == pytest.approx(0.0385 - 0.0135 - 0.020)
    assert saved["to_device"] == pytest.approx(0.0385 - 0.0104 - 0.020)


def test_pinning_that_does_not_reach_a_batch_of_another_class_is_told():
    profile = profile_of(changed(PAGEABLE, pin_memory=True))
    (text,) = [fix.text for fix in profile.fixes if fix.id == "pin_memory"]
    assert text.startswith("give the class of the batches a method pin_memory()")


@pytest.mark.parametrize(
    ("rank", "is_named"),
    [
        # Copies take next to nothing: no state, and no word of pinning.
        (with_variants(PAGEABLE, on_device=at(0.0384), pinned=at(0.0384)), False),
        # Steps wait for data so long that the copies are hidden: more of them is not the limit.
        (
            changed(
                PAGEABLE,
                step_seconds=at(0.300),
                wait_seconds=at(0.260),
                children_cpu_seconds=1.2,
                drains=(drained(16, 1.2, rate=10.0), drained(1, 1.2), drained(4, 1.2, rate=3.3)),
            ),
            False,
        ),
        (changed(PAGEABLE, variants=None), None),
    ],
    ids=["small", "hidden", "not measured"],
)
def test_transfers_that_cost_nothing_today_are_not_named(rank, is_named):
    profile = profile_of(rank)
    assert "transfer" not in states(profile)
    assert "to_device" not in fixes(profile)
    # Where nothing was measured, pinning stays a fix without a figure.
    assert fixes(profile).get("pin_memory") is None
    assert ("pin_memory" in fixes(profile)) == (is_named is None)


def test_loading_beside_an_accelerator_is_a_state_and_part_of_the_step():
    profile = profile_of(SLOWED)
    assert profile.check.explained
    assert profile.check.predicted_step_seconds == pytest.approx(0.03853)
    assert profile.step.neighbour_seconds == pytest.approx(0.00417)
    found = states(profile)["neighbour"]
    assert found.share == pytest.approx(0.108, abs=0.002)
    assert "takes 34.4 ms, and 38.5 ms beside 16 busy loader workers (12% more)" in found.text
    words = " ".join(explain(profile).split())
    assert "the limit is the accelerator, slowed by its own host's loading" in words
    assert "competes" not in words
    # Unmeasured, it is neither a state nor a part.
    without = profile_of(changed(SLOWED, variants=None))
    assert without.step.neighbour_seconds is None
    assert "neighbour" not in states(without)


def test_a_small_model_twice_as_slow_beside_its_workers_is_explained():
    # MobileNet-v3-small: 18.0 and 36.0 ms.
    rank = changed(
        SLOWED,
        step_seconds=at(0.0361),
        accelerator=msgspec.structs.replace(SLOWED.accelerator, step_seconds=at(0.0180)),
        variants=ReplayVariants(beside_workers=at(0.0360)),
        children_cpu_seconds=0.25,
        drains=(drained(16, 0.25), drained(1, 0.25)),
    )
    profile = profile_of(rank)
    assert profile.check.explained
    assert "accelerator" not in states(profile)
    assert states(profile)["neighbour"].share == pytest.approx(0.5, abs=0.01)
    assert "launched late" in explain(profile)


def test_data_hosts_take_the_neighbours_away_and_the_prediction_has_it():
    decision = decided(profile_of(SLOWED, kind="local.c16"), catalog=LOCAL, objective="time")
    best = min(
        (plan for plan in decision.plans if plan.action == "heterogeneous" and plan.predicted),
        key=lambda plan: plan.predicted.step_seconds,
    )
    (today,) = [plan for plan in decision.plans if plan.action == "keep"]
    assert today.predicted.step_seconds == pytest.approx(0.0386, rel=0.01)
    assert best.predicted.step_seconds == pytest.approx(0.0344, rel=0.02)
    without = decided(
        profile_of(changed(SLOWED, variants=None), kind="local.c16"),
        catalog=LOCAL,
        objective="time",
    )
    assert all(
        plan.predicted.step_seconds >= 0.0380
        for plan in without.plans
        if plan.action == "heterogeneous" and plan.predicted
    )


PARTS = Parts(
    accelerator_seconds=0.034,
    receive_seconds=0.0,
    loader_cpu_seconds=0.5,
    loader_wall_seconds=0.5,
    trainer_cpu_seconds=0.03,
    vcpus=16,
    workers=16,
)


def test_less_loading_slows_less_by_the_cube_and_none_not_at_all():
    parts = with_neighbour(PARTS, seconds=0.0042)
    assert parts.neighbour_seconds == pytest.approx(0.0042)
    assert parts.with_workers(8).neighbour_seconds == pytest.approx(
        0.0042 * 8**3 / 14.7**3, rel=0.01
    )
    assert parts.with_workers(0).neighbour_seconds == 0.0
    assert parts.neighbour.seconds_at(parts.loading_share(0.0)) == 0.0


@given(
    seconds=st.floats(0, 1),
    accelerator=st.floats(1e-4, 1),
    loader=st.floats(0, 10),
    workers=st.integers(0, 64),
    share=st.floats(0, 1),
)
def test_what_neighbours_add_is_todays_today_and_falls_with_what_is_loaded_here(
    seconds, accelerator, loader, workers, share
):
    bare = parts_with(accelerator=accelerator, loader=loader, workers=workers)
    parts = with_neighbour(bare, seconds=seconds)
    added = parts.neighbour_seconds
    is_loading = workers > 0 and loader > 0
    assert added == (pytest.approx(seconds) if is_loading and parts.loading_share() else 0.0)
    fewer = parts.neighbour.seconds_at(parts.loading_share(share))
    assert 0 <= fewer <= added + 1e-9
    assert parts.terms["accelerator"] == pytest.approx(accelerator + added)


def parts_with(*, accelerator: float, loader: float, workers: int) -> Parts:
    return Parts(
        accelerator_seconds=accelerator,
        receive_seconds=0.0,
        loader_cpu_seconds=loader,
        loader_wall_seconds=loader,
        trainer_cpu_seconds=0.01,
        vcpus=16,
        workers=workers,
    )


def test_without_neighbours_nothing_is_added():
    assert Neighbour().seconds_at(1.0) == 0.0
    profile = profile_of(changed(SLOWED, variants=None))
    assert parts_of(profile).neighbour_seconds == 0.0


def seconds(most: float = 0.2):
    return st.floats(0.001, most)


@given(
    accelerator=seconds(),
    on_device=seconds(),
    pinned=seconds(),
    beside=seconds(),
    pinning=st.one_of(st.none(), seconds()),
    workers=st.integers(0, 16),
    loading=seconds(2.0),
    wait=st.floats(0, 0.9),
    is_pinned=st.booleans(),
)
def test_no_fix_saves_more_than_is_waited_for_and_no_figure_is_negative(
    accelerator, on_device, pinned, beside, pinning, workers, loading, wait, is_pinned
):
    step = max(accelerator, beside) / (1 - wait)
    rank = rank_of(
        step=step,
        wait=wait * step,
        accelerator=accelerator,
        workers=workers,
        vcpus=16,
        children_cpu=loading if workers else 0.0,
        drains=(drained(16, loading), drained(1, loading)),
        uses_cuda=True,
        variants=ReplayVariants(
            on_device=at(on_device),
            pinned=at(pinned),
            beside_workers=at(beside) if workers else None,
            copied_bytes=1 << 20,
            is_pinned=is_pinned,
            pin_seconds=pinning,
        ),
    )
    profile = profile_of(rank)
    terms = profile.step
    assert 0 <= terms.transfer_seconds <= terms.accelerator_step_seconds
    saved = fixes(profile)
    for name in ("pin_memory", "non_blocking", "to_device", "uint8"):
        assert 0 <= (saved.get(name) or 0.0) <= terms.transfer_seconds + 1e-9
    assert not {"pin_memory", "non_blocking"} <= saved.keys()
    named = states(profile)
    assert all(0 <= state.share <= 1 for state in named.values())
    # A state is named only where its end would make today's step shorter; without workers the
    # trainer's thread copies after it has loaded.
    if named.keys() & {"transfer", "neighbour"} and workers:
        assert parts_of(profile).limit == "accelerator"
    assert workers or "neighbour" not in named
