"""Calls to AWS: through boto3, imported here only, retried, bounded, with errors in words."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import IO

from stoker.errors import PlatformError, UsageError
from stoker.records import Json

# Attempts of one call with exponential backoff (botocore's standard mode: at most 20 s each).
MAX_ATTEMPTS = 8
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
# What was just created may not be seen for a while.
EVENTUAL_SECONDS = 30.0

_ACTION = re.compile(r"perform:? ([a-z0-9-]+:[A-Za-z*]+)")
_MISSING = ("ResourceNotFound", "ResourceNotFoundException", "NoSuchKey", "404", "NotFound")
_THROTTLED = ("ThrottlingException", "Throttling", "TooManyRequestsException", "SlowDown")
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403")


class AwsError(PlatformError):
    """AWS refused a call.

    Attributes:
        code: AWS's own error code, such as `ResourceLimitExceeded`.
        action: Service and operation, as in a policy: `sagemaker:CreateTrainingJob`.
    """

    code = ""
    action = ""

    @property
    def is_missing(self) -> bool:
        """Whether what was asked for is not there."""
        return self.code in _MISSING or "does not exist" in self.what or "not found" in self.what


class Aws:
    """AWS as one account and region see it.

    Args:
        region: Absent: what boto3 finds.
        clients: By service, instead of boto3's own (for recorded answers).
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        clients: Mapping[str, object] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._region = region
        self._clients = dict(clients or {})
        self.sleep = sleep

    def client(self, service: str) -> object:
        """The boto3 client of a service, made once.

        Raises:
            UsageError: If boto3 is not installed, or no region is known.
        """
        if service not in self._clients:
            self._clients[service] = _new_client(service, self._region)
        return self._clients[service]

    @property
    def region(self) -> str:
        """The region in use; UsageError where none is known."""
        return str(getattr(self.client("sagemaker"), "meta").region_name)  # noqa: B009

    def call(self, service: str, operation: str, **parameters: object) -> dict[str, Json]:
        """One call; the answer as JSON (times as ISO 8601 in UTC, no metadata).

        Args:
            service: As boto3 names it: `sagemaker`.
            operation: As in the API: `CreateTrainingJob`.
            **parameters: Of the operation.

        Raises:
            AwsError: If AWS refuses it, or cannot be reached.
            UsageError: If a parameter is not as the API's model says.
        """
        action = f"{service}:{operation}"
        method = getattr(self.client(service), _snake(operation))
        with explained(action):
            answer = method(**parameters)
        return {key: _json(value) for key, value in answer.items() if key != "ResponseMetadata"}

    def pages(
        self, service: str, operation: str, *, items: str, **parameters: object
    ) -> Iterator[Mapping[str, Json]]:
        """The objects of all pages of a listing; `items` is the key that holds them."""
        token: dict[str, object] = {}
        while True:
            answer = self.call(service, operation, **parameters, **token)
            found = answer.get(items)
            if isinstance(found, list):
                yield from (item for item in found if isinstance(item, Mapping))
            following = answer.get("NextToken") or answer.get("nextToken")
            if not following or {"NextToken": following} == token:
                return
            token = {"NextToken" if "NextToken" in answer else "nextToken": following}

    def read_object(self, uri: str) -> bytes:
        """The content of an s3:// address."""
        bucket, key = split_uri(uri)
        with explained("s3:GetObject", where=uri):
            content = self._s3("get_object", Bucket=bucket, Key=key)["Body"]
            return bytes(getattr(content, "read")())  # noqa: B009

    def write_object(
        self, uri: str, content: bytes | IO[bytes], *, kms_key: str | None = None
    ) -> None:
        """Writes an object, encrypted with the key named, else with the bucket's own."""
        bucket, key = split_uri(uri)
        secured: dict[str, object] = {"ServerSideEncryption": "AES256"}
        if kms_key:
            secured = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
        with explained("s3:PutObject", where=uri):
            self._s3("put_object", Bucket=bucket, Key=key, Body=content, **secured)

    def delete_object(self, uri: str) -> None:
        """Deletes an object; one that is not there is no error."""
        bucket, key = split_uri(uri)
        with explained("s3:DeleteObject", where=uri):
            self._s3("delete_object", Bucket=bucket, Key=key)

    def has_object(self, uri: str) -> bool:
        """Whether there is such an object."""
        bucket, key = split_uri(uri)
        try:
            with explained("s3:GetObject", where=uri):
                self._s3("head_object", Bucket=bucket, Key=key)
        except AwsError as err:
            if err.is_missing:
                return False
            raise
        return True

    def _s3(self, method: str, **parameters: object) -> Mapping[str, object]:
        answer: Mapping[str, object] = getattr(self.client("s3"), method)(**parameters)
        return answer


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// address.

    Raises:
        UsageError: If it is none.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UsageError(f"{uri} is no s3:// address", fix="as in s3://bucket/folder")
    return bucket, key


@contextlib.contextmanager
def explained(action: str, *, where: str = "") -> Iterator[None]:
    """Turns botocore's errors into ours.

    Raises:
        AwsError: In place of a refusal, or of an unreachable service.
        UsageError: In place of a parameter that the API's model refuses.
    """
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        NoRegionError,
        ParamValidationError,
    )

    try:
        yield
    except ClientError as err:
        raise _refusal(dict(err.response.get("Error", {})), action, where) from err
    except ParamValidationError as err:
        raise UsageError(str(err).replace("\n", "; "), where=where or action) from err
    except NoRegionError as err:
        raise UsageError(
            "no AWS region is known", where=action, fix="set AWS_REGION, or sagemaker.region"
        ) from err
    except NoCredentialsError as err:
        raise _error(
            "no AWS credentials were found", action, "", fix="aws configure, or run under a role"
        ) from err
    except BotoCoreError as err:
        raise _error(f"AWS did not answer: {err}", where or action, type(err).__name__) from err


def _refusal(error: Mapping[str, object], action: str, where: str) -> AwsError:
    code = str(error.get("Code", ""))
    message = str(error.get("Message", "")).strip()
    found = _ACTION.search(message)
    if code in _DENIED or "not authorized" in message:
        missing = found.group(1) if found else action
        refused = _error(
            f"permission {missing} is missing: {message}",
            where or action,
            code,
            fix=f"allow {missing} in the caller's policy; configs/sagemaker has ones to start from",
        )
    elif code in _THROTTLED:
        refused = _error(
            f"AWS throttled {action} {MAX_ATTEMPTS} times: {message}",
            where or action,
            code,
            fix="try again in a minute",
        )
    else:
        refused = _error(f"{code}: {message}", where or action, code)
    refused.action = action
    return refused


def _error(what: str, where: str, code: str, *, fix: str = "") -> AwsError:
    error = AwsError(what, where=where, fix=fix)
    error.code = code
    return error


def _new_client(service: str, region: str | None) -> object:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise UsageError("boto3 is not installed", fix="pip install 'stoker[aws]'") from None
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "max_attempts": MAX_ATTEMPTS},
    )
    with explained(f"{service}:*"):
        client: object = boto3.client(service, region_name=region, config=config)
    return client


def _snake(operation: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation).lower()


def _json(value: object) -> Json:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Mapping():
            return {str(key): _json(item) for key, item in value.items()}
        case list() | tuple():
            return [_json(item) for item in value]
        case _:
            return str(value)
