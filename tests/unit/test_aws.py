"""Checks calls to AWS: refusals in words, answers as JSON, pages, addresses."""

import io
from datetime import datetime, timedelta, timezone

import boto3
import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
)
from botocore.response import StreamingBody
from botocore.stub import Stubber

from stoker.errors import ServiceError, StokerError, UsageError
from stoker.platforms.aws import Aws, explained, split_uri

KEYS = {"region_name": "eu-central-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}


@pytest.fixture(scope="module")
def clients():
    made = {name: boto3.client(name, **KEYS) for name in ("sagemaker", "s3")}
    yield made
    for client in made.values():
        client.close()


@pytest.fixture
def sagemaker(clients):
    with Stubber(clients["sagemaker"]) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


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


def refused(code: str, message: str) -> StokerError:
    error = ClientError({"Error": {"Code": code, "Message": message}}, "CreateTrainingJob")
    return raised(error)


def raised(error: Exception) -> StokerError:
    with pytest.raises(StokerError) as caught, explained("sagemaker:CreateTrainingJob"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("code", "message", "action"),
    [
        (
            "AccessDeniedException",
            "User: arn:aws:sts::1:assumed-role/x/y is not authorized to perform: iam:PassRole on "
            "resource: arn:aws:iam::1:role/z because no identity-based policy allows it",
            "iam:PassRole",
        ),
        (
            "AccessDenied",
            "User: x is not authorized to perform: kms:GenerateDataKey on resource: y",
            "kms:GenerateDataKey",
        ),
        ("AccessDenied", "Access Denied", "sagemaker:CreateTrainingJob"),
        ("403", "Forbidden", "sagemaker:CreateTrainingJob"),
        (
            "ValidationException",
            "x is not authorized to perform: ecr:BatchGetImage",
            "ecr:BatchGetImage",
        ),
    ],
)
def test_a_missing_permission_names_the_action(code, message, action):
    error = refused(code, message)
    assert isinstance(error, ServiceError)
    assert error.what.startswith(f"permission {action} is missing")
    assert error.fix.startswith(f"allow {action}")
    assert error.kind == "denied"
    assert error.exit_code == 4


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ValidationException", "Requested resource not found."),
        ("ResourceNotFound", "Training job does not exist"),
        ("ResourceNotFoundException", "The specified log group does not exist."),
        ("NoSuchKey", "The specified key does not exist."),
        ("404", "Not Found"),
    ],
)
def test_what_is_not_there_is_missing_and_not_denied(code, message):
    error = refused(code, message)
    assert isinstance(error, ServiceError)
    assert error.kind == "missing"
    assert error.code == code


def test_a_bucket_that_is_not_there_is_a_wrong_name_not_a_missing_object():
    error = refused("NoSuchBucket", "The specified bucket does not exist")
    assert isinstance(error, ServiceError)
    assert error.kind == "refused"
    assert "bucket's name" in error.fix


@pytest.mark.parametrize("code", ["ThrottlingException", "TooManyRequestsException", "SlowDown"])
def test_throttling_is_worth_a_retry(code):
    error = refused(code, "Rate exceeded")
    assert isinstance(error, ServiceError)
    assert error.kind == "away"
    assert "throttled sagemaker:CreateTrainingJob 8 times" in error.what


def test_a_service_out_of_reach_is_worth_a_retry():
    error = raised(EndpointConnectionError(endpoint_url="https://example.invalid"))
    assert isinstance(error, ServiceError)
    assert error.kind == "away"
    assert error.action == "sagemaker:CreateTrainingJob"


@pytest.mark.parametrize("code", ["ExpiredTokenException", "ExpiredToken", "InvalidClientTokenId"])
def test_a_login_that_ran_out_is_named(code):
    error = refused(code, "The security token included in the request is expired")
    assert isinstance(error, ServiceError)
    assert error.kind == "stale"
    assert "log in again" in error.fix


def test_missing_credentials_and_region_say_what_to_set():
    assert "aws configure" in raised(NoCredentialsError()).fix
    region = raised(NoRegionError())
    assert isinstance(region, UsageError)
    assert "AWS_REGION" in region.fix


def test_a_wrong_parameter_is_a_usage_error_in_one_line(aws):
    with pytest.raises(UsageError, match="TrainingJobName") as caught:
        aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=7)
    assert "\n" not in caught.value.what


