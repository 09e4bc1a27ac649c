"""Where nothing has a price an accelerator that waits is what counts; idle cores are free."""

import msgspec
import pytest

from stoker.catalog import catalog_of
from stoker.records import StepTerms, Workload
from support import builders, decisions
from support.gpu_profiles import H100, changed, here, names, words


def test_an_accelerator_that_waits_beside_idle_cores_is_given_them():
    decision = here(H100)
    assert (decision.action, decision.verdict) == ("heterogeneous", "sure")
    assert names(decision.plan) == ["1 local.c4", "2 local.c6"]
    assert decision.plan.predicted.step_seconds == pytest.approx(0.0478, abs=0.001)
    text = words(decision)
    # What is free comes first; then data hosts, for the script as it is.
    assert text.startswith("Give the loaders 15 workers per host on local.c16")
    assert text.index("at no cost") < text.index("add 2 data hosts")
    assert "accelerators busy 9" in text
    assert "help here" not in text
    assert "CPU-seconds" not in text[: text.index("How it was decided")]


def test_without_idle_cores_nothing_on_this_machine_is_promised():
    decision = here(H100, cores=4)
    assert (decision.action, decision.verdict) == ("keep", "none")
    # The accelerator waits all the same: that hosts elsewhere may help is not denied.
    assert "help here" not in words(decision)
    assert words(decision).startswith("This machine has nothing left for it")
    assert "--as" in next(each.text for each in decision.advice if each.id == "elsewhere")


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


def test_a_limit_in_dollars_rules_out_what_has_no_price():
    decision = in_cluster(max_usd_per_hour=10.0)
    assert decision.action == "keep"
    other = next(plan for plan in decision.plans if plan.action == "heterogeneous")
    assert "price is not known" in other.reason


def test_pools_of_which_some_have_a_price_are_compared_in_money_only_if_todays_has_one():
    money = in_cluster(gpu="4.0")
    assert (money.action, money.prices.is_billed) == ("keep", True)
    assert not [plan for plan in money.plans if plan.action == "heterogeneous"]
    (answer,) = [each for each in money.path if "data group" in each.question]
    assert "no CPU-only type with a price" in answer.because
    time = in_cluster(cpu="0.2")
    assert (time.action, time.prices.is_billed) == ("heterogeneous", False)
    assert any("gpu has no price" in warning for warning in time.warnings)
    both = in_cluster(gpu="4.0", cpu="0.2")
    assert (both.action, both.prices.is_billed) == ("heterogeneous", True)
    assert both.plan.predicted.usd_per_hour > 4.0
