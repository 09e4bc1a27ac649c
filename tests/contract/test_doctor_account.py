"""`stoker doctor WORKLOAD` against moto, with recorded answers of Service Quotas."""

import json
from collections.abc import Mapping
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from stoker.doctor.host import Finding
from stoker.doctor.services import examine_account
from stoker.platforms.aws import Aws
from stoker.workload_file import read_workload
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
    "sagemaker": {"role": ROLE, "output_uri": "s3://bucket/stoker", "region": REGION},
}
# Applied quotas; what the account was never given has the service's default, zero.
APPLIED = {"ml.g5.xlarge for training job usage": 2, "ml.c5.xlarge for training job usage": 4}
DEFAULTS = {
    "ml.g5.xlarge for training job usage": 0,
    "ml.c5.2xlarge for training job usage": 4,
    "ml.t3.medium for processing job usage": 20,
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
        (name, "ok") for name in ("account", "role", "image", "bucket", "quota")
    ]
    assert found[0].text.startswith(f"{ACCOUNT}, {REGION}, as arn:aws:")


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([f"sagemaker.role={ROLE}-x"], "role", "stoker-training-x in eu-central-1"),
        ([f"image={IMAGE}2"], "image", "there is no"),
        ([f"image={IMAGE.replace(REGION, 'us-east-1')}"], "image", "stoker:1 in eu-central-1"),
        ([f"sagemaker.control.image={IMAGE}-x"], "image", "there is no"),
        (["sagemaker.output_uri=s3://no-such-bucket/a"], "bucket", "there is no no-such-bucket"),
        (["cluster.dnn.count=3"], "quota", "ml.g5.xlarge for training job usage: 2 of 3"),
    ],
)
def test_what_an_account_lacks_is_named_with_a_way_out(account, tmp_path, overrides, name, words):
    failed = [each for each in findings(tmp_path, *overrides) if each.state == "fail"]
    assert [each.name for each in failed] == [name]
    assert words in failed[0].text
    assert failed[0].fix


def test_a_right_that_is_missing_is_a_warning_that_names_it(account, tmp_path):
    client = boto3.client("service-quotas", region_name=REGION)
    stub = Stubber(client)
    message = "User: a is not authorized to perform: servicequotas:ListServiceQuotas"
    stub.add_client_error("list_aws_default_service_quotas", "AccessDeniedException", message)
    stub.activate()
    (found,) = [each for each in findings(tmp_path, quotas=client) if each.state != "ok"]
    assert (found.name, found.state) == ("quota", "warn")
    assert "servicequotas:ListServiceQuotas is missing" in found.text
