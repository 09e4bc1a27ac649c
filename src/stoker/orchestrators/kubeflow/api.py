"""Calls of Kubeflow Pipelines' API go through kfp's own client; kfp is imported here alone."""

import contextlib
import importlib
import io
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from stoker.errors import MissingExtraError, PlatformError, UsageError
from stoker.records import Json, KubeflowSettings, Workload
from stoker.settings import KubeflowEnvironment

# The service of an installation by its manifests, and the token that it asks pods for.
IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowConnection:
    """Tells how Kubeflow Pipelines is reached.

    Attributes:
        host: Address of the API; None: by the kube config.
        ui: Address of the pages; empty: not known.
        namespace: Namespace of the profile; empty: not known.
        token: Returns the token of this moment: a file's may be renewed; None: none is sent.
        cookie: Cookie of a session; empty: none is sent.
        ca_file: Certificates to trust; None: those of public authorities.
        context: Context of the kube config.
    """

    host: str | None
    ui: str = ""
    namespace: str = ""
    token: Callable[[], str] | None = field(default=None, repr=False)
    cookie: str = field(default="", repr=False)
    ca_file: Path | None = None
    verify: bool = True
    context: str | None = None

    @property
    def place(self) -> str:
        """Returns the host, for messages."""
        return self.host or "the cluster of the kube config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Holds the command line's words on the connection, before the workload's and the system's."""

    host: str | None = None
    namespace: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


def connection_of(
    workload: Workload | None,
    *,
    flags: Flags,
    environment: KubeflowEnvironment,
    pod_token: Path = POD_TOKEN,
) -> KubeflowConnection:
    """Returns the connection: a flag counts more than the workload, and that than the environment.

    Raises:
        UsageError: If an address cannot be one, or a file with a secret cannot be read.
    """
    kubernetes = workload.kubernetes if workload else None
    settings = (kubernetes.kubeflow if kubernetes else None) or KubeflowSettings()
    named = flags.host or settings.host or environment.endpoint
    host = _address(named or (IN_CLUSTER if environment.is_pod else "")) or None
    ca_file = flags.ca_file or (Path(settings.ca_file) if settings.ca_file else None)
    if ca_file is not None and not ca_file.is_file():
        raise UsageError(f"no such file: {ca_file}", where="certificates of Kubeflow's authority")
    return KubeflowConnection(
        host=host,
        ui=_address(settings.ui or environment.ui or named),
        namespace=(
            flags.namespace
            or settings.namespace
            or (kubernetes.namespace if kubernetes else None)
            or environment.namespace
        ),
        token=_token(
            flags.token_file or (Path(settings.token_file) if settings.token_file else None),
            environment,
            pod_token,
        ),
        cookie=_secret(Path(settings.cookie_file)) if settings.cookie_file else environment.cookie,
        ca_file=ca_file,
        verify=settings.verify,
        context=kubernetes.context if kubernetes else None,
    )


def _token(
    file: Path | None, environment: KubeflowEnvironment, pod_token: Path
) -> Callable[[], str] | None:
    if file is None and environment.token:
        return lambda: environment.token
    if file is None and environment.is_pod and pod_token.is_file():
        file = pod_token
    if file is None:
        return None
    # Once here, so that a file that cannot be read is told before anything is sent.
    _secret(file)
    return lambda: _secret(file)


def _secret(file: Path) -> str:
    try:
        text = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "not a text"
        raise UsageError(
            f"cannot read {file}: {reason}", where="credentials for Kubeflow"
        ) from None
    if not text or any(c in text for c in "\r\n"):
        raise UsageError(f"{file} is empty or has several lines", where="credentials for Kubeflow")
    return text


def _address(text: str) -> str:
    """Returns the address with its scheme and no slash at the end.

    Raises:
        UsageError: If it is none, or has a password in it.
    """
    if not text:
        return ""
    whole = text if "://" in text else f"https://{text}"
    # People copy what the browser shows.
    bare = whole.partition("#")[0].rstrip("/")
    try:
        parts = urlsplit(bare)
        # `port` raises ValueError where it is no number from 0 to 65535.
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(
            f"{text} is not an address",
            where="Kubeflow's host",
            fix="as https://kubeflow.example.com",
        )
    if parts.username or parts.password:
        raise UsageError(
            "a password does not belong in the address",
            where="Kubeflow's host",
            fix="--token-file F, or a token in the variable STOKER_KUBEFLOW_TOKEN",
        )
    return bare


_MAX_WORDS = 400
# Answered by a proxy in front of the service, while that is away or overloaded.
_AWAY = (429, 502, 503, 504)


class KubeflowError(PlatformError):
    """Kubeflow Pipelines refused a call, or did not answer.

    Attributes:
        status: HTTP status; 0 where nothing was answered.
        may_pass: Whether the same call may be answered later.
    """

    status = 0
    may_pass = False

    @property
    def is_missing(self) -> bool:
        """Returns whether what was asked for does not exist."""
        return self.status == 404

    @property
    def is_unreachable(self) -> bool:
        """Returns whether the service did not answer, or too late: asking again may help."""
        return self.may_pass


