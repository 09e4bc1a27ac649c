"""`stoker doctor --aws WORKLOAD` tells what an account lacks, what to do, what may not be asked."""

import json
from collections.abc import Iterator, Mapping

import msgspec
import pytest

from stoker.doctor import Finding
from stoker.doctor.account import examine_account, quotas_of
from stoker.orchestrators.sagemaker.roles import ecr_image, role_arns, trusts
from stoker.platforms.aws import Aws
from stoker.records import Json, SageMakerSettings
from support.aws_answers import Answers
from support.moto import AwsServer
from support.policies import ACCOUNT, REGION, REGISTRY, example, rendered
from support.sagemaker_pipeline import DATA
from support.sagemaker_pipeline import decision as decided

NEEDED = (
    "ml.g5.xlarge for training job usage",
    "ml.g5.2xlarge for training job usage",
    "ml.g5.4xlarge for training job usage",
    "ml.c7i.2xlarge for training job usage",
    "ml.c7i.4xlarge for training job usage",
    "ml.t3.medium for processing job usage",
)
MANIFEST = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
    "config": {"mediaType": "x", "size": 1, "digest": "sha256:" + "1" * 64},
    "layers": [],
}


@pytest.fixture
def aws(aws_server: AwsServer) -> Aws:
    """Makes an empty account."""
    return Aws(region=REGION, sleep=lambda seconds: None)


@pytest.fixture
def answers(aws: Aws) -> Answers:
    """Plays Service Quotas, which moto does not have: one page of each listing."""
    made = Answers(aws)
    give_quotas(made, dict.fromkeys(NEEDED, 4.0))
    return made


def give_quotas(answers: Answers, values: Mapping[str, float], **defaults: float) -> None:
    """Sets what Service Quotas answers from now on."""
    for operation, quotas in (
        ("ListServiceQuotas", values),
        ("ListAWSDefaultServiceQuotas", defaults),
    ):
        listed = [{"QuotaName": name, "Value": value} for name, value in quotas.items()]
        answers.always_answer("service-quotas", operation, lambda q=listed: {"Quotas": q})


@pytest.fixture
def account(aws: Aws, answers: Answers) -> Aws:
    """Makes an account with what the example needs."""
    home = {"LocationConstraint": REGION}
    aws.call("s3", "CreateBucket", Bucket="bucket", CreateBucketConfiguration=home)
    aws.write_object("s3://bucket/mnist/t10k-images-idx3-ubyte.gz", b"x")
    aws.call("ecr", "CreateRepository", repositoryName="stoker")
    for tag in ("mnist", "control"):
        aws.call(
            "ecr",
            "PutImage",
            repositoryName="stoker",
            imageTag=tag,
            imageManifest=json.dumps({**MANIFEST, "annotations": {"tag": tag}}),
        )
    for part, arn in role_arns(settings()).items():
        service = "scheduler" if part == "scheduler" else "sagemaker"
        make_role(aws, arn.rpartition("/")[2], rendered()[f"trust-{service}.json"])
    return aws


def make_role(aws: Aws, name: str, trust: Mapping[str, Json]) -> None:
    document = json.dumps(trust)
    aws.call("iam", "CreateRole", RoleName=name, AssumeRolePolicyDocument=document)


def settings() -> SageMakerSettings:
    found = example().sagemaker
    assert found
    return found


def found(aws: Aws, *overrides: str) -> list[Finding]:
    return list(examine_account(example(*overrides), aws=aws))


def of(findings: list[Finding], name: str) -> Iterator[Finding]:
    return (each for each in findings if each.name == name)


def test_an_account_that_has_what_a_workload_needs_is_told_line_by_line(account: Aws) -> None:
    findings = found(account)
    assert {each.state for each in findings} == {"ok"}
    names = [each.name for each in findings]
    assert names == ["bucket", "data", *["image"] * 2, *["iam"] * 4, *["quota"] * 6]
    (image, _) = of(findings, "image")
    assert " is sha256:" in image.text


def test_what_is_not_there_fails_with_what_makes_it(aws: Aws, answers: Answers) -> None:
    give_quotas(answers, {})
    findings = found(aws)
    missing = [each for each in findings if each.name != "quota"]
    assert {each.state for each in missing} == {"fail"}
    assert all(each.fix for each in findings)
    (bucket,) = of(findings, "bucket")
    assert bucket.text == "there is no s3://bucket"
    assert bucket.fix.startswith(f"aws s3 mb s3://bucket --region {REGION}")
    # Nobody knows such a type here: that is no failure of the account.
    assert {each.state for each in of(findings, "quota")} == {"warn"}


