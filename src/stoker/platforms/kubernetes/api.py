"""Calls to a cluster: retried and bounded, objects as they are in JSON."""

import json
import time
from collections.abc import Callable, Mapping
from typing import cast

from stoker.platforms.kubernetes.api_errors import Action, ApiError
from stoker.platforms.kubernetes.connection import Response, Stream, connect, explained
from stoker.platforms.kubernetes.reading import Document, mapping, mappings, text
from stoker.platforms.kubernetes.resources import OF_CLUSTER, Resource
from stoker.records import Json

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
# Attempts of one call: 0.5 + 1 + 2 + 4 s between them.
MAX_ATTEMPTS = 5
RETRY_SECONDS = 0.5
# One page of a list.
PAGE = 500


class Cluster:
    """A cluster as one namespace sees it.

    Args:
        context: Of the kube config; absent: its current one, or the pod's own service account.
        namespace: Absent: the context's, or the pod's own.
        sleep: Waits so many seconds.
        clock: Monotonic seconds, for deadlines.
    """

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._namespace = namespace
        self._client: object | None = None
        self.sleep = sleep
        self.clock = clock

    @property
    def namespace(self) -> str:
        """The namespace in use.

        Raises:
            PlatformError: If no cluster is configured.
            UsageError: If the kubernetes client is not installed.
        """
        if self._namespace is None:
            self._connected()
            assert self._namespace
        return self._namespace

    def get(self, resource: Resource, name: str) -> Document:
        """An object.

        Raises:
            ApiError: Here as below, if the cluster refuses, or does not answer in MAX_ATTEMPTS.
        """
        return self._call("get", resource, name)

    def find(self, resource: Resource, name: str) -> Document | None:
        """An object, or None where there is none of the name."""
        try:
            return self.get(resource, name)
        except ApiError as err:
            if err.is_missing:
                return None
            raise

    def list(
        self, resource: Resource, *, query: Mapping[str, str] | None = None, attempts: int = 1
    ) -> tuple[list[Document], str]:
        """All objects that `query` selects, and the version from which to watch them."""
        found: list[Document] = []
        following = ""
        while True:
            asked = {**(query or {}), "limit": str(PAGE)}
            if following:
                asked["continue"] = following
            page = self._call("list", resource, query=asked, attempts=attempts)
            found += mappings(page, "items")
            described = mapping(page, "metadata")
            following = text(described, "continue")
            if not following:
                return found, text(described, "resourceVersion")

    def create(self, resource: Resource, body: Document) -> Document:
        """Makes an object; where an answer was lost, a second attempt says AlreadyExists."""
        return self._call("create", resource, body=body)

    def patch(self, resource: Resource, name: str, body: Document) -> Document:
        """Changes the fields that `body` has (a merge patch)."""
        return self._call("patch", resource, name, body=body)

    def delete(self, resource: Resource, name: str, *, uid: str | None = None) -> None:
        """Deletes an object after all that it owns; one that is not there is no error.

        Args:
            resource: Its kind.
            name: Its name.
            uid: Only this one, and none that has its name by now.
        """
        options: dict[str, Json] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
        }
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._call("delete", resource, name, body=options)
        except ApiError as err:
            is_another = err.code == 409 and uid is not None
            if not err.is_missing and not is_another:
                raise

    def open(
        self,
        resource: Resource,
        name: str = "",
        *,
        part: str = "",
        query: Mapping[str, str],
        read_seconds: float,
    ) -> Stream:
        """A watch of objects, or a part of one (`log`), as it comes; asked for once.

        Args:
            resource: Its kind.
            name: Of one object; empty: of all that `query` selects.
            part: Of the object.
            query: The call's parameters.
            read_seconds: For which the connection may be silent.
        """
        verb = "get" if name else "watch"
        action = self._action(verb, resource, name=name, part=part)
        path = self._path(resource, name, part)
        response = self._send(
            "GET", path, action, query=query, body=None, is_stream=True, read_seconds=read_seconds
        )
        return Stream(response, action)

    def _call(
        self,
        verb: str,
        resource: Resource,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        attempts: int = MAX_ATTEMPTS,
    ) -> Document:
        action = self._action(verb, resource, name=name)
        method = _METHODS[verb]
        path = self._path(resource, name)
        for attempt in range(attempts):
            try:
                response = self._send(
                    method, path, action, query=query or {}, body=body, read_seconds=READ_SECONDS
                )
                with explained(action):
                    document = json.loads(response.data)
                return document if isinstance(document, Mapping) else {}
            except ApiError as err:
                err.is_repeated = attempt > 0
                if not err.is_passing or attempt == attempts - 1:
                    raise
                self.sleep(RETRY_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    def _send(
        self,
        method: str,
        path: str,
        action: Action,
        *,
        query: Mapping[str, str],
        body: Document | None,
        read_seconds: float,
        is_stream: bool = False,
    ) -> Response:
        client = self._connected()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with explained(action):
            answered = client.call_api(  # type: ignore[attr-defined]
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "application/json, */*", "Content-Type": kind},
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, read_seconds),
            )
            response = cast("Response", answered)
            if not is_stream:
                response.data  # noqa: B018  read while errors of it are explained
            return response

    def _path(self, resource: Resource, name: str = "", part: str = "") -> str:
        place = "" if resource in OF_CLUSTER else f"/namespaces/{self.namespace}"
        return "/".join(
            word for word in (f"{resource.api}{place}/{resource.plural}", name, part) if word
        )

    def _action(self, verb: str, resource: Resource, *, name: str = "", part: str = "") -> Action:
        plural = f"{resource.plural}/{part}" if part else resource.plural
        return Action(
            verb=verb,
            group=resource.group,
            resource=plural,
            namespace=self.namespace,
            name=name,
        )

    def _connected(self) -> object:
        if self._client is None:
            self._client, found = connect(self._context)
            self._namespace = self._namespace or found
        return self._client


_METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}


__all__ = [
    "CONNECT_SECONDS",
    "MAX_ATTEMPTS",
    "PAGE",
    "READ_SECONDS",
    "RETRY_SECONDS",
    "ApiError",
    "Cluster",
    "Document",
    "Resource",
]
