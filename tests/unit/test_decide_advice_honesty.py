"""`decide` promises nothing that a profile ruled out, on figures that were advised wrongly once."""

import math
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide import explain
from stoker.decide.model import ClusterShape, Hosts, estimate
from stoker.decide.ranking import error_band
from stoker.decide.step_work import measure, today_of
from stoker.profile.explain import explain as explain_profile
from stoker.profile.rank_results import BatchFacts, Evidence, Reads
from stoker.run.outputs import free_advice
from support import builders, decisions, profiled_ranks
from support.profiled_ranks import at, drained


def ms(**milliseconds):
    return {name: round(value / 1000, 9) for name, value in milliseconds.items()}


def rank_of(took, *, rates, workers, vcpus, others=0.0, read_bytes=0.0, threads=None, looks=()):
    wall, read = at(took["wall"]), at(read_bytes)
    reads = Reads(workers=1, batch_bytes=read, cold_seconds=wall, warm_seconds=wall)
    return profiled_ranks.rank_of(
        **{name: took[name] for name in ("step", "wait", "accelerator")},
        workers=workers,
        vcpus=vcpus,
        trainer_cpu=took["trainer"],
        children_cpu=took["loader"] if workers else 0.0,
        drains=tuple(
            drained(n, took["loader"], wall=took["wall"] if n == 1 else n / rate, rate=rate)
            for n, rate in rates.items()
        ),
        others_vcpus=others,
        evidence=Evidence(core_looks=looks),
        reads=reads if read_bytes else None,
        batch=BatchFacts(samples=8, num_bytes=1_000_000),
        pin_memory=False,
        torch_threads=threads,
    )


def profile_of(*ranks):
    kind = f"local.c{round(ranks[0].vcpus)}"
    return profiled_ranks.profile_of(*ranks, kind=kind, count=len(ranks))


def decided(profile, *, cores=4, asked=(), **more):
    catalog = load_catalog("local", cores=cores)
    return decisions.decided(profile, catalog=catalog, extra_clusters=asked, **more)


ONE_HOST = {"objective": "time", "max_data_hosts": 1, "allowed_instance_types": ("local.c1",)}


def words(decision):
    return " ".join(explain(decision).split())


def plans(decision, action):
    return [plan for plan in decision.plans if plan.action == action and plan.predicted]


# 24 MB files, eight a batch, one disk: 2.9 batches a second with one worker, 3.2 with two.
LOADING = ms(step=345, wait=330, accelerator=10, trainer=10, loader=160, wall=345)
DISK_RANK = rank_of(LOADING, rates={2: 3.2, 1: 2.9}, workers=1, vcpus=2, read_bytes=201.33e6)
DISK = profile_of(DISK_RANK)


def test_workers_that_share_a_disk_are_promised_no_more_than_was_measured_of_them():
    decision = decided(DISK, objective="time")
    assert (decision.bottleneck, decision.action) == ("storage", "keep")
    # Of 345 ms two workers save 32, so that 65 are divided among workers and 280 are shared.
    for plan in decision.plans:
        assert plan.predicted.speedup <= 345 / 280, plan.action
    own = decided(DISK, objective="time", storage="per_host", max_data_hosts=2)
    assert own.action == "heterogeneous"
    assert max(plan.predicted.speedup for plan in plans(own, "heterogeneous")) > 2
    # The profile's own words name the storage alone.
    text = " ".join(explain_profile(DISK).split())
    assert "bound by storage or network" in text
    assert "too few loader workers" not in text
    assert "keeps up" not in text


