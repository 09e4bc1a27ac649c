"""The uploaded SageMaker pipeline is run: each step's container from its literal arguments."""

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.job import fetch_training
from stoker.records import Decision, Evaluation, Json, Training, Workload, bare_type, read_json
from support import sample_records
from support.command import process
from support.moto import ACCOUNT, REGION, ROLE, AwsServer
from support.sagemaker_execution import Account, DefinitionError, Execution, account

pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.timeout(400)]

RecordT = TypeVar("RecordT")

BUCKET = "stoker-runs"
OUT = f"s3://{BUCKET}/out"
TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
from stoker import DataLoader

class Numbers(Dataset):
    def __len__(self):
        return 192
    def __getitem__(self, index):
        end = time.process_time() + 0.004
        while time.process_time() < end:
            pass
        return torch.full((8,), float(index))

epochs = int(sys.argv[sys.argv.index("--epochs") + 1])
kept = Path("/opt/ml/checkpoints/epoch")
first = int(kept.read_text()) if kept.exists() else 0
print(f"begins at epoch {first}", flush=True)
model = torch.nn.Linear(8, 1)
loader = DataLoader(Numbers(), batch_size=16, num_workers=1)
for epoch in range(first, epochs):
    for batch in loader:
        model(batch).sum().backward()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(epoch + 1))
    if (Path(os.environ["SM_CHANNEL_TRAINING"]) / "broken").exists():
        raise ValueError("sample 7 is broken")
