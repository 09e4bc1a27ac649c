"""An agent sends answers over CURVE, and batches over plain TCP, to whoever shows a ticket first.

A trainer asks for a ticket over CURVE, connects here, and sends it as the first bytes; from then on
the data host only sends. Bytes from an unauthenticated connection are compared with the tickets
given out and never parsed; at most 32 of them are read, within 10 s.

The agent's loop accepts and compares. Who has shown its ticket gets a thread of its own, which
seals and sends that trainer's batches one after the other.

A batch is sealed from the worker's shared memory as it is sent; its slot is free after that.
"""

import contextlib
import errno
import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from stoker.errors import UsageError
from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.crypto import HANDSHAKE_SECONDS, MAX_WAITING, RejectionLog
from stoker.feed.wire.protocol import TICKET_BYTES, Ticket
from stoker.feed.wire.sealing import Sealer, SessionEpoch, new_key
from stoker.feed.wire.stream import BatchWriter, BufferPool, tune
from stoker.logs import Log

# A ticket that is not used by then is void; trainers connect at once, and ask again.
_TICKET_SECONDS = 60.0
_MAX_ACCEPTED_A_TURN = 100
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Threads that still send when the agent ends.
_JOIN_SECONDS = 2.0


@dataclass(slots=True)
class OutgoingBatch:
    """A batch waits in the outbox, with what frees its memory once it is sent.

    Attributes:
        packed: The message that describes it.
        of: Session and epoch.
        done: Called once, from any thread, when the payload is needed no more.
    """

    packed: bytes
    payload: Bytes1D | None
    of: SessionEpoch
    done: Callable[[], None]


