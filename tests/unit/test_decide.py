import math
import re
from functools import partial
from itertools import pairwise, permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import Catalog, load_catalog
from stoker.catalog.catalog import extended, parse_table
from stoker.decide import explain, pareto_front
from stoker.decide.choose import FlowChart, choose, decision_path, local_core_words
from stoker.decide.ranking import Ranking, error_band, ranking_of
from stoker.decide.step_work import measure
from stoker.errors import UsageError
from stoker.records import (
    Check,
    Constraints,
    FeedSettings,
    Fix,
    Observed,
    Plan,
    Predicted,
    Profile,
    ProfiledHost,
    ProfileState,
    Spread,
    StepTerms,
    TrainingSize,
    to_json,
)
from support import builders, decisions
from support.decisions import FEW
from support.property_tests import examples

AWS = load_catalog("sagemaker")
LOCAL = load_catalog("local", cores=2)
TYPES = (
    *("ml.g5.8xlarge", "ml.g5.48xlarge", "ml.g5.xlarge", "ml.p4d.24xlarge"),
    *("ml.p3.2xlarge", "ml.p5en.48xlarge", "ml.m5.large", "ml.c5.24xlarge"),
)


def _decide(profile, *, steps=None, extra=(), **more):
    size = TrainingSize(steps=steps)
    return decisions.decided(profile, training=size, extra_clusters=extra, **more)


_profile = partial(builders.profile, is_explained=True, global_batch_size=64)
TRAINING = {"accelerator_step_seconds": 0.022, "trainer_cpu_seconds": 0.022}
LOADING = {"loader_cpu_seconds": 0.040, "receive_cpu_seconds": 0.0, "num_workers": 1}
_one_core = partial(_profile, step_seconds=0.062, **TRAINING, **LOADING)
_starved = builders.starved


def _accelerator_bound(count=1, **terms):
    own = {"accelerator_step_seconds": 0.2, "loader_cpu_seconds": 1.0 * count}
    return _starved(count=count, **own, **terms)


def _local(profile=None, **more):
    return _decide(
        profile or _one_core(),
        catalog=LOCAL,
        objective="time",
        max_data_hosts=1,
        allowed_instance_types=("local.c1",),
        **more,
    )


def _plans(decision, action):
    return [plan for plan in decision.plans if plan.action == action]


def _asked(profile, *groups):
    (plan,) = [p for p in _decide(profile, extra=[groups]).plans if p.reason.startswith("asked")]
    return plan


# The model on one-core hosts, where training and loading share the core.


def test_a_second_core_takes_the_share_that_makes_both_busy():
    plan = _local().plan
    # (1-x) c + g = x c / eta at x = (c + g) / (c (1 + 1/eta)).
    share = 0.062 / (0.040 * (1 + 1 / 0.85))
    assert plan.action == "heterogeneous"
    assert plan.remote_share == pytest.approx(share)
    assert plan.predicted.step_seconds == pytest.approx(share * 0.040 / 0.85)
    # The dnn host has CPU left for a worker.
    assert [g.workers_per_host for g in plan.groups] == [1, 1]


def test_dnn_host_loads_nothing_where_data_hosts_leave_room_below_the_accelerator():
    plan = _asked(_starved(), *builders.clusters("ml.g5.8xlarge", "ml.c7i.24xlarge", 4))
    assert plan.groups[0].workers_per_host == 0
    assert plan.remote_share == 1.0
    assert plan.predicted.limit == "accelerator"


@pytest.mark.parametrize(("training", "loading"), [(0.1, 0.01), (0.01, 9.5)])
def test_training_and_loading_on_cpus_are_faster_on_a_faster_cpu(training, loading):
    profile = _profile(
        "ml.m5.24xlarge",
        step_seconds=0.1,
        accelerator_step_seconds=training,
        loader_cpu_seconds=loading,
        trainer_cpu_seconds=0.1,
    )
    decision = _decide(profile, extra=[builders.clusters("ml.c7i.24xlarge")])
    (plan,) = [p for p in decision.plans if p.groups[0].instance_type == "ml.c7i.24xlarge"]
    assert plan.predicted.step_seconds == pytest.approx(0.1 / (20677 / 14320), rel=0.01)