def test_answers_are_json_with_times_in_utc_that_sort_with_records(aws, sagemaker):
    at = datetime(2026, 11, 20, 9, 0, 0, tzinfo=timezone(timedelta(hours=1)))
    sagemaker.add_response(
        "describe_training_job",
        {
            "TrainingJobName": "x",
            "TrainingJobArn": "arn:aws:sagemaker:eu-central-1:1:training-job/x",
            "ModelArtifacts": {"S3ModelArtifacts": "s3://b/m"},
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Training",
            "AlgorithmSpecification": {"TrainingInputMode": "File"},
            "ResourceConfig": {"VolumeSizeInGB": 1},
            "StoppingCondition": {},
            "CreationTime": at,
        },
    )
    answer = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName="x")
    assert answer["CreationTime"] == "2026-11-20T08:00:00.000Z"
    assert "ResponseMetadata" not in answer


def test_a_listing_gives_the_items_of_all_pages(aws, sagemaker):
    arn = "arn:aws:sagemaker:eu-central-1:123456789012:training-job/x"
    first = {"Tags": [{"Key": "a", "Value": "1"}], "NextToken": "more"}
    sagemaker.add_response("list_tags", first, {"ResourceArn": arn})
    sagemaker.add_response(
        "list_tags",
        {"Tags": [{"Key": "b", "Value": "2"}]},
        {"ResourceArn": arn, "NextToken": "more"},
    )
    found = aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
    assert [item["Key"] for item in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://bucket/a/b", ("bucket", "a/b")),
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
    ],
)
def test_addresses_are_split(uri, parts):
    assert split_uri(uri) == parts


@pytest.mark.parametrize("uri", ["bucket/key", "https://bucket/key", "s3:///key", ""])
def test_what_is_no_address_is_a_usage_error(uri):
    with pytest.raises(UsageError, match="not an s3:// address"):
        split_uri(uri)


# ---- objects


def test_nothing_is_said_of_encryption_where_no_key_is_named(aws, s3):
    s3.add_response("put_object", {}, {"Bucket": "b", "Key": "k", "Body": b"x"})
    aws.write_object("s3://b/k", b"x")


def test_a_named_key_encrypts(aws, s3):
    s3.add_response(
        "put_object",
        {},
        {
            "Bucket": "b",
            "Key": "k",
            "Body": b"x",
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "alias/mine",
        },
    )
    aws.write_object("s3://b/k", b"x", kms_key="alias/mine")


CONDITIONAL = {"Bucket": "b", "Key": "k", "Body": b"x", "IfNoneMatch": "*"}


def test_an_object_is_made_unless_there_is_one(aws, s3):
    s3.add_response("put_object", {}, CONDITIONAL)
    s3.add_client_error("put_object", "PreconditionFailed", expected_params=CONDITIONAL)
    assert aws.create_object("s3://b/k", b"x")
    assert not aws.create_object("s3://b/k", b"x")


def test_two_writers_at_once_are_told_apart_by_a_retry(aws, s3, slept):
    s3.add_client_error("put_object", "ConditionalRequestConflict", expected_params=CONDITIONAL)
    s3.add_client_error("put_object", "PreconditionFailed", expected_params=CONDITIONAL)
    assert not aws.create_object("s3://b/k", b"x")
    assert len(slept) == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_a_store_without_conditional_writes_is_asked_first(aws, s3, is_there):
    s3.add_client_error("put_object", "NotImplemented", expected_params=CONDITIONAL)
    if is_there:
        s3.add_response("head_object", {}, {"Bucket": "b", "Key": "k"})
    else:
        s3.add_client_error("head_object", "404", "Not Found")
        s3.add_response("put_object", {}, {"Bucket": "b", "Key": "k", "Body": b"x"})
    assert aws.create_object("s3://b/k", b"x") == (not is_there)


def test_an_object_may_not_be_seen_is_not_the_same_as_not_there(aws, s3):
    s3.add_client_error("head_object", "403", "Forbidden")
    with pytest.raises(ServiceError, match="permission s3:GetObject is missing"):
        aws.has_object("s3://b/k")


def test_an_object_that_breaks_off_is_an_error(aws, s3):
    body = StreamingBody(io.BytesIO(b"short"), content_length=10)
    s3.add_response("get_object", {"Body": body}, {"Bucket": "b", "Key": "k"})
    with pytest.raises(ServiceError, match="AWS did not answer"):
        aws.read_object("s3://b/k")
