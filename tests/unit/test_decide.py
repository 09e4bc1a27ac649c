import math
from functools import partial
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import Catalog, load_catalog
from stoker.decide import explain
from stoker.decide.price import error_band
from stoker.errors import UsageError
from stoker.records import (
    Check,
    Constraints,
    FeedSettings,
    Fix,
    Observed,
    Profile,
    ProfiledHost,
    ProfileState,
    StepTerms,
    TrainingSize,
    groups_in_words,
    to_json,
)
from support import builders, decisions
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
LOADING = {"loader_cpu_seconds": 0.040, "num_workers": 1}
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


def test_settings_may_fix_the_local_workers_and_auto_is_never_slower():
    (alone,) = _plans(_local(feed=FeedSettings(local_workers=0)), "heterogeneous")
    assert alone.groups[0].workers_per_host == 0
    assert alone.remote_share == 1.0
    # Alone, data hosts reach more of their CPU than together with hosts that load too.
    assert alone.predicted.step_seconds == pytest.approx(0.040 / 0.93)
    (mixed,) = _plans(_local(), "heterogeneous")
    assert mixed.predicted.step_seconds <= alone.predicted.step_seconds


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


def test_unexplained_profile_gets_a_rough_table_and_no_advice_but_to_profile_again():
    explained = _decide(_accelerator_bound())
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
    twins = {groups_in_words(plan.groups): plan.predicted for plan in known.plans}
    twin = twins[groups_in_words(unknown.plan.groups)]
    assert error_band(unknown.plan.predicted) > error_band(twin)
    assert any(doubt in warning for warning in unknown.warnings)


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


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"allowed_instance_types": ("c5.4xlarg",)}, "where", "allowed_instance_types"),
        ({"profile": _profile("ml.g5.8xl", step_seconds=0.2)}, "fix", "did you mean ml.g5.8xlarge"),
        ({"regions": ("eu-west-1",)}, "what", "for region us-east-1, but only eu-west-1"),
        ({"catalog": Catalog(platform="sagemaker", instances=(), source="")}, "fix", "--prices"),
    ],
)
def test_impossible_input_is_an_error_that_says_where_and_what_to_do(more, field, words):
    with pytest.raises(UsageError) as caught:
        _decide(**{"profile": _starved(), **more})
    assert words in getattr(caught.value, field)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (builders.clusters("ml.g5.8xlarge", "c5.12xlarge"), "training job cannot use ml.c5.12x"),
        (builders.clusters("ml.g5.8xlarge", "ml.trn2.48xlarge"), "ml.trn2.48xlarge has no price"),
        (builders.clusters("ml.p4d.24xlarge"), "the accelerators differ (A10G today, A100 here"),
        (builders.clusters("ml.c5.9xlarge"), "the accelerators differ (A10G today, none"),
    ],
)
def test_a_cluster_that_was_asked_for_and_may_not_run_says_why(groups, reason):
    decision = _decide(_starved(), extra=[groups])
    (plan,) = [plan for plan in decision.plans if plan.reason.startswith("asked for, but")]
    assert not plan.feasible
    assert reason in plan.reason
    assert reason in " ".join(explain(decision).split())


# States of a training that no host changes, from which money is kept.


def _with_states(*states, found=None, fixes=()):
    named = tuple(ProfileState(id=name, text=f"{name}: x", share=share) for name, share in states)
    return _decide(msgspec.structs.replace(found or _starved(), states=named, fixes=fixes))


@pytest.mark.parametrize("name", ["throttled", "straggler", "storage"])
def test_what_no_host_changes_is_to_be_fixed_before_money_is_spent(name):
    fix = Fix(id=name, text="change it", cost="small")
    decision = _with_states((name, 0.5), fixes=() if name == "storage" else (fix,))
    assert decision.action == "keep"
    assert "fix that before money is spent" in decision.plan.reason
    (advice,) = [own for own in decision.advice if own.id == name]
    assert advice.when == "before any money is spent"
    # The plans are priced and shown all the same.
    assert "heterogeneous" in {plan.action for plan in decision.plans}


def test_profiles_fix_that_costs_nothing_is_the_charts_free_fix_and_the_first_advice():
    fix = Fix(id="persistent_workers", text="keep the workers", saves_seconds=0.02)
    decision = _decide(msgspec.structs.replace(_starved(), fixes=(fix,)))
    assert decision.advice[0].id == fix.id
    (turn,) = [each for each in decision.path if each.question == "Is there a free fix?"]
    assert (turn.answer, turn.because) == ("yes", "keep the workers")
    unknown = _decide(_starved(num_workers=None)).path[2]
    assert (unknown.question, unknown.answer) == ("Is there a free fix?", "unknown")


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
    loader_wall_seconds=_some,
    trainer_cpu_seconds=_some,
    num_workers=st.none() | st.integers(min_value=0, max_value=200),
    global_batch_size=st.integers(min_value=1, max_value=10_000),
    batch_bytes=_bytes,
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
any_steps = st.none() | st.integers(min_value=1, max_value=10**9)
_property = settings(max_examples=examples(15), derandomize=True)


@_property
@given(profile=profiles(), constraints=constraints_of_any_kind, steps=any_steps)
def test_any_profile_gives_a_whole_decision(profile, constraints, steps):
    decision = _decide(profile, constraints=constraints, steps=steps)
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
    again = _decide(profile, constraints=constraints, steps=steps)
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
@given(profile=profiles(), constraints=constraints_of_any_kind)
def test_chosen_plan_breaks_no_constraint(profile, constraints):
    plan = _decide(profile, constraints=constraints).plan
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