def refusal(
    status: int, body: str, *, content_type: str, connection: KubeflowConnection
) -> KubeflowError:
    """Returns the error for an answer that is a refusal."""
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
            fix = "with Kubeflow's dashboard it is https://SITE/pipeline; check --host"
        case 404:
            what = "it does not exist (404)"
        case 409:
            what = "it exists already (409)"
            fix = "somebody else created it first: run the command again to see it"
        case 400:
            what = "Kubeflow cannot do this (400)"
        case _ if status in _AWAY:
            what = f"Kubeflow is overloaded, or not running ({status})"
            fix = "try again a little later"
        case _:
            what = f"Kubeflow failed ({status})"
            fix = "kubectl logs -n kubeflow deployment/ml-pipeline     says why"
    error = KubeflowError(f"{what}: {words}" if words else what, where=connection.place, fix=fix)
    error.status = status
    error.may_pass = status in _AWAY or status >= 500
    return error


def login_page(connection: KubeflowConnection) -> KubeflowError:
    """Returns the error for a page of HTML where JSON was asked for."""
    error = KubeflowError(
        "a web page answered where Kubeflow Pipelines should: a login, or another site",
        where=connection.place,
        fix="a token (--token-file F) or a session's cookie (kubernetes.kubeflow.cookie_file); "
        "with the dashboard the host is https://SITE/pipeline",
    )
    error.status = 401
    return error


def not_json(connection: KubeflowConnection, why: str) -> KubeflowError:
    """Returns the error for an answer that cannot be understood."""
    return KubeflowError(
        f"this is not Kubeflow Pipelines: {why}",
        where=connection.place,
        fix="check --host",
    )


def silence(err: Exception, *, operation: str, connection: KubeflowConnection) -> KubeflowError:
    """Returns the error for a call that had no answer: by the kind of urllib3's exception."""
    cause = getattr(err, "reason", None) or err
    kind = type(cause).__name__
    text = " ".join(f"{kind} {cause}".split())
    may_pass, is_late = True, "Timeout" in kind
    fix = "is it up, and reachable from here? check --host"
    if "CERTIFICATE_VERIFY" in text or "SSLError" in kind or "SSLError" in text:
        why, may_pass = "its certificate is not trusted, or it does not speak TLS", False
        fix = "--ca-file F with its authority's certificate; or http:// where it has none"
    elif "NameResolution" in kind or "getaddrinfo" in text:
        why, fix = "no such host name", "check --host; a VPN?"
    elif "ReadTimeout" in kind:
        why, fix = "no answer in time", "try again a little later"
    elif is_late:
        why = "no connection in time"
    elif "ResponseError" in kind or "redirect" in text:
        why, may_pass = "it redirects again and again, as logins do", False
        fix = "a token (--token-file F) or a session's cookie"
    elif "refused" in text:
        why = "nothing listens there"
        fix = "kubectl port-forward -n kubeflow svc/ml-pipeline 8888; then --host http://localhost:8888"
    else:
        why = "the connection broke"
    # What only reads may be asked again without a second thought.
    if may_pass and is_late and not operation.startswith(("get", "list")):
        fix = "it may have been done anyway: check before you try again"
    error = KubeflowError(f"Kubeflow did not answer: {why}", where=connection.place, fix=fix)
    error.may_pass = may_pass
    return error


def _words(body: str, *, content_type: str) -> str:
    """Returns the service's message, or a short plain text; nothing of a page."""
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


CONNECT_SECONDS = 10.0
# From request to the first bytes, and between any two reads.
READ_SECONDS = 60.0
# Of one answer as a whole.
ANSWER_SECONDS = 300.0
# A page of a hundred versions with their pipelines has some 20 MB.
MAX_ANSWER_BYTES = 256 << 20
PAGE_SIZE = 100
# A listing of more than ten thousand objects is a mistake.
MAX_PAGES = 100

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_SERVICES = {
    "pipeline": "_pipelines_api",
    "upload": "_upload_api",
    "experiment": "_experiment_api",
    "run": "_run_api",
    "recurring_run": "_recurring_run_api",
    "healthz": "_healthz_api",
}


class _Answer(Protocol):
    """Describes what is used of urllib3's answers here."""

    headers: Mapping[str, str]

    def read1(self, amt: int) -> bytes: ...

    def close(self) -> None: ...

    def release_conn(self) -> None: ...


