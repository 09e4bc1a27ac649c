"""Pipelines are uploaded, started, shown, scheduled and stopped on both services."""

import json
import os

import pytest

from support.black_box import as_json, refused, stoker
from support.kfp_server import KfpServer
from support.moto_server import REGION
from support.workloads import BUCKET, ON_KUBERNETES, ON_SAGEMAKER, ROLE, changed, write

UNCHANGED, CHANGED, NEW = 0, 10, 11
GATE = [{"metric": "accuracy", "min": 0.9}]


@pytest.fixture
def kubeflow(tmp_path):
    """A server that checks what it is sent by the published API, and a workload for it."""
    pytest.importorskip("kfp")
    with KfpServer() as server:
        where = {"kubeflow": {"host": server.url}, "pools": {"g5.2xlarge": {"cpu": 7, "gpus": 1}}}
        where["pools"]["g5.2xlarge"]["memory"] = "28Gi"
        of = changed(ON_KUBERNETES, kubernetes=where, gate=GATE, hyperparameters={"epochs": 3})
        write(tmp_path, of)
        yield server
    assert server.problems == []


def test_on_kubeflow_a_pipeline_is_uploaded_started_shown_and_stopped(kubeflow, tmp_path):
    upload = ("upload", "kubeflow", "workload.yaml")
    stoker(*upload, "--check", cwd=tmp_path, code=NEW)
    assert kubeflow.sent() == []
    refused("start", "kubeflow", "workload.yaml", cwd=tmp_path)
    as_json(*upload, cwd=tmp_path)
    (pipeline,) = kubeflow.kept["pipelines"]
    sent = kubeflow.sent()
    stoker(*upload, "--check", cwd=tmp_path, code=UNCHANGED)
    higher = ("--set", "gate=[{metric: accuracy, min: 0.99}]")
    stoker(*upload, "--check", *higher, cwd=tmp_path, code=CHANGED)
    assert kubeflow.sent() == sent

    start = ("start", "kubeflow", "workload.yaml", "--param")
    refused(*start, "epoch=4", cwd=tmp_path)
    refused(*start, "epochs=many", cwd=tmp_path)
    assert kubeflow.kept["runs"] == []
    stoker(*start, "epochs=4", cwd=tmp_path)
    assert kubeflow.run()["runtime_config"]["parameters"] == {"epochs": 4}
    assert kubeflow.run()["pipeline_version_reference"]["pipeline_id"] == pipeline["pipeline_id"]

    run = kubeflow.run()["run_id"]
    of = ("--workload", "workload.yaml")
    assert as_json("status", "kubeflow", run, *of, cwd=tmp_path)["run"] == run
    stoker("stop", "kubeflow", run, *of, "--yes", cwd=tmp_path)
    assert kubeflow.run()["state"] == "CANCELED"


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 4)])
def test_the_exit_code_of_status_says_how_a_run_ended(kubeflow, tmp_path, state, code):
    stoker("upload", "kubeflow", "workload.yaml", cwd=tmp_path)
    stoker("start", "kubeflow", "workload.yaml", cwd=tmp_path)
    kubeflow.end(state, error={"message": "no node"})
    words = ("status", "kubeflow", "mnist", "--workload", "workload.yaml", "--json")
    assert json.loads(stoker(*words, cwd=tmp_path, code=code))["status"] == state


def test_a_schedule_on_kubeflow_is_written_whole_and_deleted(kubeflow, tmp_path):
    stoker("upload", "kubeflow", "workload.yaml", cwd=tmp_path)
    schedule = ("schedule", "kubeflow", "workload.yaml")
    stoker(*schedule, "--cron", "@daily", "--param", "epochs=5", cwd=tmp_path)
    stoker(*schedule, "--cron", "@every 12h", cwd=tmp_path)
    (made,) = kubeflow.kept["recurringruns"]
    assert made["runtime_config"].get("parameters", {}) == {}
    stoker(*schedule, "--delete", cwd=tmp_path)
    assert kubeflow.kept["recurringruns"] == []


def test_a_server_that_is_not_there_is_the_platforms_refusal(tmp_path):
    pytest.importorskip("kfp")
    nowhere = {"kubeflow": {"host": "http://127.0.0.1:9"}}
    write(tmp_path, changed(ON_KUBERNETES, kubernetes=nowhere, gate=GATE))
    refused("start", "kubeflow", "workload.yaml", cwd=tmp_path, code=4, env=dict(os.environ))


def test_on_sagemaker_a_pipeline_is_uploaded_started_and_scheduled(aws_server, tmp_path):
    pytest.importorskip("sagemaker")
    env = aws_server.environ()
    aws_server.make_bucket(BUCKET)
    of = {"region": REGION, "source": "code"}
    channels = {"train": {"uri": f"s3://{BUCKET}/data/"}}
    workload = changed(ON_SAGEMAKER, sagemaker=of, gate=GATE, channels=channels)
    write(tmp_path, changed(workload, hyperparameters={"epochs": 3}))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    sagemaker = aws_server.client("sagemaker")
    upload = ("upload", "sagemaker", "workload.yaml")
    as_json(*upload, cwd=tmp_path, env=env)
    pipeline = sagemaker.describe_pipeline(PipelineName="mnist")
    assert pipeline["RoleArn"] == ROLE
    listed = aws_server.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]
    names = {each["Key"].rpartition("/")[2] for each in listed}
    assert names >= {"code.tar.gz", "workload.json"}
    stoker(*upload, "--check", cwd=tmp_path, env=env, code=UNCHANGED)

    start = ("start", "sagemaker", "workload.yaml", "--param")
    stoker(*start, "epochs=4", cwd=tmp_path, env=env)
    found = sagemaker.list_pipeline_executions(PipelineName="mnist")
    (execution,) = found["PipelineExecutionSummaries"]
    arn = execution["PipelineExecutionArn"]
    told = sagemaker.list_pipeline_parameters_for_execution(PipelineExecutionArn=arn)
    assert {"Name": "epochs", "Value": "4"} in told["PipelineParameters"]

    schedule = ("schedule", "sagemaker", "workload.yaml")
    zone = ("--time-zone", "Europe/Berlin")
    more = ("--cron", "cron(30 6 ? * MON-FRI *)", *zone, "--param", "epochs=2")
    stoker(*schedule, *more, cwd=tmp_path, env=env)
    scheduler = aws_server.client("scheduler")
    made = scheduler.get_schedule(Name="stoker-mnist")
    assert made["ScheduleExpression"] == "cron(30 6 ? * MON-FRI *)"
    assert made["ScheduleExpressionTimezone"] == "Europe/Berlin"
    stoker(*schedule, "--delete", cwd=tmp_path, env=env)
    assert scheduler.list_schedules()["Schedules"] == []
