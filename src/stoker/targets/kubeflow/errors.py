"""What Kubeflow says when it refuses, or does not answer, in words that tell what to do."""

import json

from stoker.errors import PlatformError
from stoker.records import Json
from stoker.targets.kubeflow.connection import Connection

_MAX_WORDS = 400
# Answered by what stands before the service, while that is away or has too much to do.
_AWAY = (429, 502, 503, 504)


class KubeflowError(PlatformError):
    """Kubeflow Pipelines refused a call, or did not answer.

    Attributes:
        status: Of HTTP; 0 where nothing was answered.
        may_pass: Whether the same call may be answered later.
    """

    status = 0
    may_pass = False

    @property
    def is_missing(self) -> bool:
        """Whether what was asked for is not there."""
        return self.status == 404

    @property
    def is_unreachable(self) -> bool:
        """Whether the service did not answer, or too late: asking again may help."""
        return self.may_pass


def refusal(status: int, body: str, *, content_type: str, connection: Connection) -> KubeflowError:
    """The error for an answer that is a refusal."""
    words = _words(body, content_type=content_type)
    namespace = connection.namespace
    fix = ""
    match status:
        case 401:
            what = "Kubeflow does not know who you are, or your login has ended (401)"
            fix = (
                "kubectl create token default-editor -n NAMESPACE "
                "--audience pipelines.kubeflow.org > F; then --token-file F"
            )
        case 403:
            what = "Kubeflow does not let you do this (403)"
            fix = (
                f"ask for the right in namespace {namespace} (its owner: Manage Contributors)"
                if namespace
                else "name your profile's namespace: --namespace N"
            )
        case 404 if _is_page(body, content_type) or not words:
            what = "there is no Kubeflow Pipelines at this address (404)"
            fix = "behind Kubeflow's dashboard it is https://SITE/pipeline; check --host"
        case 404:
            what = "it is not there (404)"
        case 409:
            what = "it is there already (409)"
            fix = "somebody else was faster: the same command again shows what there is"
        case 400:
            what = "Kubeflow cannot do this (400)"
        case _ if status in _AWAY:
            what = f"Kubeflow has no time, or is away ({status})"
            fix = "try again a little later"
        case _:
            what = f"Kubeflow failed ({status})"
            fix = "kubectl logs -n kubeflow deployment/ml-pipeline     says why"
    error = KubeflowError(f"{what}: {words}" if words else what, where=connection.place, fix=fix)
    error.status = status
    error.may_pass = status in _AWAY or status >= 500
    return error


def login_page(connection: Connection) -> KubeflowError:
    """The error for a page of HTML where JSON was asked for."""
    error = KubeflowError(
        "a web page answered where Kubeflow Pipelines should: a login, or another site",
        where=connection.place,
        fix="a token (--token-file F) or a session's cookie (kubernetes.kubeflow.cookie_file); "
        "behind the dashboard the host is https://SITE/pipeline",
    )
    error.status = 401
    return error


def not_json(connection: Connection, why: str) -> KubeflowError:
    """The error for an answer that cannot be understood."""
    return KubeflowError(
        f"what answers is not Kubeflow Pipelines: {why}",
        where=connection.place,
        fix="check --host",
    )


def silence(err: Exception, *, operation: str, connection: Connection) -> KubeflowError:
    """The error for a call that had no answer: by the kind of urllib3's exception."""
    cause = getattr(err, "reason", None) or err
    kind = type(cause).__name__
    text = " ".join(f"{kind} {cause}".split())
    may_pass, is_late = True, "Timeout" in kind
    fix = "is it up, and reachable from here? check --host"
    if "CERTIFICATE_VERIFY" in text or "SSLError" in kind or "SSLError" in text:
        why, may_pass = "its certificate is not trusted, or it speaks no TLS", False
        fix = "--ca-file F with its authority's certificate; http:// where it has none"
    elif "NameResolution" in kind or "getaddrinfo" in text:
        why, fix = "no such host name", "check --host; a VPN?"
    elif "ReadTimeout" in kind:
        why, fix = "no answer in time", "try again a little later"
    elif is_late:
        why = "no connection in time"
    elif "ResponseError" in kind or "redirect" in text:
        why, may_pass = "it sends us from page to page, as logins do", False
        fix = "a token (--token-file F) or a session's cookie"
    elif "refused" in text:
        why = "nothing listens there"
        fix = "kubectl port-forward -n kubeflow svc/ml-pipeline 8888; then --host http://localhost:8888"
    else:
        why = "the connection broke"
    if may_pass and is_late and not operation.startswith(("get", "list")):
        fix = "it may have been done all the same: look before you try again"
    error = KubeflowError(f"Kubeflow did not answer: {why}", where=connection.place, fix=fix)
    error.may_pass = may_pass
    return error


def _words(body: str, *, content_type: str) -> str:
    """What the service says: its message, or a short plain text; nothing of a page."""
    if _is_page(body, content_type):
        return ""
    text = body
    try:
        document: Json = json.loads(body)
    except ValueError:
        pass
    else:
        if isinstance(document, dict):
            text = next(
                (
                    str(document[key])
                    for key in ("message", "error", "error_message", "error_details")
                    if document.get(key)
                ),
                "",
            )
    line = " ".join(text.split())
    return line if len(line) <= _MAX_WORDS else line[: _MAX_WORDS - 1] + "…"


def _is_page(body: str, content_type: str) -> bool:
    return "html" in content_type.lower() or body.lstrip()[:1] == "<"


__all__ = ["KubeflowError", "login_page", "not_json", "refusal", "silence"]
