"""What the stack of configs/sagemaker mails: models that wait, idle hosts, drift, missing runs."""

import sys
import types
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session
import msgspec
import pytest
from botocore.stub import Stubber

from stoker.cli.main import run as command
from stoker.platforms.aws import Aws
from stoker.records import Evaluation, Notice, read_json, to_json, write_json
from stoker.records.notices import KINDS
from stoker.run.cloudwatch_metrics import NAMESPACE, publish
from support import sample_records
from support.policies import EVERYTHING, REGION, example, stack, statements

# PutMetricAlarm: "Period multiplied by EvaluationPeriods can't be more than 604,800 seconds".
MAX_WINDOW_SECONDS = 604_800
DAY = timedelta(days=1)
PIPELINE = f"arn:aws:sagemaker:{REGION}:123456789012:pipeline/mnist"


def properties(name: str, **given: str) -> Any:
    return stack({**EVERYTHING, **given})[name]["Properties"]


# As in the developer guide of SageMaker AI, "SageMaker model package state change".
REGISTERED = {
    "source": "aws.sagemaker",
    "detail-type": "SageMaker Model Package State Change",
    "detail": {
        "ModelPackageGroupName": "mnist",
        "ModelPackageVersion": 2,
        "ModelPackageArn": f"arn:aws:sagemaker:{REGION}:123456789012:model-package/mnist/2",
        "ModelPackageStatus": "Completed",
        "ModelApprovalStatus": "PendingManualApproval",
    },
}


def is_matched(pattern: Any, event: Any) -> bool:
    """Whether EventBridge's rule takes an event: lists are alternatives, all keys must hold."""
    for key, wanted in pattern.items():
        given = event.get(key)
        holds = is_matched(wanted, given or {}) if isinstance(wanted, dict) else given in wanted
        if not holds:
            return False
    return True


@pytest.mark.parametrize(
    ("changes", "is_mailed"),
    [
        ({}, True),
        ({"ModelApprovalStatus": "Approved"}, False),
        ({"ModelApprovalStatus": "Rejected"}, False),
        ({"ModelPackageStatus": "InProgress"}, False),
        ({"ModelPackageStatus": "Failed"}, False),
        ({"ModelPackageGroupName": "mnist-stage"}, False),
    ],
)
def test_a_model_that_waits_for_a_person_is_mailed_once_it_is_complete(changes, is_mailed):
    rule = properties("ApprovalRule")
    event = {**REGISTERED, "detail": {**REGISTERED["detail"], **changes}}
    assert is_matched(rule["EventPattern"], event) == is_mailed
    assert rule["Targets"][0]["Arn"] == "FailureTopic"


def watched(name: str) -> set[str]:
    alarm = properties(name)
    single = [alarm["MetricName"]] if "MetricName" in alarm else []
    stats = [
        each["MetricStat"]["Metric"] for each in alarm.get("Metrics", ()) if "MetricStat" in each
    ]
    assert all(each["Namespace"] == NAMESPACE for each in [*stats, *([alarm] if single else [])])
    return {*single, *(each["MetricName"] for each in stats)}


def test_each_kind_that_a_run_tells_has_its_alarm_or_its_rule():
    alarms = watched("DataGroupIdleAlarm") | watched("DriftAlarm")
    # A model that waits is an event, also if the run's own parameter made it wait.
    assert alarms | {"told_approval_pending"} == {f"told_{kind}" for kind in KINDS}


def test_what_a_run_tells_is_a_figure_a_kind_in_the_namespace_that_its_role_may_write(aws_server):
    idle = Notice(kind="data_group_idle", text="the data group made 0 of 10 batches, $1.00")
    publish(example(), (idle,), quiet=False)
    metrics = Aws(region=REGION).call("cloudwatch", "ListMetrics", Namespace=NAMESPACE)["Metrics"]
    assert {each["MetricName"] for each in metrics} == {f"told_{kind}" for kind in KINDS}
    assert {each["Dimensions"][0]["Value"] for each in metrics} == {"mnist"}
    allowed = statements(properties("StepPolicy")["PolicyDocument"])
    (write,) = [each for each in allowed if each["Sid"] == "WriteWhatRunsTell"]
    assert write["Condition"] == {"StringEquals": {"cloudwatch:namespace": NAMESPACE}}


