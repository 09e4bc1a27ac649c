"""`decide` neither contradicts a measured profile nor promises what the profile ruled out.

The numbers are those of trainings that were advised wrongly.
"""

import math
from dataclasses import replace
from datetime import date
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.cli.outputs import free_advice
from stoker.decide import decide, explain
from stoker.decide.model import ClusterShape, Hosts, estimate
from stoker.decide.work import measure, today_of
from stoker.profile.combine import combine
from stoker.profile.explain import explain as explain_profile
from stoker.profile.rank_results import (
    AcceleratorOnly,
    AsIs,
    BatchFacts,
    Drain,
    Evidence,
    LoaderFacts,
    Quartiles,
    RankResult,
    Reads,
)
from stoker.records import (
    Check,
    Constraints,
    Profile,
    ProfiledHost,
    ProfileSettings,
    StepTerms,
    TodaysGroup,
    to_document,
)
from support import builders


def at(value):
    return Quartiles(mean=value, median=value, low=value, high=value, samples=60)


def ms(**milliseconds):
    return {name: round(value / 1000, 9) for name, value in milliseconds.items()}


def rank_of(took, *, rates, workers, vcpus, others=0.0, read_bytes=0.0, threads=None, looks=()):
    return RankResult(
        rank=0,
        world_size=1,
        host="algo-1",
        vcpus=vcpus,
        ranks_on_host=1,
        as_is=AsIs(
            step_seconds=at(took["step"]),
            wait_seconds=at(took["wait"]),
            trainer_cpu_seconds=took["trainer"],
            children_cpu_seconds=took["loader"] if workers else 0.0,
            receive_seconds=0.0,
            others_vcpus=others,
        ),
        evidence=Evidence(core_looks=looks),
        accelerator=AcceleratorOnly(
            step_seconds=at(took["accelerator"]),
            trainer_cpu_seconds=at(took["trainer"]),
            cached_batches=8,
        ),
        drains=tuple(
            Drain(
                workers=count,
                cpu_seconds=at(took["loader"]),
                wall_seconds=at(took["wall"] if count == 1 else count / rate),
                batches_per_second=rate,
            )
            for count, rate in rates.items()
        ),
        reads=Reads(
            workers=1,
            batch_bytes=at(read_bytes),
            cold_seconds=at(took["wall"]),
            warm_seconds=at(took["wall"]),
        )
        if read_bytes
        else None,
        batch=BatchFacts(samples=8, num_bytes=1_000_000),
        loader=LoaderFacts(
            num_workers=workers,
            pin_memory=False,
            persistent_workers=True,
            dataset="__main__.Data",
            torch_threads=threads,
        ),
    )


def profile_of(rank):
    return combine(
        [rank],
        group=TodaysGroup(instance_type=f"local.c{round(rank.vcpus)}"),
        settings=ProfileSettings(),
        workload_sha256=None,
        what={},
    )


def decided(profile, *, cores=4, fallback=(), asked=(), **constraints):
    return decide(
        profile,
        catalog=load_catalog("local", cores=cores),
        constraints=Constraints(**constraints),
        fallback=fallback,
        extra_clusters=asked,
        today=date(2026, 11, 21),
    )


def words(decision):
    return " ".join(explain(decision).split())


def plans(decision, action):
    return [plan for plan in decision.plans if plan.action == action and plan.predicted]


# 24 MB files, eight a batch, one disk: 2.9 batches a second with one worker, 3.2 with two.
DISK = profile_of(
    rank_of(
        ms(step=345, wait=330, accelerator=10, trainer=10, loader=160, wall=345),
        rates={2: 3.2, 1: 2.9},
        workers=1,
        vcpus=2,
        read_bytes=201.33e6,
    )
)


def test_more_workers_are_promised_no_more_than_the_profile_measured_of_them():
    # Of 345 ms two workers save 32, so that 65 are divided among workers and 280 are shared.
    for plan in decided(DISK, objective="time").plans:
        assert plan.predicted.speedup <= 345 / 280, plan.action


def test_a_disk_at_its_limit_is_not_mended_by_hosts_that_may_share_it():
    decision = decided(DISK, objective="time")
    assert decision.action == "keep"
    assert decision.bottleneck == "storage"