def test_what_may_not_be_asked_is_no_failure_and_names_the_right(
    account: Aws, answers: Answers
) -> None:
    refused = {
        "s3": ("HeadBucket", "403"),
        "ecr": ("DescribeImages", "AccessDeniedException"),
        "iam": ("GetRole", "AccessDenied"),
        "service-quotas": ("ListServiceQuotas", "AccessDeniedException"),
        "ec2": ("DescribeSubnets", "UnauthorizedOperation"),
    }
    for service, (operation, code) in refused.items():
        answers.always_refuse(service, operation, code)
    network = ("sagemaker.vpc.subnets=[subnet-1]", "sagemaker.vpc.security_groups=[sg-1]")
    findings = found(account, *network)
    unasked = [each for each in findings if each.state != "ok"]
    assert {each.state for each in unasked} == {"warn"}
    assert [each.name for each in unasked] == [
        *("bucket", "image", "image", *["iam"] * 4, "quota", "vpc")
    ]
    for right in (
        *("s3:ListBucket", "ecr:DescribeImages", "iam:GetRole"),
        *("servicequotas:ListServiceQuotas", "ec2:DescribeSubnets"),
    ):
        assert any(f"permission {right} is missing" in each.text for each in unasked)
        assert any(each.fix.startswith(f"allow {right} ") for each in unasked)


def test_an_account_that_refuses_is_told_with_its_region_and_left_at_that(
    aws: Aws, answers: Answers
) -> None:
    answers.always_refuse("sts", "GetCallerIdentity", "ExpiredToken")
    (refused,) = found(aws)
    assert refused.state == "fail"
    assert REGION in refused.text
    assert "ExpiredToken" in refused.text


def test_data_images_and_roles_of_another_kind_than_the_workload_says_fail(
    account: Aws, answers: Answers
) -> None:
    name = role_arns(settings())["scheduler"].rpartition("/")[2]
    trust = json.dumps(rendered()["trust-sagemaker.json"])
    account.call("iam", "UpdateAssumeRolePolicy", RoleName=name, PolicyDocument=trust)
    findings = found(
        account,
        "channels.training.uri=s3://bucket/mnists/",
        f"image={REGISTRY}/stoker:other",
        f"sagemaker.control.image={REGISTRY.replace(REGION, 'us-east-1')}/stoker:control",
        "sagemaker.role=arn:aws:iam::210987654321:role/stoker-training",
    )
    failed = [each.text for each in findings if each.state == "fail"]
    assert failed == [
        "channel training: nothing is at s3://bucket/mnists/",
        f"there is no {REGISTRY}/stoker:other",
        f"{REGISTRY.replace(REGION, 'us-east-1')}/stoker:control is in us-east-1: SageMaker pulls "
        f"from ECR of its own region, {REGION}",
        f"stoker-training (execution) is in account 210987654321, and you are in {ACCOUNT}",
        "stoker-scheduler (scheduler) does not trust scheduler.amazonaws.com for account "
        f"{ACCOUNT}",
    ]


def test_quotas_that_are_too_low_fail_where_nothing_else_would_do(
    account: Aws, answers: Answers
) -> None:
    give_quotas(
        answers,
        {NEEDED[0]: 0, NEEDED[1]: 0, "Longest run time for a training job": 3600.0},
        **dict.fromkeys(NEEDED, 1.0),
    )
    findings = list(of(found(account), "quota"))
    assert [(each.state, each.text) for each in findings if each.state != "ok"] == [
        ("fail", f"{NEEDED[0]}: 0, needed 1 (today's cluster)"),
        ("warn", f"{NEEDED[1]}: 0, needed 1 (allowed to plans)"),
        (
            "warn",
            "Longest run time for a training job: 1 h 00 min, needed 2 h 00 min "
            "(sagemaker.max_run_seconds)",
        ),
    ]
    assert "ask for 1 (console, Service Quotas" in findings[0].fix
    # What nobody has changed is listed by its default alone.
    assert sum(each.state == "ok" for each in findings) == 4


