import boto3
import pytest
from botocore.exceptions import (
    ClientError,
    NoCredentialsError,
    NoRegionError,
)
from botocore.stub import Stubber

from stoker.errors import StokerError, UsageError
from stoker.platforms.aws import Aws

KEYS = {"region_name": "eu-central-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}


@pytest.fixture(scope="module")
def clients():
    made = {name: boto3.client(name, **KEYS) for name in ("sagemaker", "s3")}
    yield made
    for client in made.values():
        client.close()


@pytest.fixture
def s3(clients):
    with Stubber(clients["s3"]) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def slept():
    return []


@pytest.fixture
def aws(clients, slept):
    return Aws(clients=clients, sleep=slept.append)


def raised(error: Exception) -> StokerError:
    with pytest.raises(StokerError) as caught, Aws().explained("sagemaker:CreateTrainingJob"):
        raise error
    return caught.value


NOT_ALLOWED = (
    "User: arn:aws:sts::1:assumed-role/x/y is not authorized to perform: iam:PassRole on "
    "resource: arn:aws:iam::1:role/z because no identity-based policy allows it"
)


@pytest.mark.parametrize(
    ("code", "message", "action"),
    [
        ("AccessDeniedException", NOT_ALLOWED, "iam:PassRole"),
        ("AccessDenied", "Access Denied", "sagemaker:CreateTrainingJob"),
        ("403", "Forbidden", "sagemaker:CreateTrainingJob"),
        ("ValidationException", "not authorized to perform: ecr:Batch", "ecr:Batch"),
    ],
)
def test_a_missing_permission_names_the_action(code, message, action):
    error = raised(ClientError({"Error": {"Code": code, "Message": message}}, "x"))
    assert error.what.startswith(f"permission {action} is missing")
    assert error.fix.startswith(f"allow {action}")
    assert error.exit_code == 4


@pytest.mark.parametrize(
    ("code", "message", "kind", "words"),
    [
        ("ValidationException", "Requested resource not found.", "missing", ""),
        ("NoSuchKey", "The specified key does not exist.", "missing", ""),
        ("NoSuchBucket", "The bucket does not exist", "refused", "check the bucket's name"),
        ("ThrottlingException", "Rate exceeded", "away", "sagemaker:CreateTrainingJob 8 times"),
        ("SlowDown", "Reduce your request rate", "away", ""),
        ("ExpiredTokenException", "The token is expired", "stale", "log in"),
    ],
)
def test_a_refusal_has_a_kind_and_says_what_to_do(code, message, kind, words):
    error = raised(ClientError({"Error": {"Code": code, "Message": message}}, "x"))
    assert (error.kind, error.code) == (kind, code)
    assert words in str(error)


def test_missing_credentials_and_region_say_what_to_set():
    assert "aws configure" in raised(NoCredentialsError()).fix
    region = raised(NoRegionError())
    assert isinstance(region, UsageError)
    assert "AWS_REGION" in region.fix


WHOLE = {"Bucket": "b", "Key": "k", "Body": b"x"}
CONDITIONAL = WHOLE | {"IfNoneMatch": "*"}


def test_an_object_is_made_unless_there_is_one(aws, s3):
    s3.add_response("put_object", {}, CONDITIONAL)
    s3.add_client_error("put_object", "PreconditionFailed", expected_params=CONDITIONAL)
    assert aws.create_object("s3://b/k", b"x")
    assert not aws.create_object("s3://b/k", b"x")
