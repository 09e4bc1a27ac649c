"""`stoker doctor --aws WORKLOAD` against moto, with recorded answers of Service Quotas."""

import json
from collections.abc import Mapping
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from stoker.doctor import Finding
from stoker.doctor.account import examine_account
from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.workload_file import read_workload
from support.command import stoker
from support.moto_server import ACCOUNT, REGION

ROLE = f"arn:aws:iam::{ACCOUNT}:role/stoker-training"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/stoker:1"
WORKLOAD = {
    "name": "mnist",
    "command": ["python", "train.py"],
    "platform": "sagemaker",
    "image": IMAGE,
    "cluster": {"dnn": {"instance_type": "ml.g5.xlarge", "count": 2}},
    "channels": {"training": {"uri": "s3://bucket/mnist"}},
    "constraints": {"allowed_instance_types": ["ml.g5.xlarge", "ml.c5.xlarge", "ml.c5.2xlarge"]},
    "sagemaker": {"role": ROLE, "output_uri": "s3://bucket/stoker", "region": REGION},
}
# Applied quotas; what the account was never given has the service's default, zero.
APPLIED = {"ml.g5.xlarge for training job usage": 2, "ml.c5.xlarge for training job usage": 4}
DEFAULTS = {
    "ml.g5.xlarge for training job usage": 0,
    "ml.c5.2xlarge for training job usage": 4,
    "ml.t3.medium for processing job usage": 20,
    "ml.g5.xlarge for spot training job usage": 1,
    "ml.c5.xlarge for spot training job usage": 8,
    "ml.c5.2xlarge for spot training job usage": 8,
}


def service_quotas(
    applied: Mapping[str, float] = APPLIED, defaults: Mapping[str, float] = DEFAULTS
) -> object:
    """Returns a client whose answers botocore checks by the service's model, in two pages."""
    client = boto3.client("service-quotas", region_name=REGION)
    stub = Stubber(client)
    for operation, quotas in (
        ("list_aws_default_service_quotas", defaults),
        ("list_service_quotas", applied),
    ):
        listed = [{"QuotaName": name, "Value": float(value)} for name, value in quotas.items()]
        first, second = listed[:1], listed[1:]
        stub.add_response(operation, {"Quotas": first, "NextToken": "2"}, None)
        stub.add_response(operation, {"Quotas": second}, None)
    stub.activate()
    return client


def trust(service: str) -> str:
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": service}}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


@pytest.fixture
def account(aws_server):
    """An account that has all that WORKLOAD needs."""
    aws = Aws(region=REGION)
    aws_server.make_bucket("bucket")
    aws.write_object("s3://bucket/mnist/images", b"1")
    policy = trust("sagemaker.amazonaws.com")
    aws.call("iam", "CreateRole", RoleName="stoker-training", AssumeRolePolicyDocument=policy)
    aws.call("ecr", "CreateRepository", repositoryName="stoker")
    media_type = "application/vnd.docker.distribution.manifest.v2+json"
    config = {"digest": f"sha256:{'0' * 64}", "size": 1, "mediaType": media_type}
    manifest = {"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": []}
    aws.call(
        "ecr",
        "PutImage",
        repositoryName="stoker",
        imageTag="1",
        imageManifest=json.dumps(manifest),
    )
    return aws


def findings(folder: Path, *overrides: str, quotas: object = None) -> list[Finding]:
    file = folder / "workload.json"
    file.write_text(json.dumps(WORKLOAD))
    workload = read_workload(file, overrides=overrides)
    aws = Aws(region=REGION, clients={"service-quotas": quotas or service_quotas()})
    return list(examine_account(workload, aws=aws))


