"""What a run tells beside its result: one list, in the same words everywhere."""

import html
from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest

from stoker.evaluate import evaluate
from stoker.notify import RunEnding, body_of
from stoker.record_words import evaluation_table, evaluation_words
from stoker.records import (
    Evaluation,
    Group,
    GroupSpending,
    Measured,
    Notice,
    NoticeKind,
    PreviousDecision,
    Prices,
    to_json,
)
from stoker.records.notices import IDLE_SHARE, KINDS, notices_of
from stoker.records.profile_origin import MAX_PROFILE_DAYS, ProfileOrigin
from stoker.report import ReportedRun, write_report
from stoker.run.outputs import told_of_evaluation
from stoker.tracking import metrics_of
from support import sample_records

replace = msgspec.structs.replace
TODAY = date(2026, 11, 26)
MEASURED_ON = datetime(2026, 11, 25, 3, tzinfo=UTC)


def profiled(*, days=0):
    when = (MEASURED_ON - timedelta(days=days)).isoformat()
    return replace(sample_records.profile(), what={"when": when})


def decided(*, prices=None, **changes):
    billed = prices or Prices(date="2026-11-20", source="a price list")
    return replace(sample_records.decision(), prices=billed, **changes)


def trained(*, step_seconds=sample_records.MEASURED_SECONDS, **changes):
    record = sample_records.training()
    measured = replace(record.measured, step_seconds=step_seconds)
    return replace(record, measured=measured, **changes)


def judged(*, today=TODAY, **records) -> Evaluation:
    found = {"profile": profiled(), "decision": decided(), "training": trained()}
    return evaluate(
        workload=sample_records.workload(),
        **{**found, **records},
        today=today,
    )


def kinds(record: Evaluation) -> tuple[NoticeKind, ...]:
    return tuple(notice.kind for notice in record.notices)


def last(*, groups=None, **changes) -> PreviousDecision:
    """The last run's plan, as `decide` remembers it."""
    plan = sample_records.decision().plan
    known = {"run": "mnist-1", "date": "2026-11-19", "action": plan.action}
    return PreviousDecision(**known, groups=groups or plan.groups, **changes)


def test_a_run_as_it_was_predicted_tells_nothing():
    record = judged(decision=decided(previous=last()))
    assert (record.notices, record.warnings) == ((), ())


@pytest.mark.parametrize(
    ("step_seconds", "is_told"), [(0.034, False), (0.036, False), (0.061, True), (0.004, True)]
)
def test_a_step_outside_its_predicted_band_is_told(step_seconds, is_told):
    record = judged(training=trained(step_seconds=step_seconds))
    assert kinds(record) == (("prediction_outside",) if is_told else ())
    if is_told:
        (words,) = record.warnings
        assert "outside" in words
        assert "predicted" in words


def test_a_busy_machine_makes_no_prediction_wrong():
    noisy = judged(decision=decided(is_noisy=True), training=trained(step_seconds=0.061))
    assert kinds(noisy) == ()


@pytest.mark.parametrize(
    ("batches", "idle_share", "words"),
    [
        (0, 1.0, "the data group made 0 of 1,240 batches, $3.10"),
        (3, None, "the data group made 3 of 1,240 batches, $3.10"),
        (1200, 0.9, "the data group was idle 90% of its time, $2.80 of $3.10: fewer data hosts"),
        (1200, IDLE_SHARE, None),
        (1200, 0.2, None),
        (1200, None, None),
    ],
)
def test_a_data_group_that_is_paid_for_nothing_is_told(batches, idle_share, words):
    group = GroupSpending(
        group="data",
        usd=3.1,
        idle_share=idle_share,
        idle_usd=2.8,
        batches=batches,
        all_batches=1240,
    )
    training = trained(spending=(group,))
    measured = replace(training.measured, wait_seconds=0.05 * training.measured.step_seconds)
    record = judged(training=replace(training, measured=measured))
    assert kinds(record) == (("data_group_idle",) if words else ())
    assert not words or record.warnings[0].startswith(words)


def test_fewer_hosts_are_no_advice_where_steps_wait_for_data():
    group = GroupSpending(group="data", idle_share=0.94, batches=20, all_batches=40)
    training = trained(spending=(group,))
    measured = replace(training.measured, wait_seconds=0.98 * training.measured.step_seconds)
    record = judged(training=replace(training, measured=measured))
    assert record.warnings[0] == (
        "the data group was idle 94% of its time, though steps waited for data: its start was most "
        "of the run, or it was late"
    )


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, False),
        ({"is_held": True, "gain": 0.04, "margin": 0.05}, False),
        ({"forgotten": "its types are no longer allowed"}, False),
        ({"is_changed": True}, True),
        ({"is_changed": True, "forgotten": "its types are no longer allowed"}, True),
    ],
)
def test_another_plan_than_the_last_run_had_is_told_with_both(changes, is_told):
    groups = sample_records.decision().plan.groups[:1]
    record = judged(decision=decided(previous=last(groups=groups, **changes)))
    assert kinds(record) == (("decision_changed",) if is_told else ())
    if is_told:
        assert record.warnings == (
            "the decision changed: dnn 1 x local.c1, data 1 x local.c1; in run mnist-1 of "
            "2026-11-19 dnn 1 x local.c1",
        )


