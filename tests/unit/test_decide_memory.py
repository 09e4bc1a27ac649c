"""The last run's plan stays until another one is clearly better; bad memory never decides."""

import functools
import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide import LastRun, explain, remembered
from stoker.decide.ranking import error_band
from stoker.decide.remember import margin
from stoker.record_words import decision_words
from stoker.records import GroupSpending, write_json
from stoker.run.earlier_runs import memory_of
from support import builders, decisions, sample_records
from support.property_tests import examples

replace = msgspec.structs.replace
WEEKS = 52
TRAINED = replace(sample_records.training(), events=())
# The least loading that data hosts pay for, about: noise decides there.
BORDER = 4.3
CATALOG = load_catalog("sagemaker")
# Few, so that a year of decisions takes a second.
TYPES = ("ml.g5.8xlarge", "ml.c7i.4xlarge", "ml.c7i.12xlarge")


def decided(loading=6.1, *, last=None, step=None, **constraints):
    """Decides on a profile whose loading takes these CPU-seconds of 32 vCPUs."""
    seconds = step or max(0.08, loading / 31)
    profile = builders.starved(loader_cpu_seconds=loading, step_seconds=seconds, predicted=seconds)
    groups = last.plan.groups if last else ()
    limits = {"max_data_hosts": 2, "allowed_instance_types": TYPES, **constraints}
    return decisions.decided(profile, catalog=CATALOG, last=groups, **limits)


@functools.cache
def of_week(loading):
    return decided(loading)


def after(decision, last=None, **training):
    if last is None:
        return decision
    record = replace(TRAINED, **training)
    return remembered(decision, LastRun(run="mnist-1", decision=last, training=record))


def plan_of(decision):
    return decision.action, [(group.instance_type, group.count) for group in decision.plan.groups]


def changes(loadings, *, with_memory=True):
    plans, last = [], None
    for loading in loadings:
        known = last if with_memory else None
        last = after(of_week(round(loading, 1)), known)
        plans.append(plan_of(last))
    return sum(one != other for one, other in itertools.pairwise(plans))


def wobbling(seed, *, around=BORDER, share=0.08):
    drawn = random.Random(seed)
    return [around * drawn.uniform(1 - share, 1 + share) for _ in range(WEEKS)]


def test_without_memory_noise_changes_the_plan_from_week_to_week():
    assert changes(wobbling(1), with_memory=False) > 3


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 10**6), around=st.floats(2.6, 7.5))
def test_noise_within_the_band_changes_the_plan_at_most_once_a_year(seed, around):
    weeks = wobbling(seed, around=around)
    assert changes(weeks) <= 1


@pytest.mark.parametrize(("before", "now"), [(1.5, 6.2), (6.2, 1.5), (2.0, 9.0), (9.0, 2.0)])
def test_a_plan_that_is_twice_as_good_replaces_the_last_one_at_once(before, now):
    last = decided(before)
    fresh = decided(now, last=last)
    assert plan_of(last) != plan_of(fresh)
    found = after(fresh, last)
    assert plan_of(found) == plan_of(fresh)
    assert found.previous.is_changed
    assert found.previous.gain > found.previous.margin


def held():
    last = decided(6.2)
    assert last.action == "heterogeneous"
    for loading in (4.2, 4.0, 3.8, 3.6, 3.4, 3.2):
        fresh = decided(loading, last=last)
        found = after(fresh, last)
        if found.previous.is_held:
            return fresh, last, found
    raise AssertionError("no decision was held")


def test_a_held_plan_is_told_with_its_run_and_what_would_replace_it():
    fresh, last, found = held()
    assert plan_of(found) == plan_of(last)
    assert found.plan == found.plans[0]
    assert len(found.plans) == len(fresh.plans)
    assert found.previous.gain <= found.previous.margin
    assert not found.previous.is_changed
    assert found.plan.reason.startswith("as in mnist-1: ")
    assert "replaces it" in found.plan.reason
    assert "s in mnist-1" in explain(found)
    assert "mnist-1" in decision_words(found)


def test_the_margin_is_both_bands_together_and_the_plans_own_where_it_is_twice_as_fast():
    fresh, _, found = held()
    one, other = found.plan.predicted, fresh.plan.predicted
    assert found.previous.margin == margin(other, over=one)
    twice = replace(other, step_seconds=one.step_seconds / 2, step_seconds_high=one.step_seconds)
    assert margin(other, over=other) == pytest.approx(min(2 * error_band(other), 0.4))
    assert margin(twice, over=one) == 0.4
    sharp = replace(twice, step_seconds_high=twice.step_seconds * 1.1)
    assert margin(sharp, over=one) == pytest.approx(0.1)