def test_settings_may_fix_the_local_workers_and_auto_is_never_slower():
    (alone,) = _plans(_local(feed=FeedSettings(local_workers=0)), "heterogeneous")
    assert alone.groups[0].workers_per_host == 0
    assert alone.remote_share == 1.0
    # Alone, data hosts reach more of their CPU than together with hosts that load too.
    assert alone.predicted.step_seconds == pytest.approx(0.040 / 0.93)
    (mixed,) = _plans(_local(), "heterogeneous")
    assert mixed.predicted.step_seconds <= alone.predicted.step_seconds


def test_waiting_for_storage_takes_as_long_on_a_data_host():
    training = {"accelerator_step_seconds": 0.005, "trainer_cpu_seconds": 0.0}
    loading = {"loader_cpu_seconds": 0.0, "loader_wall_seconds": 0.1}
    profile = _one_core(step_seconds=0.1, **training, **loading)
    six = (builders.group("dnn", workers_per_host=2), builders.group("data", workers_per_host=4))
    plans = _local(profile, extra=[six]).plans
    plan = next(p for p in plans if p.groups[-1].workers_per_host == 4)
    assert plan.predicted.step_seconds == pytest.approx(0.1 / 6)
    assert plan.predicted.limit == "latency"


def test_share_stays_below_one_where_the_network_is_the_limit():
    # 0.4 GB a step: 0.46 s over the data host's 10 Gbit/s, if all of it were made there.
    profile = _starved(accelerator_step_seconds=0.01, batch_bytes=4e8)
    plan = _asked(profile, *builders.clusters("ml.g5.8xlarge", "ml.c5.9xlarge"))
    assert 0 < plan.remote_share < 0.5
    assert "network" in (plan.predicted.limit, plan.predicted.second_limit)
    network = plan.remote_share * 4e8 * 8 / (0.7 * 10e9)
    assert plan.predicted.step_seconds == pytest.approx(network, rel=1e-6)


def test_measured_step_corrects_the_terms_that_bind_and_no_other():
    # The parts give 0.18 s, measured were 0.2 s: loading is dearer than it looked, and the
    # accelerator is as fast as it was measured.
    slow = _starved(loader_cpu_seconds=0.9 * 6.1, trainer_cpu_seconds=0.9 * 0.3)
    assert _decide(slow, objective="time").plan.predicted.step_seconds == pytest.approx(0.08)


def test_more_accelerators_are_offered_where_they_are_the_limit_for_time_and_not_for_money():
    cheapest = _decide(_accelerator_bound())
    offered = _plans(cheapest, "scale_out")
    assert {plan.groups[0].count for plan in offered} == {1, 2, 4}
    doubled = next(plan for plan in offered if plan.groups[0].count == 2)
    assert doubled.predicted.step_seconds == pytest.approx(0.2 / 2 / 0.9)
    assert doubled.predicted.cost_change > 0
    assert not _plans(_decide(_starved()), "scale_out")
    # A g5.12xlarge has four accelerators for 2.3 times the price of one g5.8xlarge.
    assert cheapest.action == "keep"


def test_larger_instance_comes_before_more_instances():
    (group,) = _decide(_accelerator_bound(), objective="time").plan.groups
    assert group.count == 1
    # Two accelerators today: four in one g5.12xlarge.
    of_two = _decide(_accelerator_bound(count=2), objective="time")
    offered = {plan.groups[0].instance_type: plan for plan in _plans(of_two, "scale_out")}
    one, four = offered["ml.g5.12xlarge"], offered["ml.g5.8xlarge"]
    assert [plan.groups[0].count for plan in (one, four)] == [1, 4]
    assert one.predicted.step_seconds < four.predicted.step_seconds


def test_global_batch_grows_with_the_replicas_and_the_advice_says_so():
    decision = _decide(_accelerator_bound(), objective="time")
    # One g5.48xlarge has eight accelerators.
    assert (decision.action, decision.plan.global_batch_size) == ("scale_out", 8 * 256)
    text = next(advice.text for advice in decision.advice if advice.id == "global-batch")
    assert "2048 samples instead of 256" in text
    assert "learning rate" in text
    unknown = _decide(_accelerator_bound(global_batch_size=None), objective="time")
    assert (unknown.action, unknown.plan.global_batch_size) == ("scale_out", None)
    assert {plan.global_batch_size for plan in _decide(_starved()).plans} == {None}


def test_deadline_asks_for_more_accelerators_where_the_cpu_is_the_limit():
    hurried = _decide(_starved(), deadline_hours=1.5, steps=100_000)
    assert hurried.bottleneck == "cpu"
    assert _plans(hurried, "scale_out")
    assert hurried.plan.predicted.total_hours <= 1.5
    assert not _plans(_decide(_starved(), deadline_hours=50, steps=100_000), "scale_out")