def test_what_a_profile_says_of_storage_does_not_exclude_itself():
    text = " ".join(explain_profile(DISK).split())
    assert "bound by storage or network" in text
    assert "too few loader workers" not in text
    assert "keeps up" not in text


# 16 MB files, eight a batch, one disk; copying them is two thirds of a worker's time.
DISK_AND_COPIES = profile_of(
    rank_of(
        ms(step=166, wait=160, accelerator=5.3, trainer=0.2, loader=101, wall=151),
        rates={2: 7.98, 1: 6.54},
        workers=1,
        vcpus=2,
        read_bytes=134.2e6,
    )
)


def test_a_profile_names_the_storage_where_its_parts_do():
    assert decided(DISK_AND_COPIES, objective="time").bottleneck == "storage"
    assert [state.id for state in DISK_AND_COPIES.states] == ["storage"]


def test_taking_a_batch_from_a_busy_worker_is_part_of_what_workers_are_promised_to_give():
    # No workers: 30 ms of loading and 20 of training. With two, a step took 23.7 ms and not 20.4:
    # torch asks the worker, which computes, for the memory of a batch.
    rank = rank_of(
        ms(step=53.1, wait=32.7, accelerator=20.4, trainer=0.2, loader=31, wall=32),
        rates={2: 60.0, 1: 31.0},
        workers=0,
        vcpus=2,
    )
    drains = [msgspec.structs.replace(drain, handover_seconds=at(0.0025)) for drain in rank.drains]
    profile = profile_of(msgspec.structs.replace(rank, drains=tuple(drains)))
    assert profile.timed_step.handover_seconds == 0.0025
    (tuned,) = plans(decided(profile, objective="time"), "tune")
    assert tuned.predicted.step_seconds == pytest.approx(0.0229, abs=0.0001)
    assert tuned.predicted.step_seconds_low < 0.0237 < tuned.predicted.step_seconds_high
    # Today, nobody takes a batch from a worker: the parts explain the step without it.
    assert profile.check.predicted_step_seconds == pytest.approx(0.0524, abs=0.0001)


# The main process loads, on a virtual machine whose cores others use as well: a batch took 42 ms
# while it was profiled, and 30 ms while it trained.
UNSTEADY = rank_of(
    ms(step=62.4, wait=41.8, accelerator=20.3, trainer=0.2, loader=36.5, wall=37),
    rates={2: 54.0, 1: 27.0},
    workers=0,
    vcpus=2,
    looks=((0.0002,) * 20 + (0.00025,) * 20) * 4,
)


def test_a_gpu_works_while_a_batch_is_taken_from_a_worker():
    drain = Drain(
        workers=2,
        cpu_seconds=at(0.03),
        wall_seconds=at(0.03),
        batches_per_second=60.0,
        handover_seconds=at(0.0025),
    )
    rank = msgspec.structs.replace(UNSTEADY, drains=(drain,))
    assert profile_of(rank).timed_step.handover_seconds == 0.0025
    rank = msgspec.structs.replace(rank, uses_cuda=True)
    assert profile_of(rank).timed_step.handover_seconds is None


def test_a_cpu_whose_own_speed_changes_widens_the_bands_and_is_told():
    profile = profile_of(UNSTEADY)
    assert profile.observed.cpu_speed_spread == pytest.approx(0.114, abs=0.002)
    assert "CPU's speed varied by 11% between seconds of the profile" in " ".join(
        explain_profile(profile).split()
    )
    decision = decided(profile, objective="time")
    assert "CPU's speed varied by 11% between seconds of the profile" in words(decision)
    steady = decided(profile_of(msgspec.structs.replace(UNSTEADY, evidence=None)), objective="time")
    assert "own speed" not in words(steady)
    for unsure, sure in zip(decision.plans, steady.plans, strict=True):
        # Two standard deviations, as an independent doubt.
        width = (unsure.predicted.step_seconds_high / unsure.predicted.step_seconds) - 1
        known = (sure.predicted.step_seconds_high / sure.predicted.step_seconds) - 1
        assert width == pytest.approx(math.hypot(known, 2 * 0.114), abs=0.005), unsure.action


