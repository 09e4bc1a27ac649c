"""Calls to a cluster by the kubernetes client's public API: dictionaries in and out."""

import contextlib
import copy
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.errors import MissingExtraError, PlatformError, ServiceError, ServiceErrorKind
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings, text
from stoker.repeat import READ_AGAIN_SECONDS, Clock, Sleep, Suppressed, repeated

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

# A missing right; quotas and admission rules answer 403, too.
_DENIED = re.compile(r'User "[^"]*" cannot ')
_KINDS: Mapping[int, ServiceErrorKind] = {
    401: "stale",
    404: "missing",
    # A proxy between here and the cluster.
    407: "away",
    **dict.fromkeys((408, 429, 500, 502, 503, 504), "away"),
}
_FIXES: Mapping[str, str] = {
    "stale": "log in again (kubectl get pods shows whether), or set kubernetes.context",
    "denied": "kubectl apply -k configs/kubernetes (its rbac.yaml), with your account in it",
    "missing": "check kubernetes.namespace; install JobSet (jobset.sigs.k8s.io) or Trainer",
    "away": "check with kubectl get pods: VPN, proxy, the context's server",
}
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
# A silent training is normal; this long a silence may be a dead connection.
LOG_READ_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Resource:
    """An API resource; the core's have no group, and a name in the client's methods."""

    group: str
    version: str
    plural: str
    singular: str = ""


JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
TRAINJOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs")
RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes")
SECRETS = Resource("", "v1", "secrets", "secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "config_map")
PODS = Resource("", "v1", "pods", "pod")
EVENTS = Resource("", "v1", "events", "event")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "persistent_volume_claim")

_OF_KIND: Mapping[str, Resource] = {
    "JobSet": JOBSETS,
    "TrainJob": TRAINJOBS,
    "TrainingRuntime": RUNTIMES,
    "Secret": SECRETS,
    "ConfigMap": CONFIG_MAPS,
}


def resource_of(document: Document) -> Resource:
    return _OF_KIND[text(document, "kind")]


def name_of(document: Document) -> str:
    return text(document, "metadata", "name")


def uid_of(document: Document | None) -> str:
    return text(document, "metadata", "uid")


class ApiClient(Protocol):
    """The kubernetes client's connection to a cluster."""

    default_headers: Mapping[str, str]


def connect(context: str | None) -> tuple[ApiClient, str]:
    """Returns the kubernetes client's ApiClient, and the namespace of its configuration."""
    try:
        from kubernetes import client, config  # type: ignore[import-untyped]
        from urllib3.util import ssl_
    except ImportError as err:
        raise MissingExtraError.of(err, extra="kubernetes") from None
    settings = client.Configuration()
    # `repeated` retries.
    settings.retries = False
    # Each followed log keeps a connection.
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
    except (config.ConfigException, OSError, KeyError, TypeError, ValueError) as err:
        raise PlatformError(
            f"cannot use the kube config: {str(err) or type(err).__name__}",
            where=f"key kubernetes.context, {context}" if context else "variable KUBECONFIG",
            fix="kubectl config get-contexts lists the contexts; set KUBECONFIG, or "
            "kubernetes.context",
        ) from err
    connected = client.ApiClient(settings)
    options = connected.rest_client.pool_manager.connection_pool_kw
    verified = ssl_.create_urllib3_context(cert_reqs=options["cert_reqs"])
    # Python 3.13 sets it, kubectl does not: cluster authorities are often older than the rule.
    # Chain, name and time are verified in any case.
    verified.verify_flags &= ~ssl.VERIFY_X509_STRICT
    options["ssl_context"] = verified
    connection: ApiClient = connected
    return connection, namespace


