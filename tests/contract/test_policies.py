"""configs/sagemaker/stoker.yaml gives the rights that are used, and no others."""

import ast
import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import botocore.client
import botocore.session
import pytest

from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Group, Json
from stoker.run.judging import champion_quality
from stoker.sagemaker import compile_pipeline
from support import sagemaker_pipeline as sample
from support.command import stoker
from support.examples import project
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

pytestmark = pytest.mark.e2e

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
    *("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams"),
    "logs:PutLogEvents",
    "cloudwatch:PutMetricData",
    # The service, in a VPC.
    *("ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission"),
    *("ec2:DeleteNetworkInterface", "ec2:DeleteNetworkInterfacePermission"),
    *("ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups"),
    *("ec2:DescribeSubnets", "ec2:DescribeVpcs"),
    # The service pulls images, people push them.
    *("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload"),
    *("ecr:GetAuthorizationToken", "ecr:GetDownloadUrlForLayer", "ecr:InitiateLayerUpload"),
    *("ecr:PutImage", "ecr:UploadLayerPart"),
    # Asked for wherever a request has tags.
    "sagemaker:AddTags",
    # Asked for wherever a request names a role; no operation of the API.
    "iam:PassRole",
    # S3 and the service, with a key of the user's own.
    *("kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"),
    # The pipeline, of its steps.
    *("sagemaker:CreateModelPackage", "sagemaker:CreateModelPackageGroup"),
    *("sagemaker:DescribeModelPackageGroup", "sagemaker:CreateProcessingJob"),
    *("sagemaker:DescribeProcessingJob", "sagemaker:StopProcessingJob"),
    # People, by commands of the pages.
    "iam:SimulatePrincipalPolicy",
    *("sagemaker:RetryPipelineExecution", "sagemaker:UpdateModelPackage"),
    *OF_MLFLOW,
}
# Actions of IAM that are no operation of the API.
PERMISSION_ONLY = {*("iam:PassRole", "s3:ListBucket"), *OF_MLFLOW}
# Actions for which IAM takes no resource: metrics, logins, listings, and EC2's Describe calls.
NO_RESOURCE = {
    *("cloudwatch:GetMetricData", "cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"),
    *("sagemaker:ListTrainingJobs", "ec2:DescribeDhcpOptions"),
    *("ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups"),
    *("ec2:DescribeSubnets", "ec2:DescribeVpcs"),
    *("servicequotas:ListAWSDefaultServiceQuotas", "servicequotas:ListServiceQuotas"),
}
# "No permissions are required to perform this operation": STS's API reference.
NO_RIGHT = {"sts:GetCallerIdentity"}
# Operations, and services, that IAM calls otherwise than the API.
IAM_NAMES = {
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
}
IAM_SERVICES = {"service-quotas": "servicequotas"}
# What Aws's methods for objects ask for.
OBJECT_ACTIONS = {
    **dict.fromkeys(("read_object", "open_object"), "s3:GetObject"),
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


def test_a_role_is_trusted_to_services_that_work_for_this_account():
    made = stack(EVERYTHING)
    sagemaker, scheduler = "sagemaker.amazonaws.com", "scheduler.amazonaws.com"
    services: dict[str, Json] = {"execution": sagemaker, "step": [sagemaker, scheduler]}
    for part, service in services.items():
        properties = made[ROLES[part]]["Properties"]
        (statement,) = statements(properties["AssumeRolePolicyDocument"])
        assert statement["Principal"] == {"Service": service}
        assert statement["Action"] == "sts:AssumeRole"
        assert ACCOUNT in json.dumps(statement)


def test_the_stack_makes_the_roles_that_the_example_names():
    settings, made = example().sagemaker, stack(EXAMPLE)
    parts = ("ExecutionRole", "StepRole")
    names = [f"role/{made[part]['Properties']['RoleName']}" for part in parts]  # type: ignore[call-overload, index]
    named = (settings.role, settings.control.role)
    assert [str(arn).rpartition(":")[2] for arn in named] == names


def calls_of_the_sources() -> dict[str, str]:
    """Maps each action to where it is called, for every call through `Aws` in src/stoker."""
    found: dict[str, str] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        if {"kubeflow", "kubernetes"} & set(file.parts):
            continue  # clients of other services, with calls of the same form
        tree = ast.parse(file.read_text())
        # Operations that a comprehension goes through.
        loops = {
            ast.unparse(each.target): [text for item in each.iter.elts for text in _texts(item)]
            for each in ast.walk(tree)
            if isinstance(each, ast.comprehension) and isinstance(each.iter, ast.Tuple)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            if node.func.attr in OBJECT_ACTIONS:
                found[OBJECT_ACTIONS[node.func.attr]] = where
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            is_call = node.func.attr in ("call", "pages", "find") and len(node.args) >= 2
            if is_call and isinstance(words[0] if words else None, str):
                operations = _texts(node.args[1]) or loops.get(ast.unparse(node.args[1]), [])
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
    assert others == {"ecr", "iam", "kms", "sagemaker"}


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
        ("execution", "sagemaker:CreateTrainingJob", "", f"{JOB}/mnist--1"),
        ("execution step", "s3:GetObject", f"{RUN}/{TOKEN}", f"{OTHER}/{TOKEN}"),
        ("step caller", "s3:PutObject", f"{RUN}/{TOKEN}", f"{OTHER}/{TOKEN}"),
        ("step caller", "s3:DeleteObject", f"{RUN}/{TOKEN}", f"{RUN}/output/model.tar.gz"),
        ("execution", "s3:PutObject", "", f"{RUN}/{TOKEN}"),
        ("execution", "s3:DeleteObject", "", f"{RUN}/{TOKEN}"),
        ("step", "sagemaker:StartPipelineExecution", f"{LINE}/mnist", f"{LINE}/other"),
        ("step", "sagemaker:CreateModelPackage", f"{MODELS}/mnist", f"{MODELS}/other"),
        ("caller", "scheduler:DeleteSchedule", f"{SCHEDULE}--weekly", f"{SCHEDULE}2"),
    ],
)
def test_each_part_reaches_what_is_its_own_alone(policies, action, allowed, refused):
    for policy in policies.split():
        assert not allowed or is_allowed(policy, action, allowed)
        assert not is_allowed(policy, action, refused)