def test_an_account_that_has_everything_is_in_order(account, tmp_path):
    found = findings(tmp_path)
    assert [(each.name, each.state) for each in found] == [
        (name, "ok") for name in ("account", "role", "image", "bucket", "data", "quota")
    ]
    assert found[0].text.startswith(f"{ACCOUNT}, {REGION}, as arn:aws:")
    assert found[-1].text == "3 of 3 allowed types can be used"


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([f"sagemaker.role={ROLE}-x"], "role", "there is no role stoker-training-x"),
        (
            ["sagemaker.role=arn:aws:iam::999999999999:role/a"],
            "role",
            "belongs to account 99999999",
        ),
        ([f"sagemaker.schedule_role={ROLE}"], "role", "is not for scheduler.amazonaws.com"),
        ([f"image={IMAGE}2"], "image", "there is no"),
        ([f"image={IMAGE.replace('stoker', 'other')}"], "image", "there is no"),
        ([f"image={IMAGE.replace(REGION, 'us-east-1')}"], "image", "the jobs in eu-central-1"),
        ([f"sagemaker.control.image={IMAGE}-x"], "image", "sagemaker.control.image: there is no"),
        (["sagemaker.output_uri=s3://no-such-bucket/a"], "bucket", "no bucket no-such-bucket"),
        (["sagemaker.checkpoint_uri=s3://no-such-bucket/a"], "bucket", "no-such-bucket"),
        (["channels.training.uri=s3://bucket/other"], "data", "nothing is at s3://bucket/other"),
        (["cluster.dnn.count=3"], "quota", "ml.g5.xlarge for training job usage: 2 of 3"),
        (["cluster.dnn.instance_type=ml.p4d.24xlarge"], "quota", "24xlarge for training job usage"),
        (["sagemaker.control.instance_type=ml.m5.large"], "quota", "ml.m5.large for processing"),
        (
            ["sagemaker.request={EnableManagedSpotTraining: true}"],
            "quota",
            "ml.g5.xlarge for spot training job usage: 1 of 2",
        ),
    ],
)
def test_what_an_account_lacks_is_named_with_a_way_out(account, tmp_path, overrides, name, words):
    failed = [each for each in findings(tmp_path, *overrides) if each.state == "fail"]
    assert [each.name for each in failed] == [name]
    assert words in failed[0].text
    assert failed[0].fix


def test_allowed_types_without_a_quota_are_a_warning(account, tmp_path):
    types = "constraints.allowed_instance_types=[ml.c5.xlarge, ml.p5.48xlarge, ml.trn2.48xlarge]"
    (found,) = [each for each in findings(tmp_path, types) if each.state != "ok"]
    assert (found.name, found.state) == ("quota", "warn")
    assert found.text.startswith("1 of 3 allowed types can be used")
    assert "a plan with ml.p5.48xlarge, ml.trn2.48xlarge cannot start" in found.text


def test_the_quota_of_every_preferred_type_has_to_cover_the_hosts(account, tmp_path):
    preferred = "sagemaker.further_types=[ml.trn2.48xlarge]"
    (found,) = [each for each in findings(tmp_path, preferred) if each.state != "ok"]
    assert (found.name, found.state) == ("quota", "fail")
    assert "ml.trn2.48xlarge for training job usage: 0 of" in found.text


def test_the_whole_catalog_is_counted_where_no_type_is_barred(account, tmp_path):
    found = findings(tmp_path, "constraints.allowed_instance_types=null")[-1]
    assert (found.name, found.state) == ("quota", "ok")
    assert found.text.startswith("3 of ")


def test_an_image_elsewhere_is_a_warning(account, tmp_path):
    (found,) = [each for each in findings(tmp_path, "image=ghcr.io/a/b:1") if each.state != "ok"]
    assert (found.name, found.state) == ("image", "warn")


def test_a_right_that_is_missing_is_a_warning_that_names_it(account, tmp_path):
    client = boto3.client("service-quotas", region_name=REGION)
    stub = Stubber(client)
    message = "User: a is not authorized to perform: servicequotas:ListServiceQuotas"
    stub.add_client_error("list_aws_default_service_quotas", "AccessDeniedException", message)
    stub.activate()
    (found,) = [each for each in findings(tmp_path, quotas=client) if each.state != "ok"]
    assert (found.name, found.state) == ("quota", "warn")
    assert "servicequotas:ListServiceQuotas is missing" in found.text


def test_a_wrong_login_ends_the_checks(tmp_path, aws_server):
    client = boto3.client("sts", region_name=REGION)
    stub = Stubber(client)
    stub.add_client_error("get_caller_identity", "ExpiredToken", "The token has expired")
    stub.activate()
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(WORKLOAD))
    aws = Aws(region=REGION, clients={"sts": client})
    (found,) = examine_account(read_workload(file), aws=aws)
    assert (found.name, found.state) == ("account", "fail")
    assert "log in again" in found.fix


