"""The ranks' results become the record: sums, maxima, the self-check, the fixes, the words."""

from datetime import date

import msgspec
import pytest

from stoker.catalog import Instance, load_catalog
from stoker.decide.model import Work
from stoker.errors import UsageError
from stoker.profile.explain import explain
from stoker.profile.rank_results import BatchFacts, Copies, Evidence, RankResult
from stoker.profile.unmeasured import ProcessReport, why_unmeasured
from stoker.records import EpochPause, EpochTimes, Profile
from stoker.records.profile import MAX_PROFILE_DAYS
from support import sample_records
from support.builders import gpu_load
from support.decisions import decided
from support.profiled_ranks import TORCHS, at, changed, drained, profile_of, rank_of

# One core: 40 ms to load, 22 ms to train.
TOOK = {"step": 0.063, "wait": 0.038, "accelerator": 0.022}
CPU = {"trainer_cpu": 0.0225, "trainer_alone_cpu": 0.022, "children_cpu": 0.0405}
ONE_CORE = rank_of(
    **{**TOOK, **CPU, "vcpus": 1},
    drains=(drained(1, 0.040, rate=24.0), drained(2, 0.040, rate=24.0)),
    batch=BatchFacts(samples=64, num_bytes=590336),
    persistent_workers=False,
    evidence=Evidence(),
)


def words_of(profile: Profile) -> str:
    return " ".join(explain(profile).split())


def test_on_one_core_loading_and_training_add_up():
    profile = profile_of(ONE_CORE)
    assert profile.check.predicted_step_seconds == pytest.approx(0.063)
    assert profile.check.explained
    assert profile.step.loader_cpu_seconds == pytest.approx(0.040)
    assert profile.step.trainer_cpu_seconds == pytest.approx(0.022)
    assert profile.step.num_workers == 2
    assert (profile.host.vcpus, profile.host.quota_vcpus) == (1, None)
    assert profile.fixes == ()
    assert "60% of a step is waiting for data" in explain(profile)
    assert "the limit is the CPU." in words_of(profile)


def test_ranks_add_up_where_cpu_is_meant_and_the_slowest_counts_where_waiting_is():
    first = changed(ONE_CORE, world_size=2, vcpus=2)
    second = changed(first, rank=1, wait_seconds=at(0.050, 120), trainer_cpu_seconds=0.03)
    step = profile_of(first, second).step
    assert step.global_batch_size == 128
    assert step.batch_bytes == 2 * 590336
    assert step.loader_cpu_seconds == pytest.approx(0.080)
    assert step.trainer_cpu_seconds == pytest.approx(0.044)
    assert step.wait_seconds == pytest.approx(0.050)
    assert step.accelerator_step_seconds == pytest.approx(0.022)
    assert step.num_workers == 4
    # Those of one host.
    assert profile_of(first, changed(second, host="algo-2"), count=2).step.num_workers == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"reach": "own", "class_name": "litdata.X"},
            "litdata.X gets no help from data hosts: it makes batches in its own way",
        ),
        ({}, f"loader: {TORCHS}; data hosts can make its batches"),
    ],
)
def test_one_line_says_how_far_data_hosts_can_help(given, words):
    assert words in words_of(profile_of(changed(ONE_CORE, **given)))


def test_loading_in_the_main_process_is_explained_though_a_device_hides_some_of_it():
    first = rank_of(
        step=0.070, wait=0.010, accelerator=0.060, workers=0, drains=(drained(1, 0.05),)
    )
    timed = msgspec.structs.replace(first.as_is, clock="cuda:0")
    profile = profile_of(changed(first, as_is=timed))
    assert profile.check.error == pytest.approx(0.0, abs=0.01)