def test_taking_a_batch_from_a_busy_worker_is_part_of_what_workers_are_promised_to_give():
    # No workers: 30 ms of loading and 20 of training. With two, a step took 23.7 ms and not 20.4:
    # torch asks the worker, which computes, for the memory of a batch.
    took = ms(step=53.1, wait=32.7, accelerator=20.4, trainer=0.2, loader=31, wall=32)
    rank = rank_of(took, rates={2: 60.0, 1: 31.0}, workers=0, vcpus=2)
    drains = [msgspec.structs.replace(drain, handover_seconds=at(0.0025)) for drain in rank.drains]
    rank = msgspec.structs.replace(rank, drains=tuple(drains))
    profile = profile_of(rank)
    assert profile.timed_step.handover_seconds == 0.0025
    (tuned,) = plans(decided(profile, objective="time"), "tune")
    assert tuned.predicted.step_seconds == pytest.approx(0.0229, abs=0.0001)
    assert tuned.predicted.step_seconds_low < 0.0237 < tuned.predicted.step_seconds_high
    # Today, nobody takes a batch from a worker: the parts explain the step without it.
    assert profile.check.predicted_step_seconds == pytest.approx(0.0524, abs=0.0001)
    # A GPU works meanwhile.
    on_a_gpu = profile_of(msgspec.structs.replace(rank, uses_cuda=True))
    assert on_a_gpu.timed_step.handover_seconds is None


# The main process loads, on a virtual machine whose cores others use as well: a batch took 42 ms
# while it was profiled, and 30 ms while it trained.
UNSTEADY = rank_of(
    ms(step=62.4, wait=41.8, accelerator=20.3, trainer=0.2, loader=36.5, wall=37),
    rates={2: 54.0, 1: 27.0},
    workers=0,
    vcpus=2,
    looks=((0.0002,) * 20 + (0.00025,) * 20) * 4,
)


def test_a_cpu_whose_own_speed_changes_widens_the_bands_and_is_told():
    profile = profile_of(UNSTEADY)
    assert profile.observed.cpu_speed_spread == pytest.approx(0.114, abs=0.002)
    said = "CPU's speed varied by 11% between seconds of the profile"
    assert said in " ".join(explain_profile(profile).split())
    decision = decided(profile, objective="time")
    assert said in words(decision)
    quiet = msgspec.structs.replace(UNSTEADY, evidence=None)
    steady = decided(profile_of(quiet), objective="time")
    assert "CPU's speed varied" not in words(steady)
    for unsure, sure in zip(decision.plans, steady.plans, strict=True):
        # Two standard deviations, as an independent doubt.
        width = math.hypot(error_band(sure.predicted), 2 * 0.114)
        assert error_band(unsure.predicted) == pytest.approx(width, abs=0.005), unsure.action
    # Of several hosts the least steady one counts.
    second = msgspec.structs.replace(quiet, rank=1, world_size=2, host="algo-2")
    both = profile_of(msgspec.structs.replace(UNSTEADY, world_size=2), second)
    assert both.observed.cpu_speed_spread == profile.observed.cpu_speed_spread


SHARED = ms(step=66.1, wait=40, accelerator=22, trainer=21, loader=42, wall=42)
ONE_CORE = rank_of(SHARED, rates={1: 23.0}, workers=1, vcpus=1)
BURNING = Evidence(elsewhere_vcpus=1.0)
BUSY_NEIGHBOUR = profile_of(msgspec.structs.replace(ONE_CORE, evidence=BURNING))


def test_cores_that_others_keep_busy_promise_nothing_of_hosts_on_them():
    # One core of a machine of two, whose other one is burning: the data host would be there.
    decide_on_two = partial(decided, cores=2, **ONE_HOST)
    assert decide_on_two(profile_of(ONE_CORE)).action == "heterogeneous"
    decision = decide_on_two(BUSY_NEIGHBOUR)
    assert (decision.action, decision.bottleneck) == ("keep", "unexplained")
    assert decision.plan.reason == (
        "the measurement is not reliable: other programs were using 1.0 of this machine's other "
        "vCPU; profile again on a quiet machine"
    )
    # Said once, and without a word about money: nobody is billed.
    assert words(decision).count("were using 1.0 of this machine's other vCPU") == 1
    assert not decision.advice
    assert not decision.warnings
    for word in ("money", "spending", "$", "costs"):
        assert word not in words(decision)


