"""Earlier runs correct the model's constants; wrong, foreign and few ones never do."""

import dataclasses
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide import EarlierRun, calibrate, explain
from stoker.decide.calibrate import BOUNDS
from stoker.decide.model import ClusterShape, Hosts, estimate
from stoker.decide.ranking import error_band
from stoker.decide.step_work import measure
from stoker.errors import UsageError
from stoker.records import Calibration, Check, Event, Job, ProfiledData, ProfiledHost, write_json
from stoker.run.earlier_runs import calibration_of
from support import builders, decisions, sample_records
from support.property_tests import examples

replace = msgspec.structs.replace
LOCAL = load_catalog("local", cores=2)
CONSTRAINTS = {"objective": "time", "max_data_hosts": 1, "allowed_instance_types": ("local.c1",)}
NOTHING = Calibration()
TOOK = {"step_seconds": 0.062, "accelerator_step_seconds": 0.022, "trainer_cpu_seconds": 0.022}
LOADING = {"loader_cpu_seconds": 0.040, "receive_cpu_seconds": 0.001, "num_workers": 1}
KNOWN = {"is_explained": True, "predicted": 0.062, "workload_sha256": "a" * 64}
profile = partial(builders.profile, global_batch_size=64, **TOOK, **LOADING, **KNOWN)


def run(slower=1.0, **training):
    found = profile()
    decision = decisions.decided(found, catalog=LOCAL, **CONSTRAINTS)
    assert decision.action == "heterogeneous"
    one = sample_records.training()
    step = decision.plan.predicted.step_seconds * slower
    record = replace(
        one,
        workload_sha256=found.workload_sha256,
        groups=decision.plan.groups,
        measured=replace(one.measured, step_seconds=step),
        events=(),
    )
    return EarlierRun(profile=found, decision=decision, training=replace(record, **training))


FITS = run(1.1)


def learned(*runs):
    return calibrate(runs, like=profile(vcpus=1), catalog=LOCAL)


def decided(calibration=None):
    return decisions.decided(profile(), catalog=LOCAL, calibration=calibration, **CONSTRAINTS)


def outcome_after(calibration):
    decision = decided(calibration)
    plan = next(plan for plan in decision.plans if plan.action == "heterogeneous")
    return plan.predicted


def test_three_runs_that_came_slower_make_the_next_prediction_the_measured_step():
    found = learned(FITS, FITS, FITS)
    assert found.runs == 3
    assert found.efficiency < 1
    assert found.receive == 1
    measured = FITS.training.measured
    assert outcome_after(found).step_seconds == pytest.approx(measured.step_seconds, rel=1e-3)
    # The middle run counts, and not the odd one.
    five = learned(FITS, FITS, FITS, run(1.3), FITS)
    assert five.efficiency == pytest.approx(found.efficiency)
    assert learned(run(), run(), run()).efficiency == pytest.approx(1, abs=1e-6)


def test_runs_that_disagree_widen_the_bands_of_data_groups():
    agreed, torn = learned(*[run(1.08)] * 3), learned(run(1.0), run(1.08), run(1.16))
    assert torn.spread > agreed.spread
    assert error_band(outcome_after(torn)) > error_band(outcome_after(agreed))


def run_of(found, groups, *, catalog, slower=1.0):
    """Returns a run on the hosts of these groups, and the limit that was predicted of them."""
    decision = decisions.decided(found, catalog=catalog, extra_clusters=[groups])
    plan = next(plan for plan in decision.plans if plan.reason == "asked for")
    one = FITS.training
    training = replace(
        one,
        groups=plan.groups,
        measured=replace(one.measured, step_seconds=slower * plan.predicted.step_seconds),
        job=Job(platform=catalog.platform, name="job"),
    )
    earlier = EarlierRun(profile=found, decision=replace(decision, plan=plan), training=training)
    return earlier, plan.predicted.limit


def test_receiving_is_corrected_where_the_data_hosts_are_not_the_limit():
    # All batches are made on data hosts with CPU to spare: the dnn host's receiving is the limit.
    aws = load_catalog("sagemaker")
    took = {"step_seconds": 1.0, "accelerator_step_seconds": 0.01, "trainer_cpu_seconds": 1.0}
    loading = {"loader_cpu_seconds": 30.0, "receive_cpu_seconds": 0.2}
    found = builders.starved(workload_sha256="a" * 64, **took, **loading)
    groups = builders.clusters("ml.g5.8xlarge", "ml.c7i.24xlarge", 8, workers_per_host=0)
    one, limit = run_of(found, groups, catalog=aws, slower=1.5)
    assert limit == "receive"
    corrected = calibrate([one] * 3, like=found, catalog=aws)
    assert corrected.efficiency == 1
    assert corrected.receive == pytest.approx(1.5, rel=0.01)


