"""A profile is taken for another machine, never surer than it was; or there are only numbers."""

import shlex

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.cli.main import run
from stoker.decide import TakeAs
from stoker.decide.model import StepWork
from stoker.decide.ranking import error_band
from stoker.decide.scaled_profile import taken_as
from stoker.decide.step_work import measure, today_of
from stoker.errors import UsageError
from stoker.records import (
    Decision,
    Fix,
    ProfiledData,
    ProfiledHost,
    ProfileState,
    read_json,
    write_json,
)
from support import builders, decisions
from support.property_tests import examples

AWS = load_catalog("sagemaker")
LOCAL = load_catalog("local", cores=3)


def _workstation(*, cpu_model=None, **changes):
    took = {"step_seconds": 0.110, "accelerator_step_seconds": 0.050, "trainer_cpu_seconds": 0.090}
    loading = {"loader_cpu_seconds": 0.120, "loader_wall_seconds": 0.120, "num_workers": 2}
    batch = {"batch_bytes": 600_000.0, "receive_cpu_seconds": 0.001, "handover_seconds": 0.002}
    host = ProfiledHost(instance_type="local.c2", vcpus=2, accelerators=0, cpu_model=cpu_model)
    return builders.profile(host=host, is_explained=True, **took | loading | batch | changes)


def _decide(profile, take_as, **more):
    given = {"catalog": decisions.FEW, "objective": "time", **more}
    return decisions.decided(profile, take_as=take_as, **given)


def _keep(decision):
    return next(p.predicted for p in decision.plans if p.action == "keep" and p.predicted)


def test_cpu_seconds_become_fewer_as_a_vcpu_there_is_faster_and_waiting_takes_as_long():
    waits = _workstation(loader_cpu_seconds=0.010, loader_wall_seconds=0.410, step_seconds=0.205)
    slow, fast, waiting = (
        _keep(_decide(profile, TakeAs(instance_type="ml.c5.large", cpu_speed=speed)))
        for profile, speed in ((_workstation(), 1.0), (_workstation(), 2.0), (waits, 10.0))
    )
    assert slow.limit == "cpu"
    assert slow.step_seconds == pytest.approx(0.110, rel=0.01)
    assert fast.step_seconds == pytest.approx(slow.step_seconds / 2)
    assert waiting.step_seconds == pytest.approx((0.4 + 0.001) / 2)


def test_unknown_cpu_is_taken_to_be_as_fast_and_is_less_sure():
    unknown, known = (
        _decide(_workstation(cpu_model=model), TakeAs(instance_type="ml.c7i.xlarge"))
        for model in ("i486", "AMD EPYC 7R32")
    )
    assert unknown.taken_elsewhere.cpu_speed_source == "assumed"
    assert unknown.taken_elsewhere.cpu_speed == 1.0
    assert any("--cpu-speed" in warning for warning in unknown.warnings)
    assert error_band(_keep(unknown)) > error_band(_keep(known))
    # The kernel's spelling of the CPU of m6a and c6a differs by a word from the catalog's.
    assert known.taken_elsewhere.cpu_speed_source == "cpu_model"
    assert 1.1 < known.taken_elsewhere.cpu_speed < 1.5


def test_accelerator_that_nobody_measured_forbids_spending_and_says_what_loading_takes():
    found = _decide(_workstation(), TakeAs(instance_type="ml.g5.2xlarge"))
    assert (found.bottleneck, found.action) == ("unexplained", "keep")
    assert [plan.action for plan in found.plans] == ["keep"]
    advice = next(each.text for each in found.advice if each.id == "accelerator-step")
    assert "62.9 ms per batch on 1 x ml.g5.2xlarge, and 21.0 ms with 6 workers per host" in advice
    assert "--accelerator-step-seconds" in advice