def test_cores_that_others_keep_busy_promise_nothing_of_hosts_on_them():
    # One core of a machine of two, whose other one is burning: the data host would be there.
    rank = ONE_CORE
    evidence = Evidence(elsewhere_vcpus=1.0)
    busy = profile_of(msgspec.structs.replace(rank, evidence=evidence))
    decide_on_two = partial(
        decided, cores=2, objective="time", max_data_hosts=1, allowed_instance_types=("local.c1",)
    )
    assert decide_on_two(profile_of(rank)).action == "heterogeneous"
    decision = decide_on_two(busy)
    assert (decision.action, decision.bottleneck) == ("keep", "unexplained")
    reason = (
        "other programs were using 1.0 of this machine's other vCPU, so the measurement is not "
        "reliable; profile again on a quiet machine"
    )
    assert decision.plan.reason == reason
    # Said once, in the text and in the record, and without a word about money: nobody is billed.
    assert words(decision).count(reason.removeprefix("o")) == 1
    assert str(to_document(decision)).count("not reliable; profile again") == 2  # plan, and plans
    assert "were using" not in str(to_document(decision)["path"])
    assert not decision.advice
    assert not decision.warnings
    for word in ("money", "spending", "$", "costs"):
        assert word not in words(decision)


def test_a_cluster_to_fall_back_on_is_run_where_others_keep_the_machine_busy():
    rank = ONE_CORE
    fallback = builders.clusters("local.c1", "local.c1")

    decided_on = partial(decided, objective="time", fallback=fallback)

    evidence = Evidence(elsewhere_vcpus=1.0)
    busy = profile_of(msgspec.structs.replace(rank, evidence=evidence))
    decision = decided_on(busy, cores=2)
    assert (decision.bottleneck, decision.action) == ("unexplained", "heterogeneous")
    assert [group.instance_type for group in decision.plan.groups] == ["local.c1", "local.c1"]
    assert decision.plan.reason.startswith("asked for, as other programs were using 1.0")
    assert decision.is_noisy
    assert words(decision).startswith("Add 1 data host: dnn 1 x local.c1, data 1 x local.c1. Asked")
    assert "Prediction error" not in words(decision)
    # One core has no room for it, and a quiet machine has figures of its own.
    assert decided_on(busy, cores=1).action == "keep"
    quiet = decided_on(profile_of(rank), cores=2)
    assert quiet.bottleneck == "cpu"
    assert not quiet.is_noisy


def test_of_several_hosts_the_least_steady_one_counts():
    second = msgspec.structs.replace(UNSTEADY, rank=1, world_size=2, host="algo-2", evidence=None)
    first = msgspec.structs.replace(UNSTEADY, world_size=2)
    profile = combine(
        [first, second],
        group=TodaysGroup(instance_type="local.c2", count=2),
        settings=ProfileSettings(),
        workload_sha256=None,
        what={},
    )
    assert profile.observed.cpu_speed_spread == pytest.approx(0.114, abs=0.002)


ONE_CORE = rank_of(
    ms(step=66.1, wait=40, accelerator=22, trainer=21, loader=42, wall=42),
    rates={1: 23.0},
    workers=1,
    vcpus=1,
)
# One vCPU, one worker; other programs took 0.6 of the vCPU.
ONE_BUSY_CORE = profile_of(
    rank_of(
        ms(step=66.3, wait=60, accelerator=0.5, trainer=0.1, loader=26.8, wall=26.8),
        rates={1: 15.0},
        workers=1,
        vcpus=1,
        others=0.594,
    )
)
# Two vCPUs, no workers; other programs took 1.8 of the vCPUs.
TWO_BUSY_CORES = profile_of(
    rank_of(
        ms(step=172, wait=139, accelerator=6, trainer=6, loader=27.8, wall=27.8),
        rates={2: 7.0, 1: 6.0},
        workers=0,
        vcpus=2,
        others=1.8,
    )
)
BUSY = pytest.mark.parametrize("profile", [ONE_BUSY_CORE, TWO_BUSY_CORES], ids=["one", "two"])


