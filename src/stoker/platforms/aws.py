"""Calls to AWS through boto3, with retries, timeouts and readable errors.

aws = Aws(region="eu-central-1")
aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName="mnist")["TrainingJobStatus"]
aws.read_object("s3://bucket/folder/profile.json")
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import IO, cast

from stoker.environment import cloud_region
from stoker.errors import MissingExtraError, ServiceError, ServiceErrorKind, StokerError, UsageError
from stoker.platforms.service_limits import object_problem, over_limits, tag_problems
from stoker.records import Json, Workload
from stoker.records.base import Document, mappings
from stoker.repeat import (
    READ_AGAIN_SECONDS,
    Clock,
    ResultT,
    Sleep,
    Suppressed,
    may_pass,
    repeated,
)

# Operations that change nothing: what they are asked for exists, or does not.
_READING = ("Describe", "List", "Get", "Head")
# Where a user says a part of a request.
_WRITTEN_AS = {
    "Name": "--name",
    "ScheduleExpression": "--cron",
    "ScheduleExpressionTimezone": "--time-zone",
    "Target": "--param, or the workload's keys sagemaker.schedule_role and dead_letter_queue",
    "PipelineName": "the workload's key name",
    "PipelineParameters": "--param",
    "PipelineDefinition": "the workload, which is too large for a pipeline",
    "RoleArn": "the workload's keys sagemaker.role and pipeline_role",
    "ModelPackageGroupName": "the workload's key sagemaker.model.group",
    "Tags": "Tags in the workload's key sagemaker.request",
}
# Attempts of one call with exponential backoff (botocore's standard mode: at most 20 s each).
MAX_ATTEMPTS = 8

_ACTION = re.compile(r"perform:? ([a-z0-9-]+:[A-Za-z*]+)")
_MISSING = (
    "ResourceNotFound",
    "ResourceNotFoundException",
    "NoSuchKey",
    "NoSuchEntity",
    "ParameterNotFound",
    "ParameterVersionNotFound",
    "404",
    "NotFound",
)
# Some services name a missing object only in the message.
_MISSING_WORDS = ("does not exist", "not found", "could not find")
# Of throttling with a status other than 429: ThrottlingException, RequestThrottled.
_THROTTLED = re.compile(r"throttl|TooManyRequests|SlowDown|RequestLimitExceeded", re.IGNORECASE)
# Without a final answer: timeouts, a proxy that wants a login, throttling.
_PASSING_STATUS = (407, 408, 429)
_PASSING_CODES = ("RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete")
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403")
# Codes of requests whose time differs too much from the service's.
_CLOCK = ("RequestTimeTooSkewed", "InvalidSignatureException", "SignatureDoesNotMatch")
_STALE_LOGIN = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "RequestExpired",
    "UnrecognizedClientException",
    # botocore's, if it cannot renew a login.
    "CredentialRetrievalError",
    "SSOError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    # The metadata service of a host may be away for a moment.
    "NoCredentialsError",
    *_CLOCK,
)
_LOG_IN = "log in again: aws sso login, or new keys"
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
# A new object may be invisible for a while.
EVENTUAL_SECONDS = 30.0
# Answers of S3-like stores to a conditional write: the object exists, another write is in progress,
# not supported.
_EXISTS = ("PreconditionFailed", "412")
_CONFLICT = ("ConditionalRequestConflict", "409")
_UNCONDITIONAL = ("NotImplemented", "501", "MethodNotAllowed")
# Attempts while another write of the same object is in progress.
_CONFLICTS = 3


def error_kind(code: str, message: str, *, status: int = 0) -> ServiceErrorKind:
    """Returns the kind of a refusal; some services name the reason only in the message."""
    words = message.lower()
    has_no_answer = status >= 500 and code not in _UNCONDITIONAL
    is_passing = status in _PASSING_STATUS or code in _PASSING_CODES or _THROTTLED.search(code)
    if has_no_answer or is_passing:
        return "away"
    if code in _STALE_LOGIN:
        return "stale"
    if code in _DENIED or "not authorized" in words:
        return "denied"
    if code in _EXISTS:
        return "taken"
    # A bucket that does not exist is a wrong name in the workload.
    if code != "NoSuchBucket" and (code in _MISSING or any(w in words for w in _MISSING_WORDS)):
        return "missing"
    return "refused"


def refusal(
    error: Mapping[str, object], action: str, where: str, *, status: int = 0
) -> ServiceError:
    """Returns the error for a refusal as botocore has parsed it; `status` is HTTP's."""
    code = str(error.get("Code", ""))
    message = str(error.get("Message", "")).strip()
    kind = error_kind(code, message, status=status)
    what = f"{code}: {message}"
    fix = ""
    if kind == "denied":
        named = _ACTION.search(message)
        missing = named.group(1) if named else action
        what = f"permission {missing} is missing: {message}"
        fix = f"allow {missing} as configs/sagemaker/stoker.yaml does"
    elif kind == "stale":
        fix = "check this machine's clock, and its keys" if code in _CLOCK else _LOG_IN
    elif kind == "away":
        did = "throttled" if status < 500 and _THROTTLED.search(code) else "did not answer"
        what = f"AWS {did} {action} {MAX_ATTEMPTS} times: {message or code}"
        fix = "try again in a minute"
    elif code == "NoSuchBucket":
        fix = "check the bucket's name, or create it"
    return ServiceError(what, where=where or action, fix=fix, code=code, action=action, kind=kind)