def test_metrics_that_cannot_be_sent_are_a_line_and_no_failure(aws_server, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", "http://127.0.0.1:1")
    publish(example(), (), quiet=False)
    printed = "".join(capsys.readouterr())
    assert not printed or printed.startswith("notify: metrics not sent to CloudWatch: ")


def run_heartbeat(monkeypatch, *, runs, made) -> float:
    """Runs the function's own code; returns the figure that it writes."""
    code = properties("HeartbeatFunction")["Code"]["ZipFile"]
    session = botocore.session.get_session()
    secrets = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    clients: dict[str, Any] = {
        name: session.create_client(name, region_name=REGION, **secrets)
        for name in ("sagemaker", "cloudwatch")
    }
    sent: list[dict[str, Any]] = []
    clients["cloudwatch"].put_metric_data = lambda **request: sent.append(request)
    pages = [runs[:2], runs[2:]]
    with Stubber(clients["sagemaker"]) as stub:
        asked = {"PipelineName": "mnist", "SortBy": "CreationTime", "SortOrder": "Descending"}
        for number, page in enumerate(pages):
            summaries = [
                {"StartTime": when, "PipelineExecutionStatus": status} for when, status in page
            ]
            more = {"NextToken": "next"} if number == 0 else {}
            token = {"NextToken": "next"} if number else {}
            answer = {"PipelineExecutionSummaries": summaries, **more}
            stub.add_response("list_pipeline_executions", answer, {**asked, **token})
        stub.add_response("describe_pipeline", {"CreationTime": made}, {"PipelineName": "mnist"})
        boto = types.SimpleNamespace(client=clients.__getitem__)
        monkeypatch.setitem(sys.modules, "boto3", boto)
        monkeypatch.setenv("PIPELINE", "mnist")
        scope: dict[str, Any] = {}
        exec(compile(code, "index.py", "exec"), scope)
        scope["handler"]({}, None)
    (request,) = sent
    (figure,) = request["MetricData"]
    alarm = properties("HeartbeatAlarm")
    assert request["Namespace"] == alarm["Namespace"]
    assert (figure["MetricName"], figure["Dimensions"]) == (
        alarm["MetricName"],
        alarm["Dimensions"],
    )
    return float(figure["Value"])


@pytest.mark.parametrize(
    ("hours", "between"),
    [("30", DAY), ("78", 3 * DAY), ("174", 7 * DAY), ("750", 31 * DAY), ("8800", 366 * DAY)],
)
def test_the_run_that_did_not_come_is_told_for_any_schedule(monkeypatch, hours, between):
    now = datetime.now(UTC)
    alarm = properties("HeartbeatAlarm", HeartbeatHours=hours)
    made = now - 2 * between - DAY
    # On time, with a failed and a running one since.
    good = [(now, "Executing"), (now - DAY / 2, "Failed"), (now - between, "Succeeded")]
    late = [(now, "Failed"), (now, "Stopped"), (now - between - DAY, "Succeeded")]
    assert run_heartbeat(monkeypatch, runs=good, made=made) < float(alarm["Threshold"])
    assert run_heartbeat(monkeypatch, runs=late, made=made) > float(alarm["Threshold"])
    # Never one that succeeded: since the pipeline was made.
    assert run_heartbeat(monkeypatch, runs=[], made=made) > float(alarm["Threshold"])
    assert run_heartbeat(monkeypatch, runs=[], made=now) < float(alarm["Threshold"])


def test_the_heartbeats_own_end_is_told_and_its_window_is_one_that_cloudwatch_has():
    alarm = properties("HeartbeatAlarm", HeartbeatHours="9000")
    assert alarm["TreatMissingData"] == "breaching"
    assert alarm["Period"] * alarm["EvaluationPeriods"] <= MAX_WINDOW_SECONDS
    rule, permission = properties("HeartbeatRule"), properties("HeartbeatPermission")
    assert rule["ScheduleExpression"] == "rate(30 minutes)"
    assert permission["FunctionName"] == "HeartbeatFunction"
    assert rule["Targets"][0]["Arn"].endswith("HeartbeatFunction")
    assert permission["SourceArn"].endswith("HeartbeatRule")


def test_the_functions_code_fits_into_a_template():
    # AWS::Lambda::Function: ZipFile has up to 4 MiB today, 4,096 characters before.
    assert len(properties("HeartbeatFunction")["Code"]["ZipFile"]) < 4096


@pytest.mark.parametrize(
    ("run", "approval", "is_waiting"),
    [
        ("mnist--0a1b2c3d", "PendingManualApproval", True),
        ("mnist--0a1b2c3d", "Approved", False),
        ("mnist--0a1b2c3d", "Rejected", False),
        # Typed by a person: nothing is registered after it, and no metric is sent.
        ("", "PendingManualApproval", False),
    ],
)
def test_the_step_evaluate_tells_by_the_runs_own_approval_status(
    aws_server, monkeypatch, tmp_path, capsys, run, approval, is_waiting
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_PIPELINE_RUN", run)
    workload = msgspec.structs.replace(
        sample_records.workload(),
        **{
            name: getattr(example(), name) for name in ("platform", "sagemaker", "image", "cluster")
        },
    )
    records = ("profile", "decision", "training")
    for name in records:
        write_json(Path(f"{name}.json"), getattr(sample_records, name)())
    words = [f"--{name}={name}.json" for name in records]
    words += ["--set", f"sagemaker.model.approval={approval}"]
    assert command(["evaluate", to_json(workload), *words]) == 0
    words_of_it = "the model waits for approval in the group mnist"
    assert (f"warning: {words_of_it}" in capsys.readouterr().out) == is_waiting
    record = read_json(Path("evaluation.json"), Evaluation)
    assert (words_of_it in record.warnings) == is_waiting
    metrics = Aws(region=REGION).call("cloudwatch", "ListMetrics", Namespace=NAMESPACE)["Metrics"]
    assert bool(metrics) == bool(run)