def test_unexplained_profile_gets_a_rough_table_and_no_advice_to_buy_accelerators():
    explained = _decide(_accelerator_bound())
    assert any(advice.id == "more-accelerators" for advice in explained.advice)
    check = Check(predicted_step_seconds=0.1, error=-0.5, explained=False)
    unexplained = _decide(msgspec.structs.replace(_accelerator_bound(), check=check))
    assert (unexplained.bottleneck, unexplained.action) == ("unexplained", "keep")
    assert [each.id for each in unexplained.advice] == ["profile-again"]
    assert "Rough guide only" in explain(unexplained)
    assert "Rough guide only" not in explain(explained)


@pytest.mark.parametrize(
    ("profile", "doubt"),
    [
        (msgspec.structs.replace(_starved(), check=None), "not checked"),
        (_starved(trainer_cpu_seconds=None, num_workers=None), "trainer's own CPU"),
    ],
)
def test_what_was_not_measured_widens_the_bands_and_is_said(profile, doubt):
    # Few types, so that both list the same plans.
    types = ("ml.c7i.xlarge", "ml.c7i.4xlarge")
    known = _decide(_starved(), allowed_instance_types=types)
    unknown = _decide(profile, allowed_instance_types=types)
    assert unknown.action == known.action == "heterogeneous"
    twins = {plan.groups: plan.predicted for plan in known.plans}
    assert error_band(unknown.plan.predicted) > error_band(twins[unknown.plan.groups])
    assert any(doubt in warning for warning in unknown.warnings)


def test_near_equals_are_decided_by_fewer_machines():
    decision = _decide(_starved(), objective="time")
    able = [p for p in decision.plans if p.feasible and p.predicted]
    best = min(p.predicted.step_seconds for p in able)
    near = [p for p in able if p.predicted.step_seconds <= best * 1.03]
    assert sum(g.count for g in decision.plan.groups) == min(
        sum(g.count for g in plan.groups) for plan in near
    )


def test_a_budget_that_todays_cluster_misses_by_less_than_a_cent_keeps_it_and_says_so():
    (keep,) = _plans(_decide(_starved()), "keep")
    decision = _decide(_starved(), max_usd_per_hour=keep.predicted.usd_per_hour - 0.001)
    assert (decision.action, decision.plan.feasible) == ("keep", True)
    cost, budget = re.findall(r"\$([0-9.]+)", decision.plan.reason)
    assert float(cost) - float(budget) == pytest.approx(0.001)


def test_a_plan_that_costs_more_than_max_usd_with_its_start_is_not_chosen():
    free = _decide(_starved(), steps=100_000)
    cost = free.plan.predicted.total_usd + free.plan.predicted.usd_per_hour / 12
    assert _decide(_starved(), steps=100_000, max_usd=cost).plan.groups == free.plan.groups
    tight = _decide(_starved(), steps=100_000, max_usd=cost - 0.01)
    (barred,) = [plan for plan in tight.plans if plan.groups == free.plan.groups]
    assert not barred.feasible
    assert "above max_usd" in barred.reason


def test_deadline_that_nothing_meets_keeps_todays_cluster_and_says_so():
    decision = _decide(_starved(), steps=100_000, deadline_hours=0.01)
    assert decision.action == "keep"
    assert "misses the deadline" in decision.plan.reason


def test_deadline_and_budget_that_contradict_each_other_are_named_with_what_is_needed():
    decision = _decide(_starved(), deadline_hours=2.5, max_usd_per_hour=3.1, steps=100_000)
    assert decision.action == "keep"
    assert "within the budget of $3.10 per hour: the two contradict" in decision.plan.reason
    needed = float(decision.plan.reason.split(" needs $")[1].split(" ")[0])
    outcomes = [plan.predicted for plan in decision.plans if plan.predicted]
    in_time = [each.usd_per_hour for each in outcomes if each.total_hours <= 2.5]
    assert needed == pytest.approx(min(in_time), abs=0.005)


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"allowed_instance_types": ("c5.4xlarg",)}, "where", "allowed_instance_types[0]"),
        ({"extra": [(builders.group("data", "c5.9xlarge"),)]}, "what", "one dnn group"),
        ({"profile": _profile("ml.g5.8xl", step_seconds=0.2)}, "fix", "did you mean ml.g5.8xlarge"),
        ({"profile": _starved(step_seconds=1e9)}, "where", "step.step_seconds"),
        ({"profile": _starved(step_seconds=1e-12)}, "where", "step.step_seconds"),
        ({"profile": _starved(loader_cpu_seconds=1e300)}, "where", "step.loader_cpu_seconds"),
        ({"max_data_hosts": 1_000_000}, "where", "key constraints.max_data_hosts"),
        ({"regions": ("eu-west-1",)}, "what", "for region us-east-1, but only eu-west-1"),
        ({"catalog": Catalog(platform="sagemaker", instances=(), source="")}, "fix", "--prices"),
    ],
)
def test_impossible_input_is_an_error_that_says_where_and_what_to_do(more, field, words):
    with pytest.raises(UsageError) as caught:
        _decide(**{"profile": _starved(), **more})
    assert words in getattr(caught.value, field)