def test_a_cluster_to_fall_back_on_is_run_where_others_keep_the_machine_busy():
    fallback = builders.clusters("local.c1", "local.c1")
    decided_on = partial(decided, objective="time", fallback=fallback)
    decision = decided_on(BUSY_NEIGHBOUR, cores=2)
    assert (decision.bottleneck, decision.action) == ("unexplained", "heterogeneous")
    assert [group.instance_type for group in decision.plan.groups] == ["local.c1", "local.c1"]
    assert decision.plan.reason.startswith(
        "the plan of --group, as the measurement is not reliable: other programs were using 1.0"
    )
    assert decision.is_noisy
    assert words(decision).startswith(
        "Add 1 data host: dnn 1 x local.c1, data 1 x local.c1. The plan"
    )
    assert "Prediction error" not in words(decision)
    # One core has no room for it, and a quiet machine has figures of its own.
    assert decided_on(BUSY_NEIGHBOUR, cores=1).action == "keep"
    quiet = decided_on(profile_of(ONE_CORE), cores=2)
    assert quiet.bottleneck == "cpu"
    assert not quiet.is_noisy


def test_other_programs_widen_the_band_by_what_they_took():
    took = ms(step=36.8, wait=30, accelerator=2, trainer=2, loader=26.8, wall=26.8)
    core = rank_of(took, rates={1: 30.0}, workers=1, vcpus=1, others=0.2)
    gone = msgspec.structs.replace(core.as_is, others_vcpus=0.0, step_seconds=at(0.0288))

    def band(rank):
        decision = decided(profile_of(rank), objective="time", max_data_hosts=1)
        return error_band(plans(decision, "heterogeneous")[0].predicted)

    # 0.2 of 1 vCPU: what is left may be a quarter more.
    quiet = band(msgspec.structs.replace(core, as_is=gone))
    assert band(core) == pytest.approx(math.hypot(quiet, 0.25), abs=0.001)


# A loader that sleeps, one worker on one vCPU: four workers are free, a data host makes it five.
ASLEEP = ms(step=42.7, wait=40, accelerator=2, trainer=2, loader=0.4, wall=42.7)
SLEEPY = profile_of(rank_of(ASLEEP, rates={1: 23.4}, workers=1, vcpus=1, others=0.05))


def test_a_loader_that_waits_gets_the_free_workers_that_the_profile_names_before_hosts():
    decision = decided(SLEEPY, **ONE_HOST)
    assert (decision.bottleneck, decision.action) == ("latency", "tune")
    (free,) = plans(decision, "tune")
    assert free.predicted.speedup == pytest.approx(4.0, rel=0.05)
    (fix,) = [fix for fix in SLEEPY.fixes if fix.id == "num_workers"]
    assert f"num_workers={free.groups[0].workers_per_host} instead of 1" in fix.text
    (told,) = free_advice(SLEEPY, decision)
    assert (
        "Give the loaders 4 workers per host instead of 1: 4.00 times as fast, at no cost." in told
    )


def with_step(profile, **terms):
    step = msgspec.structs.replace(profile.timed_step, **terms)
    return msgspec.structs.replace(profile, step=step, loader_rates=(), states=())


COLD = with_step(DISK, read_bytes=200e6, storage_bytes_per_second=600e6, loader_wall_seconds=0.16)


def with_a_data_host(profile, storage, kind="local.c2"):
    decision = decided(profile, storage=storage, **ONE_HOST | {"allowed_instance_types": (kind,)})
    (plan,) = [p for p in plans(decision, "heterogeneous") if p.groups[1].instance_type == kind]
    return decision, plan.predicted


@pytest.mark.parametrize(
    ("profile", "least", "most"),
    [(COLD, 1.0, 2.0), (DISK, 1.16, 2.19)],
    ids=["a rate", "shared by workers"],
)
def test_where_storage_is_not_known_the_hosts_gain_is_a_range(profile, least, most):
    _, shared = with_a_data_host(profile, "shared")
    _, own = with_a_data_host(profile, "per_host")
    decision, unknown = with_a_data_host(profile, None)
    assert decision.bottleneck == "storage"
    assert (shared.speedup, own.speedup) == pytest.approx((least, most), rel=0.05)
    # From the one, which is the plan's own figure, to the other.
    assert (unknown.step_seconds, unknown.speedup) == (shared.step_seconds, shared.speedup)
    assert unknown.step_seconds_high == shared.step_seconds_high
    assert unknown.step_seconds_low == pytest.approx(own.step_seconds_low)
    assert unknown.own_storage_speedup == pytest.approx(own.speedup)
    assert (shared.own_storage_speedup, own.own_storage_speedup) == (None, None)
    assert f"{own.speedup:.2f}x if each host has separate storage" in words(decision)
    both = f"{shared.speedup:.2f} times as fast without, and {own.speedup:.2f} times with one"
    assert both in words(decision)
    assert "storage?" in explain(decision)


