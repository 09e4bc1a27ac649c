"""Calls to a cluster: one connection, retries, refusals as errors."""

import contextlib
import copy
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlencode

from stoker.errors import MissingExtraError, PlatformError, ServiceError, ServiceErrorKind
from stoker.platforms.log_files import take_lines
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings
from stoker.repeat import (
    READ_AGAIN_SECONDS,
    Clock,
    ResultT,
    Sleep,
    Suppressed,
    repeated,
)

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

# A missing right; quotas and admission rules answer 403, too.
_DENIED = re.compile(r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource')
# 407: a proxy between here and the cluster.
_PASSING = frozenset((407, 408, 429, 500, 502, 503, 504))
OLDER = {
    "jobset.x-k8s.io": "update JobSet: stoker is checked against v0.13",
    "trainer.kubeflow.org": "update Kubeflow Trainer to 2.2 or newer, or set kubernetes.api to "
    "jobset",
}
INSTALL = {
    "jobset.x-k8s.io": "install JobSet: https://jobset.sigs.k8s.io/docs/installation",
    "trainer.kubeflow.org": "install Kubeflow Trainer, or set kubernetes.api to jobset",
}
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# OpenSSL's messages for certificates that only its strict verification refuses.
_STRICT_RULES = ("key usage extension", "Key Identifier", "Basic Constraints of CA cert not marked")
_NOT_STRICT = (
    "the cluster's certificate lacks an extension of RFC 5280 that kubernetes.strict_tls requires: "
    "unset it, or let an administrator renew the cluster's authority"
)
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
# How long a call is repeated that is not answered; `ClusterApi.patient` repeats longer.
RETRY_SECONDS = 8.0
# Objects per page of a list.
PAGE = 500
_METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}


def text(document: Json, *keys: str) -> str:
    """Returns the text at the path `keys`; empty if there is none, or another type."""
    value = item_at(document, *keys)
    return value if isinstance(value, str) else ""


def number(document: Document, key: str, default: int = 0) -> int:
    value = document.get(key)
    if isinstance(value, int):
        return value
    return default


