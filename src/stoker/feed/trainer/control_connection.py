"""Connection for messages to the coordinator or an agent; batches have another one.

libzmq's own reconnect would keep a name's first address, and hide that a peer came back with its
memory lost. So a lost connection is closed, and dialled again by name after a back-off.
"""

import contextlib
import socket
from collections.abc import Callable, Container, Sequence

import zmq

from stoker.feed.wire.crypto import Keys, read_event, secure_client
from stoker.feed.wire.protocol import PIECE_BYTES, Message, Piece, pack

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]

# A first packet and its repetition after 1 s; an abandoned address does not answer.
CONNECT_SECONDS = 2.0
# Back-off between attempts, doubled each time.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 2.0
# At the end of the process: time to send a goodbye.
GOODBYE_SECONDS = 0.2

# As plain numbers: zmq's own are enumerations, which are slow to combine.
_IN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE)
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def resolve(name: str, *, attempt: int = 0) -> str:
    """Returns a host's address for zmq, or raises OSError; blocks while the resolver does.

    Each `attempt` takes the next of several addresses: one may belong to a lost pod.
    """
    addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = addresses[attempt % len(addresses)]
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


class Connection:
    """A DEALER socket and its monitor; used by the I/O thread only.

    Args:
        max_message_bytes: A longer frame ends the connection before memory is taken for it.

    Attributes:
        filenos: What to poll for reading, where `has_input` is False: nothing, or socket and
            monitor. libzmq's own poll asks every socket each time, by two system calls.
        is_open: There is a socket: up (after the handshake), or connecting.
        is_drained, is_quiet: Socket, and monitor, were found empty and not touched since: then
            their descriptors signal what comes.
        down_since: When it was last lost, or made; monotonic seconds, as `dial_at`.
    """

    def __init__(
        self, context: ZmqContext, keys: Keys, *, now: float, max_message_bytes: int
    ) -> None:
        self._context = context
        self._keys = keys
        self._max_message_bytes = max_message_bytes
        self._socket: ZmqSocket | None = None
        self._monitor: ZmqSocket | None = None
        self.filenos: tuple[int, ...] = ()
        self.is_open = self.is_drained = self.is_quiet = self.is_up = False
        self._pause = FIRST_PAUSE_SECONDS
        self.down_since = self.dial_at = now

    def has_input(self) -> bool:
        """Returns whether there is input that no descriptor shows; call it before a poll."""
        # At every turn of the I/O thread.
        if self.is_drained and self.is_quiet:
            return False
        return self._has_messages() or self.has_events(())

    def has_events(self, ready: Container[int]) -> bool:
        """Returns whether `watch` has something to read, `ready` being the readable descriptors."""
        if self._monitor is None:
            return False
        if self.is_quiet:
            return self.filenos[1] in ready
        self.is_quiet = not int(self._monitor.get(_EVENTS)) & _IN
        return not self.is_quiet

    def _has_messages(self) -> bool:
        if self._socket is None or self.is_drained:
            return False
        # An exception would cost more than this check.
        self.is_drained = not int(self._socket.get(_EVENTS)) & _IN
        return not self.is_drained

    def dial(self, endpoint: str) -> None:
        self.close()
        dialling: ZmqSocket = self._context.socket(zmq.DEALER)
        secure_client(dialling, self._keys, max_message_bytes=self._max_message_bytes)
        # Never dials again on its own: see the head of this file.
        dialling.reconnect_ivl = -1
        dialling.connect_timeout = round(CONNECT_SECONDS * 1000)
        # No limit of zmq's, at which `send` would fail: credits bound what is asked for.
        dialling.sndhwm = dialling.rcvhwm = 0
        self._monitor = dialling.get_monitor_socket(_UP | _DOWN)
        self._socket = dialling
        self.is_open = True
        self.filenos = (int(dialling.get(zmq.FD)), int(self._monitor.get(zmq.FD)))
        self.is_drained = self.is_quiet = False
        dialling.connect(endpoint)

    def watch(self, now: float) -> bool:
        """Reads the monitor; True if `is_up` changed."""
        was_up = self.is_up
        while self._monitor is not None:
            self.is_quiet = True
            try:
                event, _ = read_event(self._monitor)
            except zmq.Again:
                break
            if event & _UP:
                self.is_up = True
                self._pause = FIRST_PAUSE_SECONDS
            elif event & _DOWN:
                # Closes the monitor, which ends this loop.
                self.mark_lost(now)
        return self.is_up != was_up

    def mark_lost(self, now: float, *, pause_seconds: float = 0.0) -> None:
        if self.is_up:
            self.down_since = now
        self.close()
        self.dial_at = now + max(self._pause, pause_seconds)
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def send(self, message: Message, frame: bytes | memoryview | None = None) -> None:
        """Queues a message; does nothing without a connection, whose loss `watch` reports."""
        if self._socket is None:
            return
        # Sending consumes the descriptor's signal of what came since.
        self.is_drained = False
        packed = pack(message)
        # Not contextlib's `suppress`, which takes longer than the rest.
        try:
            if frame is not None:
                self._socket.send(packed, _NOBLOCK | _MORE)
                self._socket.send(frame, _NOBLOCK, copy=False)
            elif len(packed) <= PIECE_BYTES:
                self._socket.send(packed, _NOBLOCK)
            else:
                # The indices of a batch of 100,000 samples, or samples of another host, say.
                whole = memoryview(packed)
                for start in range(0, len(whole), PIECE_BYTES):
                    end = start + PIECE_BYTES
                    self.send(Piece(is_last=end >= len(whole)), whole[start:end])
        except zmq.Again:
            return

    def receive(
        self,
        take: Callable[[Sequence[zmq.Frame]], None],
        *,
        at_most: int = 16,
        ready: Container[int] = (),
    ) -> None:
        """Calls `take` with the messages that have come.

        Args:
            take: Gets the frames of one.
            at_most: Messages, after which other sockets have a turn.
            ready: Descriptors that a poll has found readable.
        """
        if self.filenos and self.filenos[0] not in ready and not self._has_messages():
            return
        while self._socket is not None:
            self.is_drained = True
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                frames = [frame]
                while frame.more:
                    frame = self._socket.recv(_NOBLOCK, copy=False)
                    frames.append(frame)
            except zmq.Again:
                return
            self.is_drained = False
            at_most -= 1
            take(frames)
            if at_most <= 0 or not self._has_messages():
                return

    def close(self, *, linger_seconds: float = 0.0) -> None:
        self.is_up = False
        self.filenos = ()
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._socket.close(linger=round(linger_seconds * 1000))
            self._socket = None
            self.is_open = False
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None
