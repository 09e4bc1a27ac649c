"""The uploaded SageMaker pipeline is run: each step's container from its literal arguments."""

import csv
import json

import msgspec
import pytest

from stoker.platforms.sagemaker.registry import mark_model
from stoker.records import Decision, Evaluation, Profile, Training
from support.sagemaker_containers import job_arn
from support.sagemaker_execution import DefinitionError, Execution, account
from support.sagemaker_project import BATCH_SIZE, BUCKET, NUM_SAMPLES, OUT, TRAIN, Project, statuses
from support.unchanged import PLAIN, STREAM

pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.timeout(600)]


@pytest.fixture
def project(tmp_path, aws_server):
    with account(tmp_path / "jobs", aws_server) as found:
        yield Project(tmp_path / "project", found)


def test_a_run_profiles_decides_trains_evaluates_and_registers(project):
    project.upload(script=TRAIN)
    project.account.faults["Profile"] = ["SageMaker.CAPACITY_ERROR"]
    run = project.execution(epochs="2", lr="1e-05").run()
    steps = ("NeedsProfile", "Profile", "Decide", "Train", "Evaluate", "Gate", "Register")
    assert statuses(run) == dict.fromkeys(steps, "Succeeded"), project.told(run)
    assert run.status == "Succeeded"
    decision = project.record(run, "decision/decision.json", Decision)
    training = project.record(run, "training/training.json", Training)
    evaluation = project.record(run, "evaluation/evaluation.json", Evaluation)
    assert run.steps["Profile"].waits == [300]
    assert training.status == "succeeded"
    assert training.groups == decision.plan.groups
    assert training.measured.steps == 2 * NUM_SAMPLES // BATCH_SIZE
    assert training.hyperparameters == {"epochs": 2, "lr": 1e-05}
    assert evaluation.passed
    (package,) = project.packages()
    described = project.aws.call(
        "sagemaker", "DescribeModelPackage", ModelPackageName=package["ModelPackageArn"]
    )
    metadata = described["CustomerMetadataProperties"]
    assert metadata["stoker-training-job"] == training.lineage.job_id == job_arn(f"mnist--{run.id}")
    version = training.lineage.inputs["training"].version
    assert version
    assert metadata["stoker-packages"] == training.lineage.facts()["packages"]
    assert metadata["stoker-profile-sha256"] == decision.profile_sha256
    # The double reports no billed seconds: the leader's count stands.
    assert [each.group for each in training.spending] == [g.name for g in training.groups]
    assert training.spent_usd
    assert metadata["stoker-input-training"] == f"s3://{BUCKET}/data/ {version}"
    assert decision.plan.action in str(metadata["stoker-decided"])
    assert f"mnist--{run.id}" in json.dumps(described["InferenceSpecification"])
    # What the pipeline relies on, and AWS's documentation does not say: docs/sagemaker.md does.
    assert run.undocumented == {
        "a condition on the boolean of a JSON file",
        "a value of a JSON file in a step of type RegisterModel",
        "a step after another's outcome Any",
    }


def test_the_list_of_bad_samples_comes_back_with_the_runs_other_files(project):
    script = TRAIN.replace("import json, os, sys", "import csv, json, os, sys")
    strikes = "        if index == 7:\n            raise ValueError('damaged 7')\n"
    strikes += "        if index == 40:\n            os._exit(3)\n"
    script = script.replace("        return torch.full", f"{strikes}        return torch.full")
    project.upload(script=script, feed={"on_error": "skip", "max_errors": 9})
    run = project.execution(epochs="2", reuse_profile=project.profile()).run()
    training = project.record(run, "training/training.json", Training)
    assert (training.status, training.bad_samples) == ("succeeded", 4), project.told(run)
    # No batch is left out: all ranks would have the same number of steps.
    assert training.measured.steps == 2 * NUM_SAMPLES // BATCH_SIZE
    prefix = f"{OUT}/pipelines/mnist/{run.id}"
    listed = project.aws.read_object(f"{prefix}/training/training-bad_samples.csv").decode()
    rows = [
        (row["epoch"], row["index"], row["error"]) for row in csv.DictReader(listed.split("\n"))
    ]
    first = [("0", "7", "ValueError"), ("0", "40", "ProcessDiedError")]
    assert rows == first + [("1", *row[1:]) for row in first]
    report = project.aws.read_object(f"{prefix}/evaluation/report.html").decode()
    assert "damaged 7" in report


