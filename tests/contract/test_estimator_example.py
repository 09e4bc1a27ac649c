"""examples/sagemaker_estimator has the SDK send what the service and our own rules take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.platforms.aws import Aws
from support.moto_server import AwsServer
from support.sagemaker_rules import check_request

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sagemaker_estimator"
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/stoker:1"
ROLE = "arn:aws:iam::123456789012:role/stoker"

# Runs the example with the SDK's requests on record; they still go to the server. Each argument is
# a run: the file for its requests, and the command line. The SDK's modules are no garbage.
RECORDER = """
import gc, json, runpy, sys
gc.disable()
import botocore.client
call = botocore.client.BaseClient._make_api_call
def recorded(self, operation, parameters):
    with open(sent, "a") as file:
        file.write(json.dumps([operation, parameters], default=repr) + "\\n")
    return call(self, operation, parameters)
botocore.client.BaseClient._make_api_call = recorded
for run in sys.argv[1:]:
    sent, *sys.argv = json.loads(run)
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

DNN = {"name": "dnn", "role": "dnn", "instance_type": "ml.g5.xlarge", "count": 1}
DATA = {"name": "data", "role": "data", "instance_type": "ml.c7i.4xlarge", "count": 2}
TWO_GROUPS = [DNN | {"workers_per_host": 0}, DATA | {"workers_per_host": 16}]

Calls = list[tuple[str, dict[str, object]]]


def start(
    server: AwsServer, tmp_path: Path, *plans: tuple[list[dict[str, object]], tuple[str, ...]]
) -> list[Calls]:
    """Runs the example for each plan's groups with options, and returns all requests in order."""
    opt_out = tmp_path / "sagemaker.yaml"
    telemetry = "SageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"
    opt_out.write_text(f"SchemaVersion: '1.0'\n{telemetry}")
    server.make_bucket("photos")
    runs, files = [], []
    for number, (groups, more) in enumerate(plans):
        decision = tmp_path / f"decision-{number}.json"
        decision.write_text(json.dumps({"plan": {"groups": groups}}))
        files.append(tmp_path / f"sent-{number}.jsonl")
        words = [str(files[-1]), str(EXAMPLE / "estimator.py"), str(decision)]
        words += ["--image", IMAGE, "--role", ROLE, "--no-wait"]
        words += ["--data", "s3://photos/mnist/", "--output", "s3://photos/stoker"]
        runs.append(json.dumps([*words, *more, "--", "python", "train.py", "--epochs", "3"]))
    configs = {"USER_CONFIG_OVERRIDE": str(opt_out), "ADMIN_CONFIG_OVERRIDE": os.devnull}
    told = {"VALIDATE_ROLE": "false", **configs}
    environ = server.environ() | {f"SAGEMAKER_{name}": value for name, value in told.items()}
    words, how = [sys.executable, "-c", RECORDER, *runs], {"capture_output": True, "text": True}
    done = subprocess.run(words, env=environ, cwd=tmp_path, timeout=110, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return [[tuple(json.loads(line)) for line in file.read_text().splitlines()] for file in files]  # type: ignore[misc]


def training_job(calls: Calls) -> tuple[dict[str, object], dict[str, object]]:
    (body,) = [parameters for operation, parameters in calls if operation == "CreateTrainingJob"]
    check_request(body)  # type: ignore[arg-type]
    resources = body["ResourceConfig"]
    return body, resources


def test_the_groups_of_a_decision_become_a_valid_job_and_one_a_plain_job(aws_server, tmp_path):
    with_data = (TWO_GROUPS, ("--data-groups", "data"))
    calls, plain = start(aws_server, tmp_path, with_data, ([DNN], ()))
    body, resources = training_job(calls)
    assert resources["InstanceGroups"] == [
        {"InstanceGroupName": "dnn", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "data", "InstanceType": "ml.c7i.4xlarge", "InstanceCount": 2},
    ]
    variables = body["Environment"]
    assert json.loads(variables["STOKER_COMMAND"]) == ["python", "train.py", "--epochs", "3"]
    assert json.loads(variables["STOKER_WORKERS"]) == {"dnn": 0, "data": 16}
    token_of_the_run(body, calls)
    # A plan of one group becomes a plain job.
    _, resources = training_job(plain)
    assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.g5.xlarge", 1)
    assert "InstanceGroups" not in resources


def token_of_the_run(body: dict[str, object], calls: Calls) -> None:
    """The token lies where its channel looks, is long enough, and stands in no request."""
    (put,) = [parameters for operation, parameters in calls if operation == "PutObject"]
    channels = body["InputDataConfig"]
    sources = {c["ChannelName"]: c["DataSource"]["S3DataSource"] for c in channels}
    assert sources["training"]["InstanceGroupNames"] == ["data"]
    token = sources["stoker_token"]
    assert token["InstanceGroupNames"] == ["dnn", "data"]
    assert f"s3://{put['Bucket']}/{put['Key']}" == f"{token['S3Uri']}token"
    content = Aws(region="eu-central-1").read_object(f"{token['S3Uri']}token").decode()
    assert len(bytes.fromhex(content)) == 32
    assert content not in json.dumps(body)


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, ["launch", "--", "python", "train.py"]),
        ({"STOKER_COMMAND": '["python", "-m", "mine"]'}, ["launch", "--", "python", "-m", "mine"]),
    ],
)
def test_the_entry_point_becomes_the_launcher_or_says_what_is_missing(environ, command, tmp_path):
    def launched() -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, str(EXAMPLE / "launcher.py"), "--epochs", "3"]
        env = environ | {"PATH": str(tmp_path)}
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)

    missing = launched()
    assert missing.returncode == 1
    assert "stoker is not installed" in missing.stderr
    stand_in = tmp_path / "stoker"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    assert json.loads(launched().stdout) == command
