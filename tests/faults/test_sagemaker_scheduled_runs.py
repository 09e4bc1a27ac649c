"""Two scheduled runs of an uploaded SageMaker pipeline each meet troubles on their way."""

from dataclasses import dataclass

import pytest

from stoker.records import Decision, Training
from support.aws_answers import has_object
from support.moto_server import emptied
from support.sagemaker_execution import Execution, account
from support.sagemaker_project import BATCH_SIZE, NUM_SAMPLES, OUT, TRAIN, Project, statuses

pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.e2e, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Runs:
    project: Project
    # Its decision is throttled; the host of its train step is lost while the job trains.
    first: Execution
    # There are no hosts for what was decided, and then it loses the same host.
    second: Execution

    def training(self, run: Execution) -> Training:
        return self.project.record(run, "training/training.json", Training)

    def jobs(self, run: Execution) -> list[str]:
        return [name for name in self.project.account.jobs if run.id in name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, moto_process):
    folder = tmp_path_factory.mktemp("scheduled")
    with (
        pytest.MonkeyPatch.context() as patch,
        account(folder / "jobs", emptied(moto_process, patch)) as service,
    ):
        project = Project(folder / "project", service)
        capacity = {"wait_minutes": 0}
        project.upload(script=TRAIN, checkpoint_uri=f"{OUT}/checkpoints", on_no_capacity=capacity)
        reuse = f"reuse_profile={project.profile()}"
        words = ("schedule", "sagemaker", "workload.yaml", "--cron", "cron(0 3 ? * MON *)")
        project.stoker(*words, "--param", "epochs=2", "--param", reuse)
        first = project.scheduled()
        service.faults["Decide"] = ["Step.THROTTLING", "Step.SERVICE_FAULT"]
        project.lose_host_while_training(first)
        first.run()
        second = project.scheduled()
        service.lacks = {"ml.c7i.xlarge"}
        project.lose_host_while_training(second)
        second.run()
        yield Runs(project, first, second)


def test_a_profile_that_is_reused_is_decided_on_and_the_heterogeneous_job_trains(runs):
    project, run = runs.project, runs.first
    steps = ("Profile", "Decide", "Train", "Evaluate", "Gate", "Register")
    expected = dict.fromkeys(steps, "Succeeded")
    assert statuses(run) == expected, project.told(run)
    assert {host.group for host in runs.training(run).hosts} == {"dnn", "data"}
    job = project.account.jobs[f"mnist--{run.id}"]
    assert job["TrainingJobStatus"] == "Completed"
    # The token was read by the hosts, and is gone.
    assert "stoker_token" in project.account.containers.read[f"mnist--{run.id}"]
    assert not has_object(project.aws, f"{OUT}/mnist--{run.id}/stoker_token/token")


def test_a_step_that_the_service_fails_is_tried_again_after_its_waits(runs):
    assert runs.first.steps["Decide"].waits == [5, 10]
    assert runs.first.steps["Train"].waits == [120]


def test_a_train_step_whose_host_is_lost_adopts_the_job_that_runs(runs):
    project, run = runs.project, runs.first
    assert run.status == "Succeeded", project.told(run)
    assert runs.jobs(run) == [f"mnist--{run.id}"]
    # None was asked for twice, in neither run.
    assert project.account.calls.count("CreateTrainingJob") == len(project.account.jobs)
    assert "job_resumed" in project.log(run, "Train")
    assert runs.training(run).measured.steps == 2 * NUM_SAMPLES // BATCH_SIZE


def test_a_plan_without_hosts_gives_way_to_the_next_one_which_a_further_attempt_adopts(runs):
    project, run = runs.project, runs.second
    assert run.status == "Succeeded", project.told(run)
    assert run.steps["Train"].waits == [120]
    first, second = runs.jobs(run)
    assert first == f"mnist--{run.id}"
    assert second.startswith(f"{first}-plan")
    jobs = project.account.jobs
    assert [jobs[name]["TrainingJobStatus"] for name in (first, second)] == ["Failed", "Completed"]
    training = runs.training(run)
    decision = project.record(run, "decision/decision.json", Decision)
    assert training.groups != decision.plan.groups
    assert training.groups in [plan.groups for plan in decision.plans]
    assert "ml.c7i.xlarge" not in {group.instance_type for group in training.groups}
    assert training.model_uri == f"{OUT}/{second}/output/model.tar.gz"


def test_a_second_scheduled_run_trains_anew_with_the_schedules_parameters(runs):
    for run in (runs.first, runs.second):
        assert run.status == "Succeeded", runs.project.told(run)
        assert runs.training(run).measured.steps == 2 * NUM_SAMPLES // BATCH_SIZE
    assert len(runs.project.packages()) == 2