@BUSY
def test_the_parts_give_one_sum_in_profile_and_decision(profile):
    given = f"{profile.check.predicted_step_seconds * 1000:.3g} ms"
    (answer, *_) = decided(profile).path
    assert f"give {given}" in answer.because


@BUSY
def test_what_other_programs_took_is_in_the_decision_and_said(profile):
    decision = decided(profile)
    took = f"{0.594:.1f} of the 1 vCPU" if profile is ONE_BUSY_CORE else "1.8 of the 2 vCPUs"
    reason = f"other programs were using {took}, so the measurement is not reliable"
    assert words(decision).count(reason.removeprefix("o")) == 1


@BUSY
def test_time_of_other_programs_is_never_booked_as_loading(profile):
    step = profile.timed_step
    assert step.loader_cpu_seconds in (0.0268, 0.0278)
    said = words(decided(profile))
    assert "0.0661 CPU-s" not in said
    assert "0.139 CPU-s" not in said


def test_on_a_machine_that_others_keep_busy_decide_does_not_choose_and_says_so():
    decision = decided(TWO_BUSY_CORES, objective="time")
    assert decision.action == "keep"
    assert "so the measurement is not reliable" in words(decision)
    assert "x as fast, at no cost" not in words(decision)
    # A figure that nobody can bear is not shown either, in no row and in no record.
    assert [plan.action for plan in decision.plans] == ["keep"]
    assert "saves" not in explain_profile(TWO_BUSY_CORES)


def test_other_programs_widen_the_band_by_what_they_took():
    core = rank_of(
        ms(step=36.8, wait=30, accelerator=2, trainer=2, loader=26.8, wall=26.8),
        rates={1: 30.0},
        workers=1,
        vcpus=1,
        others=0.2,
    )
    assert core.as_is is not None
    gone = msgspec.structs.replace(core.as_is, others_vcpus=0.0, step_seconds=at(0.0288))

    def band(rank):
        decision = decided(profile_of(rank), objective="time", max_data_hosts=1)
        (plan, *_) = plans(decision, "heterogeneous")
        return plan.predicted.step_seconds_high / plan.predicted.step_seconds - 1

    # 0.2 of 1 vCPU: what is left may be a quarter more.
    quiet = band(msgspec.structs.replace(core, as_is=gone))
    assert band(core) == pytest.approx(math.hypot(quiet, 0.25), abs=0.001)


# A loader that sleeps, one worker on one vCPU: four workers are free, a data host makes it five.
SLEEPY = profile_of(
    rank_of(
        ms(step=42.7, wait=40, accelerator=2, trainer=2, loader=0.4, wall=42.7),
        rates={1: 23.4},
        workers=1,
        vcpus=1,
        others=0.05,
    )
)


def test_money_buys_only_what_the_best_free_plan_does_not_give():
    decision = decided(
        SLEEPY, objective="time", max_data_hosts=1, allowed_instance_types=("local.c1",)
    )
    (free,) = plans(decision, "tune")
    assert free.predicted.speedup == pytest.approx(4.0, rel=0.05)
    assert decision.action == "tune"


def test_the_bottleneck_of_a_loader_that_waits_is_called_latency_in_words_and_record():
    decision = decided(SLEEPY, objective="time")
    assert decision.bottleneck == "latency"


def test_profile_and_decision_advise_one_number_of_workers():
    (fix,) = [fix for fix in SLEEPY.fixes if fix.id == "num_workers"]
    (free,) = plans(decided(SLEEPY), "tune")
    assert f"num_workers={free.groups[0].workers_per_host} instead of 1" in fix.text


def test_free_advice_is_told_by_the_chain_whichever_plan_is_run():
    (told,) = free_advice(SLEEPY, decided(SLEEPY, objective="time"))
    assert "Give the loaders 4 workers per host instead of 1: 4.00x as fast, at no cost." in told


COLD = msgspec.structs.replace(
    DISK,
    step=msgspec.structs.replace(
        DISK.timed_step, read_bytes=200e6, storage_bytes_per_second=600e6, loader_wall_seconds=0.16
    ),
    loader_rates=(),
    states=(),
)


