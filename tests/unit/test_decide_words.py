"""Each plan tells its limits, its break-even and its global batch; the front is always shown."""

import dataclasses
import functools
from datetime import date
from functools import partial
from itertools import permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import Catalog, load_catalog
from stoker.decide import decide, explain, pareto_front
from stoker.decide.choose import Walk, choose, limits, pays, walk
from stoker.decide.pricing import START_UP_SECONDS, break_even_steps, break_even_words
from stoker.decide.work import measure
from stoker.errors import UsageError
from stoker.records import Check, Constraints, Fix, Plan, Predicted, TrainingSize
from stoker.text import cost_change_words
from support import builders
from support.property_tests import examples

replace = msgspec.structs.replace
AWS = load_catalog("sagemaker")
TODAY = date(2026, 11, 1)


profile = builders.starved


def accelerator_bound(count=1, **terms):
    bound = {"accelerator_step_seconds": 0.2, "loader_cpu_seconds": 1.0 * count}
    return profile(count=count, **bound, **terms)


def decided(found, *, catalog=AWS, steps=None, extra=(), **constraints):
    return decide(
        found,
        catalog=catalog,
        constraints=Constraints(**constraints),
        training=TrainingSize(steps=steps),
        extra_clusters=extra,
        today=TODAY,
    )


@functools.cache
def starved():
    return decided(profile())


def priced(decision):
    return [plan for plan in decision.plans if plan.predicted]


def keep_of(decision):
    return next(plan for plan in decision.plans if plan.action == "keep").predicted


def unwrapped(text):
    return " ".join(text.split())


# Limits.


def test_every_plan_tells_the_time_of_its_next_limit():
    for plan in priced(starved()):
        outcome = plan.predicted
        assert outcome.second_limit_seconds <= outcome.step_seconds * (1 + 1e-9)


def test_next_limit_is_the_accelerators_own_step_and_named_where_it_is_near():
    outcomes = [plan.predicted for plan in priced(decided(profile(), max_data_hosts=1))]
    outcome = next(each for each in outcomes if each.second_limit == "accelerator")
    assert outcome.second_limit_seconds == pytest.approx(0.08)
    assert limits(outcome) == "CPU; next: accelerator (80.0 ms)"
    alone = replace(outcome, limit="accelerator", second_limit_seconds=0.0)
    assert limits(alone) == "accelerator, and no other is near"


# Break-even.


def test_break_even_is_the_ratio_of_the_prices():
    keep = keep_of(starved())
    assert keep.break_even_speedup == 1
    for plan in priced(starved()):
        ratio = plan.predicted.usd_per_hour / keep.usd_per_hour
        assert plan.predicted.break_even_speedup == pytest.approx(ratio)
        assert (plan.predicted.cost_change < 0) == (plan.predicted.speedup > ratio)


def test_break_even_of_two_c5_beside_a_p4d_is_the_published_one_of_todays_prices():
    cluster = builders.clusters("ml.p4d.24xlarge", "ml.c5.18xlarge", 2)
    decision = decided(profile("ml.p4d.24xlarge"), extra=(cluster,))
    plan = next(p for p in decision.plans if p.reason == "asked for")
    assert plan.predicted.break_even_speedup == pytest.approx(1.291, abs=0.001)


@pytest.mark.parametrize(
    ("ratio", "speedup", "words"),
    [
        (1.5, 2.0, "a step is cheaper than today from 1.50x on: it is 2.00x"),
        (2.5, 2.0, "it buys time, not money: a step is cheaper than today from 2.50x on"),
        (0.8, 1.2, "it costs no more per hour than today's hosts"),
        (None, 1.2, "today's hosts cost nothing"),
    ],
)
def test_break_even_in_words(ratio, speedup, words):
    outcome = starved().plan.predicted
    assert pays(replace(outcome, break_even_speedup=ratio, speedup=speedup)) == words


def test_start_is_paid_back_where_both_clusters_have_cost_the_same():
    keep, promise = keep_of(starved()), starved().plan.predicted
    steps = break_even_steps(promise, keep)
    both = [
        p.usd_per_hour * START_UP_SECONDS / 3600 + steps * p.usd_per_1000_steps / 1000
        for p in (promise, keep)
    ]
    assert both[0] == pytest.approx(both[1])
    assert f"paid back after {steps:,.0f} steps" in break_even_words(promise, keep)


# Replicas and the global batch.


