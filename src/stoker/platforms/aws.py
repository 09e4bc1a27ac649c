"""Calls to AWS through boto3, with retries, timeouts and readable errors.

aws = Aws(region="eu-central-1")
aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName="mnist")["TrainingJobStatus"]
aws.read_object("s3://bucket/folder/profile.json")
"""

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, cast

from stoker.environment import cloud_region
from stoker.errors import MissingExtraError, ServiceError, ServiceErrorKind, UsageError
from stoker.records import Json
from stoker.records.base import Document, mappings
from stoker.repeat import (
    READ_AGAIN_SECONDS,
    Clock,
    ResultT,
    Sleep,
    Suppressed,
    repeated,
)

if TYPE_CHECKING:
    from botocore.model import ServiceModel

# Attempts of one call with exponential backoff (botocore's standard mode: at most 20 s each).
MAX_ATTEMPTS = 8
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0

_RIGHT = re.compile(r"perform:? ([a-z0-9-]+:[A-Za-z*]+)")
# By `CODE: MESSAGE`, as some services name the reason only in the message. The first that fits.
_KINDS: Mapping[ServiceErrorKind, str] = {
    "stale": r"ExpiredToken|InvalidClientTokenId|RequestExpired|UnrecognizedClient|CredentialRetri"
    r"|RequestTimeTooSkewed|InvalidSignature|SignatureDoesNotMatch|SSO|TokenRetri|UnauthorizedSSO",
    "away": r"RequestTimeout:|PriorRequestNotComplete|ConditionalRequestConflict|SlowDown"
    r"|\w*(Throttl|TooManyRequests)|RequestLimitExceeded",
    "denied": r"AccessDenied|UnauthorizedOperation|403|.*not authorized",
    "taken": r"PreconditionFailed|412|ResourceInUse",
    # In a terminal the user may never have logged in. A wrong bucket is one of the workload's.
    "refused": r"NoCredentials|NoSuchBucket",
    "missing": r"ResourceNotFound|NoSuch|ParameterNotFound|404|NotFound"
    r"|.*(does not exist|not found|could not find)",
}
_LOG_IN = "log in (aws configure, aws sso login), or run under a role; check this machine's clock"
# By kind, or code.
_FIXES: Mapping[str, str] = {
    "stale": _LOG_IN,
    "NoCredentialsError": _LOG_IN,
    "away": "try again in a minute; check the network (a proxy, a VPC's endpoints) and the region",
    "NoSuchBucket": "check the bucket's name, or create it",
    "NoRegionError": "set AWS_REGION, or sagemaker.region",
}


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
        self._clients = dict(clients or {})
        self.sleep = sleep
        self.clock = clock

    def client(self, service: str) -> object:
        """Returns the boto3 client of a service; raises UsageError without boto3 or a region."""
        if service not in self._clients:
            try:
                import boto3
                from botocore.config import Config
            except ImportError as err:
                raise MissingExtraError.of(err, extra="aws") from None
            config = Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"mode": "standard", "max_attempts": MAX_ATTEMPTS},
            )
            with self.explained(f"{service}:*"):
                self._clients[service] = boto3.client(
                    service, region_name=self._region, config=config
                )
        return self._clients[service]

    def renew_login(self) -> None:
        """Lets the next call read the machine's keys again, which a client reads only once."""
        import boto3

        boto3.setup_default_session()
        self._clients.clear()

    @property
    def region(self) -> str:
        """The region in use; raises a UsageError if none is known."""
        return str(getattr(self.client("sagemaker"), "meta").region_name)  # noqa: B009

    def repeated(
        self,
        call: Callable[[], ResultT],
        *,
        seconds: float = READ_AGAIN_SECONDS,
        tell: Callable[[ServiceError], None] = lambda error: None,
    ) -> ResultT:
        """Repeats a call that AWS does not answer, or for which the login must be renewed."""
        return repeated(call, seconds=seconds, tell=tell, sleep=self.sleep, clock=self.clock)

    def call(self, service: str, operation: str, **parameters: object) -> dict[str, Json]:
        """Calls an operation of the API; returns the answer as JSON (times as ISO 8601 in UTC).

        Raises ServiceError if AWS refuses it or is away, UsageError for a wrong parameter.
        """
        answer = _json(self._sent(service, operation, parameters))
        answer.pop("ResponseMetadata", None)
        return answer

    def _sent(
        self, service: str, operation: str, parameters: Mapping[str, object], *, where: str = ""
    ) -> Mapping[str, object]:
        client = self.client(service)
        from botocore import xform_name

        with self.explained(f"{service}:{operation}", where=where):
            answer: Mapping[str, object] = getattr(client, xform_name(operation))(**parameters)
        return answer

    @contextlib.contextmanager
    def explained(self, action: str, *, where: str = "") -> Iterator[None]:
        """Turns botocore's errors into ServiceError; into UsageError for a wrong parameter.

        Args:
            action: The call in IAM's terms.
            where: The object; empty: the action.
        """
        from botocore import exceptions
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except exceptions.ClientError as err:
            error = err.response.get("Error", {})
            code, message = str(error.get("Code", "")), str(error.get("Message", "")).strip()
            status = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
            # A timeout, a proxy that wants a login, throttling.
            is_away = status >= 500 or status in (407, 408, 429)
            kind = "away" if is_away else _kind_of(f"{code}: {message}", "refused")
            if kind == "stale":
                self.renew_login()
            raise _refusal(kind, code, message, action=action, where=where) from err
        except (exceptions.ParamValidationError, exceptions.NoRegionError) as err:
            fix = _FIXES.get(type(err).__name__, "")
            raise UsageError(str(err).replace("\n", "; "), where=where or action, fix=fix) from err
        except (exceptions.BotoCoreError, ResponseParserError, HTTPError) as err:
            code = type(err).__name__
            raise _refusal(
                _kind_of(code, "away"), code, str(err), action=action, where=where
            ) from err

    def _s3(self, operation: str, uri: str, **parameters: object) -> Mapping[str, object]:
        bucket, key = split_uri(uri)
        return self._sent("s3", operation, {"Bucket": bucket, "Key": key, **parameters}, where=uri)

    def find(self, service: str, operation: str, **parameters: object) -> dict[str, Json] | None:
        """Calls an operation that describes something; returns None if that does not exist."""
        with Suppressed("missing"):
            return self.call(service, operation, **parameters)
        return None

    def pages(
        self, service: str, operation: str, *, items: str, **parameters: object
    ) -> Iterator[Document]:
        """Yields the objects of all pages of a listing, by its paginator; `items` is their key."""
        client = self.client(service)
        from botocore import xform_name

        with self.explained(f"{service}:{operation}"):
            paginator = getattr(client, "get_paginator")(xform_name(operation))  # noqa: B009
            for page in paginator.paginate(**parameters):
                yield from mappings(_json(page), items)

    def read_object(self, uri: str) -> bytes:
        with self.open_object(uri) as content:
            return content.read()

    @contextlib.contextmanager
    def open_object(self, uri: str) -> Iterator[IO[bytes]]:
        """Opens an object as a stream; raises ServiceError, also if the stream breaks off."""
        body = cast("IO[bytes]", self._s3("GetObject", uri)["Body"])
        with self.explained("s3:GetObject", where=uri), contextlib.closing(body):
            yield body

    def write_object(
        self, uri: str, content: bytes | str, *, kms_key: str | None = None, **more: str
    ) -> None:
        """Writes an object, encrypted with the given key or the bucket's."""
        if kms_key:
            more |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
        self._s3("PutObject", uri, Body=content, **more)

    def create_object(self, uri: str, content: bytes, *, kms_key: str | None = None) -> bool:
        """Writes an object unless it exists; returns whether it was written.

        Only one of several concurrent callers writes.
        """
        with Suppressed("taken"):
            self.write_object(uri, content, kms_key=kms_key, IfNoneMatch="*")
            return True
        return False

    def delete_object(self, uri: str) -> None:
        """Deletes an object, which may be missing."""
        self._s3("DeleteObject", uri)