def name_of(document: Document) -> str:
    return text(document, "metadata", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAction:
    """An API call in RBAC's terms.

    Attributes:
        group: API group; empty for the core.
        resource: Plural; `pods/log` for a subresource.
        name: Name of the object, if the call is about one.
    """

    verb: str
    group: str
    resource: str
    namespace: str
    name: str = ""

    @property
    def right(self) -> str:
        """The right that RBAC has to grant: `create jobsets.jobset.x-k8s.io`."""
        resource, slash, part = self.resource.partition("/")
        return f"{self.verb} {resource}{'.' + self.group if self.group else ''}{slash}{part}"

    def __str__(self) -> str:
        action = self.right
        if self.name:
            action += f" {self.name}"
        return f"{action} in namespace {self.namespace}"


def refusal(code: int, body: str, action: ApiAction) -> ServiceError:
    """Returns the error for a bad HTTP status; `body` is a Status as JSON, or a proxy's answer."""
    status: Document = {}
    with contextlib.suppress(ValueError):
        status = mapping(json.loads(body))
    message = " ".join(str(status.get("message") or body[:300]).split())
    kind, what, fix = _meaning(code, message, action, reason=text(status, "reason"))
    error = failed(what, action, kind=kind, fix=fix)
    error.code = str(code)
    if kind == "denied" and (denied := _DENIED.search(message)):
        error.user = denied["user"]
    return error


def _meaning(
    code: int, message: str, action: ApiAction, *, reason: str
) -> tuple[ServiceErrorKind, str, str]:
    """Returns kind, words and fix of a bad HTTP status."""
    words = message or f"HTTP status {code}"
    refused = f"the cluster refused it: {words}"
    match code:
        case 401:
            return (
                "stale",
                "the cluster does not accept these credentials",
                "log in again (kubectl get pods shows whether), or set kubernetes.context",
            )
        case 403:
            return _forbidden(message, action, refused=refused)
        case 404:
            return "missing", *_missing(message, action, refused=refused)
        case 409 if reason == "AlreadyExists":
            return "taken", refused, ""
        case 400 if "strict decoding error" in message:
            what = f"the cluster does not know a field: {message}"
            return "refused", what, OLDER.get(action.group, "")
        case 400 | 422:
            fix = "check the versions of the cluster's JobSet and Trainer: stoker expects others"
            return "refused", refused, fix
        case _ if code in _PASSING:
            return "away", f"the cluster cannot answer now: {words}", "try again in a minute"
    return "refused", refused, ""


def _forbidden(
    message: str, action: ApiAction, *, refused: str
) -> tuple[ServiceErrorKind, str, str]:
    if _DENIED.search(message):
        what = f"the right {action.right} is missing in namespace {action.namespace}: {message}"
        return "denied", what, "kubectl apply -k configs/kubernetes"
    if "exceeded quota" in message:
        what = f"the namespace's quota does not allow it: {message}"
        return "refused", what, "free some of it, or ask for more (kubectl describe quota)"
    if "violates PodSecurity" in message:
        return "refused", f"the namespace's pod security forbids it: {message}", ""
    return "refused", refused, ""


def _missing(message: str, action: ApiAction, *, refused: str) -> tuple[str, str]:
    """Returns words and fix; without an object's name the namespace or the API is missing."""
    if action.name:
        return refused, ""
    if message.startswith("namespaces "):
        fix = f"kubectl create namespace {action.namespace}, or set kubernetes.namespace"
        return f"namespace {action.namespace} does not exist", fix
    what = f"the cluster has no API for {action.resource}.{action.group}".rstrip(".")
    return what, INSTALL.get(action.group, "")


def failed(what: str, action: ApiAction, *, kind: ServiceErrorKind, fix: str = "") -> ServiceError:
    return ServiceError(what, where=str(action), fix=fix, action=action.right, kind=kind)


class Connections(Protocol):
    """The connections of the kubernetes client, which has made them by the kube config."""

    pool_manager: "PoolManager"


class Configuration(Protocol):
    """What the kubernetes client has read from the kube config."""

    host: str

    def auth_settings(self) -> Mapping[str, Mapping[str, str]]: ...


class Client(Protocol):
    """The part of the kubernetes client that is the same from its version 28 to 37."""

    configuration: Configuration
    rest_client: Connections
    default_headers: Mapping[str, str]


class ByteStream:
    """An answer that is read in parts: a watch or a log. Any thread may close it."""

    def __init__(self, response: "BaseHTTPResponse", action: ApiAction) -> None:
        self._response = response
        self._action = action
        self._is_closed = False

    def lines(self) -> Iterator[tuple[str, bool]]:
        """Yields lines without their ends, and whether they had one (the last one may not).

        Raises ServiceError if the connection breaks off, without a last partial line.
        """
        rest = bytearray()
        with explained(self._action):
            for chunk in self._response.stream(None):
                for line in take_lines(rest, chunk):
                    yield line.decode(errors="replace"), True
        if rest and not self._is_closed:
            yield rest.decode(errors="replace"), False

    def close(self) -> None:
        """Ends the reading, in whatever thread; may be called twice, never raises."""
        self._is_closed = True
        connection = getattr(self._response, "connection", None)
        open_socket = getattr(connection, "sock", None)
        if isinstance(open_socket, socket.socket):
            # Only this wakes up a blocked reader.
            with contextlib.suppress(OSError, ValueError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Releases the connection; called by the thread that reads."""
        for release in (self._response.close, self._response.release_conn):
            with contextlib.suppress(Exception):
                release()


def connect(context: str | None, *, strict_tls: bool = False) -> tuple["Client", str]:
    """Returns the client, and the namespace of its configuration."""
    try:
        from kubernetes import client, config  # type: ignore[import-untyped]
        from urllib3.util import ssl_
    except ImportError as err:
        raise MissingExtraError.of(err, extra="kubernetes") from None
    settings = client.Configuration()
    # `_call` retries.
    settings.retries = False
    # Each watch and each followed log keeps a connection.
    settings.connection_pool_maxsize = 64
    try:
        # In a pod without a kube config.
        files = str(config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION).split(os.pathsep)
        has_file = any(os.path.exists(os.path.expanduser(file)) for file in files)
        if context is None and not has_file:
            config.load_incluster_config(client_configuration=settings)
            namespace = NAMESPACE_FILE.read_text(encoding="ascii").strip()
        else:
            # Not persisted: a renewed token must not be written to the user's file.
            config.load_kube_config(
                client_configuration=settings, context=context, persist_config=False
            )
            contexts, active = config.list_kube_config_contexts()
            chosen = next((c for c in contexts if c["name"] == context), active)
            namespace = str(chosen["context"].get("namespace") or "default")
    except config.ConfigException as err:
        raise _not_configured(err, context) from None
    except (OSError, KeyError, TypeError, ValueError) as err:
        raise _not_configured(err, context) from err
    connection = cast("Client", client.ApiClient(settings))
    options = connection.rest_client.pool_manager.connection_pool_kw
    verified = ssl_.create_urllib3_context(cert_reqs=options["cert_reqs"])
    # Python 3.13 sets it, kubectl does not: cluster authorities are often older than the rule.
    # Chain, name and time are verified in any case.
    verified.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if strict_tls:
        verified.verify_flags |= ssl.VERIFY_X509_STRICT
    options["ssl_context"] = verified
    return connection, namespace


def _headers_of(client: "Client") -> dict[str, str]:
    """Returns the headers of each request; the token is renewed here where it has to be."""
    headers = {**client.default_headers, "Accept": "application/json, */*"}
    if token := client.configuration.auth_settings().get("BearerToken"):
        headers[token["key"]] = token["value"]
    return headers


def _not_configured(err: Exception, context: str | None) -> PlatformError:
    what = "no cluster is configured"
    where = "kube config (variable KUBECONFIG, else ~/.kube/config), or a pod's service account"
    fix = "see kubectl config view; set KUBECONFIG, or kubernetes.context"
    if context:
        what = "cannot use the kube config"
        where = f"key kubernetes.context, {context}"
        fix = "kubectl config get-contexts lists the contexts"
    return PlatformError(f"{what}: {_words(err) or type(err).__name__}", where=where, fix=fix)


@contextlib.contextmanager
def explained(action: ApiAction) -> Iterator[None]:
    """Turns the client's errors into ServiceErrors."""
    from urllib3 import exceptions

    try:
        yield
    except exceptions.SSLError as err:
        raise _unsafe(err, action) from err
    except (exceptions.HTTPError, OSError) as err:
        raise failed(
            f"the cluster does not answer: {_words(err)}",
            action,
            kind="away",
            fix="check with kubectl get pods: VPN, proxy, the context's server",
        ) from err
    except ValueError as err:
        raise failed(
            f"the cluster's answer is not JSON: {_words(err)}", action, kind="away"
        ) from err


def _unsafe(err: object, action: ApiAction) -> PlatformError:
    words = _words(err)
    fix = "check the cluster's certificate in the kube config"
    if any(rule in words for rule in _STRICT_RULES):
        fix = _NOT_STRICT
    return failed(f"no safe connection to the cluster: {words}", action, kind="refused", fix=fix)


def _words(err: object) -> str:
    return " ".join(str(err).split())[:300]


@dataclass(frozen=True, slots=True)
class Resource:
    """An API resource: group, version and plural."""

    group: str
    version: str
    plural: str

    @property
    def api(self) -> str:
        prefix = f"apis/{self.group}" if self.group else "api"
        return f"/{prefix}/{self.version}"


JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
TRAINJOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs")
RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
PODS = Resource("", "v1", "pods")
EVENTS = Resource("", "v1", "events")
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets")
CLAIMS = Resource("", "v1", "persistentvolumeclaims")
# Argo's, which run Kubeflow's pipelines.
WORKFLOWS = Resource("argoproj.io", "v1alpha1", "workflows")
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews")

OF_KIND: Mapping[str, Resource] = {
    "JobSet": JOBSETS,
    "TrainJob": TRAINJOBS,
    "TrainingRuntime": RUNTIMES,
    "Secret": SECRETS,
    "ConfigMap": CONFIG_MAPS,
    "PodDisruptionBudget": BUDGETS,
}


class ClusterApi:
    """A cluster, for one namespace.

    Args:
        context: Context of the kube config; absent: the current one, or the pod's service account.
        namespace: Absent: the context's, or the pod's.
    """

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        strict_tls: bool = False,
        sleep: Sleep = time.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self._context = context
        self._namespace = namespace
        self._strict_tls = strict_tls
        self._client: Client | None = None
        self._patience_seconds = RETRY_SECONDS
        self._tell: Callable[[ServiceError], None] = lambda error: None
        self.sleep = sleep
        self.clock = clock

    def patient(self, tell: Callable[[ServiceError], None]) -> "ClusterApi":
        """Returns the same cluster for calls that matter: repeated for READ_AGAIN_SECONDS."""
        api = copy.copy(self)
        api._patience_seconds = READ_AGAIN_SECONDS
        api._tell = tell
        return api

    @property
    def namespace(self) -> str:
        """The namespace in use; raises PlatformError if no cluster is configured."""
        if self._namespace is None:
            self._connected()
            assert self._namespace
        return self._namespace

    def in_namespace(self, namespace: str) -> "ClusterApi":
        """Returns the same cluster for another namespace, with a new connection."""
        return ClusterApi(
            context=self._context,
            namespace=namespace,
            strict_tls=self._strict_tls,
            sleep=self.sleep,
            clock=self.clock,
        )

    def repeated(
        self, call: Callable[[], ResultT], *, seconds: float = READ_AGAIN_SECONDS
    ) -> ResultT:
        return repeated(call, seconds=seconds, sleep=self.sleep, clock=self.clock)

    def get(self, resource: Resource, name: str) -> Document:
        """Returns an object; raises ServiceError, as all calls, if the cluster refuses."""
        return self._call("get", resource, name)

    def find(self, resource: Resource, name: str) -> Document | None:
        """Returns an object, or None if it does not exist."""
        with Suppressed("missing"):
            return self.get(resource, name)
        return None

    def list(
        self, resource: Resource, *, query: Mapping[str, str] | None = None
    ) -> tuple[list[Document], str]:
        """Returns all objects that `query` selects, and the version to watch them from."""
        items: list[Document] = []
        following = ""
        while True:
            parameters = {**(query or {}), "limit": str(PAGE)}
            if following:
                parameters["continue"] = following
            page = self._call("list", resource, query=parameters, is_repeated=False)
            items += mappings(page, "items")
            described = mapping(page, "metadata")
            following = text(described, "continue")
            if not following:
                return items, text(described, "resourceVersion")

    def create(self, resource: Resource, body: Document, *, is_dry_run: bool = False) -> Document:
        """Creates an object, or has it checked; a retry after a lost answer raises `taken`."""
        # Strict: otherwise the cluster would drop unknown fields silently.
        query = {"fieldValidation": "Strict"}
        if is_dry_run:
            query["dryRun"] = "All"
        return self._call("create", resource, query=query, body=body)

    def discover(self, path: str) -> Document | None:
        """Returns what the server publishes at a path such as /version; None: nothing."""
        action = ApiAction(verb="get", group="", resource=path, namespace=self.namespace, name=path)
        with Suppressed("missing"):
            return self._answer("GET", path, action)
        return None

    def patch(self, resource: Resource, name: str, body: Document) -> Document:
        """Changes the fields in `body` (a merge patch)."""
        return self._call("patch", resource, name, body=body)

    def delete(self, resource: Resource, name: str, *, uid: str | None = None) -> None:
        """Deletes an object (with this uid) after all that it owns; it may be missing."""
        options: dict[str, Json] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # The object stays until its pods are gone.
            "propagationPolicy": "Foreground",
        }
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._call("delete", resource, name, body=options)
        except ServiceError as err:
            # The uid differs: the object is gone, and a newer one has its name.
            is_another = err.code == "409" and uid is not None
            if err.kind != "missing" and not is_another:
                raise

    def open(
        self,
        resource: Resource,
        name: str = "",
        *,
        part: str = "",
        query: Mapping[str, str],
        read_seconds: float,
    ) -> ByteStream:
        """Opens a watch, or a subresource of one object, as a stream; without retries.

        The connection may be silent for `read_seconds`.
        """
        action = self._action("get" if name else "watch", resource, name, part)
        path = self._path(resource, name, part)
        response = self._send(
            "GET", path, action, query=query, is_stream=True, read_seconds=read_seconds
        )
        return ByteStream(response, action)

    def _call(
        self,
        verb: str,
        resource: Resource,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        is_repeated: bool = True,
    ) -> Document:
        action = self._action(verb, resource, name)
        path = self._path(resource, name)
        errors: list[ServiceError] = []

        def send() -> Document:
            try:
                return self._answer(_METHODS[verb], path, action, query=query, body=body)
            except ServiceError as err:
                err.is_repeated = bool(errors)
                errors.append(err)
                raise

        return repeated(
            send,
            seconds=self._patience_seconds if is_repeated else 0.0,
            is_passing=lambda err: err.kind == "away",
            tell=self._tell,
            sleep=self.sleep,
            clock=self.clock,
        )

    def _answer(
        self,
        method: str,
        path: str,
        action: ApiAction,
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
    ) -> Document:
        response = self._send(method, path, action, query=query or {}, body=body)
        with explained(action):
            return mapping(json.loads(response.data))

    def _send(
        self,
        method: str,
        path: str,
        action: ApiAction,
        *,
        query: Mapping[str, str],
        body: Document | None = None,
        read_seconds: float = READ_SECONDS,
        is_stream: bool = False,
    ) -> "BaseHTTPResponse":
        client = self._connected()
        from urllib3 import Timeout

        # Custom resources have no strategic merges, kubectl's default.
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        url = f"{client.configuration.host}{path}"
        if query:
            url += f"?{urlencode(query)}"
        with explained(action):
            # By the client's own connections: its `call_api` is another one in each of its years.
            response: BaseHTTPResponse = client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers={**_headers_of(client), "Content-Type": kind},
                # Otherwise it is read to the end, which a watch does not have.
                preload_content=False,
                timeout=Timeout(connect=CONNECT_SECONDS, read=read_seconds),
            )
            if is_stream and response.status < 300:
                return response
            # Read here, so that errors are explained.
            text_of_answer = response.data.decode(errors="replace")
        if not 200 <= response.status < 300:
            raise refusal(response.status, text_of_answer, action)
        return response

    def _path(self, resource: Resource, name: str, part: str = "") -> str:
        place = f"{resource.api}/namespaces/{self.namespace}"
        # The only resource here that is of the cluster, not of a namespace.
        if resource == ACCESS_REVIEWS:
            place = resource.api
        return "/".join(filter(None, (place, resource.plural, name, part)))

    def _action(self, verb: str, resource: Resource, name: str, part: str = "") -> ApiAction:
        plural = "/".join(filter(None, (resource.plural, part)))
        return ApiAction(
            verb=verb, group=resource.group, resource=plural, namespace=self.namespace, name=name
        )

    def _connected(self) -> "Client":
        if self._client is None:
            self._client, namespace = connect(self._context, strict_tls=self._strict_tls)
            self._namespace = self._namespace or namespace
        return self._client
