"""Secrets that a host reads from Secrets Manager and SSM (moto), and what it says if it cannot."""

import json

import boto3
import pytest

from stoker.errors import StokerError
from stoker.launch.secrets import fetched_secrets
from stoker.platforms.aws import Aws
from stoker.records import SecretSource
from stoker.records.secrets import fetch_variables, source_of
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
    variables = fetch_variables({"X": source_of(told)})
    return fetched_secrets({"PATH": "/bin", **variables}, role=role, account=lambda region: aws)


@pytest.mark.parametrize(
    ("content", "key", "expected"),
    [
        (VALUE, None, VALUE),
        (json.dumps({"user": "a", "password": VALUE}), "password", VALUE),
        (json.dumps({"user": "a"}), None, json.dumps({"user": "a"})),
        (json.dumps({"port": 5432}), "port", "5432"),
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


@pytest.mark.parametrize("arn", [MISSING, f"arn:aws:ssm:{REGION}:123456789012:parameter/nobody"])
def test_a_secret_that_does_not_exist_is_said(aws, arn):
    with pytest.raises(StokerError, match="there is no secret X") as caught:
        fetched(aws, arn)
    assert caught.value.exit_code == 4
    assert arn in caught.value.where


@pytest.mark.parametrize(
    ("service", "operation", "message", "words"),
    [
        ("secretsmanager", "GetSecretValue", "not authorized", "secretsmanager:GetSecretValue"),
        ("secretsmanager", "GetSecretValue", "Access to KMS is not allowed", "kms:Decrypt"),
        ("ssm", "GetParameter", "not authorized", "ssm:GetParameter"),
    ],
)
def test_a_right_that_is_missing_is_named_with_the_stacks_parameter(
    aws, answers, service, operation, message, words
):
    arn = (
        MISSING
        if service == "secretsmanager"
        else MISSING.replace("secretsmanager", "ssm").replace(
            "secret:nobody-AbCdEf", "parameter/nobody"
        )
    )
    answers.refuse(service, operation, "AccessDeniedException", message)
    with pytest.raises(StokerError, match="may not read the secret X") as caught:
        fetched(aws, arn)
    assert words in caught.value.what
    assert "TrainingSecrets" in caught.value.fix


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ({"SecretBinary": b"\x00\x01"}, None, "is binary"),
        ({"SecretString": VALUE}, "token", "only if it is a JSON object"),
        ({"SecretString": json.dumps([VALUE])}, "token", "only if it is a JSON object"),
        ({"SecretString": json.dumps({"tokens": VALUE})}, "token", "its keys: tokens"),
        ({"SecretString": f"{VALUE}\0"}, None, "zero byte"),
    ],
)
def test_content_that_no_variable_can_hold_is_refused_without_showing_it(aws, content, key, words):
    arn = made(aws, "x", **content)
    with pytest.raises(StokerError, match=words) as caught:
        fetched(aws, SecretSource(arn=arn, json_key=key))
    assert VALUE not in str(caught.value)


def test_a_service_that_does_not_answer_is_asked_again(aws, answers):
    arn = made(aws, "x", SecretString=VALUE)
    answers.refuse("secretsmanager", "GetSecretValue", "ThrottlingException", "slowly", times=2)
    assert fetched(aws, arn) == {"X": VALUE}