def test_the_quotas_of_a_decision_are_those_of_its_plans() -> None:
    needed = quotas_of(example(), decided(data=DATA))
    vital = {each.name: each.value for each in needed if each.is_vital}
    assert f"{DATA.instance_type} for training job usage" in vital
    assert vital[f"{DATA.instance_type} for training job usage"] == DATA.count
    assert not any(each.why == "allowed to plans" for each in needed)
    # One job rents the hosts of all its groups.
    same = msgspec.structs.replace(DATA, instance_type="ml.g5.2xlarge")
    both = {each.name: each.value for each in quotas_of(example(), decided(data=same))}
    assert both["ml.g5.2xlarge for training job usage"] == same.count + 1
    spot = quotas_of(example("sagemaker.spot=true", "sagemaker.max_wait_seconds=9000"), None)
    assert spot[0].name == "ml.g5.xlarge for spot training job usage"


def test_a_network_without_a_way_to_the_services_is_found(account: Aws, answers: Answers) -> None:
    vpc = _id(account.call("ec2", "CreateVpc", CidrBlock="10.0.0.0/16"), "Vpc", "VpcId")
    made = account.call("ec2", "CreateSubnet", VpcId=vpc, CidrBlock="10.0.1.0/24")
    subnet = _id(made, "Subnet", "SubnetId")
    made = account.call("ec2", "CreateSecurityGroup", VpcId=vpc, GroupName="g", Description="d")
    group = str(made["GroupId"])
    network = (f"sagemaker.vpc.subnets=[{subnet}]", f"sagemaker.vpc.security_groups=[{group}]")
    way, hosts = of(found(account, *network), "vpc")
    assert (way.state, hosts.state) == ("fail", "warn")
    assert way.text.endswith("to s3, sagemaker.api, ecr.api, ecr.dkr, logs, monitoring")
    tables = account.call("ec2", "DescribeRouteTables")["RouteTables"]
    assert isinstance(tables, list)
    used = [str(t["RouteTableId"]) for t in tables if t["VpcId"] == vpc]  # type: ignore[index, call-overload]
    for service in ("s3", "sagemaker.api", "ecr.api", "ecr.dkr", "logs"):
        is_gateway = service == "s3"
        account.call(
            "ec2",
            "CreateVpcEndpoint",
            VpcId=vpc,
            ServiceName=f"com.amazonaws.{REGION}.{service}",
            VpcEndpointType="Gateway" if is_gateway else "Interface",
            **({"RouteTableIds": used} if is_gateway else {"PrivateDnsEnabled": True}),
        )
    pair = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    account.call("ec2", "AuthorizeSecurityGroupIngress", GroupId=group, IpPermissions=[pair])
    way, hosts = of(found(account, *network), "vpc")
    assert (way.state, way.text) == ("warn", "no way from the subnets to monitoring")
    assert hosts.state == "ok"


def _id(answer: Mapping[str, Json], *keys: str) -> str:
    value: Json = dict(answer)
    for key in keys:
        assert isinstance(value, Mapping)
        value = value[key]
    return str(value)


@pytest.mark.parametrize(
    ("change", "is_trusted"),
    [
        ({}, True),
        ({"Action": ["sts:AssumeRole", "sts:TagSession"]}, True),
        ({"Principal": {"Service": ["sagemaker.amazonaws.com", "ec2.amazonaws.com"]}}, True),
        ({"Condition": {}}, True),
        ({"Principal": {"Service": "ec2.amazonaws.com"}}, False),
        ({"Condition": {"StringEquals": {"aws:SourceAccount": "210987654321"}}}, False),
        ({"Effect": "Deny"}, False),
    ],
)
def test_a_trust_is_read_as_iam_reads_it(change: dict[str, Json], is_trusted: bool) -> None:
    statement = rendered()["trust-sagemaker.json"]["Statement"][0]  # type: ignore[index, call-overload]
    document: Json = {"Version": "2012-10-17", "Statement": {**statement, **change}}  # type: ignore[dict-item]
    assert trusts(document, service="sagemaker.amazonaws.com", account=ACCOUNT) == is_trusted


def test_the_name_of_an_image_in_ecr_has_parts() -> None:
    digest = "sha256:" + "a" * 64
    image = ecr_image(f"{REGISTRY}/team/stoker@{digest}")
    assert image
    assert (image.repository, image.tag, image.digest) == ("team/stoker", "", digest)
    assert ecr_image("registry.example/stoker:1") is None
    assert ecr_image("ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:1") is None