def test_accelerator_step_that_is_given_makes_it_a_decision():
    given_step = TakeAs(instance_type="ml.g5.2xlarge", accelerator_step_seconds=0.012)
    found = _decide(_workstation(), given_step)
    assert found.taken_elsewhere.accelerator_step_source == "given"
    assert (found.bottleneck, found.action) == ("workers", "tune")
    # What the training took of the workstation's CPU was the training itself.
    assert any("with an accelerator was not measured" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("NVIDIA A10G", "profile"), ("NVIDIA A10", "unknown"), ("Tesla T4", "unknown")],
)
def test_accelerator_step_is_the_profiles_on_the_same_model_alone(model, expected):
    profile = _workstation(trainer_cpu_seconds=0.01)
    host = msgspec.structs.replace(profile.host, accelerators=1, accelerator_model=model)
    profile = msgspec.structs.replace(profile, host=host)
    found = _decide(profile, TakeAs(instance_type="ml.g5.2xlarge")).taken_elsewhere
    assert found.accelerator_step_source == expected


def test_states_of_the_profiled_host_say_nothing_there():
    profile = msgspec.structs.replace(
        _workstation(),
        states=(ProfileState(id="throttled", text="", share=0.5),),
        fixes=(Fix(id="throttled", text="raise it"), Fix(id="uint8", text="send uint8")),
    )
    found = _decide(profile, TakeAs(instance_type="ml.c5.large"))
    assert {"throttled"}.isdisjoint(each.id for each in found.advice)
    assert "uint8" in {each.id for each in found.advice}


def test_a_type_without_accelerators_is_not_said_to_have_one():
    host = ProfiledHost(instance_type="local.c2", vcpus=2, accelerators=1)
    profile = msgspec.structs.replace(_workstation(), host=host)
    decision = _decide(profile, TakeAs(instance_type="ml.c5.large"))
    assert "a step on ml.c5.large that never waits for data" in decision.plan.reason
    assert "accelerators wait" not in decision.advice[0].text


PROFILES = st.builds(
    _workstation,
    cpu_model=st.sampled_from([None, "AMD EPYC 7R32", "a CPU"]),
    step_seconds=st.floats(0.01, 1.0),
    accelerator_step_seconds=st.none() | st.floats(0.001, 1.0),
    loader_cpu_seconds=st.none() | st.floats(0.001, 2.0),
    loader_wall_seconds=st.none() | st.floats(0.001, 2.0),
    trainer_cpu_seconds=st.none() | st.floats(0.001, 1.0),
    num_workers=st.sampled_from([0, 1, 2, 4]),
    others_vcpus=st.floats(0.0, 1.0),
    cpu_speed_spread=st.floats(0.0, 0.3),
)
MANY = settings(max_examples=examples(40))


def _measured(profile):
    return measure(profile, today=today_of(profile, LOCAL.get("local.c2")), processes=1)


@MANY
@given(profile=PROFILES)
def test_the_same_type_at_the_same_speed_changes_nothing_but_the_band(profile):
    work = _measured(profile)
    same = TakeAs(instance_type="local.c2")
    taken, how = taken_as(
        work, profile=profile, target=work.reference, processes=1, given=same, catalog=LOCAL
    )
    assert how.cpu_speed == 1.0
    for name in StepWork.__dataclass_fields__.keys() - {"doubts", "step_seconds", "parts_seconds"}:
        here, there = getattr(work, name), getattr(taken, name)
        assert there == (pytest.approx(here) if isinstance(here, float) else here), name
    # All plans rest on the terms above.
    here, there = (_decide(profile, asked, catalog=LOCAL) for asked in (None, same))
    steps = {plan.groups: plan.predicted for plan in here.plans if plan.action == "heterogeneous"}
    for plan in there.plans:
        if plan.groups in steps and plan.predicted is not None:
            before = steps[plan.groups]
            assert plan.predicted.step_seconds == pytest.approx(before.step_seconds)
            assert error_band(plan.predicted) >= error_band(before) - 1e-9