def tag_list(tags: Mapping[str, str]) -> list[Json]:
    """Returns tags as the services take them, sorted by their keys."""
    return [{"Key": key, "Value": tags[key]} for key in sorted(tags)]


class Aws:
    """AWS, for one account and region.

    Args:
        region: Absent: AWS_REGION, else what boto3 finds.
        clients: Clients by service, instead of boto3's (for recorded answers).
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        clients: Mapping[str, object] | None = None,
        sleep: Sleep = time.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        # boto3 does not read AWS_REGION.
        self._region = region or cloud_region()
        self._given = dict(clients or {})
        self._clients = dict(self._given)
        self.sleep = sleep
        self.clock = clock

    def client(self, service: str) -> object:
        """Returns the boto3 client of a service; raises UsageError without boto3 or a region."""
        if service not in self._clients:
            self._clients[service] = _new_client(service, self._region)
        return self._clients[service]

    def caller(self) -> str | None:
        """Returns the ARN of who calls; None if AWS does not tell, which takes 20 s at most.

        Recorded answers have no caller.
        """
        if self._given:
            return None
        try:
            client = _new_client(
                "sts", self._region, connect_seconds=5.0, read_seconds=5.0, attempts=2
            )
            with explained("sts:GetCallerIdentity"):
                answer = getattr(client, "get_caller_identity")()  # noqa: B009
        except StokerError:
            # Without keys, a region or a network the next call says so.
            return None
        return str(answer["Arn"])

    def renew_login(self) -> None:
        """Lets the next call read the machine's keys again, which a client reads only once."""
        import boto3

        boto3.setup_default_session()
        self._clients = dict(self._given)

    @property
    def region(self) -> str:
        """The region in use; raises a UsageError if none is known."""
        return str(getattr(self.client("sagemaker"), "meta").region_name)  # noqa: B009

    def repeated(
        self,
        call: Callable[[], ResultT],
        *,
        seconds: float = READ_AGAIN_SECONDS,
        is_passing: Callable[[ServiceError], bool] = may_pass,
        tell: Callable[[ServiceError], None] = lambda error: None,
    ) -> ResultT:
        """Repeats a call that AWS does not answer, or for which the login must be renewed."""

        def is_worth_it(error: ServiceError) -> bool:
            if not is_passing(error):
                return False
            if error.kind == "stale":
                self.renew_login()
            return True

        return repeated(
            call,
            seconds=seconds,
            is_passing=is_worth_it,
            tell=tell,
            sleep=self.sleep,
            clock=self.clock,
        )

    def call(self, service: str, operation: str, **parameters: object) -> dict[str, Json]:
        """Calls an operation of the API; returns the answer as JSON (times as ISO 8601 in UTC).

        Raises ServiceError if AWS refuses it or is away, UsageError for a wrong parameter.
        """
        action = f"{service}:{operation}"
        client = self.client(service)
        from botocore import xform_name

        if not operation.startswith(_READING):
            _check_limits(client, operation, parameters, where=action)
        method = getattr(client, xform_name(operation))
        with explained(action):
            answer = method(**parameters)
        return {key: _json(value) for key, value in answer.items() if key != "ResponseMetadata"}

    def find(self, service: str, operation: str, **parameters: object) -> dict[str, Json] | None:
        """Calls an operation that describes something; returns None if that does not exist."""
        with Suppressed("missing"):
            return self.call(service, operation, **parameters)
        return None

    def pages(
        self, service: str, operation: str, *, items: str, **parameters: object
    ) -> Iterator[Document]:
        """Yields the objects of all pages of a listing; `items` is their key."""
        for answer in self.answers(service, operation, **parameters):
            yield from mappings(answer, items)

    def answers(
        self, service: str, operation: str, **parameters: object
    ) -> Iterator[dict[str, Json]]:
        """Yields the pages of a listing."""
        token: dict[str, object] = {}
        while True:
            answer = self.call(service, operation, **parameters, **token)
            yield answer
            # CloudWatch Logs begins its keys with a small letter.
            name = "NextToken" if "NextToken" in answer else "nextToken"
            following = {name: answer.get(name)}
            # A page that names itself as the next one would never end.
            if not answer.get(name) or following == token:
                return
            token = dict(following)

    def object_pages(self, uri: str, **asked: str) -> Iterator[dict[str, Json]]:
        """Yields the pages of a listing of what begins with an address, of 1000 objects each."""
        bucket, prefix = split_uri(uri)
        following: dict[str, object] = {}
        while True:
            place: dict[str, object] = {"Bucket": bucket, "Prefix": prefix}
            page = self.call("s3", "ListObjectsV2", **place, **asked, **following)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": page["NextContinuationToken"]}

    def read_object(self, uri: str) -> bytes:
        with self.open_object(uri) as content:
            return content.read()

    @contextlib.contextmanager
    def open_object(self, uri: str) -> Iterator[IO[bytes]]:
        """Opens an object as a stream; raises ServiceError, also if the stream breaks off."""
        bucket, key = split_uri(uri)
        with explained("s3:GetObject", where=uri):
            body = self._s3("get_object", Bucket=bucket, Key=key)["Body"]
        content = cast("IO[bytes]", body)
        try:
            yield cast("IO[bytes]", _ObjectStream(content, uri=uri))
        finally:
            content.close()

    def write_object(
        self, uri: str, content: bytes | IO[bytes], *, kms_key: str | None = None
    ) -> None:
        """Writes an object, encrypted with the given key or the bucket's."""
        bucket, key = split_uri(uri)
        _check_object(uri)
        with explained("s3:PutObject", where=uri):
            self._s3("put_object", Bucket=bucket, Key=key, Body=content, **_encryption(kms_key))

    def create_object(self, uri: str, content: bytes, *, kms_key: str | None = None) -> bool:
        """Writes an object unless it exists; returns whether it was written.

        Only one of several concurrent callers writes, unless the store has no conditional writes.
        """
        bucket, key = split_uri(uri)
        _check_object(uri)
        for attempt in range(_CONFLICTS):
            if attempt:
                self.sleep(1.0)
            try:
                with explained("s3:PutObject", where=uri):
                    put = {"Bucket": bucket, "Key": key, "Body": content, **_encryption(kms_key)}
                    self._s3("put_object", **put, IfNoneMatch="*")
                return True
            except ServiceError as err:
                if err.kind == "taken":
                    return False
                if err.code in _UNCONDITIONAL:
                    break
                if err.code not in _CONFLICT:
                    raise
        if self.has_object(uri):
            return False
        self.write_object(uri, content, kms_key=kms_key)
        return True

    def copy_object(self, source: str, target: str) -> None:
        """Copies an object of any size within S3."""
        from_bucket, from_key = split_uri(source)
        bucket, key = split_uri(target)
        copy = getattr(self.client("s3"), "copy")  # noqa: B009
        with explained("s3:PutObject", where=f"{source} to {target}"):
            # Not CopyObject, which is limited to 5 GB.
            copy({"Bucket": from_bucket, "Key": from_key}, bucket, key)

    def delete_object(self, uri: str) -> None:
        """Deletes an object, which may be missing."""
        bucket, key = split_uri(uri)
        with explained("s3:DeleteObject", where=uri):
            self._s3("delete_object", Bucket=bucket, Key=key)

    def has_object(self, uri: str) -> bool:
        bucket, key = split_uri(uri)
        with Suppressed("missing"), explained("s3:GetObject", where=uri):
            self._s3("head_object", Bucket=bucket, Key=key)
            return True
        return False

    def _s3(self, method: str, **parameters: object) -> Mapping[str, object]:
        answer: Mapping[str, object] = getattr(self.client("s3"), method)(**parameters)
        return answer