def test_a_price_of_tomorrow_is_said_to_be_of_no_known_age(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("instance_type,usd_per_hour,priced_on\nml.g5.8xlarge,3,2062-09-27\n")
    decision = _decide(_starved(), catalog=load_catalog("sagemaker", prices=file))
    said = "the price of ml.g5.8xlarge is dated 2062-09-27, in the future: its age is not known"
    assert said in decision.warnings


def test_allowed_type_that_no_plan_can_have_is_named_with_the_reason():
    allowed = ("c5.12xlarge", "c5.18xlarge")
    warnings = _decide(_starved(), allowed_instance_types=allowed).warnings
    assert (
        "ml.c5.12xlarge is allowed, but it is in no plan: "
        "a SageMaker training job cannot use ml.c5.12xlarge"
    ) in warnings
    assert not any("ml.c5.18xlarge" in text for text in warnings)


def test_catalog_of_nothing_but_todays_type_keeps_it():
    alone = Catalog(platform="sagemaker", instances=(AWS.get("ml.g5.8xlarge"),), source="one")
    decision = _decide(_starved(), catalog=alone)
    assert decision.action == "keep"
    answer = next(a for a in decision.path if "data group" in a.question)
    assert "no CPU-only type" in answer.because


def test_todays_type_without_a_price_is_kept_and_never_free():
    profile = _profile(
        "ml.p5e.48xlarge", step_seconds=1.2, accelerator_step_seconds=0.1, loader_cpu_seconds=7.0
    )
    decision = _decide(profile)
    assert decision.action == "keep"
    assert decision.plan.predicted is None
    assert any("--prices" in warning for warning in decision.warnings)
    # SageMaker bills: without a price nothing is known of a plan's worth.
    assert decision.verdict == "unknown"
    assert explain(decision).startswith("Keep today's cluster for now.")


SIX_GROUPS = [
    *builders.clusters("ml.g5.8xlarge", "ml.c7i.xlarge"),
    *(builders.group("data", "ml.c7i.xlarge", name=f"data-{n}") for n in range(4)),
]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (builders.clusters("ml.g5.8xlarge", "c5.12xlarge"), "training job cannot use ml.c5.12x"),
        (builders.clusters("ml.g5.8xlarge", "ml.trn2.48xlarge"), "ml.trn2.48xlarge has no price"),
        (builders.clusters("ml.p4d.24xlarge"), "the accelerators differ (A10G today, A100 here"),
        (builders.clusters("ml.c5.9xlarge"), "the accelerators differ (A10G today, none"),
        (SIX_GROUPS, "a SageMaker training job has at most 5 instance groups, not 6"),
    ],
)
def test_a_cluster_that_was_asked_for_and_may_not_run_says_why(groups, reason):
    decision = _decide(_starved(), extra=[groups])
    (plan,) = [plan for plan in decision.plans if plan.reason.startswith("asked for, but")]
    assert not plan.feasible
    assert reason in plan.reason
    assert reason in " ".join(explain(decision).split())


def test_todays_cluster_asked_for_is_not_listed_twice():
    named = builders.clusters("g5.8xlarge", processes_per_host=1, workers_per_host=32)
    assert len(_plans(_decide(_starved(), extra=[named]), "keep")) == 1


def test_a_quota_of_one_and_a_half_vcpus_is_divided_by_as_it_is():
    terms = {"loader_cpu_seconds": 0.060, "trainer_cpu_seconds": 0.015, "num_workers": 2}
    profile = _one_core(step_seconds=0.050, **terms)
    host = msgspec.structs.replace(profile.host, vcpus=1, quota_vcpus=1.5)
    made = _local(msgspec.structs.replace(profile, host=host))
    assert made.path[0].because.endswith("they give 50.0 ms, measured 50.0 ms")
    assert "on 1.5 vCPUs: 50.0 ms" in made.path[1].because
    assert any("has 1.5 vCPUs, the catalog's local.c1 1" in text for text in made.warnings)
    # A data host of one core makes all batches, or both kinds of hosts make some.
    (together,) = _plans(made, "heterogeneous")
    assert 0.075 / (1.5 + 0.93) < together.predicted.step_seconds < 0.050