Path(os.environ["STOKER_METRICS"]).write_text(json.dumps({"accuracy": 0.95}))
(Path(os.environ["SM_MODEL_DIR"]) / "model.txt").write_text(f"{first} to {epochs}")
"""
WORKLOAD = {
    "name": "mnist",
    "command": ["python", "train.py"],
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/stoker:1",
    "platform": "sagemaker",
    "cluster": {"dnn": {"instance_type": "ml.c5.xlarge", "count": 1}},
    "channels": {"training": {"uri": f"s3://{BUCKET}/data/"}},
    # Of the profile, which ends itself; runs say how long they train.
    "hyperparameters": {"epochs": 500},
    "training": {"epochs": 2, "samples_per_epoch": 192, "global_batch_size": 16},
    "constraints": {
        "objective": "time",
        "max_data_hosts": 1,
        "allowed_instance_types": ["ml.c5.xlarge", "ml.c7i.xlarge"],
    },
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "profile": {"budget_seconds": 6, "max_unexplained": 0.9},
    "feed": {"lease_seconds": 3},
    "sagemaker": {
        "role": ROLE,
        "schedule_role": ROLE,
        "output_uri": OUT,
        "region": REGION,
        "source": "code",
    },
}


class Project:
    """A project folder, its account, and the runs of its uploaded pipeline."""

    def __init__(self, folder: Path, account: Account, server: AwsServer) -> None:
        self.folder = folder
        self.account = account
        self.aws = Aws(region=REGION)
        self._server = server
        (folder / "code").mkdir()
        (folder / "code" / "train.py").write_text(TRAIN)
        server.make_bucket(BUCKET)
        self.aws.write_object(f"s3://{BUCKET}/data/numbers", b"1 2 3")

    def upload(self, *words: str, **changes: Json) -> None:
        """`stoker upload sagemaker`, of the workload with other keys, or settings of SageMaker."""
        self.write(**changes)
        self.stoker("upload", "sagemaker", "workload.yaml", *words, "--yes")

    def write(self, **changes: Json) -> None:
        """Writes the workload."""
        settings = WORKLOAD["sagemaker"]
        assert isinstance(settings, dict)
        own = {key: changes.pop(key) for key in [*changes] if key in Workload.__struct_fields__}
        document = {**WORKLOAD, **own, "sagemaker": {**settings, **changes}}
        (self.folder / "workload.yaml").write_text(json.dumps(document))

    def stoker(self, *words: str) -> str:
        done = process(*words, cwd=self.folder, env=self._server.environ())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def execution(self, **parameters: str) -> Execution:
        """A run of what is uploaded, started by `stoker start`."""
        given = [
            word for name, value in parameters.items() for word in ("--param", f"{name}={value}")
        ]
        started = json.loads(self.stoker("start", "sagemaker", "workload.yaml", *given, "--json"))
        return self._run(str(started["id"]), started["parameters"])

    def handed_over(self) -> Execution:
        """The one run that a step of another one has started."""
        ((arn, parameters),) = self.account.started.values()
        return self._run(arn, parameters)

    def scheduled(self) -> Execution:
        """A run as EventBridge's scheduler starts it: by the only schedule's target."""
        (listed,) = self._listed("scheduler", "ListSchedules", "Schedules")
        schedule = self.aws.call("scheduler", "GetSchedule", Name=listed["Name"])
        target = schedule["Target"]
        assert isinstance(target, Mapping)
        given = target.get("SageMakerPipelineParameters") or {"PipelineParameterList": []}
        parameters = given["PipelineParameterList"]  # type: ignore[index,call-overload]
        assert str(target["Arn"]).endswith(":pipeline/mnist")
        assert isinstance(parameters, list)
        started = self.aws.call(
            "sagemaker",
            "StartPipelineExecution",
            PipelineName="mnist",
            PipelineParameters=parameters,
            ClientRequestToken=secrets.token_hex(16),
        )
        values = {str(p["Name"]): str(p["Value"]) for p in parameters if isinstance(p, Mapping)}
        return self._run(str(started["PipelineExecutionArn"]), values)

    def _run(self, arn: str, parameters: Mapping[str, str]) -> Execution:
        found = self.aws.call("sagemaker", "DescribePipeline", PipelineName="mnist")
        return Execution(
            self.account,
            str(found["PipelineDefinition"]),
            name="mnist",
            parameters=parameters,
            execution_id=arn.rpartition("/")[2],
        )

    def profile(self) -> str:
        """A profile to re-use, by which a data host pays: its folder."""
        profile = msgspec.to_builtins(sample_records.profile())
        profile["host"] = {"instance_type": "ml.c5.xlarge", "count": 1, "vcpus": 4}
        # The CPU is the limit, by far.
        profile["step"] |= {
            "step_seconds": 0.3,
            "wait_seconds": 0.25,
            "accelerator_step_seconds": 0.05,
            "loader_cpu_seconds": 1.2,
            "loader_wall_seconds": 1.25,
            "trainer_cpu_seconds": 0.05,
            "num_workers": 4,
            "batch_bytes": 512,
        }
        profile |= {"spread": {}, "fixes": [], "check": None}
        folder = f"s3://{BUCKET}/earlier"
        self.aws.write_object(f"{folder}/profile.json", json.dumps(profile).encode())
        return folder

    def record(self, run: Execution, path: str, kind: type[RecordT]) -> RecordT:
        content = self.aws.read_object(f"{OUT}/pipelines/mnist/{run.id}/{path}")
        return msgspec.json.decode(content, type=kind)

    def native_record(self, run: Execution) -> Training:
        """training.json out of the outputs of a run's native training."""
        file = fetch_training(
            f"{OUT}/stoker/jobs/mnist/{run.id}", folder=self.folder / run.id, aws=self.aws
        )
        assert file
        return read_json(file, Training)

    def packages(self) -> list[Mapping[str, Json]]:
        """What is registered, newest last."""
        operation, key = "ListModelPackages", "ModelPackageSummaryList"
        return self._listed("sagemaker", operation, key, ModelPackageGroupName="mnist")

    def _listed(
        self, service: str, operation: str, key: str, **parameters: str
    ) -> list[Mapping[str, Json]]:
        listed = self.aws.call(service, operation, **parameters)[key]
        assert isinstance(listed, list)
        return [item for item in listed if isinstance(item, Mapping)]

    def log(self, run: Execution, step: str) -> str:
        return self.account.containers.log(run.steps[step].job)


@pytest.fixture
def project(tmp_path: Path, aws_server: AwsServer) -> Iterator[Project]:
    (tmp_path / "project").mkdir()
    with account(tmp_path / "jobs", aws_server) as found:
        yield Project(tmp_path / "project", found, aws_server)


def statuses(run: Execution) -> dict[str, str]:
    return {name: step.status for name, step in run.steps.items() if step.status != "Not run"}


def told(project: Project, run: Execution) -> dict[str, tuple[str, str]]:
    """What the steps say of themselves, for a test that fails."""
    return {
        name: (step.reason, project.log(run, name)[-3000:] if step.job else "")
        for name, step in run.steps.items()
        if step.status != "Not run"
    }