@pytest.fixture
def network(account):
    """A VPC without a way out; gives its id, a subnet, and its route table."""
    vpc = account.call("ec2", "CreateVpc", CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    made = account.call("ec2", "CreateSubnet", VpcId=vpc, CidrBlock="10.0.0.0/24")
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = account.call("ec2", "DescribeRouteTables", Filters=of_vpc)["RouteTables"]
    return vpc, made["Subnet"]["SubnetId"], tables[0]["RouteTableId"]


def in_vpc(folder: Path, subnet: str) -> Finding:
    vpc = f"{{VpcConfig: {{Subnets: [{subnet}], SecurityGroupIds: [sg-1]}}}}"
    return findings(folder, f"sagemaker.request={vpc}")[-1]


def test_a_vpc_without_a_way_out_is_named_with_what_it_lacks(account, network, tmp_path):
    vpc, subnet, _ = network
    account.call("ec2", "CreateVpcEndpoint", VpcId=vpc, ServiceName=f"com.amazonaws.{REGION}.s3")
    found = in_vpc(tmp_path, subnet)
    assert (found.name, found.state) == ("vpc", "fail")
    assert "no endpoint for sagemaker.api, logs" in found.text


def test_a_vpc_with_endpoints_is_in_order(account, network, tmp_path):
    vpc, subnet, _ = network
    for service in ("s3", "sagemaker.api", "logs"):
        name = f"com.amazonaws.{REGION}.{service}"
        account.call("ec2", "CreateVpcEndpoint", VpcId=vpc, ServiceName=name)
    assert in_vpc(tmp_path, subnet).state == "ok"


@pytest.mark.parametrize(("way", "state"), [("nat", "ok"), ("internet", "fail")])
def test_a_route_to_a_nat_gateway_is_a_way_out_and_one_to_the_internet_is_none(
    account, network, tmp_path, way, state
):
    # SageMaker's network interfaces have no public addresses.
    vpc, subnet, table = network
    if way == "nat":
        address = account.call("ec2", "AllocateAddress", Domain="vpc")["AllocationId"]
        made = account.call("ec2", "CreateNatGateway", SubnetId=subnet, AllocationId=address)
        target = {"NatGatewayId": made["NatGateway"]["NatGatewayId"]}
    else:
        gateway = account.call("ec2", "CreateInternetGateway")["InternetGateway"]
        target = {"GatewayId": gateway["InternetGatewayId"]}
        own = {"InternetGatewayId": target["GatewayId"]}
        account.call("ec2", "AttachInternetGateway", VpcId=vpc, **own)
    account.call(
        "ec2", "CreateRoute", RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **target
    )
    assert in_vpc(tmp_path, subnet).state == state


def test_a_subnet_that_does_not_exist_is_named(account, tmp_path):
    found = in_vpc(tmp_path, "subnet-0123456789abcdef0")
    assert found.state == "fail"
    assert "subnet-0123456789abcdef0" in found.text


def test_the_terminal_has_a_line_for_each_check(account, tmp_path):
    # moto has no quotas of SageMaker.
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(WORKLOAD))
    done = stoker("doctor", "--aws", str(file), "--set", f"image={IMAGE}2")
    lines = done.stdout.splitlines()
    assert done.returncode == 4
    assert lines[0].startswith(f"ok    account  {ACCOUNT}, {REGION}")
    assert f"fail  image    image: there is no {IMAGE}2" in lines
    assert any(line.strip().startswith("try: make image") for line in lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--aws"], "--aws needs a workload"),
        (["--aws", "--cluster", "a.yaml"], "cannot be used together"),
        (["--aws", "--peer", "a", "a.yaml"], "--peer cannot be used with --aws"),
        (["a.yaml"], "a workload needs --cluster or --aws"),
    ],
)
def test_a_command_that_makes_no_sense_says_so(words, expected):
    done = stoker("doctor", *words)
    assert done.returncode == 2
    assert expected in done.stderr


def test_a_workload_for_another_platform_is_refused(tmp_path):
    file = tmp_path / "workload.yaml"
    file.write_text("name: a\ncommand: [python, a.py]\n")
    with pytest.raises(UsageError, match="the workload has no settings for SageMaker"):
        list(examine_account(read_workload(file)))