SHORT = replace(FITS.training, measured=replace(FITS.training.measured, steps=20))
UNEXPLAINED = Check(predicted_step_seconds=0.02, error=-0.6, explained=False)
OTHER_HOSTS = ProfiledHost(instance_type="local.c1", vcpus=4)


@pytest.mark.parametrize(
    "runs",
    [
        [FITS] * 2,
        [run(1.1, status="failed")] * 3,
        [run(1.1, workload_sha256="b" * 64)] * 3,
        [run(1.1, workload_sha256=None)] * 3,
        [run(1.1, measured=None)] * 3,
        [run(1.1, groups=builders.clusters("local.c1"))] * 3,
        [run(1.1, job=Job(platform="kubernetes", name="job"))] * 3,
        [run(1.1, events=(Event(when="now", what="data host lost", host="algo-2"),))] * 3,
        [dataclasses.replace(FITS, training=SHORT)] * 3,
        [dataclasses.replace(FITS, profile=replace(FITS.profile, check=UNEXPLAINED))] * 3,
        [dataclasses.replace(FITS, profile=replace(FITS.profile, host=OTHER_HOSTS))] * 3,
        # A step that no constant explains.
        [run(5.0)] * 3,
    ],
)
def test_few_runs_and_records_that_do_not_fit_say_nothing(runs):
    assert learned(*runs) == NOTHING


@settings(max_examples=examples(30), derandomize=True)
@given(st.lists(st.floats(min_value=0.05, max_value=20), max_size=8))
def test_a_correction_stays_within_its_bounds_whatever_was_measured(slower):
    found = learned(*(run(factor) for factor in slower))
    assert BOUNDS["efficiency"][0] <= found.efficiency <= BOUNDS["efficiency"][1]
    assert BOUNDS["receive"][0] <= found.receive <= BOUNDS["receive"][1]
    assert found.runs == 0 or found.runs >= 3
    if found.runs == 0:
        assert found == NOTHING


# Profiles of trainings that had a data host already.


def fed_profile():
    data = (ProfiledData(instance_type="local.c1", count=1, workers_per_host=1),)
    return replace(profile(step_seconds=0.050), data=data, check=None)


def test_todays_data_hosts_give_todays_step_whatever_was_learned():
    today = LOCAL.get("local.c1")
    data = (Hosts(instance=today, count=1, workers=1),)
    for calibration in (NOTHING, Calibration(runs=3, efficiency=0.8, receive=1.5)):
        work = measure(fed_profile(), today=today, processes=1, data=data, calibration=calibration)
        todays = ClusterShape(dnn=Hosts(instance=today, count=1, workers=1), data=data)
        assert estimate(work, todays).step_seconds == pytest.approx(0.050)


def test_a_run_that_came_as_predicted_changes_nothing_where_its_profile_had_data_hosts():
    found, catalog = fed_profile(), load_catalog("local", cores=4)
    groups = builders.clusters("local.c1", "local.c1", 3, workers_per_host=0)
    one, _ = run_of(found, groups, catalog=catalog)
    corrected = calibrate([one] * 3, like=found, catalog=catalog)
    assert corrected.efficiency == pytest.approx(1.0, abs=1e-6)
    assert corrected.runs == 3


def test_the_text_says_on_how_many_runs_it_was_calibrated():
    assert "Calibrated on 3 runs" in explain(decided(Calibration(runs=3)))
    assert "alibrated" not in explain(decided(None))
    assert "Not calibrated: fewer than 3 earlier runs fit" in explain(decided(NOTHING))


def test_whole_runs_are_read_and_the_rest_is_left(tmp_path):
    kinds = ("profile", "decision", "training")
    whole = {name: getattr(sample_records, name)() for name in kinds}
    for run in ("one", "two", "three"):
        for name, record in whole.items():
            known = replace(record, workload_sha256="a" * 64)
            write_json(tmp_path / run / f"{name}.json", known)
    write_json(tmp_path / "half" / "profile.json", whole["profile"])
    (tmp_path / "torn").mkdir()
    for name in whole:
        (tmp_path / "torn" / f"{name}.json").write_text("{")
    (tmp_path / "notes.txt").write_text("not a run")
    assert calibration_of(tmp_path, like=sample_records.profile(), catalog=LOCAL).runs == 3
    with pytest.raises(UsageError, match="no runs in"):
        calibration_of(tmp_path / "runs", like=sample_records.profile(), catalog=LOCAL)
