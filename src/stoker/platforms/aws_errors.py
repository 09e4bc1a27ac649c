"""What AWS says when it refuses a call, in words that tell what to do."""

import re
from collections.abc import Mapping

from stoker.errors import PlatformError

# Attempts of one call with exponential backoff (botocore's standard mode: at most 20 s each).
MAX_ATTEMPTS = 8

_ACTION = re.compile(r"perform:? ([a-z0-9-]+:[A-Za-z*]+)")
_MISSING = ("ResourceNotFound", "ResourceNotFoundException", "NoSuchKey", "404", "NotFound")
# Some services say only in words that what was asked for is not there.
_MISSING_WORDS = ("does not exist", "not found", "could not find")
_THROTTLED = ("ThrottlingException", "Throttling", "TooManyRequestsException", "SlowDown")
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403")
_STALE_LOGIN = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "RequestExpired",
    "UnrecognizedClientException",
)


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
        """Whether what was asked for is not there (a bucket that is not there is a wrong name)."""
        if self.code == "NoSuchBucket" or self.is_denied:
            return False
        words = self.what.lower()
        return self.code in _MISSING or any(missing in words for missing in _MISSING_WORDS)

    @property
    def is_denied(self) -> bool:
        """Whether a permission is missing, or the login is no longer valid."""
        return self.code in _DENIED or self.code in _STALE_LOGIN or "not authorized" in self.what

    @property
    def is_unreachable(self) -> bool:
        """Whether the service did not answer, or too late: asking again may help."""
        return self.code in _THROTTLED or "AWS did not answer" in self.what


def refusal(error: Mapping[str, object], action: str, where: str) -> AwsError:
    """The error for a refusal as botocore has parsed it."""
    code = str(error.get("Code", ""))
    message = str(error.get("Message", "")).strip()
    what, fix = f"{code}: {message}", ""
    if code in _DENIED or "not authorized" in message:
        found = _ACTION.search(message)
        missing = found.group(1) if found else action
        what = f"permission {missing} is missing: {message}"
        fix = f"allow {missing} in the caller's policy; configs/sagemaker has ones to start from"
    elif code in _STALE_LOGIN:
        fix = "log in again: aws sso login, or new keys"
    elif code in _THROTTLED:
        what = f"AWS throttled {action} {MAX_ATTEMPTS} times: {message}"
        fix = "try again in a minute"
    elif code == "NoSuchBucket":
        fix = "check the bucket's name, or make it"
    return failed(what, action, where=where, code=code, fix=fix)


def failed(what: str, action: str, *, where: str = "", code: str = "", fix: str = "") -> AwsError:
    """An error with AWS's code and the action that failed."""
    error = AwsError(what, where=where or action, fix=fix)
    error.code = code
    error.action = action
    return error
