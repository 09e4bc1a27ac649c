"""Runs of the uploaded pipeline remember the last one: its plan, and what it was made of."""

import json

import pytest

from stoker.records import Comparison, Decision, Training
from support.moto_server import ACCOUNT, REGION
from support.sagemaker_execution import account
from support.sagemaker_project import BUCKET, OUT, Project, statuses

pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.timeout(600)]

IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/stoker@sha256:{'a' * 64}"
TRAINED = ("DecideAgain", "TrainAgain", "EvaluateAgain", "GateAgain", "RegisterAgain")
SKIPPED = {"Compare": "Succeeded", "HasChanged": "Succeeded"}


@pytest.fixture
def project(tmp_path, aws_server):
    with account(tmp_path / "jobs", aws_server) as found:
        yield Project(tmp_path / "project", found)


def upload(project, **changes):
    project.upload(skip_unchanged=True, image=IMAGE, **changes)


def run_of(project, **parameters):
    return project.execution(epochs="2", reuse_profile=project.profile(), **parameters).run()


def comparison(project, run):
    return project.record(run, "comparison/comparison.json", Comparison)


def remembered(project):
    listed = project.aws.object_pages(f"{OUT}/stoker/memory/mnist/")
    keys = [item["Key"].rpartition("/")[2] for page in listed for item in page["Contents"]]
    return [key for key in keys if key != "README.txt"]


def test_a_run_without_a_change_trains_nothing_and_one_with_other_data_does(project):
    upload(project)
    first = run_of(project)
    assert statuses(first) == {
        **SKIPPED,
        "NeedsProfile": "Succeeded",
        **dict.fromkeys(TRAINED, "Succeeded"),
    }, project.told(first)
    assert "no run of this pipeline is remembered yet" in project.log(first, "Compare")
    assert project.record(first, "decision/decision.json", Decision).previous is None
    (file,) = remembered(project)
    assert file.endswith(f"--mnist--{first.id}.json")
    jobs = set(project.account.jobs)

    second = run_of(project)
    assert statuses(second) == SKIPPED
    assert second.status == "Succeeded"
    assert set(project.account.jobs) == jobs
    assert f"nothing changed since mnist--{first.id}" in project.log(second, "Compare")
    assert comparison(project, second).since == f"mnist--{first.id}"

    project.aws.write_object(f"s3://{BUCKET}/data/numbers", b"1 2 3 4")
    third = run_of(project)
    assert third.status == "Succeeded", project.told(third)
    assert "TrainAgain" in statuses(third)
    assert "channel.training" in comparison(project, third).words
    decision = project.record(third, "decision/decision.json", Decision)
    assert decision.previous.run == f"mnist--{first.id}"
    assert not decision.previous.is_changed
    assert len(remembered(project)) == 2


def loading(cpu_seconds, accelerator_seconds):
    """Returns the terms of a step whose loading takes these CPU-seconds of four vCPUs."""
    step = cpu_seconds / 3.7
    return {
        "step_seconds": step,
        "wait_seconds": step - accelerator_seconds,
        "accelerator_step_seconds": accelerator_seconds,
        "loader_cpu_seconds": cpu_seconds,
        "loader_wall_seconds": 1.04 * cpu_seconds,
    }


def hosts_of(groups):
    return [(group.role, group.instance_type, group.count) for group in groups]


# Unit tests of test_pipeline_memory hold a plan; the test above has a run decide with the last one.
@pytest.mark.soak
def test_a_plan_is_held_against_the_noise_of_a_profile_and_trained_on(project):
    project.upload()
    one, other = (
        project.profile("one", **loading(0.5, 0.1)),
        project.profile("b", **loading(0.57, 0.08)),
    )
    first = project.execution(epochs="2", reuse_profile=one).run()
    assert first.status == "Succeeded", project.told(first)
    # The script reads no batch, so that its data hosts would be forgotten as useless.
    (file,) = remembered(project)
    uri = f"{OUT}/stoker/memory/mnist/{file}"
    document = json.loads(project.aws.read_object(uri))
    document["training"]["spending"] = []
    project.aws.write_object(uri, json.dumps(document).encode())
    second = project.execution(epochs="2", reuse_profile=other).run()
    assert second.status == "Succeeded", project.told(second)
    before = project.record(first, "decision/decision.json", Decision)
    held = project.record(second, "decision/decision.json", Decision)
    assert held.previous.is_held
    assert 0 < held.previous.gain < held.previous.margin
    assert hosts_of(held.plan.groups) == hosts_of(before.plan.groups)
    # The noisy profile alone has another plan.
    assert hosts_of(held.plans[1].groups) == [
        ("dnn", "ml.c5.xlarge", 1),
        ("data", "ml.c7i.xlarge", 1),
    ]
    training = project.record(second, "training/training.json", Training)
    assert hosts_of(training.groups) == hosts_of(before.plan.groups)
    assert f"as in mnist--{first.id}" in project.log(second, "DecideAgain")
    report = project.aws.read_object(f"{OUT}/pipelines/mnist/{second.id}/evaluation/report.html")
    assert f"mnist--{first.id}" in report.decode()


@pytest.mark.soak
def test_a_run_that_passed_its_gates_and_failed_later_is_no_reason_to_skip(project):
    upload(project)
    project.account.faults["RegisterAgain"] = ["AccessDenied: of the test"]
    first = run_of(project)
    assert first.status == "Failed", project.told(first)
    assert len(remembered(project)) == 1
    second = run_of(project)
    assert second.status == "Succeeded", project.told(second)
    assert "has passed its gates, and is Failed" in comparison(project, second).words
    assert statuses(run_of(project)) == SKIPPED


@pytest.mark.soak
def test_a_model_below_its_gate_is_neither_remembered_nor_a_reason_to_skip(project):
    upload(project, gate=[{"metric": "accuracy", "min": 0.99}])
    first = run_of(project)
    assert first.status == "Failed"
    assert remembered(project) == []
    assert comparison(project, run_of(project)).has_changed


@pytest.mark.soak
def test_a_broken_memory_trains_and_tells_it(project):
    upload(project)
    run_of(project)
    broken = f"{OUT}/stoker/memory/mnist/99991231T000000Z--mnist--x.json"
    project.aws.write_object(broken, b'{"schema": "stoker.memory/v9"}')
    run = run_of(project)
    assert run.status == "Succeeded", project.told(run)
    assert "cannot be read" in comparison(project, run).words
    decision = project.record(run, "decision/decision.json", Decision)
    assert decision.previous is None
    assert "decided without the last run's plan" in " ".join(decision.warnings)


@pytest.mark.soak
def test_another_parameter_trains_and_so_does_a_run_that_asks_for_it(project):
    upload(project)
    run_of(project)
    other = project.execution(epochs="3", reuse_profile=project.profile()).run()
    assert "workload.training" in comparison(project, other).words
    forced = run_of(project, skip_unchanged="false")
    assert "as this run asks for it" in comparison(project, forced).words
    assert forced.status == "Succeeded", project.told(forced)
    # A forced run is compared with, too.
    assert statuses(run_of(project)) == SKIPPED


@pytest.mark.soak
def test_changed_code_trains(project):
    upload(project)
    run_of(project)
    (project.folder / "code" / "model.py").write_text("SIZE = 3\n")
    upload(project)
    run = run_of(project)
    assert "code" in comparison(project, run).words
    assert "TrainAgain" in statuses(run)
