"""configs/sagemaker: what the roles may do is what the sources call, and no more than that."""

import ast
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import botocore.session
import pytest

from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Group
from stoker.settings import read_workload
from support.policies import (
    ACCOUNT,
    FOLDER,
    POLICIES,
    REGION,
    ROOT,
    TRUSTS,
    actions,
    is_allowed,
    resources,
    s3_arn,
    statements,
)

SOURCES = ROOT / "src" / "stoker"

# Actions of IAM that are no operation of the API.
PERMISSION_ONLY = {
    "iam:PassRole": "asked for wherever a request names a role",
    "s3:ListBucket": "what the operations ListObjectsV2 and HeadBucket need",
}
# Actions for which IAM takes no resource.
NO_RESOURCE = {
    "cloudwatch:GetMetricData": "CloudWatch has no ARNs of metrics",
    "cloudwatch:PutMetricData": "CloudWatch has no ARNs of metrics",
    "ecr:GetAuthorizationToken": "a login is to the whole registry",
    "ec2:DescribeInstanceTypes": "EC2's Describe calls know no resources",
    "pricing:GetProducts": "a price list is nobody's",
    "scheduler:ListSchedules": "a listing is of the account",
    "sts:GetCallerIdentity": "it needs no permission at all; here for those who read",
    "ec2:DescribeDhcpOptions": "EC2's Describe calls know no resources",
    "ec2:DescribeNetworkInterfaces": "EC2's Describe calls know no resources",
    "ec2:DescribeSecurityGroups": "EC2's Describe calls know no resources",
    "ec2:DescribeSubnets": "EC2's Describe calls know no resources",
    "ec2:DescribeVpcs": "EC2's Describe calls know no resources",
}
# Operations of S3 that IAM calls otherwise.
IAM_NAMES = {"s3:ListObjectsV2": "s3:ListBucket"}
# What Aws's methods for objects ask for.
OBJECT_ACTIONS = {
    "read_object": "s3:GetObject",
    "open_object": "s3:GetObject",
    "has_object": "s3:GetObject",
    "write_object": "s3:PutObject",
    "create_object": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_action_is_an_operation_that_exists(name: str) -> None:
    session = botocore.session.get_session()
    for action, _ in actions(name):
        service, _, operation = action.partition(":")
        if action in PERMISSION_ONLY:
            continue
        assert operation in session.get_service_model(service).operation_names, action


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_allowed_wholesale(name: str) -> None:
    for action, statement in actions(name):
        assert "*" not in action
        assert statement["Effect"] == "Allow"
        if "*" in resources(statement):
            assert action in NO_RESOURCE, f"{action} takes a resource"


@pytest.mark.parametrize("name", POLICIES)
def test_an_action_that_takes_no_resource_names_none(name: str) -> None:
    for action, statement in actions(name):
        if action in NO_RESOURCE:
            assert resources(statement) == ["*"], f"{action} matches nothing but *"


@pytest.mark.parametrize("name", POLICIES)
def test_a_role_is_handed_to_one_service_only(name: str) -> None:
    for action, statement in actions(name):
        if action == "iam:PassRole":
            assert "iam:PassedToService" in json.dumps(statement["Condition"])


@pytest.mark.parametrize("name", POLICIES)
def test_statements_are_named_once_and_fit_into_a_role(name: str) -> None:
    sids = [statement["Sid"] for statement in statements(name)]
    assert len(sids) == len(set(sids))
    assert all(re.fullmatch(r"[A-Za-z0-9]+", str(sid)) for sid in sids)
    # IAM's limits, white space not counted: 10,240 inline in a role, 6,144 managed.
    assert len(re.sub(r"\s", "", (FOLDER / name).read_text())) < 6144


@pytest.mark.parametrize("name", TRUSTS)
def test_a_role_is_trusted_to_one_service(name: str) -> None:
    (statement,) = statements(name)
    service = name.removeprefix("trust-").removesuffix(".json")
    assert statement["Principal"] == {"Service": f"{service}.amazonaws.com"}
    assert statement["Action"] == "sts:AssumeRole"


def test_the_readme_explains_every_statement() -> None:
    text = (FOLDER / "README.md").read_text()
    for name in (*POLICIES, *TRUSTS):
        assert f"`{name}`" in text
    for name in POLICIES:
        for statement in statements(name):
            assert f"`{statement['Sid']}`" in text, f"{name}: {statement['Sid']}"


@pytest.mark.parametrize("name", [*POLICIES, *TRUSTS])
def test_the_readmes_way_to_fill_them_in_leaves_no_placeholder(name: str) -> None:
    text = (FOLDER / "README.md").read_text()
    function = text[text.index("    fill() {") : text.index("    aws iam create-role")]
    values = {
        "ACCOUNT": ACCOUNT,
        "REGION": REGION,
        "BUCKET": "b",
        "PREFIX": "p",
        "DATA_BUCKET": "d",
        "DATA_PREFIX": "e",
        "NAME": "mnist",
        "REPOSITORY": "r",
    }
    done = subprocess.run(
        ["bash", "-c", f"{function}\nfill {name}"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **values},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    left = set(re.findall(r"\b[A-Z_]{4,}\b", json.dumps(json.loads(done.stdout))))
    assert left <= {"SUBNET", "SECURITY_GROUP"}
    assert "123456789012" in done.stdout or name == "trust-lambda.json"


def calls_of_the_sources() -> dict[str, str]:
    """Action to where it is called, of every call through `Aws` in src/stoker."""
    found: dict[str, str] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        if {"kubeflow", "kubernetes"} & set(file.parts):
            continue  # clients of other services, with calls of the same form
        if file.name == "aws.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            if node.func.attr in OBJECT_ACTIONS:
                found[OBJECT_ACTIONS[node.func.attr]] = where
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            is_call = node.func.attr in ("call", "pages") and len(node.args) >= 2
            if is_call and isinstance(words[0] if words else None, str):
                operations = _texts(node.args[1])
                assert operations, f"{where}: the operation is not to be read from the source"
                if not operations[0][:1].isupper():
                    continue  # of another service's client: AWS's operations are CamelCase
                names = [f"{words[0]}:{operation}" for operation in operations]
                found.update({IAM_NAMES.get(name, name): where for name in names})
    return found


def _texts(node: ast.expr) -> list[str]:
    """The texts that an expression may be: a constant, or one of two."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return [node.value] if is_text else []  # type: ignore[attr-defined]


def test_every_call_of_the_sources_is_allowed_by_some_policy() -> None:
    allowed = {action for name in POLICIES for action, _ in actions(name)}
    called = calls_of_the_sources()
    assert {"sagemaker:CreateTrainingJob", "s3:PutObject"} <= called.keys()
    missing = {action: where for action, where in called.items() if action not in allowed}
    assert not missing


@pytest.fixture
def body(tmp_path: Path) -> Mapping[str, object]:
    """The request of the example's job with a data group, as the pipeline's train step names it."""
    workload = read_workload(
        ROOT / "configs" / "mnist-sagemaker.yaml",
        overrides=[
            "channels.training.uri=s3://BUCKET/mnist/",
            "sagemaker.output_uri=s3://BUCKET/stoker",
        ],
    )
    assert workload.cluster is not None
    data = Group(name="data", role="data", instance_type="ml.c7i.4xlarge", count=1)
    groups = (Group.of_today(workload.cluster.dnn), data)
    job = JobSpec.of(workload, groups=groups, run_dir=tmp_path / "mnist-4xk2")
    return SageMakerPlatform().plan(job).body


def test_the_training_job_may_read_its_channels_and_nothing_of_others(
    body: Mapping[str, object],
) -> None:
    channels = body["InputDataConfig"]
    assert isinstance(channels, list)
    uris = {c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in channels}
    objects = {
        "training": uris["training"] + "t10k-images-idx3-ubyte.gz",
        "stoker_token": uris["stoker_token"] + "token",
    }
    for uri in objects.values():
        assert is_allowed("execution-role.json", "s3:GetObject", s3_arn(uri))
    other = objects["stoker_token"].replace("mnist-4xk2", "other-4xk2")
    assert not is_allowed("execution-role.json", "s3:GetObject", s3_arn(other))
    for action in ("s3:PutObject", "s3:DeleteObject"):
        assert not is_allowed("execution-role.json", action, s3_arn(objects["stoker_token"]))


@pytest.mark.parametrize("policy", ["step-role.json", "caller.json"])
def test_who_starts_the_job_may_do_so_and_write_its_token(
    policy: str, body: Mapping[str, object]
) -> None:
    job = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{body['TrainingJobName']}"
    role = f"arn:aws:iam::{ACCOUNT}:role/stoker-training"
    token = s3_arn(f"s3://BUCKET/stoker/{body['TrainingJobName']}/stoker_token/token")
    service = {"iam:PassedToService": "sagemaker.amazonaws.com"}
    assert is_allowed(policy, "sagemaker:CreateTrainingJob", job)
    assert is_allowed(policy, "iam:PassRole", role, context=service)
    assert not is_allowed(
        policy, "iam:PassRole", role, context={"iam:PassedToService": "ec2.amazonaws.com"}
    )
    assert is_allowed(policy, "s3:PutObject", token)
    assert is_allowed(policy, "s3:DeleteObject", token)
    model = token.replace("stoker_token/token", "output/model.tar.gz")
    assert not is_allowed(policy, "s3:DeleteObject", model)
    assert not is_allowed(policy, "sagemaker:CreateTrainingJob", job.replace("mnist", "other"))


def test_only_who_starts_jobs_may_create_them() -> None:
    job = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/mnist-1"
    for name in ("execution-role.json", "scheduler-role.json", "starter-role.json"):
        assert not is_allowed(name, "sagemaker:CreateTrainingJob", job)


def test_the_scheduler_may_start_this_pipeline_only() -> None:
    pipeline = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:pipeline/"
    start = "sagemaker:StartPipelineExecution"
    assert is_allowed("scheduler-role.json", start, f"{pipeline}mnist")
    assert not is_allowed("scheduler-role.json", start, f"{pipeline}other")
    assert [action for action, _ in actions("scheduler-role.json")] == [start]