def test_parts_that_miss_the_whole_are_unexplained():
    profile = profile_of(changed(ONE_CORE, step_seconds=at(0.090)))
    assert profile.check.error == pytest.approx(0.063 / 0.090 - 1)
    assert not profile.check.explained
    assert "unexplained" in explain(profile)
    # Nor do CPUs that idle explain a step.
    assert not profile_of(changed(ONE_CORE, vcpus=4, step_seconds=at(0.2))).check.explained


def test_what_others_took_of_the_cpus_is_accounted_for_and_said():
    # Half the core was somebody else's: everything took twice as long, and that is explained.
    profile = profile_of(changed(ONE_CORE, step_seconds=at(0.126), others_vcpus=0.5))
    assert profile.check.explained
    said = words_of(profile)
    assert said.count("not reliable: other programs were using 0.5 of the 1 vCPU") == 1
    assert "kept 0.5" not in said
    # Another rank of the training is no other program.
    first = changed(ONE_CORE, world_size=2, vcpus=2, others_vcpus=1.0)
    assert "other programs" not in explain(profile_of(first, changed(first, rank=1)))


@pytest.mark.parametrize(("limit", "vcpus"), [(8, 2.6), (2, 2), (1, 1)])
def test_a_pod_without_a_limit_has_the_vcpus_that_it_used_and_no_more_than_its_node(limit, vcpus):
    assert Evidence(seconds=10, busy_seconds=26).used_vcpus(capacity=1, limit=limit) == vcpus


def test_a_rank_that_left_nothing_is_named():
    with pytest.raises(UsageError, match="only ranks 0 of 2"):
        profile_of(changed(ONE_CORE, world_size=2))


def test_workers_that_start_each_epoch_are_worth_keeping():
    start = EpochPause(seconds=1.962, low_seconds=1.962, high_seconds=1.962, count=3)
    times = EpochTimes(steps=10, start=start)
    (fix,) = profile_of(changed(ONE_CORE, epoch_times=times)).fixes
    assert fix.id == "persistent_workers"
    assert fix.saves_seconds == pytest.approx(0.196, abs=0.001)


def test_where_stoker_does_not_help_that_is_said_first():
    fed = changed(
        ONE_CORE,
        vcpus=8,
        step_seconds=at(0.0225),
        wait_seconds=at(0.0003),
        drains=(drained(8, 0.04), drained(1, 0.04)),
    )
    assert "the accelerator sets the pace" in explain(profile_of(fed)).splitlines()[0]


@pytest.mark.parametrize(
    ("fields", "seconds", "name"),
    [({}, 0.025, "cpu"), ({"vcpus": 8}, 0.020, "accelerator"), ({"workers": 0}, 0.100, "latency")],
)
def test_the_slowest_of_what_overlaps_sets_the_step(fields, seconds, name):
    parts = Work(
        reference=Instance(type="local", vcpus=fields.get("vcpus", 4), accelerators=1),
        measured_seconds=seconds,
        num_workers=fields.get("workers", 4),
        accelerator_seconds=0.02,
        loader_cpu_seconds=0.08,
        loader_wall_seconds=0.08,
        trainer_cpu_seconds=0.02,
    )
    assert parts.step_seconds == parts.terms[name] == pytest.approx(seconds)


# Pods of a cluster (Kubernetes 1.36, torch 2.6 on the CPU), whose trainer used a third less CPU on
# cached batches than next to its worker; `apart` is what both need alone, over the vCPUs.
def test_a_training_on_the_cpu_is_explained_by_what_its_steps_used():
    vcpus, step, workers_cpu, trainer_cpu, apart = 1, 0.458, 0.168, 0.286, 0.337
    alone = apart * vcpus - workers_cpu
    took = {"step": step, "wait": 0.02 * step, "accelerator": alone / vcpus, "vcpus": vcpus}
    cpu = {"trainer_cpu": trainer_cpu, "trainer_alone_cpu": alone, "children_cpu": workers_cpu}
    drains = tuple(drained(workers, workers_cpu, rate=0.0) for workers in (1, 2))
    profile = profile_of(rank_of(**took, **cpu, workers=vcpus, drains=drains, evidence=Evidence()))
    used = (workers_cpu + trainer_cpu) / vcpus
    assert profile.check.predicted_step_seconds == pytest.approx(used)
    assert profile.check.explained
    assert [state.id for state in profile.states] == ["cpu"]