@MANY
@given(
    profile=PROFILES,
    name=st.sampled_from(["ml.g5.2xlarge", "ml.c5.large", "ml.c7i.24xlarge", "ml.p4d.24xlarge"]),
    speed=st.none() | st.floats(0.3, 3.0),
    accelerator=st.none() | st.floats(0.001, 0.5),
)
def test_no_prediction_is_surer_than_on_the_profiled_host(profile, name, speed, accelerator):
    work = _measured(profile)
    asked = TakeAs(instance_type=name, cpu_speed=speed, accelerator_step_seconds=accelerator)
    target = AWS.get(name)
    taken, _ = taken_as(work, profile=profile, target=target, processes=1, given=asked, catalog=AWS)
    assert set(work.doubts) < set(taken.doubts)
    assert not work.unexplained or taken.unexplained == work.unexplained


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "profile.json", _workstation())
    return tmp_path


def test_error_for_a_workstations_profile_names_a_command_that_works_as_typed(folder, capsys):
    (folder / "prices.csv").write_text("instance_type,usd_per_hour\nml.c5.large,0.05\n")
    options = ["--prices", "prices.csv", "--set", "constraints.max_data_hosts=2"]
    assert run(["decide", "profile.json", "--platform", "sagemaker", *options]) == 2
    command = shlex.split(capsys.readouterr().err.split("band: ")[1])
    assert command[:2] == ["stoker", "decide"]
    assert {*options} <= {*command}
    assert run(command[1:]) == 0
    assert "Profile taken elsewhere" in capsys.readouterr().out
    decision = read_json(folder / "decision.json", Decision)
    assert decision.taken_elsewhere.profiled_on == "local.c2"


WITH_DATA_HOSTS = msgspec.structs.replace(
    _workstation(), data=(ProfiledData(instance_type="local.c1", count=1),)
)
WITHOUT_A_STEP = builders.profile("local.c2", cpu_utilization=0.9)


@pytest.mark.parametrize(
    "profile",
    [
        WITHOUT_A_STEP,
        WITH_DATA_HOSTS,
    ],
)
def test_error_for_what_cannot_be_taken_elsewhere_does_not_say_so(profile, folder, capsys):
    write_json(folder / "profile.json", profile)
    assert run(["decide", "profile.json", "--platform", "sagemaker"]) == 2
    assert "--as" not in capsys.readouterr().err


def test_a_profile_of_a_type_without_facts_is_no_error(folder, capsys):
    # It was paid, and a price file gives the catalog a type that it lacks.
    write_json(folder / "profile.json", builders.profile("ml.new.large", vcpus=2, step_seconds=0.1))
    assert run(["decide", "profile.json", "--platform", "sagemaker"]) == 0
    said = capsys.readouterr().out
    assert "--as" not in said
    assert "constraints.prices_file or --prices FILE" in " ".join(said.split())
    assert read_json(folder / "decision.json", Decision).kind == "unknown"


@pytest.mark.parametrize(
    ("profile", "words"),
    [(WITH_DATA_HOSTS, "a profile with data hosts"), (WITHOUT_A_STEP, "nothing to scale")],
)
def test_profile_with_data_hosts_or_without_a_step_cannot_be_taken_elsewhere(profile, words):
    with pytest.raises(UsageError, match=words):
        _decide(profile, TakeAs(instance_type="ml.c5.large"))