@pytest.mark.parametrize("batch", [256, 1])
def test_global_batch_grows_with_the_replicas_and_the_advice_says_so(batch):
    decision = decided(accelerator_bound(global_batch_size=batch), objective="time")
    assert decision.action == "scale_out"
    (group,) = decision.plan.groups
    replicas = AWS.get(group.instance_type).accelerators * group.count
    assert decision.plan.global_batch_size == batch * replicas
    text = next(advice.text for advice in decision.advice if advice.id == "global-batch")
    assert f"{batch * replicas} samples instead of {batch}" in text
    assert "learning rate" in text


def test_plans_with_todays_replicas_have_todays_global_batch():
    assert {plan.global_batch_size for plan in starved().plans} == {None}


def test_unknown_global_batch_is_not_made_up():
    decision = decided(accelerator_bound(global_batch_size=None), objective="time")
    assert decision.action == "scale_out"
    assert decision.plan.global_batch_size is None
    assert any(advice.id == "global-batch" for advice in decision.advice)


# What may be advised.


def test_unexplained_profile_gets_a_rough_table_and_no_advice_to_buy_accelerators():
    explained = decided(accelerator_bound())
    assert any(advice.id == "more-accelerators" for advice in explained.advice)
    check = Check(predicted_step_seconds=0.1, error=-0.5, explained=False)
    unexplained = decided(replace(accelerator_bound(), check=check))
    assert [each.id for each in unexplained.advice] == ["profile-again"]
    assert "Rough guide only" in explain(unexplained)
    assert "Rough guide only" not in explain(explained)


def test_deadline_asks_for_more_accelerators_where_the_cpu_is_the_limit():
    hurried = decided(profile(), deadline_hours=1.5, steps=100_000)
    assert hurried.bottleneck == "cpu"
    assert any(plan.action == "scale_out" for plan in hurried.plans)
    assert hurried.plan.predicted.total_hours <= 1.5
    relaxed = decided(profile(), deadline_hours=50, steps=100_000)
    assert not any(plan.action == "scale_out" for plan in relaxed.plans)


def offered(decision):
    return {
        (plan.groups[0].instance_type, plan.groups[0].count): plan.predicted.step_seconds
        for plan in decision.plans
        if plan.action == "scale_out"
    }


def test_larger_instance_comes_before_more_instances():
    decision = decided(accelerator_bound(), objective="time")
    (group,) = decision.plan.groups
    assert group.count == 1
    steps = offered(decision)
    assert steps["ml.g5.12xlarge", 1] < steps["ml.g5.8xlarge", 4]
    # Two accelerators today: four in one g5.12xlarge.
    of_two = offered(decided(accelerator_bound(count=2), objective="time"))
    assert {("ml.g5.12xlarge", 1), ("ml.g5.8xlarge", 4)} <= set(of_two)


def test_scaling_up_names_its_heterogeneous_rival_with_both_costs():
    because = next(a.because for a in starved().path if "larger type" in a.question)
    assert "1 ml.g5.16xlarge" in because
    assert "a data group is cheaper than that: 1 ml.g5.8xlarge + " in because
    assert "per 1000 steps" in because


def test_six_instance_groups_are_too_many_for_a_sagemaker_job():
    data = [builders.group("data", "ml.c7i.xlarge", name=f"data-{n}") for n in range(5)]
    groups = (builders.group("dnn", "ml.g5.8xlarge"), *data)
    plans = decided(profile(), extra=(groups,)).plans
    plan = next(plan for plan in plans if len(plan.groups) == 6)
    assert not plan.feasible
    reason = "asked for, but a SageMaker training job has at most 5 instance groups, not 6"
    assert plan.reason == reason


def test_a_cluster_that_was_asked_for_and_may_not_run_says_why_in_the_text():
    cluster = builders.clusters("ml.c5.9xlarge")
    text = unwrapped(explain(decided(profile(), extra=(cluster,))))
    assert "? 1 ml.c5.9xlarge: asked for, but the accelerators differ (A10G today, none" in text


@pytest.mark.parametrize(
    ("more", "what", "where", "fix"),
    [
        ({"max_data_hosts": 1_000_000}, "256 at most", "key constraints.max_data_hosts", ""),
        (
            {"regions": ("eu-west-1",)},
            "for region us-east-1, but only eu-west-1",
            "key constraints.regions",
            "",
        ),
        (
            {"catalog": Catalog(platform="sagemaker", instances=(), source="nothing")},
            "has no instance type",
            "",
            "--prices FILE",
        ),
    ],
)
def test_what_cannot_be_searched_is_an_error_and_no_wait(more, what, where, fix):
    with pytest.raises(UsageError, match=what) as caught:
        decided(profile(), **more)
    assert not where or caught.value.where == where
    assert fix in caught.value.fix