@pytest.mark.parametrize("policy", ["step", "caller"])
def test_a_role_is_handed_to_its_service_alone(policy):
    role = f"arn:aws:iam::{ACCOUNT}:role/{role_name('training')}"
    for service, is_own in (("sagemaker", True), ("ec2", False)):
        context = {"iam:PassedToService": f"{service}.amazonaws.com"}
        assert is_allowed(policy, "iam:PassRole", role, context=context) == is_own


def test_the_stack_has_mail_where_it_is_asked_for():
    few, made = stack(EXAMPLE), stack(EVERYTHING)
    mail = {"FailureTopic", "FailureTopicPolicy", "FailureRule"}
    assert made.keys() - few.keys() == {*mail, "KeyPolicy"}
    pipeline = f"{LINE}/mnist"
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


@pytest.mark.parametrize("other", ["mnist-stage", "mnist-2"])
@pytest.mark.parametrize("policy", ["caller", "step", "execution"])
def test_the_rights_of_a_workload_never_reach_one_whose_name_begins_alike(policy, other):
    run = f"{example().name}-"
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


POLICY_OF = {role_name("step"): "step", role_name("training"): "execution"}
READS = ("ProcessingInputs", "InputDataConfig")
WRITES = ("ProcessingOutputConfig", "OutputDataConfig", "CheckpointConfig")


@pytest.fixture
def steps():
    """Returns name and request of each step of the example's pipeline, as it would run."""
    document = json.loads(compile_pipeline(example(), folder=ROOT).definition)
    found = []
    for step in sample.steps(document):
        arguments = sample.resolved(step["Arguments"], document)
        if step["Type"] != "Condition":
            found.append((str(step["Name"]), arguments))
    return found


