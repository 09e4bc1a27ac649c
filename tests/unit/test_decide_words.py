"""Each plan tells its limits, its break-even and its global batch; the front is always shown."""

import dataclasses
import functools
from datetime import date
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
from stoker.records import Check, Constraints, Fix, Group, Plan, Predicted, TrainingSize
from stoker.text import cost_change_words
from support import builders
from support.property_tests import examples

replace = msgspec.structs.replace
AWS = load_catalog("sagemaker")
TODAY = date(2026, 11, 1)


def profile(instance_type="ml.g5.8xlarge", count=1, **terms):
    known = {
        "step_seconds": 0.2,
        "accelerator_step_seconds": 0.08,
        "loader_cpu_seconds": 6.1,
        "trainer_cpu_seconds": 0.3,
        "receive_cpu_seconds": 0.01,
        "batch_bytes": 20e6,
    }
    own = {"global_batch_size": 256, "num_workers": 32, **known, **terms}
    return builders.profile(instance_type, count=count, is_explained=True, predicted=0.2, **own)


def accelerator_bound(instance_type="ml.g5.8xlarge", count=1):
    return profile(
        instance_type, count, accelerator_step_seconds=0.2, loader_cpu_seconds=1.0 * count
    )


def decided(
    found,
    constraints=Constraints(),  # noqa: B008
    *,
    catalog=AWS,
    steps=None,
    extra=(),
):
    return decide(
        found,
        catalog=catalog,
        constraints=constraints,
        training=TrainingSize(steps=steps),
        extra_clusters=extra,
        today=TODAY,
    )


@functools.cache
def starved():
    return decided(profile())


def priced(decision):
    return [plan for plan in decision.plans if plan.predicted]


def unwrapped(text):
    return " ".join(text.split())


# Limits.


def test_every_plan_tells_the_time_of_its_next_limit():
    for plan in priced(starved()):
        outcome = plan.predicted
        assert outcome.second_limit_seconds <= outcome.step_seconds * (1 + 1e-9)


def test_next_limit_is_the_accelerators_own_step():
    decision = decided(profile(), Constraints(max_data_hosts=1))
    plan = next(p for p in priced(decision) if p.predicted.second_limit == "accelerator")
    assert plan.predicted.second_limit_seconds == pytest.approx(0.08)
    assert limits(plan.predicted) == "CPU; next: accelerator (80.0 ms)"


def test_a_limit_that_is_nowhere_near_is_not_named():
    outcome = replace((starved().plan).predicted, limit="accelerator", second_limit_seconds=0.0)
    assert limits(outcome) == "accelerator, and no other is near"


# Break-even.


def test_break_even_is_the_ratio_of_the_prices():
    decision = starved()
    keep = next(plan for plan in decision.plans if plan.action == "keep").predicted
    assert keep.break_even_speedup == 1
    for plan in priced(decision):
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
    outcome = (starved().plan).predicted
    assert pays(replace(outcome, break_even_speedup=ratio, speedup=speedup)) == words


def test_start_is_paid_back_where_both_clusters_have_cost_the_same():
    decision = starved()
    keep = next(plan for plan in decision.plans if plan.action == "keep").predicted
    promise = decision.plan.predicted
    steps = break_even_steps(promise, keep)
    assert steps is not None
    start, here = (p.usd_per_hour * START_UP_SECONDS / 3600 for p in (promise, keep))
    both = [
        start + steps * promise.usd_per_1000_steps / 1000,
        here + steps * keep.usd_per_1000_steps / 1000,
    ]
    assert both[0] == pytest.approx(both[1])
    assert f"paid back after {steps:,.0f} steps" in break_even_words(promise, keep)


# Replicas and the global batch.


@pytest.mark.parametrize("batch", [256, 1])
def test_global_batch_grows_with_the_replicas_and_the_advice_says_so(batch):
    found = accelerator_bound()
    found = replace(found, step=replace(found.step, global_batch_size=batch))
    decision = decided(found, Constraints(objective="time"))
    assert decision.action == "scale_out"
    accelerators = AWS.get(decision.plan.groups[0].instance_type).accelerators
    replicas = accelerators * decision.plan.groups[0].count
    assert decision.plan.global_batch_size == batch * replicas
    text = next(advice.text for advice in decision.advice if advice.id == "global-batch")
    assert f"{batch * replicas} samples instead of {batch}" in text
    assert "learning rate" in text