class ClusterApi:
    """A cluster, for one namespace; all calls raise ServiceError if the cluster refuses.

    Args:
        context: Context of the kube config; absent: the current one, or the pod's service account.
        namespace: Absent: the context's, or the pod's.
    """

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        sleep: Sleep = time.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self._context = context
        self._namespace = namespace
        self._client: ApiClient | None = None
        self._patience_seconds = 0.0
        self.sleep = sleep
        self.clock = clock

    def patient(self) -> "ClusterApi":
        """Returns the same cluster for calls that are repeated for READ_AGAIN_SECONDS."""
        api = copy.copy(self)
        api._patience_seconds = READ_AGAIN_SECONDS
        return api

    @property
    def namespace(self) -> str:
        """The namespace in use; raises PlatformError if no cluster is configured."""
        if self._namespace is None:
            self._connected()
        assert self._namespace
        return self._namespace

    def find(self, resource: Resource, name: str) -> Document | None:
        """Returns an object, or None if it does not exist."""
        with Suppressed("missing"):
            return self._call("get", resource, name=name)
        return None

    def list(self, resource: Resource, **selectors: str) -> list[Document]:
        """Returns all objects that `label_selector` and `field_selector` select."""
        return mappings(self._call("list", resource, **selectors), "items")

    def create(self, document: Document, *, is_dry_run: bool = False) -> Document:
        """Creates an object, or has it checked; a retry after a lost answer raises `taken`."""
        # Strict: otherwise the cluster would drop unknown fields silently.
        options = {"body": document, "field_validation": "Strict"}
        if is_dry_run:
            options["dry_run"] = "All"
        return self._call("create", resource_of(document), **options)

    def patch(self, resource: Resource, name: str, changes: Document) -> Document:
        """Changes the given fields (a merge patch)."""
        return self._call("patch", resource, name=name, body=changes)

    def delete(self, resource: Resource, name: str, *, uid: str) -> None:
        """Deletes the object of this uid after all that it owns; it may be missing."""
        options: Json = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        try:
            self._call("delete", resource, name=name, body=options)
        except ServiceError as err:
            # 409: the object is gone, and a newer one has its name.
            if err.kind != "missing" and err.code != "409":
                raise

    def open_log(
        self, pod: str, *, container: str, since_seconds: int | None
    ) -> "BaseHTTPResponse":
        """Opens the log of a pod, which is followed to its end, with times before the lines."""
        from kubernetes.client import CoreV1Api  # type: ignore[import-untyped]

        response: BaseHTTPResponse = CoreV1Api(self._connected()).read_namespaced_pod_log(
            pod,
            self.namespace,
            container=container,
            follow=True,
            timestamps=True,
            since_seconds=since_seconds,
            _preload_content=False,
            _request_timeout=(CONNECT_SECONDS, LOG_READ_SECONDS),
        )
        return response

    @contextlib.contextmanager
    def explained(self, action: str) -> Iterator[None]:
        """Turns the client's errors in a block into ServiceErrors."""
        from kubernetes.client import ApiException
        from urllib3 import exceptions

        code = 0
        cause: Exception
        kind: ServiceErrorKind = "away"
        try:
            yield
            return
        except ApiException as err:
            cause = err
            code = err.status or 0
            # A Status as JSON, or a proxy's answer. Without a status it is TLS's: the client keeps
            # the text alone.
            words = (err.body or b"").decode(errors="replace") or str(err.reason)
            status: Document = {}
            with contextlib.suppress(ValueError):
                status = mapping(json.loads(words))
            words = text(status, "message") or words
            kind = _KINDS.get(code, "refused")
            if code == 403 and _DENIED.search(words):
                kind = "denied"
            elif text(status, "reason") == "AlreadyExists":
                kind = "taken"
        except (exceptions.HTTPError, OSError, ValueError) as err:
            cause = err
            words = f"the cluster does not answer: {err}"
        raise ServiceError(
            f"the cluster refused to {action}: {' '.join(words.split())[:600]}",
            where=f"{action}, namespace {self.namespace}",
            fix=_FIXES.get(kind, ""),
            action=action,
            kind=kind,
            code=str(code),
        ) from cause

    def _call(self, verb: str, resource: Resource, **options: object) -> Document:
        from kubernetes.client import CoreV1Api, CustomObjectsApi

        client = self._connected()
        if verb == "patch":
            client = copy.copy(client)
            # Custom resources have no strategic merges, the client's default.
            kind = {"Content-Type": "application/merge-patch+json"}
            client.default_headers = {**client.default_headers, **kind}
        options |= {
            "namespace": self.namespace,
            "_preload_content": False,
            "_request_timeout": (CONNECT_SECONDS, READ_SECONDS),
        }
        action = f"{verb} {resource.plural}"
        if resource.group:
            action += f".{resource.group}"
            options |= {"group": resource.group, "version": resource.version}
            options["plural"] = resource.plural
            method = getattr(CustomObjectsApi(client), f"{verb}_namespaced_custom_object")
        else:
            word = "read" if verb == "get" else verb
            method = getattr(CoreV1Api(client), f"{word}_namespaced_{resource.singular}")

        def send() -> Document:
            with self.explained(action):
                return mapping(json.loads(method(**options).data))

        return repeated(
            send,
            seconds=self._patience_seconds,
            is_passing=lambda err: err.kind == "away",
            sleep=self.sleep,
            clock=self.clock,
        )

    def _connected(self) -> ApiClient:
        if self._client is None:
            self._client, namespace = connect(self._context)
            self._namespace = self._namespace or namespace
        return self._client