def test_a_price_of_tomorrow_is_said_to_be_of_no_known_age(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("instance_type,usd_per_hour,priced_on\nml.g5.8xlarge,3,2062-09-27\n")
    decision = decided(profile(), catalog=load_catalog("sagemaker", prices=file))
    said = "the price of ml.g5.8xlarge is dated 2062-09-27, in the future: its age is not known"
    assert said in decision.warnings


def test_profiles_fix_that_costs_nothing_is_the_charts_free_fix():
    fix = Fix(id="persistent_workers", text="keep the workers", saves_seconds=0.02)
    path = decided(replace(profile(), fixes=(fix,))).path
    (turn,) = [each for each in path if each.question == "Is there a free fix?"]
    assert (turn.answer, turn.because) == ("yes", "keep the workers")
    unknown = decided(profile(num_workers=None)).path[2]
    assert (unknown.question, unknown.answer) == ("Is there a free fix?", "unknown")


def test_deadline_and_budget_that_contradict_each_other_are_named_with_what_is_needed():
    decision = decided(profile(), deadline_hours=2.5, max_usd_per_hour=3.1, steps=100_000)
    assert decision.action == "keep"
    assert "within the budget of $3.10 per hour: the two contradict" in decision.plan.reason
    needed = float(decision.plan.reason.split(" needs $")[1].split(" ")[0])
    outcomes = [plan.predicted for plan in priced(decision)]
    in_time = [each.usd_per_hour for each in outcomes if each.total_hours <= 2.5]
    assert needed == pytest.approx(min(in_time), abs=0.005)


def test_prices_of_an_allowed_region_are_used():
    allowed = decided(profile(), regions=("eu-west-1", "us-east-1"))
    assert allowed.action == "heterogeneous"


def test_allowed_type_that_no_plan_can_have_is_named_with_the_reason():
    warnings = decided(profile(), allowed_instance_types=("c5.12xlarge", "c5.18xlarge")).warnings
    assert (
        "ml.c5.12xlarge is allowed, but it is in no plan: "
        "a SageMaker training job cannot use ml.c5.12xlarge"
    ) in warnings
    assert not any("ml.c5.18xlarge" in text for text in warnings)


def test_catalog_of_nothing_but_todays_type_keeps_it():
    alone = Catalog(platform="sagemaker", instances=(AWS.get("ml.g5.8xlarge"),), source="one")
    decision = decided(profile(), catalog=alone)
    assert decision.action == "keep"
    answer = next(a for a in decision.path if "data group" in a.question)
    assert "no CPU-only type" in answer.because


# The path and the plan.


def _made_up(action, *, step, usd_per_hour, band, hours=None):
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


def _path(others, *, hours=None, **constraints):
    keep = _made_up("keep", step=0.1, usd_per_hour=1.0, band=0.1, hours=hours)
    limits = Constraints(**constraints)
    profile = builders.profile(step_seconds=0.1, loader_cpu_seconds=0.1)
    today = load_catalog("local", cores=2).get("local.c1")
    return Walk(
        work=measure(profile, today=today, processes=1),
        bottleneck="cpu",
        keep=keep,
        chosen=choose(keep, others, limits, unexplained=None),
        plans=(keep, *others),
        constraints=limits,
    )


TUNE = _made_up("tune", step=0.091, usd_per_hour=1.0, band=0.10)
GROUP = partial(_made_up, "heterogeneous", usd_per_hour=2.0, band=0.25)


@pytest.mark.parametrize(
    ("others", "constraints", "action", "said"),
    [
        # What is free saves less than its own band: it is no rival of a plan that saves more.
        ([TUNE, GROUP(step=0.072)], {"objective": "time"}, "heterogeneous", "yes"),
        # It alone makes the deadline.
        ([GROUP(step=0.095, hours=9.5)], {"deadline_hours": 9.8}, "heterogeneous", "yes"),
        # It saves less than its band.
        ([GROUP(step=0.095)], {"objective": "time"}, "keep", "no"),
    ],
)
def test_a_data_group_is_said_to_help_where_one_is_chosen(others, constraints, action, said):
    found = _path(others, hours=10.0 if "deadline_hours" in constraints else None, **constraints)
    assert found.chosen.action == action
    answer = next(each for each in walk(found) if each.question.startswith("Would a data group"))
    assert answer.answer == said
    if said == "yes":
        assert "only" not in answer.because
        assert "buys time" not in answer.because or "cheaper" not in answer.question


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ([], "a step takes 7% longer, its error band is 25%"),
        (
            [_made_up("tune", step=0.08, usd_per_hour=1.0, band=0.1)],
            "a step takes 34% longer, both bands together are",
        ),
    ],
)
def test_what_a_data_group_loses_is_not_said_to_be_saved(free, words):
    found = _path([*free, GROUP(step=0.107)], objective="time")
    (because,) = (each.because for each in walk(found) if "be faster" in each.question)
    assert words in because


