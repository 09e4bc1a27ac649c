"""The connection to a cluster: the only module that imports the kubernetes client."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from stoker.errors import PlatformError, UsageError
from stoker.platforms.kubernetes.api_errors import Action, failed, refusal

# Beside a pod's token.
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CERTIFICATE = "check the cluster's certificate in the kube config"


class Response(Protocol):
    """What urllib3 answers."""

    status: int
    data: bytes

    def stream(self, amt: int | None) -> Iterator[bytes]:
        """What comes, as it comes."""
        ...

    def close(self) -> None:
        """Ends the answer."""
        ...

    def release_conn(self) -> None:
        """Gives the connection back."""
        ...


class Stream:
    """An answer that comes bit by bit: a watch, or a log. Closed by its user, from any thread."""

    def __init__(self, response: Response, action: Action) -> None:
        self._response = response
        self._action = action
        self._is_closed = False

    def lines(self) -> Iterator[tuple[str, bool]]:
        """Lines without their ends, and whether they had one (the last one may not).

        Raises:
            ApiError: If the connection breaks off; what came of the last line is not given then.
        """
        rest = b""
        with explained(self._action):
            for chunk in self._response.stream(None):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace"), True
        if rest and not self._is_closed:
            yield rest.decode(errors="replace"), False

    def close(self) -> None:
        """Ends the reading, in whatever thread; may be called twice, never raises."""
        self._is_closed = True
        connection = getattr(self._response, "connection", None)
        open_socket = getattr(connection, "sock", None)
        if isinstance(open_socket, socket.socket):
            # A reader that waits for more wakes up only from that.
            with contextlib.suppress(OSError, ValueError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Gives everything back, by the thread that read."""
        with contextlib.suppress(Exception):
            self._response.close()
        with contextlib.suppress(Exception):
            self._response.release_conn()


def connect(context: str | None) -> tuple[object, str]:
    """The client, and the namespace that its configuration names."""
    try:
        from kubernetes import client, config  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            "the kubernetes client is not installed", fix="pip install 'stoker[kubernetes]'"
        ) from None
    settings = client.Configuration()
    # Ours tell apart what may be sent twice.
    settings.retries = False
    settings.connection_pool_maxsize = 64
    try:
        if context is None and not _has_kube_config(config.kube_config):
            config.load_incluster_config(client_configuration=settings)
            namespace = _own_namespace()
        else:
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
    return client.ApiClient(settings), namespace


def _has_kube_config(kube_config: object) -> bool:
    # Resolved by the client from KUBECONFIG, a list of files.
    named = str(getattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", ""))
    return any(os.path.exists(os.path.expanduser(path)) for path in named.split(os.pathsep))


def _own_namespace() -> str:
    return NAMESPACE_FILE.read_text(encoding="ascii").strip()


def _not_configured(err: Exception, context: str | None) -> PlatformError:
    words = " ".join(str(err).split()) or type(err).__name__
    if context:
        return PlatformError(
            f"the kube config cannot be used: {words}",
            where=f"key kubernetes.context, {context}",
            fix="kubectl config get-contexts lists what there is",
        )
    return PlatformError(
        f"no cluster is configured: {words}",
        where="kube config (variable KUBECONFIG, else ~/.kube/config), or a pod's service account",
        fix="kubectl config view shows what there is; set KUBECONFIG, or kubernetes.context",
    )


@contextlib.contextmanager
def explained(action: Action) -> Iterator[None]:
    """Turns the client's errors into ours.

    Raises:
        ApiError: In place of a refusal, or of a cluster that does not answer.
    """
    import urllib3
    from kubernetes.client.exceptions import ApiException  # type: ignore[import-untyped]

    exceptions = urllib3.exceptions
    try:
        yield
    except ApiException as err:
        if err.status:
            body = err.body.decode(errors="replace") if isinstance(err.body, bytes) else err.body
            raise refusal(int(err.status), body or "", action) from err
        raise _unsafe(err.reason, action) from err
    except exceptions.SSLError as err:
        raise _unsafe(err, action) from err
    except (exceptions.HTTPError, OSError) as err:
        raise failed(
            f"the cluster does not answer: {_words(err)}",
            action,
            fix="check with kubectl get pods: VPN, proxy, the context's server",
        ) from err
    except ValueError as err:
        raise failed(f"the cluster's answer is not JSON: {_words(err)}", action) from err


def _unsafe(err: object, action: Action) -> PlatformError:
    what = f"no safe connection to the cluster: {_words(err)}"
    return failed(what, action, is_final=True, fix=_CERTIFICATE)


def _words(err: object) -> str:
    return " ".join(str(err).split())[:300]
