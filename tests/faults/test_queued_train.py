"""`stoker train` through a queue of AWS Batch is a real process, stopped and killed meanwhile."""

import json

import pytest

from stoker.platforms.aws import Aws
from support.batch_service import batch_service
from support.cloudwatch import put_lines
from support.local_job import until
from support.moto_server import REGION, ROLE
from support.sagemaker_service import sagemaker_service
from support.train_command import trainings

pytestmark = pytest.mark.fault

NAME, BUCKET, QUEUE = "mnist-1", "stoker-test", "gpus"
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
  queue: {{job_queue: {QUEUE}}}
"""


@pytest.fixture
def batch(aws_server):
    aws_server.make_bucket(BUCKET)
    with sagemaker_service() as sagemaker, batch_service(sagemaker) as service:
        service.add_queue(QUEUE)
        yield service


@pytest.fixture
def start(tmp_path, aws_server, batch):
    environ = aws_server.environ() | {
        "AWS_ENDPOINT_URL_SAGEMAKER": batch.sagemaker.url,
        "AWS_ENDPOINT_URL_BATCH": batch.url,
    }
    with trainings(tmp_path, WORKLOAD, name=NAME, data="", environ=environ) as make:
        yield make


def test_sigterm_leaves_a_waiting_job_in_its_queue_and_says_how_to_stop_it(start, batch):
    train = start()
    until(lambda: f"queue {QUEUE}: SUBMITTED" in train.said, what="it waits")
    train.process.terminate()
    assert train.ended_with() == 143, train.said
    job = batch.only_job()
    assert job["status"] == "SUBMITTED"
    last = train.said.splitlines()[-1]
    assert f"aws batch terminate-service-job --job-id {job['jobId']}" in last
    assert "Traceback" not in train.said


@pytest.mark.parametrize("status", ["RUNNABLE", "RUNNING"])
def test_an_attempt_after_kill_9_goes_on_with_the_same_job_and_token(
    start, batch, aws_server, tmp_path, status
):
    aws = Aws(region=REGION)
    first = start()
    until(lambda: f"queue {QUEUE}: SUBMITTED" in first.said, what="it waits")
    batch.advance(batch.only_job(), to=status)
    until(lambda: f"queue {QUEUE}: {status}" in first.said, what="it is followed")
    token = aws.read_object(TOKEN)
    first.kill()
    second = start()
    until(lambda: f"queue {QUEUE}: {status}" in second.said, what="the job is adopted")
    assert aws.read_object(TOKEN) == token
    job = batch.only_job()
    batch.advance(job, to="RUNNING")
    training = next(iter(batch.sagemaker.jobs))
    put_lines(aws, "algo-1", "step 1", job=training)
    until(lambda: "step 1" in second.said, what="its log is read")
    batch.advance(job, to="SUCCEEDED")
    assert second.ended_with() == 0, second.said
    assert not aws.has_object(TOKEN)
    record = json.loads((tmp_path / "runs" / NAME / "training.json").read_text())
    assert (record["status"], record["job"]["name"]) == ("succeeded", NAME)
    assert training in record["job"]["url"]