@pytest.mark.parametrize("storage", [None, "shared"], ids=str)
def test_a_storage_at_its_limit_is_said_first_with_what_costs_nothing(storage):
    # 200 MB a step from a SATA disk: no host makes the disk faster.
    sata = with_step(COLD, storage_bytes_per_second=580e6)
    decision, outcome = with_a_data_host(sata, storage)
    assert (decision.action, outcome.limit) == ("keep", "storage")
    assert decision.plan.reason.startswith("the storage is the limit")
    first = decision.advice[0]
    assert first.id == "storage"
    assert "page cache" in first.text
    assert ("read from the same storage" in first.text) == (storage == "shared")


def test_a_storage_that_is_nearly_the_limit_bounds_what_hosts_are_promised():
    # The CPU is the limit; a second host would halve it, and the storage is at three quarters.
    loading = {"loader_cpu_seconds": 0.68, "loader_wall_seconds": 0.68}
    busy = with_step(COLD, read_bytes=155e6, used_cpu_seconds=None, num_workers=2, **loading)
    _, shared = with_a_data_host(busy, "shared")
    decision, unknown = with_a_data_host(busy, None)
    assert decision.bottleneck == "cpu"
    assert unknown.step_seconds == shared.step_seconds == pytest.approx(155 / 600, rel=0.01)
    assert unknown.own_storage_speedup > 1.2 * unknown.speedup
    assert decision.advice[0].text.startswith("The storage is the next limit.")


def test_hosts_of_another_type_may_have_a_volume_of_another_rate():
    same, other = (
        error_band(with_a_data_host(COLD, "per_host", kind)[1]) for kind in ("local.c2", "local.c1")
    )
    assert other == pytest.approx(math.hypot(same, 0.2), abs=0.001)


def test_threads_of_torch_are_blamed_only_where_there_are_several_and_nobody_else():
    took = ms(step=157, wait=136, accelerator=21, trainer=21, loader=7, wall=7)

    def text(others, threads):
        more = {"workers": 0, "vcpus": 2, "others": others, "threads": threads}
        rank = rank_of(took, rates={2: 280.0, 1: 140.0}, **more)
        return " ".join(state.text for state in profile_of(rank).states)

    assert "threads of the main process wait for each other" in text(0.0, 2)
    assert "threads of the main process wait for each other" not in text(0.0, 1)
    assert "threads of the main process wait for each other" not in text(0.5, 2)
    assert "other programs kept 0.5 of the 2 vCPUs busy" in text(0.5, 2)