def test_spread_of_the_measured_step_is_the_band_of_keep():
    spread = {"step_seconds": Spread(low=0.19, high=0.23, samples=100)}
    profile = msgspec.structs.replace(_starved(), check=None, spread=spread)
    keep = _plans(_decide(profile), "keep")[0].predicted
    assert (keep.step_seconds_low, keep.step_seconds, keep.step_seconds_high) == (0.19, 0.2, 0.23)


# States of a training that no host changes, from which money is kept.


def _with_states(*states, found=None, fixes=()):
    named = tuple(ProfileState(id=name, text=f"{name}: x", share=share) for name, share in states)
    return _decide(msgspec.structs.replace(found or _starved(), states=named, fixes=fixes))


@pytest.mark.parametrize(
    ("name", "called"),
    # Earlier profiles call it network.
    [("throttled", "throttled"), ("straggler", "straggler"), ("network", "storage")],
)
def test_what_no_host_changes_is_to_be_fixed_before_money_is_spent(name, called):
    decision = _with_states((name, 0.5))
    assert decision.action == "keep"
    assert "fix that before money is spent" in decision.plan.reason
    (advice,) = [own for own in decision.advice if own.id == called]
    assert advice.when == "before any money is spent"
    assert "more-accelerators" not in {own.id for own in decision.advice}
    # The plans are priced and shown all the same.
    assert "heterogeneous" in {plan.action for plan in decision.plans}


@pytest.mark.parametrize("name", ["workers", "latency"])
@pytest.mark.parametrize(
    ("wall", "is_free", "action"),
    [(8.0, True, "keep"), (8.0, False, "scale_up"), (6.1, True, "heterogeneous")],
    ids=["they wait", "more are not free", "they compute"],
)
def test_waiting_workers_are_bought_nothing_while_more_are_free(name, wall, is_free, action):
    fix = Fix(id="num_workers", text="num_workers=64 instead of 32", saves_seconds=0.1)
    waiting = _starved(loader_wall_seconds=wall)
    decision = _with_states((name, 0.5), found=waiting, fixes=(fix,) if is_free else ())
    assert decision.action == action


def test_other_states_and_a_small_one_do_not_hold_the_change_off():
    assert _with_states().action == "heterogeneous"
    assert _with_states(("cpu", 0.6), ("other-programs", 0.3)).action == "heterogeneous"
    # A storage of known rate is a term of the model.
    known = _starved(read_bytes=1e6, storage_bytes_per_second=2e9)
    assert _with_states(("storage", 0.5), found=known).action == "heterogeneous"
    small = _with_states(("throttled", 0.1), fixes=(Fix(id="throttled", text="raise the limit"),))
    assert small.action == "heterogeneous"
    # A state and its fix are one line of advice.
    assert [own.id for own in small.advice].count("throttled") == 1


def test_what_a_plan_does_not_answer_is_advised_next_to_it():
    assert "gil" in {own.id for own in _with_states(("gil", 0.4)).advice}
    later = Fix(id="first-epoch", text="profile later epochs")
    assert "first-epoch" in {own.id for own in _with_states(fixes=(later,)).advice}


def test_profiles_fix_that_costs_nothing_is_the_charts_free_fix_and_the_first_advice():
    fix = Fix(id="persistent_workers", text="keep the workers", saves_seconds=0.02)
    decision = _decide(msgspec.structs.replace(_starved(), fixes=(fix,)))
    assert decision.advice[0].id == fix.id
    (turn,) = [each for each in decision.path if each.question == "Is there a free fix?"]
    assert (turn.answer, turn.because) == ("yes", "keep the workers")
    unknown = _decide(_starved(num_workers=None)).path[2]
    assert (unknown.question, unknown.answer) == ("Is there a free fix?", "unknown")


