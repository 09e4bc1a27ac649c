"""Keys from one token decide who may speak, by CURVE; `sealing` has the keys of batches.

Every process of a run holds the token, so every one can be server or client; a process without the
token can be neither. CURVE alone lets in any client that knows the server's public key: the
allow-list lets in the run's own client key only, and the handshake fails before a byte of a message
is parsed. A bounded number of connections may wait for their handshake at a time, each for a few
seconds. Who connects when the places are taken takes that of the one who has waited longest: a
member of the run proves itself within milliseconds, so a flood of strangers keeps it out for no
longer than that.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from stoker.errors import UsageError
from stoker.logs import EventName, Log

TOKEN_BYTES = 32

# A handshake that takes longer is cut; on a LAN it takes milliseconds, at start names may be slow.
HANDSHAKE_SECONDS = 10.0
# A host that vanished without closing its connections is noticed within about 15 s. The I/O
# thread answers for a process that is busy, so slow is not mistaken for dead.
HEARTBEAT_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 15.0
# Largest frame at a server's port: an unauthenticated peer can make it hold that much. Longer
# messages of members are sent in pieces.
MAX_CONTROL_BYTES = 256 << 10

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"stoker"
# Places of a port. Each takes a frame of MAX_CONTROL_BYTES and libzmq's buffers at most: 64 MiB in
# all hold 200 of them.
MAX_WAITING = 128
_LOG_SECONDS = 10.0
_ACCEPTED, _ENDED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Holds the keys that a run's token gives; z85-encoded CURVE keys and a raw MAC key."""

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


def read_event(monitor: "zmq.Socket[bytes]") -> tuple[int, int]:
    """Returns the next event that a socket's monitor reports, and its value.

    zmq.utils.monitor would import asyncio: 25 ms, a seventh of the start of each launcher.

    Raises:
        zmq.Again: If there is none.
    """
    packed, _ = monitor.recv_multipart(zmq.NOBLOCK)
    event, value = struct.unpack("=hi", packed)
    return event, value


def new_token() -> str:
    """Returns a new token: 64 hexadecimal digits."""
    return secrets.token_hex(TOKEN_BYTES)


def read_token(path: Path | str) -> bytes:
    """Returns the token in a file of 64 hexadecimal digits.

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
        # ZeroMQ's RFC 27 (ZAP): version, request id, domain, address, routing id, mechanism, the
        # client's key.
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
    """Returns a key of 32 bytes, by HKDF-SHA256 with the salt "stoker"."""
    # One block is all of HKDF's output: 32 bytes, as many as SHA-256 has.
    extracted = hmac.new(b"stoker", secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


class RejectionLog:
    """Tells of those who were cut: one line for all, at once and then every 10 s at most."""

    def __init__(self, log: Log, *, port: int) -> None:
        self._log = log
        self._port = port
        self._count = 0
        self._last = ("", "")
        self._silent_until = 0.0

    def add(self, address: str, reason: str) -> None:
        """Notes a connection that was cut, and why."""
        self._count += 1
        self._last = (address, reason)

    def tick(self, now: float) -> None:
        """Writes the line, if there is something to tell and it is time."""
        if self._count and now >= self._silent_until:
            address, reason = self._last
            self._log.event(
                EventName.CONNECTIONS_REJECTED,
                port=self._port,
                connections=self._count,
                last=address,
                reason=reason,
            )
            self._count, self._silent_until = 0, now + _LOG_SECONDS


class HandshakeGuard:
    """Bounds the connections to a CURVE server that are in the middle of their handshake.

    libzmq bounds a handshake's time and frames, but not how many there are at a time. Its monitor
    reports connections by their descriptors, and each message says over which one it came.

    Args:
        server: A ROUTER that is bound to `port`; call `close` before it is closed.
        allow_list: Keys that its context lets in.
    """

    def __init__(
        self,
        server: "zmq.Socket[bytes]",
        log: RejectionLog,
        *,
        port: int,
        allow_list: AllowList,
    ) -> None:
        self._server = server
        self._log = log
        self._allow_list = allow_list
        self._port = port
        # By descriptor; the oldest first.
        self._waiting: dict[int, _Accepted] = {}
        self.monitor: zmq.Socket[bytes] = server.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )

    def handle(self, ready: Collection[object], now: float) -> None:
        """Answers handshakes, reads what the monitor reports, cuts the oldest beyond MAX_WAITING.

        Does not block; to be called before messages are received.

        Args:
            ready: What polled readable.
        """
        is_asked = self._allow_list.socket in ready
        # First: libzmq holds a handshake until it is told whether the client's key is allowed.
        if is_asked:
            self._allow_list.handle()
        # Who is let in now may send in this same turn: that he was accepted is reported by now, as
        # `proved` expects, though perhaps it was not when `ready` was polled.
        if not (is_asked or self.monitor in ready):
            return
        while True:
            try:
                event, descriptor = read_event(self.monitor)
            except zmq.Again:
                break
            if event == _ACCEPTED:
                self._waiting[descriptor] = _Accepted(now, self._address_of(descriptor))
            elif descriptor in self._waiting:
                address = self._waiting.pop(descriptor).address
                self._log.add(address, "no handshake of this run")
        while len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            address = self._waiting.pop(oldest).address
            if self._address_of(oldest, is_to_end=True):
                self._log.add(address, f"more than {MAX_WAITING} handshakes at a time")

    def proved(self, frame: zmq.Frame) -> None:
        """Notes that a message has come: who sent it is of this run."""
        if self._waiting:
            # libzmq says with each message over which descriptor it came.
            self._waiting.pop(int(frame.get("__fd")), None)

    def tick(self, now: float) -> None:
        """Forgets whom libzmq itself has cut by now; called once a second."""
        for descriptor, accepted in list(self._waiting.items()):
            # A little after libzmq's own limit: who is still connected has passed its handshake,
            # and only has not sent a message yet.
            if now - accepted.since > HANDSHAKE_SECONDS + 2:
                del self._waiting[descriptor]
        self._log.tick(now)

    def close(self) -> None:
        """Stops watching; may be called twice."""
        with contextlib.suppress(zmq.ZMQError):
            self._server.disable_monitor()
        self.monitor.close(linger=0)

    def _address_of(self, descriptor: int, *, is_to_end: bool = False) -> str:
        """Returns who is connected there; empty: it is no connection to this port any more.

        Args:
            is_to_end: Shuts it down; libzmq, whose it is, sees its end and closes it.
        """
        try:
            # libzmq closes its descriptors in its own thread, at any time: the number may be
            # nobody's by now (dup fails), or another file's (its port differs). A duplicate, for
            # this socket closes what it wraps.
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getsockname()[1] != self._port:
                    return ""
                address = str(connection.getpeername()[0])
                if is_to_end:
                    connection.shutdown(socket.SHUT_RDWR)
                return address
        except (OSError, IndexError):
            return ""


@dataclass(frozen=True, slots=True)
class _Accepted:
    since: float
    address: str