@given(
    numbers=st.fixed_dictionaries(
        dict.fromkeys(("step", "accelerator", "trainer", "loader", "wall"), st.floats(1e-4, 1.0))
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


def test_two_plans_that_need_too_many_cores_are_told_with_one_number():
    profile = profile_of(ONE_CORE)
    decision = decided(profile, cores=1, asked=[builders.clusters("local.c1", "local.c4")])
    (answer,) = [each for each in decision.path if "data group" in each.question]
    assert "needs 5 cores, this machine has 1" in answer.because


# What a quiet machine of two cores measures, of the scripts of benchmarks/honesty.py for the most:
# TOOK in ms, batches a second with so many workers, its own workers, the bytes that a batch reads,
# and what is advised.
TOOK = ("step", "wait", "accelerator", "trainer", "loader", "wall")
KNOWN = {
    "compute": ((40.5, 0.2, 40.2, 1, 4, 4), {2: 480.0, 1: 245.0}, 1, 0, "accelerator", "keep"),
    "sleep": ((62.1, 53, 8.3, 1, 1, 61.5), {2: 32.2, 1: 16.2}, 1, 0, "latency", "tune"),
    "image": ((41.5, 33, 8.3, 1, 42, 41), {2: 46.0, 1: 24.3}, 1, 0, "workers", "tune"),
    "no workers": ((50.5, 30, 20.3, 31, 30.5, 30), {2: 63.0, 1: 33.0}, 0, 0, "workers", "tune"),
    "optimal": ((30.5, 0.3, 30.2, 1, 21, 20), {2: 92.0, 1: 49.0}, 2, 0, "accelerator", "keep"),
    "gil": ((40.5, 0.3, 40.2, 40, 5, 5), {2: 380.0, 1: 195.0}, 1, 0, "accelerator", "keep"),
    "disk": ((300, 290, 5.3, 2, 60, 300), {2: 3.5, 1: 3.3}, 1, 128e6, "storage", "keep"),
    # Copying is two thirds of a worker's time.
    "copies": ((166, 160, 5.3, 0.2, 101, 151), {2: 7.98, 1: 6.54}, 1, 134.2e6, "storage", "tune"),
    "one core": ((61.5, 36, 20.3, 20, 40, 40), {1: 24.5}, 1, 0, "cpu", "heterogeneous"),
    "shared cores": ((38.5, 20, 15.3, 15, 61, 55), {2: 32.5, 1: 18.0}, 2, 0, "cpu", "keep"),
}


def known_rank(name, *, others=0.0):
    took, rates, workers, read_bytes, *_ = KNOWN[name]
    more = {"workers": workers, "vcpus": max(rates), "others": others, "read_bytes": read_bytes}
    return rank_of(ms(**dict(zip(TOOK, took, strict=True))), rates=rates, **more)


@pytest.mark.parametrize("name", list(KNOWN))
def test_a_training_of_a_known_bottleneck_is_advised_rightly(name):
    *_, bottleneck, action = KNOWN[name]
    profile = profile_of(known_rank(name))
    assert profile.check.explained
    # Waiting workers are too few of them.
    assert [state.id for state in profile.states] == [bottleneck.replace("latency", "workers")]
    types = (profile.host.instance_type,)
    decision = decided(profile, cores=2, **ONE_HOST | {"allowed_instance_types": types})
    assert (decision.bottleneck, decision.action) == (bottleneck, action)


@pytest.mark.parametrize("name", list(KNOWN))
def test_where_others_keep_most_of_the_machine_busy_that_is_said_once_and_nothing_is_chosen(name):
    others = 0.8 * known_rank(name).vcpus
    profile = profile_of(known_rank(name, others=others))
    decision = decided(profile, objective="time")
    assert (decision.bottleneck, decision.action) == ("unexplained", "keep")
    # Figures that do not count are in no row either.
    assert [plan.action for plan in decision.plans] == ["keep"]
    assert words(decision).count(f"ther programs were using {others:.1f} of the ") == 1
    assert "the measurement is not reliable" in words(decision).lower()
    assert "saves" not in explain_profile(profile)


def test_a_cluster_that_is_asked_for_is_shown_on_a_busy_profile_and_marked():
    busy = profile_of(known_rank("no workers", others=1.8))
    decision = decided(busy, asked=[builders.clusters("local.c2", "local.c2")])
    assert [plan.action for plan in decision.plans] == ["keep", "heterogeneous"]
    assert any(line.startswith("?heterogeneous") for line in explain(decision).splitlines())
    assert "Rough guide only" in words(decision)


def test_a_data_host_takes_away_half_of_what_loading_and_training_cost_each_other():
    took = {"step_seconds": 0.130, "wait_seconds": 0.005, "accelerator_step_seconds": 0.060}
    cpu = {"trainer_cpu_seconds": 0.060, "used_cpu_seconds": 0.128, "receive_cpu_seconds": 0.001}
    loading = {"loader_cpu_seconds": 0.040, "loader_wall_seconds": 0.040, "num_workers": 1}
    batch = {"receive_seconds": 0.0, "local_receive_seconds": 0.0, "global_batch_size": 8}
    terms = {**took, **cpu, **loading, **batch, "batch_bytes": 7e4}
    profile = builders.profile(vcpus=1, is_explained=True, predicted=0.128, **terms)
    decision = decided(profile, **ONE_HOST)
    assert (decision.bottleneck, decision.action) == ("cpu", "heterogeneous")
    predicted = decision.plan.predicted
    # Half of what the step used beyond both, and tried: 64 to 73 ms of CPU (benchmarks).
    assert predicted.step_seconds == pytest.approx((0.061 + 0.014) * 0.130 / 0.128, rel=0.01)
    assert predicted.step_seconds_low < 0.065 < 0.085 < predicted.step_seconds_high