def _made_up(action, *, step, usd_per_hour, band=0.1, hours=None):
    outcome = Predicted(
        step_seconds=step,
        step_seconds_low=step * (1 - band),
        step_seconds_high=step * (1 + band),
        limit="cpu",
        second_limit="accelerator",
        second_limit_seconds=0.0,
        accelerator_utilization=0.5,
        usd_per_hour=usd_per_hour,
        usd_per_1000_steps=step * usd_per_hour * 1000 / 3600,
        speedup=0.1 / step,
        cost_change=step * usd_per_hour / 0.1 - 1,
        total_hours=hours,
    )
    data = "local.c1" if action == "heterogeneous" else ""
    workers = 2 if action == "tune" else 1
    groups = builders.clusters("local.c1", data, workers_per_host=workers)
    return Plan(action=action, groups=groups, predicted=outcome)


TUNE = _made_up("tune", step=0.091, usd_per_hour=1.0)
GROUP = partial(_made_up, "heterogeneous", usd_per_hour=2.0, band=0.25)


@pytest.mark.parametrize(
    ("others", "constraints", "action", "said", "words"),
    [
        # What is free saves less than its own band: it is no rival of a plan that saves more.
        ([TUNE, GROUP(step=0.072)], {"objective": "time"}, "heterogeneous", "yes", ""),
        # It alone makes the deadline.
        ([GROUP(step=0.095, hours=9.5)], {"deadline_hours": 9.8}, "heterogeneous", "yes", ""),
        # It saves less than its band: that is no "no".
        ([GROUP(step=0.091)], {"objective": "time"}, "keep", "unknown", "its error band is 25%"),
        # Two runs on the same hosts differ by as much.
        ([GROUP(step=0.096)], {"objective": "time"}, "keep", "no", "a step takes 4% less time"),
        # It saves nothing.
        ([GROUP(step=0.107)], {"objective": "time"}, "keep", "no", "a step takes 7% longer"),
    ],
)
def test_a_data_group_is_said_to_help_where_one_is_chosen(others, constraints, action, said, words):
    keep = _made_up("keep", step=0.1, usd_per_hour=1.0, hours=10.0)
    limits = Constraints(**constraints)
    ranking = Ranking(objective=limits.objective, is_billed=True)
    choice = choose(keep, others, limits, ranking=ranking, unexplained=None)
    chosen = choice.plan
    profile = builders.profile(step_seconds=0.1, loader_cpu_seconds=0.1)
    work = measure(profile, today=LOCAL.get("local.c1"), processes=1)
    plans = {"keep": keep, "choice": choice, "chosen": chosen, "plans": (keep, *others)}
    found = FlowChart(work=work, bottleneck="cpu", constraints=limits, ranking=ranking, **plans)
    assert chosen.action == action
    answer = next(
        each for each in decision_path(found) if each.question.startswith("Would a data group")
    )
    assert answer.answer == said
    assert words in answer.because
    if said == "yes":
        assert "only" not in answer.because
        assert "buys time" not in answer.because or "cheaper" not in answer.question


def test_accelerators_of_this_machine_are_told_by_how_busy_they_are():
    profile = _one_core()
    host = msgspec.structs.replace(profile.host, accelerators=1)
    decision = _local(msgspec.structs.replace(profile, host=host))
    keep = _plans(decision, "keep")[0].predicted
    assert keep.accelerator_seconds == pytest.approx(keep.step_seconds)
    text = explain(decision)
    assert f"accelerators busy {keep.accelerator_utilization:.0%}" in text
    assert " busy  cores limit" in text


def test_the_same_cores_in_one_host_are_compared_with_data_hosts():
    decision = _local()
    (larger,) = _plans(decision, "scale_up")
    assert not larger.feasible
    words = local_core_words(decision)
    assert "training host itself, 1 local.c2: predicted" in words
    assert f"{larger.predicted.speedup:.2f} times as fast" in words
    (kept,) = _plans(decision, "keep")
    assert local_core_words(msgspec.structs.replace(decision, plan=kept)) == ""


_amount = st.floats(min_value=0.01, max_value=10)


@settings(max_examples=examples(40), derandomize=True)
@given(st.lists(st.tuples(_amount, _amount), min_size=1, max_size=12))
def test_front_beats_all_others_and_no_plan_of_it_beats_another(outcomes):
    plans = [_made_up("tune", step=step, usd_per_hour=usd) for step, usd in outcomes]
    best = _made_up("tune", step=0.001, usd_per_hour=0.001)
    # Neither of these may be run.
    barred = ({"feasible": False}, {"predicted": None})
    others = [msgspec.structs.replace(best, **own) for own in barred]
    found, front = (
        [(p.predicted.step_seconds, p.predicted.usd_per_1000_steps) for p in each]
        for each in (plans, pareto_front([*others, *plans]))
    )
    assert set(front) <= set(found)
    for step, usd in found:
        assert any(fast <= step and cheap <= usd for fast, cheap in front)
    for one, other in permutations(front, 2):
        assert not (one[0] <= other[0] and one[1] <= other[1])