def test_a_run_profiles_decides_trains_evaluates_and_registers(project: Project) -> None:
    project.upload()
    run = project.execution(Epochs="2").run()
    assert statuses(run) == dict.fromkeys(
        ("NeedsProfile", "Profile", "Decide", "Train", "Evaluate", "Gate", "Register"), "Succeeded"
    ), told(project, run)
    assert run.status == "Succeeded"
    decision = project.record(run, "decision/decision.json", Decision)
    training = project.record(run, "training/training.json", Training)
    evaluation = project.record(run, "evaluation/evaluation.json", Evaluation)
    assert training.status == "succeeded"
    assert training.groups == decision.plan.groups
    assert training.measured
    assert training.measured.steps == 2 * 192 // 16
    assert evaluation.passed
    assert len(project.packages()) == 1
    # What the pipeline relies on, and AWS's documentation does not say: docs/sagemaker.md does.
    assert run.undocumented == {
        "a condition on the boolean of a JSON file",
        "a step after another's outcome Any",
    }


def test_a_profile_that_is_reused_is_decided_on_and_the_heterogeneous_job_trains(
    project: Project,
) -> None:
    project.upload()
    run = project.execution(Epochs="2", ReuseProfile=project.profile()).run()
    assert statuses(run) == dict.fromkeys(
        (
            "NeedsProfile",
            "DecideAgain",
            "TrainAgain",
            "EvaluateAgain",
            "GateAgain",
            "RegisterAgain",
        ),
        "Succeeded",
    ), told(project, run)
    training = project.record(run, "training/training.json", Training)
    assert {host.group for host in training.hosts} == {"dnn", "data"}
    assert training.measured
    assert training.measured.steps == 2 * 192 // 16
    job = project.account.jobs[f"mnist-{run.id}"]
    assert job["TrainingJobStatus"] == "Completed"
    # The token was read by the hosts, and is gone.
    assert "stoker_token" in project.account.containers.files[f"mnist-{run.id}"].read
    assert not project.aws.has_object(f"{OUT}/mnist-{run.id}/stoker_token/token")


def test_a_failed_training_has_its_report_and_ends_the_run_with_its_words(project: Project) -> None:
    project.upload()
    project.aws.write_object(f"s3://{BUCKET}/data/broken", b"yes")
    run = project.execution(Epochs="2", ReuseProfile=project.profile()).run()
    assert statuses(run) == {
        "NeedsProfile": "Succeeded",
        "DecideAgain": "Succeeded",
        "TrainAgain": "Failed",
        "EvaluateAgain": "Succeeded",
        "GateAgain": "Succeeded",
        "RefuseAgain": "Failed",
    }, told(project, run)
    assert run.status == "Failed"
    # No retry: it is the script's own fault.
    assert run.steps["TrainAgain"].waits == []
    assert "sample 7 is broken" in project.log(run, "TrainAgain")
    training = project.record(run, "training/training.json", Training)
    assert training.status == "failed"
    assert project.aws.has_object(f"{OUT}/pipelines/mnist/{run.id}/evaluation/report.html")
    assert "the training failed" in run.reason, run.reason
    assert project.packages() == []


def test_a_train_step_whose_host_is_lost_adopts_the_job_that_runs(project: Project) -> None:
    project.upload()
    service = project.account

    def is_training() -> bool:
        return any("begins at epoch 0" in service.containers.log(job) for job in service.jobs)

    service.lose_host_of["TrainAgain"] = is_training
    service.faults["DecideAgain"] = ["Step.THROTTLING", "Step.SERVICE_FAULT"]
    run = project.execution(Epochs="20", ReuseProfile=project.profile()).run()
    assert run.status == "Succeeded", told(project, run)
    assert run.steps["DecideAgain"].waits == [5, 10]
    assert run.steps["TrainAgain"].waits == [120]
    assert list(service.jobs) == [f"mnist-{run.id}"]
    assert service.calls.count("CreateTrainingJob") == 1
    assert "job_adopted" in project.log(run, "TrainAgain")
    training = project.record(run, "training/training.json", Training)
    assert training.measured
    assert training.measured.steps == 20 * 192 // 16


