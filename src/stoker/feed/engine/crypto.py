"""Keys of a run and authentication by CURVE; `sealing` has the keys of batches.

All keys are derived from one token. A platform's `submit` makes it, a new one for each job, and
every process of the run has it. CURVE alone accepts any client that knows the server's public key:
the allow-list accepts the run's own client key only, and the handshake fails before a byte of a
message is parsed. The number of connections in their handshake is bounded. When all places are
taken, a new one replaces the oldest: members of the run authenticate within milliseconds, so a
flood delays them no longer than that.
"""

import contextlib
import hashlib
import hmac
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from stoker.errors import UsageError
from stoker.logs import EventName, Log

TOKEN_BYTES = 32

# On a LAN a handshake takes milliseconds, but at start name resolution may be slow.
HANDSHAKE_SECONDS = 10.0
# libzmq's I/O thread answers heartbeats, so a busy process is not mistaken for a dead one.
HEARTBEAT_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 15.0
# Largest frame at a server's port: an unauthenticated peer can make it hold that much.
MAX_CONTROL_BYTES = 256 << 10

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"stoker"
# Each takes at most a frame of MAX_CONTROL_BYTES and libzmq's buffers: less than 64 MiB in total.
MAX_WAITING = 128
_LOG_SECONDS = 60.0
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_ENDED = int(zmq.EVENT_DISCONNECTED)


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Keys derived from a run's token: z85-encoded CURVE keys and a raw MAC key."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    mac_key: bytes

    @classmethod
    def from_token(cls, token: bytes) -> "Keys":
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


def read_event(monitor: "zmq.Socket[bytes]") -> tuple[int, int]:
    """Returns a monitor's next event and its value; raises zmq.Again if there is none."""
    # zmq.utils.monitor would import asyncio: 25 ms, a seventh of the start of each launcher.
    packed, _ = monitor.recv_multipart(zmq.NOBLOCK)
    event, value = struct.unpack("=hi", packed)
    return event, value


def read_token(path: Path | str) -> bytes:
    """Returns the token in a file of hexadecimal digits; errors never show its content."""
    what = f"expected a token of {2 * TOKEN_BYTES} hexadecimal digits, found something else"
    try:
        token = bytes.fromhex(Path(path).read_text("ascii"))
        if len(token) == TOKEN_BYTES:
            return token
    except OSError as err:
        what = f"cannot read the run's token: {err.strerror}"
    except ValueError:
        pass
    fix = "keep the file that the platform made beside run.json"
    raise UsageError(what, where=str(path), fix=fix)


def secure_server(
    socket: "zmq.Socket[bytes]",
    keys: Keys,
    *,
    max_message_bytes: int = MAX_CONTROL_BYTES,
    silence_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
) -> None:
    """Makes `socket` a CURVE server; call it before `bind`, with an AllowList in its context."""
    _limit(socket, max_message_bytes)
    socket.heartbeat_timeout = round(silence_seconds * 1000)
    socket.curve_server = True
    socket.curve_publickey = keys.server_public
    socket.curve_secretkey = keys.server_secret
    socket.zap_domain = _ZAP_DOMAIN


def secure_client(socket: "zmq.Socket[bytes]", keys: Keys, *, max_message_bytes: int = -1) -> None:
    """Makes `socket` a CURVE client of the run's servers; call it before `connect`."""
    _limit(socket, max_message_bytes)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