class BatchPort:
    """Listens, lets in who has a ticket, and sends; used by the agent's thread.

    Args:
        bind: Interface: `*`, or an address.
        port: None: any free one.
        wake: Wakes the agent's loop for one more turn; called from any thread.

    Attributes:
        port: The bound one.

    Raises:
        UsageError: If the port is taken.
    """

    def __init__(
        self,
        *,
        bind: str,
        port: int | None,
        host: str,
        run_id: str,
        log: Log,
        wake: Callable[[], None],
    ) -> None:
        try:
            self._listener = _listen(bind, port or 0)
        except OSError as err:
            raise UsageError(
                f"port {port} cannot be bound: {err.strerror}",
                where=f"host {host}, run {run_id}",
                fix="set feed.port to a free port of every host; the next one carries batches and "
                "has to be free, too",
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._log = log
        self._rejections = RejectionLog(log, port=self.port)
        self._wake = wake
        self._pool = BufferPool()
        # The oldest first.
        self._waiting: dict[int, _UnauthenticatedConnection] = {}
        self._lines: dict[bytes, _SendLine] = {}
        # Closed, but for their threads.
        self._ending: list[_SendLine] = []
        self._is_full = False

    def filenos(self) -> list[int]:
        """Returns the descriptors to poll for reading."""
        attached = [
            line.connection.fileno() for line in self._lines.values() if line.connection is not None
        ]
        listener = [] if self._is_full else [self._listener.fileno()]
        return [*listener, *self._waiting, *attached]

    def ticket_for(self, identity: bytes, now: float) -> Ticket:
        """Returns a ticket for the trainer at that control connection; voids an earlier one."""
        self._close_line(identity)
        line = _SendLine(
            ticket=secrets.token_bytes(TICKET_BYTES),
            key=new_key(),
            made_at=now,
            wake=self._wake,
        )
        self._lines[identity] = line
        return Ticket(ticket=line.ticket, key=line.key)

    def send(self, identity: bytes, batch: OutgoingBatch) -> bool:
        """Queues a batch for a trainer; False if it has no connection, nor a ticket for one."""
        line = self._lines.get(identity)
        return line is not None and line.put(batch)

    def handle(self, ready: Container[int], now: float) -> None:
        """Handles the descriptors that are ready."""
        for identity, line in list(self._lines.items()):
            connection = line.connection
            # A closed line is one whose thread has ended on its own, and has woken the loop for
            # this.
            if line.is_closed or (connection is not None and connection.fileno() in ready):
                # It has hung up, or speaks, which nobody asked it to.
                self._close_line(identity)
        self._ending = [line for line in self._ending if not line.has_ended()]
        for fileno in [fileno for fileno in self._waiting if fileno in ready]:
            self._read(fileno)
        if self._listener.fileno() in ready:
            self._accept(now)

    def tick(self, now: float) -> None:
        """Cuts strangers and lines that are too late; called once a second."""
        self._is_full = False
        for fileno, peer in list(self._waiting.items()):
            if now - peer.since > HANDSHAKE_SECONDS:
                self._reject(fileno, "no ticket in time")
        for identity, line in list(self._lines.items()):
            if line.connection is None and now - line.made_at > _TICKET_SECONDS:
                self._close_line(identity)
        self._rejections.tick(now)

    def close(self) -> None:
        """Closes all connections; what the kernel has taken is still delivered. May be called
        twice; 2 s at most."""
        self._listener.close()
        for peer in self._waiting.values():
            peer.connection.close()
        self._waiting.clear()
        for identity in list(self._lines):
            self._close_line(identity)
        lines, self._ending = self._ending, []
        for line in lines:
            line.has_ended(within_seconds=_JOIN_SECONDS)

    def _accept(self, now: float) -> None:
        for _ in range(_MAX_ACCEPTED_A_TURN):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if err.errno in _NO_FILES and self._waiting:
                    self._reject(next(iter(self._waiting)), "no more open files")
                elif err.errno in _NO_FILES:
                    # Until the next tick: it would be ready again at once.
                    self._is_full = True
                    return
                continue
            connection.setblocking(False)
            self._waiting[connection.fileno()] = _UnauthenticatedConnection(
                connection, str(address[0]), now
            )
            if len(self._waiting) > MAX_WAITING:
                # The oldest: a trainer sends its ticket at once, so who has waited longest is no
                # trainer.
                self._reject(next(iter(self._waiting)), f"more than {MAX_WAITING} at a time")

    def _read(self, fileno: int) -> None:
        peer = self._waiting[fileno]
        try:
            data = peer.connection.recv(TICKET_BYTES - len(peer.sent))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.sent += data
        if not data:
            self._reject(fileno, "closed without a ticket")
        elif len(peer.sent) == TICKET_BYTES:
            line = self._line_of(bytes(peer.sent))
            if line is None:
                self._reject(fileno, "no ticket of this run")
                return
            del self._waiting[fileno]
            # It is authenticated: from here on bytes that it sends end the connection, see
            # `handle`.
            line.attach(peer.connection, self._pool)

    def _line_of(self, ticket: bytes) -> "_SendLine | None":
        """Returns the line that the ticket opens; None: there is none, or it has a connection."""
        found = None
        # All of them, each in constant time: how long it takes tells nothing.
        for line in self._lines.values():
            if hmac.compare_digest(line.ticket, ticket) and line.connection is None:
                found = line
        return found

    def _reject(self, fileno: int, reason: str) -> None:
        peer = self._waiting.pop(fileno)
        peer.connection.close()
        self._rejections.add(peer.address, reason)

    def _close_line(self, identity: bytes) -> None:
        line = self._lines.pop(identity, None)
        if line is not None:
            line.close()
            self._ending.append(line)


@dataclass(slots=True)
class _UnauthenticatedConnection:
    """A peer has connected, but its ticket has not come yet."""

    connection: socket.socket
    address: str
    since: float
    sent: bytearray = field(default_factory=bytearray)


class _SendLine:
    """Sends one trainer's batches: they wait for its connection, then a thread sends them.

    Attributes:
        connection: None: the ticket was not shown yet.
        is_closed: Nothing is sent any more.
    """

    def __init__(
        self, *, ticket: bytes, key: bytes, made_at: float, wake: Callable[[], None]
    ) -> None:
        self.ticket = ticket
        self.key = key
        self.made_at = made_at
        self.connection: socket.socket | None = None
        self.is_closed = False
        self._wake = wake
        self._batches: queue.SimpleQueue[OutgoingBatch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, batch: OutgoingBatch) -> bool:
        """Queues a batch; False if the line is closed."""
        with self._lock:
            # With the lock, for the thread closes it at its end and then drops what waits: a batch
            # that was queued after that would never be let go of.
            if not self.is_closed:
                self._batches.put(batch)
            return not self.is_closed

    def attach(self, connection: socket.socket, pool: BufferPool) -> None:
        """Connects the line: its thread sends what waits, and what comes."""
        tune(connection)
        self.connection = connection
        writer = BatchWriter(connection, Sealer(self.key), pool)
        # Made by the agent's loop, and so with its priority.
        self._thread = threading.Thread(
            target=self._send, args=(writer,), name="batch-sender", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, without waiting for it; may be called twice."""
        with self._lock:
            self.is_closed = True
        self._batches.put(None)
        if self.connection is None:
            self._discard_queued()
        else:
            # Also ends a call that waits for a trainer that does not read.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def has_ended(self, *, within_seconds: float = 0.0) -> bool:
        """Returns whether the thread of a closed line has ended; if so, closes the connection."""
        if self._thread is None:
            return True
        self._thread.join(within_seconds)
        if self._thread.is_alive():
            return False
        # Not by the thread: its number could be another's while the loop still polls it.
        if self.connection is not None:
            self.connection.close()
        return True

    def _send(self, writer: BatchWriter) -> None:
        try:
            # Says that the ticket was taken, and who took it: nobody else has the key.
            writer.write(b"", None, of=("", 0))
            while (batch := self._batches.get()) is not None:
                try:
                    payload = None if batch.payload is None else batch.payload.data
                    writer.write(batch.packed, payload, of=batch.of)
                finally:
                    # All views of the slot go before it is said to be free.
                    payload = batch.payload = None
                    batch.done()
                    # Else this name would keep it until the next batch comes.
                    del batch
        except OSError:
            # The trainer has hung up, or its host is gone; it dials again.
            pass
        finally:
            with self._lock:
                self.is_closed = True
            self._discard_queued()
            self._wake()

    def _discard_queued(self) -> None:
        """Lets go of what is not sent."""
        with contextlib.suppress(queue.Empty):
            while True:
                batch = self._batches.get_nowait()
                if batch is not None:
                    batch.payload = None
                    batch.done()


def _listen(bind: str, port: int) -> socket.socket:
    if bind == "*":
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=is_dual, backlog=MAX_WAITING
        )
    else:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.create_server(
            (bind.strip("[]"), port), family=family, backlog=MAX_WAITING
        )
    listener.setblocking(False)
    return listener