# That a stream is fed so: e2e/test_unchanged_scripts.
@pytest.mark.parametrize(
    "script",
    [PLAIN, pytest.param(STREAM, marks=pytest.mark.soak)],
    ids=lambda script: script.name,
)
def test_an_unchanged_script_is_fed_and_passes(project, script):
    script.write(project.folder / "code", name="train.py")
    project.upload(
        script=(project.folder / "code" / "train.py").read_text(),
        command=["python", "train.py", str(script.epochs)],
        hyperparameters={},
        training={"epochs": script.epochs, "samples_per_epoch": 384, "global_batch_size": 16},
        gate=[],
    )
    run = project.execution().run()
    assert run.status == "Succeeded", (run.reason, statuses(run))
    kept = project.aws.read_object(f"{OUT}/stoker/profiles/mnist/{run.id}/profile.json")
    profile = msgspec.json.decode(kept, type=Profile)
    training = project.record(run, "training/training.json", Training)
    evaluation = project.record(run, "evaluation/evaluation.json", Evaluation)
    assert (profile.loader.reach, profile.loader.shards) == ("torch", script.shards)
    assert training.steps == script.steps
    assert training.measured
    assert evaluation.passed
    assert evaluation.reason == ""


def test_a_failed_training_has_its_report_and_ends_the_run_with_its_words(project):
    project.upload()
    project.aws.write_object(f"s3://{BUCKET}/data/broken", b"yes")
    run = project.execution(epochs="2", reuse_profile=project.profile()).run()
    good = ("NeedsProfile", "DecideAgain", "EvaluateAgain", "GateAgain")
    expected = dict.fromkeys(good, "Succeeded") | {"TrainAgain": "Failed", "RefuseAgain": "Failed"}
    assert statuses(run) == expected, project.told(run)
    assert run.status == "Failed"
    # No retry: it is the script's own fault.
    assert run.steps["TrainAgain"].waits == []
    assert "sample 7 is broken" in project.log(run, "TrainAgain")
    training = project.record(run, "training/training.json", Training)
    assert training.status == "failed"
    assert project.aws.has_object(f"{OUT}/pipelines/mnist/{run.id}/evaluation/report.html")
    assert "the training failed" in run.reason, run.reason
    assert project.packages() == []


def test_a_training_that_no_data_host_could_feed_ends_the_run_with_what_it_cost(project):
    held = "    held = __import__('socket').socket()\n    def __init__(self):\n"
    held += "        self.held = self.held"
    script = TRAIN.replace(
        "from stoker import DataLoader", "from torch.utils.data import DataLoader"
    )
    script = script.replace("class Numbers(Dataset):", f"class Numbers(Dataset):\n{held}")
    project.upload(script=script)
    run = project.execution(epochs="2", reuse_profile=project.profile()).run()
    training = project.record(run, "training/training.json", Training)
    assert "data" in [group.role for group in training.groups]
    assert (training.status, training.is_unfed) == ("failed", True)
    (group,) = training.useless_groups
    assert (group.batches, group.all_batches, group.idle_share) == (0, 24, 1.0)
    assert group.idle_usd == pytest.approx(group.usd)
    evaluation = project.record(run, "evaluation/evaluation.json", Evaluation)
    # Without other programs beside it, its steps are outside of the predicted band, too.
    steps = "a step took "
    others = tuple(words for words in evaluation.warnings if not words.startswith(steps))
    assert others == (group.made_words,)
    assert "made 0 of 24 batches, $" in group.made_words
    assert run.status == "Failed"
    assert "no batch came from its data hosts" in run.reason
    assert project.packages() == []


@pytest.mark.soak
def test_a_challenger_is_held_against_the_last_approved_model(project):
    project.upload()
    parameters = {"epochs": "1", "reuse_profile": project.profile(), "approval": "Approved"}
    for bound, status in (
        ("champion+0.01", "Succeeded"),
        ("champion+0.01", "Failed"),
        ("champion-0.01", "Succeeded"),
    ):
        run = project.execution(**parameters, gate=f"accuracy>={bound}").run()
        assert run.status == status, project.told(run)
        if status == "Failed":
            assert "accuracy is 0.95, asked for at least 0.96" in run.reason
        # The bucket's rule deletes what has the tag: no registered model.
        training = project.record(run, "training/training.json", Training)
        is_refused = mark_model(project.aws, str(training.model_uri), is_refused=False)
        assert is_refused == (status == "Failed")
    assert len(project.packages()) == 2


@pytest.mark.soak
def test_a_training_that_goes_on_from_its_own_end_is_no_new_model(project):
    kept = f"{OUT}/checkpoints/mnist-base"
    project.upload(script=TRAIN, checkpoint_uri=f"{OUT}/checkpoints", resume_from=kept)
    project.aws.write_object(f"{kept}/epoch", b"1")
    parameters = {"epochs": "2", "reuse_profile": project.profile()}
    first = project.execution(**parameters).run()
    assert first.status == "Succeeded", project.told(first)
    training = project.record(first, "training/training.json", Training)
    assert training.measured.steps == NUM_SAMPLES // BATCH_SIZE
    second = project.execution(**parameters).run()
    assert second.status == "Failed", project.told(second)
    assert "the training did no step" in second.reason
    assert len(project.packages()) == 1


