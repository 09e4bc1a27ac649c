"""Uploads the pipeline of a project folder to SageMaker, and starts runs of that pipeline."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.platforms.aws import Aws
from stoker.records import Json, Workload
from support import sample_records
from support.command import stoker
from support.moto_server import ACCOUNT, REGION, ROLE
from support.sagemaker_containers import GO
from support.sagemaker_execution import Account, Execution

RecordT = TypeVar("RecordT")

BUCKET = "stoker-runs"
OUT = f"s3://{BUCKET}/out"
NUM_SAMPLES = 192
BATCH_SIZE = 16
# Samples cost something where that is measured: in a profile.
TRAIN = f"""
import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
from stoker import DataLoader

class Numbers(Dataset):
    def __len__(self):
        return {NUM_SAMPLES}
    def __getitem__(self, index):
        end = time.process_time() + 0.004
        while '"profile"' in os.environ.get("STOKER_RUN", "") and time.process_time() < end:
            pass
        return torch.full((8,), float(index))

epochs = int(sys.argv[sys.argv.index("--epochs") + 1])
kept = Path("/opt/ml/checkpoints/epoch")
first = int(kept.read_text()) if kept.exists() else 0
print(f"begins at epoch {{first}}", flush=True)
while not Path("{GO}").exists():
    time.sleep(0.02)
model = torch.nn.Linear(8, 1)
loader = DataLoader(Numbers(), batch_size={BATCH_SIZE}, num_workers=1)
for epoch in range(first, epochs):
    for batch in loader:
        model(batch).sum().backward()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(epoch + 1))
Path(os.environ["STOKER_METRICS"]).write_text(json.dumps({{"accuracy": 0.95}}))
(Path(os.environ["SM_MODEL_DIR"]) / "model.txt").write_text(f"{{first}} to {{epochs}}")
"""
# Its script leaves what the steps around a training need, and reads no batch.
LIGHT = """
import json
import os
from pathlib import Path
# What a rank leaves that was fed.
output = Path(os.environ["STOKER_OUTPUT"])
(output / "timeline-rank0.csv").write_text("0,0,0,0,0.1,0.1,4,1")
(output / "loading-0.json").write_text('{"is_fed": true}')
if (Path(os.environ["SM_CHANNEL_TRAINING"]) / "broken").exists():
    raise ValueError("sample 7 is broken")