def test_a_native_training_is_tried_again_by_the_service_and_its_model_is_registered(
    project: Project,
) -> None:
    folder = project.profile()
    (project.folder / "profile.json").write_bytes(project.aws.read_object(f"{folder}/profile.json"))
    project.write()
    project.stoker(
        *("decide", "profile.json", "--workload", "workload.yaml", "--out", "decision.json")
    )
    project.upload("--train-step", "native", "--decision", "decision.json")
    project.account.faults["TrainAgain"] = ["SageMaker.CAPACITY_ERROR"]
    run = project.execution(Epochs="2", ReuseProfile=folder).run()
    assert run.status == "Succeeded", told(project, run)
    assert run.steps["TrainAgain"].waits == [300]
    training = project.native_record(run)
    assert {host.group for host in training.hosts} == {"dnn", "data"}
    (package,) = project.packages()
    described = project.aws.call(
        "sagemaker", "DescribeModelPackage", ModelPackageName=package["ModelPackageArn"]
    )
    assert run.steps["TrainAgain"].job in json.dumps(described["InferenceSpecification"])
    assert not project.aws.has_object(f"{OUT}/pipelines/mnist/{run.id}/token/token")


def test_a_plan_without_hosts_gives_way_to_the_next_one_which_a_further_attempt_adopts(
    project: Project,
) -> None:
    project.upload(on_no_capacity={"wait_minutes": 0})
    service = project.account
    service.lacks = {"ml.c7i.xlarge"}
    service.lose_host_of["TrainAgain"] = lambda: any(
        "begins at epoch 0" in service.containers.log(job) for job in service.jobs
    )
    run = project.execution(Epochs="20", ReuseProfile=project.profile()).run()
    assert run.status == "Succeeded", told(project, run)
    first, second = service.jobs
    assert first == f"mnist-{run.id}"
    assert second.startswith(f"{first}-plan")
    assert [job["TrainingJobStatus"] for job in service.jobs.values()] == ["Failed", "Completed"]
    training = project.record(run, "training/training.json", Training)
    decision = project.record(run, "decision/decision.json", Decision)
    assert training.groups != decision.plan.groups
    assert training.groups in [plan.groups for plan in decision.plans]
    assert "ml.c7i.xlarge" not in {group.instance_type for group in training.groups}
    # Where the pipeline registers it: under the name that it knew beforehand.
    assert project.aws.has_object(f"{OUT}/{first}/output/model.tar.gz")


@pytest.mark.soak
def test_a_challenger_is_held_against_the_last_approved_model(project: Project) -> None:
    project.upload()
    parameters = {"Epochs": "1", "ReuseProfile": project.profile(), "Approval": "Approved"}
    for bound, status in (
        ("champion+0.01", "Succeeded"),
        ("champion+0.01", "Failed"),
        ("champion-0.01", "Succeeded"),
    ):
        run = project.execution(**parameters, Gate=f"accuracy>={bound}").run()
        assert run.status == status, told(project, run)
        if status == "Failed":
            assert "accuracy is 0.95, asked for at least 0.96" in run.reason
    assert len(project.packages()) == 2


