import io
from datetime import datetime, timedelta, timezone

import boto3
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError
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
    with pytest.raises(StokerError) as caught, explained("sagemaker:CreateTrainingJob"):
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
        ("ResourceNotFound", "Training job does not exist", "missing", ""),
        ("ResourceNotFoundException", "The log group does not exist.", "missing", ""),
        ("NoSuchKey", "The specified key does not exist.", "missing", ""),
        ("404", "Not Found", "missing", ""),
        # A wrong name in the workload, not a missing object.
        ("NoSuchBucket", "The bucket does not exist", "refused", "check the bucket's name"),
        ("ThrottlingException", "Rate exceeded", "away", "throttled sagemaker:CreateTrainingJob 8"),
        ("TooManyRequestsException", "Rate exceeded", "away", ""),
        ("SlowDown", "Reduce your request rate", "away", ""),
        ("ExpiredTokenException", "The token is expired", "stale", "log in again"),
        ("ExpiredToken", "The token is expired", "stale", "log in again"),
        ("InvalidClientTokenId", "The token is invalid", "stale", "log in again"),
    ],
)
def test_a_refusal_has_a_kind_and_says_what_to_do(code, message, kind, words):
    error = raised(ClientError({"Error": {"Code": code, "Message": message}}, "x"))
    assert (error.kind, error.code) == (kind, code)
    assert words in str(error)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        *((status, "InternalFailure", "away") for status in (500, 502, 503, 504)),
        (400, "ThrottledException", "away"),
        (400, "RequestLimitExceeded", "away"),
        (400, "RequestTimeout", "away"),
        (429, "Whatever", "away"),
        # A proxy wants a login.
        (407, "407", "away"),
        (403, "RequestTimeTooSkewed", "stale"),
        (403, "InvalidSignatureException", "stale"),
        (403, "AccessDenied", "denied"),
        # The store has no conditional writes: `create_object` writes otherwise.
        (501, "NotImplemented", "refused"),
        (400, "ResourceLimitExceeded", "refused"),
    ],
)
def test_a_refusal_is_judged_by_its_status_before_its_words(status, code, kind):
    answer = {
        "Error": {"Code": code, "Message": "service not found"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    if kind in ("refused", "denied"):
        answer["Error"]["Message"] = "no"
    error = raised(ClientError(answer, "x"))
    assert error.kind == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoCredentialsError(), "stale"),
        (RuntimeError("the refreshed credentials are still expired."), "stale"),
        (ResponseParserError("not JSON"), "away"),
        (ProxyConnectionError(proxy_url="http://proxy.invalid"), "away"),
        (EndpointConnectionError(endpoint_url="https://example.invalid"), "away"),
    ],
)
def test_a_call_without_an_answer_may_pass(error, kind):
    found = raised(error)
    assert (found.kind, found.action) == (kind, "sagemaker:CreateTrainingJob")


def test_missing_credentials_and_region_say_what_to_set():
    assert "aws configure" in raised(NoCredentialsError()).fix
    region = raised(NoRegionError())
    assert isinstance(region, UsageError)
    assert "AWS_REGION" in region.fix


def test_a_wrong_parameter_is_a_usage_error_in_one_line(aws):
    with pytest.raises(UsageError, match="TrainingJobName") as caught:
        aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=7)
    assert "\n" not in caught.value.what


def test_answers_are_json_with_times_in_utc_that_sort_with_records(aws, s3):
    at = datetime(2026, 11, 20, 9, 0, 0, tzinfo=timezone(timedelta(hours=1)))
    s3.add_response("head_object", {"LastModified": at})
    answer = aws.call("s3", "HeadObject", Bucket="b", Key="k")
    assert answer == {"LastModified": "2026-11-20T08:00:00.000Z"}


def test_a_listing_gives_the_items_of_all_pages(aws, clients):
    asked = {"ResourceArn": "arn:aws:sagemaker:eu-central-1:123456789012:training-job/x"}
    first = {"Tags": [{"Key": "a", "Value": "1"}], "NextToken": "more"}
    with Stubber(clients["sagemaker"]) as sagemaker:
        sagemaker.add_response("list_tags", first, asked)
        second = {"Tags": [{"Key": "b", "Value": "2"}]}
        sagemaker.add_response("list_tags", second, {**asked, "NextToken": "more"})
        found = aws.pages("sagemaker", "ListTags", items="Tags", **asked)
        assert [item["Key"] for item in found] == ["a", "b"]


def test_addresses_are_split():
    assert split_uri("s3://bucket/a/b") == ("bucket", "a/b")
    assert split_uri("s3://bucket") == split_uri("s3://bucket/") == ("bucket", "")


@pytest.mark.parametrize("uri", ["bucket/key", "https://bucket/key", "s3:///key", ""])
def test_what_is_no_address_is_a_usage_error(uri):
    with pytest.raises(UsageError, match="not an s3:// address"):
        split_uri(uri)


WHOLE = {"Bucket": "b", "Key": "k", "Body": b"x"}
CONDITIONAL = WHOLE | {"IfNoneMatch": "*"}


def test_a_named_key_encrypts(aws, s3):
    s3.add_response("put_object", {}, WHOLE)
    aws.write_object("s3://b/k", b"x", kms_key=None)
    encrypted = WHOLE | {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/mine"}
    s3.add_response("put_object", {}, encrypted)
    aws.write_object("s3://b/k", b"x", kms_key="alias/mine")


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
        s3.add_response("put_object", {}, WHOLE)
    assert aws.create_object("s3://b/k", b"x") == (not is_there)


def test_an_object_may_not_be_seen_is_not_the_same_as_not_there(aws, s3):
    s3.add_client_error("head_object", "403", "Forbidden")
    with pytest.raises(ServiceError, match="permission s3:GetObject is missing"):
        aws.has_object("s3://b/k")


@pytest.mark.parametrize(
    "kind", [EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError]
)
def test_a_service_that_is_not_reached_says_what_to_look_at(kind):
    err = kind(endpoint_url="https://s3", proxy_url="http://proxy", error="no route to host")
    with (
        pytest.raises(ServiceError, match="AWS did not answer") as raised,
        explained("s3:GetObject"),
    ):
        raise err
    assert "check the network" in raised.value.fix


def test_an_object_that_breaks_off_is_an_error(aws, s3):
    body = StreamingBody(io.BytesIO(b"short"), content_length=10)
    s3.add_response("get_object", {"Body": body}, {"Bucket": "b", "Key": "k"})
    with pytest.raises(ServiceError, match="AWS did not answer"):
        aws.read_object("s3://b/k")
