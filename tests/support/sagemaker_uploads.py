"""A pipeline as stoker compiles it, by hand and short, and recorded answers on its runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import boto3
from botocore.stub import Stubber

from stoker.parameters import parameters_of
from stoker.pipelines.base import Compiled, pack_inputs
from stoker.platforms.aws import Aws
from stoker.records import Json, Workload
from stoker.workload_file import workload_from
from support.aws_answers import Clock

REGION = "eu-central-1"
ARN = f"arn:aws:sagemaker:{REGION}:123456789012"
PIPELINE = f"{ARN}:pipeline/mnist"
EXECUTION = f"{PIPELINE}/execution/abc123def456"
RUN = "mnist/abc123def456"
LAUNCHED = "mnist-abc123def456"
BUCKET = "stoker-tests"
ROLE = "arn:aws:iam::123456789012:role/stoker"

WORKLOAD: Mapping[str, Json] = {
    "name": "mnist",
    "platform": "sagemaker",
    "command": ["python", "train.py"],
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/stoker:1",
    "cluster": {"dnn": {"instance_type": "ml.g4dn.xlarge", "count": 1}},
    "channels": {"train": {"uri": f"s3://{BUCKET}/data/"}},
    "hyperparameters": {"epochs": 10},
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "sagemaker": {
        "role": ROLE,
        "output_uri": f"s3://{BUCKET}/out",
        "region": REGION,
        "request": {"Tags": [{"Key": "team", "Value": "vision"}]},
    },
}


def workload(*overrides: str) -> Workload:
    return workload_from(WORKLOAD, overrides=overrides)


def hand_made(of: Workload) -> Compiled:
    inputs = pack_inputs(of)
    parameters: list[Json] = [
        {"Name": p.name, "Type": p.kind.capitalize(), "DefaultValue": p.default}
        for p in parameters_of(of)
    ]
    parameters += [
        {"Name": "own_setting", "Type": "Integer", "DefaultValue": 2},
        {"Name": "Least", "Type": "Float", "DefaultValue": 0.5},
        {"Name": "DryRun", "Type": "Boolean", "DefaultValue": False},
    ]
    refuse = {"Name": "Refuse", "Type": "Fail", "Arguments": {"ErrorMessage": inputs.workload_uri}}
    definition = {"Version": "2020-12-01", "Parameters": parameters, "Steps": [refuse]}
    return Compiled(
        name="mnist",
        definition=json.dumps(definition),
        parameters=parameters_of(of),
        uploads=inputs.uploads,
    )


def at(minute: int) -> datetime:
    return datetime(2026, 11, 20, 10, minute, tzinfo=UTC)


@dataclass
class Recorded:
    """An AWS that answers what was recorded, in order."""

    stubber: Stubber
    clock: Clock = field(default_factory=Clock)

    def add(self, operation: str, answer: Mapping[str, object], **asked: object) -> None:
        self.stubber.add_response(operation, dict(answer), dict(asked) or None)

    def refuse(self, operation: str, code: str, message: str) -> None:
        self.stubber.add_client_error(operation, code, message)

    def aws(self) -> Aws:
        self.stubber.activate()
        clients = {"sagemaker": self.stubber.client}
        return Aws(region=REGION, clients=clients, sleep=self.clock.sleep, clock=self.clock)

    def add_run(self) -> None:
        """Adds the runs of the pipeline, of which the newest tells the ARN of all."""
        found = {"PipelineExecutionSummaries": [{"PipelineExecutionArn": EXECUTION}]}
        self.add("list_pipeline_executions", found)

    def add_state(self, status, *steps, jobs=None, reason="") -> None:
        """Adds what one look at the run asks for; `jobs`: and those with their status, if given."""
        told = {"FailureReason": reason} if reason else {}
        execution = {"PipelineExecutionStatus": status, **told}
        self.add("describe_pipeline_execution", execution, PipelineExecutionArn=EXECUTION)
        self.add("list_pipeline_execution_steps", {"PipelineExecutionSteps": list(steps)})
        if jobs is None:
            return
        summaries = [
            {"TrainingJobName": name, "TrainingJobStatus": state, "CreationTime": at(2)}
            | {"TrainingJobArn": f"{ARN}:training-job/{name}"}
            for name, state in jobs.items()
        ]
        listed = {"TrainingJobSummaries": summaries}
        self.add("list_training_jobs", listed, NameContains=EXECUTION.rpartition("/")[2])


def recorded() -> Recorded:
    keys = {"aws_access_key_id": "recorded", "aws_secret_access_key": "recorded"}
    return Recorded(Stubber(boto3.client("sagemaker", region_name=REGION, **keys)))


def step(name: str, status: str, **more: object) -> dict[str, object]:
    return {"StepName": name, "StepStatus": status, "StartTime": at(1), **more}