class _ObjectStream:
    """The content of an object; a stream that breaks off raises ServiceError.

    Here, not around the reader: botocore's ReadTimeoutError is an OSError, which a reader that
    writes files would take for its own disk's.
    """

    def __init__(self, content: IO[bytes], *, uri: str) -> None:
        self._content = content
        self._uri = uri

    def read(self, *size: int) -> bytes:
        """Returns the next `size` bytes, all of them without it; b"" at the end."""
        # botocore wraps some of urllib3's errors, and none of a socket's.
        from urllib3.exceptions import HTTPError

        action = "s3:GetObject"
        try:
            with explained(action, where=self._uri):
                return self._content.read(*size)
        except (OSError, HTTPError) as err:
            what = f"AWS did not answer: {err}"
            raise ServiceError(
                what, where=self._uri, code=type(err).__name__, action=action, kind="away"
            ) from err


def _check_limits(
    client: object, operation: str, parameters: Mapping[str, object], *, where: str
) -> None:
    """Raises UsageError for what the service's model says it would refuse, all of it in one."""
    # Clients of recorded answers have none.
    model = getattr(getattr(client, "meta", None), "service_model", None)
    if model is None:
        return
    shape = model.operation_model(operation).input_shape
    violations = [*over_limits(parameters, shape), *tag_problems(parameters.get("Tags"))]
    refused = [each for each in violations if not each.is_growing]
    if refused:
        texts = "; ".join(f"{each.place} {each.what}" for each in refused)
        keys = {_WRITTEN_AS.get(str(each.path[0]), "") for each in refused if each.path}
        written = " and ".join(sorted(keys - {""}))
        fix = f"change {written}" if written else f"see the API reference of {operation}"
        raise UsageError(f"{operation} would refuse this: {texts}", where=where, fix=fix)


