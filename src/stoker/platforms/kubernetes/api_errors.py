"""What a cluster says when it refuses a call, in words that tell what to do."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.errors import PlatformError
from stoker.records import Json

# As an API server says that a role lacks something; quotas and admission say Forbidden, too.
_DENIED = re.compile(r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource')
_PASSING = frozenset((0, 408, 429, 500, 502, 503, 504))
_INSTALL = {
    "jobset.x-k8s.io": "install JobSet: https://jobset.sigs.k8s.io/docs/installation",
    "trainer.kubeflow.org": "install Kubeflow Trainer, or set kubernetes.api to jobset",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A call as RBAC names it.

    Attributes:
        verb: get, list, watch, create, patch or delete.
        group: Of the API; empty for the core.
        resource: In the plural; `pods/log` for what belongs to an object.
        name: Of the object, where it is about one.
    """

    verb: str
    group: str
    resource: str
    namespace: str
    name: str = ""

    @property
    def right(self) -> str:
        """What RBAC has to allow: `create jobsets.jobset.x-k8s.io`."""
        resource, slash, part = self.resource.partition("/")
        return f"{self.verb} {resource}{'.' + self.group if self.group else ''}{slash}{part}"

    def __str__(self) -> str:
        """With the object and its namespace."""
        named = f" {self.name}" if self.name else ""
        return f"{self.right}{named} in namespace {self.namespace}"


class ApiError(PlatformError):
    """A cluster refused a call, or did not answer it.

    Attributes:
        code: HTTP's; 0 where there was no answer.
        reason: Kubernetes' own word, such as AlreadyExists.
        action: That failed.
        user: Who lacks a right, where that is the reason.
        is_final: Whether asking again cannot help, whatever the code is.
        is_repeated: Whether the call was sent before, and that was not answered.
    """

    code = 0
    reason = ""
    action: Action | None = None
    user = ""
    is_final = False
    is_repeated = False

    @property
    def is_passing(self) -> bool:
        """Whether the same call may succeed later."""
        return self.code in _PASSING and not self.is_final

    @property
    def is_missing(self) -> bool:
        """Whether what was asked for is not there."""
        return self.code == 404

    @property
    def is_taken(self) -> bool:
        """Whether there is an object of that name already."""
        return self.code == 409 and self.reason == "AlreadyExists"

    @property
    def is_too_old(self) -> bool:
        """Whether a watch has to begin anew."""
        return self.code == 410

    @property
    def is_denied(self) -> bool:
        """Whether a right is missing (not a quota, not an admission rule)."""
        return self.code == 403 and bool(self.user)


def refusal(code: int, body: str, action: Action) -> ApiError:
    """The error for an answer with a bad status.

    Args:
        code: HTTP's.
        body: A Status object as JSON, or whatever something in between said.
        action: That failed.
    """
    status = _status(body)
    reason = str(status.get("reason") or "")
    message = " ".join(str(status.get("message") or body[:300]).split())
    denied = _DENIED.search(message)
    user = denied.group("user") if denied and code == 403 else ""
    what, fix = f"the cluster refused it: {message or f'HTTP status {code}'}", ""
    if code == 401:
        what = "the cluster does not accept these credentials"
        fix = "log in again (kubectl get pods shows whether), or set kubernetes.context"
    elif user:
        what = f"the right {action.right} is missing in namespace {action.namespace}: {message}"
        fix = "stoker render rbac WORKLOAD | kubectl apply -f -"
    elif code == 403 and "exceeded quota" in message:
        what = f"the namespace's quota does not allow it: {message}"
        fix = "free some of it, or ask for more (kubectl describe quota)"
    elif code == 403 and "violates PodSecurity" in message:
        what = f"the namespace's pod security forbids it: {message}"
    elif code == 404 and not action.name:
        what, fix = _nothing_there(message, action)
    elif code in _PASSING:
        what = f"the cluster cannot answer now: {message or f'HTTP status {code}'}"
        fix = "try again in a minute"
    elif code in (400, 422):
        fix = "is the cluster's JobSet or Trainer of another version than stoker's rules are?"
    return failed(what, action, code=code, reason=reason, user=user, fix=fix)


def failed(
    what: str,
    action: Action,
    *,
    code: int = 0,
    reason: str = "",
    user: str = "",
    fix: str = "",
    is_final: bool = False,
) -> ApiError:
    """An error with the facts of the call.

    Args:
        what: In words.
        action: That failed.
        code: HTTP's; 0: there was no answer.
        reason: Kubernetes' own word.
        user: Who lacks a right.
        fix: What to do.
        is_final: Whether asking again cannot help, whatever the code is.
    """
    error = ApiError(what, where=str(action), fix=fix)
    error.code, error.reason, error.action, error.user = code, reason, action, user
    error.is_final = is_final
    return error


def _nothing_there(message: str, action: Action) -> tuple[str, str]:
    if message.startswith("namespaces "):
        return (
            f"there is no namespace {action.namespace}",
            f"kubectl create namespace {action.namespace}, or set kubernetes.namespace",
        )
    return (
        f"the cluster knows no {action.resource}.{action.group}".rstrip("."),
        _INSTALL.get(action.group, ""),
    )


def _status(body: str) -> Mapping[str, Json]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, Mapping) else {}
