"""Connection for messages to the coordinator or an agent; batches have another one.

libzmq's own reconnect would keep a name's first address, and hide that a peer came back with its
memory lost. So a lost connection is closed, and dialled again by name after a back-off.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

import zmq

from stoker.feed.engine.crypto import Keys, read_event, secure_client
from stoker.feed.engine.run_messages import Message, pack

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]

# A first packet and its repetition after 1 s; an abandoned address does not answer.
CONNECT_SECONDS = 2.0
# Between attempts.
PAUSE_SECONDS = 0.5
# Rosters are small, and so are messages of agents: errors are cut.
_MAX_MESSAGE_BYTES = 16 << 20
# At the end of the process: time to send a goodbye.
GOODBYE_SECONDS = 0.2

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(eq=False)
class Link:
    """Control connection to a host, dialled by name again whenever it is lost.

    Used by the control thread only.

    Attributes:
        post: Has that thread do something.
        address: The host's, as it was found last.
        is_up: The handshake is done.
    """

    context: ZmqContext
    keys: Keys
    name: str
    port: int
    post: Callable[[Callable[[], None]], None]
    address: str = ""
    is_up: bool = False
    # When it is dialled next, monotonic seconds; infinity while there is a socket.
    _dial_at: float = 0.0
    _is_closed: bool = False
    # Counts the dials: each takes the next of a name's addresses.
    _attempt: int = 0
    # The socket, and its monitor.
    _sockets: tuple[ZmqSocket, ...] = ()

    def register(self, poller: zmq.Poller) -> None:
        for each in self._sockets:
            poller.register(each, zmq.POLLIN)

    def turn(self, ready: Container[object], take: Callable[[bytes], None]) -> bool:
        """Reads what has come, and dials when it is time; True if `is_up` changed.

        Args:
            ready: The sockets that a poll has found readable.
            take: Gets each message.
        """
        was_up = self.is_up
        if time.monotonic() >= self._dial_at:
            self._dial_at = math.inf
            # The resolver may take seconds, and would delay all other hosts.
            threading.Thread(target=self._resolve, name="stoker-resolve", daemon=True).start()
        # Messages before connection events: a host that drains says so, and may hang up.
        with contextlib.suppress(zmq.Again):
            while self._sockets and self._sockets[0] in ready:
                take(self._sockets[0].recv(zmq.NOBLOCK))
        with contextlib.suppress(zmq.Again):
            while self._sockets and self._sockets[1] in ready:
                event, _ = read_event(self._sockets[1])
                if event & _UP:
                    self.is_up = True
                elif event & _DOWN:
                    self.mark_lost()
        return self.is_up != was_up

    def send(self, message: Message) -> None:
        """Queues a message; does nothing without a connection, whose loss `turn` reports."""
        if self._sockets:
            with contextlib.suppress(zmq.Again):
                self._sockets[0].send(pack(message), zmq.NOBLOCK)

    def connect(self, port: int, ticket: bytes) -> socket.socket:
        """Returns a connection to another port, after its first bytes; raises OSError."""
        connection = socket.create_connection((self.address, port), CONNECT_SECONDS)
        # Still with the connect timeout; behind it the kernel's limits apply.
        connection.sendall(ticket)
        return connection

    def mark_lost(self) -> None:
        """Closes the connection, which is dialled again after a pause."""
        self._close_sockets(0.0)
        self._dial_at = time.monotonic() + PAUSE_SECONDS

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Closes the connection for good."""
        self._is_closed = True
        self._close_sockets(linger_seconds)
        self._dial_at = math.inf

    def _resolve(self) -> None:
        addresses: list[str] = []
        with contextlib.suppress(OSError):
            resolved = socket.getaddrinfo(self.name, None, type=socket.SOCK_STREAM)
            addresses += [str(address[0]) for *_, address in resolved]
        # A link belongs to the control thread.
        self.post(lambda: self._dial(addresses))

    def _dial(self, addresses: list[str]) -> None:
        if self._is_closed:
            return
        if not addresses:
            self.mark_lost()
            return
        # One of several may belong to a lost pod.
        self.address = addresses[self._attempt % len(addresses)]
        self._attempt += 1
        dialling: ZmqSocket = self.context.socket(zmq.DEALER)
        secure_client(dialling, self.keys, max_message_bytes=_MAX_MESSAGE_BYTES)
        # Never dials again on its own: see the head of this file.
        dialling.reconnect_ivl = -1
        dialling.connect_timeout = round(CONNECT_SECONDS * 1000)
        # No limit of zmq's, at which `send` would fail: there are few messages.
        dialling.sndhwm = dialling.rcvhwm = 0
        self._sockets = (dialling, dialling.get_monitor_socket(_UP | _DOWN))
        address = f"[{self.address}]" if ":" in self.address else self.address
        dialling.connect(f"tcp://{address}:{self.port}")

    def _close_sockets(self, linger_seconds: float) -> None:
        self.is_up = False
        sockets, self._sockets = self._sockets, ()
        if sockets:
            with contextlib.suppress(zmq.ZMQError):
                sockets[0].disable_monitor()
            sockets[0].close(linger=round(linger_seconds * 1000))
            sockets[1].close(linger=0)
