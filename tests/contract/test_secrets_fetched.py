"""Secrets that a host reads from Secrets Manager and SSM (moto), and what it says if it cannot."""

import json

import boto3
import pytest

from stoker.errors import StokerError
from stoker.launch.secrets import fetched_secrets
from stoker.platforms.aws import Aws
from stoker.records import SecretSource
from stoker.records.secrets import source_of
from support.aws_answers import Answers
from support.moto_server import REGION

VALUE = "s3cr3t-of-the-team"


@pytest.fixture
def aws(aws_server):
    return Aws(region=REGION, sleep=lambda seconds: None)


@pytest.fixture
def answers(aws):
    return Answers(aws)


def made(aws, name: str, **content: object) -> str:
    return str(aws.call("secretsmanager", "CreateSecret", Name=name, **content)["ARN"])


def fetched(aws, told, *, role="dnn"):
    sources = {"X": source_of(told)}
    return fetched_secrets(sources, environ={}, role=role, account=lambda region: aws)


@pytest.mark.parametrize(
    ("content", "key", "expected"),
    [
        (VALUE, None, VALUE),
        (json.dumps({"user": "a", "password": VALUE}), "password", VALUE),
        ("two\nlines", None, "two\nlines"),
    ],
)
def test_a_secret_is_read_whole_or_by_its_key(aws, content, key, expected):
    arn = made(aws, "team/x", SecretString=content)
    assert fetched(aws, SecretSource(arn=arn, json_key=key)) == {"X": expected}


@pytest.mark.parametrize("name", ["plain", "/team/folder/db"])
def test_a_parameter_of_ssm_is_decrypted(aws, name):
    ssm = boto3.client("ssm", region_name=REGION)
    ssm.put_parameter(Name=name, Value=VALUE, Type="SecureString")
    arn = f"arn:aws:ssm:{REGION}:123456789012:parameter/{name.lstrip('/')}"
    assert fetched(aws, arn) == {"X": VALUE}


def test_data_hosts_read_only_what_names_them(aws):
    arn = made(aws, "x", SecretString=VALUE)
    assert fetched(aws, arn, role="data") == {}
    assert fetched(aws, SecretSource(arn=arn, hosts="all"), role="data") == {"X": VALUE}


MISSING = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:nobody-AbCdEf"


@pytest.mark.parametrize(
    ("service", "operation"),
    [("secretsmanager", "GetSecretValue"), ("ssm", "GetParameter")],
)
def test_a_right_that_is_missing_is_named_with_the_stacks_parameter(
    aws, answers, service, operation
):
    arn = (
        MISSING
        if service == "secretsmanager"
        else MISSING.replace("secretsmanager", "ssm").replace(
            "secret:nobody-AbCdEf", "parameter/nobody"
        )
    )
    answers.refuse(service, operation, "AccessDeniedException", "not authorized")
    with pytest.raises(StokerError, match="the secret X cannot be read") as caught:
        fetched(aws, arn)
    assert "TrainingSecrets" in caught.value.fix