@pytest.mark.parametrize(
    ("storage", "speedup"),
    [(None, 1.0), ("unknown", 1.0), ("shared", 1.0), ("per_host", 2.0)],
    ids=str,
)
def test_data_hosts_bring_storage_bandwidth_only_where_that_is_known(storage, speedup):
    decision, outcome = with_a_data_host(COLD, storage)
    assert decision.bottleneck == "storage"
    assert outcome.speedup == pytest.approx(speedup, rel=0.05)


def with_a_data_host(profile, storage):
    decision = decided(
        profile,
        objective="time",
        storage=storage,
        max_data_hosts=1,
        allowed_instance_types=("local.c2",),
    )
    (plan,) = plans(decision, "heterogeneous")
    assert plan.predicted is not None
    return decision, plan.predicted


@pytest.mark.parametrize("profile", [COLD, DISK], ids=["a rate", "shared by workers"])
def test_where_storage_is_not_known_the_hosts_gain_is_a_range(profile):
    _, shared = with_a_data_host(profile, "shared")
    _, own = with_a_data_host(profile, "per_host")
    decision, unknown = with_a_data_host(profile, None)
    # From the one, which is the plan's own figure, to the other.
    assert (unknown.step_seconds, unknown.speedup) == (shared.step_seconds, shared.speedup)
    assert unknown.step_seconds_high == shared.step_seconds_high
    assert unknown.step_seconds_low == pytest.approx(own.step_seconds_low)
    assert unknown.own_storage_speedup == pytest.approx(own.speedup)
    assert (shared.own_storage_speedup, own.own_storage_speedup) == (None, None)
    told = f"{own.speedup:.2f}x"
    assert f"{told} if each host has separate storage" in words(decision)
    assert f"{shared.speedup:.2f}x as fast without, and {told} with one" in words(decision)
    assert "storage?" in explain(decision)


@pytest.mark.parametrize("storage", [None, "shared"], ids=str)
def test_a_storage_at_its_limit_is_said_first_with_what_costs_nothing(storage):
    # 200 MB a step from a SATA disk: no host makes the disk faster.
    sata = msgspec.structs.replace(
        COLD, step=msgspec.structs.replace(COLD.timed_step, storage_bytes_per_second=580e6)
    )
    decision, outcome = with_a_data_host(sata, storage)
    assert (decision.action, outcome.limit) == ("keep", "storage")
    assert decision.plan.reason.startswith("the storage is the limit")
    first = decision.advice[0]
    assert first.id == "storage"
    for remedy in ("local disk", "page cache", "faster volume", "shards", "smaller"):
        assert remedy in first.text
    assert ("read from the same storage" in first.text) == (storage == "shared")
    pays = next(own for own in decision.path if own.question.startswith("Would a data group"))
    assert pays.answer == "no"


def test_a_storage_that_is_nearly_the_limit_bounds_what_hosts_are_promised():
    # The CPU is the limit; a second host would halve it, and the storage is at three quarters.
    busy = msgspec.structs.replace(
        COLD,
        step=msgspec.structs.replace(
            COLD.timed_step,
            read_bytes=155e6,
            loader_cpu_seconds=0.68,
            loader_wall_seconds=0.68,
            used_cpu_seconds=None,
            num_workers=2,
        ),
    )
    _, shared = with_a_data_host(busy, "shared")
    decision, unknown = with_a_data_host(busy, None)
    assert decision.bottleneck == "cpu"
    assert unknown.step_seconds == shared.step_seconds == pytest.approx(155 / 600, rel=0.01)
    assert unknown.own_storage_speedup is not None
    assert unknown.own_storage_speedup > 1.2 * unknown.speedup
    assert decision.advice[0].text.startswith("The storage is the next limit.")


def test_hosts_of_another_type_may_have_a_volume_of_another_rate():
    def width(kind):
        decision = decided(
            COLD,
            objective="time",
            storage="per_host",
            max_data_hosts=1,
            allowed_instance_types=(kind,),
        )
        (plan,) = [p for p in plans(decision, "heterogeneous") if p.groups[1].instance_type == kind]
        return plan.predicted.step_seconds_high / plan.predicted.step_seconds - 1

    assert width("local.c1") == pytest.approx(math.hypot(width("local.c2"), 0.2), abs=0.001)


