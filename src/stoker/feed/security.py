"""Who may speak: one token a run, from which both CURVE key pairs and a MAC key are derived.

Every process of a run holds the token, so every one can be server or client; whoever has not the
token can be neither. CURVE alone lets in any client that knows the server's public key: the
allow-list lets in the run's own client key only, and the handshake fails before a byte of a message
is parsed.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from stoker.errors import UsageError

TOKEN_BYTES = 32

# A handshake that takes longer is cut; on a LAN it takes milliseconds, at start names may be slow.
HANDSHAKE_SECONDS = 10.0
# A host that vanished without closing its connections is noticed within about 15 s. The I/O
# thread answers for a process that is busy, so slow is not mistaken for dead.
HEARTBEAT_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 15.0
# Of a frame at a server's port: what a stranger can have it hold before the handshake. Longer
# messages of members go in pieces.
MAX_CONTROL_BYTES = 256 << 10

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"stoker"


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """What is derived from a run's token; z85-encoded CURVE keys and a raw MAC key."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    mac_key: bytes

    @classmethod
    def from_token(cls, token: bytes) -> "Keys":
        """Derives the keys: HKDF-SHA256 with one info string each.

        Raises:
            ValueError: If the token is shorter than 32 bytes.
        """
        if len(token) < TOKEN_BYTES:
            raise ValueError(f"a token has at least {TOKEN_BYTES} bytes, this one {len(token)}")
        server = z85.encode(derive(token, info=b"stoker feed v1 server"))
        client = z85.encode(derive(token, info=b"stoker feed v1 client"))
        return cls(
            server_public=zmq.curve_public(server),
            server_secret=server,
            client_public=zmq.curve_public(client),
            client_secret=client,
            mac_key=derive(token, info=b"stoker feed v1 mac"),
        )


def new_token() -> str:
    """A new token: 64 hexadecimal digits."""
    return secrets.token_hex(TOKEN_BYTES)


def read_token(path: Path | str) -> bytes:
    """The token in a file of 64 hexadecimal digits.

    Raises:
        UsageError: If there is no such file, or something else in it (which is not repeated).
    """
    try:
        text = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "not text"
        raise UsageError(
            f"the run's token cannot be read: {reason}",
            where=str(path),
            fix="point STOKER_TOKEN_FILE to the file that the platform made",
        ) from None
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise UsageError(
            f"expected a token of {2 * TOKEN_BYTES} hexadecimal digits, found {len(text)} "
            "characters that are none",
            where=str(path),
            fix="point STOKER_TOKEN_FILE to the file that the platform made",
        )
    return token


def secure_server(
    socket: "zmq.Socket[bytes]",
    keys: Keys,
    *,
    max_message_bytes: int = MAX_CONTROL_BYTES,
    silence_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
) -> None:
    """Makes `socket` a CURVE server, before it is bound and after the context's AllowList is.

    Args:
        silence_seconds: A peer that answers no heartbeat for so long has gone.
    """
    _limit(socket, max_message_bytes)
    socket.heartbeat_timeout = round(silence_seconds * 1000)
    socket.curve_server = True
    socket.curve_publickey = keys.server_public
    socket.curve_secretkey = keys.server_secret
    socket.zap_domain = _ZAP_DOMAIN


def secure_client(socket: "zmq.Socket[bytes]", keys: Keys, *, max_message_bytes: int = -1) -> None:
    """Makes `socket` a CURVE client, before it is connected; it speaks to the run's servers only.

    Args:
        max_message_bytes: A larger message cuts the connection before memory is taken; -1: none.
    """
    _limit(socket, max_message_bytes)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


class AllowList:
    """Lets in the run's client key and nothing else; one a context, made before its servers bind.

    The owner polls `socket` and calls `handle` when it is readable: until then no new connection
    to a server of the context gets through.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> None:
        self._allowed = z85.decode(keys.client_public)
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def handle(self) -> None:
        """Answers what is waiting, without blocking."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(frames))

    def close(self) -> None:
        """Frees the socket; may be called twice."""
        self.socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request = frames[1] if len(frames) > 1 else b""
        is_ours = (
            len(frames) == 7
            and frames[0] == b"1.0"
            and frames[2] == _ZAP_DOMAIN
            and frames[5] == b"CURVE"
            and hmac.compare_digest(frames[6], self._allowed)
        )
        if is_ours:
            return [b"1.0", request, b"200", b"OK", b"run", b""]
        self.refused += 1
        return [b"1.0", request, b"400", b"not of this run", b"", b""]


def _limit(socket: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
    socket.linger = 0
    socket.ipv6 = True
    # libzmq cuts the connection before it takes memory for a longer message.
    socket.maxmsgsize = max_message_bytes
    socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
    socket.heartbeat_ivl = round(HEARTBEAT_SECONDS * 1000)
    socket.heartbeat_timeout = round(HEARTBEAT_TIMEOUT_SECONDS * 1000)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 10
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 3


def derive(secret: bytes, *, info: bytes) -> bytes:
    """A key of 32 bytes, by HKDF-SHA256 with the salt "stoker"."""
    extracted = hmac.new(b"stoker", secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()