def test_text_shows_both_ends_of_the_front_and_few_plans_else():
    decision = _decide(_starved(), max_data_hosts=60, catalog=FEW)
    front = pareto_front(decision.plans)
    text = explain(decision)
    for plan in (front[0], front[-1]):
        assert f"today + {plan.groups[1].count} {plan.groups[1].instance_type[3:]} " in text
    assert text.count("heterogeneous") < 20


_seconds = st.floats(min_value=1e-4, max_value=100)
_some = st.none() | st.just(0.0) | _seconds
_fraction = st.none() | st.floats(min_value=0, max_value=1)
_bytes = st.none() | st.floats(min_value=0, max_value=1e10)
_steps = st.builds(
    StepTerms,
    step_seconds=_seconds,
    wait_seconds=_some,
    accelerator_step_seconds=_some,
    loader_cpu_seconds=_some,
    receive_seconds=_some,
    receive_cpu_seconds=_some,
    loader_wall_seconds=_some,
    trainer_cpu_seconds=_some,
    trainer_vcpus=st.none() | st.floats(min_value=0, max_value=500),
    num_workers=st.none() | st.integers(min_value=0, max_value=200),
    global_batch_size=st.integers(min_value=1, max_value=10_000),
    batch_bytes=_bytes,
    read_bytes=_bytes,
    storage_bytes_per_second=st.none() | st.floats(min_value=1e3, max_value=1e11),
)


def profiles(types=TYPES):
    return st.builds(
        Profile,
        host=st.builds(
            ProfiledHost,
            instance_type=st.sampled_from(types),
            count=st.integers(min_value=1, max_value=4),
            vcpus=st.none() | st.integers(min_value=1, max_value=300),
            quota_vcpus=st.none() | st.floats(min_value=0.1, max_value=300),
        ),
        step=_steps,
        check=st.none()
        | st.builds(
            Check, predicted_step_seconds=_seconds, error=st.just(0.0), explained=st.booleans()
        ),
        observed=st.none()
        | st.builds(Observed, cpu_utilization=_fraction, gpu_utilization=_fraction),
    )


constraints_of_any_kind = st.builds(
    Constraints,
    objective=st.sampled_from(["cost", "time"]),
    max_usd_per_hour=st.none() | st.floats(min_value=0.01, max_value=200),
    deadline_hours=st.none() | st.floats(min_value=0.001, max_value=1000),
    max_data_hosts=st.integers(min_value=0, max_value=3),
    allowed_instance_types=st.none()
    | st.lists(st.sampled_from(["c5.9xlarge", "ml.c7i.large", "g5.16xlarge"])).map(tuple),
)
FOLLOW = (None, "sure", "probable")
any_steps = st.none() | st.integers(min_value=1, max_value=10**9)
_property = settings(max_examples=examples(60), derandomize=True)


@_property
@given(profile=profiles(), constraints=constraints_of_any_kind, steps=any_steps)
def test_any_profile_gives_a_whole_decision(profile, constraints, steps):
    decision = _decide(profile, constraints=constraints, steps=steps, catalog=FEW)
    assert decision.plan.feasible
    assert decision.plan in decision.plans
    assert decision.action == decision.plan.action
    (keep,) = _plans(decision, "keep")
    if keep.predicted is not None:
        assert keep.predicted.step_seconds == profile.step.step_seconds
    for plan in decision.plans:
        assert plan.feasible or plan.reason
        assert 0 <= plan.remote_share <= 1
        if plan.predicted is not None:
            _check_outcome(plan, keep)
    order = [plan.feasible for plan in decision.plans[1:]]
    assert order == sorted(order, reverse=True)
    assert max(map(len, explain(decision).splitlines())) <= 88
    again = _decide(profile, constraints=constraints, steps=steps, catalog=FEW)
    assert to_json(again) == to_json(decision)