# The front.

_outcomes = st.lists(
    st.tuples(st.floats(min_value=0.01, max_value=10), st.floats(min_value=0.01, max_value=10)),
    min_size=1,
    max_size=12,
)


def _plans(outcomes):
    plan = starved().plan
    made = [
        replace(plan.predicted, step_seconds=step, usd_per_1000_steps=usd) for step, usd in outcomes
    ]
    return [replace(plan, predicted=each, reason=str(n)) for n, each in enumerate(made)]


@settings(max_examples=examples(40), derandomize=True)
@given(_outcomes)
def test_front_beats_all_others_and_no_plan_of_it_beats_another(outcomes):
    plans = _plans(outcomes)
    front = [
        (p.predicted.step_seconds, p.predicted.usd_per_1000_steps) for p in pareto_front(plans)
    ]
    assert front
    for step, usd in outcomes:
        assert any(fast <= step and cheap <= usd for fast, cheap in front)
    for one, other in permutations(front, 2):
        assert not (one[0] <= other[0] and one[1] <= other[1])


def test_plans_that_may_not_run_are_not_on_the_front():
    best, other = _plans([(0.1, 0.1), (1.0, 1.0)])
    assert pareto_front([replace(best, feasible=False), other]) == [other]
    assert pareto_front([replace(best, predicted=None)]) == []


def test_text_shows_both_ends_of_the_front():
    decision = decided(profile(), max_data_hosts=60)
    front = pareto_front(decision.plans)
    text = explain(decision)
    for plan in (front[0], front[-1]):
        assert [group.role for group in plan.groups] == ["dnn", "data"]
        assert f"today + {plan.groups[1].count} {plan.groups[1].instance_type[3:]} " in text
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith((".", "*"))]) >= 2
    assert len([line for line in lines if "heterogeneous" in line]) < 20


def test_text_tells_limits_and_break_even_of_the_chosen_plan_and_the_table_before_the_working():
    text = explain(starved())
    assert text.index("\naction ") < text.index("How it was decided")
    outcome = starved().plan.predicted
    assert f"bottleneck: {limits(outcome)}" in unwrapped(text)
    assert f"Break-even: {pays(outcome)}; accelerators are busy" in unwrapped(text)


@settings(max_examples=examples(12), derandomize=True)
@given(
    loading=st.floats(min_value=6, max_value=12),
    accelerator=st.floats(min_value=0.01, max_value=0.08),
    factor=st.floats(min_value=0.5, max_value=0.99),
)
def test_a_cheaper_data_type_stays_the_chosen_one_among_all_its_numbers_of_hosts(
    loading, accelerator, factor
):
    found = profile(loader_cpu_seconds=loading, accelerator_step_seconds=accelerator)
    chosen = decided(found, max_data_hosts=4).plan
    if chosen.action != "heterogeneous":
        return
    data_type = chosen.groups[1].instance_type
    cheaper = [
        dataclasses.replace(each, usd_per_hour=each.usd_per_hour * factor)
        if each.type == data_type
        else each
        for each in AWS.instances
    ]
    catalog = Catalog(platform="sagemaker", instances=cheaper, source="cheaper", region=AWS.region)
    again = decided(found, max_data_hosts=4, catalog=catalog).plan
    assert again.groups[1].instance_type == data_type
    assert again.predicted.usd_per_1000_steps <= chosen.predicted.usd_per_1000_steps * (1 + 1e-9)


def test_a_step_that_costs_as_much_is_neither_cheaper_nor_dearer():
    assert cost_change_words(-0.004, is_billed=True) == "a step costs the same"
    assert cost_change_words(0.004, is_billed=False) == "as many CPU-seconds per step"
    assert cost_change_words(0.006, is_billed=True) == "1% more expensive per step"