def uris(value: Json) -> list[str]:
    return re.findall(r'"(s3://[^"]*)"', json.dumps(value))


def an_object(uri: str) -> str:
    """Gives an object below an address: the file itself of a file."""
    return uri if "." in uri.rpartition("/")[2] else uri.rstrip("/") + "/any"


def test_every_step_may_read_its_inputs_and_write_its_outputs(steps):
    checked = 0
    for name, request in steps:
        if "RoleArn" not in request:
            continue
        policy = POLICY_OF[str(request["RoleArn"]).rpartition("/")[2]]
        for action, keys in (("s3:GetObject", READS), ("s3:PutObject", WRITES)):
            for uri in uris([request.get(key) for key in keys]):
                arn = s3_arn(an_object(uri))
                told = f"{name}: {action} {uri}"
                assert is_allowed(policy, action, arn), told
                checked += 1
    assert checked > 8


@pytest.mark.parametrize("action", ["s3:PutObject", "s3:GetObject"])
def test_the_step_that_profiles_may_read_a_kept_one_and_keep_one(action):
    settings = example().sagemaker
    assert settings is not None
    folder = f"{settings.output_uri.rstrip('/')}/stoker/profiles/mnist"
    assert is_allowed("step", action, s3_arn(f"{folder}/0123456789abcdef.json"))


def test_steps_run_under_roles_that_the_pipeline_may_hand_over(steps):
    roles = {str(request["RoleArn"]) for _, request in steps if "RoleArn" in request}
    assert {role.rpartition("/")[2] for role in roles} == {role_name("step")}
    service = {"iam:PassedToService": "sagemaker.amazonaws.com"}
    for role in roles:
        assert is_allowed("step", "iam:PassRole", role, context=service)


PLACE = f"{REGION}:{ACCOUNT}"
SAGEMAKER = f"arn:aws:sagemaker:{PLACE}"
SCHEDULER = f"arn:aws:scheduler:{PLACE}:schedule/default"
# ARNs by the parameter that names the resource.
ARNS = {
    "PipelineName": f"{SAGEMAKER}:pipeline/{{}}",
    "TrainingJobName": f"{SAGEMAKER}:training-job/{{}}",
    "ModelPackageGroupName": f"{SAGEMAKER}:model-package-group/{{}}",
    "logGroupName": f"arn:aws:logs:{PLACE}:log-group:{{}}:log-stream:any",
    "repositoryName": f"arn:aws:ecr:{PLACE}:repository/{{}}",
    "RoleName": f"arn:aws:iam::{ACCOUNT}:role/{{}}",
}


def resource_of(action: str, parameters: Mapping[str, object]) -> str:
    """Returns the ARN that IAM compares a statement's resources with; "*": IAM takes none."""
    service = action.partition(":")[0]
    if service == "s3":
        key = str(parameters.get("Key", ""))
        return s3_arn(f"s3://{parameters['Bucket']}{'/' + key if key else ''}")
    if service == "scheduler":
        return f"{SCHEDULER}/{parameters['Name']}" if "Name" in parameters else "*"
    if service == "servicequotas" or action == "sagemaker:ListTrainingJobs":
        return "*"
    for name, value in parameters.items():
        is_resource = name == "ModelPackageName" or (name.endswith("Arn") and name != "RoleArn")
        if is_resource and str(value).startswith("arn:"):
            return str(value)
    for name, form in ARNS.items():
        if name in parameters:
            value = str(parameters[name])
            return value if value.startswith("arn:") else form.format(value)
    return "*"


def passed_roles(parameters: Mapping[str, object]) -> Iterator[str]:
    target = parameters.get("Target")
    inner = target if isinstance(target, Mapping) else {}
    for found in (parameters.get("RoleArn"), inner.get("RoleArn")):
        if found:
            yield str(found)


def is_granted(policies: str, action: str, parameters: Mapping[str, object]) -> bool:
    resource = resource_of(action, parameters)
    return any(is_allowed(policy, action, resource) for policy in policies.split())