def _check_object(uri: str) -> None:
    problem = object_problem(split_uri(uri)[1])
    if problem:
        raise UsageError(
            f"S3 would refuse this address: {problem}",
            where=uri,
            fix="correct the key of the workload, or the option, that has this address",
        )


def _encryption(kms_key: str | None) -> dict[str, object]:
    if kms_key:
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
    return {}


def region_of(workload: Workload) -> str | None:
    """Returns the region that a workload names."""
    if workload.sagemaker:
        return workload.sagemaker.region
    return None


def split_uri(uri: str) -> tuple[str, str]:
    """Returns bucket and key of an s3:// address; raises UsageError if it is not one."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UsageError(f"{uri} is not an s3:// address", fix="write s3://bucket/folder")
    return bucket, key


@contextlib.contextmanager
def explained(action: str, *, where: str = "") -> Iterator[None]:
    """Turns botocore's errors into ServiceError, and UsageError for what does not fit its model."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        NoRegionError,
        ParamValidationError,
    )
    from botocore.exceptions import ConnectionError as UnreachableError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as err:
        status = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
        error = dict(err.response.get("Error", {}))
        raise refusal(error, action, where, status=status) from err
    except ParamValidationError as err:
        raise UsageError(str(err).replace("\n", "; "), where=where or action) from err
    except NoRegionError as err:
        raise UsageError(
            "no AWS region is known", where=action, fix="set AWS_REGION, or sagemaker.region"
        ) from err
    # RuntimeError: refreshed credentials that have expired already.
    except (BotoCoreError, ResponseParserError, RuntimeError) as err:
        code = type(err).__name__
        place = where or action
        kind: ServiceErrorKind = "away"
        what = f"AWS did not answer: {err}"
        fix = ""
        if isinstance(err, NoCredentialsError):
            what = "no AWS credentials were found"
            fix = "aws configure, or run under a role"
        elif code in _STALE_LOGIN or isinstance(err, RuntimeError):
            what = str(err)
            fix = _LOG_IN
        if fix:
            kind = "stale"
        elif isinstance(err, UnreachableError):
            fix = "check the network (a proxy, a VPC's endpoints) and the region, then try again"
        raise ServiceError(what, where=place, fix=fix, code=code, action=action, kind=kind) from err


def _new_client(
    service: str,
    region: str | None,
    *,
    connect_seconds: float = CONNECT_SECONDS,
    read_seconds: float = READ_SECONDS,
    attempts: int = MAX_ATTEMPTS,
) -> object:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as err:
        raise MissingExtraError.of(err, extra="aws") from None
    config = Config(
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        retries={"mode": "standard", "max_attempts": attempts},
    )
    with explained(f"{service}:*"):
        client: object = boto3.client(service, region_name=region, config=config)
    return client


def _json(value: object) -> Json:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            # As in logs and records, so that they sort together.
            text = value.astimezone(UTC).isoformat(timespec="milliseconds")
            return text.replace("+00:00", "Z")
        case Mapping():
            return {str(key): _json(item) for key, item in value.items()}
        case list() | tuple():
            return [_json(item) for item in value]
        case _:
            return str(value)
