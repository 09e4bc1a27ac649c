"""`decide` promises nothing that a profile ruled out, on figures that were advised wrongly once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide import explain
from stoker.decide.model import estimate
from stoker.decide.work import measure, today_of
from stoker.profile.explain import explain as explain_profile
from stoker.profile.rank_results import BatchFacts, Evidence
from stoker.run.outputs import free_advice
from support import decisions, profiled_ranks
from support.profiled_ranks import drained


def ms(**milliseconds):
    return {name: round(value / 1000, 9) for name, value in milliseconds.items()}


def rank_of(took, *, rates, workers, vcpus, others=0.0):
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
        evidence=Evidence(),
        batch=BatchFacts(samples=8, num_bytes=1_000_000),
        pin_memory=False,
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
DISK_RANK = rank_of(LOADING, rates={2: 3.2, 1: 2.9}, workers=1, vcpus=2)
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


SHARED = ms(step=66.1, wait=40, accelerator=22, trainer=21, loader=42, wall=42)
ONE_CORE = rank_of(SHARED, rates={1: 23.0}, workers=1, vcpus=1)
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


@given(
    numbers=st.fixed_dictionaries(
        dict.fromkeys(("step", "accelerator", "trainer", "loader", "wall"), st.floats(1e-4, 1.0))
    ),
    few=st.floats(0.1, 100),
    many=st.floats(0.1, 100),
    others=st.floats(0, 1.9),
    workers=st.integers(0, 4),
)
def test_the_self_check_and_the_model_sum_the_parts_alike_whatever_was_measured(
    numbers, few, many, others, workers
):
    profile = profile_of(
        rank_of(
            {**numbers, "wait": numbers["step"] / 2},
            rates={1: few, 2: many},
            others=others,
            workers=workers,
            vcpus=2,
        )
    )
    today = today_of(profile, load_catalog("local", cores=2).get("local.c2"))
    work = measure(profile, today=today, processes=1)
    # A thousandth of the step is the least that the model ever says.
    summed = max(profile.check.predicted_step_seconds, numbers["step"] / 1000)
    assert work.step_seconds == pytest.approx(summed)
    bare = replace(work, factors={})
    assert estimate(bare, work.todays).step_seconds == pytest.approx(work.step_seconds)
    # Whatever the step took longer, loading is what its own processes used.
    assert work.loader_cpu_seconds == profile.step.loader_cpu_seconds


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
    took, rates, workers, *_ = KNOWN[name]
    more = {"workers": workers, "vcpus": max(rates), "others": others}
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