class Kubeflow:
    """Talks to Kubeflow Pipelines. Each call has a deadline; no connection is kept open.

    Args:
        connection: How it is reached.
        clock: Monotonic seconds.
        sleep: Waits.
        read_seconds: See `READ_SECONDS`.
    """

    def __init__(
        self,
        connection: KubeflowConnection,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        read_seconds: float | None = None,
    ) -> None:
        self.connection = connection
        self.clock = clock
        self.sleep = sleep
        # Ends of logs of nodes that have ended, by the nodes' ids: they change no more.
        self.logs: dict[str, str] = {}
        self._read_seconds = READ_SECONDS if read_seconds is None else read_seconds

    @cached_property
    def namespace(self) -> str | None:
        """Returns the profile's namespace; None where the installation has one user.

        Raises:
            UsageError: If it has many and none is named.
            PlatformError: If it cannot be asked.
        """
        if not self._health.get("multi_user"):
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

    @cached_property
    def version(self) -> tuple[int, int, int] | None:
        """Returns the version of the server; None where it does not tell, as own builds of it do.

        Raises:
            PlatformError: If it cannot be asked.
        """
        found = _VERSION.match(str(self._health.get("tag_name") or ""))
        return (int(found[1]), int(found[2]), int(found[3])) if found else None

    @cached_property
    def _health(self) -> dict[str, Json]:
        return self.call("healthz", "get_healthz")

    def call(self, service: str, operation: str, **arguments: object) -> dict[str, Json]:
        """Sends one request, as kfp's generated client names it; returns the answer's document.

        Raises:
            PlatformError: If it is refused, not answered in time, or something else answers.
        """
        # Generated from a document of its own, the upload's methods have no prefix.
        name = operation if service == "upload" else f"{service}_service_{operation}"
        send = getattr(getattr(self._client, _SERVICES[service]), name)
        given = {key: value for key, value in arguments.items() if value is not None}
        body, kind = self._answered(lambda: send(**given, **self._how()), operation)
        return self._document(body, kind)

    def get(self, path: str, *, max_bytes: int = MAX_ANSWER_BYTES) -> str:
        """Returns the text at a path that the generated client does not know: its last bytes.

        Raises:
            PlatformError: As `call`; and for a web page.
        """
        client = getattr(self._client, _SERVICES["run"]).api_client
        how = {"auth_settings": ["Bearer"], "_return_http_data_only": True, **self._how()}
        body, kind = self._answered(
            lambda: client.call_api(path, "GET", **how), "get", max_bytes=max_bytes
        )
        if _is_page(text := body.decode(errors="replace"), kind):
            raise login_page(self.connection)
        return text

    def _how(self) -> dict[str, object]:
        return {
            "_preload_content": False,
            "_request_timeout": (CONNECT_SECONDS, self._read_seconds),
        }

    def _answered(
        self, send: Callable[[], _Answer], operation: str, *, max_bytes: int | None = None
    ) -> tuple[bytes, str]:
        """Sends one request; returns the answer's body, or its last bytes, and its content type."""
        refused = importlib.import_module("kfp_server_api").ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = send()
            return self._body(answer, max_bytes), answer.headers.get("Content-Type", "")
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

    def pages(
        self,
        service: str,
        operation: str,
        *,
        items: str,
        max_pages: int | None = None,
        **arguments: object,
    ) -> Iterator[dict[str, Json]]:
        """Yields all items of a listing, page after page; of the first `max_pages` if so many do.

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
        """Returns kfp's client with what this connection says; nothing is sent yet."""
        try:
            with warnings.catch_warnings():
                # It says at each start which servers it is for, and what its parts will drop.
                warnings.simplefilter("ignore")
                kfp = importlib.import_module("kfp")
                import urllib3
        except ModuleNotFoundError as err:
            raise MissingExtraError.of(err, extra="kubeflow") from None
        connection = self.connection
        # A lost connection is tried once more; a refusal is told at once.
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
        # The generated client's own default: kfp found no address either.
        if connection.host is None and client._existing_config.host == "http://localhost":
            raise UsageError(
                "where is Kubeflow Pipelines?",
                where="no address, no pod around stoker, and no kube config",
                fix="--host https://SITE/pipeline, or kubernetes.kubeflow.host in the workload, "
                "or the variable KF_PIPELINES_ENDPOINT",
            )
        return client

    def _body(self, answer: _Answer, last: int | None) -> bytes:
        """Returns the answer's body, or its last bytes, read within bounds of size and time."""
        until = self.clock() + ANSWER_SECONDS
        parts: list[bytes] = []
        size = 0
        try:
            # `read` would wait for the whole answer, however slowly it comes.
            while part := answer.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES or self.clock() > until:
                    raise not_json(self.connection, f"its answer is longer than {size} bytes")
                if last is not None:
                    parts = [b"".join(parts)[-last:]]
        except BaseException:
            answer.close()
            raise
        answer.release_conn()
        return b"".join(parts)

    def _document(self, body: bytes, content_type: str) -> dict[str, Json]:
        # A login in front of Kubeflow answers with status 200 and its page.
        if "html" in content_type.lower() or body.lstrip()[:1] == b"<":
            raise login_page(self.connection)
        if not body.strip():
            return {}
        try:
            document: Json = json.loads(body)
        except ValueError:
            raise not_json(self.connection, "its answer is not JSON") from None
        if not isinstance(document, dict):
            raise not_json(self.connection, "its answer is not a JSON object")
        return document


class _Config(Protocol):
    """Describes what is used of the client's configuration here."""

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
    """Answers kfp's client, which asks when it starts: it is to leave the namespace to us."""

    multi_user = False


class _Credentials:
    """Sets the token in kfp's client before each request."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def refresh_api_key_hook(self, config: _Config) -> None:
        """Puts the token of this moment where the client takes it from."""
        config.api_key["authorization"] = self._token()