@functools.cache
def service_model(service: str) -> "ServiceModel":
    """Returns botocore's model of a service, without a client: that would need a region."""
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError as err:
        raise MissingExtraError.of(err, extra="aws") from None
    return ServiceModel(Loader().load_service_model(service, "service-2"))


def split_uri(uri: str) -> tuple[str, str]:
    """Returns bucket and key of an s3:// address; raises UsageError if it is not one."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UsageError(f"{uri} is not an s3:// address", fix="write s3://bucket/folder")
    return bucket, key


def _kind_of(what: str, default: ServiceErrorKind) -> ServiceErrorKind:
    matching = (kind for kind, form in _KINDS.items() if re.match(form, what, re.I | re.S))
    return next(matching, default)


def _refusal(
    kind: ServiceErrorKind, code: str, message: str, *, action: str, where: str
) -> ServiceError:
    what = f"{code}: {message}"
    fix = _FIXES.get(kind) or _FIXES.get(code, "")
    if kind == "denied":
        named = _RIGHT.search(message)
        right = named[1] if named else action
        what = f"permission {right} is missing: {message}"
        fix = f"allow {right} as configs/sagemaker/stoker.yaml does"
    elif kind == "away":
        what = f"AWS did not answer {action} {MAX_ATTEMPTS} times: {what}"
    return ServiceError(what, where=where or action, fix=fix, code=code, action=action, kind=kind)


def _json(answer: Mapping[str, object]) -> dict[str, Json]:
    document: dict[str, Json] = json.loads(json.dumps(answer, default=_text))
    return document


def _text(value: datetime) -> str:
    # As in logs and records, so that they sort together.
    text = value.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