def test_a_run_that_begins_while_another_one_is_under_way_is_refused_where_asked_for(project):
    project.upload(overlap="refuse")
    earlier, later = project.execution(), project.execution()
    project.account.executing.add(earlier.id)
    later.run()
    assert later.status == "Failed"
    assert statuses(later) == {"OnlyRun": "Failed"}
    assert f"mnist/{earlier.id}" in project.log(later, "OnlyRun")
    assert project.account.jobs == {}


@pytest.mark.soak
def test_the_profiles_own_checkpoints_reach_no_other_step(project):
    project.upload(script=TRAIN, cache_days=7)
    run = project.execution(epochs="2").run()
    assert run.status == "Succeeded", project.told(run)
    read_by = project.account.containers.read
    for step, inputs in (("Decide", {"profile"}), ("Evaluate", {"profile", "run"})):
        for name in inputs:
            read = read_by[run.steps[step].job][name]
            assert not [key for key in read if key.endswith("/epoch")], read
        assert len(read_by[run.steps[step].job]["profile"]) == 1
    # What an earlier profile left does not lie where the next one begins.
    again = project.execution(epochs="2", instance_type="ml.c5.2xlarge").run()
    assert "begins at epoch 0" in project.log(again, "Profile")


def test_a_run_over_data_of_another_date_uses_the_profile_of_an_earlier_run(project):
    for day in ("2026-11-20", "2026-11-27"):
        project.aws.write_object(f"s3://{BUCKET}/daily/{day}/numbers", b"1 2 3")
    project.upload(script=TRAIN, cache_days=7)
    # What follows the profile of the first run is of no interest here.
    project.account.faults["Decide"] = ["not retried"]
    first = project.execution(input_data=f"s3://{BUCKET}/daily/2026-11-20/").run()
    begins = dict.fromkeys(("NeedsProfile", "FindProfile", "IsProfileKept"), "Succeeded")
    expected = {**begins, "Profile": "Succeeded", "Decide": "Failed"}
    assert expected.items() <= statuses(first).items(), project.told(first)
    where = f"{OUT}/stoker/profiles/mnist/{first.id}/profile.json"
    profile = msgspec.json.decode(project.aws.read_object(where), type=Profile)
    assert profile.origin is not None
    assert set(profile.origin.code) == {"train.py"}
    given = {"epochs": "1", "lr": "0.5", "input_data": f"s3://{BUCKET}/daily/2026-11-27/"}
    second = project.execution(**given).run()
    tail = ("Decide", "Train", "Evaluate", "Gate", "Register")
    expected = {**begins, **dict.fromkeys((f"{name}Kept" for name in tail), "Succeeded")}
    assert statuses(second) == expected, project.told(second)
    words = f"measured before over s3://{BUCKET}/daily/2026-11-20/, nothing is run"
    assert words in project.log(second, "FindProfile")
    decision = project.record(second, "decision/decision.json", Decision)
    assert "code the same" in decision.measured


BASE = {
    "Version": "2020-12-01",
    "Parameters": [{"Name": "epochs", "Type": "Integer", "DefaultValue": 1}],
}
FAIL = {"Name": "A", "Type": "Fail", "Arguments": {}}
CONDITION = {"Name": "C", "Type": "Condition", "Arguments": {"Conditions": []}}
JOINED = {"Std:Join": {"On": "", "Values": ["a", {"Std:Join": {"On": "", "Values": ["b"]}}]}}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([FAIL | {"Color": 1}], "unknown property"),
        ([FAIL | {"DependsOn": ["B"]}], "not there"),
        ([FAIL | {"Arguments": {"ErrorMessage": JOINED}}], "inside a join"),
        ([FAIL | {"Arguments": {"ErrorMessage": {"Get": "Parameters.X"}}}], "no Parameters.X"),
        ([CONDITION, FAIL | {"DependsOn": ["C"]}], "cannot wait for a condition"),
        ([{"Name": "A", "Type": "Training", "Arguments": {"RoleArn": 3}}], "would be refused"),
    ],
)
def test_the_interpreter_refuses_what_the_service_would(tmp_path, aws_server, steps, words):
    with account(tmp_path, aws_server) as found, pytest.raises(DefinitionError, match=words):
        Execution(found, json.dumps({**BASE, "Steps": steps}), name="mnist").run()
