"""Where nothing has a price an accelerator that waits is what counts; idle cores are free."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import catalog_of
from stoker.decide import explain
from stoker.decide.ranking import error_band, ranking_of
from stoker.records import Constraints, Observed, StepTerms, TrainingSize, Workload
from support import builders, decisions
from support.gpu_profiles import H100, STEADY, best, changed, here, names, words
from support.property_tests import examples


def test_an_accelerator_that_waits_beside_idle_cores_is_given_them():
    decision = here(H100)
    assert (decision.action, decision.verdict) == ("heterogeneous", "sure")
    assert names(decision.plan) == ["1 local.c4", "3 local.c4"]
    assert decision.plan.predicted.step_seconds == pytest.approx(0.0478, abs=0.001)
    text = words(decision)
    # What is free comes first, with its step; then data hosts, for the script as it is.
    larger = best(decision, "scale_up").predicted
    assert text.startswith("First, at no cost: 16 loader workers per host on local.c16")
    assert text.index(f"{larger.step_seconds * 1e3:.1f} ms") < text.index("add 3 data hosts")
    assert "accelerators busy 94% instead of 28%" in text
    assert "Hosts added: 3 x local.c4" in text
    assert "help here" not in text
    assert "CPU-seconds" not in text[: text.index("How it was decided")]


def test_a_gpu_of_this_machine_is_no_difference_from_a_catalog_of_cores():
    assert [text for text in here(H100).warnings if "accelerator" in text] == []


def test_the_row_of_today_names_the_limit_that_the_verdict_names():
    few = changed(H100, host={"instance_type": "local.c16", "vcpus": 16}, num_workers=2)
    decision = here(msgspec.structs.replace(few, observed=STEADY))
    assert decision.bottleneck == "workers"
    (row,) = [line for line in explain(decision).splitlines() if "today: 1 local.c16" in line]
    assert row.endswith(" workers")


def test_without_idle_cores_nothing_on_this_machine_is_promised():
    decision = here(H100, cores=4)
    assert (decision.action, decision.verdict) == ("keep", "none")
    # The accelerator waits all the same: that hosts elsewhere may help is not denied.
    assert "help here" not in words(decision)
    assert words(decision).startswith("This machine has nothing left for it")
    assert "--as" in next(each.text for each in decision.advice if each.id == "elsewhere")


def test_a_training_bound_by_its_accelerator_gains_nothing():
    waits = {"step_seconds": 0.0455, "wait_seconds": 0.0002}
    loading = {"loader_cpu_seconds": 0.1, "loader_wall_seconds": 0.1, "used_cpu_seconds": 0.16}
    busy = msgspec.structs.replace(changed(H100, **waits, **loading), loader_rates=())
    decision = here(busy)
    assert (decision.action, decision.verdict) == ("keep", "none")
    assert explain(decision).startswith("stoker does not help here")


def test_accelerators_of_this_machine_are_the_same_for_each_of_its_hosts():
    decision = here(changed(H100, host={"accelerators": 2}))
    assert decision.action == "heterogeneous"
    for plan in decision.plans:
        # Two for as long as a step takes, whatever cores are beside them; no more to scale out to.
        outcome = plan.predicted
        assert outcome.accelerator_seconds == pytest.approx(2 * outcome.step_seconds)
        assert plan.action != "scale_out"
    larger = best(decision, "scale_up")
    assert larger.predicted.step_seconds < 0.06


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (builders.clusters("local.c16"), ""),
        ((builders.group("dnn", "local.c4", 2),), "no accelerators for 2 training hosts"),
    ],
    ids=["more cores", "more hosts"],
)
def test_a_named_cluster_has_the_accelerators_that_this_machine_has(groups, problem):
    decision = here(H100, extra_clusters=[groups])
    named = next(plan for plan in decision.plans if plan.reason.startswith("asked for"))
    assert named.feasible == (not problem)
    assert problem in named.reason


POOLS = """instance_type,vcpus,memory_gib,gpus,gpu_model,usd_per_hour
gpu,4,30,1,H100,{gpu}
cpu,4,16,0,,{cpu}
"""
CLOUDY = {"instance_type": "gpu", "accelerators": None, "vcpus": None}


def in_cluster(*, gpu="", cpu="", **more):
    terms = {name: more.pop(name) for name in StepTerms.__struct_fields__ if name in more}
    workload = builders.workload(
        platform="kubernetes",
        image="registry/image",
        cluster={"dnn": {"instance_type": "gpu"}},
        kubernetes={"pools_file": POOLS.format(gpu=gpu, cpu=cpu)},
    )
    assert isinstance(workload, Workload)
    catalog = catalog_of(workload)
    profile = changed(H100, host=CLOUDY, **terms)
    profile = msgspec.structs.replace(profile, loader_rates=() if terms else H100.loader_rates)
    return decisions.decided(profile, catalog=catalog, **more)


def test_node_pools_without_prices_are_compared_by_the_accelerators_time():
    decision = in_cluster()
    assert (decision.action, decision.verdict) == ("heterogeneous", "sure")
    assert [group.instance_type for group in decision.plan.groups] == ["gpu", "cpu"]
    assert decision.plan.predicted.accelerator_utilization > 0.9
    # No price is made up, nor is a word said of one.
    assert decision.plan.predicted.usd_per_hour is None
    assert decision.plan.predicted.usd_per_1000_steps is None
    assert decision.prices.purchase == "unpriced"
    assert "$" not in words(decision)
    assert "Today's hosts have no price" in words(decision)


@given(
    step=st.floats(0.02, 1.0),
    busy=st.floats(0.05, 1.0),
    waits=st.floats(0.5, 1.0),
    loading=st.floats(0.01, 3.0),
    workers=st.integers(0, 8),
    objective=st.sampled_from(["cost", "time"]),
)
@settings(max_examples=examples(40))
def test_a_pool_is_kept_only_if_no_plan_of_the_others_gains_more_than_its_band(
    step, busy, waits, loading, workers, objective
):
    decision = in_cluster(
        objective=objective,
        step_seconds=step,
        wait_seconds=waits * (1 - busy) * step,
        accelerator_step_seconds=busy * step,
        loader_cpu_seconds=loading,
        loader_wall_seconds=loading,
        num_workers=workers,
        used_cpu_seconds=None,
    )
    keep = next(plan.predicted for plan in decision.plans if plan.action == "keep")
    ranking = ranking_of(decision)
    gains = [
        (ranking.gain(plan.predicted, keep), error_band(plan.predicted))
        for plan in decision.plans
        # More accelerators change the training: they are chosen for time alone.
        if plan.feasible and plan.predicted and (plan.action != "scale_out" or objective == "time")
    ]
    if decision.verdict == "unknown":
        assert decision.action == "keep"
        return
    assert (decision.verdict == "sure") == any(gain > band for gain, band in gains)
    assert (decision.verdict == "none") == all(gain <= 0.05 for gain, _ in gains)
    assert (decision.action == "keep") == (decision.verdict != "sure")
    said = words(decision)
    assert ("help here" in said) <= (decision.verdict == "none")
    assert "$" not in said


def test_a_limit_in_dollars_rules_out_what_has_no_price():
    decision = in_cluster(max_usd_per_hour=10.0)
    assert decision.action == "keep"
    other = next(plan for plan in decision.plans if plan.action == "heterogeneous")
    assert "price is not known" in other.reason


def test_no_limit_in_dollars_counts_cores_of_this_machine():
    # Their nominal prices, 0.05 a core, would be above it.
    limits = {"max_usd_per_hour": 0.1, "max_usd": 0.1}
    decision = here(H100, training=TrainingSize(steps=100_000), **limits)
    assert decision.plan.groups == here(H100).plan.groups


def test_more_accelerators_of_a_cluster_without_prices_gain_time():
    busy = {"accelerator_step_seconds": 0.159, "loader_cpu_seconds": 0.1, "wait_seconds": 0.0}
    loading = {"loader_wall_seconds": 0.1, "used_cpu_seconds": 0.16}
    decision = in_cluster(**busy, **loading)
    assert (decision.action, decision.verdict) == ("keep", "none")
    (more,) = [each for each in decision.advice if each.id == "more-accelerators"]
    assert " times as fast, with another global batch" in more.text
    assert "cheaper" not in words(decision)


def test_pools_of_which_some_have_a_price_are_compared_in_money_only_if_todays_has_one():
    money = in_cluster(gpu="4.0")
    assert (money.action, money.prices.is_billed) == ("keep", True)
    assert not [plan for plan in money.plans if plan.action == "heterogeneous"]
    assert any("cpu has no price" in warning for warning in money.warnings)
    time = in_cluster(cpu="0.2")
    assert (time.action, time.prices.is_billed) == ("heterogeneous", False)
    assert any("gpu has no price" in warning for warning in time.warnings)
    both = in_cluster(gpu="4.0", cpu="0.2")
    assert (both.action, both.prices.is_billed) == ("heterogeneous", True)
    assert both.plan.predicted.usd_per_hour > 4.0


def test_more_loader_workers_come_before_hosts_where_they_are_enough():
    one = changed(
        H100,
        step_seconds=0.62,
        wait_seconds=0.53,
        used_cpu_seconds=0.21,
        accelerator_step_seconds=0.09,
        num_workers=1,
        loader_cpu_seconds=0.15,
        loader_wall_seconds=0.6,
    )
    decision = here(msgspec.structs.replace(one, loader_rates=(), observed=STEADY))
    assert (decision.action, decision.verdict) == ("tune", "sure")
    assert len(decision.plan.groups) == 1


def test_a_noisy_profile_tells_nothing():
    noisy = Observed(cpu_utilization=0.9, others_vcpus=3.0)
    decision = here(msgspec.structs.replace(H100, observed=noisy))
    assert (decision.action, decision.verdict) == ("keep", "unknown")
    assert "help here" not in words(decision)


def test_both_objectives_choose_the_same_where_all_plans_have_the_same_accelerators():
    cost, time = here(H100, objective="cost"), here(H100, objective="time")
    assert cost.plan == time.plan


def test_without_accelerators_the_step_is_what_counts():
    host = {"instance_type": "local.c2", "vcpus": 2, "accelerators": 0}
    slow = changed(H100, host=host, step_seconds=0.33, wait_seconds=0.28, num_workers=2)
    decision = here(msgspec.structs.replace(slow, observed=STEADY), cores=8)
    assert decision.verdict == "sure"
    assert decision.plan.predicted.speedup > 2
    assert "help here" not in words(decision)


def test_a_deadline_takes_the_plan_that_makes_it():
    hours = TrainingSize(steps=100_000)
    late = here(H100, training=hours, deadline_hours=2.0)
    assert late.plan.predicted.total_hours < 2.0 < 100_000 * 0.1596 / 3600
    hopeless = here(H100, training=hours, deadline_hours=0.5)
    assert (hopeless.action, hopeless.verdict) == ("keep", "none")
    assert "misses the deadline" in words(hopeless)


def test_near_ties_leave_cores_idle():
    decision = here(H100, max_data_hosts=0)
    assert decision.action == "scale_up"
    larger = [p.predicted.step_seconds for p in decision.plans if p.action == "scale_up"]
    assert decision.plan.predicted.step_seconds <= 1.03 * min(larger)
    assert "loader workers per host" in words(decision)
    # With more cores than keep the accelerator busy, the rest stays idle.
    assert names(here(H100, cores=32, max_data_hosts=0).plan) == ["1 local.c16"]


def test_nothing_changes_where_plans_have_a_price():
    decision = decisions.decided(builders.starved())
    assert decision.prices.is_billed
    assert decision.constraints == Constraints()
    assert "cheaper per step" in words(decision)