class AllowList:
    """Accepts the run's client key only; one per context, made before its servers bind.

    The owner polls `socket` and calls `handle` when it is readable: no new connection to a server
    of the context is established before.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> None:
        self._allowed = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def handle(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                self.socket.send_multipart(self._answer(frames))

    def close(self) -> None:
        self.socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        # ZeroMQ's RFC 27 (ZAP): version, request id, domain, address, routing id, mechanism, key.
        request = frames[1]
        if frames[5] == b"CURVE" and hmac.compare_digest(frames[6], self._allowed):
            return [b"1.0", request, b"200", b"OK", b"run", b""]
        return [b"1.0", request, b"400", b"not of this run", b"", b""]


def _limit(socket: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
    socket.linger = 0
    socket.ipv6 = True
    # libzmq closes the connection before it allocates memory for a longer message.
    socket.maxmsgsize = max_message_bytes
    socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
    socket.heartbeat_ivl = round(HEARTBEAT_SECONDS * 1000)
    socket.heartbeat_timeout = round(HEARTBEAT_TIMEOUT_SECONDS * 1000)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 10
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 3


def derive(secret: bytes, *, info: bytes) -> bytes:
    """Returns a key of 32 bytes, by HKDF-SHA256."""
    # A single block of HKDF's output: 32 bytes, the size of SHA-256.
    extracted = hmac.new(b"stoker", secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


class RejectionLog:
    """Logs rejected connections, with one line in a minute."""

    def __init__(self, log: Log, *, port: int) -> None:
        self._log = log
        self._port = port
        self._count = 0
        self._last = ("", "")
        self._silent_until = 0.0

    def add(self, address: str, reason: str) -> None:
        self._count += 1
        self._last = (address, reason)

    def tick(self, now: float) -> None:
        if self._count and now >= self._silent_until:
            address, reason = self._last
            self._log.event(
                EventName.CONNECTIONS_REJECTED,
                port=self._port,
                connections=self._count,
                last=address,
                reason=reason,
            )
            self._count = 0
            self._silent_until = now + _LOG_SECONDS


@dataclass(eq=False)
class HandshakeGuard:
    """Bounds the connections to a CURVE server that are in their handshake.

    libzmq bounds a handshake's time and frames, but not the number of handshakes. Its monitor
    reports connections by their descriptors, and each message has the descriptor that it came over.
    To be closed before its server.
    """

    server: "zmq.Socket[bytes]"
    log: RejectionLog
    port: int
    allow_list: AllowList
    # Time and address, by descriptor; the oldest first.
    _waiting: dict[int, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        monitor: zmq.Socket[bytes] = self.server.get_monitor_socket(_ACCEPTED | _ENDED)
        self.monitor = monitor

    def handle(self, ready: Collection[object], now: float) -> None:
        """Answers handshakes, rejects the oldest beyond MAX_WAITING; call it before receiving."""
        is_asked = self.allow_list.socket in ready
        # First: libzmq suspends a handshake until the key is allowed or not.
        if is_asked:
            self.allow_list.handle()
        # A client that is allowed now may send in this turn: its event is there by now.
        if not (is_asked or self.monitor in ready):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                event, descriptor = read_event(self.monitor)
                if event == _ACCEPTED:
                    self._waiting[descriptor] = (now, self._address_of(descriptor))
                elif descriptor in self._waiting:
                    _, address = self._waiting.pop(descriptor)
                    self.log.add(address, "no handshake with this run's token")
        while len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            _, address = self._waiting.pop(oldest)
            if self._address_of(oldest, is_to_end=True):
                self.log.add(address, f"more than {MAX_WAITING} handshakes at a time")

    def note_proved(self, frame: zmq.Frame) -> None:
        """Notes that a connection is authenticated, as a message came by it.

        Args:
            frame: Of the message; it knows its connection.
        """
        if self._waiting:
            self._waiting.pop(int(frame.get("__fd")), None)

    def tick(self, now: float) -> None:
        for descriptor, (since, _) in list(self._waiting.items()):
            # After libzmq's own limit a connection has passed its handshake, but sent nothing yet.
            if now - since > HANDSHAKE_SECONDS + 2:
                del self._waiting[descriptor]
        self.log.tick(now)

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.server.disable_monitor()
        self.monitor.close(linger=0)

    def _address_of(self, descriptor: int, *, is_to_end: bool = False) -> str:
        """Returns the peer's address; empty if it is no connection to this port any more."""
        try:
            # libzmq may have closed it: the number is unused (dup fails), or of something else.
            with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as connection:
                if connection.getsockname()[1] != self.port:
                    return ""
                address = str(connection.getpeername()[0])
                if is_to_end:
                    # libzmq, which owns the connection, then closes it.
                    connection.shutdown(socket.SHUT_RDWR)
                return address
        except (OSError, IndexError):
            return ""
