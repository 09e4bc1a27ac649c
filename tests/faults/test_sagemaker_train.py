"""`stoker train --platform sagemaker` is a real process, stopped and killed while a job runs."""

import json

import pytest

from stoker.platforms.aws import Aws
from support.cloudwatch import put_lines
from support.local_job import until
from support.moto_server import REGION, ROLE
from support.sagemaker_service import sagemaker_service
from support.train_command import trainings

pytestmark = pytest.mark.fault

NAME = "mnist-1"
BUCKET = "stoker-test"
TOKEN = f"s3://{BUCKET}/out/{NAME}/stoker_token/token"
WORKLOAD = f"""
name: mnist
platform: sagemaker
command: [python, train.py]
image: 123456789012.dkr.ecr.eu-central-1.amazonaws.com/stoker:1
cluster: {{dnn: {{instance_type: ml.g5.2xlarge}}}}
sagemaker:
  role: {ROLE}
  output_uri: s3://{BUCKET}/out
"""


@pytest.fixture
def service(aws_server):
    aws_server.make_bucket(BUCKET)
    with sagemaker_service() as found:
        yield found


@pytest.fixture
def aws(aws_server):
    return Aws(region=REGION)


@pytest.fixture
def start(tmp_path, aws_server, service):
    environ = aws_server.environ() | {"AWS_ENDPOINT_URL_SAGEMAKER": service.url}
    with trainings(tmp_path, WORKLOAD, name=NAME, data="ml.c5.4xlarge", environ=environ) as make:
        yield make


# SIGINT: in test_kubernetes_train, for all platforms.
@pytest.mark.parametrize("is_held", [False, True], ids=["following", "creating"])
def test_sigterm_leaves_the_job_and_says_how_to_stop_it(start, service, aws, is_held):
    service.is_creation_held = is_held
    train = start()
    until(
        lambda: NAME in service.jobs if is_held else "Training: it runs" in train.said,
        what="the service has the request, or the job is followed",
    )
    assert aws.has_object(TOKEN)
    train.process.terminate()
    assert train.ended_with() == 143, train.said
    assert service.calls.count("StopTrainingJob") == 0
    assert aws.has_object(TOKEN)
    last = train.said.splitlines()[-1]
    state = "may exist" if is_held else "keeps running"
    assert last.startswith(f"stopped by SIGTERM; the job {NAME} {state}"), train.said
    assert f"stop-training-job --training-job-name {NAME}" in last
    assert (f"--name {NAME} adopts it" in last) or not is_held
    assert "Traceback" not in train.said


def test_an_attempt_after_kill_9_goes_on_with_the_same_job_and_token(start, service, aws, tmp_path):
    first = start()
    until(lambda: "Training: it runs" in first.said, what="the job is followed")
    token = aws.read_object(TOKEN)
    first.kill()
    second = start()
    until(lambda: "job_resumed" in second.said, what="the job is adopted")
    assert aws.read_object(TOKEN) == token
    put_lines(
        aws, "algo-2", f"stoker T run={NAME} host=algo-2 host_role group=dnn role=dnn", job=NAME
    )
    put_lines(aws, "algo-1", "hello of a host whose group is told by nobody", job=NAME)
    service.end(NAME, "Completed")
    assert second.ended_with() == 0, second.said
    assert service.calls.count("CreateTrainingJob") == 1
    assert service.calls.count("StopTrainingJob") == 0
    assert not aws.has_object(TOKEN)
    record = json.loads((tmp_path / "runs" / NAME / "training.json").read_text())
    assert record["status"] == "succeeded"
    assert record["job"]["name"] == NAME
    logs = {path.name for path in (tmp_path / "runs" / NAME / "logs").iterdir()}
    assert logs == {"dnn-algo-2.log", "unknown-algo-1.log", "sagemaker-status.log"}