def test_plans_with_todays_replicas_have_todays_global_batch():
    decision = starved()
    assert {plan.global_batch_size for plan in decision.plans} == {None}


def test_unknown_global_batch_is_not_made_up():
    found = accelerator_bound()
    unknown = replace(found, step=replace(found.step, global_batch_size=None))
    decision = decided(unknown, Constraints(objective="time"))
    assert decision.action == "scale_out"
    assert decision.plan.global_batch_size is None
    assert any(advice.id == "global-batch" for advice in decision.advice)


# What may be advised.


def test_unexplained_profile_gets_no_advice_to_buy_accelerators():
    found = accelerator_bound()
    explained = decided(found)
    assert any(advice.id == "more-accelerators" for advice in explained.advice)
    check = Check(predicted_step_seconds=0.1, error=-0.5, explained=False)
    advice = decided(replace(found, check=check)).advice
    assert [each.id for each in advice] == ["profile-again"]


def test_unexplained_profile_has_its_table_for_orientation_only():
    check = Check(predicted_step_seconds=0.1, error=-0.5, explained=False)
    text = explain(decided(replace(profile(), check=check)))
    assert "Rough guide only" in text
    assert "Rough guide only" not in explain(starved())


def test_deadline_asks_for_more_accelerators_where_the_cpu_is_the_limit():
    hurried = decided(profile(), Constraints(deadline_hours=1.5), steps=100_000)
    assert hurried.bottleneck == "cpu"
    assert any(plan.action == "scale_out" for plan in hurried.plans)
    assert (hurried.plan.predicted.total_hours or 0) <= 1.5
    relaxed = decided(profile(), Constraints(deadline_hours=50), steps=100_000)
    assert not any(plan.action == "scale_out" for plan in relaxed.plans)


def test_larger_instance_comes_before_more_instances():
    decision = decided(accelerator_bound(), Constraints(objective="time"))
    (group,) = decision.plan.groups
    assert group.count == 1
    offered = [plan for plan in decision.plans if plan.action == "scale_out"]
    four = {p.groups[0].instance_type: p.predicted for p in offered if p.groups[0].count in (1, 4)}
    assert four["ml.g5.12xlarge"].step_seconds < four["ml.g5.8xlarge"].step_seconds


def test_several_small_hosts_have_larger_ones_offered_too():
    decision = decided(accelerator_bound(count=2), Constraints(objective="time"))
    offered = {
        (p.groups[0].instance_type, p.groups[0].count)
        for p in decision.plans
        if p.action == "scale_out"
    }
    # Two accelerators today: four in one g5.12xlarge.
    assert ("ml.g5.12xlarge", 1) in offered
    assert ("ml.g5.8xlarge", 4) in offered


def test_scaling_up_names_its_heterogeneous_rival_with_both_costs():
    decision = starved()
    because = next(a.because for a in decision.path if "larger type" in a.question)
    assert "1 ml.g5.16xlarge" in because
    assert "a data group is cheaper than that: 1 ml.g5.8xlarge + " in because
    assert "per 1000 steps" in because


def test_six_instance_groups_are_too_many_for_a_sagemaker_job():
    data = tuple(
        Group(name=f"data-{n}", role="data", instance_type="ml.c7i.xlarge", count=1)
        for n in range(5)
    )
    dnn = Group(name="dnn", role="dnn", instance_type="ml.g5.8xlarge", count=1)
    plans = decided(profile(), extra=((dnn, *data),)).plans
    plan = next(plan for plan in plans if len(plan.groups) == 6)
    assert not plan.feasible
    assert (
        plan.reason
        == "asked for, but a SageMaker training job has at most 5 instance groups, not 6"
    )


