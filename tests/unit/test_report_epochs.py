"""The report of whole epochs: headline, key figures, table, and what helps."""

import re

import msgspec
import pytest

from stoker.decide.advise import BETWEEN_UNSEEN
from stoker.evaluate import evaluate
from stoker.records import EpochPause, EpochTimes, FeedSettings, Fix, ProfiledLoader, Workload
from stoker.report import ReportedRun, write_report
from stoker.report.verdict import collect
from support import sample_records

replace = msgspec.structs.replace


def pause(seconds: float, *, count: int = 2) -> EpochPause:
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=count)


PROFILED = EpochTimes(steps=42.0, start=pause(0.6, count=0))
LOADER = ProfiledLoader(class_name="torch.DataLoader", reach="torch", splits=True)
RUN = EpochTimes(steps=42.0, start=pause(0.76), between=pause(2.1), inside_seconds=0.0)


def records(*, profiled=PROFILED, run=RUN):
    """The sample run, with these epochs."""
    decision, training = sample_records.decision(), sample_records.training()
    profile = replace(sample_records.profile(), epochs=profiled)

    def with_whole(plan):
        outcome = plan.predicted
        if outcome is None or profiled is None:
            return plan
        more = profiled.whole_step_seconds(0.0)
        whole = replace(
            outcome,
            whole_step_seconds=outcome.step_seconds + more,
            whole_step_seconds_low=outcome.step_seconds_low + more,
            whole_step_seconds_high=outcome.step_seconds_high + more,
        )
        return replace(plan, predicted=whole)

    decision = replace(
        decision,
        plan=with_whole(decision.plan),
        plans=tuple(map(with_whole, decision.plans)),
    )
    measured = training.measured
    whole = run and run.whole_step_seconds(measured.step_seconds)
    waits = run and run.whole_wait_seconds(measured.wait_seconds)
    measured = replace(measured, epochs=run, whole_step_seconds=whole, whole_wait_seconds=waits)
    return profile, decision, replace(training, measured=measured)


def page_of(
    tmp_path, *, feed=None, loader=None, fixes=(), warnings=(), measured_whole=None, **epochs
) -> str:
    profile, decision, training = records(**epochs)
    if measured_whole is not None:
        measured = replace(training.measured, whole_step_seconds=measured_whole)
        training = replace(training, measured=measured)
    profile = replace(profile, loader=loader, fixes=fixes)
    decision = replace(decision, warnings=warnings)
    command = ("python", "train.py")
    workload = Workload(name="mnist", command=command, feed=feed or FeedSettings())
    profile, decision, training = (
        replace(record, workload_sha256=None, workload_keys=None)
        for record in (profile, decision, training)
    )
    write_report(
        tmp_path / "report.html",
        ReportedRun(
            run_id="r1",
            workload=workload,
            profile=profile,
            decision=decision,
            training=training,
            evaluation=evaluate(
                workload=workload, profile=profile, decision=decision, training=training
            ),
            environment={},
        ),
    )
    text = re.sub(r"<[^>]+>", " ", (tmp_path / "report.html").read_text())
    return re.sub(r"[\s\u202f\xa0]+", " ", text)


def test_headline_is_of_whole_epochs_and_the_step_is_below(tmp_path):
    page = page_of(tmp_path)
    training = records()[-1]
    whole = training.measured.whole_step_seconds
    assert "over whole epochs. Within epochs a step takes" in page
    assert "A step takes, over whole epochs" in page
    waited = r"waited \d\d% of the time for data over whole epochs \(65% within them\); now \d\d%"
    assert re.search(rf"{waited} \(\d\d% within them\)", page)
    # With the pauses that only the run has seen, as the predicted time: not 1.8.
    assert "Predicted: 98 ms, 1.28 times as fast; whole epochs are" in page
    assert f"{whole * 1e3:.0f} ms" in page
    assert f"{training.measured.step_seconds * 1e3:.1f} ms" in page


def test_a_median_above_the_mean_of_whole_epochs_is_called_one(tmp_path):
    # A data host that was lost in the first third: most steps took longer than the mean.
    measured = records()[-1].measured
    page = page_of(tmp_path, measured_whole=0.9 * measured.step_seconds)
    assert f"the median within epochs {measured.step_seconds * 1e3:.1f} ms" in page


def test_page_names_what_an_epoch_begins_with(tmp_path):
    page = page_of(tmp_path)
    assert "An epoch of 42 steps begins with 0.76 s of waiting (2 seen): the workers of" in page
    assert "Sooner there: smaller batches" in page
    assert "persistent_workers" not in page
    assert "2.1 s lie between two epochs (2 seen)" in page
    # Before and after, each with its count.
    assert "0.60 s, computed 0.76 s, 2 seen" in page
    assert "not seen, counted as after 2.10 s, 2 seen" in page


@pytest.mark.parametrize(
    ("options", "makers"),
    [
        ({"loader": LOADER}, "the workers of a data host make"),
        ({"loader": replace(LOADER, splits=False)}, "one worker makes"),
        ({"loader": LOADER, "feed": FeedSettings(split_batches=False)}, "one worker makes"),
        ({"run": None}, "one worker makes"),
    ],
)
def test_page_says_who_makes_the_first_batch(options, makers, tmp_path):
    assert f"{makers} its first batch" in page_of(tmp_path, **options)


def test_page_advises_workers_that_stay_only_where_the_profile_does(tmp_path):
    fix = Fix(id="persistent_workers", text="persistent_workers=True: sooner", saves_seconds=0.01)
    page = page_of(tmp_path, fixes=(fix,))
    assert "longer epochs; persistent_workers=True." in page


@pytest.mark.parametrize(("epochs", "is_warned"), [({}, False), ({"run": None}, True)])
def test_what_the_run_has_seen_between_epochs_is_not_said_to_be_unseen(tmp_path, epochs, is_warned):
    page = page_of(tmp_path, warnings=(BETWEEN_UNSEEN, "Prices are old."), **epochs)
    assert "Prices are old." in page
    assert (BETWEEN_UNSEEN in page) == is_warned


@pytest.mark.parametrize("epochs", [{"profiled": None, "run": None}, {"profiled": None}])
def test_page_without_known_epochs_is_of_steps(tmp_path, epochs):
    page = page_of(tmp_path, **epochs)
    assert "A step takes, over whole epochs" not in page
    assert "Within epochs a step takes" not in page


def test_figures_without_an_evaluation_are_of_the_same_kind():
    profile, decision, training = records()
    found = collect(profile=profile, decision=decision, training=training, evaluation=None)
    assert found.is_whole
    assert found.measured.seconds == training.measured.whole_step_seconds
    assert found.baseline.seconds == pytest.approx(found.baseline.within + 0.6 / 42)
    mixed = collect(
        profile=replace(profile, epochs=None),
        decision=sample_records.decision(),
        training=training,
        evaluation=None,
    )
    assert not mixed.is_whole
    assert mixed.baseline.seconds == mixed.baseline.within
    assert mixed.measured.seconds == mixed.measured.within
    alone = collect(profile=None, decision=None, training=training, evaluation=None)
    assert alone.is_whole
