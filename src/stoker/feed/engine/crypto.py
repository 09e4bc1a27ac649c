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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from stoker.errors import UsageError
from stoker.host.machine import without_preempting
from stoker.logs import EventName, Log

TOKEN_BYTES = 32

# On a LAN a handshake takes milliseconds, but at start name resolution may be slow.
HANDSHAKE_SECONDS = 10.0
# libzmq's I/O thread answers heartbeats, so a busy process is not mistaken for a dead one.
HEARTBEAT_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 15.0
# Largest frame at a server's port: an unauthenticated peer can make it hold that much.
MAX_CONTROL_BYTES = 256 << 10

Socket = zmq.Socket[bytes]

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"stoker"
# A limit, so that others have their turn.
_MAX_MESSAGES_A_TURN = 100
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
        server = z85.encode(derive(token, info=b"stoker feed v1 server"))
        client = z85.encode(derive(token, info=b"stoker feed v1 client"))
        return cls(
            server_public=zmq.curve_public(server),
            server_secret=server,
            client_public=zmq.curve_public(client),
            client_secret=client,
            mac_key=derive(token, info=b"stoker feed v1 mac"),
        )


def read_event(monitor: Socket) -> tuple[int, int]:
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


def secure_client(socket: Socket, keys: Keys, *, max_message_bytes: int = -1) -> None:
    """Makes `socket` a CURVE client of the run's servers; call it before `connect`."""
    _limit(socket, max_message_bytes)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


def _limit(socket: Socket, max_message_bytes: int) -> None:
    socket.linger = 0
    socket.ipv6 = True
    # libzmq closes the connection before it allocates memory for a longer message.
    socket.maxmsgsize = max_message_bytes
    socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
    socket.heartbeat_ivl = round(HEARTBEAT_SECONDS * 1000)
    socket.heartbeat_timeout = round(HEARTBEAT_TIMEOUT_SECONDS * 1000)


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


class ControlServer:
    """A server's end of control connections, which hears only peers with the run's token.

    libzmq bounds a handshake's time and frames, but not the number of handshakes. Its monitor
    reports connections by their descriptors, and each message has the descriptor that it came over.

    Attributes:
        sources: What to poll for reading; `handle` and then `receive` take what is ready.
    """

    def __init__(self, keys: Keys, log: Log, *, endpoint: str) -> None:
        """Listens at `endpoint`; raises zmq.ZMQError if it cannot."""
        self._client = z85.decode(keys.client_public)
        # Time and address, by descriptor; the oldest first.
        self._waiting: dict[int, tuple[float, str]] = {}
        self._context: zmq.Context[Socket] = zmq.Context()
        with without_preempting():
            # The first socket starts libzmq's threads.
            self._asked = self._context.socket(zmq.REP)
        self._asked.bind(_ZAP_ENDPOINT)
        self._router = router = self._context.socket(zmq.ROUTER)
        # Else zmq silently drops messages for a peer that is gone; with it, `send` fails.
        router.router_mandatory = True
        # Before it is bound: nobody connects without the run's keys.
        _limit(router, MAX_CONTROL_BYTES)
        # Connections end with their processes; a host that stands still for a while comes back.
        router.heartbeat_timeout = round(2 * HEARTBEAT_TIMEOUT_SECONDS * 1000)
        router.curve_server = True
        router.curve_publickey = keys.server_public
        router.curve_secretkey = keys.server_secret
        router.zap_domain = _ZAP_DOMAIN
        try:
            router.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.port = int(router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.rejections = RejectionLog(log, port=self.port)
        self._monitor: Socket = router.get_monitor_socket(_ACCEPTED | _ENDED)
        self.sources = (router, self._asked, self._monitor)

    def handle(self, ready: Collection[object], now: float) -> None:
        """Answers handshakes, and rejects the oldest beyond MAX_WAITING."""
        is_asked = self._asked in ready
        # First: libzmq suspends a handshake until the key is allowed or not.
        if is_asked:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._asked.send_multipart(
                        self._answer(self._asked.recv_multipart(zmq.NOBLOCK))
                    )
        # A client that is allowed now may send in this turn: its event is there by now.
        if is_asked or self._monitor in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._note(*read_event(self._monitor), now)
        while len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            _, address = self._waiting.pop(oldest)
            if self._address_of(oldest, is_to_end=True):
                self.rejections.add(address, f"more than {MAX_WAITING} handshakes at a time")

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the next messages, with who sent them."""
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # It came, so its connection is authenticated.
            self._waiting.pop(int(frames[0].get("__fd")), None)
            yield frames[0].bytes, frames[-1].bytes

    def send(self, receiver: bytes, packed: bytes) -> bool:
        """Returns whether the receiver is still connected."""
        try:
            self._router.send_multipart([receiver, packed], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def tick(self, now: float) -> None:
        for descriptor, (since, _) in list(self._waiting.items()):
            # After libzmq's own limit a connection has passed its handshake, but sent nothing yet.
            if now - since > HANDSHAKE_SECONDS + 2:
                del self._waiting[descriptor]
        self.rejections.tick(now)

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Closes it, once what was sent has gone, or after so many seconds."""
        self._router.disable_monitor()
        self._context.destroy(linger=round(linger_seconds * 1000))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        # ZeroMQ's RFC 27 (ZAP): version, request id, domain, address, routing id, mechanism, key.
        request = frames[1]
        if frames[5] == b"CURVE" and hmac.compare_digest(frames[6], self._client):
            return [b"1.0", request, b"200", b"OK", b"run", b""]
        return [b"1.0", request, b"400", b"not of this run", b"", b""]

    def _note(self, event: int, descriptor: int, now: float) -> None:
        if event == _ACCEPTED:
            self._waiting[descriptor] = (now, self._address_of(descriptor))
        elif descriptor in self._waiting:
            _, address = self._waiting.pop(descriptor)
            self.rejections.add(address, "no handshake with this run's token")

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
