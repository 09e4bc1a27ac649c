"""A queue of AWS Batch in stoker's verbs: doctor, status, stop, decide and compile."""

import json

import pytest
import yaml

from stoker.doctor.account import queue_finding
from stoker.pipelines.sagemaker.client import SageMakerClient
from stoker.platforms.aws import Aws
from stoker.records.platforms import QueueSettings
from support.aws_answers import Clock
from support.batch_service import batch_service
from support.command import stoker
from support.moto_server import REGION
from support.sagemaker_service import sagemaker_service
from support.sagemaker_uploads import WORKLOAD

QUEUE = QueueSettings(job_queue="gpus")
SHARED = QueueSettings(job_queue="gpus", share_identifier="vision")
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/stoker:1"


@pytest.fixture
def batch(aws_server, monkeypatch):
    with sagemaker_service() as sagemaker, batch_service(sagemaker) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", sagemaker.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", service.url)
        yield service


@pytest.mark.parametrize(
    "queue", [QUEUE, QueueSettings(job_queue="arn:aws:batch:r:a:job-queue/gpus")]
)
def test_a_queue_with_room_is_fine(batch, queue):
    batch.add_queue("gpus", capacity=4)
    finding = queue_finding(Aws(region=REGION), queue, num_hosts=4)
    assert (finding.name, finding.state) == ("queue", "ok")
    assert "4 hosts at most" in finding.text


@pytest.mark.parametrize(
    ("about", "queue", "words"),
    [
        (None, QUEUE, "there is no queue gpus"),
        ({"kind": "ECS"}, QUEUE, "of the type ECS"),
        ({"state": "DISABLED"}, QUEUE, "DISABLED"),
        ({"policy": "fair"}, QUEUE, "has a scheduling policy"),
        ({}, SHARED, "has no scheduling policy"),
        ({"capacity": 1}, QUEUE, "1 hosts at most; a job has 2"),
    ],
)
def test_what_a_job_would_wait_for_in_vain_is_a_failure_with_its_mend(batch, about, queue, words):
    if about is not None:
        batch.add_queue("gpus", **about)
    finding = queue_finding(Aws(region=REGION), queue, num_hosts=2)
    assert finding.state == "fail"
    assert words in finding.text
    assert finding.fix


def test_status_and_stop_take_the_arn_of_a_service_job(batch):
    batch.add_queue("gpus")
    clock = Clock()
    aws = Aws(region=REGION, sleep=clock.sleep, clock=clock)
    payload = {
        "TrainingJobName": "mnist-1",
        "RoleArn": "arn:aws:iam::123456789012:role/stoker",
        "AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": IMAGE},
        "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    }
    asked = {"jobName": "mnist-1", "jobQueue": "gpus", "serviceJobType": "SAGEMAKER_TRAINING"}
    aws.call("batch", "SubmitServiceJob", **asked, serviceRequestPayload=json.dumps(payload))
    job = batch.only_job()
    client = SageMakerClient(None, run=job["jobArn"], aws=aws)
    state = client.status(job["jobArn"])
    assert (state.status, state.has_ended, state.steps) == ("SUBMITTED", False, ())
    batch.advance(job, to="RUNNING")
    state = client.status(job["jobArn"])
    (step,) = state.steps
    assert step.name == f"job {next(iter(batch.sagemaker.jobs))}"
    assert (state.status, step.status) == ("RUNNING", "InProgress")
    ended = client.stop(job["jobArn"])
    assert (ended.status, ended.has_ended, ended.exit_code) == ("FAILED", True, 4)
    assert ended.steps[0].status == "Stopped"
    assert batch.calls.count("TerminateServiceJob") == 1


def written(folder, **constraints: object):
    document = json.loads(json.dumps(WORKLOAD))
    document["sagemaker"]["queue"] = {"job_queue": "gpus"}
    document["constraints"] = constraints
    (folder / "w.yaml").write_text(yaml.safe_dump(document))


def test_a_pipeline_with_a_queue_is_refused_at_compile_with_the_way_out(tmp_path, monkeypatch):
    written(tmp_path, max_data_hosts=0)
    monkeypatch.chdir(tmp_path)
    compiling = ("compile", "sagemaker", "w.yaml", "--out", "compiled.json")
    done = stoker(*compiling)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "key sagemaker.queue" in done.stderr
    assert "--set sagemaker.queue=null" in done.stderr
    done = stoker(*compiling, "--set", "sagemaker.queue=null")
    assert done.returncode == 0, done.stderr


def test_train_shows_the_submission_without_sending_it(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = stoker("train", "w.yaml", "--dry-run", "--name", "mnist-1")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["SubmitServiceJob"]["jobQueue"] == "gpus"
    done = stoker(
        "train", "w.yaml", "--dry-run", "--group", "dnn=1", "--group", "data=ml.c5.xlarge:1"
    )
    assert done.returncode == 2
    assert "takes no data group" in done.stderr