def test_a_cluster_that_was_asked_for_and_may_not_run_says_why_in_the_text():
    cluster = builders.clusters("ml.c5.9xlarge")
    text = unwrapped(explain(decided(profile(), extra=(cluster,))))
    assert "? 1 ml.c5.9xlarge: asked for, but the accelerators differ (A10G today, none" in text


def test_more_data_hosts_than_are_searched_are_an_error_and_no_wait():
    with pytest.raises(UsageError, match="256 at most") as caught:
        decided(profile(), Constraints(max_data_hosts=1_000_000))
    assert caught.value.where == "key constraints.max_data_hosts"


def test_a_price_of_tomorrow_is_said_to_be_of_no_known_age(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("instance_type,usd_per_hour,priced_on\nml.g5.8xlarge,3,2062-09-27\n")
    decision = decided(profile(), catalog=load_catalog("sagemaker", prices=file))
    said = "the price of ml.g5.8xlarge is dated 2062-09-27, in the future: its age is not known"
    assert said in decision.warnings


def test_profiles_fix_that_costs_nothing_is_the_charts_free_fix():
    fix = Fix(id="persistent_workers", text="keep the workers", saves_seconds=0.02)
    made = replace(profile(), fixes=(fix,))
    (turn,) = [each for each in decided(made).path if each.question == "Is there a free fix?"]
    assert (turn.answer, turn.because) == ("yes", "keep the workers")
    step = replace(profile().timed_step, num_workers=None)
    unknown = decided(replace(profile(), step=step)).path[2]
    assert (unknown.question, unknown.answer) == ("Is there a free fix?", "unknown")


def test_deadline_and_budget_that_contradict_each_other_are_named_with_what_is_needed():
    constraints = Constraints(deadline_hours=2.5, max_usd_per_hour=3.1)
    decision = decided(profile(), constraints, steps=100_000)
    assert decision.action == "keep"
    assert "within the budget of $3.10 per hour: the two contradict" in decision.plan.reason
    needed = float(decision.plan.reason.split(" needs $")[1].split(" ")[0])
    in_time = [
        plan.predicted.usd_per_hour
        for plan in priced(decision)
        if (plan.predicted.total_hours or 0) <= constraints.deadline_hours
    ]
    assert needed == pytest.approx(min(in_time), abs=0.005)


def test_empty_catalog_is_an_error_that_says_what_is_missing():
    empty = Catalog(platform="sagemaker", instances=(), source="nothing")
    with pytest.raises(UsageError, match="has no instance type") as caught:
        decided(profile(), catalog=empty)
    assert "--prices FILE" in caught.value.fix


def test_prices_of_another_region_than_allowed_are_not_used():
    with pytest.raises(UsageError, match="for region us-east-1, but only eu-west-1") as at:
        decided(profile(), Constraints(regions=("eu-west-1",)))
    assert at.value.where == "key constraints.regions"
    allowed = decided(profile(), Constraints(regions=("eu-west-1", "us-east-1")))
    assert allowed.action == "heterogeneous"


def test_allowed_type_that_no_plan_can_have_is_named_with_the_reason():
    constraints = Constraints(allowed_instance_types=("c5.12xlarge", "c5.18xlarge"))
    warnings = decided(profile(), constraints).warnings
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


def _path(others, constraints, *, hours=None):
    keep = _made_up("keep", step=0.1, usd_per_hour=1.0, band=0.1, hours=hours)
    today = load_catalog("local", cores=2).get("local.c1")
    work = measure(
        builders.profile(step_seconds=0.1, loader_cpu_seconds=0.1), today=today, processes=1
    )
    chosen = choose(keep, others, constraints, unexplained=None)
    return Walk(
        work=work,
        bottleneck="cpu",
        keep=keep,
        chosen=chosen,
        plans=(keep, *others),
        constraints=constraints,
    )


def _said_of_a_data_group(found):
    answer = next(each for each in walk(found) if each.question.startswith("Would a data group"))
    assert not (answer.answer == "yes" and "only" in answer.because)
    if answer.answer == "yes" and "buys time" in answer.because:
        assert "cheaper" not in answer.question
    return answer.answer


def test_a_data_group_is_said_to_be_faster_where_one_is_chosen():
    # What is free saves less than its own band: it is no rival of a plan that saves more.
    tune = _made_up("tune", step=0.091, usd_per_hour=1.0, band=0.10)
    group = _made_up("heterogeneous", step=0.072, usd_per_hour=2.0, band=0.25)
    found = _path([tune, group], Constraints(objective="time"))
    assert found.chosen.action == "heterogeneous"
    assert _said_of_a_data_group(found) == "yes"


def test_a_data_group_is_said_to_help_where_it_alone_makes_the_deadline():
    group = _made_up("heterogeneous", step=0.095, usd_per_hour=2.0, band=0.25, hours=9.5)
    found = _path([group], Constraints(objective="cost", deadline_hours=9.8), hours=10.0)
    assert found.chosen.action == "heterogeneous"
    assert _said_of_a_data_group(found) == "yes"


def test_a_data_group_that_saves_less_than_its_band_is_said_not_to_help():
    group = _made_up("heterogeneous", step=0.095, usd_per_hour=2.0, band=0.25)
    found = _path([group], Constraints(objective="time"))
    assert found.chosen.action == "keep"
    assert _said_of_a_data_group(found) == "no"


def test_what_a_data_group_loses_is_not_said_to_be_saved():
    tune = _made_up("tune", step=0.08, usd_per_hour=1.0, band=0.1)
    group = _made_up("heterogeneous", step=0.107, usd_per_hour=2.0, band=0.25)
    for others, words in (
        ([group], "a step takes 7% longer, its error band is 25%"),
        ([tune, group], "a step takes 34% longer, both bands together are"),
    ):
        found = _path(others, Constraints(objective="time"))
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
    return [
        replace(
            plan,
            predicted=replace(plan.predicted, step_seconds=step, usd_per_1000_steps=usd),
            reason=str(index),
        )
        for index, (step, usd) in enumerate(outcomes)
    ]


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
    decision = decided(profile(), Constraints(max_data_hosts=60))
    front = pareto_front(decision.plans)
    text = explain(decision)
    for plan in (front[0], front[-1]):
        assert [group.role for group in plan.groups] == ["dnn", "data"]
        words = f"today + {plan.groups[1].count} {plan.groups[1].instance_type[3:]} "
        assert words in text
    marked = [line for line in text.splitlines() if line.startswith((".", "*"))]
    assert len(marked) >= 2
    assert len([line for line in text.splitlines() if "heterogeneous" in line]) < 20


def test_text_tells_limits_break_even_and_utilization_of_the_chosen_plan():
    decision = starved()
    text = unwrapped(explain(decision))
    assert f"bottleneck: {limits(decision.plan.predicted)}" in text
    assert f"Break-even: {pays(decision.plan.predicted)}; accelerators are busy" in text


def test_table_comes_before_the_working():
    text = explain(starved())
    assert text.index("\naction ") < text.index("How it was decided")


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
    constraints = Constraints(max_data_hosts=4)
    chosen = decided(found, constraints).plan
    if chosen.action != "heterogeneous":
        return
    data_type = chosen.groups[1].instance_type
    cheaper = [
        dataclasses.replace(i, usd_per_hour=i.usd_per_hour * factor)
        if i.type == data_type and i.usd_per_hour
        else i
        for i in AWS.instances
    ]
    catalog = Catalog(platform="sagemaker", instances=cheaper, source="cheaper", region=AWS.region)
    again = decided(found, constraints, catalog=catalog).plan
    assert again.groups[1].instance_type == data_type
    assert again.predicted.usd_per_1000_steps <= chosen.predicted.usd_per_1000_steps * (1 + 1e-9)


def test_a_step_that_costs_as_much_is_neither_cheaper_nor_dearer():
    assert cost_change_words(-0.004, is_billed=True) == "a step costs the same"
    assert cost_change_words(0.004, is_billed=False) == "as many CPU-seconds per step"
    assert cost_change_words(0.006, is_billed=True) == "1% more expensive per step"