@pytest.mark.parametrize(
    ("prices", "is_told"),
    [
        (Prices(date="2026-08-01", source="a list", stale=True), True),
        (Prices(date="2026-11-20", source="a list"), False),
        (Prices(date="2026-08-01", source="a list", stale=True, purchase="nominal"), False),
    ],
)
def test_stale_prices_are_told_with_their_limit_where_something_is_billed(prices, is_told):
    record = judged(decision=decided(prices=prices))
    assert kinds(record) == (("prices_stale",) if is_told else ())
    assert not is_told or "older than 90 days" in record.warnings[0]


@pytest.mark.parametrize(
    ("days", "is_told"),
    [(0, False), (MAX_PROFILE_DAYS - 1, False), (MAX_PROFILE_DAYS, True), (400, True)],
)
@pytest.mark.parametrize("has_origin", [True, False])
def test_an_old_profile_is_told_with_its_limit(days, is_told, has_origin):
    profile = profiled(days=days)
    if has_origin:
        origin = ProfileOrigin(measured_at=str(profile.what["when"]))
        profile = replace(profile, origin=origin, what={})
    record = judged(profile=profile)
    assert kinds(record) == (("profile_old",) if is_told else ())
    if is_told:
        assert f"more than {MAX_PROFILE_DAYS}" in record.warnings[0]


@pytest.mark.parametrize("when", [None, "", "yesterday", 7, "2026-11-25T03:00:00.000Z"])
def test_a_profile_whose_day_is_not_known_is_not_called_old(when):
    what = {} if when is None else {"when": when}
    assert kinds(judged(profile=replace(profiled(), what=what))) == ()


def test_a_model_that_a_person_has_to_approve_is_told_if_it_passed():
    passed = judged()
    waiting = notices_of(
        profile=profiled(),
        decision=decided(),
        training=trained(),
        performance=passed.performance,
        today=TODAY,
        waits_in="mnist",
    )
    assert [notice.kind for notice in waiting] == ["approval_pending"]
    assert waiting[0].text == "the model waits for approval in the group mnist"


ALL = tuple(Notice(kind=kind, text=f"words of {kind}") for kind in KINDS)


def test_each_notice_has_the_same_words_in_every_place(tmp_path):
    record = replace(judged(), notices=ALL, warnings=tuple(notice.text for notice in ALL))
    ending = RunEnding(workload="mnist", run="1", step="evaluate")
    ending.tells(record.notices)
    body = body_of(ending, format="text")
    page = tmp_path / "report.html"
    write_report(
        page,
        ReportedRun(
            run_id="1",
            workload=sample_records.workload(),
            profile=profiled(),
            decision=decided(),
            training=trained(),
            evaluation=record,
            environment={},
        ),
    )
    shown = html.unescape(page.read_text())
    places = (evaluation_words(record), evaluation_table(record), body["text"], shown)
    for notice in ALL:
        assert all(notice.text in str(place) for place in places), notice.kind
    assert body["stoker"]["notices"] == [{"kind": n.kind, "text": n.text} for n in ALL]
    assert body["stoker"]["warnings"] == [notice.text for notice in ALL]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_a_figure_of_its_own_that_goes_back_to_zero(kind):
    one = Notice(kind=kind, text="words")
    record = replace(judged(), notices=(one,), warnings=("words",))
    names = [f"told_{other}" for other in KINDS]
    figures = told_of_evaluation(record).metrics
    assert {name: figures[name] for name in names} == {
        name: float(name == f"told_{kind}") for name in names
    }
    tracked = metrics_of(trained(), record)
    assert tracked[f"stoker_told_{kind}"] == 1.0
    assert sum(tracked[f"stoker_{name}"] for name in names) == 1.0


def test_an_evaluation_of_an_earlier_version_is_read():
    text = to_json(judged()).replace('"notices": [],', "")
    assert msgspec.json.decode(text, type=Evaluation).notices == ()


def test_hosts_of_no_plan_have_no_band_to_be_outside_of():
    groups = (Group(name="dnn", role="dnn", instance_type="local.c1", count=9),)
    measured = Measured(
        step_seconds=1.0, wait_seconds=0.0, compute_seconds=1.0, samples_per_second=1.0, steps=9
    )
    record = judged(training=replace(trained(), groups=groups, measured=measured))
    assert kinds(record) == ()