Path(os.environ["STOKER_METRICS"]).write_text(json.dumps({"accuracy": 0.95}))
(Path(os.environ["SM_MODEL_DIR"]) / "model.txt").write_text("trained")
"""
WORKLOAD = {
    "name": "mnist",
    "command": ["python", "train.py"],
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/stoker:1",
    "platform": "sagemaker",
    "cluster": {"dnn": {"instance_type": "ml.c5.xlarge", "count": 1}},
    "channels": {"training": {"uri": f"s3://{BUCKET}/data/"}},
    # Of the profile, which ends itself; runs say how long they train.
    "hyperparameters": {"epochs": 500, "lr": 0.1},
    "training": {"epochs": 2, "samples_per_epoch": NUM_SAMPLES, "global_batch_size": BATCH_SIZE},
    "constraints": {
        "objective": "time",
        "max_data_hosts": 1,
        "allowed_instance_types": ["ml.c5.xlarge", "ml.c7i.xlarge"],
    },
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "profile": {"budget_seconds": 6, "max_unexplained": 0.9},
    # Nobody is lost by it, however long a busy machine stands still.
    "feed": {"lease_seconds": 60},
    "sagemaker": {
        "role": ROLE,
        "output_uri": OUT,
        "region": REGION,
        "source": "code",
    },
}


class Project:
    """A project folder, its account, and the runs of its uploaded pipeline."""

    def __init__(self, folder: Path, account: Account) -> None:
        self.folder = folder
        self.account = account
        self.aws = Aws(region=REGION)
        (folder / "code").mkdir(parents=True)
        account.server.make_bucket(BUCKET)
        self.aws.write_object(f"s3://{BUCKET}/data/numbers", b"1 2 3")

    def upload(self, *words: str, script: str = LIGHT, **changes: Json) -> None:
        """Runs `stoker upload sagemaker` on the workload with other keys, or SageMaker settings."""
        (self.folder / "code" / "train.py").write_text(script)
        self.write(**changes)
        self.stoker("upload", "sagemaker", "workload.yaml", *words, "--yes")

    def write(self, **changes: Json) -> None:
        settings = WORKLOAD["sagemaker"]
        own = {key: changes.pop(key) for key in [*changes] if key in Workload.__struct_fields__}
        document = {**WORKLOAD, **own, "sagemaker": {**settings, **changes}}
        (self.folder / "workload.yaml").write_text(json.dumps(document))

    def stoker(self, *words: str) -> str:
        """Runs a command in the folder, in this process; the pipeline's steps are processes."""
        done = stoker(*words, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def execution(self, **parameters: str) -> Execution:
        given = [f"--param={name}={value}" for name, value in parameters.items()]
        started = json.loads(self.stoker("start", "sagemaker", "workload.yaml", *given, "--json"))
        return self._run(str(started["run"]), parameters)

    def scheduled(self) -> Execution:
        """Starts a run as EventBridge's scheduler does: by the only schedule's target."""
        (listed,) = self._listed("scheduler", "ListSchedules", "Schedules")
        target = self.aws.call("scheduler", "GetSchedule", Name=listed["Name"])["Target"]
        given = target.get("SageMakerPipelineParameters", {}).get("PipelineParameterList", [])
        assert target["Arn"].endswith(":pipeline/mnist")
        asked = {"PipelineParameters": given, "ClientRequestToken": secrets.token_hex(16)}
        call = ("sagemaker", "StartPipelineExecution")
        started = self.aws.call(*call, PipelineName="mnist", **asked)
        values = {each["Name"]: each["Value"] for each in given}
        return self._run(started["PipelineExecutionArn"], values)

    def _run(self, arn: str, parameters: Mapping[str, str]) -> Execution:
        found = self.aws.call("sagemaker", "DescribePipeline", PipelineName="mnist")
        about = {"parameters": parameters, "execution_id": arn.rpartition("/")[2]}
        return Execution(self.account, found["PipelineDefinition"], name="mnist", **about)

    def profile(self, name: str = "earlier", **terms: Json) -> str:
        """Uploads a profile to reuse, by which a data host pays, and returns its folder.

        `terms` replace those of its step.
        """
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
            **terms,
        }
        profile |= {"spread": {}, "fixes": [], "check": None}
        folder = f"s3://{BUCKET}/{name}"
        self.aws.write_object(f"{folder}/profile.json", json.dumps(profile).encode())
        return folder

    def record(self, run: Execution, path: str, kind: type[RecordT]) -> RecordT:
        content = self.aws.read_object(f"{OUT}/pipelines/mnist/{run.id}/{path}")
        return msgspec.json.decode(content, type=kind)

    def packages(self) -> list[Mapping[str, Json]]:
        operation, key = "ListModelPackages", "ModelPackageSummaryList"
        return self._listed("sagemaker", operation, key, ModelPackageGroupName="mnist")

    def _listed(self, service, operation, key, **parameters) -> list[Mapping[str, Json]]:
        return self.aws.call(service, operation, **parameters)[key]

    def log(self, run: Execution, step: str) -> str:
        return self.account.containers.log(run.steps[step].job)

    def told(self, run: Execution) -> dict[str, tuple[str, str]]:
        return {
            name: (step.reason, self.log(run, name)[-3000:] if step.job else "")
            for name, step in run.steps.items()
            if step.status != "Not run"
        }

    def lose_host_while_training(self, run: Execution) -> None:
        """Loses the host of the run's Train once a job trains, which continues if adopted."""
        log = self.account.containers.log

        def num_begun() -> int:
            return log(f"mnist--{run.id}*").count("begins at epoch")

        self.account.lose_host_of["Train"] = lambda: num_begun() > 0
        # Also when a second job began in place of the adoption, so that the test fails at once.
        self.account.containers.lets_go = lambda: (
            num_begun() > 1 or "job_resumed" in log(f"pipelines-{run.id}-Train-*")
        )


def statuses(run: Execution) -> dict[str, str]:
    return {name: step.status for name, step in run.steps.items() if step.status != "Not run"}