def test_an_equal_plan_is_told_as_the_last_one():
    found = after(decided(6.2), decided(6.2))
    assert found.previous == replace(found.previous, is_changed=False, is_held=False, gain=None)
    assert "as in mnist-1" in decision_words(found)


@pytest.mark.parametrize(
    ("last", "training", "words"),
    [
        (lambda d: replace(d, objective="time"), {}, "ranked by time"),
        (lambda d: replace(d, prices=replace(d.prices, source="mine.csv")), {}, "other prices"),
        (lambda d: replace(d, prices=replace(d.prices, region="eu-west-1")), {}, "other prices"),
        (lambda d: d, {"is_unfed": True}, "gave it nothing"),
        (
            lambda d: d,
            {"spending": (GroupSpending(group="data", batches=0, all_batches=900),)},
            "gave it nothing",
        ),
    ],
)
def test_memory_that_does_not_fit_is_told_and_not_used(last, training, words):
    fresh, before, _ = held()
    found = after(fresh, last(before), **training)
    assert plan_of(found) == plan_of(fresh)
    assert words in found.previous.forgotten


@pytest.mark.parametrize("loading", [0.3, 0.8, 1.5])
def test_data_hosts_that_save_no_time_are_not_paid_for_ranked_by_time(loading):
    # Below the price of a second GPU host.
    limits = {"objective": "time", "allowed_instance_types": TYPES, "max_usd_per_hour": 5.0}
    last = decided(6.2, **limits)
    assert "data" in [group.role for group in last.plan.groups]
    # The accelerator is the limit today: data hosts would only cost.
    profile = builders.starved(loader_cpu_seconds=loading, step_seconds=0.08, predicted=0.08)
    step = replace(profile.step, step_seconds=0.08, accelerator_step_seconds=0.08, wait_seconds=0.0)
    profile, groups = replace(profile, step=step), last.plan.groups
    fresh = decisions.decided(profile, catalog=CATALOG, last=groups, max_data_hosts=2, **limits)
    assert fresh.action == "keep"
    found = after(fresh, last)
    assert plan_of(found) == plan_of(fresh)
    assert found.previous.is_changed
    assert "costs" in found.path[-1].because
    assert "saves no time" in found.path[-1].because


def test_a_plan_that_todays_constraints_rule_out_is_not_held():
    _, last, _ = held()
    fresh = decided(3.8, max_data_hosts=0)
    found = after(fresh, last)
    assert plan_of(found) == plan_of(fresh)
    assert found.previous.forgotten
    assert found.previous.is_changed


def written(folder, workload, decision, *, passed=True):
    folder.mkdir(parents=True)
    write_json(folder / "workload.json", workload)
    write_json(folder / "profile.json", sample_records.profile())
    write_json(folder / "decision.json", decision)
    write_json(folder / "training.json", TRAINED)
    write_json(folder / "evaluation.json", replace(sample_records.evaluation(), passed=passed))


def read(tmp_path, workload):
    return memory_of(workload, runs=tmp_path, besides=tmp_path / "new")


def test_the_last_run_is_the_newest_of_the_workload_that_passed(tmp_path):
    own, other = builders.workload(), builders.workload("other")
    assert read(tmp_path, own).last is None
    written(tmp_path / "a", own, decided(6.2))
    written(tmp_path / "b", own, decided(1.5), passed=False)
    written(tmp_path / "c", other, decided(1.5))
    found = read(tmp_path, own)
    assert found.last.run == "a"
    assert [run.decision.action for run in found.runs] == ["heterogeneous"]
    # A learning rate, or more epochs, leave a step as it is.
    assert read(tmp_path, builders.workload("mnist", "training.epochs=9")).last.run == "a"
    changed = builders.workload("mnist", 'command=["python", "other.py"]')
    assert read(tmp_path, changed).last is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "stoker.decision/v9"}'])
def test_bad_missing_or_newer_memory_is_told_and_not_used(tmp_path, text):
    own = builders.workload()
    written(tmp_path / "a", own, decided(6.2))
    file = tmp_path / "a" / "decision.json"
    file.write_text(text) if text else file.unlink()
    found = read(tmp_path, own)
    assert found.last is None
    assert "a cannot be read" in found.why_not
