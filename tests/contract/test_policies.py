"""configs/sagemaker/stoker.yaml gives the rights that are used, and no others."""

import ast
import fnmatch
import json
import re
from collections.abc import Mapping
from typing import Any

import botocore.session
import pytest
from botocore.model import OperationModel

from stoker.pipelines.sagemaker.client import SCHEDULE_GROUP, SageMakerClient
from stoker.pipelines.sagemaker.compile import compile_pipeline
from stoker.pipelines.sagemaker.schedule import RETRY_POLICY
from stoker.pipelines.schedules import AskedSchedule, schedule_name
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Group
from stoker.run.run_folders import run_base
from support.policies import (
    ACCOUNT,
    EVERYTHING,
    EXAMPLE,
    POLICIES,
    REGION,
    ROLES,
    ROOT,
    TEMPLATE,
    actions,
    example,
    is_allowed,
    rendered,
    resources,
    role_name,
    s3_arn,
    stack,
    statements,
)

SOURCES = ROOT / "src" / "stoker"

# MLflow's client asks for these under IAM's names for them; no service of botocore has them.
OF_MLFLOW = {
    "sagemaker:CallMlflowAppApi",
    *(
        f"sagemaker-mlflow:{action}"
        for action in (
            *("AccessUI", "CreateExperiment", "CreateRun", "GetExperiment", "GetExperimentByName"),
            *("GetRun", "ListArtifacts", "LogBatch", "LogMetric", "LogParam", "SearchRuns"),
            *("SetTag", "UpdateRun"),
        )
    ),
}
# What no source calls, by who does, under the role or with the policy.
OF_OTHERS = {
    # The service, of a job's hosts and lines.
    *("logs:CreateLogGroup", "logs:CreateLogStream"),
    "logs:PutLogEvents",
    # The service, in a VPC.
    *("ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission"),
    *("ec2:DeleteNetworkInterface", "ec2:DeleteNetworkInterfacePermission"),
    *("ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups"),
    "ec2:DescribeVpcs",
    # The service pulls images, people push them.
    *("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload"),
    *("ecr:GetAuthorizationToken", "ecr:GetDownloadUrlForLayer", "ecr:InitiateLayerUpload"),
    *("ecr:PutImage", "ecr:UploadLayerPart"),
    # Asked for wherever a request names a role; no operation of the API.
    "iam:PassRole",
    # Asked for with a submission that has tags.
    "batch:TagResource",
    # S3 and the service, with a key of the user's own.
    *("kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"),
    # The pipeline, of its steps.
    *("sagemaker:CreateModelPackage", "sagemaker:CreateProcessingJob"),
    *("sagemaker:DescribeProcessingJob", "sagemaker:StopProcessingJob"),
    # People, by `aws scheduler`; the scheduler itself, with a dead-letter queue.
    *("scheduler:DeleteSchedule", "sqs:SendMessage"),
    # People, by commands of the pages (test_page_rights).
    *("iam:SimulatePrincipalPolicy", "logs:FilterLogEvents"),
    *("sagemaker:RetryPipelineExecution", "sagemaker:UpdateModelPackage"),
    *OF_MLFLOW,
}
# Actions of IAM that are no operation of the API.
PERMISSION_ONLY = {*("iam:PassRole", "s3:ListBucket", "s3:GetLifecycleConfiguration"), *OF_MLFLOW}
# Actions for which IAM takes no resource: metrics, logins, listings, and EC2's Describe calls.
NO_RESOURCE = {
    *("cloudwatch:DescribeAlarmsForMetric", "cloudwatch:GetMetricData"),
    *("cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"),
    *("sagemaker:ListTrainingJobs", "scheduler:ListSchedules", "ec2:DescribeDhcpOptions"),
    "sagemaker:ListPipelines",
    *("batch:DescribeJobQueues", "batch:DescribeServiceEnvironments"),
    *("batch:DescribeServiceJob", "batch:ListServiceJobs"),
    *("ec2:DescribeNetworkInterfaces", "ec2:DescribeRouteTables", "ec2:DescribeSecurityGroups"),
    *("ec2:DescribeSubnets", "ec2:DescribeVpcEndpoints", "ec2:DescribeVpcs"),
    *("servicequotas:ListAWSDefaultServiceQuotas", "servicequotas:ListServiceQuotas"),
}
# "No permissions are required to perform this operation": STS's API reference.
NO_RIGHT = {"sts:GetCallerIdentity"}
# Operations, and services, that IAM calls otherwise than the API.
IAM_NAMES = {
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:DeleteObjects": "s3:DeleteObject",
    "s3:GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}
IAM_SERVICES = {"service-quotas": "servicequotas"}
# What Aws's methods for objects ask for.
OBJECT_ACTIONS = {
    **dict.fromkeys(("read_object", "open_object", "has_object"), "s3:GetObject"),
    **dict.fromkeys(("write_object", "create_object"), "s3:PutObject"),
    "delete_object": "s3:DeleteObject",
}


def test_every_action_is_an_operation_that_exists():
    session = botocore.session.get_session()
    of_api = {name: service for service, name in IAM_SERVICES.items()}
    for action in rendered_actions() - PERMISSION_ONLY:
        service, _, operation = action.partition(":")
        model = session.get_service_model(of_api.get(service, service))
        assert operation in model.operation_names, action


def rendered_actions() -> set[str]:
    return {action for policy in rendered(is_all=True).values() for action, _ in actions(policy)}


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_allowed_wholesale(name):
    for action, statement in actions(rendered(is_all=True)[name]):
        assert "*" not in action
        assert statement["Effect"] == "Allow"
        if action in NO_RESOURCE:
            assert resources(statement) == ["*"], f"{action} matches nothing but *"
        else:
            assert "*" not in resources(statement), f"{action} takes a resource"
        if action == "iam:PassRole":
            assert "iam:PassedToService" in json.dumps(statement["Condition"])


@pytest.mark.parametrize("name", POLICIES)
def test_statements_are_named_once_and_fit_into_a_policy(name):
    policy = rendered(is_all=True)[name]
    sids = [statement["Sid"] for statement in statements(policy)]
    assert len(sids) == len(set(sids))
    # IAM's limits, white space not counted: 10,240 inline in a role, 6,144 managed.
    assert len(re.sub(r"\s", "", json.dumps(policy))) < 6144


def test_a_role_is_trusted_to_one_service_that_works_for_this_account():
    made = stack(EVERYTHING)
    services = dict.fromkeys(ROLES, "sagemaker") | {"scheduler": "scheduler"}
    services |= dict.fromkeys(("starter", "heartbeat"), "lambda")
    for part, service in services.items():
        properties = made[ROLES[part]]["Properties"]
        (statement,) = statements(properties["AssumeRolePolicyDocument"])
        assert statement["Principal"] == {"Service": f"{service}.amazonaws.com"}
        assert statement["Action"] == "sts:AssumeRole"
        # Lambda sends no such condition.
        assert (ACCOUNT in json.dumps(statement)) == (service != "lambda")


def test_the_stack_makes_the_roles_that_the_example_names():
    settings, made = example().sagemaker, stack(EXAMPLE)
    parts = ("ExecutionRole", "StepRole", "PipelineRole", "SchedulerRole")
    names = [f"role/{made[part]['Properties']['RoleName']}" for part in parts]  # type: ignore[call-overload, index]
    named = (settings.role, settings.control.role, settings.pipeline_role, settings.schedule_role)
    assert [str(arn).rpartition(":")[2] for arn in named] == names


def calls_of_the_sources() -> dict[str, str]:
    """Maps each action to where it is called, for every call through `Aws` in src/stoker."""
    found: dict[str, str] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        if {"kubeflow", "kubernetes"} & set(file.parts):
            continue  # clients of other services, with calls of the same form
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            if node.func.attr in OBJECT_ACTIONS:
                found[OBJECT_ACTIONS[node.func.attr]] = where
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            is_call = node.func.attr in ("call", "pages", "find") and len(node.args) >= 2
            if is_call and isinstance(words[0] if words else None, str):
                operations = _texts(node.args[1])
                assert operations, f"{where}: the operation is not to be read from the source"
                if not operations[0][:1].isupper():
                    continue  # of another service's client: AWS's operations are CamelCase
                service = IAM_SERVICES.get(str(words[0]), words[0])
                names = [f"{service}:{operation}" for operation in operations]
                found.update({IAM_NAMES.get(name, name): where for name in names})
    return found


def _texts(node: ast.expr) -> list[str]:
    """Returns the texts that an expression may be: a constant, or one of two."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return [node.value] if is_text else []  # type: ignore[attr-defined]


def test_the_rights_are_those_that_are_used():
    called = calls_of_the_sources()
    assert {"sagemaker:CreateTrainingJob", "s3:PutObject"} <= called.keys()
    used = (called.keys() | OF_OTHERS) - NO_RIGHT
    assert {action: called.get(action) for action in used - rendered_actions()} == {}
    assert rendered_actions() - used == set()
    assert called.keys() & OF_OTHERS == set()
    # People push images, hand over roles and have keys; what services do is not theirs.
    theirs = {action for action, _ in actions(rendered(is_all=True)["caller"])}
    others = {action.partition(":")[0] for action in theirs - called.keys()}
    assert others == {"ecr", "iam", "kms", "logs", "sagemaker", "scheduler"}


def test_the_training_job_may_read_its_channels(tmp_path):
    workload = example()
    data = Group(name="data", role="data", instance_type="ml.c7i.4xlarge", count=1)
    groups = (Group.of_today(workload.cluster.dnn), data)
    spec = JobSpec.of(workload, groups=groups, run_dir=tmp_path / "mnist--4xk2")
    body: dict[str, Any] = dict(SageMakerPlatform().plan(spec).body)
    objects = {"stoker_token": "token", "stoker_code": "code.tar.gz"}
    for channel in body["InputDataConfig"]:
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        uri += objects.get(channel["ChannelName"], "any")
        assert is_allowed("execution", "s3:GetObject", s3_arn(uri)), uri


OWN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}"
JOB, LINE, MODELS = f"{OWN}:training-job", f"{OWN}:pipeline", f"{OWN}:model-package-group"
SCHEDULE = f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule/default/stoker-mnist"
RUN, OTHER = (s3_arn(f"s3://bucket/stoker/{name}--4xk2") for name in ("mnist", "other"))
TOKEN = "stoker_token/token"


@pytest.mark.parametrize(
    ("policies", "action", "allowed", "refused"),
    [
        ("step caller", "sagemaker:CreateTrainingJob", f"{JOB}/mnist--1", f"{JOB}/other-1"),
        ("execution scheduler starter", "sagemaker:CreateTrainingJob", "", f"{JOB}/mnist--1"),
        ("execution step", "s3:GetObject", f"{RUN}/{TOKEN}", f"{OTHER}/{TOKEN}"),
        ("step caller", "s3:PutObject", f"{RUN}/{TOKEN}", f"{OTHER}/{TOKEN}"),
        ("step caller", "s3:DeleteObject", f"{RUN}/{TOKEN}", f"{RUN}/output/model.tar.gz"),
        ("execution", "s3:PutObject", "", f"{RUN}/{TOKEN}"),
        ("execution", "s3:DeleteObject", "", f"{RUN}/{TOKEN}"),
        ("scheduler", "sagemaker:StartPipelineExecution", f"{LINE}/mnist", f"{LINE}/other"),
        ("pipeline", "sagemaker:CreateModelPackage", f"{MODELS}/mnist", f"{MODELS}/other"),
        ("caller", "sagemaker:ListPipelineVersions", f"{LINE}/mnist", f"{LINE}/other"),
        ("caller", "sagemaker:UpdatePipelineVersion", f"{LINE}/mnist", f"{LINE}/other"),
        ("caller", "scheduler:DeleteSchedule", f"{SCHEDULE}--weekly", f"{SCHEDULE}2"),
        ("prune", "s3:DeleteObject", f"{RUN}/output/model.tar.gz", f"{OTHER}/output/model.tar.gz"),
    ],
)
def test_each_part_reaches_what_is_its_own_alone(policies, action, allowed, refused):
    for policy in policies.split():
        assert not allowed or is_allowed(policy, action, allowed)
        assert not is_allowed(policy, action, refused)


BATCH = f"arn:aws:batch:{REGION}:{ACCOUNT}"


@pytest.mark.parametrize(
    ("action", "allowed", "refused", "tag"),
    [
        ("batch:SubmitServiceJob", f"{BATCH}:job-queue/gpus", f"{BATCH}:job-queue/gpus2", ""),
        ("batch:GetJobQueueSnapshot", f"{BATCH}:job-queue/gpus", f"{BATCH}:job-queue/other", ""),
        ("batch:TerminateServiceJob", f"{BATCH}:service-job/1", f"{BATCH}:job/1", "Resource"),
        ("batch:TagResource", f"{BATCH}:service-job/1", f"{BATCH}:job-queue/gpus", "Request"),
        ("sagemaker:DescribeTrainingJob", f"{JOB}/AWSBatchmnist--1", f"{JOB}/other-1", ""),
        ("sagemaker:StopTrainingJob", "", f"{JOB}/AWSBatchother--1", ""),
    ],
)
def test_the_queues_policy_reaches_its_queue_and_the_workloads_jobs_alone(
    action, allowed, refused, tag
):
    for run, is_own in (("mnist--1", True), ("mnist-stage--1", False)):
        context = {f"aws:{tag}Tag/stoker:run": run}
        asked = {"context": context, "is_all": True}
        is_wanted = bool(allowed) and (is_own or not tag)
        assert is_allowed("queue", action, allowed, **asked) == is_wanted
        assert not is_allowed("queue", action, refused, **asked)


@pytest.mark.parametrize("policy", ["step", "caller"])
def test_a_role_is_handed_to_its_service_alone(policy):
    role = f"arn:aws:iam::{ACCOUNT}:role/{role_name('training')}"
    for service, is_own in (("sagemaker", True), ("ec2", False)):
        context = {"iam:PassedToService": f"{service}.amazonaws.com"}
        assert is_allowed(policy, "iam:PassRole", role, context=context) == is_own


def test_who_uploads_starts_and_schedules_the_pipeline_may_make_each_call(aws_server):
    aws_server.make_bucket("bucket")
    aws = Aws(region=REGION)
    calls: list[tuple[str, str]] = []

    def noted(params: Mapping[str, str], model: OperationModel, **_: object) -> None:
        calls.append(call_as_iam_sees_it(model, params))

    for service in ("s3", "sagemaker", "scheduler"):
        events = aws.client(service).meta.events  # type: ignore[attr-defined]
        events.register("before-parameter-build", noted)
    client = SageMakerClient(example().sagemaker, aws=aws)
    pipeline = compile_pipeline(example(), folder=ROOT)
    for _ in range(2):
        client.compared(pipeline)
        client.upload(pipeline, is_changed=True)
    client.start(example(), ["epochs=3"])
    for hour in (3, 4):
        when = f"cron(0 {hour} ? * MON *)"
        asked = AskedSchedule(name="stoker-mnist", cron=when, parameters=["epochs=3"])
        client.schedule(example(), asked)
    updates = {"s3:PutObject", "sagemaker:UpdatePipeline", "scheduler:UpdateSchedule"}
    assert updates <= {action for action, _ in calls}
    assert [call for call in calls if not is_allowed("caller", *call)] == []


def call_as_iam_sees_it(model: OperationModel, params: Mapping[str, str]) -> tuple[str, str]:
    service, place = model.service_model.service_name, f"{REGION}:{ACCOUNT}"
    if service == "s3":
        bucket = f"arn:aws:s3:::{params['Bucket']}"
        if "Key" not in params:
            return IAM_NAMES[f"s3:{model.name}"], bucket
        action = {"HeadObject": "GetObject"}.get(model.name, model.name)
        return f"s3:{action}", f"{bucket}/{params['Key']}"
    if service == "scheduler":
        name = f"arn:aws:scheduler:{place}:schedule/default/{params.get('Name')}"
        return f"scheduler:{model.name}", "*" if model.name == "ListSchedules" else name
    name = params.get("PipelineName", "")
    arn = name if name.startswith("arn:") else f"arn:aws:sagemaker:{place}:pipeline/{name}"
    return f"sagemaker:{model.name}", params.get("PipelineExecutionArn", arn)


def test_a_part_that_a_workload_does_not_use_has_no_rights():
    few = {action for policy in rendered().values() for action, _ in actions(policy)}
    services = {action.partition(":")[0] for action in rendered_actions() - few}
    assert services == {
        "batch",
        "ec2",
        "kms",
        "sagemaker",
        "sagemaker-mlflow",
        "secretsmanager",
        "sqs",
        "ssm",
    }
    assert rendered_actions() - few >= OF_MLFLOW
    # People use the key, too; the scheduler and the function do not.
    with_key = {p for p, policy in rendered(is_all=True).items() if "kms:" in json.dumps(policy)}
    assert with_key == {"caller", "execution", "step", "pipeline"}


def test_the_stack_has_a_schedule_and_mail_where_they_are_asked_for():
    few, made = stack(EXAMPLE), stack(EVERYTHING)
    mail = {"ScheduleAlarm", "FailureTopic", "FailureTopicPolicy", "FailureRule", "ApprovalRule"}
    mail |= {"DataGroupIdleAlarm", "DriftAlarm"}
    heart = {"Role", "Policy", "Function", "Rule", "Permission", "Alarm"}
    mail |= {f"Heartbeat{part}" for part in heart}
    policies = {
        f"{name}Policy"
        for name in ("Network", "Mlflow", "Key", "Webhook", "Queue", "Secrets", "TrainingQueue")
    }
    assert made.keys() - few.keys() == {*mail, *policies, "Schedule"}
    pipeline = f"{LINE}/mnist"
    schedule: Any = made["Schedule"]["Properties"]
    assert (schedule["Name"], schedule["Target"]["Arn"]) == ("stoker-mnist", pipeline)
    # As stoker schedule makes it.
    assert schedule["Name"] == schedule_name(example(), None)
    assert schedule["Target"]["RetryPolicy"] == RETRY_POLICY
    assert schedule["Target"]["DeadLetterConfig"] == {"Arn": EVERYTHING["DeadLetterQueue"]}
    # A start that is given up is no run, of which the rule could tell.
    alarm: Any = made["ScheduleAlarm"]["Properties"]
    assert alarm["MetricName"] == "InvocationDroppedCount"
    assert alarm["Dimensions"] == [{"Name": "ScheduleGroup", "Value": SCHEDULE_GROUP}]
    heartbeat: Any = made["HeartbeatAlarm"]["Properties"]
    assert heartbeat["Dimensions"] == [{"Name": "PipelineName", "Value": "mnist"}]
    assert heartbeat["TreatMissingData"] == "breaching"
    rule: Any = made["FailureRule"]["Properties"]
    assert rule["EventPattern"]["detail"]["pipelineArn"] == [pipeline]


def test_the_template_is_what_cloudformation_takes():
    from cfnlint import core
    from cfnlint.api import lint

    text, rules = TEMPLATE.read_text(), core.get_rules([], [], [])
    shared = TEMPLATE.with_name("shared.yaml").read_text()
    for each in (text, shared):
        assert [str(match) for match in lint(each, rules, [REGION])] == []
    assert lint("Resources: {R: {Type: AWS::IAM::Role, Properties: {Rolename: r}}}", rules)
    assert len(text.encode()) < 51200, "a longer one has to be put into S3"


@pytest.mark.parametrize("other", ["mnist-stage", "mnist-2", "mnist-stage-eu", "mnist-a"])
@pytest.mark.parametrize("policy", ["caller", "step", "execution", "pipeline"])
def test_the_rights_of_a_workload_never_reach_one_whose_name_begins_alike(policy, other):
    run = run_base(example())
    assert run == "mnist-"
    own, foreign = f"{run}-20261126-1", f"{other}--20261126-1"
    earlier = f"{other}-20261126-1"
    for action, statement in actions(rendered(is_all=True)[policy]):
        for resource in resources(statement):
            if "--" not in resource:
                continue
            for name in (foreign, earlier):
                asked = resource.replace("mnist--*", name).replace("*", "x")
                assert not is_allowed(policy, action, asked), (action, asked)
            # Its own jobs and folders are reached.
            assert fnmatch.fnmatchcase(resource.replace("mnist--*", own), resource), resource


def test_no_pattern_of_the_stack_continues_a_name_by_one_dash():
    lines = TEMPLATE.read_text().splitlines()
    patterns = [line for line in lines if "RoleName:" not in line]
    assert not re.search(r"\$\{Name\}(-(?!-)|\*)", "\n".join(patterns))