@pytest.mark.parametrize("max_data_hosts", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_run_hands_over_to_a_second_one_that_trains_on_what_was_decided(
    project: Project, max_data_hosts: int
) -> None:
    project.upload("--train-step", "handover")
    reuse = project.profile()
    project.account.faults["HandOverAgain"] = ["SageMaker.JOB_INTERNAL_ERROR"]
    first = project.execution(
        Epochs="2", ReuseProfile=reuse, MaxDataHosts=str(max_data_hosts), Approval="Approved"
    ).run()
    assert statuses(first) == dict.fromkeys(
        ("Decides", "NeedsProfile", "DecideAgain", "HandOverAgain"), "Succeeded"
    ), told(project, first)
    second = project.handed_over().run()
    suffix = "" if max_data_hosts else "Alone"
    names = ("MakeToken", "Train", "Evaluate", "Gate", "Register")
    expected = {"Decides", "TrainsAlone", *(f"{name}{suffix}" for name in names)}
    assert set(statuses(second)) == expected, (second.reason, told(project, second))
    assert second.status == "Succeeded", told(project, second)
    training = project.native_record(first)
    decision = project.record(first, "decision/decision.json", Decision)
    # Without a data group it is a job without instance groups, whose one group the service names.
    assert [(bare_type(g.instance_type), g.count) for g in training.groups] == [
        (bare_type(g.instance_type), g.count) for g in decision.plan.groups
    ]
    (package,) = project.packages()
    assert package["ModelApprovalStatus"] == "Approved"


def test_a_second_scheduled_run_trains_anew_with_the_schedules_parameters(project: Project) -> None:
    project.upload(checkpoint_uri=f"{OUT}/checkpoints")
    reuse = f"ReuseProfile={project.profile()}"
    project.stoker(
        *("schedule", "sagemaker", "workload.yaml", "--cron", "0 3 ? * MON *"),
        *("--param", "Epochs=2", "--param", reuse),
    )
    for _ in range(2):
        run = project.scheduled().run()
        assert run.status == "Succeeded", told(project, run)
        training = project.record(run, "training/training.json", Training)
        assert training.measured
        assert training.measured.steps == 2 * 192 // 16
    assert len(project.packages()) == 2


@pytest.mark.soak
def test_a_training_that_goes_on_from_its_own_end_is_no_new_model(project: Project) -> None:
    kept = f"{OUT}/checkpoints/mnist-base"
    project.upload(checkpoint_uri=f"{OUT}/checkpoints", resume_from=kept)
    project.aws.write_object(f"{kept}/epoch", b"1")
    parameters = {"Epochs": "2", "ReuseProfile": project.profile()}
    first = project.execution(**parameters).run()
    assert first.status == "Succeeded", told(project, first)
    training = project.record(first, "training/training.json", Training)
    assert training.measured
    assert training.measured.steps == 192 // 16
    second = project.execution(**parameters).run()
    assert second.status == "Failed", told(project, second)
    assert "the training did no step" in second.reason
    assert len(project.packages()) == 1


def test_a_run_that_begins_while_another_one_is_under_way_is_refused_where_asked_for(
    project: Project,
) -> None:
    project.upload(overlap="refuse")
    earlier, later = project.execution(), project.execution()
    project.account.executing.add(earlier.id)
    later.run()
    assert later.status == "Failed"
    assert statuses(later) == {"OnlyRun": "Failed"}
    assert f"mnist/{earlier.id}" in project.log(later, "OnlyRun")
    assert project.account.jobs == {}


@pytest.mark.soak
def test_the_profiles_own_checkpoints_reach_no_other_step(project: Project) -> None:
    project.upload(cache_days=7)
    run = project.execution(Epochs="2").run()
    assert run.status == "Succeeded", told(project, run)
    files = project.account.containers.files
    for step, inputs in (("Decide", {"profile"}), ("Evaluate", {"profile", "run"})):
        for name in inputs:
            read = files[run.steps[step].job].read[name]
            assert not [key for key in read if key.endswith("/epoch")], read
        assert len(files[run.steps[step].job].read["profile"]) == 1
    # As after a week: what an earlier profile left does not lie where the next one begins.
    assert project.execution(Epochs="2").run().steps["Profile"].is_cached
    project.account.cached.clear()
    again = project.execution(Epochs="2").run()
    assert "begins at epoch 0" in project.log(again, "Profile")


BASE = {
    "Version": "2020-12-01",
    "Parameters": [{"Name": "Epochs", "Type": "Integer", "DefaultValue": 1}],
}
JOINED = {"Std:Join": {"On": "", "Values": ["a", {"Std:Join": {"On": "", "Values": ["b"]}}]}}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{"Name": "A", "Type": "Fail", "Arguments": {}, "Color": 1}], "unknown property"),
        ([{"Name": "A", "Type": "Fail", "Arguments": {}, "DependsOn": ["B"]}], "not there"),
        ([{"Name": "A", "Type": "Fail", "Arguments": {"ErrorMessage": JOINED}}], "inside a join"),
        (
            [{"Name": "A", "Type": "Fail", "Arguments": {"ErrorMessage": {"Get": "Parameters.X"}}}],
            "no Parameters.X",
        ),
        (
            [
                {"Name": "C", "Type": "Condition", "Arguments": {"Conditions": []}},
                {"Name": "A", "Type": "Fail", "Arguments": {}, "DependsOn": ["C"]},
            ],
            "cannot wait for a condition",
        ),
        ([{"Name": "A", "Type": "Training", "Arguments": {"RoleArn": 3}}], "would be refused"),
    ],
)
def test_the_interpreter_refuses_what_the_service_would(
    tmp_path: Path, aws_server: AwsServer, steps: Json, words: str
) -> None:
    with account(tmp_path, aws_server) as found, pytest.raises(DefinitionError, match=words):
        Execution(found, json.dumps({**BASE, "Steps": steps}), name="mnist").run()