P4D = ["--instance-type", "ml.p4d.24xlarge"]
STEP = ["--step-seconds", "0.192"]
ACCELERATOR = ["--accelerator-step-seconds", "0.064"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--as", "ml.g5.2xlarge"], "--as needs a profile"),
        (["profile.json", "--cpu-speed", "2"], "add --as"),
        (["profile.json", "--as", "ml.g5.2xlarge", "--cpu-speed", "0"], "not between 0.01 and 100"),
        (["profile.json", "--as", "ml.g5.2xlrge"], "did you mean"),
        (["profile.json", "--as", "ml.g5.2xlarge", "--calibrate", "x"], "cannot be used with --as"),
        (["profile.json", *STEP], "profile.json cannot be used with --step-seconds"),
        ([], "no profile to decide on"),
        (P4D, "no profile, and no --step-seconds either"),
        (STEP, "no profile, and no --instance-type either"),
        (["--instance-type", "ml.p4d.24xlarg", *STEP], "no instance type 'ml.p4d.24xlarg'"),
        ([*P4D, "--step-seconds", "-1"], "-1 is not a number above 0"),
        ([*P4D, "--step-seconds", "nan"], "nan is not a number above 0"),
        ([*P4D, "--step-seconds", "1e9"], "out of range"),
        ([*P4D, *STEP, "--accelerator-step-seconds", "0"], "0 is not a number above 0"),
        ([*P4D, *STEP, "--accelerator-step-seconds", "0.3"], "cannot be longer"),
        ([*P4D, *STEP, "--vcpus-needed", "100"], "needs the accelerator's speed"),
        ([*P4D, *STEP, *ACCELERATOR, "--vcpus-needed", "0"], "0 is not a number above 0"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_options_that_contradict_and_impossible_numbers_are_refused(options, words, capsys):
    assert run(["decide", *options]) == 2
    assert words in capsys.readouterr().err


def _decided(folder, *options):
    assert run(["decide", *options]) == 0
    return read_json(folder / "decision.json", Decision)


@pytest.mark.parametrize(
    ("options", "bottleneck", "action", "advice"),
    [
        (STEP, "unexplained", "keep", "profile-again"),
        ([*STEP, *ACCELERATOR], "cpu", "heterogeneous", "profile"),
        ([*STEP, *ACCELERATOR, "--vcpus-needed", "250"], "cpu", "heterogeneous", "profile"),
        # 10 vCPUs feed the accelerator's 64 ms, and today's 96 vCPUs are said to take 192 ms.
        ([*STEP, *ACCELERATOR, "--vcpus-needed", "10"], "unexplained", "keep", "profile-again"),
    ],
)
def test_step_and_accelerator_tell_who_waits(options, bottleneck, action, advice, folder):
    decision = _decided(folder, *P4D, *options)
    assert (decision.bottleneck, decision.action) == (bottleneck, action)
    assert advice in [each.id for each in decision.advice]


def test_a_workload_says_which_hosts_train_today(folder):
    (folder / "w.yaml").write_text(
        "name: w\ncommand: [python, train.py]\nplatform: sagemaker\nimage: an.image/w:1\n"
        "cluster: {dnn: {instance_type: ml.g5.12xlarge, count: 2, processes_per_host: 4}}\n"
        "training: {steps: 1000}\n"
    )
    made = _decided(folder, "--workload", "w.yaml", *STEP, *ACCELERATOR)
    keep = next(plan for plan in made.plans if plan.action == "keep")
    (group,) = keep.groups
    assert (group.instance_type, group.count, group.processes_per_host) == ("ml.g5.12xlarge", 2, 4)
    assert keep.predicted.total_hours == pytest.approx(1000 * 0.192 / 3600)
    other = _decided(folder, "--workload", "w.yaml", "--instance-type", "ml.g5.24xlarge", *STEP)
    assert other.plan.groups[0].instance_type == "ml.g5.24xlarge"


def test_prices_of_an_own_cluster_join_the_catalog_and_old_ones_are_said_to_be(folder):
    (folder / "own.csv").write_text(
        "instance_type,vcpus,gpus,coremark_per_vcpu,network_gbps,usd_per_hour,priced_on\n"
        "big.box,64,0,20000,25,0.2,2020-01-01\n"
    )
    decision = _decided(folder, *P4D, *STEP, *ACCELERATOR, "--prices", "own.csv")
    assert [group.instance_type for group in decision.plan.groups][1:] == ["ml.big.box"]
    assert decision.prices.stale
    assert any("older than 90 days" in text for text in decision.warnings)