# What the driver says of the GPUs is held against the profile's step: one answer, not two.


LOCAL = load_catalog("local", cores=16)
# A small model whose loss is read in each step: 12 ms of kernels in 40 ms, and data in plenty.
ASKING = rank_of(
    step=0.040,
    wait=0.0003,
    accelerator=0.0395,
    workers=4,
    vcpus=16,
    trainer_cpu=0.036,
    children_cpu=0.04,
    drains=(drained(16, 0.04), drained(4, 0.04), drained(1, 0.04)),
    clock="cuda:0",
    copies=Copies(seconds=0.0005, pinned_seconds=0.0005),
)


def states(profile):
    return {state.id: state for state in profile.states}


def words(text):
    return " ".join(text.split())


def test_a_gpu_that_idles_in_steps_that_wait_for_nothing_does_not_set_the_pace():
    profile = profile_of(ASKING, gpus=(gpu_load(0.30),), kind="local.c16")
    found = states(profile)
    assert list(found) == ["launch"]
    assert found["launch"].share == pytest.approx(1 - 0.30 - 0.0125 - 0.0075)
    assert "kernels run on the GPU for 30% of a step" in found["launch"].text
    said = words(explain(profile))
    assert "waiting for data: the script's own thread sets the pace" in said
    assert "the accelerator sets the pace" not in said
    assert "CUDA graphs" in said
    decision = decided(profile, catalog=LOCAL)
    assert (decision.action, decision.verdict) == ("keep", "none")
    (advice,) = [each for each in decision.advice if each.id == "launch"]
    assert ".item()" in advice.text


@pytest.mark.parametrize(
    "gpus",
    [(gpu_load(0.95),), ()],
    ids=["busy", "no GPU"],
)
def test_where_the_gpu_is_busy_or_its_load_not_known_the_accelerator_sets_it(gpus):
    profile = profile_of(ASKING, gpus=gpus, kind="local.c16")
    assert list(states(profile)) == ["accelerator"]
    assert "the accelerator sets the pace" in words(explain(profile))


TORCH = ProcessReport(packages=("torch", "json"))


def rank(*, missing: str = "the script ended after 6 batches", number: int = 0) -> RankResult:
    whole = rank_of(rank=number, world_size=2 if number else 1, vcpus=2, workers=3)
    return changed(whole, missing=missing, as_is=None, stocked=None)


def reason(*ranks: RankResult, seen=(TORCH,), has_passed=False) -> UsageError:
    return why_unmeasured(ranks, seen, seconds=300, has_passed=has_passed)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (reason(rank()), "ended too soon: after 6 batches"),
        (reason(has_passed=True), "was read within 300 s, so the command was stopped"),
        (reason(), "no DataLoader of torch was read"),
        (reason(seen=(ProcessReport(packages=("torch",), loaders=("a.Dali",)),)), "it uses a.Dali"),
        (reason(seen=(ProcessReport(packages=("jax",)),)), "was read; it uses jax"),
    ],
)
def test_each_reason_has_its_own_words(error, words):
    assert words in error.what
    assert error.fix
    assert error.exit_code == 2


# What is told of a profile that was measured earlier.


TODAY = date(2026, 11, 26)


@pytest.mark.parametrize(
    ("day", "words"),
    [("2026-10-01", f"the profile is 56 days old, more than {MAX_PROFILE_DAYS}"), (TODAY, "")],
)
def test_an_old_profile_should_be_measured_again(day, words):
    then = f"{day}T10:00:00.000Z"
    profile = msgspec.structs.replace(sample_records.profile(), measured_at=then)
    assert profile.too_old(TODAY).partition(":")[0] == words