def _check_outcome(plan, keep):
    outcome, today = plan.predicted, keep.predicted
    numbers = [
        v for name in outcome.__struct_fields__ if not isinstance(v := getattr(outcome, name), str)
    ]
    assert all(number is None or math.isfinite(number) for number in numbers)
    assert 0 < outcome.step_seconds_low <= outcome.step_seconds <= outcome.step_seconds_high
    cost = outcome.step_seconds * outcome.usd_per_hour * 1000 / 3600
    assert outcome.usd_per_1000_steps == cost
    assert 0 <= outcome.accelerator_utilization <= 1
    prices = [AWS.get(group.instance_type).usd_per_hour for group in plan.groups]
    usd = sum(g.count * (price or math.nan) for g, price in zip(plan.groups, prices, strict=True))
    assert outcome.usd_per_hour == pytest.approx(usd, rel=1e-12)
    assert outcome.speedup == pytest.approx(today.step_seconds / outcome.step_seconds)
    ratio = outcome.usd_per_1000_steps / today.usd_per_1000_steps
    assert outcome.cost_change == pytest.approx(ratio - 1, abs=1e-9)
    assert outcome.break_even_speedup == pytest.approx(usd / today.usd_per_hour)
    if outcome.total_hours is not None:
        assert outcome.total_usd == pytest.approx(outcome.total_hours * usd)


@_property
@given(profile=profiles(), constraints=constraints_of_any_kind, follow=st.sampled_from(FOLLOW))
def test_an_uncertain_gain_is_never_called_none(profile, constraints, follow):
    followed = msgspec.structs.replace(constraints, follow=follow)
    decision = _decide(profile, constraints=followed, catalog=FEW)
    assert explain(decision).startswith("stoker does not help here") == (decision.verdict == "none")
    (keep,) = _plans(decision, "keep")
    ranking = ranking_of(decision)
    gains = [
        ranking.gain(plan.predicted, keep.predicted)
        for plan in decision.plans
        if keep.predicted and plan.feasible and plan.predicted and plan.action != "scale_out"
    ]
    is_over = "above the budget" in decision.plan.reason
    if decision.verdict == "none" and not is_over:
        assert max(gains) <= 0.05
    is_tried = decision.verdict == "probable"
    assert (decision.probable is not None) >= is_tried
    assert (decision.probable is None) == (decision.trial is None)
    # A plan that only probably gains rents nothing, unless the workload says so.
    assert decision.action == "keep" or decision.verdict == "sure" or follow == "probable"
    if decision.trial:
        assert decision.trial.usd > 0


@_property
@given(profile=profiles(), constraints=constraints_of_any_kind)
def test_chosen_plan_breaks_no_constraint(profile, constraints):
    plan = _decide(profile, constraints=constraints, catalog=FEW).plan
    if plan.action == "keep":
        return
    if constraints.max_usd_per_hour is not None:
        assert plan.predicted.usd_per_hour <= constraints.max_usd_per_hour * (1 + 1e-9)
    data = [group for group in plan.groups if group.role == "data"]
    assert sum(group.count for group in data) <= constraints.max_data_hosts
    if constraints.allowed_instance_types is not None:
        allowed = {AWS.get(name).type for name in constraints.allowed_instance_types}
        allowed.add(profile.host.instance_type)
        assert {group.instance_type for group in plan.groups} <= allowed


@_property
@given(
    profile=profiles(),
    data_type=st.sampled_from(["ml.c5.9xlarge", "ml.c7i.large"]),
    local_workers=st.sampled_from([0, 4, "auto"]),
)
def test_more_data_hosts_are_never_predicted_slower(profile, data_type, local_workers):
    decision = _decide(
        profile,
        max_data_hosts=20,
        allowed_instance_types=(data_type,),
        feed=FeedSettings(local_workers=local_workers),
    )
    plans = [
        plan
        for plan in _plans(decision, "heterogeneous")
        if plan.groups[1].instance_type == data_type and plan.predicted
    ]
    steps = [plan.predicted.step_seconds for plan in sorted(plans, key=lambda p: p.groups[1].count)]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(steps))


@_property
@given(
    profile=profiles(("ml.g5.8xlarge", "ml.p4d.24xlarge")),
    factor=st.floats(min_value=0.05, max_value=0.99),
)
def test_a_cheaper_price_never_makes_its_plan_lose(profile, factor):
    chosen = _decide(profile, max_data_hosts=1, catalog=FEW).plan
    if chosen.action != "heterogeneous":
        return
    data_type = chosen.groups[1].instance_type
    usd = AWS.get(data_type).usd_per_hour
    prices = f"instance_type,usd_per_hour\n{data_type},{usd * factor!r}\n"
    table = parse_table(prices, platform="sagemaker", source="prices.csv")
    cheaper = _decide(profile, max_data_hosts=1, catalog=extended(FEW, table))
    assert cheaper.plan.groups == chosen.groups
