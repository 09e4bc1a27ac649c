"""Where Kubeflow Pipelines is and how it knows us: from flags, the workload, the environment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from stoker.errors import UsageError
from stoker.records import KubeflowSettings, Workload
from stoker.settings import KubeflowEnvironment

# The service of an installation by its manifests, and the token that it asks pods for.
IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How Kubeflow Pipelines is reached.

    Attributes:
        host: Address of the API; None: by the kube config.
        ui: Address of the pages; empty: not known.
        namespace: Of the profile; empty: not known.
        token: Gives the token of this moment: a file's may be renewed; None: none is sent.
        cookie: Of a session; empty: none is sent.
        ca_file: Certificates to trust; None: those of public authorities.
        context: Of the kube config.
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
        """The host, for messages."""
        return self.host or "the cluster of the kube config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line says of the connection; absent: the workload, then the environment."""

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
) -> Connection:
    """The connection: a flag counts more than the workload, and that more than the environment.

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
    return Connection(
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
    _secret(file)
    return lambda: _secret(file)


def _secret(file: Path) -> str:
    try:
        text = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "not a text"
        raise UsageError(
            f"cannot read {file}: {reason}", where="what Kubeflow knows you by"
        ) from None
    if not text or any(c in text for c in "\r\n"):
        raise UsageError(
            f"{file} is empty or has several lines", where="what Kubeflow knows you by"
        )
    return text


def _address(text: str) -> str:
    """The address with its scheme and no slash at the end.

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
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(
            f"{text} is no address", where="Kubeflow's host", fix="as https://kubeflow.example.com"
        )
    if parts.username or parts.password:
        raise UsageError(
            "a password does not belong in the address",
            where="Kubeflow's host",
            fix="--token-file F, or a token in the variable STOKER_KUBEFLOW_TOKEN",
        )
    return bare


__all__ = ["IN_CLUSTER", "Connection", "Flags", "connection_of"]
