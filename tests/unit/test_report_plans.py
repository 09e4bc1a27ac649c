"""The picture of the plans: every plan by time and cost, the front, the chosen plan."""

import xml.etree.ElementTree as ElementTree
from datetime import date
from functools import partial
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.cli.report import report_of_decision
from stoker.decide import decide, pareto_front
from stoker.records import Constraints
from stoker.report.plans import draw_plans, spots_of
from stoker.text import MILLISECONDS, time_unit
from support import builders, sample_records
from support.property_tests import examples

replace = msgspec.structs.replace
WIDTHS = (960.0, 360.0)


def starved(**changes):
    return decide(
        builders.starved(**changes),
        catalog=load_catalog("sagemaker"),
        constraints=Constraints(),
        today=date(2026, 11, 1),
    )


def page_of(tmp_path, decision, profile=None):
    file = tmp_path / "decision.html"
    report_of_decision(
        file,
        workload=sample_records.workload(),
        profile=profile or sample_records.profile(),
        decision=decision,
    )
    return file.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")


draw = partial(draw_plans, unit=MILLISECONDS, width=960, name="plans")


def test_every_plan_that_may_run_is_a_spot_and_the_front_is_marked():
    decision = starved()
    spots = spots_of(decision)
    assert len(spots) == sum(
        plan.feasible and plan.predicted is not None for plan in decision.plans
    )
    front = {
        (p.predicted.step_seconds, p.predicted.usd_per_1000_steps)
        for p in pareto_front(decision.plans)
    }
    assert {(s.step_seconds, s.cost) for s in spots if s.is_front} == front
    assert [spot.is_chosen for spot in spots] == [False] * (len(spots) - 1) + [True]
    assert sum(spot.is_today for spot in spots) == 1
    names = {spot.name for spot in spots_of(sample_records.decision())}
    assert names == {"today", "tuned", "+1 local.c1"}


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
        seconds = ("step_seconds", "step_seconds_low", "step_seconds_high")
        changes = {name: getattr(outcome, name) * time for name in seconds}
        changes["usd_per_1000_steps"] = outcome.usd_per_1000_steps * money
        return replace(plan, predicted=replace(outcome, **changes))

    return replace(decision, plan=of_plan(decision.plan), plans=tuple(map(of_plan, decision.plans)))


@settings(max_examples=examples(200), derandomize=True)
@given(
    base=st.sampled_from(BASES),
    time=st.floats(min_value=1e-3, max_value=1e3),
    money=st.floats(min_value=1e-3, max_value=1e3),
    width=st.sampled_from(WIDTHS),
)
def test_labels_stay_in_the_picture_and_off_each_other(base, time, money, width):
    decision = scaled(base, time=time, money=money)
    unit = time_unit([plan.predicted.step_seconds for plan in decision.plans if plan.predicted])
    drawing = draw(decision, unit=unit, width=width)
    for label in drawing.labels:
        assert label.left >= -1
        assert label.right <= drawing.width + 1
        assert label.top >= -1
        assert label.bottom <= drawing.height + 1
    for one, other in combinations(drawing.labels, 2):
        assert not one.overlaps(other), (one, other)
    text = " / ".join(label.text for label in drawing.labels)
    assert "today" in text
    assert "chosen" in text
    ElementTree.fromstring(str(drawing.markup()))


@pytest.mark.parametrize(
    ("terms", "badge", "headline"),
    [
        ({}, "decided, not run yet", "One data host ("),
        ({"accelerator_step_seconds": 0.19}, "kept as it is", "stoker does not help here"),
    ],
)
def test_report_of_a_decision_alone_is_no_broken_run(tmp_path, terms, badge, headline):
    decision = starved(**terms)
    page = page_of(tmp_path, decision)
    assert 'class="plans-wide"' in page
    assert "ended in" not in page
    assert badge in page
    assert f'<span class="said">{headline}' in page
    # Only a promise is a figure in large letters.
    assert ('class="hero"' in page) == (decision.action != "keep") == (not terms)


def test_wait_that_is_not_known_is_not_drawn_as_none(tmp_path):
    profile = sample_records.profile()
    assert "strips-wide" in page_of(tmp_path, starved(), profile)
    unknown = replace(profile, step=replace(profile.step, wait_seconds=None))
    assert "strips-wide" not in page_of(tmp_path, starved(), unknown)