def test_storage_that_workers_share_is_mended_by_hosts_that_have_their_own():
    own = decided(DISK, objective="time", storage="per_host", max_data_hosts=2)
    best = max(plan.predicted.speedup for plan in plans(own, "heterogeneous") if plan.predicted)
    assert best > 2
    assert own.action == "heterogeneous"


def test_threads_of_torch_are_blamed_only_where_there_are_several_and_nobody_else():
    def text(others, threads):
        rank = rank_of(
            ms(step=157, wait=136, accelerator=21, trainer=21, loader=7, wall=7),
            rates={2: 280.0, 1: 140.0},
            workers=0,
            vcpus=2,
            others=others,
            threads=threads,
        )
        return " ".join(state.text for state in profile_of(rank).states)

    assert "threads of the main process wait for each other" in text(0.0, 2)
    assert "threads of the main process wait for each other" not in text(0.0, 1)
    assert "threads of the main process wait for each other" not in text(0.5, 2)
    assert "other programs kept 0.5 of the 2 vCPUs busy" in text(0.5, 2)


@given(
    numbers=st.fixed_dictionaries(
        {
            name: st.floats(1e-4, 1.0)
            for name in ("step", "accelerator", "trainer", "loader", "wall")
        }
    ),
    few=st.floats(0.1, 100),
    many=st.floats(0.1, 100),
    others=st.floats(0, 1.9),
    workers=st.integers(0, 4),
    read_bytes=st.floats(0, 1e6),
)
def test_the_self_check_and_the_model_sum_the_parts_alike_whatever_was_measured(
    numbers, few, many, others, workers, read_bytes
):
    profile = profile_of(
        rank_of(
            {**numbers, "wait": numbers["step"] / 2},
            rates={1: few, 2: many},
            others=others,
            workers=workers,
            vcpus=2,
            read_bytes=read_bytes,
        )
    )
    today = today_of(profile, load_catalog("local", cores=2).get("local.c2"))
    work = measure(profile, today=today, processes=1)
    # A thousandth of the step is the least that the model ever says.
    summed = max(profile.check.predicted_step_seconds, numbers["step"] / 1000)
    assert work.parts_seconds == pytest.approx(summed)
    shape = ClusterShape(dnn=Hosts(instance=today, count=1, workers=workers))
    bare = replace(work, corrected=())
    assert estimate(bare, shape).step_seconds == pytest.approx(work.parts_seconds)
    # Whatever the step took longer, loading is what its own processes used.
    assert work.loader_cpu_seconds == profile.timed_step.loader_cpu_seconds


def test_a_cluster_that_is_asked_for_is_shown_on_a_busy_profile_and_marked():
    asked = builders.clusters("local.c2", "local.c2")
    decision = decided(TWO_BUSY_CORES, asked=[asked])
    assert [plan.action for plan in decision.plans] == ["keep", "heterogeneous"]
    assert any(line.startswith("?heterogeneous") for line in explain(decision).splitlines())
    assert "Rough guide only" in words(decision)


def test_two_plans_that_need_too_many_cores_are_told_with_one_number():
    profile = profile_of(ONE_CORE)
    decision = decided(profile, cores=1, asked=[builders.clusters("local.c1", "local.c4")])
    (answer,) = [each for each in decision.path if "data group" in each.question]
    assert "needs 5 cores, this machine has 1" in answer.because


