"""The picture of the plans: every plan by time and cost, the front, the chosen plan."""

import re
import xml.etree.ElementTree as ElementTree
from datetime import date
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.cli.report import report_of_decision
from stoker.decide import decide, pareto_front
from stoker.records import Check, Constraints, Profile, ProfiledHost, StepTerms
from stoker.report import write_report
from stoker.report.plans import draw_plans, spots_of
from stoker.text import MILLISECONDS, time_unit
from support import sample_records
from support.property_tests import examples

replace = msgspec.structs.replace
WIDTHS = (960.0, 360.0)


def starved(**changes):
    terms = {
        "step_seconds": 0.2,
        "accelerator_step_seconds": 0.08,
        "loader_cpu_seconds": 6.1,
        "trainer_cpu_seconds": 0.3,
    }
    return decide(
        Profile(
            host=ProfiledHost(instance_type="ml.g5.8xlarge"),
            step=StepTerms(global_batch_size=256, **{**terms, **changes}),
            check=Check(predicted_step_seconds=0.2, error=0.0, explained=True),
        ),
        catalog=load_catalog("sagemaker"),
        constraints=Constraints(),
        today=date(2026, 11, 1),
    )


def test_every_plan_that_may_run_is_a_spot_and_the_front_is_marked():
    decision = starved()
    spots = spots_of(decision)
    able = [plan for plan in decision.plans if plan.feasible and plan.predicted]
    assert len(spots) == len(able)
    front = {
        (p.predicted.step_seconds, p.predicted.usd_per_1000_steps)
        for p in pareto_front(decision.plans)
    }
    assert {(s.step_seconds, s.cost) for s in spots if s.is_front} == front
    assert [spot.is_chosen for spot in spots] == [False] * (len(spots) - 1) + [True]
    assert sum(spot.is_today for spot in spots) == 1


def test_data_hosts_that_may_not_be_run_are_not_in_the_front():
    names = {spot.name for spot in spots_of(sample_records.decision())}
    assert names == {"today", "tuned", "+1 local.c1"}


def test_decision_with_todays_cluster_alone_has_no_picture():
    decision = sample_records.decision()
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    alone = replace(decision, action="keep", plan=keep, plans=(keep,))
    assert draw_plans(alone, unit=MILLISECONDS, width=960, name="plans") is None
    unpriced = replace(keep, predicted=None)
    nothing = replace(decision, action="keep", plan=unpriced, plans=(unpriced,))
    assert draw_plans(nothing, unit=MILLISECONDS, width=960, name="plans") is None


def test_two_plans_have_no_picture_and_three_have_one():
    decision = sample_records.decision()
    homogeneous = tuple(plan for plan in decision.plans if len(plan.groups) == 1)
    tuned = replace(decision, action="tune", plan=homogeneous[0], plans=homogeneous)
    # Two plans are told by the table.
    assert len(homogeneous) == 2
    assert draw_plans(tuned, unit=MILLISECONDS, width=960, name="plans") is None
    larger = replace(homogeneous[0], action="scale_up")
    for prices, title in (
        (decision.prices, "Time against CPU time"),
        (replace(decision.prices, purchase="on-demand"), "Time against money"),
    ):
        drawing = draw_plans(
            replace(tuned, plans=(*homogeneous, larger), prices=prices),
            unit=MILLISECONDS,
            width=960,
            name="plans",
        )
        texts = {label.text for label in drawing.labels}
        assert title in texts


@pytest.mark.parametrize("width", WIDTHS)
def test_picture_names_the_chosen_plan_and_today(width):
    drawing = draw_plans(starved(), unit=MILLISECONDS, width=width, name="plans")
    text = " / ".join(label.text.replace("\N{NO-BREAK SPACE}", " ") for label in drawing.labels)
    assert re.search(r"\+\d c7i\.\w+, chosen", text)
    assert "today" in text
    assert "costlier plans are left out" in text
    described = str(drawing.markup())
    assert "no other is both faster and cheaper than" in described
    ElementTree.fromstring(described)


BASES = (
    starved(),
    starved(accelerator_step_seconds=0.19),
    starved(accelerator_step_seconds=0.002),
    starved(loader_cpu_seconds=1.0, accelerator_step_seconds=0.199),
    sample_records.decision(),
)


def scaled(decision, *, time, money):

    def of_plan(plan):
        outcome = plan.predicted
        if outcome is None:
            return plan
        return replace(
            plan,
            predicted=replace(
                outcome,
                step_seconds=outcome.step_seconds * time,
                step_seconds_low=outcome.step_seconds_low * time,
                step_seconds_high=outcome.step_seconds_high * time,
                usd_per_1000_steps=outcome.usd_per_1000_steps * money,
            ),
        )

    return replace(decision, plan=of_plan(decision.plan), plans=tuple(map(of_plan, decision.plans)))


@settings(max_examples=examples(200), derandomize=True)
@given(
    base=st.integers(min_value=0, max_value=len(BASES) - 1),
    time=st.floats(min_value=1e-3, max_value=1e3),
    money=st.floats(min_value=1e-3, max_value=1e3),
    width=st.sampled_from(WIDTHS),
)
def test_labels_stay_in_the_picture_and_off_each_other(base, time, money, width):
    decision = scaled(BASES[base], time=time, money=money)
    unit = time_unit([plan.predicted.step_seconds for plan in decision.plans if plan.predicted])
    drawing = draw_plans(decision, unit=unit, width=width, name="plans")
    for label in drawing.labels:
        assert label.left >= -1
        assert label.right <= drawing.width + 1
        assert label.top >= -1
        assert label.bottom <= drawing.height + 1
    for one, other in combinations(drawing.labels, 2):
        assert not one.overlaps(other), (one, other)


def test_report_shows_the_picture_and_each_plans_next_limit_and_break_even(tmp_path):
    file = tmp_path / "report.html"
    decision = starved()
    write_report(
        file,
        run_id="r1",
        workload=sample_records.workload(),
        profile=None,
        decision=decision,
        training=None,
        evaluation=None,
        before_timeline=None,
        after_timeline=None,
        environment={},
    )
    page = file.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert 'class="plans-wide"' in page
    assert 'class="plans-narrow"' in page
    assert "accelerator, at 80.0 ms" in page
    ratio = decision.plan.predicted.break_even_speedup
    assert ratio is not None
    assert f"{ratio:.2f} \N{MULTIPLICATION SIGN}" in page


@pytest.mark.parametrize("action", ["change", "keep"])
def test_report_of_a_decision_alone_is_no_broken_run(tmp_path, action):
    decision = starved() if action == "change" else starved(accelerator_step_seconds=0.19)
    assert (decision.action == "keep") == (action == "keep")
    file = tmp_path / "decision.html"
    report_of_decision(
        file,
        workload=sample_records.workload(),
        profile=sample_records.profile(),
        decision=decision,
    )
    page = file.read_text(encoding="utf-8")
    assert "ended in" not in page
    badge, headline = {
        "change": ("decided, not run yet", "One data host ("),
        "keep": ("kept as it is", "stoker does not help here"),
    }[action]
    assert badge in page
    assert f'<span class="said">{headline}' in page
    # Only a promise is a figure in large letters.
    assert ('class="hero"' in page) == (action == "change")


def test_wait_that_is_not_known_is_not_drawn_as_none(tmp_path):
    profile = sample_records.profile()
    unknown = replace(profile, step=replace(profile.step, wait_seconds=None))
    file = tmp_path / "decision.html"
    report_of_decision(
        file, workload=sample_records.workload(), profile=unknown, decision=starved()
    )
    assert "strips-wide" not in file.read_text(encoding="utf-8")
