"""The uploaded SageMaker pipeline is run: each step's container from its literal arguments."""

import json

import pytest

from stoker.records import Decision, Evaluation, Training
from support.aws_answers import has_object
from support.sagemaker_containers import job_arn
from support.sagemaker_execution import account
from support.sagemaker_project import BATCH_SIZE, BUCKET, NUM_SAMPLES, OUT, TRAIN, Project, statuses

pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def project(tmp_path, aws_server):
    with account(tmp_path / "jobs", aws_server) as found:
        yield Project(tmp_path / "project", found)


def test_a_run_profiles_decides_trains_evaluates_and_registers(project):
    project.upload(script=TRAIN)
    # A profile takes some 50 batches, on a busy machine twice as many.
    run = project.execution(epochs="16", lr="1e-05").run()
    steps = ("Profile", "Decide", "Train", "Evaluate", "Gate", "Register")
    assert statuses(run) == dict.fromkeys(steps, "Succeeded"), project.told(run)
    assert run.status == "Succeeded"
    decision = project.record(run, "decision/decision.json", Decision)
    training = project.record(run, "training/training.json", Training)
    evaluation = project.record(run, "evaluation/evaluation.json", Evaluation)
    assert training.status == "succeeded"
    assert training.groups == decision.plan.groups
    assert training.measured.steps == 16 * NUM_SAMPLES // BATCH_SIZE
    assert training.hyperparameters == {"epochs": 16, "lr": 1e-05}
    assert evaluation.passed
    (package,) = project.packages()
    described = project.aws.call(
        "sagemaker", "DescribeModelPackage", ModelPackageName=package["ModelPackageArn"]
    )
    metadata = described["CustomerMetadataProperties"]
    assert (
        metadata["stoker-training-job"] == training.lineage["job_id"] == job_arn(f"mnist--{run.id}")
    )
    # The double reports no billed seconds: the leader's count stands.
    assert [each.group for each in training.spending] == [g.name for g in training.groups]
    assert training.spent_usd
    assert decision.plan.action in str(metadata["stoker-decided"])
    assert f"mnist--{run.id}" in json.dumps(described["InferenceSpecification"])
    # What the pipeline relies on, and AWS's documentation does not say: docs/sagemaker.md does.
    assert run.undocumented == {
        "a condition on the boolean of a JSON file",
        "a value of a JSON file in a step of type RegisterModel",
        "a step after another's outcome Any",
    }


def test_a_failed_training_has_its_report_and_ends_the_run_with_its_words(project):
    project.upload()
    project.aws.write_object(f"s3://{BUCKET}/data/broken", b"yes")
    run = project.execution(epochs="2", reuse_profile=project.profile()).run()
    good = ("Profile", "Decide", "Evaluate", "Gate")
    expected = dict.fromkeys(good, "Succeeded") | {"Train": "Failed", "Refuse": "Failed"}
    assert statuses(run) == expected, project.told(run)
    assert run.status == "Failed"
    # No retry: it is the script's own fault.
    assert run.steps["Train"].waits == []
    assert "sample 7 is broken" in project.log(run, "Train")
    training = project.record(run, "training/training.json", Training)
    assert training.status == "failed"
    assert has_object(project.aws, f"{OUT}/pipelines/mnist/{run.id}/evaluation/report.html")
    assert "the training failed" in run.reason, run.reason
    assert project.packages() == []


def test_a_second_run_uses_the_profile_that_the_first_has_kept(project):
    project.upload(script=TRAIN, cache_days=7)
    # What follows the profile of the first run is of no interest here.
    project.account.faults["Decide"] = ["not retried"]
    first = project.execution().run()
    assert statuses(first) == {"Profile": "Succeeded", "Decide": "Failed"}, project.told(first)
    assert "nothing is run" not in project.log(first, "Profile")
    second = project.execution(epochs="1", lr="0.5").run()
    tail = ("Profile", "Decide", "Train", "Evaluate", "Gate", "Register")
    assert statuses(second) == dict.fromkeys(tail, "Succeeded"), project.told(second)
    assert "nothing is run" in project.log(second, "Profile")