# What a quiet machine of two cores measures of the nine scripts of benchmarks/honesty.py.
NINE = {
    "compute": (
        ms(step=40.5, wait=0.2, accelerator=40.2, trainer=1, loader=4, wall=4),
        {"rates": {2: 480.0, 1: 245.0}, "workers": 1, "vcpus": 2},
        ("accelerator", "keep"),
    ),
    "sleep": (
        ms(step=62.1, wait=53, accelerator=8.3, trainer=1, loader=1, wall=61.5),
        {"rates": {2: 32.2, 1: 16.2}, "workers": 1, "vcpus": 2},
        ("latency", "tune"),
    ),
    "image": (
        ms(step=41.5, wait=33, accelerator=8.3, trainer=1, loader=42, wall=41),
        {"rates": {2: 46.0, 1: 24.3}, "workers": 1, "vcpus": 2},
        ("workers", "tune"),
    ),
    "no workers": (
        ms(step=50.5, wait=30, accelerator=20.3, trainer=31, loader=30.5, wall=30),
        {"rates": {2: 63.0, 1: 33.0}, "workers": 0, "vcpus": 2},
        ("workers", "tune"),
    ),
    "optimal": (
        ms(step=30.5, wait=0.3, accelerator=30.2, trainer=1, loader=21, wall=20),
        {"rates": {2: 92.0, 1: 49.0}, "workers": 2, "vcpus": 2},
        ("accelerator", "keep"),
    ),
    "gil": (
        ms(step=40.5, wait=0.3, accelerator=40.2, trainer=40, loader=5, wall=5),
        {"rates": {2: 380.0, 1: 195.0}, "workers": 1, "vcpus": 2},
        ("accelerator", "keep"),
    ),
    "disk": (
        ms(step=300, wait=290, accelerator=5.3, trainer=2, loader=60, wall=300),
        {"rates": {2: 3.5, 1: 3.3}, "workers": 1, "vcpus": 2, "read_bytes": 128e6},
        ("storage", "keep"),
    ),
    "one core": (
        ms(step=61.5, wait=36, accelerator=20.3, trainer=20, loader=40, wall=40),
        {"rates": {1: 24.5}, "workers": 1, "vcpus": 1},
        ("cpu", "heterogeneous"),
    ),
    "shared cores": (
        ms(step=38.5, wait=20, accelerator=15.3, trainer=15, loader=61, wall=55),
        {"rates": {2: 32.5, 1: 18.0}, "workers": 2, "vcpus": 2},
        ("cpu", "keep"),
    ),
}


@pytest.mark.parametrize("name", list(NINE))
def test_a_training_of_a_known_bottleneck_is_advised_rightly(name):
    took, how, advice = NINE[name]
    profile = profile_of(rank_of(took, **how))
    assert profile.check.explained
    # Waiting workers are too few of them.
    assert [state.id for state in profile.states] == [advice[0].replace("latency", "workers")]
    types = (profile.host.instance_type,)
    decision = decided(
        profile, cores=2, objective="time", max_data_hosts=1, allowed_instance_types=types
    )
    assert (decision.bottleneck, decision.action) == advice


@pytest.mark.parametrize("name", list(NINE))
def test_where_others_keep_most_of_the_machine_busy_nothing_is_told_of_any_of_them(name):
    took, how, _ = NINE[name]
    profile = profile_of(rank_of(took, **how, others=0.8 * how["vcpus"]))
    decision = decided(profile, objective="time")
    assert (decision.bottleneck, decision.action) == ("unexplained", "keep")
    assert "so the measurement is not reliable" in words(decision)


def test_a_data_host_takes_away_half_of_what_loading_and_training_cost_each_other():
    step = StepTerms(
        step_seconds=0.130,
        wait_seconds=0.005,
        accelerator_step_seconds=0.060,
        loader_cpu_seconds=0.040,
        loader_wall_seconds=0.040,
        trainer_cpu_seconds=0.060,
        used_cpu_seconds=0.128,
        local_receive_seconds=0.0,
        receive_seconds=0.0,
        receive_cpu_seconds=0.001,
        num_workers=1,
        global_batch_size=8,
        batch_bytes=7e4,
    )
    check = Check(predicted_step_seconds=0.128, error=-0.015, explained=True)
    profile = Profile(host=ProfiledHost(instance_type="local.c1", vcpus=1), step=step, check=check)
    decision = decided(
        profile, objective="time", max_data_hosts=1, allowed_instance_types=("local.c1",)
    )
    assert decision.bottleneck == "cpu"
    assert decision.action == "heterogeneous"
    predicted = decision.plan.predicted
    # Half of what the step used beyond both, and tried: 64 to 73 ms of CPU (benchmarks).
    assert predicted.step_seconds == pytest.approx((0.061 + 0.014) * 0.130 / 0.128, rel=0.01)
    assert predicted.step_seconds_low < 0.065 < 0.085 < predicted.step_seconds_high
