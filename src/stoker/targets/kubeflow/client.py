"""Calls of Kubeflow Pipelines' API through kfp's own client; the one place that imports kfp."""

import contextlib
import importlib
import io
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Protocol

from stoker.errors import UsageError
from stoker.records import Json
from stoker.targets.kubeflow.connection import Connection
from stoker.targets.kubeflow.errors import login_page, not_json, refusal, silence

CONNECT_SECONDS = 10.0
# From request to the first bytes, and between any two reads.
READ_SECONDS = 60.0
# Of one answer as a whole.
ANSWER_SECONDS = 300.0
# A page of a hundred versions with their pipelines has some 20 MB.
MAX_ANSWER_BYTES = 256 << 20
PAGE_SIZE = 100
# A listing of more than ten thousand is no listing.
MAX_PAGES = 100

_SERVICES = {
    "pipeline": "_pipelines_api",
    "upload": "_upload_api",
    "experiment": "_experiment_api",
    "run": "_run_api",
    "recurring_run": "_recurring_run_api",
    "healthz": "_healthz_api",
}


class _Answer(Protocol):
    """What is used of urllib3's answers."""

    def read1(self, amt: int) -> bytes: ...

    def close(self) -> None: ...

    def release_conn(self) -> None: ...


class Kubeflow:
    """An installation of Kubeflow Pipelines. Each call has a deadline; nothing is kept open.

    Args:
        connection: How it is reached.
        clock: Monotonic seconds.
        sleep: Waits.
        read_seconds: See `READ_SECONDS`.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        read_seconds: float | None = None,
    ) -> None:
        self.connection = connection
        self.clock = clock
        self.sleep = sleep
        self._read_seconds = READ_SECONDS if read_seconds is None else read_seconds

    @cached_property
    def namespace(self) -> str | None:
        """The profile's namespace; None where the installation has one user.

        Raises:
            UsageError: If it has many and none is named.
            PlatformError: If it cannot be asked.
        """
        if not self.call("healthz", "get_healthz").get("multi_user"):
            return None
        # What people told kfp itself, in its own file.
        told = getattr(self._client, "_context_setting", {}).get("namespace")
        if not (named := self.connection.namespace or told):
            raise UsageError(
                "this Kubeflow has many users, each with a namespace: which is yours?",
                where=self.connection.place,
                fix="--namespace N, or kubernetes.kubeflow.namespace in the workload",
            )
        return str(named)

    def call(self, service: str, operation: str, **arguments: object) -> dict[str, Json]:
        """Sends one request, as kfp's generated client names it, and gives the answer's document.

        Raises:
            PlatformError: If it is refused, not answered in time, or something else answers.
        """
        api = getattr(self._client, _SERVICES[service])
        refused = importlib.import_module("kfp_server_api").ApiException
        from urllib3.exceptions import HTTPError

        name = operation if service == "upload" else f"{service}_service_{operation}"
        try:
            answer = getattr(api, name)(
                **{key: value for key, value in arguments.items() if value is not None},
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, self._read_seconds),
            )
            body = self._body(answer)
        except refused as err:
            headers: Mapping[str, str] = err.headers or {}
            raise refusal(
                int(err.status or 0),
                str(err.body or ""),
                content_type=headers.get("Content-Type", ""),
                connection=self.connection,
            ) from None
        except (HTTPError, OSError) as err:
            raise silence(err, operation=operation, connection=self.connection) from None
        return self._document(body, answer.headers.get("Content-Type", ""))

    def pages(
        self,
        service: str,
        operation: str,
        *,
        items: str,
        max_pages: int | None = None,
        **arguments: object,
    ) -> Iterator[dict[str, Json]]:
        """All items of a listing, page after page; of the first `max_pages`, where so many do.

        Raises:
            PlatformError: As `call`; and if the listing does not end.
        """
        token = ""
        for _ in range(max_pages or MAX_PAGES):
            answer = self.call(
                service, operation, page_size=PAGE_SIZE, page_token=token or None, **arguments
            )
            found = answer.get(items)
            for item in found if isinstance(found, list) else ():
                if isinstance(item, dict):
                    yield item
            token = str(answer.get("next_page_token") or "")
            if not token:
                return
        if max_pages is None:
            raise not_json(self.connection, f"its listing of {items} has no end")

    @cached_property
    def _client(self) -> object:
        """kfp's client with what this connection says; nothing is sent yet."""
        try:
            with warnings.catch_warnings():
                # It says at each start which servers it is for, and what its parts will drop.
                warnings.simplefilter("ignore")
                kfp = importlib.import_module("kfp")
                import urllib3
        except ModuleNotFoundError as err:
            raise UsageError(
                f"the library {err.name} is not installed", fix="pip install 'stoker[kubeflow]'"
            ) from None
        connection = self.connection
        retries = urllib3.Retry(total=5, connect=1, read=1, redirect=4, status=0, other=0)

        def load_config(client: object, *words: object) -> object:
            config = kfp.Client._load_config(client, *words)
            config.retries = retries
            if connection.host is None and config.refresh_api_key_hook:
                _keep_host(config)
            return config

        # It would ask for health at its start, for 25 s, and write the pod's namespace to the home
        # folder: `namespace` above is for that.
        quiet = {"_load_config": load_config, "get_kfp_healthz": lambda client: _Health()}
        make = type("Client", (kfp.Client,), quiet)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            client = make(
                host=connection.host,
                credentials=_Credentials(connection.token) if connection.token else None,
                cookies=connection.cookie or None,
                ssl_ca_cert=str(connection.ca_file) if connection.ca_file else None,
                verify_ssl=connection.verify,
                kube_context=connection.context,
                ui_host=connection.ui or None,
            )
        if connection.host is None and client._existing_config.host == "http://localhost":
            raise UsageError(
                "where is Kubeflow Pipelines?",
                where="no address, no pod around stoker, and no kube config",
                fix="--host https://SITE/pipeline, or kubernetes.kubeflow.host in the workload, "
                "or the variable KF_PIPELINES_ENDPOINT",
            )
        return client

    def _body(self, answer: _Answer) -> bytes:
        """The answer's body, read within bounds of size and time."""
        until = self.clock() + ANSWER_SECONDS
        parts: list[bytes] = []
        size = 0
        try:
            while part := answer.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES or self.clock() > until:
                    raise not_json(
                        self.connection, f"after {size} bytes its answer has not come to an end"
                    )
        except BaseException:
            answer.close()
            raise
        answer.release_conn()
        return b"".join(parts)

    def _document(self, body: bytes, content_type: str) -> dict[str, Json]:
        if "html" in content_type.lower() or body.lstrip()[:1] == b"<":
            raise login_page(self.connection)
        if not body.strip():
            return {}
        try:
            document: Json = json.loads(body)
        except ValueError:
            raise not_json(self.connection, "its answer is no JSON") from None
        if not isinstance(document, dict):
            raise not_json(self.connection, "its answer is no JSON object")
        return document


class _Config(Protocol):
    """What is used of the client's configuration."""

    host: str
    api_key: dict[str, str]
    refresh_api_key_hook: Callable[["_Config"], None]


def _keep_host(config: _Config) -> None:
    """Keeps the path of the service behind the cluster's address.

    The kubernetes client's hook, which renews the token before each request, sets the host again,
    to the cluster's own: kfp's requests would go there.
    """
    host, renew = config.host, config.refresh_api_key_hook

    def renew_token_only(config: _Config) -> None:
        renew(config)
        config.host, config.refresh_api_key_hook = host, renew_token_only

    config.refresh_api_key_hook = renew_token_only


class _Health:
    """What kfp's client looks at when it starts: it is to leave the namespace to us."""

    multi_user = False


class _Credentials:
    """What kfp's client asks for the token before each request."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def refresh_api_key_hook(self, config: _Config) -> None:
        """Puts the token of this moment where the client takes it from."""
        config.api_key["authorization"] = self._token()


__all__ = ["MAX_PAGES", "Kubeflow"]
