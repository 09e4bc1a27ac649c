"""A profile is taken for another machine, never surer than it was; or there are only numbers."""

import pytest

from stoker.cli.main import run
from stoker.decide import TakeAs
from stoker.decide.price import error_band
from stoker.records import (
    Decision,
    ProfiledHost,
    read_json,
    write_json,
)
from support import builders, decisions


def _workstation(*, kind="local.c2", **changes):
    took = {"step_seconds": 0.110, "accelerator_step_seconds": 0.050, "trainer_cpu_seconds": 0.090}
    loading = {"loader_cpu_seconds": 0.120, "loader_wall_seconds": 0.120, "num_workers": 2}
    batch = {"batch_bytes": 600_000.0}
    host = ProfiledHost(instance_type=kind, vcpus=2, accelerators=0)
    return builders.profile(host=host, is_explained=True, **took | loading | batch | changes)


def _decide(profile, take_as, **more):
    given = {"catalog": decisions.FEW, "objective": "time", **more}
    return decisions.decided(profile, take_as=take_as, **given)


def _keep(decision):
    return next(p.predicted for p in decision.plans if p.action == "keep" and p.predicted)


def test_cpu_seconds_become_fewer_as_a_vcpu_there_is_faster_and_waiting_takes_as_long():
    waits = {"loader_cpu_seconds": 0.010, "loader_wall_seconds": 0.410, "step_seconds": 0.205}
    busy, waiting = (
        _decide(_workstation(kind="ml.m5.large", **terms), TakeAs(instance_type="ml.c7i.large"))
        for terms in ({}, waits)
    )
    speed = busy.taken_elsewhere.cpu_speed
    assert speed > 1.01
    assert _keep(busy).limit == "cpu"
    assert _keep(busy).step_seconds == pytest.approx(0.110 / speed, rel=0.01)
    assert _keep(waiting).step_seconds == pytest.approx((0.4 + 0.010 / speed) / 2)


def test_unknown_cpu_is_taken_to_be_as_fast_and_is_less_sure():
    unknown, known = (
        _decide(_workstation(kind=kind), TakeAs(instance_type="ml.c7i.xlarge"))
        for kind in ("local.c2", "ml.m5.large")
    )
    assert unknown.taken_elsewhere.cpu_speed_source == "assumed"
    assert unknown.taken_elsewhere.cpu_speed == 1.0
    assert error_band(_keep(unknown)) > error_band(_keep(known))
    assert known.taken_elsewhere.cpu_speed_source == "catalog"


def test_accelerator_that_nobody_measured_forbids_spending_and_says_what_loading_takes():
    found = _decide(_workstation(), TakeAs(instance_type="ml.g5.2xlarge"))
    assert (found.bottleneck, found.action) == ("unexplained", "keep")
    assert [plan.action for plan in found.plans] == ["keep"]
    advice = next(each.text for each in found.advice if each.id == "accelerator-step")
    assert "62.9 ms per batch on 1 x ml.g5.2xlarge" in advice
    assert "--accelerator-step-seconds" in advice


def test_accelerator_step_that_is_given_makes_it_a_decision():
    given_step = TakeAs(instance_type="ml.g5.2xlarge", accelerator_step_seconds=0.012)
    found = _decide(_workstation(), given_step)
    assert found.taken_elsewhere.accelerator_step_source == "given"
    assert (found.bottleneck, found.action) == ("workers", "tune")
    # What the training took of the workstation's CPU was the training itself.
    assert any("with an accelerator was not measured" in text for text in found.warnings)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "profile.json", _workstation())
    return tmp_path


def test_a_workstations_profile_is_for_a_cloud_only_where_it_is_scaled(folder, capsys):
    words = ["decide", "profile.json", "--platform", "sagemaker"]
    assert run(words) == 2
    assert "scale the profile to a type there: --as T" in capsys.readouterr().err
    assert run([*words, "--as", "ml.g5.xlarge"]) == 0
    decision = read_json(folder / "decision.json", Decision)
    assert decision.taken_elsewhere.profiled_on == "local.c2"


P4D = ["--instance-type", "ml.p4d.24xlarge"]
STEP = ["--step-seconds", "0.192"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--as", "ml.g5.2xlarge"], "no profile to decide on"),
        (["profile.json", "--as", "ml.g5.2xlrge"], "did you mean"),
        ([], "no profile to decide on"),
        ([*P4D, "--step-seconds", "-1"], "should be greater"),
        ([*P4D, *STEP, "--accelerator-step-seconds", "0.3"], "at most as long as today's"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_options_that_contradict_and_impossible_numbers_are_refused(options, words, capsys):
    assert run(["decide", *options]) == 2
    assert words in capsys.readouterr().err