# What stoker is asked, by the verb; {W} is the example's workload, for this region.
COMMANDS = {
    "upload": ["upload sagemaker {W} --yes", "upload sagemaker {W} --check"],
    "start": ["start sagemaker {W} --param epochs=3 --yes"],
    "schedule": [
        "schedule sagemaker {W} --cron 'cron(0 3 ? * MON *)' --param epochs=20",
        "schedule sagemaker {W} --delete",
    ],
    "status": ["status sagemaker mnist"],
    "stop": ["stop sagemaker mnist --yes"],
    "doctor": ["doctor {W}"],
    "train": ["train {W} --group dnn=ml.g5.xlarge:1 --name mnist--r1 --yes"],
    "profile": ["profile --training-job mnist--r1"],
    "init": ["init {T} --from-training-job mnist--r1"],
}


# Operations that moto does not have, with an empty answer.
NOT_IN_MOTO = {
    "ListPipelineExecutionSteps": "PipelineExecutionSteps",
    "ListAWSDefaultServiceQuotas": "Quotas",
    "ListServiceQuotas": "Quotas",
}


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of all clients: action and parameters."""
    made: list[tuple[str, Mapping[str, object]]] = []
    call = botocore.client.BaseClient._make_api_call

    def noted(client, operation, asked):
        api = client.meta.service_model.service_name
        action = f"{IAM_SERVICES.get(api, api)}:{operation}"
        made.append((IAM_NAMES.get(action, action), dict(asked)))
        if operation in NOT_IN_MOTO:
            return {NOT_IN_MOTO[operation]: []}
        return call(client, operation, asked)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", noted)
    return made


def test_stoker_makes_no_call_that_the_policies_do_not_allow(aws_server, calls, tmp_path):
    aws_server.make_bucket("bucket")
    folder = project(tmp_path)
    workload = folder / "configs" / "mnist-sagemaker.yaml"
    text = workload.read_text()
    workload.write_text(text.replace("\nsagemaker:\n", f"\nsagemaker:\n  region: {REGION}\n"))
    calls.clear()
    refused: list[str] = []
    reached: set[str] = set()
    for verb in ("upload", "start", "schedule", "status", "doctor", "train", "profile", "init"):
        refused += asked_of(verb, workload, calls, folder, reached)
    refused += asked_of("stop", workload, calls, folder, reached)
    champion_quality(Aws(region=REGION), "mnist")
    refused += not_granted("evaluate", calls, "caller", reached)
    assert refused == []
    assert reached >= REACHED


# What the verbs must have come to, so that the test looks at something.
REACHED = {
    *("sagemaker:CreatePipeline", "sagemaker:StartPipelineExecution", "scheduler:CreateSchedule"),
    *("sagemaker:CreateTrainingJob", "sagemaker:ListTrainingJobs", "s3:PutObject", "iam:GetRole"),
    *("sagemaker:ListModelPackages", "cloudwatch:GetMetricData"),
}


def asked_of(verb, workload, calls, folder, reached) -> list[str]:
    refused = []
    for command in COMMANDS[verb]:
        done = stoker(*shlex.split(command.format(W=workload, T=folder / "made")), cwd=folder)
        assert calls, (command, done)
        refused += not_granted(command, calls, "caller", reached)
    return refused


def not_granted(command, calls, policies, reached) -> list[str]:
    """Returns a line for each recorded call that is refused, and forgets them all."""
    assert calls, command
    reached |= {action for action, _ in calls}
    found = []
    for action, parameters in calls:
        if action == "sts:GetCallerIdentity":
            continue
        if not is_granted(policies, action, parameters):
            found.append(f"{command}: {action} on {resource_of(action, parameters)}")
        for role in passed_roles(parameters):
            service = action.partition(":")[0]
            context = {"iam:PassedToService": f"{service}.amazonaws.com"}
            if not is_allowed("caller", "iam:PassRole", role, context=context):
                found.append(f"{command}: iam:PassRole of {role} to {service}")
    calls.clear()
    return found
